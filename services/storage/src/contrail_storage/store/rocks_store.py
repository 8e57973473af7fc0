"""The node's RocksDB: one column family, large values in blob files, no log of its own.

The write-ahead log makes entries durable. Writes to this store may be lost until `flush` has
returned, but never in part. There is one column family because a flush covers only one: without
RocksDB's own log, a crash would leave two families at different points.
"""

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Literal, Self, TypeVar

from rocksdict import (
    BottommostLevelCompaction,
    CompactOptions,
    DbClosedError,
    Rdict,
    RdictIter,
    ReadOptions,
    WriteBatch,
    WriteOptions,
)

from contrail_storage.disk.files import Files
from contrail_storage.store.blob_files import SUFFIX as BLOB_SUFFIX
from contrail_storage.store.rewriter import Rewriter
from contrail_storage.store.rocks_options import (
    MIB,
    ReadingFolder,
    StoreOptions,
    passing_by,
    rocks_options,
    whole,
)
from contrail_storage.store.store_errors import (
    StoreClosedError,
    StoreCorruptError,
    StoreError,
    StoreFailedError,
    StoreLockedError,
    StoreMissingError,
    StoreScanCutError,
    StoreStalledError,
)

__all__ = [
    "Operation",
    "RocksStore",
    "StoreClosedError",
    "StoreCorruptError",
    "StoreError",
    "StoreFailedError",
    "StoreLockedError",
    "StoreMissingError",
    "StoreOptions",
    "StoreScanCutError",
    "StoreStalledError",
    "StoreView",
]

Operation = (
    tuple[Literal["put"], bytes, bytes]
    | tuple[Literal["delete"], bytes]
    | tuple[Literal["delete_range"], bytes, bytes]
)
Value = TypeVar("Value")

_SCAN_ROWS: Final = 256
_SCAN_BYTES: Final = 4 * MIB
_VIEW_BYTES: Final = MIB // 4
_WAIT_STEP_S: Final = 0.01
_MOVED_TOGETHER: Final = 8
_LASTING_SUFFIXES: Final = (".sst", BLOB_SUFFIX)
_LASTING: Final = tuple(f"*{suffix}" for suffix in _LASTING_SUFFIXES)
_CURRENT: Final = "CURRENT"
_MISSING_PREFIX: Final = "IO error: No such file"
_STALL_PREFIX: Final = "Result incomplete:"
_REOPENING: Final = "the store failed and is being reopened"
_PROPERTIES: Final = {
    "memtable_bytes": "rocksdb.cur-size-all-mem-tables",
    "sst_bytes": "rocksdb.total-sst-files-size",
    "blob_bytes": "rocksdb.live-blob-file-size",
    "blob_garbage_bytes": "rocksdb.live-blob-file-garbage-size",
    "live_bytes": "rocksdb.estimate-live-data-size",
    "level0_files": "rocksdb.num-files-at-level0",
    "pending_compaction_bytes": "rocksdb.estimate-pending-compaction-bytes",
    "write_stopped": "rocksdb.is-write-stopped",
    "delayed_write_rate": "rocksdb.actual-delayed-write-rate",
    "background_errors": "rocksdb.background-errors",
    "block_cache_bytes": "rocksdb.block-cache-usage",
}


class RocksStore:
    """An ordered map of bytes to bytes. All methods may be called from any thread."""

    def __init__(self, database: Rdict) -> None:
        # The open database and two handles of it; None once closed or suspended. Under `_gate`.
        self._database: Rdict | None = database
        self._passing_by: Rdict | None = passing_by(database)  # reads bypass the cache
        self._unverified: Rdict | None = passing_by(database, verified=False)  # and checksums
        # How it was opened for reading only; None once it can be written.
        self._reading: tuple[Path, StoreOptions, ReadingFolder] | None = None
        # RocksDB writes no log of its own: the node's log has every change until a flush.
        self._write_options = WriteOptions()
        # The published stub calls this a method; it is a property.
        setattr(self._write_options, "disable_wal", True)  # noqa: B010
        # A write that would stall is refused: waiting inside the binding, it would hold the
        # interpreter lock, and so stop the event loop.
        self._write_options.no_slowdown = True
        self._writing = threading.Lock()  # one batch at a time, so that put-again sees current rows
        self._rewriting = threading.Lock()  # one `rewrite` or `reclaim` at a time
        self._gate = threading.Condition()  # guards the fields below; signals `_users` == 0
        self._users = 0  # calls that use the database now; it is closed at 0 only
        self._closing = False  # `close` was called: every call raises; never unset
        self._suspended = False  # between `suspend` and `take_over`: every call raises
        self._scans: set[_Scan] = set()  # open scans, whose iterators a close takes away

    @classmethod
    def open(cls, path: Path, options: StoreOptions | None = None) -> Self:
        """Open the store, creating it if there is none.

        Raises StoreLockedError, StoreCorruptError, StoreMissingError or StoreFailedError.
        """
        try:
            Files().make_directory(path)
        except OSError as error:
            raise StoreFailedError(str(error)) from error
        with _own_errors():
            return cls(whole(Rdict(str(path), rocks_options(options or StoreOptions()), {})))

    @classmethod
    def open_reading(
        cls, path: Path, options: StoreOptions | None = None, *, with_gaps: bool = False
    ) -> Self:
        """Open a store without changing a file until :meth:`begin_writing`; create a missing one.

        Takes no lock. Errors as those of :meth:`open`. With ``with_gaps``, files of values may be
        missing: reading a value of such a file raises StoreCorruptError.
        """
        options = options or StoreOptions()
        if not (path / _CURRENT).exists():
            # Creating a new store here would lose the tables. Without them the folder is new.
            if any(next(path.glob(pattern), None) for pattern in _LASTING):
                raise StoreCorruptError(f"{path.name} has tables but no {_CURRENT}")
            return cls.open(path, options)
        with _own_errors():
            folder = ReadingFolder(path, options)
            store = cls(folder.database if with_gaps else whole(folder.database))
        store._reading = path, options, folder
        return store

    def begin_writing(self) -> None:
        """Take the lock and allow writes, as after :meth:`open`. No other thread may use the store.

        Errors as those of `open`; the store then stays open for reading.
        """
        if self._reading is None:
            return
        path, options, folder = self._reading
        with _own_errors():
            assert self._database is not None
            # These handles keep the database open, and with it the files of the temporary folder.
            self._passing_by = self._unverified = None
            self._database.close()
            folder.remove()
            try:
                self._use(Rdict(str(path), rocks_options(options), {}))
            except BaseException:
                folder = ReadingFolder(path, options)
                self._reading = path, options, folder
                self._use(folder.database)
                raise
        self._reading = None

    def _use(self, database: Rdict) -> None:
        self._database = database
        self._passing_by = passing_by(database)
        self._unverified = passing_by(database, verified=False)

    def suspend(self) -> None:
        """Close a store that failed, until `take_over`. May be repeated.

        Until then every call raises StoreFailedError, and open scans are ended.
        """
        with self._gate:
            self._suspended = True
            self._gate.wait_for(lambda: self._users == 0)
            database, self._database = self._database, None
            self._passing_by = self._unverified = None
            # An open iterator keeps the files of the failed store, and the reopened one could not
            # lock it.
            for scan in self._scans:
                scan.cut, scan.rows = True, None
            self._scans.clear()
        if database is not None:
            with suppress(Exception):  # the log has everything that could not be written
                database.close()
        self._stop_reading()

    def _stop_reading(self) -> None:
        reading, self._reading = self._reading, None
        if reading is not None:
            reading[2].remove()

    def take_over(self, other: "RocksStore") -> None:
        """Continue, after `suspend`, with the database of ``other``, which nobody else uses."""
        with self._gate:
            self._database, other._database = other._database, None
            self._passing_by, other._passing_by = other._passing_by, None
            self._unverified, other._unverified = other._unverified, None
            self._reading, other._reading = other._reading, None
            self._suspended = False

    @staticmethod
    def clone(path: Path, target: Path) -> None:
        """Copy a store that nobody has open; files that never change are linked.

        Where links are impossible, files are copied durably. Raises OSError.
        """
        target.mkdir(parents=True)
        for file in path.iterdir():
            if file.suffix in _LASTING_SUFFIXES:
                with suppress(OSError):
                    # Tables and blob files are never changed once written, so both stores may share
                    # them.
                    os.link(file, target / file.name)
                    continue
            if file.is_file() and file.name != "LOCK":
                shutil.copyfile(file, target / file.name)
                _sync(target / file.name)

    @staticmethod
    def repair(path: Path) -> None:
        """Make a damaged store openable: keep the sound tables and drop the others.

        Rows of dropped tables are missing, and older rows may appear instead. Values in blob files
        cannot be read (StoreCorruptError), and these files are lost when the store is opened for
        writing. Raises StoreError.
        """
        with _own_errors():
            Rdict.repair(str(path), rocks_options(StoreOptions()))

    def write(self, operations: Sequence[Operation]) -> None:
        """Write all operations, in order, as one atomic batch.

        Raises StoreStalledError (nothing was written), StoreFailedError or StoreCorruptError
        (it may have been: reopen).
        """
        batch = WriteBatch(raw_mode=True)
        actions: dict[str, Callable[..., None]] = {
            "put": batch.put,
            "delete": batch.delete,
            "delete_range": batch.delete_range,
        }
        for operation in operations:
            actions[operation[0]](*operation[1:])
        with self._writing, self._using() as database:
            database.write(batch, self._write_options)

    def get(self, key: bytes) -> bytes | None:
        """Return the value under `key`, or None. Raises StoreCorruptError or StoreFailedError."""
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the values under `keys`, None where there is none; one bad value fails all.

        Other threads run while it reads. Raises StoreCorruptError or StoreFailedError.
        """
        with self._using() as database:
            # The list form releases the interpreter lock and raises on corruption.
            found: list[bytes | None] = database.get(list(keys))  # type: ignore[assignment]
            return found

    def get_once(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """As `get_many`, but the values are not kept in the cache."""
        with self._using():
            assert self._passing_by is not None
            found: list[bytes | None] = self._passing_by.get(list(keys))  # type: ignore[assignment]
            return found

    def get_unverified(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """As `get_once`, without RocksDB's checksums: for values with their own.

        In a damaged file the result may be any value, None, or an error.
        """
        with self._using():
            assert self._unverified is not None
            found: list[bytes | None] = self._unverified.get(list(keys))  # type: ignore[assignment]
            return found

    def scan(self, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield (key, value) in key order from `start` up to but not including `stop`.

        Shows the store as it was when the scan began. Raises StoreCorruptError where a row cannot
        be read, and StoreClosedError when the store is closed meanwhile.
        """
        return self._scan(start, stop, lambda rows: (rows.key(), rows.value()))

    @contextmanager
    def view(self) -> Iterator["StoreView"]:
        """Yield a view of the store as it is now, for several scans by one thread at a time.

        While it is open, the store keeps the files that it shows.
        """
        scan = _Scan()
        with self._using() as database:
            scan.rows = database.iter()
            self._scans.add(scan)
        try:
            yield StoreView(self, scan)
        finally:
            with self._gate:
                self._scans.discard(scan)
                scan.rows = None

    def scan_keys(self, start: bytes, stop: bytes) -> Iterator[bytes]:
        """Yield the keys of `scan` without their values."""
        return self._scan(start, stop, lambda rows: rows.key())

    def flush(self) -> None:
        """Make everything written so far durable. Blocks; other threads run meanwhile.

        Raises StoreFailedError; what was written then still counts as not flushed.
        """
        with self._using() as database:
            database.flush(True)

    def rewrite(self, ranges: Sequence[tuple[bytes, bytes]], patience_s: float) -> None:
        """Rewrite all files that have keys of ``ranges``, so that they have current rows only.

        On return no file has anything that was overwritten or deleted there before the last
        `flush`. Scans that keep old files are ended after ``patience_s``. Blocks. Raises
        StoreFailedError when an old file remains, StoreCorruptError when one is damaged.
        """
        with self._rewriting, self._using() as database:
            rewriter = self._rewriter(database)
            rewriter.rewrite(ranges)
            self._wait_for_scans(patience_s)
            rewriter.wait_for_removals()

    def reclaim(self, *, pressing: bool = False) -> int:
        """Rewrite a few files that are mostly unneeded, or small and many; return their bytes.

        With ``pressing``, deleted rows first leave the tables, so that the unneeded bytes are
        known, and one file is rewritten at a time. Does nothing while `rewrite` runs. Blocks;
        errors as those of `rewrite`.
        """
        if not self._rewriting.acquire(blocking=False):
            return 0
        try:
            with self._using() as database:
                rewriter = self._rewriter(database)
                if not pressing:
                    return rewriter.reclaim()
                status = os.statvfs(database.path())
                return rewriter.press(status.f_bavail * status.f_frsize // 2)
        finally:
            self._rewriting.release()

    def _rewriter(self, database: Rdict) -> Rewriter:
        options = CompactOptions()
        options.set_bottommost_level_compaction(BottommostLevelCompaction.force_optimized())
        return Rewriter(
            database,
            lambda start, stop: database.compact_range(start, stop, options),
            lambda keys: self._put_again(database, keys),
            self._check_open,
        )

    def _put_again(self, database: Rdict, keys: Sequence[bytes]) -> None:
        for at in range(0, len(keys), _MOVED_TOGETHER):
            some = list(keys[at : at + _MOVED_TOGETHER])
            # Stalled: without this loop, a rewrite under load would fail and start again from its
            # beginning.
            while not self._put_some_again(database, some):
                time.sleep(_WAIT_STEP_S)
            self._check_open()
        self.flush()

    def _put_some_again(self, database: Rdict, keys: list[bytes]) -> bool:
        """Put the values of ``keys`` again where there are any; False while the store stalls."""
        batch = WriteBatch(raw_mode=True)
        with self._writing:  # what is read is still current when it is written
            values: list[bytes | None] = database.get(keys)  # type: ignore[assignment, arg-type]
            for key, value in zip(keys, values, strict=True):
                if value is not None:
                    batch.put(key, value)
            try:
                with _own_errors():
                    database.write(batch, self._write_options)
            except StoreStalledError:
                return False
        return True

    def _check_open(self) -> None:
        if self._closing:
            raise StoreClosedError("the store is being closed")
        if self._suspended:
            raise StoreFailedError(_REOPENING)

    def _wait_for_scans(self, patience_s: float) -> None:
        with self._gate:
            scans = list(self._scans)
        deadline = time.monotonic() + patience_s
        while scans and time.monotonic() < deadline:
            self._check_open()
            time.sleep(_WAIT_STEP_S)
            with self._gate:
                scans = [scan for scan in scans if scan in self._scans]
        for scan in scans:
            # Two fields: the thread of the scan sees why its iterator is gone.
            scan.cut = True
            scan.rows = None

    def owed_bytes(self, compaction_max: int) -> int:
        """Bytes waiting to be flushed, plus at most ``compaction_max`` waiting for compaction."""
        with self._using() as database:
            unflushed, compaction = (
                database.property_int_value(_PROPERTIES[name]) or 0
                for name in ("memtable_bytes", "pending_compaction_bytes")
            )
        return unflushed + min(compaction, compaction_max)

    @property
    def stats(self) -> dict[str, int]:
        """Sizes in bytes, counts, and whether writes are stopped (1) or slowed (rate above 0)."""
        with self._using() as database:
            return {
                name: database.property_int_value(property_name) or 0
                for name, property_name in _PROPERTIES.items()
            }

    def close(self) -> None:
        """Wait for running calls, end open scans and close the store. May be repeated."""
        with self._gate:
            self._closing = True
            self._gate.wait_for(lambda: self._users == 0)
            database, self._database = self._database, None
            self._passing_by = self._unverified = None  # They would keep the store open.
            for scan in self._scans:
                scan.rows = None  # An open iterator would keep the store's files locked.
            self._scans.clear()
        if database is not None:
            with _own_errors():
                database.close()
        self._stop_reading()

    def _scan(
        self, start: bytes, stop: bytes, read: Callable[[RdictIter], Value]
    ) -> Iterator[Value]:
        scan = _Scan()
        with self._using() as database:
            bounds = ReadOptions()
            bounds.set_iterate_upper_bound(stop)
            scan.rows = database.iter(bounds)
            scan.rows.seek(start)
            self._scans.add(scan)
        try:
            while chunk := self._next_rows(scan, read):
                yield from chunk
        finally:
            with self._gate:
                self._scans.discard(scan)
                scan.rows = None

    def seek(self, scan: "_Scan", start: bytes) -> None:
        """Move a view's scan."""
        with self._using():
            scan.open_rows().seek(start)

    def rows_below(self, scan: "_Scan", stop: bytes) -> list[tuple[bytes, bytes]]:
        """The next rows of a view's scan whose keys are below ``stop``."""

        def read(rows: RdictIter) -> tuple[bytes, bytes] | None:
            key: bytes = rows.key()
            return (key, rows.value()) if key < stop else None

        return self._next_rows(scan, read, _VIEW_BYTES)

    def _next_rows(
        self,
        scan: "_Scan",
        read: Callable[[RdictIter], Value | None],
        size_max: int = _SCAN_BYTES,
    ) -> list[Value]:
        with self._using():
            rows = scan.open_rows()
            chunk: list[Value] = []
            size = 0
            while rows.valid() and len(chunk) < _SCAN_ROWS and size < size_max:
                row = read(rows)
                if row is None:
                    break
                chunk.append(row)
                size += len(row[1]) if isinstance(row, tuple) else 0
                rows.next()
            # An iterator that meets a damaged block just ends; only its status has the error.
            rows.status()
            return chunk

    @contextmanager
    def _using(self) -> Iterator[Rdict]:
        with self._gate:
            database = self._database
            if self._suspended and not self._closing:
                raise StoreFailedError(_REOPENING)
            if self._closing or database is None:
                raise StoreClosedError("the store is closed")
            self._users += 1
        try:
            with _own_errors():
                yield database
        finally:
            with self._gate:
                self._users -= 1
                if self._users == 0:
                    self._gate.notify_all()


class _Scan:
    """The iterator of one scan; `RocksStore.close` can take it away."""

    def __init__(self) -> None:
        self.rows: RdictIter | None = None
        self.cut = False

    def open_rows(self) -> RdictIter:
        """The iterator. Raises StoreClosedError or StoreScanCutError if it was taken away."""
        if self.cut:
            raise StoreScanCutError("the scan kept files that had to go")
        if self.rows is None:
            raise StoreClosedError("the store was closed during a scan")
        return self.rows


class StoreView:
    """The store as it was when the view was made."""

    def __init__(self, store: RocksStore, scan: _Scan) -> None:
        self._store = store
        self._scan = scan

    def scan(self, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        """As `RocksStore.scan`; the next scan of the view ends this one."""
        self._store.seek(self._scan, start)
        while chunk := self._store.rows_below(self._scan, stop):
            yield from chunk
            # An iterator keeps the interpreter while it reads: let those take it who wait for it,
            # such as the event loop, which had to wait for 5 ms each time it woke up.
            time.sleep(0)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def _own_errors() -> Iterator[None]:
    try:
        yield
    except StoreError:
        raise
    except DbClosedError as error:
        raise StoreClosedError(str(error)) from error
    except Exception as error:
        # The binding raises plain Exception; only its text says what happened.
        raise _own_error(str(error)) from error


def _own_error(text: str) -> StoreError:
    if text.startswith(_STALL_PREFIX):
        return StoreStalledError(text)
    if text.startswith("Corruption:"):
        return StoreCorruptError(text)
    if text.startswith("IO error:") and f"{os.sep}LOCK" in text:
        return StoreLockedError(text)
    if text.startswith(_MISSING_PREFIX) and BLOB_SUFFIX in text:
        return StoreCorruptError(text)
    if text.startswith(_MISSING_PREFIX):
        return StoreMissingError(text)
    return StoreFailedError(text)
