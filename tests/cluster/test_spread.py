"""A stream whose shards are led by three nodes, under load: what it keeps when a node is lost."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import httpx
import pytest

from tests.support.servers import SplitServers

NODES: Final = 3
SHARDS: Final = 3
BATCH: Final = 20
PATIENCE_S: Final = 180.0

pytestmark = pytest.mark.cluster


class Clients:
    """A publisher of batches over all shards, and a consumer that acknowledges with `sync`."""

    def __init__(self, servers: SplitServers) -> None:
        self.acked: dict[str, tuple[int, int]] = {}
        """By message id: shard and sequence."""
        self.settled: set[tuple[int, int]] = set()
        """Shard and sequence of messages whose acknowledgement was confirmed."""
        self.again: list[tuple[int, int]] = []
        """Those that were delivered after that."""
        self.errors: list[BaseException] = []
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._guard, args=(servers, work))
            for work in (self._publish, self._consume)
        ]
        for one in self._threads:
            one.start()

    def finish(self) -> None:
        self._stop.set()
        for one in self._threads:
            one.join(PATIENCE_S)
            assert not one.is_alive()

    def _guard(self, servers: SplitServers, work: Callable[[httpx.Client], None]) -> None:
        try:
            with servers.client() as client:
                work(client)
        except BaseException as error:
            self.errors.append(error)

    def _publish(self, client: httpx.Client) -> None:
        number = 0
        while not self._stop.is_set():
            batch = [
                {"subject": f"s.{at % 97}", "data": str(at), "msg_id": f"m{at}"}
                for at in range(number, number + BATCH)
            ]
            answer = client.post("/v1/streams/S/messages", json={"messages": batch})
            if answer.status_code >= 500:
                continue  # it is safe to publish them again: they have ids
            assert answer.status_code < 300, answer.text
            results = answer.json()["results"]
            if any("problem" in one for one in results):
                continue
            for at, one in enumerate(results, number):
                self.acked[f"m{at}"] = one["shard"], one["seq"]
            number += BATCH

    def _consume(self, client: httpx.Client) -> None:
        path = "/v1/streams/S/consumers/c"
        while not (self._stop.is_set() and self.settled >= set(self.acked.values())):
            pulled = client.post(f"{path}/next", json={"batch": 50, "expires": "1s"})
            if pulled.status_code != 200:
                continue
            found = pulled.json()["messages"]
            keys = [(one["shard"], one["seq"]) for one in found]
            self.again += [key for key in keys if key in self.settled]
            acks = [{"token": one["ack_token"], "kind": "ack"} for one in found]
            answer = client.post(f"{path}/ack", json={"acks": acks, "sync": True})
            if answer.status_code == 200:
                results = answer.json()["results"]
                self.settled |= {key for key, one in zip(keys, results, strict=True) if one["ok"]}


def wait_until(clients: Clients, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert not clients.errors, clients.errors
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_nothing_is_lost_or_repeated_when_a_node_that_leads_a_shard_is_killed(
    tmp_path: Path,
) -> None:
    with SplitServers(tmp_path, NODES) as servers, servers.client() as client:
        config = {"name": "S", "subjects": ["s.*"], "shards": SHARDS, "num_replicas": NODES}
        assert client.post("/v1/streams", json=config).status_code == 201
        body = {"name": "c", "ack_wait": "2s"}
        assert client.post("/v1/streams/S/consumers", json=body).status_code == 201
        clients = Clients(servers)
        try:
            wait_until(clients, lambda: len(clients.settled) > 200)
            # The first shard's leader serves the stream.
            for shard in (0, 1):
                name = client.get("/v1/streams/S").json()["shards"][shard]["leader"]
                node = next(one for one in servers.storages if one.settings["node"] == name)
                node.kill()
                wanted = len(clients.settled) + 200
                wait_until(clients, lambda wanted=wanted: len(clients.settled) > wanted)
                node.start()
        finally:
            clients.finish()
        assert not clients.errors
        assert not clients.again
        assert clients.settled >= set(clients.acked.values())
        stored: dict[tuple[int, int], str] = {}
        for shard in range(SHARDS):
            seqs: list[int] = []
            at = 1
            while True:
                path = f"/v1/streams/S/messages?shard={shard}&from_seq={at}&limit=1000"
                found = client.get(path).json()["messages"]
                if not found:
                    break
                for one in found:
                    seqs.append(one["seq"])
                    stored[shard, one["seq"]] = one["headers"]["Nats-Msg-Id"][0]
                at = seqs[-1] + 1
            assert seqs == list(range(1, len(seqs) + 1))
        assert len(set(stored.values())) == len(stored)
        assert {key: stored[key] for key in clients.acked.values()} == {
            key: name for name, key in clients.acked.items()
        }
