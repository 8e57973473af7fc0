"""Time as the stories have it: it stands still until a command moves it on."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, ParamSpec, TypeVar

from contrail_common.timeunits import NS_PER_S, format_duration, parse_time
from tests.unit.storage.dispatcher_rig import HandLoop

_P = ParamSpec("_P")
_T = TypeVar("_T")

BEGIN_NS: Final = parse_time("2026-01-01T00:00:00Z")


class StoryClock:
    """Stands in for the module ``time`` where the node reads its clocks."""

    CLOCK_BOOTTIME: Final = 7
    CLOCK_MONOTONIC: Final = 1

    def __init__(self) -> None:
        self.elapsed_ns = 0
        self.wall_step_ns = 0

    def time_ns(self) -> int:
        """The wall clock, which a story may set back or forth."""
        return BEGIN_NS + self.elapsed_ns + self.wall_step_ns

    def clock_gettime_ns(self, _clock: int) -> int:
        """The clock that runs on whatever happens to the wall clock."""
        return self.elapsed_ns


class StoryLoop(HandLoop):
    """An event loop on the story's clock. Work for threads is done at once, by the loop itself."""

    def __init__(self) -> None:
        super().__init__()
        self.set_default_executor(_AtOnce())

    def next_timer_ns(self) -> int | None:
        """When the next timer is due, on the loop's clock; None when none is set."""
        timers: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        times = [timer.when() for timer in timers if not timer.cancelled()]
        return round(min(times) * NS_PER_S) if times else None


class _AtOnce(ThreadPoolExecutor):
    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        done: Future[_T] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


def shown_time(time_ns: int) -> str:
    """A log time as the time since the story began, such as ``90s``."""
    return format_duration(time_ns - BEGIN_NS)
