"""Run blocking work in a thread that never outlives the task that awaits it."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def whole(work: Callable[[], T]) -> T:
    """Run ``work`` in a thread; a caller that is cancelled still waits until it has ended.

    Use it for work that changes files of the folder or holds a lock: a node that stops cancels its
    tasks and then releases the folder, and no thread may outlive that.
    """
    step = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(step)
    except asyncio.CancelledError:
        await asyncio.wait([step])
        step.exception()  # retrieved, or asyncio logs that it never was
        raise
