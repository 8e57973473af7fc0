"""Numbers of subjects by name: sorted hashes, without an object for each subject.

An entry is a u64: the high half of the name's hash, and the number. Entries are sorted, in parts
of at most 256. The first bits of a hash show its part, so adding a name moves the
entries of one part, and at times divides it.

Half a hash is not unique. A name is found when the subject of that number has it.
"""

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import Final, overload

import numpy as np
from numpy.typing import NDArray

from contrail_common.texts import I64Array, U32Array
from contrail_storage.core.subjects.subject_names import SubjectNames

_PART_MAX: Final = 256
_HASH: Final = 0xFFFF_FFFF_0000_0000
_NUMBER: Final = 0xFFFF_FFFF
_BITS_MAX: Final = 26
"""Parts are told apart by at most so many bits, whatever the hashes are."""


class SubjectIds:
    """The numbers of the subjects that have messages."""

    def __init__(self, names: SubjectNames) -> None:
        self.names = names
        """The names by number. The table of subjects replaces it together with its own."""
        self._size = 0
        # By the first bits of the hash. A part that needs fewer bits is in several places.
        self._parts = [array("Q")]
        self._shift = 64  # of an entry, for the bits that show its part

    @overload
    def get(self, name: str) -> int | None: ...

    @overload
    def get(self, name: str, default: int) -> int: ...

    def get(self, name: str, default: int | None = None) -> int | None:
        """The number of a subject; ``default`` for a subject that has no messages."""
        # The hash of Python: keyed, so that no client can choose names with equal hashes, and
        # cheap. It differs between processes, and is never stored.
        key = hash(name) & _HASH
        part = self._parts[key >> self._shift]
        at = bisect_left(part, key)
        while at < len(part):
            sid = part[at] - key
            if sid > _NUMBER:
                break
            names = self.names
            if names.texts.holds(names.slot(sid), name):
                return sid
            at += 1
        return default

    def __getitem__(self, name: str) -> int:
        sid = self.get(name)
        if sid is None:
            raise KeyError(name)
        return sid

    def __contains__(self, name: str) -> bool:
        return self.get(name) is not None

    def __len__(self) -> int:
        return self._size

    def add(self, name: str, sid: int) -> None:
        """Set the number of ``name``, which has none, to ``sid``."""
        entry = hash(name) & _HASH | sid
        at = entry >> self._shift
        part = self._parts[at]
        insort(part, entry)
        self._size += 1
        if len(part) > _PART_MAX:
            self._divide(at)

    def remove(self, name: str, sid: int) -> None:
        """Remove a subject, which has no more messages."""
        entry = hash(name) & _HASH | sid
        part = self._parts[entry >> self._shift]
        at = bisect_left(part, entry)
        assert part[at] == entry, f"subject {sid} has another name"
        del part[at]
        self._size -= 1

    def clear(self) -> None:
        """Remove all subjects."""
        self._parts, self._shift, self._size = [array("Q")], 64, 0

    def fill(self, subjects: Iterable[tuple[Iterable[str], U32Array]]) -> None:
        """Replace all subjects by these, given as names and their numbers."""
        entries = np.concatenate(
            [np.zeros(0, np.uint64), *[_entries(names, sids) for names, sids in subjects]]
        )
        entries.sort()
        bits = max(len(entries) * 4 // (_PART_MAX * 3), 0).bit_length()
        bounds = np.arange(1, 1 << bits, dtype=np.uint64) << np.uint64(64 - bits if bits else 0)
        parts = np.split(entries, entries.searchsorted(bounds))
        self._parts = [array("Q", part.tobytes()) for part in parts]
        self._shift, self._size = 64 - bits, len(entries)

    def _divide(self, at: int) -> None:
        """Divide the part at ``at`` by one more bit."""
        part, parts = self._parts[at], self._parts
        low, high = at, at + 1
        while low and parts[low - 1] is part:
            low -= 1
        while high < len(parts) and parts[high] is part:
            high += 1
        if high - low == 1:
            if 64 - self._shift == _BITS_MAX:
                return
            # One more bit for all: each part is in twice as many places.
            self._parts = parts = [each for each in parts for _ in range(2)]
            self._shift -= 1
            low, high = 2 * low, 2 * high
        middle = (low + high) // 2
        cut = bisect_left(part, middle << self._shift)
        parts[low:middle] = [part[:cut]] * (middle - low)
        parts[middle:high] = [part[cut:]] * (high - middle)


def _entries(names: Iterable[str], sids: U32Array) -> NDArray[np.uint64]:
    hashes: I64Array = np.fromiter(map(hash, names), np.int64, len(sids))
    return hashes.view(np.uint64) & np.uint64(_HASH) | sids
