"""An index from the marks of subjects to their slots, in 12 bytes per slot.

The index is two sorted arrays and a small dictionary of recent changes, which is merged into the
arrays when it has grown.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

U64Array = NDArray[np.uint64]
_RECENT_MAX: Final = 4_096
_NO_SLOT: Final = 0xFFFFFFFF


def prefix_of(mark: bytes) -> int:
    """The first 8 bytes of a mark, as a number. Two marks rarely share them."""
    return int.from_bytes(mark[:8], "little")


class MarkIndex:
    """Finds slots by the prefix of their mark. Several slots may share a prefix."""

    def __init__(
        self, prefixes: U64Array | None = None, slots: NDArray[np.uint32] | None = None
    ) -> None:
        """Build the index of ``slots``, parallel to ``prefixes``; empty without arguments."""
        # Slots added since the last merge, by prefix. An insert into the arrays would copy them
        # all.
        self._recent: dict[int, list[int]] = {}
        # Slots of the arrays that were discarded and are marked with _NO_SLOT.
        self._dead = 0
        nothing = np.zeros(0, np.uint64), np.zeros(0, np.uint32)
        self._set(
            nothing[0] if prefixes is None else prefixes, nothing[1] if slots is None else slots
        )

    def _set(self, prefixes: U64Array, slots: NDArray[np.uint32]) -> None:
        order = np.argsort(prefixes, kind="stable")
        self._prefixes, self._slots = prefixes[order], slots[order]

    def add(self, prefix: int, slot: int) -> None:
        """Add a slot; it may share its prefix with others."""
        self._recent.setdefault(prefix, []).append(slot)
        # The bound grows with the arrays, so each slot is copied about 16 times however many there
        # are.
        if len(self._recent) > _RECENT_MAX + len(self._slots) // 16:
            self._fold()

    def find(self, prefix: int) -> list[int]:
        """Return the slots with a prefix. The caller must compare their whole marks."""
        found = list(self._recent.get(prefix, ()))
        at = int(self._prefixes.searchsorted(np.uint64(prefix)))
        while at < len(self._prefixes) and int(self._prefixes[at]) == prefix:
            if int(self._slots[at]) != _NO_SLOT:
                found.append(int(self._slots[at]))
            at += 1
        return found

    def find_many(self, prefixes: Sequence[int]) -> set[int]:
        """Return the slots with any of the prefixes, in one pass over the arrays."""
        found = {slot for prefix in prefixes for slot in self._recent.get(prefix, ())}
        wanted = np.array(prefixes, np.uint64)
        low = np.searchsorted(self._prefixes, wanted, side="left")
        high = np.searchsorted(self._prefixes, wanted, side="right")
        # Nearly every prefix has one slot at most: those are taken at once. The loop after it is
        # for the few that have more.
        found.update(self._slots[low[high > low]].tolist())
        for start, stop in zip(low[high > low + 1], high[high > low + 1], strict=True):
            found.update(self._slots[start:stop].tolist())
        found.discard(_NO_SLOT)
        return found

    def discard(self, prefix: int, slot: int) -> None:
        """Remove a slot from its prefix."""
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
