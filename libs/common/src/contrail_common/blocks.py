"""Messages in columns: the unit of logging, storage, replication and replay.

``MessageColumns`` is what a publisher's messages become once, at the leader; the same bytes go
into the log entry and, behind a header and the columns that ``apply`` adds (times, subject ids),
into the stored block. All offset columns are Arrow's layout (``n + 1`` ascending u32 from 0), so
a block turns into Arrow arrays without touching a message.

Block, little-endian: a header of 64 bytes (``_HEADER``), then the body::

    i64 time_ns[n] | u32 subject_id[n] | u32 payload_offset[n+1]
    [ u32 entries, values, name_bytes, text_bytes |            only with FLAG_HEADERS
      u32 entry_offset[n+1] | u32 name_offset[entries+1] | u32 value_offset[entries+1] |
      u32 text_offset[values+1] | names | texts ]
    payloads

The CRC-32C covers header and body, so no bit of a block can change unnoticed.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import crc32c
import msgspec
import numpy as np
from numpy.typing import NDArray

from contrail_common.model import Headers, StoredMessage

BLOCK_MESSAGES_MAX: Final = 2_000
BLOCK_BYTES_MAX: Final = 128 * 1024
MAGIC: Final = 0xC07A
VERSION: Final = 1
FLAG_HEADERS: Final = 1

_HEADER: Final = struct.Struct("<HBBIQqIII12sIHHQ")
_HEADER_SIZES: Final = struct.Struct("<IIII")
_CRC: Final = struct.Struct("<I")
_PAIR: Final = struct.Struct("<II")
_CRC_AT: Final = 48
assert _HEADER.size == 8 * 8  # columns behind it stay aligned

_CONTINUATION: Final = 0b1000_0000
"""The two high bits of a byte of UTF-8 that does not begin a character."""

U32Array = NDArray[np.uint32]
I64Array = NDArray[np.int64]


class BlockCorruptError(Exception):
    """A stored block does not decode: its bytes changed or are not a block."""


class HeaderColumns(msgspec.Struct, array_like=True, gc=False):
    """Headers of ``n`` messages as nested offsets: message -> entries -> values -> text."""

    entry_offsets: bytes
    name_offsets: bytes
    value_offsets: bytes
    text_offsets: bytes
    names: bytes
    texts: bytes

    def message(self, position: int) -> Headers | None:
        """Headers of the message at ``position``, or None when it has none."""
        entry_offsets = _u32(self.entry_offsets)
        start, stop = int(entry_offsets[position]), int(entry_offsets[position + 1])
        if start == stop:
            return None
        names, values, texts = map(_u32, (self.name_offsets, self.value_offsets, self.text_offsets))
        headers: Headers = {}
        for entry in range(start, stop):
            name = self.names[names[entry] : names[entry + 1]].decode()
            headers[name] = [
                self.texts[texts[value] : texts[value + 1]].decode()
                for value in range(int(values[entry]), int(values[entry + 1]))
            ]
        return headers

    def is_sound(self, count: int) -> bool:
        """Whether the offsets fit each other, the heaps and ``count`` messages."""
        entries = len(self.name_offsets) // 4 - 1
        values = len(self.text_offsets) // 4 - 1
        return (
            _are_offsets(self.entry_offsets, count, entries)
            and _are_offsets(self.name_offsets, entries, len(self.names))
            and _are_offsets(self.value_offsets, entries, values)
            and _are_offsets(self.text_offsets, values, len(self.texts))
            and _is_utf8(self.names, self.name_offsets)
            and _is_utf8(self.texts, self.text_offsets)
        )

    def sizes(self) -> I64Array:
        """Bytes that each message's headers count: name + value + 4 for each value."""
        value_offsets = _u32(self.value_offsets).astype(np.int64)
        value_counts = np.diff(value_offsets)
        name_bytes = np.diff(_u32(self.name_offsets).astype(np.int64))
        texts = _u32(self.text_offsets).astype(np.int64)
        text_bytes = texts[value_offsets[1:]] - texts[value_offsets[:-1]]
        by_entry = np.concatenate(([0], np.cumsum((name_bytes + 4) * value_counts + text_bytes)))
        entry_offsets = _u32(self.entry_offsets)
        sizes: I64Array = by_entry[entry_offsets[1:]] - by_entry[entry_offsets[:-1]]
        return sizes


class MessageColumns(msgspec.Struct, array_like=True, gc=False):
    """Payloads and headers of ``count`` messages; ``offsets``: u32[count + 1] into ``payload``."""

    count: int
    offsets: bytes
    payload: bytes
    headers: HeaderColumns | None = None

    def is_sound(self) -> bool:
        """Whether there are messages and all offsets fit what they point into."""
        return (
            self.count > 0
            and _are_offsets(self.offsets, self.count, len(self.payload))
            and (self.headers is None or self.headers.is_sound(self.count))
        )

    def sizes(self) -> I64Array:
        """Bytes that each message counts for limits (payload and headers)."""
        offsets = _u32(self.offsets).astype(np.int64)
        sizes = offsets[1:] - offsets[:-1]
        return sizes if self.headers is None else sizes + self.headers.sizes()

    def select(self, positions: Sequence[int]) -> "MessageColumns":
        """The columns of the messages at ``positions`` alone."""
        offsets = _u32(self.offsets)
        payloads = [self.payload[offsets[at] : offsets[at + 1]] for at in positions]
        headers = self.headers
        return columns_of(
            payloads, None if headers is None else [headers.message(at) for at in positions]
        )


def _u32(data: bytes | memoryview) -> U32Array:
    return np.frombuffer(data, np.uint32)


def _are_offsets(data: bytes, count: int, end: int) -> bool:
    """Whether ``data`` is ``count + 1`` ascending offsets from 0 to ``end``."""
    if min(count, end) < 0 or len(data) != 4 * (count + 1):
        return False
    if count == 1:
        return data == _PAIR.pack(0, end)
    offsets = _u32(data)
    return (
        int(offsets[0]) == 0
        and int(offsets[-1]) == end
        and bool((offsets[1:] >= offsets[:-1]).all())
    )


def _is_utf8(heap: bytes, offsets: bytes) -> bool:
    """Whether ``heap`` is UTF-8 and every text in it begins with a character."""
    if heap.isascii():
        return True
    try:
        heap.decode()
    except UnicodeDecodeError:
        return False
    starts = _u32(offsets)
    first = np.frombuffer(heap, np.uint8)[starts[starts < len(heap)]]
    return not bool((first & 0b1100_0000 == _CONTINUATION).any())


def _offsets(lengths: Iterable[int], count: int) -> bytes:
    offsets = np.zeros(count + 1, np.uint32)
    np.cumsum(np.fromiter(lengths, np.uint32, count), out=offsets[1:])
    return offsets.tobytes()


def columns_of(
    payloads: Sequence[bytes], headers: Sequence[Headers | None] | None
) -> MessageColumns:
    """Columns of messages given by payload and headers (None: no message has any)."""
    count = len(payloads)
    if count == 1:
        offsets = _PAIR.pack(0, len(payloads[0]))
        payload = payloads[0]
    else:
        offsets = _offsets(map(len, payloads), count)
        payload = b"".join(payloads)
    columns = None
    if headers is not None and any(headers):
        columns = _header_columns(headers)
    return MessageColumns(count, offsets, payload, columns)


def _header_columns(headers: Sequence[Headers | None]) -> HeaderColumns:
    entry_counts: list[int] = []
    value_counts: list[int] = []
    names: list[bytes] = []
    texts: list[bytes] = []
    for message in headers:
        entry_counts.append(len(message) if message else 0)
        if not message:
            continue
        for name, values in message.items():
            names.append(name.encode())
            value_counts.append(len(values))
            texts += [value.encode() for value in values]
    return HeaderColumns(
        entry_offsets=_offsets(entry_counts, len(entry_counts)),
        name_offsets=_offsets(map(len, names), len(names)),
        value_offsets=_offsets(value_counts, len(value_counts)),
        text_offsets=_offsets(map(len, texts), len(texts)),
        names=b"".join(names),
        texts=b"".join(texts),
    )


@dataclass(slots=True, eq=False)
class Block:
    """A run of messages with consecutive sequences from ``base_seq`` on, in columns."""

    base_seq: int
    times_ns: I64Array
    subject_ids: U32Array
    columns: MessageColumns
    _sizes: I64Array | None = None

    def sizes(self) -> I64Array:
        """Bytes that each message counts for limits."""
        if self._sizes is None:
            self._sizes = self.columns.sizes()
        return self._sizes

    @property
    def count(self) -> int:
        """Number of messages, deleted ones included."""
        return self.columns.count

    @property
    def last_seq(self) -> int:
        """Sequence of the last message."""
        return self.base_seq + self.columns.count - 1

    @property
    def stored_bytes(self) -> int:
        """Bytes of the stored form."""
        columns = self.columns
        size = _HEADER.size + 12 * columns.count + len(columns.offsets) + len(columns.payload)
        if columns.headers is not None:
            size += sum(map(len, _header_parts(columns.headers)))
        return size

    def payload(self, position: int) -> bytes:
        """Payload of the message at ``position``."""
        offsets = _u32(self.columns.offsets)
        return self.columns.payload[offsets[position] : offsets[position + 1]]

    def message(self, position: int, subject: str) -> StoredMessage:
        """The message at ``position``; its subject's text is the caller's to look up."""
        headers = self.columns.headers
        return StoredMessage(
            self.base_seq + position,
            subject,
            int(self.times_ns[position]),
            None if headers is None else headers.message(position),
            self.payload(position),
        )


def encode_block(block: Block, replication_index: int) -> bytes:
    """The stored form of ``block``; ``replication_index`` is the log index of its entry."""
    columns = block.columns
    parts: list[bytes] = [block.times_ns.tobytes(), block.subject_ids.tobytes(), columns.offsets]
    flags = 0
    if columns.headers is not None:
        flags |= FLAG_HEADERS
        parts += _header_parts(columns.headers)
    parts.append(columns.payload)
    body = b"".join(parts)
    header = bytearray(
        _HEADER.pack(
            MAGIC,
            VERSION,
            0,
            columns.count,
            block.base_seq,
            int(block.times_ns[0]),
            len(body),
            len(body),
            0,
            bytes(12),
            0,
            flags,
            0,
            replication_index,
        )
    )
    _CRC.pack_into(header, _CRC_AT, crc32c.crc32c(body, crc32c.crc32c(header)))
    return bytes(header) + body


def _header_parts(headers: HeaderColumns) -> list[bytes]:
    return [
        _HEADER_SIZES.pack(
            len(headers.name_offsets) // 4 - 1,
            len(headers.text_offsets) // 4 - 1,
            len(headers.names),
            len(headers.texts),
        ),
        headers.entry_offsets,
        headers.name_offsets,
        headers.value_offsets,
        headers.text_offsets,
        headers.names,
        headers.texts,
    ]


def decode_block(data: bytes) -> Block:
    """The block stored as ``data``; raises BlockCorruptError when any bit of it changed."""
    if len(data) < _HEADER.size:
        raise BlockCorruptError("shorter than a block header")
    fields = _HEADER.unpack_from(data)
    magic, version, _codec, count, base_seq, _time, raw_len = fields[:7]
    crc, flags = fields[10], fields[11]
    if magic != MAGIC or version != VERSION or len(data) != _HEADER.size + raw_len:
        raise BlockCorruptError("not a block, or cut short")
    header = bytearray(data[: _HEADER.size])
    _CRC.pack_into(header, _CRC_AT, 0)
    view = memoryview(data)
    if crc32c.crc32c(view[_HEADER.size :], crc32c.crc32c(header)) != crc:
        raise BlockCorruptError("the checksum does not match")
    return _decode_body(view, count, base_seq, flags)


def _decode_body(view: memoryview, count: int, base_seq: int, flags: int) -> Block:
    position = _HEADER.size
    times = np.frombuffer(view, np.int64, count, position)
    position += 8 * count
    subject_ids = np.frombuffer(view, np.uint32, count, position)
    position += 4 * count
    offsets = bytes(view[position : position + 4 * (count + 1)])
    position += len(offsets)
    headers = None
    if flags & FLAG_HEADERS:
        entries, values, name_bytes, text_bytes = _HEADER_SIZES.unpack_from(view, position)
        position += _HEADER_SIZES.size
        lengths = (
            4 * (count + 1),
            4 * (entries + 1),
            4 * (entries + 1),
            4 * (values + 1),
            name_bytes,
            text_bytes,
        )
        parts = []
        for length in lengths:
            parts.append(bytes(view[position : position + length]))
            position += length
        headers = HeaderColumns(*parts)
    payload = bytes(view[position:])
    return Block(base_seq, times, subject_ids, MessageColumns(count, offsets, payload, headers))


def join_blocks(blocks: Sequence[Block]) -> Block:
    """One block of several with adjoining sequences, column by column."""
    if len(blocks) == 1:
        return blocks[0]
    columns = [block.columns for block in blocks]
    joined = MessageColumns(
        sum(part.count for part in columns),
        _join_offsets([part.offsets for part in columns]),
        b"".join([part.payload for part in columns]),
        _join_headers(columns),
    )
    return Block(
        blocks[0].base_seq,
        np.concatenate([block.times_ns for block in blocks]),
        np.concatenate([block.subject_ids for block in blocks]),
        joined,
    )


def _join_offsets(parts: Sequence[bytes]) -> bytes:
    arrays = [_u32(part) for part in parts]
    base = 0
    joined = [np.zeros(1, np.uint32)]
    for array in arrays:
        joined.append(array[1:] + np.uint32(base))
        base += int(array[-1])
    return np.concatenate(joined).tobytes()


def _join_headers(columns: Sequence[MessageColumns]) -> HeaderColumns | None:
    if all(part.headers is None for part in columns):
        return None
    zero = bytes(4)
    parts = [
        part.headers or HeaderColumns(bytes(4 * (part.count + 1)), zero, zero, zero, b"", b"")
        for part in columns
    ]
    return HeaderColumns(
        _join_offsets([part.entry_offsets for part in parts]),
        _join_offsets([part.name_offsets for part in parts]),
        _join_offsets([part.value_offsets for part in parts]),
        _join_offsets([part.text_offsets for part in parts]),
        b"".join([part.names for part in parts]),
        b"".join([part.texts for part in parts]),
    )
