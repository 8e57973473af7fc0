"""Large values apart from the tables: written once, found when damaged, gone when they must."""

import multiprocessing
import os
import random
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from contrail_storage.store.blob_files import StrayBlobs, records_of
from contrail_storage.store.rewriter import blob_files_of
from contrail_storage.store.rocks_store import (
    Operation,
    RocksStore,
    StoreCorruptError,
    StoreFailedError,
    StoreMissingError,
    StoreOptions,
)
from tests.support.folders import files_with

BLOB = 1_000
OPTIONS = StoreOptions(blob_bytes_min=BLOB)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RocksStore]:
    store = RocksStore.open(tmp_path / "db", OPTIONS)
    yield store
    store.close()


def key(shard: int, number: int) -> bytes:
    return b"B" + shard.to_bytes(4, "big") + number.to_bytes(8, "big")


def value(text: bytes, size: int = 2 * BLOB) -> bytes:
    return text + os.urandom(size)


def shard_range(shard: int) -> tuple[bytes, bytes]:
    return key(shard, 0), key(shard + 1, 0)


def blobs(store_dir: Path) -> list[Path]:
    return sorted(store_dir.glob("*.blob"))


def blobs_left(store: RocksStore, store_dir: Path) -> list[Path]:
    """The files after RocksDB has removed those that it no longer uses."""
    with store._using() as database:
        store._rewriter(database).wait_for_removals()
    return blobs(store_dir)


def test_values_from_the_bound_on_stand_apart_and_smaller_ones_in_the_tables(
    store: RocksStore, tmp_path: Path
) -> None:
    store.write([("put", b"small", b"s" * (BLOB - 1)), ("put", b"large", b"l" * BLOB)])
    store.flush()
    (file,) = blobs(tmp_path / "db")
    assert [record.key for record in records_of(file)] == [b"large"]
    assert store.stats["blob_bytes"] == file.stat().st_size
    assert store.get_many([b"small", b"large"]) == [b"s" * (BLOB - 1), b"l" * BLOB]
    assert dict(store.scan(b"a", b"z")) == {b"small": b"s" * (BLOB - 1), b"large": b"l" * BLOB}


def test_files_are_listed_with_their_sizes_and_records_with_their_places(
    store: RocksStore, tmp_path: Path
) -> None:
    rows = {key(1, number): value(b"%d" % number) for number in range(20)}
    store.write([("put", one, content) for one, content in rows.items()])
    store.flush()
    (file,) = blobs(tmp_path / "db")
    with store._using() as database:
        (listed,) = blob_files_of(database)
    assert (listed.name, listed.size, listed.garbage_bytes) == (file.name, file.stat().st_size, 0)
    content = file.read_bytes()
    found = {r.key: content[r.offset : r.offset + r.size] for r in records_of(file)}
    assert found == rows


def test_records_end_at_the_first_that_is_not_sound(store: RocksStore, tmp_path: Path) -> None:
    store.write([("put", key(1, number), value(b"")) for number in range(5)])
    store.flush()
    (file,) = blobs(tmp_path / "db")
    third = list(records_of(file))[2]
    content = bytearray(file.read_bytes())
    content[third.offset - 13 - 32] ^= 1  # in its key's size
    other = tmp_path / "other.blob"
    other.write_bytes(content)
    assert [record.key for record in records_of(other)] == [key(1, 0), key(1, 1)]
    other.write_bytes(file.read_bytes()[: third.offset + 5])
    assert len(list(records_of(other))) == 2
    other.write_bytes(b"something else" * 9)
    assert list(records_of(other)) == []


def write_then_die(path: Path) -> None:
    store = RocksStore.open(path, OPTIONS)
    store.write([("put", b"row", b"1"), ("put", key(1, 1), b"flushed" * BLOB)])
    store.flush()
    store.write([("put", b"row", b"2"), ("put", key(1, 2), b"lost" * BLOB)])
    store.write([("delete", key(1, 1))])
    os.kill(os.getpid(), signal.SIGKILL)


def test_killed_process_leaves_rows_and_large_values_at_the_same_flush(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(
        target=write_then_die, args=(tmp_path / "db",)
    )
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    store = RocksStore.open(tmp_path / "db", OPTIONS)
    found = store.get_many([b"row", key(1, 1), key(1, 2)])
    assert found == [b"1", b"flushed" * BLOB, None]
    store.close()


# Damage ------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = RocksStore.open(tmp_path / "whole", OPTIONS)
    for batch in range(3):
        store.write([("put", key(1, 10 * batch + at), b"%d" % batch * 5_000) for at in range(10)])
        store.flush()
    store.close()
    return tmp_path / "whole"


def test_missing_file_is_noticed_at_open(folder: Path) -> None:
    blobs(folder)[1].unlink()
    before = {path.name: path.read_bytes() for path in folder.glob("*.sst")}
    for opener in (RocksStore.open, RocksStore.open_reading):
        with pytest.raises(StoreMissingError, match="blob"):
            opener(folder, OPTIONS)
    assert {path.name: path.read_bytes() for path in folder.glob("*.sst")} == before


@pytest.mark.parametrize("size", [0, 40, 20_000])
def test_file_of_another_size_is_noticed_at_open(folder: Path, size: int) -> None:
    os.truncate(blobs(folder)[1], size)
    for opener in (RocksStore.open, RocksStore.open_reading):
        with pytest.raises(StoreCorruptError, match="instead of"):
            opener(folder, OPTIONS)


def test_store_with_gaps_gives_what_is_there_and_says_what_is_not(folder: Path) -> None:
    blobs(folder)[1].unlink()
    store = RocksStore.open_reading(folder, OPTIONS, with_gaps=True)
    assert store.get_many([key(1, 0), key(1, 29)]) == [b"0" * 5_000, b"2" * 5_000]
    for read in (store.get, lambda one: store.get_many([one]), lambda one: store.get_once([one])):
        with pytest.raises(StoreCorruptError):
            read(key(1, 15))
    with pytest.raises(StoreCorruptError):
        list(store.scan(*shard_range(1)))
    store.close()


@pytest.mark.parametrize("seed", range(12))
def test_bit_that_flips_is_never_taken_for_the_value(folder: Path, seed: int) -> None:
    chance = random.Random(seed)
    file = chance.choice(blobs(folder))
    content = bytearray(file.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)
    store = RocksStore.open(folder, OPTIONS)
    for number in range(30):
        try:
            found = store.get(key(1, number))
        except StoreCorruptError:
            continue
        assert found == b"%d" % (number // 10) * 5_000
    store.close()


def test_folder_with_values_but_no_current_file_is_refused(folder: Path) -> None:
    for path in [*folder.glob("*.sst"), folder / "CURRENT"]:
        path.unlink()
    with pytest.raises(StoreCorruptError):
        RocksStore.open_reading(folder, OPTIONS)


def test_clone_links_values_and_outlives_the_original(folder: Path, tmp_path: Path) -> None:
    RocksStore.clone(folder, tmp_path / "clone")
    assert [path.stat().st_nlink for path in blobs(tmp_path / "clone")] == [2] * 3
    shutil.rmtree(folder)
    clone = RocksStore.open(tmp_path / "clone", OPTIONS)
    assert len(list(clone.scan(*shard_range(1)))) == 30
    clone.close()


def test_what_a_repair_loses_is_still_in_the_files(folder: Path, tmp_path: Path) -> None:
    RocksStore.clone(folder, tmp_path / "repaired")
    RocksStore.repair(tmp_path / "repaired")
    store = RocksStore.open_reading(tmp_path / "repaired", OPTIONS, with_gaps=True)
    with pytest.raises(StoreCorruptError):
        store.get(key(1, 5))
    assert store.get(key(1, 99)) is None
    store.close()
    stray = StrayBlobs(folder)
    assert stray.keys(key(1, 0)[:5]) == [key(1, number) for number in range(30)]
    assert list(stray.values(key(1, 5))) == [b"0" * 5_000]
    assert list(stray.values(key(1, 99))) == []


# Rewriting ---------------------------------------------------------------------------------------


def test_nothing_stale_is_left_and_what_shared_its_file_stays(
    store: RocksStore, tmp_path: Path
) -> None:
    kept: dict[bytes, bytes] = {}
    for at in range(6):
        rows: list[Operation] = []
        for shard in (1, 2, 3):
            text = b"secret" if shard == 2 and at in (1, 4) else b"other"
            kept[key(shard, at)] = value(text + b" content")
            rows.append(("put", key(shard, at), kept[key(shard, at)]))
        store.write(rows)
        store.flush()
    untouched = {path.name for path in (blobs(tmp_path / "db")[i] for i in (0, 2, 3, 5))}
    kept[key(2, 1)] = value(b"emptied")
    del kept[key(2, 4)]
    store.write([("put", key(2, 1), kept[key(2, 1)]), ("delete", key(2, 4))])
    store.flush()
    assert len(files_with(tmp_path / "db", [b"secret content"])) == 2
    store.rewrite([shard_range(2)], 1.0)
    assert files_with(tmp_path / "db", [b"secret content"]) == {}
    assert dict(store.scan(b"B", b"C")) == kept
    assert untouched <= {path.name for path in blobs(tmp_path / "db")}
    assert store.stats["blob_garbage_bytes"] == 0
    store.rewrite([shard_range(2)], 1.0)  # nothing to do


def test_stale_values_of_other_ranges_may_stay(store: RocksStore, tmp_path: Path) -> None:
    store.write([("put", key(shard, 1), value(b"old %d" % shard)) for shard in (1, 2)])
    store.flush()
    store.write([("put", key(1, 2), value(b"more")), ("put", key(2, 2), value(b"more"))])
    store.flush()
    before = blobs(tmp_path / "db")
    store.rewrite([shard_range(1)], 1.0)
    assert blobs(tmp_path / "db") == before


def test_writes_that_come_meanwhile_are_kept(
    store: RocksStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("contrail_storage.store.rewriter._PIECE_BYTES", 1)
    monkeypatch.setattr("contrail_storage.store.rocks_store._MOVED_TOGETHER", 1)
    stands = {key(1, number): value(b"first") for number in range(60)}
    for number in range(60):
        store.write([("put", key(1, number), stands[key(1, number)])])
        if number % 10 == 9:
            store.flush()
    for number in range(0, 60, 5):
        store.write([("put", key(1, number), b"small")])
        stands[key(1, number)] = b"small"
    store.flush()
    done = threading.Event()

    def change() -> None:
        chance = random.Random(7)
        while not done.is_set():
            one = key(1, chance.randrange(60))
            if chance.random() < 0.3:
                stands.pop(one, None)
                store.write([("delete", one)])
            else:
                stands[one] = value(b"later")
                store.write([("put", one, stands[one])])

    writer = threading.Thread(target=change)
    writer.start()
    try:
        for _ in range(3):
            store.rewrite([shard_range(1)], 1.0)
    finally:
        done.set()
        writer.join()
    assert dict(store.scan(*shard_range(1))) == stands
    store.flush()
    store.rewrite([shard_range(1)], 1.0)
    assert dict(store.scan(*shard_range(1))) == stands
    store.close()  # or compactions would go on removing files
    for name in files_with(tmp_path / "db", [b"first"]):
        records = records_of(tmp_path / "db" / name)
        assert any(stands.get(record.key, b"").startswith(b"first") for record in records)


def test_damaged_file_cannot_be_rewritten_and_is_reported(
    folder: Path,
) -> None:
    (file, *_) = blobs(folder)
    record = list(records_of(file))[5]
    content = bytearray(file.read_bytes())
    content[record.offset - 13 - 32] ^= 1
    file.write_bytes(content)
    store = RocksStore.open(folder, OPTIONS)
    store.write([("delete", key(1, 1))])
    store.flush()
    with pytest.raises((StoreCorruptError, StoreFailedError)):
        store.rewrite([shard_range(1)], 1.0)
    store.close()


def test_file_that_is_mostly_garbage_is_reclaimed_and_others_are_not(
    store: RocksStore, tmp_path: Path
) -> None:
    for at in range(3):
        store.write([("put", key(1, 10 * at + n), value(b"")) for n in range(10)])
        store.flush()
    first, second, third = (path.name for path in blobs(tmp_path / "db"))
    kept = dict(store.scan(*shard_range(1)))
    for gone in [*range(6), *range(10, 14), *range(20, 30)]:
        store.write([("delete", key(1, gone))])
        del kept[key(1, gone)]
    store.flush()
    store.rewrite([(b"B", b"B")], 1.0)
    with store._using() as database:
        database.compact_range(b"B", b"C")  # as its own compactions would at some time
    size = store.reclaim()
    assert 20_000 < size < 25_000
    names = {path.name for path in blobs_left(store, tmp_path / "db")}
    assert second in names
    assert not {first, third} & names
    assert dict(store.scan(*shard_range(1))) == kept
    assert store.reclaim() == 0


@pytest.mark.parametrize(("files", "joined"), [(63, False), (64, True)])
def test_many_small_files_are_joined(
    store: RocksStore, tmp_path: Path, files: int, joined: bool
) -> None:
    for number in range(files):
        store.write([("put", key(number % 40, number), value(b""))])
        store.flush()
    kept = dict(store.scan(b"B", b"C"))
    assert len(blobs(tmp_path / "db")) == files
    assert (store.reclaim() > 0) == joined
    assert len(blobs_left(store, tmp_path / "db")) == (1 if joined else files)
    assert dict(store.scan(b"B", b"C")) == kept
