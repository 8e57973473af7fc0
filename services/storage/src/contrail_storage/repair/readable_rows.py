"""Reads the rows of a damaged store that can still be read."""

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

_OTHER_KINDS: Final = (
    keys.APPLIED,
    keys.shard_key(keys.ERASURE, META_SHARD),
    keys.shard_key(keys.MEMBERS, META_SHARD),
    keys.shard_key(keys.NODE, META_SHARD),
    b"K",
)
_NAMING_KINDS: Final = (keys.STREAM, keys.COUNTERS, keys.BLOCK_INDEX)
_NUMBERED: Final = 13
"""Bytes of a key that ends with a sequence."""

Row = TypeVar("Row")

Opened = Callable[[bytes, bytes], bytes]
"""Decrypts the value of a (key, value). Raises StoreCorruptError."""


class StrayRows:
    """Rows from the blob files of a store, for rows that the store itself cannot read."""

    def __init__(self, folder: Path, opened: Opened) -> None:
        self._blobs = StrayBlobs(folder)
        self._opened = opened

    def keys(self, prefix: bytes) -> list[bytes]:
        """Ascending keys of all values that were ever written and may still exist."""
        return self._blobs.keys(prefix)

    def find(self, key: bytes, index: bytes | None) -> bytes | None:
        """Return the newest value of ``key``; for a block, the one that matches ``index``, if any.

        Only current values are ever written again, so the newest file has the newest value.
        """
        for value in self._blobs.values(key):
            with suppress(StoreCorruptError, BlockCorruptError):
                plain = self._opened(key, value)
                if key[:1] != keys.BLOCK:
                    return value
                block = decode_block(plain, BLOCK_CODECS)
                # The index row names count, bytes and last time, so an older block of the same base
                # is not mistaken for it.
                if index in (None, index_row(span_of(block))):
                    return value
        return None


class ReadableRows:
    """The readable rows of a store. Unreadable ones are skipped, and noted by shard."""

    def __init__(self, store: RocksStore, opened: Opened, stray: StrayRows | None = None) -> None:
        """``opened`` also raises BlockCorruptError, for decrypted values that are not blocks."""
        self._store = store
        self._opened = opened
        self._stray = stray
        self.unreadable: dict[int, set[bytes]] = {}
        """Kinds of rows that are incomplete, by shard."""

    def rows(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield all rows, the rows of each shard in the order of their keys."""
        for prefix in _OTHER_KINDS:
            yield from self._scan(prefix, META_SHARD, prefix[:1])
        for shard_id in sorted(self._numbers()):
            for kind in keys.SHARD_KINDS:
                if kind == keys.BLOCK:
                    yield from self._blocks(shard_id)
                elif kind != keys.WINDOW:  # made from the blocks again, when they are needed
                    yield from self._scan(keys.shard_key(kind, shard_id), shard_id, kind)

    def _numbers(self) -> set[int]:
        """Numbers of the shards that have any rows."""
        found = {META_SHARD}
        for kind in _NAMING_KINDS:
            for key in self._keys(kind):
                found.add(int.from_bytes(key[1:5], "big"))
        return found

    def _keys(self, prefix: bytes) -> Iterator[bytes]:
        yield from self._walk(prefix, self._store.scan_keys, lambda key: key, lambda: None)
        yield from self._astray(prefix)

    def _scan(self, prefix: bytes, shard_id: int, kind: bytes) -> Iterator[tuple[bytes, bytes]]:
        for key, value in self._walk(
            prefix, self._store.scan, lambda row: row[0], lambda: self._note(shard_id, kind)
        ):
            try:
                self._opened(key, value)
            except StoreCorruptError:
                self._note(shard_id, kind)
            else:
                yield key, value
        # A scan ends at a row whose value is lost. So it is divided at these keys.
        for key in self._astray(prefix):
            found = self._found_astray(key, None)
            if found is None:
                self._note(shard_id, kind)
            else:
                yield key, found

    def _astray(self, prefix: bytes) -> list[bytes]:
        """Keys of existing rows whose values the store cannot read."""
        candidates = self._stray.keys(prefix) if self._stray is not None else []
        return [key for key in candidates if self._is_astray(key)]

    def _is_astray(self, key: bytes) -> bool:
        try:
            self._store.get(key)
        except StoreCorruptError:
            return True
        return False

    def _rows_of(self, kind: bytes, shard_id: int) -> list[tuple[bytes, bytes]]:
        """Decrypted rows of a shard in the order of their keys."""
        rows = self._scan(keys.shard_key(kind, shard_id), shard_id, kind)
        return sorted((key, self._opened(key, value)) for key, value in rows)

    def _walk(
        self,
        prefix: bytes,
        scan: Callable[[bytes, bytes], Iterator[Row]],
        key_of: Callable[[Row], bytes],
        on_gap: Callable[[], None],
    ) -> Iterator[Row]:
        """Yield what a scan finds. It continues after errors, and skips the rows of `_astray`."""
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
        """Yield what a scan finds, and continue after each place where it fails.

        The unreadable keys are not known, so a growing number of keys is skipped until the scan
        succeeds.
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
                # Doubling finds the end of a damaged table in few attempts. Skipped keys that are
                # readable count as a gap too.
                skip = skip * 2 if last == start else 1
                start = _after(last, skip)
            else:
                return

    def _blocks(self, shard_id: int) -> Iterator[tuple[bytes, bytes]]:
        """Yield blocks. Each is read by itself: the one after a damaged block may be sound."""
        pages, rows = (
            self._rows_of(kind, shard_id) for kind in (keys.BLOCK_PAGE, keys.BLOCK_INDEX)
        )
        directory = dict(StoredDirectory(pages, rows).index_rows())
        named = set(directory)
        named.update(keys.last_number(key, 8) for key in self._keys_of(keys.BLOCK, shard_id))
        for base_seq in sorted(named):
            key = keys.large_key(keys.BLOCK, shard_id, base_seq)
            try:
                value = self._store.get(key)
                if value is not None:
                    self._opened(key, value)
            except (StoreCorruptError, BlockCorruptError):
                value = self._found_astray(key, directory.get(base_seq))
            if value is None:
                self._note(shard_id, keys.BLOCK)
            else:
                yield key, value

    def _found_astray(self, key: bytes, index: bytes | None) -> bytes | None:
        return self._stray.find(key, index) if self._stray is not None else None

    def _keys_of(self, kind: bytes, shard_id: int) -> Iterator[bytes]:
        return self._keys(keys.shard_key(kind, shard_id))

    def _note(self, shard_id: int, kind: bytes) -> None:
        self.unreadable.setdefault(shard_id, set()).add(kind)


def _after(key: bytes, count: int) -> bytes:
    """Return the key that is ``count`` higher than ``key`` as a number."""
    width = max(len(key), _NUMBERED)
    return (int.from_bytes(key.ljust(width, b"\0"), "big") + count).to_bytes(width, "big")
