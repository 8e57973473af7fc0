"""Reading a client's frames: complete plain messages here, everything else by ``websockets``.

A socket of a publisher has many small messages, each in a frame of its own. This module reads a
message that arrives completely, in one frame, in a fifth of the library's time. The library reads
fragments, control frames, incomplete frames and invalid frames. It gets one frame at a time, so
the start of the next frame is known.
"""

from collections.abc import Iterator
from typing import Final, cast

from websockets.frames import Frame, Opcode
from websockets.protocol import Protocol, State

try:
    from websockets.speedups import apply_mask
except ImportError:  # where it was built without a compiler
    from websockets.utils import apply_mask

FINAL: Final = 0x80
MASKED: Final = 0x80
_OPCODE: Final = 0x0F
_MEDIUM: Final = 126
_LONG: Final = 127
_HEAD_BYTES: Final = {_MEDIUM: 4, _LONG: 10}
"""Bytes of a head without its mask, by length code; all other heads have two."""
_MASK_BYTES: Final = 4
TOGETHER_MAX: Final = 64
"""Messages of a run: handling them is one step of the socket."""
_ALL: Final = 1 << 64
"""More bytes than a connection can ever receive."""
_OPCODES: Final = frozenset(map(int, Opcode))


class FrameReader:
    """Reads the frames of one connection (RFC 6455, 5.2) from bytes that arrive in any pieces."""

    def __init__(self, wire: Protocol, opcode: Opcode) -> None:
        """Read frames of ``opcode`` here; ``wire`` reads all others, and has the size limit."""
        self._wire = wire
        # The first byte of a frame that is read here: complete, and of the sub-protocol's kind.
        self._plain = FINAL | opcode
        # The start of a head that has not arrived completely.
        self._begun = b""
        self._missing = 0  # bytes until the end of the frame that the library is reading

    def read(self, data: bytes) -> Iterator[list[bytes] | Frame]:
        """Yield the plain messages that ``data`` completes, in runs, and the library's frames.

        Never raises: a violation of the protocol is in ``parser_exc`` of the library.
        """
        if self._begun:
            data, self._begun = self._begun + data, b""
        at, end = 0, len(data)
        while at < end:
            if not self._missing:
                messages, at = self._plain_run(data, at)
                if messages:
                    yield messages
                    continue
                body, size = self._frame_at(data, at)
                if not body:
                    self._begun = data[at:]
                    return
                self._missing = body + size - at
            taken = min(self._missing, end - at)
            self._missing -= taken
            self._wire.receive_data(data[at : at + taken])
            at += taken
            for event in self._wire.events_received():
                yield cast(Frame, event)

    def _plain_run(self, data: bytes, at: int) -> tuple[list[bytes], int]:
        """Return the plain messages from ``at`` on, at most TOGETHER_MAX, and where they end."""
        # The library has to see, in order to refuse it, each frame that is too large, comes between
        # the fragments of another message, or follows a close frame.
        wire, plain, end = self._wire, self._plain, len(data)
        size_max = wire.max_message_size
        assert size_max is not None
        found: list[bytes] = []
        if wire.current_size is not None or wire.state is not State.OPEN:
            return found, at
        while at + 1 < end and data[at] == plain and len(found) < TOGETHER_MAX:
            size = data[at + 1] - MASKED  # not above 125 without a mask, either
            body = at + 2 + _MASK_BYTES
            if size >= _MEDIUM:
                head = at + _HEAD_BYTES[size]
                body, size = head + _MASK_BYTES, int.from_bytes(data[at + 2 : head])
            if not 0 <= size <= size_max or body + size > end:
                break
            found.append(apply_mask(data[body : body + size], data[body - _MASK_BYTES : body]))
            at = body + size
        return found, at

    def _frame_at(self, data: bytes, at: int) -> tuple[int, int]:
        """Return start (0: not known yet) and size of the content of the frame at ``at``."""
        # The second byte, which says how long the head is, has not arrived.
        if len(data) - at == 1:
            return 0, 0
        first, second = data[at], data[at + 1]
        if not second & MASKED or first & _OPCODE not in _OPCODES:
            # Masks keep a page from choosing the bytes that a proxy on the way sees (RFC 6455,
            # 10.3).
            return at + 2, _ALL  # the library refuses it, and no frame follows
        size = second & ~MASKED
        head = at + _HEAD_BYTES.get(size, 2)
        if head > len(data):
            return 0, 0
        if size >= _MEDIUM:
            size = int.from_bytes(data[at + 2 : head])
        return head + _MASK_BYTES, size
