"""A stream on a real server, and the lake of it, without the job that archives."""

from pathlib import Path
from typing import Final

from contrail_client import Contrail, Message
from contrail_spark.client import ReplayClient
from contrail_spark.lake.manifest import Range
from contrail_spark.lake.store import Lake
from contrail_spark.options import parse_options
from contrail_spark.schema import arrow_schema, spark_schema
from tests.pipeline.lakes import Row, archive
from tests.support.servers import ServerProcess

NULLS_FROM: Final = 100
"""The lake has NULL from this sequence on, and empty maps, as in older versions, before it."""


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
        """Publish messages whose payloads are numbers, a few at a time; every fifth has headers."""
        for start in range(self.published, self.published + count, 25):
            few = range(start, min(start + 25, self.published + count))
            messages = [
                Message(f"s.{at % 4}.{at % 3}", str(at), {} if at % 5 else {"N": str(at)})
                for at in few
            ]
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
        for row in rows:
            row["headers"] = row["headers"] or ([] if row["seq"] < NULLS_FROM else None)
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
