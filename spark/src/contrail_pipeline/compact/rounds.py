"""The compaction job: finds small files of a lake that follow each other, and merges them."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from contrail_client.cli import units
from contrail_client.cli.ending import Failed
from contrail_common.timeunits import NS_PER_US
from contrail_pipeline.compact.plan import Group, plan, rounds, unmeasured
from contrail_pipeline.compact.work import Merged, MergeTask, merge, size_of
from contrail_pipeline.failures import in_one_line
from contrail_pipeline.job import Job
from contrail_pipeline.tasks import run_tasks
from contrail_spark.errors import LakeConflictError, LakeError
from contrail_spark.lake.manifest import Commit, FileEntry, State
from contrail_spark.lake.store import Lake

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FILES_PER_CORE: Final = 8
"""Full files of a round for each core. What a killed job has to repeat is at most one round."""
GROUPS_MAX: Final = 1_024
"""The same for groups that are small: each is a task of Spark."""
ATTEMPTS: Final = 10
"""Other jobs may write to the lake meanwhile; each attempt begins with what they have done."""
_MEASURING_THREADS: Final = 8


@dataclass(frozen=True, slots=True)
class Wishes:
    """How large files are to be, before compression, and how long replaced ones are kept."""

    file_bytes: int
    keep_us: int


@dataclass(slots=True)
class Totals:
    """What a run of the job has done: ``new`` files are in place of ``old`` ones, by path."""

    commits: int = 0
    old: dict[str, FileEntry] = field(default_factory=dict)
    new: dict[str, FileEntry] = field(default_factory=dict)
    deleted: int = 0

    def add(self, merged: Sequence[Merged]) -> None:
        """Count a commit. Files that this run has made may be merged again."""
        self.commits += 1
        for each in merged:
            for entry in each.old:
                if self.new.pop(entry.path, None) is None:
                    self.old[entry.path] = entry
            if each.new is not None:
                self.new[each.new.path] = each.new


class Compactor:
    """One run of the job."""

    def __init__(self, job: Job, root: Path, wishes: Wishes) -> None:
        self._job = job
        self._root = root
        self._wishes = wishes
        # Of all files that were measured, by path: a path never gets another content.
        self._sizes: dict[str, int] = {}
        self.totals = Totals()

    def run(self) -> None:
        """Merge what there is to merge, and delete what was replaced long enough ago."""
        with in_one_line():
            lake = Lake.open(self._root)
            if self._job.dry_run:
                self._tell(lake)
                return
            # First, because a disk that is full may need the space.
            self.totals.deleted += lake.clean(self._wishes.keep_us)
            if self._groups(lake)[1]:
                with self._job.spark() as spark:
                    self.merge_all(spark, lake)
                self.totals.deleted += lake.clean(self._wishes.keep_us)
            self._report(lake)

    def merge_all(self, spark: "SparkSession", lake: Lake) -> None:
        """Merge files until there are none to merge."""
        cores = spark.sparkContext.defaultParallelism
        round_bytes = FILES_PER_CORE * cores * self._wishes.file_bytes
        losses = 0
        while True:
            state, groups = self._groups(lake)
            if not groups:
                return
            try:
                with self._job.progress("compact", sum(each.messages for each in groups)) as bar:
                    done = 0
                    for part in rounds(groups, round_bytes, GROUPS_MAX):
                        state = self._round(spark, lake, state, part, shares(part, done, bar))
                        done += sum(each.messages for each in part)
                        losses = 0
            except LakeConflictError as error:
                losses += 1
                if losses == ATTEMPTS:
                    raise Failed(
                        f"other jobs have changed the lake in {lake.root} {ATTEMPTS} times; run "
                        "this again when they have ended"
                    ) from error
                # A shorter round is more likely to be faster than they are.
                round_bytes = max(self._wishes.file_bytes, round_bytes // 2)

    def _groups(self, lake: Lake) -> tuple[State, list[Group]]:
        """The state of the lake, and what there is to merge of it."""
        file_bytes = self._wishes.file_bytes
        while True:
            state = lake.state()
            files = state.live_files()
            unknown = [
                each for each in unmeasured(files, file_bytes) if each.path not in self._sizes
            ]
            # Mostly waiting for a disk, which may be far away.
            with ThreadPoolExecutor(_MEASURING_THREADS, "measuring") as threads:
                sizes = list(threads.map(lambda each: size_of(lake.root, each), unknown))
            found = dict(zip((each.path for each in unknown), sizes, strict=True))
            gone = [path for path, size in found.items() if size is None]
            self._sizes |= {path: size for path, size in found.items() if size is not None}
            if not gone:
                return state, plan(files, self._sizes, file_bytes)
            if lake.state().number == state.number:
                raise LakeError(f"the lake in {lake.root}: {gone[0]} is missing")

    def _round(
        self,
        spark: "SparkSession",
        lake: Lake,
        state: State,
        groups: Sequence[Group],
        finished: Callable[[int], None],
    ) -> State:
        """Merge and commit some groups; LakeConflictError if they have to be planned again."""
        number = state.number + 1
        tasks = [MergeTask(str(lake.root), each.files, number) for each in groups]
        results = run_tasks(spark, tasks, merge, finished)
        for each in results:
            if each.problem is None:
                continue
            # The job that made this commit may also have deleted files.
            if lake.has_commit(number):
                raise LakeConflictError(each.problem)
            raise Failed(each.problem)
        change = Commit(
            number=number,
            job="compact",
            time_us=time.time_ns() // NS_PER_US,
            added=tuple(each.new for each in results if each.new is not None),
            removed=tuple(entry.path for each in results for entry in each.old),
        )
        after = lake.commit(state, change)
        self.totals.add(results)
        return after

    def _tell(self, lake: Lake) -> None:
        """Say what the job would do."""
        state, groups = self._groups(lake)
        files = sum(len(each.files) for each in groups)
        leftovers = len(lake.leftovers(self._wishes.keep_us))
        text = (
            f"would merge {units.counted(files, 'file')} of the lake in {lake.root} into "
            f"{units.count(len(groups))}, and delete {units.counted(leftovers, 'old file')}"
        )
        result = {
            "dry_run": True,
            "lake": str(lake.root),
            "commit": state.number,
            "merged": files,
            "files": len(groups),
            "messages": sum(each.messages for each in groups),
            "deleted": leftovers,
        }
        self._job.done(text, result)

    def _report(self, lake: Lake) -> None:
        totals, state = self.totals, lake.state()
        before, after = (
            sum(each.bytes for each in own.values()) for own in (totals.old, totals.new)
        )
        waiting = sum((lake.root / path).exists() for path in state.removed)
        text = f"nothing to merge in {units.counted(len(state.files), 'file')}"
        if totals.commits:
            text = (
                f"merged {units.counted(len(totals.old), 'file')} ({units.size(before)}) into "
                f"{units.count(len(totals.new))} ({units.size(after)})"
            )
        text += f"; {units.counted(totals.deleted, 'old file')} deleted" if totals.deleted else ""
        text += f"; {units.counted(waiting, 'old file')} kept for readers" if waiting else ""
        result = {
            "lake": str(lake.root),
            "commits": totals.commits,
            "merged": len(totals.old),
            "files": len(totals.new),
            "messages": sum(each.messages for each in totals.new.values()),
            "bytes_before": before,
            "bytes": after,
            "deleted": totals.deleted,
            "waiting": waiting,
        }
        self._job.done(text, result)


def shares(
    groups: Sequence[Group], done: int, advance: Callable[[int], None]
) -> Callable[[int], None]:
    """Make the messages that are done, for the progress bar, of a number of finished tasks."""
    return lambda finished: advance(done + sum(each.messages for each in groups[:finished]))
