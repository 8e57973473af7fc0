"""The archive job: finds what is new in a stream, and adds it to the lake in rounds."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from contrail_client.cli import units
from contrail_client.cli.ending import Failed
from contrail_pipeline.archive.plan import Piece, covered, cut, missing_of, rounds, spelled
from contrail_pipeline.archive.work import ArchiveTask, archive_piece
from contrail_pipeline.failures import in_one_line
from contrail_pipeline.job import Job
from contrail_pipeline.tasks import run_tasks
from contrail_spark.client import ReplayClient
from contrail_spark.errors import LakeConflictError, LakeError, LakeNotFoundError
from contrail_spark.lake.manifest import Commit, Range, State
from contrail_spark.lake.store import Lake
from contrail_spark.options import parse_options
from contrail_spark.plan import ReplayPlan, Split

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Goal = dict[int, int]
"""The last sequence to archive of each shard."""

PIECES_PER_CORE: Final = 8
"""Pieces of a round for each core. What a killed job has to repeat is at most one round."""
SMALLEST_PIECE: Final = 8 << 20
"""Messages are divided among the cores, but not into smaller files than this."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user wants of an archive.

    ``file_bytes`` are those of the messages in a file, before compression.
    """

    token: int | None
    file_bytes: int
    fail_on_data_loss: bool


@dataclass(slots=True)
class Totals:
    """What a run of the job has done."""

    commits: int = 0
    messages: int = 0
    files: int = 0
    bytes: int = 0
    lost: list[Range] = field(default_factory=list)

    def add(self, change: Commit) -> None:
        """Count a commit."""
        self.commits += 1
        self.messages += sum(each.messages for each in change.added)
        self.files += len(change.added)
        self.bytes += sum(each.bytes for each in change.added)
        self.lost += change.lost


class Archiver:
    """One run of the job."""

    def __init__(self, job: Job, stream: str, root: Path, wishes: Wishes) -> None:
        self._job = job
        self._stream = stream
        self._root = root
        self._wishes = wishes
        # The plan of the whole stream is asked only for its shards.
        self._options = parse_options(job.server_options(stream) | {"splits": "1"})
        self._client = ReplayClient(self._options)
        self.totals = Totals()

    def run(self) -> None:
        """Archive what is new since the last run, up to the end that the stream has now."""
        # The client's error for a stream that does not exist says most.
        self._job.client.get_stream(self._stream)
        with in_one_line():
            plan = self._plan()
            goal = {each.shard: each.last_seq for each in plan.shards}
            if self._job.dry_run:
                self._tell(plan, goal)
                return
            lake = Lake.ensure(self._root, plan.stream, plan.incarnation, self._wishes.token)
            if self._missing(plan, lake.state(), goal):
                with self._job.spark() as spark:
                    self.catch_up(spark, lake, goal)
            lake.clean()
            self._report(lake)

    def _plan(self) -> ReplayPlan:
        plan = self._client.plan()
        if not plan.shards:
            raise LakeError("the server is older than 0.3, and does not say what shards have")
        return plan

    def _missing(self, plan: ReplayPlan, state: State, goal: Goal) -> list[Piece]:
        """Everything up to ``goal`` that is not in the lake.

        What had been removed before the lake knew the shard is no loss.
        """
        missing = [
            each
            for bounds in plan.shards
            for each in missing_of(bounds, state, goal.get(bounds.shard, 0))
        ]
        self._check_lost([one.range for one in missing if one.lost and one.shard in state.shards])
        return missing

    def catch_up(self, spark: "SparkSession", lake: Lake, goal: Goal) -> None:
        """Archive everything up to ``goal``.

        Without one the job would not end while messages are published faster than archived.
        """
        cores = spark.sparkContext.defaultParallelism
        while True:
            state, plan = lake.state(), self._plan()
            lake.check(plan.stream, plan.incarnation, self._wishes.token)
            pieces = self._cut(plan, self._missing(plan, state, goal), cores)
            if not pieces:
                return
            messages = sum(each.messages for each in pieces)
            with self._job.progress(f"archive {self._stream}", messages) as advance:
                try:
                    done = 0
                    for part in rounds(pieces, PIECES_PER_CORE * cores):
                        state = self._round(
                            spark, lake, (plan, state, part), shares(part, done, advance)
                        )
                        done += sum(each.messages for each in part)
                except LakeConflictError:
                    # Another job has changed the lake, and may have archived some of this.
                    continue

    def _cut(self, plan: ReplayPlan, missing: list[Piece], cores: int) -> list[Piece]:
        splits: dict[Piece, tuple[Split, ...]] = {}
        for part in missing:
            if part.lost:
                continue
            asked = Split(part.shard, part.from_seq, part.to_seq, 0, 0)
            found = self._client.plan_part(asked, self._wishes.file_bytes)
            if found.incarnation != plan.incarnation:
                raise LakeError(f"stream {self._stream} was deleted and created again just now")
            splits[part] = found.splits
        total = sum(split.bytes for found in splits.values() for split in found)
        size = min(self._wishes.file_bytes, max(SMALLEST_PIECE, -(-total // cores)))
        return [
            piece
            for part in missing
            for piece in ([part] if part.lost else cut(part.range, splits[part], size))
        ]

    def _round(
        self,
        spark: "SparkSession",
        lake: Lake,
        work: tuple[ReplayPlan, State, Sequence[Piece]],
        finished: Callable[[int], None],
    ) -> State:
        """Archive and commit some pieces; LakeConflictError if they have to be planned again."""
        plan, state, pieces = work
        number = state.number + 1
        tasks = [
            ArchiveTask(
                str(self._root), self._options, plan.stream, plan.incarnation, piece, number
            )
            for piece in pieces
            if not piece.lost
        ]
        outcomes = run_tasks(spark, tasks, archive_piece, finished) if tasks else []
        for each in outcomes:
            if each.problem is None:
                continue
            # The job that made this commit also deletes what others have written for it.
            if lake.has_commit(number):
                raise LakeConflictError(each.problem)
            raise Failed(each.problem)
        found = [each for outcome in outcomes for each in outcome.lost]
        self._check_lost(found)
        change = Commit(
            number=number,
            job="archive",
            time_us=time.time_ns() // 1_000,
            covered=covered(pieces),
            lost=tuple(sorted([*(each.range for each in pieces if each.lost), *found])),
            added=tuple(entry for outcome in outcomes for entry in outcome.entries),
        )
        after = lake.commit(state, change)
        self.totals.add(change)
        return after

    def _check_lost(self, lost: list[Range]) -> None:
        """Raise Failed if messages were lost that the user wants to have."""
        if lost and self._wishes.fail_on_data_loss:
            raise Failed(
                f"messages of stream {self._stream} were removed before they were archived: "
                f"{spelled(lost)}. To archive what is left, and record in the lake what was lost, "
                "use --no-fail-on-data-loss"
            )

    def _tell(self, plan: ReplayPlan, goal: Goal) -> None:
        """Say what the job would do."""
        state = State()
        try:
            lake = Lake.open(self._root)
        except LakeNotFoundError:
            Lake.check_new(self._root)
        else:
            lake.check(plan.stream, plan.incarnation, self._wishes.token)
            state = lake.state()
        pieces = self._cut(plan, self._missing(plan, state, goal), os.cpu_count() or 1)
        kept = [each for each in pieces if not each.lost]
        messages = sum(each.messages for each in kept)
        ranges, lost = covered(kept), [each.range for each in pieces if each.lost]
        text = f"nothing is new in stream {self._stream}"
        if kept:
            about = f"about {units.counted(messages, 'message')}"
            text = f"would archive {about} in {units.counted(len(kept), 'task')}"
            text += f" ({spelled(ranges)})"
        text += f"; would record as lost: {spelled(lost)}" if lost else ""
        result = {
            "dry_run": True,
            "stream": self._stream,
            "lake": str(self._root),
            "messages": messages,
            "tasks": len(kept),
            "ranges": msgspec.to_builtins(ranges),
            "lost": msgspec.to_builtins(lost),
        }
        self._job.done(text, result)

    def _report(self, lake: Lake) -> None:
        totals, state = self.totals, lake.state()
        text = f"nothing was new in stream {self._stream}"
        if totals.commits:
            text = (
                f"archived {units.counted(totals.messages, 'message')} of stream {self._stream} in "
                f"{units.counted(totals.files, 'file')} ({units.size(totals.bytes)})"
            )
        if totals.lost:
            text += f"; lost, because they had been removed: {spelled(totals.lost)}"
        result = {
            "stream": self._stream,
            "lake": str(self._root),
            "commits": totals.commits,
            "messages": totals.messages,
            "files": totals.files,
            "bytes": totals.bytes,
            "lost": msgspec.to_builtins(totals.lost),
            "archived_through": {
                str(shard): each.archived_through for shard, each in sorted(state.shards.items())
            },
        }
        self._job.done(text, result)


def shares(
    pieces: Sequence[Piece], done: int, advance: Callable[[int], None]
) -> Callable[[int], None]:
    """Make the messages that are done, for the progress bar, of a number of finished tasks."""
    each = [piece.messages for piece in pieces if not piece.lost]
    return lambda finished: advance(done + sum(each[:finished]))
