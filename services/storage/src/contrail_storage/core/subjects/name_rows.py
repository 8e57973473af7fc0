"""The rows with the names of subjects: one for the new subjects of a command, packed into pages.

A row has the names of consecutive numbers, from the one in its key on. They are separated by NUL,
because no subject has control characters; a number without a name has an empty text. Earlier
versions wrote a row for each name, which is a row of the same form.

When a page of the table is folded, one row with its live names replaces all its rows. Until then
the rows also have the names of subjects that died. The rows of counts show which these are.
"""

from collections.abc import Collection, Iterable, Iterator
from itertools import compress, islice
from typing import Final, NamedTuple

import numpy as np

from contrail_common.texts import I64Array, Texts, U32Array
from contrail_storage.core import key_layout as keys
from contrail_storage.core.results import Writes
from contrail_storage.core.subjects.packed_names import take
from contrail_storage.core.subjects.subject_names import SubjectNames

NEXT_ID: Final = 0xFFFF_FFFF
"""The number in the key of the row that keeps the next number over a restart.

The row has the next number, and in later runs also the end of its run: u32 each.
"""
_LOADED: Final = 16_384
"""Names that are loaded together."""
_SEPARATOR: Final = "\0"
_SEPARATOR_BYTE: Final = b"\0"

Row = tuple[bytes, bytes]


class Part(NamedTuple):
    """Names as they were loaded, in order of their numbers."""

    sids: U32Array
    texts: Texts
    names: list[str]
    """The same as ``texts``."""


class NameRows:
    """Which names are in rows, and what is to be written again."""

    def __init__(self, shard_id: int, page: int) -> None:
        """``page`` is the count of numbers of one page, as of the rows of counts."""
        self.shard_id = shard_id
        self._page = page
        # Pages whose rows do not have exactly the live names in one row, and whether they have
        # more rows than that one.
        self._changed: dict[int, bool] = {}
        self.next_id = self.origin = 0
        """From the row of the next number, after :meth:`load`."""

    @property
    def changed(self) -> Collection[int]:
        """Pages whose names are to be packed: they have several rows, or names of the dead."""
        return self._changed.keys()

    def add(self, sid: int, names: list[str], writes: Writes) -> None:
        """Write the names of new subjects, which are numbered from ``sid`` on."""
        while names:
            page, within = divmod(sid, self._page)
            some, names = names[: self._page - within], names[self._page - within :]
            writes.put(self._key(sid), _SEPARATOR.join(some).encode())
            self._changed[page] = within > 0 or self._changed.get(page, False)
            sid += len(some)

    def note_dead(self, sid: int) -> None:
        """Note that a name is to be removed."""
        self._changed.setdefault(sid // self._page, False)

    def note_page(self, page: int) -> None:
        """Note that the names of a page are to be packed."""
        self._changed.setdefault(page, False)

    def clear(self) -> None:
        """Note that there are no rows."""
        self._changed.clear()

    def drop_run(self, start: int, end: int, writes: Writes) -> None:
        """Remove the rows of numbers that are given again: all of them had dead subjects."""
        writes.delete_range(self._key(start), self._key(end))

    def pack(self, page: int, numbered: SubjectNames, live: I64Array, writes: Writes) -> int:
        """Write the names of a page as one row, if they have changed; return the bytes.

        ``live`` are the slots of its live subjects.
        """
        several = self._changed.pop(page, None)
        if several is None:
            return 0
        first = page * self._page
        if several:
            writes.delete_range(self._key(first + 1), self._key(first + self._page))
        if not len(live):
            writes.delete(self._key(first))
            return 0
        names = numbered.array(int(live[0]), int(live[-1]) + 1)
        if len(live) < len(names):
            names = take(names, live - live[0])
        _, bounds, heap = names.buffers()
        offsets = np.frombuffer(bounds, np.uint32)[names.offset : names.offset + len(names) + 1]
        places = numbered.numbers(live) - first
        lengths = np.zeros(int(places[-1]) + 1, np.int64)
        lengths[places] = np.diff(offsets)
        texts = np.frombuffer(heap, np.uint8)[int(offsets[0]) : int(offsets[-1])]
        row = np.insert(texts, np.cumsum(lengths)[:-1], 0).tobytes()
        writes.put(self._key(first), row)
        return len(row)

    def _key(self, sid: int) -> bytes:
        return keys.small_key(keys.SUBJECT_NAME, self.shard_id, sid)

    # Loading -------------------------------------------------------------------------------------

    def load_few(self, rows: list[Row], dead: Collection[int]) -> list[tuple[int, str]]:
        """The numbers and names in a few rows, as :meth:`load`: without arrays."""
        found = list[tuple[int, str]]()
        for key, value in rows:
            first = keys.last_number(key, 4)
            if first == NEXT_ID:
                self._load_next_id(value)
                continue
            if first % self._page:
                self._changed[first // self._page] = True
            for sid, name in enumerate(value.decode().split(_SEPARATOR), first):
                if sid in dead:
                    self.note_dead(sid)
                elif name:
                    found.append((sid, name))
        return found

    def load(self, rows: Iterable[Row], dead: Collection[int]) -> Iterator[Part]:
        """Yield the names in ``rows``, in order of keys, without those of the ``dead``."""
        ordered, most = iter(rows), 16
        gone = np.fromiter(dead, np.uint32, len(dead))
        while some := list(islice(ordered, most)):
            if keys.last_number(some[-1][0], 4) == NEXT_ID:  # the last of all
                self._load_next_id(some.pop()[1])
            if not some:
                continue
            part = self._part(some, gone)
            yield part
            most = max(_LOADED * len(some) // max(len(part.names), 1), 1)
            most = min(most, _LOADED)

    def _load_next_id(self, value: bytes) -> None:
        self.next_id = int.from_bytes(value[:4], "little")
        self.origin = int.from_bytes(value[4:], "little")

    def _part(self, rows: list[Row], dead: U32Array) -> Part:
        values = [value for _, value in rows]
        heap = _SEPARATOR_BYTE.join(values)
        names = heap.decode().split(_SEPARATOR)
        ends = np.append(np.flatnonzero(np.frombuffer(heap, np.uint8) == 0), len(heap))
        lengths = np.diff(ends, prepend=-1) - 1
        # By row: its first number, and the count of names up to its end.
        firsts = np.frombuffer(b"".join([key[-4:] for key, _ in rows]), ">u4").astype(np.int64)
        row_ends = np.cumsum(np.fromiter(map(len, values), np.int64, len(values)) + 1) - 1
        done = ends.searchsorted(row_ends) + 1
        before = np.append(0, done[:-1])
        sids = (np.repeat(firsts - before, done - before) + np.arange(len(names))).astype(np.uint32)
        self._changed.update(
            dict.fromkeys((firsts[firsts % self._page > 0] // self._page).tolist(), True)
        )
        live = lengths > 0
        if len(dead):
            died = live & np.isin(sids, dead)
            for page in np.unique(sids[died] // self._page).tolist():
                self.note_page(page)
            live &= ~died
        if live.all():
            offsets = np.cumsum(np.append(0, lengths), dtype=np.uint32).tobytes()
            return Part(sids, Texts(offsets, heap.replace(_SEPARATOR_BYTE, b"")), names)
        kept = list(compress(names, live.tolist()))
        return Part(sids[live], Texts.of(kept), kept)
