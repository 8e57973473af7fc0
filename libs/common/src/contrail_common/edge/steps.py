"""Long work in steps, so that the event loop can serve others in between."""

import asyncio
import time
from collections.abc import Generator
from typing import Final, TypeVar

_T = TypeVar("_T")

Steps = Generator[None, None, _T]
"""Work that yields wherever it may be interrupted: each step takes a few milliseconds at most."""

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


def at_once(steps: Steps[_T]) -> _T:
    """The result of ``steps`` that are known to be few."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: _T = done.value
            return result
