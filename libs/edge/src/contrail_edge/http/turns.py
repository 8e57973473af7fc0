"""Steps of long work on the event loop: others have their turn in between."""

import asyncio
import time
from typing import Final, TypeVar

from contrail_edge.http.steps import Steps

_T = TypeVar("_T")

TURN_NS: Final = 10_000_000
"""How much CPU time steps may take, one after the other, before the loop goes round."""


class Turn:
    """The CPU time that one task may use before others have theirs.

    Time that other processes took from this one is not counted: shorter turns would not give it
    back, and they would cost more.
    """

    __slots__ = ("_look_ns", "_over_ns")

    def __init__(self) -> None:
        self._over_ns = time.thread_time_ns() + TURN_NS
        self._look_ns = time.monotonic_ns() + TURN_NS

    @property
    def over(self) -> bool:
        """Whether the time is used up."""
        now_ns = time.monotonic_ns()
        if now_ns < self._look_ns:  # asking for the CPU time takes longer
            return False
        left_ns = self._over_ns - time.thread_time_ns()
        self._look_ns = now_ns + left_ns
        return left_ns <= 0


async def in_turns(steps: Steps[_T]) -> _T:
    """The result of ``steps``; the loop goes round whenever a turn is over."""
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
