"""The duplicate window: the message ids stored recently, and the sequence of each.

Ids arrive hashed (128 bits, keyed per stream). The window keeps 96 bits of each and its sequence,
in the order in which the messages were stored, and finds them with an `IdIndex`.

An id expires exactly when its message was stored at least a window ago, in elapsed time: log time
without jumps. Sequences and times ascend together, so the check is one comparison with a sequence,
and memory is freed a segment of the index at a time. Expired ids may be held for producers (see
`core.producers`). As in JetStream, an id outlives its message (delete, purge,
ack) until the window ends.
"""

import struct
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import numpy as np

from contrail_common.texts import I64Array
from contrail_common.timeunits import INT64_MAX
from contrail_storage.core import key_layout as keys
from contrail_storage.core.id_index import ID_BYTES, IdHashes, IdIndex, ids_of
from contrail_storage.core.results import Step, Writes

_RUN_HEAD: Final = struct.Struct("<qI")
"""A row consists of runs: elapsed time, number of ids, then all ids, then all sequences (i64)."""
_IN_ORDER: Final = 1 << 31
"""Added to the number of a run whose sequences are consecutive, as most are.

Then come the first sequence (i64), the first 64 bits of each id, and its last 32 bits: half as many
bytes.
"""
_I64: Final = struct.Struct("<q")
_HELD_TOGETHER: Final = 1_024
"""Held ids that share a mark and a row, if their appends were smaller."""
_MARKS_TOGETHER: Final = 4_096
_IDS_TOGETHER: Final = 32_768
"""Runs and ids that are taken up together: each alone would take ten times as long."""


def _run(time_ns: int, hashes: IdHashes, seqs: I64Array) -> bytes:
    """A run of ids for a row."""
    count, first_seq = len(seqs), int(seqs[0])
    if int(seqs[-1]) - first_seq == count - 1:
        head = _RUN_HEAD.pack(time_ns, count | _IN_ORDER) + _I64.pack(first_seq)
        return b"".join((head, hashes.low.tobytes(), hashes.high.tobytes()))
    return b"".join((_RUN_HEAD.pack(time_ns, count), hashes.ids, seqs.tobytes()))


def _packed_run(time_ns: int, ids: bytes, seqs: bytes) -> bytes:
    """As :func:`_run`, of packed columns: a short way for one id."""
    if len(ids) == ID_BYTES:
        return b"".join((_RUN_HEAD.pack(time_ns, 1 | _IN_ORDER), seqs, ids[:8], ids[12:]))
    return _run(time_ns, IdHashes.of(ids), np.frombuffer(seqs, np.int64))


def _runs_of(row: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Elapsed time, ids and sequences (i64) of each run of a row; bits not kept are zero."""
    at = 0
    while at < len(row):
        time_ns, count = _RUN_HEAD.unpack_from(row, at)
        at += _RUN_HEAD.size
        if count == 1 | _IN_ORDER:
            yield (
                time_ns,
                row[at + 8 : at + 16] + bytes(4) + row[at + 16 : at + 20],
                row[at : at + 8],
            )
            at += 20
        elif count & _IN_ORDER:
            count -= _IN_ORDER
            [first_seq] = _I64.unpack_from(row, at)
            low = np.frombuffer(row, np.uint64, count, at + _I64.size)
            high = np.frombuffer(row, np.uint32, count, at + _I64.size + low.nbytes)
            at += _I64.size + low.nbytes + high.nbytes
            yield time_ns, ids_of(low, high), np.arange(first_seq, first_seq + count).tobytes()
        else:
            ids = row[at : at + ID_BYTES * count]
            at += len(ids) + _I64.size * count
            yield time_ns, ids, row[at - _I64.size * count : at]


class _Marks:
    """The marks of appends that follow each other, in columns: tuples would take 250 bytes each.

    Of each append: elapsed time (ascending), last sequence, and row (``entries``). Mark i has the
    ids from ``ends[i]`` to ``ends[i + 1]``, counted from the first. Those before ``start`` have
    expired.
    """

    __slots__ = ("ends", "entries", "last_seqs", "start", "times")

    def __init__(self) -> None:
        self.start = 0
        self.times = array("q")
        self.last_seqs = array("q")
        self.entries = array("q")
        self.ends = array("q", [0])

    def ids(self, first: int, stop: int) -> int:
        """Number of ids of some marks."""
        return self.ends[stop] - self.ends[first]


class _Held(NamedTuple):
    """Held ids: their number and last sequence, and their rows."""

    time_ns: int
    ids: int
    last_seq: int
    entry: int
    first_entry: int


class DedupeWindow:
    """Message ids of one stream shard within the duplicate window."""

    def __init__(self, shard_id: int) -> None:
        self.shard_id = shard_id
        self._index = IdIndex()  # may hold expired ids at its start
        self.marks: deque[_Marks] = deque()
        """Of the appends that have not expired, in order; empty: there is nothing to expire."""
        self.held: deque[_Held] = deque()
        """Those that have expired and are held for producers, in order; all before ``marks``."""
        self._live = 0  # ids that have not expired: the sum over `marks`
        self.held_ids = 0
        """The sum over ``held``."""
        self._floor_seq = 1  # ids of messages below this sequence have expired
        self._held_seq = 1  # ids of messages below this sequence are forgotten
        # The row of the newest entry, which a second append of the same entry extends.
        self._open_row = b""

    def __len__(self) -> int:
        """Ids in memory; expired ones count until their segment is dropped."""
        return len(self._index)

    def expire(
        self, now_ns: int, window_ns: int, writes: Writes, held_from: int = INT64_MAX
    ) -> None:
        """Expire the ids whose messages are at least ``window_ns`` old at ``now_ns``.

        Those of messages from the sequence ``held_from`` on are held, the others forgotten.
        """
        self._index.free()
        due_ns, held = now_ns - window_ns, self.held
        gone: list[_Held] = []
        while self.marks and (marks := self.marks[0]).times[marks.start] <= due_ns:
            first = marks.start
            self._expire_until(bisect_right(marks.times, due_ns, first))
            kept = first if held else bisect_left(marks.last_seqs, held_from, first, marks.start)
            if kept > first:
                last_seq, entry = marks.last_seqs[kept - 1], marks.entries[kept - 1]
                gone.append(
                    _Held(due_ns, marks.ids(first, kept), last_seq, entry, marks.entries[first])
                )
            if kept < marks.start:
                self._hold(marks, kept, writes)
        while held and held[0].last_seq < held_from:
            gone.append(self._release_first())
        if gone:
            self._forget(gone, writes)

    def forget_held(self, most: int, writes: Writes) -> int:
        """Hold at most ``most`` ids; return the first sequence whose message's id is known."""
        gone: list[_Held] = []
        while self.held_ids > most:
            gone.append(self._release_first())
        if gone:
            self._forget(gone, writes)
        return self._held_seq

    @property
    def first_live_seq(self) -> int | None:
        """The first message whose id has not expired; None if there is none."""
        at = len(self) - self._live
        return next((int(seqs[0]) for _, seqs in self._index.between(at, at + 1)), None)

    def _expire_until(self, stop: int) -> None:
        """Expire the first marks, up to position ``stop``."""
        marks = self.marks[0]
        self._live -= marks.ids(marks.start, stop)
        self._floor_seq = marks.last_seqs[stop - 1] + 1
        marks.start = stop
        if stop == len(marks.times):
            self.marks.popleft()

    def _hold(self, marks: _Marks, at: int, writes: Writes | None) -> None:
        """Hold ids that have just expired: those of the marks from position ``at`` on.

        Small appends share a mark and a row: held ids may be many, and a start reads all rows.
        Without ``writes``, the rows are joined already.
        """
        held, stop = self.held, marks.start
        end = len(self) - self._live
        while at < stop:
            last, upto = held[-1] if held else None, at
            if last is not None:
                most = marks.ends[at] + _HELD_TOGETHER - last.ids
                upto = bisect_right(marks.ends, most, at, stop + 1) - 1
                # A row with runs of its own, as a restore writes it, is never divided.
                upto = max(at, upto, bisect_right(marks.entries, last.entry, at, stop))
            if last is None or upto == at:
                if last is not None and last.first_entry < last.entry and writes is not None:
                    held[-1] = self._join_rows(last, end - marks.ids(at, stop), writes)
                upto, entry = at + 1, marks.entries[at]
                last = _Held(0, 0, 0, entry, entry)
            else:
                held.pop()
            ids = marks.ids(at, upto)
            time_ns, last_seq = marks.times[upto - 1], marks.last_seqs[upto - 1]
            held.append(
                _Held(time_ns, last.ids + ids, last_seq, marks.entries[upto - 1], last.first_entry)
            )
            self.held_ids += ids
            at = upto

    def _join_rows(self, mark: _Held, end: int, writes: Writes) -> _Held:
        """Write the ids of a mark, which end at a position, as one row instead of several."""
        ids, seqs = self._part(end - mark.ids, end)
        key = keys.large_key(keys.DEDUPE, self.shard_id, mark.entry)
        writes.delete_range(keys.large_key(keys.DEDUPE, self.shard_id, mark.first_entry), key)
        writes.put(key, _run(mark.time_ns, IdHashes.of(ids), seqs))
        return mark._replace(first_entry=mark.entry)

    def _release_first(self) -> _Held:
        mark = self.held.popleft()
        self.held_ids -= mark.ids
        return mark

    def _forget(self, gone: list[_Held], writes: Writes) -> None:
        """Forget ids that are no longer held."""
        self._held_seq = gone[-1].last_seq + 1
        self._index.drop_below(self._held_seq)
        # Restored runs share a row, which stays until the last of them is forgotten.
        last_index, left = gone[-1].entry, None
        if self.held:
            left = self.held[0].first_entry
        elif self.marks:
            left = self.marks[0].entries[self.marks[0].start]
        shared = left == last_index
        writes.delete_range(
            keys.large_key(keys.DEDUPE, self.shard_id, gone[0].first_entry),
            keys.large_key(keys.DEDUPE, self.shard_id, last_index + (not shared)),
        )

    def find(self, hashes: IdHashes, held_from: int = INT64_MAX) -> I64Array:
        """The sequence of each id (i64 per hash); 0 where there is none.

        Only ids within the window are found, and held ones from the sequence ``held_from`` on.
        """
        found = self._index.find(hashes)
        if found.any():
            # Ids that have expired stay in their segment until all of it is forgotten.
            found[found < min(self._floor_seq, held_from)] = 0
        return found

    def add(self, hashes: IdHashes, seqs: I64Array, step: Step) -> None:
        """Remember the ids of messages just stored: at least one, all different, none known yet.

        All ids of an entry are written as one row.
        """
        row = _run(step.elapsed_ns, hashes, seqs)
        self._remember(hashes, seqs)
        self._write_row(row, step)
        self._mark(step.elapsed_ns, len(seqs), int(seqs[-1]), step.index)

    def _write_row(self, row: bytes, step: Step) -> None:
        """Write the runs of an append, whose marks are added next."""
        # One row for each entry, so that a window of rows is deleted as one range.
        if self.marks and self.marks[-1].entries[-1] == step.index:
            row = self._open_row + row
        self._open_row = row
        step.writes.put(keys.large_key(keys.DEDUPE, self.shard_id, step.index), row)

    def _mark(self, time_ns: int, ids: int, last_seq: int, entry: int) -> None:
        all_marks = self.marks
        marks = all_marks[-1] if all_marks else _Marks()
        if all_marks:
            # In the order of sequences, whatever their times: an id never expires before its time.
            time_ns = max(time_ns, marks.times[-1])
        if not all_marks or len(marks.times) == _MARKS_TOGETHER:
            marks = _Marks()
            all_marks.append(marks)
        marks.times.append(time_ns)
        marks.last_seqs.append(last_seq)
        marks.entries.append(entry)
        marks.ends.append(marks.ends[-1] + ids)

    def _remember(self, hashes: IdHashes, seqs: I64Array) -> None:
        self._live += len(seqs)
        known = self._live + self.held_ids
        self._index.add(hashes, seqs, known, self._held_seq)

    def load(self, rows: Iterable[tuple[bytes, bytes]], live_seq: int = 0) -> None:
        """Load the window from its rows, given as (key, value) in key order.

        Those of appends that end below ``live_seq`` have expired, however long the window is.
        """
        runs: list[tuple[int, bytes, bytes]] = []
        entries: list[int] = []
        count = 0
        for key, row in rows:
            entry = keys.last_number(key, 8)
            for run in _runs_of(row):
                runs.append(run)
                entries.append(entry)
                count += len(run[1])
            if len(runs) >= _MARKS_TOGETHER or count >= _IDS_TOGETHER * ID_BYTES:
                self._take_up(runs, entries)
                runs, entries, count = [], [], 0
        self._take_up(runs, entries)
        while self.marks and (marks := self.marks[0]).last_seqs[marks.start] < live_seq:
            first = marks.start
            self._expire_until(bisect_left(marks.last_seqs, live_seq, first))
            self._hold(marks, first, None)

    def _take_up(self, runs: list[tuple[int, bytes, bytes]], entries: list[int]) -> None:
        """Add runs of other rows: elapsed time, ids and sequences of each, and its row."""
        if not runs:
            return
        seqs = np.frombuffer(b"".join([packed for _, _, packed in runs]), np.int64)
        self._remember(IdHashes.of(b"".join([ids for _, ids, _ in runs])), seqs)
        end = 0
        for (time_ns, ids, _), entry in zip(runs, entries, strict=True):
            end += len(ids) // ID_BYTES
            self._mark(time_ns, len(ids) // ID_BYTES, int(seqs[end - 1]), entry)

    # Archives ------------------------------------------------------------------------------------

    def runs(self) -> Iterator[tuple[int, bytes, bytes]]:
        """Elapsed time, ids and sequences of each append, oldest first; bits not kept are zero."""
        at = len(self) - self._live - self.held_ids  # those that are forgotten come first
        for held in self.held:
            ids, seqs = self._part(at, at + held.ids)
            yield held.time_ns, ids, seqs.tobytes()
            at += held.ids
        for marks in self.marks:
            ends, stop = marks.ends, len(marks.times)
            ids, seqs = self._part(at, at + marks.ids(marks.start, stop))
            at += len(seqs)
            for one in range(marks.start, stop):
                start, end = ends[one] - ends[marks.start], ends[one + 1] - ends[marks.start]
                yield (
                    marks.times[one],
                    ids[ID_BYTES * start : ID_BYTES * end],
                    seqs[start:end].tobytes(),
                )

    def _part(self, low: int, high: int) -> tuple[bytes, I64Array]:
        """Ids and sequences from position ``low`` of the index to before ``high``."""
        parts = list(self._index.between(low, high))
        return b"".join([ids for ids, _ in parts]), np.concatenate([seqs for _, seqs in parts])

    def restore(self, runs: list[tuple[int, bytes, bytes]], step: Step) -> None:
        """Add entries of another window, all newer than those here. Their times are log times."""
        moved = [(log_ns - step.skipped_ns, ids, seqs) for log_ns, ids, seqs in runs]
        self._write_row(b"".join([_packed_run(*run) for run in moved]), step)
        self._take_up(moved, [step.index] * len(moved))
