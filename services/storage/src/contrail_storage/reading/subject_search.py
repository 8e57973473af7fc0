"""Finds messages by their subjects, in one pass over a part of a stream.

The event loop reads which messages are live; subject numbers are compared in a thread. A step is
about at most 65,536 sequences.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from contrail_common.texts import I64Array, Mask, U32Array
from contrail_storage.core.facts import SubjectFacts
from contrail_storage.reading.reader import Reader
from contrail_storage.replica.shard import Shard

Choose = Callable[[I64Array, U32Array], NDArray[np.intp] | None]
"""Chooses from live messages, given by sequence (ascending) and subject number: their positions.

It is called in a thread, with later messages each time. None ends the search.
"""


@dataclass(slots=True, frozen=True, eq=False)
class Found:
    """Messages, ascending: sequence, subject number and size (bytes) of each."""

    seqs: I64Array
    sids: U32Array
    sizes: I64Array

    def __len__(self) -> int:
        return len(self.seqs)

    def part(self, low: int, high: int | None = None) -> "Found":
        """The messages at the positions from ``low`` up to ``high``."""
        return Found(self.seqs[low:high], self.sids[low:high], self.sizes[low:high])

    def followed_by(self, later: "Found") -> "Found":
        """These messages and ``later`` ones."""
        if not len(self):
            return later
        return Found(
            np.concatenate((self.seqs, later.seqs)),
            np.concatenate((self.sids, later.sids)),
            np.concatenate((self.sizes, later.sizes)),
        )


NOTHING: Final = Found(np.zeros(0, np.int64), np.zeros(0, np.uint32), np.zeros(0, np.int64))


async def search(
    reader: Reader, shard: Shard, choose: Choose, low_seq: int, end_seq: int
) -> AsyncIterator[Found]:
    """Yield the chosen messages from ``low_seq`` up to ``end_seq``, step by step.

    All of them are applied. The search ends early if the stream is removed. Raises DATA_LOST.
    """
    seq = low_seq
    while shard.machine.exists:
        # Where no message is live, nothing is read.
        seq = max(seq, shard.machine.counters.first_seq)
        seq = shard.machine.deleted.next_live(seq, end_seq)
        if seq >= end_seq:
            return
        facts = await reader.facts(shard, seq, end_seq - 1)
        low, stop = max(seq, shard.machine.counters.first_seq), min(end_seq, facts.end_seq)
        if low < stop:
            live = shard.machine.deleted.live_mask(low, stop - low)
            found = await asyncio.to_thread(_chosen, facts, choose, live, low, stop)
            if found is None:
                return
            yield found
        seq = facts.end_seq


def _chosen(
    facts: SubjectFacts, choose: Choose, live: Mask | None, low: int, stop: int
) -> Found | None:
    """The live and chosen messages from ``low`` up to ``stop``; ``live`` begins at ``low``."""
    within = slice(low - facts.base_seq, stop - facts.base_seq)
    found = Found(np.arange(low, stop), facts.subject_ids[within], facts.sizes[within])
    if live is not None:
        found = Found(found.seqs[live], found.sids[live], found.sizes[live])
    at = choose(found.seqs, found.sids)
    return None if at is None else Found(found.seqs[at], found.sids[at], found.sizes[at])
