"""Spark over a stream with several shards, on a real server."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from contrail_client import Contrail, Message
from contrail_common.partition import shard_of
from tests.support.servers import ServerProcess

SHARDS = 5
MESSAGES = 500

pytestmark = pytest.mark.spark


def test_every_shard_is_read_and_named_truthfully(spark: SparkSession, tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as server, Contrail(server.url) as client:
        client.ensure_stream("S", {"subjects": ["s.>"], "shards": SHARDS, "shard_by": [2]})
        messages = [Message(f"s.{at % 40}.x", str(at)) for at in range(MESSAGES)]
        client.publish_batch("S", messages).raise_refused()
        options = {"url": server.url, "stream": "S", "splits": "10"}
        frame = spark.read.format("contrail").options(**options).load()
        rows = frame.select("shard", "seq", "subject", "data").collect()
    assert sorted(int(bytes(row.data)) for row in rows) == list(range(MESSAGES))
    assert {row.shard for row in rows} == set(range(SHARDS))
    for row in rows:
        assert row.shard == shard_of(row.subject, SHARDS, (2,))
    assert len({(row.shard, row.seq) for row in rows}) == MESSAGES
