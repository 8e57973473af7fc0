"""A cluster: three storage nodes, an api and a gateway; its speed, its gaps, its idle CPU."""

import contextlib
import itertools
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from contrail_client import Contrail, ContrailError
from contrail_serve.cluster import planned
from tests.bench.cases_split import Edge
from tests.bench.figures import Bench, BenchError, Measured, Run
from tests.bench.http_scripts import Batches, Singles
from tests.bench.load import Load
from tests.bench.patience import repeat
from tests.bench.processes import HOST, Pids, cpu_s, end, ready_line, wait_until
from tests.bench.server import (
    FILL_BATCH,
    Server,
    data_folder,
    drive,
    publish_batches,
    service_environment,
)
from tests.support.ports import free_port

NODES: Final = ("n1", "n2", "n3")
_STREAM: Final = "BENCH"
_PREFIX: Final = "bench"
_FILLED: Final = "FILLED"
_KILLS: Final = 20
_IDLE_S: Final = 20.0
_REST_S: Final = 1.0
_WARM_S: Final = 0.5
_MANY_CONNECTIONS: Final = 16
"""As many batches under way as fill an entry of each shard with the part of it."""
_SINGLES_CONNECTIONS: Final = 64
_LOOK_S: Final = 0.05
"""The time between two looks at a state, which the leader shows."""


class Node:
    """One process of the cluster, which can be ended, stopped and started again."""

    def __init__(self, service: str, log: Path, **settings: Any) -> None:
        self.log = log
        values = {"host": HOST, "log_level": "warning", **settings}
        self._command = [sys.executable, "-m", "contrail_serve", service]
        self._command += [f"{name}={value}" for name, value in values.items()]
        self.port = int(values["port"])
        self._data_dir = Path(values.get("data_dir", ""))
        self.process: subprocess.Popen[bytes]

    def start(self) -> None:
        """Start it, and do not wait."""
        with self.log.open("ab") as stderr:
            self.process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=service_environment(),
            )

    def wait_until_serving(self) -> None:
        """BenchError if it does not serve."""
        line = ready_line(self.process)
        if not line or urlsplit(msgspec.json.decode(line)["url"]).port != self.port:
            raise BenchError(f"no server:\n{self.log.read_text()[-2_000:]}")

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        os.kill(self.process.pid, number)

    def wipe(self) -> None:
        """Kill it, and remove its data."""
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self._data_dir)

    def end(self) -> None:
        """End it, however it is."""
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGCONT)
        end(self.process)


@dataclass(frozen=True, slots=True)
class ClusterServer(Server):
    """Clients use one edge; the CPU and memory of all processes are counted."""

    nodes: Mapping[str, Node] = field(default_factory=dict)
    edges: tuple[Node, ...] = ()

    @property
    def pid(self) -> Pids:
        """The process ids, of what runs."""
        return tuple(one.process.pid for one in (*self.nodes.values(), *self.edges))

    def create_stream(self, stream: str, prefix: str, **settings: Any) -> None:
        """Make a stream with three replicas."""
        given = {"subjects": [f"{prefix}.>"], "num_replicas": len(NODES), **settings}
        self.call("PUT", f"/v1/streams/{stream}", given)

    def leader(self, stream: str) -> Node:
        """The node that leads a stream."""
        return self.nodes[self.call("GET", f"/v1/streams/{stream}")["cluster"]["leader"]]

    def let_lead(self, stream: str, name: str) -> None:
        """Make a node the leader of a stream."""
        node = self.nodes[name]
        if self.leader(stream) is not node:
            self.call("POST", f"/v1/streams/{stream}/leader/stepdown", {"preferred": name})
            wait_until(lambda: self.leader(stream) is node, f"{name} as the leader")

    def wait_until_whole(self) -> None:
        """Wait until all nodes are ready."""
        for node in self.nodes.values():
            probe = Server(node.process, node.port, 0.0)
            wait_until(lambda probe=probe: _is_ready(probe), "a node that becomes ready")  # type: ignore[misc]


@dataclass(frozen=True, slots=True)
class LeadingServer(ClusterServer):
    """Clients use the node that leads their stream: the first one."""

    def create_stream(self, stream: str, prefix: str, **settings: Any) -> None:
        """Make a stream with three replicas, and let the first node lead it."""
        super(LeadingServer, self).create_stream(stream, prefix, **settings)
        self.let_lead(stream, NODES[0])


def _is_ready(probe: Server) -> bool:
    try:
        probe.call("GET", "/readyz?verbose")
    except (BenchError, OSError):
        return False
    return True


@contextlib.contextmanager
def cluster(asked: Edge, data_dir: Path) -> Iterator[ClusterServer]:
    """Three nodes below ``data_dir``, an api and a gateway; clients use the one in ``asked``."""
    data_dir.mkdir()
    links = {name: free_port() for name in NODES}
    addresses = ",".join(f"{name}={HOST}:{free_port()}" for name in NODES)
    ports: dict[Edge, int] = {"api": free_port(), "gateway": free_port()}
    shared = {"cluster_secret": secrets.token_hex(16)}
    nodes = {
        name: Node(
            "storage",
            data_dir / f"{name}.log",
            node=name,
            port=free_port(),
            peers=addresses,
            link_port=link,
            data_dir=data_dir / name,
            **shared,
        )
        for name, link in links.items()
    }
    storage = ",".join(f"{HOST}:{link}" for link in links.values())
    others = {"api": {"gateways": ports["gateway"]}, "gateway": {"apis": ports["api"]}}
    edges = {
        edge: Node(
            edge,
            data_dir / f"{edge}.log",
            port=port,
            storage=storage,
            **{name: f"{HOST}:{other}" for name, other in others[edge].items()},
            **shared,
        )
        for edge, port in ports.items()
    }
    begun = perf_counter()
    with contextlib.ExitStack() as stack:
        for node in (*nodes.values(), *edges.values()):
            node.start()
            stack.callback(node.end)
        for node in (*nodes.values(), *edges.values()):
            node.wait_until_serving()
        process = edges[asked].process
        took_s = perf_counter() - begun
        server = ClusterServer(process, ports[asked], took_s, nodes, tuple(edges.values()))
        for edge in edges.values():
            probe = Server(edge.process, edge.port, 0.0)
            wait_until(lambda probe=probe: _is_ready(probe), "an edge that becomes ready")  # type: ignore[misc]
        server.wait_until_whole()
        yield server


@contextlib.contextmanager
def whole_nodes(data_dir: Path) -> Iterator[ClusterServer]:
    """Three nodes below ``data_dir``, each of them a whole server."""
    data_dir.mkdir()
    addresses = ",".join(f"{name}={HOST}:{free_port()}" for name in NODES)
    secret = secrets.token_hex(16)
    nodes = {
        name: Node(
            "serve",
            data_dir / f"{name}.log",
            node=name,
            port=free_port(),
            peers=addresses,
            data_dir=data_dir / name,
            cluster_secret=secret,
        )
        for name in NODES
    }
    begun = perf_counter()
    with contextlib.ExitStack() as stack:
        for node in nodes.values():
            node.start()
            stack.callback(node.end)
        for node in nodes.values():
            node.wait_until_serving()
        first = nodes[NODES[0]]
        server = LeadingServer(first.process, first.port, perf_counter() - begun, nodes)
        server.wait_until_whole()
        yield server


@dataclass(frozen=True, slots=True)
class Whole:
    """A case of one process, on three whole nodes, at the one that leads."""

    measure: Callable[[Bench], Measured | None]

    def __call__(self, bench: Bench) -> Measured | None:
        """The measurement of the case."""
        return self.measure(replace(bench, started=whole_nodes))


@dataclass(frozen=True, slots=True)
class Clustered:
    """A case of one process, on streams with three replicas."""

    measure: Callable[[Bench], Measured | None]
    edge: Edge = "api"

    def __call__(self, bench: Bench) -> Measured | None:
        """The measurement of the case."""
        return self.measure(replace(bench, started=partial(cluster, self.edge)))


def batches(stream: str, prefix: str) -> Batches:
    """Batches of 1,000 messages."""
    return Batches(stream, prefix, FILL_BATCH, _MANY_CONNECTIONS)


def singles(stream: str, prefix: str) -> Singles:
    """One message a request, on 64 connections."""
    del stream
    return Singles(prefix, _SINGLES_CONNECTIONS)


def shards(scripts: Callable[[str, str], Batches | Singles], bench: Bench) -> Measured:
    """Messages a second to a stream with a shard led by each node.

    Beside it: a stream with one shard, in turns on the same cluster. The CPU of the busiest node
    says how many messages three nodes take that have cores of their own.
    """
    ratios: list[float] = []
    busiest_us: dict[int, list[float]] = {1: [], len(NODES): []}
    with data_folder(bench) as folder, cluster("api", folder) as server:
        _spread_leaders(server)

        def publish(number: int, count: int) -> Run:
            stream, prefix = f"BENCH{number}OF{count}", f"bench{number}of{count}"
            server.create_stream(stream, prefix, shards=count)
            if count > 1:
                states = server.call("GET", f"/v1/streams/{stream}")["shards"]
                if len({state["leader"] for state in states}) != count:
                    raise BenchError("a node leads several shards")
            before = [cpu_s(node.process.pid) for node in server.nodes.values()]
            chosen = scripts(stream, prefix)
            load = Load(server.port, server.pid, chosen, bench.scale.seconds, _WARM_S)
            driven = drive(bench, load)
            after = [cpu_s(node.process.pid) for node in server.nodes.values()]
            server.check_stored(stream, driven.messages)
            used_s = max(late - early for early, late in zip(before, after, strict=True))
            busiest_us[count].append(used_s / driven.messages * 1e6)
            return driven.run

        def once(number: int) -> Run:
            alone, spread = publish(number, 1), publish(number, len(NODES))
            ratios.append(spread.value / alone.value)
            return spread

        runs = repeat(bench, once)
    one_us, each_us = (median(values) for values in busiest_us.values())
    note = (
        f"{median(ratios):.2f} x one shard, in turns; CPU of the busiest node {each_us:.2f} µs, "
        f"with one shard {one_us:.2f} µs"
    )
    return Measured(runs, note)


def _spread_leaders(server: ClusterServer) -> None:
    """Let each node lead as many groups as any other, which nodes do by themselves in minutes."""
    # Each new stream gets a group that has none yet.
    for number in range(_groups() - 1):
        server.create_stream(f"LED{number}", f"led{number}")
        server.let_lead(f"LED{number}", NODES[number % len(NODES)])


class _Publisher(threading.Thread):
    """Publishes one message after the other, with ids, as a client does that retries."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.acked_s: list[float] = []
        self.errors: list[ContrailError] = []
        self._url = url
        self._over = threading.Event()

    def run(self) -> None:
        """Publish until `close`."""
        with Contrail(self._url) as client:
            for number in itertools.count():
                if self._over.is_set():
                    return
                try:
                    client.publish(f"{_PREFIX}.a", b"x" * 128, msg_id=f"{number}")
                except ContrailError as error:
                    self.errors.append(error)
                else:
                    self.acked_s.append(perf_counter())

    def close(self) -> None:
        """Stop, and raise BenchError if a publish failed."""
        self._over.set()
        self.join()
        if self.errors:
            raise BenchError(f"{len(self.errors)} publishes failed, such as: {self.errors[0]}")

    def gaps_s(self, since_s: float) -> list[float]:
        """The times between two acks, from ``since_s`` on, the shortest first."""
        times = [at for at in self.acked_s if at >= since_s]
        return sorted(b - a for a, b in itertools.pairwise([since_s, *times]))

    def longest_gap_s(self, since_s: float) -> float:
        """The longest time between two acks, from ``since_s`` on."""
        return max(self.gaps_s(since_s), default=0.0)

    def wait_for_more(self, since_s: float) -> None:
        """Wait for an ack after ``since_s``, and then for some more."""
        wait_until(lambda: sum(at > since_s for at in self.acked_s[-20:]) >= 10, "the next ack")


def wait_for_rest(seconds: float) -> None:
    """Let the cluster be by itself for a while."""
    sleep(seconds)


@contextlib.contextmanager
def _published(bench: Bench) -> Iterator[tuple[ClusterServer, _Publisher]]:
    with data_folder(bench) as folder, cluster("api", folder) as server:
        server.create_stream(_STREAM, _PREFIX)
        publisher = _Publisher(server.url)
        publisher.start()
        publisher.wait_for_more(0.0)
        yield server, publisher
        publisher.close()


@dataclass(frozen=True, slots=True)
class Failover:
    """The leader is killed or stopped, and comes back before the next time."""

    number: signal.Signals

    def __call__(self, bench: Bench) -> Measured:
        """Seconds until the next ack of a publisher with one message on its way, for each time."""
        times = _KILLS if bench.scale.runs > 1 else 2
        with _published(bench) as (server, publisher):
            runs = tuple(Run(self._once(server, publisher)) for _ in range(times))
        worst_s = max(run.value for run in runs)
        return Measured(runs, f"{times} times, the worst {worst_s:.2f} s; no publish failed")

    def _once(self, server: ClusterServer, publisher: _Publisher) -> float:
        wait_for_rest(_REST_S)
        node = server.leader(_STREAM)
        at_s = perf_counter()
        node.signal(self.number)
        wait_until(lambda: _has_taken(node, self.number), "the end of a node")
        publisher.wait_for_more(at_s + 0.05)
        gap_s = publisher.longest_gap_s(at_s)
        if self.number is signal.SIGKILL:
            node.start()
            node.wait_until_serving()
        else:
            node.signal(signal.SIGCONT)
        server.wait_until_whole()
        return gap_s


def _has_taken(node: Node, number: signal.Signals) -> bool:
    """Whether a process has taken a signal."""
    return number is not signal.SIGKILL or node.process.poll() is not None


def rolling_restart(bench: Bench) -> Measured:
    """Seconds: the longest gap between acks while each node is stopped and started in turn."""

    def once(server: ClusterServer, publisher: _Publisher) -> Run:
        begun_s = perf_counter()
        for node in server.nodes.values():
            node.end()
            node.start()
            node.wait_until_serving()
            server.wait_until_whole()
        publisher.wait_for_more(perf_counter())
        return Run(publisher.longest_gap_s(begun_s))

    with _published(bench) as (server, publisher):
        runs = tuple(once(server, publisher) for _ in range(bench.scale.runs))
    return Measured(runs, "no publish failed")


def idle(bench: Bench) -> Measured:
    """CPU of the busiest node without any request, in % of a core."""
    seconds = _IDLE_S if bench.scale.runs > 1 else 2.0
    with data_folder(bench) as folder, cluster("api", folder) as server:
        server.create_stream(_STREAM, _PREFIX)
        wait_for_rest(_REST_S)

        def once() -> Run:
            before = {name: cpu_s(node.process.pid) for name, node in server.nodes.items()}
            wait_for_rest(seconds)
            used = [cpu_s(node.process.pid) - before[name] for name, node in server.nodes.items()]
            return Run(100 * max(used) / seconds)

        runs = tuple(once() for _ in range(bench.scale.runs))
    return Measured(runs, f"{_groups()} groups on each node")


def _groups() -> int:
    """The number of groups that a node is a member of: the meta group is one, too."""
    return 1 + sum(NODES[0] in entry.members for entry in planned(NODES))


def catch_up(bench: Bench) -> Measured:
    """Messages a second that a node with an empty disk gets, while the others serve.

    Beside it: the times between the acks of a publisher meanwhile.
    """
    # As many as make the start of a process small beside it, and more than the log keeps.
    times = 10 if bench.scale.runs > 1 else 1
    count = times * bench.scale.messages
    with _published(bench) as (server, publisher):

        def once() -> Run:
            leader = server.leader(_FILLED)
            name = next(name for name, node in server.nodes.items() if node is not leader)
            server.nodes[name].wipe()
            begun_s = perf_counter()
            server.nodes[name].start()
            server.nodes[name].wait_until_serving()
            wait_until(lambda: _is_current(server, name), "catching up", _LOOK_S)
            took_s = perf_counter() - begun_s
            gaps_s = publisher.gaps_s(begun_s)
            longest_s.append(gaps_s[-1])
            p50_s, p99_s = (gaps_s[len(gaps_s) * percent // 100] for percent in (50, 99))
            return Run(count / took_s, p50_s=p50_s, p99_s=p99_s)

        longest_s: list[float] = []
        server.create_stream(_FILLED, _FILLED)
        for _ in range(times):
            publish_batches(bench, server, _FILLED, _FILLED, bench.scale.messages)
        runs = tuple(once() for _ in range(bench.scale.runs))
    note = f"{count:,} messages, from the start of the process; publishes meanwhile: "
    return Measured(runs, f"{note}longest gap {max(longest_s):.2f} s")


def _is_current(server: ClusterServer, name: str) -> bool:
    replicas = server.call("GET", f"/v1/streams/{_FILLED}")["cluster"]["replicas"]
    return any(one["name"] == name and one["current"] and not one["lag"] for one in replicas)
