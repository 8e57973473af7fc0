"""The checkpoint record: a proof, stored outside RocksDB, of the state that RocksDB must have.

A database that lost files can open without an error and show an older state. So before each
explicit flush, a numbered row is written to RocksDB. After the flush, the same record is written to
a small synced file. A start takes the newest file and checks three things: RocksDB has the same
row, its applied indexes are not below the recorded ones, and the log continues where they end. The
contents of blocks are checked by the scrub.
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
# One row more than files: a crash between flush and file leaves a row without a file.
_ROWS_KEPT: Final = 3

_PutOrDelete = tuple[Literal["put"], bytes, bytes] | tuple[Literal["delete"], bytes]


class ShardMark(msgspec.Struct, frozen=True, array_like=True):
    """The content of a shard in short: its group, last sequence, number of messages and digest."""

    group: int
    last_sequence: int
    count: int
    digest: bytes


class CheckpointRecord(msgspec.Struct, frozen=True, array_like=True):
    """A record: the applied index of each group and the mark of each shard at one moment."""

    number: int
    applied: dict[int, int]
    shards: dict[int, ShardMark]


@dataclass(frozen=True, slots=True)
class Finding:
    """A difference from the record, and the groups and shards that are affected by it."""

    reason: str
    groups: frozenset[int]
    shards: frozenset[int]


class CheckpointStore(Protocol):
    """The part of the store that checkpoints use."""

    def write(self, operations: Sequence[_PutOrDelete]) -> None:
        """Write all operations as one atomic batch."""

    def get(self, key: bytes) -> bytes | None:
        """Return the value under `key`, or None."""

    def flush(self) -> None:
        """Make everything written so far durable."""


class Checkpoint:
    """Writes the records and compares with them. Methods block; one thread at a time."""

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
        """The newest readable record; None before the first checkpoint."""
        return self._record

    def take(self, applied: Mapping[int, int], shards: Mapping[int, ShardMark]) -> CheckpointRecord:
        """Write the row, flush RocksDB and write the file; return the record.

        `applied` and `shards` describe what was already *written* to the store. Later writes may
        happen during the call. On return, the log is not needed up to `applied`. Raises the store's
        errors or OSError; then the log must be kept.
        """
        record = CheckpointRecord(self._number, dict(applied), dict(shards))
        payload = msgspec.msgpack.encode(record)
        self._store.write(
            [
                ("put", _row_key(record.number), payload),
                ("delete", _row_key(max(record.number - _ROWS_KEPT, 0))),
            ]
        )
        # Even if the flush fails: the row may be in the store, and the next record must not reuse
        # its number with other content.
        self._number += 1
        self._store.flush()
        write_node_file(self._files, self._path(record.number), payload)
        self._record = record
        # Two files: if the newest one is damaged, the older one still proves most of the data.
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

        `applied` and `shards` describe the content of RocksDB. `log_bases` has the base of each
        group, recovered from the log with `keep_from=applied`. A base differs from the applied
        index only if the log begins after that index or ends before it.
        """
        return self._log_findings(applied, log_bases) + self.store_findings(applied, shards)

    def store_findings(
        self, applied: Mapping[int, int], shards: Mapping[int, ShardMark]
    ) -> list[Finding]:
        """The parts of the newest record that RocksDB, as it was opened, does not have."""
        findings = [_finding(f"{name} is damaged", self._record) for name in self._damaged]
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
            # Without the entries after the applied index, acknowledged messages are missing. If the
            # log begins later, entries between the two are missing.
            if base != index:
                where = "begins after" if base > index else "ends before"
                reason = f"the log of group {group} {where} applied index {index}, at {base}"
                findings.append(_group_finding(reason, self._record, group))
        return findings

    def _newest(self) -> CheckpointRecord | None:
        for number in reversed(self._numbers()):
            path = self._path(number)
            try:
                payload = read_node_file(self._files, path)
            except NodeFileDamagedError:
                # A store with the row has everything that was written before it.
                payload = self._store.get(_row_key(number)) or b""
            try:
                return msgspec.msgpack.decode(payload, type=CheckpointRecord)
            except msgspec.MsgspecError:
                self._damaged.append(path.name)
        return None

    def _next_number(self) -> int:
        number = max(self._numbers(), default=0) + 1
        # Rows without a file, of checkpoints that did not complete.
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
    """Return the newest readable record of a folder; None without one. Changes nothing."""
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
        # The flushes that RocksDB makes by itself may have saved later entries than the record has.
        # Then only the last sequence is sure: it never decreases.
        moved_on = applied.get(mark.group, 0) > record.applied.get(mark.group, 0)
        held = shards.get(number)
        if not (_may_follow(mark, held) if moved_on else held == mark):
            reason = f"shard {number} has {held}, but had {mark}"
            findings.append(Finding(reason, frozenset({mark.group}), frozenset({number})))
    return findings


def _may_follow(mark: ShardMark, held: ShardMark | None) -> bool:
    """Whether later entries may have led from `mark` to `held` (None: the stream was removed)."""
    return held is None or held.last_sequence >= mark.last_sequence
