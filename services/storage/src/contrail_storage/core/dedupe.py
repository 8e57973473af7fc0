"""The duplicate window: which message ids were stored lately, and under which sequence.

Ids come hashed (128 bit, keyed per stream); 96 bits of each are kept, with the sequence, in the
order in which the messages were stored, and are found through chains from a table of hashes: 30 to
36 bytes an id. Ids are looked up and added a whole append at a time.

An id is expired exactly when its message's log time is at least a window ago; since sequences and
times ascend together, that is one comparison with a sequence, and what is expired goes by the
segment. JetStream's rule holds: an id outlives its message (delete, purge, ack) until the window
ends.
"""

import mmap
import struct
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from contrail_common.texts import I64Array, U32Array
from contrail_storage.core import key_layout as keys
from contrail_storage.core.results import Writes

ID_BYTES: Final = 16
NO_ID: Final = bytes(ID_BYTES)
_SEGMENT_MIN: Final = 1_024
_MOVED_MAX: Final = 32_768
"""Ids that one append may move to another segment: that keeps ``apply`` short."""
_LARGE_BYTES: Final = 1 << 20
_ROW_HEAD: Final = struct.Struct("<qI")

U64Array = NDArray[np.uint64]
Number = TypeVar("Number", bound=np.generic)


class _Hashes(NamedTuple):
    """What is kept of the hashes of ids."""

    low: U64Array
    high: U32Array

    def since(self, start: int) -> "_Hashes":
        """The hashes from position ``start`` on."""
        return _Hashes(self.low[start:], self.high[start:])


def words_of(ids: bytes) -> U64Array:
    """The hashes of ``n`` ids as u64[n, 2]."""
    return np.frombuffer(ids, np.uint64).reshape(-1, 2)


def _kept(ids: bytes) -> _Hashes:
    words = words_of(ids)
    return _Hashes(words[:, 0], (words[:, 1] >> np.uint64(32)).astype(np.uint32))


def _ids_of(hashes: _Hashes) -> bytes:
    """Ids of which the same is kept."""
    words = np.empty((len(hashes.low), 2), np.uint64)
    words[:, 0] = hashes.low
    words[:, 1] = hashes.high.astype(np.uint64) << np.uint64(32)
    return words.tobytes()


def _zeros(count: int, kind: type[Number]) -> NDArray[Number]:
    """Zeros that take memory as they are touched, a small page at a time.

    For large arrays numpy asks for huge pages, each of which is cleared as a whole when it is first
    touched: the first ids of a large segment would take 100 ms.
    """
    size = count * np.dtype(kind).itemsize
    if size < _LARGE_BYTES:
        return np.zeros(count, kind)
    return np.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), kind)


class _Segment:
    """Ids in the order they came, up to ``capacity`` of them.

    ``heads`` holds for each hash bucket the position of its newest id, ``links`` for each id that
    of the next older one of its bucket. Positions begin at 1; 0 ends a chain.
    """

    __slots__ = ("capacity", "heads", "high", "links", "low", "mask", "seqs", "used")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        buckets = 1 << (capacity + capacity // 2 - 1).bit_length()
        self.mask = np.uint64(buckets - 1)
        self.heads = _zeros(buckets, np.uint32)
        self.links = _zeros(capacity + 1, np.uint32)
        self.low = _zeros(capacity + 1, np.uint64)
        self.high = _zeros(capacity + 1, np.uint32)
        self.seqs = _zeros(capacity + 1, np.int64)

    def find(self, hashes: _Hashes, found: I64Array) -> None:
        """Raise ``found`` to the sequences of those hashes that stand here."""
        at = self.heads[hashes.low & self.mask]
        asked = np.flatnonzero(at)
        at = at[asked]
        while len(asked):
            same = self.low[at] == hashes.low[asked]
            if same.any():
                same &= self.high[at] == hashes.high[asked]
                hit = asked[same]
                # An expired id may have been stored again: the newer sequence counts.
                found[hit] = np.maximum(found[hit], self.seqs[at[same]])
            at = self.links[at]
            more = at != 0
            at, asked = at[more], asked[more]

    def add(self, hashes: _Hashes, seqs: I64Array) -> int:
        """Add as many ids, all different, as there is room for; answers how many."""
        count = min(len(seqs), self.capacity - self.used)
        start = self.used + 1
        self.used += count
        self.low[start : start + count] = hashes.low[:count]
        self.high[start : start + count] = hashes.high[:count]
        self.seqs[start : start + count] = seqs[:count]
        at = np.arange(start, start + count, dtype=np.uint32)
        buckets = hashes.low[:count] & self.mask
        while len(at):
            self.links[at] = self.heads[buckets]
            self.heads[buckets] = at
            # Of several in one bucket the last is its head now; the others follow in later rounds.
            left = self.heads[buckets] != at
            at, buckets = at[left], buckets[left]
        return count

    def first_from(self, seq: int) -> int:
        """Position of the first id with ``seq`` or a later sequence; behind the last for none."""
        return 1 + int(np.searchsorted(self.seqs[1 : self.used + 1], seq))

    def rest(self, start: int) -> tuple[_Hashes, I64Array]:
        """Hashes and sequences of the ids from position ``start`` on."""
        return self.part(start, self.used + 1)

    def part(self, start: int, stop: int) -> tuple[_Hashes, I64Array]:
        """Hashes and sequences of the ids from position ``start`` up to ``stop``."""
        kept = slice(start, stop)
        return _Hashes(self.low[kept], self.high[kept]), self.seqs[kept]


class _Mark(NamedTuple):
    """What is known of the ids of one entry: their log time, number and last sequence."""

    time_ns: int
    ids: int
    last_seq: int
    entry: int


class DedupeWindow:
    """Message ids of one stream shard within the duplicate window."""

    def __init__(self, shard: int) -> None:
        self.shard = shard
        self._segments: list[_Segment] = []
        self._marks: deque[_Mark] = deque()
        self._live = 0
        self._floor_seq = 1
        self._open_ids = b""
        self._open_seqs = b""

    def __len__(self) -> int:
        """Ids in memory, those not yet let go of included."""
        return sum(segment.used for segment in self._segments)

    def expire(self, now_ns: int, window_ns: int, writes: Writes) -> None:
        """Forget the ids whose messages are at least ``window_ns`` old at ``now_ns``."""
        marks = self._marks
        if not marks or marks[0].time_ns > now_ns - window_ns:
            return
        first_index = last_index = marks[0].entry
        while marks and marks[0].time_ns <= now_ns - window_ns:
            gone = marks.popleft()
            last_index = gone.entry
            self._live -= gone.ids
            self._floor_seq = gone.last_seq + 1
        while self._segments and self._segments[0].seqs[self._segments[0].used] < self._floor_seq:
            del self._segments[0]
        # Restored entries share a row: it stands until the last of them has expired.
        shared = bool(marks) and marks[0].entry == last_index
        writes.delete_range(
            keys.large_key(keys.DEDUPE, self.shard, first_index),
            keys.large_key(keys.DEDUPE, self.shard, last_index + (not shared)),
        )

    def find(self, ids: bytes) -> I64Array:
        """Sequences that the ids were stored under within the window; 0 for those that were not."""
        hashes = _kept(ids)
        found = np.zeros(len(hashes.low), np.int64)
        for segment in self._segments:
            segment.find(hashes, found)
        found[found < self._floor_seq] = 0
        return found

    def add(self, ids: bytes, seqs: I64Array, time_ns: int, index: int, writes: Writes) -> None:
        """Remember ids, all different and none in the window, of messages just stored (>= 1).

        All ids of an entry become one row.
        """
        marks = self._marks
        self._remember(ids, seqs)
        if marks and marks[-1].entry == index:
            # A second append of the same entry: both stand in the row of the entry.
            self._open_ids += ids
            self._open_seqs += seqs.tobytes()
            marks.pop()
        else:
            self._open_ids, self._open_seqs = ids, seqs.tobytes()
        count = len(self._open_ids) // ID_BYTES
        marks.append(_Mark(time_ns, count, int(seqs[-1]), index))
        writes.put(
            keys.large_key(keys.DEDUPE, self.shard, index),
            b"".join((_ROW_HEAD.pack(time_ns, count), self._open_ids, self._open_seqs)),
        )

    def _remember(self, ids: bytes, seqs: I64Array) -> None:
        hashes = _kept(ids)
        self._live += len(seqs)
        start = 0
        while start < len(seqs):
            if not self._segments or self._segments[-1].used == self._segments[-1].capacity:
                self._extend()
            start += self._segments[-1].add(hashes.since(start), seqs[start:])

    def _extend(self) -> None:
        """Begin a segment with room for as many ids as the window holds now.

        So a window that neither grows nor shrinks has two of them.
        """
        if len(self) > _MOVED_MAX:
            self._segments.append(_Segment(max(_SEGMENT_MIN, self._live)))
            return
        # Every segment is asked for every id: the small ones of a growing window are joined.
        fresh = _Segment(max(_SEGMENT_MIN, 2 * self._live))
        for segment in self._segments:
            fresh.add(*segment.rest(segment.first_from(self._floor_seq)))
        self._segments = [fresh]

    def load(self, rows: Iterable[tuple[bytes, bytes]]) -> None:
        """Take up the window from its rows, given as (key, value) in key order."""
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
        self._remember(ids, seqs)
        self._marks.append(_Mark(time_ns, len(seqs), int(seqs[-1]), index))

    # Archives ------------------------------------------------------------------------------------

    def runs(self) -> Iterator[tuple[int, bytes, bytes]]:
        """Log time, ids and sequences of each entry, oldest first; of an id only what is kept."""
        at = len(self) - self._live  # what is expired stands before the rest
        for mark in self._marks:
            parts = list(self._between(at, at + mark.ids))
            ids = b"".join([_ids_of(hashes) for hashes, _ in parts])
            yield mark.time_ns, ids, b"".join([seqs.tobytes() for _, seqs in parts])
            at += mark.ids

    def _between(self, low: int, high: int) -> Iterator[tuple[_Hashes, I64Array]]:
        """What stands from position ``low`` of all segments up to ``high``."""
        for segment in self._segments:
            start, stop = max(low, 0), min(high, segment.used)
            if start < stop:
                yield segment.part(1 + start, 1 + stop)
            low, high = low - segment.used, high - segment.used

    def restore(self, runs: list[tuple[int, bytes, bytes]], index: int, writes: Writes) -> None:
        """Take up entries of another window, newer than all that stand here; once an index."""
        row: list[bytes] = []
        for time_ns, ids, packed in runs:
            seqs = np.frombuffer(packed, np.int64)
            self._take_up(time_ns, ids, seqs, index)
            row += (_ROW_HEAD.pack(time_ns, len(seqs)), ids, packed)
        writes.put(keys.large_key(keys.DEDUPE, self.shard, index), b"".join(row))
