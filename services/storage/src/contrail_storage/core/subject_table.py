"""Subjects of a stream shard: name to number, and first, last and count of each.

``count`` is exact, and so is ``last``, but for the subjects in ``unsettled``: theirs is an upper
bound until somebody has looked for it (``core.last_search``). ``first`` is a lower bound. Which
message follows or precedes one that went away is in the blocks alone.

In rows the ``last`` of an unsettled subject stands below zero.

A subject gets a number (sid) with its first message and keeps it while it has messages; numbers
ascend and are never used again, so a number in an old block can't come to mean another subject.
Memory: the name, one dict slot, and 32 bytes; dead numbers at the low end are let go.

``names`` is only ever appended to or replaced by a new list, so a reader in another thread may go
on using the list (and ``base``) that it took: names of subjects that died meanwhile still stand.
"""

import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import numpy as np

from contrail_common.texts import I64Array, U32Array
from contrail_storage.core import key_layout as keys
from contrail_storage.core.results import Writes
from contrail_storage.core.subject_ids import SubjectIds

PAGE: Final = 1_024
PART: Final = 256
"""Subjects of one record of an archive: with the longest names they take 1 MiB."""
_DELTA_BYTES_MIN: Final = 1 << 20
_DELTA_ROWS_MAX: Final = 4_096
_PAGE_BYTES: Final = PAGE * 20
_NEXT_ID_ROW: Final = 0xFFFF_FFFF
"""Stands for a number in the key of the row that keeps the next number over a restart."""
_ONE: Final = struct.Struct("<IqqI")


class SubjectTable:
    """State per subject of one shard; ``base`` is the number that index 0 of the arrays means."""

    def __init__(self, shard: int) -> None:
        self.shard = shard
        self.base = 0
        self.names: list[str | None] = []
        self.ids = SubjectIds(self)
        self.first = np.zeros(PAGE, np.int64)
        self.last = np.zeros(PAGE, np.int64)
        self.counts = np.zeros(PAGE, np.uint32)
        self.unsettled: set[int] = set()
        """Numbers of the subjects whose ``last`` is but an upper bound."""
        self._dirty_pages: set[int] = set()
        self._delta_bytes = 0
        self._delta_rows = 0
        self._dead = 0

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def next_id(self) -> int:
        """The number that the next new subject gets."""
        return self.base + len(self.names)

    def name(self, sid: int) -> str:
        """Name of the subject numbered ``sid``, which must be live."""
        name = self.names[sid - self.base]
        assert name is not None, f"subject {sid} is gone"
        return name

    def last_seq(self, subject: str) -> int:
        """Sequence of the subject's last message, 0 when it has none."""
        sid = self.ids.get(subject)
        return 0 if sid is None else int(self.last[sid - self.base])

    def count(self, subject: str) -> int:
        """Number of the subject's messages."""
        sid = self.ids.get(subject)
        return 0 if sid is None else int(self.counts[sid - self.base])

    def live(self) -> Iterable[tuple[int, str]]:
        """(sid, name) of every subject that has messages."""
        # Asking for each number by its name would cost ten times as much.
        live = np.flatnonzero(self.counts[: len(self.names)]).tolist()
        return ((self.base + at, self.name(self.base + at)) for at in live)

    def number(self, subject: str, writes: Writes) -> int:
        """The subject's number, given now when it is new."""
        sid = self.ids.get(subject)
        if sid is None:
            sid = self.next_id
            self.ids.add(subject, sid)
            self.names.append(subject)
            self._grow()
            writes.put(keys.small_key(keys.SUBJECT_NAME, self.shard, sid), subject.encode())
        return sid

    def _grow(self) -> None:
        size = len(self.first)
        if len(self.names) > size:
            self.first = np.concatenate((self.first, np.zeros(size, np.int64)))
            self.last = np.concatenate((self.last, np.zeros(size, np.int64)))
            self.counts = np.concatenate((self.counts, np.zeros(size, np.uint32)))

    def add_one(self, sid: int, seq: int, index: int, writes: Writes) -> None:
        """Count one message of ``sid`` with sequence ``seq``."""
        at = sid - self.base
        if self.counts[at] == 0:
            self.first[at] = seq
        self.last[at] = seq
        self.counts[at] += 1
        if self.unsettled:
            self.unsettled.discard(sid)
        self._delta_of_one(at, index, writes)

    def add_run(self, sids: U32Array, first_seq: int, index: int, writes: Writes) -> None:
        """Count messages with consecutive sequences from ``first_seq`` on."""
        self.add_all(sids, np.arange(first_seq, first_seq + len(sids)), index, writes)

    def add_all(self, sids: U32Array, seqs: I64Array, index: int, writes: Writes) -> None:
        """Count messages with the sequences ``seqs``, which ascend."""
        at = sids.astype(np.int64) - self.base
        # Assignment with repeated indexes keeps the last value: backwards that is the first
        # sequence of a subject, forwards its last.
        fresh = self.counts[at] == 0
        self.first[at[fresh][::-1]] = seqs[fresh][::-1]
        self.last[at] = seqs
        np.add.at(self.counts, at, np.uint32(1))
        if self.unsettled:
            self.unsettled.difference_update(sids.tolist())
        self._delta(at[self.last[at] == seqs], index, writes)

    def remove(
        self,
        sids: U32Array,
        floor_seq: int,
        index: int,
        writes: Writes,
        last: Mapping[int, int] | None = None,
    ) -> None:
        """Take messages away, one per element; none that is live is below ``floor_seq``.

        ``last`` are the new last sequences, by number, of subjects that lose theirs and have more.
        """
        for sid, seq in (last or {}).items():
            self.last[sid - self.base] = seq
        touched, counts = np.unique(sids.astype(np.int64) - self.base, return_counts=True)
        self.counts[touched] -= counts.astype(np.uint32)
        self.first[touched] = np.maximum(self.first[touched], floor_seq)
        for at in touched[self.counts[touched] == 0]:
            self._forget(int(at), writes)
        self._delta(touched, index, writes)
        self._trim()

    def remove_oldest(
        self, sids: U32Array, first: I64Array, gone: U32Array, index: int, writes: Writes
    ) -> None:
        """Take the oldest messages of ``sids`` away: ``gone`` has one number for each message.

        ``first`` are the new lower bounds of the first sequences of ``sids``.
        """
        at = sids.astype(np.int64) - self.base
        touched, counts = np.unique(gone.astype(np.int64) - self.base, return_counts=True)
        moved = at[first > self.first[at]]
        self.first[at] = np.maximum(self.first[at], first)
        self.counts[touched] -= counts.astype(np.uint32)
        for dead in touched[self.counts[touched] == 0]:
            self._forget(int(dead), writes)
        changed = np.union1d(touched, moved)
        if len(changed):
            self._delta(changed, index, writes)
        self._trim()

    def take_out(
        self, sids: U32Array, seqs: I64Array, floor_seq: int, index: int, writes: Writes
    ) -> list[int]:
        """Take messages away wherever they lie: a number and a sequence for each.

        No live message is below ``floor_seq``. Answers the subjects that have lost their last
        message and have others; they are unsettled from here on.
        """
        at = sids.astype(np.int64) - self.base
        touched, counts = np.unique(at, return_counts=True)
        oldest, newest = at[self.first[at] == seqs], at[self.last[at] == seqs]
        self.counts[touched] -= counts.astype(np.uint32)
        self.first[oldest] += 1
        self.first[touched] = np.maximum(self.first[touched], floor_seq)
        for dead in touched[self.counts[touched] == 0]:
            self._forget(int(dead), writes)
        lost: list[int] = (newest[self.counts[newest] > 0] + self.base).tolist()
        self.unsettled.update(lost)
        self._delta(touched, index, writes)
        self._trim()
        return lost

    def take_out_one(
        self, sid: int, seq: int, floor_seq: int, index: int, writes: Writes
    ) -> list[int]:
        """Take one message away as :meth:`take_out` does; arrays of one cost several times more."""
        at = sid - self.base
        left = int(self.counts[at]) - 1
        first = int(self.first[at])
        self.counts[at] = left
        self.first[at] = max(first + (first == seq), floor_seq)
        lost: list[int] = []
        if not left:
            self._forget(at, writes)
        elif int(self.last[at]) == seq:
            lost.append(sid)
            self.unsettled.add(sid)
        self._delta_of_one(at, index, writes)
        self._trim()
        return lost

    def settle(
        self, sids: I64Array, last: I64Array, found: int, index: int, writes: Writes
    ) -> None:
        """Set ``last`` of unsettled subjects: of the first ``found`` exact, of others a bound."""
        self.unsettled.difference_update(sids[:found].tolist())
        at = sids - self.base
        self.last[at] = last
        self._delta(at, index, writes)

    def remove_one(self, sid: int, seq: int, previous_seq: int, index: int, writes: Writes) -> None:
        """Take the message ``seq`` away; ``previous_seq`` is the last older one of its subject."""
        at = sid - self.base
        self.counts[at] -= 1
        if self.counts[at] == 0:
            self._forget(at, writes)
        elif self.last[at] == seq:
            self.last[at] = previous_seq
        elif self.first[at] == seq:
            self.first[at] = seq + 1
        self._delta(np.array([at]), index, writes)
        self._trim()

    def clear(self, writes: Writes) -> None:
        """Forget every subject; numbers go on ascending."""
        for kind in (keys.SUBJECT_NAME, keys.SUBJECT_PAGE, keys.SUBJECT_DELTA):
            prefix = keys.shard_key(kind, self.shard)
            writes.delete_range(prefix, keys.prefix_end(prefix))
        self.base = self.next_id
        self.names = []
        self.ids.clear()
        self.unsettled.clear()
        self.first = np.zeros(PAGE, np.int64)
        self.last = np.zeros(PAGE, np.int64)
        self.counts = np.zeros(PAGE, np.uint32)
        self._dirty_pages.clear()
        self._delta_bytes = self._delta_rows = self._dead = 0
        # Keeps the next number above all earlier ones over a restart.
        writes.put(keys.small_key(keys.SUBJECT_NAME, self.shard, _NEXT_ID_ROW), self._base_row())

    def _base_row(self) -> bytes:
        return self.base.to_bytes(4, "little")

    def _forget(self, at: int, writes: Writes) -> None:
        name = self.names[at]
        assert name is not None
        self.ids.remove(name)
        self.unsettled.discard(self.base + at)
        self._dead += 1
        writes.delete(keys.small_key(keys.SUBJECT_NAME, self.shard, self.base + at))
        if at == len(self.names) - 1:
            writes.put(
                keys.small_key(keys.SUBJECT_NAME, self.shard, _NEXT_ID_ROW),
                self.next_id.to_bytes(4, "little"),
            )

    def _trim(self) -> None:
        # When half of the numbers are dead: let go of their names, and of the low end's arrays.
        if self._dead < PAGE or self._dead * 2 < len(self.names):
            return
        live = np.flatnonzero(self.counts[: len(self.names)])
        low = int(live[0]) if len(live) else len(self.names)
        low -= low % PAGE
        kept = self.counts[low:] > 0
        self.names = [
            name if alive else None
            for name, alive in zip(self.names[low:], kept.tolist(), strict=False)
        ]
        self.first, self.last = self.first[low:].copy(), self.last[low:].copy()
        self.counts = self.counts[low:].copy()
        self.base += low
        self._dead = 0
        if not len(self.first):
            self.first, self.last = np.zeros(PAGE, np.int64), np.zeros(PAGE, np.int64)
            self.counts = np.zeros(PAGE, np.uint32)

    # Persistence: a delta row with each entry, folded into pages when the deltas outgrow them. ----

    def _delta(self, touched: I64Array, index: int, writes: Writes) -> None:
        if len(touched) == 1:
            self._delta_of_one(int(touched[0]), index, writes)
            return
        sids = (touched + self.base).astype(np.uint32)
        row = b"".join(
            (
                sids.tobytes(),
                self.first[touched].tobytes(),
                self._stored_last(touched).tobytes(),
                self.counts[touched].tobytes(),
            )
        )
        self._dirty_pages.update((sids // PAGE).tolist())
        self._write_delta(row, index, writes)

    def _delta_of_one(self, at: int, index: int, writes: Writes) -> None:
        sid, last = self.base + at, int(self.last[at])
        last = -last if sid in self.unsettled else last
        row = _ONE.pack(sid, int(self.first[at]), last, int(self.counts[at]))
        self._dirty_pages.add(sid // PAGE)
        self._write_delta(row, index, writes)

    def _write_delta(self, row: bytes, index: int, writes: Writes) -> None:
        # Several commands of one entry write one row each: the row count tells them apart.
        self._delta_rows += 1
        key = keys.large_key(keys.SUBJECT_DELTA, self.shard, index) + self._delta_rows.to_bytes(
            4, "big"
        )
        writes.put(key, row)
        self._delta_bytes += len(row)
        if (
            self._delta_bytes > max(_DELTA_BYTES_MIN, len(self._dirty_pages) * _PAGE_BYTES)
            or self._delta_rows >= _DELTA_ROWS_MAX
        ):
            self._fold(writes)

    def _stored_last(self, at: I64Array) -> I64Array:
        last = self.last[at]
        if self.unsettled:
            for place, sid in enumerate((at + self.base).tolist()):
                if sid in self.unsettled:
                    last[place] = -last[place]
        return last

    def _fold(self, writes: Writes) -> None:
        prefix = keys.shard_key(keys.SUBJECT_DELTA, self.shard)
        writes.delete_range(prefix, keys.prefix_end(prefix))
        for page in self._dirty_pages:
            self._write_page(page, writes)
        self._dirty_pages.clear()
        self._delta_bytes = self._delta_rows = 0

    def _write_page(self, page: int, writes: Writes) -> None:
        start = page * PAGE - self.base
        low, high = max(start, 0), min(start + PAGE, len(self.names))
        key = keys.small_key(keys.SUBJECT_PAGE, self.shard, page)
        if low >= high or not self.counts[low:high].any():
            writes.delete(key)
        else:
            writes.put(key, self._row(np.arange(low, high)))

    def _row(self, at: I64Array) -> bytes:
        sids = (at + self.base).astype(np.uint32)
        columns = sids, self.first[at], self._stored_last(at), self.counts[at]
        return b"".join([column.tobytes() for column in columns])

    def recount(self, first: I64Array, last: I64Array, counts: U32Array, writes: Writes) -> None:
        """Take what was counted, by number from ``base`` on, in the place of what stands here."""
        size = len(self.names)
        for kind in (keys.SUBJECT_NAME, keys.SUBJECT_PAGE, keys.SUBJECT_DELTA):
            prefix = keys.shard_key(kind, self.shard)
            writes.delete_range(prefix, keys.prefix_end(prefix))
        self.first[:size], self.last[:size], self.counts[:size] = first, last, counts
        alive = (counts > 0).tolist()
        self.names = [
            name if lives else None for name, lives in zip(self.names, alive, strict=True)
        ]
        self.ids.clear()
        for at, name in enumerate(self.names):
            if name is not None:
                self.ids.add(name, self.base + at)
        self.unsettled.clear()
        self._dirty_pages.clear()
        self._delta_bytes = self._delta_rows = 0
        self._dead = size - len(self.ids)
        for name, sid in self.ids.items():
            writes.put(keys.small_key(keys.SUBJECT_NAME, self.shard, sid), name.encode())
        for page in {sid // PAGE for sid in self.ids.values()}:
            self._write_page(page, writes)
        key = keys.small_key(keys.SUBJECT_NAME, self.shard, _NEXT_ID_ROW)
        writes.put(key, self.next_id.to_bytes(4, "little"))

    # Archives ------------------------------------------------------------------------------------

    def parts(self) -> Iterator[tuple[bytes, list[str]]]:
        """All live subjects by number, some at a time: their rows (as a page's) and names."""
        live = np.flatnonzero(self.counts[: len(self.names)])
        for start in range(0, len(live), PART):
            at = live[start : start + PART]
            yield self._row(at), [self.name(self.base + one) for one in at.tolist()]

    def restore(self, row: bytes, names: list[str], writes: Writes) -> None:
        """Take up subjects of another table; their numbers are above all that stand here."""
        sids = np.frombuffer(row, np.uint32, len(names))
        if not self.names:
            self.base = int(sids[0]) - int(sids[0]) % PAGE
        self._extend(int(sids[-1]) + 1)
        for sid, name in zip(sids.tolist(), names, strict=True):
            self.names[sid - self.base] = name
            self.ids.add(name, sid)
            writes.put(keys.small_key(keys.SUBJECT_NAME, self.shard, sid), name.encode())
        self._load_row(row)
        for page in np.unique(sids // PAGE).tolist():
            self._write_page(page, writes)

    def restore_next_id(self, next_id: int, writes: Writes) -> None:
        """Number new subjects from ``next_id`` on, which is above all that stand here."""
        if not self.names:
            self.base = next_id
        self._extend(next_id)
        key = keys.small_key(keys.SUBJECT_NAME, self.shard, _NEXT_ID_ROW)
        writes.put(key, next_id.to_bytes(4, "little"))

    def _extend(self, next_id: int) -> None:
        self.names.extend([None] * (next_id - self.next_id))
        while len(self.first) < len(self.names):
            self._grow()

    # Loading -------------------------------------------------------------------------------------

    def load(
        self,
        names: Iterable[tuple[bytes, bytes]],
        pages: Iterable[tuple[bytes, bytes]],
        deltas: Iterable[tuple[bytes, bytes]],
    ) -> None:
        """Take up the state from its rows, each given as (key, value) in key order."""
        found: list[tuple[int, str]] = []
        next_id = 0
        for key, value in names:
            sid = keys.last_number(key, 4)
            if sid == _NEXT_ID_ROW:
                next_id = int.from_bytes(value, "little")
            else:
                found.append((sid, value.decode()))
        if found:
            next_id = max(next_id, found[-1][0] + 1)
        self.base = found[0][0] - found[0][0] % PAGE if found else next_id
        self.names = [None] * (next_id - self.base)
        for sid, name in found:
            self.names[sid - self.base] = name
            self.ids.add(name, sid)
        size = PAGE
        while size < len(self.names):
            size *= 2
        self.first = np.zeros(size, np.int64)
        self.last = np.zeros(size, np.int64)
        self.counts = np.zeros(size, np.uint32)
        for _, row in pages:
            self._load_row(row)
        for key, row in deltas:
            sids = self._load_row(row)
            self._dirty_pages.update(np.unique(sids // PAGE).tolist())
            self._delta_bytes += len(row)
            self._delta_rows = max(self._delta_rows, keys.last_number(key, 4))

    def _load_row(self, row: bytes) -> U32Array:
        count = len(row) // _ONE.size
        sids = np.frombuffer(row, np.uint32, count)
        first = np.frombuffer(row, np.int64, count, 4 * count)
        last = np.frombuffer(row, np.int64, count, 12 * count)
        counts = np.frombuffer(row, np.uint32, count, 20 * count)
        kept = (sids >= self.base) & (sids < self.next_id)
        at = sids[kept].astype(np.int64) - self.base
        if self.unsettled:
            self.unsettled.difference_update(sids[kept].tolist())
        self.unsettled.update(sids[kept & (last < 0)].tolist())
        last = np.abs(last)
        self.first[at], self.last[at], self.counts[at] = first[kept], last[kept], counts[kept]
        return sids
