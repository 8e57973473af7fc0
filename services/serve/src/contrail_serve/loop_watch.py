"""Watches the event loop: how late its timers run, and what held it for too long.

A timer, every 20 ms, compares two clocks. Its delay in wall time is the *lateness*: every request
waits that long. The part of it that the loop's thread spent computing is the *stall*. Waiting for a
core, for another thread or for the disk makes the loop late and does not stall it, so that stalls
mean the same on a busy machine.

uvloop has no hook around its callbacks, and one would cost every request. The timer costs 6 µs
fifty times a second whatever the load is, and less often while the loop is idle. A stall is seen
from the moment the timer is due, so up to 20 ms of it are not counted, after idleness up to 50 ms.
"""

import asyncio
import sys
import threading
import time
from types import FrameType
from typing import Final

import structlog

from contrail_common.timings import Timings

CHECK_S: Final = 0.02
"""Seconds between checks; also the longest that one step may hold the loop."""

IDLE_CHECK_S: Final = 0.05
_IDLE_CPU_S: Final = 0.001
"""The loop is idle if it has used less between two checks."""

WARN_S: Final = 0.1
_LOOK_S: Final = WARN_S / 2
"""The thread looks twice during a stall that is warned of."""

_FRAMES: Final = 8
_log: Final = structlog.get_logger("contrail.serve")


class LoopWatch:
    """Measures the running event loop while :meth:`run` runs."""

    def __init__(self) -> None:
        self.lateness = Timings()
        """Delays of the timer."""
        self.stalls = Timings()
        """The CPU time that the loop's thread used during each of these delays."""
        self._checks = 0  # the loop writes it, the thread reads it
        self._checked_cpu_s = 0.0  # as above: CPU time of the loop's thread at the last check
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        # What the loop was doing since the check of that number; written by the thread.
        self._seen: tuple[int, list[str]] = (0, [])

    @property
    def named(self) -> bool:
        """Whether it is known what the loop has been doing since the last check."""
        return self._seen[0] == self._checks

    async def run(self) -> None:
        """Watch until cancelled."""
        loop = asyncio.get_running_loop()
        self._arm(loop, CHECK_S)
        ended = threading.Event()
        if hasattr(time, "pthread_getcpuclockid"):  # not on macOS: there, stalls have no names
            asked = threading.get_ident(), ended
            threading.Thread(target=self._look, args=asked, name="loop-watch", daemon=True).start()
        try:
            await loop.create_future()
        finally:
            ended.set()
            if self._timer is not None:
                self._timer.cancel()

    def _arm(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._checked_cpu_s = time.thread_time()
        self._checks += 1
        self._due_s = time.monotonic() + seconds
        self._timer = loop.call_later(seconds, self._check, loop)

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        late_s = max(time.monotonic() - self._due_s, 0.0)
        used_s = time.thread_time() - self._checked_cpu_s
        # The rest of the delay was spent waiting.
        stall_s = min(late_s, used_s)
        self.lateness.add(late_s)
        self.stalls.add(stall_s)
        if stall_s > CHECK_S:
            say = _log.warning if stall_s > WARN_S else _log.debug
            say(
                "loop_stalled",
                seconds=round(stall_s, 3),
                doing=self._seen[1] if self.named else [],
            )
        self._arm(loop, CHECK_S if used_s > _IDLE_CPU_S else IDLE_CHECK_S)

    def _look(self, loop_thread: int, ended: threading.Event) -> None:
        """Note what the loop is doing whenever it has not come round for long; in a thread."""
        clock = time.pthread_getcpuclockid(loop_thread)
        while not ended.wait(_LOOK_S):
            number = self._checks
            # The first look counts: a later one may come when the step has just ended.
            if self.named:
                continue
            if time.clock_gettime(clock) - self._checked_cpu_s > 2 * CHECK_S:
                frame = sys._current_frames().get(loop_thread)
                self._seen = number, _innermost(frame)


def _innermost(frame: FrameType | None) -> list[str]:
    """Return the innermost calls as ``module:function:line``, the innermost first."""
    calls: list[str] = []
    while frame is not None and len(calls) < _FRAMES:
        module = frame.f_globals.get("__name__", "?")
        calls.append(f"{module}:{frame.f_code.co_qualname}:{frame.f_lineno}")
        frame = frame.f_back
    return calls
