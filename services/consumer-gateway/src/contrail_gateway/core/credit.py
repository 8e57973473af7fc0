"""Credit: the number of messages or bytes that a subscriber allows the server to send."""

from contrail_common.timeunits import INT64_MAX


class Credit:
    """A balance of messages and one of bytes; None means no limit.

    A message that begins within the credit is sent whole, so the balance of bytes may fall below
    zero. Added credit first makes up for that.
    """

    __slots__ = ("bytes", "msgs")

    def __init__(self, msgs: int | None, bytes_: int | None) -> None:
        self.msgs = msgs
        self.bytes = bytes_

    def add(self, msgs: int, bytes_: int) -> None:
        """Add to the balances."""
        if self.msgs is not None:
            self.msgs = min(self.msgs + msgs, INT64_MAX)
        if self.bytes is not None:
            self.bytes = min(self.bytes + bytes_, INT64_MAX)

    @property
    def open(self) -> bool:
        """True if another message may be sent."""
        return (self.msgs is None or self.msgs > 0) and (self.bytes is None or self.bytes > 0)

    def spend(self, count: int, size: int) -> None:
        """Subtract ``count`` messages of ``size`` bytes in total."""
        if self.msgs is not None:
            self.msgs -= count
        if self.bytes is not None:
            self.bytes -= size
