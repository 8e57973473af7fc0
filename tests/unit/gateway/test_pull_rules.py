"""What a pull may ask for."""

from typing import Any

import msgspec
import pytest

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.timeunits import NS_PER_S
from contrail_gateway.core.pull_rules import (
    ACKS_MAX,
    EXPIRES_DEFAULT_NS,
    AckRequest,
    PullBody,
    PullTerms,
    check_ack,
    check_ack_count,
    pull_terms,
)
from tests.support.each import each


def terms(heartbeats: bool = True, **fields: Any) -> PullTerms:
    body = msgspec.json.decode(msgspec.json.encode(fields), type=PullBody)
    return pull_terms(body, heartbeats=heartbeats)


def test_empty_pull_asks_for_one_message_within_the_default_time() -> None:
    asked = terms()
    assert (asked.batch, asked.expires_ns, asked.expires_given) == (1, EXPIRES_DEFAULT_NS, False)


def test_pull_without_waiting_has_no_default_time() -> None:
    assert terms(no_wait=True).expires_ns == 0
    assert terms(no_wait=True, expires="1s").expires_ns == NS_PER_S


@each("expires", ["60s", "1m", 60 * NS_PER_S, "0.5s"])
def test_expires_up_to_a_minute_is_taken(expires: str | int) -> None:
    assert terms(expires=expires).expires_given


@each(
    ("fields", "pointer"),
    [
        ({"expires": "61s"}, "/expires"),
        ({"expires": "-1s"}, "/expires"),
        ({"expires": "soon"}, "/expires"),
        ({"idle_heartbeat": "3s", "expires": "5s"}, "/idle_heartbeat"),
        ({"idle_heartbeat": "50ms", "expires": "5s"}, "/idle_heartbeat"),
        ({"idle_heartbeat": "-1s", "expires": "5s"}, "/idle_heartbeat"),
        ({"min_pending": 1}, "/min_pending"),
        ({"min_ack_pending": 1}, "/min_ack_pending"),
        ({"group": "g"}, "/group"),
        ({"id": "x"}, "/id"),
        ({"priority": 1}, "/priority"),
    ],
)
def test_invalid_pull_is_422_at_its_field(fields: dict[str, Any], pointer: str) -> None:
    with pytest.raises(ApiError) as refused:
        terms(**fields)
    assert (refused.value.spec.status, refused.value.fields[0].pointer) == (422, pointer)


def test_heartbeat_needs_an_answer_with_a_place_for_it() -> None:
    assert terms(idle_heartbeat="2s", expires="4s").heartbeat_ns == 2 * NS_PER_S
    with pytest.raises(ApiError) as refused:
        terms(heartbeats=False, idle_heartbeat="2s", expires="4s")
    assert refused.value.spec is errors.PULL_INVALID


@each("batch", [0, -1, 10_001, 1.5, "1", None])
def test_batch_out_of_bounds_is_not_decoded(batch: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        terms(batch=batch)


def test_delay_belongs_to_nak_and_reason_to_term() -> None:
    assert check_ack(AckRequest("t", "nak", delay="2s"), "acks/0") == 2 * NS_PER_S
    assert check_ack(AckRequest("t", "term", reason="poison"), "acks/0") == 0
    for bad in (
        AckRequest("t", "ack", delay="2s"),
        AckRequest("t", "nak", reason="x"),
        AckRequest("t", "nak", delay="-2s"),
        AckRequest("t", "nak", delay="later"),
    ):
        with pytest.raises(ApiError) as refused:
            check_ack(bad, "acks/3")
        assert refused.value.spec is errors.INVALID_FIELD
        assert refused.value.fields[0].pointer.startswith("/acks/3/")


def test_far_too_many_ranges_are_refused_before_they_are_made() -> None:
    ack = b'{"token":"t.*","ranges":[%b]}'
    body = b'{"acks":[%b]}'
    check_ack_count(body % b",".join([ack % b"[0,0]"] * ACKS_MAX))
    check_ack_count(body % (ack % b",".join([b"[0,0]"] * ACKS_MAX)))
    with pytest.raises(ApiError) as refused:
        check_ack_count(body % (ack % b",".join([b"[0,0]"] * 5 * ACKS_MAX)))
    assert refused.value.spec is errors.BATCH_TOO_LARGE
