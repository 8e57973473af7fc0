"""Candidates of a publish: what they become, and why some are refused."""

from typing import Any

import msgspec
import pytest

from contrail_api.batch import JsonBatch, check_count
from contrail_api.candidates import (
    BatchItem,
    PackedItem,
    json_candidate,
    packed_candidates,
    payload_of,
    results_of,
    sifted,
)
from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.link import PubResult
from contrail_common.model import PublishMessage

PAYLOAD_MAX = 1000


def item(**fields: Any) -> BatchItem:
    return msgspec.json.decode(msgspec.json.encode({"subject": "a.b", **fields}), type=BatchItem)


def candidate(**fields: Any) -> PublishMessage | ApiError:
    one = item(**fields)
    return json_candidate(one, payload_of(one, "", 63), PAYLOAD_MAX)


def message(**fields: Any) -> PublishMessage:
    found = candidate(**fields)
    assert isinstance(found, PublishMessage)
    return found


def refusal(**fields: Any) -> ApiError:
    found = candidate(**fields)
    assert isinstance(found, ApiError)
    return found


def packed(*items: list[Any]) -> list[PackedItem]:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(items), type=list[PackedItem])


@pytest.mark.parametrize(
    ("fields", "payload"),
    [
        ({"data": "grün"}, "grün".encode()),
        ({"data": ""}, b""),
        ({"data_base64": "AP8="}, b"\x00\xff"),
        ({"json": {"b": [1, 2.50], "a": None}}, b'{"b":[1,2.5],"a":null}'),
        ({"json": None}, b"null"),
    ],
)
def test_payload_is_taken_from_the_one_form_given(fields: dict[str, Any], payload: bytes) -> None:
    assert message(**fields).payload == payload


def test_json_payload_is_stored_compact_and_otherwise_as_written() -> None:
    raw = b'{"subject":"a","json": { "b" : 1.50 , "a": [ 12345678901234567890 ] } }'
    one = msgspec.json.decode(raw, type=BatchItem)
    assert payload_of(one, "", 63) == b'{"b":1.50,"a":[12345678901234567890]}'


@pytest.mark.parametrize("fields", [{}, {"data": "x", "json": 1}, {"data": "", "data_base64": ""}])
def test_anything_but_one_payload_form_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="exactly one") as refused:
        candidate(**fields)
    assert refused.value.spec is errors.INVALID_FIELD


def test_json_payload_that_is_not_utf_8_is_refused() -> None:
    one = msgspec.json.decode(b'{"subject":"a","json":"\xff"}', type=BatchItem)
    with pytest.raises(ApiError) as refused:
        payload_of(one, "", 63)
    assert refused.value.spec is errors.MALFORMED_BODY


def test_json_payload_that_nests_too_deep_is_refused() -> None:
    one = item(json=0)
    one.json = msgspec.Raw(b"[" * 64 + b"]" * 64)
    with pytest.raises(ApiError, match="nests deeper"):
        payload_of(one, "", 63)


def test_message_id_and_expectations_become_the_headers_that_jetstream_stores() -> None:
    found = message(data="x", msg_id="k", expected={"last_seq": 4}, headers={"A": ["1"]})
    assert found.headers == {
        "A": ["1"],
        "Nats-Msg-Id": ["k"],
        "Nats-Expected-Last-Sequence": ["4"],
    }
    assert found.msg_id == "k"
    assert found.expected is not None
    assert found.expected.last_seq == 4


def test_message_id_in_the_headers_counts_whatever_its_spelling() -> None:
    assert message(data="x", headers={"nats-msg-id": ["k"]}).msg_id == "k"


@pytest.mark.parametrize(
    ("fields", "spec"),
    [
        ({"subject": "a.*"}, errors.INVALID_SUBJECT),
        ({"subject": ""}, errors.INVALID_SUBJECT),
        ({"subject": "a b"}, errors.INVALID_SUBJECT),
        ({"data": "x" * (PAYLOAD_MAX + 1)}, errors.MESSAGE_TOO_LARGE),
        ({"headers": {"A": ["x" * 70_000]}}, errors.HEADERS_TOO_LARGE),
        ({"headers": {"A": ["x\ny"]}}, errors.INVALID_FIELD),
        ({"headers": {"A": []}}, errors.INVALID_FIELD),
        ({"msg_id": "k", "headers": {"nats-msg-id": ["other"]}}, errors.INVALID_FIELD),
        ({"msg_id": "a\r\nb"}, errors.INVALID_FIELD),
        ({"msg_id": "k" * 5000}, errors.INVALID_FIELD),
        ({"expected": {"last_seq": -1}}, errors.INVALID_FIELD),
        ({"expected": {"last_subject_seq_subject": "a"}}, errors.EXPECTED_SUBJECT_ALONE),
        ({"ttl": "5s"}, errors.TTL_DISABLED),
        ({"ttl": 5}, errors.TTL_DISABLED),
        ({"headers": {"Nats-Rollup": ["sub"]}}, errors.ROLLUP_REFUSED),
        ({"headers": {"Nats-Schedule": ["@every 1s"]}}, errors.FEATURE_HEADER),
    ],
)
def test_item_that_cannot_be_stored_is_refused_for_itself(
    fields: dict[str, Any], spec: errors.ErrorSpec
) -> None:
    found = refusal(**{"data": "x", **fields})
    assert found.spec is spec
    assert found.applied is False or spec is errors.INVALID_FIELD


def test_batch_without_headers_is_passed_on_as_decoded() -> None:
    items = packed(["a", None, b"1"], ["b", None, b"2"])
    candidates, messages = packed_candidates(items, PAYLOAD_MAX)
    assert candidates is items
    assert messages is items


def test_packed_headers_are_interpreted() -> None:
    _, messages = packed_candidates(
        packed(
            ["a", {"Nats-Msg-Id": ["k"]}, b"1"],
            ["a", {"Nats-Expected-Last-Sequence": ["3"], "X": ["y"]}, b"2"],
        ),
        PAYLOAD_MAX,
    )
    assert messages[0].msg_id == "k"
    assert messages[1].expected is not None
    assert messages[1].expected.last_seq == 3


@pytest.mark.parametrize(
    "bad",
    [
        ["a.*", None, b"x"],
        ["a", None, b"x" * (PAYLOAD_MAX + 1)],
        ["a", {"A": []}, b"x"],
        ["a", {"Nats-TTL": ["1s"]}, b"x"],
        ["a", {"Nats-Msg-Id": ["k" * 5000]}, b"x"],
        ["a b", {"Nats-Msg-Id": ["k"]}, b"x"],
    ],
)
def test_one_bad_packed_item_leaves_the_others(bad: list[Any]) -> None:
    candidates, messages = packed_candidates(packed(["a", None, b"1"], bad), PAYLOAD_MAX)
    assert len(messages) == 1
    assert isinstance(candidates[1], ApiError)


@pytest.mark.parametrize(
    "bad",
    [
        ["a", None],
        ["a", None, "text"],
        [1, None, b"x"],
        ["a", None, b"x", "smuggled-id"],
        ["a", None, b"x", None, {"last_seq": 1}],
        ["a", None, b"x", None, None, None],
        {"subject": "a"},
    ],
)
def test_packed_item_of_another_shape_is_not_decoded(bad: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        packed(bad)


def test_results_keep_the_order_of_the_messages() -> None:
    refused = ApiError(errors.INVALID_SUBJECT)
    good = PublishMessage("a", None, b"")
    candidates, messages = sifted([good, refused, good, good])
    answered = [
        PubResult(5),
        PubResult(0, code=10071, detail="wrong last sequence: 5"),
        PubResult(5, True),
    ]
    results, all_stored = results_of(candidates, answered)
    assert len(messages) == 3
    assert not all_stored
    encoded = msgspec.json.decode(msgspec.json.encode(results))
    assert encoded[0] == {"seq": 5, "duplicate": False}
    assert encoded[1]["problem"]["code"] == 20003
    assert encoded[2]["problem"]["status"] == 412
    assert encoded[3] == {"seq": 5, "duplicate": True}


def test_json_batch_refuses_unknown_fields() -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.json.decode(b'{"messages":[],"more":1}', type=JsonBatch)


def test_more_messages_than_a_request_may_hold_are_refused() -> None:
    check_count(10_000)
    with pytest.raises(ApiError) as refused:
        check_count(10_001)
    assert refused.value.spec is errors.BATCH_TOO_LARGE
