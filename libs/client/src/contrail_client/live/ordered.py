"""Where an ordered subscription goes on: every message once, in the order of the stream. Pure."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal

from contrail_client.live.frames import Sub
from contrail_client.models import Gap
from contrail_client.times import time_text

Start = int | datetime | Literal["all", "last", "new"]
"""A sequence, a time, or `all`, `last` (the newest message) or `new` (what comes from now on)."""

GapHandler = Callable[[Gap], None]
"""What is called with the gap when sequences were gone before they were read."""

_POLICIES: Final = ("all", "last", "new")


@dataclass(frozen=True, slots=True)
class Begin:
    """Where a subscription without a consumer begins, in the words of a consumer's config."""

    deliver_policy: str
    opt_start_seq: int | None = None
    opt_start_time: str | None = None


def begin_at(start: Start) -> Begin:
    """The beginning that `start` stands for; ValueError when it stands for none."""
    match start:
        case datetime():
            return Begin("by_start_time", opt_start_time=time_text(start))
        case bool():
            raise ValueError(f"{start!r} is not a valid start")
        case int() if start > 0:
            return Begin("by_start_sequence", opt_start_seq=start)
        case str() if start in _POLICIES:
            return Begin(start)
    raise ValueError(f"{start!r} is neither a sequence, a time nor one of {', '.join(_POLICIES)}")


class Course:
    """How far an ordered reader has come.

    Whatever comes a second time is passed over, and every new subscription begins behind what was
    taken last, so nothing is taken twice or out of order. Where there are several shards that is
    so in each, and `cursor` is the place of all.
    """

    def __init__(self, begin: Begin) -> None:
        self._begin = begin
        self._last_seqs: dict[int | None, int] = {}
        self.cursor = ""

    def place(self, sub: Sub) -> Sub:
        """`sub` with the place where it has to begin."""
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
        """Whether the message with `seq` is the next one; False when it was taken before."""
        if seq <= self._last_seqs.get(shard, 0):
            return False
        self._last_seqs[shard] = seq
        return True

    def skip(self, first: int, last: int, cause: str, shard: int | None = None) -> Gap | None:
        """The stream no longer has `first` to `last`; the part that was not taken is the gap."""
        first = max(first, self._last_seqs.get(shard, 0) + 1)
        if last < first:
            return None
        self._last_seqs[shard] = last
        return Gap(first, last, cause, shard)
