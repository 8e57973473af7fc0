"""Compares lakes with streams, row by row."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from contrail_spark.lake.manifest import State
from contrail_spark.lake.parquet import SCHEMA
from contrail_spark.lake.store import Lake
from tests.spark.stored import stored

Rows = list[dict[str, Any]]


def lake_rows(root: Path) -> Rows:
    """All messages of a lake by shard and sequence, however its files are named."""
    lake = Lake.open(root)
    rows: Rows = []
    for entry in lake.state().live_files():
        assert lake.verify(entry) is None
        table = pq.read_table(root / entry.path, partitioning=None)
        assert table.schema.equals(SCHEMA)
        assert table.num_rows == entry.messages
        rows += table.to_pylist()
    return sorted(rows, key=place)


def stream_rows(url: str, stream: str = "S") -> Rows:
    """All messages of a stream by shard and sequence."""
    return sorted(stored(url, stream, *SCHEMA.names), key=place)


def place(row: dict[str, Any]) -> tuple[int, int]:
    """Where a message is in its stream."""
    return row["shard"], row["seq"]


def check_same(root: Path, url: str, stream: str = "S") -> State:
    """Fail unless the lake has each message of the stream once, unchanged, and no other one."""
    archived, published = lake_rows(root), stream_rows(url, stream)
    assert len(archived) == len(published)
    for one, other in zip(archived, published, strict=True):
        assert one == other
    # Nothing is left over, neither complete nor unfinished.
    state = Lake.open(root).state()
    files = {path.relative_to(root).as_posix() for path in (root / "data").rglob("*.*")}
    assert files == set(state.files)
    assert not list((root / "tmp").iterdir())
    return state
