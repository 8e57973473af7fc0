"""The erase job: rewrites what has the messages, deletes the old files, and looks again.

Every step finds out from the lake what is left to do, so a job that was killed is run again.
"""

import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from contrail_client.cli import units
from contrail_client.cli.ending import Failed, Misuse
from contrail_client.models import Erasure
from contrail_common.timeunits import NS_PER_US, format_time
from contrail_pipeline.erase.work import (
    Doomed,
    Found,
    Rewrite,
    Rewritten,
    Scan,
    delete,
    rewrite,
    scan,
)
from contrail_pipeline.failures import in_one_line
from contrail_pipeline.job import Job
from contrail_pipeline.restore.progress import FOLDER as RESTORES
from contrail_pipeline.tasks import run_tasks
from contrail_spark.client import ReplayClient
from contrail_spark.errors import LakeConflictError
from contrail_spark.lake.layout import (
    DATA,
    LAKE_FILE,
    MANIFEST,
    TEMPORARY,
    parse_commit_name,
    parse_data_path,
    parse_temporary_name,
)
from contrail_spark.lake.manifest import Commit, Range, State
from contrail_spark.lake.store import Lake
from contrail_spark.options import parse_options

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")

ATTEMPTS: Final = 10
"""Other jobs may write to the lake meanwhile; each attempt begins with what they have done."""
SEQUENCES_MAX: Final = 100_000
_REQUEST_SEQUENCES: Final = 10_000
_WAIT_S: Final = 60.0
_TASKS_PER_CORE: Final = 4


@dataclass(frozen=True, slots=True)
class Wishes:
    """What to erase: subjects, and ranges of sequences whose shard may be left out."""

    subjects: tuple[str, ...]
    ranges: tuple[tuple[int | None, int, int], ...] = ()
    in_stream: bool = False
    wait_s: float = 600.0
    receipt: Path | None = None


@dataclass(slots=True)
class Done:
    """What a run of the job has done, for its receipt."""

    rewritten: list[Rewritten] = field(default_factory=list)
    deleted: list[dict[str, Any]] = field(default_factory=list)
    scanned: list[Found] = field(default_factory=list)
    documents: int = 0
    commit: int = 0
    erasures: list[Erasure] = field(default_factory=list)


class Eraser:
    """One run of the job."""

    def __init__(self, job: Job, root: Path, wishes: Wishes) -> None:
        self._job = job
        self._root = root
        self._wishes = wishes
        self._done = Done()

    def run(self) -> None:
        """Erase the messages, and print the receipt."""
        with in_one_line():
            started_ns = time.time_ns()
            lake = Lake.open(self._root)
            state = lake.state()
            doomed = Doomed(self._wishes.subjects, self._ranges(state))
            # First, so that nothing is half done, and no link is deleted in place of a file.
            surveyed(lake.root)
            if not self._job.dry_run and self._wishes.in_stream:
                self._erase_in_stream(lake, doomed)
            with self._job.spark() as spark:
                if self._job.dry_run:
                    self._tell(spark, lake, doomed, state)
                    return
                for _ in range(ATTEMPTS):
                    rewritten = self._rewrite(spark, lake, doomed)
                    if rewritten and self._sweep_and_prove(spark, lake, doomed):
                        break
                else:
                    raise Failed(
                        f"other jobs have changed the lake in {lake.root} {ATTEMPTS} times; run "
                        "this again when they have ended"
                    )
            self._report(lake, doomed, started_ns)

    def _ranges(self, state: State) -> tuple[Range, ...]:
        found = []
        for shard, first, last in self._wishes.ranges:
            seqs = f"{first}-{last}" if last > first else str(first)
            # A shard without messages is not in the lake, not even if it is the first one.
            if shard is None and state.shards.keys() - {0}:
                raise Misuse(
                    "the stream of the lake has several shards, each with its own sequences: use "
                    f"--seq SHARD:{seqs}"
                )
            # The stream may have a shard of which nothing is archived yet.
            if shard is not None and shard not in state.shards and not self._wishes.in_stream:
                raise Misuse(f"--seq {shard}:{seqs}: the lake has no messages of shard {shard}")
            found.append(Range(shard or 0, first, last))
        return tuple(found)

    def _erase_in_stream(self, lake: Lake, doomed: Doomed) -> None:
        """Erase in the stream first: otherwise the next archive would bring messages back."""
        client, stream = self._job.client, lake.info.stream
        plan = ReplayClient(parse_options(self._job.server_options(stream))).plan()
        if plan.incarnation != lake.info.incarnation:
            # It has other messages under the same sequences.
            raise Failed(
                f"stream {stream} was deleted and created again since the lake in {lake.root} was "
                f"begun; erase in the lake without --stream, and in the stream with "
                f"`contrail stream erase`"
            )
        ends = {each.shard: each.last_seq for each in plan.shards}
        for each in doomed.ranges:
            if each.shard not in ends:
                raise Misuse(f"--seq {each.shard}:...: stream {stream} has no shard {each.shard}")
            if each.to_seq > ends[each.shard]:
                # The server would refuse a part of a range after it has erased others.
                raise Misuse(
                    f"--seq: shard {each.shard} of stream {stream} ends with sequence "
                    f"{ends[each.shard]}, before {each.to_seq}"
                )
        if sum(each.to_seq - each.from_seq + 1 for each in doomed.ranges) > SEQUENCES_MAX:
            raise Misuse(f"--stream takes at most {SEQUENCES_MAX:,} sequences; erase by subject")
        receipts = [client.erase(stream, subject=each) for each in doomed.subjects]
        for each in doomed.ranges:
            seqs = range(each.from_seq, each.to_seq + 1)
            shard = each.shard if len(ends) > 1 else None
            receipts += [
                client.erase(stream, seqs[at : at + _REQUEST_SEQUENCES], shard=shard)
                for at in range(0, len(seqs), _REQUEST_SEQUENCES)
            ]
        deadline = time.monotonic() + self._wishes.wait_s
        for receipt in receipts:
            current = receipt
            while current.status != "done":
                left = deadline - time.monotonic()
                if left <= 0:
                    raise Failed(
                        f"the erasure {current.id} in stream {stream} is still pending; run this "
                        f"again later, or see `contrail erasure {current.id}`"
                    )
                current = client.erasure(current.id, wait_s=min(left, _WAIT_S))
            self._done.erasures.append(current)

    def _rewrite(self, spark: "SparkSession", lake: Lake, doomed: Doomed) -> bool:
        """Commit the affected files without the messages; False if another job was faster."""
        state = lake.state()
        affected = self._affected(spark, lake, doomed, state)
        if not affected:
            return True
        tasks = [
            Rewrite(str(lake.root), state.files[each.path], doomed, state.number + 1)
            for each in affected
        ]
        results = _run(spark, _shared(spark, tasks), rewrite, self._job, "rewriting")
        for each in results:
            if each.problem is None:
                continue
            # The job that made this commit also deletes what others have written for it.
            if lake.has_commit(state.number + 1):
                return False
            raise Failed(each.problem)
        change = Commit(
            number=state.number + 1,
            job="erase",
            time_us=time.time_ns() // NS_PER_US,
            added=tuple(entry for each in results for entry in each.new),
            removed=tuple(each.old.path for each in results),
        )
        try:
            lake.commit(state, change)
        except LakeConflictError:
            return False
        self._done.rewritten += results
        for each in results:
            self._delete(lake, each.old.path, each.erased)
        return True

    def _affected(
        self, spark: "SparkSession", lake: Lake, doomed: Doomed, state: State
    ) -> list[Found]:
        """The files of the lake that have messages to erase."""
        token = lake.info.token
        maybe = [each.path for each in state.live_files() if doomed.may_be_in(each, token)]
        found = self._scan(spark, lake, doomed, maybe, thorough=False)
        for each in found:
            if each.problem is not None:
                raise Failed(f"the lake in {lake.root}: {each.problem}")
        return [each for each in found if each.doomed]

    def _scan(
        self,
        spark: "SparkSession",
        lake: Lake,
        doomed: Doomed,
        paths: Sequence[str],
        *,
        thorough: bool,
    ) -> list[Found]:
        root = str(lake.root)
        tasks = [Scan(root, tuple(own), doomed, thorough) for own in _shared(spark, paths)]
        return _run(spark, tasks, scan, self._job, "proving" if thorough else "searching")

    def _sweep_and_prove(self, spark: "SparkSession", lake: Lake, doomed: Doomed) -> bool:
        """Delete what has the messages and is not of the lake; True if nothing has them then."""
        parquet, documents, temporary = surveyed(lake.root)
        found = self._scan(spark, lake, doomed, parquet, thorough=True)
        state = lake.state()
        dirty = [each for each in found if each.doomed or each.problem is not None]
        seen = {each.path for each in found}
        if not state.files.keys() <= {each.path for each in found if not each.doomed}:
            # Another job has added a file, unless one is missing.
            check_there(lake, state.files.keys() - seen)
            return False
        for each in dirty:
            if each.problem is not None and each.path in state.files:
                raise Failed(f"the lake in {lake.root}: {each.problem}")
        gone = [each.path for each in dirty]
        if any(_commit_of(each) > state.number for each in (*gone, *temporary)):
            # A job may be about to add them. With this commit it no longer can.
            self._fence(lake, state)
            return False
        erased = {each.path: each.doomed for each in dirty}
        for path in (*gone, *temporary):
            self._delete(lake, path, erased.get(path, 0))
        self._done.scanned, self._done.documents = found, len(documents)
        self._done.commit = state.number
        return not (gone or temporary)

    def _delete(self, lake: Lake, path: str, messages: int) -> None:
        digest = delete(lake.root, path)
        if digest is not None:
            self._done.deleted.append({"path": path, "sha256": digest, "messages": messages})

    def _fence(self, lake: Lake, state: State) -> None:
        now_us = time.time_ns() // NS_PER_US
        # The commit of another job has the same effect.
        with suppress(LakeConflictError):
            lake.commit(state, Commit(number=state.number + 1, job="erase", time_us=now_us))

    def _tell(self, spark: "SparkSession", lake: Lake, doomed: Doomed, state: State) -> None:
        check_there(lake, state.files)
        files = self._affected(spark, lake, doomed, state)
        messages = sum(each.doomed for each in files)
        text = (
            f"would erase {units.counted(messages, 'message')} in "
            f"{units.counted(len(files), 'file')} of the lake in {lake.root}"
        )
        paths = [each.path for each in files]
        self._job.done(text, {"lake": str(lake.root), "messages": messages, "files": paths})

    def _report(self, lake: Lake, doomed: Doomed, started_ns: int) -> None:
        done = self._done
        messages = sum(each.erased for each in done.rewritten)
        looked_at = sum(each.messages for each in done.scanned)
        receipt: dict[str, Any] = {
            "lake": str(lake.root),
            "stream": lake.info.stream,
            "incarnation": lake.info.incarnation,
            "subjects": doomed.subjects,
            "sequences": doomed.ranges,
            "started": format_time(started_ns),
            "finished": format_time(time.time_ns()),
            "commit": done.commit,
            "messages": messages,
            "rewritten": [_rewriting(each) for each in done.rewritten],
            "deleted": done.deleted,
            "proof": {
                "files": len(done.scanned),
                "messages": looked_at,
                "documents": done.documents,
                "found": sum(each.doomed for each in done.scanned),
            },
            "erasures": done.erasures,
        }
        if self._wishes.receipt is not None:
            self._keep(self._wishes.receipt, receipt)
        text = (
            f"{units.counted(receipt['messages'], 'message')} erased from "
            f"{units.counted(len(done.rewritten), 'file')}; "
            f"{units.counted(len(done.deleted), 'old file')} deleted; none found in "
            f"{units.counted(receipt['proof']['messages'], 'message')} of "
            f"{units.counted(len(done.scanned), 'file')}"
        )
        self._job.done(text, receipt)

    def _keep(self, path: Path, receipt: dict[str, Any]) -> None:
        content = msgspec.json.encode(receipt)
        try:
            write_receipt(path, content)
        except OSError as error:
            # Another run would find nothing to erase, and have another receipt.
            self._job.done(content.decode(), receipt)
            raise Failed(
                f"the messages are erased, but the receipt {path} cannot be written: "
                f"{error.strerror}; it was printed instead"
            ) from error


def check_there(lake: Lake, paths: Iterable[str]) -> None:
    """Raise Failed if a file of the lake is missing, rather than replaced meanwhile."""
    for path in sorted(paths):
        if not (lake.root / path).exists() and path in lake.state().files:
            raise Failed(f"the lake in {lake.root}: {path} is missing")


def surveyed(root: Path) -> tuple[list[str], list[str], list[str]]:
    """All files below a lake: data files, documents without messages, and temporary ones.

    Raises Failed if there are others.
    """
    parquet, documents, unknown = everything(root)
    temporary = [each for each in unknown if _is_temporary(each)]
    if strange := sorted(set(unknown) - set(temporary)):
        raise Failed(
            f"the lake in {root} has a file that does not belong there and may have copies of "
            f"messages: {strange[0]}; remove it, and run this again"
        )
    return parquet, documents, temporary


def everything(root: Path) -> tuple[list[str], list[str], list[str]]:
    """All files below a lake: data files, documents without messages, and all others.

    Links are among the others: what is behind a folder is not looked through, and deleting a link
    leaves the file.
    """
    parquet, documents, unknown = [], [], []
    for folder, folders, names in os.walk(root, onerror=_raise):
        links = [each for each in (*folders, *names) if Path(folder, each).is_symlink()]
        for name in {*names, *links}:
            path = Path(folder, name).relative_to(root).as_posix()
            if name in links:
                unknown.append(path)
            elif parse_data_path(path) is not None:
                parquet.append(path)
            elif _is_document(path):
                documents.append(path)
            else:
                unknown.append(path)
    return sorted(parquet), documents, unknown


def write_receipt(path: Path, content: bytes) -> None:
    """Write a receipt, durably."""
    with path.open("wb") as file:
        file.write(content + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _raise(error: OSError) -> None:
    # Another erasure may have removed the folder, because it was empty.
    if not isinstance(error, FileNotFoundError):
        raise error


def _is_document(path: str) -> bool:
    folder, _, name = path.rpartition("/")
    return (
        path == LAKE_FILE
        or (folder == MANIFEST and parse_commit_name(name) is not None)
        or (folder == RESTORES and name.endswith(".json"))
    )


def _is_temporary(path: str) -> bool:
    folder, _, name = path.rpartition("/")
    return folder == TEMPORARY and parse_temporary_name(name) is not None


def _commit_of(path: str) -> int:
    """The only commit that can add a file."""
    if path.startswith(f"{DATA}/"):
        found = parse_data_path(path)
        return found.commit if found else 0
    return parse_temporary_name(path.rpartition("/")[2]) or 0


def _rewriting(each: Rewritten) -> dict[str, Any]:
    return {
        "path": each.old.path,
        "sha256": each.old.sha256,
        "erased": each.erased,
        "new": [{"path": entry.path, "sha256": entry.sha256} for entry in each.new],
    }


def _shared(spark: "SparkSession", work: Sequence[T]) -> list[Sequence[T]]:
    """The work in about as many parts as pay off."""
    count = min(len(work), _TASKS_PER_CORE * spark.sparkContext.defaultParallelism)
    return [work[at::count] for at in range(count)]


def _run(spark: "SparkSession", tasks: Sequence[Any], work: Any, job: Job, what: str) -> list[Any]:
    if not tasks:
        return []
    with job.progress(what, len(tasks)) as advance:
        results: Iterable[list[Any]] = run_tasks(spark, tasks, work, advance)
    return [each for own in results for each in own]
