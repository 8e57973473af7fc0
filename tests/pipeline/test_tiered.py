"""One range of a stream and its lake, on a real server: what Spark's workers run, without a JVM."""

import logging
import pickle
from collections.abc import Iterable, Iterator
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.datasource import InputPartition

from contrail_client import Contrail, NotFound
from contrail_spark.batch import ContrailBatchReader
from contrail_spark.client import ReplayClient
from contrail_spark.errors import (
    DataLossError,
    LakeError,
    LakeNotFoundError,
    OptionError,
    ServerRefusedError,
)
from contrail_spark.lake.store import Lake
from contrail_spark.options import parse_options
from contrail_spark.schema import arrow_schema, spark_schema
from contrail_spark.source import ContrailDataSource
from tests.pipeline.tiers import Tiers
from tests.support.servers import ServerProcess


class Reads(Tiers):
    """Reads of both as one, in the way of Spark's workers."""

    def source(self, **options: str) -> ContrailDataSource:
        given = {"url": self.url, "stream": "S", "lake": str(self.folder), **options}
        return ContrailDataSource({name: value for name, value in given.items() if value})

    def reader(self, **options: str) -> ContrailBatchReader:
        source = self.source(**options)
        schema = source.schema()
        return pickle.loads(pickle.dumps(source)).reader(schema)

    def read(self, **options: str) -> list[int]:
        """The payloads of a read, which are numbers, in ascending order."""
        return sorted(numbers(self.reader(**options)))


def numbers(reader: ContrailBatchReader) -> list[int]:
    """What a reader yields, after checking the order within partitions."""
    return [int(row["data"]) for part in reader.partitions() for row in rows(reader, part)]


def rows(reader: ContrailBatchReader, part: InputPartition) -> list[dict[str, Any]]:
    copy = pickle.loads(pickle.dumps(reader))
    found = [row for batch in copy.read(part) for row in batch.to_pylist()]
    if found and "seq" in found[0]:
        places = [(row["shard"], row["seq"]) for row in found]
        assert places == sorted(set(places))
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server") / "data") as running:
        yield running


@pytest.fixture
def shards() -> int:
    return 2


@pytest.fixture
def tiers(server: ServerProcess, tmp_path: Path, shards: int) -> Iterator[Reads]:
    with Contrail(server.url) as client:
        yield Reads(server, client, tmp_path, shards)
        with suppress(NotFound):
            client.delete_stream("S")


def test_what_retention_removed_comes_from_the_lake(tiers: Reads) -> None:
    tiers.publish(1_000)
    tiers.archive()
    tiers.retain(300)
    tiers.publish(200)
    assert tiers.read() == list(range(1_200))
    assert len(tiers.read(lake="")) < 700
    kinds = {type(part).__name__ for part in tiers.reader().partitions()}
    assert kinds == {"LakePartition", "SplitPartition"}


def test_a_tiered_read_equals_the_stream_before_retention(tiers: Reads) -> None:
    tiers.publish(600)
    tiers.archive()
    some = tiers.time(100)
    asked = (
        {},
        {"subject": "s.1.>"},
        {"subject": "s.*.2 s.3.1"},
        {"subject": "s.none"},
        {"startingTimestamp": some},
        {"endingTimestamp": some},
        {"splits": "3"},
        {"maxBytesPerPartition": "2k"},
        {"columns": "data"},
        {"columns": "data,subject", "subject": "s.0.0"},
    )
    before = [tiers.read(lake="", **each) for each in asked]
    assert [len(found) for found in before[:4]] == [600, 150, 250, 0]
    assert 0 < len(before[4]) < 600
    assert 0 < len(before[5]) < 600
    tiers.retain(200)
    for options, expected in zip(asked, before, strict=True):
        assert tiers.read(**options) == expected, options
    tiers.retain(10_000)
    for options, expected in zip(asked, before, strict=True):
        assert tiers.read(**options) == expected, options


@pytest.mark.parametrize("shards", [1])
def test_sequences_mean_the_same_in_lake_and_stream(tiers: Reads) -> None:
    tiers.publish(300)
    tiers.archive()
    tiers.retain(200)
    for first, last in [(50, 250), (1, 99), (99, 99), (199, 200), (200, 200), (300, 400)]:
        limits = {"startingSequence": str(first), "endingSequence": str(last)}
        assert tiers.read(**limits) == list(range(first - 1, min(last, 300)))
        tiers_alone = tiers.read(**limits, lakeOnly="true")
        assert tiers_alone == list(range(first - 1, min(last, 300)))
    assert tiers.read(startingSequence="120", subject="s.1.>") == list(range(121, 300, 4))


def test_sequences_of_several_shards_are_refused_without_a_server_too(tiers: Reads) -> None:
    tiers.publish(10)
    tiers.archive()
    with pytest.raises(OptionError, match="the lake has 2 shards, each with its own sequences"):
        tiers.reader(startingSequence="2", lakeOnly="true")


def test_all_columns_come_back_with_the_types_that_spark_compares(tiers: Reads) -> None:
    tiers.publish(40)
    plain = tiers.reader(lake="")
    before = [row for part in plain.partitions() for row in rows(plain, part)]
    tiers.archive()
    tiers.retain(10)
    reader = tiers.reader()
    after = [row for part in reader.partitions() for row in rows(reader, part)]
    place = itemgetter("shard", "seq")
    assert sorted(after, key=place) == sorted(before, key=place)
    for part in reader.partitions():
        for batch in reader.read(part):
            assert batch.schema.equals(arrow_schema(spark_schema()), check_metadata=True)


def headers_of(
    reader: ContrailBatchReader, parts: Iterable[InputPartition]
) -> dict[int, list[tuple[str, list[str]]] | None]:
    return {int(row["data"]): row["headers"] for part in parts for row in rows(reader, part)}


def test_a_message_without_headers_has_null_wherever_it_is(tiers: Reads) -> None:
    tiers.publish(600)
    tiers.archive()
    tiers.retain(200)
    tiers.publish(200)
    expected = {at: None if at % 5 else [("N", [str(at)])] for at in range(800)}
    for options in ({}, {"consistency": "any"}, {"splits": "1"}):
        reader = tiers.reader(**options)
        assert headers_of(reader, reader.partitions()) == expected
    query = tiers.source(startingPosition="earliest").streamReader(spark_schema())
    start = query.initialOffset()
    parts = query.partitions(start, query.latestOffset(start, query.getDefaultReadLimit()))
    assert headers_of(query, parts) == expected
    tiers.archive()
    tiers.retain(10_000)
    # Planned when the stream still had the messages.
    assert headers_of(reader, reader.partitions()) == expected
    alone = tiers.reader(lakeOnly="true")
    assert headers_of(alone, alone.partitions()) == expected


def test_the_number_and_the_size_of_partitions_are_options_of_the_lake_too(tiers: Reads) -> None:
    tiers.publish(2_000)
    tiers.archive()
    tiers.retain(5_000)
    assert len(tiers.reader(splits="1").partitions()) == 2  # one for each shard
    assert len(tiers.reader(splits="10").partitions()) in range(8, 13)
    assert len(tiers.reader(maxBytesPerPartition="1k").partitions()) > 10


def test_a_deleted_message_stays_deleted_while_the_stream_has_older_ones(tiers: Reads) -> None:
    tiers.publish(100)
    tiers.archive()
    tiers.retain(5)
    message = tiers.client.read_range("S", shard=1, from_seq=20, limit=1).messages[0]
    tiers.client.delete_message("S", message.seq, shard=1)
    found = tiers.read()
    assert int(message.payload) not in found
    assert len(found) == 99


def test_retention_between_plan_and_read_loses_nothing(tiers: Reads) -> None:
    tiers.publish(1_000)
    tiers.archive()
    tiers.retain(100)
    reader = tiers.reader()
    tiers.retain(400)
    assert sorted(numbers(reader)) == list(range(1_000))


def test_what_is_archived_after_the_plan_is_found_by_a_read(tiers: Reads) -> None:
    tiers.publish(500)
    tiers.archive()
    tiers.publish(500)
    reader = tiers.reader(splits="2")
    first, *others = reader.partitions()
    batches = reader.read(first)
    found = [int(value) for value in next(batches).column("data").to_pylist()]
    tiers.archive()
    tiers.retain(10_000)
    found += [int(value) for batch in batches for value in batch.column("data").to_pylist()]
    found += [int(row["data"]) for part in others for row in rows(reader, part)]
    assert sorted(found) == list(range(1_000))


@pytest.mark.parametrize("shards", [1])
def test_a_gap_between_lake_and_stream_is_named(
    tiers: Reads, caplog: pytest.LogCaptureFixture
) -> None:
    tiers.publish(400)
    tiers.archive()
    tiers.publish(400)
    tiers.retain(451)
    lost = r"stream S shard 0: sequences 401\.\.450 were removed before they were "
    with pytest.raises(DataLossError, match=rf"{lost}archived in the lake .*failOnDataLoss"):
        tiers.reader()
    with caplog.at_level(logging.WARNING):
        assert len(tiers.read(failOnDataLoss="false")) == 750
    assert "were removed before they were archived" in caplog.text
    assert len(tiers.read(endingSequence="400")) == 400


def test_a_gap_does_not_matter_to_a_read_of_what_came_after_it(tiers: Reads) -> None:
    tiers.publish(200)
    tiers.archive()
    tiers.publish(100)
    tiers.retain(120)
    tiers.publish(100)
    found = tiers.read(startingTimestamp=tiers.time(151))
    assert len(found) >= 50
    assert set(found) <= set(range(270, 400))
    assert tiers.read(startingTimestamp="2100-01-01T00:00:00Z") == []
    with pytest.raises(DataLossError):
        tiers.reader(startingTimestamp="2000-01-01T00:00:00Z")


def test_messages_that_were_lost_before_they_were_archived_are_named(tiers: Reads) -> None:
    tiers.publish(100)
    tiers.archive()
    tiers.publish(100)
    tiers.archive(lose=10)
    tiers.retain(1_000)
    with pytest.raises(DataLossError, match=r"shard 0: sequences 51\.\.60 were removed before"):
        tiers.reader()
    assert len(tiers.read(failOnDataLoss="false")) == 180


def test_what_was_gone_before_the_lake_began_is_no_loss(tiers: Reads) -> None:
    tiers.publish(100)
    tiers.retain(11)
    tiers.archive()
    tiers.retain(21)
    assert len(tiers.read()) == 80


def test_a_lake_that_has_not_begun_takes_nothing_away(tiers: Reads) -> None:
    tiers.publish(100)
    tiers.retain(11)
    plan = ReplayClient(parse_options({"url": tiers.url, "stream": "S"})).plan()
    Lake.ensure(tiers.folder, "S", plan.incarnation, None)
    assert len(tiers.read()) == 80


def test_messages_lost_after_the_plan_are_named(tiers: Reads) -> None:
    tiers.publish(100)
    tiers.archive()
    tiers.publish(100)
    reader = tiers.reader(splits="1")
    tiers.retain(81)
    with pytest.raises(DataLossError, match=r"shard 0: sequences 51\.\.80 were removed before the"):
        numbers(reader)
    kept = tiers.reader(failOnDataLoss="false")
    tiers.retain(91)
    assert len(numbers(kept)) == 120


def test_a_lake_alone_needs_no_stream_and_no_server(tiers: Reads) -> None:
    tiers.publish(100)
    tiers.archive()
    tiers.client.delete_stream("S")
    with pytest.raises(ServerRefusedError, match=r'stream_not_found.*"lakeOnly", "true"'):
        tiers.reader()
    nowhere = "http://127.0.0.1:1"
    assert tiers.read(lakeOnly="true", url=nowhere) == list(range(100))
    assert len(tiers.read(lakeOnly="true", url=nowhere, subject="s.1.*")) == 25


def test_a_lake_of_another_stream_is_refused(tiers: Reads, tmp_path: Path) -> None:
    tiers.publish(10)
    tiers.archive()
    with pytest.raises(LakeError, match="holds stream S, not T"):
        tiers.reader(stream="T", lakeOnly="true")
    tiers.client.delete_stream("S")
    tiers.client.ensure_stream("S", {"subjects": ["s.>"]})
    with pytest.raises(LakeError, match=r'created again since the lake.*"lakeOnly", "true"'):
        tiers.reader()
    assert len(tiers.read(lakeOnly="true")) == 10
    with pytest.raises(LakeNotFoundError, match="there is no lake in"):
        tiers.reader(lake=str(tmp_path / "none"))


def test_options_that_make_no_sense_together_are_refused(tiers: Reads) -> None:
    with pytest.raises(OptionError, match="lakeOnly needs the option lake"):
        tiers.reader(lake="", lakeOnly="true")
    with pytest.raises(OptionError, match=r"lakeOnly has no meaning for spark\.readStream"):
        tiers.source(lakeOnly="true").streamReader(spark_schema()).initialOffset()


def test_a_query_reads_the_history_from_the_lake_and_goes_on(tiers: Reads) -> None:
    tiers.publish(400)
    tiers.archive()
    since = tiers.time(50)
    tiers.retain(100)
    stream = tiers.source(startingPosition="earliest").streamReader(spark_schema())
    start = stream.initialOffset()
    assert start["shards"] == {"0": 0, "1": 0}
    found: list[int] = []
    for step in range(3):
        end = stream.latestOffset(start, stream.getDefaultReadLimit())
        for part in stream.partitions(start, end):
            copy = pickle.loads(pickle.dumps(stream))
            found += [int(v) for batch in copy.read(part) for v in batch["data"].to_pylist()]
        start = end
        tiers.publish(100)
        if step == 0:
            tiers.archive()
            tiers.retain(10_000)
    assert sorted(found) == list(range(600))
    timed = tiers.source(startingTimestamp=since).streamReader(spark_schema())
    assert 25 <= timed.initialOffset()["shards"]["0"] < 50
    late = tiers.source(startingTimestamp="2100-01-01T00:00:00Z").streamReader(spark_schema())
    assert late.initialOffset()["shards"] == {"0": 350, "1": 350}


@pytest.mark.parametrize("shards", [1])
def test_a_query_may_start_with_a_sequence_of_the_lake(tiers: Reads) -> None:
    tiers.publish(100)
    tiers.archive()
    tiers.retain(90)
    stream = tiers.source(startingSequence="50").streamReader(spark_schema())
    start = stream.initialOffset()
    assert start["shards"] == {"0": 49}
    end = stream.latestOffset(start, stream.getDefaultReadLimit())
    found = [
        int(value)
        for part in stream.partitions(start, end)
        for batch in stream.read(part)
        for value in batch["data"].to_pylist()
    ]
    assert found == list(range(49, 100))
