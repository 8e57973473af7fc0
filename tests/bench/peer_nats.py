"""NATS JetStream over its text protocol: publish with acks, replay, pulls.

``sync_interval: always`` is asked for; a server that does not know it (before 2.10) acknowledges
from the page cache, and the report says so.
"""

import contextlib
import itertools
import json
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from tests.bench.figures import PULLED_MAX, Bench, BenchError, Measured, Run
from tests.bench.http_scripts import MARKER, PAYLOAD_BYTES, payloads
from tests.bench.load import SHOWN_BYTES, Load, Script
from tests.bench.patience import repeat
from tests.bench.processes import HOST, Usage, listens, running, wait_until
from tests.bench.server import drive
from tests.support.ports import free_port

HELLO: Final = b'CONNECT {"verbose":false,"pedantic":false,"headers":true}\r\n'
_PULL: Final = 100
_FILL_WINDOW: Final = 1_000
WARM_S: Final = 0.5
_TIMEOUT_S: Final = 60.0
_SYNCED: Final = "sync_interval: always"


@dataclass(frozen=True, slots=True)
class Nats:
    """A server that is up; ``note`` says what its acks mean."""

    port: int
    pid: int
    note: str


@contextlib.contextmanager
def nats_server(bench: Bench) -> Iterator[Nats | None]:
    """A JetStream server without data; None when it is not installed."""
    program = shutil.which("nats-server")
    if program is None:
        yield None
        return
    with tempfile.TemporaryDirectory(dir=bench.folder) as folder:
        version = _output(program, "--version").removeprefix("nats-server: ")
        config = Path(folder, "nats.conf")
        config.write_text(_config(folder, _SYNCED))
        durable = _accepts(program, config)
        if not durable:
            config.write_text(_config(folder, ""))
        port = free_port()
        command = [program, "-a", HOST, "-p", str(port), "-c", str(config)]
        with running(command, Path(folder, "nats.log")) as process:
            wait_until(partial(listens, port), "starting NATS")
            means = "fsync before the ack" if durable else "acks from the page cache, no fsync"
            yield Nats(port, process.pid, f"NATS {version}, {means}")


def _config(folder: str, sync: str) -> str:
    return f'jetstream {{ store_dir: "{folder}"\n max_file_store: 20GB\n {sync}\n }}\n'


def _accepts(program: str, config: Path) -> bool:
    tested = subprocess.run([program, "-c", config, "-t"], capture_output=True, check=False)
    return tested.returncode == 0


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


class Client:
    """A blocking connection for what is not measured, and for counting a replay."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection((HOST, port), timeout=_TIMEOUT_S)
        self.socket.sendall(HELLO + b"SUB reply 1\r\nPING\r\n")
        self._lines = self.socket.makefile("rb")
        while not self._lines.readline().startswith(b"PONG"):
            pass

    def call(self, api: str, body: Any) -> Any:
        """The answer of a JetStream request; BenchError when it is an error."""
        data = json.dumps(body).encode()
        self.socket.sendall(b"PUB $JS.API.%b reply %d\r\n%b\r\n" % (api.encode(), len(data), data))
        while not (line := self._lines.readline()).startswith(b"MSG"):
            if not line:
                raise BenchError("NATS closed the connection")
        answer = json.loads(self._lines.read(int(line.split()[-1])))
        self._lines.readline()
        if "error" in answer:
            raise BenchError(f"{api}: {answer['error']}")
        return answer

    def create_stream(self, stream: str, **settings: Any) -> None:
        """A file stream of one replica, without ``settings`` on a subject of its own name."""
        config = {"name": stream, "subjects": [stream.lower()], "storage": "file"}
        defaults = {**config, "num_replicas": 1, "max_age": 0}
        self.call(f"STREAM.CREATE.{stream}", {**defaults, **settings})

    def check_stored(self, stream: str, messages: int) -> None:
        """BenchError unless the stream holds exactly ``messages``."""
        stored = self.call(f"STREAM.INFO.{stream}", {})["state"]["messages"]
        if stored != messages:
            raise BenchError(f"{messages} messages were acknowledged, NATS stored {stored}")

    def count_payloads(self, messages: int) -> None:
        """Read until as many payloads have come."""
        buffer = bytearray(1 << 20)
        view = memoryview(buffer)
        kept = 0
        while messages > 0:
            count = self.socket.recv_into(view[kept:])
            if not count:
                raise BenchError(f"NATS closed the connection with {messages} messages missing")
            end = kept + count
            messages -= buffer.count(MARKER, 0, end)
            # A marker may be cut by the end of what was read; a whole one must not count twice.
            kept = min(len(MARKER) - 1, end)
            buffer[:kept] = buffer[end - kept : end]

    def close(self) -> None:
        """End the connection."""
        self._lines.close()
        self.socket.close()


def without_pings(received: bytes) -> bytes:
    """The server's pings may stay unanswered for minutes; they must not be taken for an answer."""
    return received.replace(b"PING\r\n", b"")


class Publishing:
    """Publishes ``each`` messages at a time and waits for all their acks."""

    def __init__(self, inbox: bytes, requests: Iterator[list[bytes]], each: int) -> None:
        self.messages = 0
        self._inbox = inbox
        self._requests = requests
        self._each = each
        self._greeted = False

    def request(self, answer: bytes) -> bytes | None:
        """The next messages."""
        if not answer:
            return HELLO + b"SUB %b 1\r\nPING\r\n" % self._inbox
        if self._greeted:
            self.messages += self._each
        self._greeted = True
        parts = next(self._requests, None)
        return None if parts is None else self._inbox.join(parts)

    def complete(self, received: bytes) -> bool:
        """Whether all acks are there."""
        if not self._greeted:
            return b"PONG\r\n" in received
        if b"-ERR" in received or b'"error"' in received:
            raise BenchError(f"NATS refused: {received[:SHOWN_BYTES]!r}")
        acks = received.count(b'"seq":')
        return acks == self._each and without_pings(received).endswith(b"}\r\n")


@dataclass(frozen=True, slots=True)
class _Publishes:
    stream: str
    each: int
    connections: int
    count: int | None = None

    def __call__(self) -> Sequence[Script]:
        pool = payloads()
        subject = self.stream.lower().encode()
        head = b"PUB %b " % subject
        tails = [b" %d\r\n%b\r\n" % (len(payload), payload) for payload in pool]
        requests = [
            self._parts(head, tails[at : at + self.each]) for at in range(0, len(pool), self.each)
        ]
        shared: Iterator[list[bytes]] = itertools.cycle(requests)
        if self.count is not None:
            shared = itertools.islice(shared, self.count)
        return [
            Publishing(b"in.%d" % number, shared, self.each) for number in range(self.connections)
        ]

    @staticmethod
    def _parts(head: bytes, tails: list[bytes]) -> list[bytes]:
        """The messages, cut where each connection puts the name of its inbox."""
        return [head, *(tail + head for tail in tails[:-1]), tails[-1]]


@dataclass(frozen=True, slots=True)
class Publish:
    """Publishes with acks, ``each`` outstanding on each of some connections."""

    each: int
    connections: int

    def __call__(self, bench: Bench) -> Measured | None:
        """Messages a second; None when NATS is not installed."""
        with nats_server(bench) as nats:
            if nats is None:
                return None
            runs = repeat(bench, lambda number: self._run(bench, nats, f"S{number}"))
        return Measured(runs, nats.note)

    def _run(self, bench: Bench, nats: Nats, stream: str) -> Run:
        with contextlib.closing(Client(nats.port)) as client:
            client.create_stream(stream)
            publishes = _Publishes(stream, self.each, self.connections)
            load = Load(nats.port, nats.pid, publishes, bench.scale.seconds, WARM_S)
            driven = drive(bench, load)
            client.check_stored(stream, driven.messages)
        return driven.run


def _fill(bench: Bench, nats: Nats, client: Client, messages: int) -> None:
    client.create_stream("S")
    publishes = _Publishes("S", _FILL_WINDOW, 1, count=messages // _FILL_WINDOW)
    drive(bench, Load(nats.port, nats.pid, publishes))
    client.check_stored("S", messages)


def replay(bench: Bench) -> Measured | None:
    """A push consumer without acks from the start, counted but not decoded: messages a second."""
    with nats_server(bench) as nats:
        if nats is None:
            return None
        with contextlib.closing(Client(nats.port)) as client:
            _fill(bench, nats, client, bench.scale.messages)

        def once(number: int) -> Run:
            drained = bench.worker.submit(_drain, nats, bench.scale.messages, f"d{number}")
            return drained.result()

        runs = repeat(bench, once)
    return Measured(runs, nats.note)


def _drain(nats: Nats, messages: int, inbox: str) -> Run:
    with contextlib.closing(Client(nats.port)) as client:
        client.socket.sendall(b"SUB %b 2\r\n" % inbox.encode())
        config = {"deliver_subject": inbox, "ack_policy": "none", "deliver_policy": "all"}
        data = json.dumps({"stream_name": "S", "config": config}).encode()
        before = Usage.now(nats.pid)
        client.socket.sendall(b"PUB $JS.API.CONSUMER.CREATE.S %d\r\n%b\r\n" % (len(data), data))
        client.count_payloads(messages)
        after = Usage.now(nats.pid)
    return before.run(after, messages)


class _Pulling:
    """Pulls 100 at a time and acknowledges each before the next pull, in one write."""

    def __init__(self, consumer: str) -> None:
        self.messages = 0
        asked = json.dumps({"batch": _PULL, "no_wait": True}).encode()
        api = f"$JS.API.CONSUMER.MSG.NEXT.S.{consumer}".encode()
        self._next = b"PUB %b in %d\r\n%b\r\n" % (api, len(asked), asked)
        self._greeted = False
        self._acking = 0

    def request(self, answer: bytes) -> bytes | None:
        if not answer:
            return HELLO + b"SUB in 1\r\nPING\r\n"
        if not self._greeted:
            self._greeted = True
            return self._next
        self.messages += self._acking
        if answer.startswith(b"HMSG"):
            return None
        lines = without_pings(answer).split(b"\r\n")
        replies = [line.split(b" ")[3] for line in lines[:-1:2]]
        self._acking = len(replies)
        return b"".join(b"PUB %b 0\r\n\r\n" % reply for reply in replies) + self._next

    def complete(self, received: bytes) -> bool:
        if not self._greeted:
            return b"PONG\r\n" in received
        received = without_pings(received)
        if received.startswith(b"HMSG"):
            return b"404 No Messages" in received
        return (
            received.count(MARKER) == _PULL
            and len(received) - received.rfind(MARKER) == PAYLOAD_BYTES + 2
        )


@dataclass(frozen=True, slots=True)
class _Pulls:
    consumer: str

    def __call__(self) -> Sequence[Script]:
        return [_Pulling(self.consumer)]


def pull(bench: Bench) -> Measured | None:
    """Pulls of 100 with explicit acks, one outstanding: messages a second."""
    messages = min(bench.scale.messages, PULLED_MAX)
    with nats_server(bench) as nats:
        if nats is None:
            return None
        with contextlib.closing(Client(nats.port)) as client:
            _fill(bench, nats, client, messages)

            def once(number: int) -> Run:
                config = {"durable_name": f"C{number}", "ack_policy": "explicit"}
                body = {"stream_name": "S", "config": config}
                client.call(f"CONSUMER.DURABLE.CREATE.S.C{number}", body)
                driven = drive(bench, Load(nats.port, nats.pid, _Pulls(f"C{number}")))
                if driven.messages != messages:
                    raise BenchError(f"NATS gave {driven.messages} of {messages} messages")
                return driven.run

            runs = repeat(bench, once)
    return Measured(runs, nats.note)
