"""``spark.readStream.format("contrail")`` end to end in a JVM, against a real server."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from contrail_client import Contrail, Message
from tests.support.servers import ServerProcess

SHARDS = 2

pytestmark = pytest.mark.spark


@pytest.fixture
def client(running: ServerProcess) -> Iterator[Contrail]:
    """A server with the stream S of two shards, which has 300 messages."""
    with Contrail(running.url) as client:
        create(client)
        yield client
        client.delete_stream("S")


def create(client: Contrail) -> None:
    client.ensure_stream("S", {"subjects": ["s.>"], "shards": SHARDS, "shard_by": [2]})
    publish(client, range(300))


def publish(client: Contrail, numbers: range) -> None:
    messages = [Message(f"s.{number % 40}.x", str(number)) for number in numbers]
    client.publish_batch("S", messages).raise_refused()


class Job:
    """A query that appends the messages of S to Parquet files, each time up to its end."""

    def __init__(self, spark: SparkSession, server: ServerProcess, folder: Path) -> None:
        self._spark = spark
        self._url = server.url
        self._folder = folder

    def run(self, **options: str) -> list[dict[str, Any]]:
        """Start the query from its checkpoint, wait for its end, and return its progress."""
        given = {"url": self._url, "stream": "S", "startingPosition": "earliest", **options}
        frame = self._spark.readStream.format("contrail").options(**given).load()
        query: StreamingQuery = (
            frame.selectExpr("shard", "seq", "cast(data as string) as number")
            .writeStream.format("parquet")
            .option("path", str(self._folder / "out"))
            .option("checkpointLocation", str(self._folder / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return [progress for progress in query.recentProgress if progress["numInputRows"]]

    def numbers(self) -> list[int]:
        """The numbers of all messages in the files."""
        rows = self._spark.read.parquet(str(self._folder / "out")).select("number").collect()
        return sorted(int(row.number) for row in rows)


@pytest.fixture
def job(spark: SparkSession, running: ServerProcess, client: Contrail, tmp_path: Path) -> Job:
    """A job that has not run yet."""
    return Job(spark, running, tmp_path)


def test_a_backlog_is_read_in_batches_and_each_run_goes_on(job: Job, client: Contrail) -> None:
    progress = job.run(maxMessagesPerTrigger="120")
    assert [one["numInputRows"] for one in progress] == [120, 120, 60]
    assert job.numbers() == list(range(300))
    assert job.run() == []
    publish(client, range(300, 350))
    assert [one["numInputRows"] for one in job.run()] == [50]
    assert job.numbers() == list(range(350))


def test_progress_shows_the_end_of_the_stream(job: Job) -> None:
    first, last = job.run(maxMessagesPerTrigger="200")
    sources = [one["sources"][0] for one in (first, last)]
    assert sources[0]["latestOffset"] == sources[1]["endOffset"] != sources[0]["endOffset"]
    assert sum(json.loads(sources[1]["endOffset"])["shards"].values()) == 300


def test_a_query_that_runs_on_gets_new_messages(
    spark: SparkSession, running: ServerProcess, client: Contrail, tmp_path: Path
) -> None:
    options = {"url": running.url, "stream": "S", "columns": "shard,seq"}
    frame = spark.readStream.format("contrail").options(**options).load()
    query = frame.writeStream.format("memory").queryName("new_messages").start()
    try:
        query.processAllAvailable()
        for start in (300, 340):
            publish(client, range(start, start + 40))
            query.processAllAvailable()
        assert spark.table("new_messages").distinct().count() == 80
    finally:
        query.stop()


def test_messages_overtaken_by_retention_end_the_query_or_are_skipped(
    job: Job, client: Contrail
) -> None:
    job.run()
    publish(client, range(300, 400))
    for shard in range(SHARDS):
        client.purge_stream("S", keep=10, shard=shard)
    with pytest.raises(StreamingQueryException, match="DataLossError: stream S shard"):
        job.run()
    job.run(failOnDataLoss="false")
    publish(client, range(400, 410))
    job.run()
    numbers = job.numbers()
    assert numbers[:300] == list(range(300))
    assert len(numbers) == len(set(numbers)) == 300 + 10 * SHARDS + 10
    assert numbers[-10:] == list(range(400, 410))


def test_a_stream_that_was_re_created_ends_the_query_with_a_sentence(
    job: Job, client: Contrail
) -> None:
    job.run()
    client.delete_stream("S")
    create(client)
    with pytest.raises(StreamingQueryException) as failed:
        job.run()
    sentence = "CheckpointError: stream S was re-created after the checkpoint of this query was"
    assert sentence in str(failed.value)
    assert "Traceback" not in str(failed.value)
    job.run(failOnDataLoss="false")
    assert job.numbers() == sorted([*range(300), *range(300)])


def test_a_mistake_in_the_options_ends_a_query_with_its_sentence(job: Job) -> None:
    for _ in range(2):  # without a checkpoint, and with one
        with pytest.raises(StreamingQueryException) as failed:
            job.run(splits="2")
        sentence = "OptionError: option splits has no meaning for spark.readStream"
        assert sentence in str(failed.value)
        assert "Traceback" not in str(failed.value)
        job.run()
