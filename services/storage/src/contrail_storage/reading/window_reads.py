"""Reads of windows: from their rows, or from the blocks where a row is missing."""

import asyncio
from collections.abc import Callable
from typing import Final

import numpy as np

from contrail_storage.core.facts import SubjectFacts
from contrail_storage.reading.answering import removed_too_quickly
from contrail_storage.store.block_store import BlockMissingError, BlockStore
from contrail_storage.store.windows import (
    WINDOW,
    WINDOW_BITS,
    extents_of,
    facts_in_memory,
    joined,
    read_blocks,
    read_rows,
)

RUN_WINDOWS: Final = 16
"""Windows of one read at most: 65,536 sequences, 768 KiB in memory, less than 1 ms in a thread."""
_RECENT_WINDOWS: Final = 1
"""Newest full windows, whose rows may not be written yet, and whose blocks are in memory."""
_OPENED_MAX: Final = 64
"""Newest windows whose facts are kept, of 48 KiB at most."""
_PIECE_BYTES: Final = 16 << 20
"""Bytes of blocks that are read in one turn of a thread, so that a read can end in between."""
_RETRIES: Final = 8


class WindowReads:
    """Reads the subject numbers and sizes of messages without their blocks."""

    def __init__(self, blocks: BlockStore) -> None:
        self._blocks = blocks
        self.keep: Callable[[int, SubjectFacts], None] = lambda shard_id, facts: None
        """Called with a window whose row was missing, and the shard that it is of."""
        # By shard: facts of the newest window that were read from blocks, least recently used
        # first. They stay valid, as rows do, and a search needs them again after each match.
        self._opened: dict[int, SubjectFacts] = {}

    async def read(self, shard_id: int, from_seq: int, to_seq: int) -> SubjectFacts:
        """The facts from ``from_seq`` or its window on, up to ``to_seq`` or the end of its window.

        ``to_seq`` is applied. One call reads at most RUN_WINDOWS windows: continue at the end of
        the facts. Raises one of UNREADABLE if a block is needed and cannot be read, the store's
        errors, or OVERLOADED.
        """
        blocks, first = self._blocks, from_seq >> WINDOW_BITS
        gap_end = self._gap_end(shard_id, from_seq)
        if gap_end >> WINDOW_BITS > first:
            # The compactor has removed blocks and rows; a gap in a window has values in its row.
            count = min(gap_end, to_seq + 1, from_seq + (RUN_WINDOWS << WINDOW_BITS)) - from_seq
            return SubjectFacts(from_seq, np.zeros(count, np.uint32), np.zeros(count, np.int64))
        # Only full windows have rows.
        full = max(blocks.directory(shard_id).end_seq, to_seq + 1) >> WINDOW_BITS
        facts: SubjectFacts | None = None
        if first >= full - _RECENT_WINDOWS:
            end_seq = min(to_seq + 1, (first + 1) << WINDOW_BITS)
            facts = facts_in_memory(blocks, shard_id, from_seq, end_seq)
        if facts is None and first < full:
            stop = min(full, (to_seq >> WINDOW_BITS) + 1, first + RUN_WINDOWS)
            facts = await asyncio.to_thread(read_rows, blocks, shard_id, first, stop)
        if facts is not None:
            return facts
        if first >= full:
            return await self._open(shard_id, from_seq, to_seq + 1)
        base_seq = first << WINDOW_BITS
        facts = await self._from_blocks(shard_id, base_seq, base_seq + WINDOW)
        self.keep(shard_id, facts)
        return facts

    def _gap_end(self, shard_id: int, from_seq: int) -> int:
        """The first sequence of the next block, if it lies after ``from_seq``; else that."""
        directory = self._blocks.directory(shard_id)
        position = directory.position(from_seq)
        if position == len(directory):
            return from_seq
        return max(from_seq, directory.base_seq(position))

    async def _open(self, shard_id: int, from_seq: int, end_seq: int) -> SubjectFacts:
        """The facts of a part of the newest window, whose blocks are not all in memory."""
        known = self._opened.pop(shard_id, None)
        if known is not None and not (
            known.base_seq <= from_seq and known.end_seq >> WINDOW_BITS == from_seq >> WINDOW_BITS
        ):
            known = None
        if known is None:
            known = await self._from_blocks(shard_id, from_seq, end_seq)
        elif known.end_seq <= from_seq:
            more = await self._from_blocks(shard_id, known.end_seq, end_seq)
            known = joined([known, more])
        self._opened[shard_id] = known
        if len(self._opened) > _OPENED_MAX:
            del self._opened[next(iter(self._opened))]
        return known

    async def _from_blocks(self, shard_id: int, base_seq: int, end_seq: int) -> SubjectFacts:
        """The facts of a part of a window from its blocks, however large they are."""
        parts: list[SubjectFacts] = []
        retries, seq = _RETRIES, base_seq
        while seq < end_seq:
            extents = extents_of(self._blocks, shard_id, seq, end_seq, _PIECE_BYTES)
            stop = min(extents[-1].end_seq, end_seq) if extents else end_seq
            try:
                part = await asyncio.to_thread(
                    read_blocks, self._blocks, shard_id, seq, stop, extents
                )
            except BlockMissingError:
                # Merged, cut or trimmed while it was read: look again.
                retries -= 1
                if retries:
                    continue
                raise removed_too_quickly() from None
            parts.append(part)
            seq = stop
        return joined(parts)
