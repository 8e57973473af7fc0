"""The ends of frames in the bytes that a WebSocket server sends. A frame can be inserted there."""

from typing import Final

_HEAD_END: Final = b"\r\n\r\n"
_HEAD_BYTES_MAX: Final = 64 << 10
_SHORT: Final = 2
_MEDIUM: Final = 126
_LONG: Final = 127
_LENGTH_BITS: Final = 0x7F


class FrameEnds:
    """Finds the ends of frames in a server's bytes: the answer to the handshake, then frames.

    A server's frames are not masked (RFC 6455, 5.1), so their heads have 2, 4 or 10 bytes.
    """

    def __init__(self) -> None:
        # The answer to the handshake, until its end was found.
        self._answer: bytearray | None = bytearray()
        # The head of the current frame, while it is incomplete.
        self._head = bytearray()
        # Bytes of the current frame's content that have not come yet.
        self._left = 0
        self.between = False
        """True if the bytes so far end with a complete frame or the answer to the handshake."""

    def feed(self, data: bytes) -> int | None:
        """Take ``data``; return how many of its bytes belong to the current frame.

        Returns None if the frame does not end in ``data``. An answer that opens no socket has no
        end.
        """
        first: int | None = None
        at = 0
        while at < len(data):
            at += self._take(memoryview(data)[at:])
            if self.between and first is None:
                first = at
        return first

    def _take(self, data: memoryview) -> int:
        """Take bytes up to the next end, and return their number."""
        self.between = False
        if self._answer is not None:
            return self._take_answer(self._answer, data)
        taken = 0
        while taken < len(data) and not self._left:
            self._head.append(data[taken])
            taken += 1
            if self._head_complete():
                break
        if self._left:
            step = min(self._left, len(data) - taken)
            self._left -= step
            taken += step
            self.between = not self._left
        return taken

    def _take_answer(self, answer: bytearray, data: memoryview) -> int:
        before = len(answer)
        answer += data[: _HEAD_BYTES_MAX - before]
        end = answer.find(_HEAD_END)
        if end < 0 or not answer.startswith(b"HTTP/1.1 101"):
            return len(data)
        self._answer = None
        self.between = True
        return end + len(_HEAD_END) - before

    def _head_complete(self) -> bool:
        head = self._head
        if len(head) < _SHORT:
            return False
        length = head[1] & _LENGTH_BITS
        more = {_MEDIUM: 2, _LONG: 8}.get(length, 0)
        if len(head) < _SHORT + more:
            return False
        self._left = int.from_bytes(head[_SHORT:]) if more else length
        head.clear()
        self.between = not self._left
        return True
