"""A new layout of a subject table, without its dead slots, made a piece at a time."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from contrail_common.texts import I64Array, U32Array
from contrail_storage.core.subjects.packed_names import CHUNK, Packer, take
from contrail_storage.core.subjects.subject_names import SubjectNames

_PIECE: Final = 16 * CHUNK
"""Slots that are looked at together."""

Columns = tuple[I64Array, I64Array, U32Array]
"""First and last sequences and counts, by slot."""


class Layout:
    """The slots of ``numbered`` to keep, their names and columns, as far as they were looked at.

    A subject that dies after its slot was looked at keeps a dead slot. So does a dead one in a
    chunk of which seven of eight are live: numbers in a row need no search.
    """

    def __init__(self, numbered: SubjectNames, size: int, capacity: int) -> None:
        """``numbered`` may grow to ``size`` slots, of which ``capacity`` are expected to stay."""
        self.numbered = numbered
        # By new slot; the arrays may be longer than there are slots.
        self._columns = empty_columns(capacity)
        self._ranks = np.zeros(capacity, np.uint32)
        self._kept = 0  # new slots
        self._row = 0  # the new slot from which on each rank is one above the one before it
        # By old slot: its new one plus one. 0: not looked at, or dead.
        self._places = np.zeros(size, np.uint32)
        self._looked = 0  # old slots
        self._names = Packer()

    def look(self, columns: Columns, size: int, slots: int) -> None:
        """Look at the first ``slots`` of ``size`` slots, or more; ``columns`` are those of all."""
        while self._looked < min(slots, size):
            low, high = self._looked, min(self._looked + _PIECE, size)
            kept = columns[2][low:high] > 0
            starts = np.arange(0, high - low, CHUNK)
            sizes = np.diff(starts, append=high - low)
            most = np.add.reduceat(kept, starts, dtype=np.int64) * 8 >= sizes * 7
            kept |= np.repeat(most, sizes)
            at = np.flatnonzero(kept)
            names = self.numbered.array(low, high)
            self._names.add(names if kept.all() else take(names, at))
            if len(at):
                self._keep(columns, at + low)
            self._looked = high

    def _keep(self, columns: Columns, at: I64Array) -> None:
        begin, end = self._kept, self._kept + len(at)
        if end > len(self._ranks):
            self._grow(2 * end)
        ranks = self.numbered.ranks(at)
        gaps = np.flatnonzero(np.diff(ranks) != 1)
        if len(gaps):
            self._row = begin + int(gaps[-1]) + 1
        elif begin and int(self._ranks[begin - 1]) + 1 != int(ranks[0]):
            self._row = begin
        self._ranks[begin:end] = ranks
        self._places[at] = np.arange(begin + 1, end + 1)
        for mine, column in _pairs(self._columns, columns):
            mine[begin:end] = column[at]
        self._kept = end

    def _grow(self, capacity: int) -> None:
        """Copy everything. Only if the table has grown to its double size since the beginning."""
        kept, columns, ranks = self._kept, self._columns, self._ranks
        self._columns, self._ranks = empty_columns(capacity), np.zeros(capacity, np.uint32)
        self._ranks[:kept] = ranks[:kept]
        for mine, column in _pairs(self._columns, columns):
            mine[:kept] = column[:kept]

    def follow_one(self, columns: Columns, at: int) -> None:
        """Take over what has changed in a slot."""
        place = int(self._places[at]) - 1
        if place >= 0:
            for mine, column in _pairs(self._columns, columns):
                mine[place] = column[at]

    def follow(self, columns: Columns, at: I64Array) -> None:
        """Take over what has changed in slots."""
        places = self._places[at]
        known = places > 0
        if known.any():
            places, at = places[known] - 1, at[known]
            for mine, column in _pairs(self._columns, columns):
                mine[places] = column[at]

    def finish(self, columns: Columns, size: int) -> tuple[SubjectNames, Columns]:
        """The names and columns by their new slots."""
        self.look(columns, size, size)
        ranks = self._ranks[: self._kept]
        return self.numbered.with_ranks(ranks, self._row, self._names.finish()), self._columns


def _pairs(ours: Columns, theirs: Columns) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    return [(ours[0], theirs[0]), (ours[1], theirs[1]), (ours[2], theirs[2])]


def empty_columns(capacity: int) -> Columns:
    """Columns of zeros. The system provides their memory where it is used."""
    return np.zeros(capacity, np.int64), np.zeros(capacity, np.int64), np.zeros(capacity, np.uint32)
