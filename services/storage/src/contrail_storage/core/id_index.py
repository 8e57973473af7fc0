"""An index of hashed message ids, in the order in which they were added.

Ids are in segments, each with a hash table. Most ids that are looked up are new: a filter of bits
in front of a few segments shows that with one cache miss, where each table would cost another.
Lookups and additions handle the ids of a whole append at once.
"""

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from contrail_common.texts import I64Array, Mask, U32Array

ID_BYTES: Final = 16
NO_ID: Final = bytes(ID_BYTES)
_WHOLE: Final = np.dtype((np.void, ID_BYTES))
_SEGMENT_MIN: Final = 256
_MOVED_MAX: Final = 32_768
"""Ids that one append may move to another segment; the limit keeps ``apply`` short."""
_SEGMENT_MAX: Final = (1 << 32) - 1
"""Ids of one segment at most: their positions have 32 bits."""
_LARGE_BYTES: Final = 1 << 20
_WORD_IDS: Final = 3
"""Ids for each word of a filter that is full: one new id in 500 passes it then, by mistake."""
_PATTERN_BITS: Final = 11
_PATTERN_ONES: Final = 3

U64Array = NDArray[np.uint64]
Number = TypeVar("Number", bound=np.generic)


def _patterns() -> U64Array:
    """Words with a few pseudo-random bits set; an id sets those of two of them in a filter."""
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
    """Hashes of ids (16 bytes each) in columns: the bits that are kept, and patterns of filters.

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
        high = np.frombuffer(ids, np.uint32)[3::4].copy()
        # The patterns use high bits, since the buckets use the low ones.
        patterns = _PATTERNS.take(low >> np.uint64(64 - _PATTERN_BITS))
        patterns |= _PATTERNS.take(high >> np.uint32(32 - _PATTERN_BITS))
        return cls(ids, low, high, patterns)

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


def ids_of(low: U64Array, high: U32Array) -> bytes:
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


class _Filter:
    """Bits of up to ``capacity`` ids: an id whose pattern is not in its word was not added.

    A Bloom filter in which all bits of an id are in one word (Putze, Sanders and Singler, "Cache-,
    Hash- and Space-Efficient Bloom Filters", 2007).
    """

    __slots__ = ("capacity", "mask", "words")

    def __init__(self, ids: int) -> None:
        """For at least ``_WORD_IDS`` times as many ids as ``ids``."""
        words = 1 << (ids - 1).bit_length()
        self.capacity = _WORD_IDS * words
        self.mask = words - 1
        self.words = _zeros(words, np.uint64)

    def passed_by(self, hashes: IdHashes) -> NDArray[np.intp]:
        """Positions of the hashes that may have been added."""
        # Here and below, `take` and its mode make numpy wait for several cache misses at once.
        words = self.words.take(hashes.low.view(np.int64) & self.mask, mode="clip")
        passed: NDArray[np.intp] = ((words & hashes.patterns) == hashes.patterns).nonzero()[0]
        return passed

    def add(self, hashes: IdHashes, count: int) -> None:
        """Add the first ``count`` hashes."""
        patterns = hashes.patterns[:count]
        at = hashes.low[:count].view(np.int64) & self.mask
        while len(at):
            self.words[at] = self.words.take(at, mode="clip") | patterns
            # Of several ids with one word, only the bits of the last are in it now.
            words = self.words.take(at, mode="clip")
            left = ((words & patterns) != patterns).nonzero()[0]
            at, patterns = at[left], patterns[left]


class _Segment:
    """Ids in the order in which they were added, up to ``capacity`` of them.

    ``table`` has, for each hash bucket, the position of one of its ids; ``links`` has, for each id,
    the position of another one of its bucket. Positions begin at 1; 0 ends a chain.
    """

    __slots__ = ("capacity", "high", "links", "low", "mask", "seqs", "table", "used")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        buckets = 1 << (capacity - 1).bit_length()
        self.mask = buckets - 1
        self.table = _zeros(buckets, np.uint32)
        self.links = _zeros(capacity + 1, np.uint32)
        self.low = _zeros(capacity + 1, np.uint64)
        self.high = _zeros(capacity + 1, np.uint32)
        self.seqs = _zeros(capacity + 1, np.int64)

    def find(self, low: int, high: int) -> int:
        """The newest sequence of an id; 0 if it is not in this segment."""
        at, newest = self.table.item(low & self.mask), 0
        while at:
            # An expired id may be here again, and ids that were added together are in any order.
            if self.low.item(at) == low and self.high.item(at) == high:
                newest = max(newest, self.seqs.item(at))
            at = self.links.item(at)
        return newest

    def add(self, hashes: IdHashes, seqs: I64Array) -> int:
        """Add the first ids, as many as fit; return how many."""
        count = min(len(seqs), self.capacity - self.used)
        start = self.used + 1
        self.used += count
        end = start + count
        self.low[start:end] = hashes.low[:count]
        self.high[start:end] = hashes.high[:count]
        self.seqs[start:end] = seqs[:count]
        at = np.arange(start, end, dtype=np.uint32)
        buckets = hashes.low[:count].view(np.int64) & self.mask
        while len(at):
            self.links[at] = self.table.take(buckets, mode="clip")
            self.table[buckets] = at
            if len(at) == 1:
                break
            # Of several ids in one bucket, only the last is in the table now. The others follow in
            # the next rounds.
            left = (self.table.take(buckets, mode="clip") != at).nonzero()[0]
            at, buckets = at[left], buckets[left]
        return count

    def arrays(self) -> "list[NDArray[np.generic]]":
        """All that takes memory."""
        return [self.table, self.links, self.low, self.high, self.seqs]

    def first_from(self, seq: int) -> int:
        """Position of the first id with ``seq`` or a later sequence; ``used + 1`` without one."""
        return 1 + int(np.searchsorted(self.seqs[1 : self.used + 1], seq))

    def part(self, start: int, stop: int) -> tuple[bytes, I64Array]:
        """Ids and their sequences from position ``start`` to before ``stop``.

        Bits that are not kept are zero.
        """
        kept = slice(start, stop)
        return ids_of(self.low[kept], self.high[kept]), self.seqs[kept]


class _Group:
    """A filter, and the segments whose ids it has, oldest first."""

    __slots__ = ("filter", "left", "segments")

    def __init__(self, first: _Segment) -> None:
        self.filter = _Filter(first.capacity)
        self.left = self.filter.capacity - first.capacity
        """Ids that further segments may have."""
        self.segments = [first]

    def find(self, hashes: IdHashes, found: I64Array) -> None:
        """Set ``found`` to the newest sequences of those hashes that are here."""
        # One by one: what few ids take in numpy would be most of a lookup.
        for at in self.filter.passed_by(hashes).tolist():
            low, high = hashes.low.item(at), hashes.high.item(at)
            for segment in reversed(self.segments):
                seq = segment.find(low, high)
                if seq:
                    found[at] = seq
                    break

    def add(self, hashes: IdHashes, seqs: I64Array) -> int:
        """As `_Segment.add`, to the newest segment."""
        count = self.segments[-1].add(hashes, seqs)
        self.filter.add(hashes, count)
        return count


class IdIndex:
    """Hashed ids and their sequences, which ascend; the oldest are dropped, a segment at a time."""

    def __init__(self) -> None:
        self._groups: list[_Group] = []  # oldest first; each has a segment
        # Arrays of dropped segments: freeing those of millions of ids takes tens of milliseconds.
        self._dropped: list[NDArray[np.generic]] = []

    def __len__(self) -> int:
        return sum(segment.used for segment in self._segments())

    def _segments(self) -> Iterator[_Segment]:
        for group in self._groups:
            yield from group.segments

    def find(self, hashes: IdHashes) -> I64Array:
        """The newest sequence of each id (i64 per hash); 0 where there is none."""
        found = np.zeros(hashes.count, np.int64)
        for group in self._groups:
            group.find(hashes, found)
        return found

    def add(self, hashes: IdHashes, seqs: I64Array, known: int, first_seq: int) -> None:
        """Add ids.

        ``known`` is the number of ids that are still needed, these included; ``first_seq`` is the
        sequence of the first of them.
        """
        start = 0
        while start < len(seqs):
            newest = self._groups[-1].segments[-1] if self._groups else None
            if newest is None or newest.used == newest.capacity:
                self._extend(known, first_seq)
            start += self._groups[-1].add(hashes.since(start), seqs[start:])

    def _extend(self, known: int, first_seq: int) -> None:
        """Start a segment with a capacity for as many ids as are known now.

        So an index of constant size has two segments.
        """
        if len(self) > _MOVED_MAX:
            segment = _Segment(min(max(_SEGMENT_MIN, known), _SEGMENT_MAX))
            group = self._groups[-1]
            if segment.capacity <= group.left:
                group.left -= segment.capacity
                group.segments.append(segment)
            else:
                self._groups.append(_Group(segment))
            return
        # Every lookup asks every group, so the ids of a small index that grows are in one segment.
        fresh = _Group(_Segment(max(_SEGMENT_MIN, 2 * known)))
        for group in self._groups:
            for segment in group.segments:
                ids, seqs = segment.part(segment.first_from(first_seq), segment.used + 1)
                fresh.add(IdHashes.of(ids), seqs)
                self._set_aside(segment.arrays())
            self._set_aside([group.filter.words])
        self._groups = [fresh]

    def drop_below(self, seq: int) -> None:
        """Forget the oldest ids, as far as whole segments have only sequences below ``seq``."""
        groups = self._groups
        while groups and (oldest := groups[0].segments[0]).seqs[oldest.used] < seq:
            self._set_aside(oldest.arrays())
            del groups[0].segments[0]
            # A filter goes with its last segment, so it takes no further ones.
            groups[0].left = 0
            if not groups[0].segments:
                self._set_aside([groups.pop(0).filter.words])

    def _set_aside(self, arrays: "list[NDArray[np.generic]]") -> None:
        self._dropped += [part for part in arrays if part.nbytes >= _LARGE_BYTES]

    def free(self) -> None:
        """Free an array of what was dropped, if there is any."""
        if self._dropped:
            self._dropped.pop()

    def between(self, low: int, high: int) -> Iterator[tuple[bytes, I64Array]]:
        """Ids and sequences from position ``low`` to before ``high``, counted from 0."""
        for segment in self._segments():
            start, stop = max(low, 0), min(high, segment.used)
            if start < stop:
                yield segment.part(1 + start, 1 + stop)
            low, high = low - segment.used, high - segment.used
