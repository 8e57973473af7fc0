"""Calls that publish."""

import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, cast

import msgspec

from contrail_client.calls import (
    JSON,
    MSGPACK,
    Answer,
    Call,
    Request,
    T,
    item_problem,
    json_as,
    nothing,
    path_of,
    query_items,
)
from contrail_client.errors import ApiProblem
from contrail_client.models import AtomicAck, BatchResult, Message, PubAck

BATCH_MESSAGES: Final = 1_000
BATCH_BYTES: Final = 4 << 20
BATCH_ROWS: Final = 1
BATCH_COLUMNS: Final = 2
"""The form of a msgpack batch, which is its first item."""

_HEADER_NAME: Final = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)
_EXPECTED_HEADERS: Final = {
    "stream": "Nats-Expected-Stream",
    "last_seq": "Nats-Expected-Last-Sequence",
    "last_subject_seq": "Nats-Expected-Last-Subject-Sequence",
    "last_subject_seq_subject": "Nats-Expected-Last-Subject-Sequence-Subject",
    "last_msg_id": "Nats-Expected-Last-Msg-Id",
}


class _Ack(msgspec.Struct):
    stream: str = ""
    seq: int = 0
    duplicate: bool = False
    shard: int | None = None


class _Run(msgspec.Struct):
    """The outcome of `count` consecutive messages; sequences ascend from `first_seq`."""

    count: int
    first_seq: int = 0
    duplicate: bool = False
    shard: int | None = None
    problem: dict[str, Any] | None = None


class _Runs(msgspec.Struct):
    runs: list[_Run]


_ack = json_as(_Ack)
_runs = msgspec.msgpack.Decoder(_Runs)
_atomic_ack = json_as(AtomicAck)


def publish(message: Message) -> Call[PubAck]:
    """Store one message in the stream that captures its subject."""
    return Call(_request(message), _one_ack, repeatable=message.msg_id is not None)


def publish_unacked(message: Message) -> Call[None]:
    """Send one message without an acknowledgement: the answer comes before it is stored."""
    return Call(_request(message, ack="none"), nothing, repeatable=message.msg_id is not None)


def _request(message: Message, **query: str) -> Request:
    headers = tuple(
        _http_header(name, value)
        for name, values in (message_headers(message) or {}).items()
        for value in values
    )
    return Request(
        "POST",
        path_of("subjects", message.subject, "messages"),
        query=query_items(query),
        headers=(*headers, ("Content-Type", "application/octet-stream")),
        body=payload_bytes(message),
    )


def publish_batch(
    stream: str,
    messages: Sequence[Message],
    producer: str | None = None,
    number: int | None = None,
) -> Call[BatchResult]:
    """Store messages in order; each one is stored or refused by itself."""

    def parse(answer: Answer) -> BatchResult:
        durability = answer.headers.get("durability", "")
        runs = _runs.decode(answer.body).runs
        # Results are matched by position, so a missing one would confirm the wrong messages.
        count = sum(run.count for run in runs)
        if count != len(messages):
            raise ValueError(f"{count} results for {len(messages)} messages")
        return BatchResult(tuple(one for run in runs for one in _results(stream, run, durability)))

    query = {"producer": producer, "number": number}
    return _batch(stream, messages, parse, query, accept=MSGPACK)


def publish_atomic(stream: str, messages: Sequence[Message]) -> Call[AtomicAck]:
    """Store all messages or none (at most 1,000 and 2 MiB)."""
    return _batch(stream, messages, _atomic_ack, {"atomic": True})


def batches(
    messages: Iterable[Message], *, size: int = BATCH_MESSAGES, size_bytes: int = BATCH_BYTES
) -> Iterator[list[Message]]:
    """Split messages into batches of at most `size` messages and about `size_bytes`.

    A message that is larger than `size_bytes` gets its own batch.
    """
    batch: list[Message] = []
    used = 0
    for message in messages:
        weight = len(message.payload) + len(message.subject)
        if batch and (len(batch) >= size or used + weight > size_bytes):
            yield batch
            batch, used = [], 0
        batch.append(message)
        used += weight
    if batch:
        yield batch


def _batch(
    stream: str,
    messages: Sequence[Message],
    parse: Callable[[Answer], T],
    query: Mapping[str, Any],
    *,
    accept: str = JSON,
) -> Call[T]:
    request = Request(
        "POST",
        path_of("streams", stream, "messages"),
        query=query_items(query),
        headers=(("Content-Type", MSGPACK), ("Accept", accept)),
        body=_packed(_checked(messages)),
    )
    return Call(request, parse, repeatable=all(each.msg_id is not None for each in messages))


def _packed(messages: Sequence[Message]) -> bytes:
    """The body of a batch: columns if no message has more than an id, which the server prefers."""
    # The empty id of a row is stored as a header; in columns it means that there is none.
    if any(
        each.headers or each.msg_id == "" or each.expected is not None or each.ttl is not None
        for each in messages
    ):
        rows = [(each.subject, message_headers(each), payload_bytes(each)) for each in messages]
        return msgspec.msgpack.encode((BATCH_ROWS, rows))
    numbers: dict[str, int] = {}
    index = [numbers.setdefault(each.subject, len(numbers)) for each in messages]
    ids = [(each.msg_id or "").encode() for each in messages]
    offsets, payload = _joined([payload_bytes(each) for each in messages])
    columns = (list(numbers), _u32(index), offsets, payload, _joined(ids) if any(ids) else None)
    return msgspec.msgpack.encode((BATCH_COLUMNS, columns))


def _joined(values: Sequence[bytes]) -> tuple[bytes, bytes]:
    """Where each value begins and the last one ends, and all of them as one."""
    return _u32([0, *accumulate(map(len, values))]), b"".join(values)


def _u32(numbers: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)


def _one_ack(answer: Answer) -> PubAck:
    ack = _ack(answer)
    durability = answer.headers.get("durability", "")
    return PubAck(ack.stream, ack.seq, ack.duplicate, durability, ack.shard)


def _results(stream: str, run: _Run, durability: str) -> list[PubAck | ApiProblem]:
    if run.problem is not None:
        return [item_problem(run.problem) for _ in range(run.count)]
    seqs = range(run.first_seq, run.first_seq + run.count)
    return [PubAck(stream, seq, run.duplicate, durability, run.shard) for seq in seqs]


def payload_bytes(message: Message) -> bytes:
    """The payload as bytes; a text is encoded as UTF-8."""
    payload = message.payload
    return payload.encode() if isinstance(payload, str) else payload


def _checked(messages: Sequence[Message]) -> Sequence[Message]:
    for each in messages:
        if not isinstance(each, Message):
            raise TypeError(f"a batch must consist of Message objects, not {type(each).__name__}")
    return messages


def message_headers(message: Message) -> dict[str, list[str]] | None:
    """The headers of a message, including those for its id, expectations and time to live."""
    # `Message.__post_init__` has put the headers into this form.
    given = cast(dict[str, list[str]] | None, message.headers)
    if message.msg_id is None and message.expected is None and message.ttl is None:
        return given
    headers = dict(given or {})
    if message.msg_id is not None:
        headers["Nats-Msg-Id"] = [message.msg_id]
    if message.ttl is not None:
        headers["Nats-TTL"] = [str(message.ttl)]
    for field, name in _EXPECTED_HEADERS.items():
        value = getattr(message.expected, field, None)
        if value is not None:
            headers[name] = [str(value)]
    return headers


def _http_header(name: str, value: str) -> tuple[str, str]:
    """A message header as an HTTP header; ValueError if only a batch can carry it."""
    if not _HEADER_NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is not a valid HTTP header name; publish the message in a batch"
        )
    if not (value.isascii() and value.isprintable()):
        raise ValueError(f"header {name} is not printable ASCII; publish the message in a batch")
    return (name if name.lower().startswith("nats-") else f"Msg-Header-{name}", value)
