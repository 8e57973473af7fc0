"""Messages in columns: the unit of logging, storage, replication and replay.

The leader converts a publisher's messages to ``MessageColumns`` once. The same bytes go into the
log entry and into the stored block, there after a header and the columns that ``apply`` adds
(times, subject ids). All offset columns have Arrow's layout (``n + 1`` ascending u32 from 0), so a
block becomes Arrow arrays without work for each message.

Block, little-endian: a header of 64 bytes (``_HEADER``), then the body::

    i64 time_ns[n] | u32 subject_id[n] | u32 payload_offset[n+1]
    [ u32 entries, values, name_bytes, text_bytes |            only with FLAG_HEADERS
      u32 entry_offset[n+1] | u32 name_offset[entries+1] | u32 value_offset[entries+1] |
      u32 text_offset[values+1] | names | texts ]
    [ u32 names, values, name_bytes, text_bytes |              only with FLAG_UNIFORM_HEADERS
      u32 name_offset[names+1] | u32 text_offset[values+1] | names | texts ]
    [ u64 key[n] | u32 plain_size[n] ]                         only with FLAG_SEALED
    payloads

The header has the codec of the stored body (0: none) and the body's plain size. The CRC-32C covers
header and body as stored, so it detects a change of any bit. A body with a codec has a second
CRC-32C, over the plain body.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple, Protocol

import crc32c
import msgspec
import numpy as np
from numpy.typing import NDArray

from contrail_common.arrays import compact, spared_bytes
from contrail_common.columns.header_columns import (
    AnyHeaders,
    HeaderColumns,
    UniformHeaders,
    header_size,
    headers_in_columns,
    join_headers,
)
from contrail_common.columns.sealed_columns import (
    NOT_SEALED,
    ContentSealedError,
    Seals,
    content_of,
    join_seals,
    plain_cell,
)
from contrail_common.model import Headers, StoredMessage
from contrail_common.texts import (
    I64Array,
    Texts,
    U32Array,
    are_offsets,
    as_u32,
    chosen,
    cut,
    join_offsets,
    lengths_of,
    offsets_of,
)

BLOCK_MESSAGES_MAX: Final = 2_000
BLOCK_BYTES_MAX: Final = 128 * 1024
PLAIN_BYTES_MAX: Final = 8 << 20
"""Plain size of a compressed body. The largest entry has < 4 MiB, a merged block < 256 KiB."""
MAGIC: Final = 0xC07A
VERSION: Final = 1
FLAG_HEADERS: Final = 1
FLAG_UNIFORM_HEADERS: Final = 2
FLAG_SEALED: Final = 4
_FLAGS_HEADERS: Final = FLAG_HEADERS | FLAG_UNIFORM_HEADERS

_HEADER: Final = struct.Struct("<HBBIQqIIII8sIHHQ")
_HEADER_SIZES: Final = struct.Struct("<IIII")
_CRC: Final = struct.Struct("<I")
_SPAN: Final = struct.Struct("<II")
_CRC_AT: Final = 48
assert _HEADER.size == 8 * 8  # the columns after it stay aligned


class BlockCorruptError(Exception):
    """A stored block does not decode: its bytes changed or are not a block."""


class BlockCodec(Protocol):
    """Compresses bodies; ``number`` (1 to 255) identifies the codec in stored blocks."""

    @property
    def number(self) -> int:
        """The number in stored blocks, from 1 on."""
        ...

    @property
    def min_bytes(self) -> int:
        """Smaller bodies are stored without compression."""
        ...

    def compress(self, body: bytes) -> bytes:
        """Return the stored form of ``body``."""
        ...

    def decompress(self, stored: memoryview, size: int) -> bytes:
        """Return the body of ``size`` bytes; raise ValueError if ``stored`` is invalid."""
        ...


class MessageColumns(msgspec.Struct, array_like=True, gc=False):
    """Payloads and headers of ``count`` messages; ``offsets``: u32[count + 1] into ``payload``.

    With ``seals``, the payloads are cells (:mod:`contrail_common.columns.sealed_columns`), which
    contain the headers.
    """

    count: int
    offsets: bytes
    payload: bytes
    headers: AnyHeaders | None = None
    seals: Seals | None = None

    def is_sound(self) -> bool:
        """Return True if there are messages and all offsets are valid."""
        return (
            self.count > 0
            and are_offsets(self.offsets, self.count, len(self.payload))
            and (self.headers is None or self.headers.is_sound(self.count))
            and (self.seals is None or (self.headers is None and self.seals.is_sound(self.count)))
        )

    def sizes(self) -> I64Array:
        """Return each message's bytes for limits (payload and headers, unencrypted)."""
        if self.seals is not None:
            return self.seals.plain_sizes()
        sizes = lengths_of(self.offsets)
        return sizes if self.headers is None else sizes + self.headers.sizes()

    def sizes_at(self, at: NDArray[np.intp] | slice) -> I64Array:
        """Return those of :meth:`sizes` at some positions."""
        if self.seals is not None:
            return self.seals.plain_sizes()[at]
        offsets = as_u32(self.offsets)
        sizes = (offsets[1:][at] - offsets[:-1][at]).astype(np.int64)
        return sizes if self.headers is None else sizes + self.headers.sizes()[at]

    def size(self) -> int:
        """Return the sum of :meth:`sizes`."""
        if self.seals is not None:
            return int(self.seals.plain_sizes().sum())
        return len(self.payload) + (0 if self.headers is None else self.headers.size())

    def slice(self, start: int, stop: int) -> "MessageColumns":
        """Return the columns of the messages from ``start`` up to ``stop``."""
        offsets, payload = cut(self.offsets, start, stop, self.payload)
        headers = None if self.headers is None else self.headers.slice(start, stop)
        seals = None if self.seals is None else self.seals.slice(start, stop)
        return MessageColumns(stop - start, offsets, payload, headers, seals)

    def select(self, positions: I64Array) -> "MessageColumns":
        """Return the columns of the messages at ``positions``."""
        offsets, payload = chosen(self.offsets, positions, self.payload)
        headers = None if self.headers is None else self.headers.select(positions)
        seals = None if self.seals is None else self.seals.select(positions)
        return MessageColumns(len(positions), offsets, payload, headers, seals)

    def content(self, position: int) -> tuple[Headers | None, bytes]:
        """Return headers and payload of the message at ``position``.

        Raises ContentSealedError if it is sealed, and CellBrokenError if its cell is invalid.
        """
        start, stop = _SPAN.unpack_from(self.offsets, 4 * position)
        payload = self.payload[start:stop]
        if self.seals is None:
            return None if self.headers is None else self.headers.message(position), payload
        if self.seals.key_ids[position] != NOT_SEALED:
            raise ContentSealedError(f"message {position} is sealed")
        return content_of(payload)

    def in_cells(self) -> "MessageColumns":
        """Return the same messages as cells, which are not sealed yet."""
        if self.seals is not None:
            return self
        each = [None] * self.count if self.headers is None else self.headers.each()
        # A cell has the headers too, because subject keys must protect these as well.
        spans = pairwise(as_u32(self.offsets).tolist())
        cells = [
            plain_cell(headers, self.payload[start:end])
            for headers, (start, end) in zip(each, spans, strict=True)
        ]
        joined = columns_of(cells, None)
        joined.seals = Seals.of([NOT_SEALED] * self.count, self.sizes())
        return joined


def columns_of(
    payloads: Sequence[bytes], headers: Sequence[Headers | None] | None
) -> MessageColumns:
    """Return the columns of messages given by payload and headers (None if no message has any)."""
    count = len(payloads)
    return MessageColumns(
        count,
        offsets_of(map(len, payloads), count),
        payloads[0] if count == 1 else b"".join(payloads),
        headers_in_columns(headers) if headers is not None and any(headers) else None,
    )


def join_columns(parts: Sequence[MessageColumns]) -> MessageColumns:
    """Concatenate the columns of ``parts``."""
    if len(parts) == 1:
        return parts[0]
    seals = None
    if any(part.seals is not None for part in parts):
        # Columns with seals have their headers in the cells, so all parts need that form.
        parts = [part.in_cells() for part in parts]
        seals = join_seals([part.seals for part in parts if part.seals is not None])
    return MessageColumns(
        sum(part.count for part in parts),
        join_offsets([part.offsets for part in parts]),
        b"".join([part.payload for part in parts]),
        join_headers([(part.headers, part.count) for part in parts]),
        seals,
    )


def message_size(headers: Headers | None, payload_bytes: int) -> int:
    """Return a message's bytes for limits: payload + (name + value + 4) for each header value."""
    if not headers:
        return payload_bytes
    return payload_bytes + header_size(headers)


def blanks(count: int) -> MessageColumns:
    """Return ``count`` messages without payload and headers."""
    return MessageColumns(count, bytes(4 * (count + 1)), b"")


class Block(msgspec.Struct, eq=False):
    """A run of messages with consecutive sequences from ``base_seq`` on, in columns."""

    base_seq: int
    times_ns: I64Array
    subject_ids: U32Array
    columns: MessageColumns

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
        """Bytes of the stored form without compression."""
        columns = self.columns
        # A message takes 8 bytes for its time and 4 for its subject number.
        size = _HEADER.size + 12 * columns.count + len(columns.offsets) + len(columns.payload)
        if columns.headers is not None:
            size += _header_bytes(columns.headers)
        if columns.seals is not None:
            size += len(columns.seals.keys) + len(columns.seals.sizes)
        return size

    @property
    def held_bytes(self) -> int:
        """Bytes of the columns in memory."""
        return self.stored_bytes - spared_bytes(self.times_ns) - spared_bytes(self.subject_ids)

    def compacted(self) -> "Block":
        """Return the block with one time, or one subject number, where all are equal."""
        times_ns, subject_ids = compact(self.times_ns), compact(self.subject_ids)
        return Block(self.base_seq, times_ns, subject_ids, self.columns)

    def message(self, position: int, subject: str) -> StoredMessage:
        """Return the message at ``position``. The caller looks up the ``subject``.

        Raises the errors of :meth:`MessageColumns.content`.
        """
        headers, payload = self.columns.content(position)
        return StoredMessage(
            self.base_seq + position, subject, int(self.times_ns[position]), headers, payload
        )


@dataclass(slots=True, eq=False)
class BlockView:
    """A :class:`Block` that is not copied, for scans that mostly pass messages on.

    ``offsets`` are those of ``columns``. ``payload`` is a view, which keeps the whole stored block
    in memory.
    """

    base_seq: int
    times_ns: I64Array
    subject_ids: U32Array
    offsets: U32Array
    headers: AnyHeaders | None
    payload: memoryview
    seals: Seals | None = None

    @classmethod
    def of(cls, block: Block) -> "BlockView":
        """Return a view of a block in memory."""
        columns = block.columns
        return cls(
            block.base_seq,
            block.times_ns,
            block.subject_ids,
            as_u32(columns.offsets),
            columns.headers,
            memoryview(columns.payload),
            columns.seals,
        )

    @property
    def count(self) -> int:
        """Number of messages, deleted ones included."""
        return len(self.subject_ids)

    @property
    def last_seq(self) -> int:
        """Sequence of the last message."""
        return self.base_seq + len(self.subject_ids) - 1

    def message(self, position: int, subject: str) -> StoredMessage:
        """Return the message at ``position``. The caller looks up the ``subject``."""
        return StoredMessage(
            self.base_seq + position,
            subject,
            int(self.times_ns[position]),
            None if self.headers is None else self.headers.message(position),
            bytes(self.payload[self.offsets[position] : self.offsets[position + 1]]),
        )


def encode_block(block: Block, replication_index: int, codec: BlockCodec | None = None) -> bytes:
    """Return the stored form of ``block``; ``replication_index`` is the log index of its entry.

    A body that ``codec`` does not make smaller is stored without it.
    """
    columns = block.columns
    parts: list[bytes] = [block.times_ns.tobytes(), block.subject_ids.tobytes(), columns.offsets]
    flags = 0
    if columns.headers is not None:
        uniform = isinstance(columns.headers, UniformHeaders)
        flags |= FLAG_UNIFORM_HEADERS if uniform else FLAG_HEADERS
        parts += _header_parts(columns.headers)
    if columns.seals is not None:
        flags |= FLAG_SEALED
        parts += columns.seals.keys, columns.seals.sizes
    parts.append(columns.payload)
    plain = b"".join(parts)
    number, plain_crc, body = _compressed(plain, codec)
    header = bytearray(
        _HEADER.pack(
            MAGIC,
            VERSION,
            number,
            columns.count,
            block.base_seq,
            int(block.times_ns[0]),
            len(plain),
            len(body),
            0,
            plain_crc,
            bytes(8),  # reserved
            0,  # the checksum, which covers the rest of the header and is set below
            flags,
            0,
            replication_index,
        )
    )
    # Keep the interpreter's lock: the CRC takes microseconds, getting the lock back milliseconds.
    crc = crc32c.crc32c(body, crc32c.crc32c(header), gil_release_mode=0)
    _CRC.pack_into(header, _CRC_AT, crc)
    return bytes(header) + body


def _compressed(plain: bytes, codec: BlockCodec | None) -> tuple[int, int, bytes]:
    """Return the codec's number, the CRC of the plain body and the body, all as they are stored."""
    if codec is not None and codec.min_bytes <= len(plain) <= PLAIN_BYTES_MAX:
        body = codec.compress(plain)
        # Random or encrypted payloads do not get smaller; decompressing them would be wasted.
        if len(body) < len(plain):
            return codec.number, crc32c.crc32c(plain), body
    return 0, 0, plain


def _header_parts(headers: AnyHeaders) -> list[bytes]:
    if isinstance(headers, UniformHeaders):
        names, values = headers.names, headers.values
        sizes = _HEADER_SIZES.pack(
            len(names.offsets) // 4 - 1,
            len(values.offsets) // 4 - 1,
            len(names.heap),
            len(values.heap),
        )
        return [sizes, names.offsets, values.offsets, names.heap, values.heap]
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


def _header_bytes(headers: AnyHeaders) -> int:
    """The bytes of :func:`_header_parts`."""
    if isinstance(headers, UniformHeaders):
        names, values = headers.names, headers.values
        size = len(names.offsets) + len(values.offsets) + len(names.heap) + len(values.heap)
        return _HEADER_SIZES.size + size
    return sum(map(len, _header_parts(headers)))


class _Body(NamedTuple):
    """The plain body of a stored block, and the fields of its header."""

    view: memoryview
    messages: int
    base_seq: int
    flags: int


def decode_block(data: bytes, codecs: Mapping[int, BlockCodec] | None = None) -> Block:
    """Return the block stored as ``data``; raise BlockCorruptError if any bit has changed.

    ``codecs`` has all codecs of stored blocks by their numbers.
    """
    return _decode_body(_open(data, codecs))


def view_block(data: bytes, codecs: Mapping[int, BlockCodec] | None = None) -> BlockView:
    """Decode like :func:`decode_block`, but the columns are views of ``data`` or its plain body."""
    view, count, base_seq, flags = _open(data, codecs)
    sids_at = 8 * count
    offsets_at = sids_at + 4 * count
    position = offsets_at + 4 * (count + 1)
    headers = None
    if flags & _FLAGS_HEADERS:
        headers, position = _decode_headers(view, position, count, flags)
    seals, position = _decode_seals(view, position, count, flags)
    return BlockView(
        base_seq,
        np.frombuffer(view, np.int64, count),
        np.frombuffer(view, np.uint32, count, sids_at),
        np.frombuffer(view, np.uint32, count + 1, offsets_at),
        headers,
        view[position:],
        seals,
    )


def _open(data: bytes, codecs: Mapping[int, BlockCodec] | None) -> _Body:
    if len(data) < _HEADER.size:
        raise BlockCorruptError("shorter than a block header")
    fields = _HEADER.unpack_from(data)
    magic, version, number, count, base_seq, _time, plain_bytes, stored_bytes = fields[:8]
    plain_crc, crc, flags = fields[9], fields[11], fields[12]
    if magic != MAGIC or version != VERSION or len(data) != _HEADER.size + stored_bytes:
        raise BlockCorruptError("not a block, or cut short")
    header = bytearray(data[: _HEADER.size])
    _CRC.pack_into(header, _CRC_AT, 0)
    view = memoryview(data)
    # Keep the lock, as `encode_block` does.
    if crc32c.crc32c(view[_HEADER.size :], crc32c.crc32c(header), gil_release_mode=0) != crc:
        raise BlockCorruptError("the checksum does not match")
    body = view[_HEADER.size :]
    if number:
        codec = (codecs or {}).get(number)
        body = memoryview(_decompressed(body, codec, number, plain_bytes, plain_crc))
    elif plain_bytes != stored_bytes:
        raise BlockCorruptError("the sizes in its header differ")
    return _Body(body, count, base_seq, flags)


def _decompressed(
    stored: memoryview, codec: BlockCodec | None, number: int, size: int, crc: int
) -> bytes:
    if codec is None:
        raise BlockCorruptError(f"unknown codec {number}")
    if size > PLAIN_BYTES_MAX:
        raise BlockCorruptError(f"a body of {size} bytes is larger than the maximum")
    try:
        plain = codec.decompress(stored, size)
    except ValueError as error:
        raise BlockCorruptError(f"the body cannot be decompressed: {error}") from error
    # A codec may invent bytes for damaged input without an error, so check the plain body too.
    if len(plain) != size or crc32c.crc32c(plain) != crc:
        raise BlockCorruptError("the checksum of the plain body does not match")
    return plain


def _decode_body(body: _Body) -> Block:
    view, count, base_seq, flags = body
    sids_at = 8 * count
    offsets_at = sids_at + 4 * count
    position = offsets_at + 4 * (count + 1)
    # Copy the columns: a view would keep the whole stored form in memory with the block.
    times = compact(np.frombuffer(bytes(view[:sids_at]), np.int64))
    subject_ids = compact(np.frombuffer(bytes(view[sids_at:offsets_at]), np.uint32))
    offsets = bytes(view[offsets_at:position])
    headers = None
    if flags & _FLAGS_HEADERS:
        headers, position = _decode_headers(view, position, count, flags)
    seals, position = _decode_seals(view, position, count, flags)
    columns = MessageColumns(count, offsets, bytes(view[position:]), headers, seals)
    return Block(base_seq, times, subject_ids, columns)


def _decode_seals(
    view: memoryview, position: int, count: int, flags: int
) -> tuple[Seals | None, int]:
    """Return the seals at ``position`` if there are any, and the position after them."""
    if not flags & FLAG_SEALED:
        return None, position
    middle = position + 8 * count
    stop = middle + 4 * count
    return Seals(bytes(view[position:middle]), bytes(view[middle:stop])), stop


def _decode_headers(
    view: memoryview, position: int, count: int, flags: int
) -> tuple[AnyHeaders, int]:
    """Return the headers at ``position``, and the position after them."""
    names, values, name_bytes, text_bytes = _HEADER_SIZES.unpack_from(view, position)
    position += _HEADER_SIZES.size
    uniform = bool(flags & FLAG_UNIFORM_HEADERS)
    # There is one more offset than there are elements.
    offsets = (names, values) if uniform else (count, names, names, values)
    parts = []
    for length in (*[4 * (number + 1) for number in offsets], name_bytes, text_bytes):
        parts.append(bytes(view[position : position + length]))
        position += length
    if uniform:
        name_offsets, text_offsets, name_heap, text_heap = parts
        return UniformHeaders(
            Texts(name_offsets, name_heap), Texts(text_offsets, text_heap)
        ), position
    return HeaderColumns(*parts), position


def join_blocks(blocks: Sequence[Block]) -> Block:
    """Join blocks with ascending sequences into one, column by column.

    Gaps between them are filled with blank messages that have the time and subject of the message
    before the gap.
    """
    if len(blocks) == 1:
        return blocks[0]
    if blocks[-1].last_seq + 1 - blocks[0].base_seq > sum(block.count for block in blocks):
        blocks = _without_gaps(blocks)
    return Block(
        blocks[0].base_seq,
        np.concatenate([block.times_ns for block in blocks]),
        np.concatenate([block.subject_ids for block in blocks]),
        join_columns([block.columns for block in blocks]),
    )


def _without_gaps(blocks: Sequence[Block]) -> list[Block]:
    adjoining = [blocks[0]]
    for block in blocks[1:]:
        before = adjoining[-1]
        gap = block.base_seq - before.last_seq - 1
        if gap:
            times_ns = np.full(gap, before.times_ns[-1])
            sids = np.full(gap, before.subject_ids[-1])
            adjoining.append(Block(before.last_seq + 1, times_ns, sids, blanks(gap)))
        adjoining.append(block)
    return adjoining
