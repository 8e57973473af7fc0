"""A new layout of a subject table, without its dead slots, made a piece at a time."""

from typing import Final

import numpy as np

from contrail_common.texts import I64Array, U32Array
from contrail_storage.core.subjects.packed_names import CHUNK, Packer, take
from contrail_storage.core.subjects.subject_names import SubjectNames

_PIECE: Final = 16 * CHUNK
"""Slots that are looked at together."""


class Layout:
    """The slots of ``numbered`` to keep, and their names, as far as they were looked at.

    A subject that dies after its slot was looked at keeps a dead slot. So does a dead one in a
    chunk of which seven of eight are live: numbers in a row need no search.
    """

    def __init__(self, numbered: SubjectNames) -> None:
        self.numbered = numbered
        self._looked = 0  # slots
        self._kept: list[I64Array] = []
        self._ranks: list[U32Array] = []  # of the numbers at these slots
        self._names = Packer()

    def look(self, counts: U32Array, slots: int) -> None:
        """Look at the first ``slots`` slots or more; ``counts`` are those of all slots."""
        while self._looked < min(slots, len(counts)):
            low, high = self._looked, min(self._looked + _PIECE, len(counts))
            kept = counts[low:high] > 0
            starts = np.arange(0, high - low, CHUNK)
            sizes = np.diff(starts, append=high - low)
            most = np.add.reduceat(kept, starts, dtype=np.int64) * 8 >= sizes * 7
            kept |= np.repeat(most, sizes)
            at = np.flatnonzero(kept)
            names = self.numbered.array(low, high)
            self._names.add(names if kept.all() else take(names, at))
            self._kept.append(at + low)
            self._ranks.append(self.numbered.ranks(at + low))
            self._looked = high

    def finish(self, counts: U32Array) -> tuple[SubjectNames, list[I64Array]]:
        """The names by their new slots, and the old slots in order of the new ones, in pieces."""
        self.look(counts, len(counts))
        return self.numbered.with_ranks(self._ranks, self._names.finish()), self._kept
