"""A reader for blob files, in which RocksDB stores large values. It works without the store.

The store itself does not say which of these files have a key, and cannot read a value when the
table that referred to it is lost. The layout is version 1 of RocksDB's blob log
(``db/blob/blob_log_format.h``), little-endian:

    file   = magic u32, version u32, 22 bytes | records | footer of 32 bytes
    record = key size u64, value size u64, expiration u64, header crc u32, crc u32 | key | value

A crc is a masked crc32c. The header crc covers the first 24 bytes, the other one key and value.
"""

import re
import struct
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import BinaryIO, Final

from crc32c import crc32c

SUFFIX: Final = ".blob"
_MAGIC: Final = 0x248F37
_VERSION: Final = 1
_START: Final = struct.Struct("<II")
_START_BYTES: Final = 30
_FOOTER_BYTES: Final = 32
_RECORD: Final = struct.Struct("<QQQII")
_CHECKED_BYTES: Final = 24
_KEY_BYTES_MAX: Final = 4_096
_MASK_DELTA: Final = 0xA282EAD8
_U32: Final = 0xFFFFFFFF
_LISTED: Final = re.compile(
    r"^blob_file_number: (\d+) total_blob_count: \d+ total_blob_bytes: (\d+) "
    r".*garbage_blob_bytes: (\d+)$",
    re.MULTILINE,
)


@dataclass(slots=True, frozen=True)
class BlobFile:
    """A file in use: bytes of all its records, and of records that are garbage."""

    name: str
    record_bytes: int
    garbage_bytes: int

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self.records_end + _FOOTER_BYTES

    @property
    def records_end(self) -> int:
        """Offset of the end of the last record."""
        return _START_BYTES + self.record_bytes


@dataclass(slots=True, frozen=True)
class BlobRecord:
    """Where a file has the value of ``key``: offset and size in bytes."""

    key: bytes
    offset: int
    size: int


def listed_files(text: str) -> list[BlobFile]:
    """The files in RocksDB's property ``rocksdb.sstables``, which lists them after the tables."""
    return [
        BlobFile(f"{int(number):06d}{SUFFIX}", int(total), int(garbage))
        for number, total, garbage in _LISTED.findall(text)
    ]


def records_of(path: Path) -> Iterator[BlobRecord]:
    """Yield the records of a file in order, up to its end or to the first damaged record.

    Raises OSError.
    """
    # Unbuffered: only the heads and keys are read, and the values between them are skipped.
    with path.open("rb", buffering=0) as file:
        size = path.stat().st_size
        if file.read(_START.size) != _START.pack(_MAGIC, _VERSION):
            return
        offset = _START_BYTES
        while (record := _record_at(file, offset, size)) is not None:
            yield record
            offset = record.offset + record.size


def _record_at(file: BinaryIO, offset: int, size: int) -> BlobRecord | None:
    file.seek(offset)
    head = file.read(_RECORD.size)
    if len(head) < _RECORD.size:
        return None
    key_size, value_size, _, head_crc, _ = _RECORD.unpack(head)
    value_offset = offset + _RECORD.size + key_size
    sound = head_crc == _masked(crc32c(head[:_CHECKED_BYTES])) and key_size <= _KEY_BYTES_MAX
    # A file that was not closed has no footer, and may end in the middle of a record.
    if not sound or value_offset + value_size > size:
        return None
    return BlobRecord(file.read(key_size), value_offset, value_size)


def _masked(crc: int) -> int:
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & _U32


class StrayBlobs:
    """All values in the blob files of a folder, also values that no table refers to.

    It is for folders with lost tables. The index of keys takes about 300 bytes for each value, and
    is built at the first use.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._keys: list[bytes] = []
        self._found: dict[bytes, list[tuple[str, BlobRecord]]] | None = None

    def keys(self, prefix: bytes) -> list[bytes]:
        """Keys that begin with ``prefix``, ascending."""
        self._index()
        start = bisect_left(self._keys, prefix)
        return [*takewhile(lambda key: key.startswith(prefix), islice(self._keys, start, None))]

    def values(self, key: bytes) -> Iterator[bytes]:
        """Yield all values of ``key`` that are still in a file, newest file first.

        They are not checked: a value may be damaged, or replaced or deleted since.
        """
        for name, record in self._index().get(key, ()):
            with (self._folder / name).open("rb") as file:
                file.seek(record.offset)
                yield file.read(record.size)

    def _index(self) -> dict[bytes, list[tuple[str, BlobRecord]]]:
        if self._found is None:
            self._found = {}
            # Numbers of files ascend, and values are put again only while they are current. So the
            # newest file that has a key has its newest value.
            for path in sorted(self._folder.glob(f"*{SUFFIX}"), reverse=True):
                for record in records_of(path):
                    self._found.setdefault(record.key, []).append((path.name, record))
            self._keys = sorted(self._found)
        return self._found
