"""Spark reads a stream and its lake as one."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from contrail_client import Contrail
from tests.pipeline.tiers import Tiers
from tests.support.servers import ServerProcess

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def tiers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiers]:
    """1,200 messages: 1,000 in the lake, of which the stream has 400, and 200 newer ones."""
    folder = tmp_path_factory.mktemp("tiers")
    with ServerProcess(folder / "data") as server, Contrail(server.url) as client:
        tiers = Tiers(server, client, folder, shards=2)
        tiers.publish(1_000)
        tiers.archive()
        tiers.retain(301)
        tiers.publish(200)
        yield tiers


def load(spark: SparkSession, tiers: Tiers, **options: str) -> DataFrame:
    given = {"url": tiers.url, "stream": "S", "lake": str(tiers.folder), **options}
    return spark.read.format("contrail").options(**given).load()


def test_a_frame_has_the_messages_of_both(spark: SparkSession, tiers: Tiers) -> None:
    frame = load(spark, tiers)
    rows = frame.selectExpr("int(string(data)) number", "subject").collect()
    assert sorted(row.number for row in rows) == list(range(1_200))
    assert frame.join(frame, ["shard", "seq"]).count() == 1_200
    assert frame.where("headers is not null").count() == 240
    assert frame.where("size(headers) = 0").count() == 0
    assert frame.where("headers['N'][0] = string(data)").count() == 240
    counts = load(spark, tiers, columns="subject", subject="s.1.>").groupBy("subject").count()
    assert {row.subject: row["count"] for row in counts.collect()} == {
        f"s.1.{at}": 100 for at in range(3)
    }
    narrow = (
        spark.read.format("contrail")
        .options(url=tiers.url, stream="S", lake=str(tiers.folder))
        .schema("seq long, data binary")
        .load()
    )
    assert narrow.agg({"seq": "max"}).collect()[0][0] == 600


def test_a_query_appends_each_message_once(
    spark: SparkSession, tiers: Tiers, tmp_path: Path
) -> None:
    query = (
        spark.readStream.format("contrail")
        .options(url=tiers.url, stream="S", lake=str(tiers.folder), startingPosition="earliest")
        .option("maxMessagesPerTrigger", 700)
        .load()
        .writeStream.format("parquet")
        .option("path", str(tmp_path / "files"))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    found = spark.read.parquet(str(tmp_path / "files"))
    rows = found.selectExpr("int(string(data)) n").collect()
    assert sorted(row.n for row in rows) == list(range(1_200))
    assert found.where("headers is null").count() == 960


def test_errors_begin_with_their_message(spark: SparkSession, tiers: Tiers) -> None:
    frame = load(spark, tiers)
    [path, *_] = sorted(tiers.folder.rglob("*.parquet"))
    whole = path.read_bytes()
    path.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    try:
        with pytest.raises(PySparkException, match=r"LakeError: the lake in .* is damaged: its"):
            frame.count()
    finally:
        path.write_bytes(whole)
    with pytest.raises(PySparkException, match="there is no lake in"):
        load(spark, tiers, lake=str(tiers.folder / "none"))
