"""Tables over a lake: their properties, the files they show, and their history."""

import os
import time
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Final
from urllib.parse import urlparse

import pyarrow as pa
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import PyArrowFileIO, parquet_file_to_data_file
from pyiceberg.manifest import DataFile, DataFileContent
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table, TableProperties
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.transforms import DayTransform
from pyiceberg.types import (
    BinaryType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StringType,
    TimestamptzType,
)

from contrail_client.cli.ending import Failed
from contrail_spark.errors import LakeConflictError, LakeError
from contrail_spark.lake.layout import parse_data_path, quoted
from contrail_spark.lake.manifest import FileEntry
from contrail_spark.lake.store import Lake

COLUMNS: Final = Schema(
    NestedField(1, "shard", IntegerType(), required=True),
    NestedField(2, "seq", LongType(), required=True),
    NestedField(3, "time", TimestamptzType(), required=True),
    NestedField(4, "subject", StringType(), required=True),
    NestedField(
        5,
        "headers",
        MapType(
            key_id=7,
            key_type=StringType(),
            value_id=8,
            value_type=ListType(element_id=9, element_type=StringType(), element_required=False),
            value_required=False,
        ),
        required=False,
    ),
    NestedField(6, "data", BinaryType(), required=False),
)
"""The columns of a lake, `contrail_spark.lake.parquet.SCHEMA`, with ids for Iceberg."""
DAYS: Final = PartitionSpec(PartitionField(3, 1_000, DayTransform(), "time_day"))
COMMIT: Final = "contrail.commit"
"""Property of a snapshot: the commit of the lake that it shows."""
HISTORY_MS: Final = 5 * 24 * 3_600 * 1_000
"""How long a snapshot is kept after it was replaced: the default of Iceberg's own upkeep."""
GUARDS: Final = {
    # Bounds of subjects and payloads would keep what is erased from the lake.
    "write.metadata.metrics.default": "none",
    "write.metadata.metrics.column.shard": "full",
    "write.metadata.metrics.column.seq": "full",
    "write.metadata.metrics.column.time": "full",
    # The files belong to the lake, and must not be deleted with the table or its snapshots.
    "gc.enabled": "false",
    # After another run's commit, PyIceberg would add the same files again.
    "commit.retry.num-retries": "0",
    # What a run for each archive would otherwise pile up.
    "commit.manifest-merge.enabled": "true",
    "write.metadata.delete-after-commit.enabled": "true",
}
"""Properties of every table, which a run restores before it changes anything else."""


def root_uri(lake: Lake) -> str:
    """The folder of a lake as Iceberg names it: not quoted, and without a link resolved."""
    root = os.path.normpath(lake.root)
    if found := set(root) & set("?#"):
        raise Failed(f"Iceberg cannot read files below {root}, because of the {min(found)} in it")
    return f"file://{root}"


def lost_guards(metadata: TableMetadata) -> dict[str, str]:
    """The properties that a table must have and has not."""
    guards = dict(GUARDS)
    if metadata.name_mapping() is None:
        # The files have no ids of columns.
        names = metadata.schema().name_mapping.model_dump_json()
        guards[TableProperties.DEFAULT_NAME_MAPPING] = names
    return {key: value for key, value in guards.items() if metadata.properties.get(key) != value}


def identity(lake: Lake) -> dict[str, str]:
    """The properties that tie a table to a lake."""
    return {
        "contrail.stream": lake.info.stream,
        "contrail.incarnation": lake.info.incarnation,
        "contrail.lake": root_uri(lake),
        "contrail.lake-created-us": str(lake.info.created_us),
    }


def check_identity(name: str, found: dict[str, str], lake: Lake) -> None:
    """Raise Failed unless the properties are those of a table over this lake."""
    stream, incarnation, root, created = (found.get(key) for key in identity(lake))
    if stream is None or root is None:
        raise Failed(f"table {name} was not made by this job; choose another name")
    again = f"drop table {name} without PURGE, and run this again"
    if stream != lake.info.stream:
        raise Failed(f"table {name} shows stream {stream}, and the lake has {lake.info.stream}")
    if incarnation != lake.info.incarnation:
        raise Failed(f"stream {stream} was created again since table {name} was; {again}")
    if root != root_uri(lake):
        raise Failed(
            f"table {name} shows the lake in {root}, and not in {root_uri(lake)}; if the lake was "
            f"moved, {again}"
        )
    if created != str(lake.info.created_us):
        raise Failed(f"the lake in {lake.root} is newer than table {name}; {again}")


def check_location(name: str, location: str, lake: Lake) -> None:
    """Raise Failed if the location of a table is not absolute, or in the lake.

    There, `erase` would find files that it does not know.
    """
    uri = urlparse(location)
    if not (uri.scheme or location.startswith("/")):
        raise Failed(
            f"table {name} would be in {location}, which only programs in this folder find; give "
            "the catalog an absolute warehouse"
        )
    local = Path(os.path.normpath(uri.path))
    if uri.scheme in ("", "file") and local.is_relative_to(os.path.normpath(lake.root)):
        raise Failed(f"table {name} would be in {location}, but must be outside of the lake")


def shown_files(table: Table, lake: Lake) -> dict[str, DataFile]:
    """The files that a table shows, by path below the lake; Failed if it shows anything else."""
    found: dict[str, DataFile] = {}
    snapshot = table.current_snapshot()
    prefix, stream = f"{root_uri(lake)}/", quoted(lake.info.stream)
    for manifest in snapshot.manifests(table.io) if snapshot else ():
        for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True):
            file = entry.data_file
            path = file.file_path.removeprefix(prefix)
            place = parse_data_path(path)
            if (
                file.content != DataFileContent.DATA
                or path in found
                or place is None
                or place.stream != stream
            ):
                raise Failed(
                    f"another program has written to table {'.'.join(table.name())}, and added "
                    f"{file.file_path}; drop the table without PURGE, and run this again"
                )
            found[path] = file
    return found


def described(lake: Lake, entry: FileEntry, metadata: TableMetadata) -> DataFile:
    """A file of the lake as the table's manifests have it, by its footer.

    Raises LakeConflictError if it is no longer in the lake.
    """
    try:
        uri = f"{root_uri(lake)}/{entry.path}"
        file = parquet_file_to_data_file(PyArrowFileIO(), metadata, uri)
    except FileNotFoundError:
        if entry.path in lake.state().files:
            raise LakeError(f"the lake in {lake.root}: {entry.path} is missing") from None
        raise LakeConflictError(f"another job has changed the lake in {lake.root}") from None
    except (OSError, pa.ArrowException) as error:
        raise LakeError(f"the lake in {lake.root}: {entry.path} is damaged: {error}") from error
    if (file.file_size_in_bytes, file.record_count) != (entry.bytes, entry.messages):
        raise LakeError(
            f"the lake in {lake.root}: {entry.path} is damaged: it has {file.record_count:,} "
            f"messages in {file.file_size_in_bytes:,} bytes, and the manifest says "
            f"{entry.messages:,} in {entry.bytes:,}"
        )
    return file


def outdated(metadata: TableMetadata) -> list[Snapshot]:
    """Snapshots that were replaced so long ago that nobody should read them any more."""
    limit_ms = time.time_ns() // 1_000_000 - HISTORY_MS
    named = {each.snapshot_id for each in metadata.refs.values()}
    ordered = sorted(metadata.snapshots, key=lambda each: each.sequence_number or 0)
    return [
        each
        for each, after in pairwise(ordered)
        if after.timestamp_ms < limit_ms and each.snapshot_id not in named
    ]


def metadata_files(snapshots: Iterable[Snapshot], io: FileIO) -> set[str]:
    """The manifests of snapshots, and the lists of them."""
    found = set()
    for each in snapshots:
        found.add(each.manifest_list)
        found.update(manifest.manifest_path for manifest in each.manifests(io))
    return found
