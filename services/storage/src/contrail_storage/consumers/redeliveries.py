"""The times at which the pending deliveries of a consumer are due again."""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Container, Iterable
from typing import Final

from contrail_storage.core.consumer_machine import ConsumerMachine

_STALE_MAX: Final = 4_096
DUE_MAX: Final = 10_000
"""Sequences that one pull takes at most."""
SLICE_MAX: Final = 8_192
"""Pending messages that are read in one turn of the event loop, in a few milliseconds."""


class Redeliveries:
    """Deadlines of the pending messages, the earliest first.

    A message that is acknowledged or postponed leaves a stale deadline in the heap. It is removed
    when it is reached, or when so many are stale that the heap is rebuilt.
    """

    def __init__(
        self, consumer: ConsumerMachine, on_taken: Callable[[], None] = lambda: None
    ) -> None:
        """``on_taken`` is called after each further slice of a `rebuild`."""
        self._consumer = consumer
        self._on_taken = on_taken
        # (deadline, sequence), a heap. A pair is stale if the pending message has another deadline.
        self._heap: list[tuple[int, int]] = []
        self._left: deque[int] = deque()
        """Sequences that a `rebuild` still has to read."""
        self._next_slice: asyncio.Handle | None = None

    def turn_to(self, consumer: ConsumerMachine) -> None:
        """Use an equal machine from now on; the caller must `rebuild` afterwards."""
        self._consumer = consumer

    def rebuild(self) -> None:
        """Read all deadlines again: the first slice now, the rest in later turns of the loop."""
        self.close()
        self._left.extend(self._consumer.pending)
        self._heap = self._slice()
        heapq.heapify(self._heap)

    def close(self) -> None:
        """Stop an unfinished `rebuild`."""
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
        """Add the deadlines of ``seqs``, which have changed."""
        for seq in seqs:
            pending = self._consumer.pending.get(seq)
            if pending is not None:
                heapq.heappush(self._heap, (pending.deadline_ns, seq))
        # Each nak or in_progress adds a deadline and leaves a stale one.
        if len(self._heap) > 2 * len(self._consumer.pending) + _STALE_MAX:
            self.rebuild()

    def take_due(self, now_ns: int, in_flight: Container[int], most: int = DUE_MAX) -> list[int]:
        """Return pending sequences that are due and not ``in_flight``, ascending.

        Returns at most ``most``, those that are due first. The caller gives unused ones back
        (:meth:`note`).
        """
        due: set[int] = set()
        while len(due) < most and self._heap and self._heap[0][0] <= now_ns:
            deadline_ns, seq = heapq.heappop(self._heap)
            # In flight: its redelivery is on its way to the log, and moves the deadline when it is
            # applied.
            if self._stands(deadline_ns, seq) and seq not in in_flight:
                due.add(seq)
        return sorted(due)

    def pending_seqs(self) -> list[int]:
        """All pending sequences."""
        return list(self._consumer.pending)

    def are_over(self, seqs: Iterable[int], limit: int, now_ns: int) -> list[int]:
        """Return the ``seqs`` whose last delivery, the ``limit``-th, timed out."""
        pending = self._consumer.pending
        return [
            seq
            for seq in seqs
            if (one := pending.get(seq)) is not None
            and one.deadline_ns <= now_ns
            and one.attempts >= limit
        ]

    def next_last_ns(self, seqs: Iterable[int], limit: int, now_ns: int) -> int | None:
        """When the next of ``seqs`` is due whose last delivery has not timed out yet, or None."""
        pending = self._consumer.pending
        found = (
            one.deadline_ns
            for seq in seqs
            if (one := pending.get(seq)) is not None
            and one.deadline_ns > now_ns
            and one.attempts >= limit
        )
        return min(found, default=None)

    def earliest_ns(self) -> int | None:
        """The next time to check, None for never. It may be of a stale deadline."""
        return self._heap[0][0] if self._heap else None

    def drop_stale(self) -> None:
        """Remove stale deadlines before the first valid one."""
        while self._heap and not self._stands(*self._heap[0]):
            heapq.heappop(self._heap)

    def _stands(self, deadline_ns: int, seq: int) -> bool:
        pending = self._consumer.pending.get(seq)
        return pending is not None and pending.deadline_ns == deadline_ns
