"""Redis Streams with ``appendfsync always``, which syncs before it answers; RESP by hand."""

import contextlib
import itertools
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Final

from tests.bench.figures import PULLED_MAX, Bench, BenchError, Measured, Run
from tests.bench.http_scripts import MARKER, PAYLOAD_BYTES, payloads
from tests.bench.load import SHOWN_BYTES, Load, Script
from tests.bench.patience import repeat
from tests.bench.processes import HOST, listens, running, wait_until
from tests.bench.server import drive
from tests.support.ports import free_port

_ENTRY_ID: Final = re.compile(rb"\*2\r\n\$\d+\r\n(\d+-\d+)\r\n")
_PAGE: Final = 1_000
_PULL: Final = 100
_FILL_PIPELINE: Final = 1_000
_WARM_S: Final = 0.5


def _command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(w), w) for w in words)


@contextlib.contextmanager
def _redis(bench: Bench) -> Iterator[tuple[int, int] | None]:
    """Port and process id of a Redis without data; None when it is not installed."""
    program = shutil.which("redis-server")
    if program is None:
        yield None
        return
    with tempfile.TemporaryDirectory(dir=bench.folder) as folder:
        port = free_port()
        command = [program, "--bind", HOST, "--port", str(port), "--dir", folder, "--save", ""]
        command += ["--appendonly", "yes", "--appendfsync", "always", "--daemonize", "no"]
        command += ["--logfile", str(Path(folder, "redis.log"))]
        with running(command, Path(folder, "stderr.log")) as process:
            wait_until(partial(listens, port), "starting Redis")
            yield port, process.pid


@cache
def _version() -> str:
    line = subprocess.run(["redis-server", "--version"], capture_output=True, text=True, check=True)
    return line.stdout.split()[2].removeprefix("v=")


def _note() -> str:
    return f"Redis {_version()}, appendfsync always"


def _call(port: int, *words: bytes) -> bytes:
    """The one-line answer of a command that is not measured."""
    with socket.create_connection((HOST, port)) as connection:
        connection.sendall(_command(*words))
        answer = connection.recv(4_096)
    _refuse_errors(answer)
    return answer


class _Adding:
    """Sends XADDs, ``each`` at a time."""

    def __init__(self, requests: Iterator[bytes], each: int) -> None:
        self.messages = 0
        self._requests = requests
        self._each = each

    def request(self, answer: bytes) -> bytes | None:
        if answer:
            self.messages += self._each
        return next(self._requests, None)

    def complete(self, received: bytes) -> bool:
        _refuse_errors(received)
        return received.count(b"\r\n") == 2 * self._each and received.endswith(b"\r\n")


def _refuse_errors(received: bytes) -> None:
    if received.startswith(b"-") or b"\r\n-" in received:
        raise BenchError(f"Redis refused: {received[:SHOWN_BYTES]!r}")


@dataclass(frozen=True, slots=True)
class _Adds:
    stream: str
    each: int
    connections: int
    count: int | None = None

    def __call__(self) -> Sequence[Script]:
        key = self.stream.encode()
        adds = [_command(b"XADD", key, b"*", b"d", payload) for payload in payloads()]
        requests = [b"".join(adds[at : at + self.each]) for at in range(0, len(adds), self.each)]
        shared: Iterator[bytes] = itertools.cycle(requests)
        if self.count is not None:
            shared = itertools.islice(shared, self.count)
        return [_Adding(shared, self.each) for _ in range(self.connections)]


class _Ranging:
    """Reads the whole stream in pages."""

    def __init__(self, stream: str) -> None:
        self.messages = 0
        self._key = stream.encode()

    def request(self, answer: bytes) -> bytes | None:
        if answer == b"*0\r\n":
            return None
        first = b"-"
        if answer:
            self.messages += _PAGE
            first = b"(" + _ENTRY_ID.findall(answer, answer.rfind(b"*2\r\n$", 0, -150))[-1]
        return _command(b"XRANGE", self._key, first, b"+", b"COUNT", b"%d" % _PAGE)

    def complete(self, received: bytes) -> bool:
        return received == b"*0\r\n" or _holds_payloads(received, _PAGE)


def _holds_payloads(received: bytes, count: int) -> bool:
    return (
        received.endswith(b"\r\n")
        and len(received) - received.rfind(MARKER) == PAYLOAD_BYTES + 2
        and received.count(MARKER) == count
    )


class _Pulling:
    """Reads as one consumer of a group, acknowledging each batch in the request after it."""

    def __init__(self, stream: str) -> None:
        self.messages = 0
        self._key = stream.encode()
        self._read = _command(
            *[b"XREADGROUP", b"GROUP", b"g", b"c", b"COUNT", b"%d" % _PULL],
            *[b"STREAMS", self._key, b">"],
        )
        self._acking = 0

    def request(self, answer: bytes) -> bytes | None:
        self.messages += self._acking
        ids = _ENTRY_ID.findall(answer)
        self._acking = len(ids)
        if answer and not ids:
            return None
        ack = _command(b"XACK", self._key, b"g", *ids) if ids else b""
        return ack + self._read

    def complete(self, received: bytes) -> bool:
        _refuse_errors(received)
        if self._acking:
            line, _, received = received.partition(b"\r\n")
            if received and line != b":%d" % self._acking:
                raise BenchError(f"Redis acknowledged {line!r}, not {self._acking}")
        return received == b"*-1\r\n" or _holds_payloads(received, _PULL)


@dataclass(frozen=True, slots=True)
class _One:
    make: Callable[[str], Script]
    stream: str

    def __call__(self) -> Sequence[Script]:
        return [self.make(self.stream)]


@dataclass(frozen=True, slots=True)
class Publish:
    """XADD, ``each`` in one write, over some connections."""

    each: int
    connections: int

    def __call__(self, bench: Bench) -> Measured | None:
        """Messages a second; None when Redis is not installed."""
        with _redis(bench) as redis:
            if redis is None:
                return None
            runs = repeat(bench, lambda number: self._run(bench, redis, f"s{number}"))
        return Measured(runs, _note())

    def _run(self, bench: Bench, redis: tuple[int, int], stream: str) -> Run:
        adds = _Adds(stream, self.each, self.connections)
        driven = drive(bench, Load(*redis, adds, seconds=bench.scale.seconds, warm_s=_WARM_S))
        stored = _call(redis[0], b"XLEN", stream.encode())
        if stored != b":%d\r\n" % driven.messages:
            raise BenchError(f"{driven.messages} were acknowledged, Redis has {stored!r}")
        return driven.run


def replay(bench: Bench) -> Measured | None:
    """XRANGE in pages of 1,000, counted but not decoded: messages a second."""
    return _read(bench, _Ranging, bench.scale.messages)


def pull(bench: Bench) -> Measured | None:
    """XREADGROUP of 100 with the XACK of the batch before: messages a second."""
    return _read(bench, _Pulling, min(bench.scale.messages, PULLED_MAX))


def _read(bench: Bench, make: Callable[[str], Script], messages: int) -> Measured | None:
    with _redis(bench) as redis:
        if redis is None:
            return None
        adds = _Adds("s", _FILL_PIPELINE, 1, count=messages // _FILL_PIPELINE)
        drive(bench, Load(*redis, adds))

        def once(_: int) -> Run:
            _call(redis[0], b"XGROUP", b"DESTROY", b"s", b"g")
            _call(redis[0], b"XGROUP", b"CREATE", b"s", b"g", b"0")
            driven = drive(bench, Load(*redis, _One(make, "s")))
            if driven.messages != messages:
                raise BenchError(f"Redis gave {driven.messages} of {messages} messages")
            return driven.run

        runs = repeat(bench, once)
    return Measured(runs, _note())
