"""Streams in memory: as all others, but for what their acks mean and what a restart leaves."""

import json
from pathlib import Path
from typing import Any

import pytest

from contrail_common import errors
from tests.contract.conftest import Stream, assert_problem
from tests.contract.talk import Talk
from tests.support.servers import ServerProcess, SplitServers

ARCHIVE = {"content-type": "application/vnd.contrail.snapshot"}


@pytest.fixture
def memory(unused: Stream) -> Stream:
    """A stream in memory of the test's own."""
    answer = unused.configure(storage="memory")
    assert (answer.status_code, answer.headers["durability"]) == (201, "memory")
    assert answer.json()["config"]["storage"] == "memory"
    return unused


def test_storage_is_shown_and_cannot_be_changed(memory: Stream) -> None:
    answer = memory.client.get(memory.path)
    assert (answer.headers["durability"], answer.json()["config"]["storage"]) == (
        "memory",
        "memory",
    )
    assert_problem(memory.configure(storage="file"), 409, 10052, "/storage")
    assert_problem(memory.configure(), 409, 10052, "/storage")
    again = memory.configure(storage="memory", max_msgs=5)
    assert (again.status_code, again.headers["durability"]) == (200, "memory")
    memory.client.delete(memory.path)


def test_stream_in_files_cannot_move_to_memory(stream: Stream) -> None:
    assert stream.client.get(stream.path).headers["durability"] == "fsync"
    assert_problem(stream.configure(storage="memory"), 409, 10052, "/storage")


def test_every_way_to_publish_says_memory(
    server: ServerProcess | SplitServers, memory: Stream
) -> None:
    single = memory.publish(b"1")
    assert (single.status_code, single.headers["durability"]) == (201, "memory")
    items = [{"subject": memory.subject(), "data": "2"}]
    batch = memory.client.post(f"{memory.path}/messages", json={"messages": items})
    assert (batch.status_code, batch.headers["durability"]) == (201, "memory")
    lines = memory.client.post(
        f"{memory.path}/messages",
        content=json.dumps(items[0]),
        headers={"content-type": "application/x-ndjson"},
    )
    assert (lines.status_code, lines.headers["durability"]) == (201, "memory")
    with Talk(server.url) as talk:
        assert talk.ask("pub", subject=memory.subject(), data="4")["durability"] == "memory"
    assert memory.state()["last_seq"] == 4


def test_messages_are_read_consumed_replayed_and_removed_as_of_files(memory: Stream) -> None:
    memory.fill(300)
    consumer = memory.consumer(filter_subject=memory.subject("1"))
    deliveries = memory.next(consumer, batch=60)
    assert [one["data"] for one in deliveries[:2]] == ["1", "6"]
    assert len(deliveries) == 60
    memory.ack(consumer, *[one["ack_token"] for one in deliveries])
    assert memory.next(consumer) == []
    found = memory.client.get(f"{memory.path}/last", params={"subject": memory.subject("4")})
    assert found.json()["messages"][0]["data"] == "299"
    replayed = memory.client.get(
        f"{memory.path}/replay", headers={"accept": "application/x-ndjson"}
    )
    assert json.loads(replayed.text.splitlines()[-1]) == {"end": True, "messages": 300}
    again = memory.publish(b"x", nats_msg_id="one"), memory.publish(b"x", nats_msg_id="one")
    assert [answer.status_code for answer in again] == [201, 200]
    answer = memory.client.post(f"{memory.path}/purge", json={"keep": 10})
    assert answer.json() == {"purged": 291}
    assert memory.state()["messages"] == 10
    answer = memory.client.post(f"{memory.path}/erase?wait=60s", json={"seqs": [295]})
    assert answer.json()["status"] == "done"


def test_archive_restores_as_a_stream_in_memory(memory: Stream) -> None:
    memory.fill(20)
    archive = memory.client.get(f"{memory.path}/snapshot").content
    memory.client.delete(memory.path)
    answer = memory.client.put(f"{memory.path}/restore", content=archive, headers=ARCHIVE)
    assert answer.status_code == 201, answer.text
    assert answer.headers["durability"] == "memory"
    assert memory.state()["messages"] == 20


def _made(server: ServerProcess | SplitServers) -> dict[str, Any]:
    with server.client() as client:
        stream = Stream(client, "KEPT", "kept")
        assert stream.configure(storage="memory", first_seq=7).status_code == 201
        stream.fill(10)
        consumer = stream.consumer()
        (delivery,) = stream.next(consumer)
        etag = client.get(stream.path).headers["etag"]
        return {"token": delivery["ack_token"], "etag": etag}


def _is_recreated(server: ServerProcess | SplitServers, old: dict[str, Any]) -> None:
    with server.client() as client:
        stream = Stream(client, "KEPT", "kept")
        answer = client.get(stream.path)
        assert answer.json()["config"]["first_seq"] == 7
        assert answer.json()["state"]["messages"] == 0
        assert answer.headers["etag"] != old["etag"]
        refused = client.delete(stream.path, headers={"if-match": old["etag"]})
        assert_problem(refused, 412)
        assert client.get(f"{stream.path}/consumers/c").status_code == 404
        (result,) = stream.ack(stream.consumer(), old["token"])
        assert result["problem"]["code"] == errors.TOKEN_STALE.code
        assert stream.publish().json()["seq"] == 7


@pytest.mark.long
@pytest.mark.parametrize("end", ["stop", "kill"])
def test_restart_keeps_the_stream_and_loses_what_it_held(
    own_server: ServerProcess, end: str
) -> None:
    old = _made(own_server)
    getattr(own_server, end)()
    own_server.start()
    _is_recreated(own_server, old)


@pytest.mark.long
def test_publish_beyond_the_bound_is_507_until_there_is_room(tmp_path: Path) -> None:
    with (
        ServerProcess(tmp_path / "data", memory_max_bytes=300_000) as server,
        server.client() as client,
    ):
        stream = Stream(client, "M", "m")
        assert stream.configure(storage="memory").status_code == 201
        answers = [stream.publish(b"x" * 50_000) for _ in range(8)]
        statuses = [answer.status_code for answer in answers]
        assert statuses == [201] * 5 + [507] * 3
        problem = assert_problem(answers[-1], 507, 10028)
        assert (problem["applied"], problem["retryable"]) == (False, True)
        figures = client.get("/metrics").text
        assert "contrail_memory_max_bytes 300000.0" in figures
        assert client.post(f"{stream.path}/purge").json() == {"purged": 5}
        assert stream.publish(b"x" * 50_000).status_code == 201
