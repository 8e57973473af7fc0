"""Three storage nodes on disks and a network that fail on demand, two apis and two gateways."""

import contextlib
import os
import random
import signal
import time
from pathlib import Path
from typing import Any, Final, Self

import httpx

from tests.chaos.disks import Disk, compiled
from tests.chaos.network import HOST, Network
from tests.support.servers import Process, SplitServers

NODES: Final = 3
_READY_S: Final = 120.0


class ChaosCluster:
    """The processes of a cluster, and the means to disturb them."""

    def __init__(self, folder: Path, chance: random.Random, nodes: int = NODES) -> None:
        self.servers = SplitServers(folder, nodes)
        self.chance = chance
        self.nodes = {str(one.settings["node"]): one for one in self.servers.storages}
        self.disks: dict[str, Disk] = {}
        listed = self.servers.storage.settings["peers"].split(",")
        addresses = {
            name: (HOST, int(address.rpartition(":")[2]))
            for name, address in (one.split("=") for one in listed)
        }
        self.network = Network(addresses)
        library = compiled(folder)
        for name, node in self.nodes.items():
            node.settings["peers"] = self.network.addresses_for(name)
            node.settings["peer_port"] = addresses[name][1]
            if library is not None:
                self.disks[name] = Disk(Path(node.settings["data_dir"]), library)
                vars(node)["program"] = self.disks[name].program

    def __enter__(self) -> Self:
        self.servers.start()
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.nodes:
            with contextlib.suppress(ProcessLookupError, AssertionError):
                self.resume(name)
        self.servers.__exit__()
        self.network.close()

    @property
    def urls(self) -> list[str]:
        """The addresses of all edges."""
        return [edge.url for edge in self.servers.edges]

    def leader(self, stream: str) -> str:
        """The name of the node that leads a stream, as some edge says; any node if none does."""
        with contextlib.suppress(httpx.HTTPError, KeyError, ValueError):
            with self.servers.client() as client:
                answer = client.get(f"/v1/streams/{stream}", timeout=5.0).json()
            if answer["cluster"]["leader"] in self.nodes:
                return str(answer["cluster"]["leader"])
        return self.any_node()

    def any_node(self) -> str:
        """The name of some node."""
        return self.chance.choice(sorted(self.nodes))

    def other_node(self, name: str) -> str:
        """The name of some other node."""
        return self.chance.choice(sorted(set(self.nodes) - {name}))

    def kill(self, name: str) -> None:
        """End a node at once."""
        self.nodes[name].kill()

    def cut_power(self, *names: str) -> int:
        """End nodes at once, and take back what they had not synced; returns the bytes."""
        for name in names:
            self.nodes[name].kill()
        return sum(self.disks[name].cut(self.chance) for name in names)

    def pause(self, name: str) -> None:
        """Stop a node; it keeps its connections."""
        os.kill(self.nodes[name].pid, signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """Let a node continue."""
        if self.nodes[name].alive:
            os.kill(self.nodes[name].pid, signal.SIGCONT)

    def start(self, *names: str) -> None:
        """Start nodes again, and wait until they take requests of their own."""
        started: list[Process] = []
        for name in names:
            if name in self.disks:
                self.disks[name].begin()
            self.nodes[name].spawn()
            started.append(self.nodes[name])
        for node in started:
            node.wait_until_serving()

    def wait_until_ready(self, name: str) -> None:
        """Wait until a node has all that it may be counted with."""
        deadline_s = time.monotonic() + _READY_S
        with self.nodes[name].client() as client:
            while client.get("/readyz").status_code != httpx.codes.OK:
                assert time.monotonic() < deadline_s, self.nodes[name].log.read_text("utf-8")
                time.sleep(0.05)

    def restart_edge(self, edge: Process) -> None:
        """Kill an api or a gateway, and start it again."""
        edge.kill()
        edge.start()

    def ended(self) -> list[str]:
        """What processes that have ended by themselves wrote last."""
        return [
            f"{one.log.name}: {one.log.read_text(encoding='utf-8')[-2_000:]}"
            for one in self.servers.processes
            if not one.alive
        ]

    def stop(self) -> dict[str, Any]:
        """End all processes cleanly; returns the exit status of each node."""
        for edge in self.servers.edges:
            edge.stop()
        for node in self.nodes.values():
            node.process.send_signal(signal.SIGTERM)  # type: ignore[union-attr]
        return {name: node.wait() for name, node in self.nodes.items()}
