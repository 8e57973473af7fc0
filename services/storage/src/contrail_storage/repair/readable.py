"""What can still be read of a store some of whose blocks have rotted."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

from contrail_common.columns.blocks import BlockCorruptError, decode_block
from contrail_storage.core import key_layout as keys
from contrail_storage.core.commands import META_SHARD
from contrail_storage.store.blob_files import StrayBlobs
from contrail_storage.store.block_codecs import BLOCK_CODECS
from contrail_storage.store.block_store import index_row, span_of
from contrail_storage.store.directory_pages import StoredDirectory
from contrail_storage.store.rocks_store import RocksStore, StoreCorruptError

_OTHER_KINDS: Final = (keys.APPLIED, keys.shard_key(keys.ERASURE, META_SHARD), b"K")
_NAMING_KINDS: Final = (keys.STREAM, keys.COUNTERS, keys.BLOCK_INDEX)
_NUMBERED: Final = 13
"""Bytes of a key that ends with a sequence."""

Row = TypeVar("Row")

Opened = Callable[[bytes, bytes], bytes]
"""What a (key, value) is once it is no longer sealed. Raises StoreCorruptError."""


class StrayRows:
    """Rows out of the files that a store keeps beside its tables, where it cannot read them."""

    def __init__(self, folder: Path, opened: Opened) -> None:
        self._blobs = StrayBlobs(folder)
        self._opened = opened

    def keys(self, prefix: bytes) -> list[bytes]:
        """Keys, ascending, under which a value was ever written that may still be there."""
        return self._blobs.keys(prefix)

    def find(self, key: bytes, index: bytes | None) -> bytes | None:
        """The newest value under ``key``; of a block the one that ``index`` is of, if known.

        A value is only ever put again while it is current, so the newest file has the newest.
        """
        for value in self._blobs.values(key):
            with suppress(StoreCorruptError, BlockCorruptError):
                plain = self._opened(key, value)
                if key[:1] != keys.BLOCK:
                    return value
                block = decode_block(plain, BLOCK_CODECS)
                if index in (None, index_row(span_of(block))):
                    return value
        return None


class ReadableRows:
    """The rows of a store that read back; what does not is passed over, and noted by shard."""

    def __init__(self, store: RocksStore, opened: Opened, stray: StrayRows | None = None) -> None:
        """``opened`` raises BlockCorruptError as well, for what opens and is no block."""
        self._store = store
        self._opened = opened
        self._stray = stray
        self.unreadable: dict[int, set[bytes]] = {}
        """Kinds of rows that are incomplete, by shard."""

    def rows(self) -> Iterator[tuple[bytes, bytes]]:
        """All of them; of a shard in order of key."""
        for prefix in _OTHER_KINDS:
            yield from self._scan(prefix, META_SHARD, prefix[:1])
        for number in sorted(self._numbers()):
            for kind in keys.SHARD_KINDS:
                if kind == keys.BLOCK:
                    yield from self._blocks(number)
                else:
                    yield from self._scan(keys.shard_key(kind, number), number, kind)

    def _numbers(self) -> set[int]:
        """Shards of which there is anything."""
        found = {META_SHARD}
        for kind in _NAMING_KINDS:
            for key in self._keys(kind):
                found.add(int.from_bytes(key[1:5], "big"))
        return found

    def _keys(self, prefix: bytes) -> Iterator[bytes]:
        yield from self._walk(prefix, self._store.scan_keys, lambda key: key, lambda: None)
        yield from self._astray(prefix)

    def _scan(self, prefix: bytes, number: int, kind: bytes) -> Iterator[tuple[bytes, bytes]]:
        for key, value in self._walk(
            prefix, self._store.scan, lambda row: row[0], lambda: self._note(number, kind)
        ):
            try:
                self._opened(key, value)
            except StoreCorruptError:
                self._note(number, kind)
            else:
                yield key, value
        for key in self._astray(prefix):
            found = self._found_astray(key, None)
            if found is None:
                self._note(number, kind)
            else:
                yield key, found

    def _astray(self, prefix: bytes) -> list[bytes]:
        """Keys of rows that are there, and whose values the store cannot read."""
        candidates = self._stray.keys(prefix) if self._stray is not None else []
        return [key for key in candidates if self._is_astray(key)]

    def _is_astray(self, key: bytes) -> bool:
        try:
            self._store.get(key)
        except StoreCorruptError:
            return True
        return False

    def _rows_of(self, kind: bytes, number: int) -> list[tuple[bytes, bytes]]:
        """Rows of a shard in order of key, opened."""
        rows = self._scan(keys.shard_key(kind, number), number, kind)
        return sorted((key, self._opened(key, value)) for key, value in rows)

    def _walk(
        self,
        prefix: bytes,
        scan: Callable[[bytes, bytes], Iterator[Row]],
        key_of: Callable[[Row], bytes],
        on_gap: Callable[[], None],
    ) -> Iterator[Row]:
        """What a scan gives that stops for nothing, but for what is astray."""
        start = prefix
        for key in self._astray(prefix):
            yield from self._walk_between(start, key, scan, key_of, on_gap)
            start = key + b"\0"
        yield from self._walk_between(start, keys.prefix_end(prefix), scan, key_of, on_gap)

    def _walk_between(
        self,
        start: bytes,
        stop: bytes,
        scan: Callable[[bytes, bytes], Iterator[Row]],
        key_of: Callable[[Row], bytes],
        on_gap: Callable[[], None],
    ) -> Iterator[Row]:
        """What a scan gives, and what it gives behind each place where it ends too early.

        Which keys cannot be read is not known, so ever more of them are passed over until it goes
        on.
        """
        skip = 1
        while start < stop:
            last = start
            try:
                for row in scan(start, stop):
                    last = key_of(row)
                    yield row
            except StoreCorruptError:
                on_gap()
                skip = skip * 2 if last == start else 1
                start = _behind(last, skip)
            else:
                return

    def _blocks(self, number: int) -> Iterator[tuple[bytes, bytes]]:
        """Blocks are asked for one by one: beside one that rotted the next may be whole."""
        pages, rows = (self._rows_of(kind, number) for kind in (keys.BLOCK_PAGE, keys.BLOCK_INDEX))
        directory = dict(StoredDirectory(pages, rows).index_rows())
        named = set(directory)
        named.update(keys.last_number(key, 8) for key in self._keys_of(keys.BLOCK, number))
        for base_seq in sorted(named):
            key = keys.large_key(keys.BLOCK, number, base_seq)
            try:
                value = self._store.get(key)
                if value is not None:
                    self._opened(key, value)
            except (StoreCorruptError, BlockCorruptError):
                value = self._found_astray(key, directory.get(base_seq))
            if value is None:
                self._note(number, keys.BLOCK)
            else:
                yield key, value

    def _found_astray(self, key: bytes, index: bytes | None) -> bytes | None:
        return self._stray.find(key, index) if self._stray is not None else None

    def _keys_of(self, kind: bytes, number: int) -> Iterator[bytes]:
        return self._keys(keys.shard_key(kind, number))

    def _note(self, number: int, kind: bytes) -> None:
        self.unreadable.setdefault(number, set()).add(kind)


def _behind(key: bytes, count: int) -> bytes:
    """The key ``count`` numbers behind ``key``."""
    width = max(len(key), _NUMBERED)
    return (int.from_bytes(key.ljust(width, b"\0"), "big") + count).to_bytes(width, "big")
