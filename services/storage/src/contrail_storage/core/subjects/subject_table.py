"""Subjects of a stream shard: name to number, and first, last and count of each.

``count`` is exact. ``last`` is the newest message that was ever stored. If it was removed, only the
blocks show which one is the newest now, and ``last`` is an upper bound. ``first`` is a lower bound.

In rows of version 0.2, a negative ``last`` is an upper bound, and perhaps the sequence of another
subject's message. It is loaded as `NOT_LIVE`.

A subject gets a number (sid) with its first message and keeps it while it has messages. Numbers
ascend. After the last one (2^32) they wrap around, in runs that have no number of a live subject.
Blocks may hold numbers of removed messages, whose subject nobody reads. So the number of a live
message means the same subject as long as the message lives, in every block.

Memory per subject: the bytes of its name, and 33 to find it and for the arrays. A number has a slot
in the arrays (``core.subjects.subject_names``). When half of the slots are dead the arrays are
rebuilt, so that memory follows the live subjects, however far apart their numbers are.

``names`` is only appended to or replaced, so a reader in another thread may keep using the object
that it took (with ``base``): names of subjects that were removed meanwhile are still in it.
"""

# One module: the arrays, the names and their rows change together, and one object has them.

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, compress, islice
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from contrail_common.arrays import consecutive, distinct
from contrail_common.texts import I64Array, Mask, Texts, U32Array
from contrail_common.timeunits import INT64_MAX
from contrail_storage.core import key_layout as keys
from contrail_storage.core.results import Step, Writes
from contrail_storage.core.subjects import subject_names
from contrail_storage.core.subjects.layout import Columns, Layout, empty_columns
from contrail_storage.core.subjects.name_rows import NEXT_ID, NameRows
from contrail_storage.core.subjects.subject_ids import SubjectIds
from contrail_storage.core.subjects.subject_names import SubjectNames, rank_order

PAGE: Final = 1_024
NOT_LIVE: Final = INT64_MAX
"""A last sequence above all others: no message has it."""
AreLive = Callable[[I64Array], Mask]
"""Which of some sequences are live messages."""
PART: Final = 256
"""Subjects of one record of an archive: with the longest names they take 1 MiB."""
_SLOTS_MIN: Final = 64
_DOUBLED_MAX: Final = 65_536
"""Longer arrays are made for 16 million slots, so that they are not copied as they grow.

The system adds memory to them only where it is used. When these are nearly full, a layout with
twice as many is prepared.
"""
_LEAP: Final = 256
_RECENT_CHARS: Final = 2_048
"""Longer lists of subjects are not remembered with their numbers."""
_FEW: Final = 32
"""Up to so many subjects are loaded one by one."""
_DELTA_BYTES_MIN: Final = 1 << 20
_DELTA_ROWS_MAX: Final = 4_096
_PAGE_BYTES: Final = PAGE * 20
_FOLDED_TOGETHER: Final = 8
"""Pages that one delta row writes: 0.3 ms, or 2 ms if their names have changed."""
_FOLDED_BYTES: Final = 1 << 20
"""With longer pages, fewer are written together."""
_FREED_TOGETHER: Final = 2_048
"""Parts of dropped memory that are freed together. Those of 10 million subjects take 40 ms."""
_ONE: Final = struct.Struct("<IqqI")
_NONE_LEFT: Final = bytes(4)
_DELTA_END: Final = struct.Struct(">QI")
"""End of the key of a delta row: log index, and the number of the row."""


class SubjectTable:
    """State per subject of one shard."""

    def __init__(self, shard_id: int) -> None:
        self.shard_id = shard_id
        self.numbered = SubjectNames(0)
        """Names and slots of numbers. Replaced as a whole when the slots are rebuilt."""
        self.ids = SubjectIds(self.numbered)
        """Numbers by name, of the subjects that have messages."""
        # By slot; the arrays may be longer than there are slots.
        self._crowded_from = _SLOTS_MIN  # slots; with more, longer arrays are prepared
        self.first = np.zeros(_SLOTS_MIN, np.int64)  # at most the sequence of the first message
        self.last = np.zeros(_SLOTS_MIN, np.int64)  # the newest ever stored
        self.counts = np.zeros(_SLOTS_MIN, np.uint32)  # messages; 0: the slot is dead
        self.lost_last = False
        """Whether a subject may have lost its newest message and kept others. In no row."""
        self._delta_prefix = keys.shard_key(keys.SUBJECT_DELTA, shard_id)  # of the delta rows' keys
        self._dirty_pages: set[int] = set()  # pages whose rows are older than a delta row
        self._delta_bytes = 0  # in the delta rows of these pages
        self._delta_rows = 0  # how many these are
        self._delta_end = 0, 0  # log index and number in the key of the newest one
        self._folding: list[int] = []  # pages to write before earlier delta rows are removed
        self._folded_end = b""  # the end of the keys of these rows
        self._dead = 0  # slots without a subject
        self._name_rows = NameRows(shard_id, PAGE)  # which pages have names to write again
        # Parts of names, numbers and columns that nobody needs; see `free_dropped`.
        self._dropped: list[object] = []
        self._unnamed: list[str] = []  # new subjects of this command, whose names have no row yet
        self._layout: Layout | None = None  # the next one, begun for the slots of `numbered`
        # Subjects of an earlier command, their numbers and slots: a publisher often has the same in
        # each batch, and finding them one by one takes longer than counting the messages. None
        # after a subject has gone, or slots have moved.
        self._recent: tuple[list[str], U32Array, I64Array] | None = None
        self.rounds = 0
        """Number of runs begun so far. A cache by subject number is valid only within one run."""

    def _use_names(self, numbered: SubjectNames) -> None:
        self.numbered = self.ids.names = numbered
        self._layout = self._recent = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def next_id(self) -> int:
        """The number that the next new subject gets."""
        return self.numbered.next_id

    @property
    def base(self) -> int:
        """The number of the first of ``names``."""
        return self.numbered.base

    @property
    def names(self) -> Sequence[str | None]:
        """Names by number, from ``base`` on; None where the name is not known."""
        return self.numbered.texts if self.numbered.all_in_a_row else self.numbered

    @property
    def size(self) -> int:
        """Number of slots in use; the arrays may be longer."""
        return self.numbered.texts.size

    def name(self, sid: int) -> str:
        """Name of the subject numbered ``sid``, which must be live."""
        name = self.numbered.texts.at(self.numbered.slot(sid))
        assert name is not None, f"subject {sid} is gone"
        return name

    def last_of(self, sid: int) -> int:
        """The newest message ever stored of the subject numbered ``sid``, which must be live."""
        return int(self.last[self.numbered.slot(sid)])

    def last_seq(self, subject: str) -> int:
        """The newest message ever stored of a subject with messages, 0 when it has none."""
        sid = self.ids.get(subject)
        return 0 if sid is None else self.last_of(sid)

    def count(self, subject: str) -> int:
        """Number of the subject's messages."""
        sid = self.ids.get(subject)
        return 0 if sid is None else int(self.counts[self.numbered.slot(sid)])

    def live(self) -> Iterable[tuple[int, str]]:
        """(sid, name) of every subject that has messages."""
        counts = self.counts[: self.size]
        sids = self.numbered.numbers(np.flatnonzero(counts)).tolist()
        # Asking for each number by its name would cost several times as much.
        names = compress(self.numbered.texts, (counts > 0).tolist())
        return zip(sids, (name for name in names if name), strict=True)

    def number(self, subject: str) -> int:
        """Return the number of a subject. A new subject gets its number now.

        Its name is written when its first message is counted, which must follow.
        """
        sid = self.ids.get(subject)
        return self._register(subject) if sid is None else sid

    def _register(self, subject: str) -> int:
        """Give the subject the next number, and the last slot."""
        assert self.numbered.left, "no capacity was reserved for new subjects"
        sid = self.numbered.append(subject)
        self.ids.add(subject, sid)
        self._grow()
        self._unnamed.append(subject)
        return sid

    # Runs of numbers ------------------------------------------------------------------------------

    def has_capacity(self, subjects: int) -> bool:
        """Whether ``subjects`` new subjects can get numbers.

        False if this run is nearly used up and the live numbers leave no gap that is wide enough.
        With less than four million subjects there always is one.
        """
        return self.numbered.left >= subjects or self._next_run(subjects) is not None

    def reserve(self, subjects: int, writes: Writes) -> None:
        """Begin another run if this one has fewer numbers left; see :meth:`has_capacity`."""
        if self.numbered.left >= subjects:
            return
        run = self._next_run(subjects)
        if run is not None:
            self.rounds += 1
            self._name_rows.drop_run(*run, writes)
            self._lay_out(*run)
            self._put_next_id(writes)

    def _next_run(self, subjects: int) -> tuple[int, int] | None:
        """Start and end of the next gap of ``subjects`` numbers, searched from here and around."""
        live = self.numbered.numbers(np.flatnonzero(self.counts[: self.size]))
        run, end = subject_names.RUN, subject_names.END
        pages = end // run
        # A gap lies between two pages that have live numbers; both ends of the range count as such.
        used = np.concatenate(([-1], distinct(live // run), [pages]))
        starts, ends = used[:-1] + 1, np.minimum(used[1:], pages)
        here = -(-(self.numbered.origin or end) // run) % pages
        within = np.flatnonzero((starts < here) & (here < ends))
        starts, ends = np.append(starts, np.full(len(within), here)), np.append(ends, ends[within])
        wide = np.flatnonzero((ends - starts) * run >= max(subjects, 1))
        if not len(wide):
            return None
        first = wide[np.argmin((starts[wide] - here) % pages)]
        return int(starts[first]) * run, int(ends[first]) * run

    def _grow(self) -> None:
        if self.size > len(self.first):
            size, columns = len(self.first), self._columns
            self._make_arrays()
            self.first[:size], self.last[:size], self.counts[:size] = columns
            self._layout = None  # it is for shorter arrays

    @property
    def _columns(self) -> Columns:
        return self.first, self.last, self.counts

    def _use_columns(self, columns: Columns) -> None:
        self.first, self.last, self.counts = columns
        capacity = len(self.first)
        self._crowded_from = capacity * 3 // 4 if capacity > _DOUBLED_MAX else capacity

    def _make_arrays(self) -> None:
        self._use_columns(empty_columns(_capacity(self.size)))

    def add_one(self, subject: str, seq: int, step: Step, count: int = 1) -> int:
        """Count messages of one subject, with consecutive sequences from ``seq`` on.

        Returns its number. A new subject gets it now.
        """
        sid = self.ids.get(subject)
        if sid is None:
            sid = self._register(subject)
        numbered = self.numbered
        at = numbered.slot(sid)
        if self.counts[at] == 0:
            self.first[at] = seq
        self.last[at] = seq + count - 1
        self.counts[at] += count
        self._delta_of_one(sid, at, step)
        if numbered.texts.size > self._crowded_from:
            self._trim()
        return sid

    def add_indexed(
        self, subjects: list[str], index: U32Array, counts: I64Array, first_seq: int, step: Step
    ) -> U32Array:
        """Count messages as :meth:`add_run`, given with the ``index`` of each one's subject.

        ``subjects`` are distinct, and each has at least one of the messages: ``counts``. Returns
        their numbers. New subjects get theirs now.
        """
        numbers, at = self._numbers_and_slots(subjects)
        seqs = consecutive(0, len(index)) + first_seq
        # Assignment with repeated indexes keeps the last value: see `add_all`.
        last = np.empty(len(subjects), np.int64)
        last[index] = seqs
        fresh = self.counts[at] == 0
        if np.count_nonzero(fresh):
            first = np.empty(len(subjects), np.int64)
            first[index[::-1]] = seqs[::-1]
            self.first[at[fresh]] = first[fresh]
        self.last[at] = last
        self.counts[at] += counts.astype(np.uint32)
        self._delta(at[last.argsort()], step)
        if self.size > self._crowded_from:
            self._trim()
        return numbers

    def _numbers_and_slots(self, subjects: list[str]) -> tuple[U32Array, I64Array]:
        recent = self._recent
        if recent is not None and recent[0] == subjects:
            return recent[1:]
        numbers = np.array([self.number(subject) for subject in subjects], np.uint32)
        slots = self.numbered.slots(numbers)
        if sum(map(len, subjects)) <= _RECENT_CHARS:
            self._recent = subjects, numbers, slots
        return numbers, slots

    def add_run(self, sids: U32Array, first_seq: int, step: Step) -> None:
        """Count messages with consecutive sequences from ``first_seq`` on."""
        self.add_all(sids, np.arange(first_seq, first_seq + len(sids)), step)

    def add_all(self, sids: U32Array, seqs: I64Array, step: Step) -> None:
        """Count messages with the sequences ``seqs``, which ascend."""
        at = self.numbered.slots(sids)
        # Assignment with repeated indexes keeps the last value: backwards that is the first
        # sequence of a subject, forwards its last.
        fresh = self.counts[at] == 0
        self.first[at[fresh][::-1]] = seqs[fresh][::-1]
        self.last[at] = seqs
        np.add.at(self.counts, at, np.uint32(1))
        self._delta(at[self.last[at] == seqs], step)
        if self.size > self._crowded_from:
            self._trim()

    def remove(self, sids: U32Array, floor_seq: int, step: Step) -> None:
        """Remove messages, one per element of ``sids``. No live message is below ``floor_seq``."""
        touched, counts = np.unique(self.numbered.slots(sids), return_counts=True)
        self.counts[touched] -= counts.astype(np.uint32)
        self.first[touched] = np.maximum(self.first[touched], floor_seq)
        self._forget(touched[self.counts[touched] == 0], step.writes)
        self._delta(touched, step)
        self._trim()

    def remove_oldest(
        self, sids: U32Array, first: I64Array, gone: U32Array, step: Step, are_live: AreLive
    ) -> None:
        """Remove the oldest messages of ``sids``. ``gone`` has one number for each message.

        ``first`` are the new lower bounds of the first sequences of ``sids``.
        """
        at = self.numbered.slots(sids)
        touched, counts = np.unique(self.numbered.slots(gone), return_counts=True)
        moved = at[first > self.first[at]]
        self.first[at] = np.maximum(self.first[at], first)
        self.counts[touched] -= counts.astype(np.uint32)
        self._forget(touched[self.counts[touched] == 0], step.writes)
        self._note_only(touched, are_live)
        changed = np.union1d(touched, moved)
        if len(changed):
            self._delta(changed, step)
        self._trim()

    def _note_only(self, touched: I64Array, are_live: AreLive) -> None:
        """Set ``first`` of the ``touched`` subjects whose only message is their last."""
        alone = touched[self.counts[touched] == 1]
        alone = alone[are_live(self.last[alone])]
        self.first[alone] = self.last[alone]

    def take_out(
        self,
        sids: U32Array,
        seqs: I64Array,
        floor_seq: int,
        step: Step,
        oldest: AreLive | None = None,
    ) -> None:
        """Remove messages anywhere, given with a subject number and a sequence for each.

        No live message is below ``floor_seq``. ``oldest`` is given if all subjects lose their
        oldest messages.
        """
        at = self.numbered.slots(sids)
        touched, counts = np.unique(at, return_counts=True)
        newest = at[self.last[at] == seqs]
        # The sequences ascend, so the highest of each subject is assigned last.
        known = (self.first[at] <= seqs) if oldest else (self.first[at] == seqs)
        self.first[at[known]] = seqs[known] + 1
        self.counts[touched] -= counts.astype(np.uint32)
        self.first[touched] = np.maximum(self.first[touched], floor_seq)
        self._forget(touched[self.counts[touched] == 0], step.writes)
        self.lost_last |= bool(self.counts[newest].any())
        if oldest:
            self._note_only(touched, oldest)
        self._delta(touched, step)
        self._trim()

    def take_out_one(self, sid: int, seq: int, floor_seq: int, step: Step) -> None:
        """As :meth:`take_out`, for one message: arrays of one cost several times more."""
        at = self.numbered.slot(sid)
        left = int(self.counts[at]) - 1
        first = int(self.first[at])
        self.counts[at] = left
        self.first[at] = max(first + (first == seq), floor_seq)
        if not left:
            self._forget_one(at, sid, step.writes)
        elif int(self.last[at]) == seq:
            self.lost_last = True
        self._delta_of_one(sid, at, step)
        self._trim()

    def clear(self, writes: Writes) -> None:
        """Remove every subject. New subjects get higher numbers."""
        self._delete_rows(writes)
        # Not from 0: blocks of removed messages may be in the store, with the old numbers.
        self._drop_columns()
        self._use_names(self.numbered.emptied())
        self._dropped += self.ids.clear()
        self._make_arrays()
        self._dead = 0
        # Keeps the next number above all earlier ones over a restart.
        self._put_next_id(writes)

    def _put_next_id(self, writes: Writes) -> None:
        key = keys.small_key(keys.SUBJECT_NAME, self.shard_id, NEXT_ID)
        row = self.next_id.to_bytes(4, "little")
        if self.numbered.origin:
            row += self.numbered.origin.to_bytes(4, "little")
        writes.put(key, row)

    def _forget(self, dead: I64Array, writes: Writes) -> None:
        for at, sid in zip(dead.tolist(), self.numbered.numbers(dead).tolist(), strict=True):
            self._forget_one(at, sid, writes)

    def _forget_one(self, at: int, sid: int, writes: Writes) -> None:
        name = self.numbered.texts.at(at)
        assert name is not None
        self.ids.remove(name, sid)
        self._recent = None
        # The slot stays until the arrays are rebuilt: slots of others must not move meanwhile.
        self._dead += 1
        self._name_rows.note_dead(sid)
        # The highest number will lose its row, and a start would give it to another subject.
        if sid == self.next_id - 1:
            self._put_next_id(writes)

    def _trim(self) -> None:
        """Prepare another layout, as far as it is due, and use it when it is ready."""
        size, dead, capacity = self.size, self._dead, len(self.first)
        # At half of the slots: the cost of a layout is spread over as many removals. All of the
        # work is done a piece at a time, from a quarter on.
        due = dead * 4 - size if dead >= PAGE else 0
        crowded = size > self._crowded_from
        if crowded:
            # From three quarters of the capacity on, until a sixteenth of it is left.
            due = max(due, (size - self._crowded_from) * 5)
        if due <= 0:
            return
        if self._layout is None:
            expected = 2 * capacity if crowded else _capacity(size - dead)
            self._layout = Layout(self.numbered, capacity, expected)
        self._layout.look(self._columns, size, due)
        if due >= size:
            numbered, columns = self._layout.finish(self._columns, size)
            self._drop_columns()
            self._use_names(numbered)
            self._use_columns(columns)
            self._dead = self.size - len(self.ids)

    def _drop_columns(self) -> None:
        self._dropped += (*self._columns, *self.numbered.texts.memory)

    @property
    def has_dropped(self) -> bool:
        """Whether memory of removed subjects is not freed."""
        return bool(self._dropped)

    def free_dropped(self) -> None:
        """Free a part of the memory of removed subjects."""
        del self._dropped[-_FREED_TOGETHER:]

    def _lay_out(self, next_id: int | None = None, end: int | None = None) -> None:
        """Rebuild the arrays without dead subjects. New subjects are numbered from ``next_id`` on.

        With an ``end``, a new run of numbers begins there.
        """
        live = np.flatnonzero(self.counts[: self.size])
        next_id = self.next_id if next_id is None else next_id
        if end is not None:
            live = live[rank_order(self.numbered.numbers(live), end)]
        sids = self.numbered.numbers(live)
        origin = self.numbered.origin if end is None else end
        names = self.numbered.texts.arrays(live)
        self._use_names(SubjectNames.of_live(sids, names, next_id, origin))
        (first, last, counts), at = self._columns, self.numbered.slots_of_live(sids)
        self._make_arrays()
        self.first[at], self.last[at], self.counts[at] = first[live], last[live], counts[live]
        self._dead = self.size - int(np.count_nonzero(self.counts))

    # Persistence: a delta row with each command, folded into pages when the deltas outgrow them. --

    def _delta(self, touched: I64Array, step: Step) -> None:
        if len(touched) == 1:
            at = int(touched[0])
            self._delta_of_one(self.numbered.number(at), at, step)
            return
        sids = self.numbered.numbers(touched).astype(np.uint32)
        row = b"".join(
            (
                sids.tobytes(),
                self.first[touched].tobytes(),
                self.last[touched].tobytes(),
                self.counts[touched].tobytes(),
            )
        )
        self._dirty_pages.update((sids // PAGE).tolist())
        self._write_delta(row, step)
        if self._layout is not None:
            self._layout.follow(self._columns, touched)

    def _delta_of_one(self, sid: int, at: int, step: Step) -> None:
        row = _ONE.pack(sid, int(self.first[at]), int(self.last[at]), int(self.counts[at]))
        self._dirty_pages.add(sid // PAGE)
        self._write_delta(row, step)
        if self._layout is not None:
            self._layout.follow_one(self._columns, at)

    def _write_delta(self, row: bytes, step: Step) -> None:
        if self._dropped:
            self.free_dropped()  # not only by the housekeeper: a log that is read back has none
        if self._unnamed:
            names, self._unnamed = self._unnamed, []
            self._name_rows.add(self.numbered.number(self.size - len(names)), names, step.writes)
        # Several commands of one entry write one row each: the number tells them apart.
        index, number = self._delta_end
        self._delta_end = step.index, number + 1 if index == step.index else 1
        key = self._delta_prefix + _DELTA_END.pack(*self._delta_end)
        step.writes.put(key, row)
        self._delta_rows += 1
        self._delta_bytes += len(row)
        if not self._folding and (
            self._delta_bytes > max(_DELTA_BYTES_MIN, len(self._dirty_pages) * _PAGE_BYTES)
            or self._delta_rows >= _DELTA_ROWS_MAX
        ):
            self._folding, self._folded_end = sorted(self._dirty_pages), key + b"\0"
            self._dirty_pages.clear()
            self._delta_bytes = self._delta_rows = 0
        if self._folding:
            self._fold(step.writes)

    def _fold(self, writes: Writes) -> None:
        """Write some of the pages, and remove the delta rows once all are written.

        Until then a page may be newer than these rows. But all changes after them are in later
        rows, which are loaded after them.
        """
        written = 0
        for _ in range(min(_FOLDED_TOGETHER, len(self._folding))):
            written += self._write_page(self._folding.pop(), writes)
            if written > _FOLDED_BYTES:
                break
        if not self._folding:
            writes.delete_range(self._delta_prefix, self._folded_end)

    def _delete_rows(self, writes: Writes) -> None:
        for kind in (keys.SUBJECT_NAME, keys.SUBJECT_PAGE, keys.SUBJECT_DELTA):
            prefix = keys.shard_key(kind, self.shard_id)
            writes.delete_range(prefix, keys.prefix_end(prefix))
        self._dirty_pages.clear()
        self._folding.clear()
        self._delta_bytes = self._delta_rows = 0
        self._name_rows.clear()

    def pack_names(self, pages: int, writes: Writes) -> None:
        """Write the names of some pages without those of dead subjects; see `has_unpacked`."""
        for page in list(islice(self._name_rows.changed, pages)):
            self._name_rows.pack(page, self.numbered, self._live_of(page), writes)

    @property
    def has_unpacked(self) -> bool:
        """Whether rows may have names of dead subjects."""
        return bool(self._name_rows.changed)

    def _live_of(self, page: int) -> I64Array:
        """The slots of a page's live subjects."""
        low = self.numbered.slot_from(page * PAGE)
        high = self.numbered.slot_up_to((page + 1) * PAGE - 1)
        # Without dead ones: which of them still have slots depends on when the arrays were made.
        live: I64Array = np.flatnonzero(self.counts[low:high]) + low
        return live

    def _write_page(self, page: int, writes: Writes) -> int:
        """Write a page and, if they have changed, its names; return the bytes."""
        live = self._live_of(page)
        key = keys.small_key(keys.SUBJECT_PAGE, self.shard_id, page)
        row = self._row(live)
        if row:
            writes.put(key, row)
        else:
            writes.delete(key)
        return len(row) + self._name_rows.pack(page, self.numbered, live, writes)

    def _row(self, at: I64Array) -> bytes:
        sids = self.numbered.numbers(at).astype(np.uint32)
        columns = sids, self.first[at], self.last[at], self.counts[at]
        return b"".join([column.tobytes() for column in columns])

    def recount(self, first: I64Array, last: I64Array, counts: U32Array, writes: Writes) -> None:
        """Replace first, last and count of every subject (by slot) by what was counted."""
        self._delete_rows(writes)
        size = self.size
        self.first[:size], self.last[:size], self.counts[:size] = first, last, counts
        self._lay_out()
        self.ids.clear()
        for sid, name in self.live():
            self.ids.add(name, sid)
            self._name_rows.note_page(sid // PAGE)
        for page in {sid // PAGE for sid, _ in self.live()}:
            self._write_page(page, writes)
        self._put_next_id(writes)

    # Archives ------------------------------------------------------------------------------------

    def parts(self) -> Iterator[tuple[bytes, list[str]]]:
        """Yield all live subjects by number, in parts: their rows, as in a page, and names."""
        live = np.flatnonzero(self.counts[: self.size])
        live = live[np.argsort(self.numbered.numbers(live))]
        for start in range(0, len(live), PART):
            at = live[start : start + PART]
            yield self._row(at), [self.name(sid) for sid in self.numbered.numbers(at).tolist()]

    @property
    def next_of_archive(self) -> int:
        """A number above all in blocks: the next one of a table restored from this table."""
        return NEXT_ID if self.numbered.origin else self.next_id

    def restore(self, row: bytes, names: list[str], writes: Writes) -> None:
        """Add subjects of another table; their numbers are above all numbers here."""
        self.lost_last = True
        sids = np.frombuffer(row, np.uint32, len(names))
        numbered = self.numbered if self.size else SubjectNames(int(sids[0]))
        self._use_names(numbered.extended(sids.astype(np.int64), names))
        self._grow()
        for sid, name in zip(sids.tolist(), names, strict=True):
            self.ids.add(name, sid)
        self._load_rows([row])
        for page in distinct(sids // PAGE).tolist():
            self._name_rows.note_page(page)
            self._write_page(page, writes)

    def restore_next_id(self, next_id: int, writes: Writes) -> None:
        """Number new subjects from ``next_id`` on, which is above all numbers here."""
        self._lay_out(next_id)
        self._put_next_id(writes)

    # Loading -------------------------------------------------------------------------------------

    def load(
        self,
        names: Iterable[tuple[bytes, bytes]],
        pages: Iterable[tuple[bytes, bytes]],
        deltas: Iterable[tuple[bytes, bytes]],
    ) -> None:
        """Load the state from its rows, given as (key, value) in key order."""
        delta_rows = [row for _, row in deltas]
        self._load_names(iter(names), _dead_in(delta_rows))
        self._load_rows(row for _, row in pages)
        if delta_rows:
            sids = self._load_rows(delta_rows)
            self._dirty_pages.update(distinct(sids // PAGE).tolist())
            self._delta_bytes = sum(map(len, delta_rows))
            self._delta_rows = len(delta_rows)
        # Rows of an earlier version have one name each.
        self._dirty_pages.update(self._name_rows.changed)

    def _load_names(self, rows: Iterator[tuple[bytes, bytes]], dead: set[int]) -> None:
        some = list(islice(rows, _FEW + 1))
        if sum(row.count(b"\0") + 1 for _, row in some) <= _FEW:
            found = self._name_rows.load_few(some, dead)
            if self._load_few_names(found):
                return
        parts: list[tuple[U32Array, Texts]] = []

        def each() -> Iterator[tuple[list[str], U32Array]]:
            for part in self._name_rows.load(chain(some, rows), dead):
                parts.append((part.sids, part.texts))
                yield part.names, part.sids

        self.ids.fill(each())
        next_id, origin = self._name_rows.next_id, self._name_rows.origin
        self._use_names(SubjectNames.of_rows(parts, next_id, origin))
        self._make_arrays()
        self._dead = self.size - len(self.ids)

    def _load_few_names(self, found: list[tuple[int, str]]) -> bool:
        """Load few names as `_load_names` does; False for one of the rarer cases.

        Most streams have few subjects. Arrays of them would take most of the time of a start.
        """
        if self._name_rows.origin:
            return False  # in a later run of numbers
        next_id = self._name_rows.next_id
        next_id = max(next_id, found[-1][0] + 1) if found else next_id
        first = found[0][0] if found else next_id
        if (next_id - first) * 3 > len(found) * 4:
            return False  # not every number from the first on has a slot
        numbered = SubjectNames(first)
        for sid, name in found:
            while numbered.next_id < sid:
                numbered.texts.append(None)
            numbered.append(name)
            self.ids.add(name, sid)
        while numbered.next_id < next_id:
            numbered.texts.append(None)
        self._use_names(numbered)
        self._grow()
        self._dead = self.size - len(found)
        return True

    def _load_few_rows(self, rows: list[bytes]) -> U32Array:
        """As `_load_rows`, for rows of few subjects."""
        found: list[int] = []
        for row in rows:
            count = len(row) // _ONE.size
            values = struct.unpack(f"<{count}I{2 * count}q{count}I", row)
            found += values[:count]
            columns = (values[at * count : (at + 1) * count] for at in range(4))
            for sid, first, last, held in zip(*columns, strict=True):
                at = self.numbered.slot(sid)
                if 0 <= at < self.size:
                    self.first[at], self.counts[at] = first, held
                    self.last[at] = NOT_LIVE if last < 0 else last
        return np.array(found, np.uint32)

    def _load_rows(self, rows: Iterable[bytes]) -> U32Array:
        """Load rows; later rows replace earlier ones. Return the numbers in them."""
        rows = list(rows)
        if sum(map(len, rows)) <= _FEW * _ONE.size:
            return self._load_few_rows(rows)
        parts: list[list[npt.NDArray[Any]]] = [[], [], [], []]
        for row in rows:
            count = len(row) // _ONE.size
            parts[0].append(np.frombuffer(row, np.uint32, count))
            parts[1].append(np.frombuffer(row, np.int64, count, 4 * count))
            parts[2].append(np.frombuffer(row, np.int64, count, 12 * count))
            parts[3].append(np.frombuffer(row, np.uint32, count, 20 * count))
        sids, first, last, counts = map(np.concatenate, parts)
        at = self.numbered.slots(sids)
        # Delta rows may be of subjects that died later. These have neither a name nor a slot.
        kept = (at >= 0) & (at < self.size)
        at = at[kept]
        # Assignment with repeated indexes keeps the last value: that of the latest row.
        self.first[at], self.counts[at] = first[kept], counts[kept]
        self.last[at] = np.where(last < 0, NOT_LIVE, last)[kept]
        return sids


def _capacity(size: int) -> int:
    """The slots of the arrays for ``size`` slots."""
    capacity = _SLOTS_MIN
    while capacity < size:
        capacity *= _LEAP if capacity == _DOUBLED_MAX else 2
    return capacity


def _dead_in(rows: list[bytes]) -> set[int]:
    """The numbers whose last row in ``rows`` says that the subject has no messages."""
    dead = set[int]()
    for row in rows:
        count = len(row) // _ONE.size
        sids, counts = np.frombuffer(row, np.uint32, count), row[-4 * count :]
        if not dead and _NONE_LEFT not in counts:
            continue
        left = np.frombuffer(counts, np.uint32)
        # After 2^32 numbers, one may be that of a new subject.
        dead.difference_update(sids[left > 0].tolist())
        dead.update(sids[left == 0].tolist())
    return dead
