"""Run calls concurrently, as tasks or in threads, and return their results in order."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


async def async_in_order(
    calls: Iterable[Callable[[], Coroutine[Any, Any, T]]], at_once: int
) -> AsyncIterator[T]:
    """The results of `calls` in order, while up to `at_once` of them run.

    A call is taken from the iterable only when it can start. When the loop over the results is
    left, or a call fails, running calls are cancelled.
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
    """As `async_in_order`, in threads. They cannot be cancelled, so leaving the loop waits."""
    with ThreadPoolExecutor(at_once) as pool:
        under_way: deque[Future[T]] = deque()
        for call in calls:
            under_way.append(pool.submit(call))
            if len(under_way) >= at_once:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
