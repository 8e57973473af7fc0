"""What may be given for a message: each value in its one form, or a `TypeError` that names it."""

from collections.abc import Callable
from typing import Any

import pytest

from contrail_client import Message
from contrail_client.live.publisher import outgoing_message
from contrail_client.models import ReplaySplit
from contrail_client.operations import publishing
from contrail_client.operations.erasing import erase
from contrail_client.operations.listening import EventReader
from contrail_client.operations.replaying import arrow_request
from contrail_client.reconnecting import Reconnecting
from tests.support.each import each


def by_publisher(**fields: Any) -> Message:
    """As a publisher takes it."""
    rest = {"subject": "a", "payload": b"", "headers": None, "msg_id": None, "ttl": None}
    return outgoing_message(**{**rest, "expected": None, **fields})


def by_hand(**fields: Any) -> Message:
    return Message(**{"subject": "a", **fields})


@pytest.mark.parametrize("make", [by_hand, by_publisher])
def test_header_may_be_one_text_or_a_list(make: Callable[..., Message]) -> None:
    message = make(headers={"Content-Type": "application/json", "Tag": ["x", "y"], "One": ("z",)})
    stored = {"Content-Type": ["application/json"], "Tag": ["x", "y"], "One": ["z"]}
    assert publishing.message_headers(message) == stored
    assert ("Msg-Header-Content-Type", "application/json") in publishing.publish(
        message
    ).request.headers


@each("make", [by_hand, by_publisher])
@each(
    ("fields", "sentence"),
    [
        ({"headers": {"Retries": 3}}, "header Retries must be a str or a list of str, not int"),
        ({"headers": {"Retries": None}}, "header Retries must be .* not None"),
        ({"headers": {"Raw": b"x"}}, "header Raw must be .* not bytes"),
        ({"headers": {"Tags": {"x"}}}, "header Tags must be .* not set"),
        ({"headers": {"Tags": ["x", 1]}}, "header Tags must be a list of str, but holds int"),
        ({"headers": {5: "x"}}, "the name of a header must be a str, not int: 5"),
        ({"headers": [("A", "b")]}, "headers must be a dict of names to values, not list"),
        ({"payload": {"id": 1}}, "payload must be bytes or a str, not dict; .*json.dumps"),
        ({"payload": [1]}, "payload must be bytes or a str, not list"),
        ({"payload": None}, "payload must be bytes or a str, not None"),
        ({"payload": 17}, "payload must be bytes or a str, not int"),
        ({"msg_id": 17}, "msg_id must be a str, not int"),
        ({"subject": b"a"}, "subject must be a str, not bytes"),
        ({"expected": {"last_seq": 3}}, "expected must be an Expected, not dict"),
    ],
)
def test_other_types_are_refused_with_a_sentence(
    make: Callable[..., Message], fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(TypeError, match=sentence):
        make(**fields)


@pytest.mark.parametrize("make", [by_hand, by_publisher])
def test_header_without_a_value_is_refused(make: Callable[..., Message]) -> None:
    with pytest.raises(ValueError, match="header Tags has no value"):
        make(headers={"One": "", "Tags": []})


def test_payload_that_can_change_is_copied() -> None:
    data = bytearray(b"one")
    messages = [Message("a", data), Message("a", memoryview(data))]  # type: ignore[arg-type]
    data[:] = b"two"
    assert [message.payload for message in messages] == [b"one", b"one"]


def test_batch_takes_messages_only() -> None:
    with pytest.raises(TypeError, match="a batch must consist of Message objects, not tuple"):
        publishing.publish_batch("S", [("a", b"x")])  # type: ignore[list-item]


def test_one_text_is_not_taken_for_its_letters_where_several_may_be_given() -> None:
    split = ReplaySplit(shard=0, from_seq=1, to_seq=2, stream="S")
    assert ("columns", "seq") in arrow_request(split, "seq").query
    events = EventReader(None, None, "nak", Reconnecting(None, 0.0))  # type: ignore[arg-type]
    assert events.request().query == (("types", "nak"),)
    assert erase("S", seqs=5, subject=None, shard=None, wait_s=0.0).request.body == b'{"seqs":[5]}'
