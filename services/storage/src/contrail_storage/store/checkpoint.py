"""The checkpoint record: proof, kept outside RocksDB, of the state that RocksDB must still have.

A database that lost files can open without an error and show an older state. So before each
explicit flush a numbered row goes into RocksDB, and after the flush the same record goes into a
small synced file. At open the newest file must find its row unchanged in RocksDB, the applied
indexes at or above the recorded ones, and a write-ahead log that continues where they end.
Contents of blocks are the scrub's concern.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Protocol

import msgspec

from contrail_storage.core import key_layout as keys
from contrail_storage.disk.files import Files
from contrail_storage.disk.node_file import NodeFileDamagedError, read_node_file, write_node_file

_KIND: Final = b"K"
_PREFIX: Final = "checkpoint-"
_FILES_KEPT: Final = 2
# One row more than files: a crash between flush and file leaves a row that no file speaks of.
_ROWS_KEPT: Final = 3

_PutOrDelete = tuple[Literal["put"], bytes, bytes] | tuple[Literal["delete"], bytes]


class ShardMark(msgspec.Struct, frozen=True, array_like=True):
    """What a shard holds: the group it belongs to, its last sequence, message count and digest."""

    group: int
    last_sequence: int
    count: int
    digest: bytes


class CheckpointRecord(msgspec.Struct, frozen=True, array_like=True):
    """Record `number`: applied index per group, mark per shard, all of one moment."""

    number: int
    applied: dict[int, int]
    shards: dict[int, ShardMark]


@dataclass(frozen=True, slots=True)
class Finding:
    """Missing data: the memberships and shards that cannot be trusted."""

    reason: str
    groups: frozenset[int]
    shards: frozenset[int]


class CheckpointStore(Protocol):
    """What is needed of the store."""

    def write(self, operations: Sequence[_PutOrDelete]) -> None:
        """Write all operations as one atomic batch."""

    def get(self, key: bytes) -> bytes | None:
        """Return the value under `key`, or None."""

    def flush(self) -> None:
        """Make everything written so far durable."""


class Checkpoint:
    """Keeper of the second record. Its methods block; one thread at a time."""

    def __init__(self, store: CheckpointStore, directory: Path, files: Files | None = None) -> None:
        self._store = store
        self._directory = directory
        self._files = files or Files()
        self._files.make_directory(directory)
        self._damaged: list[str] = []
        self._record = self._newest()
        self._number = self._next_number()

    @property
    def record(self) -> CheckpointRecord | None:
        """The newest readable record, None on a node that never took one."""
        return self._record

    def take(self, applied: Mapping[int, int], shards: Mapping[int, ShardMark]) -> CheckpointRecord:
        """Write the row, flush RocksDB, write the file; return what is now proven.

        `applied` and `shards` are what has been *written* to the store by now (later writes may
        go on meanwhile). On return the log is not needed below `applied` any more. Raises the
        store's errors or OSError; then the log must be kept.
        """
        record = CheckpointRecord(self._number, dict(applied), dict(shards))
        payload = msgspec.msgpack.encode(record)
        self._store.write(
            [
                ("put", _row_key(record.number), payload),
                ("delete", _row_key(max(record.number - _ROWS_KEPT, 0))),
            ]
        )
        self._number += 1
        self._store.flush()
        write_node_file(self._files, self._path(record.number), payload)
        self._record = record
        for number in self._numbers()[:-_FILES_KEPT]:
            self._files.unlink(self._path(number))
        return record

    def verify(
        self,
        applied: Mapping[int, int],
        shards: Mapping[int, ShardMark],
        log_bases: Mapping[int, int],
    ) -> list[Finding]:
        """Compare RocksDB, as it was opened, and the log with the newest record.

        `applied` and `shards` are what RocksDB holds. `log_bases` are the bases of the groups as
        the log recovered them with `keep_from=applied`: such a base is the applied index itself,
        unless the log begins after it or ends before it.
        """
        findings = [_finding(f"{name} is damaged", self._record) for name in self._damaged]
        findings += self._log_findings(applied, log_bases)
        return findings + self.store_findings(applied, shards)

    def store_findings(
        self, applied: Mapping[int, int], shards: Mapping[int, ShardMark]
    ) -> list[Finding]:
        """What RocksDB, as it was opened, lacks of what the newest record proves."""
        findings: list[Finding] = []
        record = self._record
        if record is None:
            return findings
        row = self._store.get(_row_key(record.number))
        if row != msgspec.msgpack.encode(record):
            what = "missing" if row is None else "changed"
            findings.append(_finding(f"row {record.number} is {what} in RocksDB", record))
        for group, index in record.applied.items():
            if applied.get(group, 0) < index:
                held = applied.get(group, 0)
                findings.append(
                    _group_finding(
                        f"group {group} is applied up to {held}, but was at {index}", record, group
                    )
                )
        findings += _shard_findings(record, applied, shards)
        return findings

    def _log_findings(
        self, applied: Mapping[int, int], log_bases: Mapping[int, int]
    ) -> list[Finding]:
        findings = []
        for group in sorted({*applied, *log_bases}):
            index, base = applied.get(group, 0), log_bases.get(group, 0)
            if base != index:
                where = "begins after" if base > index else "ends before"
                reason = f"the log of group {group} {where} applied index {index}, at {base}"
                findings.append(_group_finding(reason, self._record, group))
        return findings

    def _newest(self) -> CheckpointRecord | None:
        for number in reversed(self._numbers()):
            path = self._path(number)
            try:
                return msgspec.msgpack.decode(
                    read_node_file(self._files, path), type=CheckpointRecord
                )
            except (NodeFileDamagedError, msgspec.MsgspecError):
                self._damaged.append(path.name)
        return None

    def _next_number(self) -> int:
        number = max(self._numbers(), default=0) + 1
        while self._store.get(_row_key(number)) is not None:
            number += 1
        return number

    def _numbers(self) -> list[int]:
        numbers = []
        for name in self._files.list_names(self._directory):
            with suppress(ValueError):
                numbers.append(int(name.removeprefix(_PREFIX), 16))
        return sorted(numbers)

    def _path(self, number: int) -> Path:
        return self._directory / f"{_PREFIX}{number:016x}"


def newest_record(files: Files, directory: Path) -> CheckpointRecord | None:
    """The newest record of a folder that can be read; changes nothing."""
    try:
        names = files.list_names(directory)
    except FileNotFoundError:
        return None
    for name in sorted(names, reverse=True):
        with suppress(NodeFileDamagedError, msgspec.MsgspecError):
            return msgspec.msgpack.decode(
                read_node_file(files, directory / name), type=CheckpointRecord
            )
    return None


def _row_key(number: int) -> bytes:
    return keys.large_key(_KIND, 0, number)


def _finding(reason: str, record: CheckpointRecord | None) -> Finding:
    if record is None:
        return Finding(reason, frozenset(), frozenset())
    return Finding(reason, frozenset(record.applied), frozenset(record.shards))


def _group_finding(reason: str, record: CheckpointRecord | None, group: int) -> Finding:
    marks = record.shards if record else {}
    shards = frozenset(number for number, mark in marks.items() if mark.group == group)
    return Finding(reason, frozenset({group}), shards)


def _shard_findings(
    record: CheckpointRecord, applied: Mapping[int, int], shards: Mapping[int, ShardMark]
) -> list[Finding]:
    findings = []
    for number, mark in record.shards.items():
        moved_on = applied.get(mark.group, 0) > record.applied.get(mark.group, 0)
        held = shards.get(number)
        if not (_may_follow(mark, held) if moved_on else held == mark):
            reason = f"shard {number} has {held}, but had {mark}"
            findings.append(Finding(reason, frozenset({mark.group}), frozenset({number})))
    return findings


def _may_follow(mark: ShardMark, held: ShardMark | None) -> bool:
    """Whether later entries can have led from `mark` to `held`; a missing shard was deleted."""
    return held is None or held.last_sequence >= mark.last_sequence
