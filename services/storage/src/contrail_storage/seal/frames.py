"""Sealed bytes, and what seals and opens them.

A sealed value is a frame of AES-256-GCM::

    data key's id u32 | number u64 | ciphertext | tag 16 B

big-endian. The first 12 bytes are the nonce. A data key is used by one process only, which counts
what it seals with it, so no nonce comes twice under a key.
"""

import struct
from typing import Final, Protocol

_HEAD: Final = struct.Struct(">IQ")
HEAD_BYTES: Final = _HEAD.size
TAG_BYTES: Final = 16
SEAL_BYTES: Final = HEAD_BYTES + TAG_BYTES
"""How much longer sealed bytes are."""


class SealBrokenError(Exception):
    """Sealed bytes do not open: they changed, were moved, or their data key is not known."""


class Sealer(Protocol):
    """Seals bytes to the place that they are kept at, and opens them there. Thread-safe."""

    def seal(self, plain: bytes | memoryview, place: bytes) -> bytes:
        """``plain``, sealed; it opens at ``place`` alone. Raises OSError: no data key at hand."""
        ...

    def open(self, sealed: bytes | memoryview, place: bytes) -> bytes:
        """What was sealed. Raises SealBrokenError."""
        ...


def frame_head(key_id: int, number: int) -> bytes:
    """The first bytes of the frame that is the ``number``-th under a data key; also its nonce."""
    return _HEAD.pack(key_id, number)


def key_of(sealed: bytes | memoryview) -> int:
    """The id of the data key that sealed a frame. Raises SealBrokenError when it is cut short."""
    if len(sealed) < SEAL_BYTES:
        raise SealBrokenError(f"{len(sealed)} bytes are too few for an encrypted value")
    key_id: int = _HEAD.unpack_from(sealed)[0]
    return key_id
