"""Numbered batches: no message is stored twice, however late and in which form it is repeated."""

from typing import Any

import httpx
import msgspec

from contrail_common import errors
from contrail_common.partition import shard_of
from tests.contract.conftest import Stream, assert_problem
from tests.support.each import each

MSGPACK_TYPE = "application/vnd.msgpack"
INVALID = 20030


def send(stream: Stream, messages: list[Any], **query: Any) -> httpx.Response:
    path = f"{stream.path}/messages"
    return stream.client.post(path, params=query, json={"messages": messages})


def item(stream: Stream, text: str, rest: str = "a") -> dict[str, Any]:
    return {"subject": stream.subject(rest), "data": text, "msg_id": text}


def results(answer: httpx.Response) -> list[tuple[int, bool]]:
    """The sequence of each message, and whether it is a duplicate."""
    assert answer.status_code == 201, answer.text
    return [(one["seq"], one["duplicate"]) for one in answer.json()["results"]]


def stored(stream: Stream) -> list[str]:
    page = stream.client.get(f"{stream.path}/messages", params={"limit": 1000}).json()
    return [one["data"] for one in page["messages"]]


def test_messages_of_a_batch_are_stored_once_in_whatever_form_they_come(stream: Stream) -> None:
    query: dict[str, Any] = {"producer": "job", "number": 7}
    first = send(stream, [item(stream, "1"), item(stream, "2")], **query)
    assert results(first) == [(1, False), (2, False)]
    path = f"{stream.path}/messages"
    lines = "".join(f"{msgspec.json.encode(item(stream, text)).decode()}\n" for text in "23")
    kind = {"content-type": "application/x-ndjson"}
    second = stream.client.post(path, params=query, content=lines, headers=kind)
    assert results(second) == [(2, True), (3, False)]
    offsets = b"\0\0\0\0\1\0\0\0\2\0\0\0"
    columns = [2, [[stream.subject("a")], bytes(8), offsets, b"34", [offsets, b"34"]]]
    kind = {"content-type": MSGPACK_TYPE, "accept": MSGPACK_TYPE}
    body = msgspec.msgpack.encode(columns)
    third = stream.client.post(path, params=query, content=body, headers=kind)
    assert msgspec.msgpack.decode(third.content) == {
        "runs": [{"count": 1, "first_seq": 3, "duplicate": True}, {"count": 1, "first_seq": 4}]
    }
    other = send(stream, [item(stream, "5")], producer="job-2", number=1)
    assert results(other) == [(5, False)]
    later = send(stream, [item(stream, "6")], producer="job", number=9)
    assert results(later) == [(6, False)]
    # Whatever an earlier batch has, it is over.
    assert results(send(stream, [item(stream, "7")], **query)) == [(0, True)]
    assert stored(stream) == ["1", "2", "3", "4", "5", "6"]


def test_refused_message_is_refused_for_itself(stream: Stream) -> None:
    query = {"producer": "job", "number": 1}
    messages = [item(stream, "1"), {"subject": "elsewhere", "data": "2", "msg_id": "2"}]
    for duplicate in (False, True):
        answer = send(stream, messages, **query)
        assert answer.status_code == 207
        first, second = answer.json()["results"]
        assert first == {"seq": 1, "duplicate": duplicate}
        assert second["problem"]["code"] == 20002


def test_refused_atomic_batch_is_stored_once_corrected_under_the_same_number(
    unused: Stream,
) -> None:
    assert unused.configure(allow_atomic=True).status_code == 201
    try:
        query = {"producer": "job", "atomic": "true", "number": 2}
        for expected in ({"last_seq": 7}, {"last_seq": 0}):
            messages = [{**item(unused, "1"), "expected": expected}, item(unused, "2")]
            answer = send(unused, messages, **query)
            if expected["last_seq"]:
                assert_problem(answer, 412, errors.WRONG_LAST_SEQUENCE.code)
        assert answer.status_code == 201
        assert stored(unused) == ["1", "2"]
    finally:
        unused.client.delete(unused.path)


def test_atomic_batch_of_an_earlier_number_is_refused_as_a_repeat_is(unused: Stream) -> None:
    assert unused.configure(allow_atomic=True).status_code == 201
    try:
        query = {"producer": "job", "atomic": "true"}
        first = send(unused, [item(unused, "1")], number=2, **query)
        assert first.json()["last_seq"] == 1
        for number, text in ((2, "1"), (1, "2")):
            again = send(unused, [item(unused, text)], number=number, **query)
            assert_problem(again, 409, errors.ATOMIC_DUPLICATE.code)
        assert stored(unused) == ["1"]
    finally:
        unused.client.delete(unused.path)


@each(
    ("query", "pointer"),
    [
        ({"producer": "job"}, "number"),
        ({"number": "1"}, "producer"),
        ({"producer": "job", "number": "0"}, "number"),
        ({"producer": "job", "number": str(1 << 63)}, "number"),
        ({"producer": "job", "number": "x"}, "number"),
        ({"producer": "", "number": "1"}, "producer"),
        ({"producer": "a b", "number": "1"}, "producer"),
        ({"producer": "j" * 256, "number": "1"}, "producer"),
    ],
)
def test_wrong_parameters_are_named(stream: Stream, query: dict[str, str], pointer: str) -> None:
    assert_problem(send(stream, [item(stream, "1")], **query), 422, INVALID, pointer)
    assert stored(stream) == []


def test_message_without_an_id_refuses_the_request(stream: Stream) -> None:
    query = {"producer": "job", "number": 1}
    without = {"subject": stream.subject("a"), "data": "2"}
    assert_problem(send(stream, [without], **query), 422, INVALID, "/messages/0")
    some = [item(stream, "1"), {"subject": "a b", "data": ""}, without]
    assert_problem(send(stream, some, **query), 422, INVALID, "/messages/2")
    assert stored(stream) == []


def test_largest_name_and_number_are_taken(stream: Stream) -> None:
    query = {"producer": "j" * 255, "number": (1 << 63) - 1}
    assert results(send(stream, [item(stream, "1")], **query)) == [(1, False)]
    assert results(send(stream, [item(stream, "1")], **query)) == [(1, True)]


def test_batch_goes_to_several_shards(unused: Stream) -> None:
    assert unused.configure(shards=4, shard_by=[2]).status_code == 201
    try:
        messages = [item(unused, text, text) for text in "abcdefgh"]
        assert len({shard_of(f"x.{text}", 4, (2,)) for text in "abcdefgh"}) > 1
        query = {"producer": "job", "number": 1}
        first = results(send(unused, messages[:5], **query))
        assert not any(duplicate for _, duplicate in first)
        again = results(send(unused, messages, **query))
        assert [duplicate for _, duplicate in again] == [True] * 5 + [False] * 3
        assert [seq for seq, _ in again[:5]] == [seq for seq, _ in first]
        assert sorted(stored(unused)) == list("abcdefgh")
    finally:
        unused.client.delete(unused.path)
