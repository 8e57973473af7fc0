"""A node that was away for longer than the log reaches is as good as the others afterwards."""

import time
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from contrail_storage.disk.node_file import LOG_NAME
from tests.support.folders import size_of
from tests.support.servers import Process, SplitServers

NODES: Final = 3
STREAM: Final = "/v1/streams/S"
BEFORE: Final = 20
AFTER: Final = 20
LARGE: Final = 900_000
KEPT_MAX: Final = 6 << 20
PATIENCE_S: Final = 180.0

pytestmark = pytest.mark.cluster


def publish(client: httpx.Client, first: int, count: int, size: int) -> None:
    for seq in range(first, first + count):
        deadline = time.monotonic() + PATIENCE_S
        while True:
            content = f"{seq}." + "x" * size
            headers = {"Nats-Msg-Id": f"{seq}"}
            answer = client.post("/v1/subjects/S.a/messages", content=content, headers=headers)
            if answer.status_code in (200, 201):
                break
            assert answer.status_code in (503, 504), answer.text
            assert time.monotonic() < deadline


def info_of(client: httpx.Client) -> dict[str, Any]:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        answer = client.get(STREAM)
        if answer.status_code == 200:
            info: dict[str, Any] = answer.json()
            return info
        assert answer.status_code in (503, 504), answer.text
        assert time.monotonic() < deadline


def until_current(client: httpx.Client, name: str) -> None:
    """Wait until a member that does not lead has everything."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        replicas = info_of(client)["cluster"]["replicas"]
        known = next((one for one in replicas if one["name"] == name), None)
        if known is not None and known["current"] and known["lag"] == 0:
            return
        assert time.monotonic() < deadline, replicas


def until_forgotten(client: httpx.Client, logs: list[Path]) -> None:
    """Wait until a checkpoint has cut the logs of some nodes, since only that drops segments."""
    deadline = time.monotonic() + PATIENCE_S
    while any(size_of(log) > KEPT_MAX for log in logs):
        info_of(client)
        assert time.monotonic() < deadline


def until_installed(client: httpx.Client, log: Path) -> None:
    """Wait until a node says that it has got the state of a group."""
    deadline = time.monotonic() + PATIENCE_S
    while "state_installed" not in log.read_text():
        info_of(client)
        assert time.monotonic() < deadline


def check_all(client: httpx.Client, count: int) -> None:
    state = info_of(client)["state"]
    assert (state["messages"], state["last_seq"]) == (count, count)
    for seq in range(1, count + 1, 7):
        answer = client.get(f"{STREAM}/messages/{seq}")
        assert answer.status_code == 200, answer.text
        assert answer.text.startswith(f"{seq}.")


def test_node_behind_the_log_of_the_others_can_be_the_last_to_lead(tmp_path: Path) -> None:
    servers = SplitServers(tmp_path, NODES)
    for node in servers.storages:
        node.settings["log_tail_bytes"] = 1 << 20
    with servers, servers.client() as client:
        nodes: dict[str, Process] = {one.settings["node"]: one for one in servers.storages}
        config = {"subjects": ["S.>"], "num_replicas": NODES}
        answer = client.put(STREAM, json=config)
        assert answer.status_code == 201, answer.text
        publish(client, 1, BEFORE, 100)
        first = info_of(client)["cluster"]["leader"]
        behind, other = (name for name in nodes if name != first)
        nodes[behind].kill()
        # More than the others keep in memory, and on disk.
        publish(client, BEFORE + 1, AFTER, LARGE)
        until_forgotten(client, [tmp_path / name / LOG_NAME for name in (first, other)])
        nodes[behind].start()
        until_installed(client, tmp_path / f"{behind}.log")
        until_current(client, behind)
        total = BEFORE + AFTER
        nodes[first].kill()
        publish(client, total + 1, 20, 100)
        check_all(client, total + 20)
        nodes[first].start()
        until_current(client, first if info_of(client)["cluster"]["leader"] != first else behind)
        nodes[other].kill()
        publish(client, total + 21, 20, 100)
        check_all(client, total + 40)
