"""Reclaiming the space of deleted messages: drop dead blocks, and rewrite mostly dead ones.

Each replica places messages in blocks on its own, so nothing of this is logged. Rewrites go through
the store's writer like merges, in order with everything else. They follow the changed pages of
deleted sequences, so a stream without deletions costs nothing.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import structlog

from contrail_common.columns.blocks import Block
from contrail_common.texts import Mask
from contrail_storage.core.deleted import PAGE
from contrail_storage.core.stream.strip_dead import between_live, strip_dead
from contrail_storage.replica.applier import Applier
from contrail_storage.replica.changes import take
from contrail_storage.replica.shard import Mend, Shard, in_memory_first, not_mended
from contrail_storage.replica.store_writer import RewriteJob, RowJob
from contrail_storage.store.block_store import (
    UNREADABLE,
    BlockSpan,
    BlockStore,
)
from contrail_storage.store.rocks_store import StoreClosedError, StoreFailedError
from contrail_storage.store.windows import WINDOW_BITS
from contrail_storage.upkeep.backoff import Backoff

_PAUSE_BLOCKS: Final = 64
_RETRY_MAX_S: Final = 60.0
_PACKED_TOGETHER: Final = 16
"""Pages of names that are written in one step."""
_WRITTEN_TOGETHER: Final = 32
"""Rewritten blocks that wait in memory for the writer, at most."""
_log = structlog.get_logger("contrail.compact")


@dataclass(slots=True, frozen=True)
class CompactorBounds:
    """Seconds between checks of deletions, and bytes per second to read for them."""

    tick_s: float = 0.5
    bytes_s: int = 16 << 20


@dataclass(slots=True)
class CompactCounts:
    """Counters since the start of the node."""

    dropped: int = 0
    rewritten: int = 0
    freed_bytes: int = 0


class _Alive(NamedTuple):
    """A block of the directory, and a mask of its live messages."""

    span: BlockSpan
    live: Mask

    @property
    def messages(self) -> int:
        return int(np.count_nonzero(self.live))


class Compactor:
    """Reclaims the space of deleted messages in all shards, in the background."""

    def __init__(
        self,
        is_listed: Callable[[int], bool],
        blocks: BlockStore,
        applier: Applier,
        bounds: CompactorBounds,
        mend: Mend = not_mended,
    ) -> None:
        """``is_listed`` returns whether a listed stream has a shard with that id."""
        self._mend = mend
        self.counts = CompactCounts()
        self._is_listed = is_listed
        self._blocks = blocks
        self._applier = applier
        self._bounds = bounds
        self._ticking = asyncio.Lock()

    async def run(self) -> None:
        """Reclaim space until cancelled."""
        backoff = Backoff(self._bounds.tick_s, _RETRY_MAX_S)
        while True:
            await asyncio.sleep(self._bounds.tick_s)
            try:
                await self.tick()
            except StoreClosedError:
                return
            except StoreFailedError as error:
                # Expected while the disk fails; it ends when the store is reopened.
                if backoff.failed(str(error)):
                    _log.warning("compaction_put_off", error=str(error))
                await asyncio.sleep(backoff.pause_s)
            except Exception as error:
                # The node still serves, so this must not end it. The store is just too large.
                if backoff.failed(repr(error)):
                    _log.exception("compaction_failed")
                await asyncio.sleep(backoff.pause_s)
            else:
                backoff.succeeded()

    async def tick(self) -> None:
        """Check the pages with deletions since the last tick. Raises StoreFailedError."""
        changed, shards = self._applier.changes.deletions, self._applier.shards
        async with self._ticking:
            ids = [one for one in take(changed) if one in shards and self._is_listed(one)]
            left = in_memory_first([shards[one] for one in ids])  # a failing disk spares these
            left.reverse()
            try:
                while left:
                    shard = left[-1]
                    machine = shard.machine
                    if machine.exists and not shard.damaged and machine.deleted.touched:
                        await self._compact(shard)
                    left.pop()
            finally:
                changed.update(shard.machine.shard_id for shard in left)

    async def _compact(self, shard: Shard) -> None:
        touched = shard.machine.deleted.touched
        pages, seq, looked = sorted(touched), 0, 0
        for checked, page in enumerate(pages):
            # Before the page is read: a deletion from now on adds it again.
            touched.discard(page)
            seq = max(seq, page * PAGE)
            while True:
                looked += 1
                if looked % _PAUSE_BLOCKS == 0:
                    await asyncio.sleep(0)
                found = self._find(shard, seq)
                if found is None or found.span.base_seq >= (page + 1) * PAGE:
                    break
                settled = found.span.end_seq <= self._settled_below(shard)
                try:
                    made = settled and await self._reclaim(shard, found)
                except StoreFailedError:
                    # Nothing may be forgotten: no later deletion need touch these pages again.
                    touched.update(pages[checked:])
                    raise
                if not made:
                    # To be checked again: when messages or blocks change, or if they just have.
                    touched.add(page)
                    if settled:
                        self._applier.changes.deletions.add(shard.machine.shard_id)
                    break
                seq = found.span.end_seq
            if not shard.machine.exists or shard.damaged:
                return
            self._drop_windows(shard, page)

    def _drop_windows(self, shard: Shard, page: int) -> None:
        """Remove the rows of windows without messages, which would stay until the head passes."""
        low_seq, end_seq = page * PAGE, (page + 1) * PAGE
        if shard.machine.deleted.count(low_seq, end_seq - 1) < PAGE:
            return
        directory = self._blocks.directory(shard.machine.shard_id)
        position = directory.position(low_seq)
        if position < len(directory) and directory.base_seq(position) >= end_seq:
            for window in range(low_seq >> WINDOW_BITS, end_seq >> WINDOW_BITS):
                self._applier.drop_window(shard.machine.shard_id, window)

    def _find(self, shard: Shard, seq: int) -> _Alive | None:
        """Return the first block that ends after ``seq``, with its live messages."""
        machine = shard.machine
        if not machine.exists or shard.damaged:
            return None
        directory = self._blocks.directory(machine.shard_id)
        position = directory.position(seq)
        if position >= len(directory):
            return None
        span = directory.span(position)
        return _Alive(span, machine.live_mask(span.base_seq, span.count))

    def _settled_below(self, shard: Shard) -> int:
        """The sequence up to which blocks are applied, wait for no merge, and are not the last.

        The last block stays whole, so that the directory ends where the stream does.
        """
        directory = self._blocks.directory(shard.machine.shard_id)
        runs = [run.base_seqs[0] for run in shard.small_runs.values()]
        last = directory.span(len(directory) - 1).base_seq
        return min(last, shard.applied_seq + 1, *runs)

    async def _reclaim(self, shard: Shard, found: _Alive) -> bool:
        """Drop or cut a block if that is worth it; False when it has changed meanwhile."""
        span, shard_id = found.span, shard.machine.shard_id
        live = found.messages
        if not live:
            if self._applier.rewrite(shard_id, span, []) is not None:
                self.counts.dropped += 1
                self.counts.freed_bytes += span.bytes
            return True
        known = self._emptied(shard_id, span)
        # Half of what has content must be dead. Each rewrite then halves it at least, so a message
        # is rewritten about eleven times at most.
        if 2 * (span.count - live - known) < span.count - known:
            return True
        block = await self._load(shard, span)
        if block is None:
            return False
        left = await asyncio.to_thread(between_live, block, found.live)
        self._replace(shard, found, block, left)
        await asyncio.sleep(span.bytes / self._bounds.bytes_s)
        return True

    def _emptied(self, shard_id: int, span: BlockSpan) -> int:
        directory = self._blocks.directory(shard_id)
        return directory.emptied(directory.position(span.base_seq))

    async def _load(self, shard: Shard, span: BlockSpan) -> Block | None:
        """Return the block, or None if it was replaced. None also if it was unreadable.

        Without another member that has it, the shard is damaged.
        """
        shard_id = shard.machine.shard_id
        block = self._blocks.recall(shard_id, span.base_seq)
        # A block that is not written yet is in memory only; the store would not find it.
        if block is None or block.count != span.count:
            try:
                [block] = await asyncio.to_thread(self._blocks.load_many, shard_id, [span.base_seq])
            except UNREADABLE as error:
                stands = shard.machine.exists and self._blocks.directory(shard_id).holds(span)
                if stands and not await self._mend(shard, span.base_seq):
                    shard.damaged = f"block {span.base_seq}: {error}"
                    shard.notify()
                return None
        return block if block.base_seq == span.base_seq and block.count == span.count else None

    def _replace(
        self, shard: Shard, found: _Alive, block: Block, left: list[Block]
    ) -> RewriteJob | None:
        """Replace a block by what is left of it, if it still exists and gets smaller.

        A block of the same size has no content to remove; this is noted, see ``emptied``.
        """
        shard_id, span = shard.machine.shard_id, found.span
        if not shard.machine.exists:
            return None
        directory = self._blocks.directory(shard_id)
        # The dead messages were empty before: a rewrite would change nothing, every time.
        if left[0].count == block.count and left[0].stored_bytes == block.stored_bytes:
            directory.note_emptied(span, span.count - found.messages)
            return None
        job = self._applier.rewrite(shard_id, span, left)
        for _, part in job.blocks if job is not None else ():
            at = part.base_seq - span.base_seq
            live = int(np.count_nonzero(found.live[at : at + part.count]))
            directory.note_emptied(part, part.count - live)
        if job is not None:
            self.counts.rewritten += 1
            self.counts.freed_bytes += max(span.bytes - job.bytes, 0)
        return job

    # Everything at once --------------------------------------------------------------------------

    async def empty(self, shard: Shard) -> bool:
        """Remove the content of deleted messages from all blocks of the shard, and their names.

        Blocks keep their sequences, including blocks that wait for a merge. Returns when all is
        written: True, or False when a block is unreadable.
        """
        jobs: list[RewriteJob | RowJob] = []
        while shard.machine.exists:
            packed = self._applier.pack_names(shard.machine.shard_id, _PACKED_TOGETHER)
            if packed is None:
                break
            jobs.append(packed)
            if len(jobs) == _WRITTEN_TOGETHER:
                await _all_written(jobs)
            await asyncio.sleep(0)
        seq = checked = 0
        while (found := self._find(shard, seq)) is not None:
            checked += 1
            if checked % _PAUSE_BLOCKS == 0:
                await asyncio.sleep(0)
            seq = found.span.base_seq
            gone = found.span.count - found.messages
            # Every dead message of the block is known to be empty.
            if gone == self._emptied(shard.machine.shard_id, found.span):
                seq = found.span.end_seq
                continue
            block = await self._load(shard, found.span)
            if block is None:
                await asyncio.sleep(0)
                continue
            fresh = await asyncio.to_thread(strip_dead, block, found.live)
            job = self._replace(shard, found, block, [fresh])
            if job is not None:
                jobs.append(job)
            if len(jobs) == _WRITTEN_TOGETHER:
                await _all_written(jobs)
        await _all_written(jobs)
        return not shard.damaged


async def _all_written(jobs: list[RewriteJob | RowJob]) -> None:
    for job in jobs:
        await job.written.wait()
        if job.lost:
            raise StoreFailedError("the store failed before rewritten blocks were stored")
    jobs.clear()
