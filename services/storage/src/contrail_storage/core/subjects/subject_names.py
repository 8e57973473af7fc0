"""Names of subjects by number. The number of slots follows the live subjects.

New numbers get consecutive slots. Old numbers that outlived their neighbours are kept in a list, so
that one old subject does not keep slots for all subjects that were removed after it.

Numbers are u32 and wrap around (``core.subjects.subject_table``). Internally they are ranks: the
distance of a number from ``origin``, where the run of new numbers ends. So every new number has a
higher rank than all numbers that were live when the run began, wherever the run lies.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, overload

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from contrail_common.texts import I64Array, Texts, U32Array
from contrail_storage.core.subjects import packed_names
from contrail_storage.core.subjects.packed_names import PackedNames

_NONE_OLD: Final = np.zeros(0, np.uint32)
_MASK: Final = 0xFFFF_FFFF
RUN: Final = 1_024
"""Later runs of numbers begin and end at multiples of this, so that pages lie in one run."""
END: Final = (_MASK // RUN) * RUN
"""No run has this number or a higher one."""


class SubjectNames(Sequence[str | None]):
    """Names from the number ``base`` on; None stands for a number without a slot.

    ``texts`` are the names in order of their slots. Slots never change; names are only appended.
    So another thread that holds this object may keep using it.
    """

    def __init__(
        self,
        young: int,
        old: U32Array = _NONE_OLD,
        texts: PackedNames | None = None,
        origin: int = 0,
    ) -> None:
        """``old`` are the ranks below ``young`` with slots, ascending; all later ones have one."""
        self.texts = PackedNames() if texts is None else texts
        self.origin = origin
        self._old = old
        self._old_numbers = old.data
        self._old_count = len(old)
        self._young = young
        self._shift = young - len(old)
        self.base = ((int(old[0]) if len(old) else young) + origin) & _MASK

    @classmethod
    def of_live(
        cls, numbers: I64Array, names: Iterable[pa.Array], next_id: int, origin: int = 0
    ) -> "SubjectNames":
        """Names of the live ``numbers``, given in pieces; ``next_id`` is a new one's.

        The numbers ascend by rank. From the first number on after which three of four are live,
        every number has a slot, live or not.
        """
        count = len(numbers)
        sids, next_id = (numbers - origin) & _MASK, _rank(next_id, origin)
        # At most a quarter of the slots are dead, so that the arrays stay small and need no search.
        dense = (count - np.arange(count)) * 4 >= (next_id - sids) * 3
        old = int(dense.argmax()) if dense.any() else count
        young = int(sids[old]) if old < count else next_id
        below = sids[:old].astype(np.uint32)
        # The slot of each number, and the number of slots.
        slots = np.append(np.arange(old), sids[old:] - young + old)
        slots = np.append(slots, next_id - young + old)
        return cls(young, below, PackedNames.of(_spread(names, slots)), origin)

    @classmethod
    def of_rows(
        cls, parts: list[tuple[U32Array, Texts]], next_id: int, origin: int
    ) -> "SubjectNames":
        """The live numbers and their names in ``parts``, in order of numbers, as rows have them.

        ``next_id`` was written when the run began, or when its newest subject died.
        """
        sids = np.concatenate([np.zeros(0, np.int64), *[part for part, _ in parts]])
        young = sids[(next_id <= sids) & (sids < origin)] if origin else sids
        next_id = max(next_id, int(young[-1]) + 1) if len(young) else next_id
        # By rank: the numbers from the origin on come first.
        high, low = list[pa.Array](), list[pa.Array]()
        for part, texts in parts:
            cut = int(part.searchsorted(origin))
            high.append(packed_names.text_array(texts, cut, texts.count))
            low.append(packed_names.text_array(texts, 0, cut))
        sids = sids[rank_order(sids, origin)]
        return cls.of_live(sids, filter(len, high + low), next_id, origin)

    def ranks(self, slots: I64Array) -> U32Array:
        """The ranks of the numbers at ``slots``."""
        return ((self.numbers(slots) - self.origin) & _MASK).astype(np.uint32)

    def with_ranks(self, ranks: U32Array, row: int, texts: PackedNames) -> "SubjectNames":
        """The numbers with ``ranks``, which ascend, and their names ``texts``.

        From position ``row`` on, each rank is one above the one before it. New numbers go on from
        ``next_id``.
        """
        old, young = len(ranks), self._next_rank
        if old and int(ranks[-1]) + 1 == young:
            old, young = row, int(ranks[row])
        return SubjectNames(young, ranks[:old], texts, self.origin)

    @property
    def left(self) -> int:
        """Count of numbers of this run that new subjects can still get.

        Below zero if the next number of a restored archive is above the last run.
        """
        return (_MASK + 1 if self.origin else END) - self._shift - self.texts.size

    @property
    def next_id(self) -> int:
        """The number after the last one with a slot; the origin itself at the end of a run."""
        return (self._next_rank + self.origin) & _MASK

    @property
    def _next_rank(self) -> int:
        return self._shift + self.texts.size

    def emptied(self) -> "SubjectNames":
        """Return an object without names that has the same next number."""
        return SubjectNames(self._next_rank, origin=self.origin)

    @property
    def all_in_a_row(self) -> bool:
        """Whether ``texts`` are the names from ``base`` on, without a gap."""
        return not len(self._old)

    def append(self, name: str) -> int:
        """Give the number ``next_id`` to ``name``, and return it."""
        sid = (self._shift + self.texts.size + self.origin) & _MASK
        self.texts.append(name)
        return sid

    def extended(self, sids: I64Array, names: list[str]) -> "SubjectNames":
        """Return these names and further live ones, with higher numbers.

        The packed names move to the result. Only in the first run of numbers, where ranks and
        numbers are the same.
        """
        end = int(sids[-1]) + 1
        if len(sids) * 4 >= (end - self.next_id) * 3:
            behind = np.full(end - self.next_id, None, object)
            behind[sids - self.next_id] = names
            young, old, added = self._young, self._old, behind.tolist()
        else:
            row = np.arange(self._young, self.next_id, dtype=np.uint32)
            young, added = end, names
            old = np.concatenate((self._old, row, sids)).astype(np.uint32)
        for name in added:
            self.texts.append(name)
        return SubjectNames(young, old, self.texts)

    def slots(self, sids: I64Array | U32Array) -> I64Array:
        """The slots of numbers: below zero, or after the last slot, for a number without one."""
        ranks = sids.astype(np.int64)
        if self.origin:
            ranks = (ranks - self.origin) & _MASK
        at = ranks - self._shift
        if len(self._old):
            low = at < len(self._old)
            if low.any():
                wanted = ranks[low]
                found = self._old.searchsorted(wanted.astype(np.uint32))
                known = self._old.take(found, mode="clip") == wanted
                at[low] = np.where(known, found, -1)
        return at

    def slots_of_live(self, sids: I64Array) -> I64Array:
        """The slots of the numbers from which :meth:`of_live` has made this, without a search."""
        old = self._old_count
        return np.concatenate((np.arange(old), self.slots(sids[old:])))

    def slot(self, sid: int) -> int:
        """The slot of a number, as :meth:`slots`."""
        rank = (sid - self.origin) & _MASK if self.origin else sid
        at = rank - self._shift
        old = self._old_count
        if at >= old or not old:
            return at
        found = bisect_left(self._old_numbers, rank)
        return found if found < old and self._old_numbers[found] == rank else -1

    def array(self, low: int, high: int) -> pa.Array:
        """The names of the slots from ``low`` up to ``high``: :meth:`PackedNames.array`."""
        return self.texts.array(low, high)

    def slot_from(self, sid: int) -> int:
        """Number of slots whose subject numbers are below ``sid``, by rank."""
        return self._slot_from_rank((sid - self.origin) & _MASK)

    def slot_up_to(self, sid: int) -> int:
        """Number of slots whose subject numbers are at most ``sid``, by rank."""
        return self._slot_from_rank(((sid - self.origin) & _MASK) + 1)

    def _slot_from_rank(self, rank: int) -> int:
        if rank < self._young:
            return bisect_left(self._old_numbers, rank)
        return min(rank - self._shift, self.texts.size)

    def numbers(self, slots: I64Array) -> I64Array:
        numbers: I64Array = slots + self._shift
        if len(self._old):
            low = slots < len(self._old)
            numbers[low] = self._old[slots[low]]
        return (numbers + self.origin) & _MASK if self.origin else numbers

    def number(self, slot: int) -> int:
        rank = self._old_numbers[slot] if slot < len(self._old) else slot + self._shift
        return (rank + self.origin) & _MASK if self.origin else rank

    @overload
    def __getitem__(self, at: int) -> str | None: ...

    @overload
    def __getitem__(self, at: slice) -> list[str | None]: ...

    def __getitem__(self, at: int | slice) -> str | list[str | None] | None:
        if isinstance(at, slice):
            return [self[one] for one in range(*at.indices(len(self)))]
        if not 0 <= at < len(self):
            raise IndexError(at)
        slot = self.slot((self.base + at) & _MASK)
        return self.texts[slot] if slot >= 0 else None

    def __len__(self) -> int:
        return self._next_rank - ((self.base - self.origin) & _MASK)


def _rank(sid: int, origin: int) -> int:
    """The rank of the next number: after all others if it is the origin."""
    return sid if not origin else (sid - origin - 1 & _MASK) + 1


def _spread(pieces: Iterable[pa.Array], slots: I64Array) -> Iterator[pa.Array]:
    """Yield ``pieces`` with an empty text for each slot between ``slots``, which end behind all."""
    low = 0
    for piece in pieces:
        high = low + len(piece)
        size = int(slots[high] - slots[low])
        if size == len(piece):
            yield piece
        else:
            positions = np.full(size, -1)
            positions[slots[low:high] - slots[low]] = np.arange(len(piece))
            yield packed_names.take(piece, positions)
        low = high


def rank_order(sids: I64Array, origin: int) -> NDArray[np.intp]:
    """The order in which numbers ascend by rank."""
    return np.argsort((sids - origin) & _MASK)
