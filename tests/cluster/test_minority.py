"""What one node of three answers while the other two stand still."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from contrail_client import Bounds, Contrail
from tests.support.servers import Process, SplitServers

STREAM = "/v1/streams/MINORITY"
SUBJECT = "minority.a"
NOT_READY = 20_052
META = 0

pytestmark = pytest.mark.cluster


def state(servers: SplitServers) -> dict[str, Any]:
    with servers.client() as client:
        found: dict[str, Any] = client.get("/v1/cluster").json()
    return found


def wait_until(servers: SplitServers, status: str) -> None:
    while state(servers)["status"] != status:
        pass


def wait_for_all(servers: SplitServers, number: int) -> None:
    """Wait until all members of a group have applied the same entries."""
    while True:
        groups = {group["number"]: group for group in state(servers)["groups"]}
        members = groups[number]["members"]
        if len({one.get("applied") for one in members}) == 1:
            return


def stand_still(nodes: list[Process]) -> None:
    for node in nodes:
        os.kill(node.pid, signal.SIGSTOP)


def staleness_ms(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    return int(answer.headers["contrail-staleness"])


def all_reads_of_a_copy(url: str) -> None:
    """Read the only message in all ways that a client has."""
    with Contrail(url) as client:
        assert (client.get_stream("MINORITY", consistency="any").staleness_ms or 0) > 0
        assert client.get_message("MINORITY", 1, consistency="any").payload == b"one"
        found = client.read_range("MINORITY", consistency="any")
        assert (found.staleness_ms or 0) > 0
        for messages in (
            found.messages,
            client.last_messages("MINORITY", consistency="any"),
            client.replay("MINORITY", Bounds(consistency="any")),
        ):
            assert [one.payload for one in messages] == [b"one"]
        subjects = client.list_subjects("MINORITY", consistency="any")
        assert [one.subject for one in subjects] == [SUBJECT]
        assert list(client.list_deleted("MINORITY", consistency="any")) == []
    command = ["stream", "get", "MINORITY", "1", "--raw", "--consistency", "any", "--server", url]
    shown = subprocess.run(
        [sys.executable, "-m", "contrail_client", *command], capture_output=True, check=True
    )
    assert shown.stdout == b"one\n"


def test_minority_serves_copies_and_refuses_the_rest_in_time(tmp_path: Path) -> None:
    with SplitServers(tmp_path, nodes=3) as servers, servers.client() as client:
        wait_until(servers, "healthy")
        body = {"subjects": ["minority.>"], "num_replicas": 3}
        info = client.put(STREAM, json=body).json()
        client.post(f"/v1/subjects/{SUBJECT}/messages", content=b"one").raise_for_status()
        leader = info["cluster"]["leader"]
        replicas = {one["name"] for one in info["cluster"]["replicas"]}
        assert replicas == {"n1", "n2", "n3"} - {leader}
        still = [one for one in servers.storages if one.settings["node"] != min(replicas)]
        # Until all copies have it, and the one that goes on has heard of that.
        while not all(one["current"] for one in client.get(STREAM).json()["cluster"]["replicas"]):
            pass
        wait_for_all(servers, META)
        stand_still(still)
        try:
            url = f"{STREAM}/messages/1"
            any_copy = {"consistency": "any"}
            first = staleness_ms(client.get(url, params=any_copy))
            later = client.get(url, params=any_copy)
            assert later.content == b"one"
            while staleness_ms(client.get(url, params=any_copy)) <= first:
                pass
            all_reads_of_a_copy(servers.url)
            # Refused once the time for finding a leader is over: in a sentence, without an effect.
            with ThreadPoolExecutor() as threads:
                read = threads.submit(client.get, url)
                post = threads.submit(client.post, f"/v1/subjects/{SUBJECT}/messages", content=b"2")
                for refused in (read.result(), post.result()):
                    assert (refused.status_code, refused.json()["code"]) == (503, NOT_READY)
                    assert refused.json()["detail"] == "no node leads the stream"
                    assert refused.json()["applied"] is False
            shown = state(servers)
            assert shown["status"] == "unavailable"
            assert "the meta group has no leader" in str(shown["missing"])
        finally:
            for node in still:
                os.kill(node.pid, signal.SIGCONT)
        wait_until(servers, "healthy")
        assert client.get(url).content == b"one"
        # Until a node has heard enough of the others to say how old its copy is.
        while (copy := client.get(url, params=any_copy)).status_code == 503:
            pass
        assert staleness_ms(copy) < 10_000
