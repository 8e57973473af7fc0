"""The form of sealed (encrypted and authenticated) bytes, and the interface of their sealers.

A sealed value is a frame of AES-256-GCM::

    data key's id u32 | number u64 | ciphertext | tag 16 B

Numbers are big-endian. The first 12 bytes are the nonce. A data key is used by one process only,
and that process numbers everything it seals with the key. So no nonce repeats under a key.
"""

import struct
from typing import Final, Protocol

_HEAD: Final = struct.Struct(">IQ")
HEAD_BYTES: Final = _HEAD.size
TAG_BYTES: Final = 16
SEAL_BYTES: Final = HEAD_BYTES + TAG_BYTES
"""Bytes that sealing adds to a value."""


class SealBrokenError(Exception):
    """Sealed bytes cannot be opened: they were changed or moved, or their data key is unknown."""


class Sealer(Protocol):
    """Seals bytes and binds them to the position where they are stored. Thread-safe."""

    def seal(self, plain: bytes | memoryview, context: bytes) -> bytes:
        """Return ``plain`` sealed, so that it can be opened only with the same ``context``.

        Raises OSError if a new data key is needed and cannot be written.
        """
        ...

    def open(self, sealed: bytes | memoryview, context: bytes) -> bytes:
        """Return the plain bytes. Raises SealBrokenError."""
        ...


def frame_head(key_id: int, number: int) -> bytes:
    """The head of a frame, which is also its nonce: no two frames of a key share a ``number``."""
    return _HEAD.pack(key_id, number)


def key_of(sealed: bytes | memoryview) -> int:
    """The id of the data key that sealed a frame. Raises SealBrokenError for a frame cut short."""
    # Checked here, before the key is looked up: shorter bytes have no id to read, and the cipher
    # would report them as modified.
    if len(sealed) < SEAL_BYTES:
        raise SealBrokenError(f"{len(sealed)} bytes are too few for an encrypted value")
    key_id: int = _HEAD.unpack_from(sealed)[0]
    return key_id
