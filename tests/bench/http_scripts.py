"""Requests of the public API, encoded in advance, and the parsing of their answers."""

import itertools
import random
import string
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from tests.bench.figures import BenchError
from tests.bench.load import SHOWN_BYTES, Script

MARKER: Final = b"payload:"
"""Begins every payload and occurs nowhere else, so counting it counts messages."""
PAYLOAD_BYTES: Final = 128
SUBJECTS: Final = 16
JSON: Final = "application/json"
NDJSON: Final = "application/x-ndjson"
MSGPACK: Final = "application/vnd.msgpack"
PULL_COLUMNS: Final = f"{MSGPACK}; form=columns"
BYTES: Final = "application/octet-stream"
COLUMNS: Final = "columns"
"""The form of a batch in msgpack that consists of columns, answered in runs."""
_LENGTH: Final = b"\r\ncontent-length: "
_PULL_EXPIRES: Final = "5s"
_VARIANTS: Final = 4_000
_LETTERS: Final = string.ascii_letters + string.digits

Item = tuple[str, dict[str, list[str]] | None, bytes]
"""A message of a msgpack batch: subject, headers, payload."""


def payloads(count: int = _VARIANTS, size: int = PAYLOAD_BYTES) -> list[bytes]:
    """Random letters and digits, equal in all runs. They hardly compress."""
    chance = random.Random(1)
    length = size - len(MARKER)
    return [MARKER + "".join(chance.choices(_LETTERS, k=length)).encode() for _ in range(count)]


def http_request(path: str, content_type: str, body: bytes, accept: str = "*/*") -> bytes:
    """The bytes of a POST."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: {accept}\r\n"
        f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def body_start(received: bytes, statuses: tuple[bytes, ...]) -> int:
    """Return the start of the body of a complete answer; 0 while the answer is incomplete.

    BenchError if the answer has another status or no length.
    """
    end = received.find(b"\r\n\r\n")
    if end < 0:
        return 0
    if received[9:12] not in statuses:
        raise BenchError(f"unexpected answer: {received[:SHOWN_BYTES]!r}")
    # The service writes names in lower case; a general client would have to look for any case.
    at = received.find(_LENGTH, 0, end) + len(_LENGTH)
    if at < len(_LENGTH):
        raise BenchError(f"an answer without a length: {received[:SHOWN_BYTES]!r}")
    start = end + 4
    return start if len(received) - start >= int(received[at : received.find(b"\r", at)]) else 0


class Publishing:
    """Sends requests of ``messages_each`` messages, all of which must be stored (201)."""

    def __init__(self, requests: Iterator[bytes], messages_each: int) -> None:
        self.messages = 0
        self._requests = requests
        self._messages_each = messages_each

    def request(self, answer: bytes) -> bytes | None:
        """The next request."""
        if answer:
            self.messages += self._messages_each
        return next(self._requests, None)

    def complete(self, received: bytes) -> bool:
        """Whether the answer is there."""
        return body_start(received, (b"201",)) > 0


@dataclass(frozen=True, slots=True)
class Singles:
    """One message a request, the same ones again and again."""

    prefix: str
    connections: int

    def __call__(self) -> Sequence[Script]:
        """The scripts of the connections."""
        requests = [
            http_request(f"/v1/subjects/{self.prefix}.{number % SUBJECTS}/messages", BYTES, payload)
            for number, payload in enumerate(payloads())
        ]
        again = itertools.cycle(requests)
        return [Publishing(again, 1) for _ in range(self.connections)]


@dataclass(frozen=True, slots=True)
class Batches:
    """Batches of ``size`` messages: ``count`` of them, or without an end.

    With ``ids`` each message has an id that is used once.
    """

    stream: str
    prefix: str
    size: int
    connections: int
    form: str = MSGPACK
    count: int | None = None
    ids: bool = False
    payload_bytes: int = PAYLOAD_BYTES

    def __call__(self) -> Sequence[Script]:
        """The scripts of the connections, which share the batches."""
        encode = _ENCODERS[self.form]
        path = f"/v1/streams/{self.stream}/messages"
        kind, accept = (MSGPACK, MSGPACK) if self.form == COLUMNS else (self.form, "*/*")
        requests: Iterable[bytes] = [
            http_request(path, kind, encode(items), accept) for items in self._item_lists()
        ]
        if not self.ids:
            again = itertools.cycle(requests)
            requests = again if self.count is None else itertools.islice(again, self.count)
        shared = iter(requests)
        return [Publishing(shared, self.size) for _ in range(self.connections)]

    def _item_lists(self) -> Iterator[list[Item]]:
        pool = payloads(size=self.payload_bytes)
        count = _VARIANTS // self.size if not self.ids else self.count or 0
        for batch in range(count):
            yield [
                (
                    f"{self.prefix}.{number % SUBJECTS}",
                    {"Nats-Msg-Id": [f"{batch}-{number}"]} if self.ids else None,
                    pool[(batch * self.size + number) % _VARIANTS],
                )
                for number in range(self.size)
            ]


@dataclass(frozen=True, slots=True)
class DistinctSubjects:
    """Batches of 1,000 messages, each on a subject of its own, encoded as they are sent."""

    stream: str
    prefix: str
    count: int
    connections: int

    def __call__(self) -> Sequence[Script]:
        """The scripts of the connections, which share the batches."""
        shared = self._requests(payloads())
        return [Publishing(shared, 1_000) for _ in range(self.connections)]

    def _requests(self, pool: list[bytes]) -> Iterator[bytes]:
        path = f"/v1/streams/{self.stream}/messages"
        for batch in range(self.count):
            items: list[Item] = [
                (f"{self.prefix}.{batch}.{number}", None, pool[number]) for number in range(1_000)
            ]
            yield http_request(path, MSGPACK, msgpack_batch(items))


def msgpack_batch(items: list[Item]) -> bytes:
    """The body of a batch as msgpack."""
    return msgspec.msgpack.encode((1, items))


def _columns(items: list[Item]) -> bytes:
    subjects = list(dict.fromkeys(subject for subject, _, _ in items))
    index = [subjects.index(subject) for subject, _, _ in items]
    ids = [headers["Nats-Msg-Id"][0].encode() for _, headers, _ in items if headers]
    columns = (
        subjects,
        struct.pack(f"<{len(index)}I", *index),
        *_joined([payload for _, _, payload in items]),
        _joined(ids) if ids else None,
    )
    return msgspec.msgpack.encode((2, columns))


def _joined(values: list[bytes]) -> tuple[bytes, bytes]:
    offsets = itertools.accumulate(map(len, values), initial=0)
    return struct.pack(f"<{len(values) + 1}I", *offsets), b"".join(values)


def _objects(items: list[Item]) -> list[dict[str, Any]]:
    return [{"subject": subject, "data": payload.decode()} for subject, _, payload in items]


def _json(items: list[Item]) -> bytes:
    return msgspec.json.encode({"messages": _objects(items)})


def _ndjson(items: list[Item]) -> bytes:
    return b"".join(msgspec.json.encode(line) + b"\n" for line in _objects(items))


_ENCODERS: Final[dict[str, Callable[[list[Item]], bytes]]] = {
    MSGPACK: msgpack_batch,
    COLUMNS: _columns,
    JSON: _json,
    NDJSON: _ndjson,
}


class _Delivery(msgspec.Struct):
    seq: int
    ack_token: str


class _Refusable(msgspec.Struct):
    ok: bool = False


class _Pulled(msgspec.Struct):
    messages: list[_Delivery]
    ack_results: list[_Refusable] = []


class _Columns(msgspec.Struct):
    count: int


class _PulledColumns(msgspec.Struct):
    cols: _Columns
    ack_token: str
    ack_results: list[_Refusable] = []


class _Acknowledged(msgspec.Struct):
    results: list[_Refusable]


_pulled: Final = msgspec.msgpack.Decoder(_Pulled)
_pulled_columns: Final = msgspec.msgpack.Decoder(_PulledColumns)
_acknowledged: Final = msgspec.json.Decoder(_Acknowledged)


class Share:
    """The number of messages that the connections of one consumer may still request."""

    def __init__(self, messages: int) -> None:
        self._left = messages

    def take(self, wanted: int) -> int:
        """As many as are left, at most ``wanted``."""
        taken = min(wanted, self._left)
        self._left -= taken
        return taken

    def give_back(self, count: int) -> None:
        """A pull brought fewer than it asked for."""
        self._left += count


class Pulling:
    """Pulls ``batch`` at a time and acknowledges each batch in the pull after it."""

    def __init__(
        self, consumer_path: str, batch: int, share: Share, *, columns: bool = False
    ) -> None:
        """With ``columns``, one acknowledgement is for all messages of a pull."""
        self.messages = 0
        self._columns = columns
        self._path = consumer_path
        self._batch = batch
        self._share = share
        self._asked = 0
        # Acknowledgements without a result yet, and the messages that they are for.
        self._unconfirmed = self._held = 0

    def request(self, answer: bytes) -> bytes | None:
        """The next pull; at the end the last acknowledgements alone."""
        tokens = self._take(answer) if answer else []
        self._unconfirmed = len(tokens)
        self._asked = self._share.take(self._batch)
        acks = [{"token": token, "kind": "ack"} for token in tokens]
        if self._asked:
            pull = {"batch": self._asked, "expires": _PULL_EXPIRES, "acks": acks}
            return self._post("next", pull, PULL_COLUMNS if self._columns else MSGPACK)
        # Synchronous: nothing is pending any more when the last answer is there.
        return self._post("ack", {"acks": acks, "sync": True}, JSON) if acks else None

    def complete(self, received: bytes) -> bool:
        """Whether the answer is there."""
        return body_start(received, (b"200",)) > 0

    def _post(self, action: str, body: dict[str, Any], accept: str) -> bytes:
        return http_request(f"{self._path}/{action}", JSON, msgspec.json.encode(body), accept)

    def _take(self, answer: bytes) -> list[str]:
        body = memoryview(answer)[body_start(answer, (b"200",)) :]
        tokens: list[str] = []
        count = 0
        if not self._asked:
            results = _acknowledged.decode(body).results
        elif self._columns:
            columns = _pulled_columns.decode(body)
            results, tokens, count = columns.ack_results, [columns.ack_token], columns.cols.count
        else:
            pulled = _pulled.decode(body)
            results, count = pulled.ack_results, len(pulled.messages)
            tokens = [delivery.ack_token for delivery in pulled.messages]
        self._confirm(results)
        self._held = count
        self._share.give_back(self._asked - count)
        return tokens

    def _confirm(self, results: list[_Refusable]) -> None:
        if len(results) != self._unconfirmed or not all(result.ok for result in results):
            raise BenchError(f"not all of {self._unconfirmed} acks were taken: {results[:3]}")
        self.messages += self._held


@dataclass(frozen=True, slots=True)
class Pulls:
    """Pulls of one consumer over some connections, ``messages`` in all."""

    stream: str
    consumer: str
    messages: int
    batch: int
    connections: int
    columns: bool = False

    def __call__(self) -> Sequence[Script]:
        """The scripts of the connections."""
        path = f"/v1/streams/{self.stream}/consumers/{self.consumer}"
        share, columns = Share(self.messages), self.columns
        return [Pulling(path, self.batch, share, columns=columns) for _ in range(self.connections)]
