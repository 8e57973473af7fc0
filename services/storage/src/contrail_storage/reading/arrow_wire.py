"""Arrow record batches on the wire, without copying their last column.

A writer of Arrow streams copies every column into one message. Payloads are most of a replay and
are in stored blocks. So here the message's head includes their size, and they follow in pieces.

Layout (Arrow columnar format 1.5, encapsulated message and RecordBatch; FlatBuffers binary
format): continuation mark, size of the metadata, metadata, body. The metadata that pyarrow writes
for the other columns is read for its field nodes and buffers, and written again with one more
column's.
"""

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import pyarrow as pa

from contrail_link.contract.read import Chunk

_PREFIX: Final = struct.Struct("<II")
_U16: Final = struct.Struct("<H")
_U32: Final = struct.Struct("<I")
_I32: Final = struct.Struct("<i")
_PAIR: Final = struct.Struct("<qq")
"""A field node (length, nulls) or a buffer (offset, length)."""

_ALIGNMENT: Final = 8
_CONTINUATION: Final = 0xFFFFFFFF
_VERSION_5: Final = 4
_RECORD_BATCH: Final = 3
_MESSAGE_HEADER: Final = 2
_BATCH_NODES: Final = 1
_BATCH_BUFFERS: Final = 2
"""Fields of the tables Message and RecordBatch, by their places."""

_HEAD: Final = struct.Struct(
    "<I"  # 0: where the root table is
    "HHHHHH"  # 4: table of places of Message: its size, Message's, places of four fields
    "iHBxqI"  # 16: Message: back to its places; version, kind, bytes of the body, RecordBatch
    "HHHHH2x"  # 36: table of places of RecordBatch, with three fields
    "iIqII"  # 48: RecordBatch: back to its places; nodes, length, buffers; how many nodes
)
assert _HEAD.size == 9 * 8  # so that the nodes after it are aligned


class _Parts(NamedTuple):
    """The parts of a message: encoded field nodes, encoded buffers, and the body."""

    nodes: bytes
    buffers: bytes
    body: memoryview


def batch_with_payloads(
    others: pa.RecordBatch, rows: int, offsets: memoryview, payloads: Sequence[Chunk]
) -> tuple[Chunk, ...]:
    """Return a message with the columns of ``others`` and a last binary column, in pieces.

    ``offsets`` are i32[rows + 1], from 0, into the concatenated ``payloads``.
    """
    parts = _read(memoryview(others.serialize()))
    size = sum(map(len, payloads))
    offsets_at = len(parts.body)
    payloads_at = offsets_at + _padded(offsets.nbytes)
    end = payloads_at + _padded(size)
    nodes = parts.nodes + _PAIR.pack(rows, 0)
    buffers = b"".join(
        [
            parts.buffers,
            _PAIR.pack(offsets_at, 0),
            _PAIR.pack(offsets_at, offsets.nbytes),
            _PAIR.pack(payloads_at, size),
        ]
    )
    return (
        _head(rows, nodes, buffers, end),
        parts.body,
        offsets.cast("B"),
        bytes(payloads_at - offsets_at - offsets.nbytes),
        *payloads,
        bytes(end - payloads_at - size),
    )


def _padded(size: int) -> int:
    return -size % _ALIGNMENT + size


def _head(rows: int, nodes: bytes, buffers: bytes, body_bytes: int) -> bytes:
    buffers_at = _HEAD.size + len(nodes) + 4
    metadata = b"".join(
        [
            _HEAD.pack(
                *(16, 12, 20, 4, 6, 16, 8),
                *(12, _VERSION_5, _RECORD_BATCH, body_bytes, 16),
                *(10, 20, 8, 4, 16),
                *(12, 16, rows, buffers_at - 64, len(nodes) // _PAIR.size),
            ),
            nodes,
            bytes(4),
            _U32.pack(len(buffers) // _PAIR.size),
            buffers,
        ]
    )
    return _PREFIX.pack(_CONTINUATION, len(metadata)) + metadata


def _read(message: memoryview) -> _Parts:
    _, size = _PREFIX.unpack_from(message)
    metadata = message[_PREFIX.size : _PREFIX.size + size]
    root = _target(metadata, 0)
    batch = _target(metadata, _position(metadata, root, _MESSAGE_HEADER))
    return _Parts(
        _pairs(metadata, _position(metadata, batch, _BATCH_NODES)),
        _pairs(metadata, _position(metadata, batch, _BATCH_BUFFERS)),
        message[_PREFIX.size + size :],
    )


def _target(metadata: memoryview, at: int) -> int:
    """Return the place that the reference at ``at`` leads to."""
    target: int = at + _U32.unpack_from(metadata, at)[0]
    return target


def _position(metadata: memoryview, table: int, field: int) -> int:
    """Return the place of a field of the table at ``table``; every writer sets these fields."""
    vtable = table - _I32.unpack_from(metadata, table)[0]
    position: int = table + _U16.unpack_from(metadata, vtable + 4 + 2 * field)[0]
    return position


def _pairs(metadata: memoryview, at: int) -> bytes:
    """Return the elements of the vector that the reference at ``at`` leads to."""
    vector = _target(metadata, at)
    count = _U32.unpack_from(metadata, vector)[0]
    return bytes(metadata[vector + 4 : vector + 4 + count * _PAIR.size])
