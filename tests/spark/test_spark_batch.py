"""``spark.read.format("contrail")`` end to end in a JVM, against a replay server on loopback."""

import zlib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, DataFrameReader, SparkSession
from pyspark.sql import functions as sf

from contrail_spark.schema import spark_schema
from tests.spark.replay_server import EPOCH_US, Cut, Refuse, ReplayServer

pytestmark = pytest.mark.spark

EPOCH = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=EPOCH_US)


@pytest.fixture
def two_shards() -> Iterator[ReplayServer]:
    """Stream FLIGHTS with 250 messages in each of two shards."""
    server = ReplayServer(rows_per_shard=250, shards=2, batch_rows=64)
    yield server
    server.close()


def reader(spark: SparkSession, server: ReplayServer, **options: str) -> DataFrameReader:
    """A reader of stream FLIGHTS on ``server``."""
    given = {"url": server.url, "stream": "FLIGHTS", **options}
    return spark.read.format("contrail").options(**given)


def sequences(frame: DataFrame) -> list[int]:
    """The sequences of all rows, sorted."""
    return sorted(row.seq for row in frame.select("seq").collect())


def test_every_message_of_every_shard_is_counted(
    spark: SparkSession, two_shards: ReplayServer
) -> None:
    frame = reader(spark, two_shards).load()
    assert frame.count() == 500
    assert frame.select("shard", "seq").distinct().count() == 500


def test_all_columns_arrive_in_their_types(spark: SparkSession, server: ReplayServer) -> None:
    frame = reader(spark, server).load()
    assert frame.schema == spark_schema()
    found = {row.seq: row.asDict() for row in frame.collect()}
    assert found[4] == {
        "shard": 0,
        "seq": 4,
        "time": (EPOCH + timedelta(microseconds=4)).astimezone().replace(tzinfo=None),
        "subject": "flights.JFK.LAX.AA",
        "headers": {"Leg": ["4", "x"]},
        "data": bytearray(b"0:4"),
    }
    assert (found[5]["headers"], found[5]["data"]) == (None, bytearray(b""))


def test_columns_are_usable_in_sql_functions(spark: SparkSession, server: ReplayServer) -> None:
    row = (
        reader(spark, server, subject="flights.JFK.LAX.*")
        .load()
        .agg(
            sf.count("headers").alias("with_headers"),
            sf.sum(sf.crc32("data")).alias("checksum"),
            sf.count_distinct("subject").alias("subjects"),
        )
        .collect()[0]
    )
    expected = server.rows(0, 1, 100, "flights.JFK.LAX.*")
    assert row.checksum == sum(zlib.crc32(message["data"]) for message in expected)
    assert row.with_headers == sum(bool(message["headers"]) for message in expected)
    assert row.subjects == 2


def test_one_split_becomes_one_partition(spark: SparkSession, two_shards: ReplayServer) -> None:
    frame = reader(spark, two_shards, splits="4").load()
    assert frame.rdd.getNumPartitions() == 4
    assert two_shards.asked("/plan")[0]["splits"] == "4"
    per_partition = frame.groupBy(sf.spark_partition_id().alias("p")).count().collect()
    assert {row["count"] for row in per_partition} == {125}


def test_columns_not_selected_are_not_sent(spark: SparkSession, server: ReplayServer) -> None:
    frame = reader(spark, server).schema("subject string, seq long").load()
    assert frame.columns == ["subject", "seq"]
    assert sequences(frame) == list(range(1, 101))
    assert {query["columns"] for query in server.asked("/replay")} == {"subject,seq"}


def test_a_projection_without_the_sequence_is_resumed_too(
    spark: SparkSession, server: ReplayServer
) -> None:
    server.faults.append(Cut(2))
    frame = reader(spark, server, columns="data", splits="1").load()
    assert frame.columns == ["data"]
    assert frame.count() == 100


def test_a_range_and_a_subject_are_given_as_options(
    spark: SparkSession, server: ReplayServer
) -> None:
    frame = reader(
        spark,
        server,
        startingSequence="11",
        endingSequence="60",
        subject="flights.EWR.>",
    ).load()
    assert sequences(frame) == [row["seq"] for row in server.rows(0, 11, 60, "flights.EWR.>")]


def test_a_frame_stays_at_its_snapshot(spark: SparkSession, server: ReplayServer) -> None:
    frame = reader(spark, server).load()
    assert frame.count() == 100
    server.rows_per_shard = 150
    assert (frame.count(), frame.union(frame).count()) == (100, 200)
    assert reader(spark, server).load().count() == 150
    assert len(server.asked("/plan")) == 2


def test_a_frame_with_a_schema_given_stays_at_its_snapshot_too(
    spark: SparkSession, server: ReplayServer
) -> None:
    frame = reader(spark, server).schema("seq long").load()
    assert frame.count() == 100
    server.rows_per_shard = 150
    assert frame.count() == 100
    assert len(server.asked("/plan")) == 1


def test_an_empty_range_reads_as_an_empty_frame(spark: SparkSession, server: ReplayServer) -> None:
    server.rows_per_shard = 0
    assert reader(spark, server).load().collect() == []


def test_faults_on_the_way_neither_lose_nor_double_a_row(
    spark: SparkSession, two_shards: ReplayServer
) -> None:
    two_shards.faults.extend([Cut(1), Refuse(503, "overloaded"), Cut(0), Cut(1, extra=99)])
    frame = reader(spark, two_shards, splits="2").load()
    assert sequences(frame) == sorted([*range(1, 251)] * 2)


def test_two_filters_on_one_frame_do_not_meet(spark: SparkSession, server: ReplayServer) -> None:
    server.rows_per_shard = 10
    frame = reader(spark, server).load()
    low, high = frame.filter("seq <= 2"), frame.filter("seq >= 9")
    assert sequences(low) == [1, 2]
    assert sequences(frame) == list(range(1, 11))
    assert sequences(low.union(high)) == [1, 2, 9, 10]
    assert sequences(frame.union(low)) == sorted([*range(1, 11), 1, 2])


def test_three_filters_in_one_query_do_not_meet(spark: SparkSession, server: ReplayServer) -> None:
    server.rows_per_shard = 10
    reader(spark, server).load().createOrReplaceTempView("messages")
    row = spark.sql(
        "SELECT (SELECT count(*) FROM messages WHERE seq <= 2) AS low,"
        " (SELECT count(*) FROM messages WHERE seq > 5) AS high,"
        " (SELECT count(*) FROM messages) AS everything"
    ).collect()[0]
    assert tuple(row) == (2, 5, 10)


def test_a_view_is_made_in_sql_alone(spark: SparkSession, server: ReplayServer) -> None:
    spark.sql(
        "CREATE OR REPLACE TEMPORARY VIEW flights USING contrail "
        f"OPTIONS (url '{server.url}', stream 'FLIGHTS')"
    )
    assert spark.sql("SELECT count(*) FROM flights").collect()[0][0] == 100


@pytest.mark.parametrize(
    ("options", "schema", "sentence"),
    [
        ({"startingSequnce": "1"}, None, "did you mean startingSequence?"),
        ({"columns": "payload"}, None, "unknown column payload; a stream has: shard, seq"),
        ({}, "payload binary", "unknown column payload; a stream has: shard, seq"),
        ({}, "data string", "column data has type binary, not string"),
        ({"stream": "NONE"}, None, "stream NONE: 404 stream_not_found"),
    ],
)
def test_a_mistake_fails_the_query_with_its_sentence(
    spark: SparkSession,
    server: ReplayServer,
    options: dict[str, str],
    schema: str | None,
    sentence: str,
) -> None:
    configured = reader(spark, server, **options)
    with pytest.raises(PySparkException) as refused:
        (configured.schema(schema) if schema else configured).load().collect()
    assert sentence in str(refused.value)


def test_messages_lost_to_retention_fail_the_query(
    spark: SparkSession, server: ReplayServer
) -> None:
    frame = reader(spark, server, splits="1").load()
    frame.count()
    server.first_seq = 11
    with pytest.raises(PySparkException) as failed:
        frame.count()
    first, second, *_ = str(failed.value).splitlines()
    assert first == "An exception was thrown from the Python worker:"
    sentence = "DataLossError: stream FLIGHTS shard 0: sequences 1..10 were removed before they"
    assert sentence in second


def test_messages_lost_to_retention_are_skipped_if_asked_for(
    spark: SparkSession, server: ReplayServer
) -> None:
    frame = reader(spark, server, failOnDataLoss="false").load()
    server.first_seq = 11
    assert sequences(frame) == list(range(11, 101))
