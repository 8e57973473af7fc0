"""Requests to many streams and consumers, and sockets that do nothing."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Final, cast

import uvloop

from tests.bench.figures import BenchError
from tests.bench.http_scripts import JSON, MARKER, Pulling, Share, body_start, http_request
from tests.bench.load import SHOWN_BYTES, Script
from tests.bench.processes import HOST, Usage, cpu_s, rss_bytes
from tests.bench.socket_scripts import JSON as TEXT
from tests.bench.socket_scripts import handshake, opened

CONNECTIONS: Final = 8
_NO_CONTENT: Final = b"HTTP/1.1 204"
_OPENING: Final = 64
_PING: Final = b"\x89"
_PONG: Final = b"\x8a"
_MASKED: Final = 0x80


def stream_name(number: int) -> str:
    """The name of a stream; it captures ``subject_of(number)``."""
    return f"S{number}"


def subject_of(number: int) -> str:
    """A subject of a stream."""
    return f"s{number}.x"


class Calls:
    """Requests one after the other, each of which must be answered with 200, 201 or 204."""

    def __init__(self, requests: Iterator[bytes]) -> None:
        self.messages = 0
        self._requests = requests

    def request(self, answer: bytes) -> bytes | None:
        """The next request."""
        if answer:
            self.messages += 1
        return next(self._requests, None)

    def complete(self, received: bytes) -> bool:
        """Whether the answer is there."""
        if received.startswith(_NO_CONTENT):
            return received.endswith(b"\r\n\r\n")
        return body_start(received, (b"200", b"201")) > 0


class PullOnce:
    """Pulls one message of each of many consumers, and acknowledges it."""

    def __init__(self, consumers: Iterator[str]) -> None:
        self.messages = 0
        self._consumers = consumers
        self._pulling: Pulling | None = None

    def request(self, answer: bytes) -> bytes | None:
        """The acknowledgement of the message, or the pull of the next consumer."""
        if self._pulling is not None:
            request = self._pulling.request(answer)
            if request is not None:
                return request
            self.messages += self._pulling.messages
        path = next(self._consumers, None)
        if path is None:
            return None
        self._pulling = Pulling(path, 1, Share(1))
        return self._pulling.request(b"")

    def complete(self, received: bytes) -> bool:
        """Whether the answer is there."""
        assert self._pulling is not None
        return self._pulling.complete(received)


@dataclass(frozen=True, slots=True)
class Many:
    """The same call for each of ``numbers``, over some connections."""

    call: Callable[[int], bytes]
    numbers: range

    def __call__(self) -> Sequence[Script]:
        """The scripts of the connections, which share the calls."""
        shared = map(self.call, self.numbers)
        return [Calls(shared) for _ in range(CONNECTIONS)]


@dataclass(frozen=True, slots=True)
class PullEach:
    """One message for each consumer of ``numbers``."""

    streams: int
    numbers: range

    def __call__(self) -> Sequence[Script]:
        """The scripts of the connections, which share the consumers."""
        shared = (consumer_path(self.streams, number) for number in self.numbers)
        return [PullOnce(shared) for _ in range(CONNECTIONS)]


def consumer_path(streams: int, number: int) -> str:
    """The path of a consumer: the first ones are on different streams."""
    return f"/v1/streams/{stream_name(number % streams)}/consumers/c{number // streams}"


def put_stream(number: int) -> bytes:
    """Create a stream."""
    return _call("PUT", f"/v1/streams/{stream_name(number)}", {"subjects": [f"s{number}.>"]})


def delete_stream(number: int) -> bytes:
    """Delete a stream."""
    return _call("DELETE", f"/v1/streams/{stream_name(number)}")


def publish_to(number: int) -> bytes:
    """Publish to a subject; the server finds the stream."""
    path = f"/v1/subjects/{subject_of(number)}/messages"
    return http_request(path, "application/octet-stream", MARKER)


def put_consumer(streams: int, number: int) -> bytes:
    """Create a durable consumer."""
    return _call("PUT", consumer_path(streams, number), {})


def delete_consumer(streams: int, number: int) -> bytes:
    """Delete a consumer."""
    return _call("DELETE", consumer_path(streams, number))


def _call(method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    return http_request(path, JSON, content, JSON).replace(b"POST", method.encode(), 1)


# Idle sockets ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Held:
    """The cost of sockets to the server: to open all of them, and to hold them."""

    opened_s: float
    opened_cpu_s: float
    bytes_all: int
    idle_cores: float


def hold_sockets(port: int, server_pid: int, count: int, seconds: float) -> Held:
    """Open ``count`` WebSockets, and answer nothing but pings for ``seconds``."""
    return uvloop.run(_hold(port, server_pid, count, seconds))


async def _hold(port: int, server_pid: int, count: int, seconds: float) -> Held:
    loop = asyncio.get_running_loop()
    before, before_bytes = Usage.now(server_pid), rss_bytes(server_pid)
    sockets = [_Idle(loop) for _ in range(count)]
    waiting = iter(sockets)
    while some := list(islice(waiting, _OPENING)):
        for one in some:
            await loop.create_connection(partial(_same, one), HOST, port)
        await asyncio.gather(*(one.open for one in some))
    after = Usage.now(server_pid)
    grown = rss_bytes(server_pid) - before_bytes
    cpu, begun = cpu_s(server_pid), time.monotonic()
    await wait_for(seconds)
    idle_cores = (cpu_s(server_pid) - cpu) / (time.monotonic() - begun)
    if lost := sum(one.lost for one in sockets):
        raise BenchError(f"the server closed {lost} of {count} idle sockets")
    for one in sockets:
        one.close()
    return Held(after.at_s - before.at_s, after.server_s - before.server_s, grown, idle_cores)


async def wait_for(seconds: float) -> None:
    """Let time pass while nothing is asked."""
    await asyncio.sleep(seconds)


def _same(one: "_Idle") -> "_Idle":
    return one


class _Idle(asyncio.Protocol):
    """A WebSocket that answers pings."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.open: asyncio.Future[None] = loop.create_future()
        self.lost = False
        self._received = b""
        self._transport: asyncio.WriteTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio's.
        self._transport = cast(asyncio.WriteTransport, transport)
        self._transport.write(handshake(TEXT))

    def data_received(self, data: bytes) -> None:
        if not self.open.done():
            self._received += data
            try:
                if opened(self._received):
                    self.open.set_result(None)
            except BenchError as error:
                self.open.set_exception(error)
        elif data.startswith(_PING) and len(data) == 2 + data[1]:
            # Masked with zeros, which changes nothing.
            self._transport.write(_PONG + bytes((_MASKED | data[1],)) + bytes(4) + data[2:])
        elif not data.startswith(b"\x81"):
            raise BenchError(f"an idle socket got {data[:SHOWN_BYTES]!r}")

    def close(self) -> None:
        """End the connection."""
        self.lost = False
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if not self.open.done():
            self.open.set_exception(BenchError(f"a socket was not opened: {exc}"))
