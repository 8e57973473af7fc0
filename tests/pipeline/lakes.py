"""Lakes for tests: written file by file, with the content that a test wants."""

import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from contrail_spark.lake import files, parquet
from contrail_spark.lake.layout import (
    NO_TOKEN,
    TEMPORARY,
    DataFile,
    Partition,
    quoted,
    temporary_name,
)
from contrail_spark.lake.manifest import Commit, FileEntry, Range
from contrail_spark.lake.store import Lake

SCHEMA: Final = parquet.SCHEMA
Row = dict[str, Any]


def made_row(seq: int, subject: str = "s.a", shard: int = 0, time_us: int | None = None) -> Row:
    """A message whose content follows from its sequence.

    Without headers it has NULL or, as in files of older versions, an empty map.
    """
    return {
        "shard": shard,
        "seq": seq,
        "time": seq * 1_000_000 if time_us is None else time_us,
        "subject": subject,
        "headers": [("Leg", [str(seq)])] if seq % 4 == 0 else [] if seq % 4 == 1 else None,
        "data": f"{shard}:{seq}".encode(),
    }


def archive(
    lake: Lake,
    rows: Sequence[Row],
    covered: Iterable[Range],
    lost: Iterable[Range] = (),
    row_group: int = 7,
) -> None:
    """Commit the rows in one file for each shard and folder."""
    state = lake.state()
    number = state.number + 1

    def place(row: Row) -> tuple[int, Partition]:
        return row["shard"], partition_of_row(lake, row)

    entries = [
        write(lake, number, partition, list(own), row_group)
        for (_, partition), own in groupby(sorted(rows, key=place), place)
    ]
    commit = Commit(
        number=number,
        job="test",
        time_us=time.time_ns() // 1_000,
        covered=tuple(covered),
        lost=tuple(lost),
        added=tuple(entries),
    )
    lake.commit(state, commit)


def write(
    lake: Lake, commit: int, partition: Partition, rows: list[Row], row_group: int = 7
) -> FileEntry:
    """Put a data file in its place, and return what the manifest says of it."""
    rows = sorted(rows, key=lambda row: int(row["seq"]))
    temporary = lake.root / TEMPORARY / temporary_name(commit, "test")
    pq.write_table(
        pa.Table.from_pylist(rows, SCHEMA),
        temporary,
        row_group_size=row_group,
        compression="zstd",
        write_page_checksum=True,
    )
    digest = files.sha256(temporary)
    first, last = rows[0], rows[-1]
    stream = quoted(lake.info.stream)
    named = DataFile(partition, stream, first["shard"], first["seq"], last["seq"], commit)
    found = lake.publish(temporary, named, digest)
    entry = FileEntry(
        path=found.path,
        shard=first["shard"],
        from_seq=first["seq"],
        to_seq=last["seq"],
        messages=len(rows),
        bytes=temporary.stat().st_size,
        sha256=digest,
        first_time_us=first["time"],
        last_time_us=last["time"],
    )
    temporary.unlink()
    return entry


def made_lake(root: Path, *parts: Sequence[Row], token: int | None = None) -> Lake:
    """A lake of stream S, whose only shard is archived through the end of the last part."""
    lake = Lake.ensure(root, "S", "first", token)
    before = 0
    for rows in parts:
        last = max(row["seq"] for row in rows)
        archive(lake, rows, [Range(0, before + 1, last)])
        before = last
    return lake


def partition_of_row(lake: Lake, row: Row) -> Partition:
    """The folder that a message belongs in."""
    day = datetime.fromtimestamp(row["time"] / 1_000_000, UTC).date()
    if lake.info.token is None:
        return Partition(day)
    tokens = row["subject"].split(".")
    short = len(tokens) < lake.info.token
    return Partition(day, NO_TOKEN if short else quoted(tokens[lake.info.token - 1]))
