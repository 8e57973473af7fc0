"""Checkpoints: flush the store, record what was flushed, and remove the log before it."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final

import structlog

from contrail_storage.core.entry_codec import EntryDamagedError, check_entry
from contrail_storage.disk.files import Files
from contrail_storage.disk.whole_steps import whole
from contrail_storage.replica.shard import Shard
from contrail_storage.store.checkpoint import Checkpoint, CheckpointStore, ShardMark
from contrail_storage.store.rocks_store import StoreError
from contrail_storage.upkeep.backoff import Backoff
from contrail_storage.wal.node_log import LogFailedError, LogRottenError, NodeLog

_LOOK_S: Final = 1.0
_RETRY_MAX_S: Final = 30.0
UntilWritten = Callable[[Mapping[int, int]], Awaitable[None]]
Shards = Callable[[], Mapping[int, Shard]]
_log = structlog.get_logger("contrail.checkpoint")


class DataLostError(Exception):
    """The data found at the start is not the data that was stored. The node must not serve it.

    ``store_is_whole``: only the log, or the proof itself, is damaged.
    """

    def __init__(self, reason: str, *, store_is_whole: bool = False) -> None:
        super().__init__(reason)
        self.store_is_whole = store_is_whole


def check_unapplied(log: NodeLog) -> None:
    """Check the recovered entries, all of which are to be applied.

    Raises DataLostError, or EntryVersionError for entries of another release.
    """
    for number, group in log.recovery.groups.items():
        for data, index, _ in group.entries:
            try:
                if data:
                    check_entry(data)
            except EntryDamagedError as error:
                reason = f"entry {index} of group {number} is damaged: {error}"
                raise DataLostError(reason, store_is_whole=True) from error


def marks_of(shards: Mapping[int, Shard]) -> dict[int, ShardMark]:
    """Return the marks of shards, which a record proves at the next start."""
    return {number: _mark(shard) for number, shard in shards.items() if shard.machine.exists}


def _mark(shard: Shard) -> ShardMark:
    counters = shard.machine.counters
    digest = counters.digest.to_bytes(4, "big")
    return ShardMark(shard.group, counters.last_seq, counters.messages, digest)


async def when_due(is_due: Callable[[], bool], checkpoint: Callable[[], Awaitable[None]]) -> None:
    """Take a checkpoint whenever it is due; check this every second."""
    backoff = Backoff(_LOOK_S, _RETRY_MAX_S)
    while True:
        await asyncio.sleep(max(_LOOK_S, backoff.pause_s))
        if is_due():
            try:
                await checkpoint()
                backoff.succeeded()
            except (OSError, StoreError, LogRottenError) as error:
                # The log is kept until a checkpoint succeeds. A full disk may recover by itself.
                if backoff.failed(str(error)):
                    _log.warning("checkpoint_failed", error=str(error))


class Checkpointer:
    """Takes checkpoints while the node runs, and compares with the last one at the start."""

    def __init__(self, store: CheckpointStore, files: Files, data_dir: Path) -> None:
        self._checkpoint = Checkpoint(store, data_dir / "checkpoints", files)
        self._lock = asyncio.Lock()

    def verify(
        self,
        log: NodeLog,
        applied: Mapping[int, int],
        shards: Mapping[int, Shard],
        without: frozenset[int] = frozenset(),
        is_replicated: Callable[[int], bool] = lambda group: False,
    ) -> frozenset[int]:
        """Raise DataLostError if the store or the log has less than a record proves.

        Groups ``without`` a whole state are left out. Returns the replicated groups of which the
        store has less; others have them. Also raises as `check_unapplied` does.
        """
        check_unapplied(log)
        bases = {number: group.base_index for number, group in log.recovery.groups.items()}
        marks = marks_of(shards)
        in_store = self._checkpoint.store_findings(applied, marks)
        less = {
            number
            for finding in in_store
            if finding.groups and all(map(is_replicated, finding.groups))
            for number in finding.groups
        }
        less |= {
            number
            for number, base in bases.items()
            if base > applied.get(number, 0) and is_replicated(number)
        }
        known = less | without
        findings = [
            finding
            for finding in self._checkpoint.verify(applied, marks, bases)
            if not finding.groups or not finding.groups <= known
        ]
        if findings:
            reasons = "; ".join(finding.reason for finding in findings)
            raise DataLostError(
                f"stored data is missing or changed: {reasons}",
                store_is_whole=not in_store,
            )
        return frozenset(less)

    async def run(
        self,
        log: NodeLog,
        shards: Shards,
        applied: Callable[[], Mapping[int, int]],
        until_written: UntilWritten,
    ) -> None:
        """Flush what is applied now, and remove the log before it.

        ``applied`` returns the indexes of ``shards``; ``until_written`` waits until the store
        has them.
        """
        # Apart from the work of the caller: the marks of 10,000 shards take 5 ms.
        await asyncio.sleep(0)
        async with self._lock:
            await self._take(log, shards, applied, until_written, None)

    async def cut(
        self,
        log: NodeLog,
        shards: Shards,
        applied: Callable[[], Mapping[int, int]],
        until_written: UntilWritten,
    ) -> None:
        """Flush, and remove every current segment of the log, without copying records forward.

        Raises LogFailedError when one of the segments is still needed.
        """
        async with self._lock:
            # The order is fixed: entries of the old segments must be applied and flushed before the
            # segments can go, and nothing may be appended to them any more.
            left, ends = await whole(log.rotate)
            await until_written(ends)
            await self._take(log, shards, applied, until_written, 0)
            # `drop_segments` keeps a segment with an entry that is not flushed. Its bytes would
            # outlive the erasure that asked for the cut, so this is a failure.
            if log.first_segment <= left:
                raise LogFailedError("an older segment of the log is still needed")

    async def _take(
        self,
        log: NodeLog,
        shards: Shards,
        applied: Callable[[], Mapping[int, int]],
        until_written: UntilWritten,
        keep_bytes: int | None,
    ) -> None:
        # Read under the lock: during the wait, the store may have been reopened.
        marks, noted = marks_of(shards()), dict(applied())
        # The record names these indexes and marks. If the store had less at the flush, the next
        # start would report lost data.
        await until_written(noted)
        await whole(lambda: self._checkpoint.take(noted, marks))
        # Last: an entry may leave the log only when the store has it durably.
        freed = await whole(lambda: log.drop_segments(noted, keep_bytes=keep_bytes))
        _log.info("checkpoint", applied=noted, log_bytes_freed=freed)
