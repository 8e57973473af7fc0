"""``df.write`` and ``df.writeStream`` end to end in a JVM, against a real server."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from contrail_client import Contrail, Message
from tests.checks.repository import ROOT
from tests.spark.stored import message_ids, stored, texts
from tests.support.servers import ServerProcess

pytestmark = pytest.mark.spark

ROWS = 3_000
PAGE = (ROOT / "docs" / "spark.md").read_text(encoding="utf-8")


@pytest.fixture
def client(running: ServerProcess) -> Iterator[Contrail]:
    """A server with an empty stream S that forgets ids after 100 ms."""
    with Contrail(running.url) as client:
        client.ensure_stream("S", {"subjects": ["s.>"], "duplicate_window": "100ms"})
        yield client
        client.delete_stream("S")


def write(frame: DataFrame, server: ServerProcess, stream: str = "S", **options: str) -> None:
    given = {"url": server.url, "stream": stream, **options}
    frame.write.format("contrail").options(**given).mode("append").save()


def numbers(spark: SparkSession) -> DataFrame:
    """Rows 0 to 2,999 in 3 partitions, with 10 subjects."""
    return spark.range(0, ROWS, 1, 3).selectExpr(
        "concat('s.', id % 10) as subject", "cast(id as string) as data"
    )


def test_rows_become_messages_in_the_order_of_their_partition(
    spark: SparkSession, running: ServerProcess, client: Contrail
) -> None:
    write(numbers(spark), running)
    found = stored(running.url, "S", "subject", "data")
    written = [int(row["data"]) for row in found]
    assert sorted(written) == list(range(ROWS))
    assert all(row["subject"] == f"s.{int(row['data']) % 10}" for row in found)
    for start in range(0, ROWS, 1_000):
        part = [number for number in written if start <= number < start + 1_000]
        assert part == sorted(part)


def test_all_columns_are_written(
    spark: SparkSession, running: ServerProcess, client: Contrail
) -> None:
    frame = spark.sql(
        "select cast(null as binary) as data, map('A', '1') as headers, 'id-1' as msg_id "
        "union all select cast('x' as binary), null, 'id-2'"
    ).coalesce(1)
    write(frame, running, subject="s.one")
    found = stored(running.url, "S", "subject", "headers", "data")
    assert [row["data"] for row in found] == [b"", b"x"]
    assert [dict(row["headers"]).get("A") for row in found] == [["1"], None]
    assert {row["subject"] for row in found} == {"s.one"}
    assert message_ids(running.url, "S") == ["id-1", "id-2"]


def test_frame_that_was_read_is_written_as_it_is(
    spark: SparkSession, running: ServerProcess, client: Contrail
) -> None:
    client.update_stream("S", {"subjects": ["t.*"]})
    client.ensure_stream("COPY", {"subjects": ["s.*"], "duplicate_window": "1h"})
    messages = [
        Message(f"t.{at}", str(at), headers={"A": ["1", "2"]} if at % 2 else {}, msg_id=f"m{at}")
        for at in range(100)
    ]
    client.publish_batch("S", messages).raise_refused()
    options = {"url": running.url, "stream": "S"}
    frame = spark.read.format("contrail").options(**options).load()
    try:
        for _ in range(2):  # the second time all are duplicates
            renamed = frame.selectExpr(
                "replace(subject, 't.', 's.') as subject", "* except(subject)"
            )
            write(renamed, running, "COPY", sourceStream="S")
        found = stored(running.url, "COPY", "subject", "headers", "data")
        assert sorted(int(row["data"]) for row in found) == list(range(100))
        for row in found:
            at = int(row["data"])
            assert row["subject"] == f"s.{at}"
            own = [("A", ["1", "2"])] if at % 2 else []
            assert sorted(row["headers"]) == [*own, ("Nats-Msg-Id", [f"S:0:{at + 1}"])]
    finally:
        client.delete_stream("COPY")


@pytest.mark.parametrize(
    ("columns", "mode", "sentence"),
    [
        ("'s.1' as subject, 'x' as data, 1 as colour", "append", "a message has no column colour"),
        ("'s.1' as subject, 1 as data", "append", "column data has type int"),
        ("cast(null as string) as subject, 'x' as data", "append", "row 1 has no subject"),
        ("'s..1' as subject, 'x' as data", "append", "a subject must not contain an empty token"),
        ("'z.1' as subject, 'x' as data", "append", "row 1 with subject 'z.1': 20002 subject_not"),
        ("'s.1' as subject, 'x' as data", "overwrite", "messages cannot be overwritten"),
        ("'s.1' as subject, 'x' as data", "error", 'the "ErrorIfExists" mode'),
    ],
)
def test_mistake_is_named(
    spark: SparkSession,
    running: ServerProcess,
    client: Contrail,
    columns: str,
    mode: str,
    sentence: str,
) -> None:
    writer = spark.sql(f"select {columns}").write.format("contrail").mode(mode)
    writer.options(url=running.url, stream="S")
    with pytest.raises(PySparkException) as refused:
        writer.save()
    assert sentence in str(refused.value)
    assert texts(running.url, "S") == []


def test_example_of_the_manual_writes_both_ways(
    spark: SparkSession, running: ServerProcess, client: Contrail, tmp_path: Path
) -> None:
    client.ensure_stream("ALERTS", {"subjects": ["alerts.*"]})
    [example] = re.findall(r"```python\n(alerts = .*?)```", PAGE, re.DOTALL)
    (tmp_path / "delays").mkdir()
    (tmp_path / "delays" / "1.txt").write_text("JFK\nEWR")
    program = example.replace("http://127.0.0.1:7420", running.url)
    exec(program.replace("/data", str(tmp_path)), {"spark": spark})
    assert sorted(texts(running.url, "ALERTS")) == ["closed", "delayed", "delayed"]
    client.delete_stream("ALERTS")


class Query:
    """A streaming query from files of lines to stream S, which ends when it has read all."""

    def __init__(self, spark: SparkSession, server: ServerProcess, folder: Path) -> None:
        self._spark = spark
        self._server = server
        self._lines = folder / "lines"
        self._lines.mkdir()
        self.checkpoint = folder / "checkpoint"
        self._files = 0

    def add(self, *lines: str) -> None:
        """Add a file."""
        self._files += 1
        (self._lines / f"{self._files}.txt").write_text("\n".join(lines))

    def run(self, mode: str = "append", **options: str) -> None:
        """Read each new file in a batch of its own."""
        frame = self._spark.readStream.option("maxFilesPerTrigger", 1).text(str(self._lines))
        frame = frame.selectExpr("'s.a' as subject", "value as data")
        if mode != "append":
            frame = frame.groupBy("subject").agg({"data": "max"}).toDF("subject", "data")
        query = (
            frame.writeStream.format("contrail")
            .options(url=self._server.url, stream="S", **options)
            .option("checkpointLocation", str(self.checkpoint))
            .queryName("lines")
            .outputMode(mode)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()


@pytest.fixture
def query(spark: SparkSession, running: ServerProcess, tmp_path: Path) -> Query:
    return Query(spark, running, tmp_path)


def test_repeated_batch_stores_nothing_twice(
    query: Query, running: ServerProcess, client: Contrail
) -> None:
    query.add("1", "2")
    query.add("3", "4")
    query.run()
    assert texts(running.url, "S") == ["1", "2", "3", "4"]
    # As if the driver had died before it noted that the last batch is complete.
    for name in ("1", ".1.crc"):
        (query.checkpoint / "commits" / name).unlink()
    client.publish("s.a", "probe", msg_id="probe")
    while client.publish("s.a", "probe", msg_id="probe").duplicate:
        pass  # until the duplicate window has passed
    client.purge_stream("S", up_to_seq=10_000)
    query.add("5")
    query.run()
    assert texts(running.url, "S") == ["5"]
    names = [name.rpartition(":")[0] for name in message_ids(running.url, "S")]
    assert [name.split(":")[1:] for name in names] == [["2", "0"]]


@pytest.mark.parametrize(
    ("mode", "sentence"),
    [("complete", "messages cannot be overwritten"), ("update", "does not support Update mode")],
)
def test_other_modes_of_a_query_are_refused(
    query: Query, running: ServerProcess, client: Contrail, mode: str, sentence: str
) -> None:
    query.add("1")
    with pytest.raises(PySparkException, match=sentence):
        query.run(mode)
    assert texts(running.url, "S") == []


def test_refused_row_ends_the_query(query: Query, running: ServerProcess, client: Contrail) -> None:
    query.add("1", "x" * 100)
    client.update_stream("S", {"max_msg_size": 80})
    with pytest.raises(PySparkException, match=r"row 2 with subject 's.a': 10054 message"):
        query.run()
