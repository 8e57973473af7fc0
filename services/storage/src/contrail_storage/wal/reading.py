"""Reads entries from the segments by their places, for members that are behind."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from contrail_storage.disk.files import Files
from contrail_storage.seal.frames import Sealer
from contrail_storage.wal import codec
from contrail_storage.wal.codec import Batch, MalformedRecordError, RecordKind, Seal
from contrail_storage.wal.log_state import Segment
from contrail_storage.wal.spans import Span

READ_BYTES_MAX: Final = 8 << 20
_CHUNK_BYTES: Final = 1 << 20

LoggedEntry = tuple[bytes, int, int]
"""Data, index and term."""


def read_entries(
    files: Files,
    directory: Path,
    located: Iterable[tuple[Segment, Span]],
    group: int,
    from_index: int,
    max_bytes: int,
    sealer: Sealer | None,
) -> list[LoggedEntry]:
    """Return the entries of spans that follow each other, from ``from_index`` on.

    Ends before ``max_bytes``, but not before the first entry. Blocks. Raises OSError, and
    MalformedRecordError if a span does not have its entries.
    """
    found: list[LoggedEntry] = []
    left = max_bytes
    for segment, span in located:
        for entry in _entries_of(files, directory, segment, span, group, sealer):
            if entry[1] < from_index:
                continue
            left -= len(entry[0])
            if left < 0 and found:
                return found
            found.append(entry)
    return found


def _entries_of(
    files: Files, directory: Path, segment: Segment, span: Span, group: int, sealer: Sealer | None
) -> Iterator[LoggedEntry]:
    index, skipped = span.first, span.start.record
    path = directory / segment.name
    for batch in _batches(files, path, span.start.offset, segment.salt):
        if batch.sealed != (sealer is not None):
            raise MalformedRecordError(f"{segment.name}: batch {batch.number} is of another log")
        seal = Seal(sealer, segment.salt, batch.number) if sealer is not None else None
        for number, record in enumerate(codec.records(batch.body, seal)):
            if number < skipped or record.group != group or record.kind is not RecordKind.ENTRY:
                continue
            if (record.index, record.term) != (index, span.term):
                raise MalformedRecordError(f"{segment.name}: entry {index} is not in its place")
            yield bytes(record.data), index, span.term
            if index == span.last:
                return
            index += 1
        skipped = 0
    raise MalformedRecordError(f"{segment.name}: entry {index} cannot be read")


def _batches(files: Files, path: Path, offset: int, salt: bytes) -> Iterator[Batch]:
    """Yield the batches from ``offset`` on, up to the first that is damaged or not written yet."""
    size = _CHUNK_BYTES
    while True:
        data = files.read_part(path, offset, size)
        read = 0
        while (batch := codec.read_batch(memoryview(data), read, salt)) is not None:
            yield batch
            read = batch.end
        if read:
            offset += read
            size = _CHUNK_BYTES
        elif len(data) < size:
            return
        else:
            size *= 4  # the batch may be larger
