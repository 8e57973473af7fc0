"""The state of the log in memory: the end of each group, the next batch, and the segment files.

The name of a segment contains the number of its first WAL batch and the salt, so a damaged file can
be judged without reading anything inside it.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from contrail_storage.disk.files import Files
from contrail_storage.wal.codec import SALT_BYTES, RecordKind
from contrail_storage.wal.spans import Change, GroupSpans

RESTORING: Final = 1
"""Flag of a member that lacks what it acknowledged; see `contrail_replicator.messages`."""
OnDurable = Callable[[int, int], None]
SUFFIX: Final = ".wal"
_NAME: Final = re.compile(r"([0-9a-f]{12})-([0-9a-f]{16})-([0-9a-f]{16})\.wal")


class LogEnd(msgspec.Struct, frozen=True, gc=False):
    """The end of a group's log after its first `position` records.

    With term, vote and the member's flags there (see :class:`~contrail_storage.wal.codec.Record`).
    """

    position: int
    last_index: int
    last_term: int
    term: int
    voted_for: str | None
    flags: int


NOTHING: Final = LogEnd(0, 0, 0, 0, None, 0)


@dataclass(slots=True)
class LogGroup:
    """The log of one group: its `end`, and the end and the `spans` of the part that is `durable`.

    `followed` groups have other members, which read the tail of the log. The entries after
    `held_index` are kept for one that fetches the state there.
    """

    end: LogEnd = NOTHING
    durable: LogEnd = NOTHING
    spans: GroupSpans = field(default_factory=GroupSpans)
    on_durable: OnDurable | None = None
    followed: bool = False
    held_index: int | None = None
    ended: bool = False


class LogBatch(msgspec.Struct, eq=False):
    """Records of one write: `count` of them, and the `changes` by group, in order."""

    parts: list[bytes] = []
    changes: dict[int, list[Change]] = {}
    size: int = 0
    count: int = 0

    def add(self, group: int, kind: RecordKind, index: int, term: int) -> None:
        """Note the record that follows, in addition to its `parts`."""
        changes = self.changes.get(group)
        if changes is None:
            changes = self.changes[group] = []
        before = changes[-1] if changes else None
        follows = before is not None and before.last == index - 1 and before.term == term
        if before is not None and follows and kind is before.kind is RecordKind.ENTRY:
            before.last = index
        else:
            changes.append(Change(kind, index, term, index, self.count))
        self.count += 1


@dataclass(slots=True)
class Segment:
    """One file of the log, which `readers` calls of `NodeLog.read` are reading."""

    number: int
    first_batch: int
    salt: bytes
    size: int = 0
    readers: int = 0

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
