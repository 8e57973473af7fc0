"""What the archive job plans, and what its tasks write. No JVM."""

import itertools
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from contrail_client import Contrail, Message
from contrail_client.cli.ending import Misuse
from contrail_pipeline.archive import rounds as archiving
from contrail_pipeline.archive.command import file_size_of
from contrail_pipeline.archive.plan import Piece, covered, cut, missing_of, rounds, spelled
from contrail_pipeline.archive.work import ArchiveTask, archive_piece
from contrail_spark.errors import LakeError
from contrail_spark.lake.manifest import Range, ShardState, State
from contrail_spark.lake.store import Lake
from contrail_spark.options import SPLITS_MAX, parse_options
from contrail_spark.plan import ShardBounds, Split
from tests.pipeline.archives import check_same
from tests.pipeline.jobs import LocalJob, no_space, run_here
from tests.spark.replay_server import ReplayServer
from tests.support.command import run_contrail
from tests.support.servers import ServerProcess


def archived_through(last: int) -> State:
    return State(shards={0: ShardState(archived_through=last)})


@pytest.mark.parametrize(
    ("first", "last", "done", "goal", "found"),
    [
        (1, 0, 0, 0, []),
        (1, 10, 0, 10, [Piece(0, 1, 10)]),
        (1, 12, 0, 10, [Piece(0, 1, 10)]),
        (1, 10, 4, 10, [Piece(0, 5, 10)]),
        (1, 10, 10, 10, []),
        (4, 10, 0, 10, [Piece(0, 1, 3, lost=True), Piece(0, 4, 10)]),
        (4, 10, 3, 10, [Piece(0, 4, 10)]),
        (5, 10, 3, 10, [Piece(0, 4, 4, lost=True), Piece(0, 5, 10)]),
        (11, 10, 3, 10, [Piece(0, 4, 10, lost=True)]),
        (15, 20, 3, 10, [Piece(0, 4, 10, lost=True)]),
        (1, 20, 12, 10, []),
        (15, 20, 12, 10, []),
    ],
)
def test_what_is_missing(first: int, last: int, done: int, goal: int, found: list[Piece]) -> None:
    assert missing_of(ShardBounds(0, first, last), archived_through(done), goal) == found


def test_a_stream_that_ends_before_the_lake_is_refused() -> None:
    with pytest.raises(LakeError, match=r"ends with sequence 9, but the lake has it through 10"):
        missing_of(ShardBounds(0, 1, 9), archived_through(10), 9)


def check_whole(part: Range, pieces: list[Piece]) -> None:
    assert [pieces[0].from_seq, pieces[-1].to_seq] == [part.from_seq, part.to_seq]
    for before, after in pairwise(pieces):
        assert before.from_seq <= before.to_seq == after.from_seq - 1
    assert covered(pieces) == (part,)


def test_pieces_are_the_splits_and_cover_what_no_split_has() -> None:
    part = Range(0, 1, 100)
    splits = [Split(0, 5, 40, 30, 100), Split(0, 45, 90, 40, 140)]
    pieces = cut(part, splits, 100)
    assert pieces == [Piece(0, 1, 40, 30), Piece(0, 41, 100, 40)]
    check_whole(part, pieces)
    assert cut(part, [], 100) == [Piece(0, 1, 100)]


def test_as_many_splits_as_a_plan_can_have_are_cut_further() -> None:
    """A plan of a large range has no more splits than these, and they are larger than asked."""
    part = Range(3, 1, SPLITS_MAX * 1_000)
    splits = [Split(3, at * 1_000 + 1, (at + 1) * 1_000, 1_000, 10_000) for at in range(SPLITS_MAX)]
    pieces = cut(part, splits, 2_500)
    assert len(pieces) == 4 * SPLITS_MAX
    check_whole(part, pieces)
    assert sum(each.messages for each in pieces) == SPLITS_MAX * 1_000
    # A message is never cut, however large it is.
    assert len(cut(Range(0, 1, 2), [Split(0, 1, 2, 2, 1 << 30)], 1)) == 2


def test_rounds_commit_ranges_of_several_shards() -> None:
    pieces = [Piece(0, 1, 5, lost=True), Piece(0, 6, 9), Piece(1, 1, 4), Piece(1, 5, 8)]
    assert [covered(part) for part in rounds(pieces, 3)] == [
        (Range(0, 1, 9), Range(1, 1, 4)),
        (Range(1, 5, 8),),
    ]
    assert spelled(covered(pieces)) == "shard 0: 1..9, shard 1: 1..8"


@pytest.mark.parametrize(("text", "size"), [("1m", 1 << 20), ("16g", 16 << 30), ("2048k", 2 << 20)])
def test_file_sizes(text: str, size: int) -> None:
    assert file_size_of(text) == size


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("1048575", "must be from 1 MiB to 16 GiB, not 1048575"),
        ("17179869185", "must be from 1 MiB to 16 GiB"),
        ("much", "must be a size in bytes such as"),
    ],
)
def test_wrong_file_sizes(text: str, why: str) -> None:
    with pytest.raises(Misuse, match=f"--file-size {why}"):
        file_size_of(text)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.ensure(tmp_path / "lake", "FLIGHTS", "first", None)


def task_of(server: ReplayServer, lake: Lake) -> ArchiveTask:
    options = parse_options({"url": server.url, "stream": "FLIGHTS", "fetchRetries": "0"})
    return ArchiveTask(str(lake.root), options, "FLIGHTS", "first", Piece(0, 1, 100), 1)


def test_a_task_says_what_retention_has_overtaken(server: ReplayServer, lake: Lake) -> None:
    server.first_seq = 31
    outcome = archive_piece(task_of(server, lake))
    assert (outcome.problem, outcome.lost) == (None, (Range(0, 1, 30),))
    assert sum(each.messages for each in outcome.entries) == 70
    # A job that was killed and runs again has the same file.
    assert archive_piece(task_of(server, lake)) == outcome
    [file] = lake.root.rglob("*.parquet")
    headers = pq.read_table(file, partitioning=None)["headers"].to_pylist()
    assert headers == [each["headers"] or None for each in server.rows(0, 31, 100)]


def test_a_task_of_a_removed_range_has_no_file(server: ReplayServer, lake: Lake) -> None:
    server.first_seq = 101
    outcome = archive_piece(task_of(server, lake))
    assert (outcome.problem, outcome.entries, outcome.lost) == (None, (), (Range(0, 1, 100),))
    assert not list(lake.root.rglob("*.parquet"))


def test_a_task_fails_in_one_sentence(server: ReplayServer, lake: Lake) -> None:
    server.rows_per_shard = 90
    problem = archive_piece(task_of(server, lake)).problem
    assert problem is not None
    assert "sequences 91..100 were" in problem
    server.rows_per_shard = 100
    with no_space():
        problem = archive_piece(task_of(server, lake)).problem
    assert problem == f"cannot write to the lake in {lake.root}: File too large"
    (lake.root / "tmp").rename(lake.root / "away")
    (lake.root / "tmp").touch()
    problem = archive_piece(task_of(server, lake)).problem
    assert problem == f"cannot write to the lake in {lake.root}: {lake.root}/tmp: File exists"


def test_a_dry_run_refuses_what_the_job_would_refuse(
    running: ServerProcess, client: Contrail, tmp_path: Path
) -> None:
    client.create_stream("S", {"subjects": ["s.>"]})
    client.publish("s.a", "x")
    (tmp_path / "file").touch()
    command = ("pipeline", "archive", "S")
    env = {"CONTRAIL_URL": running.url}
    for name, why in ((".", "has other files and no lake"), ("file", "Not a directory")):
        found = run_contrail(*command, str(tmp_path / name), "--dry-run", env=env)
        assert found.exit_code == 1
        assert why in found.stderr
    found = run_contrail(*command, "s3://bucket/lake", env=env)
    assert found.exit_code == 2
    assert "must be a folder of a file system, not a URL" in found.stderr
    found = run_contrail(*command, str(tmp_path / "new"), "--dry-run", env=env)
    assert found.exit_code == 0
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


class KilledError(BaseException):
    """The end of the process at some step."""


def test_an_archive_that_is_killed_at_any_step_is_completed(
    running: ServerProcess, client: Contrail, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archiving, "run_tasks", run_here)
    # Two rounds, so that there are several commits.
    monkeypatch.setattr(archiving, "PIECES_PER_CORE", 1)
    client.create_stream("K", {"subjects": ["k.>"], "shards": 4, "shard_by": [2]})
    client.publish_batch("K", [Message(f"k.{at % 9}", str(at)) for at in range(90)])
    job: Any = LocalJob(client, running.url)
    wishes = archiving.Wishes(None, 1 << 20, True)
    taken = last = 0

    def killed_at(act: Callable[..., Any]) -> Callable[..., Any]:
        def stepped(*given: Any, **named: Any) -> Any:
            nonlocal taken
            taken += 1
            if taken > last:  # nor does the process clean up
                raise KilledError
            return act(*given, **named)

        return stepped

    for last in itertools.count():
        root = tmp_path / f"lake{last}"
        taken = 0
        with monkeypatch.context() as patch:
            for name in ("fsync", "link", "unlink", "mkdir"):
                patch.setattr(os, name, killed_at(getattr(os, name)))
            try:
                archiving.Archiver(job, "K", root, wishes).run()
            except KilledError:
                pass
            else:
                break
        archiving.Archiver(job, "K", root, wishes).run()
        check_same(root, running.url, "K")
    assert last > 30
