"""The group of the shards in memory: one member that commits what is proposed, with no log at all.

A commit comes in a later pass of the event loop, so that requests still join into entries.
"""

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Final

from contrail_storage.core.key_layout import VOLATILE
from contrail_storage.replica.raft_port import OnCommit, OnLost

VOLATILE_GROUP: Final = VOLATILE | 1
_TERM: Final = 1
_LIFE_BITS: Final = 32


class NotLeadingError(Exception):
    """The group takes no entries now."""


@dataclass(slots=True, eq=False)
class VolatileEntry:
    """A committed entry."""

    index: int
    term: int
    data: bytes
    context: object | None


class VolatileGroup:
    """A `Group` over nothing: it leads from `start` until it resigns or stops."""

    def __init__(
        self,
        on_commit: OnCommit,
        on_lost: OnLost,
    ) -> None:
        self.is_leader = False
        self.applied_index = 0
        self._last_index = 0
        self._on_commit = on_commit
        self._on_lost = on_lost
        self._proposed: list[VolatileEntry] = []
        self._unwritten: deque[tuple[int, int]] = deque()
        self._unwritten_bytes = 0

    def begin(self, life: int) -> None:
        """Lead for the first time, with indexes above those of all lives with a lower number.

        Versions are indexes: one of a stream that was lost never comes again (up to 2^32 entries).
        """
        self.applied_index = self._last_index = life << _LIFE_BITS
        self.start()

    @property
    def outstanding_bytes(self) -> int:
        """Bytes proposed and not yet committed."""
        return sum(len(entry.data) for entry in self._proposed)

    def unwritten_bytes(self, written_index: int) -> int:
        """Bytes proposed of the entries above ``written_index``."""
        while self._unwritten and self._unwritten[0][0] <= written_index:
            self._unwritten_bytes -= self._unwritten.popleft()[1]
        return self._unwritten_bytes

    def start(self) -> None:
        """Lead."""
        self.is_leader = True

    def tick(self) -> None:
        """Nothing is ever due."""

    def resign(self) -> None:
        """Lead no longer; what is not committed is lost."""
        self.is_leader = False
        lost, self._proposed = self._proposed, []
        self._on_lost([entry.context for entry in lost])

    def stop(self) -> None:
        """End taking part."""
        self.resign()

    def propose(self, data: bytes, context: object) -> int:
        """Append an entry; answers its index. Raises NotLeadingError."""
        if not self.is_leader:
            raise NotLeadingError
        if not self._proposed:
            asyncio.get_running_loop().call_soon(self._commit)
        self._last_index += 1
        self._proposed.append(VolatileEntry(self._last_index, _TERM, data, context))
        self._unwritten.append((self._last_index, len(data)))
        self._unwritten_bytes += len(data)
        return self._last_index

    def _commit(self) -> None:
        entries, self._proposed = self._proposed, []
        if entries:
            self.applied_index = entries[-1].index
            self._on_commit(entries)

    def handle_log_failure(self) -> None:
        """The log is of the other groups."""

    def handle_log_recovered(self) -> None:
        """The log is of the other groups."""
