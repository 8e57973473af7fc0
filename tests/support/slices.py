"""The event loop, callback by callback: what a step of it costs, in CPU time of its thread.

CPU time, so that a busy machine does not fail a test. Garbage collections are left out: their
length depends on everything else that the process of the tests has made.
"""

import asyncio
import contextlib
import gc
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

RULE_S: Final = 0.02
"""The longest that one step may hold the event loop."""

_TRIES: Final = 3
_LOOK_S: Final = 0.005
_FRAMES: Final = 6


@dataclass(slots=True)
class Slices:
    """The longest callback since :func:`sliced` began, and the calls it was in when looked at."""

    longest_s: float = 0.0
    longest: str = "nothing has run"
    count: int = 0
    collected_s: float = 0.0
    """CPU time of garbage collections in the loop's thread."""
    seen: list[str] = field(default_factory=list)
    """What a thread has seen during the current callback; the innermost call first."""

    def note(self, used_s: float, handle: asyncio.Handle) -> None:
        """Count a callback."""
        self.count += 1
        if used_s > self.longest_s:
            self.longest_s, self.longest = used_s, "\n  ".join(self.seen) or repr(handle)
        self.seen = []

    def __str__(self) -> str:
        """The longest callback, for the text of a failure."""
        return f"one step took {self.longest_s * 1e3:.1f} ms of CPU:\n  {self.longest}"


@contextlib.contextmanager
def sliced() -> Iterator[Slices]:
    """Time every callback of this thread's asyncio loop while the context lasts."""
    slices = Slices()
    thread = threading.get_ident()
    ended = threading.Event()
    run = asyncio.Handle._run
    collecting_since = 0.0

    def timed(handle: asyncio.Handle) -> None:
        if threading.get_ident() != thread:
            run(handle)
            return
        begun, collected = time.thread_time(), slices.collected_s
        run(handle)
        used = time.thread_time() - begun - (slices.collected_s - collected)
        slices.note(used, handle)

    def collected(phase: str, _: dict[str, Any]) -> None:
        nonlocal collecting_since
        if threading.get_ident() != thread:
            return
        if phase == "start":
            collecting_since = time.thread_time()
        else:
            slices.collected_s += time.thread_time() - collecting_since

    def look() -> None:
        clock = time.pthread_getcpuclockid(thread)
        count, since = -1, 0.0
        while not ended.wait(_LOOK_S):
            now = time.clock_gettime(clock)
            if slices.count != count:
                count, since = slices.count, now
            elif now - since > _LOOK_S:
                slices.seen = _calls(thread)

    looker = threading.Thread(target=look, daemon=True)
    asyncio.Handle._run = timed  # type: ignore[attr-defined]
    gc.callbacks.append(collected)
    looker.start()
    try:
        yield slices
    finally:
        ended.set()
        gc.callbacks.remove(collected)
        asyncio.Handle._run = run  # type: ignore[attr-defined]
        looker.join()


async def assert_no_stall(
    operation: Callable[[], Coroutine[Any, Any, object]], bound_s: float = RULE_S
) -> None:
    """AssertionError if one callback takes more than ``bound_s`` of CPU during ``operation``.

    It is repeated if it does: what other processes do to the caches passes, a stall does not. Run
    the operation on something small before: what it imports at its first use is no stall.
    """
    for _ in range(_TRIES):
        with sliced() as slices:
            # A task, so that its steps up to the first wait are callbacks too.
            await asyncio.ensure_future(operation())
        assert slices.count, "no callback was seen: is this loop asyncio's own?"
        if slices.longest_s <= bound_s:
            return
    raise AssertionError(str(slices))


def _calls(thread: int) -> list[str]:
    calls: list[str] = []
    frame = sys._current_frames().get(thread)
    while frame is not None and len(calls) < _FRAMES:
        name = frame.f_globals.get("__name__", "?")
        calls.append(f"{name}:{frame.f_code.co_qualname}:{frame.f_lineno}")
        frame = frame.f_back
    return calls
