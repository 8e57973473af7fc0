"""The duplicate window: the message ids stored recently, and the sequence of each.

Ids arrive hashed (128 bits, keyed per stream). The window keeps 96 bits of each and its sequence,
in the order in which the messages were stored. A hash table with chains finds them. Most ids are
new: the filter bits in the word of a bucket show that without a walk along its chain. An id takes
32 to 40 bytes. Lookups and additions handle the ids of a whole append at once.

An id expires exactly when its message was stored at least a window ago, in elapsed time: log time
without jumps. Sequences and times ascend together, so the check is one comparison with a sequence,
and memory is freed a segment at a time. Expired ids may be held for producers (see
`core.producers`). As in JetStream, an id outlives its message (delete, purge,
ack) until the window ends.
"""

import mmap
import struct
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from contrail_common.texts import I64Array, Mask, U32Array
from contrail_common.timeunits import INT64_MAX
from contrail_storage.core import key_layout as keys
from contrail_storage.core.results import Step, Writes

ID_BYTES: Final = 16
NO_ID: Final = bytes(ID_BYTES)
_WHOLE: Final = np.dtype((np.void, ID_BYTES))
_SEGMENT_MIN: Final = 256
_MOVED_MAX: Final = 32_768
"""Ids that one append may move to another segment; the limit keeps ``apply`` short."""
_LARGE_BYTES: Final = 1 << 20
_AT_BITS: Final = 24
_AT_MASK: Final = np.uint64((1 << _AT_BITS) - 1)
_FILTER_MASK: Final = ~_AT_MASK
_SEGMENT_MAX: Final = (1 << _AT_BITS) - 1
"""Ids of one segment at most, so that the positions of all of them fit into its words."""
_PATTERN_BITS: Final = 12
_PATTERN_ONES: Final = 5
_RUN_HEAD: Final = struct.Struct("<qI")
"""A row consists of runs: elapsed time, number of ids, then all ids, then all sequences (i64)."""
_IN_ORDER: Final = 1 << 31
"""Added to the number of a run whose sequences are consecutive, as most are.

Then come the first sequence (i64), the first 64 bits of each id, and its last 32 bits: half as many
bytes.
"""
_I64: Final = struct.Struct("<q")
_HELD_TOGETHER: Final = 1_024
"""Held ids that share a mark and a row, if their appends were smaller."""
_MARKS_TOGETHER: Final = 4_096
_IDS_TOGETHER: Final = 32_768
"""Runs and ids that are taken up together: each alone would take ten times as long."""

U64Array = NDArray[np.uint64]
Number = TypeVar("Number", bound=np.generic)


def _patterns() -> U64Array:
    """Words with a few pseudo-random filter bits set; an id sets one of them in its bucket."""
    numbers = np.arange(1 << _PATTERN_BITS, dtype=np.uint64)
    words = np.zeros(len(numbers), np.uint64)
    filter_bits = np.uint64(64 - _AT_BITS)
    for _ in range(_PATTERN_ONES):
        # A linear congruential generator (Knuth's MMIX); its high bits are the most random.
        numbers = numbers * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
        bits = np.uint64(_AT_BITS) + ((numbers >> np.uint64(32)) * filter_bits >> np.uint64(32))
        words |= np.uint64(1) << bits
    return words


_PATTERNS: Final = _patterns()


@dataclass(slots=True, frozen=True, eq=False)
class IdHashes:
    """Hashes of ids (16 bytes each) in columns: the bits that are kept, and the filter pattern.

    ``low`` has the first 64 bits of each, ``high`` the last 32.
    """

    ids: bytes
    low: U64Array
    high: U32Array
    patterns: U64Array

    @classmethod
    def of(cls, ids: bytes) -> "IdHashes":
        """Split ``ids``, the concatenated hashes, into columns."""
        low = np.frombuffer(ids, np.uint64)[::2].copy()
        # The pattern uses the high bits, since the bucket uses the low ones.
        numbers = (low >> np.uint64(64 - _PATTERN_BITS)).view(np.int64)
        return cls(ids, low, np.frombuffer(ids, np.uint32)[3::4].copy(), _PATTERNS[numbers])

    @property
    def count(self) -> int:
        """Number of hashes."""
        return len(self.low)

    def at(self, positions: NDArray[np.intp]) -> "IdHashes":
        """Only the hashes at ``positions``."""
        return IdHashes.of(np.frombuffer(self.ids, _WHOLE)[positions].tobytes())

    def since(self, start: int) -> "IdHashes":
        """The hashes from position ``start`` on."""
        if not start:
            return self
        return IdHashes(
            self.ids[ID_BYTES * start :], self.low[start:], self.high[start:], self.patterns[start:]
        )

    def present(self) -> Mask:
        """A mask: true where there is an id, that is, where the hash differs from NO_ID."""
        found: Mask = self.low != 0
        # The first half of a real hash is zero once in 2^64. Only then the second half matters.
        if not found.all():
            found |= np.frombuffer(self.ids, np.uint64)[1::2] != 0
        return found

    def repeat(self) -> bool:
        """Whether some id seems to occur twice: only the first half of each is compared."""
        halves = np.sort(self.low)
        if not (halves[1:] == halves[:-1]).any():
            return False
        halves = np.sort(self.low[self.present()])
        return bool((halves[1:] == halves[:-1]).any())


def _ids_of(low: U64Array, high: U32Array) -> bytes:
    """Rebuild ids from the bits that are kept; the other bits are zero."""
    words = np.empty((len(low), 2), np.uint64)
    words[:, 0] = low
    words[:, 1] = high.astype(np.uint64) << np.uint64(32)
    return words.tobytes()


def _zeros(count: int, kind: type[Number]) -> NDArray[Number]:
    """Zeros that take memory when they are first used, one small page at a time.

    For large arrays numpy asks for huge pages, and the kernel clears each as a whole at its first
    use: adding the first ids to a large segment would take 100 ms.
    """
    size = count * np.dtype(kind).itemsize
    if size < _LARGE_BYTES:
        return np.zeros(count, kind)
    return np.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), kind)


class _Segment:
    """Ids in the order in which they were added, up to ``capacity`` of them.

    ``table`` has a word for each hash bucket. Its low bits are the position of the bucket's newest
    id; ``links`` has, for each id, the position of the next older one of its bucket. Positions
    begin at 1; 0 ends a chain. The other bits of a word are a filter, the union of the patterns of
    the bucket's ids: an id whose pattern is not in it is not in the segment. When the segment is
    full, one in 1,000 absent ids passes the filter at most. Position and filter share a word
    because each bucket is a cache miss.
    """

    __slots__ = ("capacity", "high", "links", "low", "mask", "seqs", "table", "used")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        # Between 0.5 and 1 ids per bucket: fuller ones would let more absent ids pass the filter.
        buckets = 1 << (capacity - 1).bit_length()
        self.mask = buckets - 1
        self.table = _zeros(buckets, np.uint64)
        self.links = _zeros(capacity + 1, np.uint32)
        self.low = _zeros(capacity + 1, np.uint64)
        self.high = _zeros(capacity + 1, np.uint32)
        self.seqs = _zeros(capacity + 1, np.int64)

    def find(self, hashes: IdHashes, found: I64Array) -> None:
        """Raise ``found`` to the sequences of those hashes that are in this segment."""
        # Here and below, `take` and its mode make numpy wait for several cache misses at once.
        words = self.table.take(hashes.low.view(np.int64) & self.mask, mode="clip")
        asked = ((words & hashes.patterns) == hashes.patterns).nonzero()[0]
        if not len(asked):
            return
        at = (words[asked] & _AT_MASK).view(np.int64)
        while len(asked):
            same = self.low[at] == hashes.low[asked]
            if same.any():
                same &= self.high[at] == hashes.high[asked]
                hit = asked[same]
                # An expired id may have been stored again: the newer sequence wins.
                found[hit] = np.maximum(found[hit], self.seqs[at[same]])
            at = self.links[at]
            more = at != 0
            at, asked = at[more], asked[more]

    def add(self, hashes: IdHashes, seqs: I64Array) -> int:
        """Add the first ids, as many as fit; return how many. The ids must all be different."""
        count = min(len(seqs), self.capacity - self.used)
        start = self.used + 1
        self.used += count
        self.low[start : start + count] = hashes.low[:count]
        self.high[start : start + count] = hashes.high[:count]
        self.seqs[start : start + count] = seqs[:count]
        at = np.arange(start, start + count, dtype=np.uint64)
        buckets, patterns = hashes.low[:count].view(np.int64) & self.mask, hashes.patterns[:count]
        while len(at):
            words = self.table.take(buckets, mode="clip")
            self.links[at.view(np.int64)] = words & _AT_MASK
            words = (words & _FILTER_MASK) | patterns | at
            self.table[buckets] = words
            if len(at) == 1:
                break
            # Of several ids in one bucket, only the last is in the table now. The others follow in
            # the next rounds.
            left = (self.table.take(buckets, mode="clip") != words).nonzero()[0]
            at, buckets, patterns = at[left], buckets[left], patterns[left]
        return count

    def arrays(self) -> "list[NDArray[np.generic]]":
        """All that takes memory."""
        return [self.table, self.links, self.low, self.high, self.seqs]

    def first_from(self, seq: int) -> int:
        """Position of the first id with ``seq`` or a later sequence; ``used + 1`` without one."""
        return 1 + int(np.searchsorted(self.seqs[1 : self.used + 1], seq))

    def rest(self, start: int) -> tuple[bytes, I64Array]:
        """Ids and their sequences from position ``start`` on; bits that are not kept are zero."""
        return self.part(start, self.used + 1)

    def part(self, start: int, stop: int) -> tuple[bytes, I64Array]:
        """Ids and their sequences from position ``start`` to before ``stop``, as :meth:`rest`."""
        kept = slice(start, stop)
        return _ids_of(self.low[kept], self.high[kept]), self.seqs[kept]


def _run(time_ns: int, hashes: IdHashes, seqs: I64Array) -> bytes:
    """A run of ids for a row."""
    count, first_seq = len(seqs), int(seqs[0])
    if int(seqs[-1]) - first_seq == count - 1:
        head = _RUN_HEAD.pack(time_ns, count | _IN_ORDER) + _I64.pack(first_seq)
        return b"".join((head, hashes.low.tobytes(), hashes.high.tobytes()))
    return b"".join((_RUN_HEAD.pack(time_ns, count), hashes.ids, seqs.tobytes()))


def _packed_run(time_ns: int, ids: bytes, seqs: bytes) -> bytes:
    """As :func:`_run`, of packed columns: a short way for one id."""
    if len(ids) == ID_BYTES:
        return b"".join((_RUN_HEAD.pack(time_ns, 1 | _IN_ORDER), seqs, ids[:8], ids[12:]))
    return _run(time_ns, IdHashes.of(ids), np.frombuffer(seqs, np.int64))


def _runs_of(row: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Elapsed time, ids and sequences (i64) of each run of a row; bits not kept are zero."""
    at = 0
    while at < len(row):
        time_ns, count = _RUN_HEAD.unpack_from(row, at)
        at += _RUN_HEAD.size
        if count == 1 | _IN_ORDER:
            yield (
                time_ns,
                row[at + 8 : at + 16] + bytes(4) + row[at + 16 : at + 20],
                row[at : at + 8],
            )
            at += 20
        elif count & _IN_ORDER:
            count -= _IN_ORDER
            [first_seq] = _I64.unpack_from(row, at)
            low = np.frombuffer(row, np.uint64, count, at + _I64.size)
            high = np.frombuffer(row, np.uint32, count, at + _I64.size + low.nbytes)
            at += _I64.size + low.nbytes + high.nbytes
            yield time_ns, _ids_of(low, high), np.arange(first_seq, first_seq + count).tobytes()
        else:
            ids = row[at : at + ID_BYTES * count]
            at += len(ids) + _I64.size * count
            yield time_ns, ids, row[at - _I64.size * count : at]


class _Marks:
    """The marks of appends that follow each other, in columns: tuples would take 250 bytes each.

    Of each append: elapsed time (ascending), last sequence, and row (``entries``). Mark i has the
    ids from ``ends[i]`` to ``ends[i + 1]``, counted from the first. Those before ``start`` have
    expired.
    """

    __slots__ = ("ends", "entries", "last_seqs", "start", "times")

    def __init__(self) -> None:
        self.start = 0
        self.times = array("q")
        self.last_seqs = array("q")
        self.entries = array("q")
        self.ends = array("q", [0])

    def ids(self, first: int, stop: int) -> int:
        """Number of ids of some marks."""
        return self.ends[stop] - self.ends[first]


class _Held(NamedTuple):
    """Held ids: their number and last sequence, and their rows."""

    time_ns: int
    ids: int
    last_seq: int
    entry: int
    first_entry: int


class DedupeWindow:
    """Message ids of one stream shard within the duplicate window."""

    def __init__(self, shard_id: int) -> None:
        self.shard_id = shard_id
        self._segments: list[_Segment] = []  # oldest first; may hold expired ids at its start
        self.marks: deque[_Marks] = deque()
        """Of the appends that have not expired, in order; empty: there is nothing to expire."""
        self.held: deque[_Held] = deque()
        """Those that have expired and are held for producers, in order; all before ``marks``."""
        self._live = 0  # ids that have not expired: the sum over `marks`
        self.held_ids = 0
        """The sum over ``held``."""
        self._floor_seq = 1  # ids of messages below this sequence have expired
        self._held_seq = 1  # ids of messages below this sequence are forgotten
        # The row of the newest entry, which a second append of the same entry extends.
        self._open_row = b""
        # Arrays of dropped segments: freeing those of millions of ids takes tens of milliseconds.
        self._dropped: list[NDArray[np.generic]] = []

    def __len__(self) -> int:
        """Ids in memory; expired ones count until their segment is dropped."""
        return sum(segment.used for segment in self._segments)

    def expire(
        self, now_ns: int, window_ns: int, writes: Writes, held_from: int = INT64_MAX
    ) -> None:
        """Expire the ids whose messages are at least ``window_ns`` old at ``now_ns``.

        Those of messages from the sequence ``held_from`` on are held, the others forgotten.
        """
        if self._dropped:
            self._dropped.pop()
        due_ns, held = now_ns - window_ns, self.held
        gone: list[_Held] = []
        while self.marks and (marks := self.marks[0]).times[marks.start] <= due_ns:
            first = marks.start
            self._expire_until(bisect_right(marks.times, due_ns, first))
            kept = first if held else bisect_left(marks.last_seqs, held_from, first, marks.start)
            if kept > first:
                last_seq, entry = marks.last_seqs[kept - 1], marks.entries[kept - 1]
                gone.append(
                    _Held(due_ns, marks.ids(first, kept), last_seq, entry, marks.entries[first])
                )
            if kept < marks.start:
                self._hold(marks, kept, writes)
        while held and held[0].last_seq < held_from:
            gone.append(self._release_first())
        if gone:
            self._forget(gone, writes)

    def forget_held(self, most: int, writes: Writes) -> int:
        """Hold at most ``most`` ids; return the first sequence whose message's id is known."""
        gone: list[_Held] = []
        while self.held_ids > most:
            gone.append(self._release_first())
        if gone:
            self._forget(gone, writes)
        return self._held_seq

    @property
    def first_live_seq(self) -> int | None:
        """The first message whose id has not expired; None if there is none."""
        at = len(self) - self._live
        return next((int(seqs[0]) for _, seqs in self._between(at, at + 1)), None)

    def _expire_until(self, stop: int) -> None:
        """Expire the first marks, up to position ``stop``."""
        marks = self.marks[0]
        self._live -= marks.ids(marks.start, stop)
        self._floor_seq = marks.last_seqs[stop - 1] + 1
        marks.start = stop
        if stop == len(marks.times):
            self.marks.popleft()

    def _hold(self, marks: _Marks, at: int, writes: Writes | None) -> None:
        """Hold ids that have just expired: those of the marks from position ``at`` on.

        Small appends share a mark and a row: held ids may be many, and a start reads all rows.
        Without ``writes``, the rows are joined already.
        """
        held, stop = self.held, marks.start
        end = len(self) - self._live
        while at < stop:
            last, upto = held[-1] if held else None, at
            if last is not None:
                most = marks.ends[at] + _HELD_TOGETHER - last.ids
                upto = bisect_right(marks.ends, most, at, stop + 1) - 1
                # A row with runs of its own, as a restore writes it, is never divided.
                upto = max(at, upto, bisect_right(marks.entries, last.entry, at, stop))
            if last is None or upto == at:
                if last is not None and last.first_entry < last.entry and writes is not None:
                    held[-1] = self._join_rows(last, end - marks.ids(at, stop), writes)
                upto, entry = at + 1, marks.entries[at]
                last = _Held(0, 0, 0, entry, entry)
            else:
                held.pop()
            ids = marks.ids(at, upto)
            time_ns, last_seq = marks.times[upto - 1], marks.last_seqs[upto - 1]
            held.append(
                _Held(time_ns, last.ids + ids, last_seq, marks.entries[upto - 1], last.first_entry)
            )
            self.held_ids += ids
            at = upto

    def _join_rows(self, mark: _Held, end: int, writes: Writes) -> _Held:
        """Write the ids of a mark, which end at a position, as one row instead of several."""
        ids, seqs = self._part(end - mark.ids, end)
        key = keys.large_key(keys.DEDUPE, self.shard_id, mark.entry)
        writes.delete_range(keys.large_key(keys.DEDUPE, self.shard_id, mark.first_entry), key)
        writes.put(key, _run(mark.time_ns, IdHashes.of(ids), seqs))
        return mark._replace(first_entry=mark.entry)

    def _release_first(self) -> _Held:
        mark = self.held.popleft()
        self.held_ids -= mark.ids
        return mark

    def _forget(self, gone: list[_Held], writes: Writes) -> None:
        """Forget ids that are no longer held."""
        self._held_seq = gone[-1].last_seq + 1
        # A segment at a time: removing single ids would mean rebuilding chains.
        while self._segments and self._segments[0].seqs[self._segments[0].used] < self._held_seq:
            dropped = self._segments.pop(0).arrays()
            self._dropped += [part for part in dropped if part.nbytes >= _LARGE_BYTES]
        # Restored runs share a row, which stays until the last of them is forgotten.
        last_index, left = gone[-1].entry, None
        if self.held:
            left = self.held[0].first_entry
        elif self.marks:
            left = self.marks[0].entries[self.marks[0].start]
        shared = left == last_index
        writes.delete_range(
            keys.large_key(keys.DEDUPE, self.shard_id, gone[0].first_entry),
            keys.large_key(keys.DEDUPE, self.shard_id, last_index + (not shared)),
        )

    def find(self, hashes: IdHashes, held_from: int = INT64_MAX) -> I64Array:
        """The sequence of each id (i64 per hash); 0 where there is none.

        Only ids within the window are found, and held ones from the sequence ``held_from`` on.
        """
        found = np.zeros(hashes.count, np.int64)
        for segment in self._segments:
            segment.find(hashes, found)
        if found.any():
            # Ids that have expired stay in their segment until all of it is forgotten.
            found[found < min(self._floor_seq, held_from)] = 0
        return found

    def add(self, hashes: IdHashes, seqs: I64Array, step: Step) -> None:
        """Remember the ids of messages just stored: at least one, all different, none known yet.

        All ids of an entry are written as one row.
        """
        row = _run(step.elapsed_ns, hashes, seqs)
        self._remember(hashes, seqs)
        self._write_row(row, step)
        self._mark(step.elapsed_ns, len(seqs), int(seqs[-1]), step.index)

    def _write_row(self, row: bytes, step: Step) -> None:
        """Write the runs of an append, whose marks are added next."""
        # One row for each entry, so that a window of rows is deleted as one range.
        if self.marks and self.marks[-1].entries[-1] == step.index:
            row = self._open_row + row
        self._open_row = row
        step.writes.put(keys.large_key(keys.DEDUPE, self.shard_id, step.index), row)

    def _mark(self, time_ns: int, ids: int, last_seq: int, entry: int) -> None:
        all_marks = self.marks
        marks = all_marks[-1] if all_marks else _Marks()
        if all_marks:
            # In the order of sequences, whatever their times: an id never expires before its time.
            time_ns = max(time_ns, marks.times[-1])
        if not all_marks or len(marks.times) == _MARKS_TOGETHER:
            marks = _Marks()
            all_marks.append(marks)
        marks.times.append(time_ns)
        marks.last_seqs.append(last_seq)
        marks.entries.append(entry)
        marks.ends.append(marks.ends[-1] + ids)

    def _remember(self, hashes: IdHashes, seqs: I64Array) -> None:
        self._live += len(seqs)
        start = 0
        while start < len(seqs):
            if not self._segments or self._segments[-1].used == self._segments[-1].capacity:
                self._extend()
            start += self._segments[-1].add(hashes.since(start), seqs[start:])

    def _extend(self) -> None:
        """Start a segment with a capacity for as many ids as the window holds now.

        So a window of constant size has two segments.
        """
        known = self._live + self.held_ids
        if len(self) > _MOVED_MAX:
            self._segments.append(_Segment(min(max(_SEGMENT_MIN, known), _SEGMENT_MAX)))
            return
        # Every lookup asks every segment, so a small window that grows is kept in one segment.
        fresh = _Segment(max(_SEGMENT_MIN, 2 * known))
        for segment in self._segments:
            ids, seqs = segment.rest(segment.first_from(self._held_seq))
            fresh.add(IdHashes.of(ids), seqs)
        self._segments = [fresh]

    def load(self, rows: Iterable[tuple[bytes, bytes]], live_seq: int = 0) -> None:
        """Load the window from its rows, given as (key, value) in key order.

        Those of appends that end below ``live_seq`` have expired, however long the window is.
        """
        runs: list[tuple[int, bytes, bytes]] = []
        entries: list[int] = []
        count = 0
        for key, row in rows:
            entry = keys.last_number(key, 8)
            for run in _runs_of(row):
                runs.append(run)
                entries.append(entry)
                count += len(run[1])
            if len(runs) >= _MARKS_TOGETHER or count >= _IDS_TOGETHER * ID_BYTES:
                self._take_up(runs, entries)
                runs, entries, count = [], [], 0
        self._take_up(runs, entries)
        while self.marks and (marks := self.marks[0]).last_seqs[marks.start] < live_seq:
            first = marks.start
            self._expire_until(bisect_left(marks.last_seqs, live_seq, first))
            self._hold(marks, first, None)

    def _take_up(self, runs: list[tuple[int, bytes, bytes]], entries: list[int]) -> None:
        """Add runs of other rows: elapsed time, ids and sequences of each, and its row."""
        if not runs:
            return
        seqs = np.frombuffer(b"".join([packed for _, _, packed in runs]), np.int64)
        self._remember(IdHashes.of(b"".join([ids for _, ids, _ in runs])), seqs)
        end = 0
        for (time_ns, ids, _), entry in zip(runs, entries, strict=True):
            end += len(ids) // ID_BYTES
            self._mark(time_ns, len(ids) // ID_BYTES, int(seqs[end - 1]), entry)

    # Archives ------------------------------------------------------------------------------------

    def runs(self) -> Iterator[tuple[int, bytes, bytes]]:
        """Elapsed time, ids and sequences of each append, oldest first; bits not kept are zero."""
        at = len(self) - self._live - self.held_ids  # those that are forgotten come first
        for held in self.held:
            ids, seqs = self._part(at, at + held.ids)
            yield held.time_ns, ids, seqs.tobytes()
            at += held.ids
        for marks in self.marks:
            ends, stop = marks.ends, len(marks.times)
            ids, seqs = self._part(at, at + marks.ids(marks.start, stop))
            at += len(seqs)
            for one in range(marks.start, stop):
                start, end = ends[one] - ends[marks.start], ends[one + 1] - ends[marks.start]
                yield (
                    marks.times[one],
                    ids[ID_BYTES * start : ID_BYTES * end],
                    seqs[start:end].tobytes(),
                )

    def _part(self, low: int, high: int) -> tuple[bytes, I64Array]:
        """As :meth:`_between`, in one piece."""
        parts = list(self._between(low, high))
        return b"".join([ids for ids, _ in parts]), np.concatenate([seqs for _, seqs in parts])

    def _between(self, low: int, high: int) -> Iterator[tuple[bytes, I64Array]]:
        """Ids and sequences from ``low`` to before ``high``, counted over all segments from 0."""
        for segment in self._segments:
            start, stop = max(low, 0), min(high, segment.used)
            if start < stop:
                yield segment.part(1 + start, 1 + stop)
            low, high = low - segment.used, high - segment.used

    def restore(self, runs: list[tuple[int, bytes, bytes]], step: Step) -> None:
        """Add entries of another window, all newer than those here. Their times are log times."""
        moved = [(log_ns - step.skipped_ns, ids, seqs) for log_ns, ids, seqs in runs]
        self._write_row(b"".join([_packed_run(*run) for run in moved]), step)
        self._take_up(moved, [step.index] * len(moved))
