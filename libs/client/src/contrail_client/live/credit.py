"""Credit of a subscription: how much the server may send ahead of what was consumed. Pure."""

from typing import Final

_PART: Final = 2
"""Credit goes back once one over this of the window was consumed, not for every message."""


class CreditWindow:
    """A window of messages and of bytes that the server may fill.

    What is consumed is given back in parts, so that at no time more than the window is on its way
    or unread: with the one exception that a message which begins within the credit is sent whole.
    """

    def __init__(self, msgs: int, size: int) -> None:
        if msgs < 1 or size < 1:
            raise ValueError("credit must be at least one message and one byte")
        self.msgs = msgs
        self.bytes = size
        self._consumed = 0
        self._consumed_bytes = 0

    def consumed(self, size: int) -> bool:
        """A message of `size` bytes was consumed; True when it is time to give credit back."""
        self._consumed += 1
        self._consumed_bytes += size
        return self._consumed * _PART >= self.msgs or self._consumed_bytes * _PART >= self.bytes

    def give_back(self) -> tuple[int, int]:
        """Messages and bytes that may be sent in addition; they count as given from here on."""
        given = (self._consumed, self._consumed_bytes)
        self._consumed = self._consumed_bytes = 0
        return given

    def anew(self) -> None:
        """A new socket begins with the whole window."""
        self._consumed = self._consumed_bytes = 0
