"""Rewriting files of the store, so that overwritten and deleted bytes are gone from the disk.

Compactions rewrite tables. A blob file (`blob_files`) stays as long as a table refers to one of its
values. So its current values are written again under their own keys; when the tables have dropped
the older references, RocksDB removes the file.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from contrail_storage.store.blob_files import SUFFIX, BlobFile, listed_files, records_of
from contrail_storage.store.store_errors import StoreCorruptError, StoreFailedError

Range = tuple[bytes, bytes]

_WAIT_S: Final = 60.0
_STEP_S: Final = 0.01
_PIECE_BYTES: Final = 256 << 20
_ROUNDS: Final = 3
_SPANS_MAX: Final = 32
_SHARD_BYTES: Final = 5
"""Keys begin with their kind and the number of their shard."""
_RECLAIMED_TOGETHER: Final = 4
_PRESSING_PART: Final = 8
"""When space is short, a file is rewritten if this fraction (1/8) of it is garbage."""
_SMALL_BYTES: Final = 4 << 20
_JOINED_TOGETHER: Final = 64
_RUNNING: Final = "rocksdb.num-running-compactions"
_LISTING: Final = "rocksdb.sstables"
_FILES: Final = ("*.sst", f"*{SUFFIX}")


class Database(Protocol):
    """What is needed of RocksDB."""

    def live_files(self) -> list[dict[str, Any]]:
        """The tables in use: name, size, level, first and last key."""
        ...

    def property_value(self, name: str) -> str | None:
        """A property as text."""
        ...

    def property_int_value(self, name: str) -> int | None:
        """A property as a number."""
        ...

    def set_options(self, options: dict[str, str]) -> None:
        """Change options of the open database."""
        ...

    def path(self) -> str:
        """The folder."""
        ...


class Rewriter:
    """Rewrites files of one open database; one thread at a time.

    ``compact`` compacts a range including its last level, even if only that has files;
    ``put_again`` writes the current values of keys again and flushes them; ``check_open`` raises
    when the store is closing.
    """

    def __init__(
        self,
        database: Database,
        compact: Callable[[bytes, bytes], None],
        put_again: Callable[[Sequence[bytes]], None],
        check_open: Callable[[], None],
    ) -> None:
        self._database = database
        self._compact = compact
        self._put_again = put_again
        self._check_open = check_open

    def rewrite(self, ranges: Sequence[Range]) -> None:
        """Rewrite all files that have keys of ``ranges`` and may have stale values of them."""
        self._rewrite_tables(ranges)
        # The tables name current values alone now, so the store knows what nothing needs.
        self._vacate([one for one in self._blob_files() if self._is_stale(one, ranges)])

    def reclaim(self) -> int:
        """Rewrite a few files that are mostly garbage, else small ones if there are many.

        Answers their bytes.
        """
        files = self._blob_files()
        mostly_garbage = [one for one in files if 2 * one.garbage_bytes > one.record_bytes]
        small = [one for one in files if one.size < _SMALL_BYTES]
        chosen = mostly_garbage[:_RECLAIMED_TOGETHER]
        if not chosen and len(small) >= _JOINED_TOGETHER:
            chosen = small[:_JOINED_TOGETHER]
        self._vacate(chosen)
        return sum(one.size for one in chosen)

    def press(self, free_bytes: int) -> int:
        """Rewrite the file that frees most, if its current values fit; return its bytes.

        Tables are compacted first, where they fit, so that the store knows the unneeded bytes.
        """
        if sum(one["size"] for one in self._database.live_files()) < free_bytes:
            self._compact(b"", b"\xff" * 32)
        files = [
            one
            for one in self._blob_files()
            if _PRESSING_PART * one.garbage_bytes > one.record_bytes
            and one.record_bytes - one.garbage_bytes < free_bytes
        ]
        chosen = sorted(files, key=lambda one: one.garbage_bytes)[-1:]
        self._vacate(chosen)
        return sum(one.size for one in chosen)

    def wait_for_removals(self) -> None:
        """Wait until the files are gone that the store does not use any more."""
        left = self._unneeded_files()

        def gone() -> bool:
            left.intersection_update(self._unneeded_files())
            return not left

        self._wait_until(gone, "removal of files")

    def _blob_files(self) -> list[BlobFile]:
        return blob_files_of(self._database)

    # Tables --------------------------------------------------------------------------------------

    def _rewrite_tables(self, ranges: Sequence[Range]) -> None:
        for piece in _pieces(self._database.live_files(), ranges):
            self._rewrite_piece(piece)

    def _rewrite_piece(self, piece: Range) -> None:
        # Without compactions of its own no file can come that was made of older ones.
        self._database.set_options({"disable_auto_compactions": "true"})
        try:
            self._wait_until(lambda: not self._database.property_int_value(_RUNNING), "compaction")
            self._compact_piece(piece)
        finally:
            self._database.set_options({"disable_auto_compactions": "false"})

    def _compact_piece(self, piece: Range) -> None:
        before = {one["name"] for one in self._database.live_files()}
        wanted = [piece]
        for _ in range(_ROUNDS):
            for start, stop in wanted:
                self._compact(start, stop)
            # A failed compaction says nothing: only its files tell. A file that has keys on both
            # sides of a piece and none in it is passed over, and then asked for by its own keys.
            old = [one for one in self._database.live_files() if one["name"] in before]
            wanted = [(one["start_key"], one["end_key"]) for one in old if _overlaps(one, *piece)]
            if not wanted:
                return
        raise StoreFailedError(f"{len(wanted)} files were not rewritten")

    # Values apart --------------------------------------------------------------------------------

    def _is_stale(self, file: BlobFile, ranges: Sequence[Range]) -> bool:
        """Whether some value in a file is not needed, and some, maybe that, is of ``ranges``."""
        return bool(file.garbage_bytes) and any(
            start <= key < stop for key in self._keys_of(file) for start, stop in ranges
        )

    def _keys_of(self, file: BlobFile) -> set[bytes]:
        """All keys in a file; none when it has gone meanwhile."""
        try:
            records = list(records_of(Path(self._database.path()) / file.name))
        except FileNotFoundError:
            return set()
        except OSError as error:
            raise StoreFailedError(str(error)) from error
        if records[-1:] and records[-1].offset + records[-1].size != file.records_end:
            raise StoreCorruptError(f"records of {file.name} do not read back")
        return {record.key for record in records}

    def _vacate(self, files: Sequence[BlobFile]) -> None:
        """Take what is current out of ``files``, so that they go."""
        for group in _groups(files):
            keys = sorted(set().union(*map(self._keys_of, group)))
            self._put_again(keys)
            self._rewrite_tables(_spans(keys))
        left = {file.name for file in files} & {file.name for file in self._blob_files()}
        if left:
            raise StoreFailedError(f"{len(left)} files of values are still in use")

    # Waiting -------------------------------------------------------------------------------------

    def _unneeded_files(self) -> set[str]:
        """Files on the disk that the store does not use."""
        # Listed before they are asked for: what is made in between is not unneeded.
        folder = Path(self._database.path())
        found = {path.name for pattern in _FILES for path in folder.glob(pattern)}
        tables = {Path(one["name"]).name for one in self._database.live_files()}
        return found - tables - {file.name for file in self._blob_files()}

    def _wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _WAIT_S
        while not condition():
            self._check_open()
            if time.monotonic() > deadline:
                raise StoreFailedError(f"{what}: not completed within {_WAIT_S} s")
            time.sleep(_STEP_S)


def blob_files_of(database: Database) -> list[BlobFile]:
    """Files of values that a database uses."""
    return listed_files(database.property_value(_LISTING) or "")


def _pieces(files: list[dict[str, Any]], ranges: Sequence[Range]) -> Iterator[Range]:
    """``ranges`` in pieces of not much more than ``_PIECE_BYTES`` of files.

    RocksDB's own compactions have their turn in between, so that writes need not wait.
    """
    for start, stop in ranges:
        at, size = start, 0
        for one in sorted(files, key=lambda file: file["start_key"]):
            if not _overlaps(one, start, stop):
                continue
            if size >= _PIECE_BYTES and one["start_key"] > at:
                yield at, one["start_key"]
                at, size = one["start_key"], 0
            size += one["size"]
        yield at, stop


def _overlaps(file: dict[str, Any], start: bytes, stop: bytes) -> bool:
    return bool(file["start_key"] < stop and file["end_key"] >= start)


def _groups(files: Iterable[BlobFile]) -> Iterator[list[BlobFile]]:
    """``files`` by so many at a time as make ``_PIECE_BYTES``, at least one."""
    group: list[BlobFile] = []
    size = 0
    for file in files:
        group.append(file)
        size += file.size
        if size >= _PIECE_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _spans(keys: Sequence[bytes]) -> list[Range]:
    """The range of the keys (ascending) of each shard; one of all where there are many shards."""
    spans: list[Range] = []
    for key in keys:
        if spans and spans[-1][0][:_SHARD_BYTES] == key[:_SHARD_BYTES]:
            spans[-1] = spans[-1][0], key + b"\0"
        else:
            spans.append((key, key + b"\0"))
    return spans if len(spans) <= _SPANS_MAX else [(keys[0], keys[-1] + b"\0")]
