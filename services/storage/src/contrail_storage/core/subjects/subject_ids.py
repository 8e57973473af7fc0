"""Numbers of subjects by name, without an object for each number.

A number as the value of a dict takes 32 bytes. Here the value is the number of a group of eight,
one object for all eight; the list of names shows which of them it is.
"""

from collections.abc import Iterator, Mapping
from typing import Final, Protocol

from contrail_storage.core.subjects.subject_names import SubjectNames

_GROUP: Final = 8


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
        near.reverse()
        return low + len(near) - 1 - near.index(name)

    def __contains__(self, name: object) -> bool:
        return name in self._groups

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, name: str, sid: int) -> None:
        """``sid``, above all others, is the number of ``name`` from now on."""
        group = sid // _GROUP
        if group != self._newest:
            self._newest = group  # one object, which all eight share
        self._groups[name] = self._newest

    def remove(self, name: str) -> None:
        """The subject has no messages any more."""
        del self._groups[name]

    def clear(self) -> None:
        """No subject has messages any more."""
        self._groups = {}
