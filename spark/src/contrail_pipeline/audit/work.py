"""What Spark's workers do in an audit: each task reads one range of a shard."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from contrail_pipeline.audit.checks import RangeCheck, RangeReport
from contrail_pipeline.audit.digest import COLUMNS, ChunkDigest, ContentDigest
from contrail_pipeline.audit.findings import Finding
from contrail_pipeline.audit.lakes import LakeRange, verify
from contrail_pipeline.audit.replicas import Copies
from contrail_spark.batch import freeze_modules
from contrail_spark.client import ReplayClient
from contrail_spark.errors import ContrailSparkError, LakeError, ProtocolError
from contrail_spark.lake.manifest import FileEntry
from contrail_spark.lake.store import Lake
from contrail_spark.options import ReplayOptions
from contrail_spark.plan import ReplayPlan, Split


@dataclass(frozen=True, slots=True)
class RangeTask:
    """A range of the stream to check.

    ``nodes`` are those whose copies are to be compared, the leader first; ``archived`` is the part
    of the range that the lake has too.
    """

    options: ReplayOptions
    plan: ReplayPlan
    shard: int
    from_seq: int
    to_seq: int
    nodes: tuple[str, ...] = ()
    archived: LakeRange | None = None

    def read(self, from_seq: int, to_seq: int) -> Iterator[pa.RecordBatch]:
        """The messages that the leader has of a part of the range."""
        split = Split(self.shard, from_seq, to_seq, 0, 0)
        return ReplayClient(self.options).read(self.plan, split, ("shard", *COLUMNS))


@dataclass(frozen=True, slots=True)
class FileTask:
    """A file of a lake to compare with its entry in the manifest."""

    root: Path
    entry: FileEntry


def audit_range(task: RangeTask) -> RangeReport:
    """Read a range, and compare it with the other copies and with the lake."""
    freeze_modules()
    check = RangeCheck(task.shard, task.from_seq, task.to_seq)
    archived = _Archived(task.archived)
    try:
        for batch in task.read(task.from_seq, task.to_seq):
            check.add(batch)
            archived.add(batch)
    except ProtocolError as error:
        report = check.finish()
        # What follows in the range is unknown, so it is not missing.
        report.gaps = [run for run in report.gaps if run[1] < task.to_seq]
        report.findings.append(
            Finding("protocol", f"shard {task.shard}: {error}", "stream", task.shard)
        )
        return report
    except ContrailSparkError as error:
        report = check.finish()
        report.error = str(error)
        return report
    report = check.finish()
    if len(task.nodes) > 1:
        copies = Copies(task.options, task.plan, task.shard, task.nodes)
        report.findings += copies.compare(task.from_seq, task.to_seq, report.digests)
    if task.archived is not None:
        try:
            report.findings += task.archived.compare(archived.finish(), report.gaps, task.read)
        except ContrailSparkError as error:
            report.error = str(error)
    return report


def check_archived(task: LakeRange) -> RangeReport:
    """Check a range of a lake that the stream no longer has."""
    freeze_modules()
    return RangeReport(task.shard, task.from_seq, task.to_seq, findings=task.check())


def check_file(task: FileTask) -> Finding | None:
    """Compare a file with its entry in the manifest; None if it is whole."""
    freeze_modules()
    try:
        return verify(Lake.open(task.root), task.entry)
    except LakeError as error:
        return Finding("lake_file", str(error), "lake")


class _Archived:
    """The checksums of the part of a range that the lake has too."""

    def __init__(self, archived: LakeRange | None) -> None:
        self._bounds = None if archived is None else (archived.from_seq, archived.to_seq)
        self._digest = ContentDigest()
        self._found: list[ChunkDigest] = []

    def add(self, batch: pa.RecordBatch) -> None:
        if self._bounds is None:
            return
        seqs = batch.column("seq").to_numpy()
        low, high = seqs.searchsorted(self._bounds[0]), seqs.searchsorted(self._bounds[1], "right")
        if low < high:
            self._found += self._digest.update(batch.slice(low, high - low))

    def finish(self) -> list[ChunkDigest]:
        return [*self._found, *self._digest.finish()]
