"""The messages that left a shard lately, for counts that follow a shard instead of counting again.

This is no part of the state. It exists while somebody counts; ``apply`` adds to it and never asks
it. Sequences and subject numbers take 12 bytes a message, in all shards together at most 12 MiB.
"""

from array import array
from collections import OrderedDict
from typing import Final, Protocol

import numpy as np

from contrail_common.texts import I64Array, U32Array

SHARD_MESSAGES_MAX: Final = 1 << 16
"""Removals that are kept of one shard; above this, the older half is dropped."""
MESSAGES_MAX: Final = 1 << 20
"""Removals that are kept of all shards; above this, those read least recently are dropped."""
_COST: Final = 64
"""Removals that an object counts as in addition to those in it."""


class RecentRemovals:
    """The latest removals of a shard, in order.

    A reader keeps its place: the number of removals before those that it has yet to read.
    """

    __slots__ = ("_begin", "_seqs", "_shared", "_sids")

    def __init__(self, shared: "RemovalMemory") -> None:
        self._shared: RemovalMemory | None = shared  # None once it is closed
        self._begin = 0  # removals that were dropped
        self._seqs = array("q")
        self._sids = array("I")

    def __len__(self) -> int:
        return len(self._seqs)

    @property
    def is_open(self) -> bool:
        """Whether removals are recorded."""
        return self._shared is not None

    @property
    def end(self) -> int:
        """The place after the last removal."""
        return self._begin + len(self._seqs)

    def add(self, seqs: I64Array, sids: U32Array) -> None:
        """Add removed messages, given with a sequence and a subject number for each."""
        if self._shared is None:
            return
        self._seqs.frombytes(seqs.tobytes())
        self._sids.frombytes(sids.tobytes())
        self._shared.used += len(seqs)
        if len(self._seqs) > SHARD_MESSAGES_MAX:
            self._drop(max(len(self._seqs) // 2, len(self._seqs) - SHARD_MESSAGES_MAX))
        if self._shared.used > MESSAGES_MAX:
            self._shared.shrink()

    def _drop(self, count: int) -> None:
        assert self._shared is not None
        del self._seqs[:count], self._sids[:count]
        self._begin += count
        self._shared.used -= count

    def since(self, place: int) -> tuple[I64Array, U32Array] | None:
        """Sequences and subject numbers from ``place`` on; None if some are not known any more."""
        at = place - self._begin
        if at < 0 or self._shared is None:
            return None
        return np.array(self._seqs[at:], np.int64), np.array(self._sids[at:], np.uint32)

    def close(self) -> None:
        """Drop everything and record no more."""
        if self._shared is not None:
            self._shared.forget(self)
            self._shared = None
            self._seqs, self._sids = array("q"), array("I")


class Recorded(Protocol):
    """The state of a shard, as far as it records removals."""

    removals: RecentRemovals | None


class RemovalMemory:
    """The memory that all shards of a node share for their recent removals."""

    def __init__(self) -> None:
        self.used = 0
        """Removals that are kept, with `_COST` for each object."""
        self._kept: OrderedDict[RecentRemovals, None] = OrderedDict()  # read least recently first

    def of(self, state: Recorded) -> RecentRemovals:
        """The recent removals of a shard; from now on, they are recorded."""
        found = state.removals
        if found is None or not found.is_open:
            found = state.removals = RecentRemovals(self)
            self._kept[found] = None
            self.used += _COST
        else:
            self._kept.move_to_end(found)
        return found

    def forget(self, removals: RecentRemovals) -> None:
        """Take an object out, which is being closed."""
        del self._kept[removals]
        self.used -= len(removals) + _COST

    def shrink(self) -> None:
        """Close objects until there are few enough removals."""
        while self.used > MESSAGES_MAX:
            next(iter(self._kept)).close()
