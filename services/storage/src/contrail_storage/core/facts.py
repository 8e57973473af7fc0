"""Facts about stored messages that ``apply`` needs, and the port through which it asks for them.

A machine keeps no state per message. When a limit or a delete removes messages, it needs their
subjects, sizes and times. These are in the blocks and are the same on every replica, so ``apply``
stays deterministic. For messages that are not written yet, the port answers from memory.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from contrail_common.columns.blocks import Block
from contrail_common.texts import I64Array, U32Array

Live = NDArray[np.bool_]
"""A mask over the messages of some facts: true where the message is live."""


@dataclass(slots=True, eq=False)
class MessageFacts:
    """Subject ids, sizes in bytes and times of consecutive messages from ``base_seq`` on."""

    base_seq: int
    subject_ids: U32Array
    sizes: I64Array
    times_ns: I64Array

    @property
    def end_seq(self) -> int:
        """The sequence after the last message."""
        return self.base_seq + len(self.sizes)


def facts_of(block: Block) -> MessageFacts:
    """The facts of a block's messages."""
    return MessageFacts(block.base_seq, block.subject_ids, block.sizes(), block.times_ns)


class FactsPort(Protocol):
    """Answers what the machine asks about messages that it appended in earlier entries."""

    def facts_at(self, seq: int) -> MessageFacts:
        """Facts of a run of messages that holds ``seq``; a bounded read."""
        ...


def oldest_in(
    found: U32Array, live: Live | None, sids: U32Array, left: I64Array, most: int
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
