"""Segment files of the log: their names, and what the log keeps in memory about each.

The name contains the number of the first WAL batch and the salt, so a damaged file can be judged
without reading anything inside it.
"""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from contrail_storage.disk.files import Files
from contrail_storage.wal.codec import SALT_BYTES

SUFFIX: Final = ".wal"
_NAME: Final = re.compile(r"([0-9a-f]{12})-([0-9a-f]{16})-([0-9a-f]{16})\.wal")


@dataclass(slots=True)
class Segment:
    """One file of the log.

    `highest` has the highest entry index written per group. The file is needed while one of them is
    above what RocksDB has flushed.
    """

    number: int
    first_batch: int
    salt: bytes
    size: int = 0
    highest: dict[int, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The file's name inside the log's directory."""
        return f"{self.number:012x}-{self.first_batch:016x}-{self.salt.hex()}{SUFFIX}"

    def note(self, group: int, index: int) -> None:
        """Note that the segment has entry `index` of a group."""
        if index > self.highest.get(group, 0):
            self.highest[group] = index


def new_segment(number: int, first_batch: int) -> Segment:
    """Return a segment that is not on disk yet, with a random salt."""
    return Segment(number, first_batch, os.urandom(SALT_BYTES))


def list_segments(files: Files, directory: Path) -> list[Segment]:
    """Return the segments in a directory in order of their numbers.

    Raises ValueError for a name that ends like a segment's but is not one.
    """
    found = []
    for name in files.list_names(directory):
        if not name.endswith(SUFFIX):
            continue
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"{name!r} is not a segment of the log")
        number, first_batch, salt = match.groups()
        found.append(Segment(int(number, 16), int(first_batch, 16), bytes.fromhex(salt)))
    return sorted(found, key=lambda segment: segment.number)
