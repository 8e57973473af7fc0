"""NATS JetStream: the last message of a subject, out of many subjects."""

import contextlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tests.bench.figures import Bench, BenchError, Measured, Run
from tests.bench.http_scripts import payloads
from tests.bench.load import SHOWN_BYTES, Load, Script
from tests.bench.patience import repeat
from tests.bench.peer_nats import (
    HELLO,
    WARM_S,
    Client,
    Publishing,
    nats_server,
    without_pings,
)
from tests.bench.server import FILL_BATCH, FILL_CONNECTIONS, drive

_STREAM: Final = "S"


def _subject(batch: int, number: int) -> bytes:
    return b"s.%d.%d" % (batch, number)


@dataclass(frozen=True, slots=True)
class _DistinctSubjects:
    """Publishes each message on a subject of its own, 1,000 outstanding on each connection."""

    batches: int

    def __call__(self) -> Sequence[Script]:
        shared = self._requests(payloads())
        inboxes = [b"in.%d" % number for number in range(FILL_CONNECTIONS)]
        return [Publishing(inbox, shared, FILL_BATCH) for inbox in inboxes]

    def _requests(self, pool: list[bytes]) -> Iterator[list[bytes]]:
        for batch in range(self.batches):
            heads = [b"PUB %b " % _subject(batch, number) for number in range(FILL_BATCH)]
            tails = [b" %d\r\n%b\r\n" % (len(payload), payload) for payload in pool[:FILL_BATCH]]
            joints = [tail + head for tail, head in zip(tails, heads[1:], strict=False)]
            yield [heads[0], *joints, tails[-1]]


class _Getting:
    """Asks for the last message of one random subject after the other."""

    def __init__(self, inbox: bytes, lookups: Iterator[tuple[bytes, bytes]]) -> None:
        self.messages = 0
        self._inbox = inbox
        self._lookups = lookups
        self._subject = self._payload = b""

    def request(self, answer: bytes) -> bytes | None:
        """The next request."""
        if not answer:
            return HELLO + b"SUB %b 1\r\nPING\r\n" % self._inbox
        if self._subject:
            self.messages += 1
        self._subject, self._payload = next(self._lookups)
        api = b"$JS.API.DIRECT.GET.%b.%b" % (_STREAM.encode(), self._subject)
        return b"PUB %b %b 0\r\n\r\n" % (api, self._inbox)

    def complete(self, received: bytes) -> bool:
        """Whether the answer is there; BenchError when it is not the right message."""
        if not self._subject:
            return b"PONG\r\n" in received
        line, _, rest = without_pings(received).partition(b"\r\n")
        if not rest or len(rest) < int(line.split()[-1]) + 2:
            return False
        named = b"\r\nNats-Subject: %b\r\n" % self._subject
        if named not in rest or not rest.endswith(b"\r\n\r\n%b\r\n" % self._payload):
            raise BenchError(f"NATS gave another message: {received[:SHOWN_BYTES]!r}")
        return True


@dataclass(frozen=True, slots=True)
class Gets:
    """Gets over some connections, one outstanding on each."""

    batches: int
    connections: int

    def __call__(self) -> Sequence[Script]:
        """The scripts of the connections."""
        shared = self._lookups(payloads())
        return [_Getting(b"in.%d" % number, shared) for number in range(self.connections)]

    def _lookups(self, pool: list[bytes]) -> Iterator[tuple[bytes, bytes]]:
        chance = random.Random(2)
        while True:
            batch, number = chance.randrange(self.batches), chance.randrange(FILL_BATCH)
            yield _subject(batch, number), pool[number]


@dataclass(frozen=True, slots=True)
class LastGet:
    """Direct gets of the last message of random subjects, one outstanding on each connection."""

    connections: int

    def __call__(self, bench: Bench) -> Measured | None:
        """Gets a second; None when NATS is not installed."""
        batches = bench.scale.messages // FILL_BATCH
        with nats_server(bench) as nats:
            if nats is None:
                return None
            with contextlib.closing(Client(nats.port)) as client:
                client.create_stream(_STREAM, subjects=["s.>"], allow_direct=True)
                drive(bench, Load(nats.port, nats.pid, _DistinctSubjects(batches)))
                client.check_stored(_STREAM, bench.scale.messages)
            gets = Gets(batches, self.connections)
            load = Load(nats.port, nats.pid, gets, bench.scale.seconds, WARM_S)

            def once(_: int) -> Run:
                return drive(bench, load).run

            runs = repeat(bench, once)
        return Measured(runs, f"{bench.scale.messages:,} subjects; {nats.note}")
