"""The stream reader against a real server, called as Spark calls it. No JVM."""

import json
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from contrail_client import Contrail, Message
from contrail_common.partition import shard_of
from contrail_spark.batch import ContrailBatchReader
from contrail_spark.errors import CheckpointError, DataLossError, OptionError, ServerRefusedError
from contrail_spark.schema import spark_schema
from contrail_spark.source import ContrailDataSource
from contrail_spark.stream import ContrailStreamReader
from tests.spark.replay_server import ReplayServer
from tests.support.each import each
from tests.support.servers import ServerProcess

SHARDS = 3
ALL = ReadAllAvailable()


@pytest.fixture
def client(running: ServerProcess) -> Iterator[Contrail]:
    """A server with the empty stream S of one shard, and T of several."""
    with Contrail(running.url) as client:
        client.ensure_stream("S", {"subjects": ["s.>"]})
        client.ensure_stream("T", {"subjects": ["t.>"], "shards": SHARDS, "shard_by": [2]})
        yield client
        for name in ("S", "T"):
            client.delete_stream(name)


def publish(client: Contrail, count: int, stream: str = "S") -> None:
    messages = [Message(f"{stream.lower()}.{at % 40}.x", str(at)) for at in range(count)]
    client.publish_batch(stream, messages).raise_refused()


class Query:
    """A streaming query: its checkpoint, and the rows that it has read, batch by batch."""

    def __init__(self, server: ServerProcess, **options: str) -> None:
        self._options = {"url": server.url, "stream": "S", "fetchRetries": "1", **options}
        self.offset: dict[str, Any] | None = None
        self.restart()

    def restart(self, **options: str) -> None:
        """Start the query again from its checkpoint, which is kept as JSON."""
        source = ContrailDataSource(self._options | options)
        reader = source.streamReader(spark_schema(("shard", "seq")))
        assert isinstance(reader, ContrailStreamReader)
        self.reader = reader
        if self.offset is None:
            self.offset = self.reader.initialOffset()
        self.offset = json.loads(json.dumps(self.offset))

    def next(self) -> list[tuple[int, int]]:
        """Read the next batch: shard and sequence of its messages."""
        assert self.offset is not None
        end = self.reader.latestOffset(self.offset, self.reader.getDefaultReadLimit())
        rows = self.read(end)
        self.offset = end
        return rows

    def read(self, end: dict[str, Any]) -> list[tuple[int, int]]:
        """The rows after the offset up to ``end``, each partition by an unpickled reader."""
        assert self.offset is not None
        rows: list[tuple[int, int]] = []
        for partition in self.reader.partitions(self.offset, end):
            worker, part = pickle.loads(pickle.dumps((self.reader, partition)))
            for batch in worker.read(part):
                rows += zip(*(column.to_pylist() for column in batch.columns), strict=True)
        return rows


def rows_of(reader: ContrailBatchReader, partition: InputPartition) -> list[tuple[int, int]]:
    return [
        row
        for batch in reader.read(partition)
        for row in zip(*(column.to_pylist() for column in batch.columns), strict=True)
    ]


def sequences(*ranges: range) -> list[tuple[int, int]]:
    return [(0, seq) for one in ranges for seq in one]


def test_new_messages_follow_those_that_were_read(running: ServerProcess, client: Contrail) -> None:
    query = Query(running, startingPosition="earliest")
    assert query.next() == []
    publish(client, 30)
    assert query.next() == sequences(range(1, 31))
    assert query.next() == []
    publish(client, 5)
    query.restart()
    assert query.next() == sequences(range(31, 36))
    assert query.reader.reportLatestOffset() == query.offset


def test_a_query_starts_with_new_messages_unless_told_otherwise(
    running: ServerProcess, client: Contrail
) -> None:
    publish(client, 10)
    latest, earliest = Query(running), Query(running, startingPosition="earliest")
    third, timed = Query(running, startingSequence="3"), Query(running, startingTimestamp="0")
    publish(client, 2)
    assert latest.next() == sequences(range(11, 13))
    assert third.next() == sequences(range(3, 13))
    assert earliest.next() == timed.next() == sequences(range(1, 13))


def test_nothing_that_was_removed_before_the_start_is_missed(
    running: ServerProcess, client: Contrail
) -> None:
    publish(client, 10)
    client.purge_stream("S")
    queries = [Query(running, startingPosition=where) for where in ("earliest", "latest")]
    publish(client, 2)
    for query in queries:
        assert query.next() == sequences(range(11, 13))


def test_a_limit_divides_a_backlog_into_batches(running: ServerProcess, client: Contrail) -> None:
    publish(client, 25)
    query = Query(running, startingPosition="earliest", maxOffsetsPerTrigger="10")
    assert query.reader.getDefaultReadLimit() == ReadMaxRows(10)
    assert [len(query.next()) for _ in range(4)] == [10, 10, 5, 0]
    everything = Query(running, startingPosition="earliest", maxMessagesPerTrigger="10")
    assert everything.offset is not None
    assert everything.reader.latestOffset(everything.offset, ALL) == query.offset


def test_available_now_ends_where_the_stream_ended(
    running: ServerProcess, client: Contrail
) -> None:
    publish(client, 25)
    query = Query(running, startingPosition="earliest", maxMessagesPerTrigger="20")
    query.reader.prepareForTriggerAvailableNow()
    assert query.next() == sequences(range(1, 21))
    publish(client, 25)
    assert query.next() == sequences(range(21, 26))
    assert query.next() == []


@pytest.mark.parametrize("limit", ["1", "7", "1000"])
def test_every_shard_is_followed(running: ServerProcess, client: Contrail, limit: str) -> None:
    query = Query(running, stream="T", startingPosition="earliest", maxMessagesPerTrigger=limit)
    publish(client, 60, "T")
    rows: list[tuple[int, int]] = []
    while batch := query.next():
        assert len(batch) <= max(int(limit), SHARDS)
        rows += batch
        query.restart()
    assert {shard for shard, _ in rows} == set(range(SHARDS))
    assert len(set(rows)) == len(rows) == 60
    assert all((shard, seq - 1) in rows for shard, seq in rows if seq > 1)


def test_only_shards_that_can_have_matching_messages_are_followed(
    running: ServerProcess, client: Contrail
) -> None:
    query = Query(running, stream="T", startingPosition="earliest", subject="t.7.>")
    publish(client, 80, "T")
    assert [shard for shard, _ in query.next()] == [shard_of("t.7.x", SHARDS, (2,))] * 2
    query.restart(subject="t.>")
    with pytest.raises(CheckpointError, match=r"option subject was changed\. Use a new checkpoint"):
        query.next()


def test_sequences_are_those_of_the_shard_that_a_filter_needs(
    running: ServerProcess, client: Contrail
) -> None:
    publish(client, 80, "T")
    given = {"url": running.url, "stream": "T", "startingSequence": "2", "columns": "shard,seq"}
    with pytest.raises(OptionError, match="3 shards of the stream are read, each with its own"):
        ContrailDataSource(given).schema()
    source = ContrailDataSource(given | {"subject": "t.7.>"})
    parts = pickle.loads(pickle.dumps(source.reader(source.schema()))).partitions()
    assert {part.split.shard for part in parts} == {shard_of("t.7.x", SHARDS, (2,))}
    assert min(part.split.from_seq for part in parts) == 2
    query = Query(running, stream="T", subject="t.7.>", startingSequence="2")
    batch = query.next()
    assert batch == [row for part in parts for row in rows_of(source.reader(source.schema()), part)]


def test_a_batch_that_is_repeated_is_the_same(running: ServerProcess, client: Contrail) -> None:
    publish(client, 30)
    query = Query(running, startingPosition="earliest", minPartitions="4")
    assert query.offset is not None
    end = query.reader.latestOffset(query.offset, ALL)
    first = query.read(end)
    publish(client, 30)
    query.restart()
    query.reader.prepareForTriggerAvailableNow()
    assert len(query.reader.partitions(query.offset, end)) == 4
    assert query.read(end) == first == sequences(range(1, 31))


def test_deleted_messages_are_no_loss(running: ServerProcess, client: Contrail) -> None:
    publish(client, 30)
    query = Query(running, startingPosition="earliest")
    for seq in (5, 30):
        client.delete_message("S", seq)
    assert query.next() == sequences(range(1, 5), range(6, 30))
    assert query.next() == []


@pytest.mark.parametrize("kept", [13, 21])
def test_what_retention_overtook_is_named_or_skipped(
    running: ServerProcess, client: Contrail, kept: int, caplog: pytest.LogCaptureFixture
) -> None:
    publish(client, 10)
    query = Query(running, startingPosition="earliest", maxMessagesPerTrigger="100")
    query.next()
    publish(client, 10)
    client.purge_stream("S", up_to_seq=kept)
    lost = f"stream S shard 0: sequences 11..{kept - 1} were removed before they were read"
    with pytest.raises(DataLossError, match=lost):
        query.next()
    query.restart(failOnDataLoss="false")
    assert query.next() == sequences(range(kept, 21))
    assert lost in caplog.text
    publish(client, 1)
    assert query.next() == sequences(range(21, 22))


def recreate(client: Contrail) -> None:
    client.delete_stream("S")
    client.ensure_stream("S", {"subjects": ["s.>"]})
    publish(client, 4)


def test_a_stream_that_was_re_created_is_refused_or_read_from_its_start(
    running: ServerProcess, client: Contrail, caplog: pytest.LogCaptureFixture
) -> None:
    publish(client, 10)
    query = Query(running, startingPosition="earliest")
    query.next()
    recreate(client)
    sentence = "stream S was re-created after the checkpoint of this query was written"
    with pytest.raises(CheckpointError, match=sentence):
        query.next()
    query.restart(failOnDataLoss="false")
    assert query.next() == sequences(range(1, 5))
    assert sentence in caplog.text
    assert query.next() == []


def test_a_stream_that_was_re_created_before_a_batch_was_read(
    running: ServerProcess, client: Contrail, caplog: pytest.LogCaptureFixture
) -> None:
    publish(client, 10)
    query = Query(running, startingPosition="earliest")
    assert query.offset is not None
    end = query.reader.latestOffset(query.offset, ALL)
    recreate(client)
    sentence = r"stream S was re-created before sequences 1\.\.10 of shard 0 were read"
    with pytest.raises(CheckpointError, match=sentence):
        query.read(end)
    query.restart(failOnDataLoss="false")
    assert query.read(end) == []
    assert "re-created before sequences 1..10" in caplog.text


def test_a_stream_that_lost_its_end_is_refused_or_read_from_there(
    running: ServerProcess, client: Contrail, caplog: pytest.LogCaptureFixture
) -> None:
    publish(client, 10)
    query = Query(running, startingPosition="earliest")
    query.next()
    assert query.offset is not None
    query.offset["shards"]["0"] = 15
    sentence = "stream S shard 0 ends at sequence 10, but this query has read up to 15"
    with pytest.raises(CheckpointError, match=sentence):
        query.next()
    query.restart(failOnDataLoss="false")
    assert query.next() == []
    assert sentence in caplog.text
    publish(client, 2)
    assert query.next() == sequences(range(11, 13))


def test_an_end_that_was_lost_after_spark_logged_a_batch_is_named_or_skipped(
    running: ServerProcess, client: Contrail, caplog: pytest.LogCaptureFixture
) -> None:
    """The server has an older disk than when the query logged the batch, which it repeats."""
    publish(client, 10)
    query = Query(running, startingPosition="earliest")
    assert query.offset is not None
    logged = {**query.reader.latestOffset(query.offset, ALL), "shards": {"0": 15}}
    lost = r"stream S shard 0: sequences 11\.\.15 were lost by the server"
    with pytest.raises(DataLossError, match=lost):
        query.read(logged)
    query.restart(failOnDataLoss="false")
    assert query.read(logged) == sequences(range(1, 11))
    assert "sequences 11..15 were lost by the server" in caplog.text
    query.offset = logged
    assert query.next() == []
    publish(client, 2)
    assert query.next() == sequences(range(11, 13))


def test_a_stream_that_is_gone_ends_the_query(running: ServerProcess, client: Contrail) -> None:
    query = Query(running)
    client.delete_stream("S")
    with pytest.raises(ServerRefusedError, match="404 stream_not_found"):
        query.next()
    client.ensure_stream("S", {"subjects": ["s.>"]})


def test_no_partitions_are_read_as_nothing(running: ServerProcess, client: Contrail) -> None:
    query = Query(running)
    assert query.offset is not None
    assert query.reader.partitions(query.offset, query.offset) == []
    for partition in (None, InputPartition(None)):
        assert list(query.reader.read(partition)) == []


def test_only_the_leader_says_where_the_stream_ends(server: ReplayServer) -> None:
    """A replica that is behind would look like a stream that has lost its end."""
    given = {"url": server.url, "stream": "FLIGHTS", "consistency": "any"}
    reader = ContrailDataSource(given).streamReader(spark_schema(("seq",)))
    start = {"incarnation": "first", "shards": {"0": 90}}
    [partition] = reader.partitions(start, reader.latestOffset(start, ALL))
    assert sum(batch.num_rows for batch in reader.read(partition)) == 10
    assert [query.get("consistency") for query in server.asked("/plan")] == [None]
    assert [query.get("consistency") for query in server.asked("/replay")] == ["any"]


@each("name", ["endingSequence", "endingTimestamp", "splits", "maxBytesPerPartition"])
def test_options_of_batches_are_refused(name: str) -> None:
    reader = ContrailDataSource({"stream": "S", name.upper(): "1"}).streamReader(spark_schema())
    refused = rf"option {name} has no meaning for spark\.readStream"
    with pytest.raises(OptionError, match=refused):
        reader.initialOffset()
    with pytest.raises(OptionError, match=refused):
        reader.latestOffset({}, ALL)
    with pytest.raises(OptionError, match=refused):
        reader.partitions({}, {})


@each(
    ("name", "value"),
    [("startingPosition", "latest"), ("maxMessagesPerTrigger", "1"), ("maxOffsetsPerTrigger", "1")],
)
def test_options_of_streams_are_refused_for_a_batch(name: str, value: str) -> None:
    source = ContrailDataSource({"stream": "S", name: value})
    with pytest.raises(OptionError, match=rf"option {name} has no meaning for spark\.read"):
        source.reader(spark_schema())
