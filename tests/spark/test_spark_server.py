"""The client of the Spark source against a real server: what both have to agree on. No JVM."""

from collections.abc import Iterator
from urllib.parse import quote_plus

import pyarrow as pa
import pytest

from contrail_client import Contrail, Message
from contrail_spark.client import ReplayClient
from contrail_spark.errors import DataLossError, ServerRefusedError, StreamChangedError
from contrail_spark.options import SUBJECT_CHARS_MAX, parse_options
from contrail_spark.plan import ReplayPlan
from contrail_spark.schema import COLUMNS, arrow_schema, conform, spark_schema
from tests.support.servers import ServerProcess

MESSAGES = 3_000


@pytest.fixture
def client(running: ServerProcess) -> Iterator[Contrail]:
    """A server with stream S: subjects s.0.x to s.9.x in turn, every third with a header.

    Payloads are so large that there are several blocks.
    """
    with Contrail(running.url) as client:
        client.ensure_stream("S", {"subjects": ["s.>"]})
        for start in range(0, MESSAGES, 1_000):
            messages = [
                Message(
                    f"s.{at % 10}.x", payload(at), headers={"N": [str(at)]} if not at % 3 else {}
                )
                for at in range(start, start + 1_000)
            ]
            client.publish_batch("S", messages).raise_refused()
        yield client
        client.delete_stream("S")


def payload(number: int) -> bytes:
    """The payload of message ``number``, of about 2,000 bytes."""
    return b"%d" % number + bytes(1_990)


class Read:
    """A plan, and the rows of all its splits in Spark's types."""

    def __init__(self, server: ServerProcess, **options: str) -> None:
        given = {"url": server.url, "stream": "S", "fetchRetries": "1", **options}
        self.options = parse_options(given)
        self._client = ReplayClient(self.options, sleep=lambda _: None)
        self.plan: ReplayPlan = self._client.plan()

    def rows(self) -> list[dict[str, object]]:
        schema = arrow_schema(spark_schema(self.options.columns))
        batches = [
            conform(batch, schema)
            for split in self.plan.splits
            for batch in self._client.read(self.plan, split, tuple(schema.names))
        ]
        rows: list[dict[str, object]] = pa.Table.from_batches(batches, schema).to_pylist()
        return rows

    def sequences(self) -> list[object]:
        return [row["seq"] for row in self.rows()]


def test_all_columns_of_all_messages_arrive(running: ServerProcess, client: Contrail) -> None:
    rows = Read(running).rows()
    assert [row["seq"] for row in rows] == list(range(1, MESSAGES + 1))
    assert list(rows[0]) == list(COLUMNS)
    assert [row["data"] for row in rows] == [payload(at) for at in range(MESSAGES)]
    assert (rows[3]["headers"], rows[4]["headers"]) == ([("N", ["3"])], None)
    assert (rows[3]["shard"], rows[3]["subject"]) == (0, "s.3.x")


def test_a_message_must_match_one_of_the_filters(running: ServerProcess, client: Contrail) -> None:
    found = Read(running, subject="s.3.> s.7.* s.none").sequences()
    assert found == [at + 1 for at in range(MESSAGES) if at % 10 in (3, 7)]


def test_as_many_filters_as_an_option_takes_fit_in_a_request(
    running: ServerProcess, client: Contrail
) -> None:
    longest = " ".join(["s.7.x", *("s." + ">" * 1_190 for _ in range(4))])
    read = Read(running, subject=longest, consistency="any", failOnDataLoss="false")
    assert SUBJECT_CHARS_MAX - 100 < len(quote_plus(longest)) <= SUBJECT_CHARS_MAX
    assert len(read.sequences()) == MESSAGES // 10


def test_ranges_of_sequences_and_times_are_limits(running: ServerProcess, client: Contrail) -> None:
    limits = {"startingSequence": "990", "endingSequence": "1010"}
    assert Read(running, **limits).sequences() == list(range(990, 1011))
    beyond = {"startingSequence": str(MESSAGES), "endingSequence": str(MESSAGES + 1)}
    assert Read(running, **beyond).sequences() == [MESSAGES]
    assert Read(running, startingSequence=str(MESSAGES + 1)).plan.splits == ()
    assert Read(running, endingTimestamp="0").plan.splits == ()
    assert len(Read(running, startingTimestamp="0", columns="seq").sequences()) == MESSAGES


def test_a_small_maximum_gives_more_partitions(running: ServerProcess, client: Contrail) -> None:
    few = Read(running, minPartitions="1")
    many = Read(running, minPartitions="1", maxBytesPerPartition="1k")
    assert len(few.plan.splits) == 1 < len(many.plan.splits)
    assert many.sequences() == few.sequences()


def test_deleted_messages_are_gaps_and_no_loss(running: ServerProcess, client: Contrail) -> None:
    read = Read(running)
    for seq in (2, 1500, MESSAGES):
        client.delete_message("S", seq)
    gone = {2, 1500, MESSAGES}
    assert read.sequences() == [seq for seq in range(1, MESSAGES + 1) if seq not in gone]


@pytest.mark.parametrize("kept", [2, 1_001, MESSAGES, MESSAGES + 1])
def test_what_retention_removed_is_named_or_skipped(
    running: ServerProcess, client: Contrail, kept: int, caplog: pytest.LogCaptureFixture
) -> None:
    strict = Read(running, splits="1")
    lenient = Read(running, splits="1", failOnDataLoss="false")
    client.purge_stream("S", up_to_seq=kept)
    with pytest.raises(DataLossError, match=rf"stream S shard 0: sequences 1\.\.{kept - 1} were"):
        strict.rows()
    assert lenient.sequences() == list(range(kept, MESSAGES + 1))
    assert f"sequences 1..{kept - 1} were removed" in caplog.text


def test_another_stream_of_the_same_name_is_never_read(
    running: ServerProcess, client: Contrail
) -> None:
    read = Read(running, failOnDataLoss="false")
    client.delete_stream("S")
    with pytest.raises(ServerRefusedError, match="404 stream_not_found"):
        read.rows()
    client.ensure_stream("S", {"subjects": ["s.>"]})
    client.publish_batch("S", [Message("s.0.x", "other")] * 10).raise_refused()
    with pytest.raises(StreamChangedError, match="load it again"):
        read.rows()


def test_any_replica_may_be_read(running: ServerProcess, client: Contrail) -> None:
    assert len(Read(running, consistency="any", columns="seq").sequences()) == MESSAGES
