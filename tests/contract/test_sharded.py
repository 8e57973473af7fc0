"""Streams with several shards: one interface over all of them, and each by its number."""

import json
import struct
from collections.abc import Iterator
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from contrail_common.partition import shard_of
from tests.contract.conftest import Stream, assert_problem
from tests.contract.talk import JSON, MSGPACK, Talk
from tests.contract.test_tail import tail
from tests.support.servers import ServerProcess

SHARDS = 4
SHARDED = 20072
JSON_MESSAGE = {"accept": "application/json"}


@pytest.fixture
def sharded(unused: Stream) -> Iterator[Stream]:
    """A stream of the test's own, with four shards by the second token."""
    config = {"shards": SHARDS, "shard_by": [2], "allow_atomic": True, "allow_rollup_hdrs": True}
    answer = unused.configure(**config)
    assert answer.status_code == 201, answer.text
    yield unused
    unused.client.delete(unused.path)


def shard_number(rest: str) -> int:
    return shard_of(f"x.{rest}", SHARDS, (2,))


def apart() -> tuple[str, str]:
    """Two keys whose subjects are in different shards."""
    return "a", next(key for key in "bcdefgh" if shard_number(key) != shard_number("a"))


def pages(stream: Stream, **query: Any) -> list[dict[str, Any]]:
    """All messages, along the cursors."""
    found: list[dict[str, Any]] = []
    while True:
        answer = stream.client.get(f"{stream.path}/messages", params=query)
        assert answer.status_code == 200, answer.text
        page = answer.json()
        assert page.keys() == {"messages", "cursor", "num_pending"}
        if not page["messages"]:
            return found
        found += page["messages"]
        query["cursor"] = page["cursor"]
        query.pop("start_time", None)


def test_config_shows_the_shards_and_they_never_change(sharded: Stream) -> None:
    info = sharded.client.get(sharded.path).json()
    assert (info["config"]["shards"], info["config"]["shard_by"]) == (SHARDS, [2])
    assert len(info["shards"]) == SHARDS
    again = sharded.client.put(sharded.path, json=info["config"])
    assert again.status_code == 200
    for change in ({"shards": 3}, {"shard_by": [1]}, {"shards": 1}):
        answer = sharded.client.put(sharded.path, json={**info["config"], **change})
        assert_problem(answer, 409, 10052, f"/{next(iter(change))}")
    patched = sharded.client.patch(
        sharded.path,
        content=b'{"max_msgs": 9}',
        headers={"content-type": "application/merge-patch+json"},
    )
    assert patched.json()["config"]["max_msgs"] == 9


def test_stream_of_one_shard_shows_nothing_of_shards(stream: Stream) -> None:
    assert stream.publish().json().keys() == {"stream", "seq", "duplicate"}
    info = stream.client.get(stream.path).json()
    assert "shards" not in info
    assert (info["config"]["shards"], info["config"]["shard_by"]) == (1, [])
    page = stream.client.get(f"{stream.path}/messages").json()
    assert page.keys() == {"messages", "next_seq", "num_pending"}
    assert "shard" not in page["messages"][0]
    answer = stream.client.get(f"{stream.path}/messages?cursor=abc")
    assert_problem(answer, 422, 20030, "cursor")
    answer = stream.client.get(f"{stream.path}/messages/1?shard=1")
    assert_problem(answer, 422, 20030, "shard")


def test_publishes_are_answered_with_the_shard_of_their_subject(sharded: Stream) -> None:
    for key in "abcdef":
        answer = sharded.publish(rest=key)
        assert answer.status_code == 201, answer.text
        ack = answer.json()
        assert ack.keys() == {"stream", "seq", "duplicate", "shard"}
        assert ack["shard"] == shard_number(key)
    left, right = apart()
    first = sharded.publish(rest=left, Nats_Msg_Id="twice").json()
    assert not sharded.publish(rest=right, Nats_Msg_Id="twice").json()["duplicate"]
    again = sharded.publish(rest=left, Nats_Msg_Id="twice")
    assert again.status_code == 200
    assert again.json() == {**first, "duplicate": True}


def test_batch_is_answered_in_its_order(sharded: Stream) -> None:
    messages = [{"subject": sharded.subject(f"k{at % 9}"), "data": str(at)} for at in range(40)]
    messages[7]["expected"] = {"last_seq": 0}
    messages[8]["subject"] = "elsewhere"
    answer = sharded.client.post(f"{sharded.path}/messages", json={"messages": messages})
    assert answer.status_code == 207
    results = answer.json()["results"]
    assert results[7]["problem"]["code"] == SHARDED
    assert results[8]["problem"]["code"] == 20002
    for at, result in enumerate(results):
        if at not in (7, 8):
            assert result["shard"] == shard_number(f"k{at % 9}")
            target = f"{sharded.path}/messages/{result['seq']}?shard={result['shard']}"
            stored = sharded.client.get(target)
            assert stored.text == str(at)
            assert stored.headers["contrail-shard"] == str(result["shard"])
    lines = "\n".join(json.dumps(one) for one in messages[:3]).encode()
    answer = sharded.client.post(
        f"{sharded.path}/messages",
        content=lines,
        headers={"content-type": "application/x-ndjson", "accept": "application/x-ndjson"},
    )
    shards = [json.loads(line)["shard"] for line in answer.text.splitlines()]
    assert shards == [shard_number(f"k{at}") for at in range(3)]


def test_batch_over_shards_is_not_atomic_and_replaces_no_stream(sharded: Stream) -> None:
    left, right = apart()
    target = f"{sharded.path}/messages?atomic=true"

    def batch(*keys: str) -> dict[str, Any]:
        return {"messages": [{"subject": sharded.subject(key), "data": "x"} for key in keys]}

    assert_problem(sharded.client.post(target, json=batch(left, right)), 422, SHARDED)
    answer = sharded.client.post(target, json=batch(left, left))
    assert answer.status_code == 201
    assert answer.json() == {
        "stream": sharded.name, "first_seq": 1, "last_seq": 2, "count": 2,
        "shard": shard_number(left),
    }  # fmt: skip
    assert_problem(sharded.publish(rest=left, Nats_Rollup="all"), 422, 10111)
    assert sharded.publish(rest=left, Nats_Rollup="sub").status_code == 201
    answer = sharded.publish(rest=left, Nats_Expected_Last_Sequence="3")
    assert answer.status_code == 201
    other = {
        "Nats_Expected_Last_Subject_Sequence": "0",
        "Nats_Expected_Last_Subject_Sequence_Subject": sharded.subject(right),
    }
    assert_problem(sharded.publish(rest=left, **other), 422, SHARDED)


def test_sequences_need_their_shard(sharded: Stream) -> None:
    sharded.fill(10)
    for query in ("", "?shard=4", "?shard=x"):
        answer = sharded.client.get(f"{sharded.path}/messages/1{query}")
        assert_problem(answer, 422, 20030, "shard")
        answer = sharded.client.delete(f"{sharded.path}/messages/1{query}")
        assert_problem(answer, 422, 20030, "shard")
        answer = sharded.client.get(f"{sharded.path}/deleted{query}")
        assert_problem(answer, 422, 20030, "shard")
    for target in ("messages?from_seq=1", "last?up_to_seq=1", "replay", "replay/plan?from_seq=1"):
        answer = sharded.client.get(f"{sharded.path}/{target}")
        assert_problem(answer, 422, 20030, "shard")
    for purge in ({"up_to_seq": 5}, {"keep": 1}):
        answer = sharded.client.post(f"{sharded.path}/purge", json=purge)
        assert_problem(answer, 422, 20030, "shard")
    shard = shard_number("0")
    query = {"shard": shard, "from_seq": 1}
    page = sharded.client.get(f"{sharded.path}/messages", params=query).json()
    assert page["messages"][0]["shard"] == shard
    assert "next_seq" in page
    deleted = sharded.client.delete(f"{sharded.path}/messages/1?shard={shard}")
    assert deleted.status_code == 204
    purged = sharded.client.post(f"{sharded.path}/purge", json={"up_to_seq": 100, "shard": shard})
    assert purged.json()["purged"] == len(page["messages"]) - 1


def test_ranges_over_all_shards_go_on_from_cursors(sharded: Stream) -> None:
    for number in range(25):
        sharded.publish(b"%d" % number, rest=f"k{number % 6}")
    found = pages(sharded, limit=4)
    assert [int(one["data"]) for one in found] == list(range(25))
    assert {one["shard"] for one in found} == {shard_number(f"k{key}") for key in range(6)}
    late = found[11]["time"]
    assert pages(sharded, limit=4, start_time=late) == found[11:]
    subject = sharded.subject("k2")
    assert pages(sharded, subject=subject) == [one for one in found if one["subject"] == subject]
    start = sharded.client.get(f"{sharded.path}/messages?limit=1").json()
    assert start["num_pending"] == 24
    for bad in ("abc", "MTI"):
        answer = sharded.client.get(f"{sharded.path}/messages", params={"cursor": bad})
        assert_problem(answer, 422, 20030, "cursor")
    both = {"cursor": start["cursor"], "from_seq": 1}
    answer = sharded.client.get(f"{sharded.path}/messages", params=both)
    assert_problem(answer, 422, 10003)
    lines = sharded.client.get(
        f"{sharded.path}/messages?limit=5", headers={"accept": "application/x-ndjson"}
    )
    rest = pages(sharded, cursor=lines.headers["contrail-cursor"])
    assert [json.loads(line) for line in lines.text.splitlines()] + rest == found


def test_waiting_read_over_all_shards_is_empty_in_the_end(sharded: Stream) -> None:
    answer = sharded.client.get(f"{sharded.path}/messages?wait=10ms")
    assert answer.status_code == 204


def test_tail_over_all_shards_continues_after_its_last_id(sharded: Stream) -> None:
    for number in range(9):
        sharded.publish(b"%d" % number, rest=f"k{number}")
    seen: list[str] = []
    last_id = ""
    for count in (1, 3, 4):
        headers = {"Last_Event_ID": last_id} if last_id else {}
        with tail(sharded, **headers) as events:
            for _ in range(count):
                event = events.next()
                assert event is not None
                message = json.loads(event["data"])
                assert message["shard"] == shard_number(f"k{message['data']}")
                seen.append(message["data"])
                last_id = event["id"]
    with tail(sharded, Last_Event_ID=last_id) as events:
        for number in (8, 9, 10):
            if number > 8:
                sharded.publish(b"%d" % number, rest=f"k{number}")
            event = events.next()
            assert event is not None
            seen.append(json.loads(event["data"])["data"])
    assert seen == [str(number) for number in range(11)]
    shard = shard_number("k0")
    with tail(sharded, f"shard={shard}") as events:
        assert events.message()["shard"] == shard
    events_only = {"accept": "text/event-stream", "last-event-id": "3"}
    answer = sharded.client.get(f"{sharded.path}/messages", headers=events_only)
    assert_problem(answer, 422, 20030, "shard")


def test_last_subjects_and_purges_are_of_all_shards(sharded: Stream) -> None:
    sharded.fill(20)
    found: list[dict[str, Any]] = []
    token: str | None = ""
    while token is not None:
        query = {"limit": 2, "page_token": token}
        page = sharded.client.get(f"{sharded.path}/last", params=query).json()
        found += page["messages"]
        token = page["next_page_token"]
    assert sorted(int(one["data"]) for one in found) == [16, 17, 18, 19, 20]
    only = sharded.client.get(f"{sharded.path}/last?subject={sharded.subject('3')}").json()
    assert [one["data"] for one in only["messages"]] == ["18"]
    first = sharded.client.get(f"{sharded.path}/subjects?limit=3").json()
    query = {"limit": 3, "page_token": first["next_page_token"]}
    second = sharded.client.get(f"{sharded.path}/subjects", params=query).json()
    names = [one["subject"] for one in first["items"] + second["items"]]
    assert names == [sharded.subject(str(key)) for key in range(5)]
    one_subject = {"subject": sharded.subject("1"), "keep": 1}
    purged = sharded.client.post(f"{sharded.path}/purge", json=one_subject)
    assert purged.json() == {"purged": 3}
    info = sharded.client.get(sharded.path).json()
    for key in ("messages", "bytes", "num_subjects", "num_deleted"):
        assert info["state"][key] == sum(state[key] for state in info["shards"])
    assert info["state"]["messages"] == 17
    assert sharded.client.post(f"{sharded.path}/purge").json() == {"purged": 17}


@pytest.mark.long
def test_replay_reads_every_shard_by_its_splits(sharded: Stream) -> None:
    sharded.fill(50)
    plan = sharded.client.get(f"{sharded.path}/replay/plan?splits=8").json()
    rows: list[dict[str, Any]] = []
    for split in plan["splits"]:
        query = {
            "shard": split["shard"],
            "from_seq": split["from_seq"],
            "to_seq": split["to_seq"],
            "incarnation": plan["incarnation"],
        }
        body = sharded.client.get(f"{sharded.path}/replay", params=query).content
        rows += pa.ipc.open_stream(body).read_all().to_pylist()
    assert sorted(int(row["data"]) for row in rows) == list(range(1, 51))
    for row in rows:
        assert row["shard"] == shard_of(row["subject"], SHARDS, (2,))
    outside = sharded.client.get(f"{sharded.path}/replay?shard=4")
    assert_problem(outside, 422, 20030, "shard")
    position = sharded.client.get(f"{sharded.path}/subjects?consistency=any")
    info = sharded.client.get(sharded.path).json()
    assert position.headers["nats-last-sequence"] == str(info["state"]["last_seq"])


def test_archive_holds_all_shards(sharded: Stream) -> None:
    sharded.fill(30)
    shard = shard_number("0")
    assert sharded.client.delete(f"{sharded.path}/messages/1?shard={shard}").status_code == 204
    found, info = pages(sharded), sharded.client.get(sharded.path).json()
    archive = sharded.client.get(f"{sharded.path}/snapshot").content
    sharded.client.delete(sharded.path)
    kind = {"content-type": "application/vnd.contrail.snapshot"}
    cut = sharded.client.put(f"{sharded.path}/restore", content=archive[:-9], headers=kind)
    assert_problem(cut, 422, 20008)
    restored = sharded.client.put(f"{sharded.path}/restore", content=archive, headers=kind)
    assert restored.status_code == 201, restored.text
    for key in ("config", "state", "shards"):
        assert restored.json()[key] == info[key]
    assert pages(sharded) == found


@pytest.mark.parametrize("form", [JSON, MSGPACK])
def test_sockets_are_answered_with_the_shard(
    server: ServerProcess, sharded: Stream, form: str
) -> None:
    data: Any = b"x" if form == MSGPACK else "x"
    with Talk(server.url, form) as talk:
        ack = talk.ask("pub", subject=sharded.subject("k"), data=data)
        assert ack["shard"] == shard_number("k")
        messages: list[Any] = [
            {"subject": sharded.subject(f"k{at}"), "data": data} for at in range(8)
        ]
        acks = talk.ask("pub_batch", stream=sharded.name, messages=messages)
    assert [one["shard"] for one in acks["results"]] == [shard_number(f"k{at}") for at in range(8)]


def test_packed_batch_is_split_as_any_other(sharded: Stream) -> None:
    items = [[sharded.subject(f"k{at}"), None, b"%d" % at] for at in range(30)]
    answer = sharded.client.post(
        f"{sharded.path}/messages",
        content=msgspec.msgpack.encode([1, items]),
        headers={"content-type": "application/vnd.msgpack"},
    )
    assert answer.status_code == 201, answer.text
    assert [one["shard"] for one in answer.json()["results"]] == [
        shard_number(f"k{at}") for at in range(30)
    ]


def test_columns_are_split_and_answered_in_runs_of_shards(sharded: Stream) -> None:
    numbers = struct.pack("<31I", *range(31))
    subjects = [sharded.subject(f"k{at}") for at in range(30)]
    kind = "application/vnd.msgpack"
    answer = sharded.client.post(
        f"{sharded.path}/messages",
        content=msgspec.msgpack.encode([2, [subjects, numbers[:-4], numbers, b"x" * 30, None]]),
        headers={"content-type": kind, "accept": kind},
    )
    assert answer.status_code == 201, answer.text
    runs = msgspec.msgpack.decode(answer.content)["runs"]
    found = [(run["shard"], run["first_seq"] + at) for run in runs for at in range(run["count"])]
    assert [shard for shard, _ in found] == [shard_number(f"k{at}") for at in range(30)]
    assert len(runs) < len(found) == len(set(found))


def test_messages_are_erased_by_subject_from_all_shards_and_by_sequence_from_one(
    sharded: Stream,
) -> None:
    sharded.fill(20)
    erase = f"{sharded.path}/erase"
    assert_problem(sharded.client.post(erase, json={"seqs": [1]}), 422, 20030, "shard")
    by_seq = {"seqs": [1], "shard": shard_number("0")}
    answer = sharded.client.post(f"{erase}?wait=60s", json=by_seq)
    assert (answer.status_code, answer.json()["messages"]) == (200, 1)
    answer = sharded.client.post(f"{erase}?wait=60s", json={"subject": f"{sharded.prefix}.>"})
    assert (answer.status_code, answer.json()["messages"]) == (200, 19)
    assert sharded.client.get(sharded.path).json()["state"]["messages"] == 0
