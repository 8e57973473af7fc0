"""Gives up on messages whose last allowed delivery was not acknowledged in time."""

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

from contrail_storage.core.consumer_machine import ConsumerMachine
from contrail_storage.core.results import Result
from contrail_storage.replica.entries import has_failed

RETRY_S: Final = 0.1
"""Pause after a command that was refused or lost."""


class Host(Protocol):
    """The part of a dispatcher that `Exhaustion` uses."""

    consumer: ConsumerMachine

    @property
    def elapsed_ns(self) -> Callable[[], int]:
        """Returns the elapsed time, in nanoseconds."""
        ...

    def propose_exhaust(self, seqs: list[int]) -> "asyncio.Future[Result]":
        """Propose to give up on ``seqs``; raises ApiError."""
        ...

    def arm_deadline(self, soonest_s: float = 0.0) -> None:
        """Set the timer for the earliest deadline, but not before ``soonest_s`` from now."""
        ...

    def arm_again(self, soonest_s: float) -> None:
        """As `arm_deadline`, unless the timer is set."""
        ...


class Exhaustion:
    """Gives up on the messages of one consumer.

    It does not refer to its host: both would then wait for a full garbage collection.
    """

    __slots__ = ("_task",)

    def __init__(self) -> None:
        # Searches all pending messages; at most one at a time.
        self._task: asyncio.Task[None] | None = None

    def give_up(self, host: Host, seqs: list[int]) -> "asyncio.Future[Result]":
        """Propose to give up on ``seqs``, which are due. If that fails, they are due again."""
        try:
            future = host.propose_exhaust(seqs)
        except BaseException:
            host.consumer.pending.note(seqs)
            raise
        future.add_done_callback(lambda done: _given_up(host, seqs, done))
        return future

    def search(self, host: Host, limit: int) -> None:
        """Give up on all messages that were delivered ``limit`` times and are due.

        This is for consumers that nobody pulls from: a pull gives up on those that it meets.
        """
        if self._task is None:
            self._task = asyncio.ensure_future(self._search(host, limit))
            self._task.add_done_callback(lambda done: self._searched(host, done))

    async def _search(self, host: Host, limit: int) -> None:
        later_ns: list[int] = []
        from_seq: int | None = 0
        while from_seq is not None:
            at_ns = host.elapsed_ns()
            entries, from_seq = host.consumer.pending.read_from(from_seq)
            last = [
                (seq, item.deadline_ns) for seq, item in entries.items() if item.attempts >= limit
            ]
            later_ns += sorted(due_ns for _, due_ns in last if due_ns > at_ns)[:1]
            over = [seq for seq, due_ns in last if due_ns <= at_ns]
            if over:
                await self.give_up(host, over)
            else:
                await asyncio.sleep(0)
        if later_ns:
            # The earliest deadline may be that of a message that waits for a pull, for however
            # long. It must not hide those after it.
            host.arm_again(max(min(later_ns) - host.elapsed_ns(), 0) / 1e9)

    def _searched(self, host: Host, done: "asyncio.Task[None]") -> None:
        self._task = None
        if not done.cancelled() and done.exception() is not None:
            host.arm_deadline(RETRY_S)

    def close(self) -> None:
        """Stop a search."""
        if self._task is not None:
            self._task.cancel()


def _given_up(host: Host, seqs: list[int], done: "asyncio.Future[Result]") -> None:
    if has_failed(done):
        host.consumer.pending.note(seqs)
        host.arm_deadline(RETRY_S)
    else:
        host.arm_deadline()
