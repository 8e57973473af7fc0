"""Deadlines that only count the delays of a peer, not those of the server.

A delayed event loop runs its timers before it reads its sockets. A timer that acts at once would
therefore close connections whose bytes arrived in time and are still in the socket's buffer.
"""

import asyncio
from collections.abc import Callable
from typing import Final

_LOOK_S: Final = 0.001
"""Above 0, so that the event loop polls its sockets once before the timer runs."""


def after_a_look(loop: asyncio.AbstractEventLoop, act: Callable[[], object]) -> asyncio.TimerHandle:
    """Run ``act`` after every socket that is ready now was read and written.

    Call this when a deadline has passed, and cancel the handle if the awaited bytes were there.
    """
    return loop.call_later(_LOOK_S, act)
