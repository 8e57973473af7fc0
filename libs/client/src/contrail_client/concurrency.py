"""Calls that run side by side while their results come in order: as tasks, or in threads."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


async def async_in_order(
    calls: Iterable[Callable[[], Coroutine[Any, Any, T]]], at_once: int
) -> AsyncIterator[T]:
    """The results of `calls` in their order, with up to `at_once` of them under way.

    A call is taken when its turn has come, not before. What is under way when the loop over the
    results is left, or a call fails, is cancelled.
    """
    under_way: deque[asyncio.Task[T]] = deque()
    try:
        for call in calls:
            under_way.append(asyncio.create_task(call()))
            if len(under_way) >= at_once:
                yield await under_way.popleft()
        while under_way:
            yield await under_way.popleft()
    finally:
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)


def in_order(calls: Iterable[Callable[[], T]], at_once: int) -> Iterator[T]:
    """As `async_in_order`, in threads: these cannot be cancelled, so their end is waited for."""
    with ThreadPoolExecutor(at_once) as pool:
        under_way: deque[Future[T]] = deque()
        for call in calls:
            under_way.append(pool.submit(call))
            if len(under_way) >= at_once:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
