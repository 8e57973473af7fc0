"""Servers and lakes that an audit is to find fault with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from contrail_pipeline.audit.work import RangeTask
from contrail_spark.client import ReplayClient
from contrail_spark.lake import files
from contrail_spark.lake.layout import DataFile, Partition, temporary_name
from contrail_spark.lake.manifest import Commit, FileEntry, Range
from contrail_spark.lake.store import Lake
from contrail_spark.options import parse_options
from contrail_spark.schema import arrow_schema, spark_schema
from tests.spark.lakes import DAY
from tests.spark.replay_server import ReplayServer

Rows = list[dict[str, Any]]
SCHEMA = arrow_schema(spark_schema())


class TamperedServer(ReplayServer):
    """Serves what ``tamper`` makes of the right messages, for each node of ``nodes`` its own."""

    def __init__(self, rows_per_shard: int = 100, nodes: tuple[str, ...] = ()) -> None:
        super().__init__(rows_per_shard)
        self.nodes = nodes
        self.tamper: dict[str, Callable[[Rows], Rows]] = {}
        self.applied: dict[str, int] = {}
        self._asked = ""

    def headers(self, query: dict[str, str]) -> dict[str, str]:
        node = query.get("replica")
        if node not in self.nodes:
            return {}
        return {"Contrail-Replica": node, "Contrail-Applied-Index": str(self.applied.get(node, 1))}

    def batches(self, query: dict[str, str]) -> Any:
        tamper = self.tamper.get(query.get("replica", ""), lambda rows: rows)
        rows = tamper(self.rows(0, int(query["from_seq"]), int(query["to_seq"])))
        for start in range(0, len(rows), self.batch_rows):
            batch = pa.RecordBatch.from_pylist(rows[start : start + self.batch_rows], SCHEMA)
            yield batch.select(query["columns"].split(","))


def task(server: ReplayServer, **more: Any) -> RangeTask:
    """The task that checks all of the server's stream."""
    options = parse_options(
        {"url": server.url, "stream": "FLIGHTS", "failOnDataLoss": "false", "fetchRetries": "0"}
    )
    plan = ReplayClient(options).plan()
    return RangeTask(options, plan, 0, server.first_seq, server.rows_per_shard, **more)


def make_lake(root: Path, rows: Rows, *ranges: tuple[int, int], incarnation: str = "first") -> Lake:
    """A lake of FLIGHTS with a file and a commit for each range, which has the rows of it."""
    lake = Lake.ensure(root, "FLIGHTS", incarnation, None)
    for first, last in ranges:
        add_file(lake, [row for row in rows if first <= row["seq"] <= last], first, last)
    return lake


def add_file(lake: Lake, rows: Rows, first: int, last: int) -> FileEntry:
    """Archive a range in one file that has these rows, whatever they are."""
    state = lake.state()
    number = state.number + 1
    low, high = min(row["seq"] for row in rows), max(row["seq"] for row in rows)
    file = DataFile(Partition(DAY), "FLIGHTS", 0, low, high, number)
    written = lake.root / "tmp" / temporary_name(number, "x")
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), written, compression="none")
    digest = files.sha256(written)
    lake.publish(written, file, digest)
    times = [row["time"] for row in rows]
    entry = FileEntry(
        path=file.path,
        shard=0,
        from_seq=low,
        to_seq=high,
        messages=min(len(rows), high - low + 1),
        bytes=written.stat().st_size,
        sha256=digest,
        first_time_us=min(times),
        last_time_us=max(times),
    )
    covered = (Range(0, first, last),)
    lake.commit(state, Commit(number=number, job="t", time_us=0, covered=covered, added=(entry,)))
    return entry
