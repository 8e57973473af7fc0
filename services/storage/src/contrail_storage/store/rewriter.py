"""Rewrites files of the store, so that overwritten and deleted bytes leave the disk.

Compactions rewrite tables. A blob file (`blob_files`) stays as long as a table refers to one of its
values. So the rewriter writes the current values again under their own keys. When the tables have
dropped the older references, RocksDB removes the file.
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
"""Bytes of the kind and the shard id, with which every key begins."""
_RECLAIMED_TOGETHER: Final = 4
_PRESSING_PART: Final = 8
"""If space is short, a file is rewritten when more than this fraction (1/8) is garbage."""
_SMALL_BYTES: Final = 4 << 20
_JOINED_TOGETHER: Final = 64
_RUNNING: Final = "rocksdb.num-running-compactions"
_LISTING: Final = "rocksdb.sstables"
_FILES: Final = ("*.sst", f"*{SUFFIX}")


class Database(Protocol):
    """The part of RocksDB that the rewriter uses."""

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
        """Change options while the database is open."""
        ...

    def path(self) -> str:
        """The folder."""
        ...


class Rewriter:
    """Rewrites files of one open database; one thread at a time.

    ``compact`` compacts a range including its last level, even if no other level has files.
    ``put_again`` writes the current values of keys again, and flushes them. ``check_open`` raises
    if the store is being closed.
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
        # Now the tables refer to current values only, so the store knows what is garbage.
        self._vacate([one for one in self._blob_files() if self._is_stale(one, ranges)])

    def reclaim(self) -> int:
        """Rewrite a few files that are mostly garbage, else small ones if there are many.

        Returns their bytes.
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
        """Rewrite the file with the most garbage whose current values fit; return its bytes.

        Tables are compacted first, if they fit, so that the store knows what is garbage.
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
        """Wait until files that the store no longer uses are removed. Raises StoreFailedError."""
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
        # Otherwise a compaction in the background could make a new file from old ones meanwhile.
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
            # A compaction that fails raises no error: only its files show it. A file with keys on
            # both sides of the piece, and none in it, is skipped. The next round asks for it by its
            # own keys.
            old = [one for one in self._database.live_files() if one["name"] in before]
            wanted = [(one["start_key"], one["end_key"]) for one in old if _overlaps(one, *piece)]
            if not wanted:
                return
        raise StoreFailedError(f"{len(wanted)} files were not rewritten")

    # Blob files ----------------------------------------------------------------------------------

    def _is_stale(self, file: BlobFile, ranges: Sequence[Range]) -> bool:
        """Whether a file has garbage, and a key of ``ranges``, to which the garbage may belong."""
        return bool(file.garbage_bytes) and any(
            start <= key < stop for key in self._keys_of(file) for start, stop in ranges
        )

    def _keys_of(self, file: BlobFile) -> set[bytes]:
        """All keys in a file; none if the file was removed meanwhile."""
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
        """Write the current values of ``files`` to other files, so that these can be removed."""
        for group in _groups(files):
            # All keys of the files, not only stale ones: a file is removed when no table refers to
            # it.
            keys = sorted(set().union(*map(self._keys_of, group)))
            self._put_again(keys)
            self._rewrite_tables(_spans(keys))
        left = {file.name for file in files} & {file.name for file in self._blob_files()}
        if left:
            raise StoreFailedError(f"{len(left)} files of values are still in use")

    # Waiting -------------------------------------------------------------------------------------

    def _unneeded_files(self) -> set[str]:
        """Names of files in the folder that the store does not use."""
        # The folder is listed first: a file that is created in between is not taken for unneeded.
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
    """The blob files that a database uses."""
    return listed_files(database.property_value(_LISTING) or "")


def _pieces(files: list[dict[str, Any]], ranges: Sequence[Range]) -> Iterator[Range]:
    """Cut ``ranges`` into pieces with files of about ``_PIECE_BYTES``.

    RocksDB's own compactions run between the pieces, so that writes do not stall.
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
    """Group ``files`` so that each group, of at least one file, has about ``_PIECE_BYTES``."""
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
    """The range of keys (ascending) of each shard; one range of all with many shards."""
    spans: list[Range] = []
    for key in keys:
        if spans and spans[-1][0][:_SHARD_BYTES] == key[:_SHARD_BYTES]:
            spans[-1] = spans[-1][0], key + b"\0"
        else:
            spans.append((key, key + b"\0"))
    return spans if len(spans) <= _SPANS_MAX else [(keys[0], keys[-1] + b"\0")]
