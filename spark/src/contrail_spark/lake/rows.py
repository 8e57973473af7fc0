"""The messages in data files, in the order of their sequences."""

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from contrail_spark.errors import LakeError
from contrail_spark.lake.manifest import FileEntry
from contrail_spark.lake.selection import Selection

SEQ: Final = "seq"
BATCH_ROWS_MAX: Final = 8_192
BATCH_BYTES: Final = 4 << 20
_READ_AHEAD_BYTES: Final = 1 << 20


def read_rows(
    root: Path,
    entries: Iterable[FileEntry],
    bounds: tuple[int, int],
    columns: tuple[str, ...],
    wanted: Selection,
) -> Iterator[pa.RecordBatch]:
    """The wanted messages of a shard within ``bounds``, both inclusive, in ascending sequence.

    The batches have ``columns`` and ``seq``. Files whose ranges overlap are merged, and only those
    that have the same sequences are open at the same time. Raises LakeError for a damaged file, and
    FileNotFoundError.
    """
    last = 0
    for group in overlapping(entries):
        sources = [
            (each.from_seq, read_file(root, each, bounds, columns, wanted)) for each in group
        ]
        for batch in _merged(sources):
            seqs = sequences(batch)
            if seqs[0] <= last or (len(group) > 1 and bool((np.diff(seqs) == 0).any())):
                names = ", ".join(each.path for each in group)
                raise LakeError(f"a sequence is in the lake more than once: {names}")
            last = int(seqs[-1])
            yield batch


def overlapping(entries: Iterable[FileEntry]) -> Iterator[list[FileEntry]]:
    """Files of a shard in groups: the ranges of two groups do not overlap, and ascend."""
    group: list[FileEntry] = []
    end = 0
    for entry in sorted(entries, key=lambda each: (each.from_seq, each.path)):
        if group and entry.from_seq > end:
            yield group
            group = []
        group.append(entry)
        end = max(end, entry.to_seq)
    if group:
        yield group


def read_file(
    root: Path,
    entry: FileEntry,
    bounds: tuple[int, int],
    columns: tuple[str, ...],
    wanted: Selection,
) -> Iterator[pa.RecordBatch]:
    """The wanted messages of one file, otherwise as :func:`read_rows`."""
    kept = list(dict.fromkeys((*columns, SEQ)))
    read = list(dict.fromkeys((*kept, *wanted.columns)))
    try:
        with pq.ParquetFile(
            root / entry.path,
            buffer_size=_READ_AHEAD_BYTES,
            pre_buffer=False,
            page_checksum_verification=True,
        ) as file:
            lacking = set(read) - set(file.schema_arrow.names)
            if lacking:
                raise LakeError(f"{entry.path} is damaged: it has no column {min(lacking)}")
            groups = _row_groups(file.metadata, bounds, wanted)
            size = _batch_rows(file.metadata)
            position = 0
            # Threads of Arrow would only compete with Spark's tasks for the same cores.
            for batch in file.iter_batches(size, groups, read, use_threads=False):
                position = _check_order(batch, position, entry)
                found = _clipped(batch, bounds)
                mask = wanted.mask(found)
                found = found if mask is None else found.filter(mask)
                if found.num_rows:
                    yield found.select(kept)
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError, KeyError) as error:
        raise LakeError(f"{entry.path} is damaged: {error}") from error


def _row_groups(metadata: pq.FileMetaData, bounds: tuple[int, int], wanted: Selection) -> list[int]:
    """The row groups that may have wanted messages, by their statistics."""
    chosen = []
    for at in range(metadata.num_row_groups):
        limits = limits_of(metadata.row_group(at))
        first, last = limits.get(SEQ, bounds)
        if first > bounds[1] or last < bounds[0]:
            continue
        if "subject" in limits and not wanted.may_have_subjects(*limits["subject"]):
            continue
        chosen.append(at)
    return chosen


def limits_of(group: pq.RowGroupMetaData) -> dict[str, tuple[Any, Any]]:
    """The least and the greatest value of each column of a row group that says so."""
    found = {}
    for at in range(group.num_columns):
        column = group.column(at)
        if column.is_stats_set and column.statistics.has_min_max:
            found[column.path_in_schema] = (column.statistics.min, column.statistics.max)
    return found


def _batch_rows(metadata: pq.FileMetaData) -> int:
    """How many rows make a batch of a good size."""
    groups = (metadata.row_group(at) for at in range(metadata.num_row_groups))
    size: int = sum(group.total_byte_size for group in groups)
    return max(1, min(BATCH_ROWS_MAX, BATCH_BYTES * int(metadata.num_rows) // max(size, 1)))


def sequences(batch: pa.RecordBatch) -> NDArray[np.int64]:
    """The sequences of a batch."""
    found: NDArray[np.int64] = batch.column(SEQ).to_numpy()
    return found


def _check_order(batch: pa.RecordBatch, before: int, entry: FileEntry) -> int:
    seqs = sequences(batch)
    if len(seqs) == 0:
        return before
    first, last = int(seqs[0]), int(seqs[-1])
    if first <= before or last > entry.to_seq or bool((np.diff(seqs) <= 0).any()):
        raise LakeError(f"{entry.path} is damaged: its messages are not in order")
    return last


def _clipped(batch: pa.RecordBatch, bounds: tuple[int, int]) -> pa.RecordBatch:
    seqs = sequences(batch)
    start, stop = np.searchsorted(seqs, bounds[0]), np.searchsorted(seqs, bounds[1], side="right")
    return batch.slice(int(start), int(stop - start))


def _merged(
    sources: Iterable[tuple[int, Iterator[pa.RecordBatch]]],
) -> Iterator[pa.RecordBatch]:
    """The rows of all sources, each of which is in order, in one order.

    A source comes with a sequence below which it has nothing, and is not opened before it is its
    turn: files of many subject tokens overlap in long chains, but few of them at one sequence.
    """
    waiting = deque(sources)
    heads: list[_Head] = []
    while True:
        while waiting and (not heads or waiting[0][0] <= min(head.last for head in heads)):
            opened = _Head(waiting.popleft()[1])
            if opened.advance():
                heapq.heappush(heads, opened)
        if not heads:
            return
        # Nothing that is still to come is below the end of the batch that ends first.
        end = min(head.last for head in heads)
        parts = []
        while heads and heads[0].first <= end:
            head = heads[0]
            parts.append(head.take(end))
            if head.advance():
                heapq.heapreplace(heads, head)
            else:
                heapq.heappop(heads)
        yield _sorted(parts)


def _sorted(parts: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(parts) == 1:
        return parts[0]
    # Files of other writers may say otherwise whether a column may have nulls.
    schema = parts[0].schema
    same = [pa.RecordBatch.from_arrays(each.columns, schema=schema) for each in parts]
    joined = pa.concat_batches(same)
    return joined.take(np.argsort(sequences(joined), kind="stable"))


class _Head:
    """What is left of the newest batch of a source."""

    def __init__(self, source: Iterator[pa.RecordBatch]) -> None:
        self.source = source
        self.rest: pa.RecordBatch = None
        self._seqs: NDArray[np.int64] = np.empty(0, np.int64)

    @property
    def first(self) -> int:
        return int(self._seqs[0])

    @property
    def last(self) -> int:
        return int(self._seqs[-1])

    def __lt__(self, other: "_Head") -> bool:
        return self.first < other.first

    def advance(self) -> bool:
        """Read the next batch if nothing is left; False at the end."""
        if len(self._seqs) == 0:
            self.rest = next(self.source, None)
            if self.rest is None:
                return False
            self._seqs = sequences(self.rest)
        return True

    def take(self, end: int) -> pa.RecordBatch:
        """Remove and return the rows up to and including ``end``."""
        count = int(np.searchsorted(self._seqs, end, side="right"))
        taken, self.rest = self.rest.slice(0, count), self.rest.slice(count)
        self._seqs = self._seqs[count:]
        return taken
