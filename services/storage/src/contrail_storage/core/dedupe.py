"""The duplicate window: the message ids stored recently, and the sequence of each.

Ids arrive hashed (128 bits, keyed per stream). The window keeps 96 bits of each and its sequence,
in the order in which the messages were stored. A hash table with chains finds them. Most ids are
new: a word of filter bits for each chain shows that without a walk. An id takes 33 to 42 bytes.
Lookups and additions handle the ids of a whole append at once.

An id expires exactly when its message was stored at least a window ago, in elapsed time: log time
without jumps. Sequences and times ascend together, so the check is one comparison with a sequence,
and memory is freed a segment at a time. As in JetStream, an id outlives its message (delete, purge,
ack) until the window ends.
"""

import mmap
import struct
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from contrail_common.texts import I64Array, Mask, U32Array
from contrail_storage.core import key_layout as keys
from contrail_storage.core.results import Step, Writes

ID_BYTES: Final = 16
NO_ID: Final = bytes(ID_BYTES)
_WHOLE: Final = np.dtype((np.void, ID_BYTES))
_SEGMENT_MIN: Final = 1_024
_MOVED_MAX: Final = 32_768
"""Ids that one append may move to another segment; the limit keeps ``apply`` short."""
_LARGE_BYTES: Final = 1 << 20
_PATTERN_BITS: Final = 12
_PATTERN_ONES: Final = 6
_ROW_HEAD: Final = struct.Struct("<qI")

U64Array = NDArray[np.uint64]
Number = TypeVar("Number", bound=np.generic)


def _patterns() -> U64Array:
    """Words with a few pseudo-random bits set; an id sets one of them in a segment's filter."""
    numbers = np.arange(1 << _PATTERN_BITS, dtype=np.uint64)
    words = np.zeros(len(numbers), np.uint64)
    for _ in range(_PATTERN_ONES):
        # A linear congruential generator (Knuth's MMIX); its high bits are the most random.
        numbers = numbers * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
        words |= np.uint64(1) << (numbers >> np.uint64(58))
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

    ``heads`` has the position of the newest id of each hash bucket. ``links`` has, for each id, the
    position of the next older one of its bucket. Positions begin at 1; 0 ends a chain. ``filter``
    has the union of the patterns of each bucket's ids: an id whose pattern is not in it is not in
    the segment. When the segment is full, one in 20,000 absent ids passes the filter (a word then
    has 1.3 ids at most).
    """

    __slots__ = ("capacity", "filter", "heads", "high", "links", "low", "mask", "seqs", "used")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        # Between 0.67 and 1.33 ids per bucket: fuller ones would let more absent ids pass the
        # filter.
        buckets = 1 << (capacity - capacity // 4 - 1).bit_length()
        self.mask = buckets - 1
        self.filter = _zeros(buckets, np.uint64)
        self.heads = _zeros(buckets, np.uint32)
        self.links = _zeros(capacity + 1, np.uint32)
        self.low = _zeros(capacity + 1, np.uint64)
        self.high = _zeros(capacity + 1, np.uint32)
        self.seqs = _zeros(capacity + 1, np.int64)

    def find(self, hashes: IdHashes, found: I64Array) -> None:
        """Raise ``found`` to the sequences of those hashes that are in this segment."""
        buckets = hashes.low.view(np.int64) & self.mask
        passed = (self.filter[buckets] & hashes.patterns) == hashes.patterns
        asked = passed.nonzero()[0]
        if not len(asked):
            return
        at = self.heads[buckets[asked]]
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
        at = np.arange(start, start + count, dtype=np.uint32)
        buckets, patterns = hashes.low[:count].view(np.int64) & self.mask, hashes.patterns[:count]
        while len(at):
            self.links[at] = self.heads[buckets]
            self.heads[buckets] = at
            self.filter[buckets] |= patterns
            # Of several ids in one bucket, only the last is in `heads` and in the filter now. The
            # others follow in the next rounds.
            left = (self.heads[buckets] != at).nonzero()[0]
            at, buckets, patterns = at[left], buckets[left], patterns[left]
        return count

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


class _Mark(NamedTuple):
    """The ids of one entry: elapsed time, count and last sequence, and the row (``entry``)."""

    time_ns: int
    ids: int
    last_seq: int
    entry: int


class DedupeWindow:
    """Message ids of one stream shard within the duplicate window."""

    def __init__(self, shard_id: int) -> None:
        self.shard_id = shard_id
        self._segments: list[_Segment] = []  # oldest first; may hold expired ids at its start
        self.marks: deque[_Mark] = deque()
        """One for each entry that has not expired, in order; empty: there is nothing to expire."""
        self._live = 0  # ids that have not expired: the sum over `marks`
        self._floor_seq = 1  # ids of messages below this sequence have expired
        # The row of the newest entry, which a second append of the same entry extends.
        self._open_ids = b""
        self._open_seqs = b""

    def __len__(self) -> int:
        """Ids in memory; expired ones count until their segment is dropped."""
        return sum(segment.used for segment in self._segments)

    def expire(self, now_ns: int, window_ns: int, writes: Writes) -> None:
        """Forget the ids whose messages are at least ``window_ns`` old at ``now_ns``."""
        marks = self.marks
        if not marks or marks[0].time_ns > now_ns - window_ns:
            return
        first_index = last_index = marks[0].entry
        while marks and marks[0].time_ns <= now_ns - window_ns:
            gone = marks.popleft()
            last_index = gone.entry
            self._live -= gone.ids
            self._floor_seq = gone.last_seq + 1
        # A segment at a time: removing single ids would mean rebuilding chains.
        while self._segments and self._segments[0].seqs[self._segments[0].used] < self._floor_seq:
            del self._segments[0]
        # Restored entries share a row, which stays until the last of them has expired.
        shared = bool(marks) and marks[0].entry == last_index
        writes.delete_range(
            keys.large_key(keys.DEDUPE, self.shard_id, first_index),
            keys.large_key(keys.DEDUPE, self.shard_id, last_index + (not shared)),
        )

    def find(self, hashes: IdHashes) -> I64Array:
        """The sequence of each id within the window (i64 per hash); 0 where there is none."""
        found = np.zeros(hashes.count, np.int64)
        for segment in self._segments:
            segment.find(hashes, found)
        if found.any():
            # Expired ids stay in their segment until all of it has expired.
            found[found < self._floor_seq] = 0
        return found

    def add(self, hashes: IdHashes, seqs: I64Array, step: Step) -> None:
        """Remember the ids of messages just stored: at least one, all different, none known yet.

        All ids of an entry are written as one row.
        """
        ids, marks = hashes.ids, self.marks
        index, time_ns = step.index, step.elapsed_ns
        self._remember(hashes, seqs)
        # One row for each entry, so that a window of rows is deleted as one range.
        if marks and marks[-1].entry == index:
            # A second append of the same entry extends the row of the entry.
            self._open_ids += ids
            self._open_seqs += seqs.tobytes()
            marks.pop()
        else:
            self._open_ids, self._open_seqs = ids, seqs.tobytes()
        count = len(self._open_ids) // ID_BYTES
        marks.append(_Mark(time_ns, count, int(seqs[-1]), index))
        step.writes.put(
            keys.large_key(keys.DEDUPE, self.shard_id, index),
            b"".join((_ROW_HEAD.pack(time_ns, count), self._open_ids, self._open_seqs)),
        )

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
        if len(self) > _MOVED_MAX:
            self._segments.append(_Segment(max(_SEGMENT_MIN, self._live)))
            return
        # Every lookup asks every segment, so a small window that grows is kept in one segment.
        fresh = _Segment(max(_SEGMENT_MIN, 2 * self._live))
        for segment in self._segments:
            ids, seqs = segment.rest(segment.first_from(self._floor_seq))
            fresh.add(IdHashes.of(ids), seqs)
        self._segments = [fresh]

    def load(self, rows: Iterable[tuple[bytes, bytes]]) -> None:
        """Load the window from its rows, given as (key, value) in key order."""
        for key, row in rows:
            at = 0
            while at < len(row):
                time_ns, count = _ROW_HEAD.unpack_from(row, at)
                ids_at = at + _ROW_HEAD.size
                seqs_at = ids_at + ID_BYTES * count
                seqs = np.frombuffer(row, np.int64, count, seqs_at)
                self._take_up(time_ns, row[ids_at:seqs_at], seqs, keys.last_number(key, 8))
                at = seqs_at + seqs.nbytes

    def _take_up(self, time_ns: int, ids: bytes, seqs: I64Array, index: int) -> None:
        self._remember(IdHashes.of(ids), seqs)
        self.marks.append(_Mark(time_ns, len(seqs), int(seqs[-1]), index))

    # Archives ------------------------------------------------------------------------------------

    def runs(self) -> Iterator[tuple[int, bytes, bytes]]:
        """Elapsed time, ids and sequences of each entry, oldest first; bits not kept are zero."""
        at = len(self) - self._live  # expired ids come before the others
        for mark in self.marks:
            parts = list(self._between(at, at + mark.ids))
            ids = b"".join([each for each, _ in parts])
            yield mark.time_ns, ids, b"".join([seqs.tobytes() for _, seqs in parts])
            at += mark.ids

    def _between(self, low: int, high: int) -> Iterator[tuple[bytes, I64Array]]:
        """Ids and sequences from ``low`` to before ``high``, counted over all segments from 0."""
        for segment in self._segments:
            start, stop = max(low, 0), min(high, segment.used)
            if start < stop:
                yield segment.part(1 + start, 1 + stop)
            low, high = low - segment.used, high - segment.used

    def restore(self, runs: list[tuple[int, bytes, bytes]], step: Step) -> None:
        """Add entries of another window, all newer than those here; at most once per log index.

        Their times are log times.
        """
        row: list[bytes] = []
        for log_ns, ids, packed in runs:
            time_ns = log_ns - step.skipped_ns
            seqs = np.frombuffer(packed, np.int64)
            self._take_up(time_ns, ids, seqs, step.index)
            row += (_ROW_HEAD.pack(time_ns, len(seqs)), ids, packed)
        step.writes.put(keys.large_key(keys.DEDUPE, self.shard_id, step.index), b"".join(row))
