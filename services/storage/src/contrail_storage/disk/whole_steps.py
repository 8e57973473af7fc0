"""Blocking work in a thread that is never left behind."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def whole(work: Callable[[], T]) -> T:
    """Do ``work`` in a thread; whoever is cancelled meanwhile still waits until it has ended.

    For work that changes files of the folder or runs under a lock: a node that stops cancels its
    tasks and then lets go of the folder, and no thread may outlive that.
    """
    step = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(step)
    except asyncio.CancelledError:
        await asyncio.wait([step])
        step.exception()  # asked for, or asyncio logs that nobody did
        raise
