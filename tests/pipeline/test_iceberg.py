"""Iceberg tables over lakes, in a real catalog in SQLite. No JVM."""

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.table import Table, TableProperties

from contrail_client.cli.ending import Failed
from contrail_pipeline.compact import rounds as compacting
from contrail_pipeline.erase import steps as erasing
from contrail_pipeline.iceberg import steps
from contrail_pipeline.iceberg import table as tables
from contrail_pipeline.iceberg.steps import ATTEMPTS
from contrail_spark.lake.store import Lake
from tests.pipeline.iceberg_rig import NAME, Rig, archive_more, people, rows_of
from tests.pipeline.lakes import SCHEMA, made_lake, made_row
from tests.support.command import run_contrail

SECRET: Final = "s.ann.visit"
DAY_US: Final = 86_400_000_000
BOUNDED: Final = {1, 2, 3}
"""The ids of the columns shard, seq and time."""


class KilledError(BaseException):
    """The end of the process at some step."""


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    def run_tasks(_: object, tasks: Sequence[Any], work: Any, __: object) -> list[Any]:
        return [work(task) for task in tasks]

    monkeypatch.setattr(erasing, "run_tasks", run_tasks)
    monkeypatch.setattr(compacting, "run_tasks", run_tasks)
    return Rig(tmp_path)


@pytest.mark.parametrize("token", [None, 2])
def test_a_table_follows_its_lake_through_archives_and_erasures(
    rig: Rig, token: int | None
) -> None:
    lake = made_lake(rig.root, people(1, 30), people(31, 60), token=token)
    first = rig.publish()
    rig.check()
    assert (first["created"], first["messages"], first["commit"]) == (True, 60, 2)
    assert first["added"] == first["files"] == len(lake.state().files)
    for at in range(3, 7):
        archive_more(lake, people(at * 30 - 29, at * 30))
        assert rig.publish()["created"] is False
    rig.check()
    rig.erase(SECRET)
    found = rig.publish()
    rig.check()
    assert (found["removed"] > 0, found["messages"]) == (True, 120)
    # One snapshot for each run, which says what it shows.
    assert len(rig.table.snapshots()) == 6
    summary = rig.snapshot().summary
    assert summary is not None
    assert summary[tables.COMMIT] == str(lake.state().number)
    assert summary["total-records"] == "120"


def test_a_snapshot_is_readable_until_a_compaction_deletes_its_files(rig: Rig) -> None:
    made_lake(rig.root, people(1, 30), people(31, 60))
    rig.publish()
    old = rig.snapshot().snapshot_id
    rig.compact(keep_us=3_600_000_000)
    # The table still shows the files that were replaced.
    rig.check()
    found = rig.publish()
    assert (found["added"], found["removed"], found["messages"]) == (1, 2, 60)
    rig.check()
    assert rig.rows(old) == rig.rows()
    rig.compact(keep_us=0)
    rig.check()
    with pytest.raises(FileNotFoundError):
        rig.rows(old)


def test_a_table_whose_files_were_compacted_and_deleted_is_repaired_by_a_run(rig: Rig) -> None:
    made_lake(rig.root, people(1, 30), people(31, 60))
    rig.publish()
    rig.compact(keep_us=0)
    with pytest.raises(FileNotFoundError):
        rig.rows()
    assert rig.publish()["removed"] == 2
    rig.check()


def test_a_run_with_nothing_new_changes_nothing(rig: Rig) -> None:
    made_lake(rig.root, people(1, 9))
    before = rig.publish()
    found = rig.publish()
    assert (found["added"], found["removed"], found["metadata"]) == (0, 0, before["metadata"])
    assert len(list((rig.warehouse / "demo/orders/metadata").iterdir())) == 3


def test_a_dry_run_changes_nothing(rig: Rig) -> None:
    lake = made_lake(rig.root, people(1, 9))
    found = rig.publish(dry_run=True)
    assert (found["created"], found["added"], found["metadata"]) == (True, 1, None)
    assert rig.catalog.list_namespaces() == []
    before = rig.publish()
    archive_more(lake, people(10, 12))
    found = rig.publish(dry_run=True)
    assert (found["added"], found["metadata"]) == (1, before["metadata"])
    assert rig.table.metadata_location == before["metadata"]


def test_days_are_partitions(rig: Rig) -> None:
    rows = [made_row(seq, time_us=20_000 * DAY_US + seq * DAY_US // 4) for seq in range(1, 13)]
    made_lake(rig.root, rows)
    rig.publish()
    rig.check()
    assert sorted(each.partition[0] for each in rig.files()) == [20_000, 20_001, 20_002, 20_003]
    # Day 20,002 is the 6th of October 2024.
    found = rig.table.scan("time >= '2024-10-06T00:00:00+00:00'")
    assert sorted(each.file.partition[0] for each in found.plan_files()) == [20_002, 20_003]
    assert [row["seq"] for row in rows_of(found.to_arrow())] == [8, 9, 10, 11, 12]


def test_an_empty_lake_is_an_empty_table(rig: Rig) -> None:
    lake = Lake.ensure(rig.root, "S", "first", None)
    assert rig.publish()["files"] == 0
    assert rig.rows() == []
    archive_more(lake, people(1, 3))
    rig.publish()
    rig.check()


def test_metadata_has_no_bounds_of_what_can_be_erased(rig: Rig) -> None:
    lake = made_lake(rig.root, people(1, 30))
    rig.publish()
    # Somebody resets what protects the table: the next run puts it back first.
    with rig.table.transaction() as change:
        change.remove_properties(*tables.GUARDS, TableProperties.DEFAULT_NAME_MAPPING)
    archive_more(lake, people(31, 60))
    rig.publish()
    found = rig.files()
    assert len(found) == 2
    for each in found:
        assert set(each.lower_bounds) == set(each.upper_bounds) == BOUNDED
    assert tables.lost_guards(rig.table.metadata) == {}
    rig.check()


def other_stream(rig: Rig) -> Path:
    return made_renamed(rig.folder / "other", "OTHER", "first")


def stream_created_again(rig: Rig) -> Path:
    return made_renamed(rig.folder / "other", "S", "second")


def made_renamed(root: Path, stream: str, incarnation: str) -> Path:
    Lake.ensure(root, stream, incarnation, None)
    return root


def moved(rig: Rig) -> Path:
    return rig.root.rename(rig.folder / "moved")


def begun_again(rig: Rig) -> Path:
    rig.root.rename(rig.folder / "before")
    made_lake(rig.root, people(1, 9))
    return rig.root


def of_another_program(rig: Rig) -> Path:
    with rig.table.transaction() as change:
        change.remove_properties(*tables.identity(Lake.open(rig.root)))
    return rig.root


def file_elsewhere(rig: Rig) -> Path:
    return other_file(rig, rig.folder / "data" / "date=1970-01-01" / "S-0-8-9-r1.parquet")


def file_in_no_partition(rig: Rig) -> Path:
    return other_file(rig, rig.root / "data" / "S-0-8-9-r1.parquet")


def file_of_other_stream(rig: Rig) -> Path:
    return other_file(rig, rig.root / "data" / "date=1970-01-01" / "OTHER-0-8-9-r1.parquet")


def other_file(rig: Rig, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(people(8, 9), SCHEMA), path)
    rig.table.add_files([f"file://{path}"])
    return rig.root


def rows_deleted(rig: Rig) -> Path:
    """Another engine has deleted rows, with a file that says which."""
    [file] = rig.files()
    deletes = DataFile.from_args(
        content=DataFileContent.POSITION_DELETES,
        file_path=file.file_path.replace("-r1", "-r2"),
        file_format=FileFormat.PARQUET,
        partition=file.partition,
        record_count=1,
        file_size_in_bytes=1,
    )
    deletes.spec_id = file.spec_id
    with (
        rig.table.transaction() as change,
        change.update_snapshot().fast_append() as snapshot,
    ):
        snapshot.append_data_file(deletes)
    return rig.root


def listed_twice(rig: Rig) -> Path:
    rig.table.add_files([rig.files()[0].file_path], check_duplicate_files=False)
    return rig.root


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (other_stream, "table demo.orders shows stream S, and the lake has OTHER"),
        (stream_created_again, "stream S was created again since table demo.orders was"),
        (moved, "if the lake was moved, drop table demo.orders without PURGE"),
        (begun_again, "is newer than table demo.orders"),
        (of_another_program, "table demo.orders was not made by this job"),
        (file_elsewhere, "another program has written to table demo.orders"),
        (file_in_no_partition, "another program has written to table demo.orders"),
        (file_of_other_stream, "another program has written to table demo.orders"),
        (rows_deleted, "another program has written to table demo.orders"),
        (listed_twice, "another program has written to table demo.orders"),
    ],
)
def test_a_table_of_something_else_is_refused(
    rig: Rig, change: Callable[[Rig], Path], said: str
) -> None:
    made_lake(rig.root, people(1, 9))
    rig.publish()
    root = change(rig)
    before = rig.table.metadata_location
    with pytest.raises(Failed, match=said):
        rig.publish(root)
    assert rig.table.metadata_location == before


def test_a_dropped_table_is_made_again(rig: Rig) -> None:
    made_lake(rig.root, people(1, 9))
    rig.publish()
    moved(rig).rename(rig.root)
    rig.catalog.drop_table(NAME)
    assert rig.publish()["created"] is True
    rig.check()


@pytest.mark.parametrize(
    ("warehouse", "said"),
    [
        ("file://{}", "must be outside of the lake"),
        ("{}/data/../tables", "must be outside of the lake"),
        ("tables", "give the catalog an absolute warehouse"),
    ],
)
def test_a_table_that_is_relative_or_in_the_lake_is_refused(
    rig: Rig, warehouse: str, said: str
) -> None:
    made_lake(rig.root, people(1, 9))
    rig.properties["warehouse"] = warehouse.format(rig.root)
    with pytest.raises(Failed, match=said):
        rig.publish()
    assert rig.catalog.list_tables("demo") == []
    rig.erase("none")


@pytest.mark.parametrize("sign", ["#", "?"])
def test_a_path_that_iceberg_cannot_name_is_refused(rig: Rig, sign: str) -> None:
    root = rig.folder / f"lake{sign}1"
    made_lake(root, people(1, 9))
    with pytest.raises(Failed, match=f"because of the \\{sign} in it"):
        rig.publish(root)


def test_other_signs_in_a_path_are_taken_literally(rig: Rig) -> None:
    rig.root = rig.folder / "a lake%20ü"
    made_lake(rig.root, people(1, 9), token=2)
    rig.publish()
    rig.check()


def test_a_file_that_is_missing_or_not_that_of_the_manifest_is_named(rig: Rig) -> None:
    lake = made_lake(rig.root, people(1, 9))
    [entry] = lake.state().live_files()
    path = lake.root / entry.path
    content = path.read_bytes()
    for change, said in (
        (path.unlink, "is missing"),
        (lambda: path.write_bytes(content[:-9]), "is damaged"),
        (lambda: pq.write_table(pq.read_table(path).slice(1), path), "has 8 messages in"),
    ):
        path.write_bytes(content)
        change()
        with pytest.raises(Failed, match=said) as error:
            rig.publish()
        assert entry.path in str(error.value)
        assert rig.catalog.list_tables("demo") == []


def at_commit(act: Callable[[int], None]) -> Any:
    """A catalog's `commit_table`, before which a test does something, told which commit it is."""
    before, count = SqlCatalog.commit_table, 0

    def commit(self: SqlCatalog, *given: Any) -> Any:
        nonlocal count
        count += 1
        act(count)
        return before(self, *given)

    return commit


@pytest.mark.parametrize("exists", [False, True])
def test_of_two_runs_at_once_the_slower_one_begins_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    lake = made_lake(rig.root, people(1, 30))
    if exists:
        rig.publish()
        archive_more(lake, people(31, 60))

    def overtake(count: int) -> None:
        if count == 1:
            last = lake.state().archived_through(0)
            archive_more(lake, people(last + 1, last + 30))
            rig.erase(SECRET)
            assert rig.publish()["added"] > 0

    monkeypatch.setattr(SqlCatalog, "commit_table", at_commit(overtake))
    found = rig.publish()
    assert (found["added"], found["removed"], found["created"]) == (0, 0, False)
    rig.check()
    # Also: no file twice, and no snapshot of the run that lost.
    assert len(rig.table.snapshots()) == 1 + exists


def test_a_run_that_was_overtaken_at_the_start_takes_nothing_back(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = made_lake(rig.root, people(1, 30))
    rig.publish()
    before, calls = SqlCatalog.load_table, 0

    def overtaken(self: SqlCatalog, *given: Any) -> Table:
        nonlocal calls
        calls += 1
        if calls == 1:
            archive_more(lake, people(31, 60))
            rig.publish()
        return before(self, *given)

    monkeypatch.setattr(SqlCatalog, "load_table", overtaken)
    found = rig.publish()
    assert (found["added"], found["removed"], found["messages"]) == (0, 0, 60)


def test_a_file_that_is_erased_meanwhile_is_not_added(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_lake(rig.root, people(1, 30))
    before, calls = tables.described, 0

    def erased_first(*given: Any) -> DataFile:
        nonlocal calls
        calls += 1
        if calls == 1:
            rig.erase(SECRET)
        return before(*given)

    monkeypatch.setattr(tables, "described", erased_first)
    assert rig.publish()["messages"] == 20
    assert calls == 2
    rig.check()


def test_endless_conflicts_are_an_error(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    made_lake(rig.root, people(1, 9))
    commits = 0

    def refuse(count: int) -> None:
        nonlocal commits
        commits = count
        raise CommitFailedException("changed")

    monkeypatch.setattr(SqlCatalog, "commit_table", at_commit(refuse))
    with pytest.raises(Failed, match=f"{ATTEMPTS} times; run this again"):
        rig.publish()
    assert commits == ATTEMPTS


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("exists", [False, True])
def test_a_run_that_was_killed_is_completed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, exists: bool, after: bool
) -> None:
    lake = made_lake(rig.root, people(1, 30))
    if exists:
        rig.publish()
        archive_more(lake, people(31, 60))
        rig.erase(SECRET)
    commit = SqlCatalog.commit_table

    def killed(self: SqlCatalog, *given: Any) -> Any:
        if after:
            commit(self, *given)
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(SqlCatalog, "commit_table", killed)
        with pytest.raises(KilledError):
            rig.publish()
    assert (rig.publish()["added"] == 0) is after
    rig.check()


def test_an_error_of_the_catalog_is_one_sentence(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    made_lake(rig.root, people(1, 9))

    def fail(_: int) -> None:
        raise RuntimeError("the database is away\nwith details")

    monkeypatch.setattr(SqlCatalog, "commit_table", at_commit(fail))
    with pytest.raises(Failed, match=r"^Iceberg: the database is away$"):
        rig.publish()


def test_snapshots_of_long_ago_are_forgotten_with_their_manifests(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = made_lake(rig.root, people(1, 30))
    for at in range(2, 5):
        rig.publish()
        archive_more(lake, people(at * 30 - 29, at * 30))
    rig.erase(SECRET)
    monkeypatch.setattr(tables, "HISTORY_MS", -60_000)
    rig.publish()
    rig.check()
    table = rig.table
    assert len(table.snapshots()) == 1
    needed = tables.metadata_files(table.snapshots(), table.io)
    present = {f"file://{each}" for each in rig.warehouse.rglob("*.avro")}
    assert present == needed


def test_a_snapshot_is_kept_until_long_after_it_was_replaced(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = made_lake(rig.root, people(1, 9))
    rig.publish()
    archive_more(lake, people(10, 12))
    rig.publish()
    metadata = rig.table.metadata
    old, new = sorted(metadata.snapshots, key=lambda each: each.sequence_number or 0)
    for late_ms, expected in ((0, []), (1, [old])):
        now_ms = new.timestamp_ms + tables.HISTORY_MS + late_ms
        monkeypatch.setattr(time, "time_ns", lambda now_ms=now_ms: now_ms * 1_000_000)
        assert tables.outdated(metadata) == expected
    rig.table.manage_snapshots().create_tag(old.snapshot_id, "kept").commit()
    assert tables.outdated(rig.table.metadata) == []


def test_many_runs_do_not_pile_up_manifests(rig: Rig) -> None:
    lake = made_lake(rig.root, people(1, 3))
    rig.publish()
    with rig.table.transaction() as change:
        change.set_properties({"commit.manifest.min-count-to-merge": "3"})
    for at in range(2, 10):
        archive_more(lake, people(at * 3 - 2, at * 3))
        rig.publish()
    rig.check()
    assert len(rig.snapshot().manifests(rig.table.io)) <= 3


def pipeline_iceberg(*arguments: str) -> tuple[int, str]:
    found = run_contrail("pipeline", "iceberg", *arguments, env={})
    return found.exit_code, found.stdout if found.exit_code == 0 else found.stderr


def test_the_command(rig: Rig) -> None:
    made_lake(rig.root, people(1, 9))
    given = [str(rig.root), "--table", NAME]
    for key, value in rig.properties.items():
        given += ["--property", f"{key}={value}"]
    tail = f"it shows 9 messages in 1 file of the lake in {rig.root}\n"
    assert pipeline_iceberg(*given, "--dry-run") == (
        0,
        "would create table demo.orders, with 1 file\n",
    )
    assert pipeline_iceberg(*given) == (0, f"table demo.orders: created; {tail}")
    status, output = pipeline_iceberg(*given, "--json")
    assert (status, json.loads(output)["table"]) == (0, NAME)
    assert pipeline_iceberg(*given) == (0, f"table demo.orders: already up to date; {tail}")
    archive_more(Lake.open(rig.root), people(10, 12))
    assert pipeline_iceberg(*given, "--dry-run") == (
        0,
        "would add 1 file to table demo.orders, and take out 0\n",
    )


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--table", "orders"], 2, "--table must be such as namespace.table, not 'orders'"),
        (["--table", "demo..orders"], 2, "--table must be such as"),
        (["--table", NAME, "--property", "uri"], 2, "--property must be such as"),
        (["--table", NAME, "--property", "=x"], 2, "--property must be such as"),
        (["--table", NAME, "--master", "local"], 2, "No such option: --master"),
        ([], 2, "Missing option '--table'"),
        (["--table", NAME], 1, "there is no lake in"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, arguments: list[str], status: int, said: str) -> None:
    found = pipeline_iceberg(str(tmp_path / "none"), *arguments)
    assert found[0] == status
    assert said in found[1]
    assert len(found[1].splitlines()) == 1


def test_a_catalog_that_is_not_configured_is_a_mistake(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_lake(rig.root, people(1, 9))
    status, said = pipeline_iceberg(str(rig.root), "--table", NAME, "--catalog", "none")
    assert status == 2
    assert "the Iceberg catalog is not configured: URI missing" in said
    rig.properties.pop("warehouse")
    with pytest.raises(Failed, match="No default path is set"):
        rig.publish()


def test_without_pyiceberg_the_job_names_the_extra(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, steps.__name__)
    monkeypatch.delitem(sys.modules, tables.__name__)
    monkeypatch.setitem(sys.modules, "pyiceberg", None)
    for each in [name for name in sys.modules if name.startswith("pyiceberg.")]:
        monkeypatch.delitem(sys.modules, each)
    status, said = pipeline_iceberg(str(rig.root), "--table", NAME)
    assert (status, said) == (
        1,
        "contrail: this job needs PyIceberg: install contrail-spark[iceberg] as well\n",
    )
