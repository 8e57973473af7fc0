"""Pages of subjects in the order of their names.

The order is kept as runs: sorted slots of consecutive parts of the table. New subjects come behind,
and when they are many they become a run; small runs become larger ones. A page merges the runs from
the name after which it begins. So nothing is sorted again for a page, and a page costs by its size.
"""

import asyncio
import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from contrail_common.texts import U32Array
from contrail_storage.core.subjects.filters import SubjectFilter, packed_names
from contrail_storage.core.subjects.packed_names import PackedNames
from contrail_storage.core.subjects.subject_names import SubjectNames
from contrail_storage.core.subjects.subject_table import SubjectTable
from contrail_storage.reading.filter_cache import FilterCache

_RUNS: Final = (1 << 18, 1 << 15, 1 << 12, 1 << 9)
"""Slots of a run. Sorting the longest takes about 0.1 s in a thread."""
_BYTES_MAX: Final = 64 << 20
"""Kept for all tables together, or for the one that was paged last: four bytes for each subject."""
_FEW: Final = 4_096
"""So many names, or one of 1,024 in the table, are sorted for a page without using the order."""
_WINDOW: Final = 16_384
_T = TypeVar("_T", bound=np.generic)


class NameOrder:
    """Runs of the slots of one table, sorted by name."""

    def __init__(self, numbered: SubjectNames) -> None:
        self.numbered = numbered
        self._runs: dict[tuple[int, int], U32Array] = {}

    def missing(self, size: int) -> tuple[int, int] | None:
        """First and end slot of a run that is to be sorted; None if a table of ``size`` is."""
        return next((one for one in _parts(size) if one not in self._runs), None)

    def sort(self, part: tuple[int, int]) -> U32Array:
        """Sort a run. For any thread."""
        names = packed_names(self.numbered, *part)
        # Empty names are of slots without a name. They come first.
        missing = len(names) - np.count_nonzero(_values(pc.binary_length(names), np.int32))
        order = _values(pc.sort_indices(names), np.uint64)[missing:] + np.uint64(part[0])
        return order.astype(np.uint32)

    @property
    def size_bytes(self) -> int:
        """Memory of the runs."""
        return sum(run.nbytes for run in self._runs.values())

    def put(self, part: tuple[int, int], run: U32Array) -> None:
        """Add a sorted run."""
        self._runs[part] = run

    def runs(self, size: int) -> tuple[list[U32Array], int]:
        """Return the runs of a table of ``size``, and the slot from which on none is sorted."""
        parts = _parts(size)
        self._runs = {part: self._runs[part] for part in parts}
        return list(self._runs.values()), parts[-1][1] if parts else 0


def _values(numbers: pa.Array, kind: type[_T]) -> NDArray[_T]:
    # Not `to_numpy`: it imports pandas first, which takes a second if pandas is installed.
    return np.frombuffer(numbers.buffers()[1], kind)[numbers.offset :][: len(numbers)]


def _parts(size: int) -> list[tuple[int, int]]:
    """The runs of a table: the longest first, so that few of them change when it grows."""
    parts = []
    low = 0
    for length in _RUNS:
        while low + length <= size:
            parts.append((low, low + length))
            low += length
    return parts


class _View(NamedTuple):
    """What a page is made from, as of one moment. Any thread may use it.

    The table changes ``counts`` meanwhile: the page shows the one or the other.
    """

    texts: PackedNames
    counts: U32Array
    matches: NDArray[np.bool_] | None
    """By slot; None: all match."""
    runs: list[U32Array]
    fresh: U32Array
    """Slots behind the runs."""

    def page(self, after: str, prefix: str, limit: int) -> list[tuple[str, int]]:
        """(name, count) of the first subjects after ``after`` that begin with ``prefix``."""
        fresh = sorted(one for one in self._named(self.fresh) if one[0] > after)
        walks = (self._walk(run, after, prefix) for run in self.runs)
        return list(islice(heapq.merge(fresh, *walks), limit))

    def _walk(self, run: U32Array, after: str, prefix: str) -> Iterator[tuple[str, int]]:
        name, end = self._name, len(run)
        if prefix:
            end = bisect_right(run, prefix, key=lambda slot: name(slot)[: len(prefix)])
        find = bisect_right if after >= prefix else bisect_left
        at, width = find(run, max(after, prefix), key=name), 64
        while at < end:
            yield from self._named(run[at : min(at + width, end)])
            at += width
            width = min(2 * width, _WINDOW)

    def _name(self, slot: int) -> str:
        return self.texts.at(slot) or ""

    def _named(self, slots: U32Array) -> Iterable[tuple[str, int]]:
        counts = self.counts[slots]
        wanted = counts > 0
        if self.matches is not None:
            wanted &= self.matches[slots]
        # Not a generator: this is most of the time of a page.
        names = map(self.texts.at, slots[wanted].tolist())
        return zip(cast(Iterator[str], names), counts[wanted].tolist(), strict=True)


class NameOrders:
    """The orders of the tables that were paged last."""

    def __init__(self, filters: FilterCache) -> None:
        self._filters = filters
        # Weak, so that an order is dropped with its table. The last used is the last one.
        self._orders: WeakKeyDictionary[SubjectTable, NameOrder] = WeakKeyDictionary()
        self._turn = asyncio.Lock()  # held while a run is sorted

    async def page(
        self, table: SubjectTable, wanted: SubjectFilter, after: str, limit: int
    ) -> list[tuple[str, int]]:
        """(name, messages) of the first live subjects after ``after`` that match, in byte order."""
        await self._filters.prepare(table, wanted)
        if wanted.count_at_most(table) <= max(_FEW, table.size >> 10):
            slots = wanted.slots(table).astype(np.uint32)
            view = _View(table.numbered.texts, table.counts, None, [], slots)
            return view.page(after, "", limit)
        while (order := self._of(table)).missing(table.size) is not None:
            await self._sort(order, table)
            await self._filters.prepare(table, wanted)
        runs, end = order.runs(table.size)
        fresh = np.arange(end, table.size, dtype=np.uint32)
        matches = wanted.matches(table)
        view = _View(table.numbered.texts, table.counts, matches, runs, fresh)
        return await asyncio.to_thread(view.page, after, wanted.prefix, limit)

    @property
    def size_bytes(self) -> int:
        """Memory of all orders."""
        return sum(order.size_bytes for order in self._orders.values())

    def _of(self, table: SubjectTable) -> NameOrder:
        order = self._orders.pop(table, None)
        if order is None or order.numbered is not table.numbered:
            order = NameOrder(table.numbered)
        self._orders[table] = order
        while len(self._orders) > 1 and self.size_bytes > _BYTES_MAX:
            del self._orders[next(iter(self._orders))]
        return order

    async def _sort(self, order: NameOrder, table: SubjectTable) -> None:
        async with self._turn:
            part = order.missing(table.size)
            if part is not None:
                order.put(part, await asyncio.to_thread(order.sort, part))
