"""When the pending deliveries of a consumer are due again."""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Container, Iterable
from typing import Final

from contrail_storage.core.consumer_machine import ConsumerMachine

_STALE_MAX: Final = 4_096
DUE_MAX: Final = 10_000
"""As many as a pull takes at most."""
SLICE_MAX: Final = 8_192
"""Pending messages that are taken in one turn of the loop: some milliseconds."""


class Redeliveries:
    """Deadlines of what is pending, the earliest first.

    Whatever was acknowledged or postponed leaves its deadline behind, until that is met or so many
    are stale that all are taken anew.
    """

    def __init__(
        self, consumer: ConsumerMachine, on_taken: Callable[[], None] = lambda: None
    ) -> None:
        """``on_taken`` is called behind each further slice of a `rebuild`."""
        self._consumer = consumer
        self._on_taken = on_taken
        self._heap: list[tuple[int, int]] = []
        self._left: deque[int] = deque()
        """Sequences of a `rebuild` that are still to be looked at."""
        self._next_slice: asyncio.Handle | None = None

    def turn_to(self, consumer: ConsumerMachine) -> None:
        """Go on with an equal machine; a `rebuild` is to follow."""
        self._consumer = consumer

    def rebuild(self) -> None:
        """Take all from the machine: at once what a slice holds, the rest in turns of the loop."""
        self.close()
        self._left.extend(self._consumer.pending)
        self._heap = self._slice()
        heapq.heapify(self._heap)

    def close(self) -> None:
        """Take no more."""
        self._left.clear()
        if self._next_slice is not None:
            self._next_slice.cancel()
            self._next_slice = None

    def _slice(self) -> list[tuple[int, int]]:
        pending, left = self._consumer.pending, self._left
        seqs = [left.popleft() for _ in range(min(SLICE_MAX, len(left)))]
        if left:
            self._next_slice = asyncio.get_running_loop().call_soon(self._take_slice)
        return [(one.deadline_ns, seq) for seq in seqs if (one := pending.get(seq)) is not None]

    def _take_slice(self) -> None:
        self._next_slice = None
        for deadline in self._slice():
            heapq.heappush(self._heap, deadline)
        self._on_taken()

    def note(self, seqs: Iterable[int]) -> None:
        """The deadlines of ``seqs`` are others now."""
        for seq in seqs:
            pending = self._consumer.pending.get(seq)
            if pending is not None:
                heapq.heappush(self._heap, (pending.deadline_ns, seq))
        if len(self._heap) > 2 * len(self._consumer.pending) + _STALE_MAX:
            self.rebuild()

    def take_due(self, now_ns: int, in_flight: Container[int], most: int = DUE_MAX) -> list[int]:
        """Pending sequences whose deadline passed and that are not ``in_flight``, ascending.

        No more than ``most``, those that were due first; whoever has no use for some of them gives
        them back (:meth:`note`).
        """
        due: set[int] = set()
        while len(due) < most and self._heap and self._heap[0][0] <= now_ns:
            deadline_ns, seq = heapq.heappop(self._heap)
            if self._stands(deadline_ns, seq) and seq not in in_flight:
                due.add(seq)
        return sorted(due)

    def are_over(self, seqs: Iterable[int], limit: int, now_ns: int) -> list[int]:
        """Those of ``seqs`` whose last delivery, the ``limit``-th, was not acknowledged in time."""
        pending = self._consumer.pending
        return [
            seq
            for seq in seqs
            if (one := pending.get(seq)) is not None
            and one.deadline_ns <= now_ns
            and one.attempts >= limit
        ]

    def earliest_ns(self) -> int | None:
        """When to look again, None for never. Nothing need be due then."""
        return self._heap[0][0] if self._heap else None

    def drop_stale(self) -> None:
        """Let go of those before the first that stands."""
        while self._heap and not self._stands(*self._heap[0]):
            heapq.heappop(self._heap)

    def _stands(self, deadline_ns: int, seq: int) -> bool:
        pending = self._consumer.pending.get(seq)
        return pending is not None and pending.deadline_ns == deadline_ns
