"""What Spark's Python workers call, without a JVM: the data source, its pickle, and the reader."""

import gc
import pickle
import subprocess
import sys
from typing import Final

import pytest
from pyspark.sql.datasource import DataSourceReader, InputPartition

from contrail_spark import batch
from contrail_spark.batch import ContrailBatchReader
from contrail_spark.errors import OptionError
from contrail_spark.schema import arrow_schema, spark_schema
from contrail_spark.source import ContrailDataSource
from tests.spark.replay_server import ReplayServer


def source(server: ReplayServer, **options: str) -> ContrailDataSource:
    return ContrailDataSource({"url": server.url, "stream": "FLIGHTS", **options})


def rows(reader: ContrailBatchReader) -> list[int]:
    """The number of rows of each partition, read from a pickled reader as in a worker."""
    copy = pickle.loads(pickle.dumps(reader))
    return [sum(one.num_rows for one in copy.read(part)) for part in reader.partitions()]


def test_a_pickled_source_keeps_the_plan_of_its_schema(server: ReplayServer) -> None:
    loaded = source(server)
    schema = loaded.schema()
    server.rows_per_shard = 150
    for _ in range(2):  # two actions on one DataFrame
        reader = pickle.loads(pickle.dumps(loaded)).reader(schema)
        assert sum(rows(reader)) == 100
    assert len(server.asked("/plan")) == 1


def test_batches_have_exactly_the_schema_that_spark_compares(server: ReplayServer) -> None:
    schema = spark_schema(("data", "subject"))
    reader = source(server).reader(schema)
    [first, *_] = reader.partitions()
    for found in reader.read(first):
        assert found.schema.equals(arrow_schema(schema), check_metadata=True)


def test_an_empty_plan_is_read_as_nothing(server: ReplayServer) -> None:
    server.rows_per_shard = 0
    reader = source(server).reader(spark_schema())
    assert reader.partitions() == []
    for partition in (None, InputPartition(None)):  # what Spark makes of no partitions
        assert list(reader.read(partition)) == []


def test_filters_are_not_pushed_down() -> None:
    assert ContrailBatchReader.pushFilters is DataSourceReader.pushFilters


def test_a_mistake_is_found_before_a_request_is_sent(server: ReplayServer) -> None:
    with pytest.raises(OptionError, match="option maxBytesPerPartition: must be a size in bytes"):
        source(server, maxBytesPerPartition="much").schema()
    assert server.requests == []


def test_modules_are_exempt_from_collection_once_in_a_process(
    server: ReplayServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[None] = []
    monkeypatch.setattr(gc, "freeze", lambda: calls.append(None))
    batch.freeze_modules.cache_clear()
    reader = source(server, splits="4").reader(spark_schema(("seq",)))
    assert rows(reader) == [25] * 4
    assert len(calls) == 1


READ: Final = """
import pickle, sys
reader = pickle.load(sys.stdin.buffer)
assert sum(batch.num_rows for part in reader.partitions() for batch in reader.read(part)) == 100
assert "pandas" not in sys.modules
"""


def test_pandas_is_not_imported_to_read_a_stream(server: ReplayServer) -> None:
    """It takes a new worker a second, and after each task its objects are visited."""
    reader = source(server).reader(spark_schema())
    command = [sys.executable, "-c", READ]
    subprocess.run(command, input=pickle.dumps(reader), check=True, timeout=120)
