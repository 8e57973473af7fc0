"""Bounds over all connections of a process: bytes of bodies in flight, answers nobody has read."""

from dataclasses import dataclass
from typing import Final, Protocol

_SMALL_BYTES: Final = 64 << 10
"""What a connection may hold of bodies while anything is left."""
_SHARE: Final = 4
_UNTRACKED_BYTES: Final = 8 << 10
"""Unread bytes of one connection that are not worth looking after."""


@dataclass(slots=True)
class BodyBudget:
    """Bytes of request bodies, and of unfinished messages of sockets, that are held.

    A connection may come to hold a quarter of what is left to all others. However many large bodies
    others are slow to send, something is left for the next one; many of them get smaller shares.
    """

    bytes_max: int
    held: int = 0

    def take(self, own: int, count: int) -> bool:
        """Count ``count`` bytes for a connection that holds ``own``; False beyond its share."""
        left = self.bytes_max - self.held
        wanted = own + count
        if count > left or (wanted > _SMALL_BYTES and wanted > (left + own) // _SHARE):
            return False
        self.held += count
        return True

    def give(self, count: int) -> None:
        """Say that ``count`` bytes are no longer held."""
        self.held -= count


class Sender(Protocol):
    """A connection that is written to, or whatever else keeps answers for someone who reads."""

    def get_write_buffer_size(self) -> int:
        """Bytes that were not taken yet."""
        ...

    def abort(self) -> None:
        """End the connection at once and forget these bytes."""
        ...


class UnreadBudget:
    """Bytes of answers that were written and not taken yet, over all connections of a process.

    At the bound connections are cut, those first that have taken nothing for the longest time. One
    that holds no more than its share, which all connections have room for, is cut last. The bytes
    are looked up again before anyone is cut; in between the sum may be too high, never too low.
    """

    def __init__(self, bytes_max: int, connections_max: int) -> None:
        self.bytes_max = bytes_max
        self._share = bytes_max // connections_max
        self.held = 0
        self.cut = 0
        """Connections that were cut."""
        self._senders: dict[Sender, int] = {}
        """Unread bytes when last looked at; whoever was seen to take some goes to the end."""

    def wrote(self, sender: Sender, count: int) -> None:
        """Look after ``sender``, to which ``count`` bytes have just been written."""
        unread = sender.get_write_buffer_size()
        known = self._senders.get(sender)
        if known is None:
            if unread <= _UNTRACKED_BYTES:
                return
            known = 0
        elif unread < known + count:
            del self._senders[sender]
        self._senders[sender] = unread
        self.held += unread - known
        if self.held > self.bytes_max:
            self._look()
            self._cut()

    def forget(self, sender: Sender) -> None:
        """Look after ``sender`` no more: its connection has ended."""
        self.held -= self._senders.pop(sender, 0)

    def _look(self) -> None:
        for sender, known in list(self._senders.items()):
            unread = sender.get_write_buffer_size()
            if unread < known:
                self.forget(sender)
                if unread > _UNTRACKED_BYTES:
                    self._senders[sender] = unread
                    self.held += unread

    def _cut(self) -> None:
        for share in (self._share, 0):
            for sender, unread in list(self._senders.items()):
                if self.held <= self.bytes_max:
                    return
                if unread > share:
                    self.forget(sender)
                    self.cut += 1
                    sender.abort()
