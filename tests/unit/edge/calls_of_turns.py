"""How much is done between two turns of the event loop, counted and not timed."""

import asyncio
import sys
from types import FrameType
from typing import Any


class CallsOfTurns:
    """Counts calls of functions in each turn of the loop while it is entered."""

    def __init__(self) -> None:
        self.most = self.turns = self._count = 0

    def __enter__(self) -> "CallsOfTurns":
        self._next = asyncio.get_running_loop().call_soon(self._turn)
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        self._next.cancel()

    def _turn(self) -> None:
        self.most, self._count = max(self.most, self._count), 0
        self.turns += 1
        self._next = asyncio.get_running_loop().call_soon(self._turn)

    def _called(self, frame: FrameType, event: str, argument: Any) -> None:
        self._count += event in ("call", "c_call")
