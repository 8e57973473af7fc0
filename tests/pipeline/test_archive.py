"""`contrail pipeline archive` on a real server: what is in the lake, and what is refused."""

import os
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from contrail_client import Contrail, Message
from contrail_client.cli.connection import Session
from contrail_client.cli.context import Context
from contrail_client.cli.ending import Failed
from contrail_pipeline.archive import rounds
from contrail_pipeline.job import Job
from contrail_pipeline.tasks import run_tasks
from contrail_spark.client import ReplayClient
from contrail_spark.lake.manifest import Commit, State
from contrail_spark.lake.store import Lake
from contrail_spark.options import parse_options
from tests.pipeline.archives import check_same, lake_rows, stream_rows
from tests.pipeline.commands import run
from tests.support.servers import ServerProcess

SHARDS = 3
MESSAGES = 3_000
LARGE = 900_000

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.usefixtures("spark")]


def message(at: int) -> Message:
    headers = {"Leg": ["a", str(at)], "Empty": [""]} if at % 7 == 0 else None
    payload = b"" if at % 11 == 0 else bytes([at % 256]) * (at % 50)
    return Message(f"s.{at % 6}.{at % 5}", payload, headers=headers, msg_id=f"id-{at}")


def publish(client: Contrail, stream: str, first: int, count: int) -> None:
    for start in range(first, first + count, 1_000):
        few = range(start, min(start + 1_000, first + count))
        client.publish_batch(stream, [message(at) for at in few]).raise_refused()


def archive(running: ServerProcess, stream: str, lake: Path, *more: str) -> tuple[int, Any]:
    return run("archive", stream, str(lake), "--server", running.url, *more)


def test_a_stream_is_archived_again_and_again(
    running: ServerProcess, client: Contrail, spark: SparkSession, tmp_path: Path
) -> None:
    client.create_stream("S", {"subjects": ["s.>"], "shards": SHARDS, "shard_by": [2]})
    lake = tmp_path / "lake"
    status, result = archive(running, "S", lake)
    assert (status, result["messages"], result["commits"]) == (0, 0, 0), result
    publish(client, "S", 0, MESSAGES)
    large = [Message("s.1.x", bytes([at]) * LARGE) for at in range(20)]
    for at in range(0, 20, 5):
        client.publish_batch("S", large[at : at + 5]).raise_refused()
    for shard in range(SHARDS):
        for seq in (5, 6, 7, 100):
            client.delete_message("S", seq, shard=shard)
    status, planned = archive(running, "S", lake, "--dry-run")
    assert (status, planned["messages"]) == (0, MESSAGES + 20 - 4 * SHARDS), planned
    assert len(planned["ranges"]) == SHARDS
    assert not Lake.open(lake).state().files
    status, result = archive(running, "S", lake, "--file-size", "1m")
    assert (status, result["messages"]) == (0, MESSAGES + 20 - 4 * SHARDS), result
    # The large payloads are more than a task gets.
    assert result["files"] > SHARDS
    state = check_same(lake, running.url)
    assert {len(entry.path.split("/")) for entry in state.files.values()} == {3}

    status, result = archive(running, "S", lake)
    assert (status, result["messages"], result["commits"]) == (0, 0, 0), result
    publish(client, "S", MESSAGES, 500)
    status, result = archive(running, "S", lake)
    assert (status, result["messages"], result["commits"]) == (0, 500, 1), result
    after = check_same(lake, running.url)
    assert set(state.files) < set(after.files)

    status, report = run("audit", "S", "--lake", str(lake), "--server", running.url)
    assert (status, report["findings"]) == (0, 0), report
    options = {"stream": "S", "lake": str(lake), "lakeOnly": "true"}
    frame = spark.read.format("contrail").options(**options).load()
    found = frame.selectExpr("shard", "seq", "subject", "data").collect()
    assert sorted((row.shard, row.seq, row.subject, bytes(row.data)) for row in found) == [
        (row["shard"], row["seq"], row["subject"], row["data"]) for row in stream_rows(running.url)
    ]


def test_what_retention_overtakes_is_an_error_or_recorded(
    running: ServerProcess, client: Contrail, tmp_path: Path
) -> None:
    client.create_stream("R", {"subjects": ["r.>"]})
    client.publish_batch("R", [Message("r.a", str(at)) for at in range(100)]).raise_refused()
    client.purge_stream("R", up_to_seq=11)
    lake = tmp_path / "lake"
    # What was removed before the lake was begun is no loss, but the lake says so.
    status, result = archive(running, "R", lake)
    assert (status, result["messages"]) == (0, 90), result
    assert result["lost"] == [{"shard": 0, "from_seq": 1, "to_seq": 10}]
    client.publish_batch("R", [Message("r.a", str(at)) for at in range(100)]).raise_refused()
    client.purge_stream("R", up_to_seq=151)
    for more in ([], ["--dry-run"]):
        status, error = archive(running, "R", lake, *more)
        assert (status, error["error"]) == (1, "failed")
        assert (
            "of stream R were removed before they were archived: shard 0: 101..150. To"
            in (error["message"])
        )
    assert Lake.open(lake).state().archived_through(0) == 100
    status, planned = archive(running, "R", lake, "--no-fail-on-data-loss", "--dry-run")
    assert planned["lost"] == [{"shard": 0, "from_seq": 101, "to_seq": 150}]
    status, result = archive(running, "R", lake, "--no-fail-on-data-loss")
    assert (status, result["messages"]) == (0, 50), result
    assert Lake.open(lake).state().shards[0].lost == ((1, 10), (101, 150))
    assert [row["seq"] for row in lake_rows(lake)] == [*range(11, 101), *range(151, 201)]
    status, report = run("audit", "R", "--lake", str(lake), "--server", running.url)
    assert (status, report["findings"]) == (0, 0), report


def test_partitions_by_token_and_what_is_refused(
    running: ServerProcess, client: Contrail, tmp_path: Path
) -> None:
    client.create_stream("T", {"subjects": ["t", "t.>"]})
    subjects = ["t", "t.JFK.a", "t.LAX", "t.JFK.b", "t.ä/%"]
    client.publish_batch("T", [Message(subjects[at % 5], str(at)) for at in range(50)])
    lake = tmp_path / "lake"
    status, result = archive(running, "T", lake, "--subject-token", "2")
    assert (status, result["messages"], result["files"]) == (0, 50, 4), result
    state = check_same(lake, running.url, "T")
    assert {path.split("/")[2] for path in state.files} == {
        "token=JFK",
        "token=LAX",
        "token=%C3%A4%2F%25",
        "token=__HIVE_DEFAULT_PARTITION__",
    }
    refused: list[tuple[list[str], int, str]] = [
        ([], 1, "is partitioned by day and subject token 2, not by day"),
        (["--subject-token", "3", "--dry-run"], 1, "not by day and subject token 3"),
        (["--subject-token", "65"], 2, "--subject-token"),
        (["--file-size", "1k"], 2, "--file-size must be from 1 MiB to 16 GiB, not 1k"),
    ]
    for arguments, wanted, text in refused:
        status, error = archive(running, "T", lake, *arguments)
        assert (status, text in error["message"]) == (wanted, True), error
    status, error = archive(running, "NONE", lake)
    assert (status, error["error"]) == (3, "stream_not_found")
    status, error = archive(running, "T", tmp_path)
    assert (status, "has other files and no lake" in error["message"]) == (1, True), error
    client.delete_stream("T")
    client.create_stream("T", {"subjects": ["t", "t.>"]})
    for more in ([], ["--dry-run"]):
        status, error = archive(running, "T", lake, "--subject-token", "2", *more)
        assert (status, error["error"]) == (1, "failed")
        assert "stream T was deleted and created again since the lake" in error["message"]


class Contested(Lake):
    """A lake to which another job commits just before each third commit."""

    commits = 0

    def commit(self, state: State, change: Commit) -> State:
        self.commits += 1
        if self.commits % 3 == 0:
            super().commit(state, Commit(number=state.number + 1, job="other", time_us=0))
        return super().commit(state, change)


def test_commits_that_are_lost_to_another_job_are_worked_out_again(
    running: ServerProcess,
    client: Contrail,
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rounds, "PIECES_PER_CORE", 1)
    client.create_stream("C", {"subjects": ["c.>"]})
    for _ in range(4):
        client.publish_batch("C", [Message("c.a", bytes(LARGE))] * 5).raise_refused()
    plan = ReplayClient(parse_options({"url": running.url, "stream": "C"})).plan()
    lake = Contested.ensure(tmp_path / "lake", "C", plan.incarnation, None)
    assert isinstance(lake, Contested)
    job = Job(Session(client, Context(running.url, None), True), None, False)
    archiver = rounds.Archiver(job, "C", lake.root, rounds.Wishes(None, 1 << 20, True))
    archiver.catch_up(spark, lake, {0: 20})
    assert archiver.totals.messages == 20
    state = lake.state()
    assert state.number - archiver.totals.commits == lake.commits // 3 > 0
    lake.clean()
    check_same(lake.root, running.url, "C")


def test_a_worker_that_dies_ends_a_job_in_one_sentence() -> None:
    """Tasks of all jobs run like this; a worker may be killed when memory is short."""
    job = Job(Session(None, Context("", None), True), None, False)  # type: ignore[arg-type]
    with pytest.raises(Failed) as failed, job.spark() as spark:
        run_tasks(spark, [9], os._exit, lambda _: None)
    said = str(failed.value)
    assert said.startswith("Job aborted due to stage failure: Task 0")
    assert "Python worker exited unexpectedly" in said
    assert "\n" not in said
