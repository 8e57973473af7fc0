"""A store for streams in memory, with the interface of `RocksStore` and without files.

The rows of one kind and shard form a table. A range must be within one table. The size counts the
overhead of each row, and the old values of changed rows that open views need.
"""

import threading
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from contrail_storage.core import key_layout as keys
from contrail_storage.store.rocks_store import Operation

ROW_OVERHEAD: Final = 200
"""Bytes of a row without its value: two object headers, the key, and entries in the table."""
_TABLE: Final = len(keys.shard_key(keys.BLOCK, 0))
_SCAN_ROWS: Final = 256


class _Table:
    """Rows of one kind and shard: keys in order, and their values."""

    __slots__ = ("keys", "values")

    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.values: dict[bytes, bytes] = {}

    def put(self, key: bytes, value: bytes) -> None:
        if key not in self.values:
            # Most keys are the highest of their table: sequences and log indexes ascend.
            if not self.keys or key > self.keys[-1]:
                self.keys.append(key)
            else:
                insort(self.keys, key)
        self.values[key] = value

    def delete(self, key: bytes) -> None:
        del self.values[key]
        del self.keys[bisect_left(self.keys, key)]

    def between(self, start: bytes, stop: bytes) -> tuple[int, int]:
        """Positions of the keys from ``start`` up to, not including, ``stop``."""
        return bisect_left(self.keys, start), bisect_left(self.keys, stop)


class MemoryStore:
    """Ordered bytes to bytes. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._tables: dict[bytes, _Table] = {}
        self._views: set[MemoryView] = set()
        # Taken again by a scan that is collected as garbage while this thread holds it.
        self._lock = threading.RLock()
        self._bytes = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of all rows, and of the old values that open views keep."""
        return self._bytes + sum(view.size_bytes for view in tuple(self._views))

    def write(self, operations: Sequence[Operation]) -> None:
        """Write all operations, in order; scans and views see all of them or none."""
        actions: dict[str, Callable[..., None]] = {
            "put": self._put,
            "delete": self._delete,
            "delete_range": self._delete_range,
        }
        with self._lock:
            for operation in operations:
                actions[operation[0]](*operation[1:])

    def _put(self, key: bytes, value: bytes) -> None:
        table = self._tables.get(key[:_TABLE])
        if table is None:
            table = self._tables[key[:_TABLE]] = _Table()
        old = table.values.get(key)
        self._note(key, old, deleted=False)
        self._bytes += len(value) + (ROW_OVERHEAD if old is None else -len(old))
        table.put(key, value)

    def _delete(self, key: bytes) -> None:
        table = self._tables.get(key[:_TABLE])
        old = table.values.get(key) if table is not None else None
        if table is None or old is None:
            return
        self._note(key, old, deleted=True)
        self._bytes -= len(old) + ROW_OVERHEAD
        table.delete(key)
        if not table.keys:
            del self._tables[key[:_TABLE]]

    def _delete_range(self, start: bytes, stop: bytes) -> None:
        table = self._tables.get(start[:_TABLE])
        if table is None:
            return
        low, high = table.between(start, stop)
        for key in table.keys[low:high]:
            old = table.values.pop(key)
            self._note(key, old, deleted=True)
            self._bytes -= len(old) + ROW_OVERHEAD
        del table.keys[low:high]
        if not table.keys:
            del self._tables[start[:_TABLE]]

    def _note(self, key: bytes, old: bytes | None, *, deleted: bool) -> None:
        for view in tuple(self._views):
            view.note(key, old, deleted=deleted)

    def get(self, key: bytes) -> bytes | None:
        """Return the value under `key`, or None."""
        return self.get_many([key])[0]

    def get_many(self, wanted: Sequence[bytes]) -> list[bytes | None]:
        """Return the values under `wanted`, None where there is none."""
        with self._lock:
            tables = [self._tables.get(key[:_TABLE]) for key in wanted]
            return [
                None if table is None else table.values.get(key)
                for table, key in zip(tables, wanted, strict=True)
            ]

    def get_once(self, wanted: Sequence[bytes]) -> list[bytes | None]:
        """As `get_many`: there is no cache."""
        return self.get_many(wanted)

    def get_unverified(self, wanted: Sequence[bytes]) -> list[bytes | None]:
        """As `get_many`: there are no checksums."""
        return self.get_many(wanted)

    def scan(self, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield (key, value) in key order from `start` up to but not including `stop`.

        Shows the store as it was when the scan began.
        """
        with self.view() as view:
            yield from view.scan(start, stop)

    @contextmanager
    def view(self) -> Iterator["MemoryView"]:
        """Yield a view of the store as it is now, for several scans. It keeps rows that change."""
        view = MemoryView(self)
        with self._lock:
            self._views.add(view)
        try:
            yield view
        finally:
            with self._lock:
                self._views.discard(view)

    def rows(
        self, view: "MemoryView", start: bytes, stop: bytes
    ) -> tuple[list[tuple[bytes, bytes]], bytes | None]:
        """Return the next rows of a view's scan, and the key to continue at (None: the end)."""
        with self._lock:
            table = self._tables.get(start[:_TABLE]) or _Table()
            low, high = table.between(start, stop)
            found = table.keys[low : min(high, low + _SCAN_ROWS)]
            # The smallest key after the last row of this part.
            end = found[-1] + b"\0" if low + _SCAN_ROWS < high else stop
            noted = view.noted(start, end)
            shown = {key: table.values[key] for key in found} | noted
            rows = [(key, value) for key, value in sorted(shown.items()) if value is not None]
        return rows, None if end == stop else end


class MemoryView:
    """A `MemoryStore` as it was at one moment. It has the old values of rows that changed since."""

    def __init__(self, store: MemoryStore) -> None:
        self.size_bytes = 0
        self._store = store
        self._keys: list[bytes] = []
        self._old: dict[bytes, bytes | None] = {}

    def note(self, key: bytes, old: bytes | None, *, deleted: bool) -> None:
        """Note that a row changes, or is ``deleted``; ``old`` is its value (None: no row)."""
        # Only the first change counts: the view shows the value before it.
        if key not in self._old:
            self._old[key] = old
            insort(self._keys, key)
            self.size_bytes += ROW_OVERHEAD + len(old or b"")
        elif deleted and self._old[key] is None:
            # The row was added and removed while the view is open: the view never shows it.
            del self._old[key]
            del self._keys[bisect_left(self._keys, key)]
            self.size_bytes -= ROW_OVERHEAD

    def noted(self, start: bytes, stop: bytes) -> dict[bytes, bytes | None]:
        """The old values of the changed rows of a range; None for a row that did not exist."""
        low, high = bisect_left(self._keys, start), bisect_left(self._keys, stop)
        return {key: self._old[key] for key in self._keys[low:high]}

    def scan(self, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        """As `MemoryStore.scan`."""
        at: bytes | None = start
        while at is not None:
            rows, at = self._store.rows(self, at, stop)
            yield from rows
