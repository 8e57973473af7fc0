"""The newest message of a subject, where the one that the subject table names was removed.

The search goes backwards over windows. No later message than the one it finds is the newest until
the subject gets another: removals only make an older message the newest. So the next search for the
subject continues there.
"""

from collections.abc import Awaitable, Callable
from typing import Final

import numpy as np

from contrail_common.texts import I64Array, U32Array
from contrail_storage.core.facts import SubjectFacts, SubjectSet
from contrail_storage.core.stream.stream_machine import StreamMachine
from contrail_storage.reading.window_reads import RUN_WINDOWS
from contrail_storage.replica.shard import Shard
from contrail_storage.store.windows import WINDOW_BITS

_KNOWN_MAX: Final = 8_192
"""Messages that are remembered, of all shards: about 2 MB."""
_FEW: Final = 64
"""Subjects of a search up to which their messages are remembered."""

Facts = Callable[[Shard, int, int], Awaitable[SubjectFacts]]


class Newest:
    """Finds newest messages, and remembers some."""

    def __init__(self, facts: Facts) -> None:
        """``facts``: see `Reader.facts`."""
        self._facts = facts
        # By shard and newest message ever stored of a subject: an earlier message of the subject.
        # There is no live one between the two. The oldest entries are dropped first.
        self._known: dict[tuple[int, int], int] = {}

    async def find(self, shard: Shard, sids: U32Array) -> I64Array:
        """The newest live messages of the subjects ``sids`` (ascending), as of the return.

        0 for a subject without messages. Returns at once if the table has the answer. Raises
        ApiError.
        """
        machine, few = shard.machine, len(sids) <= _FEW
        # Sequences of the subjects themselves; those that are live are the newest.
        stored = found = np.zeros(len(sids), np.int64)
        # No live message of a subject is after its bound, except those after `stored`.
        bounds = found
        windows = 1
        while True:
            before, stored = stored, _newest_stored(machine, sids)
            start = self._recall(machine.shard_id, stored) if few else stored
            found = np.where(stored == before, found, start)
            bounds = np.where(stored == before, bounds, start)
            live = machine.are_live(found)
            left = np.flatnonzero(~live & (stored > 0))
            top_seq = min(int(bounds[left].max(initial=0)), shard.applied_seq)
            first_seq = machine.counters.first_seq
            # The second cannot be while subjects are left: each of them has a live message.
            if not len(left) or top_seq < first_seq:
                break
            low_seq = max((top_seq >> WINDOW_BITS) - windows + 1, 0) << WINDOW_BITS
            low_seq = max(low_seq, first_seq)
            newest = await self._newest_within(shard, sids[left], low_seq, top_seq)
            found[left] = newest
            # Not `found`: a message of another subject may be there.
            lower = np.minimum(bounds[left], low_seq - 1)
            bounds[left] = np.where(newest > 0, newest, lower)
            windows = min(2 * windows, RUN_WINDOWS)
        found = np.where(live, found, 0)
        if few:
            self._keep(machine.shard_id, stored, found)
        return found

    def known(self, shard: Shard, last_seq: int) -> int:
        """The newest message of a subject if it is remembered, else 0.

        ``last_seq`` is the newest one ever stored, as the table has it.
        """
        seq = self._known.get((shard.machine.shard_id, last_seq), 0)
        return seq if seq and shard.machine.is_live(seq) else 0

    def _recall(self, shard_id: int, stored: I64Array) -> I64Array:
        known = self._known
        return np.array([known.get((shard_id, seq), seq) for seq in stored.tolist()], np.int64)

    def _keep(self, shard_id: int, stored: I64Array, found: I64Array) -> None:
        for seq, newest in zip(stored.tolist(), found.tolist(), strict=True):
            if 0 < newest != seq:
                self._known[shard_id, seq] = newest
        while len(self._known) > _KNOWN_MAX:
            del self._known[next(iter(self._known))]

    async def _newest_within(
        self, shard: Shard, sids: U32Array, low_seq: int, top_seq: int
    ) -> I64Array:
        """The newest live messages from ``low_seq`` up to ``top_seq``, 0 for none."""
        machine, seq = shard.machine, low_seq
        newest, wanted = np.zeros(len(sids), np.int64), SubjectSet(sids)
        while seq <= top_seq:
            facts = await self._facts(shard, seq, top_seq)
            found = facts.subject_ids[seq - facts.base_seq : top_seq + 1 - facts.base_seq]
            at = wanted.positions(found)
            live = machine.deleted.live_mask(seq, len(found))
            at = at if live is None else at[live[at]]
            # Assignment with repeated indexes keeps the last value.
            newest[np.searchsorted(sids, found[at])] = at + seq
            seq = facts.end_seq
        return newest


def _newest_stored(machine: StreamMachine, sids: U32Array) -> I64Array:
    """The newest message ever stored of each subject, 0 for those without messages."""
    table = machine.subjects
    at = table.numbered.slots(sids)
    held = (at >= 0) & (at < table.size)
    held[held] = table.counts[at[held]] > 0
    stored = np.zeros(len(at), np.int64)
    stored[held] = table.last[at[held]]
    return stored
