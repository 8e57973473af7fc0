"""Transformations of real streams: their rows, refusals, and what happens when they are killed."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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
from tests.pipeline.commands import running as running_job
from tests.spark.stored import stored
from tests.support.command import run_contrail
from tests.support.each import each
from tests.support.servers import ServerProcess

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.usefixtures("spark")]

SQL = """
-- every other message, with its number
select shard, seq, replace(subject, 's.', 't.') as subject, 'n' || cast(data as string) as data
from messages
where seq % 2 = 0;
"""
MESSAGES = 12_000
BATCH = 1_000
KILLED_AT = (1, 2_000)
"""Numbers of written messages at which the job is killed; at the first it has just begun."""


@pytest.fixture(scope="module")
def filled(running: ServerProcess, client: Contrail) -> ServerProcess:
    """The server of the module, with a message to read."""
    fill(client, 1)
    return running


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
def test_stream_to_stream_and_on_from_there(own_server: ServerProcess, tmp_path: Path) -> None:
    with Contrail(own_server.url) as client:
        fill(client, 5_000)
        given = [
            "pipeline",
            *arguments(own_server, tmp_path, "--to", "T", "--once", "--batch", "2000"),
        ]
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
        assert written(own_server.url) == expected(own_server.url)
        changed = arguments(own_server, tmp_path, "--to", "T", "--once", sql=SQL.replace("%", "*"))
        refused = run_contrail("pipeline", *changed, env={})
        assert refused.exit_code == 1
        assert "the SQL was changed" in refused.output


def test_stream_to_files(own_server: ServerProcess, tmp_path: Path) -> None:
    with Contrail(own_server.url) as client:
        fill(client, 3_000)
    out = tmp_path / "out"
    given = arguments(own_server, tmp_path, "--to-parquet", str(out), "--once")
    done = run_contrail("pipeline", *given, env={})
    assert done.exit_code == 0, done.output
    found = pq.read_table(out, columns=["subject", "data"]).to_pylist()
    rows = sorted((row["subject"], row["data"].encode()) for row in found)
    assert rows == expected(own_server.url)
    # Spark would write nothing, because the folder has batches of the same numbers.
    again = run_contrail("pipeline", *given, "--checkpoint", str(tmp_path / "new"), env={})
    assert again.exit_code == 1
    assert "has the rows of another checkpoint" in again.output


@pytest.mark.parametrize(
    ("more", "status", "text"),
    [
        ((), 2, "either --to STREAM or --to-parquet FOLDER"),
        (("--to", "S"), 2, "would read what it writes"),
        (("--to", "NONE"), 3, "NONE"),
        (("--to-parquet", __file__), 2, "--to-parquet: "),
        (("--to-parquet", "s3://bucket/rows"), 2, "a folder of a file system, not a URL"),
        (("--to", "T", "--every", "0s"), 2, "--every must be at least 1ms"),
        (("--to", "T", "--every", "soon"), 2, "--every"),
    ],
)
def test_what_makes_no_sense_is_refused_before_spark_starts(
    filled: ServerProcess, tmp_path: Path, more: tuple[str, ...], status: int, text: str
) -> None:
    done = run_contrail("pipeline", *arguments(filled, tmp_path, *more), env={})
    assert done.exit_code == status
    assert text in done.output


def test_a_folder_that_cannot_be_written_to_ends_the_job_at_once(
    filled: ServerProcess, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "folder"
    given = arguments(filled, tmp_path, "--once", "--retries", "0", "--to-parquet", str(folder))
    done = run_contrail("pipeline", *given, env={})
    assert done.exit_code == 1
    [error] = lines_of(done.stderr)
    assert error["message"] == f"cannot write to the folder of the rows {folder}: Not a directory"


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
    spark: SparkSession, filled: ServerProcess, sql: str, text: str
) -> None:
    with pytest.raises(Misuse) as refused:
        transformation(filled, sql).result(spark)
    assert text in str(refused.value)


def test_other_statements_and_rows_that_vary_are_refused(
    spark: SparkSession, filled: ServerProcess, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    row = "select 't.1' as subject, data from messages"
    for sql, text in (
        (f"insert overwrite directory '{out}' using parquet select 1", "one SELECT, and no other"),
        ("set spark.sql.ansi.enabled=false", "one SELECT, and no other"),
        (f"{row} limit 3", "has the operator GlobalLimit"),
        (f"{row} where rand() < 0.5", "a function such as rand"),
        (f"{row} where subject in (select cast(id as string) from range(9))", "has a subquery"),
        (f"{row} where exists (select 1 from range(9) where id = seq)", "has a subquery"),
        (f"{row} except select 't.1', cast('x' as binary)", "has the operator Except"),
        (
            f"{row}, lateral (select id from range(9) where id = seq)",
            "has the operator LateralJoin",
        ),
        (f"{row} order by seq", "cannot be run: Sorting is not supported"),
    ):
        with pytest.raises(Misuse, match=text):
            transformation(filled, sql).result(spark)
    assert not out.exists()
    assert spark.conf.get("spark.sql.ansi.enabled") == "true"


def transformation(server: ServerProcess, sql: str) -> Transformation:
    source = {"url": server.url, "stream": "S"}
    return Transformation(sql, source, "contrail", {"url": server.url, "stream": "T"})


ROW = "'t.1' as subject, data"


@each(
    ("sql", "text"),
    [
        (f"select uuid() as msg_id, {ROW} from messages", "the column msg_id has"),
        (f"select r || 1 as msg_id, {ROW} from (select *, uuid() as r from messages)", "msg_id"),
        (f"with a as (select uuid() as msg_id, {ROW} from messages) select * from a", "msg_id"),
        (
            f"select cast(seq as string) as msg_id, {ROW} from messages "
            f"union all select uuid(), {ROW} from messages",
            "msg_id",
        ),
        (
            f"select msg_id, {ROW} from messages lateral view explode(array(uuid())) as msg_id",
            "msg_id",
        ),
        (f"select shard, cast(rand() * 9 as long) as seq, {ROW} from messages", "shard and seq"),
    ],
)
def test_an_id_that_varies_is_refused(
    spark: SparkSession, filled: ServerProcess, sql: str, text: str
) -> None:
    with pytest.raises(Misuse, match=text):
        transformation(filled, sql).result(spark)


@each(
    "sql",
    [
        # Rows that vary, with ids that do not.
        "select shard, seq, 't.1' as subject, uuid() as data from messages",
        f"select 'm' || seq as msg_id, {ROW} from messages where rand() < 0.5",
        f"select shard, seq, {ROW} from messages, range(9) where id = seq",
        # Rows that keep their order, and need no id.
        f"with a as (select {ROW} from messages) select * from a where data > ''",
        f"select /*+ broadcast(m) */ {ROW} from messages m",
        f"from messages |> select {ROW}",
        f"select {ROW} from messages union all select {ROW} from messages",
        "select 't.1' as subject, e as data from messages lateral view explode(array('a')) as e",
        f"select {ROW} from messages watermark time delay of interval 1 second",
    ],
)
def test_rows_that_are_known_again_are_allowed(
    spark: SparkSession, filled: ServerProcess, sql: str
) -> None:
    assert transformation(filled, sql).result(spark).isStreaming


def test_a_server_that_does_not_answer_is_no_mistake_in_the_sql(
    spark: SparkSession, own_server: ServerProcess
) -> None:
    source = {"url": own_server.url, "stream": "S", "fetchRetries": "0"}
    own_server.kill()
    work = Transformation("select * from messages", source, "parquet", {"path": "unused"})
    with pytest.raises(PySparkException, match="connection refused"):
        work.result(spark)


def test_counts_by_window_are_written_with_ids_of_their_own(
    spark: SparkSession, own_server: ServerProcess, tmp_path: Path
) -> None:
    sql = (
        "select 't.count' as subject, cast(count(*) as string) as data, "
        "concat('minute-', cast(window.start as string)) as msg_id from messages "
        "watermark time delay of interval 0 seconds group by window(time, '1 second')"
    )
    with Contrail(own_server.url) as client:
        fill(client, 10, shards=1)
        first = client.get_stream("S").state.first_at
        while second(client.get_stream("S").state.last_at) == second(first):
            client.publish("s.end", "")  # until the first window is over
    work = Transformation(
        sql,
        {"url": own_server.url, "stream": "S", "startingPosition": "earliest"},
        "contrail",
        {"url": own_server.url, "stream": "T"},
    )
    query = work.start(spark, str(tmp_path / "checkpoint"), None)
    query.awaitTermination()
    times = [row["time"] for row in stored(own_server.url, "S", "time")]
    in_first = sum(second(time) == second(times[0]) for time in times)
    assert [row["data"] for row in stored(own_server.url, "T", "data")] == [str(in_first).encode()]


# Killed and stopped ------------------------------------------------------------------------------
Going = Callable[[], bool]


@contextmanager
def meanwhile(act: Callable[[Going], None]) -> Iterator[None]:
    """Act in another thread while the job runs in this one, and then send it SIGTERM."""
    ended = threading.Event()

    def acted() -> None:
        try:
            act(lambda: not ended.is_set())
        except BaseException:
            while not ended.wait(1):  # the second signal interrupts the job
                os.kill(os.getpid(), signal.SIGTERM)
            raise
        os.kill(os.getpid(), signal.SIGTERM)

    kept = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with ThreadPoolExecutor(1) as thread:
            done = thread.submit(acted)
            try:
                yield
            finally:
                ended.set()
            done.result()
    finally:
        signal.signal(signal.SIGTERM, kept)


def wait_for(client: Contrail, seq: int, going: Going) -> None:
    """Wait until the target has a message with this sequence."""
    while not client.read_range("T", from_seq=seq, limit=1, wait="5s").messages:
        assert going(), "the job has ended"


def test_killed_job_and_restarted_server_lose_and_repeat_nothing(
    own_server: ServerProcess, tmp_path: Path
) -> None:
    given = arguments(own_server, tmp_path, "--to", "T", "--batch", str(BATCH), "--every", "10ms")
    with Contrail(own_server.url) as client:
        fill(client, MESSAGES)
        for seq in KILLED_AT:
            with running_job(tmp_path / "job.log", *given) as process:
                wait_for(client, seq, lambda: process.poll() is None)
        before = client.get_stream("T").state.messages
        assert before < MESSAGES // 2

        def restarted(going: Going) -> None:
            wait_for(client, before + 1, going)
            own_server.kill()
            own_server.start()
            wait_for(client, MESSAGES // 2, going)

        with meanwhile(restarted):
            done = run_contrail("pipeline", *given, "--retries", "50", env={})
        assert done.exit_code == 0, done.output
        assert lines_of(done.stdout)[-1]["stopped"] is True
        assert written(own_server.url) == expected(own_server.url)


def test_sigterm_ends_after_the_batch(own_server: ServerProcess, tmp_path: Path) -> None:
    given = arguments(own_server, tmp_path, "--to", "T", "--batch", str(BATCH), "--every", "1h")
    with Contrail(own_server.url) as client:
        fill(client, 3 * BATCH)
        with meanwhile(lambda going: wait_for(client, 1, going)):
            done = run_contrail("pipeline", *given, env={})
        assert done.exit_code == 0, done.output
        assert client.get_stream("T").state.messages < BATCH
    *batches, summary = lines_of(done.stdout)
    assert (summary["stopped"], summary["batches"]) == (True, len(batches))
    checkpoint = tmp_path / "checkpoint"
    begun, finished = (
        {int(path.name) for path in (checkpoint / name).glob("[0-9]*")}
        for name in ("offsets", "commits")
    )
    assert begun == finished == {0}
