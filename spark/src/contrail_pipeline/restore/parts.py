"""The restore job: which parts of a lake a stream lacks, in which order they are replayed."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from contrail_client.cli import show, units
from contrail_client.cli.ending import Failed
from contrail_client.configs import StreamConfig
from contrail_client.errors import NotFound
from contrail_common.config_rules import SUBJECTS_MAX
from contrail_pipeline.bounds import Bounds
from contrail_pipeline.failures import in_one_line
from contrail_pipeline.job import Job
from contrail_pipeline.restore.progress import Progress
from contrail_pipeline.restore.work import (
    BATCH_SEQUENCES,
    RestoreTask,
    Target,
    first_tokens,
    number_of,
    restore_part,
)
from contrail_pipeline.tasks import run_tasks
from contrail_spark.client import ReplayClient
from contrail_spark.lake.manifest import FileEntry, State
from contrail_spark.lake.splits import (
    LakeSplit,
    files_of,
    missing_wanted,
    verified_once,
)
from contrail_spark.lake.store import Lake
from contrail_spark.options import ReplayOptions, parse_options, parse_write_options
from contrail_spark.tiered import lake_ranges, selection

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

IDS_MAX: Final = 1 << 19
"""Messages that are sent at the same time at most: the stream has to know all of their ids."""
WAVE_BATCHES_MAX: Final = 16


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user wants restored, and how.

    With ``create`` the stream is created if it does not exist, and captures ``capture``. ``name``
    tells restores of the same messages apart.
    """

    bounds: Bounds
    create: bool = False
    capture: tuple[str, ...] = ()
    prefix: str = ""
    origin: bool = False
    name: str = ""


@dataclass(slots=True)
class Totals:
    """What a run of the job has sent."""

    messages: int = 0
    duplicates: int = 0


class Restorer:
    """One run of the job."""

    def __init__(self, job: Job, root: Path, stream: str, wishes: Wishes) -> None:
        self._job = job
        self._root = root
        self._stream = stream
        self._wishes = wishes

    def run(self) -> None:
        """Send everything that the stream may lack."""
        with in_one_line():
            server = self._job.server_options(self._stream)
            options = parse_options(server | self._wishes.bounds.options())
            lake = Lake.open(self._root)
            state = lake.state()
            files = self._files(options, lake, state)
            found = [entry for _, entries in files.values() for entry in entries]
            if self._job.dry_run:
                self._tell(lake, found)
                return
            with self._job.spark() as spark:
                self._ensure_stream(spark, lake, state, found)
                progress = self._progress(options, lake)
                target = Target(
                    parse_write_options(server),
                    progress.producer,
                    self._wishes.prefix,
                    self._wishes.origin,
                )
                tasks = [
                    [
                        RestoreTask(str(lake.root), selection(options), split, target)
                        for split in own
                    ]
                    for own in self._splits(files, progress)
                ]
                totals = self._send(spark, tasks, state, progress)
            self._report(lake, totals)

    def _files(
        self, options: ReplayOptions, lake: Lake, state: State
    ) -> dict[int, tuple[tuple[int, int], list[FileEntry]]]:
        """The files of each shard, and the range to restore of them."""
        wanted = selection(options)
        found = {}
        for shard, bounds in lake_ranges(options, state, None).items():
            for first, last in missing_wanted(state, shard, bounds, wanted):
                show.warning(
                    f"shard {shard}: sequences {first}..{last} were lost before they were archived",
                    as_json=self._job.as_json,
                )
            found[shard] = bounds, files_of(state, shard, bounds, wanted, lake.info.token)
        return found

    def _splits(
        self,
        files: dict[int, tuple[tuple[int, int], list[FileEntry]]],
        progress: Progress,
    ) -> list[list[LakeSplit]]:
        """For each shard the splits that are not known to be complete, in their order."""
        size = max(1, min(WAVE_BATCHES_MAX, IDS_MAX // (BATCH_SEQUENCES * max(1, len(files)))))
        found = []
        for shard, (bounds, entries) in files.items():
            done = progress.done(shard)
            found.append(verified_once(splits_of(shard, bounds, entries, done, size)))
        return found

    def _send(
        self,
        spark: "SparkSession",
        tasks: Sequence[Sequence[RestoreTask]],
        state: State,
        progress: Progress,
    ) -> Totals:
        """Send wave after wave: of each shard one split, so that its messages keep their order."""
        totals = Totals()
        expected = {entry for own in tasks for each in own for entry in each.split.files}
        expected_messages = sum(each.messages for each in expected)
        with self._job.progress(f"restoring {self._stream}", expected_messages) as advance:
            for wave in zip_longest(*tasks):
                parts = [task for task in wave if task is not None]
                outcomes = run_tasks(spark, parts, restore_part, lambda _: None)
                for outcome in outcomes:
                    if outcome.problem is not None:
                        raise Failed(outcome.problem)
                    totals.messages += outcome.messages
                    totals.duplicates += outcome.duplicates
                for part in parts:
                    # The last batch may be one that the lake does not have all messages of yet.
                    full = state.archived_through(part.split.shard) // BATCH_SEQUENCES
                    progress.reached(part.split.shard, min(number_of(part.split.to_seq), full))
                if problem := progress.save():
                    show.warning(problem, as_json=self._job.as_json)
                advance(totals.messages)
        return totals

    def _progress(self, options: ReplayOptions, lake: Lake) -> Progress:
        """What earlier runs of this restore have sent to this stream."""
        plan = ReplayClient(parse_options(self._job.server_options(self._stream))).plan()
        info = lake.info
        if plan.incarnation == info.incarnation:
            raise Failed(
                f"the lake in {lake.root} is the archive of this stream {self._stream}; to read "
                "both as one, use the option lake of the data source"
            )
        wishes = self._wishes
        selected = (options.subjects, options.from_seq, options.to_seq)
        times = (options.start_time, options.end_time)
        # Another lake of the same stream may have messages that this one lacks. The stream would
        # take them for repetitions, because it does not look at the ids of earlier batches.
        source = (info.stream, info.incarnation, info.created_us)
        which = (source, selected, times, wishes.prefix, wishes.name)
        digest = hashlib.sha256(msgspec.json.encode(which)).hexdigest()[:24]
        return Progress.load(lake, f"restore-{digest}", plan.incarnation)

    def _ensure_stream(
        self, spark: "SparkSession", lake: Lake, state: State, found: list[FileEntry]
    ) -> None:
        try:
            self._job.client.get_stream(self._stream)
        except NotFound:
            if not self._wishes.create:
                raise
        else:
            return
        config: StreamConfig = {"subjects": list(self._wishes.capture)}
        if not self._wishes.capture:
            paths = [str(lake.root / each.path) for each in found]
            read = run_tasks(spark, paths, first_tokens, lambda _: None)
            for each in read:
                if each.problem is not None:
                    raise Failed(each.problem)
            tokens = {one for each in read for one in each.filters}
            config = {"subjects": captured(tokens, self._wishes.prefix)}
        if len(state.shards) > 1:
            config["shards"] = max(state.shards) + 1
        self._job.client.create_stream(self._stream, config)
        captures = ", ".join(config["subjects"])
        show.note(f"created stream {self._stream} ({captures})", as_json=self._job.as_json)

    def _tell(self, lake: Lake, found: list[FileEntry]) -> None:
        exists = True
        with suppress(NotFound):
            exists = False
            self._job.client.get_stream(self._stream)
            exists = True
        if not exists and not self._wishes.create:
            self._job.client.get_stream(self._stream)
        messages = sum(each.messages for each in found)
        result = {
            "lake": str(lake.root),
            "stream": self._stream,
            "create": not exists,
            "files": len(found),
            "messages_max": messages,
        }
        text = (
            f"would restore at most {units.counted(messages, 'message')} from "
            f"{units.counted(len(found), 'file')} to {'stream' if exists else 'the new stream'} "
            f"{self._stream}"
        )
        self._job.done(text, result)

    def _report(self, lake: Lake, totals: Totals) -> None:
        stored = totals.messages - totals.duplicates
        result = {
            "lake": str(lake.root),
            "stream": self._stream,
            "messages": totals.messages,
            "stored": stored,
            "duplicates": totals.duplicates,
        }
        text = f"{units.counted(stored, 'message')} restored to stream {self._stream}"
        if totals.duplicates:
            text += f"; {totals.duplicates:,} were there already"
        self._job.done(text, result)
        kept = self._job.client.get_stream(self._stream).state.messages
        if kept < stored:
            show.warning(
                f"stream {self._stream} has only {units.counted(kept, 'message')} now: its limits "
                "or its retention have removed others",
                as_json=self._job.as_json,
            )


def splits_of(
    shard: int, bounds: tuple[int, int], entries: Sequence[FileEntry], done: int, size: int
) -> Iterator[LakeSplit]:
    """Splits of up to ``size`` numbered batches after batch ``done``, where there are files."""
    low, high = max(bounds[0], done * BATCH_SEQUENCES + 1), bounds[1]
    while low <= high:
        later = [each for each in entries if each.to_seq >= low]
        if not later:
            return
        low = max(low, min(each.from_seq for each in later))
        last = min(high, (number_of(low) + size - 1) * BATCH_SEQUENCES)
        files = tuple(each for each in later if each.from_seq <= last)
        if low <= last and files:
            yield LakeSplit(shard, low, last, files)
        low = last + 1


def captured(tokens: set[str], prefix: str) -> list[str]:
    """The subjects of a stream that captures everything in the lake."""
    found = sorted(prefix + each for each in tokens)
    if prefix.endswith("."):
        found = [f"{prefix}>"]
    if not found:
        raise Failed("the lake has no such messages, so the stream cannot be created from it")
    if len(found) > SUBJECTS_MAX:
        raise Failed(
            f"the subjects in the lake begin with more than {SUBJECTS_MAX} tokens; use --capture"
        )
    return found
