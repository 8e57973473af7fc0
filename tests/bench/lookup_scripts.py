"""Requests for single messages whose answers are known, and streams of many subjects to read."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from tests.bench.figures import BenchError
from tests.bench.http_scripts import (
    JSON,
    MARKER,
    MSGPACK,
    Item,
    Publishing,
    body_start,
    http_request,
    msgpack_batch,
    payloads,
)
from tests.bench.load import SHOWN_BYTES, Script
from tests.bench.server import FILL_BATCH

MANY_SUBJECTS: Final = 10_000
GROUP_SUBJECTS: Final = 100
"""Subjects that begin alike: one in a hundred."""

_REQUESTS: Final = 200

Lookup = tuple[bytes, tuple[bytes, ...]]
"""A request, and what its answer must contain."""


class Looking:
    """Asks for ``together`` messages after the other; each answer must be what was asked for."""

    def __init__(self, lookups: Iterator[Lookup], together: int = 1) -> None:
        self.messages = 0
        self._lookups = lookups
        self._together = together
        self._expected: tuple[bytes, ...] = ()

    def request(self, answer: bytes) -> bytes | None:
        """The next request."""
        if answer:
            self.messages += self._together
        request, self._expected = next(self._lookups, (None, ()))
        return request

    def complete(self, received: bytes) -> bool:
        """Whether the answer is there; BenchError when it has not just the right messages."""
        if not body_start(received, (b"200",)):
            return False
        missing = [part for part in self._expected if part not in received]
        if missing or received.count(MARKER) != self._together:
            raise BenchError(f"{missing} is not in {received[:SHOWN_BYTES]!r}")
        return True


@dataclass(frozen=True, slots=True)
class LastLookups:
    """Gets of the last message of random subjects of ``DistinctSubjects``."""

    stream: str
    prefix: str
    batches: int
    connections: int

    def __call__(self) -> Sequence[Script]:
        """The scripts of the connections."""
        shared = self._lookups(payloads())
        return [Looking(shared) for _ in range(self.connections)]

    def _lookups(self, pool: list[bytes]) -> Iterator[Lookup]:
        chance = random.Random(2)
        while True:
            batch, number = chance.randrange(self.batches), chance.randrange(FILL_BATCH)
            subject = f"{self.prefix}.{batch}.{number}"
            expected = (b'"subject":"%b"' % subject.encode(), pool[number])
            yield _get(f"/v1/streams/{self.stream}/last?subject={subject}"), expected


@dataclass(frozen=True, slots=True)
class SequenceLookups:
    """Gets of messages by random sequences."""

    stream: str
    messages: int
    connections: int

    def __call__(self) -> Sequence[Script]:
        """The scripts of the connections."""
        shared = self._lookups()
        return [Looking(shared) for _ in range(self.connections)]

    def _lookups(self) -> Iterator[Lookup]:
        chance = random.Random(2)
        while True:
            seq = chance.randint(1, self.messages)
            expected = (b"\r\nnats-sequence: %d\r\n" % seq,)
            yield _get(f"/v1/streams/{self.stream}/messages/{seq}"), expected


@dataclass(frozen=True, slots=True)
class ManyLookups:
    """Gets of many messages by sequences in msgpack: every fourth one from a random one on."""

    stream: str
    messages: int
    connections: int
    together: int

    def __call__(self) -> Sequence[Script]:
        """The scripts of the connections, which share the requests."""
        chance = random.Random(2)
        path, span = f"/v1/streams/{self.stream}/messages/get", 4 * self.together
        requests: list[Lookup] = []
        for _ in range(_REQUESTS):
            first = chance.randint(1, self.messages - span)
            body = msgspec.json.encode({"seqs": list(range(first, first + span, 4))})
            requests.append((http_request(path, JSON, body, MSGPACK), ()))
        again = itertools.cycle(requests)
        return [Looking(again, self.together) for _ in range(self.connections)]


def _get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: */*\r\n\r\n".encode()


@dataclass(frozen=True, slots=True)
class ShuffledSubjects:
    """Batches of 1,000 messages over 10,000 subjects, ``prefix.0.0`` to ``prefix.99.99``.

    Every ten batches have each subject once, those that begin alike far from each other.
    """

    stream: str
    prefix: str
    count: int
    connections: int

    def __call__(self) -> Sequence[Script]:
        """The scripts of the connections, which share the batches."""
        path = f"/v1/streams/{self.stream}/messages"
        requests = [http_request(path, MSGPACK, msgpack_batch(items)) for items in self._batches()]
        shared = itertools.islice(itertools.cycle(requests), self.count)
        return [Publishing(shared, FILL_BATCH) for _ in range(self.connections)]

    def _batches(self) -> Iterator[list[Item]]:
        numbers = list(range(MANY_SUBJECTS))
        random.Random(2).shuffle(numbers)
        pool = payloads()
        for first in range(0, MANY_SUBJECTS, FILL_BATCH):
            part = numbers[first : first + FILL_BATCH]
            yield [(self._subject(number), None, pool[number % len(pool)]) for number in part]

    def _subject(self, number: int) -> str:
        group, member = divmod(number, GROUP_SUBJECTS)
        return f"{self.prefix}.{group}.{member}"
