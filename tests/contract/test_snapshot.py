"""Archives of streams: taken while the stream goes on, restored whole or not at all."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from contrail_client import ApiProblem, AsyncContrail, Contrail
from tests.contract.conftest import Stream, assert_problem
from tests.support.command import run_contrail
from tests.support.servers import ServerProcess

pytestmark = pytest.mark.split

TYPE = {"content-type": "application/vnd.contrail.snapshot"}


def snapshot(stream: Stream, query: str = "") -> bytes:
    answer = stream.client.get(f"{stream.path}/snapshot{query}")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == TYPE["content-type"]
    return answer.content


def restore(client: httpx.Client, name: str, content: bytes | Iterator[bytes]) -> httpx.Response:
    return client.put(f"/v1/streams/{name}/restore", content=content, headers=TYPE)


def messages(stream: Stream, name: str) -> list[Any]:
    answer = stream.client.get(f"/v1/streams/{name}/messages", params={"limit": 1000})
    found: list[Any] = answer.json()["messages"]
    return [{**one, "stream": ""} for one in found]


def test_stream_comes_back_as_it_was_under_another_name(stream: Stream) -> None:
    stream.fill(700)
    stream.publish(b"with id", Nats_Msg_Id="once", X_Own="v")
    stream.client.delete(f"{stream.path}/messages/3")
    consumer = stream.consumer()
    [first, second, *_] = stream.next(consumer, batch=10)
    stream.ack(consumer, first["ack_token"])
    before, kept = stream.state(), messages(stream, stream.name)
    state = stream.client.get(consumer).json()
    plan = stream.client.get(f"{stream.path}/replay/plan").json()
    data = snapshot(stream)
    stream.client.delete(stream.path)
    name = f"{stream.name}-copy"
    answer = restore(stream.client, name, data)
    assert answer.status_code == 201, answer.text
    assert answer.headers["location"] == f"/v1/streams/{name}"
    assert (answer.json()["config"]["name"], answer.json()["state"]) == (name, before)
    assert messages(stream, name) == kept
    again = stream.publish(b"with id", Nats_Msg_Id="once")
    assert (again.json()["seq"], again.json()["duplicate"]) == (701, True)
    other = stream.client.get(f"/v1/streams/{name}/consumers/c").json()
    for field in ("delivered", "ack_floor", "num_ack_pending", "num_pending", "config"):
        assert other[field] == state[field]
    stale = stream.client.get(
        f"/v1/streams/{name}/replay", params={"incarnation": plan["incarnation"]}
    )
    assert_problem(stale, 409, 20006)
    follows = stream.publish(b"next")
    assert follows.json()["seq"] == 702
    assert second["seq"] == 2
    stream.client.delete(f"/v1/streams/{name}")


def test_consumers_are_left_out_when_asked(stream: Stream) -> None:
    stream.fill(5)
    stream.consumer()
    data = snapshot(stream, "?consumers=false")
    stream.client.delete(stream.path)
    answer = restore(stream.client, stream.name, data)
    assert answer.json()["state"]["consumer_count"] == 0


def test_name_and_subjects_that_are_taken_are_refused(stream: Stream) -> None:
    stream.fill(5)
    data = snapshot(stream)
    assert_problem(restore(stream.client, stream.name, data), 409, 10130)
    problem = assert_problem(restore(stream.client, f"{stream.name}-2", data), 409, 10065)
    assert problem["applied"] is False
    assert stream.state()["messages"] == 5


@pytest.mark.parametrize("given", [{}, {"content-type": "application/octet-stream"}])
def test_archive_may_travel_as_plain_bytes(stream: Stream, given: dict[str, str]) -> None:
    stream.fill(3)
    target = f"{stream.path}/snapshot"
    archive = stream.client.get(target, headers={"accept": "application/octet-stream"})
    assert archive.headers["content-type"] == "application/octet-stream"
    stream.client.delete(stream.path)
    answer = stream.client.put(f"{stream.path}/restore", content=archive.content, headers=given)
    assert answer.status_code == 201, answer.text
    assert stream.state()["messages"] == 3


def test_archive_of_another_type_is_refused(unused: Stream) -> None:
    answer = unused.client.put(
        f"{unused.path}/restore", content=b"x", headers={"content-type": "text/plain"}
    )
    assert_problem(answer, 415, 20033)


def test_damaged_archive_restores_nothing(stream: Stream) -> None:
    stream.fill(300)
    data = snapshot(stream)
    stream.client.delete(stream.path)
    places = (0, 9, 20, len(data) // 2, len(data) - 1)
    damaged = [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in places]
    for content in (*damaged, data[:-1], data[: len(data) // 2], b"", data + b"x"):
        problem = assert_problem(restore(stream.client, stream.name, content), 422, 20008)
        assert problem["detail"].startswith(("the archive", "this is not"))
        assert_problem(stream.client.get(stream.path), 404, 10059)
    assert restore(stream.client, stream.name, data).status_code == 201


def test_other_media_types_and_names_are_refused(stream: Stream) -> None:
    target = f"/v1/streams/{stream.name}-2/restore"
    assert_problem(stream.client.put(target, json={}), 415, 20033)
    assert_problem(restore(stream.client, "a.b", b"x"), 422, 10052)
    assert_problem(stream.client.get("/v1/streams/nobody/snapshot"), 404, 10059)
    accept = {"accept": "application/json"}
    assert_problem(stream.client.get(f"{stream.path}/snapshot", headers=accept), 406)


def test_restore_that_is_broken_off_leaves_the_name_free(stream: Stream) -> None:
    stream.fill(1000)
    data = snapshot(stream)
    stream.client.delete(stream.path)

    def broken() -> Iterator[bytes]:
        yield data[: len(data) // 2]
        raise ConnectionError("the client leaves")

    with pytest.raises(ConnectionError):
        restore(stream.client, stream.name, broken())
    # The server undoes it as soon as it sees the end of the connection.
    answer = restore(stream.client, stream.name, data)
    while answer.status_code == 409:
        answer = restore(stream.client, stream.name, data)
    assert answer.json()["state"]["messages"] == 1000


def test_snapshots_under_load_hold_a_prefix(stream: Stream) -> None:
    done = threading.Event()

    def publish() -> None:
        while not done.is_set():
            stream.fill(100)

    publisher = threading.Thread(target=publish)
    publisher.start()
    try:
        archives = [snapshot(stream) for _ in range(5)]
    finally:
        done.set()
        publisher.join()
    kept = stream.client.get(f"{stream.path}/replay", headers={"accept": "application/x-ndjson"})
    payloads = [json.loads(line).get("data") for line in kept.text.splitlines()][:-1]
    stream.client.delete(stream.path)
    last = 0
    for data in archives:
        state = restore(stream.client, stream.name, data).json()["state"]
        assert state["messages"] == state["last_seq"] >= last
        last = state["last_seq"]
        found = stream.client.get(
            f"{stream.path}/replay", headers={"accept": "application/x-ndjson"}
        )
        restored = [json.loads(line).get("data") for line in found.text.splitlines()][:-1]
        assert restored == payloads[:last]
        stream.client.delete(stream.path)


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_clients_and_command_take_and_restore(
    unused: Stream, tmp_path: Path, compression: str
) -> None:
    unused.configure(compression=compression)
    unused.fill(1000)
    url, name = str(unused.client.base_url).rstrip("/"), unused.name
    with Contrail(url) as client:
        data = b"".join(client.snapshot(name))
        with pytest.raises(ApiProblem, match="already in use"):
            client.restore(name, [data])
        client.delete_stream(name)
        assert client.restore(name, [data[:99], data[99:]]).state.messages == 1000

    async def once_more() -> int:
        async with AsyncContrail(url) as client:
            chunks = [chunk async for chunk in client.snapshot(name, consumers=False)]
            await client.delete_stream(name)

            async def again() -> Any:
                for chunk in chunks:
                    yield chunk

            return (await client.restore(name, again())).state.messages

    assert asyncio.run(once_more()) == 1000
    file = tmp_path / "archive"
    env = {"CONTRAIL_URL": url, "CONTRAIL_TOKEN": None, "CONTRAIL_CONFIG": None}

    def run(*arguments: str) -> Any:
        result = run_contrail("stream", *arguments, env=env)
        assert result.exit_code == 0, (result.output, result.stderr)
        return result.stdout

    assert json.loads(run("snapshot", name, str(file), "--json"))["bytes"] == file.stat().st_size
    assert [one.name for one in tmp_path.iterdir()] == ["archive"]
    run("rm", name, "--yes")
    assert "1,000" in run("restore", name, str(file))
    unused.client.delete(unused.path)


@pytest.mark.long
def test_memory_grows_with_neither_snapshot_nor_restore(own_server: ServerProcess) -> None:
    payload = "x" * 10_000
    batch = {"messages": [{"subject": "big.a", "data": payload} for _ in range(90)]}
    most = 0

    def watched(chunks: Iterator[bytes]) -> Iterator[bytes]:
        nonlocal most
        for chunk in chunks:
            yield chunk
            most = max(most, own_server.rss_bytes())

    def there_and_back(client: httpx.Client) -> int:
        nonlocal most
        most = 0
        with client.stream("GET", "/v1/streams/BIG/snapshot") as answer:
            archive = list(watched(answer.iter_raw()))
        assert sum(map(len, archive)) > 100_000_000
        client.delete("/v1/streams/BIG")
        answer = restore(client, "BIG", watched(iter(archive)))
        assert answer.json()["state"]["messages"] == 90 * 115
        return most

    with own_server.client() as client:
        client.put("/v1/streams/BIG", json={"subjects": ["big.>"]})
        for _ in range(115):
            assert client.post("/v1/streams/BIG/messages", json=batch).status_code == 201
        # Write buffers and caches have bounds, and have their fill by now.
        filled = own_server.rss_bytes()
        first = there_and_back(client)
        assert there_and_back(client) < first + (50 << 20)
        assert most < filled + (90 << 20)
