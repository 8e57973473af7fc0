"""The group of the shards in memory: one member without a log, which commits every proposal.

It commits in a later turn of the event loop, so that requests still join into entries.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from contrail_storage.replica.raft_port import Callbacks, PeerReport

_TERM: Final = 1
_LIFE_BITS: Final = 32


class NotLeadingError(Exception):
    """The group accepts no entries now."""


@dataclass(slots=True, eq=False)
class MemoryEntry:
    """A committed entry."""

    index: int
    term: int
    data: bytes
    context: object | None


@dataclass(slots=True)
class MemoryReport:
    """What the group knows of itself: see `GroupReport`."""

    role: str
    commit: int
    term: int = _TERM
    leader: str = ""
    durable: int = 0
    applied: int = 0
    restoring: bool = False
    suspect: bool = False
    peers: list[PeerReport] = field(default_factory=list)
    elections: Mapping[str, int] = field(default_factory=dict)
    step_downs: Mapping[str, int] = field(default_factory=dict)


class MemoryGroup:
    """A `Group` without a log: it leads from `start` until it resigns or stops."""

    is_alone = flags_are_durable = True
    is_handing_over = may_hand_over = False
    leader = ""
    ended_by = ""
    flags = 0
    term = _TERM

    def __init__(self, callbacks: Callbacks) -> None:
        self.is_leader = False
        self.applied_index = 0
        self._last_index = 0
        self._on_commit, self._on_lost = callbacks.on_commit, callbacks.on_lost
        # Entries to commit in a later turn of the loop, and whether that turn is due.
        self._proposed: deque[MemoryEntry] = deque()
        self._committing = False
        # True from an `on_commit` that returned False until `resume`.
        self._paused = False
        # (index, bytes) of entries that may not be in the store yet, and the sum of the bytes.
        self._unwritten: deque[tuple[int, int]] = deque()
        self._unwritten_bytes = 0

    def begin(self, life: int) -> None:
        """Lead for the first time. Indexes are above those of all processes with a lower ``life``.

        Versions are indexes, so no version of a lost stream is used again (for up to 2^32 entries).
        """
        self.applied_index = self._last_index = life << _LIFE_BITS
        self.start()

    @property
    def outstanding_bytes(self) -> int:
        """Bytes proposed and not yet committed."""
        return sum(len(entry.data) for entry in self._proposed)

    def unwritten_bytes(self, written_index: int) -> int:
        """Bytes of the proposed entries above ``written_index``."""
        while self._unwritten and self._unwritten[0][0] <= written_index:
            self._unwritten_bytes -= self._unwritten.popleft()[1]
        return self._unwritten_bytes

    def trim(self, index: int, at_most: int) -> bool:
        """Do nothing: applied entries are not kept."""
        del index, at_most
        return True

    def hand_over(self, target: str | None = None) -> bool:
        """Return False: there is no other member."""
        return False

    def may_take_over(self, peer: str) -> bool:
        """Return False: there is no other member."""
        return False

    def decline(self, declines: bool = True) -> None:
        """Do nothing: there is no other member."""

    def keep_applied(self, kept: bool) -> None:
        """Do nothing: the store of this group's entries is never opened again."""

    @property
    def lagging(self) -> list[str]:
        """Nobody: there is no other member."""
        return []

    def mark_suspect(self, suspect: bool) -> None:
        """Do nothing: nobody could have another state."""

    def install(self, index: int, term: int) -> bool:
        """Do nothing, as :meth:`mark_suspect`."""
        del index, term
        return False

    def read_index(self, done: Callable[[bool], None]) -> None:
        """Call ``done``: there is no other member."""
        done(self.is_leader)

    def heard_majority_within(self, seconds: float) -> bool:
        """Whether the group leads: there is no other member."""
        del seconds
        return self.is_leader

    def staleness_s(self) -> float:
        """Return 0: there is no other member."""
        return 0.0

    def report(self) -> MemoryReport:
        """Return the state of the group."""
        role = "leader" if self.is_leader else "follower"
        return MemoryReport(role, self._last_index, applied=self.applied_index)

    def start(self) -> None:
        """Begin to lead."""
        self.is_leader = True

    def tick(self) -> None:
        """Do nothing: nothing is ever due."""

    def resign(self) -> None:
        """Stop leading; entries that are not committed are lost."""
        self.is_leader = False
        lost, self._proposed = self._proposed, deque()
        self._on_lost([entry.context for entry in lost])

    def stop(self) -> None:
        """Stop leading for good."""
        self.resign()

    def propose(self, data: bytes, context: object) -> int:
        """Append an entry, and return its index. Raises NotLeadingError."""
        if not self.is_leader:
            raise NotLeadingError
        # In a later turn, as with a log: `propose` returns before the entry is applied.
        self._commit_soon()
        self._last_index += 1
        self._proposed.append(MemoryEntry(self._last_index, _TERM, data, context))
        self._unwritten.append((self._last_index, len(data)))
        self._unwritten_bytes += len(data)
        return self._last_index

    def resume(self) -> None:
        """Commit again, after ``on_commit`` has refused the next entry."""
        self._paused = False
        if self._proposed:
            self._commit_soon()

    def _commit_soon(self) -> None:
        if not (self._committing or self._paused):
            self._committing = True
            asyncio.get_running_loop().call_soon(self._commit)

    def _commit(self) -> None:
        self._committing = False
        while self._proposed and not self._paused:
            entry = self._proposed.popleft()
            self.applied_index = entry.index
            self._paused = not self._on_commit(entry)

    def handle_log_failure(self) -> None:
        """Do nothing: this group has no log."""

    def handle_log_recovered(self) -> None:
        """Do nothing: this group has no log."""
