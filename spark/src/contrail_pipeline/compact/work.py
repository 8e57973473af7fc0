"""Merge files of a lake: what runs in a worker of Spark."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from contrail_pipeline.failures import unwritable
from contrail_spark.batch import freeze_modules
from contrail_spark.errors import ContrailSparkError, LakeError
from contrail_spark.lake.manifest import FileEntry, partition_of
from contrail_spark.lake.parquet import SCHEMA, SLAB_BYTES, PartitionedWriter
from contrail_spark.lake.rows import read_file
from contrail_spark.lake.selection import Selection
from contrail_spark.lake.store import Lake

TOKEN_SLAB_BYTES: Final = 4 << 20
"""Row groups in a lake with subject tokens. A range is read from the files of all tokens, and of
each whole row groups are decoded, however few of their messages are in the range."""


@dataclass(frozen=True, slots=True)
class MergeTask:
    """Files of one shard and partition to merge into one that only ``commit`` can add."""

    root: str
    files: tuple[FileEntry, ...]
    commit: int


@dataclass(frozen=True, slots=True)
class Merged:
    """What replaces the files of a task, or why it failed."""

    old: tuple[FileEntry, ...]
    new: FileEntry | None = None
    problem: str | None = None


def size_of(root: Path, entry: FileEntry) -> int | None:
    """The bytes of a file's messages before compression; None if the file is gone.

    Raises LakeError if the file is damaged.
    """
    try:
        metadata = pq.read_metadata(root / entry.path)
    except FileNotFoundError:
        return None
    except (pa.ArrowException, OSError) as error:
        raise LakeError(f"the lake in {root}: {entry.path} is damaged: {error}") from error
    groups = (metadata.row_group(at) for at in range(metadata.num_row_groups))
    return sum(int(group.total_byte_size) for group in groups)


def merge(task: MergeTask) -> Merged:
    """Write the messages of several files to one, which belongs to the lake after the commit."""
    freeze_modules()
    try:
        return Merged(task.files, _merged(task))
    except ContrailSparkError as error:
        return Merged(task.files, problem=f"the lake in {task.root}: {error}")
    except (OSError, pa.ArrowException) as error:
        return Merged(task.files, problem=unwritable(task.root, error))


def _merged(task: MergeTask) -> FileEntry:
    lake, first = Lake.open(task.root), task.files[0]
    slab_bytes = SLAB_BYTES if lake.info.token is None else TOKEN_SLAB_BYTES
    with PartitionedWriter(lake, first.shard, task.commit, slab_bytes) as writer:
        for entry in task.files:
            # What is damaged must not get a new checksum.
            if problem := lake.verify(entry):
                raise LakeError(problem)
            bounds, messages = (entry.from_seq, entry.to_seq), 0
            for batch in read_file(lake.root, entry, bounds, tuple(SCHEMA.names), Selection()):
                messages += batch.num_rows
                writer.write(batch)
            if messages != entry.messages:
                raise LakeError(
                    f"{entry.path} has {messages:,} messages in its range instead of "
                    f"{entry.messages:,}"
                )
        entries = writer.finish()
    if len(entries) > 1 or partition_of(entries[0]) != partition_of(first):
        names = ", ".join(each.path for each in task.files)
        raise LakeError(f"messages of other folders are in one of {names}")
    return entries[0]
