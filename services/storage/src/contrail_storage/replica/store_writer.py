"""Writing to the store: encode all waiting jobs, and write them in order as one batch.

The thread that applies entries writes small jobs at once. A thread of its own writes larger jobs
and all jobs that come after them.

Rows, blocks and the applied index of an entry are always in the same batch. So the store is the
exact state at its applied index, no matter when it was flushed.
"""

import asyncio
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final, NamedTuple, Protocol

import msgspec
import structlog

from contrail_common.columns.blocks import Block, BlockCodec, encode_block, join_blocks
from contrail_storage.core import key_layout as keys
from contrail_storage.core.chain import NO_CHAIN, Chain, encode_applied
from contrail_storage.core.results import Row
from contrail_storage.store.block_store import BlockSpan, index_row, span_of
from contrail_storage.store.directory_pages import PageRange, page_rows

_BATCH_BYTES: Final = 4 << 20
_NOW_BYTES_MAX: Final = 32 << 10
_STALL_WAIT_S: Final = 0.005
_STOP_GRACE_S: Final = 10.0
_log = structlog.get_logger("contrail.store")


class WritableStore(Protocol):
    """The part of the store that the writer uses."""

    def scan(self, start: bytes, stop: bytes) -> Iterable[tuple[bytes, bytes]]:
        """Rows as (key, value) in key order from ``start`` up to ``stop``."""
        ...

    def write(self, operations: Sequence[Row]) -> None:
        """Write all operations as one atomic batch."""
        ...


class GoneBlock(NamedTuple):
    """A block to remove from the store; ``paged`` when a page of the directory may list it."""

    shard_id: int
    base_seq: int
    paged: bool


class WriteJob(msgspec.Struct, eq=False):
    """The changes of one applied entry: rows, blocks with directory entries, removed blocks."""

    group: int
    index: int
    term: int
    rows: list[Row]
    blocks: list[tuple[int, Block, BlockSpan]] = []
    dropped: list[GoneBlock] = []
    bytes: int = 0
    chain: Chain = NO_CHAIN


@dataclass(slots=True, eq=False)
class MergeJob:
    """Adjoining small blocks of a shard that become one."""

    shard_id: int
    gone: list[GoneBlock]
    merged: Block
    span: BlockSpan


@dataclass(slots=True, eq=False)
class RewriteJob:
    """A block to remove, and the blocks that replace it."""

    shard_id: int
    gone: GoneBlock
    blocks: list[tuple[Block, BlockSpan]]
    written: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the blocks are in the store, or will never be (``lost``)."""
    lost: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of the blocks to write."""
        return sum(span.bytes for _, span in self.blocks)


@dataclass(slots=True, frozen=True)
class PageJob:
    """Blocks of a shard to list in one page, as the store has them when the job is written."""

    shard_id: int
    range: PageRange
    bytes: ClassVar[int] = 0


@dataclass(slots=True, eq=False)
class RowJob:
    """Rows of a shard that are derived from others, so that no entry has them."""

    shard_id: int
    rows: list[Row]
    written: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the rows are in the store, or will never be (``lost``)."""
    lost: bool = False
    bytes: ClassVar[int] = 0


Job = WriteJob | MergeJob | RewriteJob | PageJob | RowJob


def merge_job(shard_id: int, blocks: list[Block], paged_stop: int = 0) -> MergeJob:
    """The job that joins ``blocks`` (adjoining, ascending), paged below ``paged_stop``."""
    merged = join_blocks(blocks)
    # The merged block is stored under the key of the first one, so that one is not removed.
    bases = (block.base_seq for block in blocks[1:])
    gone = [GoneBlock(shard_id, base_seq, base_seq < paged_stop) for base_seq in bases]
    return MergeJob(shard_id, gone, merged, span_of(merged))


class StoreWriter:
    """Owns the writer thread. Callbacks run on it, and their owner hands them to the event loop.

    The "submitting thread" is the one that applies entries: the event loop, or the thread that
    reads a log back.
    """

    def __init__(
        self,
        store: WritableStore,
        stalled: type[Exception],
        on_written: Callable[[list[Job]], None],
        on_failure: Callable[[Exception], None],
        codec_of: Callable[[int], BlockCodec | None] = lambda shard_id: None,
        on_lost: Callable[[list[Job]], None] = lambda jobs: None,
    ) -> None:
        """``codec_of`` returns the codec that compresses a shard's blocks; any thread may call it.

        After ``on_failure`` only jobs of shards in memory are written, until :meth:`go_on`. The
        other jobs go to ``on_lost``.
        """
        self._store = store
        self._codec_of = codec_of
        self._stalled = stalled
        self._on_written = on_written
        self._on_failure = on_failure
        self._on_lost = on_lost
        # From the submitting thread to the writer thread; None ends it.
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self.failed = False
        """Whether a write failed: memory is ahead of the store. Set by either thread."""
        self.submitted = self.settled = 0
        """Numbers of jobs queued and of jobs reported back, ever. Submitting thread only."""
        # Monotonic time after which a stalled write fails; finite once `stop` is called.
        self._stall_until = math.inf
        self.batches = 0
        self.seconds = 0.0
        self.stalls = 0

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job; jobs are written in the order in which they are queued."""
        self.submitted += 1
        self._jobs.put(job)

    def settle(self, jobs: int) -> None:
        """Note that ``jobs`` queued jobs were reported as written or lost."""
        self.settled += jobs

    def go_on(self) -> None:
        """Write again after a failure. The store must have the lost jobs; none may be queued."""
        self.failed = False

    def write_now(self, jobs: Sequence[Job]) -> bool:
        """Write small jobs in the calling thread; False when they must be submitted instead.

        That is the case when other jobs are queued, the jobs are large, or the store stalls or has
        failed.
        """
        # The order of jobs must hold: nothing may overtake a queued job.
        if self.submitted != self.settled or self.failed or sum(map(_size, jobs)) > _NOW_BYTES_MAX:
            return False
        started = time.perf_counter()
        try:
            self._store.write(self._operations(jobs))
        except self._stalled:
            self.stalls += 1
            return False
        except Exception as error:
            self._fail(error)
            return False
        self._note(started)
        return True

    def stop(self) -> None:
        """Write what is queued, then end the thread; a stalled store gets a grace time."""
        self._stall_until = time.monotonic() + _STOP_GRACE_S
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        running = True
        while running:
            jobs, running = self._drain()
            if not jobs:
                continue
            if self.failed:
                self._spare(jobs)
                continue
            started = time.perf_counter()
            try:
                # In one batch where possible: a flush between batches is consistent too, because
                # each has its applied index.
                for part in _groups(jobs):
                    self._write(self._operations(part))
            except Exception as error:
                self._fail(error)
                self._spare(jobs)
                continue
            self._note(started)
            self._on_written(jobs)

    def _fail(self, error: Exception) -> None:
        self.failed = True
        _log.critical("store_write_failed", error=str(error))
        self._on_failure(error)

    def _spare(self, jobs: Sequence[Job]) -> None:
        """Write only the jobs of shards in memory, because the store has failed."""
        spared = [job for job in jobs if _is_in_memory(job)]
        if spared:
            self._write(self._operations(spared))
            self._on_written(spared)
        lost = [job for job in jobs if not _is_in_memory(job)]
        if lost:
            self._on_lost(lost)

    def _note(self, started: float) -> None:
        self.batches += 1
        self.seconds += time.perf_counter() - started

    def _drain(self) -> tuple[list[Job], bool]:
        job = self._jobs.get()
        jobs: list[Job] = []
        size = 0
        while job is not None:
            jobs.append(job)
            size += _size(job)
            if size >= _BATCH_BYTES:
                return jobs, True
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return jobs, True
        return jobs, False

    def _write(self, operations: list[Row]) -> None:
        while True:
            try:
                self._store.write(operations)
            except self._stalled:
                # The store is stalled and has written nothing, so the same batch is tried again.
                self.stalls += 1
                # Only when the node stops. While it runs, a stall ends by itself, and requests are
                # held back.
                if time.monotonic() > self._stall_until:
                    raise
                time.sleep(_STALL_WAIT_S)
            else:
                return

    def _operations(self, jobs: Sequence[Job]) -> list[Row]:
        operations: list[Row] = []
        applied: dict[int, WriteJob] = {}
        for job in jobs:
            if isinstance(job, PageJob):
                operations += self._page_rows(job)
                continue
            if isinstance(job, RowJob):
                operations += job.rows
                continue
            if isinstance(job, MergeJob):
                for gone in job.gone:
                    operations += _block_deletes(gone)
                operations += self._block_puts(job.shard_id, job.merged, job.span, 0)
                continue
            if isinstance(job, RewriteJob):
                operations += _block_deletes(job.gone)
                for block, span in job.blocks:
                    operations += self._block_puts(job.shard_id, block, span, 0)
                continue
            for shard_id, block, span in job.blocks:
                operations += self._block_puts(shard_id, block, span, job.index)
            for gone in job.dropped:
                operations += _block_deletes(gone)
            # After the blocks of the same job, in the order of entries: a row of a dropped shard
            # removes its blocks as well.
            operations += job.rows
            applied[job.group] = job
        # Once per batch, with the last index: rows and index are one atomic write.
        for group, job in applied.items():
            value = encode_applied(job.index, job.term, job.chain)
            operations.append(("put", keys.shard_key(keys.APPLIED, group), value))
        return operations

    def _block_puts(self, shard_id: int, block: Block, span: BlockSpan, index: int) -> list[Row]:
        body = encode_block(block, index, self._codec_of(shard_id))
        return [
            ("put", keys.large_key(keys.BLOCK, shard_id, block.base_seq), body),
            ("put", keys.large_key(keys.BLOCK_INDEX, shard_id, block.base_seq), index_row(span)),
        ]

    def _page_rows(self, job: PageJob) -> list[Row]:
        start, stop = job.range
        pages, rows = (
            self._store.scan(
                keys.large_key(kind, job.shard_id, start), keys.large_key(kind, job.shard_id, stop)
            )
            for kind in (keys.BLOCK_PAGE, keys.BLOCK_INDEX)
        )
        return page_rows(job.shard_id, job.range, pages, rows)


def _is_in_memory(job: Job) -> bool:
    return keys.is_in_memory(job.group if isinstance(job, WriteJob) else job.shard_id)


def _size(job: Job) -> int:
    return job.span.bytes if isinstance(job, MergeJob) else job.bytes


def _block_deletes(gone: GoneBlock) -> list[Row]:
    index_key = keys.large_key(keys.BLOCK_INDEX, gone.shard_id, gone.base_seq)
    return [
        ("delete", keys.large_key(keys.BLOCK, gone.shard_id, gone.base_seq)),
        # A page may list the block. Without an empty row, a start would expect it.
        ("put", index_key, b"") if gone.paged else ("delete", index_key),
    ]


def _groups(jobs: Sequence[Job]) -> Iterator[Sequence[Job]]:
    """Split ``jobs`` into batches: a page lists what the jobs before it have written."""
    begun = 0
    for at, job in enumerate(jobs):
        if isinstance(job, PageJob):
            yield from (part for part in (jobs[begun:at], jobs[at : at + 1]) if part)
            begun = at + 1
    if begun < len(jobs):
        yield jobs[begun:]
