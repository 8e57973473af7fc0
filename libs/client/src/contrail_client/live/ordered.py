"""The position of an ordered reader: every message once, in the order of the stream. Pure."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal

from contrail_client.live.frames import Sub
from contrail_client.models import Gap
from contrail_client.times import time_text

Start = int | datetime | Literal["all", "last", "new"]
"""A sequence, a time, or `all`, `last` (the newest message) or `new` (messages from now on)."""

GapHandler = Callable[[Gap], None]
"""Called with a gap: sequences that the stream no longer had when they were to be read."""

_POLICIES: Final = ("all", "last", "new")


@dataclass(frozen=True, slots=True)
class Begin:
    """The start of a subscription without a consumer, as fields of a consumer's configuration."""

    deliver_policy: str
    opt_start_seq: int | None = None
    opt_start_time: str | None = None


def begin_at(start: Start) -> Begin:
    """Convert `start`; raises ValueError if it is not a valid start."""
    match start:
        case datetime():
            return Begin("by_start_time", opt_start_time=time_text(start))
        # In Python, True is an integer.
        case bool():
            raise ValueError(f"{start!r} is not a valid start")
        case int() if start > 0:
            return Begin("by_start_sequence", opt_start_seq=start)
        case str() if start in _POLICIES:
            return Begin(start)
    raise ValueError(f"{start!r} is neither a sequence, a time nor one of {', '.join(_POLICIES)}")


class Course:
    """The progress of an ordered reader.

    Each new subscription starts after the last message that was taken, and a message that comes
    twice is skipped. So no message is taken twice or out of order. In a stream with several shards
    that holds within each shard, and `cursor` is the position in all of them.
    """

    def __init__(self, begin: Begin) -> None:
        self._begin = begin
        # The last sequence taken, by shard; under None if the stream has one shard.
        self._last_seqs: dict[int | None, int] = {}
        # The server's last cursor; "" if the stream has one shard.
        self.cursor = ""

    def resume(self, sub: Sub) -> Sub:
        """Set the start of `sub` to the current position, and return it."""
        begin = self._begin
        last_seq = self._last_seqs.get(None, 0)
        if self.cursor:
            begin = Begin("all")
        elif last_seq:
            begin = Begin("by_start_sequence", opt_start_seq=last_seq + 1)
        sub.ordered = True
        sub.opt_start_cursor = self.cursor or None
        sub.deliver_policy = begin.deliver_policy
        sub.opt_start_seq = begin.opt_start_seq
        sub.opt_start_time = begin.opt_start_time
        return sub

    def take(self, seq: int, shard: int | None = None) -> bool:
        """Advance to `seq`; False if that message was taken before."""
        if seq <= self._last_seqs.get(shard, 0):
            return False
        self._last_seqs[shard] = seq
        return True

    def skip(self, first: int, last: int, cause: str, shard: int | None = None) -> Gap | None:
        """Advance past `first` to `last`, which the stream no longer has.

        Returns the part that was not taken before as a gap; None if there is no such part.
        """
        first = max(first, self._last_seqs.get(shard, 0) + 1)
        if last < first:
            return None
        self._last_seqs[shard] = last
        return Gap(first, last, cause, shard)
