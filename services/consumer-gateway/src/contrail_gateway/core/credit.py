"""Credit: how much a subscriber is ready to be sent."""

from contrail_common.timeunits import INT64_MAX


class Credit:
    """A balance of messages and one of bytes; None is without a limit.

    A message that begins within the credit is sent whole, so the balance of bytes may fall below
    zero, and what is added fills that up first.
    """

    __slots__ = ("bytes", "msgs")

    def __init__(self, msgs: int | None, bytes_: int | None) -> None:
        self.msgs = msgs
        self.bytes = bytes_

    def add(self, msgs: int, bytes_: int) -> None:
        """Allow that much more."""
        if self.msgs is not None:
            self.msgs = min(self.msgs + msgs, INT64_MAX)
        if self.bytes is not None:
            self.bytes = min(self.bytes + bytes_, INT64_MAX)

    @property
    def open(self) -> bool:
        """Whether another message may begin."""
        return (self.msgs is None or self.msgs > 0) and (self.bytes is None or self.bytes > 0)

    def spend(self, count: int, size: int) -> None:
        """``count`` messages of ``size`` bytes in all are sent."""
        if self.msgs is not None:
            self.msgs -= count
        if self.bytes is not None:
            self.bytes -= size
