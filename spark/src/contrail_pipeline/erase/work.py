"""Find and remove messages in the files of a lake: what runs in workers of Spark."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from contrail_pipeline.failures import unwritable
from contrail_spark.errors import ContrailSparkError, LakeError
from contrail_spark.lake import files
from contrail_spark.lake.manifest import FileEntry, Range
from contrail_spark.lake.parquet import SCHEMA, PartitionedWriter
from contrail_spark.lake.rows import limits_of, read_file
from contrail_spark.lake.selection import Selection
from contrail_spark.lake.store import Lake

_KEYS: Final = ["shard", "seq", "subject"]
_EVERYTHING: Final = (1, (1 << 63) - 1)


@dataclass(frozen=True, slots=True)
class Doomed:
    """The messages to erase: those of ``subjects`` (filters), or those in ``ranges``."""

    subjects: tuple[str, ...] = ()
    ranges: tuple[Range, ...] = ()

    def may_be_in(self, entry: FileEntry, token: int | None) -> bool:
        """False if a file of the lake has none of the messages."""
        by_subject = bool(self.subjects) and Selection(self.subjects).may_have(entry, token)
        return by_subject or any(
            each.shard == entry.shard
            and each.from_seq <= entry.to_seq
            and each.to_seq >= entry.from_seq
            for each in self.ranges
        )

    def mask(self, batch: pa.RecordBatch) -> pa.BooleanArray:
        """Which rows are to be erased."""
        found: Any = pa.repeat(False, batch.num_rows)
        if self.subjects:
            found = Selection(self.subjects).mask(batch)
        shards, seqs = batch.column("shard"), batch.column("seq")
        for each in self.ranges:
            inside = pc.and_(
                pc.greater_equal(seqs, each.from_seq), pc.less_equal(seqs, each.to_seq)
            )
            found = pc.or_(found, pc.and_(inside, pc.equal(shards, each.shard)))
        return found


@dataclass(frozen=True, slots=True)
class Scan:
    """Files to look through, by their paths below the lake in ``root``.

    Unless ``thorough``, row groups are left out whose statistics exclude the messages.
    """

    root: str
    paths: tuple[str, ...]
    doomed: Doomed
    thorough: bool


@dataclass(frozen=True, slots=True)
class Found:
    """A file: its messages that were looked at, those to erase, and why it cannot be read.

    ``messages`` and ``doomed`` are 0 for a file that is gone.
    """

    path: str
    messages: int = 0
    doomed: int = 0
    problem: str | None = None


def scan(task: Scan) -> list[Found]:
    """Count the messages to erase in each of the files."""
    return [_scanned(task, path) for path in task.paths]


def _scanned(task: Scan, path: str) -> Found:
    messages = doomed = 0
    try:
        with pq.ParquetFile(Path(task.root, path), page_checksum_verification=True) as file:
            for group in range(file.metadata.num_row_groups):
                limits = limits_of(file.metadata.row_group(group)).get("subject")
                wanted = Selection(task.doomed.subjects)
                excluded = limits is not None and not wanted.may_have_subjects(*limits)
                if excluded and not task.thorough and not task.doomed.ranges:
                    continue
                before = doomed
                for batch in file.iter_batches(row_groups=[group], columns=_KEYS):
                    messages += batch.num_rows
                    doomed += pc.sum(task.doomed.mask(batch)).as_py() or 0
                if doomed == before and limits is not None and task.doomed.subjects:
                    # Statistics name two subjects, which must be those of messages.
                    named = pa.RecordBatch.from_pydict({"subject": pa.array(limits, pa.string())})
                    doomed += pc.sum(wanted.mask(named)).as_py() or 0
    except FileNotFoundError:
        return Found(path)
    except (pa.ArrowException, OSError, KeyError) as error:
        return Found(path, messages, doomed, f"{path} cannot be read: {error}")
    return Found(path, messages, doomed)


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A file of the lake to write again for ``commit``, without the messages to erase."""

    root: str
    entry: FileEntry
    doomed: Doomed
    commit: int


@dataclass(frozen=True, slots=True)
class Rewritten:
    """What replaces a file, which is nothing if all its messages are erased, or what failed."""

    old: FileEntry
    new: tuple[FileEntry, ...] = ()
    problem: str | None = None

    @property
    def erased(self) -> int:
        """The number of messages that are not in the new files."""
        return self.old.messages - sum(each.messages for each in self.new)


def rewrite(tasks: Sequence[Rewrite]) -> list[Rewritten]:
    """Write files again, one after another."""
    return [_rewritten(task) for task in tasks]


def _rewritten(task: Rewrite) -> Rewritten:
    lake, entry = Lake.open(task.root), task.entry
    try:
        # What is damaged must not get a new checksum.
        if problem := lake.verify(entry):
            raise LakeError(problem)
        with PartitionedWriter(lake, entry.shard, task.commit) as writer:
            for batch in read_file(lake.root, entry, _EVERYTHING, tuple(SCHEMA.names), Selection()):
                kept = batch.filter(pc.invert(task.doomed.mask(batch)))
                if kept.num_rows:
                    writer.write(kept)
            return Rewritten(entry, tuple(writer.finish()))
    except ContrailSparkError as error:
        return Rewritten(entry, problem=f"the lake in {task.root}: {error}")
    except (OSError, pa.ArrowException) as error:
        return Rewritten(entry, problem=unwritable(task.root, error))


def delete(root: Path, path: str) -> str | None:
    """Delete a file for good, and its folder if that is empty; its SHA-256 before.

    None if the file was gone already.
    """
    whole = root / path
    try:
        digest = files.sha256(whole)
        whole.unlink()
    except FileNotFoundError:
        return None
    files.sync_folder(whole.parent)
    # The name of the folder may be a token of the erased subject.
    if whole.parent.name.startswith("token="):
        try:
            whole.parent.rmdir()
            files.sync_folder(whole.parent.parent)
        except OSError:
            pass  # it has other files
    return digest
