"""Deadlines that count what a peer lets pass, not what the server itself does.

A loop that was held up runs its timers before it reads its sockets. Whoever acts on a timer at once
therefore closes connections whose bytes came in time and lie in the socket's buffer.
"""

import asyncio
from collections.abc import Callable
from typing import Final

_LOOK_S: Final = 0.001
"""Longer than no time at all: the loop then polls its sockets once before the timer runs."""


def after_a_look(loop: asyncio.AbstractEventLoop, act: Callable[[], object]) -> asyncio.TimerHandle:
    """Run ``act`` once every socket was read, and written to, that was ready by now.

    For a deadline that has passed: cancel the handle when what was awaited turns out to be there.
    """
    return loop.call_later(_LOOK_S, act)
