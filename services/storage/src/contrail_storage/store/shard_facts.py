"""The facts port of a shard's machine: answers from the blocks and windows of the store."""

from contrail_storage.core.facts import MessageFacts, SubjectFacts, facts_of
from contrail_storage.store.block_store import BlockMissingError, BlockStore
from contrail_storage.store.windows import WINDOW_BITS, read_rows


class ShardFacts:
    """Facts of one shard's messages. Raises one of UNREADABLE, or the store's error."""

    def __init__(self, blocks: BlockStore, shard_id: int) -> None:
        self._blocks = blocks
        self._shard_id = shard_id

    def facts_at(self, seq: int) -> MessageFacts:
        """Facts of the block that holds ``seq``."""
        directory = self._blocks.directory(self._shard_id)
        position = directory.position(seq)
        if position == len(directory) or directory.base_seq(position) > seq:
            raise BlockMissingError(f"no block of shard {self._shard_id} holds sequence {seq}")
        return facts_of(self._blocks.load(self._shard_id, directory.base_seq(position)))

    def subjects_at(self, seq: int) -> SubjectFacts:
        """Facts of the window that holds ``seq``, or of the block if the window has no row."""
        window = seq >> WINDOW_BITS
        found = None
        # The newest windows are not full, or their rows are not written yet.
        if window < (self._blocks.directory(self._shard_id).end_seq >> WINDOW_BITS) - 1:
            found = read_rows(self._blocks, self._shard_id, window, window + 1)
        return self.facts_at(seq) if found is None else found
