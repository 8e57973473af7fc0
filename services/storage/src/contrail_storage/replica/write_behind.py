"""Write-behind: what entries change waits a moment, so that several reach the store as one batch.

Nothing depends on the moment. What is applied is durable in the log and readable from memory, and
a batch holds whole entries in order, with the applied index of the last. Adjoining small blocks
are joined on the way, so most messages reach the store in their final block.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from contrail_common.columns.blocks import BLOCK_BYTES_MAX, BLOCK_MESSAGES_MAX, Block
from contrail_storage.replica.store_writer import Job, StoreWriter, WriteJob, merge_job
from contrail_storage.store.block_store import BlockSpan, BlockStore

HOLD_S: Final = 0.005
"""As long as several syncs of the log take; readers don't wait for it."""
HOLD_BYTES_MAX: Final = BLOCK_BYTES_MAX


class WriteBehind:
    """Holds the jobs of applied entries, in order, until a batch is worth writing. On the loop."""

    def __init__(
        self, writer: StoreWriter, blocks: BlockStore, on_written: Callable[[list[Job]], None]
    ) -> None:
        """``on_written`` is told of what :meth:`flush` wrote itself."""
        self._writer = writer
        self._blocks = blocks
        self._on_written = on_written
        self._held: list[WriteJob] = []
        self._bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def put(self, job: WriteJob) -> None:
        """Take the job of the next entry."""
        self._held.append(job)
        self._bytes += job.bytes
        if self._bytes >= HOLD_BYTES_MAX:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(HOLD_S, self.flush)

    def flush(self) -> None:
        """Write what is held: small jobs here, others by the writer's thread."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        jobs, self._held, self._bytes = self._held, [], 0
        if not jobs:
            return
        if len(jobs) > 1:
            self._join_blocks(jobs)
        if self._writer.write_now(jobs):
            self._on_written(list(jobs))
        else:
            for job in jobs:
                self._writer.submit(job)

    def _join_blocks(self, jobs: list[WriteJob]) -> None:
        runs: dict[int, _Run] = {}
        for job in jobs:
            for number, block, span in job.blocks:
                run = runs.get(number)
                if run is None or not run.takes(span):
                    if run is not None:
                        self._join(number, run)
                    run = runs[number] = _Run()
                run.add(job, block, span)
        for number, run in runs.items():
            self._join(number, run)

    def _join(self, number: int, run: "_Run") -> None:
        """Have the blocks of ``run`` written as one, if none of them was removed meanwhile."""
        directory = self._blocks.directories.get(number)
        if len(run.blocks) <= 1 or directory is None:
            return
        merge = merge_job(number, run.blocks)
        if not directory.replace([block.base_seq for block in run.blocks], merge.span):
            return
        self._blocks.overlay_joined(number, run.blocks, merge.merged)
        for job in run.jobs:
            job.blocks = [each for each in job.blocks if each[1] not in run]
        run.jobs[-1].blocks.append((number, merge.merged, merge.span))


class ReplayBehind(WriteBehind):
    """The same while a log is read back in a thread of its own, where no timer is needed."""

    def put(self, job: WriteJob) -> None:
        """Take the job of the next entry."""
        self._held.append(job)
        self._bytes += job.bytes
        if self._bytes >= HOLD_BYTES_MAX:
            self.flush()


class _Run:
    """Adjoining blocks of a shard that fit into one, and the jobs that were to write them."""

    def __init__(self) -> None:
        self.jobs: list[WriteJob] = []
        self.blocks: list[Block] = []
        self._end_seq = 0
        self._bytes = 0
        self._count = 0

    def __contains__(self, block: Block) -> bool:
        return any(block is one for one in self.blocks)

    def takes(self, span: BlockSpan) -> bool:
        """Whether a block may follow."""
        return (
            span.base_seq == self._end_seq
            and self._bytes + span.bytes <= BLOCK_BYTES_MAX
            and self._count + span.count <= BLOCK_MESSAGES_MAX
        )

    def add(self, job: WriteJob, block: Block, span: BlockSpan) -> None:
        """One more block at the end."""
        self.jobs.append(job)
        self.blocks.append(block)
        self._end_seq = span.end_seq
        self._bytes += span.bytes
        self._count += span.count
