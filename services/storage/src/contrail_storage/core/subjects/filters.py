"""Subject filters over a subject table: which subject numbers match, updated for new subjects."""

from typing import Final
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from contrail_common.subjects import is_wildcard, matches_any
from contrail_common.texts import I64Array, U32Array
from contrail_storage.core.subjects.subject_names import SubjectNames
from contrail_storage.core.subjects.subject_table import SubjectTable

FILTERS_MAX: Final = 8
"""Filters that are kept for a table; one takes a byte for each subject."""


class SubjectLookup:
    """The subject numbers that match, as of one moment. Any thread may use it.

    ``matches`` is by slot of ``numbered``. Numbers without a slot do not match.
    """

    __slots__ = ("matches", "numbered")

    def __init__(self, numbered: SubjectNames, matches: NDArray[np.bool_]) -> None:
        self.numbered = numbered
        self.matches = matches

    def select(self, sids: I64Array | U32Array) -> NDArray[np.bool_]:
        """A mask of the numbers that match; numbers without a slot do not."""
        if not len(self.matches):
            return np.zeros(len(sids), np.bool_)
        # Slots below zero become large numbers, after the last slot.
        at = self.numbered.slots(sids).view(np.uint64)
        found: NDArray[np.bool_] = self.matches.take(at, mode="clip")
        found &= at < len(self.matches)
        return found


class SubjectFilter:
    """The subjects of ``table`` that match any of ``patterns``; no patterns match everything.

    Each subject is matched once, when it is first seen; a scan then only looks its number up.
    """

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self.patterns = tuple(pattern for pattern in patterns if pattern != ">")
        if len(self.patterns) < len(patterns):
            self.patterns = ()
        self._numbered = SubjectNames(0)
        self._seen = 0
        self._rounds = 0
        self._mask = np.zeros(64, np.bool_)

    @property
    def matches_all(self) -> bool:
        """Whether every message passes."""
        return not self.patterns

    def _catch_up(self, table: SubjectTable) -> None:
        if self._numbered is not table.numbered:
            self._move(table)
        total = table.size
        if total > len(self._mask):
            grown = np.zeros(max(total, 2 * len(self._mask)), np.bool_)
            grown[: self._seen] = self._mask[: self._seen]
            self._mask = grown
        # Only subjects that are new since the last use.
        for at in range(self._seen, total):
            name = table.numbered.texts[at]
            self._mask[at] = name is not None and matches_any(self.patterns, name)
        self._seen = total

    def _move(self, table: SubjectTable) -> None:
        """Move the known answers to the slots that the numbers have now."""
        if self._rounds != table.rounds:  # numbers may be those of other subjects
            self._rounds, self._seen = table.rounds, 0
            self._numbered, self._mask = table.numbered, np.zeros(64, np.bool_)
            return
        before = SubjectLookup(self._numbered, self._mask[: self._seen])
        next_sid = self._numbered.number(self._seen)
        self._numbered = table.numbered
        self._seen = self._numbered.slot_from(next_sid)
        self._mask = before.select(self._numbered.numbers(np.arange(self._seen)))

    def lookup(self, table: SubjectTable) -> SubjectLookup:
        """A lookup for messages that are in blocks now. Other threads may use it."""
        self._catch_up(table)
        # Lookups may share the array: answers in it never change, and new ones come after them.
        return SubjectLookup(self._numbered, self._mask[: self._seen])

    def select(self, table: SubjectTable, sids: U32Array) -> NDArray[np.bool_]:
        """Which of the numbers match; numbers that the table no longer knows do not."""
        return self.lookup(table).select(sids)

    def subjects(self, table: SubjectTable) -> list[tuple[int, str]]:
        """(sid, name) of the live subjects that match."""
        if len(self.patterns) == 1 and not is_wildcard(self.patterns[0]):
            sid = table.ids.get(self.patterns[0])
            return [] if sid is None else [(sid, self.patterns[0])]
        self._catch_up(table)
        return (
            [(sid, name) for sid, name in table.live() if self._mask[table.numbered.slot(sid)]]
            if self.patterns
            else list(table.live())
        )

    def numbers(self, table: SubjectTable, from_sid: int = 0) -> I64Array:
        """Numbers of the live subjects that match, ascending from ``from_sid`` on.

        Uses the answers that are known instead of matching every name again.
        """
        if len(self.patterns) == 1 and not is_wildcard(self.patterns[0]):
            sid = table.ids.get(self.patterns[0], -1)
            return np.array([sid] if sid >= from_sid else [], np.int64)
        low = 0 if table.numbered.origin else table.numbered.slot_from(from_sid)
        total = table.size
        wanted = table.counts[low:total] > 0
        if self.patterns:
            self._catch_up(table)
            wanted &= self._mask[low:total]
        sids = table.numbered.numbers(np.flatnonzero(wanted) + low)
        # After the first run, slots do not ascend as numbers do.
        return np.sort(sids[sids >= from_sid]) if table.numbered.origin else sids


class FilterCache:
    """The filters of the last reads. The next page of a read needs no new match of all names."""

    def __init__(self) -> None:
        # Weak: the filters of a table are dropped with the table.
        self._of_table: WeakKeyDictionary[SubjectTable, dict[tuple[str, ...], SubjectFilter]]
        self._of_table = WeakKeyDictionary()

    def get(self, table: SubjectTable, patterns: tuple[str, ...]) -> SubjectFilter:
        """The filter for ``patterns`` over ``table``."""
        filters = self._of_table.setdefault(table, {})
        found = filters.pop(patterns, None) or SubjectFilter(patterns)
        filters[patterns] = found
        if len(filters) > FILTERS_MAX:
            del filters[next(iter(filters))]
        return found
