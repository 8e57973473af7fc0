"""What can still be read of a store some of whose blocks have rotted."""

from collections.abc import Callable, Iterator
from typing import Final, TypeVar

from contrail_common.blocks import BlockCorruptError
from contrail_storage.core import key_layout as keys
from contrail_storage.core.commands import META_SHARD
from contrail_storage.store.directory_pages import StoredDirectory
from contrail_storage.store.rocks_store import RocksStore, StoreCorruptError

_OTHER_KINDS: Final = (keys.APPLIED, keys.shard_key(keys.ERASURE, META_SHARD), b"K")
_NAMING_KINDS: Final = (keys.STREAM, keys.COUNTERS, keys.BLOCK_INDEX)
_NUMBERED: Final = 13
"""Bytes of a key that ends with a sequence."""

Row = TypeVar("Row")

Opened = Callable[[bytes, bytes], bytes]
"""The value that was sealed, if any was, for a key and a value as stored.

Raises StoreCorruptError or BlockCorruptError for what is not as it was written.
"""


class ReadableRows:
    """The rows of a store that read back; what does not is passed over, and noted by shard."""

    def __init__(self, store: RocksStore, opened: Opened) -> None:
        self._store = store
        self._opened = opened
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
        return self._walk(prefix, self._store.scan_keys, lambda key: key, lambda: None)

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

    def _rows_of(self, kind: bytes, number: int) -> Iterator[tuple[bytes, bytes]]:
        """Rows of a shard, opened."""
        for key, value in self._scan(keys.shard_key(kind, number), number, kind):
            yield key, self._opened(key, value)

    def _walk(
        self,
        prefix: bytes,
        scan: Callable[[bytes, bytes], Iterator[Row]],
        key_of: Callable[[Row], bytes],
        on_gap: Callable[[], None],
    ) -> Iterator[Row]:
        """What a scan gives, and what it gives behind each place where it ends too early.

        Which keys cannot be read is not known, so ever more of them are passed over until it goes
        on.
        """
        start, stop, skip = prefix, keys.prefix_end(prefix), 1
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
        named = set(StoredDirectory(pages, rows).spans["base"].tolist())
        named.update(keys.last_number(key, 8) for key in self._keys_of(keys.BLOCK, number))
        for base_seq in sorted(named):
            key = keys.large_key(keys.BLOCK, number, base_seq)
            try:
                value = self._store.get(key)
                if value is not None:
                    self._opened(key, value)
            except (StoreCorruptError, BlockCorruptError):
                value = None
            if value is None:
                self._note(number, keys.BLOCK)
            else:
                yield key, value

    def _keys_of(self, kind: bytes, number: int) -> Iterator[bytes]:
        return self._keys(keys.shard_key(kind, number))

    def _note(self, number: int, kind: bytes) -> None:
        self.unreadable.setdefault(number, set()).add(kind)


def _behind(key: bytes, count: int) -> bytes:
    """The key ``count`` numbers behind ``key``."""
    width = max(len(key), _NUMBERED)
    return (int.from_bytes(key.ljust(width, b"\0"), "big") + count).to_bytes(width, "big")
