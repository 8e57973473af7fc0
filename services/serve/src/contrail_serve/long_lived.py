"""Keeps garbage collections short: objects that live long are left out of them.

A full collection of Python looks at all container objects, and so holds the event loop for a time
that grows with the number of streams and consumers. `gc.freeze` excludes everything that exists
from later collections. Frozen objects are freed as always when nothing refers to them. Only frozen
objects that refer to each other in a circle stay in memory until a thaw. Streams, consumers and
connections end without such circles.
"""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

LONG_S: Final = 0.005
"""A full collection that took longer is followed by a freeze."""

THRESHOLDS: Final = (700, 10, 3)
"""See `gc.set_threshold`. A full collection comes after about 30,000 new objects, not 85,000.

So it takes about 10 ms, and up to 5 ms for older ones. What is new is looked at once in any case.
"""

THAW_AFTER: Final = 128
"""Instead of every 128th freeze there is a thaw: the next collection looks at everything."""

_OLDEST: Final = 2
"""The generation of a full collection."""


@contextmanager
def uncollected() -> Iterator[None]:
    """Run without collections, then freeze: nearly all objects made meanwhile live long."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def short_collections(long_s: float = LONG_S, thaw_after: int = THAW_AFTER) -> Iterator[None]:
    """Collect little at a time, and freeze what a long full collection leaves; in any thread."""
    begun_s = 0.0
    long = 0

    def collected(phase: str, info: dict[str, Any]) -> None:
        nonlocal begun_s, long
        if info["generation"] < _OLDEST:
            return
        if phase == "start":
            begun_s = time.thread_time()
        elif time.thread_time() - begun_s >= long_s:
            long += 1
            if long % thaw_after:
                gc.freeze()
            else:
                gc.unfreeze()

    thresholds = gc.get_threshold()
    gc.set_threshold(*THRESHOLDS)
    gc.callbacks.append(collected)
    try:
        yield
    finally:
        gc.callbacks.remove(collected)
        gc.set_threshold(*thresholds)
