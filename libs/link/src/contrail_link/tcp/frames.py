"""Frames of the link over TCP: a head of fixed size, then a body.

Head, big-endian: ``u32 bytes of body | u8 kind | u8 method | u32 request | u32 value``. A body is
msgpack, except in CHUNK, where it is the bytes themselves.

| Kind | From | Meaning of request, value and body |
|---|---|---|
| REQUEST | client | a new number; the milliseconds for which the caller waits; the arguments |
| CANCEL | client | the caller no longer waits |
| CREDIT | client | the number of further bytes of chunks that may be sent |
| RESULT | server | the result; for a stream: it begins; for request 0, unasked: the node's name |
| ERROR | server | the refusal; for a stream: it ends incomplete |
| CHUNK | server | a piece of the stream |
| END | server | the stream is complete |
| PULSE | both | a sign of life; from the server with its readiness (component to reason) |
| CONTEXT | client | id and trace of the request with this number, which follows |
"""

import struct
from typing import Final

import msgspec

REQUEST: Final = 1
CANCEL: Final = 2
CREDIT: Final = 3
RESULT: Final = 4
ERROR: Final = 5
CHUNK: Final = 6
END: Final = 7
PULSE: Final = 8
CONTEXT: Final = 9

_KINDS: Final = frozenset(range(REQUEST, CONTEXT + 1))
_HEAD: Final = struct.Struct(">IBBII")
HEAD_BYTES: Final = _HEAD.size
VALUE_MAX: Final = 0xFFFF_FFFF


class FrameError(Exception):
    """The peer broke the protocol; the connection must end."""


class Frame(msgspec.Struct, eq=False):
    """One frame; ``body`` is a view of the bytes that were read."""

    kind: int
    method: int
    request: int
    value: int
    body: memoryview


def frame_head(kind: int, method: int, request: int, value: int, body_bytes: int) -> bytes:
    """Return the head of a frame whose body has ``body_bytes`` bytes."""
    return _HEAD.pack(body_bytes, kind, method, request, value)


class FrameReader:
    """Splits a byte stream into frames. It buffers at most one incomplete frame."""

    def __init__(self, body_bytes_max: int) -> None:
        self._body_bytes_max = body_bytes_max
        # The incomplete frame, as it arrived. It is joined once it is complete, not for each chunk.
        self._parts: list[bytes] = []
        # Bytes in `_parts`.
        self._have = 0
        # Bytes of the incomplete frame, or of its head while that is incomplete.
        self._need = HEAD_BYTES

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that ``data`` completes.

        Raises FrameError for a head with an unknown kind or a body above the limit.
        """
        self._have += len(data)
        if self._parts:
            self._parts.append(data)
            if self._have < self._need:
                return []
            data = b"".join(self._parts)
            self._parts = []
        return self._cut(data)

    def _cut(self, data: bytes) -> list[Frame]:
        frames: list[Frame] = []
        view = memoryview(data)
        at, end = 0, len(data)
        self._need = HEAD_BYTES
        while end - at >= HEAD_BYTES:
            size, kind, method, request, value = _HEAD.unpack_from(data, at)
            # Checked before the body arrives: a wrong size would make the reader buffer up to 4
            # GiB.
            if size > self._body_bytes_max or kind not in _KINDS:
                raise FrameError(f"a frame of kind {kind} with {size} bytes")
            stop = at + HEAD_BYTES + size
            if stop > end:
                self._need = stop - at
                break
            frames.append(Frame(kind, method, request, value, view[at + HEAD_BYTES : stop]))
            at = stop
        self._have = end - at
        if at < end:
            self._parts = [data[at:]]
        return frames
