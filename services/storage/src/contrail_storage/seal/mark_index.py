"""Slots by the marks of their subjects: 12 bytes for each in sorted columns, little at a time."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

U64Array = NDArray[np.uint64]
_RECENT_MAX: Final = 4_096
_NO_SLOT: Final = 0xFFFFFFFF


def prefix_of(mark: bytes) -> int:
    """The part of a mark that slots are found by; two marks hardly ever have the same."""
    return int.from_bytes(mark[:8], "little")


class MarkIndex:
    """Finds slots by the prefixes of their marks; several may have the same."""

    def __init__(
        self, prefixes: U64Array | None = None, slots: NDArray[np.uint32] | None = None
    ) -> None:
        """Slots with the ``prefixes`` of their marks; none when none are given."""
        self._recent: dict[int, list[int]] = {}
        self._dead = 0
        nothing = np.zeros(0, np.uint64), np.zeros(0, np.uint32)
        self._set(
            nothing[0] if prefixes is None else prefixes, nothing[1] if slots is None else slots
        )

    def _set(self, prefixes: U64Array, slots: NDArray[np.uint32]) -> None:
        order = np.argsort(prefixes, kind="stable")
        self._prefixes, self._slots = prefixes[order], slots[order]

    def add(self, prefix: int, slot: int) -> None:
        """Another slot."""
        self._recent.setdefault(prefix, []).append(slot)
        if len(self._recent) > _RECENT_MAX + len(self._slots) // 16:
            self._fold()

    def find(self, prefix: int) -> list[int]:
        """Slots under a prefix."""
        found = list(self._recent.get(prefix, ()))
        at = int(self._prefixes.searchsorted(np.uint64(prefix)))
        while at < len(self._prefixes) and int(self._prefixes[at]) == prefix:
            if int(self._slots[at]) != _NO_SLOT:
                found.append(int(self._slots[at]))
            at += 1
        return found

    def find_many(self, prefixes: Sequence[int]) -> set[int]:
        """Slots under any of the prefixes."""
        found = {slot for prefix in prefixes for slot in self._recent.get(prefix, ())}
        wanted = np.array(prefixes, np.uint64)
        low = np.searchsorted(self._prefixes, wanted, side="left")
        high = np.searchsorted(self._prefixes, wanted, side="right")
        found.update(self._slots[low[high > low]].tolist())
        for start, stop in zip(low[high > low + 1], high[high > low + 1], strict=True):
            found.update(self._slots[start:stop].tolist())
        found.discard(_NO_SLOT)
        return found

    def discard(self, prefix: int, slot: int) -> None:
        """The slot is no longer under the prefix."""
        recent = self._recent.get(prefix, [])
        if slot in recent:
            recent.remove(slot)
            if not recent:
                del self._recent[prefix]
            return
        at = int(self._prefixes.searchsorted(np.uint64(prefix)))
        while at < len(self._prefixes) and int(self._prefixes[at]) == prefix:
            if int(self._slots[at]) == slot:
                self._slots[at] = _NO_SLOT
                self._dead += 1
            at += 1
        if self._dead > _RECENT_MAX + len(self._slots) // 4:
            self._fold()

    def _fold(self) -> None:
        kept = self._slots != _NO_SLOT
        pairs = [(prefix, slot) for prefix, slots in self._recent.items() for slot in slots]
        prefixes = np.array([prefix for prefix, _ in pairs], np.uint64)
        slots = np.array([slot for _, slot in pairs], np.uint32)
        self._set(
            np.concatenate((self._prefixes[kept], prefixes)),
            np.concatenate((self._slots[kept], slots)),
        )
        self._recent, self._dead = {}, 0
