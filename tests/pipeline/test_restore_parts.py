"""The parts of a restore, without a JVM: what is sent again after any interruption, and headers."""

import random
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from contrail_client import Contrail
from contrail_client.cli.ending import Failed
from contrail_pipeline.bounds import Bounds
from contrail_pipeline.restore import parts, work
from contrail_pipeline.restore.parts import Restorer, Wishes, captured, splits_of
from contrail_pipeline.restore.progress import Progress
from contrail_pipeline.restore.work import (
    RestoreTask,
    Target,
    first_tokens,
    numbered,
    restore_part,
    transformed,
)
from contrail_spark import publisher
from contrail_spark.lake.manifest import Range
from contrail_spark.lake.selection import Selection
from contrail_spark.lake.splits import verified_once
from contrail_spark.lake.store import Lake
from contrail_spark.options import parse_write_options
from tests.pipeline.jobs import LocalJob, no_space, run_here
from tests.pipeline.lakes import SCHEMA, Row, archive, made_lake, made_row
from tests.spark.stored import message_ids, stored
from tests.support.command import run_contrail
from tests.support.servers import ServerProcess

LAST = 3_000


class KilledError(BaseException):
    """The end of a process in the midst of a task."""


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("contrail_pipeline.restore.work.BATCH_SEQUENCES", 100)
    monkeypatch.setattr("contrail_pipeline.restore.parts.BATCH_SEQUENCES", 100)
    monkeypatch.setattr("contrail_spark.bodies.BODY_ROWS_MAX", 30)


def tasks(lake: Lake, target: Target, size: int, done: int = 0) -> list[RestoreTask]:
    state = lake.state()
    files = state.live_files()
    bounds = 1, state.archived_through(0)
    splits = verified_once(splits_of(0, bounds, files, done, size))
    return [RestoreTask(str(lake.root), Selection(), split, target) for split in splits]


def restore(lake: Lake, target: Target, size: int, done: int = 0) -> tuple[int, int]:
    outcomes = [restore_part(task) for task in tasks(lake, target, size, done)]
    assert [each.problem for each in outcomes if each.problem] == []
    return sum(each.messages for each in outcomes), sum(each.duplicates for each in outcomes)


@pytest.mark.long
@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("seed", range(4))
def test_an_interrupted_restore_loses_and_repeats_nothing(
    running: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    random_ = random.Random(seed)
    name = f"R{seed}"
    rows = [
        made_row(seq, f"r{seed}.{random_.choice('abc')}")
        for seq in range(1, LAST + 1)
        if random_.random() < 0.9
    ]
    cuts = sorted(random_.sample(range(1, len(rows)), 4))
    parts = [rows[low:high] for low, high in zip([0, *cuts], [*cuts, len(rows)], strict=True)]
    lake = made_lake(tmp_path / "lake", *parts[:-1], token=2)
    options = parse_write_options({"url": running.url, "stream": name})
    target = Target(options, "restore-x")
    publish = publisher.Publisher.publish
    left = 0

    def killed_later(self: publisher.Publisher, *given: object) -> int:
        nonlocal left
        left -= 1
        if left < 0 and random_.random() < 0.5:
            raise KilledError  # before the request
        found = publish(self, *given)  # type: ignore[arg-type]
        if left < 0:
            raise KilledError  # after it
        return found

    with Contrail(running.url) as client:
        client.ensure_stream(name, {"subjects": [f"r{seed}.>"], "duplicate_window": "100ms"})
        monkeypatch.setattr(publisher.Publisher, "publish", killed_later)
        for _ in range(6):
            left = random_.randrange(60)
            with suppress(KilledError):
                # Without what is known of earlier runs, all batches are sent again.
                restore(lake, target, random_.randrange(1, 8))
        monkeypatch.setattr(publisher.Publisher, "publish", publish)
        restore(lake, target, 3)
        # The lake has grown within a batch that was sent already.
        archive(lake, parts[-1], [Range(0, lake.state().archived_through(0) + 1, LAST)])
        restore(lake, target, 5)
        assert restore(lake, target, 2) == (len(rows), len(rows))
    found = stored(running.url, name, "seq", "subject", "data")
    assert [row["data"] for row in found] == [row["data"] for row in rows]
    assert [row["subject"] for row in found] == [row["subject"] for row in rows]
    assert message_ids(running.url, name) == [f"S:0:{row['seq']}" for row in rows]


def test_what_is_done_is_not_sent_again(
    running: ServerProcess, tmp_path: Path, small_batches: None
) -> None:
    lake = made_lake(tmp_path / "lake", [made_row(seq, "done.x") for seq in range(1, 1_001)])
    target = Target(parse_write_options({"url": running.url, "stream": "DONE"}), "restore-y")
    with Contrail(running.url) as client:
        client.ensure_stream("DONE", {"subjects": ["done.>"]})
    assert restore(lake, target, 4) == (1_000, 0)
    assert restore(lake, target, 4, done=7) == (300, 300)
    assert restore(lake, target, 4, done=10) == (0, 0)


def test_progress_belongs_to_one_incarnation_of_a_stream(tmp_path: Path) -> None:
    lake = made_lake(tmp_path / "lake", [made_row(1)])
    progress = Progress.load(lake, "restore-x", "i1")
    assert progress.done(0) == 0
    progress.reached(0, 7)
    progress.reached(0, 5)
    assert progress.save() is None
    assert Progress.load(lake, "restore-x", "i1").done(0) == 7
    assert Progress.load(lake, "restore-x", "i2").done(0) == 0
    assert Progress.load(lake, "restore-y", "i1").done(0) == 0
    path = lake.root / "restores" / "restore-x.json"
    path.write_text("{")
    assert Progress.load(lake, "restore-x", "i1").done(0) == 0
    path.unlink()
    path.mkdir()
    assert "a restart will send everything again" in str(progress.save())
    assert progress.save() is None  # said once
    with no_space():
        said = str(Progress.load(lake, "restore-x", "i1").save())
    assert said.endswith(f"again: {path.parent}: File too large")


def test_splits_begin_and_end_with_batches(small_batches: None, tmp_path: Path) -> None:
    lake = made_lake(
        tmp_path / "lake",
        [made_row(seq) for seq in range(50, 260)],
        [made_row(seq) for seq in range(1_000, 1_004)],
    )
    files = lake.state().live_files()

    def found(bounds: tuple[int, int], done: int, size: int) -> list[tuple[int, int, int]]:
        return [
            (each.from_seq, each.to_seq, len(each.files))
            for each in splits_of(0, bounds, files, done, size)
        ]

    assert found((1, 1_003), 0, 1) == [
        (50, 100, 1),
        (101, 200, 1),
        (201, 300, 1),
        (1_000, 1_000, 1),
        (1_001, 1_003, 1),
    ]
    assert found((1, 1_003), 0, 100) == [(50, 1_003, 2)]
    assert found((120, 250), 1, 1) == [(120, 200, 1), (201, 250, 1)]
    assert found((1, 1_003), 10, 1) == [(1_001, 1_003, 1)]
    assert found((1, 1_003), 11, 1) == []


@pytest.mark.parametrize("rows", [1, 7, 100])
def test_messages_get_the_same_numbers_however_they_are_read(rows: int) -> None:
    size = work.BATCH_SEQUENCES
    seqs = [1, size - 1, size, size + 1, 2 * size, 2 * size + 1, 5 * size + 1]
    table = pa.Table.from_pylist([made_row(seq) for seq in seqs], SCHEMA)
    found: dict[int, list[int]] = {}
    for number, batches in numbered(iter(table.to_batches(rows))):
        for batch in batches:
            found.setdefault(number, []).extend(batch.column("seq").to_pylist())
    assert found == {
        1: [1, size - 1, size],
        2: [size + 1, 2 * size],
        3: [2 * size + 1],
        6: [5 * size + 1],
    }


def batch_of(*rows: Row) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(list(rows), SCHEMA)


TARGET = Target(parse_write_options({"stream": "T"}), "p")


def test_headers_that_would_act_again_are_left_out() -> None:
    headers = [
        ("Nats-Msg-Id", ["old"]),
        ("nats-ttl", ["1h"]),
        ("Nats-Rollup", ["all"]),
        ("Nats-Expected-Last-Sequence", ["3"]),
        ("Nats-Marker-Reason", ["MaxAge"]),
        ("Leg", ["1", "2"]),
    ]
    batch = batch_of(made_row(1), {**made_row(2), "headers": headers})
    found = transformed(batch, "S", TARGET).column("headers").to_pylist()
    assert found == [[], [("Nats-Marker-Reason", ["MaxAge"]), ("Leg", ["1", "2"])]]


def test_headers_without_an_effect_are_not_touched() -> None:
    batch = batch_of(made_row(4), made_row(5))
    assert transformed(batch, "S", TARGET).column("headers") is not None
    assert transformed(batch, "S", TARGET).column("headers").equals(batch.column("headers"))


def test_origin_and_prefix_are_what_was_asked_for() -> None:
    batch = batch_of(made_row(1_500_000, "s.a", time_us=1_767_225_600_000_001))
    target = replace(TARGET, prefix="old.", origin=True)
    [row] = transformed(batch, "S", target).to_pylist()
    assert row["subject"] == "old.s.a"
    assert dict(row["headers"]) == {
        "Leg": ["1500000"],
        "Nats-Stream": ["S"],
        "Nats-Subject": ["s.a"],
        "Nats-Sequence": ["1500000"],
        "Nats-Time-Stamp": ["2026-01-01T00:00:00.000001000Z"],
    }


def test_a_new_stream_captures_what_is_in_the_lake(tmp_path: Path) -> None:
    lake = made_lake(
        tmp_path / "lake", [made_row(1, "a.b"), made_row(2, "a.c.d"), made_row(3, "b")]
    )
    [file] = lake.state().live_files()
    tokens = set(first_tokens(str(lake.root / file.path)).filters)
    assert captured(tokens, "") == ["a.>", "b"]
    assert captured(tokens, "x.") == ["x.>"]
    assert captured(tokens, "x") == ["xa.>", "xb"]
    with pytest.raises(Failed, match="no such messages"):
        captured(set(), "")
    with pytest.raises(Failed, match="more than 256 tokens; use --capture"):
        captured({f"t{at}.>" for at in range(257)}, "")


def test_a_file_whose_subjects_cannot_be_read_has_a_name(tmp_path: Path) -> None:
    path = tmp_path / "file.parquet"
    assert first_tokens(str(path)).problem == f"{path} is missing"
    path.write_bytes(b"PAR1")
    assert f"{path} is damaged: " in str(first_tokens(str(path)).problem)


def test_messages_that_the_stream_does_not_keep_are_told(
    running: ServerProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(parts, "run_tasks", run_here)
    lake = made_lake(tmp_path / "lake", [made_row(seq, "few.x") for seq in range(1, 11)])
    with Contrail(running.url) as client:
        client.create_stream("FEW", {"subjects": ["few.>"], "max_msgs": 4})
        client.create_stream("ALL", {"subjects": ["all.>"]})
        for stream, prefix in (("FEW", ""), ("ALL", "all.")):
            job = LocalJob(client, running.url)
            wishes = Wishes(Bounds(), prefix=prefix)
            Restorer(job, lake.root, stream, wishes).run()  # type: ignore[arg-type]
            assert job.results[0]["stored"] == 10
            told = "has only 4 messages now" in capsys.readouterr().err
            assert told is (stream == "FEW")


@pytest.mark.usefixtures("small_batches")
def test_a_second_lake_of_a_stream_brings_what_the_first_one_lacks(
    running: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "run_tasks", run_here)
    rows = [made_row(seq, "twice.x") for seq in range(1, 301)]
    late = made_lake(tmp_path / "late", [each for each in rows if each["seq"] % 2])
    early = made_lake(tmp_path / "early", rows)
    with Contrail(running.url) as client:
        client.create_stream("TWICE", {"subjects": ["twice.>"]})
        for lake in (late, early):
            job = LocalJob(client, running.url)
            Restorer(job, lake.root, "TWICE", Wishes(Bounds())).run()  # type: ignore[arg-type]
    found = {each["data"] for each in stored(running.url, "TWICE", "data")}
    assert found == {each["data"] for each in rows}


def test_a_refusal_is_the_problem_of_the_task(running: ServerProcess, tmp_path: Path) -> None:
    lake = made_lake(tmp_path / "lake", [made_row(1, "other.x")])
    with Contrail(running.url) as client:
        client.ensure_stream("NARROW", {"subjects": ["narrow.>"]})
    target = Target(parse_write_options({"url": running.url, "stream": "NARROW"}), "restore-z")
    [task] = tasks(lake, target, 1)
    outcome = restore_part(task)
    assert "sequences 1..8192 of shard 0" in str(outcome.problem)
    assert "row 1 with subject 'other.x'" in str(outcome.problem)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--subject", ""], "--subject '': a subject filter must not be empty"),
        (["--subject", "a b"], "--subject 'a b': .* white space"),
        (["--create", "--capture", "a..b"], "--capture 'a..b': .* empty token"),
        (["--subject-prefix", ".old."], "--subject-prefix '.old.': .* empty token"),
        (["--subject-prefix", "*."], "--subject-prefix '\\*.': .* wildcards"),
        (["--capture", "a"], "--capture needs --create"),
    ],
)
def test_a_mistake_is_told_before_anything_is_done(arguments: list[str], why: str) -> None:
    found = run_contrail("pipeline", "restore", "nowhere", "S", *arguments, env={})
    assert found.exit_code == 2
    assert re.search(why, found.stderr)
