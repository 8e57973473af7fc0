"""The second record: a store that went back in time, or lost its log, is noticed at open."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from contrail_storage.core import key_layout as keys
from contrail_storage.disk.files import Files
from contrail_storage.store.checkpoint import Checkpoint, CheckpointStore, ShardMark
from contrail_storage.store.rocks_store import RocksStore
from tests.unit.storage.wal_disk import SimDisk

FOLDER = Path("/node")
MARKS = {7: ShardMark(1, 100, 90, b"digest"), 8: ShardMark(2, 5, 5, b"other")}
APPLIED = {1: 40, 2: 9}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RocksStore]:
    store = RocksStore.open(tmp_path / "db")
    yield store
    store.close()


def keeper(store: CheckpointStore, disk: Files) -> Checkpoint:
    return Checkpoint(store, FOLDER, disk)


def findings(
    checkpoint: Checkpoint,
    applied: dict[int, int] = APPLIED,
    marks: dict[int, ShardMark] = MARKS,
    bases: dict[int, int] | None = None,
) -> list[tuple[set[int], set[int]]]:
    found = checkpoint.verify(applied, marks, applied if bases is None else bases)
    return [(set(finding.groups), set(finding.shards)) for finding in found]


def test_new_node_has_no_record_and_no_finding(store: RocksStore) -> None:
    checkpoint = keeper(store, SimDisk())
    assert checkpoint.record is None
    assert findings(checkpoint, {}, {}) == []


def test_unchanged_store_passes(store: RocksStore) -> None:
    disk = SimDisk()
    taken = keeper(store, disk).take(APPLIED, MARKS)
    reopened = keeper(store, disk)
    assert reopened.record == taken
    assert findings(reopened) == []


def test_store_that_moved_on_passes(store: RocksStore) -> None:
    disk = SimDisk()
    keeper(store, disk).take(APPLIED, MARKS)
    later = {7: ShardMark(1, 130, 20, b"changed")}  # shard 8 was deleted
    assert findings(keeper(store, disk), {1: 60, 2: 10}, later) == []


def test_row_that_is_gone_makes_everything_suspect(store: RocksStore) -> None:
    disk = SimDisk()
    keeper(store, disk).take(APPLIED, MARKS)
    store.write([("delete_range", b"K", b"L")])
    assert findings(keeper(store, disk)) == [({1, 2}, {7, 8})]


def test_store_older_than_the_record_names_the_group_and_its_shards(store: RocksStore) -> None:
    disk = SimDisk()
    keeper(store, disk).take(APPLIED, MARKS)
    found = findings(keeper(store, disk), {1: 39, 2: 9})
    assert ({1}, {7}) in found


def test_damaged_shard_at_the_recorded_index_is_named_alone(store: RocksStore) -> None:
    disk = SimDisk()
    keeper(store, disk).take(APPLIED, MARKS)
    damaged = {**MARKS, 7: ShardMark(1, 100, 89, b"digest")}
    assert findings(keeper(store, disk), APPLIED, damaged) == [({1}, {7})]
    assert findings(keeper(store, disk), APPLIED, {8: MARKS[8]}) == [({1}, {7})]


def test_shard_whose_sequence_went_back_is_named(store: RocksStore) -> None:
    disk = SimDisk()
    keeper(store, disk).take(APPLIED, MARKS)
    back = {**MARKS, 7: ShardMark(1, 99, 90, b"digest")}
    assert findings(keeper(store, disk), {1: 50, 2: 9}, back) == [({1}, {7})]


@pytest.mark.parametrize("base", [39, 41])
def test_log_that_does_not_join_up_names_the_group(store: RocksStore, base: int) -> None:
    disk = SimDisk()
    keeper(store, disk).take(APPLIED, MARKS)
    assert findings(keeper(store, disk), bases={1: base, 2: 9}) == [({1}, {7})]


def test_damaged_newest_file_is_a_finding_unless_the_store_has_its_row(
    store: RocksStore,
) -> None:
    disk = SimDisk()
    checkpoint = keeper(store, disk)
    first = checkpoint.take(APPLIED, MARKS)
    second = checkpoint.take({1: 50, 2: 9}, MARKS)
    newest = max(disk.names)
    disk.names[newest].content[-1] ^= 1
    reopened = keeper(store, disk)
    assert reopened.record == second
    assert findings(reopened, {1: 50, 2: 9}) == []
    # A store that is older than the file lacks the row. The file before still counts.
    store.write([("delete", keys.large_key(b"K", 0, second.number))])
    reopened = keeper(store, disk)
    assert reopened.record == first
    assert findings(reopened, {1: 50, 2: 9}) == [({1, 2}, {7, 8})]


def test_two_files_are_kept_and_numbers_go_up(store: RocksStore) -> None:
    disk = SimDisk()
    checkpoint = keeper(store, disk)
    numbers = [checkpoint.take(APPLIED, MARKS).number for _ in range(5)]
    assert numbers == [1, 2, 3, 4, 5]
    assert len(disk.names) == 2
    assert keeper(store, disk).take(APPLIED, MARKS).number == 6
    assert findings(keeper(store, disk)) == []


@pytest.mark.parametrize("keep", [0.0, 0.5, 1.0])
def test_power_cut_at_every_call_of_a_checkpoint_leaves_no_false_finding(
    store: RocksStore, keep: float
) -> None:
    cut_at, completed = 0, False
    while not completed:
        cut_at += 1
        disk = SimDisk()
        checkpoint = keeper(store, disk)
        for _ in range(3):
            checkpoint.take(APPLIED, MARKS)
        disk.cut_at = disk.calls + cut_at
        try:
            checkpoint.take(APPLIED, MARKS)
            completed = True
        except Exception:
            completed = False
        after = disk.survivor(keep)
        reopened = keeper(store, after)
        assert findings(reopened) == []
        reopened.take(APPLIED, MARKS)
        assert findings(keeper(store, after)) == []
    assert cut_at > 4
