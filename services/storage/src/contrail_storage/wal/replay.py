"""Replay of the log at a start: the log of each group, and whether it is torn or rotten.

Batches are numbered across segments, and a batch is written only once the batch before it is
durable. So a damaged batch that is followed by a sound one was durable once, and has rotted. A
damaged last batch was never acknowledged, and is cut. A segment is read up to the first batch of
the next segment: after a failed write, the log continues in a new segment with the first batch that
is not durable, and the rest of the failed file is void.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from contrail_storage.disk.files import Files
from contrail_storage.seal.frames import Sealer
from contrail_storage.wal import codec
from contrail_storage.wal.codec import Batch, MalformedRecordError, Record, RecordKind, Seal
from contrail_storage.wal.log_state import Segment
from contrail_storage.wal.spans import Change, GroupSpans


@dataclass(slots=True)
class RecoveredGroup:
    """The durable log of one group: `entries` are (data, index, term) after the base, in order."""

    term: int = 0
    voted_for: str | None = None
    flags: int = 0
    base_index: int = 0
    base_term: int = 0
    entries: list[tuple[bytes, int, int]] = field(default_factory=list)

    @property
    def last_index(self) -> int:
        """Index of the last entry, or of the base when there is none."""
        return self.entries[-1][1] if self.entries else self.base_index

    @property
    def last_term(self) -> int:
        """Term of the last entry, or of the base when there is none."""
        return self.entries[-1][2] if self.entries else self.base_term


@dataclass(frozen=True, slots=True)
class TornTail:
    """The end of the last segment was never durable and has been cut."""

    segment: str
    bytes_cut: int


@dataclass(frozen=True, slots=True)
class Rot:
    """A batch that was durable once can no longer be read. Nothing after it is used."""

    segment: str
    offset: int
    reason: str

    def __str__(self) -> str:
        return f"{self.reason} ({self.segment} from byte {self.offset} on)"


@dataclass(slots=True)
class Recovery:
    """The content of the log when it was opened, and its damage."""

    groups: dict[int, RecoveredGroup] = field(default_factory=dict)
    torn_tail: TornTail | None = None
    rot: Rot | None = None


@dataclass(slots=True)
class Replayed:
    """A `Recovery`, the places of all entries, and where the log goes on.

    `sound` are the sound bytes of the last segment, `next_batch` is the number of the next batch.
    """

    recovery: Recovery
    spans: dict[int, GroupSpans] = field(default_factory=dict)
    sound: bytes = b""
    next_batch: int = 1


class _DamageError(Exception):
    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(reason)
        self.offset = offset


def replay(
    files: Files,
    directory: Path,
    segments: list[Segment],
    keep_from: Mapping[int, int],
    sealer: Sealer | None = None,
) -> Replayed:
    """Read all segments and set the size of each; change nothing on disk.

    Entries at or below `keep_from[group]` are checked and not kept in memory; the last of them
    becomes the group's base. `sealer` is for an encrypted log, in which a plain batch is damage.
    Raises OSError, and UnsupportedVersionError for the log of a newer release.
    """
    reader = _SegmentReplay(keep_from, sealer)
    first = segments[0].first_batch if segments else 1
    result = Replayed(reader.recovery, reader.spans, next_batch=first)
    for position, segment in enumerate(segments):
        data = files.read(directory / segment.name)
        segment.size = len(data)
        is_last = position + 1 == len(segments)
        # Batches of a failed write may be complete in this file. The next segment has the same
        # numbers again, and only those count.
        limit = None if is_last else segments[position + 1].first_batch
        try:
            end, result.next_batch = reader.read_segment(segment, data, limit)
        except _DamageError as damage:
            result.next_batch = reader.next_batch
            reader.recovery.rot = Rot(segment.name, damage.offset, str(damage))
            break
        if is_last:
            result.sound = data[:end]
            torn = data[end:].rstrip(b"\0")  # zeros are space that was written in advance
            if torn:
                reader.recovery.torn_tail = TornTail(segment.name, len(torn))
    return result


class _SegmentReplay:
    def __init__(self, keep_from: Mapping[int, int], sealer: Sealer | None) -> None:
        self.recovery = Recovery()
        self.spans: dict[int, GroupSpans] = {}
        self.next_batch = 0
        self._sealer = sealer
        self._keep_from = keep_from

    def read_segment(self, segment: Segment, data: bytes, limit: int | None) -> tuple[int, int]:
        """Apply a segment's batches below `limit`.

        Return the offset after its last sound batch, and the number of the next batch.
        """
        view = memoryview(data)
        offset, self.next_batch = 0, segment.first_batch
        while limit is None or self.next_batch < limit:
            # Another number is damage too, even in a sound batch: the batch that belongs here is
            # missing.
            batch = codec.read_batch(view, offset, segment.salt)
            if batch is None or batch.number != self.next_batch:
                self._judge(segment, data, offset, limit)
                break
            self._apply_batch(segment, batch, offset)
            offset = batch.end
            self.next_batch += 1
        return offset, self.next_batch

    def _judge(self, segment: Segment, data: bytes, offset: int, limit: int | None) -> None:
        if limit is not None:
            # The next segment was opened only after this batch was durable.
            raise _DamageError(
                offset, f"WAL batch {self.next_batch} of a closed segment is damaged"
            )
        # Nothing sound after it: the batch was being written when the process ended, and is cut.
        if codec.find_batch(data, offset, segment.salt) is not None:
            raise _DamageError(
                offset, f"WAL batch {self.next_batch} is damaged, but a later one is intact"
            )

    def _apply_batch(self, segment: Segment, batch: Batch, offset: int) -> None:
        try:
            records = codec.records(batch.body, self._seal(segment, batch))
            for number, record in enumerate(records):
                self._apply(record)
                self._note_place(record, segment, offset, number)
        except MalformedRecordError as error:
            raise _DamageError(offset, f"WAL batch {self.next_batch}: {error}") from error

    def _seal(self, segment: Segment, batch: Batch) -> Seal | None:
        # Otherwise somebody without a key could put forged plain batches into an encrypted log.
        if batch.sealed != (self._sealer is not None):
            raise MalformedRecordError(f"it is {'' if batch.sealed else 'not '}encrypted")
        return Seal(self._sealer, segment.salt, batch.number) if self._sealer is not None else None

    def _note_place(self, record: Record, segment: Segment, offset: int, number: int) -> None:
        if record.kind is RecordKind.END:
            del self.spans[record.group]
            return
        spans = self.spans.get(record.group)
        if spans is None:
            spans = self.spans[record.group] = GroupSpans()
        change = Change(record.kind, record.index, record.term, record.index, number)
        spans.change(change, segment.number, offset)

    def _apply(self, record: Record) -> None:
        group = self.recovery.groups.get(record.group)
        if group is None:
            # The log of a group begins with a BASE. Without one, records of the group are missing.
            if record.kind not in (RecordKind.HARD_STATE, RecordKind.BASE):
                raise MalformedRecordError(f"group {record.group} has no base")
            group = self.recovery.groups[record.group] = RecoveredGroup()
        if record.kind is RecordKind.HARD_STATE:
            group.term, group.voted_for = record.term, codec.voted_for(record)
            group.flags = record.index
        elif record.kind is RecordKind.TRUNCATE:
            _cut(group, record)
        elif record.kind is RecordKind.BASE:
            _rebase(group, record)
        elif record.kind is RecordKind.END:
            del self.recovery.groups[record.group]
        else:
            self._add_entry(group, record)

    def _add_entry(self, group: RecoveredGroup, record: Record) -> None:
        # A gap means that a segment or a batch is missing that had a valid place in the order.
        if record.index != group.last_index + 1:
            raise MalformedRecordError(
                f"group {record.group} skips from entry {group.last_index} to entry {record.index}"
            )
        if record.index <= self._keep_from.get(record.group, 0):
            # The store has applied it. It is kept as the base, which the next entry must follow.
            group.base_index, group.base_term = record.index, record.term
        else:
            group.entries.append((bytes(record.data), record.index, record.term))


def _cut(group: RecoveredGroup, record: Record) -> None:
    if record.index == 0:
        raise MalformedRecordError("no log has an entry 0 to cut")
    kept = record.index - group.base_index - 1
    if kept < 0:
        # The entries up to there were not kept, or were in a segment that has been dropped.
        group.base_index, group.base_term = record.index - 1, record.term
    del group.entries[max(kept, 0) :]


def _rebase(group: RecoveredGroup, record: Record) -> None:
    position = record.index - group.base_index
    # Every segment begins with the BASE of each group: usually the log has that entry, and nothing
    # changes. A BASE in the middle cuts what follows it (the log was reset to that entry). Only an
    # entry that is unknown, or of another term, makes the log empty.
    if position == 0 and group.base_term == record.term:
        group.entries.clear()
    elif 0 < position <= len(group.entries) and group.entries[position - 1][2] == record.term:
        del group.entries[position:]
    else:
        group.base_index, group.base_term = record.index, record.term
        group.entries.clear()
