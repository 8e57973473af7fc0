"""The subject filters of a node: shared by all who use the same patterns, and ready when used."""

import asyncio
from typing import Final
from weakref import WeakKeyDictionary, WeakValueDictionary

from contrail_storage.core.subjects.filters import SubjectFilter
from contrail_storage.core.subjects.subject_table import SubjectTable

FILTERS_MAX: Final = 8
"""Filters of a table that are kept for the next read; one takes a byte for each subject."""


class FilterCache:
    """One filter for the same patterns over the same table, as long as somebody uses it.

    The filters of the last reads are kept, so that the next page of a read need not match all names
    again. Names are matched in a thread, for one filter at a time.
    """

    def __init__(self) -> None:
        # Weak, so that filters are dropped with their table.
        self._used: WeakKeyDictionary[
            SubjectTable, WeakValueDictionary[tuple[str, ...], SubjectFilter]
        ] = WeakKeyDictionary()
        self._kept: WeakKeyDictionary[SubjectTable, dict[tuple[str, ...], SubjectFilter]]
        self._kept = WeakKeyDictionary()
        # Held during one step in a thread: filters take turns, and none is matched twice.
        self._turn = asyncio.Lock()

    def share(self, table: SubjectTable, patterns: tuple[str, ...]) -> SubjectFilter:
        """The filter for ``patterns`` over ``table``, which the caller keeps and prepares."""
        used = self._used.get(table)
        found = None if used is None else used.get(patterns)
        if found is None:
            found = SubjectFilter(patterns)
            if found.is_wild:  # others have no answers to share
                self._used.setdefault(table, WeakValueDictionary())[patterns] = found
        return found

    async def get(self, table: SubjectTable, patterns: tuple[str, ...]) -> SubjectFilter:
        """The filter for ``patterns`` over ``table``, ready for use."""
        found = self.share(table, patterns)
        if found.is_wild:
            kept = self._kept.setdefault(table, {})
            kept.pop(patterns, None)
            kept[patterns] = found
            if len(kept) > FILTERS_MAX:
                del kept[next(iter(kept))]
            await self.prepare(table, found)
        return found

    async def prepare(self, table: SubjectTable, wanted: SubjectFilter) -> None:
        """Match the names that ``wanted`` has not seen; nothing is awaited if they are few.

        Call it right before each use, without a further wait in between.
        """
        while wanted.rest(table) is not None:
            async with self._turn:
                rest = wanted.rest(table)
                if rest is not None:
                    wanted.accept(rest, await asyncio.to_thread(rest.work))
