"""A lake, and a table over it in a real catalog in SQLite."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pyarrow as pa
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot

from contrail_pipeline.compact.rounds import Compactor
from contrail_pipeline.compact.rounds import Wishes as CompactionWishes
from contrail_pipeline.erase.steps import Eraser, Wishes
from contrail_pipeline.iceberg.steps import Publisher
from contrail_spark.lake.manifest import Range
from contrail_spark.lake.reader import LakeReader
from contrail_spark.lake.selection import Selection
from contrail_spark.lake.store import Lake
from tests.pipeline.lakes import Row, archive, made_row

NAME: Final = "demo.orders"


class LoopJob:
    """A job that keeps its result, and whose tasks run in a loop."""

    def __init__(self, *, dry_run: bool = False) -> None:
        self.dry_run = dry_run
        self.as_json = True
        self.said = ""
        self.result: dict[str, Any] = {}

    @contextmanager
    def spark(self) -> Iterator[Any]:
        yield SimpleNamespace(sparkContext=SimpleNamespace(defaultParallelism=2))

    @contextmanager
    def progress(self, *_: object) -> Iterator[Callable[[int], None]]:
        yield lambda _: None

    def done(self, text: str, result: dict[str, Any]) -> None:
        self.said, self.result = text, result


class Rig:
    """A lake, and the catalog with the table that shows it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "lake"
        self.warehouse = folder / "warehouse"
        self.properties = {
            "uri": f"sqlite:///{folder}/catalog.db",
            "warehouse": f"file://{self.warehouse}",
        }

    @property
    def catalog(self) -> Catalog:
        return load_catalog(None, **self.properties)

    @property
    def table(self) -> Table:
        return self.catalog.load_table(NAME)

    def publish(self, root: Path | None = None, *, dry_run: bool = False) -> dict[str, Any]:
        job = LoopJob(dry_run=dry_run)
        given: Any = job
        Publisher(given, root or self.root, NAME, None, dict(self.properties)).run()
        return job.result

    def erase(self, *subjects: str) -> None:
        job: Any = LoopJob()
        Eraser(job, self.root, Wishes(subjects)).run()

    def compact(self, keep_us: int) -> None:
        job: Any = LoopJob()
        Compactor(job, self.root, CompactionWishes(1 << 20, keep_us)).run()

    def snapshot(self) -> Snapshot:
        found = self.table.current_snapshot()
        assert found is not None
        return found

    def files(self) -> list[DataFile]:
        table = self.table
        return [
            entry.data_file
            for manifest in self.snapshot().manifests(table.io)
            for entry in manifest.fetch_manifest_entry(table.io)
        ]

    def rows(self, snapshot_id: int | None = None) -> list[Row]:
        return rows_of(self.table.scan(snapshot_id=snapshot_id).to_arrow())

    def check(self) -> None:
        """The table has the messages of the lake, and no others."""
        lake = Lake.open(self.root)
        state = lake.state()
        reader = LakeReader(lake, Selection())
        names = ("shard", "seq", "time", "subject", "headers", "data")
        batches = [
            batch.select(names)
            for shard in state.shards
            for batch in reader.read(
                reader.range(state, shard, (1, state.archived_through(shard))), names
            )
        ]
        assert self.rows() == rows_of(pa.Table.from_batches(batches))


def rows_of(table: pa.Table) -> list[Row]:
    # Iceberg shows the empty maps of older files, which are NULL in files that replace them.
    found: list[Row] = [
        {**row, "headers": row["headers"] or None} if "headers" in row else row
        for row in table.to_pylist()
    ]
    return sorted(found, key=lambda row: (row["shard"], row["seq"]))


def people(first: int, last: int) -> list[Row]:
    names = ("ann", "bob", "ö x%2F")
    return [made_row(seq, f"s.{names[seq % 3]}.visit") for seq in range(first, last + 1)]


def archive_more(lake: Lake, rows: list[Row]) -> None:
    archive(lake, rows, [Range(0, rows[0]["seq"], rows[-1]["seq"])])
