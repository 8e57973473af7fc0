"""Sockets: publishing with many messages in flight, pushing, and the delay between them."""

import asyncio
import statistics
from dataclasses import dataclass, replace
from time import perf_counter_ns
from typing import Final

import msgspec
import uvloop
from websockets.asyncio.client import ClientConnection, connect
from websockets.typing import Subprotocol

from tests.bench.cases_publish import published
from tests.bench.figures import Bench, BenchError, Measured, Run
from tests.bench.load import Load
from tests.bench.patience import repeat
from tests.bench.processes import HOST, Pids, Usage
from tests.bench.server import Server, drive, fill, fresh_server
from tests.bench.socket_scripts import MSGPACK, SocketPublishes, SocketPushes

_STREAM: Final = "BENCH"
_PREFIX: Final = "bench"
_NS_PER_S: Final = 1_000_000_000
_LATE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class SocketPublish:
    """Single messages, ``outstanding`` of them on each of some sockets."""

    outstanding: int
    sockets: int = 1

    def __call__(self, bench: Bench) -> Measured:
        """Messages a second."""
        return published(
            bench,
            lambda _, prefix: SocketPublishes(prefix, self.outstanding, self.sockets),
            timed=True,
        )


@dataclass(frozen=True, slots=True)
class SocketPush:
    """An ordered subscription from the start of a stream, in columns with ``cols``."""

    form: str = MSGPACK
    cols: bool = False

    def __call__(self, bench: Bench) -> Measured:
        """Messages a second."""
        with fresh_server(bench) as server:
            fill(bench, server, _STREAM, _PREFIX)
            scripts = SocketPushes(_STREAM, bench.scale.messages, self.form, self.cols)

            def once(_: int) -> Run:
                driven = drive(bench, Load(server.port, server.pid, scripts))
                if driven.messages != bench.scale.messages:
                    raise BenchError(f"{driven.messages} messages were pushed")
                return driven.run

            return Measured(repeat(bench, once))


@dataclass(frozen=True, slots=True)
class Delay:
    """From publishing a message on one socket to its arrival on another, at a steady rate."""

    rate: int

    def __call__(self, bench: Bench) -> Measured:
        """Seconds, the median over all messages."""
        with fresh_server(bench) as server:
            server.create_stream(_STREAM, _PREFIX)
            return Measured(repeat(bench, lambda _: self._once(bench, server)))

    def _once(self, bench: Bench, server: Server) -> Run:
        count = round(self.rate * bench.scale.seconds)
        return bench.worker.submit(delays, server.port, server.pid, self.rate, count).result()


def delays(port: int, server_pid: Pids, rate: int, count: int) -> Run:
    """Publish ``count`` messages at ``rate`` a second; measures the delay of each."""
    return uvloop.run(_delays(port, server_pid, rate, count))


class _Pushed(msgspec.Struct):
    data: bytes


class _Frame(msgspec.Struct):
    op: str
    messages: list[_Pushed] = []


_decoder: Final = msgspec.msgpack.Decoder(_Frame)


async def _delays(port: int, server_pid: Pids, rate: int, count: int) -> Run:
    url = f"ws://{HOST}:{port}/v1/ws"
    form = [Subprotocol(MSGPACK)]
    async with (
        connect(url, subprotocols=form, compression=None) as publisher,
        connect(url, subprotocols=form, compression=None) as subscriber,
    ):
        sub = {"op": "sub", "id": 1, "sid": "s", "stream": _STREAM, "ordered": True}
        sub |= {"deliver_policy": "new", "credit": {"msgs": count}}
        await _ask(subscriber, sub)
        before = Usage.now(server_pid)
        sending = asyncio.create_task(_send(publisher, rate, count))
        async with asyncio.timeout(count / rate + _LATE_S):
            taken_ns = await _receive(subscriber, count)
            await sending
        after = Usage.now(server_pid)
    percentiles = statistics.quantiles(taken_ns, n=100, method="inclusive")
    median_s, p99_s = percentiles[49] / _NS_PER_S, percentiles[98] / _NS_PER_S
    return replace(before.run(after, count, value=median_s), p50_s=median_s, p99_s=p99_s)


async def _ask(socket: ClientConnection, frame: dict[str, object]) -> None:
    await socket.recv()
    await socket.send(msgspec.msgpack.encode(frame))
    answer = await socket.recv()
    if _decoder.decode(answer).op != "ok":
        raise BenchError(f"unexpected answer: {answer!r}")


async def wait_until(at_s: float) -> None:
    """Pause until the loop's time is ``at_s``."""
    wait_s = at_s - asyncio.get_running_loop().time()
    if wait_s > 0:
        await asyncio.sleep(wait_s)


async def _send(socket: ClientConnection, rate: int, count: int) -> None:
    begun = asyncio.get_running_loop().time()
    for number in range(count):
        await wait_until(begun + number / rate)
        data = perf_counter_ns().to_bytes(8) + bytes(120)
        await socket.send(
            msgspec.msgpack.encode({"op": "pub", "subject": f"{_PREFIX}.a", "data": data})
        )


async def _receive(socket: ClientConnection, count: int) -> list[int]:
    taken_ns: list[int] = []
    while len(taken_ns) < count:
        frame = _decoder.decode(await socket.recv())
        now_ns = perf_counter_ns()
        if frame.op == "error":
            raise BenchError("a message was refused")
        taken_ns += [now_ns - int.from_bytes(one.data[:8]) for one in frame.messages]
    return taken_ns
