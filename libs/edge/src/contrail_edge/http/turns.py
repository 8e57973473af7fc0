"""Turns of long work on the event loop, which leave time for other work in between."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final, TypeVar

from contrail_edge.http.steps import Steps

_T = TypeVar("_T")

TURN_NS: Final = 10_000_000
"""CPU time of consecutive steps, after which the event loop must do other work."""

_PARTS: Final = 2
"""Of a turn for all connections: one for work that waited, one for the sockets that are ready."""


class Turn:
    """The CPU time that one task may use before the event loop does other work.

    Time in which other processes had the CPU is not counted. Shorter turns would not give that time
    back, and would cost more.
    """

    __slots__ = ("_over_ns", "look_ns")

    def __init__(self, parts: int = 1) -> None:
        """A turn, or one of so many ``parts`` of it."""
        self._over_ns = time.thread_time_ns() + TURN_NS // parts
        self.look_ns = time.monotonic_ns() + TURN_NS // parts
        """Monotonic time until which it is certainly not over."""

    @property
    def over(self) -> bool:
        """True if the time is used up."""
        now_ns = time.monotonic_ns()
        if now_ns < self.look_ns:  # reading the CPU time is slower than the clock
            return False
        if self._over_ns:
            left_ns = self._over_ns - time.thread_time_ns()
            # Before that time the CPU time cannot be used up, so it need not be read again.
            self.look_ns = now_ns + left_ns
            if left_ns <= 0:
                self._over_ns = self.look_ns = 0
        return not self._over_ns


class SharedTurns:
    """The turns of all connections: what they do in one pass of the event loop, one after another.

    Thousands of sockets may be ready in the same pass. The event loop calls them all before it runs
    its timers, so those that are called when the turn is over wait for the next pass.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        # From the first use in a pass until nothing waits. While it is set, `_next_pass` is due.
        self._turn: Turn | None = None

    @property
    def over(self) -> bool:
        """True if the time of this pass is used up: ``add`` all further work."""
        turn = self._turn
        if turn is None:
            self._begin()
            return False
        return time.monotonic_ns() >= turn.look_ns and turn.over

    def add(self, work: Callable[[], None]) -> None:
        """Call ``work`` in a later pass, after all that waits already."""
        if self._turn is None:
            self._begin()
        self._waiting.append(work)

    def run(self, work: Callable[[], None]) -> None:
        """Call ``work`` now or, if the turn is over, in a later pass."""
        if self.over:
            self.add(work)
        else:
            work()

    def close(self, transport: asyncio.BaseTransport) -> bool:
        """Close a connection whose peer has ended it, as the answer to ``eof_received``.

        False lets the event loop close it now; True keeps it open until a later pass.
        """
        over = self.over
        if over:
            self.add(transport.close)
        return over

    def _begin(self) -> None:
        self._turn = Turn(_PARTS)
        asyncio.get_running_loop().call_soon(self._next_pass)

    def _next_pass(self) -> None:
        if not self._waiting:
            self._turn = None
            return
        turn = self._turn = Turn(_PARTS)
        try:
            while self._waiting:
                self._waiting.popleft()()
                if turn.over:
                    break
        finally:
            # If the turn is over, the sockets that are read in the rest of this pass wait.
            if self._waiting or turn.over:
                asyncio.get_running_loop().call_soon(self._next_pass)
            else:
                self._turn = None


async def in_turns(steps: Steps[_T]) -> _T:
    """Run ``steps``, let the event loop do other work after each turn, and return the result."""
    turn: Turn | None = None
    while True:
        try:
            is_long = next(steps)
        except StopIteration as done:
            result: _T = done.value
            return result
        if turn is None:
            turn = Turn()  # not before the first step: most work has no other
        if is_long or turn.over:
            await asyncio.sleep(0)
            turn = Turn()
