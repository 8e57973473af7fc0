"""Salvages the usable part of a damaged log, and begins a new log at the indexes of the store.

A group's entries are used up to the first missing one, because later entries may depend on it. If
the store is ahead of the damage, nothing is missing, and later entries continue from the store.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from pathlib import Path

from contrail_storage.core.entry_codec import EntryDamagedError, check_entry
from contrail_storage.disk.files import Files
from contrail_storage.disk.node_file import NodeFileDamagedError
from contrail_storage.seal.frames import Sealer
from contrail_storage.wal import codec
from contrail_storage.wal.codec import Batch, MalformedRecordError, Record, RecordKind, Seal
from contrail_storage.wal.log_state import Segment, list_segments, new_segment
from contrail_storage.wal.newest_segment import missing_newest, note_newest


@dataclass(slots=True)
class SalvagedGroup:
    """A group's log after what the store has: `entries` are (data, index, term), in order.

    `lost`: entries after them are missing, or may be. `highest` is the highest index seen.
    """

    end: int = 0
    term: int = 0
    voted_for: str | None = None
    flags: int = 0
    highest: int = 0
    entries: list[tuple[bytes, int, int]] = field(default_factory=list)
    lost: bool = False
    doubtful: bool = True
    """Whether an unreadable part after the last known entry may have had entries."""

    @property
    def end_term(self) -> int:
        """Term of the last entry, if known."""
        return self.entries[-1][2] if self.entries else self.term


def salvage(
    files: Files, directory: Path, applied: Mapping[int, int], sealer: Sealer | None
) -> dict[int, SalvagedGroup]:
    """Read what can be read; `applied` are the store's indexes by group.

    Changes nothing. Raises OSError, and UnsupportedVersionError for the log of a newer release.
    """
    reader = _SegmentSalvage(applied)
    try:
        segments = list_segments(files, directory)
    except FileNotFoundError:
        segments = []
    limits: list[int | None] = [segment.first_batch for segment in segments[1:]]
    for segment, limit in zip_longest(segments, limits):
        # A segment is missing in between. Any group may have had entries in it.
        if reader.next_segment not in (0, segment.number):
            reader.doubt()
        reader.next_segment = segment.number + 1
        data = files.read(directory / segment.name)
        reader.read(segment, data, limit, sealer)
    if _newest_may_be_missing(files, directory, segments):
        reader.doubt()
    return reader.finish()


def _newest_may_be_missing(files: Files, directory: Path, segments: list[Segment]) -> bool:
    try:
        return bool(missing_newest(files, directory, segments))
    except NodeFileDamagedError:
        return True


def cut_damaged(groups: Iterable[SalvagedGroup]) -> None:
    """Use no entry that is not what was proposed, and none after it.

    Raises EntryVersionError for entries of another release.
    """
    for group in groups:
        for position, (data, index, _) in enumerate(group.entries):
            try:
                if data:
                    check_entry(data)
            except EntryDamagedError:
                del group.entries[position:]
                group.end, group.lost = index - 1, True
                break


def begin_again(
    files: Files,
    directory: Path,
    sealer: Sealer | None,
    groups: Mapping[int, tuple[int, int, SalvagedGroup]],
) -> None:
    """Write a log whose groups begin after (index, term) of `groups`, with their known votes.

    Entries of a group after that index follow.
    """
    files.make_directory(directory)
    segment = new_segment(1, 1)
    heads = b"".join(
        codec.hard_state_record(group, max(term, held.term), held.voted_for, held.flags)
        + codec.mark_record(RecordKind.BASE, group, index, term)
        for group, (index, term, held) in groups.items()
    )
    entries = (
        codec.record_header(RecordKind.ENTRY, group, index, term, len(data)) + data
        for group, (base, _, held) in groups.items()
        for data, index, term in held.entries
        if index > base
    )
    handle = files.create(directory / segment.name)
    try:
        # The last batch is empty. It distinguishes damage in the one before from a torn tail.
        for number, plain in enumerate(chain((heads,), entries, (b"",)), start=1):
            part = plain
            if sealer is not None:
                part = codec.sealed_body(plain, Seal(sealer, segment.salt, number))
            head = codec.batch_header(segment.salt, number, part, sealed=sealer is not None)
            handle.write([head, part])
        handle.sync()
    finally:
        handle.close()
    files.sync_directory(directory)
    note_newest(files, directory, segment)


class _SegmentSalvage:
    def __init__(self, applied: Mapping[int, int]) -> None:
        self._groups = {number: SalvagedGroup(index) for number, index in applied.items()}
        self.next_segment = 0

    def doubt(self) -> None:
        """Note an unreadable part: any group may have had entries there."""
        for group in self._groups.values():
            group.doubtful = True

    def read(self, segment: Segment, data: bytes, limit: int | None, sealer: Sealer | None) -> None:
        """Read the batches of a segment below `limit`, which is the first of the next segment."""
        number = segment.first_batch
        for batch in _batches(data, segment.salt):
            # After a failed write, the next segment begins again with this number. The rest is
            # void.
            if limit is not None and batch.number >= limit:
                break
            # Batches are missing before this one, or it does not decode.
            if batch.number != number or not self._take(segment, batch, sealer):
                self.doubt()
            number = batch.number + 1
        if limit is not None and number < limit:
            self.doubt()

    def _take(self, segment: Segment, batch: Batch, sealer: Sealer | None) -> bool:
        if batch.sealed != (sealer is not None):
            return False
        seal = Seal(sealer, segment.salt, batch.number) if sealer is not None else None
        try:
            records = [(one, bytes(one.data)) for one in codec.records(batch.body, seal)]
        except MalformedRecordError:
            return False
        for record, content in records:
            self._take_record(record, content)
        return True

    def _take_record(self, record: Record, content: bytes) -> None:
        group = self._groups.setdefault(record.group, SalvagedGroup())
        # Also of entries that are not used: new indexes must be above all that clients may have
        # seen.
        group.highest = max(group.highest, record.index)
        if record.kind is RecordKind.HARD_STATE:
            group.term, group.voted_for = record.term, content.decode(errors="replace") or None
            group.flags = record.index
        elif record.kind is RecordKind.END:
            del self._groups[record.group]
        # After a gap nothing is added, even if it is sound: later entries may depend on a missing
        # one.
        elif group.lost:
            return
        elif record.kind is RecordKind.ENTRY:
            _add(group, record, content)
        else:
            end = record.index - (record.kind is RecordKind.TRUNCATE)
            _end_at(group, end, record.term)

    def finish(self) -> dict[int, SalvagedGroup]:
        """Return the groups; unreadable parts after their last entries make them `lost`."""
        for group in self._groups.values():
            group.lost = group.lost or group.doubtful
        return self._groups


def _batches(data: bytes, salt: bytes) -> Iterator[Batch]:
    """Yield every sound batch, wherever it begins."""
    view, offset = memoryview(data), 0
    while True:
        batch = codec.read_batch(view, offset, salt)
        if batch is None:
            found = codec.find_batch(data, offset, salt)
            if found is None:
                return
            offset = found
            continue
        yield batch
        offset = batch.end


def _add(group: SalvagedGroup, record: Record, content: bytes) -> None:
    if record.index <= group.end:
        # The store has the entry, or it repeats one that is known.
        group.doubtful = group.doubtful and record.index < group.end
    elif record.index == group.end + 1:
        group.entries.append((content, record.index, record.term))
        group.end, group.doubtful = record.index, False
    else:
        group.lost = True


def _end_at(group: SalvagedGroup, index: int, term: int) -> None:
    """Handle a record that says that the group ends at `index`."""
    if index > group.end:
        group.lost = True
        return
    group.doubtful = False
    # A leader was replaced: its last entries were never committed, and others follow.
    while group.entries and group.entries[-1][1] > index:
        group.entries.pop()
        group.end -= 1
    group.term = max(group.term, term)
