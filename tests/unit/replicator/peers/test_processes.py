"""Three processes with bare Raft groups on the peer port: they form, elect, commit and survive."""

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("bare_node.py")
NAMES = ("n1", "n2", "n3")
SECRET, OTHER_SECRET = "11" * 32, "22" * 32
GROUP = 1024
WAIT_S = 120

pytestmark = [pytest.mark.cluster, pytest.mark.long]


class Process:
    """One node; its events are read by a thread."""

    def __init__(self, cluster: "Processes", name: str, secret: str = SECRET) -> None:
        self.cluster = cluster
        self.name = name
        self.applied: list[str] = []
        self.acked: set[str] = set()
        self.leads = False
        self.formed = ""
        self.ending = False
        self.read_back = False
        self.stderr = cluster.folder / f"{name}.stderr"
        folder = cluster.folder / name
        folder.mkdir(exist_ok=True)
        with self.stderr.open("ab") as errors:
            self.child = subprocess.Popen(
                [sys.executable, PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        peers = {one: f"127.0.0.1:{port}" for one, port in cluster.ports.items()}
        self.tell(
            name=name,
            folder=str(folder),
            port=cluster.ports[name],
            peers=peers,
            groups=[GROUP],
            secret=secret,
            encrypted=cluster.encrypted,
        )
        threading.Thread(target=self.read, daemon=True).start()

    def tell(self, **line: Any) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps(line).encode() + b"\n")
        self.child.stdin.flush()

    def read(self) -> None:
        assert self.child.stdout is not None
        for line in self.child.stdout:
            self.cluster.events.put((self, json.loads(line)))
        self.cluster.events.put((self, {"event": "ended"}))

    def note(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "formed":
                self.formed = event["cluster"]
            case "leader":
                self.leads = event["leads"]
            case "applied":
                self.applied.append(event["data"])
                if event["acked"]:
                    self.acked.add(event["data"])
            case "read":
                self.read_back = True
            case "failed":
                raise AssertionError(event)
            case "ended" if not self.ending:
                raise AssertionError(self.stderr.read_text()[-2_000:])

    def end(self) -> None:
        self.ending = True
        self.child.kill()
        self.child.wait()
        for pipe in (self.child.stdin, self.child.stdout):
            assert pipe is not None
            pipe.close()


class Processes:
    """Three nodes on loopback."""

    def __init__(self, folder: Path, *, encrypted: bool) -> None:
        self.folder = folder
        self.encrypted = encrypted
        self.events: queue.Queue[tuple[Process, dict[str, Any]]] = queue.Queue()
        self.held = [socket.socket() for _ in NAMES]
        for one in self.held:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            one.bind(("127.0.0.1", 0))
        ports = (one.getsockname()[1] for one in self.held)
        self.ports = dict(zip(NAMES, ports, strict=True))
        self.nodes: dict[str, Process] = {}

    def begin(self, name: str, secret: str = SECRET) -> Process:
        self.nodes[name] = Process(self, name, secret)
        return self.nodes[name]

    def wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            node, event = self.events.get(timeout=WAIT_S)
            node.note(event)

    def leader(self, *but: Process) -> Process:
        """Wait for a leader of those that are not left out."""

        def found() -> list[Process]:
            return [one for one in self.nodes.values() if one.leads and one not in but]

        self.wait_until(lambda: bool(found()))
        return found()[0]

    def commit(self, data: str, *but: Process, zeros: int = 0) -> Process:
        """Propose until a leader has acknowledged the entry; return it."""
        while True:
            leader = self.leader(*but)
            leader.tell(group=GROUP, data=data, zeros=zeros)
            # A leader that was deposed meanwhile refuses, or says that the outcome is unknown.
            self.wait_until(lambda one=leader: data in one.acked or not one.leads)  # type: ignore[misc]
            if data in leader.acked:
                return leader

    def wait_for_all(self, *data: str) -> None:
        self.wait_until(lambda: all(set(data) <= set(one.applied) for one in self.nodes.values()))
        # An entry that a deposed leader left unknown was proposed again, and comes twice.
        histories = sorted((one.applied for one in self.nodes.values()), key=len)
        assert [histories[-1][: len(one)] for one in histories] == histories

    def end(self) -> None:
        for node in self.nodes.values():
            node.end()
        for one in self.held:
            one.close()


@pytest.fixture(params=[False, True], ids=["plain", "encrypted"])
def processes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Processes]:
    cluster = Processes(tmp_path, encrypted=request.param)
    for name in NAMES:
        cluster.begin(name)
    yield cluster
    cluster.end()


def test_three_processes_form_commit_and_survive_a_kill_and_a_pause(processes: Processes) -> None:
    processes.wait_until(lambda: all(one.formed for one in processes.nodes.values()))
    assert len({one.formed for one in processes.nodes.values()}) == 1
    killed = processes.commit("first")
    processes.wait_for_all("first")

    killed.end()
    killed.leads = False
    processes.commit("after the kill", killed)
    # More than a leader keeps in memory for those that lag.
    large = [f"large {number}" for number in range(12)]
    for data in large:
        processes.commit(data, killed, zeros=1 << 20)
    again = processes.begin(killed.name)
    processes.wait_for_all("first", "after the kill", *large)
    assert again.formed
    assert any(one.read_back for one in processes.nodes.values())

    paused = processes.leader()
    paused.child.send_signal(signal.SIGSTOP)
    try:
        processes.commit("during the pause", paused)
        # It is on a majority, but its leader does not know of it and must not add to it.
        paused.tell(group=GROUP, data="to the paused leader")
    finally:
        paused.child.send_signal(signal.SIGCONT)
    processes.wait_until(lambda: "during the pause" in paused.applied)
    assert "to the paused leader" not in paused.acked
    processes.commit("after the pause")
    processes.wait_for_all("first", "after the kill", "during the pause", "after the pause")


def test_a_process_with_another_secret_stays_outside(tmp_path: Path) -> None:
    cluster = Processes(tmp_path, encrypted=False)
    try:
        for name, secret in zip(NAMES, (SECRET, SECRET, OTHER_SECRET), strict=True):
            cluster.begin(name, secret)

        def refused() -> bool:
            text = cluster.nodes["n1"].stderr.read_text()
            return "it has a different cluster secret" in text

        lines = threading.Event()
        while not refused():
            lines.wait(0.05)
        assert not any(one.formed for one in cluster.nodes.values())
    finally:
        cluster.end()
