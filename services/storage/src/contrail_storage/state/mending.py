"""A block that cannot be read is replaced by what another member of its group has of it.

Members divide the same messages into blocks in their own way. So a member fetches all blocks with
the sequences of its own, and makes one of them that has exactly these sequences. What it gets has
to prove itself: each block has the checksum with which the other member stored it, and subjects,
sizes and times have to be those that this member knows of its live messages.

What is deleted here stays so: nothing of a deleted message is taken, whatever the other one has.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec
import numpy as np
import structlog

from contrail_common.columns.blocks import (
    Block,
    BlockCorruptError,
    blanks,
    decode_block,
    join_blocks,
)
from contrail_common.errors import ApiError
from contrail_common.texts import Mask
from contrail_storage.core import key_layout as keys
from contrail_storage.core.chain import entry_of
from contrail_storage.core.stream.strip_dead import strip_dead
from contrail_storage.replica.applier import Applier
from contrail_storage.replica.shard import Shard
from contrail_storage.state.fetching import Fetching
from contrail_storage.state.messages import OpenBlocks
from contrail_storage.state.rows import BrokenStateError
from contrail_storage.store.block_codecs import BLOCK_CODECS
from contrail_storage.store.block_store import BlockSpan, BlockStore
from contrail_storage.store.store_errors import StoreError
from contrail_storage.store.windows import WINDOW_BITS, read_rows

_TRIES: Final = 3
_AGAIN_S: Final = 0.2
_PATIENCE_S: Final = 10.0
_REFUSED: Final = (
    ApiError,
    BlockCorruptError,
    BrokenStateError,
    StoreError,
    msgspec.DecodeError,
)
_log = structlog.get_logger("contrail.state")


@dataclass(slots=True)
class MendCounts:
    """For metrics."""

    mended: int = 0
    failed: int = 0


class _Given(NamedTuple):
    """What another member has of the sequences of a block."""

    block: Block
    missing: Mask
    """The sequences that it does not have."""
    strange: Mask
    """The sequences whose messages are not those of this member."""


class Mending:
    """Replaces blocks that cannot be read, one at a time. Used on the event loop."""

    def __init__(
        self,
        member: str,
        blocks: BlockStore,
        applier: Applier,
        fetching: Fetching,
        until_applied: Callable[[int, int], Awaitable[None]],
        counts: MendCounts,
    ) -> None:
        """``until_applied`` waits until this node has applied an entry of a group (ApiError)."""
        self.counts = counts
        self._member = member
        self._blocks = blocks
        self._applier = applier
        self._fetching = fetching
        self._until_applied = until_applied
        self._turn = asyncio.Lock()

    async def mend(self, shard: Shard, base_seq: int, peers: Sequence[str]) -> bool:
        """Replace a block by what one of ``peers`` has: see `Mend`.

        False if none of them has it within 10 s. Calls for other blocks wait as long.
        """
        async with self._turn:
            mended = False
            with suppress(TimeoutError):
                async with asyncio.timeout(_PATIENCE_S):
                    mended = await self._mended(shard, base_seq, peers)
            self.counts.failed += not mended
            return mended

    async def _mended(self, shard: Shard, base_seq: int, peers: Sequence[str]) -> bool:
        for attempt in range(_TRIES):
            if attempt:
                await asyncio.sleep(_AGAIN_S)
            for peer in peers:
                if shard.damaged or shard.away:
                    return False  # while this call waited for another one, which found no member
                if await self._mended_by(peer, shard, base_seq):
                    return True
        return False

    async def _mended_by(self, peer: str, shard: Shard, base_seq: int) -> bool:
        span = self._span(shard, base_seq)
        if span is None:
            return True
        try:
            await self._replace(shard, span, peer)
        except _REFUSED as error:
            _log.warning("block_not_mended", block=base_seq, member=peer, reason=str(error))
            return False
        self.counts.mended += 1
        _log.warning("block_mended", shard=shard.machine.shard_id, block=base_seq, member=peer)
        return True

    def _span(self, shard: Shard, base_seq: int) -> BlockSpan | None:
        """The block that begins there; None if it was merged or removed."""
        shard_id = shard.machine.shard_id
        directory = self._blocks.directory(shard_id)
        position = directory.position(base_seq)
        if position == len(directory):
            return None
        span = directory.span(position)
        return span if span.base_seq == base_seq else None

    async def _replace(self, shard: Shard, span: BlockSpan, peer: str) -> None:
        applied, values = await self._fetch(shard, span, peer)
        # Messages that the other member had removed by then are dead here too, after this.
        await self._until_applied(shard.group, applied)
        given = await asyncio.to_thread(self._check, shard.machine.shard_id, span, values)
        shard_id = shard.machine.shard_id
        if not (shard.machine.exists and self._blocks.directory(shard_id).holds(span)):
            return  # removed or merged meanwhile
        live = shard.machine.live_mask(span.base_seq, span.count)
        if (live & given.missing).any():
            raise BrokenStateError("it lacks messages of the block")
        if (live & given.strange).any():
            raise BrokenStateError("it has other messages in the place of those of the block")
        fresh = strip_dead(given.block, live)
        job = self._applier.rewrite(shard_id, span, [fresh])
        if job is not None:
            ((_, placed),) = job.blocks
            dead = span.count - int(np.count_nonzero(live))
            self._blocks.directory(shard_id).note_emptied(placed, dead)

    async def _fetch(self, shard: Shard, span: BlockSpan, peer: str) -> tuple[int, list[bytes]]:
        """What a member has applied, and its stored blocks with the sequences of ``span``."""
        shard_id, group = shard.machine.shard_id, shard.group
        prefix = keys.shard_key(keys.BLOCK, shard_id)
        request = OpenBlocks(group, self._member, shard_id, span.base_seq, span.end_seq)
        values: list[bytes] = []
        async with (
            self._fetching.open(peer, request) as opened,
            aclosing(self._fetching.rows(peer, opened, group)) as pieces,
        ):
            async for rows in pieces:
                for _, key, *value in rows:
                    if not key.startswith(prefix):
                        raise BrokenStateError("it sends a row that was not asked for")
                    values += value
        return entry_of(opened.applied)[0], values

    def _check(self, shard_id: int, span: BlockSpan, values: Sequence[bytes]) -> _Given:
        """Make one block of stored ones. Blocks; raises BlockCorruptError and BrokenStateError."""
        found = [decode_block(value, BLOCK_CODECS) for value in values]
        parts = [part for block in found if (part := _within(block, span)) is not None]
        missing = np.ones(span.count, np.bool_)
        for part in parts:
            missing[part.base_seq - span.base_seq :][: part.count] = False
        block = join_blocks(_framed(parts, span))
        if block.count != span.count:
            raise BrokenStateError("it sends the same sequences twice")
        strange = self._strange(shard_id, block)
        strange[-1] |= int(block.times_ns[-1]) != span.last_time_ns
        return _Given(block, missing, strange)

    def _strange(self, shard_id: int, block: Block) -> Mask:
        """Where windows have other subjects or sizes than a block. Blocks.

        Windows without a row are not compared: they are new, or are damaged too.
        """
        strange = np.zeros(block.count, np.bool_)
        sizes, end_seq = block.columns.sizes(), block.last_seq + 1
        for window in range(block.base_seq >> WINDOW_BITS, (end_seq - 1 >> WINDOW_BITS) + 1):
            facts = read_rows(self._blocks, shard_id, window, window + 1)
            if facts is None:
                continue
            low, high = max(facts.base_seq, block.base_seq), min(facts.end_seq, end_seq)
            here = slice(low - block.base_seq, high - block.base_seq)
            there = slice(low - facts.base_seq, high - facts.base_seq)
            strange[here] = (facts.subject_ids[there] != block.subject_ids[here]) | (
                facts.sizes[there] != sizes[here]
            )
        return strange


def _within(block: Block, span: BlockSpan) -> Block | None:
    """The part of a block with sequences of ``span``."""
    low, high = max(block.base_seq, span.base_seq), min(block.last_seq + 1, span.end_seq)
    if low >= high:
        return None
    start, stop = low - block.base_seq, high - block.base_seq
    if (start, stop) == (0, block.count):
        return block
    times_ns, subject_ids = block.times_ns[start:stop], block.subject_ids[start:stop]
    return Block(low, times_ns, subject_ids, block.columns.slice(start, stop))


def _framed(parts: Sequence[Block], span: BlockSpan) -> list[Block]:
    """``parts`` with blank messages before and after them, up to the ends of ``span``."""
    first = parts[0] if parts else _blank(span.base_seq, span.end_seq, span.last_time_ns, 0)
    framed = [*(parts or [first])]
    if first.base_seq > span.base_seq:
        time_ns, subject_id = int(first.times_ns[0]), int(first.subject_ids[0])
        framed.insert(0, _blank(span.base_seq, first.base_seq, time_ns, subject_id))
    last = framed[-1]
    if last.last_seq + 1 < span.end_seq:
        subject_id = int(last.subject_ids[-1])
        framed.append(_blank(last.last_seq + 1, span.end_seq, span.last_time_ns, subject_id))
    return framed


def _blank(base_seq: int, end_seq: int, time_ns: int, subject_id: int) -> Block:
    count = end_seq - base_seq
    times_ns = np.full(count, time_ns, np.int64)
    return Block(base_seq, times_ns, np.full(count, subject_id, np.uint32), blanks(count))
