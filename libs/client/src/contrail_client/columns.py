"""Messages in columns, as the server sends them, and their conversion into messages. Pure."""

import struct
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import pairwise

import msgspec

from contrail_client.errors import UnexpectedAnswer
from contrail_client.models import Delivered

_NS_PER_S = 1_000_000_000


class HeaderColumns(msgspec.Struct):
    """The headers of the messages.

    `entry_offsets` point from messages to entries (one name each), `value_offsets` from entries to
    values, and `text_offsets` from values to `texts`.
    """

    entry_offsets: bytes
    name_offsets: bytes
    value_offsets: bytes
    text_offsets: bytes
    names: bytes
    texts: bytes


class Columns(msgspec.Struct):
    """Delivered messages in columns.

    Numbers are little-endian: i64 for `seqs` and `times_ns`, u32 for indexes and offsets.
    """

    stream: str
    count: int
    first_consumer_seq: int
    num_pending: int
    seqs: bytes
    times_ns: bytes
    subjects: list[str]
    subject_index: bytes
    offsets: bytes
    data: bytes
    headers: HeaderColumns | None = None


def messages_of(columns: Columns) -> list[Delivered]:
    """The messages in order; raises UnexpectedAnswer if the columns do not fit together."""
    try:
        return list(_messages(columns))
    except (struct.error, ValueError, IndexError, OverflowError) as error:
        raise UnexpectedAnswer(f"columns sent by the server cannot be read: {error}") from error


def _messages(columns: Columns) -> Iterator[Delivered]:
    count, data = columns.count, columns.data
    times = _i64(columns.times_ns, count)
    # Messages that were published together have the same time: format it once.
    texts = {time_ns: _text_of(time_ns) for time_ns in set(times)}
    headers = columns.headers
    each_headers = [{} for _ in times] if headers is None else _headers(headers, count)
    last_pending = columns.num_pending + count - 1
    rows = zip(
        _i64(columns.seqs, count),
        _u32(columns.subject_index, count),
        times,
        pairwise(_u32(columns.offsets, count + 1)),
        each_headers,
        strict=True,
    )
    for at, (seq, subject, time_ns, (start, stop), found) in enumerate(rows):
        yield Delivered(
            stream=columns.stream,
            seq=seq,
            subject=columns.subjects[subject],
            time=texts[time_ns],
            data=data[start:stop],
            headers=found,
            consumer_seq=columns.first_consumer_seq + at,
            num_pending=last_pending - at,
        )


def _headers(columns: HeaderColumns, count: int) -> list[dict[str, list[str]]]:
    ends = _u32(columns.entry_offsets, count + 1)
    entries = ends[-1]
    value_ends = _u32(columns.value_offsets, entries + 1)
    names = _texts(columns.names, columns.name_offsets, entries)
    values = _texts(columns.texts, columns.text_offsets, value_ends[-1])
    lists = [values[start:stop] for start, stop in pairwise(value_ends)]
    return [
        dict(zip(names[start:stop], lists[start:stop], strict=True))
        for start, stop in pairwise(ends)
    ]


def _texts(heap: bytes, offsets: bytes, count: int) -> list[str]:
    spans = pairwise(_u32(offsets, count + 1))
    if heap.isascii():
        text = heap.decode()
        return [text[start:stop] for start, stop in spans]
    return [heap[start:stop].decode() for start, stop in spans]


def _u32(data: bytes, count: int) -> Sequence[int]:
    return struct.unpack(f"<{count}I", data)


def _i64(data: bytes, count: int) -> Sequence[int]:
    return struct.unpack(f"<{count}q", data)


def _text_of(time_ns: int) -> str:
    seconds, rest = divmod(time_ns, _NS_PER_S)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest:09d}Z"
