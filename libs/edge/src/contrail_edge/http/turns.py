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


class Turn:
    """The CPU time that one task may use before the event loop does other work.

    Time in which other processes had the CPU is not counted. Shorter turns would not give that time
    back, and would cost more.
    """

    __slots__ = ("_look_ns", "_over_ns")

    def __init__(self) -> None:
        self._over_ns = time.thread_time_ns() + TURN_NS
        self._look_ns = time.monotonic_ns() + TURN_NS

    @property
    def over(self) -> bool:
        """True if the time is used up."""
        now_ns = time.monotonic_ns()
        if now_ns < self._look_ns:  # reading the CPU time is slower than the clock
            return False
        left_ns = self._over_ns - time.thread_time_ns()
        # Before that time the CPU time cannot be used up, so it need not be read again.
        self._look_ns = now_ns + left_ns
        return left_ns <= 0


class LaterTurns:
    """Short work that nobody waits for, done in later turns of the event loop."""

    def __init__(self) -> None:
        # While it is not empty, a turn is scheduled.
        self._left: deque[Callable[[], None]] = deque()

    def add(self, work: Callable[[], None]) -> None:
        """Call ``work`` in a later turn."""
        if not self._left:
            asyncio.get_running_loop().call_soon(self._take_turn)
        self._left.append(work)

    def _take_turn(self) -> None:
        turn = Turn()
        try:
            while self._left and not turn.over:
                self._left.popleft()()
        finally:
            if self._left:
                asyncio.get_running_loop().call_soon(self._take_turn)


async def in_turns(steps: Steps[_T]) -> _T:
    """Run ``steps``, let the event loop do other work after each turn, and return the result."""
    turn = Turn()
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: _T = done.value
            return result
        if turn.over:
            await asyncio.sleep(0)
            turn = Turn()
