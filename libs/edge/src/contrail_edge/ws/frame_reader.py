"""Reading a client's frames: whole plain messages here, everything else by ``websockets``.

A socket that is published to carries many small messages, each in a frame of its own. One that came
whole, in one frame, is read in a fifth of the library's time. Fragments, control frames, what comes
in pieces and what is against the rules are the library's. It is never given more than its frame, so
where the next one begins is known.
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
"""Of a head without its mask; others have two."""
_MASK_BYTES: Final = 4
_ALL: Final = 1 << 64
"""More than will ever come."""
_OPCODES: Final = frozenset(map(int, Opcode))


class FrameReader:
    """The frames of one connection (RFC 6455, 5.2), in order, as they come in any pieces."""

    def __init__(self, wire: Protocol, opcode: Opcode) -> None:
        """Plain messages are frames of ``opcode``; ``wire`` reads the others, and has the bound."""
        self._wire = wire
        self._plain = FINAL | opcode
        self._begun = b""
        self._missing = 0  # of what the library has begun to read

    def read(self, data: bytes) -> Iterator[bytes | Frame]:
        """What ``data`` completes: plain messages, and frames as the library has read them.

        What breaks the rules is in the library's ``parser_exc`` then; nothing is raised.
        """
        if self._begun:
            data, self._begun = self._begun + data, b""
        at, end = 0, len(data)
        while at < end:
            if not self._missing:
                body, size = self._frame_at(data, at)
                if not body:
                    self._begun = data[at:]
                    return
                if body + size <= end and self._is_plain(data[at], size):
                    yield apply_mask(data[body : body + size], data[body - _MASK_BYTES : body])
                    at = body + size
                    continue
                self._missing = body + size - at
            taken = min(self._missing, end - at)
            self._missing -= taken
            self._wire.receive_data(data[at : at + taken])
            at += taken
            for event in self._wire.events_received():
                yield cast(Frame, event)

    def _frame_at(self, data: bytes, at: int) -> tuple[int, int]:
        """Where the content of the frame at ``at`` begins, 0 until that is known; its bytes."""
        if len(data) - at == 1:
            return 0, 0
        first, second = data[at], data[at + 1]
        if not second & MASKED or first & _OPCODE not in _OPCODES:
            return at + 2, _ALL  # the library refuses it, and what follows is no frame
        size = second & ~MASKED
        head = at + _HEAD_BYTES.get(size, 2)
        if head > len(data):
            return 0, 0
        if size >= _MEDIUM:
            size = int.from_bytes(data[at + 2 : head])
        return head + _MASK_BYTES, size

    def _is_plain(self, first: int, size: int) -> bool:
        wire = self._wire
        assert wire.max_message_size is not None
        return (
            first == self._plain
            and size <= wire.max_message_size
            and wire.current_size is None
            and wire.state is State.OPEN
        )
