"""Deleted sequences inside a stream, as bitmaps of fixed ranges of sequences.

The ranges are pages of 4,096 sequences and not blocks, because each replica cuts its blocks in its
own way. A page takes 512 bytes in memory and in the store.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from heapq import nsmallest
from itertools import pairwise
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from contrail_common.texts import I64Array, Mask
from contrail_common.timeunits import INT64_MAX
from contrail_storage.core import key_layout as keys
from contrail_storage.core.results import Writes

PAGE: Final = 4_096
_TOP_BIT: Final = 0x80
_NEAR: Final = 4
"""Sequences to check one by one before a whole page is decoded."""
_FEW: Final = 32
"""Marks of a page that are set one by one, because arrays would take longer."""
_PAGES_MAX: Final = 1_024
"""Pages that one call of ``ranges`` checks."""


@cache
def _full(size: int) -> bytes:
    """The bitmap of ``size`` deleted sequences; cached, so that full pages share one object."""
    return b"\xff" * (size // 8)


def by_page(seqs: I64Array) -> Iterator[tuple[int, NDArray[np.intp]]]:
    """The number of each page that has some of ``seqs``, and the positions of these."""
    numbers = seqs // PAGE
    order = np.argsort(numbers, kind="stable")
    numbers = numbers[order]
    starts = np.flatnonzero(np.diff(numbers, prepend=-1)).tolist()
    for start, end in pairwise([*starts, len(seqs)]):
        yield int(numbers[start]), order[start:end]


class DeletedSet:
    """The deleted sequences between the first and the last sequence of the stream."""

    kind: ClassVar[bytes] = keys.DELETED
    """Kind of the rows in the store."""

    def __init__(self, shard_id: int) -> None:
        self.shard_id = shard_id
        self._pages: dict[int, bytes] = {}
        self._counts: dict[int, int] = {}
        self.total = 0
        self.touched: set[int] = set()
        """Pages with new marks that the compactor has not checked yet; no part of the state."""

    def __contains__(self, seq: int) -> bool:
        page = self._pages.get(seq // PAGE)
        if page is None:
            return False
        at = seq % PAGE
        return bool(page[at // 8] & _TOP_BIT >> at % 8)

    def add_many(self, seqs: I64Array, writes: Writes) -> None:
        """Mark ``seqs`` (ascending, at least one), none of which is marked yet."""
        if len(seqs) == 1:
            first, position = divmod(int(seqs[0]), PAGE)
            self._add_few(first, [position], writes)
            return
        for number, at in by_page(seqs):
            within = seqs[at] - number * PAGE
            if len(within) <= _FEW:
                self._add_few(number, within.tolist(), writes)
                continue
            marks = np.zeros(PAGE, np.bool_)
            marks[within] = True
            page = np.packbits(marks)
            if number in self._pages:
                page |= np.frombuffer(self._pages[number], np.uint8)
            self._set(number, page.tobytes(), len(within), writes)

    def _add_few(self, number: int, positions: list[int], writes: Writes) -> None:
        page = bytearray(self._pages.get(number) or PAGE // 8)
        for at in positions:
            page[at // 8] |= _TOP_BIT >> at % 8
        self._set(number, bytes(page), len(positions), writes)

    def _marks(self, number: int) -> Mask:
        """The sequences of a page: true where the sequence is deleted."""
        page = self._pages.get(number)
        if page is None:
            return np.zeros(PAGE, np.bool_)
        return np.unpackbits(np.frombuffer(page, np.uint8)).astype(np.bool_)

    def _set(self, number: int, page: bytes, added: int, writes: Writes) -> None:
        count = self._counts.get(number, 0) + added
        page = _full(PAGE) if count == PAGE else page
        self._pages[number] = page
        self._counts[number] = count
        self.total += added
        self.touched.add(number)
        writes.put(keys.large_key(self.kind, self.shard_id, number), page)

    def count(self, from_seq: int, to_seq: int) -> int:
        """Number of deleted sequences from ``from_seq`` to ``to_seq`` (inclusive)."""
        if not self.total or to_seq < from_seq:
            return 0
        total = 0
        counts: Iterable[tuple[int, int]] = self._counts.items()
        pages = range(from_seq // PAGE, to_seq // PAGE + 1)
        if len(pages) < len(self._counts):
            counts = ((page, self._counts[page]) for page in pages if page in self._counts)
        for number, count in counts:
            start = number * PAGE
            low, high = max(from_seq - start, 0), min(to_seq - start + 1, PAGE)
            if low == 0 and high == PAGE:
                total += count
            elif low < high:
                total += int(np.count_nonzero(self._marks(number)[low:high]))
        return total

    def next_live(self, seq: int, stop_seq: int = INT64_MAX) -> int:
        """The first sequence from ``seq`` on that is not deleted.

        The search ends at ``stop_seq``; the answer is then at least that.
        """
        # Usually one of the next few is live, and unpacking a page takes much longer.
        for near in range(seq, min(seq + _NEAR, stop_seq)):
            if near not in self:
                return near
        while seq < stop_seq and (count := self._counts.get(seq // PAGE)) is not None:
            if count < PAGE:
                live = np.flatnonzero(~self._marks(seq // PAGE)[seq % PAGE :])
                if len(live):
                    return seq + int(live[0])
            seq += PAGE - seq % PAGE
        return seq

    def previous_live(self, seq: int) -> int:
        """The last sequence up to ``seq`` that is not deleted; trimmed sequences count as live."""
        while (count := self._counts.get(seq // PAGE)) is not None:
            if count < PAGE:
                live = np.flatnonzero(~self._marks(seq // PAGE)[: seq % PAGE + 1])
                if len(live):
                    return seq - seq % PAGE + int(live[-1])
            seq -= seq % PAGE + 1
        return seq

    def ranges(
        self, from_seq: int, to_seq: int, limit: int
    ) -> tuple[list[tuple[int, int]], int | None]:
        """Runs of deleted sequences in ``from_seq`` .. ``to_seq`` (inclusive), ``limit`` at most.

        Returns pairs (first, last), ascending, and the sequence to continue at (None at the end).
        A call checks a limited number of pages: a run may be cut there.
        """
        wanted = range(from_seq // PAGE, to_seq // PAGE + 1)
        numbers = nsmallest(_PAGES_MAX + 1, (page for page in self._pages if page in wanted))
        found: list[tuple[int, int]] = []
        for number in numbers[:_PAGES_MAX]:
            start = number * PAGE
            marks = self._marks(number)
            marks[: max(from_seq - start, 0)] = False
            marks[max(to_seq + 1 - start, 0) :] = False
            edges = np.flatnonzero(np.diff(marks.astype(np.int8), prepend=0, append=0)) + start
            for first, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
                if found and found[-1][1] == first - 1:
                    found[-1] = (found[-1][0], end - 1)
                elif len(found) == limit:
                    return found, first
                else:
                    found.append((first, end - 1))
        return found, numbers[-1] * PAGE if len(numbers) > _PAGES_MAX else None

    def live_mask(self, base_seq: int, count: int) -> Mask | None:
        """A mask of the live ones of ``count`` sequences from ``base_seq`` on; None: all are."""
        if not self.total:
            return None
        mask: Mask | None = None
        for number in range(base_seq // PAGE, (base_seq + count - 1) // PAGE + 1):
            if number not in self._pages:
                continue
            if mask is None:
                mask = np.ones(count, np.bool_)
            start = number * PAGE
            low, high = max(start, base_seq), min(start + PAGE, base_seq + count)
            marks = self._marks(number)[low - start : high - start]
            mask[low - base_seq : high - base_seq] = ~marks
        return mask

    def are_live(self, seqs: I64Array) -> Mask:
        """A mask of the ``seqs`` that are live. They may be far apart."""
        live = np.ones(len(seqs), np.bool_)
        if not self.total:
            return live
        for number, at in by_page(seqs):
            page = self._pages.get(number)
            if page is None:
                continue
            if len(at) <= _NEAR:
                for one in at.tolist():
                    live[one] = int(seqs[one]) not in self
            else:
                live[at] = ~self._marks(number)[seqs[at] % PAGE]
        return live

    def have_page(self, seqs: I64Array) -> Mask:
        """Which of ``seqs`` lie in a page with a row: any mark that they ever got is known."""
        return np.isin(seqs // PAGE, np.fromiter(self._pages, np.int64, len(self._pages)))

    def trim(self, first_seq: int, writes: Writes) -> None:
        """Forget the sequences below the new first sequence."""
        for number in [number for number in self._pages if number * PAGE < first_seq]:
            # A page that the first sequence divides is not written: `load` trims it again.
            if (number + 1) * PAGE <= first_seq:
                self.total -= self._counts.pop(number)
                del self._pages[number]
                self.touched.discard(number)
                writes.delete(keys.large_key(self.kind, self.shard_id, number))
                continue
            self._clear_below(number, first_seq - number * PAGE)

    def _clear_below(self, number: int, at: int) -> None:
        # Each ack in order runs this, so it works on bytes: arrays would take ten times as long.
        page = self._pages[number]
        whole, bits = divmod(at, 8)
        kept = bytes(whole) + bytes((page[whole] & 0xFF >> bits,)) + page[whole + 1 :]
        count = int.from_bytes(kept, "big").bit_count()
        self.total += count - self._counts[number]
        self._pages[number] = kept
        self._counts[number] = count
        self.touched.add(number)

    def clear(self, writes: Writes) -> None:
        """Forget everything."""
        self._pages, self._counts, self.total = {}, {}, 0
        self.touched.clear()
        prefix = keys.shard_key(self.kind, self.shard_id)
        writes.delete_range(prefix, keys.prefix_end(prefix))

    def load(self, rows: Iterable[tuple[bytes, bytes]], first_seq: int) -> None:
        """Load the pages; marks below ``first_seq`` were trimmed without a write."""
        for key, row in rows:
            self._take_up(keys.last_number(key, 8), bytes(row))
        self.trim(first_seq, Writes())

    def _take_up(self, number: int, page: bytes) -> None:
        self._pages[number] = _full(PAGE) if page == _full(PAGE) else page
        self._counts[number] = int(np.bitwise_count(np.frombuffer(page, np.uint8)).sum())
        # After a start, the compactor checks everything once: what it had left to do is not stored.
        self.touched.add(number)
        self.total += self._counts[number]

    def pages(self) -> list[tuple[int, bytes]]:
        """Numbers and bitmaps of all pages, ascending."""
        return sorted(self._pages.items())

    def restore(self, pages: list[tuple[int, bytes]], writes: Writes) -> None:
        """Add pages of another set; none of them is here yet."""
        for number, page in pages:
            self._take_up(number, page)
            writes.put(keys.large_key(self.kind, self.shard_id, number), page)
