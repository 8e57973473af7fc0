"""The Iceberg job: adds to a table what it lacks of a lake, and takes out what the lake lacks.

The table itself says which files it shows, so a job that was killed is run again.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table, Transaction
from pyiceberg.table.update.snapshot import ExpireSnapshots

from contrail_client.cli import units
from contrail_client.cli.ending import Failed, Misuse
from contrail_pipeline.failures import in_one_line
from contrail_pipeline.iceberg import table as tables
from contrail_pipeline.job import Job
from contrail_spark.errors import ContrailSparkError, LakeConflictError
from contrail_spark.lake.manifest import FileEntry, State
from contrail_spark.lake.store import Lake

ATTEMPTS: Final = 10
"""Other runs may write to the table meanwhile; each attempt begins with what they have done."""
_CONFLICTS: Final = (CommitFailedException, TableAlreadyExistsError, LakeConflictError)


@dataclass(frozen=True, slots=True)
class Change:
    """How a table differs from the lake after a commit; without a table, it is to be created."""

    table: Table | None
    state: State
    added: list[FileEntry]
    removed: list[DataFile]

    def __bool__(self) -> bool:
        return self.table is None or bool(self.added or self.removed)


class Publisher:
    """One run of the job."""

    def __init__(
        self, job: Job, root: Path, table: str, catalog: str | None, properties: dict[str, str]
    ) -> None:
        self._job = job
        self._root = root
        self._name = table
        self._catalog = catalog
        self._properties = properties

    def run(self) -> None:
        """Bring the table up to date, and say what was done."""
        # PyIceberg logs warnings about what is an error or right here.
        logging.getLogger("pyiceberg").addHandler(logging.NullHandler())
        with in_one_line(), _errors_of_iceberg():
            lake = Lake.open(self._root)
            catalog = self._load_catalog()
            for _ in range(ATTEMPTS):
                change = self._compare(lake, catalog)
                if self._job.dry_run:
                    self._tell(lake, change)
                    return
                with suppress(*_CONFLICTS):
                    self._report(lake, change, self._apply(lake, catalog, change))
                    return
            raise Failed(
                f"other jobs have changed the lake or table {self._name} {ATTEMPTS} times; run "
                "this again when they have ended"
            )

    def _load_catalog(self) -> Catalog:
        try:
            return load_catalog(self._catalog, **self._properties)
        except (ValueError, KeyError) as error:
            raise Misuse(
                f"the Iceberg catalog is not configured: {_line(error)}; name one with --catalog, "
                "or give its uri and warehouse with --property"
            ) from error

    def _compare(self, lake: Lake, catalog: Catalog) -> Change:
        try:
            table = catalog.load_table(self._name)
        except NoSuchTableError:
            table = None
        shown: dict[str, DataFile] = {}
        if table is not None:
            tables.check_identity(self._name, table.properties, lake)
            tables.check_location(self._name, table.location(), lake)
            shown = tables.shown_files(table, lake)
        # After the table: a run that wins against another one is never older than that.
        state = lake.state()
        added = [each for each in state.live_files() if each.path not in shown]
        removed = [file for path, file in shown.items() if path not in state.files]
        return Change(table, state, added, removed)

    def _apply(self, lake: Lake, catalog: Catalog, change: Change) -> Table | None:
        """Commit the change, and return the table with it. Raises for conflicts."""
        if not change:
            return change.table
        if change.table is None:
            transaction = self._creation(lake, catalog)
        else:
            _restore_guards(change.table)
            transaction = change.table.transaction()
        metadata = transaction.table_metadata
        files = []
        with self._job.progress("reading files", len(change.added)) as advance:
            for entry in change.added:
                files.append(tables.described(lake, entry, metadata))
                advance(len(files))
        if files or change.removed:
            update = transaction.update_snapshot({tables.COMMIT: str(change.state.number)})
            # Only an append keeps the number of manifests small.
            with update.overwrite() if change.removed else update.merge_append() as snapshot:
                for file in files:
                    snapshot.append_data_file(file)
                for file in change.removed:
                    snapshot.delete_data_file(file)
        return _committed(transaction)

    def _creation(self, lake: Lake, catalog: Catalog) -> Transaction:
        catalog.create_namespace_if_not_exists(Catalog.namespace_from(self._name))
        transaction = catalog.create_table_transaction(
            self._name,
            tables.COLUMNS,
            partition_spec=tables.DAYS,
            properties=tables.identity(lake),
        )
        metadata = transaction.table_metadata
        tables.check_location(self._name, metadata.location, lake)
        return transaction.set_properties(tables.lost_guards(metadata))

    def _tell(self, lake: Lake, change: Change) -> None:
        what = (
            f"would create table {self._name}, with {units.counted(len(change.added), 'file')}"
            if change.table is None
            else f"would add {units.counted(len(change.added), 'file')} to table {self._name}, "
            f"and take out {len(change.removed):,}"
        )
        self._job.done(what, self._result(lake, change, change.table))

    def _report(self, lake: Lake, change: Change, table: Table | None) -> None:
        result = self._result(lake, change, table)
        what = (
            "created"
            if change.table is None
            else f"{units.counted(len(change.added), 'file')} added, {len(change.removed):,} taken "
            "out"
            if change
            else "already up to date"
        )
        self._job.done(
            f"table {self._name}: {what}; it shows {units.counted(result['messages'], 'message')} "
            f"in {units.counted(result['files'], 'file')} of the lake in {lake.root}",
            result,
        )

    def _result(self, lake: Lake, change: Change, table: Table | None) -> dict[str, Any]:
        return {
            "lake": str(lake.root),
            "commit": change.state.number,
            "table": self._name,
            "metadata": table.metadata_location if table else None,
            "created": change.table is None,
            "added": len(change.added),
            "removed": len(change.removed),
            "files": len(change.state.files),
            "messages": sum(each.messages for each in change.state.files.values()),
        }


def _restore_guards(table: Table) -> None:
    """In a commit of its own: the next one already follows them."""
    if lost := tables.lost_guards(table.metadata):
        table.transaction().set_properties(lost).commit_transaction()


def _committed(transaction: Transaction) -> Table:
    """Commit, and delete what only snapshots of long ago needed."""
    old = tables.outdated(transaction.table_metadata)
    if old:
        ExpireSnapshots(transaction).by_ids([each.snapshot_id for each in old]).commit()
    table = transaction.commit_transaction()
    if old:
        kept = tables.metadata_files(table.metadata.snapshots, table.io)
        for path in tables.metadata_files(old, table.io) - kept:
            with suppress(OSError):
                table.io.delete(path)
    return table


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def _errors_of_iceberg() -> Iterator[None]:
    """Raise Failed for errors of a catalog: each kind of catalog has its own classes."""
    try:
        yield
    except (Failed, Misuse, ContrailSparkError):
        raise
    except Exception as error:
        raise Failed(f"Iceberg: {_line(error)}") from error
