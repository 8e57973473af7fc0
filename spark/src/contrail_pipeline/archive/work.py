"""Archive one piece of a stream: what runs in a worker of Spark."""

from dataclasses import dataclass

import pyarrow as pa

from contrail_pipeline.archive.plan import Piece
from contrail_pipeline.failures import unwritable
from contrail_spark.batch import freeze_modules
from contrail_spark.client import ReplayClient
from contrail_spark.errors import ContrailSparkError
from contrail_spark.lake.manifest import FileEntry, Range
from contrail_spark.lake.parquet import SCHEMA, PartitionedWriter
from contrail_spark.lake.store import Lake
from contrail_spark.options import ReplayOptions
from contrail_spark.plan import ReplayPlan, Split


@dataclass(frozen=True, slots=True)
class ArchiveTask:
    """A piece to archive to the lake in ``root``, in files that only ``commit`` can add."""

    root: str
    options: ReplayOptions
    stream: str
    incarnation: str
    piece: Piece
    commit: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """The files of a task, what was removed from the stream meanwhile, and why it failed."""

    entries: tuple[FileEntry, ...] = ()
    lost: tuple[Range, ...] = ()
    problem: str | None = None


def archive_piece(task: ArchiveTask) -> Outcome:
    """Write the messages of a piece to data files, which belong to the lake after the commit."""
    freeze_modules()
    lost: list[Range] = []
    piece = task.piece
    try:
        lake = Lake.open(task.root)
        client = ReplayClient(
            task.options,
            lost=lambda first, last: lost.append(Range(piece.shard, first, last)),
        )
        plan = ReplayPlan(task.stream, task.incarnation, ())
        split = Split(piece.shard, piece.from_seq, piece.to_seq, 0, 0)
        with PartitionedWriter(lake, piece.shard, task.commit) as writer:
            for batch in client.read(plan, split, tuple(SCHEMA.names)):
                writer.write(batch)
            return Outcome(tuple(writer.finish()), tuple(lost))
    except ContrailSparkError as error:
        return Outcome(problem=str(error))
    except (OSError, pa.ArrowException) as error:
        return Outcome(problem=unwritable(task.root, error))
