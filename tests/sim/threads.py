"""Threads of simulated processes: real threads, of which one runs at a time.

The event loop hands the turn to a thread and waits. The thread gives it back when it ends, sleeps,
or waits for a lock, a condition or a queue. So the order of all steps follows from the seed.
"""

import asyncio
import math
import queue
import threading
from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Final, Self, cast

if TYPE_CHECKING:
    from tests.sim.loop import Process, SimLoop

_SWITCH_S: Final = 0.00005


class Killed(BaseException):
    """Raised in the threads of a process that was killed."""


class _Body(threading.Thread):
    """A real thread, which runs one worker after another."""

    def __init__(self, pool: "Pool") -> None:
        super().__init__(daemon=True)
        self.go = threading.Semaphore(0)
        self.back = threading.Semaphore(0)
        self.job: Callable[[], None] | None = None
        self._pool = pool
        self.start()

    def run(self) -> None:
        while True:
            self.go.acquire()
            if self.job is None:
                return
            self.job()
            self._pool.idle.append(self)
            self.back.release()


class Pool:
    """Real threads that wait for a worker."""

    def __init__(self) -> None:
        self.idle: list[_Body] = []

    def take(self) -> _Body:
        """A thread that has nothing to do."""
        return self.idle.pop() if self.idle else _Body(self)

    def close(self) -> None:
        """End the idle threads."""
        for body in self.idle:
            body.job = None
            body.go.release()


_running = threading.local()


class Worker:
    """A simulated thread."""

    def __init__(
        self,
        loop: "SimLoop",
        pool: Pool,
        process: "Process | None",
        target: Callable[[], None],
    ) -> None:
        self.done = False
        self._loop, self._pool, self._process, self._target = loop, pool, process, target
        self._context = copy_context()
        self._body: _Body | None = None
        self.killed = False
        # Counts its waits, so that a wake-up for an earlier one is known as such.
        self.waits = 0
        self._ended: list[Worker] = []
        if process is not None:
            process.workers[self] = None

    @property
    def now(self) -> float:
        """The time of the loop."""
        return self._loop.now

    def wake(self, delay_s: float = -1.0) -> None:
        """Give it the turn a little later, unless it has been woken meanwhile."""
        if delay_s < 0:
            delay_s = self._loop.random.random() * _SWITCH_S
        self._loop.call_later(delay_s, self._step, self.waits, context=self._context.copy())

    def _step(self, wait: int) -> None:
        if wait == self.waits and not self.done:
            self._take_turn()

    def _take_turn(self) -> None:
        self.waits += 1
        if self._body is None:
            self._body = self._pool.take()
            self._body.job = self._run
        body = self._body
        body.go.release()
        body.back.acquire()

    def _run(self) -> None:
        _running.worker = self
        try:
            if not self.killed:
                self._context.copy().run(self._target)
        except Killed:
            pass
        except BaseException as error:
            self._loop.errors.append(f"a thread ended: {error!r}")
        self.done = True
        if self._process is not None:
            self._process.workers.pop(self, None)
        for one in self._ended:
            one.wake()

    def give_turn(self) -> None:
        """Called by the thread itself: wait until it is woken."""
        body = self._body
        assert body is not None
        if self.killed:
            raise Killed
        body.back.release()
        body.go.acquire()
        if self.killed:
            raise Killed

    def kill(self) -> None:
        """End it: the exception ends what it does, and nothing it touches counts any more."""
        self.killed = True
        if self._body is None:
            self.done = True
            if self._process is not None:
                self._process.workers.pop(self, None)
        while not self.done:
            self._take_turn()

    def sleep(self, seconds: float) -> None:
        """Called by the thread itself."""
        self.wake(seconds)
        self.give_turn()

    def join(self) -> None:
        """Wait in another simulated thread until this one has ended."""
        if not self.done:
            waiting = current_worker("join")
            self._ended.append(waiting)
            waiting.give_turn()


def current_worker(what: str) -> Worker:
    """The thread that runs. Raises AssertionError on the event loop, which must never wait."""
    worker: Worker | None = getattr(_running, "worker", None)
    assert worker is not None, f"the event loop waits: {what}"
    return worker


def _runs_now() -> object:
    """The simulated thread that runs; the event loop is one too."""
    return getattr(_running, "worker", None) or _running


def sleep(seconds: float) -> None:
    """`time.sleep`."""
    current_worker("sleep").sleep(seconds)


class Lock:
    """`threading.Lock`."""

    def __init__(self) -> None:
        self._held = False
        self._waiting: deque[Worker] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not self._held:
            self._held = True
            return True
        if not blocking:
            return False
        assert timeout < 0, "not simulated"
        worker = current_worker("a lock is held")
        self._waiting.append(worker)
        worker.give_turn()
        return True  # `release` has handed it over

    def release(self) -> None:
        self._held = False
        while self._waiting:
            worker = self._waiting.popleft()
            if not worker.done:
                self._held = True
                worker.wake()
                return

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock(Lock):
    """`threading.RLock`. A condition must not wait where its owner has acquired it twice."""

    def __init__(self) -> None:
        super().__init__()
        self._owner: object = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = _runs_now()
        if self._held and self._owner is me:
            self._depth += 1
            return True
        if not super().acquire(blocking, timeout):
            return False
        self._owner, self._depth = me, 1
        return True

    def release(self) -> None:
        me = _runs_now()
        if self._owner is not me:
            # A thread that was killed while it waited for a condition has not got it back.
            assert getattr(me, "killed", False), "another thread has the lock"
            return
        self._depth -= 1
        if not self._depth:
            self._owner = None
            super().release()


class Condition:
    """`threading.Condition`."""

    def __init__(self, lock: Any = None) -> None:
        self._lock = lock or Lock()
        self._waiting: deque[tuple[Worker, int]] = deque()

    def __enter__(self) -> Self:
        self._lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        worker = current_worker("a condition")
        mine = worker, worker.waits
        self._waiting.append(mine)
        self._lock.release()
        if timeout is not None:
            worker.wake(timeout)
        try:
            worker.give_turn()
        finally:
            signalled = mine not in self._waiting
            if not signalled:
                self._waiting.remove(mine)
            if not worker.killed:
                self._lock.acquire()
        return signalled

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        end_s = math.inf if timeout is None else current_worker("a condition").now + timeout
        while not predicate():
            left_s = None if timeout is None else end_s - current_worker("a condition").now
            if left_s is not None and left_s <= 0:
                return False
            self.wait(left_s)
        return True

    def notify(self, n: int = 1) -> None:
        for _ in range(min(n, len(self._waiting))):
            worker, _wait = self._waiting.popleft()
            worker.wake()

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class SimpleQueue:
    """`queue.SimpleQueue`."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._ready = Condition()

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._ready.notify()

    def get(self) -> Any:
        while not self._items:
            with self._ready:
                self._ready.wait()
        return self._items.popleft()

    def get_nowait(self) -> Any:
        if not self._items:
            raise queue.Empty
        return self._items.popleft()


class Thread:
    """`threading.Thread`."""

    def __init__(
        self, target: Callable[..., None], name: str = "", daemon: bool = False, args: Any = ()
    ) -> None:
        del name, daemon
        self._target, self._args = target, args
        self._worker: Worker | None = None

    def start(self) -> None:
        loop = cast("SimLoop", asyncio.get_running_loop())
        self._worker = loop.spawn_thread(lambda: self._target(*self._args), _SWITCH_S)

    def is_alive(self) -> bool:
        return self._worker is not None and not self._worker.done

    def join(self) -> None:
        if self._worker is not None:
            self._worker.join()


class Threading:
    """Takes the place of the module `threading` in modules of the product."""

    Thread = Thread
    Lock = Lock
    RLock = RLock
    Condition = Condition
    Event = threading.Event
    current_thread = staticmethod(threading.current_thread)


class Queue:
    """Takes the place of the module `queue`."""

    SimpleQueue = SimpleQueue
    Empty = queue.Empty


def in_thread() -> bool:
    """Whether a simulated thread runs, not the event loop."""
    return getattr(_running, "worker", None) is not None
