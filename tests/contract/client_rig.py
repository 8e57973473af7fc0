"""What the tests of the client share: a server, a cable to it that can be cut, and deadlines."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar
from urllib.parse import urlsplit

from contrail_client import Contrail

T = TypeVar("T")

DEADLINE_S = 240.0
CHUNK = 65_536
_numbers = itertools.count(1)


def finish(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work``; it fails when it takes too long."""

    async def within_time() -> T:
        async with asyncio.timeout(DEADLINE_S):
            return await work

    return asyncio.run(within_time())


def new_stream(url: str, **config: Any) -> str:
    """A stream of a test's own, which captures what lies below its name; answers the name."""
    name = f"L{next(_numbers)}"
    with Contrail(url) as client:
        client.ensure_stream(name, {"subjects": [f"{name}.>"], **config})
    return name


class Cable:
    """Passes bytes between clients and a server, until it is cut."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = str(parts.hostname), int(parts.port or 0)
        self._ends: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Server | None = None
        self.url = ""
        self.mended = asyncio.Event()
        self.mended.set()
        self.connections = 0

    async def __aenter__(self) -> "Cable":
        self._listener = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        port = self._listener.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._listener is not None
        self._listener.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Break every connection; new ones are refused until ``repair``."""
        self.mended.clear()
        for end in self._ends:
            end.transport.abort()

    def repair(self) -> None:
        """Take connections again."""
        self.mended.set()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        if not self.mended.is_set():
            writer.transport.abort()
            return
        try:
            there, back = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.transport.abort()
            return
        self.connections += 1
        self._ends |= {writer, back}
        await asyncio.gather(self._pass(reader, back), self._pass(there, writer))

    async def _pass(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(CHUNK):
                target.write(data)
                await target.drain()
        target.close()
        self._ends.discard(target)


@contextlib.asynccontextmanager
async def cable_to(url: str) -> AsyncIterator[Cable]:
    """A cable to the server at ``url``."""
    async with Cable(url) as cable:
        yield cable
