"""Consumers of streams with several shards, over HTTP and over sockets."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from contrail_common.partition import shard_of
from tests.contract.conftest import Stream, assert_problem
from tests.contract.talk import JSON, MSGPACK, Frame, Talk
from tests.support.servers import ServerProcess

pytestmark = pytest.mark.split

SHARDS = 4
WHOLE = {"msgs": 1_000, "bytes": 1 << 20}


@pytest.fixture
def sharded(unused: Stream) -> Iterator[Stream]:
    """A stream of the test's own, with four shards by the second token."""
    answer = unused.configure(shards=SHARDS, shard_by=[2])
    assert answer.status_code == 201, answer.text
    yield unused
    unused.client.delete(unused.path)


def fill(stream: Stream, count: int) -> None:
    """Messages on nine subjects in turn, payloads by number from 0."""
    messages = [
        {"subject": stream.subject(f"k{number % 9}"), "data": str(number)}
        for number in range(count)
    ]
    answer = stream.client.post(f"{stream.path}/messages", json={"messages": messages})
    assert answer.status_code == 201, answer.text


def numbers(messages: list[dict[str, Any]]) -> list[int]:
    return sorted(int(one["data"]) for one in messages)


def by_shard(messages: list[Frame]) -> dict[int, list[int]]:
    """The sequences of each shard, in the order in which they came."""
    found: dict[int, list[int]] = {}
    for one in messages:
        assert one["shard"] == shard_of(one["subject"], SHARDS, (2,))
        found.setdefault(one["shard"], []).append(one["seq"])
    return found


def in_form(seqs_of: dict[int, Any], form: str) -> dict[Any, Any]:
    return seqs_of if form == MSGPACK else {str(shard): of for shard, of in seqs_of.items()}


# HTTP --------------------------------------------------------------------------------------------
def test_pulls_and_acks_go_over_all_shards(sharded: Stream) -> None:
    fill(sharded, 30)
    consumer = sharded.consumer()
    info = sharded.client.get(consumer).json()
    assert (info["num_pending"], len(info["shards"])) == (30, SHARDS)
    taken = sharded.next(consumer, batch=30)
    assert numbers(taken) == list(range(30))
    by_shard(taken)
    assert taken[-1]["num_pending"] == 0
    results = sharded.ack(consumer, *[one["ack_token"] for one in taken[:20]])
    assert results == [{"ok": True}] * 20
    assert sharded.ack(consumer, taken[20]["ack_token"], kind="nak") == [{"ok": True}]
    [again] = sharded.next(consumer, expires="20s")
    assert (again["data"], again["num_delivered"]) == (taken[20]["data"], 2)
    info = sharded.client.get(consumer).json()
    assert info["num_ack_pending"] == 10
    assert info["num_redelivered"] == 1
    for key in ("num_ack_pending", "num_redelivered", "num_pending"):
        assert info[key] == sum(one[key] for one in info["shards"])
    assert info["delivered"]["consumer_seq"] == 31
    state = sharded.client.get(sharded.path).json()
    assert state["state"]["consumer_count"] == 1
    assert {one["consumer_count"] for one in state["shards"]} == {1}
    listed = sharded.client.get(f"{sharded.path}/consumers").json()
    assert [one["name"] for one in listed["items"]] == ["c"]
    assert sharded.client.delete(consumer).status_code == 204
    assert_problem(sharded.client.get(consumer), 404, 10014)


def test_consumer_is_changed_as_any_other(sharded: Stream) -> None:
    consumer = sharded.consumer()
    first = sharded.client.get(consumer)
    changed = sharded.client.patch(
        consumer,
        content=b'{"max_ack_pending": 3}',
        headers={"content-type": "application/merge-patch+json", "if-match": first.headers["etag"]},
    )
    assert changed.status_code == 200, changed.text
    fill(sharded, 20)
    assert len(sharded.next(consumer, batch=10)) == 3
    assert sharded.next(consumer, batch=10) == []
    stale = sharded.client.put(consumer, json={}, headers={"if-match": first.headers["etag"]})
    assert_problem(stale, 412)
    by_seq = {"deliver_policy": "by_start_sequence", "opt_start_seq": 4}
    answer = sharded.client.put(f"{sharded.path}/consumers/d", json=by_seq)
    assert_problem(answer, 422, 20072, "/opt_start_seq")
    sharded.publish(b"20", rest="k1")
    answer = sharded.client.put(f"{sharded.path}/consumers/d", json={"deliver_policy": "last"})
    assert answer.status_code == 201
    assert numbers(sharded.next(f"{sharded.path}/consumers/d", batch=10)) == [20]


# Sockets -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("form", [JSON, MSGPACK])
def test_socket_settles_by_shard(server: ServerProcess, sharded: Stream, form: str) -> None:
    fill(sharded, 24)
    consumer = sharded.consumer()
    with Talk(server.url, form) as talk:
        talk.done("sub", sid="s", stream=sharded.name, consumer="c", credit=WHOLE)
        found = talk.messages(24)
        assert sorted(int(one["data"]) for one in found) == list(range(24))
        seqs_of = by_shard(found)
        shard, own = next((one, seqs) for one, seqs in seqs_of.items() if len(seqs) > 2)
        talk.done("ack", sid="s", seqs=in_form({shard: own[:1]}, form))
        ranges = in_form({shard: [(own[1], own[-1])]}, form)
        talk.done("ack", sid="s", ranges=ranges)
        info = sharded.client.get(consumer).json()
        assert info["num_ack_pending"] == 24 - len(own)
        again = talk.refused("ack", sid="s", seqs=in_form({shard: own[:1]}, form))
        assert again["name"] == "not_sent_here"
        plain = talk.refused("ack", sid="s", seqs=[1])
        assert plain["name"] == "invalid_field"
        rest = {one: seqs for one, seqs in seqs_of.items() if one != shard}
        tokens = [one["ack_token"] for one in found if one["shard"] in rest]
        talk.done("ack", sid="s", tokens=tokens[:2])
        last = {one: seqs[-1:] for one, seqs in rest.items()}
        talk.send({"op": "nak", "sid": "s", "seqs": in_form(last, form)})
        again_sent = talk.messages(len(rest))
        assert {one["num_delivered"] for one in again_sent} == {2}
        assert by_shard(again_sent) == last


def test_socket_of_one_shard_knows_no_shards(server: ServerProcess, stream: Stream) -> None:
    stream.fill(2)
    stream.consumer()
    with Talk(server.url) as talk:
        talk.done("sub", sid="s", stream=stream.name, consumer="c", credit=WHOLE)
        assert all("shard" not in one for one in talk.messages(2))
        refused = talk.refused("ack", sid="s", seqs={"0": [1]})
        assert refused["name"] == "invalid_field"
        talk.done("ack", sid="s", seqs=[1, 2])


def test_acks_of_all_before_are_of_each_shard(server: ServerProcess, sharded: Stream) -> None:
    fill(sharded, 24)
    consumer = sharded.consumer(ack_policy="all")
    with Talk(server.url) as talk:
        talk.done("sub", sid="s", stream=sharded.name, consumer="c", credit=WHOLE)
        seqs_of = by_shard(talk.messages(24))
        shard = max(seqs_of)
        talk.done("ack", sid="s", seqs={str(shard): seqs_of[shard][-1:]})
        info = sharded.client.get(consumer).json()
        assert info["num_ack_pending"] == 24 - len(seqs_of[shard])
        rest = {str(one): seqs[-1:] for one, seqs in seqs_of.items() if one != shard}
        talk.done("ack", sid="s", seqs=rest)
        assert sharded.client.get(consumer).json()["num_ack_pending"] == 0


def test_heartbeat_reports_the_position_in_each_shard(
    server: ServerProcess, sharded: Stream
) -> None:
    fill(sharded, 18)
    sharded.consumer()
    with Talk(server.url) as talk:
        talk.done("connect", heartbeat="100ms")
        talk.done("sub", sid="s", stream=sharded.name, consumer="c", credit=WHOLE)
        seqs_of = by_shard(talk.messages(18))
        beat = talk.next("hb")
        assert beat["last_consumer_seq"] == 18
        assert beat["last_stream_seq"] == max(max(seqs) for seqs in seqs_of.values())
        expected = {str(shard): [len(seqs), seqs[-1]] for shard, seqs in seqs_of.items()}
        assert {key: pair for key, pair in beat["shards"].items() if pair != [0, 0]} == expected


def test_heartbeat_of_a_pull_reports_the_position_in_each_shard(sharded: Stream) -> None:
    fill(sharded, 18)
    consumer = sharded.consumer(ack_policy="none")
    pulled = sharded.client.post(f"{consumer}/next", json={"batch": 18}).json()["messages"]
    seqs_of = by_shard(pulled)
    with sharded.client.stream(
        "POST",
        f"{consumer}/next",
        json={"expires": "30s", "idle_heartbeat": "100ms"},
        headers={"Accept": "application/x-ndjson"},
    ) as answer:
        beat = json.loads(next(answer.iter_lines()))
    assert beat["hb"] is True
    assert beat["last_consumer_seq"] == len(pulled)
    assert beat["last_stream_seq"] == max(max(seqs) for seqs in seqs_of.values())
    expected = {str(shard): [len(seqs), max(seqs)] for shard, seqs in seqs_of.items()}
    assert {key: pair for key, pair in beat["shards"].items() if pair != [0, 0]} == expected


@pytest.mark.parametrize("form", [JSON, MSGPACK])
def test_ordered_tail_continues_from_its_cursor(
    server: ServerProcess, sharded: Stream, form: str
) -> None:
    fill(sharded, 30)
    found: list[Frame] = []
    cursor: str | None = None
    for credit in (7, 7, 100):
        with Talk(server.url, form) as talk:
            begin = {} if cursor is None else {"opt_start_cursor": cursor}
            talk.done(
                "sub", sid="s", stream=sharded.name, ordered=True, credit={"msgs": credit}, **begin
            )
            wanted = min(credit, 30 - len(found))
            came: list[Frame] = []
            while len(came) < wanted:
                frame = talk.next("msgs")
                came += frame["messages"]
                cursor = frame["cursor"]
            found += came
    assert sorted(int(one["data"]) for one in found) == list(range(30))
    assert all("ack_token" not in one for one in found)
    for seqs in by_shard(found).values():
        assert seqs == list(range(1, len(seqs) + 1))
    with Talk(server.url, form) as talk:
        begin = {"opt_start_cursor": cursor}
        talk.done("sub", sid="s", stream=sharded.name, ordered=True, credit=WHOLE, **begin)
        sharded.publish(b"30", rest="k1")
        [later] = talk.messages(1)
        assert int(later["data"]) == 30
        for bad in ("x", "MTI"):
            refused = talk.refused(
                "sub", sid="t", stream=sharded.name, ordered=True, opt_start_cursor=bad
            )
            assert refused["name"] == "invalid_field"
        both = {"opt_start_cursor": cursor, "opt_start_seq": 1}
        refused = talk.refused("sub", sid="t", stream=sharded.name, ordered=True, **both)
        assert refused["name"] == "invalid_field"
        by_seq = {"deliver_policy": "by_start_sequence", "opt_start_seq": 1}
        refused = talk.refused("sub", sid="t", stream=sharded.name, ordered=True, **by_seq)
        assert refused["name"] == "sharded_unsupported"


def test_gap_names_the_shard_that_lost_messages(server: ServerProcess, sharded: Stream) -> None:
    fill(sharded, 27)
    with Talk(server.url) as talk:
        talk.done("sub", sid="s", stream=sharded.name, ordered=True, credit={"msgs": 5})
        frame = talk.next("msgs")
        cursor, seen = frame["cursor"], by_shard(frame["messages"])
    pages = sharded.client.get(f"{sharded.path}/messages?limit=100").json()["messages"]
    held = by_shard(pages)
    shard = next(one for one, seqs in held.items() if seqs[-1] > 3 + max(seen.get(one, [0])))
    purge = {"up_to_seq": held[shard][-1], "shard": shard}
    assert sharded.client.post(f"{sharded.path}/purge", json=purge).status_code == 200
    with Talk(server.url) as talk:
        begin = {"opt_start_cursor": cursor}
        talk.done("sub", sid="s", stream=sharded.name, ordered=True, credit=WHOLE, **begin)
        gap = talk.next("gap")
        first = max(seen.get(shard, [0])) + 1
        assert (gap["shard"], gap["first"], gap["last"]) == (shard, first, held[shard][-1] - 1)
        left = sum(len(seqs) for seqs in held.values()) - 5 - (gap["last"] - gap["first"] + 1)
        assert len(talk.messages(left)) == left


def test_own_subscription_shares_and_acks_over_all_shards(
    server: ServerProcess, sharded: Stream
) -> None:
    fill(sharded, 12)
    with Talk(server.url) as talk:
        talk.done("sub", sid="s", stream=sharded.name, credit=WHOLE)
        seqs_of = by_shard(talk.messages(12))
        talk.done("ack", sid="s", seqs={str(shard): seqs for shard, seqs in seqs_of.items()})
        [consumer] = sharded.client.get(f"{sharded.path}/consumers").json()["items"]
        assert consumer["num_ack_pending"] == 0
        talk.done("unsub", sid="s")


def test_last_of_each_subject_comes_first_from_all_shards(sharded: Stream) -> None:
    fill(sharded, 30)
    last = {"deliver_policy": "last_per_subject", "filter_subject": f"{sharded.prefix}.*"}
    consumer = sharded.consumer(**last)
    taken = sharded.next(consumer, batch=30)
    assert numbers(taken) == list(range(21, 30))
    sharded.publish(b"30", rest="k0")
    assert numbers(sharded.next(consumer, batch=30)) == [30]
