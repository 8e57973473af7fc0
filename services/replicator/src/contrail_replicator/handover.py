"""A leader's attempt to make another member the leader, and members that do not want to lead."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from contrail_replicator.journal import GroupJournal

SLOW_AGAIN_S: Final = 30.0
"""A leader hands over for its slow disk once in this time, in which it does not want to lead."""


@dataclass(slots=True)
class Handover:
    """Waits until the target has the whole log; then asks it to start an election at once.

    Nothing is appended meanwhile. It ends with the leadership, or without success at `deadline`.
    """

    target: str
    deadline: float
    """Seconds on the group's clock."""
    next_request: float = float("-inf")
    """When the target is asked, or asked again."""

    def is_due(self, now: float, target_index: int, last_index: int) -> bool:
        """Whether to ask the target now; it has the log durably up to `target_index`."""
        return target_index >= last_index and now >= self.next_request


class Willingness:
    """Whether a member wants to lead: not while its disk is slow or its owner declines."""

    def __init__(
        self, journal: GroupJournal, clock: Callable[[], float], slow_disk_s: float
    ) -> None:
        self._journal = journal  # its log
        self._clock = clock  # seconds
        self._slow_disk_s = slow_disk_s  # how long its log may wait for the disk
        # What was recorded when the disk was last up to date, and when that was.
        self._awaited, self._awaited_since = 0, clock()
        # Until when it counts as slow.
        self._slow_until = float("-inf")
        self.owner_declines = False
        """Whether the member's owner declines: it is about to stop, or has no store."""

    @property
    def declines(self) -> bool:
        """Whether other leaders should not hand over to this member."""
        now = self._clock()
        return self.owner_declines or self._disk_is_slow(now) or now < self._slow_until

    def must_hand_over(self) -> bool:
        """Whether a leader should hand over now, because its disk is slow."""
        now = self._clock()
        if self._disk_is_slow(now) and now >= self._slow_until:
            self._slow_until = now + SLOW_AGAIN_S
            return True
        return False

    def _disk_is_slow(self, now: float) -> bool:
        journal = self._journal
        if journal.durable_position >= self._awaited:
            self._awaited, self._awaited_since = journal.position, now
        return now - self._awaited_since > self._slow_disk_s
