"""An event loop with a clock of its own, on which several simulated processes run.

Time passes only while nothing is due, so a run is as fast as its work, and the same seed gives the
same run. Each call belongs to the process in whose context it was made. Calls of a process that is
paused are held until it goes on, and those of a dead one are never made.
"""

import asyncio
import heapq
import random
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from typing import Any, Final, Self

from tests.sim.threads import Pool, Worker

EPOCH_S: Final = 1_800_000_000
"""The wall clock at the begin of a run, in seconds since 1970."""
_BEGIN_S: Final = 100.0
_ORDER_S: Final = 1e-12
_JOB_S: Final = 0.0002


class Process:
    """A process that runs on the loop: its calls, its threads and its wall clock."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock_ahead_ns = 0
        self.dead = self.paused = False
        self.held: list[Callable[[], None]] = []
        # In the order in which they began, in which they end: a set would follow addresses.
        self.workers: dict[Worker, None] = {}
        self.context = copy_context()
        self.context.run(_process.set, self)

    def takes(self, call: Callable[[], None]) -> bool:
        """Whether a call may be made now; it is kept for later while the process is paused."""
        if self.paused and not self.dead:
            self.held.append(call)
        return not (self.dead or self.paused)


_process: ContextVar[Process | None] = ContextVar("process", default=None)


def current_process() -> Process | None:
    """The process that is running; None for the simulation itself."""
    return _process.get()


def process_of(context: Context) -> Process | None:
    """The process to which calls in a context belong."""
    return context.get(_process)


class _Handle(asyncio.Handle):
    def _run(self) -> None:
        process = process_of(self._context)  # type: ignore[attr-defined]
        if process is None or process.takes(self._run):
            super()._run()  # type: ignore[misc]


class _TimerHandle(asyncio.TimerHandle):
    def __lt__(self, other: Any) -> bool:
        return bool(self._when < other._when)  # type: ignore[attr-defined]

    def _run(self) -> None:
        process = process_of(self._context)  # type: ignore[attr-defined]
        if not self.cancelled() and (process is None or process.takes(self._run)):
            super()._run()  # type: ignore[misc]


class _Idle:
    """Takes the place of the system call that waits: it lets the time pass."""

    def __init__(self, loop: "SimLoop") -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("nothing is due, and nobody will ever do anything again")
        self._loop.now += timeout
        return []

    def close(self) -> None:
        pass


def _is_timer(call: Any) -> bool:
    return not getattr(call.__self__._callback, "arrives", False)


class SimLoop(asyncio.base_events.BaseEventLoop):
    """The loop of a run. Use as a context manager, which makes it the current one."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.now = _BEGIN_S
        self.random = random.Random(f"loop {seed}")
        self.errors: list[str] = []
        self._timers = 0
        self._clock_resolution = 1e-9
        self._selector = _Idle(self)
        self._pool = Pool()
        # Of dead processes too: a coroutine that is collected would run its `finally`.
        self._tasks: list[asyncio.Task[Any]] = []
        self.set_task_factory(self._make_task)
        self.set_exception_handler(self._note_error)

    def __enter__(self) -> Self:
        asyncio.set_event_loop(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()
        asyncio.set_event_loop(None)
        self.close()
        for task in self._tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            # What it still wants to do at its end, it can no longer do.
            with suppress(BaseException):
                task.get_coro().close()

    # What asyncio needs --------------------------------------------------------------------------

    def time(self) -> float:
        """Seconds; never goes backwards."""
        return self.now

    def _process_events(self, event_list: object) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def _call_soon(
        self, callback: Callable[..., object], args: Any, context: Context | None
    ) -> asyncio.Handle:
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """As the base class."""
        # Those that are due at the same time run in the order in which they were made.
        self._timers += 1
        timer = _TimerHandle(when + self._timers * _ORDER_S, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)  # type: ignore[attr-defined]
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Run in a simulated thread."""
        del executor
        future = self.create_future()

        def work() -> None:
            try:
                result = func(*args)
            except Exception as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        self.spawn_thread(work, self.random.random() * _JOB_S)
        return future

    def _make_task(self, loop: asyncio.AbstractEventLoop, coro: Any, **more: Any) -> Any:
        task = asyncio.Task(coro, loop=loop, **more)
        if current_process() is not None:
            self._tasks.append(task)
            if len(self._tasks) > 4_096:
                self._tasks = [one for one in self._tasks if not one.done()]
        return task

    def _note_error(self, loop: object, context: dict[str, Any]) -> None:
        del loop
        error = context.get("exception")
        self.errors.append(f"{context['message']}: {error!r}")

    # Processes and threads -----------------------------------------------------------------------

    def spawn_thread(self, target: Callable[[], None], delay_s: float = 0.0) -> Worker:
        """Run a target in a simulated thread of the current process."""
        worker = Worker(self, self._pool, current_process(), target)
        worker.wake(delay_s)
        return worker

    def pause(self, process: Process) -> None:
        """Stop a process, as SIGSTOP does."""
        process.paused = True

    def go_on(self, process: Process) -> None:
        """Let a paused process go on: it makes all calls that became due meanwhile.

        As in a real loop, what has arrived comes before the timers.
        """
        process.paused = False
        held, process.held = process.held, []
        for call in sorted(held, key=_is_timer):
            self.call_soon(call, context=process.context.copy())

    def kill(self, process: Process) -> None:
        """End a process: nothing of it is called any more, and its threads end."""
        process.dead = True
        process.held.clear()
        for worker in list(process.workers):
            worker.kill()

    def run_for(self, seconds: float) -> None:
        """Let the time pass."""
        self.call_later(seconds, self.stop)
        self.run_forever()


def wall_ns(loop: SimLoop) -> int:
    """The wall clock of the running process."""
    process = current_process()
    ahead_ns = 0 if process is None else process.clock_ahead_ns
    return EPOCH_S * 10**9 + round(loop.now * 1e9) + ahead_ns
