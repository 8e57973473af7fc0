"""The encrypted store: values come back from their key only, and the files show nothing of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from contrail_storage.disk.files import Files
from contrail_storage.seal.keyring import Keyring
from contrail_storage.store.checkpoint import Checkpoint, ShardMark
from contrail_storage.store.rocks_store import RocksStore, StoreCorruptError
from contrail_storage.store.sealed_store import SealedStore
from tests.support.folders import files_with

NODE_KEY = bytes(32)
VALUE = b"a value that nobody else shall read"


@pytest.fixture
def keyring(tmp_path: Path) -> Keyring:
    return Keyring.create(Files(), tmp_path, NODE_KEY)


@pytest.fixture
def below(tmp_path: Path) -> Iterator[RocksStore]:
    store = RocksStore.open(tmp_path / "store")
    yield store
    store.close()


@pytest.fixture
def store(below: RocksStore, keyring: Keyring) -> SealedStore:
    return SealedStore(below, keyring)


def test_values_come_back_by_every_way_of_reading(store: SealedStore) -> None:
    store.write([("put", b"a", VALUE), ("put", b"b", b""), ("put", b"c", b"3"), ("delete", b"c")])
    assert store.get(b"a") == VALUE
    assert store.get_many([b"b", b"c", b"a"]) == [b"", None, VALUE]
    assert list(store.scan(b"a", b"z")) == [(b"a", VALUE), (b"b", b"")]
    assert list(store.scan_keys(b"a", b"z")) == [b"a", b"b"]
    store.write([("delete_range", b"a", b"z")])
    assert list(store.scan_keys(b"", b"z")) == []


def test_same_value_twice_is_stored_differently(store: SealedStore, below: RocksStore) -> None:
    store.write([("put", b"a", VALUE), ("put", b"b", VALUE)])
    assert below.get(b"a") != below.get(b"b")
    assert VALUE not in (below.get(b"a") or b"")


def test_value_under_another_key_or_not_sealed_is_corrupt(
    store: SealedStore, below: RocksStore
) -> None:
    store.write([("put", b"a", VALUE)])
    below.write([("put", b"b", below.get(b"a") or b""), ("put", b"c", VALUE)])
    for key in (b"b", b"c"):
        with pytest.raises(StoreCorruptError, match=key.hex()):
            store.get(key)
    with pytest.raises(StoreCorruptError):
        list(store.scan(b"a", b"z"))
    assert store.get(b"a") == VALUE


def test_files_of_the_store_show_no_value(store: SealedStore, tmp_path: Path) -> None:
    store.write([("put", b"%d" % number, VALUE) for number in range(100)])
    store.flush()
    store.close()
    assert files_with(tmp_path, [VALUE]) == {}


def test_checkpoint_of_an_encrypted_store_is_verified_after_a_restart(
    tmp_path: Path, keyring: Keyring
) -> None:
    marks = {5: ShardMark(1, 10, 10, b"dddd")}
    store = SealedStore(RocksStore.open(tmp_path / "store"), keyring)
    Checkpoint(store, tmp_path / "checkpoints").take({1: 7}, marks)
    store.close()
    again = SealedStore(
        RocksStore.open(tmp_path / "store"), Keyring.load(Files(), tmp_path, [NODE_KEY])
    )
    assert Checkpoint(again, tmp_path / "checkpoints").verify({1: 7}, marks, {1: 7}) == []
    again.close()
