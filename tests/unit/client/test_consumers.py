"""Calls that manage consumers, pull and acknowledge."""

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_client.calls import Answer, conclude
from contrail_client.errors import AcksRefused, UnexpectedAnswer
from contrail_client.models import Delivery, Pull
from contrail_client.operations import consumers

INFO = b"""{"stream": "S", "name": "c", "created": "2026-01-31T08:00:00.000000000Z",
  "config": {"name": "c", "ack_wait": "30s"},
  "delivered": {"consumer_seq": 5, "stream_seq": 9, "last_active": null},
  "ack_floor": {"consumer_seq": 4, "stream_seq": 8}, "num_ack_pending": 1, "num_redelivered": 0,
  "num_waiting": 0, "num_pending": 3, "push_bound": false, "paused": false}"""
FACTS = {"consumer_seq": 5, "num_delivered": 2, "num_pending": 3, "ack_token": "t9"}
PULLED = msgspec.msgpack.encode(
    {
        "messages": [
            {
                "stream": "S",
                "seq": 9,
                "subject": "a",
                "time": "",
                "headers": {},
                **FACTS,
                "data": b"x",
            }
        ],
        "num_pending": 3,
    }
)
COLUMNS = msgspec.msgpack.encode(
    {
        "cols": {
            "stream": "S",
            "count": 3,
            "first_consumer_seq": 5,
            "num_pending": 7,
            "seqs": struct.pack("<3q", 4, 6, 7),
            "times_ns": struct.pack("<3q", 10**9, 10**9, 2 * 10**9),
            "subjects": ["a", "b"],
            "subject_index": struct.pack("<3I", 1, 0, 1),
            "offsets": struct.pack("<4I", 0, 1, 3, 3),
            "data": b"x\xff\xfe",
        },
        "num_pending": 7,
        "ack_token": "head.*",
    }
)
REFUSED = b"""{"results": [{"ok": true}, {"problem": {"title": "stale token", "status": 409,
  "detail": "the consumer was reset", "code": 20010, "name": "stale_token", "retryable": false,
  "errors": []}}]}"""


def pull(**changes: object) -> "consumers.Call[Pull[Delivery]]":
    fields = dict.fromkeys(("expires", "max_bytes", "no_wait")) | {"batch": 1, "kind": Delivery}
    return consumers.pull("S", "c", **(fields | changes))  # type: ignore[arg-type]


def delivery(token: str) -> Delivery:
    return Delivery(
        stream="S",
        seq=1,
        subject="a",
        time="",
        consumer_seq=1,
        num_delivered=1,
        num_pending=0,
        ack_token=token,
    )


def test_durable_consumer_is_put_under_its_name() -> None:
    request = consumers.put("S", "c", {"filter_subject": "a.>"}).request
    assert (request.method, request.path) == ("PUT", "/v1/streams/S/consumers/c")
    assert request.body == b'{"filter_subject":"a.>"}'


def test_consumer_with_a_name_is_created_once() -> None:
    call = consumers.create("S", "c", {"filter_subject": "a.>"})
    assert (call.request.method, call.request.path) == ("POST", "/v1/streams/S/consumers")
    assert msgspec.json.decode(call.request.body) == {"name": "c", "filter_subject": "a.>"}
    assert call.repeatable


def test_ephemeral_consumer_is_posted_without_a_name() -> None:
    call = consumers.create("S", None, {"deliver_policy": "new"})
    request = call.request
    assert not call.repeatable  # the second time would make another one
    assert (request.method, request.path) == ("POST", "/v1/streams/S/consumers")


def test_info_is_read_with_its_etag() -> None:
    info = conclude(consumers.get("S", "c"), Answer(200, {"etag": '"1"'}, INFO))
    assert (info.name, info.etag, info.num_pending) == ("c", '"1"', 3)
    assert (info.delivered.stream_seq, info.ack_floor.consumer_seq) == (9, 4)


def test_pull_sends_what_is_given() -> None:
    request = pull(batch=10, expires="5s").request
    assert request.path == "/v1/streams/S/consumers/c/next"
    assert msgspec.json.decode(request.body) == {"batch": 10, "expires": "5s"}


def test_pull_is_never_repeated_by_itself() -> None:
    assert not pull().repeatable


def test_pulled_messages_carry_their_delivery_facts() -> None:
    found = conclude(pull(), Answer(200, {}, PULLED))
    assert (len(found), found.num_pending) == (1, 3)
    [message] = found
    assert (message.seq, message.payload, message.ack_token) == (9, b"x", "t9")
    assert (message.consumer_seq, message.num_delivered, message.num_pending) == (5, 2, 3)


def test_columns_become_messages_with_a_token_each() -> None:
    found = conclude(pull(), Answer(200, {}, COLUMNS))
    assert found.num_pending == 7
    assert [(one.seq, one.subject, one.payload, one.ack_token) for one in found] == [
        (4, "b", b"x", "head.0"),
        (6, "a", b"\xff\xfe", "head.1"),
        (7, "b", b"", "head.2"),
    ]
    assert [(one.data, one.data_base64) for one in found][:2] == [("x", None), (None, b"\xff\xfe")]
    assert [(one.consumer_seq, one.num_delivered, one.num_pending) for one in found] == [
        (5, 1, 9),
        (6, 1, 8),
        (7, 1, 7),
    ]
    assert found.messages[2].time == "1970-01-01T00:00:02.000000000Z"


def test_pull_that_waited_in_vain_is_empty() -> None:
    assert conclude(pull(), Answer(204, {})) == Pull()


def test_acknowledgements_go_into_one_request() -> None:
    call = consumers.acknowledge("S", "c", "nak", [delivery("t1"), delivery("t2")], delay="5s")
    assert call.request.path == "/v1/streams/S/consumers/c/ack"
    assert msgspec.json.decode(call.request.body) == {
        "acks": [
            {"token": "t1", "kind": "nak", "delay": "5s"},
            {"token": "t2", "kind": "nak", "delay": "5s"},
        ],
        "sync": False,
    }


@given(
    st.lists(
        st.tuples(st.sampled_from(["h", "h.2", "old"]), st.integers(0, 4)), min_size=1, max_size=9
    ),
    st.data(),
)
def test_acknowledgements_of_a_head_go_together(
    tokens: list[tuple[str, int]], data: st.DataObject
) -> None:
    given_tokens = [head if head == "old" else f"{head}.{at}" for head, at in tokens]
    call = consumers.acknowledge("S", "c", "ack", list(map(delivery, given_tokens)))
    acks = msgspec.json.decode(call.request.body)["acks"]
    meant: list[list[str]] = []
    for ack in acks:
        head, _, position = ack["token"].rpartition(".")
        ranges = ack.get("ranges")
        assert (ranges is not None) == (position == "*")
        places = [at for first, last in ranges or () for at in range(first, last + 1)]
        assert places == sorted(set(places))
        meant.append([f"{head}.{at}" for at in places] or [ack["token"]])
    assert [one for some in meant for one in some] == given_tokens
    # The result of an ack is that of each of its messages.
    bad = data.draw(st.integers(0, len(acks) - 1))
    problem = msgspec.json.decode(REFUSED)["results"][1]
    results = [problem if at == bad else {"ok": True} for at in range(len(acks))]
    with pytest.raises(AcksRefused) as caught:
        conclude(call, Answer(200, {}, msgspec.json.encode({"results": results})))
    begin = sum(map(len, meant[:bad]))
    assert list(caught.value.refused) == list(range(begin, begin + len(meant[bad])))


def test_refused_acknowledgements_are_raised_by_position() -> None:
    call = consumers.acknowledge("S", "c", "ack", [delivery("t1"), delivery("t2")])
    with pytest.raises(AcksRefused, match="1 acknowledgements were refused") as caught:
        conclude(call, Answer(200, {}, REFUSED))
    assert {at: each.name for at, each in caught.value.refused.items()} == {1: "stale_token"}


def test_acknowledgement_answer_of_another_length_is_unexpected() -> None:
    call = consumers.acknowledge("S", "c", "ack", [delivery("t1")], sync=True)
    with pytest.raises(UnexpectedAnswer, match="2 results for 1"):
        conclude(call, Answer(200, {}, REFUSED))
