"""The cache of decoded blocks."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from contrail_common.columns.blocks import Block

CACHE_BYTES: Final = 128 << 20
"""Bytes of a cache that nobody sized: that of a store which is opened for a repair."""
CACHE_BLOCKS: Final = 1 << 16
"""Blocks at most, however small: when a shard is dropped, one step of the loop looks at each."""
# Bytes of a cached block in addition to its columns, so that tiny ones count too.
_OVERHEAD: Final = 512

Key = tuple[int, int]
"""Shard and base sequence."""


class BlockCache:
    """The blocks that were used last, up to ``max_bytes``; any thread may use it."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.size_bytes = 0
        """The sum of the sizes in `_blocks`; changed under `_lock`."""
        self.generation = 0
        """Changes when an older form of a block may be under way; changed under `_lock`."""
        # Each with its size, least recently used first; under `_lock`.
        self._blocks: OrderedDict[Key, tuple[Block, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Key) -> Block | None:
        """Return the block if it is here."""
        with self._lock:
            cached = self._blocks.get(key)
            if cached is None:
                return None
            self._blocks.move_to_end(key)
            return cached[0]

    def put(self, key: Key, block: Block) -> None:
        """Add a block, or replace the one that is here."""
        with self._lock:
            self._remove(key)
            self._add(key, block)

    def put_read(self, key: Key, block: Block, generation: int) -> None:
        """Add a block that was read from the disk, unless it may be old.

        ``generation`` is from before it was looked for in memory.
        """
        with self._lock:
            # One that is here already was merged meanwhile: it has more messages.
            if generation == self.generation and key not in self._blocks:
                self._add(key, block)

    def _add(self, key: Key, block: Block) -> None:
        blocks, size = self._blocks, block.held_bytes + _OVERHEAD
        blocks[key] = (block, size)
        self.size_bytes += size
        while self.size_bytes > self.max_bytes or len(blocks) > CACHE_BLOCKS:
            _, (_, freed) = blocks.popitem(last=False)
            self.size_bytes -= freed

    def _remove(self, key: Key) -> None:
        cached = self._blocks.pop(key, None)
        if cached is not None:
            self.size_bytes -= cached[1]

    def renew(self) -> None:
        """Take no block that is being read: the read may return an older form of it."""
        with self._lock:
            self.generation += 1

    def discard(self, key: Key) -> None:
        """Remove a block, which was removed or replaced, if it is here."""
        with self._lock:
            self.generation += 1
            self._remove(key)

    def discard_shards(self, gone: Callable[[int], bool]) -> None:
        """Remove the blocks of all shards for which ``gone`` is true."""
        with self._lock:
            self.generation += 1
            for key in [key for key in self._blocks if gone(key[0])]:
                self._remove(key)
