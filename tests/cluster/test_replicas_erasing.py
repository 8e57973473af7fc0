"""A stream on three nodes is erased while nodes are killed: in the end no file has the bytes."""

import time
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.support.folders import files_with
from tests.support.servers import Process, SplitServers

NODES: Final = 3
MESSAGES: Final = 40
PATIENCE_S: Final = 60.0
STREAM: Final = "/v1/streams/S"

pytestmark = pytest.mark.cluster


def secret(seq: int) -> str:
    return f"payload-text-{seq:04}"


def publish(client: httpx.Client, first: int, count: int) -> None:
    """Publish messages with ids; a leader that has just been killed may have to be replaced."""
    deadline = time.monotonic() + PATIENCE_S
    for seq in range(first, first + count):
        content, headers = secret(seq) + "." * 50, {"Nats-Msg-Id": f"{seq}"}
        while True:
            answer = client.post("/v1/subjects/S.a/messages", content=content, headers=headers)
            if answer.status_code in (200, 201):
                break
            assert answer.status_code in (503, 504), answer.text
            assert time.monotonic() < deadline


def content_of(subject: str) -> str:
    return f"sealed-content-of-{subject}"


def put(client: httpx.Client, subject: str) -> None:
    answer = client.post(f"/v1/subjects/{subject}/messages", content=content_of(subject))
    assert answer.status_code == 201, answer.text


def receipt_of(client: httpx.Client, receipt: dict[str, Any], wait: str = "0s") -> dict[str, Any]:
    """The receipt as it is now; a node that has just been killed may have to be replaced first."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        answer = client.get(f"/v1/erasures/{receipt['id']}", params={"wait": wait})
        if answer.status_code in (200, 202):
            found: dict[str, Any] = answer.json()
            return found
        assert answer.status_code == 503, answer.text
        assert time.monotonic() < deadline


def until_left(client: httpx.Client, receipt: dict[str, Any], nodes: list[str]) -> None:
    """Wait until only ``nodes`` have not reported."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        replicas = receipt_of(client, receipt)["replicas"]
        if [one["node"] for one in replicas if one["status"] == "pending"] == nodes:
            return
        assert time.monotonic() < deadline, replicas


def test_erasure_is_done_when_killed_nodes_are_back_and_hold_nothing(tmp_path: Path) -> None:
    with SplitServers(tmp_path, NODES) as servers, servers.client() as client:
        nodes = {one.settings["node"]: one for one in servers.storages}

        def folders() -> list[Path]:
            return [tmp_path / name for name in nodes]

        config = {"subjects": ["S.>"], "num_replicas": NODES}
        answer = client.put(STREAM, json=config)
        assert answer.status_code == 201, answer.text
        publish(client, 1, MESSAGES)
        keyed = {"subjects": ["K.>"], "num_replicas": NODES, "erasure": "subject_key"}
        answer = client.put("/v1/streams/K", json=keyed)
        assert answer.status_code == 201, answer.text
        for subject in ("K.a", "K.b"):
            put(client, subject)
        leader = client.get(STREAM).json()["cluster"]["leader"]
        absent: Process = next(one for name, one in nodes.items() if name != leader)
        name: str = absent.settings["node"]

        # A follower is away: it keeps the bytes, and the receipt says so.
        absent.kill()
        answer = client.post(f"{STREAM}/erase", json={"seqs": [7, 9]})
        assert answer.status_code == 202, answer.text
        first = answer.json()
        assert [one["node"] for one in first["replicas"]] == sorted(nodes)
        until_left(client, first, [name])
        erased = [secret(7).encode(), secret(9).encode()]
        for node in nodes:
            assert bool(files_with(tmp_path / node, erased)) == (node == name)
        answer = client.post("/v1/streams/K/erase", json={"subject": "K.a"})
        assert (answer.status_code, answer.json()["shredded"]) == (202, True), answer.text
        shredded = answer.json()
        until_left(client, shredded, [name])
        publish(client, MESSAGES + 1, 5)
        absent.start()
        assert receipt_of(client, shredded, f"{PATIENCE_S}s")["status"] == "done"
        assert receipt_of(client, first, f"{PATIENCE_S}s")["status"] == "done"
        assert [files_with(folder, erased) for folder in folders()] == [{}] * NODES

        # The leader is killed between the deletion and its report.
        answer = client.post(f"{STREAM}/erase", json={"seqs": [11]})
        second = answer.json()
        nodes[leader].kill()
        publish(client, MESSAGES + 6, 5)
        nodes[leader].start()
        assert receipt_of(client, second, f"{PATIENCE_S}s")["status"] == "done"
        erased.append(secret(11).encode())
        assert [files_with(folder, erased) for folder in folders()] == [{}] * NODES
        assert all(files_with(folder, [secret(8).encode()]) for folder in folders())
        kept = client.get(f"{STREAM}/messages/8")
        assert kept.status_code == 200
        # The next leader opens what is left of the other stream, and gives the subject a new key.
        put(client, "K.a")
        assert client.get("/v1/streams/K/messages/1").status_code == 404
        for seq, subject in ((2, "K.b"), (3, "K.a")):
            opened = client.get(f"/v1/streams/K/messages/{seq}", headers={"Accept": "*/*"})
            assert content_of(subject) in opened.text
        sealed = [content_of(subject).encode() for subject in ("K.a", "K.b")]
        assert [files_with(folder, sealed) for folder in folders()] == [{}] * NODES
