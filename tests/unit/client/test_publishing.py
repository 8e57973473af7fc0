"""Calls that publish."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_client.calls import Answer, conclude
from contrail_client.errors import ApiProblem, UnexpectedAnswer
from contrail_client.models import AtomicAck, Expected, Message, PubAck
from contrail_client.operations import publishing
from tests.support.each import each

FSYNC = {"durability": "fsync"}
WRONG = {
    "type": "urn:x",
    "title": "wrong last sequence",
    "status": 412,
    "detail": "last is 7",
    "code": 10071,
    "name": "wrong_last_sequence",
    "retryable": False,
    "errors": [],
}
MIXED = msgspec.msgpack.encode(
    {
        "runs": [
            {"count": 2, "first_seq": 7},
            {"count": 1, "problem": WRONG},
            {"count": 1, "first_seq": 3, "duplicate": True, "shard": 5},
        ]
    }
)


def batch_body(messages: list[Message]) -> list[object]:
    return msgspec.msgpack.decode(publishing.publish_batch("S", messages).request.body)


def test_single_publish_sends_the_payload_as_the_body() -> None:
    request = publishing.publish(Message("orders.new", b"\x00one")).request
    assert (request.method, request.path) == ("POST", "/v1/subjects/orders.new/messages")
    assert request.body == b"\x00one"
    assert request.headers == (("Content-Type", "application/octet-stream"),)


def test_text_is_sent_as_utf_8() -> None:
    assert publishing.publish(Message("a", "ü")).request.body == "ü".encode()


def test_message_headers_get_the_prefix_and_control_headers_do_not() -> None:
    message = Message(
        "a",
        headers={"Trace": ["x", "y"], "nats-rollup": ["sub"]},
        msg_id="id-1",
        expected=Expected(last_seq=0, stream="S"),
        ttl="5s",
    )
    assert publishing.publish(message).request.headers == (
        ("Msg-Header-Trace", "x"),
        ("Msg-Header-Trace", "y"),
        ("nats-rollup", "sub"),
        ("Nats-Msg-Id", "id-1"),
        ("Nats-TTL", "5s"),
        ("Nats-Expected-Stream", "S"),
        ("Nats-Expected-Last-Sequence", "0"),
        ("Content-Type", "application/octet-stream"),
    )


@each("headers", [{"Name": ["ü"]}, {"Name": ["a\r\nEvil: 1"]}, {"A b": ["x"]}, {"": ["x"]}])
def test_header_that_http_cannot_carry_is_refused_before_sending(
    headers: dict[str, list[str]],
) -> None:
    with pytest.raises(ValueError, match="batch"):
        publishing.publish(Message("a", headers=headers))


def test_only_messages_with_ids_may_be_repeated() -> None:
    with_id, without = Message("a", msg_id="1"), Message("a")
    assert publishing.publish(with_id).repeatable
    assert not publishing.publish(without).repeatable
    assert publishing.publish_batch("S", [with_id, with_id]).repeatable
    assert not publishing.publish_batch("S", [with_id, without]).repeatable


def test_stored_message_is_acknowledged_with_its_durability() -> None:
    body = b'{"stream": "S", "seq": 12, "duplicate": false}'
    ack = conclude(publishing.publish(Message("a")), Answer(201, FSYNC, body))
    assert ack == PubAck("S", 12, duplicate=False, durability="fsync")


def test_duplicate_is_acknowledged_with_its_first_sequence() -> None:
    body = b'{"stream": "S", "seq": 3, "duplicate": true}'
    ack = conclude(publishing.publish(Message("a", msg_id="1")), Answer(200, FSYNC, body))
    assert (ack.seq, ack.duplicate) == (3, True)


def test_batch_is_the_documented_msgpack() -> None:
    message = Message("a.b", b"x", {"N": ["v"]})
    request = publishing.publish_batch("S", [message]).request
    assert request.body == b"\x92\x01\x91\x93\xa3a.b\x81\xa1N\x91\xa1v\xc4\x01x"
    kind = "application/vnd.msgpack"
    assert request.headers == (("Content-Type", kind), ("Accept", kind))
    assert (request.path, request.query) == ("/v1/streams/S/messages", ())


def test_batch_without_headers_is_columns() -> None:
    assert batch_body([Message("a", "x"), Message("b", "ü"), Message("a")]) == [
        2,
        [["a", "b"], u32(0, 1, 0), u32(0, 1, 3, 3), "xü".encode(), None],
    ]
    with_ids = [Message("a", msg_id="é"), Message("a"), Message("a", msg_id="2")]
    assert batch_body(with_ids) == [
        2,
        [["a"], u32(0, 0, 0), u32(0, 0, 0, 0), b"", [u32(0, 2, 2, 3), "é2".encode()]],
    ]
    assert batch_body([]) == [2, [[], b"", u32(0), b"", None]]


def u32(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(4, "little") for number in numbers)


@each(
    ("message", "headers"),
    [
        (
            Message("a", msg_id="1", expected=Expected(last_subject_seq=4)),
            {"Nats-Msg-Id": ["1"], "Nats-Expected-Last-Subject-Sequence": ["4"]},
        ),
        (Message("a", ttl="5s"), {"Nats-TTL": ["5s"]}),
        (Message("a", msg_id=""), {"Nats-Msg-Id": [""]}),
    ],
)
def test_batch_with_other_headers_is_rows(message: Message, headers: object) -> None:
    assert batch_body([Message("a", "x"), message]) == [1, [["a", None, b"x"], ["a", headers, b""]]]


def test_batch_results_keep_the_order_of_the_messages() -> None:
    call = publishing.publish_batch("S", [Message(subject) for subject in "abcd"])
    result = conclude(call, Answer(207, FSYNC, MIXED))
    first, second, third, fourth = result.results
    assert first == PubAck("S", 7, duplicate=False, durability="fsync")
    assert second == PubAck("S", 8, duplicate=False, durability="fsync")
    assert isinstance(third, ApiProblem)
    assert (third.status, third.code) == (412, 10071)
    assert fourth == PubAck("S", 3, duplicate=True, durability="fsync", shard=5)
    assert result.refused == {2: third}
    with pytest.raises(ApiProblem, match="wrong_last_sequence"):
        result.raise_refused()


def test_batch_stored_whole_has_nothing_to_raise() -> None:
    body = msgspec.msgpack.encode({"runs": [{"count": 1, "first_seq": 1}]})
    result = conclude(publishing.publish_batch("S", [Message("a")]), Answer(201, FSYNC, body))
    result.raise_refused()
    assert result.refused == {}


def test_batch_answer_of_another_length_is_unexpected() -> None:
    with pytest.raises(UnexpectedAnswer, match="4 results for 1 messages"):
        conclude(publishing.publish_batch("S", [Message("a")]), Answer(207, FSYNC, MIXED))


def test_numbered_batch_is_said_in_the_query() -> None:
    call = publishing.publish_batch("S", [Message("a", msg_id="1")], "job", 7)
    assert call.request.query == (("producer", "job"), ("number", "7"))
    assert publishing.publish_batch("S", [Message("a")]).request.query == ()


def test_atomic_batch_has_one_acknowledgement() -> None:
    call = publishing.publish_atomic("S", [Message("a"), Message("b")])
    assert call.request.query == (("atomic", "true"),)
    body = b'{"stream": "S", "first_seq": 5, "last_seq": 6, "count": 2}'
    assert conclude(call, Answer(201, FSYNC, body)) == AtomicAck("S", 5, 6, 2)


@given(
    sizes=st.lists(st.integers(0, 50), max_size=60),
    size=st.integers(1, 10),
    size_bytes=st.integers(1, 100),
)
def test_batches_keep_order_and_bounds(sizes: list[int], size: int, size_bytes: int) -> None:
    messages = [Message(f"s{number}", b"x" * each) for number, each in enumerate(sizes)]
    cut = list(publishing.batches(messages, size=size, size_bytes=size_bytes))
    assert [message for batch in cut for message in batch] == messages
    for batch in cut:
        weight = sum(len(message.payload) + len(message.subject) for message in batch)
        assert 1 <= len(batch) <= size
        assert weight <= size_bytes or len(batch) == 1
