"""Sealed content in columns: which messages are sealed, and in which form.

The payload of a sealed message is a *cell*: the nonce (12 B), the ciphertext of the message's plain
cell, and the tag (16 B). The plain cell contains the headers too::

    u32 header_bytes | headers as msgpack | payload

A message without content has an empty cell and is not sealed. Columns with seals have no other
headers. The size of a message for limits is that of its plain content.
"""

import struct
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from contrail_common.model import Headers
from contrail_common.texts import I64Array, as_u32

NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16
CELL_OVERHEAD: Final = NONCE_BYTES + 4 + TAG_BYTES
"""Bytes by which a sealed cell is longer than the payload and the encoded headers."""
NOT_SEALED: Final = 0
_HEAD: Final = struct.Struct("<I")
_encode_headers: Final = msgspec.msgpack.Encoder().encode
_headers_decoder: Final = msgspec.msgpack.Decoder(Headers)


class ContentSealedError(ValueError):
    """The content of a message was requested while it is sealed."""


class CellBrokenError(ValueError):
    """The bytes of a plain cell are not valid."""


class Seals(msgspec.Struct, array_like=True, gc=False):
    """For each message, the id of its key (u64; NOT_SEALED if none) and its plain size (u32)."""

    keys: bytes
    sizes: bytes

    @classmethod
    def of(cls, keys: Sequence[int], sizes: I64Array) -> "Seals":
        """Return the seals of messages with these ``keys`` and plain ``sizes`` in bytes."""
        return cls(np.array(keys, np.uint64).tobytes(), sizes.astype(np.uint32).tobytes())

    @property
    def key_ids(self) -> NDArray[np.uint64]:
        """The id of each message's key."""
        return np.frombuffer(self.keys, np.uint64)

    def plain_sizes(self) -> I64Array:
        """Return each message's bytes for limits."""
        return as_u32(self.sizes).astype(np.int64)

    def is_sound(self, count: int) -> bool:
        """Return True if there is a key and a size for each of ``count`` messages."""
        return len(self.keys) == 8 * count and len(self.sizes) == 4 * count

    def slice(self, start: int, stop: int) -> "Seals":
        """Return the seals of the messages from ``start`` up to ``stop``."""
        return Seals(self.keys[8 * start : 8 * stop], self.sizes[4 * start : 4 * stop])

    def select(self, positions: I64Array) -> "Seals":
        """Return the seals of the messages at ``positions``."""
        return Seals(self.key_ids[positions].tobytes(), as_u32(self.sizes)[positions].tobytes())

    def only(self, kept: NDArray[np.bool_]) -> "Seals":
        """Return a copy in which messages that are not ``kept`` are not sealed and have size 0."""
        keys, sizes = self.key_ids.copy(), as_u32(self.sizes).copy()
        keys[~kept] = NOT_SEALED
        sizes[~kept] = 0
        return Seals(keys.tobytes(), sizes.tobytes())


def join_seals(parts: Sequence[Seals]) -> Seals:
    """Return the seals of all ``parts``, one part after another."""
    return Seals(b"".join([part.keys for part in parts]), b"".join([part.sizes for part in parts]))


def plain_cell(headers: Headers | None, payload: bytes) -> bytes:
    """Return the content of a message as it is sealed; empty without headers and payload."""
    if not headers:
        return _HEAD.pack(0) + payload if payload else b""
    encoded = _encode_headers(headers)
    return _HEAD.pack(len(encoded)) + encoded + payload


def content_of(cell: bytes) -> tuple[Headers | None, bytes]:
    """Return headers and payload of a plain cell; raise CellBrokenError if it is invalid."""
    if not cell:
        return None, b""
    if len(cell) < _HEAD.size:
        raise CellBrokenError("it is cut short")
    begin = _HEAD.size + _HEAD.unpack_from(cell)[0]
    if begin > len(cell):
        raise CellBrokenError("its headers are cut short")
    if begin == _HEAD.size:
        return None, cell[begin:]
    try:
        return _headers_decoder.decode(cell[_HEAD.size : begin]), cell[begin:]
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CellBrokenError(f"its headers do not decode: {error}") from error
