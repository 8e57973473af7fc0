"""Checkpoints of a node: flush the store, prove it with the second record, drop the log below."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import structlog

from contrail_storage.core.stream_machine import StreamMachine
from contrail_storage.store.checkpoint import Checkpoint, CheckpointStore, ShardMark
from contrail_storage.wal.files import Files
from contrail_storage.wal.node_log import NodeLog

_log = structlog.get_logger("contrail.checkpoint")


class DataLostError(Exception):
    """What was found at open is not what was stored: the node must not serve it."""


class Checkpointer:
    """Takes checkpoints while the node runs and compares with the last one at open."""

    def __init__(self, store: CheckpointStore, files: Files, data_dir: Path, group: int) -> None:
        self._checkpoint = Checkpoint(store, data_dir / "checkpoints", files)
        self._group = group
        self._lock = asyncio.Lock()

    def verify(
        self, log: NodeLog, applied: Mapping[int, int], machines: Mapping[int, StreamMachine]
    ) -> None:
        """Raise DataLostError when the store or the log holds less than was proven before."""
        bases = {number: group.base_index for number, group in log.recovery.groups.items()}
        findings = self._checkpoint.verify(applied, self._marks(machines), bases)
        if findings:
            reasons = "; ".join(finding.reason for finding in findings)
            raise DataLostError(f"stored data is missing or changed: {reasons}")

    def _marks(self, machines: Mapping[int, StreamMachine]) -> dict[int, ShardMark]:
        return {
            number: ShardMark(
                self._group,
                machine.counters.last_seq,
                machine.counters.messages,
                machine.counters.digest.to_bytes(4, "big"),
            )
            for number, machine in machines.items()
            if machine.exists
        }

    async def run(
        self,
        log: NodeLog,
        machines: Mapping[int, StreamMachine],
        applied: Mapping[int, int],
        until_written: Callable[[Mapping[int, int]], Awaitable[None]],
    ) -> None:
        """Flush what is applied now and drop the log below it.

        ``applied`` are the indexes that ``machines`` stand at; ``until_written`` waits until
        the store holds them.
        """
        async with self._lock:
            marks, noted = self._marks(machines), dict(applied)
            await until_written(noted)
            await asyncio.to_thread(self._checkpoint.take, noted, marks)
            freed = await asyncio.to_thread(log.drop_segments, noted)
            _log.info("checkpoint", applied=noted, log_bytes_freed=freed)
