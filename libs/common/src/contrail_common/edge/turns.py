"""Steps of long work on the event loop: others have their turn in between."""

import asyncio
import time
from typing import Final, TypeVar

from contrail_common.edge.steps import Steps

_T = TypeVar("_T")

TURN_NS: Final = 10_000_000
"""How long steps may follow each other before the loop goes round."""


class Turn:
    """The time that one task may use before others have theirs."""

    __slots__ = ("_over_ns",)

    def __init__(self) -> None:
        self._over_ns = time.monotonic_ns() + TURN_NS

    @property
    def over(self) -> bool:
        """Whether the time is used up."""
        return time.monotonic_ns() >= self._over_ns


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
