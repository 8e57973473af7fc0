"""Names of subjects by number, and numbers by name. The number of slots follows the live subjects.

New numbers get consecutive slots. Old numbers that outlived their neighbours are kept in a list, so
that one old subject does not keep slots for all subjects that were removed after it.

Numbers are u32 and wrap around (``core.subjects.subject_table``). Internally they are ranks: the
distance of a number from ``origin``, where the run of new numbers ends. So every new number has a
higher rank than all numbers that were live when the run began, wherever the run lies.

The dictionary from names to numbers has no object for each number, which would take 32 bytes. Its
values are numbers of groups of eight, and the eight names of a group share one object. The list of
names shows which of the eight it is.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from contrail_common.texts import I64Array, U32Array

_NONE_OLD: Final = np.zeros(0, np.uint32)
_MASK: Final = 0xFFFF_FFFF
RUN: Final = 1_024
"""Later runs of numbers begin and end at multiples of this, so that pages lie in one run."""
END: Final = (_MASK // RUN) * RUN
"""No run has this number or a higher one."""
_GROUP: Final = 8


class SubjectNames(Sequence[str | None]):
    """Names from the number ``base`` on; None stands for a number without a slot.

    ``texts`` are the names in order of their slots. Slots never change; names are only appended.
    So another thread that holds this object may keep using it.
    """

    def __init__(
        self,
        young: int,
        old: U32Array = _NONE_OLD,
        texts: list[str | None] | None = None,
        origin: int = 0,
    ) -> None:
        """``old`` are the ranks below ``young`` with slots, ascending; all later ones have one."""
        self.texts: list[str | None] = [] if texts is None else texts
        self.origin = origin
        self._old = old
        self._old_numbers = old.data
        self._young = young
        self._shift = young - len(old)
        self.base = ((int(old[0]) if len(old) else young) + origin) & _MASK

    @classmethod
    def of_live(
        cls, numbers: I64Array, texts: Sequence[str | None], next_id: int, origin: int = 0
    ) -> "SubjectNames":
        """Names ``texts`` of the live ``numbers``; ``next_id`` is a new one's.

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
        if next_id - young == count - old:
            return cls(young, below, list(texts), origin)
        behind = np.full(next_id - young, None, object)
        behind[sids[old:] - young] = texts[old:]
        return cls(young, below, [*texts[:old], *behind.tolist()], origin)

    @property
    def left(self) -> int:
        """Count of numbers of this run that new subjects can still get.

        Below zero if the next number of a restored archive is above the last run.
        """
        return (_MASK + 1 if self.origin else END) - self._shift - len(self.texts)

    @property
    def next_id(self) -> int:
        """The number after the last one with a slot; the origin itself at the end of a run."""
        return (self._next_rank + self.origin) & _MASK

    @property
    def _next_rank(self) -> int:
        return self._shift + len(self.texts)

    def emptied(self) -> "SubjectNames":
        """Return an object without names that has the same next number."""
        return SubjectNames(self._next_rank, origin=self.origin)

    @property
    def all_in_a_row(self) -> bool:
        """Whether ``texts`` are the names from ``base`` on, without a gap."""
        return not len(self._old)

    def append(self, name: str) -> None:
        """Give the number ``next_id`` to ``name``."""
        self.texts.append(name)

    def extended(self, sids: I64Array, texts: list[str]) -> "SubjectNames":
        """Return these names and further live ones, with higher numbers.

        The list of names moves to the result. Only in the first run of numbers, where ranks and
        numbers are the same.
        """
        end = int(sids[-1]) + 1
        if len(sids) * 4 >= (end - self.next_id) * 3:
            behind = np.full(end - self.next_id, None, object)
            behind[sids - self.next_id] = texts
            self.texts += behind.tolist()
            return SubjectNames(self._young, self._old, self.texts)
        row = np.arange(self._young, self.next_id, dtype=np.uint32)
        self.texts += texts
        old = np.concatenate((self._old, row, sids)).astype(np.uint32)
        return SubjectNames(end, old, self.texts)

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

    def slot(self, sid: int) -> int:
        """The slot of a number, as :meth:`slots`."""
        rank = (sid - self.origin) & _MASK if self.origin else sid
        at = rank - self._shift
        old = len(self._old)
        if at >= old or not old:
            return at
        found = bisect_left(self._old_numbers, rank)
        return found if found < old and self._old_numbers[found] == rank else -1

    def slot_from(self, sid: int) -> int:
        """Number of slots whose subject numbers are below ``sid``, by rank."""
        return self._slot_from_rank((sid - self.origin) & _MASK)

    def slot_up_to(self, sid: int) -> int:
        """Number of slots whose subject numbers are at most ``sid``, by rank."""
        return self._slot_from_rank(((sid - self.origin) & _MASK) + 1)

    def _slot_from_rank(self, rank: int) -> int:
        if rank < self._young:
            return bisect_left(self._old_numbers, rank)
        return min(rank - self._shift, len(self.texts))

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


def rank_order(sids: I64Array, origin: int) -> NDArray[np.intp]:
    """The order in which numbers ascend by rank."""
    return np.argsort((sids - origin) & _MASK)


class Named(Protocol):
    """The owner of the names.

    A name may occur twice in a group, if its subject died and was created again: the later counts.
    """

    numbered: SubjectNames


class SubjectIds(Mapping[str, int]):
    """The numbers of the subjects that have messages."""

    def __init__(self, table: Named) -> None:
        self._table = table
        self._groups: dict[str, int] = {}
        self._newest = 0

    def __getitem__(self, name: str) -> int:
        slot = self.slot(name)
        if slot < 0:
            raise KeyError(name)
        return self._table.numbered.number(slot)

    def slot(self, name: str) -> int:
        """The slot of a subject's number; below zero for a subject that has no messages."""
        group = self._groups.get(name)
        if group is None:
            return -1
        names = self._table.numbered
        low = names.slot_from(group * _GROUP)
        near = names.texts[low : low + _GROUP]
        # The highest first: a name may occur twice in a group, and the later number counts.
        near.reverse()
        return low + len(near) - 1 - near.index(name)

    def __contains__(self, name: object) -> bool:
        return name in self._groups

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, name: str, sid: int) -> None:
        """Set the number of ``name`` to ``sid``, which is above all others."""
        group = sid // _GROUP
        if group != self._newest:
            self._newest = group  # one object, which all eight share
        self._groups[name] = self._newest

    def remove(self, name: str) -> None:
        """Remove a subject, which has no more messages."""
        del self._groups[name]

    def clear(self) -> None:
        """Remove all subjects."""
        self._groups = {}
