"""Gives up on messages whose last allowed delivery was not acknowledged in time."""

import asyncio
from collections.abc import Callable
from typing import Final

from contrail_storage.core.pending_deliveries import PendingDeliveries
from contrail_storage.core.results import Result
from contrail_storage.replica.entries import has_failed

RETRY_S: Final = 0.1
"""Pause after a command that was refused or lost."""

Arm = Callable[[float], None]


class Exhaustion:
    """Gives up on the messages of one consumer."""

    __slots__ = ("_arm", "_arm_again", "_pending", "_propose", "_task")

    def __init__(
        self,
        pending: Callable[[], PendingDeliveries],
        propose: "Callable[[list[int]], asyncio.Future[Result]]",
        arm: Arm,
        arm_again: Arm,
    ) -> None:
        """``pending`` returns the consumer's deliveries.

        ``arm`` sets the timer for the earliest deadline; ``arm_again``, unless one is set. Their
        argument is how many seconds from now the timer is due at the earliest.
        """
        self._pending = pending
        self._propose = propose
        self._arm = arm
        self._arm_again = arm_again
        # Searches all pending messages; at most one at a time.
        self._task: asyncio.Task[None] | None = None

    def give_up(self, seqs: list[int]) -> "asyncio.Future[Result]":
        """Propose to give up on ``seqs``, which are due. If that fails, they are due again."""
        try:
            future = self._propose(seqs)
        except BaseException:
            self._pending().note(seqs)
            raise
        future.add_done_callback(lambda done: self._given_up(seqs, done))
        return future

    def _given_up(self, seqs: list[int], done: "asyncio.Future[Result]") -> None:
        if has_failed(done):
            self._pending().note(seqs)
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
        later_ns: list[int] = []
        from_seq: int | None = 0
        while from_seq is not None:
            at_ns = now_ns()
            entries, from_seq = self._pending().read_from(from_seq)
            last = [
                (seq, item.deadline_ns) for seq, item in entries.items() if item.attempts >= limit
            ]
            later_ns += sorted(due_ns for _, due_ns in last if due_ns > at_ns)[:1]
            over = [seq for seq, due_ns in last if due_ns <= at_ns]
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
