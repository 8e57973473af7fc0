"""Deleted sequences inside a stream, as bitmaps of fixed ranges of sequences.

The ranges are pages of 4,096 sequences and not blocks, because how messages lie in blocks is each
replica's own affair.
"""

from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from contrail_storage.core import key_layout as keys
from contrail_storage.core.results import Writes

PAGE: Final = 4_096


class DeletedSet:
    """Sequences deleted between the first and the last kept one."""

    def __init__(self, shard: int) -> None:
        self.shard = shard
        self._pages: dict[int, NDArray[np.bool_]] = {}
        self._counts: dict[int, int] = {}
        self.total = 0

    def __contains__(self, seq: int) -> bool:
        page = self._pages.get(seq // PAGE)
        return page is not None and bool(page[seq % PAGE])

    def add(self, seq: int, writes: Writes) -> None:
        """Mark ``seq``, which is not marked yet."""
        number = seq // PAGE
        page = self._pages.get(number)
        if page is None:
            page = self._pages[number] = np.zeros(PAGE, np.bool_)
            self._counts[number] = 0
        page[seq % PAGE] = True
        self._counts[number] += 1
        self.total += 1
        writes.put(keys.large_key(keys.DELETED, self.shard, number), np.packbits(page).tobytes())

    def count(self, from_seq: int, to_seq: int) -> int:
        """How many of the sequences ``from_seq`` to ``to_seq`` (inclusive) are deleted."""
        if not self.total or to_seq < from_seq:
            return 0
        total = 0
        for number, page in self._pages.items():
            start = number * PAGE
            low, high = max(from_seq - start, 0), min(to_seq - start + 1, PAGE)
            if low == 0 and high == PAGE:
                total += self._counts[number]
            elif low < high:
                total += int(np.count_nonzero(page[low:high]))
        return total

    def next_live(self, seq: int) -> int:
        """The first sequence from ``seq`` on that is not deleted."""
        while (page := self._pages.get(seq // PAGE)) is not None:
            live = np.flatnonzero(~page[seq % PAGE :])
            if len(live):
                return seq + int(live[0])
            seq += PAGE - seq % PAGE
        return seq

    def live_mask(self, base_seq: int, count: int) -> NDArray[np.bool_] | None:
        """Which of ``count`` sequences from ``base_seq`` on are live; None when all are."""
        if not self.total:
            return None
        mask: NDArray[np.bool_] | None = None
        for number in range(base_seq // PAGE, (base_seq + count - 1) // PAGE + 1):
            page = self._pages.get(number)
            if page is None:
                continue
            if mask is None:
                mask = np.ones(count, np.bool_)
            start = number * PAGE
            low, high = max(start, base_seq), min(start + PAGE, base_seq + count)
            mask[low - base_seq : high - base_seq] = ~page[low - start : high - start]
        return mask

    def trim(self, first_seq: int, writes: Writes) -> None:
        """Forget what lies below the new first sequence."""
        for number in [number for number in self._pages if number * PAGE < first_seq]:
            if (number + 1) * PAGE <= first_seq:
                self.total -= self._counts.pop(number)
                del self._pages[number]
                writes.delete(keys.large_key(keys.DELETED, self.shard, number))
                continue
            page = self._pages[number]
            page[: first_seq - number * PAGE] = False
            left = int(np.count_nonzero(page))
            self.total -= self._counts[number] - left
            self._counts[number] = left

    def clear(self, writes: Writes) -> None:
        """Forget everything."""
        self._pages, self._counts, self.total = {}, {}, 0
        prefix = keys.shard_key(keys.DELETED, self.shard)
        writes.delete_range(prefix, keys.prefix_end(prefix))

    def load(self, rows: Iterable[tuple[bytes, bytes]], first_seq: int) -> None:
        """Take up the pages; marks below ``first_seq`` were trimmed without a write."""
        for key, row in rows:
            number = keys.last_number(key, 8)
            page = np.unpackbits(np.frombuffer(row, np.uint8)).astype(np.bool_)
            self._pages[number] = page
            self._counts[number] = int(np.count_nonzero(page))
            self.total += self._counts[number]
        self.trim(first_seq, Writes())
