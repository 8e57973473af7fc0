"""The state of the log in memory: the end of each group, the next batch, and the segment files.

The name of a segment contains the number of its first WAL batch and the salt, so a damaged file can
be judged without reading anything inside it.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from contrail_storage.disk.files import Files
from contrail_storage.wal.codec import SALT_BYTES

OnDurable = Callable[[int, int], None]
SUFFIX: Final = ".wal"
_NAME: Final = re.compile(r"([0-9a-f]{12})-([0-9a-f]{16})-([0-9a-f]{16})\.wal")


class LogEnd(NamedTuple):
    """The end of a group's log after its first `position` records, with term and vote there."""

    position: int
    last_index: int
    last_term: int
    term: int
    voted_for: str | None


NOTHING: Final = LogEnd(0, 0, 0, 0, None)


@dataclass(slots=True)
class LogGroup:
    """The log of one group: its `end`, and the end of the part that is `durable`."""

    end: LogEnd = NOTHING
    durable: LogEnd = NOTHING
    on_durable: OnDurable | None = None


@dataclass(slots=True)
class LogBatch:
    """Records of one write; `highest` has the highest entry index of each group in them."""

    parts: list[bytes] = field(default_factory=list)
    highest: dict[int, int] = field(default_factory=dict)
    size: int = 0


@dataclass(slots=True)
class Segment:
    """One file of the log.

    `highest` has the highest entry index ever written per group: indexes can go back, as entries
    that were not committed may be replaced. The file is needed while one of them is above what
    RocksDB has flushed.
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


def new_segment(number: int, first_batch: int) -> Segment:
    """Return a segment that is not on disk yet, with a random salt."""
    return Segment(number, first_batch, os.urandom(SALT_BYTES))


def list_segments(files: Files, directory: Path) -> list[Segment]:
    """Return the segments in a directory in order of their numbers.

    Raises ValueError for a file that has the suffix of a segment and no valid name.
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
