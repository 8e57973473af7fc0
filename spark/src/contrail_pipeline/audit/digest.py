"""Checksums of messages: over ranges, whatever batches they come in, and of single messages."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from contrail_common.model import MSG_ID

I64Array = NDArray[np.int64]

COLUMNS: Final = ("seq", "time", "subject", "headers", "data")
CHUNK: Final = 1 << 16
"""Sequences that one checksum covers. It begins at a multiple of this number, wherever a read
begins, so that the checksums of two reads can be compared."""
_VALUE_BYTES: Final = 4
"""What the server adds to the size of a message for each value of a header."""


@dataclass(frozen=True, slots=True)
class ChunkDigest:
    """The checksum of the messages from ``from_seq`` to ``to_seq`` that belong to one chunk."""

    chunk: int
    from_seq: int
    to_seq: int
    messages: int
    sha256: str


class ContentDigest:
    """Makes the checksums of messages that come in ascending sequence.

    A checksum covers sequence, time in microseconds, subject, headers and payload of each message,
    and their order. A column is hashed as a whole, as lengths and contents, so the time that it
    takes depends on the bytes rather than on the number of messages.
    """

    def __init__(self) -> None:
        self._hashes = _Hashes()
        self._chunk = -1
        self._first = self._last = self._messages = 0

    def update(self, batch: pa.RecordBatch) -> Iterator[ChunkDigest]:
        """Add messages, and yield the checksum of each chunk that ends before the last of them."""
        seqs = _integers(batch.column("seq"))
        chunks = seqs // CHUNK
        borders = [0, *(np.flatnonzero(np.diff(chunks)) + 1).tolist(), len(seqs)]
        for start, stop in pairwise(borders):
            if start == stop:
                continue
            chunk = int(chunks[start])
            if chunk != self._chunk:
                yield from self.finish()
                self._chunk, self._first = chunk, int(seqs[start])
            self._hashes.update(batch.slice(start, stop - start))
            self._last = int(seqs[stop - 1])
            self._messages += stop - start

    def finish(self) -> Iterator[ChunkDigest]:
        """Yield the checksum of the last chunk, if there is one."""
        if self._messages:
            digest = self._hashes.hexdigest()
            yield ChunkDigest(self._chunk, self._first, self._last, self._messages, digest)
        self._hashes, self._messages = _Hashes(), 0


def digests(batches: Iterator[pa.RecordBatch]) -> Iterator[ChunkDigest]:
    """The checksums of all chunks of a read."""
    content = ContentDigest()
    for batch in batches:
        yield from content.update(batch)
    yield from content.finish()


def combined(parts: Iterator[ChunkDigest]) -> str:
    """The checksum of many chunks together."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(f"{part.chunk} {part.messages} {part.sha256}\n".encode())
    return whole.hexdigest()


def sizes(batch: pa.RecordBatch) -> int:
    """The bytes of the messages as the server counts them: payloads and headers."""
    _, entries, names, values, texts = _headers(batch.column("headers"))
    per_value = pc.binary_length(names).to_numpy(zero_copy_only=False) + _VALUE_BYTES
    in_headers = int((per_value * values).sum()) + _bytes_of(texts) if entries else 0
    return in_headers + _bytes_of(batch.column("data"))


def ids(batch: pa.RecordBatch) -> int:
    """How many messages have an id."""
    names = _headers(batch.column("headers"))[2]
    return pc.sum(pc.equal(names, MSG_ID)).as_py() or 0


def rows(batch: pa.RecordBatch) -> Iterator[tuple[int, dict[str, Any]]]:
    """The sequence and the parts of each message, long ones as a checksum."""
    seqs, times = _integers(batch.column("seq")), _integers(batch.column("time"))
    columns = (batch.column(name).to_pylist() for name in ("subject", "headers", "data"))
    for seq, time, subject, headers, data in zip(seqs, times, *columns, strict=True):
        yield (
            int(seq),
            {
                "time": int(time),
                "subject": subject,
                "headers": _short(repr(headers or []).encode()),
                "data": _short(data or b""),
            },
        )


class _Hashes:
    """A hash for each part of a batch: parts of the same column follow each other in it."""

    def __init__(self) -> None:
        self._parts: list[Any] = []

    def update(self, batch: pa.RecordBatch) -> None:
        counts, entries, names, values, texts = _headers(batch.column("headers"))
        parts: list[NDArray[Any] | memoryview | bytes] = [
            _integers(batch.column("seq")),
            _integers(batch.column("time")),
            *_heap(batch.column("subject")),
            *_heap(batch.column("data")),
            counts,
            *(_heap(names) if entries else (b"", b"")),
            values,
            *(_heap(texts) if entries else (b"", b"")),
        ]
        if not self._parts:
            self._parts = [hashlib.sha256() for _ in parts]
        for part, content in zip(self._parts, parts, strict=True):
            part.update(content)

    def hexdigest(self) -> str:
        return hashlib.sha256(b"".join(part.digest() for part in self._parts)).hexdigest()


def _short(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _integers(column: pa.Array) -> I64Array:
    numbers: I64Array = np.ascontiguousarray(
        column.cast(pa.int64()).to_numpy(zero_copy_only=False), np.int64
    )
    return numbers


def _heap(texts: pa.Array) -> tuple[I64Array, memoryview | bytes]:
    """The lengths of texts, and all of them one after another; null is an empty one."""
    if texts.null_count:
        texts = pc.fill_null(texts, b"" if pa.types.is_binary(texts.type) else "")
    bounds = _bounds(texts)
    heap = texts.buffers()[2]
    joined = b"" if heap is None else memoryview(heap)[bounds[0] : bounds[-1]]
    return np.diff(bounds).astype(np.int64), joined


def _bytes_of(texts: pa.Array) -> int:
    return pc.sum(pc.binary_length(texts)).as_py() or 0


def _headers(column: pa.Array) -> tuple[I64Array, int, pa.Array, I64Array, pa.Array]:
    """Headers of each message, how many in all, their names, values of each, and the values."""
    # A NULL counts as an empty map: there are no entries for it in the files of a lake.
    bounds = _bounds(column)
    counts = np.diff(bounds).astype(np.int64)
    first, last = int(bounds[0]), int(bounds[-1])
    names, items = column.keys[first:last], column.items[first:last]
    ends = _bounds(items) if len(items) else np.zeros(1, np.int32)
    values = np.diff(ends).astype(np.int64)
    texts = items.values[int(ends[0]) : int(ends[-1])] if len(items) else pa.array([], pa.string())
    return counts, last - first, names, values, texts


def _bounds(array: pa.Array) -> NDArray[np.int32]:
    """Where each value begins, and where the last one ends."""
    buffer = array.buffers()[1]
    if buffer is None or not len(array):
        return np.zeros(len(array) + 1, np.int32)
    return np.frombuffer(buffer, np.int32, len(array) + 1, 4 * array.offset)
