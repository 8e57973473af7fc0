"""Limits over all connections of a process: bytes of bodies in flight and of unread answers."""

from dataclasses import dataclass
from typing import Final, Protocol

_SMALL_BYTES: Final = 64 << 10
"""Bytes of bodies that a connection may always hold while the budget has that much left."""
_SHARE: Final = 4
"""A larger body may hold one in this many of the bytes that are left."""
_UNTRACKED_BYTES: Final = 8 << 10
"""Unread bytes of one connection up to which it is not tracked."""


@dataclass(slots=True)
class BodyBudget:
    """The budget of bytes in memory of request bodies and of unfinished messages of sockets.

    A connection may hold up to a quarter of the bytes that are left. So, however many large bodies
    arrive slowly, some bytes remain for the next connection; the more there are, the smaller are
    their shares.
    """

    bytes_max: int
    held: int = 0

    def take(self, own: int, count: int) -> bool:
        """Count ``count`` bytes for a connection that holds ``own``; False above its share."""
        left = self.bytes_max - self.held
        wanted = own + count
        # What the connection already holds is part of what it may share in. Otherwise a body would
        # be refused in the middle, only because of its first half.
        if count > left or (wanted > _SMALL_BYTES and wanted > (left + own) // _SHARE):
            return False
        self.held += count
        return True

    def give(self, count: int) -> None:
        """Return ``count`` bytes to the budget."""
        self.held -= count


class Sender(Protocol):
    """A connection that is written to, or another buffer of answers."""

    def get_write_buffer_size(self) -> int:
        """Return the bytes that the peer has not read yet."""
        ...

    def abort(self) -> None:
        """End the connection at once, and drop these bytes."""
        ...


class UnreadBudget:
    """The budget of bytes of answers that were written and not read, over all connections.

    Above the limit, connections are cut: first those that have read nothing for longest, and last
    those within their share, which is the limit divided by the number of connections. Before that,
    the bytes are looked up again; until then, the sum may be too high, but never too low.

    The first 8 KiB of each connection are not tracked, because most answers are small and read at
    once. So all connections together hold at most ``bytes_max`` plus ``connections_max`` times
    8 KiB: by default 256 MiB + 8,192 x 8 KiB = 320 MiB.
    """

    def __init__(self, bytes_max: int, connections_max: int) -> None:
        self.bytes_max = bytes_max
        self._share = bytes_max // connections_max
        self.held = 0
        self.cut = 0
        """Number of connections that were cut."""
        self._senders: dict[Sender, int] = {}
        """Unread bytes at the last look. A sender that has read some since moves to the end."""

    def wrote(self, sender: Sender, count: int) -> None:
        """Track ``sender``, to which ``count`` bytes have just been written."""
        unread = sender.get_write_buffer_size()
        known = self._senders.get(sender)
        if known is None:
            if unread <= _UNTRACKED_BYTES:
                return
            known = 0
        elif unread < known + count:
            # It has read some since the last look, so it is inserted again, at the end.
            del self._senders[sender]
        self._senders[sender] = unread
        self.held += unread - known
        if self.held > self.bytes_max:
            self._look()
            self._cut()

    def forget(self, sender: Sender) -> None:
        """Stop tracking ``sender``, because its connection has ended."""
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
        # The first round spares those within their share. Only if many of them hold more together
        # than the limit, the second round ends some of them.
        for share in (self._share, 0):
            for sender, unread in list(self._senders.items()):
                if self.held <= self.bytes_max:
                    return
                if unread > share:
                    self.forget(sender)
                    self.cut += 1
                    sender.abort()
