"""All rows of a node: rows of shards and groups in memory, and all others on disk."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from contrail_storage.store.memory_store import MemoryStore, MemoryView
from contrail_storage.store.rocks_store import Operation, StoreView
from contrail_storage.store.sealed_store import SealedView, Store

_IN_MEMORY_BIT: Final = 0x80


class SplitStore:
    """Chooses the store of a row by the shard id in its key. Methods and errors as of `Store`.

    A batch is written to memory after the store on disk has taken its part. So if that store is
    stalled, nothing is written.
    """

    def __init__(self, durable: Store, memory: MemoryStore) -> None:
        self._durable = durable
        self._memory = memory

    def write(self, operations: Sequence[Operation]) -> None:
        """Write all operations, as one atomic batch in each store."""
        in_memory = [one for one in operations if _in_memory(one[1])]
        # Usually no row is in memory, and nothing is copied.
        durable: Sequence[Operation] = operations
        if in_memory:
            durable = [one for one in operations if not _in_memory(one[1])]
        if durable:
            self._durable.write(durable)
        if in_memory:
            self._memory.write(in_memory)

    def get(self, key: bytes) -> bytes | None:
        """Return the value under `key`, or None."""
        return self._side(key).get(key)

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the values under `keys`, all of one shard, None where there is none."""
        return self._side(keys[0]).get_many(keys) if keys else []

    def get_once(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """As `get_many`, but the values are not cached."""
        return self._side(keys[0]).get_once(keys) if keys else []

    def get_unverified(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """As `get_once`, without the checksums of the store on disk."""
        return self._side(keys[0]).get_unverified(keys) if keys else []

    def scan(self, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield (key, value) in key order from `start` up to `stop`, which are of one shard."""
        return self._side(start).scan(start, stop)

    @contextmanager
    def view(self) -> Iterator["SplitView"]:
        """Yield a view of both stores as they are now, for scans by one thread at a time."""
        with self._durable.view() as durable, self._memory.view() as memory:
            yield SplitView(durable, memory)

    def _side(self, key: bytes) -> Store | MemoryStore:
        return self._memory if _in_memory(key) else self._durable


class SplitView:
    """A view of both sides."""

    def __init__(self, durable: StoreView | SealedView, memory: MemoryView) -> None:
        self._durable = durable
        self._memory = memory

    def scan(self, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        """As `SplitStore.scan`; the next scan of the view ends this one."""
        side = self._memory if _in_memory(start) else self._durable
        return side.scan(start, stop)


def _in_memory(key: bytes) -> bool:
    # After the kind comes the number of the shard or group, big-endian; a prefix may lack it.
    return len(key) > 1 and key[1] >= _IN_MEMORY_BIT
