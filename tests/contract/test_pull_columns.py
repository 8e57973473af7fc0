"""Pulls in columns: the same messages as in rows, one token for all of them, acks by ranges.

The columns are read here as a client's author would read them from the description alone.
"""

from typing import Any

import msgspec
import pytest

from tests.contract.conftest import Stream, assert_problem
from tests.contract.test_websocket_columns import rows
from tests.support.each import each

COLUMNS = {"Accept": "application/vnd.msgpack; form=columns"}
PACKED = {"Accept": "application/vnd.msgpack"}
pytestmark = pytest.mark.split


def pull(
    stream: Stream, consumer: str, headers: dict[str, str] = COLUMNS, **body: Any
) -> dict[str, Any]:
    answer = stream.client.post(
        f"{consumer}/next", json={"batch": 100, "no_wait": True, **body}, headers=headers
    )
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = msgspec.msgpack.decode(answer.content)
    form = headers["Accept"] if "cols" in found else PACKED["Accept"]
    assert answer.headers["content-type"] == form
    return found


def seqs(found: dict[str, Any]) -> list[int]:
    return [one["seq"] for one in rows(found["cols"])]


def pending(stream: Stream, consumer: str) -> tuple[int, int]:
    info = stream.client.get(consumer).json()
    return info["num_ack_pending"], info["ack_floor"]["stream_seq"]


def redelivered(stream: Stream, consumer: str, **body: Any) -> list[int]:
    """What is due again: it comes in rows."""
    answer = stream.client.post(
        f"{consumer}/next", json={"batch": 100, "expires": "20s", **body}, headers=COLUMNS
    )
    return [one["seq"] for one in msgspec.msgpack.decode(answer.content)["messages"]]


def test_columns_have_what_rows_have(stream: Stream) -> None:
    for at in range(5):
        stream.publish(bytes([at]), "ab"[at % 2], **{"Msg-Header-Kind": f"k{at}"} if at else {})
    one, other = stream.consumer("one"), stream.consumer("other")
    found, listed = pull(stream, one, batch=4), pull(stream, other, PACKED, batch=4)
    assert found.keys() == {"cols", "num_pending", "ack_token"}
    tokens = [message.pop("ack_token") for message in listed["messages"]]
    assert rows(found["cols"]) == listed["messages"]
    assert found["num_pending"] == listed["num_pending"] == 1
    # Either token is valid where the other one is.
    results = stream.ack(other, *tokens)
    assert results == [{"ok": True}] * 4
    assert stream.ack(one, found["ack_token"]) == [{"ok": True}]
    assert pending(stream, one) == pending(stream, other) == (0, 4)


def test_ranges_acknowledge_a_part_over_all_gaps(stream: Stream) -> None:
    for at in range(20):
        stream.publish(b"x", "ab"[at % 3 == 0])
    consumer = stream.consumer(filter_subject=stream.subject("a"))
    found = pull(stream, consumer)
    wanted = [seq for seq in range(1, 21) if (seq - 1) % 3]
    assert seqs(found) == wanted
    token = found["ack_token"]
    assert stream.ack(consumer, token, ranges=[[0, 1], [3, 3], [12, 12]]) == [{"ok": True}]
    left = [seq for at, seq in enumerate(wanted) if at not in (0, 1, 3, 12)]
    assert pending(stream, consumer)[0] == len(left)
    assert stream.ack(consumer, token, ranges=[[0, 12]], kind="nak") == [{"ok": True}]
    assert redelivered(stream, consumer) == left


def test_acks_of_columns_come_with_the_next_pull(stream: Stream) -> None:
    stream.fill(7)
    consumer = stream.consumer()
    token, taken = "", []
    for _ in range(3):
        found = pull(stream, consumer, batch=3, acks=[{"token": token}] if token else [])
        assert found.get("ack_results") == ([{"ok": True}] if token else None)
        token, taken = found["ack_token"], taken + seqs(found)
    assert taken == [1, 2, 3, 4, 5, 6, 7]
    last = pull(stream, consumer, acks=[{"token": token}])
    assert last == {"messages": [], "num_pending": 0, "ack_results": [{"ok": True}]}
    assert pending(stream, consumer) == (0, 7)


def test_token_covers_nothing_that_others_hold(stream: Stream) -> None:
    stream.fill(6)
    consumer = stream.consumer(ack_wait="1h")
    first, second = pull(stream, consumer, batch=2), pull(stream, consumer, batch=2)
    stream.ack(consumer, first["ack_token"], kind="nak")
    third = pull(stream, consumer)  # the first two again, then the last two: in rows
    assert [one["seq"] for one in third["messages"]] == [1, 2, 5, 6]
    beyond = stream.ack(consumer, second["ack_token"], ranges=[[0, 2]])
    assert beyond[0]["problem"]["status"] == 422
    assert pending(stream, consumer) == (6, 0)
    head = third["messages"][-1]["ack_token"].rpartition(".")[0]
    assert stream.ack(consumer, f"{head}.*") == [{"ok": True}]
    assert pending(stream, consumer) == (4, 0)
    [refused] = stream.ack(consumer, f"{head}.2")
    assert refused["problem"]["name"] == "ack_token_invalid"


@each(
    "ranges",
    [[[1, 0]], [[-1, 0]], [[0, 1], [1, 2]], [[2, 2], [0, 0]], [[0]], [["0", 1]], 1],
)
def test_invalid_ranges_refuse_the_request_before_any_ack(stream: Stream, ranges: Any) -> None:
    stream.fill(4)
    consumer = stream.consumer()
    token = pull(stream, consumer)["ack_token"]
    held = pending(stream, consumer)
    acks = [{"token": token, "ranges": [[3, 3]]}, {"token": token, "ranges": ranges}]
    answer = stream.client.post(f"{consumer}/ack", json={"acks": acks})
    problem = assert_problem(answer, 422)
    assert problem["errors"][0]["pointer"].startswith("/acks/1/ranges")
    assert pending(stream, consumer) == held


def test_ranges_are_for_the_token_of_columns(stream: Stream) -> None:
    stream.fill(2)
    consumer = stream.consumer()
    [one, _] = stream.next(consumer, batch=2)
    acks = [{"token": one["ack_token"], "ranges": [[0, 0]]}]
    answer = stream.client.post(f"{consumer}/ack", json={"acks": acks})
    assert assert_problem(answer, 422)["errors"][0]["pointer"] == "/acks/0/ranges"


def test_acks_of_columns_count_their_messages(stream: Stream) -> None:
    stream.fill(10)
    consumer = stream.consumer()
    token = pull(stream, consumer)["ack_token"]
    answer = stream.client.post(f"{consumer}/ack", json={"acks": [{"token": token}] * 1_001})
    assert_problem(answer, 413)
    assert pending(stream, consumer) == (10, 0)


@each(
    "accept",
    [
        "application/vnd.msgpack",
        "application/vnd.msgpack; form=rows",
        "application/vnd.msgpack; form=columnss",
        "application/vnd.msgpack, text/plain; form=columns",
        "application/json",
        "application/json, application/vnd.msgpack; q=0.5; form=columns",
    ],
)
def test_whoever_does_not_ask_for_columns_gets_rows(stream: Stream, accept: str) -> None:
    stream.fill(1)
    answer = stream.client.post(f"{stream.consumer()}/next", headers={"Accept": accept})
    assert answer.status_code == 200
    assert b"messages" in answer.content
    assert b"cols" not in answer.content


def test_messages_of_several_shards_come_in_rows(stream: Stream) -> None:
    stream.client.delete(stream.path)
    stream.configure(shards=3)
    for at in range(9):
        stream.publish(b"x", f"k{at}")
    consumer = stream.consumer()
    found = pull(stream, consumer)["messages"]
    assert len(found) == 9
    assert stream.ack(consumer, *(one["ack_token"] for one in found)) == [{"ok": True}] * 9
    assert pending(stream, consumer)[0] == 0
