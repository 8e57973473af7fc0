"""A front that forwards everything to peers which a test plays by hand, byte by byte."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from typing import Any, Final, cast

import contrail_api
import contrail_gateway
from contrail_edge.app import build_app
from contrail_edge.http.budgets import UnreadBudget
from contrail_edge.http.settings import EdgeSettings
from contrail_edge.routing import EdgeModule
from contrail_edge.server import EdgeServer, make_server
from contrail_link.contract import StorageLink
from contrail_serve.forwarding.forwarder import Forwarder
from contrail_serve.forwarding.peers import Peers

HOST: Final = "127.0.0.1"
SETTINGS: Final = EdgeSettings(ack_keys=(bytes(32),), linger_s=0.2)
OK: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/x\r\ncontent-length: 2\r\n\r\nok"


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run a test; one that hangs fails."""

    async def bounded() -> None:
        async with asyncio.timeout(120):
            await work

    asyncio.run(bounded())


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until ``condition`` holds."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


class Peer:
    """A server whose connections a test reads and writes itself."""

    def __init__(self) -> None:
        self.accepted = 0
        self._lines: list[Line] = []
        self._arrivals: asyncio.Queue[Line] = asyncio.Queue()
        self._server: asyncio.Server
        self.address = (HOST, 0)

    async def __aenter__(self) -> "Peer":
        self._server = await asyncio.start_server(self._accept, HOST, 0)
        self.address = self._server.sockets[0].getsockname()[:2]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for line in self._lines:
            line.end()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        line = Line(reader, writer)
        self._lines.append(line)
        self._arrivals.put_nowait(line)

    async def line(self) -> "Line":
        """The next connection that comes in."""
        return await self._arrivals.get()


class Line:
    """One connection, from either side."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def head(self) -> bytes:
        """Bytes up to the end of a head."""
        return await self.reader.readuntil(b"\r\n\r\n")

    async def exactly(self, count: int) -> bytes:
        """So many bytes."""
        return await self.reader.readexactly(count)

    async def rest(self) -> bytes:
        """Everything up to the end of the connection."""
        with contextlib.suppress(ConnectionError):
            return await self.reader.read()
        return b""

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def end(self) -> None:
        """End the connection at once."""
        self.writer.transport.abort()


class Front:
    """An api process as far as forwarding goes."""

    def __init__(
        self, port: int, server: EdgeServer, forwarder: Forwarder, unread: UnreadBudget
    ) -> None:
        self.port = port
        self.unread = unread
        self.server = server
        self.forwarder = forwarder
        self.lines: list[Line] = []

    async def line(self) -> Line:
        """A client's connection."""
        line = Line(*await asyncio.open_connection(HOST, self.port))
        self.lines.append(line)
        return line

    async def ask(self, method: str, target: str, *lines: str, body: bytes = b"") -> Line:
        """A client's connection with a request on it."""
        line = await self.line()
        if body:
            lines = (*lines, f"content-length: {len(body)}")
        head = "\r\n".join([f"{method} {target} HTTP/1.1", f"Host: {HOST}", *lines, "", ""])
        line.send(head.encode() + body)
        return line


@contextlib.asynccontextmanager
async def front(
    *addresses: tuple[str, int], answer_s: float = 60.0, **settings: int
) -> AsyncIterator[Front]:
    """A front whose gateways, and apis for all other paths, are ``addresses``."""
    edge = replace(SETTINGS, **settings)
    listener = socket.create_server((HOST, 0))
    link = cast(StorageLink, _NoLink())
    forwarder = Forwarder(Peers("gateway", addresses), answer_s)
    modules = [contrail_api.edge_module(link, edge), contrail_gateway.edge_module(link, edge)]
    app = build_app([_elsewhere(module, forwarder) for module in modules], edge)
    server = make_server(app, edge, [listener])
    task = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    running = Front(listener.getsockname()[1], server, forwarder, app.state.unread)
    try:
        yield running
    finally:
        forwarder.drain()
        server.should_exit = True
        await task
        forwarder.close()
        for line in running.lines:
            line.end()


def _elsewhere(module: EdgeModule, forwarder: Forwarder) -> EdgeModule:
    return EdgeModule(module.link, module.routes, module.management, module.sockets, forwarder)


class _NoLink:
    """No storage: nothing is served here."""

    def readiness(self, *, strict: bool = False) -> dict[str, str]:
        return {}

    async def metrics_text(self) -> str:
        return ""
