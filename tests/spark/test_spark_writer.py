"""The writers against a real server, without a JVM: ids, numbers, retries and orders of tasks."""

import logging
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from contrail_client import Contrail
from contrail_spark import bodies, writer
from contrail_spark.errors import ServerRefusedError
from contrail_spark.layout import IdSource
from contrail_spark.source import ContrailDataSource
from contrail_spark.writer import ContrailBatchWriter, ContrailStreamWriter, Written
from tests.spark.stored import message_ids, texts
from tests.support.servers import ServerProcess

SCHEMA = StructType(
    [
        StructField("subject", StringType()),
        StructField("data", BinaryType()),
        StructField("msg_id", StringType()),
    ]
)
WITHOUT_IDS = StructType(SCHEMA.fields[:2])
Writer = ContrailBatchWriter | ContrailStreamWriter
Run = Callable[..., Written]
QUERY = "b3c0bbd9-93b7-4a0f-a8d4-a2c4b1b5a5b4"


@pytest.fixture
def client(running: ServerProcess) -> Iterator[Contrail]:
    """A server with an empty stream S."""
    with Contrail(running.url) as client:
        client.ensure_stream("S", {"subjects": ["s.>"], "duplicate_window": "100ms"})
        yield client
        client.delete_stream("S")


class FakeTask:
    """The task that Spark would run."""

    def __init__(self, partition: int, batch: int) -> None:
        self._partition = partition
        self._properties = {
            "sql.streaming.queryId": QUERY,
            "streaming.sql.batchId": str(batch),
        }

    def partitionId(self) -> int:  # noqa: N802 Spark's name
        return self._partition

    def getLocalProperty(self, key: str) -> str | None:  # noqa: N802 Spark's name
        return self._properties.get(key)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs one task of a pickled writer, as a worker does."""

    def run(made: Writer, texts: list[str], partition: int = 0, batch: int = 0) -> Written:
        monkeypatch.setattr(writer, "_task", lambda: FakeTask(partition, batch))
        rows = pa.record_batch(
            {
                "subject": pa.array(["s.a"] * len(texts), pa.string()),
                "data": pa.array([one.encode() for one in texts], pa.binary()),
                "msg_id": pa.array(texts, pa.string()),
            }
        )
        if made._layout.ids is not IdSource.COLUMN:
            rows = rows.drop_columns(["msg_id"])
        half = len(texts) // 2
        written = pickle.loads(pickle.dumps(made)).write(iter([rows[:half], rows[half:]]))
        assert isinstance(written, Written)
        return written

    return run


def source(server: ServerProcess, **options: str) -> ContrailDataSource:
    return ContrailDataSource({"url": server.url, "stream": "S", **options})


def let_the_window_pass(client: Contrail) -> None:
    """Wait until the stream has forgotten the ids of single messages."""
    client.publish("s.probe", "probe", msg_id="probe")
    while client.publish("s.probe", "probe", msg_id="probe").duplicate:
        pass
    client.purge_stream("S", subject="s.probe")


def test_attempts_of_a_task_store_each_row_once(
    running: ServerProcess, client: Contrail, run: Run
) -> None:
    made = source(running).writer(WITHOUT_IDS, overwrite=False)
    assert run(made, ["1", "2", "3"]) == Written(3, 0)
    assert run(made, ["4"], partition=1) == Written(1, 0)
    let_the_window_pass(client)
    assert run(made, ["1", "2", "3", "3b"]) == Written(4, 3)
    assert texts(running.url, "S") == ["1", "2", "3", "4", "3b"]
    # Another write of the same rows is meant.
    again = source(running).writer(WITHOUT_IDS, overwrite=False)
    assert run(again, ["1", "2", "3"]) == Written(3, 0)


def test_repeated_batch_may_be_divided_in_another_way_if_rows_have_ids(
    running: ServerProcess, client: Contrail, run: Run
) -> None:
    made = source(running).streamWriter(SCHEMA, overwrite=False)
    run(made, ["a", "b", "c"], batch=5)
    run(made, ["d", "e"], partition=1, batch=5)
    let_the_window_pass(client)
    assert run(made, ["e", "c", "f"], partition=7, batch=5) == Written(3, 2)
    assert texts(running.url, "S") == ["a", "b", "c", "d", "e", "f"]
    # The ids of an earlier batch are free again after the duplicate window.
    let_the_window_pass(client)
    assert run(made, ["a"], batch=6) == Written(1, 0)


def test_rows_without_ids_get_one_from_query_batch_partition_and_row(
    running: ServerProcess, client: Contrail, run: Run
) -> None:
    made = source(running).streamWriter(WITHOUT_IDS, overwrite=False)
    run(made, ["a", "b", "c"], partition=3, batch=5)
    expected = [f"{QUERY}:5:3:{row}" for row in (1, 2, 3)]
    assert message_ids(running.url, "S") == expected


def test_batch_before_the_last_one_is_refused(
    running: ServerProcess, client: Contrail, run: Run
) -> None:
    made = source(running).streamWriter(SCHEMA, overwrite=False)
    run(made, ["a"], batch=5)
    with pytest.raises(ServerRefusedError, match=r"write batch 4 of query .* the stream has a lat"):
        run(made, ["b"], batch=4)
    assert texts(running.url, "S") == ["a"]


def test_rows_of_a_task_keep_their_order_over_many_requests(
    running: ServerProcess, client: Contrail, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "BODY_ROWS_MAX", 7)
    given = [str(number) for number in range(200)]
    run(source(running).writer(SCHEMA, overwrite=False), given)
    assert texts(running.url, "S") == given


def test_task_waits_for_a_server_that_is_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_task", lambda: FakeTask(0, 0))
    rows = pa.record_batch({"subject": ["s.a"] * 4, "data": [b"1", b"2", b"3", b"4"]})
    with ServerProcess(tmp_path / "data") as server, Contrail(server.url) as client:
        client.ensure_stream("S", {"subjects": ["s.>"]})

        def batches() -> Iterator[pa.RecordBatch]:
            yield rows[:2]
            server.kill()
            server.start()
            yield rows[2:]

        made = source(server).writer(WITHOUT_IDS, overwrite=False)
        assert made.write(batches()) == Written(4, 0)
        assert texts(server.url, "S") == ["1", "2", "3", "4"]


def test_partition_without_rows_sends_nothing(
    running: ServerProcess, client: Contrail, run: Run
) -> None:
    made = source(running, url="http://127.0.0.1:9").writer(SCHEMA, overwrite=False)
    assert run(made, []) == Written(0, 0)


def test_refused_row_is_named_with_its_number(
    running: ServerProcess, client: Contrail, run: Run
) -> None:
    client.update_stream("S", {"max_msg_size": 20})
    made = source(running).writer(SCHEMA, overwrite=False)
    expected = "write partition 2 to stream S: row 3 with subject 's.a': 10054 message_too_large"
    with pytest.raises(ServerRefusedError, match=expected):
        run(made, ["1", "2", "x" * 30, "4"], partition=2)


def test_counts_of_all_tasks_are_logged(
    running: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    counts = [Written(5, 2), None, Written(1, 1)]
    source(running).streamWriter(SCHEMA, overwrite=False).commit(counts, 7)
    source(running).writer(SCHEMA, overwrite=False).commit(counts)
    sentence = "wrote 6 messages to stream S, of which 3 were duplicates"
    assert caplog.messages == [f"batch 7 {sentence}", f"a batch write {sentence}"]
