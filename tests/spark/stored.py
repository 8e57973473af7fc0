"""All messages of a stream, as the client of the data source reads them."""

from typing import Any

import pyarrow as pa

from contrail_spark.client import ReplayClient
from contrail_spark.options import parse_options
from contrail_spark.schema import arrow_schema, conform, spark_schema


def stored(url: str, stream: str, *columns: str) -> list[dict[str, Any]]:
    """The rows of a replay, shard by shard in the order of the sequences."""
    options = parse_options({"url": url, "stream": stream, "columns": ",".join(columns)})
    client = ReplayClient(options)
    plan = client.plan()
    schema = arrow_schema(spark_schema(columns))
    batches = [
        conform(batch, schema)
        for split in sorted(plan.splits, key=lambda one: (one.shard, one.from_seq))
        for batch in client.read(plan, split, columns)
    ]
    rows: list[dict[str, Any]] = pa.Table.from_batches(batches, schema).to_pylist()
    return rows


def texts(url: str, stream: str) -> list[str]:
    """The payloads as texts."""
    return [row["data"].decode() for row in stored(url, stream, "data")]


def message_ids(url: str, stream: str) -> list[str]:
    """The ids of all messages."""
    rows = stored(url, stream, "headers")
    return [dict(row["headers"])["Nats-Msg-Id"][0] for row in rows]
