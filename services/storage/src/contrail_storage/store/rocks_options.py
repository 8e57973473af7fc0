"""RocksDB's options, handles for special reads, and a folder that cannot be written."""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rocksdict import (
    AccessType,
    BlockBasedOptions,
    Cache,
    DBCompressionType,
    Options,
    Rdict,
    ReadOptions,
)

from contrail_storage.store.rewriter import blob_files_of
from contrail_storage.store.store_errors import StoreCorruptError, StoreMissingError

MIB: Final = 1 << 20
_FAMILY: Final = "default"
_BINDING_FILE: Final = "rocksdict-config.json"
_BINDING_ERROR: Final = "(os error "


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Bounds of memory, files and background work; the size from which values go to blob files."""

    write_buffer_bytes: int = 64 * MIB
    write_buffers: int = 4
    block_cache_bytes: int = 64 * MIB
    target_file_bytes: int = 64 * MIB
    max_open_files: int = 512
    background_jobs: int = 2
    blob_bytes_min: int = 32 << 10


class ReadingFolder:
    """A `database` that is open for reading, even if its folder cannot be written.

    The binding writes a small file of its own into the folder, even to open it for reading. If that
    fails, the binding opens a temporary folder with links to the files.
    """

    def __init__(self, path: Path, options: StoreOptions) -> None:
        self._links: tempfile.TemporaryDirectory[str] | None = None
        try:
            self.database = self._open(path, options)
        except Exception as error:
            if _BINDING_ERROR not in str(error):
                raise
            self._links = tempfile.TemporaryDirectory(prefix="contrail-store-")
            for file in path.iterdir():
                if file.name != _BINDING_FILE:
                    os.symlink(file.absolute(), Path(self._links.name, file.name))
            self.database = self._open(Path(self._links.name), options)

    @staticmethod
    def _open(path: Path, options: StoreOptions) -> Rdict:
        access = AccessType.read_only()
        return Rdict(str(path), rocks_options(options), {}, access_type=access)

    def remove(self) -> None:
        """Remove the temporary folder, if there is one. The database must be closed."""
        if self._links is not None:
            self._links.cleanup()


def whole(database: Rdict) -> Rdict:
    """Check that the blob files of a database exist with their full size; return the database.

    RocksDB checks its tables when it opens, but blob files only when it reads them. Raises
    StoreMissingError or StoreCorruptError, with the database closed.
    """
    folder = Path(database.path())
    try:
        for file in blob_files_of(database):
            size = (folder / file.name).stat().st_size
            if size != file.size:
                raise StoreCorruptError(f"{file.name} has {size} bytes instead of {file.size}")
    except FileNotFoundError as error:
        database.close()
        raise StoreMissingError(str(error)) from error
    except StoreCorruptError:
        database.close()
        raise
    return database


def passing_by(database: Rdict, *, verified: bool = True) -> Rdict:
    """A handle whose reads bypass the cache and, unless ``verified``, the checksums.

    RocksDB ignores the options of a read if it has several keys, so the options are set on a
    handle. An open handle keeps the store open.
    """
    handle = database.get_column_family(_FAMILY)
    options = ReadOptions()
    options.fill_cache(False)  # type: ignore[call-arg]  # the stub lacks the argument
    # Checksums of blobs are computed without hardware support in the builds that we use.
    options.set_verify_checksums(verified)
    handle.set_read_options(options)
    return handle


def rocks_options(options: StoreOptions) -> Options:
    """The options with which RocksDB is opened."""
    cache = Cache(options.block_cache_bytes)
    table = BlockBasedOptions()
    table.set_block_cache(cache)
    table.set_block_size(16 * 1024)
    table.set_bloom_filter(10, False)
    # Indexes and filters count in the bound of the cache. Otherwise memory grows with the data.
    table.set_cache_index_and_filter_blocks(True)
    table.set_pin_l0_filter_and_index_blocks_in_cache(True)
    rocks = Options(raw_mode=True)
    rocks.create_if_missing(True)
    rocks.set_block_based_table_factory(table)
    # A damaged table must refuse the start, and not show older rows.
    rocks.set_paranoid_checks(True)
    rocks.set_write_buffer_size(options.write_buffer_bytes)
    rocks.set_max_write_buffer_number(options.write_buffers)
    rocks.set_target_file_size_base(options.target_file_bytes)
    rocks.set_level_compaction_dynamic_level_bytes(True)
    rocks.set_max_background_jobs(options.background_jobs)
    rocks.set_max_open_files(options.max_open_files)
    # Written out during a flush, not all at its end, where the log's sync would wait for it.
    rocks.set_bytes_per_sync(MIB)
    rocks.set_keep_log_file_num(2)
    rocks.set_max_log_file_size(4 * MIB)
    # A flush writes a value to a blob file once; compactions only rewrite the references.
    rocks.set_enable_blob_files(True)
    rocks.set_min_blob_size(options.blob_bytes_min)
    # Blocks are already compressed, or encrypted, which cannot be compressed.
    rocks.set_compression_type(DBCompressionType.none())
    return rocks
