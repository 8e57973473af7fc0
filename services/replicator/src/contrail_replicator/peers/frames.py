"""Frames between nodes: a head of fixed size, then a body.

Head, little-endian: ``u32 body bytes | u8 kind | u8 flags | u16 0 | u32 group | u32 crc32c``. The
checksum covers the head before it, and the body. Flags are 0 in this version.
"""

import enum
import struct
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
from crc32c import crc32c

_CHECKED: Final = struct.Struct("<IBBHI")
_CRC: Final = struct.Struct("<I")
_HEAD: Final = struct.Struct("<IBBHII")
HEAD_BYTES: Final = _HEAD.size

Bytes = bytes | bytearray | memoryview


class Channel(enum.IntEnum):
    """The connections between two nodes. Each is its own, so that none delays heartbeats."""

    CONTROL = 0
    """Heartbeats, votes, acknowledgements, and everything else that is small."""
    APPEND = 1
    """Entries, and requests to the leader of the meta group."""
    BULK = 2
    """What a member fetches to catch up."""


BODY_BYTES_MAX: Final = {
    Channel.CONTROL: 64 << 10,
    Channel.APPEND: (8 << 20) + (64 << 10),
    Channel.BULK: (1 << 20) + (64 << 10),
}


class FrameError(Exception):
    """The peer broke the protocol; the connection must end."""


class Frame(msgspec.Struct, eq=False):
    """One frame. ``body`` is valid until the next frame is taken: decoders copy from it."""

    kind: int
    group: int
    body: Bytes


def frame(kind: int, group: int, body: Sequence[Bytes]) -> list[Bytes]:
    """Return the pieces of a frame whose body is the joined pieces of ``body``."""
    head = _CHECKED.pack(sum(map(len, body)), kind, 0, 0, group)
    checksum = crc32c(head)
    for piece in body:
        checksum = crc32c(piece, checksum)
    return [head + _CRC.pack(checksum), *body]


class FrameCutter:
    """Cuts received bytes into frames. It holds at most one incomplete frame."""

    def __init__(self, body_bytes_max: int) -> None:
        self._body_bytes_max = body_bytes_max
        # The start of an incomplete head; shorter than a head.
        self._head = b""
        # The head of the incomplete body, and the body with its bytes that have arrived.
        self._head_of_body = b""
        self._body: bytearray | None = None
        self._body_have = 0

    def feed(self, data: Bytes) -> Iterator[Frame]:
        """Yield the frames that ``data`` completes.

        Raises FrameError for a body above the limit before it is read, and for a frame that is not
        what was sent.
        """
        view, at = memoryview(data), 0
        while at < len(view):
            if self._body is not None:
                at += self._fill(self._body, view[at:])
                if self._body_have == len(self._body):
                    body, self._body = self._body, None
                    yield _checked(self._head_of_body, body)
                continue
            taken = view[at : at + HEAD_BYTES - len(self._head)]
            self._head += taken
            at += len(taken)
            if len(self._head) < HEAD_BYTES:
                return
            head, self._head = self._head, b""
            size = self._size_of(head)
            if size <= len(view) - at:
                yield _checked(head, view[at : at + size])
                at += size
            else:
                self._head_of_body, self._body, self._body_have = head, bytearray(size), 0

    def _fill(self, body: bytearray, data: memoryview) -> int:
        taken = data[: len(body) - self._body_have]
        body[self._body_have : self._body_have + len(taken)] = taken
        self._body_have += len(taken)
        return len(taken)

    def _size_of(self, head: bytes) -> int:
        size, kind, flags, zero, _, _ = _HEAD.unpack(head)
        # Checked before the body is read: a wrong size would reserve up to 4 GiB.
        if size > self._body_bytes_max:
            raise FrameError(
                f"a frame of kind {kind} with {size} bytes; at most {self._body_bytes_max} "
                "are allowed on this channel"
            )
        if flags or zero:
            raise FrameError(f"a frame of kind {kind} with unknown flags")
        return int(size)


def _checked(head: bytes, body: Bytes) -> Frame:
    _, kind, _, _, group, expected = _HEAD.unpack(head)
    if crc32c(body, crc32c(head[: _CHECKED.size])) != expected:
        raise FrameError(f"a frame of kind {kind} does not match its checksum")
    return Frame(kind, group, body)
