"""The credit of a subscription: how much the server may send ahead of the reader. Pure."""

from typing import Final

_PART: Final = 2
"""Credit is returned when 1/`_PART` of the window was consumed, not for every message."""


class CreditWindow:
    """A window of messages and bytes that the server may fill.

    Consumed messages give credit back in parts. So at most the window is in flight or unread at any
    time, with one exception: a message that begins within the credit is sent whole.
    """

    def __init__(self, msgs: int, size: int) -> None:
        if msgs < 1 or size < 1:
            raise ValueError("credit must be at least one message and one byte")
        self.msgs = msgs
        self.bytes = size
        self._consumed = 0
        self._consumed_bytes = 0

    def consumed(self, size: int) -> bool:
        """Count a consumed message of `size` bytes; True if it is time to give credit back."""
        self._consumed += 1
        self._consumed_bytes += size
        return self._consumed * _PART >= self.msgs or self._consumed_bytes * _PART >= self.bytes

    def give_back(self) -> tuple[int, int]:
        """The messages and bytes to give back. They count as given from now on."""
        given = (self._consumed, self._consumed_bytes)
        self._consumed = self._consumed_bytes = 0
        return given

    def restart(self) -> None:
        """Start with the whole window again, for a new socket."""
        self._consumed = self._consumed_bytes = 0
