"""The deliveries of a consumer that are not acknowledged yet, by stream sequence.

They are kept in chunks: consecutive entries in a dict each. So the lowest one is found at once,
entries are dropped and postponed by the chunk, and a search for deadlines skips most chunks.
"""

# One module: reading, searching, storing and changing share the chunks of one consumer.

from bisect import bisect_right
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Set
from heapq import nsmallest
from itertools import islice, pairwise, repeat
from operator import lt
from typing import Any, Final

import msgspec

from contrail_common.timeunits import INT64_MAX

CHUNK: Final = 1_024
"""Entries that are added to one chunk. Reading all of them takes about 50 us."""
_FEW: Final = 64
"""A chunk that shrinks to so many entries is joined to a neighbour, if that has space."""
DUE_MAX: Final = 10_000
"""Messages among which a pull chooses those that it delivers again."""
CHUNKS_READ_MAX: Final = 8
"""Chunks that one search for deadlines reads: about 5 ms, if all deadlines are changed too."""
_CHUNKS_FREED: Final = 8
"""Dropped chunks that are freed at once. Freeing a million entries takes 60 ms."""

_encode: Final = msgspec.msgpack.Encoder().encode


class Pending(msgspec.Struct, array_like=True, gc=False):
    """One unacknowledged message: ``consumer_seq`` of its first delivery, ``attempts``, deadline.

    The deadline is an elapsed time: a log time without jumps.
    """

    consumer_seq: int
    attempts: int
    deadline_ns: int


def moved(pending: dict[int, Pending], by_ns: int) -> dict[int, Pending]:
    """The same deliveries with deadlines that are later by ``by_ns``, which may be negative."""
    if not by_ns:
        return pending
    return {
        seq: Pending(
            one.consumer_seq, one.attempts, max(min(one.deadline_ns + by_ns, INT64_MAX), 0)
        )
        for seq, one in pending.items()
    }


_rows: Final = msgspec.msgpack.Decoder(dict[int, Pending])


class _Chunk:
    """Consecutive entries, in the order in which they were added."""

    __slots__ = (
        "added",
        "ascends",
        "body",
        "entries",
        "high_ns",
        "low_ns",
        "may_join",
        "number",
        "redelivered",
        "row_bytes",
        "shifts",
        "top",
    )

    def __init__(self, seq: int) -> None:
        self.entries: dict[int, Pending] = {}
        self.added = 0
        """Entries that were added, with those that are removed again."""
        self.top = seq
        """The last sequence that was added in order."""
        self.ascends = True
        """Whether ``entries`` ascend."""
        self.number = 0
        """Number of the row in the store; 0: there is none."""
        self.row_bytes = 0
        """Bytes of that row."""
        self.body: bytes | None = b""
        """The entries in msgpack; empty after a change; None: as in the row."""
        self.may_join = True
        """False once it was small, and no neighbour had space for its entries."""
        self.redelivered = 0
        """Entries that were delivered more than once."""
        self.low_ns = INT64_MAX
        """No entry is due before, except those that `take_due` returned."""
        self.high_ns = 0
        """No entry is due after."""
        self.shifts: list[tuple[int, ...]] = []
        """Changes of all deadlines by number of attempts, to be made before they are read."""

    @classmethod
    def of_row(cls, number: int, row: bytes) -> "_Chunk":
        """The chunk with the entries of a row (at least one)."""
        entries = _rows.decode(row)
        chunk = cls(max(entries))
        chunk.entries, chunk.added = dict(sorted(entries.items())), len(entries)
        chunk.number, chunk.row_bytes, chunk.body = number, len(row), None
        chunk.redelivered = sum(item.attempts > 1 for item in entries.values())
        chunk.low_ns = min(item.deadline_ns for item in entries.values())
        chunk.high_ns = max(item.deadline_ns for item in entries.values())
        return chunk

    def add(self, seq: int, item: Pending) -> None:
        if seq > self.top:
            self.top = seq
        elif self.entries:
            self.ascends = False
        if self.shifts:
            self.read()
        self.entries[seq] = item
        self.body = b""
        self.added += 1
        if item.attempts > 1:
            self.redelivered += 1
        self.bound(item.deadline_ns)

    def bound(self, deadline_ns: int) -> None:
        """Extend the bounds to the deadline of an entry."""
        self.low_ns = min(self.low_ns, deadline_ns)
        self.high_ns = max(self.high_ns, deadline_ns)

    def sort(self) -> dict[int, Pending]:
        """The entries, ascending."""
        if not self.ascends:
            self.entries = dict(sorted(self.entries.items()))
            self.ascends = True
        return self.entries

    def read(self) -> dict[int, Pending]:
        """The entries with their true deadlines."""
        if self.shifts:
            for changes in self.shifts:
                last = len(changes) - 1
                change_ns = changes[0]
                for item in self.entries.values():
                    if last:
                        change_ns = changes[min(item.attempts - 1, last)]
                    item.deadline_ns = min(item.deadline_ns + change_ns, INT64_MAX)
            self.shifts = []
            self.body = b""
        return self.entries

    def encode(self) -> bytes:
        """The entries, ascending, in msgpack."""
        if not self.body:
            self.read()
            self.body = _encode(self.sort())
        return self.body

    def take_due(
        self, now_ns: int, left_out: Container[int], passed: set[int]
    ) -> list[tuple[int, int]]:
        """Deadline and sequence of what is due and not ``left_out``; moves the lower bound on.

        What is due and left out is added to ``passed``.
        """
        found: list[tuple[int, int]] = []
        low_ns = INT64_MAX
        for seq, item in self.read().items():
            deadline_ns = item.deadline_ns
            if deadline_ns > now_ns:
                low_ns = min(low_ns, deadline_ns)
            elif seq in left_out:
                passed.add(seq)
            else:
                found.append((deadline_ns, seq))
        self.low_ns = low_ns
        return found

    def shift(self, changes: tuple[int, ...]) -> None:
        self.shifts.append(changes)
        self.body = b""
        self.low_ns = min(self.low_ns + min(changes), INT64_MAX)
        self.high_ns = min(self.high_ns + max(changes), INT64_MAX)


def _joined(left: _Chunk, right: _Chunk) -> _Chunk:
    both = _Chunk(max(left.top, right.top))
    left.read()
    right.read()
    both.entries = {**left.sort(), **right.sort()}
    # Its space is what the right one, the last of all perhaps, has left.
    both.added = len(left.entries) + right.added
    both.redelivered = left.redelivered + right.redelivered
    both.low_ns = min(left.low_ns, right.low_ns)
    both.high_ns = max(left.high_ns, right.high_ns)
    return both


class PendingDeliveries(Mapping[int, Pending]):
    """A mapping of sequences to deliveries, ascending. Do not change what it returns.

    ``_chunks[i]`` has the sequences from ``_firsts[i]`` to before ``_firsts[i + 1]``. No chunk is
    empty.
    """

    __slots__ = (
        "_chunks",
        "_count",
        "_dropped",
        "_firsts",
        "_gone_rows",
        "_last_number",
        "_low_ns",
        "_passed",
    )

    def __init__(self, entries: Mapping[int, Pending] | None = None) -> None:
        self._firsts: list[int] = []
        self._chunks: list[_Chunk] = []
        self._count = 0
        self._low_ns = INT64_MAX
        """No chunk has a lower ``low_ns``."""
        self._dropped: list[_Chunk] = []
        """Chunks without use: they are freed a few at a time."""
        self._last_number = 0
        """No row has a higher number."""
        self._gone_rows: list[int] = []
        """Numbers of rows whose chunks are gone; see :meth:`take_rows`."""
        self._passed: set[int] = set()
        """Sequences that were due and left out, until :meth:`note`."""
        self.update(entries or {})

    # Reading -------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._count

    def __bool__(self) -> bool:
        return self._count > 0

    def __contains__(self, seq: Any) -> bool:
        at = bisect_right(self._firsts, seq) - 1
        return at >= 0 and seq in self._chunks[at].entries

    def __getitem__(self, seq: int) -> Pending:
        item = self.get(seq)
        if item is None:
            raise KeyError(seq)
        return item

    def get(self, seq: int) -> Pending | None:  # type: ignore[override]
        """The delivery of ``seq``, or None."""
        at = bisect_right(self._firsts, seq) - 1
        if at < 0:
            return None
        chunk = self._chunks[at]
        return (chunk.read() if chunk.shifts else chunk.entries).get(seq)

    def __iter__(self) -> Iterator[int]:
        for chunk in self._chunks:
            yield from chunk.sort()

    def to_dict(self) -> dict[int, Pending]:
        """All entries, ascending."""
        entries: dict[int, Pending] = {}
        for chunk in self._chunks:
            chunk.read()
            entries.update(chunk.sort())
        return entries

    def lowest(self) -> tuple[int, Pending] | None:
        """The lowest sequence and its delivery; None if nothing is pending."""
        if not self._chunks:
            return None
        chunk = self._chunks[0]
        entries = chunk.entries if chunk.ascends else chunk.sort()
        # Removed entries leave gaps that `iter` passes, but no more than a chunk has.
        return next(iter(entries.items()))

    @property
    def redelivered(self) -> int:
        """How many were delivered more than once."""
        return sum(chunk.redelivered for chunk in self._chunks)

    def among(self, seqs: Set[int]) -> set[int]:
        """Those of ``seqs`` that are pending."""
        if not seqs or not self._chunks:
            return set()
        if len(seqs) <= _FEW:
            return {seq for seq in seqs if seq in self}
        found: set[int] = set()
        begin = max(bisect_right(self._firsts, min(seqs)) - 1, 0)
        for chunk in self._chunks[begin : bisect_right(self._firsts, max(seqs))]:
            found |= chunk.entries.keys() & seqs
        return found

    def count_from(self, seq: int) -> int:
        """How many have ``seq`` or a higher sequence."""
        at = max(bisect_right(self._firsts, seq) - 1, 0)
        if at >= len(self._chunks):
            return 0
        above = sum(len(chunk.entries) for chunk in self._chunks[at + 1 :])
        return above + sum(one >= seq for one in self._chunks[at].entries)

    def cuts(self, end_seq: int, most: int) -> list[int]:
        """Pending sequences that divide those below ``end_seq`` into parts of about ``most``."""
        cuts: list[int] = []
        count = 0
        for (_, next_seq), chunk in zip(pairwise(self._firsts), self._chunks, strict=False):
            if next_seq >= end_seq:
                break
            count += len(chunk.entries)
            if count >= most:
                cuts.append(next(reversed(chunk.sort())))
                count = 0
        return cuts

    def read_from(self, seq: int) -> tuple[dict[int, Pending], int | None]:
        """The entries of the chunk for ``seq``, and where the next chunk begins (None: nowhere)."""
        at = max(bisect_right(self._firsts, seq) - 1, 0)
        if at >= len(self._chunks):
            return {}, None
        next_seq = self._firsts[at + 1] if at + 1 < len(self._firsts) else None
        return self._chunks[at].read(), next_seq

    # Deadlines -----------------------------------------------------------------------------------

    @property
    def earliest_ns(self) -> int | None:
        """A time before which nothing is due, but what `take_due` returned; None for never."""
        return self._low_ns if self._low_ns < INT64_MAX else None

    def take_due(self, now_ns: int, left_out: Container[int], most: int) -> list[int]:
        """Return up to ``most`` sequences that are due and not ``left_out``, ascending.

        Of the 10,000 that are due first, these are the lowest. None is returned again before its
        deadline changes, unless the caller gives it back (:meth:`note`).
        """
        if self._low_ns > now_ns:
            return []
        found: list[tuple[int, int]] = []
        read: list[tuple[_Chunk, list[tuple[int, int]]]] = []
        for chunk in self._chunks_due(now_ns):
            if len(found) >= DUE_MAX and found[-1][0] < chunk.low_ns:
                break
            due = chunk.take_due(now_ns, left_out, self._passed)
            read.append((chunk, due))
            found += due
            if len(found) >= DUE_MAX:
                found.sort()
                del found[DUE_MAX:]
        chosen = nsmallest(most, (seq for _, seq in found))
        kept = set(chosen)
        for chunk, due in read:
            for deadline_ns, seq in due:
                if seq not in kept:
                    chunk.bound(deadline_ns)
        self._find_low()
        return chosen

    def _chunks_due(self, now_ns: int) -> list[_Chunk]:
        if self._low_ns > now_ns:
            return []
        due = [chunk for chunk in self._chunks if chunk.low_ns <= now_ns]
        # The limit keeps a search short. What is behind it is found by the next one.
        return sorted(due, key=lambda chunk: chunk.low_ns)[:CHUNKS_READ_MAX]

    def _find_low(self) -> None:
        self._low_ns = min((chunk.low_ns for chunk in self._chunks), default=INT64_MAX)

    def note(self, seqs: Collection[int]) -> None:
        """Give ``seqs`` back: `take_due` may return them again."""
        for seq in seqs:
            item = self.get(seq)
            if item is not None:
                self._bound(seq, item.deadline_ns)
        self._passed.difference_update(seqs)

    def note_passed(self, seqs: list[int]) -> None:
        """Give back those of ``seqs`` that `take_due` left out, now that it need not any more."""
        if self._passed:
            self.note(self._passed.intersection(seqs))

    def note_all(self) -> None:
        """Give everything back; the chunks are read when they are next searched."""
        for chunk in self._chunks:
            chunk.low_ns = 0
        self._low_ns = 0 if self._chunks else INT64_MAX

    def drop_stale(self, now_ns: int) -> None:
        """Move `earliest_ns` past deadlines that were acknowledged or postponed meanwhile."""
        for chunk in self._chunks_due(now_ns):
            low_ns = min(item.deadline_ns for item in chunk.read().values())
            if low_ns <= now_ns:
                break  # due, or returned by `take_due`
            chunk.low_ns = low_ns
        self._find_low()

    def is_any_due_from(self, time_ns: int) -> bool:
        """Whether any deadline is at or after ``time_ns``.

        A search that would be long ends with True; the next one continues.
        """
        chunks = (chunk for chunk in self._chunks if chunk.high_ns >= time_ns)
        for number, chunk in enumerate(chunks):
            chunk.high_ns = max(item.deadline_ns for item in chunk.read().values())
            if chunk.high_ns >= time_ns or number >= CHUNKS_READ_MAX:
                return True
        return False

    # Rows ----------------------------------------------------------------------------------------

    @classmethod
    def of_rows(cls, rows: Iterable[tuple[int, bytes]]) -> "PendingDeliveries":
        """The deliveries in rows, given with their numbers."""
        found = cls()
        chunks = [_Chunk.of_row(number, row) for number, row in rows]
        found._chunks = sorted(chunks, key=lambda chunk: next(iter(chunk.entries)))
        found._firsts = [next(iter(chunk.entries)) for chunk in found._chunks]
        found._count = sum(len(chunk.entries) for chunk in chunks)
        found._last_number = max((chunk.number for chunk in chunks), default=0)
        found._find_low()
        return found

    def encode_some(self, most: int) -> bool:
        """Encode changed chunks for :meth:`take_rows`; False if there are more than ``most``."""
        for chunk in self._chunks:
            if chunk.body == b"":
                if not most:
                    return False
                most -= 1
                chunk.encode()
        return True

    def take_rows(self) -> tuple[dict[int, bytes], list[int]]:
        """Rows to write, by number, and the numbers of rows to delete, since the last call.

        A row has the entries of one chunk. Deliveries in a single chunk have no row.
        """
        rows: dict[int, bytes] = {}
        gone, self._gone_rows = self._gone_rows, []
        for chunk in self._chunks:
            if len(self._chunks) == 1:
                gone += self._without_row(chunk)
            elif chunk.body is not None:
                if not chunk.number:
                    self._last_number += 1
                    chunk.number = self._last_number
                row = rows[chunk.number] = chunk.encode()
                chunk.row_bytes, chunk.body = len(row), None
        return rows, gone

    @staticmethod
    def _without_row(chunk: _Chunk) -> list[int]:
        """Let a chunk have no row; return the number of the one that it had."""
        gone = [chunk.number] if chunk.number else []
        chunk.number = chunk.row_bytes = 0
        chunk.body = chunk.body or b""
        return gone

    @property
    def rows(self) -> int:
        """Number of rows, as of the last :meth:`take_rows`."""
        return sum(chunk.number > 0 for chunk in self._chunks)

    @property
    def row_bytes(self) -> int:
        """Bytes of all rows, as of the last :meth:`take_rows`."""
        return sum(chunk.row_bytes for chunk in self._chunks)

    def without_rows(self) -> msgspec.Raw:
        """The deliveries that have no rows, in msgpack; see :meth:`take_rows`."""
        return msgspec.Raw(self._chunks[0].encode() if len(self._chunks) == 1 else _encode({}))

    # Changing ------------------------------------------------------------------------------------

    def add(self, seq: int, item: Pending) -> None:
        """Add a delivery; ``seq`` is not pending yet."""
        chunks = self._chunks
        if not chunks:
            self._append(seq)
        chunk = chunks[-1]
        if seq < self._firsts[-1]:
            chunk = self._between(seq)
        # Below the top, as after a change of leader, the chunk may become twice as long.
        elif chunk.added >= CHUNK * (1 if seq > chunk.top else 2):
            chunk = self._next(seq)
        chunk.add(seq, item)
        self._count += 1
        self._low_ns = min(self._low_ns, item.deadline_ns)

    def are_above(self, seqs: list[int]) -> bool:
        """Whether there are ``seqs``, and they ascend above everything that was added."""
        above = bool(seqs) and (not self._chunks or seqs[0] > self._chunks[-1].top)
        return above and all(map(lt, seqs, islice(seqs, 1, None)))

    def add_first(self, seqs: list[int], consumer_seq: int, deadline_ns: int) -> None:
        """Add first deliveries in one pass, numbered from ``consumer_seq``: see `are_above`."""
        start = 0
        while start < len(seqs):
            if not self._chunks:
                self._append(seqs[start])
            chunk = self._chunks[-1]
            if chunk.added >= CHUNK:
                chunk = self._next(seqs[start])
            some = seqs[start : start + CHUNK - chunk.added]
            numbers = range(consumer_seq + start, consumer_seq + start + len(some))
            items = map(Pending, numbers, repeat(1), repeat(deadline_ns))
            if chunk.shifts:
                chunk.read()
            chunk.body = b""
            chunk.entries.update(zip(some, items, strict=False))
            chunk.added += len(some)
            chunk.top = some[-1]
            chunk.bound(deadline_ns)
            start += len(some)
        self._count += len(seqs)
        self._low_ns = min(self._low_ns, deadline_ns)

    def _append(self, seq: int) -> None:
        self._firsts.append(seq)
        self._chunks.append(_Chunk(seq))
        self.free_dropped()

    def _next(self, seq: int) -> _Chunk:
        """The chunk for ``seq``, the last one being full."""
        last = len(self._chunks) - 1
        if seq <= self._chunks[last].top:
            return self._split(last, seq)
        self._chunks[last].may_join = True
        self._removed_from(last)
        self._append(seq)
        return self._chunks[-1]

    def _between(self, seq: int) -> _Chunk:
        """The chunk for ``seq``, which is below the last chunk."""
        at = max(bisect_right(self._firsts, seq) - 1, 0)
        self._firsts[at] = min(self._firsts[at], seq)
        chunk = self._chunks[at]
        return self._split(at, seq) if len(chunk.entries) >= 2 * CHUNK else chunk

    def _split(self, at: int, seq: int) -> _Chunk:
        """Divide a chunk, and return the part for ``seq``."""
        whole = self._chunks[at]
        whole.read()
        items = list(whole.sort().items())
        middle = len(items) // 2
        if not middle:
            whole.added = len(items)
            return whole
        parts = []
        for some in (items[:middle], items[middle:]):
            part = _Chunk(some[0][0])
            for each, item in some:
                part.add(each, item)
            part.low_ns = min(part.low_ns, whole.low_ns)
            parts.append(part)
        self._gone_rows += self._without_row(whole)
        self._chunks[at : at + 1] = parts
        self._firsts.insert(at + 1, items[middle][0])
        return parts[seq >= items[middle][0]]

    def update(self, entries: Mapping[int, Pending]) -> None:
        """Add deliveries, none of which is pending yet."""
        for seq in sorted(entries):
            self.add(seq, entries[seq])

    def redeliver(self, seq: int, item: Pending, deadline_ns: int) -> None:
        """Note a further delivery of ``seq``, whose entry is ``item``."""
        if item.attempts == 1:
            self._chunks[bisect_right(self._firsts, seq) - 1].redelivered += 1
        item.attempts += 1
        self.postpone(seq, item, deadline_ns)

    def postpone(self, seq: int, item: Pending, deadline_ns: int) -> None:
        """Set the deadline of ``seq``, whose entry is ``item``."""
        item.deadline_ns = deadline_ns
        self._bound(seq, deadline_ns).body = b""

    def _bound(self, seq: int, deadline_ns: int) -> _Chunk:
        chunk = self._chunks[bisect_right(self._firsts, seq) - 1]
        chunk.bound(deadline_ns)
        self._low_ns = min(self._low_ns, deadline_ns)
        return chunk

    def shift(self, changes: tuple[int, ...]) -> None:
        """Add ``changes[i]`` to the deadlines of entries with ``i + 1`` attempts, or the last."""
        if any(changes):
            for chunk in self._chunks:
                chunk.shift(changes)
            self._find_low()

    def remove(self, seq: int) -> Pending | None:
        """Remove ``seq`` and return its delivery; None if it is not pending."""
        at = bisect_right(self._firsts, seq) - 1
        if at < 0:
            return None
        chunk = self._chunks[at]
        if chunk.shifts:
            chunk.read()
        item = chunk.entries.pop(seq, None)
        if item is not None:
            chunk.body = b""
            if item.attempts > 1:
                chunk.redelivered -= 1
            self._count -= 1
            if len(chunk.entries) <= _FEW:
                self._removed_from(at)
        return item

    def remove_all(self, seqs: list[int]) -> tuple[list[int], list[int]]:
        """Remove ``seqs``; return those that were pending, and those that were not."""
        removed: list[int] = []
        missing: list[int] = []
        at = -1
        low = high = 0  # the limits of chunk `at`
        for seq in seqs:
            if not low <= seq < high:
                self._removed_from(at)
                at = bisect_right(self._firsts, seq) - 1
                if at < 0:
                    low = high = 0
                    missing.append(seq)
                    continue
                chunk = self._chunks[at]
                low = self._firsts[at]
                high = self._firsts[at + 1] if at + 1 < len(self._firsts) else INT64_MAX
                chunk.body = b""
                take = chunk.entries.pop
            item = take(seq, None)
            if item is None:
                missing.append(seq)
                continue
            removed.append(seq)
            if item.attempts > 1:
                chunk.redelivered -= 1
        self._removed_from(at)
        self._count -= len(removed)
        return removed, missing

    def remove_below(self, end_seq: int) -> list[int]:
        """Remove what is below ``end_seq``; return its sequences, ascending."""
        removed: list[int] = []
        count = max(bisect_right(self._firsts, end_seq - 1) - 1, 0)
        whole, self._chunks = self._chunks[:count], self._chunks[count:]
        del self._firsts[:count]
        for chunk in whole:
            removed += chunk.sort()
            self._gone_rows += self._without_row(chunk)
        self._dropped += whole
        self.free_dropped()
        self._count -= len(removed)
        if self._chunks:
            for seq in [seq for seq in self._chunks[0].sort() if seq < end_seq]:
                self.remove(seq)
                removed.append(seq)
        return removed

    @property
    def has_dropped(self) -> bool:
        """Whether there are dropped chunks that are not freed."""
        return bool(self._dropped)

    def free_dropped(self) -> bool:
        """Free a few of the chunks that were dropped; return whether there are more."""
        del self._dropped[-_CHUNKS_FREED:]
        return bool(self._dropped)

    def _removed_from(self, at: int) -> None:
        """Drop or join chunk ``at``, after entries of it were removed, if it is small now."""
        if at < 0:
            return
        chunk = self._chunks[at]
        if not chunk.entries:
            self._gone_rows += self._without_row(chunk)
            del self._chunks[at], self._firsts[at]
        elif chunk.may_join and len(chunk.entries) <= _FEW:
            chunk.may_join = False
            self._join(at)

    def _join(self, at: int) -> None:
        """Join a chunk to a neighbour, so that few deliveries never keep many chunks."""
        for left in (at - 1, at):
            if left >= 0 and left + 1 < len(self._chunks):
                one, other = self._chunks[left : left + 2]
                if len(one.entries) + len(other.entries) <= CHUNK // 2:
                    self._gone_rows += self._without_row(one) + self._without_row(other)
                    self._chunks[left : left + 2] = [_joined(one, other)]
                    del self._firsts[left + 1]
                    return
