"""Reads of windows: from their rows, or from the blocks where a row is missing."""

import asyncio
from collections.abc import Callable
from typing import Final

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_storage.store.block_store import BlockMissingError, BlockStore
from contrail_storage.store.windows import (
    WINDOW,
    WINDOW_BITS,
    WindowFacts,
    extents_of,
    facts_in_memory,
    read_blocks,
    read_rows,
)

RUN_WINDOWS: Final = 64
"""Windows of one read at most: 65,536 sequences, 768 KiB in memory, about 1 ms in a thread."""
_RECENT_WINDOWS: Final = 2
"""Newest full windows, whose rows may not be written yet, and whose blocks are in memory."""
_RETRIES: Final = 8


class WindowReads:
    """Reads the subject numbers and sizes of messages without their blocks."""

    def __init__(self, blocks: BlockStore) -> None:
        self._blocks = blocks
        self.keep: Callable[[int, WindowFacts], None] = lambda shard_id, facts: None
        """Called with a window whose row was missing, and the shard that it is of."""

    async def read(self, shard_id: int, from_seq: int, to_seq: int) -> WindowFacts:
        """The facts from ``from_seq`` or its window on, up to ``to_seq`` or the end of its window.

        ``to_seq`` is applied. One call reads at most RUN_WINDOWS windows: continue at the end of
        the facts. Raises one of UNREADABLE if a block is needed and cannot be read, the store's
        errors, or OVERLOADED.
        """
        blocks, first = self._blocks, from_seq >> WINDOW_BITS
        # Only full windows have rows.
        full = max(blocks.directory(shard_id).end_seq, to_seq + 1) >> WINDOW_BITS
        facts: WindowFacts | None = None
        if first >= full - _RECENT_WINDOWS:
            facts = facts_in_memory(blocks, shard_id, from_seq, to_seq + 1)
        if facts is None and first < full:
            stop = min(full, (to_seq >> WINDOW_BITS) + 1, first + RUN_WINDOWS)
            facts = await asyncio.to_thread(read_rows, blocks, shard_id, first, stop)
        if facts is not None:
            return facts
        if first >= full:
            return await self._from_blocks(shard_id, from_seq, to_seq + 1)
        base_seq = first << WINDOW_BITS
        facts = await self._from_blocks(shard_id, base_seq, base_seq + WINDOW)
        self.keep(shard_id, facts)
        return facts

    async def _from_blocks(self, shard_id: int, base_seq: int, end_seq: int) -> WindowFacts:
        blocks = self._blocks
        for _ in range(_RETRIES):
            extents = extents_of(blocks, shard_id, base_seq, end_seq)
            try:
                return await asyncio.to_thread(
                    read_blocks, blocks, shard_id, base_seq, end_seq, extents
                )
            except BlockMissingError:
                continue  # merged, cut or trimmed while it was read: look again
        raise ApiError(
            errors.OVERLOADED,
            "messages in the range are being removed too quickly to read it",
            retry_after_s=1,
        )
