"""Write-behind: the changes of entries wait a moment, so that several reach the store in one batch.

Waiting costs nothing: an applied entry is durable in the log and readable from memory. A batch
holds whole entries in order, with the applied index of the last one. Adjoining small blocks are
joined before they are written, so most messages reach the store in their final block.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from contrail_common.columns.blocks import BLOCK_BYTES_MAX, BLOCK_MESSAGES_MAX, Block
from contrail_storage.replica.store_writer import Job, StoreWriter, WriteJob, merge_job
from contrail_storage.store.block_store import BlockSpan, BlockStore

HOLD_S: Final = 0.05
"""Readers do not wait for it. After a crash, this much more of the log is applied again."""
SOON_S: Final = 0.005
"""About as long as several fsyncs of the log: enough for a batch of `WORTH_BYTES`."""
WORTH_BYTES: Final = 8 << 10
"""Smaller batches cost more than their entries: a batch costs as much as a whole publish."""
HOLD_BYTES_MAX: Final = 1 << 20
"""Each batch wakes the writer's thread and the event loop once, so under load several entries of
the largest size share one."""


class WriteBehind:
    """Holds the jobs of applied entries, in order, until a batch is worth writing.

    Runs on the event loop.
    """

    def __init__(
        self, writer: StoreWriter, blocks: BlockStore, on_written: Callable[[list[Job]], None]
    ) -> None:
        """``on_written`` is called with the jobs that :meth:`flush` wrote itself."""
        self._writer = writer
        self._blocks = blocks
        self._on_written = on_written
        # Jobs of applied entries in order, their bytes, and the timer of the next flush.
        self._held: list[WriteJob] = []
        self._bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        # When a batch of `WORTH_BYTES` does not wait for more; HOLD_S after the first job at most.
        self._soon = 0.0

    def put(self, job: WriteJob) -> None:
        """Add the job of the next entry."""
        self._held.append(job)
        self._bytes += job.bytes
        if self._bytes >= HOLD_BYTES_MAX:
            self.flush()
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(HOLD_S, self.flush)
            self._soon = loop.time() + SOON_S
        elif self._bytes >= WORTH_BYTES and asyncio.get_running_loop().time() >= self._soon:
            self.flush()

    def flush(self) -> None:
        """Write all held jobs: small ones in this call, others on the writer's thread."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        jobs, self._held, self._bytes = self._held, [], 0
        if not jobs:
            return
        # Before writing: a joined block is written once, its parts never.
        if len(jobs) > 1:
            self._join_blocks(jobs)
        if self._writer.write_now(jobs):
            self._on_written(list(jobs))
        else:
            # All of them to the thread, in order. None may be written here while others are queued.
            for job in jobs:
                self._writer.submit(job)

    def _join_blocks(self, jobs: list[WriteJob]) -> None:
        runs: dict[int, _Run] = {}
        for job in jobs:
            for shard_id, block, span in job.blocks:
                run = runs.get(shard_id)
                if run is None or not run.takes(span):
                    if run is not None:
                        self._join(shard_id, run)
                    run = runs[shard_id] = _Run()
                run.add(job, block, span)
        for shard_id, run in runs.items():
            self._join(shard_id, run)

    def _join(self, shard_id: int, run: "_Run") -> None:
        """Replace the blocks of ``run`` by one, unless one of them was removed meanwhile."""
        directory = self._blocks.directories.get(shard_id)
        if len(run.blocks) <= 1 or directory is None:
            return
        merge = merge_job(shard_id, run.blocks)
        # Removed by a later entry of the same batch. Then the parts are written, and removed again.
        if not directory.replace([block.base_seq for block in run.blocks], merge.span):
            return
        self._blocks.overlay_joined(shard_id, run.blocks, merge.merged)
        joined = {id(block) for block in run.blocks}
        for job in run.jobs:
            job.blocks = [each for each in job.blocks if id(each[1]) not in joined]
        # With the last job: a joined block must not be stored before all entries of its messages
        # are.
        run.jobs[-1].blocks.append((shard_id, merge.merged, merge.span))


class ReplayBehind(WriteBehind):
    """A `WriteBehind` without a timer, for replaying a log in a thread of its own."""

    def put(self, job: WriteJob) -> None:
        """Add the job of the next entry."""
        self._held.append(job)
        self._bytes += job.bytes
        if self._bytes >= HOLD_BYTES_MAX:
            self.flush()


class _Run:
    """Adjoining blocks of a shard that fit into one block, and the jobs that would write them."""

    def __init__(self) -> None:
        self.jobs: list[WriteJob] = []
        self.blocks: list[Block] = []
        self._end_seq = 0
        self._bytes = 0
        self._count = 0

    def takes(self, span: BlockSpan) -> bool:
        """Whether the block adjoins the run and fits."""
        return (
            span.base_seq == self._end_seq
            and self._bytes + span.bytes <= BLOCK_BYTES_MAX
            and self._count + span.count <= BLOCK_MESSAGES_MAX
        )

    def add(self, job: WriteJob, block: Block, span: BlockSpan) -> None:
        """Add one more block at the end."""
        self.jobs.append(job)
        self.blocks.append(block)
        self._end_seq = span.end_seq
        self._bytes += span.bytes
        self._count += span.count
