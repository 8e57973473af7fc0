"""The limit on the memory of all streams in memory together."""

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_storage.core import key_layout as keys
from contrail_storage.replica.applier import Applier
from contrail_storage.replica.memory_group import MemoryGroup
from contrail_storage.replica.proposer import Proposer
from contrail_storage.store.memory_store import MemoryStore


class MemoryBudget:
    """Counts rows in memory and bytes on their way there; refuses messages beyond the limit."""

    _log: Proposer
    _group: MemoryGroup
    _applier: Applier

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.store = MemoryStore()

    def guard(self, log: Proposer, group: MemoryGroup, applier: Applier) -> None:
        """Make ``log``, which proposes to ``group``, refuse messages beyond the limit."""
        self._log, self._group, self._applier = log, group, applier
        log.check_space = self.check

    @property
    def size_bytes(self) -> int:
        """Bytes that the streams take now."""
        size_bytes = self.store.size_bytes
        # The applied index is read from the store itself. The event loop learns of the writer's
        # batches later, and would count them twice meanwhile.
        row = self.store.get(keys.shard_key(keys.APPLIED, keys.MEMORY_GROUP))
        in_store = int.from_bytes(row[:8], "big") if row else 0
        written = max(in_store, self._applier.written_indexes.get(keys.MEMORY_GROUP, 0))
        return size_bytes + self._group.unwritten_bytes(written) + self._log.queued_bytes

    def check(self, size: int) -> None:
        """Raise MEMORY_FULL if ``size`` more bytes of messages do not fit."""
        if self.size_bytes + size > self.max_bytes:
            self._applier.flush()  # removed messages may still be in the store
        if self.size_bytes + size > self.max_bytes:
            message = f"streams in memory are limited to {self.max_bytes} bytes in total"
            raise ApiError(errors.MEMORY_FULL, message, retry_after_s=1, applied=False)
