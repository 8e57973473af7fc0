"""RocksDB behind our own interface: atomic batches, honest scans, one set of errors."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from contrail_storage.store.rocks_store import (
    Operation,
    RocksStore,
    StoreClosedError,
    StoreCorruptError,
    StoreLockedError,
    StoreOptions,
    StoreScanCutError,
    StoreStalledError,
)
from tests.support.folders import files_with


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RocksStore]:
    store = RocksStore.open(tmp_path / "db")
    yield store
    store.close()


def rows(count: int, value: bytes = b"v" * 100) -> list[Operation]:
    return [("put", b"k%06d" % number, value) for number in range(count)]


def test_batch_is_applied_in_order(store: RocksStore) -> None:
    store.write(
        [
            ("put", b"a", b"1"),
            ("put", b"b", b"2"),
            ("put", b"c", b"3"),
            ("delete_range", b"a", b"c"),
            ("put", b"a", b"again"),
            ("delete", b"c"),
        ]
    )
    assert store.get_many([b"a", b"b", b"c"]) == [b"again", None, None]
    assert store.get(b"a") == b"again"
    assert store.get(b"none") is None


def test_values_that_are_read_once_are_not_kept_in_the_cache(tmp_path: Path) -> None:
    store = RocksStore.open(tmp_path / "once")
    store.write(rows(100, os.urandom(20_000)))
    store.flush()
    keys = [key for _, key, *_ in rows(100)]
    before = store.stats["block_cache_bytes"]
    assert store.get_once([*keys, b"none"]) == [*store.get_once(keys), None]
    assert store.stats["block_cache_bytes"] - before < 100_000
    assert store.get_once(keys) == store.get_many(keys)
    assert store.stats["block_cache_bytes"] - before > 1_000_000
    store.close()
    with pytest.raises(StoreClosedError):
        store.get_once(keys)
    RocksStore.open(tmp_path / "once").close()


def test_scan_yields_the_range_in_order(store: RocksStore) -> None:
    store.write(rows(1000))
    found = list(store.scan(b"k000100", b"k000900"))
    assert [key for key, _ in found] == [b"k%06d" % number for number in range(100, 900)]
    assert list(store.scan_keys(b"k000997", b"l")) == [b"k000997", b"k000998", b"k000999"]
    assert list(store.scan(b"x", b"y")) == []


def test_scan_shows_the_store_as_it_was_when_it_began(store: RocksStore) -> None:
    store.write(rows(1000))
    scan = store.scan(b"k", b"l")
    next(scan)
    store.write([("delete_range", b"k", b"l"), ("put", b"k000500x", b"new")])
    assert len(list(scan)) == 999


def test_view_shows_the_store_as_it_was_to_each_of_its_scans(store: RocksStore) -> None:
    store.write(rows(1000))
    with store.view() as view:
        store.write([("delete_range", b"k", b"l"), ("put", b"k000500x", b"new")])
        store.flush()
        assert len(list(view.scan(b"k000900", b"l"))) == 100
        found = list(view.scan(b"k000100", b"k000900"))
        assert [key for key, _ in found] == [b"k%06d" % number for number in range(100, 900)]
        assert list(view.scan(b"x", b"y")) == []
        store.close()
        with pytest.raises(StoreClosedError):
            list(view.scan(b"k", b"l"))


def test_reopened_store_holds_what_was_flushed(tmp_path: Path) -> None:
    store = RocksStore.open(tmp_path / "db")
    store.write(rows(10))
    store.flush()
    store.close()
    again = RocksStore.open(tmp_path / "db")
    assert len(list(again.scan_keys(b"k", b"l"))) == 10
    again.close()


def write_then_die(path: Path) -> None:
    store = RocksStore.open(path)
    store.write(rows(10))
    store.flush()
    store.write([("put", b"late", b"lost"), ("delete", b"k000000")])
    os.kill(os.getpid(), signal.SIGKILL)


def test_killed_process_leaves_the_store_at_its_last_flush(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(
        target=write_then_die, args=(tmp_path / "db",)
    )
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    store = RocksStore.open(tmp_path / "db")
    assert store.get_many([b"late", b"k000000"]) == [None, b"v" * 100]
    store.close()


def test_second_opener_gets_the_error_that_the_store_is_locked(
    store: RocksStore, tmp_path: Path
) -> None:
    with pytest.raises(StoreLockedError):
        RocksStore.open(tmp_path / "db")


def damage_the_table_file(path: Path) -> None:
    (table,) = path.glob("*.sst")
    content = bytearray(table.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 100] = bytes(100)
    table.write_bytes(content)


def test_damaged_table_fails_reads_instead_of_ending_them(tmp_path: Path) -> None:
    path = tmp_path / "db"
    store = RocksStore.open(path)
    store.write(rows(3000, os.urandom(100)))
    store.flush()
    store.close()
    damage_the_table_file(path)
    store = RocksStore.open(path)
    with pytest.raises(StoreCorruptError):
        list(store.scan(b"k", b"l"))
    with pytest.raises(StoreCorruptError):
        list(store.scan_keys(b"k", b"l"))
    with pytest.raises(StoreCorruptError):
        store.get_many([b"k%06d" % number for number in range(3000)])
    store.close()


def test_overload_is_a_refusal_and_the_batch_may_be_built_again(tmp_path: Path) -> None:
    options = StoreOptions(write_buffer_bytes=64 << 10, write_buffers=2)
    store = RocksStore.open(tmp_path / "db", options)
    refused: list[int] = []
    for number in range(2000):
        operations: list[Operation] = [("put", b"%d" % number, os.urandom(30_000))]
        try:
            store.write(operations)
        except StoreStalledError:
            refused.append(number)
            break
    assert refused
    store.flush()
    while True:
        try:
            store.write([("put", b"%d" % refused[0], b"second try")])
            break
        except StoreStalledError:
            store.flush()
    assert store.get(b"%d" % refused[0]) == b"second try"
    store.close()


def test_closed_store_refuses_everything_and_closes_twice(store: RocksStore) -> None:
    store.close()
    store.close()
    for call in (
        lambda: store.get(b"a"),
        lambda: store.write([("put", b"a", b"b")]),
        store.flush,
        lambda: list(store.scan(b"a", b"b")),
        lambda: store.stats,
    ):
        with pytest.raises(StoreClosedError):
            call()


def test_close_ends_open_scans_and_lets_go_of_the_files(tmp_path: Path) -> None:
    store = RocksStore.open(tmp_path / "db")
    store.write(rows(1000))
    scan = store.scan(b"k", b"l")
    next(scan)
    store.close()
    RocksStore.open(tmp_path / "db").close()
    with pytest.raises(StoreClosedError):
        list(scan)


def test_close_while_other_threads_work_waits_for_them(tmp_path: Path) -> None:
    store = RocksStore.open(tmp_path / "db")
    store.write(rows(1000))
    errors: list[Exception] = []
    started = threading.Barrier(4)

    def work() -> None:
        started.wait(30)
        try:
            while True:
                store.write(rows(50))
                store.get_many([b"k%06d" % number for number in range(50)])
                list(store.scan_keys(b"k", b"l"))
                store.flush()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    started.wait(30)
    store.close()
    for thread in threads:
        thread.join(30)
    assert [type(error) for error in errors] == [StoreClosedError] * 3
    RocksStore.open(tmp_path / "db").close()


def test_stats_name_sizes_and_stalls(store: RocksStore) -> None:
    store.write(rows(100))
    stats = store.stats
    assert stats["memtable_bytes"] > 0
    assert stats["write_stopped"] == 0
    assert stats["background_errors"] == 0


def test_rewritten_store_holds_nothing_that_was_overwritten_or_deleted(
    store: RocksStore, tmp_path: Path
) -> None:
    for at in range(4):  # in several files
        store.write([("put", b"k%d%03d" % (at, n), b"old%03d" % n * 20) for n in range(100)])
        store.flush()
    store.write([("put", b"k0005", b"new"), ("delete", b"k1005")])
    store.write([("delete_range", b"k2000", b"k2999"), ("put", b"z", b"beside")])
    store.flush()
    assert files_with(tmp_path / "db", [b"old005"])
    store.rewrite([(b"k0", b"k3"), (b"x", b"y")], 1.0)
    store.write([("put", b"k3005", b"new")])
    store.flush()
    store.rewrite([(b"k3", b"k4")], 1.0)
    assert files_with(tmp_path / "db", [b"old005"]) == {}
    assert store.get_many([b"k0005", b"k1005", b"k3005", b"z"]) == [b"new", None, b"new", b"beside"]
    assert len(list(store.scan(b"k", b"l"))) == 299
    store.rewrite([(b"k", b"l")], 1.0)  # nothing to do


def test_scan_may_end_before_files_are_removed_and_is_ended_if_it_does_not(
    store: RocksStore, tmp_path: Path
) -> None:
    store.write(rows(1_000, b"gone" * 9))
    store.flush()
    scan, done = store.scan(b"k", b"l"), store.scan(b"k", b"l")
    assert next(scan)
    assert next(done)
    store.write([("delete_range", b"k", b"l")])
    store.flush()
    threading.Timer(0.1, done.close).start()  # type: ignore[attr-defined]
    store.rewrite([(b"k", b"l")], 0.5)
    assert files_with(tmp_path / "db", [b"gone"]) == {}
    with pytest.raises(StoreScanCutError):
        list(scan)


def test_store_is_rewritten_in_pieces_and_gives_up_when_it_is_closed(
    store: RocksStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("contrail_storage.store.rewriter._PIECE_BYTES", 1)
    for at in range(5):
        store.write([("put", b"k%d%02d" % (at, n), b"old" * 50) for n in range(50)])
        store.flush()
        store.rewrite([(b"k%d" % at, b"k%d" % (at + 1))], 1.0)  # a table at the bottom for each
    store.write([("put", b"k%d%02d" % (at, n), b"new" * 50) for at in range(5) for n in range(50)])
    store.flush()
    store.rewrite([(b"k0", b"k9")], 1.0)
    assert files_with(tmp_path / "db", [b"oldold"]) == {}
    assert {value for _, value in store.scan(b"k", b"l")} == {b"new" * 50}
    scan = store.scan(b"k", b"l")
    next(scan)
    threading.Timer(0.1, store.close).start()
    with pytest.raises(StoreClosedError):
        store.rewrite([(b"k0", b"k9")], 30.0)


def test_copy_of_a_store_is_durable_where_nothing_can_be_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RocksStore.open(tmp_path / "store")
    store.write(rows(20))
    store.flush()
    store.close()
    synced: set[str] = set()
    sync = os.fsync

    def noted(descriptor: int) -> None:
        sync(descriptor)
        synced.add(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    def refused(*_: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "link", refused)
    RocksStore.clone(tmp_path / "store", tmp_path / "copy")
    assert synced == {path.name for path in (tmp_path / "copy").iterdir()}
    assert any(name.endswith(".sst") for name in synced)
    copy = RocksStore.open(tmp_path / "copy")
    assert copy.get(b"k000007") == b"v" * 100
    copy.close()
