"""The Parquet files of a lake: written by partition, with memory bounded by one slab of messages.

Everything that waits to be written is written as one row group per partition, so an open file holds
no messages, and costs about 100 KiB.
"""

from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from contrail_spark.errors import LakeError
from contrail_spark.lake import files
from contrail_spark.lake.layout import (
    NO_TOKEN,
    DataFile,
    Partition,
    quoted,
)
from contrail_spark.lake.manifest import FileEntry
from contrail_spark.lake.store import Lake
from contrail_spark.schema import conform

SCHEMA: Final = pa.schema(
    [
        pa.field("shard", pa.int32(), nullable=False),
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("time", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("subject", pa.string(), nullable=False),
        pa.field("headers", pa.map_(pa.string(), pa.list_(pa.string()))),
        pa.field("data", pa.binary()),
    ]
)
"""The columns of a data file: those of the data source."""

SLAB_BYTES: Final = 32 << 20
OPEN_FILES_MAX: Final = 256
_DAY_US: Final = 86_400_000_000
_REPEATED: Final = [
    "shard",
    "subject",
    "headers.key_value.key",
    "headers.key_value.value.list.element",
]
"""Columns with few different values. For payloads, a dictionary only takes time."""
_WRITER: Final = {
    "compression": "zstd",
    "use_dictionary": _REPEATED,
    "column_encoding": {"seq": "DELTA_BINARY_PACKED", "time": "DELTA_BINARY_PACKED"},
    "write_statistics": ["shard", "seq", "time", "subject"],
    "write_page_checksum": True,
}


class DataFileWriter:
    """One data file, which gets its name when it is complete."""

    def __init__(self, lake: Lake, partition: Partition, shard: int, commit: int) -> None:
        self.partition = partition
        self._lake = lake
        self._shard = shard
        self._commit = commit
        self._temporary = lake.temporary(commit)
        self._parquet = pq.ParquetWriter(self._temporary, SCHEMA, **_WRITER)
        # First and last sequence, first and last time.
        self._seqs = (0, 0)
        self._times = (0, 0)
        self._messages = 0

    def write(self, messages: pa.Table) -> None:
        """Append messages of ascending sequence as one row group."""
        first, last = messages["seq"][0].as_py(), messages["seq"][-1].as_py()
        if self._messages and first <= self._seqs[1]:
            raise LakeError(f"sequence {first} of shard {self._shard} came after {self._seqs[1]}")
        times = pc.min_max(messages["time"].cast(pa.int64())).as_py()
        low, high = times["min"], times["max"]
        if self._messages:
            first, low, high = self._seqs[0], min(low, self._times[0]), max(high, self._times[1])
        self._seqs, self._times = (first, last), (low, high)
        self._messages += messages.num_rows
        self._parquet.write_table(messages, row_group_size=messages.num_rows)

    def finish(self) -> FileEntry:
        """Make the file durable under its name, and return its entry for the manifest."""
        self._parquet.close()
        files.sync_file(self._temporary)
        size, digest = self._temporary.stat().st_size, files.sha256(self._temporary)
        stream = quoted(self._lake.info.stream)
        name = DataFile(self.partition, stream, self._shard, *self._seqs, self._commit)
        name = self._lake.publish(self._temporary, name, digest)
        self._temporary.unlink(missing_ok=True)
        return FileEntry(
            path=name.path,
            shard=self._shard,
            from_seq=name.from_seq,
            to_seq=name.to_seq,
            messages=self._messages,
            bytes=size,
            sha256=digest,
            first_time_us=self._times[0],
            last_time_us=self._times[1],
        )

    def discard(self) -> None:
        """Give up the file."""
        # The disk may be full, so that the end of the file cannot be written.
        with suppress(OSError):
            self._parquet.close()
        self._temporary.unlink(missing_ok=True)


class PartitionedWriter:
    """Messages of one shard in ascending sequence, each to the file of its partition.

    ``slab_bytes`` of messages become a row group of each partition. A context: without `finish`
    nothing remains.
    """

    def __init__(self, lake: Lake, shard: int, commit: int, slab_bytes: int = SLAB_BYTES) -> None:
        self._lake = lake
        self._shard = shard
        self._commit = commit
        self._slab_max = slab_bytes
        self._slab: list[pa.RecordBatch] = []
        self._slab_bytes = 0
        self._open: dict[Partition, DataFileWriter] = {}
        self._entries: list[FileEntry] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for each in self._open.values():
            each.discard()

    def write(self, batch: pa.RecordBatch) -> None:
        """Take messages with all columns of `SCHEMA`."""
        self._slab.append(conform(batch, SCHEMA))
        self._slab_bytes += batch.nbytes
        if self._slab_bytes >= self._slab_max:
            self._flush()

    def finish(self) -> list[FileEntry]:
        """Complete all files, and return their entries."""
        self._flush()
        self._close_before(None)
        return self._entries

    def _flush(self) -> None:
        if not self._slab:
            return
        slab = pa.Table.from_batches(self._slab, SCHEMA)
        self._slab, self._slab_bytes = [], 0
        newest: Partition | None = None
        for newest, messages in by_partition(slab, self._lake.info.token):
            file = self._open.get(newest)
            if file is None:
                file = self._begin(newest)
            file.write(messages)
        # Times hardly ever go back within a shard. If they do, the day gets another file.
        self._close_before(newest)

    def _begin(self, partition: Partition) -> DataFileWriter:
        if len(self._open) >= OPEN_FILES_MAX:
            self._close_before(partition)
        if len(self._open) >= OPEN_FILES_MAX:
            raise LakeError(
                f"token {self._lake.info.token} of the subjects has more than {OPEN_FILES_MAX} "
                f"values in one file's range on {partition.day}; partition the lake by a token "
                "with fewer values, or archive with smaller files"
            )
        file = DataFileWriter(self._lake, partition, self._shard, self._commit)
        self._open[partition] = file
        return file

    def _close_before(self, partition: Partition | None) -> None:
        """Complete the files of days before that of ``partition``; with None, all files."""
        for each in sorted(self._open):
            if partition is None or each.day < partition.day:
                self._entries.append(self._open[each].finish())
                del self._open[each]


def by_partition(slab: pa.Table, token: int | None) -> Iterator[tuple[Partition, pa.Table]]:
    """The messages of each partition in their order; partitions in the order of days."""
    days = slab["time"].cast(pa.int64()).to_numpy() // _DAY_US
    first_day = int(days.min())
    tokens: list[str | None] = [None]
    codes = np.zeros(1, np.int64)
    if token is not None:
        tokens, codes = _tokens(slab, token)
    keys = (days - first_day) * len(tokens) + codes
    if (keys == keys[0]).all():
        yield _partition(int(keys[0]), first_day, tokens), slab
        return
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=ordered[0] - 1))
    slab = slab.take(pa.array(order))
    for start, end in zip(starts, [*starts[1:], len(order)], strict=True):
        yield _partition(int(ordered[start]), first_day, tokens), slab.slice(start, end - start)


def _token_of(subjects: pa.Array, token: int) -> pa.Array:
    """The token of each subject at place ``token``, from 1; null if it has fewer."""
    pattern = rf"^(?:[^.]*\.){{{token - 1}}}(?P<token>[^.]+)"
    return pc.struct_field(pc.extract_regex(subjects, pattern), "token")


def _tokens(slab: pa.Table, token: int) -> tuple[list[str | None], np.ndarray]:
    """The tokens that occur, as folders name them, and the position of each message's."""
    subjects = slab["subject"].combine_chunks().dictionary_encode()
    found = _token_of(subjects.dictionary, token).dictionary_encode()
    # Messages without the token are at the end.
    names = [quoted(name) for name in found.dictionary.to_pylist()]
    of_subject = pc.fill_null(found.indices, len(names)).to_numpy(zero_copy_only=False)
    codes = of_subject[subjects.indices.to_numpy()].astype(np.int64)
    return [*names, NO_TOKEN], codes


def _partition(key: int, first_day: int, tokens: list[str | None]) -> Partition:
    day, token = divmod(key, len(tokens))
    return Partition(np.datetime64(first_day + day, "D").item(), tokens[token])
