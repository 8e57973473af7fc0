"""Connections between the nodes of a cluster that a test can cut, in one direction or in both.

Each node dials each other node at an address of its own, behind which bytes are passed on. A cut
holds the bytes, as a network does that drops packets: nobody is told. When it ends they arrive, or
the connection is reset.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

HOST: Final = "127.0.0.1"
_CHUNK: Final = 64 << 10

Direction = tuple[str, str]
"""The name of the node that sends, and that of the node that receives."""


@dataclass(eq=False)
class _Connection:
    """One connection: the node that dialled it, the other one, and both halves of it."""

    dialler: str
    listener: str
    ends: list[asyncio.StreamWriter] = field(default_factory=list)

    def concerns(self, names: Iterable[str]) -> bool:
        return bool({self.dialler, self.listener} & set(names))

    def reset(self) -> None:
        for writer in self.ends:
            writer.transport.abort()


class Network:
    """Listeners between all pairs of nodes, on an event loop in a thread of its own."""

    def __init__(self, addresses: Mapping[str, tuple[str, int]]) -> None:
        """Listen for each pair of nodes; ``addresses`` are the real ones."""
        self._addresses = dict(addresses)
        self._ports: dict[Direction, int] = {}
        self._cut: set[Direction] = set()
        self._connections: set[_Connection] = set()
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._servers: list[asyncio.Server] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()

    def addresses_for(self, name: str) -> str:
        """What ``--peers`` says to a node: itself, and the others behind this network."""
        return ",".join(
            f"{other}={host}:{port if other == name else self._ports[name, other]}"
            for other, (host, port) in self._addresses.items()
        )

    def cut(self, directions: Iterable[Direction]) -> None:
        """Let no byte pass in these directions."""
        self._call(lambda: self._cut.update(directions))

    def isolate(self, name: str) -> None:
        """Cut a node off from all others."""
        others = [other for other in self._addresses if other != name]
        self.cut([*((name, other) for other in others), *((other, name) for other in others)])

    def heal(self, *, reset: bool = False) -> None:
        """End all cuts; with ``reset``, connections that were cut end too."""

        def change() -> None:
            names = {name for direction in self._cut for name in direction}
            self._cut.clear()
            if reset:
                for connection in list(self._connections):
                    if connection.concerns(names):
                        connection.reset()
            self._changed.set()
            self._changed = asyncio.Event()

        self._call(change)

    def close(self) -> None:
        """End everything."""

        async def end() -> None:
            for server in self._servers:
                server.close()
            self._cut.clear()
            self._changed.set()
            for connection in list(self._connections):
                connection.reset()
            await asyncio.gather(*self._tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, change: Callable[[], None]) -> None:
        async def run() -> None:
            change()

        asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    async def _listen(self) -> None:
        for dialler in self._addresses:
            for listener in self._addresses:
                if dialler != listener:
                    await self._listen_for(dialler, listener)

    async def _listen_for(self, dialler: str, listener: str) -> None:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            connection = _Connection(dialler, listener, [writer])
            self._connections.add(connection)
            try:
                await self._pass_on(connection, reader, writer)
            finally:
                connection.reset()
                self._connections.discard(connection)
                self._tasks.discard(task)

        server = await asyncio.start_server(accept, HOST, 0)
        self._servers.append(server)
        self._ports[dialler, listener] = server.sockets[0].getsockname()[1]

    async def _pass_on(
        self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        dialler, listener = connection.dialler, connection.listener
        with contextlib.suppress(OSError):
            await self._open((dialler, listener))
            host, port = self._addresses[listener]
            there, to_listener = await asyncio.open_connection(host, port)
            connection.ends.append(to_listener)
            halves = [
                asyncio.ensure_future(self._pump(reader, to_listener, (dialler, listener))),
                asyncio.ensure_future(self._pump(there, writer, (listener, dialler))),
            ]
            try:
                await asyncio.wait(halves, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for half in halves:
                    half.cancel()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                await self._open(direction)
                writer.write(data)
                await writer.drain()

    async def _open(self, direction: Direction) -> None:
        """Wait until bytes pass in this direction."""
        while direction in self._cut:
            await self._changed.wait()
