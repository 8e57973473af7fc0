"""Transformations of real streams: their rows, refusals, and what happens when they are killed."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from contrail_client import Contrail, Message
from contrail_client.cli.ending import Misuse
from contrail_pipeline.transform.query import Transformation
from contrail_spark.session import JavaNotFoundError, find_java
from tests.spark.stored import stored
from tests.support.command import run_contrail
from tests.support.servers import ServerProcess

pytestmark = [pytest.mark.spark, pytest.mark.long]

SQL = """
-- every other message, with its number
select shard, seq, replace(subject, 's.', 't.') as subject, 'n' || cast(data as string) as data
from messages
where seq % 2 = 0;
"""
MESSAGES = 20_000
BATCH = 1_000
KILLED_AT = (1, 5_000)
"""Numbers of written messages at which the job is killed; at the first it has just begun."""
WAIT_S = 300


@pytest.fixture(scope="module", autouse=True)
def java() -> None:
    try:
        find_java()
    except JavaNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path / "server") as server:
        yield server


def fill(client: Contrail, count: int, shards: int = 2) -> None:
    config: Any = {"subjects": ["s.>"], "shards": shards}
    client.ensure_stream("S", config)
    # A window that ends long before a job that was killed repeats a batch.
    client.ensure_stream("T", {"subjects": ["t.>"], "duplicate_window": "100ms"})
    for first in range(0, count, 5_000):
        numbers = range(first, min(first + 5_000, count))
        client.publish_batch("S", [Message(f"s.{at % 40}", str(at)) for at in numbers])


def expected(url: str) -> list[tuple[str, bytes]]:
    """What the SQL makes of the stream, worked out without Spark."""
    rows = stored(url, "S", "seq", "subject", "data")
    return sorted(
        (row["subject"].replace("s.", "t."), b"n" + row["data"])
        for row in rows
        if row["seq"] % 2 == 0
    )


def written(url: str) -> list[tuple[str, bytes]]:
    return sorted((row["subject"], row["data"]) for row in stored(url, "T", "subject", "data"))


def arguments(server: ServerProcess, folder: Path, *more: str, sql: str = SQL) -> list[str]:
    file = folder / "query.sql"
    # Some editors begin a file with this mark.
    file.write_text(sql, encoding="utf-8-sig")
    given = ["transform", str(file), "--server", server.url, "--from", "S", "--json"]
    return [*given, "--checkpoint", str(folder / "checkpoint"), *more]


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def second(time: datetime | None) -> datetime:
    assert time is not None
    return time.replace(microsecond=0)


# In one process ----------------------------------------------------------------------------------
def test_stream_to_stream_and_on_from_there(server: ServerProcess, tmp_path: Path) -> None:
    with Contrail(server.url) as client:
        fill(client, 5_000)
        given = ["pipeline", *arguments(server, tmp_path, "--to", "T", "--once", "--batch", "2000")]
        dry = run_contrail(*given, "--dry-run", env={})
        assert dry.exit_code == 0, dry.output
        [shown] = lines_of(dry.stdout)
        assert shown["columns"] == {
            "shard": "int", "seq": "bigint", "subject": "string", "data": "string"
        }  # fmt: skip
        assert "BatchScan contrail" in shown["plan"]
        assert not (tmp_path / "checkpoint").exists()
        done = run_contrail(*given, env={})
        assert done.exit_code == 0, done.output
        *batches, summary = lines_of(done.stdout)
        assert sum(one["rows"] for one in batches) == summary["rows"] == 5_000
        assert [one["lag"] for one in batches] == [3_000, 1_000, 0]
        assert written(server.url) == expected(server.url)
        changed = arguments(server, tmp_path, "--to", "T", "--once", sql=SQL.replace("%", "*"))
        refused = run_contrail("pipeline", *changed, env={})
        assert refused.exit_code == 1
        assert "the SQL was changed" in refused.output


def test_stream_to_files(server: ServerProcess, tmp_path: Path) -> None:
    with Contrail(server.url) as client:
        fill(client, 3_000)
    out = tmp_path / "out"
    given = arguments(server, tmp_path, "--to-parquet", str(out), "--once")
    done = run_contrail("pipeline", *given, env={})
    assert done.exit_code == 0, done.output
    found = pq.read_table(out, columns=["subject", "data"]).to_pylist()
    rows = sorted((row["subject"], row["data"].encode()) for row in found)
    assert rows == expected(server.url)


@pytest.mark.parametrize(
    ("more", "status", "text"),
    [
        ((), 2, "either --to STREAM or --to-parquet FOLDER"),
        (("--to", "S"), 2, "would read what it writes"),
        (("--to", "NONE"), 3, "NONE"),
        (("--to-parquet", __file__), 2, "--to-parquet: "),
        (("--to", "T", "--every", "0s"), 2, "--every must be at least 1ms"),
        (("--to", "T", "--every", "soon"), 2, "--every"),
    ],
)
def test_what_makes_no_sense_is_refused_before_spark_starts(
    server: ServerProcess, tmp_path: Path, more: tuple[str, ...], status: int, text: str
) -> None:
    with Contrail(server.url) as client:
        fill(client, 1)
    done = run_contrail("pipeline", *arguments(server, tmp_path, *more), env={})
    assert done.exit_code == status
    assert text in done.output


@pytest.mark.parametrize(
    ("sql", "text"),
    [
        ("select subjet from messages", "`subjet` cannot be resolved"),
        ("selec 1", "Syntax error at or near 'selec'"),
        ("select 't.1' as subject, 'x' as data", "does not read the view messages"),
        ("select subject from messages", "the result of the SQL has no column data"),
        ("select subject, data, seq from messages", "needs the columns shard and seq"),
        ("select subject, data, 1 as n from messages", "a message has no column n"),
        (
            "select subject, cast(count(*) as string) as data from messages group by subject",
            "an aggregation needs a window of time and a watermark",
        ),
        (
            "select 't.1' as subject, cast(count(*) as string) as data from messages "
            "watermark time delay of interval 1 second group by window(time, '1 minute')",
            "has the operator Aggregate, after which Spark may repeat rows in another order",
        ),
        (
            "select a.subject, a.data from messages a join messages b on a.seq = b.seq",
            "has the operator Join",
        ),
    ],
)
def test_sql_that_cannot_be_run_is_refused(
    spark: SparkSession, server: ServerProcess, sql: str, text: str
) -> None:
    with Contrail(server.url) as client:
        fill(client, 1)
    source = {"url": server.url, "stream": "S"}
    work = Transformation(sql, source, "contrail", {"url": server.url, "stream": "T"})
    with pytest.raises(Misuse) as refused:
        work.result(spark)
    assert text in str(refused.value)


def test_other_statements_and_rows_that_vary_are_refused(
    spark: SparkSession, server: ServerProcess, tmp_path: Path
) -> None:
    with Contrail(server.url) as client:
        fill(client, 1)
    out = tmp_path / "out"
    row = "select 't.1' as subject, data from messages"
    for sql, text in (
        (f"insert overwrite directory '{out}' using parquet select 1", "one SELECT, and no other"),
        ("set spark.sql.ansi.enabled=false", "one SELECT, and no other"),
        (f"{row} limit 3", "has the operator GlobalLimit"),
        (f"{row} where rand() < 0.5", "a function such as rand"),
    ):
        source = {"url": server.url, "stream": "S"}
        work = Transformation(sql, source, "contrail", {"url": server.url, "stream": "T"})
        with pytest.raises(Misuse, match=text):
            work.result(spark)
    assert not out.exists()
    assert spark.conf.get("spark.sql.ansi.enabled") == "true"


def test_a_server_that_does_not_answer_is_no_mistake_in_the_sql(
    spark: SparkSession, server: ServerProcess
) -> None:
    source = {"url": server.url, "stream": "S", "fetchRetries": "0"}
    server.kill()
    work = Transformation("select * from messages", source, "parquet", {"path": "unused"})
    with pytest.raises(PySparkException, match="connection refused"):
        work.result(spark)


def test_counts_by_window_are_written_with_ids_of_their_own(
    spark: SparkSession, server: ServerProcess, tmp_path: Path
) -> None:
    sql = (
        "select 't.count' as subject, cast(count(*) as string) as data, "
        "concat('minute-', cast(window.start as string)) as msg_id from messages "
        "watermark time delay of interval 0 seconds group by window(time, '1 second')"
    )
    with Contrail(server.url) as client:
        fill(client, 10, shards=1)
        first = client.get_stream("S").state.first_at
        while second(client.get_stream("S").state.last_at) == second(first):
            client.publish("s.end", "")  # until the first window is over
    work = Transformation(
        sql,
        {"url": server.url, "stream": "S", "startingPosition": "earliest"},
        "contrail",
        {"url": server.url, "stream": "T"},
    )
    query = work.start(spark, str(tmp_path / "checkpoint"), None)
    query.awaitTermination()
    times = [row["time"] for row in stored(server.url, "S", "time")]
    in_first = sum(second(time) == second(times[0]) for time in times)
    assert [row["data"] for row in stored(server.url, "T", "data")] == [str(in_first).encode()]


# In processes of their own -----------------------------------------------------------------------
@contextmanager
def job(server: ServerProcess, folder: Path, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    """The job with its JVM and workers: a group of processes that end with the context."""
    given = arguments(server, folder, "--to", "T", "--batch", str(BATCH), *more)
    command = [sys.executable, "-m", "contrail_pipeline", *given]
    with (folder / "job.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(client: Contrail, seq: int, process: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait until the target has a message with this sequence."""
    while not client.read_range("T", from_seq=seq, limit=1, wait="5s").messages:
        assert process.poll() is None, (folder / "job.log").read_text()


def test_killed_job_and_restarted_server_lose_and_repeat_nothing(
    server: ServerProcess, tmp_path: Path
) -> None:
    with Contrail(server.url) as client:
        fill(client, MESSAGES)
        for seq in KILLED_AT:
            with job(server, tmp_path, "--every", "10ms") as process:
                wait_for(client, seq, process, tmp_path)
        assert client.get_stream("T").state.messages < MESSAGES // 2
        with job(server, tmp_path, "--every", "10ms", "--retries", "50") as process:
            before = client.get_stream("T").state.messages
            wait_for(client, before + 1, process, tmp_path)
            server.kill()
            server.start()
            wait_for(client, MESSAGES // 2, process, tmp_path)
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_S) == 0, (tmp_path / "job.log").read_text()
        assert lines_of((tmp_path / "job.log").read_text())[-1]["stopped"] is True
        assert written(server.url) == expected(server.url)


def test_sigterm_ends_after_the_batch(server: ServerProcess, tmp_path: Path) -> None:
    with Contrail(server.url) as client:
        fill(client, MESSAGES)
        with job(server, tmp_path, "--every", "1h") as process:
            wait_for(client, 1, process, tmp_path)
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_S) == 0, (tmp_path / "job.log").read_text()
        assert client.get_stream("T").state.messages < MESSAGES // 2
    *batches, summary = lines_of((tmp_path / "job.log").read_text())
    assert (summary["stopped"], summary["batches"]) == (True, len(batches))
    checkpoint = tmp_path / "checkpoint"
    begun, finished = (
        {int(path.name) for path in (checkpoint / name).glob("[0-9]*")}
        for name in ("offsets", "commits")
    )
    assert begun == finished == {0}
