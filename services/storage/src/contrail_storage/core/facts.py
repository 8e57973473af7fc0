"""Facts about stored messages that ``apply`` needs, and the port through which it asks for them.

A machine keeps no state per message. When a limit or a delete removes messages, it needs their
subjects, sizes and times. These are in the blocks and are the same on every replica, so ``apply``
stays deterministic. For messages that are not written yet, the port answers from memory.
"""

from typing import Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from contrail_common.columns.blocks import Block
from contrail_common.texts import I64Array, Mask, U32Array

_SPAN_MAX: Final = 1 << 24
"""Numbers between the lowest and the highest of a :class:`SubjectSet` with a mark for each."""


class SubjectFacts(msgspec.Struct, eq=False):
    """Subject numbers and sizes in bytes of consecutive sequences from ``base_seq`` on.

    Sequences without a message have any values. The caller knows which messages are live.
    """

    base_seq: int
    subject_ids: U32Array
    sizes: I64Array

    @property
    def end_seq(self) -> int:
        """The sequence after the last one."""
        return self.base_seq + len(self.sizes)


class MessageFacts(SubjectFacts, eq=False):
    """Also the times of these messages."""

    times_ns: I64Array


def facts_of(block: Block) -> MessageFacts:
    """The facts of a block's messages."""
    sizes = block.columns.sizes()
    return MessageFacts(block.base_seq, block.subject_ids, sizes, block.times_ns)


class FactsPort(Protocol):
    """Answers what the machine asks about messages that it appended in earlier entries."""

    def facts_at(self, seq: int) -> MessageFacts:
        """Facts of a run of messages that holds ``seq``; a bounded read."""
        ...

    def subjects_at(self, seq: int) -> SubjectFacts:
        """As :meth:`facts_at`, for searches: the run is long, and has no times."""
        ...


class SubjectSet:
    """Finds the messages of some subjects among many; a search for each takes much longer."""

    def __init__(self, sids: U32Array) -> None:
        """``sids`` ascend; there is at least one."""
        self._sids = sids
        self._low = sids[0]
        # By number, from the lowest on; the last one stands for all others. The system gives memory
        # only to the parts that are used.
        span = int(sids[-1]) - int(self._low) + 1
        self._marks = np.zeros(span + 1 if span <= _SPAN_MAX else 0, np.bool_)
        if len(self._marks):
            self._marks[sids - self._low] = True

    def positions(self, found: U32Array) -> NDArray[np.intp]:
        """The positions in ``found`` of the numbers that are in the set."""
        if not len(self._marks):
            return np.flatnonzero(np.isin(found, self._sids))
        # Numbers below the lowest become large ones.
        return np.flatnonzero(self._marks.take(found - self._low, mode="clip"))


def oldest_in(
    found: U32Array, live: Mask | None, sids: U32Array, left: I64Array, most: int
) -> NDArray[np.intp]:
    """Positions in ``found`` of the oldest live messages of ``sids``, at most ``most`` in all.

    At most ``left`` of each subject; the call decreases ``left`` by the messages found.
    """
    owner = np.minimum(np.searchsorted(sids, found), len(sids) - 1)
    wanted = (sids[owner] == found) & (left[owner] > 0)
    # A block may have numbers of removed subjects: only live messages count.
    if live is not None:
        wanted &= live
    positions = np.flatnonzero(wanted)
    if not len(positions):
        return positions
    owner = owner[positions]
    # The rank of each message within its subject: its position in a stable sort, less the first's.
    order = np.argsort(owner, kind="stable")
    ordered = owner[order]
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order)) - np.searchsorted(ordered, ordered)
    chosen = np.flatnonzero(rank < left[owner])[:most]
    left -= np.bincount(owner[chosen], minlength=len(left))
    taken: NDArray[np.intp] = positions[chosen]
    return taken
