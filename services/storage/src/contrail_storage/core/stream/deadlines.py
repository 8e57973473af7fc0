"""Deadlines of messages, which are stored in rows, and messages that ``max_age`` does not remove.

Deadlines are only in the store: the row ``shard | deadline | first sequence`` has the sequences of
one append that share a deadline. If a message is removed earlier, its row stays until it is due.
Memory holds one number: a lower bound of all deadlines.
"""

from collections.abc import Iterable
from typing import ClassVar, Final

import numpy as np

from contrail_common.texts import I64Array
from contrail_common.timeunits import INT64_MAX
from contrail_storage.core import key_layout as keys
from contrail_storage.core.deleted import PAGE, DeletedSet, by_page
from contrail_storage.core.results import Writes

NO_DEADLINE: Final = INT64_MAX + 1
"""The bound without any deadline: later than every deadline."""

DeadlineRow = tuple[int, bytes]
"""A deadline and the sequences (i64, ascending) that are due then."""


class Deadlines:
    """The deadlines of a shard: rows in the store, and a lower bound of them in memory."""

    def __init__(self, shard_id: int) -> None:
        self.shard_id = shard_id
        # Lower bounds: of the rows that a scan has seen, and of those added since it began. A scan
        # reads the store in steps, so rows may be added under it that it does not see.
        self._seen_ns = self._fresh_ns = NO_DEADLINE

    @property
    def earliest_ns(self) -> int:
        """A lower bound of the deadlines of all rows; NO_DEADLINE without rows."""
        return min(self._seen_ns, self._fresh_ns)

    def add(self, deadline_ns: int, seqs: I64Array, writes: Writes) -> None:
        """Add the deadline of messages of one append (``seqs`` ascending, at least one)."""
        key = keys.deadline_key(self.shard_id, deadline_ns, int(seqs[0]))
        writes.put(key, seqs.tobytes())
        # Never raised by an append: a bound that is too low costs a scan, one too high a message
        # that never expires.
        self._fresh_ns = min(self._fresh_ns, deadline_ns)

    def drop(self, rows: I64Array, writes: Writes) -> None:
        """Remove rows, given as pairs of deadline and first sequence."""
        for deadline_ns, first_seq in rows.reshape(-1, 2).tolist():
            writes.delete(keys.deadline_key(self.shard_id, deadline_ns, first_seq))

    def clear(self, writes: Writes) -> None:
        """Remove all rows."""
        if self.earliest_ns < NO_DEADLINE:
            prefix = keys.shard_key(keys.DEADLINE, self.shard_id)
            writes.delete_range(prefix, keys.prefix_end(prefix))
        self._seen_ns = self._fresh_ns = NO_DEADLINE

    def begin_scan(self) -> None:
        """Start a scan of the rows; deadlines added from now on are tracked separately."""
        self._seen_ns, self._fresh_ns = self.earliest_ns, NO_DEADLINE

    def end_scan(self, earliest_ns: int) -> None:
        """End a scan: the earliest row that stays has this deadline (NO_DEADLINE: none stays)."""
        self._seen_ns = earliest_ns

    def load(self, rows: Iterable[tuple[bytes, bytes]]) -> None:
        """Load the bound from the first of ``rows``, which are in key order."""
        for key, _ in rows:
            self._seen_ns, _ = keys.deadline_of(key)
            return

    def restore(self, rows: list[DeadlineRow], writes: Writes) -> None:
        """Add rows of another shard; none of them is here yet."""
        for deadline_ns, seqs in rows:
            self.add(deadline_ns, np.frombuffer(seqs, np.int64), writes)


class ExemptSet(DeletedSet):
    """Sequences of messages that were published with TTL ``never``: ``max_age`` keeps them."""

    kind: ClassVar[bytes] = keys.EXEMPT

    def discard_many(self, seqs: I64Array, writes: Writes) -> None:
        """Unmark the removed messages ``seqs`` (ascending), of which only some are marked."""
        if not self.total:
            return
        for number, at in by_page(seqs):
            if number not in self._pages:
                continue
            marks = self._marks(number)
            before = int(np.count_nonzero(marks))
            marks[seqs[at] % PAGE] = False
            left = int(np.count_nonzero(marks))
            if left < before:
                self._set(number, np.packbits(marks).tobytes(), left - before, writes)
                if not left:
                    del self._pages[number], self._counts[number]
                    writes.delete(keys.large_key(self.kind, self.shard_id, number))


def first_outside(sets: Iterable[DeletedSet], seq: int, last_seq: int) -> int:
    """The first of ``seq`` to ``last_seq`` that is in none of ``sets``, or ``last_seq`` + 1."""
    sets = list(sets)
    while seq <= last_seq:
        count = min(PAGE - seq % PAGE, last_seq + 1 - seq)
        outside = np.ones(count, np.bool_)
        for one in sets:
            mask = one.live_mask(seq, count)
            if mask is not None:
                outside &= mask
        found = np.flatnonzero(outside)
        if len(found):
            return seq + int(found[0])
        seq += count
    return last_seq + 1
