"""Numbers of subjects by name: sorted hashes, without an object for each subject.

An entry is a u64: the high half of the name's hash, and the number. Entries are sorted, in parts
of about 128 to 256. The first bits of a hash show its part, so adding a name moves the entries of
one part. Parts are divided in their order, one as soon as there are 128 more entries; when all
are divided, it begins again (linear hashing). So there is no step over all parts.

Half a hash is not unique. A name is found when the subject of that number has it.
"""

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from typing import Final, overload

import numpy as np
from numpy.typing import NDArray

from contrail_common.texts import I64Array, U32Array
from contrail_storage.core.subjects.subject_names import SubjectNames

_PART: Final = 128
"""Entries for each part; parts that are not divided yet have up to twice as many."""
_HASH: Final = 0xFFFF_FFFF_0000_0000
_NUMBER: Final = 0xFFFF_FFFF
_DIVIDED: Final = array("Q")
"""In the place of a part that was divided."""


class SubjectIds:
    """The numbers of the subjects that have messages."""

    def __init__(self, names: SubjectNames) -> None:
        self.names = names
        """The names by number. The table of subjects replaces it together with its own."""
        self._size = 0
        # By the first bits of the hash. Those before `_divided` are empty: their entries are in
        # `_halves`, by one more bit.
        self._parts = [array("Q")]
        self._halves: list[array[int]] = []
        self._divided = 0
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
        at = key >> self._shift
        part = self._parts[at] if at >= self._divided else self._halves[key >> self._shift - 1]
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
        insort(self._part_of(entry), entry)
        self._size += 1
        if self._size > _PART * (len(self._parts) + self._divided):
            self._divide()

    def remove(self, name: str, sid: int) -> None:
        """Remove a subject, which has no more messages."""
        entry = hash(name) & _HASH | sid
        part = self._part_of(entry)
        at = bisect_left(part, entry)
        assert part[at] == entry, f"subject {sid} has another name"
        del part[at]
        self._size -= 1

    def _part_of(self, entry: int) -> "array[int]":
        at = entry >> self._shift
        return self._parts[at] if at >= self._divided else self._halves[entry >> self._shift - 1]

    def clear(self) -> Sequence[object]:
        """Remove all subjects; return what takes their memory, to be freed in pieces."""
        freed = self._parts + self._halves
        self._parts, self._halves, self._divided = [array("Q")], [], 0
        self._shift, self._size = 64, 0
        return freed

    def fill(self, subjects: Iterable[tuple[Iterable[str], U32Array]]) -> None:
        """Replace all subjects by these, given as names and their numbers."""
        entries = np.concatenate(
            [np.zeros(0, np.uint64), *[_entries(names, sids) for names, sids in subjects]]
        )
        entries.sort()
        count = max(-(-len(entries) // _PART), 1)
        bits = count.bit_length() - 1
        divided = count - (1 << bits)
        # Where the parts begin, after the first, which begins at 0.
        halves = np.arange(2 * divided, dtype=np.uint64) << np.uint64(63 - bits)
        parts = np.arange(divided, 1 << bits, dtype=np.uint64) << np.uint64(64 - bits & 63)
        bounds = np.concatenate([halves, parts])[1:]
        cut = np.split(entries, entries.searchsorted(bounds))
        made = [array("Q", part.tobytes()) for part in cut]
        self._halves, self._parts = made[: 2 * divided], [_DIVIDED] * divided + made[2 * divided :]
        self._divided, self._shift, self._size = divided, 64 - bits, len(entries)

    def _divide(self) -> None:
        """Divide the next part by one more bit of the hash."""
        at = self._divided
        part = self._parts[at]
        cut = bisect_left(part, 2 * at + 1 << self._shift - 1)
        self._halves += part[:cut], part[cut:]
        self._parts[at] = _DIVIDED
        self._divided += 1
        if self._divided == len(self._parts):
            self._parts, self._halves, self._divided = self._halves, [], 0
            self._shift -= 1


def _entries(names: Iterable[str], sids: U32Array) -> NDArray[np.uint64]:
    hashes: I64Array = np.fromiter(map(hash, names), np.int64, len(sids))
    return hashes.view(np.uint64) & np.uint64(_HASH) | sids
