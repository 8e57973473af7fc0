"""The load generator: connections with one request in flight each, which use little CPU.

It runs in its own process. Requests are encoded in advance if possible, and answers are read only
as far as needed to know that they are complete and valid.
"""

import asyncio
import statistics
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Final, Protocol, cast, runtime_checkable

import uvloop

from tests.bench.figures import BenchError, Run
from tests.bench.processes import HOST, Pids, Usage

_STUCK_S: Final = 120.0
SHOWN_BYTES: Final = 400


class Script(Protocol):
    """The requests of one connection."""

    messages: int
    """Messages that the answers have confirmed so far."""

    def request(self, answer: bytes) -> bytes | None:
        """The request after ``answer`` (empty at first); None at the end."""
        ...

    def complete(self, received: bytes) -> bool:
        """Whether ``received`` is the complete answer; BenchError if it is not valid."""
        ...


@runtime_checkable
class Ahead(Script, Protocol):
    """A script that does not wait for answers, so at its end some are still missing."""

    def end(self, answer: bytes) -> bool:
        """Handle ``answer`` after the last request; True if it was the last answer."""
        ...


@dataclass(frozen=True, slots=True)
class Load:
    """The requests to send, and the server to send them to.

    ``scripts`` is called in the process of the load generator and gives one script for each
    connection. The load ends when they do, or ``seconds`` after the warm-up.
    """

    port: int
    server_pid: Pids
    scripts: Callable[[], Sequence[Script]]
    seconds: float | None = None
    warm_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Driven:
    """``messages`` were confirmed in all; ``run`` is about those after the warm-up."""

    messages: int
    run: Run


def drive(load: Load) -> Driven:
    """Carry the load out; raises BenchError when an answer is not the expected one."""
    return uvloop.run(_Driver(load).drive())


class _Driver:
    def __init__(self, load: Load) -> None:
        self.over = False
        self.begun_at = array("d")
        self.ended_at = array("d")
        self._load = load
        self._scripts = load.scripts()
        self._talking = len(self._scripts)
        self._marks: list[tuple[Usage, int]] = []
        self._done: asyncio.Future[None]

    async def drive(self) -> Driven:
        loop = asyncio.get_running_loop()
        self._done = loop.create_future()
        connections = [_Connection(self, script) for script in self._scripts]
        for connection in connections:
            await loop.create_connection(partial(_same, connection), HOST, self._load.port)
        loop.call_later(self._load.warm_s, self._mark)
        if self._load.seconds is not None:
            loop.call_later(self._load.warm_s + self._load.seconds, self._end)
        for connection in connections:
            connection.proceed(b"")
        try:
            async with asyncio.timeout(self._load.warm_s + (self._load.seconds or 0.0) + _STUCK_S):
                await self._done
        except TimeoutError:
            raise BenchError(f"stuck after {self._messages()} messages") from None
        if len(self._marks) == 1:
            self._mark()
        if len(self._marks) != 2:
            raise BenchError("the load ended before its warm-up")
        return Driven(self._messages(), self._run())

    def finished(self) -> None:
        """A connection has said all."""
        self._talking -= 1
        if not self._talking and not self._done.done():
            self._done.set_result(None)

    def fail(self, error: Exception) -> None:
        """A connection cannot go on."""
        self.over = True
        if not self._done.done():
            self._done.set_exception(error)

    def _end(self) -> None:
        if self._talking:
            self._mark()
            self.over = True

    def _mark(self) -> None:
        self._marks.append((Usage.now(self._load.server_pid), self._messages()))

    def _messages(self) -> int:
        return sum(script.messages for script in self._scripts)

    def _run(self) -> Run:
        (first, messages_before), (last, messages_after) = self._marks
        messages = messages_after - messages_before
        latencies = [
            ended - begun
            for begun, ended in zip(self.begun_at, self.ended_at, strict=True)
            if first.at_s <= begun and ended <= last.at_s
        ]
        if not messages or len(latencies) < 2:
            raise BenchError("no request was answered within the time")
        percentiles = statistics.quantiles(latencies, n=100, method="inclusive")
        run = first.run(last, messages)
        return replace(run, p50_s=percentiles[49], p99_s=percentiles[98])


def _same(connection: "_Connection") -> "_Connection":
    return connection


class _Connection(asyncio.Protocol):
    def __init__(self, driver: _Driver, script: Script) -> None:
        self._driver = driver
        self._script = script
        self._received = b""
        self._begun = 0.0
        self._transport: asyncio.WriteTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio's.
        self._transport = cast(asyncio.WriteTransport, transport)

    def proceed(self, answer: bytes) -> None:
        """Send the request after ``answer``."""
        if self._driver.over and isinstance(self._script, Ahead):
            if self._script.end(answer):
                self._close()
            return
        request = self._script.request(answer)
        if request is None or self._driver.over:
            self._close()
            return
        self._begun = perf_counter()
        self._transport.write(request)

    def _close(self) -> None:
        self._transport.close()
        self._driver.finished()

    def data_received(self, data: bytes) -> None:
        try:
            received = self._received + data if self._received else data
            if not self._script.complete(received):
                self._received = received
                return
            self._received = b""
            self._driver.begun_at.append(self._begun)
            self._driver.ended_at.append(perf_counter())
            self.proceed(received)
        except Exception as error:
            self._driver.fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._transport.is_closing():
            self._driver.fail(BenchError(f"the server closed a connection: {exc}"))
