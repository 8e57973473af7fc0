"""The node's write-ahead log: one file sequence, one writer thread, all Raft groups of the node.

The event loop appends records. The writer thread takes all waiting records as one WAL batch, writes
and syncs it, and notifies the loop once per batch. Records that arrive meanwhile form the next
batch (group commit).
"""

# One module: writing, failing, recovering and dropping segments share one lock and its fields.

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, Self

from msgspec.structs import replace

from contrail_storage.disk.files import AppendHandle, Files
from contrail_storage.disk.node_file import NodeFileDamagedError
from contrail_storage.seal.frames import Sealer
from contrail_storage.wal import codec
from contrail_storage.wal.codec import MalformedRecordError, RecordKind
from contrail_storage.wal.log_options import LogOptions, LogStats
from contrail_storage.wal.log_state import (
    LogBatch,
    LogEnd,
    LogGroup,
    OnDurable,
    Segment,
    list_segments,
    new_segment,
)
from contrail_storage.wal.newest_segment import NEWEST_NAME, missing_newest, note_newest
from contrail_storage.wal.reading import READ_BYTES_MAX, LoggedEntry, read_entries
from contrail_storage.wal.replay import RecoveredGroup, Recovery, Replayed, Rot, replay

# A start opens and checks each file. Above this number they go even if `keep_bytes` would keep
# them.
_MAX_SEGMENTS: Final = 64
_JOIN_TIMEOUT_S: Final = 30.0
# Parts of this average size are written as they are; smaller ones are joined first.
_SMALL_PART_BYTES: Final = 16 << 10
_SPANS_MAX: Final = 16


class LogFailedError(OSError):
    """A write or sync failed; the log takes no records until `NodeLog.recover` has returned."""


class LogFullError(BlockingIOError):
    """The queue to the disk is full (`LogOptions.queue_bytes`); nothing was appended."""


class EntriesGoneError(LookupError):
    """The log does not have such old entries any more."""


class LogRottenError(Exception):
    """Batches that were durable cannot be read any more; the log cannot be used after them."""


class NodeLog:
    """Write-ahead log of one node. Open it, `attach` the groups, then `start` it.

    Only one thread (the event loop) appends. `recover`, `drop_segments` and `close` block and may
    run in another thread. A position counts the records of one group: a record is durable when the
    position that its append returned has been reported.
    """

    def __init__(
        self,
        directory: Path,
        files: Files,
        options: LogOptions,
        segments: list[Segment],
        sealer: Sealer | None = None,
    ) -> None:
        self.recovery = Recovery()
        self.stats = LogStats()
        self._directory = directory  # has the segments, and the name of the newest one
        self._files = files  # the only way to the disk, which tests replace
        self._options = options  # bounds; never changed
        self._segments = segments  # oldest first; only the last is written. The list: _lock
        self._sealer = sealer  # of an encrypted log
        self._doubtful: tuple[Segment, bytes] | None = None  # to write again; before `start`
        self._next_batch = 1  # number of the next batch; writer thread
        self._next_segment = segments[-1].number + 1 if segments else 1  # numbers never repeat
        self._groups: dict[int, LogGroup] = {}  # _lock; `durable` never passes `end`
        self._handle: AppendHandle | None = None  # the last segment's file; writer thread
        # Never held during a write or sync. With an `RLock`, the conditions do in C what they do in
        # Python with a `Lock`.
        self._lock = threading.RLock()
        self._work = threading.Condition(self._lock)  # wakes the writer thread
        self._progress = threading.Condition(self._lock)  # a batch is durable, or has failed
        self._retention = threading.Lock()  # one read-back or drop at a time; before _lock
        self._waiting = LogBatch()  # records not yet taken by the writer thread; _lock
        self._in_flight_bytes = 0  # size of the batch being written; _lock
        self._needs_successor = False  # the last batch has records: an empty one is due; _lock
        self._failure: Exception | None = None  # set by the writer thread, cleared by `recover`
        self._refusing = False  # the loop knows of the failure: appends raise; event loop
        self._leave = 0  # segments up to this number take no more batches; see `rotate`; _lock
        self._closing = False  # the writer thread ends when nothing waits; _lock
        # From the writer thread to the event loop; None before `start`.
        self._call_soon: Callable[[Callable[[], None]], object] | None = None
        # Called once for each failure, on the event loop.
        self._on_failure: Callable[[Exception], None] | None = None
        # Writes and syncs batches. Only `start` starts it, and `close` ends it.
        self._thread = threading.Thread(target=self._run, name="contrail-wal", daemon=True)

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        files: Files | None = None,
        options: LogOptions | None = None,
        keep_from: Mapping[int, int] | None = None,
        sealer: Sealer | None = None,
        begin: bool = True,
    ) -> Self:
        """Read the log of a node; with `begin`, and unless it is rotten, call `begin_segment`.

        The caller holds the lock of the data folder. `keep_from` has the applied index of each
        group in the store. A log with `recovery.rot` cannot be started. `sealer` is for an
        encrypted log. Raises OSError, and UnsupportedVersionError for the log of a newer release.
        """
        files = files or Files()
        files.make_directory(directory)
        segments = list_segments(files, directory)
        log = cls(directory, files, options or LogOptions(), segments, sealer)
        log._take_over(replay(files, directory, segments, keep_from or {}, sealer))
        missing, why = "", "the newest segment is missing"
        try:
            missing = missing_newest(files, directory, segments)
        except NodeFileDamagedError as error:
            missing, why = NEWEST_NAME, str(error)
        # The remaining segments are sound, so nothing else would show that acknowledged entries are
        # missing.
        if missing and log.recovery.rot is None:
            log.recovery.rot = Rot(missing, 0, why)
        if begin and log.recovery.rot is None:
            log.begin_segment()
        return log

    def _take_over(self, found: Replayed) -> None:
        self.recovery = found.recovery
        if self._segments:
            self._doubtful = self._segments[-1], found.sound
        self._next_batch = found.next_batch
        self._count_segments()
        for number, held in found.recovery.groups.items():
            end = LogEnd(0, held.last_index, held.last_term, held.term, held.voted_for, held.flags)
            self._groups[number] = LogGroup(end, durable=end, spans=found.spans[number])

    def begin_segment(self) -> None:
        """Write the last segment again, without its torn tail, and continue in a new segment.

        This is the first change of the files. After an OSError the log is not open; call again.
        """
        if self._doubtful is not None:
            self._write_again(*self._doubtful)
            self._doubtful = None
        try:
            self._open_segment()
        except BaseException:
            self._close_handle()  # the segment may lack its head or its note
            raise

    def _write_again(self, segment: Segment, sound: bytes) -> None:
        """Replace the last segment by a synced copy of the bytes that were read from it.

        A killed process may have left bytes that it never synced, or whose sync failed. After a
        failed sync the kernel counts the pages as written, and the next sync of that file reports
        success. Only bytes that are written again can be synced reliably.
        """
        path = self._directory / segment.name
        copy = path.with_name(f"{segment.name}.new")
        with suppress(FileNotFoundError):
            self._files.unlink(copy)
        handle = self._files.create(copy)
        try:
            handle.write([sound])
            handle.sync()
        finally:
            handle.close()
        self._files.rename(copy, path)
        self._files.sync_directory(self._directory)
        segment.size = len(sound)

    def attach(self, group: int, on_durable: OnDurable) -> RecoveredGroup:
        """Return the group's recovered log, once, and report its durable records from now on.

        `on_durable(position, index)` runs on the event loop after each WAL batch with records of
        the group; `index` is the last index of the group's log at that position. Raises
        LogFailedError after a failure, until `recover`.
        """
        with self._lock:
            if self._failure is not None:
                raise LogFailedError(f"the log is not accepting writes: {self._failure}")
            state = self._groups.get(group)
            if state is None:
                state = self._groups[group] = LogGroup()
                self._mark(group, state, state.end, RecordKind.BASE, 0, 0)
            if state.on_durable is not None:
                raise ValueError(f"group {group} is already attached")
            state.on_durable = on_durable
        return self.recovery.groups.pop(group, None) or RecoveredGroup()

    def detach(self, group: int) -> None:
        """Stop reporting to a group that has ended; its log is kept."""
        with self._lock:
            self._groups[group].on_durable = None

    def start(
        self,
        *,
        call_soon: Callable[[Callable[[], None]], object],
        on_failure: Callable[[Exception], None],
    ) -> None:
        """Start the writer thread.

        `call_soon` schedules a callback on the event loop from another thread
        (`loop.call_soon_threadsafe`). `on_failure(error)` runs on the loop, once per failure.
        Raises LogRottenError when damage was found.
        """
        if self._handle is None:
            raise LogRottenError(str(self.recovery.rot))
        self._call_soon, self._on_failure = call_soon, on_failure
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether there is a segment to write to."""
        return self._handle is not None

    @property
    def failed(self) -> bool:
        """Whether a write failed and `recover` has not succeeded since."""
        return self._failure is not None

    @property
    def queued_bytes(self) -> int:
        """Bytes that are appended and not durable yet."""
        return self._waiting.size + self._in_flight_bytes

    def has_capacity(self, size: int) -> bool:
        """Whether an entry of `size` bytes may be appended now."""
        return self._waiting.size + self._in_flight_bytes + size <= self._options.queue_bytes

    def append(self, group: int, index: int, term: int, data: bytes) -> int:
        """Add the next entry of a group's log; return the position of its record.

        Raises LogFullError when the queue is full (an entry without data always fits),
        LogFailedError after a reported failure, ValueError unless `index` is the next one.
        """
        size = len(data)
        with self._lock:
            state = self._writable(group)
            end = state.end
            if index != end.last_index + 1:
                raise ValueError(f"entry {index} of group {group} cannot follow {end.last_index}")
            waiting = self._waiting
            queued = waiting.size + self._in_flight_bytes
            # Entries without data always fit: a new leader must be able to write its first entry
            # (the no-op of Raft), whatever waits.
            if size and queued + size > self._options.queue_bytes:
                raise LogFullError(f"{queued} bytes are waiting for the disk")
            waiting.add(group, RecordKind.ENTRY, index, term)
            header = codec.record_header(RecordKind.ENTRY, group, index, term, size)
            waiting.parts += header, data
            waiting.size += size + len(header)
            # Before the entry is durable: the next append must follow this one. `durable` has what
            # is safe.
            after = LogEnd(end.position + 1, index, term, end.term, end.voted_for, end.flags)
            return self._advance(state, after)

    def save_hard_state(self, group: int, term: int, voted_for: str | None) -> int:
        """Record term and vote; return the record's position. Raises LogFailedError."""
        with self._lock:
            state = self._writable(group)
            end = replace(state.end, term=term, voted_for=voted_for)
            return self._save(group, state, end)

    def flags(self, group: int) -> int:
        """The member's flags, as they were recovered or recorded last."""
        with self._lock:
            return self._groups[group].end.flags

    def save_flags(self, group: int, flags: int) -> int:
        """Record the member's flags, as `save_hard_state` does term and vote."""
        with self._lock:
            state = self._writable(group)
            return self._save(group, state, replace(state.end, flags=flags))

    def begin_new(self, group: int, flags: int) -> None:
        """Begin the log of a group with flags; nothing changes if it has begun. Before `attach`."""
        with self._lock:
            if group not in self._groups:
                state = self._groups[group] = LogGroup()
                # In one batch: a log that has begun must have the flags.
                self._mark(group, state, state.end, RecordKind.BASE, 0, 0)
                self._save(group, state, replace(state.end, flags=flags))

    def _save(self, group: int, state: LogGroup, end: LogEnd) -> int:
        record = codec.hard_state_record(group, end.term, end.voted_for, end.flags)
        self._waiting.add(group, RecordKind.HARD_STATE, 0, 0)
        return self._enqueue(state, end, record)

    def truncate(self, group: int, from_index: int, last_term: int) -> int:
        """Cut a group's log from `from_index` on; the entry before that has `last_term`."""
        with self._lock:
            state = self._writable(group)
            end = replace(state.end, last_index=from_index - 1, last_term=last_term)
            return self._mark(group, state, end, RecordKind.TRUNCATE, from_index, last_term)

    def reset(self, group: int, index: int, term: int) -> int:
        """Make a group's log end at (`index`, `term`), empty unless it holds that entry."""
        with self._lock:
            state = self._writable(group)
            end = replace(state.end, last_index=index, last_term=term)
            return self._mark(group, state, end, RecordKind.BASE, index, term)

    def end(self, group: int) -> int:
        """Remove a group, whose number is never used again; it takes no more records."""
        with self._lock:
            state = self._writable(group)
            state.ended = True
            return self._mark(group, state, state.end, RecordKind.END, 0, 0)

    def keep_tail(self, group: int) -> None:
        """Keep `LogOptions.tail_bytes` of the log, which other members of the group may read."""
        with self._lock:
            self._groups[group].followed = True

    def hold(self, group: int, index: int | None) -> None:
        """Keep the entries after `index`, for a member that fetches the state there; None: no more.

        They are kept as far as another `LogOptions.tail_bytes`, but not from a cut.
        """
        with self._lock:
            self._groups[group].held_index = index

    def base_index(self, group: int) -> int:
        """Index of the entry before the oldest one that `read` returns."""
        with self._lock:
            return self._groups[group].spans.base_index

    def read(
        self, group: int, from_index: int, max_bytes: int = READ_BYTES_MAX
    ) -> list[LoggedEntry]:
        """Return durable entries of a group from `from_index` on: data, index, term. Blocks.

        They have at most `max_bytes`, or are a single entry; there are none after the last one. An
        entry that is replaced meanwhile is left out. Any thread may call this. Raises
        EntriesGoneError, LogRottenError, or OSError.
        """
        with self._lock:
            spans = self._groups[group].spans
            if from_index <= spans.base_index:
                raise EntriesGoneError(f"group {group} has no entry {from_index} any more")
            # Each has about 1 MiB, so these are enough, and none of them is read in vain.
            wanted = spans.from_index(from_index, _SPANS_MAX)
            numbers = {span.start.segment for span in wanted}
            segments = {one.number: one for one in self._segments if one.number in numbers}
            for segment in segments.values():
                segment.readers += 1
        located = [(segments[span.start.segment], span) for span in wanted]
        try:
            found = read_entries(
                self._files, self._directory, located, group, from_index, max_bytes, self._sealer
            )
        except MalformedRecordError as error:
            raise LogRottenError(str(error)) from error
        finally:
            with self._lock:
                for segment in segments.values():
                    segment.readers -= 1
                self._progress.notify_all()
        with self._lock:
            # An entry has not changed if an entry with its index still has its term.
            while found and found[-1][1] > spans.base_index:
                _, index, term = found[-1]
                if spans.term_at(index) == term:
                    break
                found.pop()
        return found

    def term_at(self, group: int, index: int) -> int | None:
        """Term of a durable entry, or of the entry before the oldest one; None for any other."""
        with self._lock:
            return self._groups[group].spans.term_at(index)

    def _writable(self, group: int) -> LogGroup:
        if self._refusing or self._closing:
            raise LogFailedError(f"the log is not accepting writes: {self._failure or 'closed'}")
        state = self._groups[group]
        if state.ended:
            raise ValueError(f"group {group} has ended")
        return state

    def _mark(
        self, group: int, state: LogGroup, end: LogEnd, kind: RecordKind, index: int, term: int
    ) -> int:
        self._waiting.add(group, kind, index, term)
        return self._enqueue(state, end, codec.mark_record(kind, group, index, term))

    def _enqueue(self, state: LogGroup, end: LogEnd, record: bytes) -> int:
        self._waiting.parts.append(record)
        self._waiting.size += len(record)
        return self._advance(state, replace(end, position=end.position + 1))

    def _advance(self, state: LogGroup, end: LogEnd) -> int:
        if self._failure is not None:
            # The loop does not know of the failure yet: this record is lost with the waiting ones.
            self._waiting = LogBatch()
        state.end = end
        self._work.notify()
        return end.position

    def _run(self) -> None:
        while (batch := self._next_batch_to_write()) is not None:
            try:
                self._write(*batch)
            except Exception as error:
                self._fail(error)

    def _next_batch_to_write(self) -> tuple[LogBatch, dict[int, LogEnd]] | None:
        with self._lock:
            while True:
                batch = self._waiting
                if (batch.parts or self._must_leave()) and self._failure is None:
                    # The marks are taken in the same moment as the records: they say how far each
                    # group is durable once this batch is.
                    self._waiting, self._in_flight_bytes = LogBatch(), batch.size
                    marks = {}
                    for group in batch.changes:
                        marks[group] = self._groups[group].end
                    return batch, marks
                # The last batch is acknowledged, and no batch follows it. If its bytes rot now, it
                # looks like a torn tail, and a start would cut it. An empty batch after it settles
                # that.
                lonely = self._needs_successor and self._failure is None
                # Also at the end: a clean stop must not leave an acknowledged batch as the last
                # one.
                if self._closing:
                    return (LogBatch(), {}) if lonely else None
                signalled = self._work.wait(self._options.idle_s if lonely else None)
                if lonely and not signalled and not self._waiting.parts:
                    return LogBatch(), {}

    def _write(self, batch: LogBatch, marks: dict[int, LogEnd]) -> None:
        """Write and sync one batch, then report what is durable. Runs in the writer thread."""
        # Between batches only, so a batch is never divided.
        segment = self._segments[-1]
        if segment.number <= self._leave or segment.size >= self._options.segment_bytes:
            self._open_segment()
            segment = self._segments[-1]
        offset = segment.size
        self._put(segment, batch.parts)
        with self._lock:
            for group, mark in marks.items():
                state, changes = self._groups[group], batch.changes[group]
                state.durable = mark
                for change in changes:
                    state.spans.change(change, segment.number, offset)
                if changes[-1].kind is RecordKind.END:
                    del self._groups[group]
            self._in_flight_bytes = 0
            self._needs_successor = bool(batch.parts)
            self._progress.notify_all()
        if marks:
            self._notify(partial(self._report_durable, marks))

    def _put(self, segment: Segment, parts: Sequence[bytes]) -> None:
        assert self._handle is not None
        sealer = self._sealer
        if sealer is not None:
            body = b"".join(parts)
            parts = [codec.sealed_body(body, codec.Seal(sealer, segment.salt, self._next_batch))]
        elif sum(map(len, parts)) < len(parts) * _SMALL_PART_BYTES:
            parts = [b"".join(parts)]  # a write of many small parts costs more than a copy
        header = codec.batch_header(
            segment.salt, self._next_batch, *parts, sealed=sealer is not None
        )
        self._handle.write([header, *parts])
        started = time.perf_counter()
        self._handle.sync()
        elapsed = time.perf_counter() - started
        size = len(header) + sum(map(len, parts))
        segment.size += size
        self._next_batch += 1
        stats = self.stats
        stats.syncs.add(elapsed)
        stats.batches_written += 1
        stats.bytes_written += size
        stats.size_bytes += size

    def _open_segment(self) -> None:
        """Continue in a new segment whose first batch has the end of every group's log."""
        self._close_handle()
        segment = new_segment(self._next_segment, self._next_batch)
        self._next_segment += 1
        with self._lock:
            states = [(group, state.durable) for group, state in self._groups.items()]
        head = [
            codec.hard_state_record(group, mark.term, mark.voted_for, mark.flags)
            + codec.mark_record(RecordKind.BASE, group, mark.last_index, mark.last_term)
            for group, mark in states
        ]
        path = self._directory / segment.name
        self._handle = self._files.create(path, ahead_bytes=self._options.ahead_bytes)
        # Listed before its first batch is durable: if the next call fails, the file is dropped with
        # its neighbours. An unlisted leftover would later look like a damaged part of the log.
        with self._lock:
            self._segments.append(segment)
        self._files.sync_directory(self._directory)
        # Every segment can be read by itself: it repeats term, vote and end of each group, so the
        # older segments may go.
        self._put(segment, head)
        # After the first batch is durable and before any entry. If a power cut undoes the segment,
        # the note never named it; if the segment is lost later, the note shows it.
        note_newest(self._files, self._directory, segment)
        with self._lock:
            self._needs_successor = True
            self._count_segments()

    def _count_segments(self) -> None:
        self.stats.segments = len(self._segments)
        self.stats.size_bytes = sum(segment.size for segment in self._segments)

    def _notify(self, callback: Callable[[], None]) -> None:
        assert self._call_soon is not None
        try:  # for each batch, where `suppress` costs three calls
            self._call_soon(callback)
        except RuntimeError:  # the event loop has ended: nobody waits for the report
            return

    def _report_durable(self, marks: dict[int, LogEnd]) -> None:
        for group, mark in marks.items():
            state = self._groups.get(group)
            if state is not None and state.on_durable is not None:
                state.on_durable(mark.position, mark.last_index)

    def _fail(self, error: Exception) -> None:
        # After a failed write or sync, nobody knows what the file has. It is never written again,
        # and `recover` opens a new segment.
        self._close_handle()
        with self._lock:
            self._failure = error
            self._waiting = LogBatch()
            self._in_flight_bytes = 0
            self._progress.notify_all()
        self._notify(partial(self._report_failure, error))

    def _report_failure(self, error: Exception) -> None:
        self._refusing = True
        assert self._on_failure is not None
        self._on_failure(error)

    def _close_handle(self) -> None:
        if self._handle is not None:
            with suppress(OSError):
                self._handle.close()
            self._handle = None

    def recover(self) -> None:
        """After a failure, cut every group's log to its durable end and open a new segment.

        The failed file is never written again. Blocks. Raises LogFailedError while the disk still
        fails; call again later. Call it only after `on_failure` has run.
        """
        if not self._refusing:
            return
        with self._lock:
            for state in self._groups.values():
                # Term and vote are kept even if not durable: forgetting them allows a second vote.
                durable = state.durable
                state.durable = state.end = replace(
                    state.end, last_index=durable.last_index, last_term=durable.last_term
                )
                state.ended = False
        number = self._next_segment
        try:
            self.begin_segment()
        except OSError as error:
            raise LogFailedError(f"segment {number} cannot be opened: {error}") from error
        with self._lock:
            self._failure = None
            self._refusing = False
            self._waiting = LogBatch()
            self._work.notify()

    def read_back(self, keep_from: Mapping[int, int]) -> dict[int, RecoveredGroup]:
        """Read the entries above `keep_from` from the files, as at a start. Blocks.

        Nobody may append meanwhile. Raises OSError, LogRottenError, or LogFailedError if busy.
        """
        with self._retention:
            with self._lock:
                idle = self._progress.wait_for(
                    lambda: self._failure or not (self._waiting.parts or self._in_flight_bytes),
                    _JOIN_TIMEOUT_S,
                )
            if not idle:
                raise LogFailedError("the log is still busy")
            segments = list_segments(self._files, self._directory)
            found = replay(self._files, self._directory, segments, keep_from, self._sealer).recovery
        if found.rot is not None:
            raise LogRottenError(str(found.rot))
        return found.groups

    def drop_segments(self, applied: Mapping[int, int], *, keep_bytes: int | None = None) -> int:
        """Remove the oldest segments without entries above `applied`; return the bytes freed.

        Read the indexes in `applied` before a RocksDB flush, and call this after it. The newest
        `keep_bytes` stay. Entries of quiet groups are copied forward first, so that such a group
        does not keep old segments. Blocks. Raises OSError, or LogRottenError when an old segment
        has become unreadable; then the segments stay.
        """
        keep = self._kept_bytes() if keep_bytes is None else keep_bytes
        with self._retention:
            surplus = self._surplus(keep)
            if keep_bytes is None:
                surplus = self._without_held(surplus)
            blockers = self._blockers(surplus, applied)
            if blockers:
                self._carry_forward(blockers, applied)
            freed = 0
            for segment in surplus:
                if self._blockers([segment], applied) or not self._release(segment):
                    break
                self._remove(segment)
                freed += segment.size
                with self._lock:
                    self._segments.remove(segment)
                    self._count_segments()
            self.stats.left_bytes = self.stats.size_bytes
        return freed

    @property
    def tail_bytes(self) -> int:
        """Bytes that are kept for other members of the groups; 0 if there are none."""
        with self._lock:
            followed = any(state.followed for state in self._groups.values())
        return self._options.tail_bytes if followed else 0

    def _kept_bytes(self) -> int:
        return max(self._options.keep_bytes, self.tail_bytes)

    def _release(self, segment: Segment) -> bool:
        """Let nobody begin to read a segment, and wait for those who do."""
        with self._lock:
            for state in self._groups.values():
                state.spans.forget(segment.number)
            return self._progress.wait_for(lambda: not segment.readers, _JOIN_TIMEOUT_S)

    def bytes_above(self, applied: Mapping[int, int]) -> int:
        """Bytes of the segments that have an entry above `applied`."""
        with self._lock:
            segments = list(self._segments)
        return sum(one.size for one in segments if self._blockers([one], applied))

    def _must_leave(self) -> bool:
        return self._segments[-1].number <= self._leave

    def rotate(self) -> tuple[int, dict[int, int]]:
        """Close the open segment whatever its size, and continue in a new one.

        Return its number, and the last index of each group up to its end. Blocks. Raises
        LogFailedError.
        """
        with self._lock:
            left = self._leave = self._segments[-1].number
            self._work.notify()
            self._progress.wait_for(
                lambda: self._failure or self._closing or not self._must_leave(), _JOIN_TIMEOUT_S
            )
            if self._failure or self._must_leave():
                raise LogFailedError(f"no new segment: {self._failure or 'closed, or too slow'}")
            return left, {group: one.durable.last_index for group, one in self._groups.items()}

    @property
    def first_segment(self) -> int:
        """Number of the oldest segment."""
        with self._lock:
            return self._segments[0].number

    def _surplus(self, keep_bytes: int) -> list[Segment]:
        with self._lock:
            rest = sum(segment.size for segment in self._segments)
            surplus = []
            for position, segment in enumerate(self._segments[:-1]):
                rest -= segment.size
                if rest < keep_bytes and len(self._segments) - position <= _MAX_SEGMENTS:
                    break
                surplus.append(segment)
        return surplus

    def _without_held(self, surplus: list[Segment]) -> list[Segment]:
        """Leave out what is held, except what is too old for that."""
        with self._lock:
            held: set[int] = set()
            for state in self._groups.values():
                if state.held_index is not None:
                    held |= state.spans.segments_above(state.held_index)
            rest = self._options.tail_bytes if held else 0
        position = len(surplus)
        for at in reversed(range(len(surplus))):
            rest -= surplus[at].size
            if rest < 0:
                break
            if surplus[at].number in held:
                position = at
        return surplus[:position]

    def _blockers(self, segments: list[Segment], applied: Mapping[int, int]) -> set[int]:
        """Groups with an entry above `applied` in one of the segments."""
        numbers = {segment.number for segment in segments}
        with self._lock:
            return {
                group
                for group, state in self._groups.items()
                if not numbers.isdisjoint(state.spans.segments_above(applied.get(group, 0)))
            }

    def _carry_forward(self, blockers: set[int], applied: Mapping[int, int]) -> None:
        """Write the live entries of quiet groups again at the end, and release the old copies."""
        with self._lock:
            segments = list(self._segments)
            keep_from = {group: state.end.last_index for group, state in self._groups.items()}
            quiet = {
                group: state.durable
                for group, state in self._groups.items()
                if group in blockers and state.end.position == state.durable.position
            }
        if not quiet:
            return  # busy groups move on by themselves
        keep_from.update({group: applied.get(group, 0) for group in quiet})
        copies = [Segment(part.number, part.first_batch, part.salt) for part in segments]
        found = replay(self._files, self._directory, copies, keep_from, self._sealer).recovery
        if found.rot is not None:
            raise LogRottenError(f"{found.rot.segment}: {found.rot.reason}")
        with self._lock:
            targets = self._copy_quiet(quiet, found.groups)
            done = self._progress.wait_for(lambda: self._reached(targets), _JOIN_TIMEOUT_S)
            if not done or self._failure is not None:
                return

    def _copy_quiet(
        self, quiet: Mapping[int, LogEnd], held: Mapping[int, RecoveredGroup]
    ) -> dict[int, int]:
        budget = self._options.carry_bytes
        targets: dict[int, int] = {}
        for group, mark in quiet.items():
            size = sum(len(data) for data, _, _ in held[group].entries)
            state = self._groups.get(group)
            if size <= budget and state is not None and state.end.position == mark.position:
                budget -= size
                targets[group] = self._copy(group, held[group])
        return targets

    def _copy(self, group: int, held: RecoveredGroup) -> int:
        state = self._writable(group)
        self._mark(group, state, state.end, RecordKind.BASE, held.base_index, held.base_term)
        for data, index, term in held.entries:
            header = codec.record_header(RecordKind.ENTRY, group, index, term, len(data))
            self._waiting.add(group, RecordKind.ENTRY, index, term)
            self._enqueue(state, state.end, header + data)
        return state.end.position

    def _reached(self, targets: Mapping[int, int]) -> bool:
        return self._failure is not None or all(
            state is None or state.durable.position >= position
            for state, position in ((self._groups.get(one), at) for one, at in targets.items())
        )

    def _remove(self, segment: Segment) -> None:
        # Synced one by one: a gap in the numbers would look like a lost segment.
        with suppress(FileNotFoundError):  # removed earlier, but the sync after it failed
            self._files.unlink(self._directory / segment.name)
        self._files.sync_directory(self._directory)

    def close(self) -> None:
        """Write the waiting records, stop the writer thread and close the file. Blocks."""
        with self._lock:
            self._closing = True
            self._work.notify()
            self._progress.notify_all()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_TIMEOUT_S)
        self._close_handle()
