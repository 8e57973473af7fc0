"""A storage node, its link over real sockets, and a wire between the ends that a test can cut."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Final

from contrail_common.model import StreamConfig
from contrail_link.contract import StorageLink
from contrail_link.tcp.client import RemoteLink
from contrail_link.tcp.handshake import derived_key
from contrail_link.tcp.limits import LinkLimits
from contrail_link.tcp.server import LinkServer
from contrail_serve.groups import SingleMemberGroups
from contrail_storage.link import LocalLink
from contrail_storage.node import NodeOptions, StorageNode
from tests.support.ports import HOST, free_port

KEY: Final = derived_key(b"the secret of this cluster", "link")
PATIENCE_S: Final = 60.0
QUICK: Final = LinkLimits(
    backoff_min_s=0.002,
    backoff_max_s=0.01,
    reconnect_wait_s=5.0,
    pulse_s=0.05,
    sweep_s=0.05,
    window_bytes=64 << 10,
    chunk_bytes=8 << 10,
)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a test; one that hangs fails."""

    async def bounded() -> Any:
        async with asyncio.timeout(60):
            return await work

    return asyncio.run(bounded())


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until ``condition`` holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0)


async def until_found(condition: Callable[[], Awaitable[bool]]) -> None:
    """As :func:`until`, for a condition that has to be asked for."""
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def storage(data_dir: Path) -> AsyncIterator[LocalLink]:
    """The link of a storage node of its own, with the stream ``S`` on ``a.>``."""
    node = await asyncio.to_thread(StorageNode.open, NodeOptions(data_dir), SingleMemberGroups())
    await node.start()
    try:
        link = LocalLink(node)
        await link.put_stream(StreamConfig(name="S", subjects=("a.>",)), "put", None, False)
        yield link
    finally:
        await node.stop()


def bound(port: int = 0) -> socket.socket:
    """A socket that is bound and not listening.

    Its port is none that the kernel assigns: a client that connects while nobody listens there
    could be assigned the same, and would be connected to itself.
    """
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((HOST, port or free_port()))
    return listener


def port_of(listener: socket.socket) -> int:
    port: int = listener.getsockname()[1]
    return port


@contextlib.asynccontextmanager
async def served(
    link: StorageLink,
    port: int = 0,
    limits: LinkLimits = QUICK,
    key: bytes = KEY,
    node: str = "",
) -> AsyncIterator[tuple[LinkServer, int]]:
    """``link`` on a port of this machine."""
    listener = bound(port)
    server = LinkServer(link, [key], limits, node=node)
    await server.start(listener)
    try:
        yield server, port_of(listener)
    finally:
        await server.stop(1.0)


@contextlib.asynccontextmanager
async def remote(
    port: int, limits: LinkLimits = QUICK, key: bytes = KEY, up: bool = True
) -> AsyncIterator[RemoteLink]:
    """A client of the link at ``port``."""
    link = RemoteLink((HOST, port), [key], limits)
    link.start()
    try:
        if up:
            await until(lambda: not link.readiness())
        yield link
    finally:
        await link.close()


class Wire:
    """A proxy for TCP connections to ``port``, which loses what a test wants it to lose."""

    def __init__(self, port: int) -> None:
        self.port = 0
        self.hold_requests = self.hold_answers = False
        self.refuse = False
        self.held_requests = self.held_answers = 0
        self.on_held: Callable[[bytes], None] = lambda data: None
        self._to = port
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "Wire":
        self._server = await asyncio.start_server(self._accept, HOST, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """End all connections at once."""
        for writer in self._writers:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        if self.refuse:
            writer.transport.abort()
            return
        try:
            to_reader, to_writer = await asyncio.open_connection(HOST, self._to)
        except OSError:
            writer.transport.abort()
            return
        self._writers.add(to_writer)
        requests = asyncio.create_task(self._pump(reader, to_writer, requests=True))
        await self._pump(to_reader, writer, requests=False)
        await requests

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, requests: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if requests and self.hold_requests:
                    self.held_requests += len(data)
                    self.on_held(data)
                elif not requests and self.hold_answers:
                    self.held_answers += len(data)
                else:
                    writer.write(data)
                    await writer.drain()
        writer.transport.abort()
