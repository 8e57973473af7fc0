"""One range of a stream and its lake, on a real server: what Spark's workers run, without a JVM."""

import logging
import pickle
from collections.abc import Iterator
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.datasource import InputPartition

from contrail_client import Contrail, Message, NotFound
from contrail_spark.batch import ContrailBatchReader
from contrail_spark.client import ReplayClient
from contrail_spark.errors import (
    DataLossError,
    LakeError,
    LakeNotFoundError,
    OptionError,
    ServerRefusedError,
)
from contrail_spark.lake.manifest import Range
from contrail_spark.lake.store import Lake
from contrail_spark.options import parse_options
from contrail_spark.schema import arrow_schema, spark_schema
from contrail_spark.source import ContrailDataSource
from tests.pipeline.lakes import Row, archive
from tests.support.servers import ServerProcess


class Tiers:
    """Stream S, and the lake of it."""

    def __init__(self, server: ServerProcess, client: Contrail, folder: Path, shards: int) -> None:
        self.client = client
        self.url = server.url
        self.folder = folder / "lake"
        self.published = 0
        self.shards = shards
        config = {"shards": shards, "shard_by": [2]} if shards > 1 else {}
        client.ensure_stream("S", {"subjects": ["s.>"], **config})

    def publish(self, count: int) -> None:
        """Publish messages whose payloads are numbers, a few at a time."""
        for start in range(self.published, self.published + count, 25):
            few = range(start, min(start + 25, self.published + count))
            messages = [Message(f"s.{at % 4}.{at % 3}", str(at)) for at in few]
            self.client.publish_batch("S", messages).raise_refused()
        self.published += count

    def archive(self, lose: int = 0) -> Lake:
        """Archive what is new, but of each shard the first ``lose`` messages are too late."""
        client = ReplayClient(parse_options({"url": self.url, "stream": "S"}))
        plan = client.plan()
        lake = Lake.ensure(self.folder, "S", plan.incarnation, None)
        state = lake.state()
        rows: list[Row] = []
        for split in plan.splits:
            for batch in client.read(plan, split, tuple(arrow_schema(spark_schema()).names)):
                times = batch.column("time").cast("int64").to_pylist()
                found = zip(batch.to_pylist(), times, strict=True)
                rows += [{**row, "time": time} for row, time in found]
        covered, lost = [], []
        for one in plan.shards:
            first = state.archived_through(one.shard) + 1
            covered.append(Range(one.shard, first, one.last_seq))
            start = max(first, one.first_seq) + lose
            if start > first:
                lost.append(Range(one.shard, first, start - 1))
            rows = [row for row in rows if row["shard"] != one.shard or row["seq"] >= start]
        archive(lake, rows, covered, lost, row_group=20)
        return lake

    def retain(self, first: int) -> None:
        """Remove all messages below a sequence from each shard."""
        for shard in range(self.shards):
            self.client.purge_stream("S", up_to_seq=first, shard=shard)

    def time(self, seq: int) -> str:
        """When a message of the first shard was published."""
        return self.client.read_range("S", shard=0, from_seq=seq, limit=1).messages[0].time

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
def tiers(server: ServerProcess, tmp_path: Path, shards: int) -> Iterator[Tiers]:
    with Contrail(server.url) as client:
        yield Tiers(server, client, tmp_path, shards)
        with suppress(NotFound):
            client.delete_stream("S")


def test_what_retention_removed_comes_from_the_lake(tiers: Tiers) -> None:
    tiers.publish(1_000)
    tiers.archive()
    tiers.retain(300)
    tiers.publish(200)
    assert tiers.read() == list(range(1_200))
    assert len(tiers.read(lake="")) < 700
    kinds = {type(part).__name__ for part in tiers.reader().partitions()}
    assert kinds == {"LakePartition", "SplitPartition"}


def test_a_tiered_read_equals_the_stream_before_retention(tiers: Tiers) -> None:
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
def test_sequences_mean_the_same_in_lake_and_stream(tiers: Tiers) -> None:
    tiers.publish(300)
    tiers.archive()
    tiers.retain(200)
    for first, last in [(50, 250), (1, 99), (99, 99), (199, 200), (200, 200), (300, 400)]:
        limits = {"startingSequence": str(first), "endingSequence": str(last)}
        assert tiers.read(**limits) == list(range(first - 1, min(last, 300)))
        tiers_alone = tiers.read(**limits, lakeOnly="true")
        assert tiers_alone == list(range(first - 1, min(last, 300)))
    assert tiers.read(startingSequence="120", subject="s.1.>") == list(range(121, 300, 4))


def test_sequences_of_several_shards_are_refused_without_a_server_too(tiers: Tiers) -> None:
    tiers.publish(10)
    tiers.archive()
    with pytest.raises(OptionError, match="stream S has 2 shards, each with its own sequences"):
        tiers.reader(startingSequence="2", lakeOnly="true")


def test_all_columns_come_back_with_the_types_that_spark_compares(tiers: Tiers) -> None:
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


def test_the_number_and_the_size_of_partitions_are_options_of_the_lake_too(tiers: Tiers) -> None:
    tiers.publish(2_000)
    tiers.archive()
    tiers.retain(5_000)
    assert len(tiers.reader(splits="1").partitions()) == 2  # one for each shard
    assert len(tiers.reader(splits="10").partitions()) in range(8, 13)
    assert len(tiers.reader(maxBytesPerPartition="1k").partitions()) > 10


def test_a_deleted_message_stays_deleted_while_the_stream_has_older_ones(tiers: Tiers) -> None:
    tiers.publish(100)
    tiers.archive()
    tiers.retain(5)
    message = tiers.client.read_range("S", shard=1, from_seq=20, limit=1).messages[0]
    tiers.client.delete_message("S", message.seq, shard=1)
    found = tiers.read()
    assert int(message.payload) not in found
    assert len(found) == 99


def test_retention_between_plan_and_read_loses_nothing(tiers: Tiers) -> None:
    tiers.publish(1_000)
    tiers.archive()
    tiers.retain(100)
    reader = tiers.reader()
    tiers.retain(400)
    assert sorted(numbers(reader)) == list(range(1_000))


def test_what_is_archived_after_the_plan_is_found_by_a_read(tiers: Tiers) -> None:
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
    tiers: Tiers, caplog: pytest.LogCaptureFixture
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


def test_a_gap_does_not_matter_to_a_read_of_what_came_after_it(tiers: Tiers) -> None:
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


def test_messages_that_were_lost_before_they_were_archived_are_named(tiers: Tiers) -> None:
    tiers.publish(100)
    tiers.archive()
    tiers.publish(100)
    tiers.archive(lose=10)
    tiers.retain(1_000)
    with pytest.raises(DataLossError, match=r"shard 0: sequences 51\.\.60 were removed before"):
        tiers.reader()
    assert len(tiers.read(failOnDataLoss="false")) == 180


def test_what_was_gone_before_the_lake_began_is_no_loss(tiers: Tiers) -> None:
    tiers.publish(100)
    tiers.retain(11)
    tiers.archive()
    tiers.retain(21)
    assert len(tiers.read()) == 80


def test_a_lake_that_has_not_begun_takes_nothing_away(tiers: Tiers) -> None:
    tiers.publish(100)
    tiers.retain(11)
    plan = ReplayClient(parse_options({"url": tiers.url, "stream": "S"})).plan()
    Lake.ensure(tiers.folder, "S", plan.incarnation, None)
    assert len(tiers.read()) == 80


def test_messages_lost_after_the_plan_are_named(tiers: Tiers) -> None:
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


def test_a_lake_alone_needs_no_stream_and_no_server(tiers: Tiers) -> None:
    tiers.publish(100)
    tiers.archive()
    tiers.client.delete_stream("S")
    with pytest.raises(ServerRefusedError, match=r'stream_not_found.*"lakeOnly", "true"'):
        tiers.reader()
    nowhere = "http://127.0.0.1:1"
    assert tiers.read(lakeOnly="true", url=nowhere) == list(range(100))
    assert len(tiers.read(lakeOnly="true", url=nowhere, subject="s.1.*")) == 25


def test_a_lake_of_another_stream_is_refused(tiers: Tiers, tmp_path: Path) -> None:
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


def test_options_that_make_no_sense_together_are_refused(tiers: Tiers) -> None:
    with pytest.raises(OptionError, match="lakeOnly needs the option lake"):
        tiers.reader(lake="", lakeOnly="true")
    with pytest.raises(OptionError, match=r"lakeOnly has no meaning for spark\.readStream"):
        tiers.source(lakeOnly="true").streamReader(spark_schema())


def test_a_query_reads_the_history_from_the_lake_and_goes_on(tiers: Tiers) -> None:
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
