"""A cluster of simulated nodes, and edges that serve clients from all of them."""

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from random import Random
from typing import Any, Final, TypeVar
from unittest.mock import patch

import contrail_serve.cluster
from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_link.contract import StorageLink
from contrail_link.contract.remote import OnLoss
from contrail_link.routed.link import RoutedLink
from contrail_link.tcp import methods
from contrail_link.tcp.channel import Channel
from contrail_serve.cluster import Peers
from contrail_serve.cluster_secret import ClusterSecret
from contrail_serve.settings import ClusterSettings, SecretSettings
from contrail_storage.link import LocalLink
from contrail_storage.node import NodeOptions, StorageNode
from contrail_storage.wal import LogOptions
from tests.sim import threads, world
from tests.sim.disk import Disk, SimFiles, SimStore
from tests.sim.loop import Process, SimLoop, current_process
from tests.sim.net import Listener, LoopNet, Sockets

_DELAY_S: Final = 0.003
_LOST_S: Final = 1.0
_PORT: Final = 7431
_SEGMENT_BYTES: Final = 32 << 10
_R = TypeVar("_R")


class SimNode:
    """A node through all of its lives."""

    def __init__(self, cluster: "SimCluster", name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.disk = Disk(Random(f"{cluster.seed} {name}"), in_thread=threads.in_thread)
        self.process = Process(name)
        self.process.dead = True
        self.node: StorageNode | None = None
        """The node, once it is open."""
        self.begun: asyncio.Task[None] | None = None
        """Forms or joins the cluster, and starts; its error says why the node does not run."""
        self._cluster = cluster

    @property
    def runs(self) -> bool:
        """Whether it serves."""
        begun = self.begun
        return (
            not self.process.dead
            and begun is not None
            and begun.done()
            and not begun.cancelled()
            and begun.exception() is None
        )

    def start(self) -> None:
        """Start a process over the disk as it is."""
        ahead_ns = self.process.clock_ahead_ns
        self.process = self._cluster.processes[self.name] = Process(self.name)
        self.process.clock_ahead_ns = ahead_ns
        self.node = None
        loop = self._cluster.loop
        self.begun = self.process.context.copy().run(lambda: loop.create_task(self._begin()))

    async def _begin(self) -> None:
        cluster = self._cluster
        addresses = {name: f"{name}:{_PORT}" for name in cluster.nodes}
        secret = SecretSettings(values=(b"s" * 32,), file=None)
        settings = ClusterSettings(
            name=self.name,
            host="",
            port=_PORT,
            addresses=addresses,
            secret=secret,
            certificates=None,
        )
        peers = Peers(settings, ClusterSecret(secret))
        options = NodeOptions(
            self.folder,
            self.name,
            cluster=peers.cluster,
            files=SimFiles(self.disk),
            open_store=self._open_store,
            log=LogOptions(_SEGMENT_BYTES, keep_bytes=0, tail_bytes=cluster.tail_bytes),
            checkpoint_bytes=4 * _SEGMENT_BYTES,
            **cluster.options,
        )
        self.node = StorageNode.open(options, peers.groups)
        await peers.form(self.node)
        await self.node.start()

    def _open_store(self, path: Path) -> SimStore:
        path.mkdir(parents=True, exist_ok=True)
        (path / "CURRENT").touch()
        return self.disk.store

    def crash(self, *, power: bool) -> None:
        """End the process; with ``power``, the machine too."""
        self._cluster.loop.kill(self.process)
        self._cluster.net.crash(self.name)
        self.disk.crash(power=power)
        lock = None if self.node is None else self.node.lock
        if lock is not None:
            lock.release()

    def wipe(self) -> None:
        """Give a node that is not running an empty disk."""
        self.disk.wipe()
        for path in sorted(self.folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()

    def pause(self) -> None:
        """Stop the process for a while."""
        self._cluster.loop.pause(self.process)

    def go_on(self) -> None:
        """Let a paused process go on."""
        self._cluster.loop.go_on(self.process)


class SimCluster:
    """All nodes, their network and the edges."""

    def __init__(
        self, loop: SimLoop, folder: Path, seed: int, size: int = 3, **options: Any
    ) -> None:
        self.loop = loop
        self.seed = seed
        self.options = options
        self.tail_bytes = _SEGMENT_BYTES if seed % 2 else 1 << 30
        """Bytes of the log that nodes keep for others. Half of the clusters keep few of them, so
        that a node that was away needs the state of another."""
        self.processes: dict[str, Process] = {}
        self.net = LoopNet(loop, self.processes, seed)
        self.random = Random(f"cluster {seed}")
        self.nodes: dict[str, SimNode] = {}
        for number in range(1, size + 1):
            name = f"n{number}"
            self.nodes[name] = SimNode(self, name, folder / name)

    def client(
        self,
        name: str,
        work: Callable[[StorageLink], Coroutine[Any, Any, _R]],
        patience_s: float = _LOST_S,
    ) -> "asyncio.Task[_R]":
        """Begin what a client does, at an edge of its own with that name.

        ``patience_s`` is the time after which the edge gives up a silent connection.
        """
        process = self.processes[name] = Process(name)

        async def run() -> _R:
            nodes = [_EdgeNode(self, name, node, patience_s) for node in self.nodes.values()]
            return await work(RoutedLink(nodes).link)

        return process.context.copy().run(lambda: self.loop.create_task(run()))

    def start(self) -> None:
        """Start all nodes."""
        for node in self.nodes.values():
            node.start()

    def until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        """Let time pass until a condition holds. Raises AssertionError if it does not."""
        end = self.loop.now + seconds
        while not condition():
            assert self.loop.now < end, "the condition did not come true"
            self.loop.run_for(0.05)
            self.check()

    def check(self) -> None:
        """Raise the error of a node that could not start, or RuntimeError for one that failed."""
        for one in self.nodes.values():
            if one.begun is not None and not one.process.dead and one.begun.done():
                one.begun.result()
            if one.node is not None and one.node.failure:
                raise RuntimeError(f"{one.name}: {one.node.failure}")


class _EdgeNode:
    """A node as an edge reaches it, in the place of `RemoteLink`."""

    channels: Mapping[str, Channel] = {}

    def __init__(self, cluster: SimCluster, edge: str, node: SimNode, patience_s: float) -> None:
        self.name = node.name
        self.link: Any = self
        self._cluster, self._edge, self._node = cluster, edge, node
        self._patience_s = patience_s
        self._links: tuple[StorageNode, LocalLink] | None = None

    def _local(self) -> LocalLink:
        node = self._node.node
        assert node is not None
        if self._links is None or self._links[0] is not node:
            self._links = node, LocalLink(node)
        return self._links[1]

    def _reached(self, source: str, target: str) -> bool:
        return (source, target) not in self._cluster.net.cut

    async def call(self, name: str, arguments: tuple[Any, ...], on_loss: OnLoss) -> Any:
        """Call a method of the node, and return its result."""
        node, loop = self._node, self._cluster.loop
        process = node.process
        if not node.runs or not self._reached(self._edge, node.name):
            raise ApiError(errors.NOT_READY, "storage link: down", applied=False)
        answer: asyncio.Future[Any] = loop.create_future()
        # The caller may be gone when it comes.
        answer.add_done_callback(lambda done: done.exception())

        async def serve() -> None:
            outcome: tuple[Any, ApiError | None]
            try:
                outcome = await getattr(self._local(), name)(*arguments), None
            except ApiError as error:
                outcome = None, error
            loop.call_later(self._delay(), back, *outcome, context=edge)

        def back(result: Any, error: ApiError | None) -> None:
            if answer.done():
                return
            if not self._reached(node.name, self._edge):
                loop.call_later(self._patience_s, lose, context=edge)
            elif error is None:
                answer.set_result(result)
            else:
                answer.set_exception(error)

        def arrive() -> None:
            if self._reached(self._edge, node.name):
                loop.create_task(serve())
            else:
                loop.call_later(self._patience_s, lose, context=edge)

        def lose() -> None:
            if not answer.done():
                answer.set_exception(_lost(on_loss))

        arrive.arrives = True  # type: ignore[attr-defined]
        edge = self._cluster.processes[self._edge].context.copy()
        loop.call_later(self._delay(), arrive, context=process.context.copy())
        end_s = loop.now + self._patience_s
        while not answer.done():
            await asyncio.wait([answer], timeout=0.05)
            silent = loop.now > end_s and not self._whole()
            if (node.process is not process or process.dead or silent) and not answer.done():
                raise _lost(on_loss)
        return answer.result()

    def _whole(self) -> bool:
        name = self._node.name
        whole = self._reached(self._edge, name) and self._reached(name, self._edge)
        return whole and not self._node.process.paused

    def _delay(self) -> float:
        return self._cluster.random.random() * 2 * _DELAY_S

    def publish_then(self, stream: str, content: Any, done: Callable[[Any], None]) -> None:
        """Publish; raises a refusal at once if the node is out of reach."""
        if not self._node.runs or not self._reached(self._edge, self.name):
            raise ApiError(errors.NOT_READY, "storage link: down", applied=False)

        async def publish() -> None:
            try:
                outcome = await self.call("_published", (stream, content), OnLoss.UNKNOWN)
            except ApiError as error:
                outcome = error
            done(outcome)

        self._cluster.loop.create_task(publish())


def _lost(on_loss: OnLoss) -> ApiError:
    if on_loss is OnLoss.UNKNOWN:
        return ApiError(errors.OUTCOME_UNKNOWN, "storage link: lost")
    return ApiError(errors.NOT_READY, "storage link: lost")


async def _published(self: LocalLink, stream: str, content: Any) -> Any:
    """Publish, and return the outcome."""
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def done(outcome: Any) -> None:
        if not answer.done():
            answer.set_result(outcome)

    self.publish_then(stream, content, done)
    outcome = await answer
    if isinstance(outcome, ApiError):
        raise outcome
    return outcome


def _remote(method: methods.DeclaredMethod) -> Callable[..., Any]:
    @wraps(method.declaration)
    async def call(self: _EdgeNode, *args: Any, **kwargs: Any) -> Any:
        return await self.call(method.name, method.in_order(args, kwargs), method.on_loss)

    return call


for _method in methods.DECLARED:
    if inspect.iscoroutinefunction(_method.declaration):
        setattr(_EdgeNode, _method.name, _remote(_method))


@contextmanager
def simulated(seed: int, folder: Path, size: int = 3, **options: Any) -> Iterator[SimCluster]:
    """A cluster that has not been started."""
    with SimLoop(seed) as loop, world.replaced(loop, seed), ExitStack() as stack:
        cluster = SimCluster(loop, folder, seed, size, **options)

        def sockets(_tls: object) -> Sockets:
            process = current_process()
            assert process is not None
            return Sockets(cluster.net, process.name)

        for name, value in (
            ("PeerSockets", sockets),
            ("made_tls", lambda name: None),
            ("listen", lambda host, port: Listener()),
        ):
            stack.enter_context(patch.object(contrail_serve.cluster, name, value))
        stack.enter_context(patch.object(LocalLink, "_published", _published, create=True))
        yield cluster
