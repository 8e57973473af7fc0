"""Gives up on messages whose last allowed delivery was not acknowledged in time."""

import asyncio
from collections.abc import Callable
from typing import Final

from contrail_storage.consumers.redeliveries import Redeliveries
from contrail_storage.core.results import Result
from contrail_storage.replica.entries import has_failed

RETRY_S: Final = 0.1
"""Pause after a command that was refused or lost."""
_CHECKED: Final = 2_000
"""Pending messages that are checked in one step."""

Arm = Callable[[float], None]


class Exhaustion:
    """Gives up on the messages of one consumer."""

    __slots__ = ("_arm", "_arm_again", "_deadlines", "_propose", "_task")

    def __init__(
        self,
        deadlines: Redeliveries,
        propose: "Callable[[list[int]], asyncio.Future[Result]]",
        arm: Arm,
        arm_again: Arm,
    ) -> None:
        """``arm`` sets the timer for the earliest deadline; ``arm_again``, unless one is set.

        Their argument is how many seconds from now the timer is due at the earliest.
        """
        self._deadlines = deadlines
        self._propose = propose
        self._arm = arm
        self._arm_again = arm_again
        # Searches all pending messages; at most one at a time.
        self._task: asyncio.Task[None] | None = None

    def give_up(self, seqs: list[int]) -> "asyncio.Future[Result]":
        """Propose to give up on ``seqs``, which are due. If that fails, they are due again."""
        future = self._propose(seqs)
        future.add_done_callback(self._given_up)
        return future

    def _given_up(self, done: "asyncio.Future[Result]") -> None:
        if has_failed(done):
            # The deadlines of these messages were taken out of the heap.
            self._deadlines.rebuild()
            self._arm(RETRY_S)
        else:
            self._arm(0)

    def search(self, limit: int, now_ns: Callable[[], int]) -> None:
        """Give up on all messages that were delivered ``limit`` times and are due.

        This is for consumers that nobody pulls from: a pull gives up on those that it meets.
        """
        if self._task is None:
            self._task = asyncio.ensure_future(self._search(limit, now_ns))
            self._task.add_done_callback(self._searched)

    async def _search(self, limit: int, now_ns: Callable[[], int]) -> None:
        seqs = self._deadlines.pending_seqs()
        later_ns: list[int] = []
        for start in range(0, len(seqs), _CHECKED):
            some, at_ns = seqs[start : start + _CHECKED], now_ns()
            next_ns = self._deadlines.next_last_ns(some, limit, at_ns)
            if next_ns is not None:
                later_ns.append(next_ns)
            over = self._deadlines.are_over(some, limit, at_ns)
            if over:
                await self.give_up(over)
            else:
                await asyncio.sleep(0)
        if later_ns:
            # The earliest deadline may be that of a message that waits for a pull, for however
            # long. It must not hide those after it.
            self._arm_again(max(min(later_ns) - now_ns(), 0) / 1e9)

    def _searched(self, done: "asyncio.Task[None]") -> None:
        self._task = None
        if not done.cancelled() and done.exception() is not None:
            self._arm(RETRY_S)

    def close(self) -> None:
        """Stop a search."""
        if self._task is not None:
            self._task.cancel()
