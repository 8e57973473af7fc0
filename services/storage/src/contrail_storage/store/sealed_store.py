"""The encrypted store: every value is sealed, and bound to its key.

Keys are not sealed. They have kinds, shard numbers and sequences, and no names.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from contrail_storage.seal.frames import SealBrokenError, Sealer
from contrail_storage.store.rocks_store import (
    Operation,
    RocksStore,
    StoreCorruptError,
    StoreView,
)


class SealedStore:
    """A `RocksStore` whose values are sealed on the way in and opened on the way out.

    Sealing and opening happen in the calling thread. Methods and errors are those of `RocksStore`;
    a value that does not open is a StoreCorruptError.
    """

    def __init__(self, store: RocksStore, sealer: Sealer) -> None:
        self._store = store
        self._sealer = sealer

    @property
    def below(self) -> RocksStore:
        """The `RocksStore` with the sealed values."""
        return self._store

    def begin_writing(self) -> None:
        """Allow writing, after the store was opened for reading."""
        self._store.begin_writing()

    def write(self, operations: Sequence[Operation]) -> None:
        """Write all operations as one atomic batch; also OSError when no data key is at hand."""
        self._store.write([self._sealed(operation) for operation in operations])

    def get(self, key: bytes) -> bytes | None:
        """Return the value under `key`, or None."""
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the values under `keys`, None where there is none; one bad value fails all."""
        return self._all_opened(keys, self._store.get_many(keys))

    def get_once(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """As `get_many`, but the values are not cached."""
        return self._all_opened(keys, self._store.get_once(keys))

    def get_unverified(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """As `get_once`, without RocksDB's checksums; a value that does not open is an error."""
        return self._all_opened(keys, self._store.get_unverified(keys))

    def _all_opened(
        self, keys: Sequence[bytes], found: Sequence[bytes | None]
    ) -> list[bytes | None]:
        return [
            None if sealed is None else self._opened(key, sealed)
            for key, sealed in zip(keys, found, strict=True)
        ]

    def scan(self, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield (key, value) in key order from `start` up to but not including `stop`."""
        for key, sealed in self._store.scan(start, stop):
            yield key, self._opened(key, sealed)

    @contextmanager
    def view(self) -> Iterator["SealedView"]:
        """Yield a view of the store as it is now, for several scans by one thread at a time."""
        with self._store.view() as view:
            yield SealedView(view, self._opened)

    def scan_keys(self, start: bytes, stop: bytes) -> Iterator[bytes]:
        """Yield the keys of `scan` without their values."""
        return self._store.scan_keys(start, stop)

    def flush(self) -> None:
        """Make everything written so far durable."""
        self._store.flush()

    def rewrite(self, ranges: Sequence[tuple[bytes, bytes]], patience_s: float) -> None:
        """Rewrite the files of ``ranges`` with only their current values."""
        self._store.rewrite(ranges, patience_s)

    def reclaim(self, *, pressing: bool = False) -> int:
        """Rewrite a few files that are mostly garbage; return their bytes."""
        return self._store.reclaim(pressing=pressing)

    @property
    def stats(self) -> dict[str, int]:
        """The figures of the store below."""
        return self._store.stats

    def close(self) -> None:
        """Close the store below."""
        self._store.close()

    def _sealed(self, operation: Operation) -> Operation:
        if operation[0] != "put":
            return operation
        _, key, value = operation
        return "put", key, self._sealer.seal(value, key)

    def _opened(self, key: bytes, sealed: bytes) -> bytes:
        try:
            return self._sealer.open(sealed, key)
        except SealBrokenError as error:
            raise StoreCorruptError(f"the value of row {key.hex()}: {error}") from error


class SealedView:
    """A `StoreView` whose values are opened on the way out."""

    def __init__(self, view: StoreView, opened: Callable[[bytes, bytes], bytes]) -> None:
        self._view = view
        self._opened = opened

    def scan(self, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        """As `SealedStore.scan`; the next scan of the view ends this one."""
        for key, sealed in self._view.scan(start, stop):
            yield key, self._opened(key, sealed)


Store = RocksStore | SealedStore
"""The store of a node's rows on disk."""
