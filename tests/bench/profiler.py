"""``python -m tests.bench.profiler calls|cpu FILE SERVICE [name=value ...]``: a watched server.

Runs a server command, and on each SIGUSR1 writes what its functions have cost so far into FILE.

``calls`` counts calls of functions in Python, which makes the server several times slower. ``cpu``
takes samples instead, which costs a few percent: each gives the CPU time that a thread used since
the last one to the function in which it is. (The time of traced calls would say too much of small
functions, and a thread that takes samples sees the others only where they release the interpreter
lock.)
"""

import contextlib
import dis
import os
import random
import signal
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Final, NamedTuple, Protocol

import msgspec

from contrail_serve.main import main as serve
from tests.bench.stages import OTHER, SHARED, Costs, Function, stage_of

_PAUSE_S: Final = 0.001
_CPUCLOCK_PERTHREAD_SCHED: Final = 6
_RESUME: Final = dis.opmap["RESUME"]
_INLINED: Final = {"<dictcomp>", "<listcomp>", "<setcomp>"}
"""Calls until Python 3.11, and none since."""


class Profiler(Protocol):
    """A way to find out what functions cost."""

    def install(self) -> None:
        """Begin, before other threads start."""
        ...

    def costs(self) -> Costs:
        """What each function has cost so far."""
        ...


class Calls:
    """Numbers of calls in all threads."""

    def __init__(self) -> None:
        self._counts: defaultdict[Function, int] = defaultdict(int)
        self._modules = _Modules()

    def install(self) -> None:
        """Begin in this thread, and in threads that start from now on."""
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    def costs(self) -> Costs:
        """The number of calls of each function."""
        return dict(self._counts)

    def _called(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name not in _INLINED:
            function = self._modules.stage(frame), self._modules.entry(frame).name
            # No other thread comes between reading and writing: no call into Python is there.
            self._counts[function] += 1


class Cpu:
    """CPU time in nanoseconds, from samples of all threads at irregular times."""

    def __init__(self) -> None:
        self._used_ns: defaultdict[Function, int] = defaultdict(int)
        self._modules = _Modules()
        # By thread: its CPU time at the last sample, and where it was last seen at work.
        self._seen: dict[int, int] = {}
        self._worked: dict[int, Function] = {}
        self._sampling_ns = self._begun_ns = 0
        # A fixed pause could be in step with timers of the server.
        self._random = random.Random(1)

    def install(self) -> None:
        """Begin to take samples. They interrupt the main thread, which has to be this one."""
        self._begun_ns = time.process_time_ns()
        self._seen[threading.get_native_id()] = time.thread_time_ns()
        signal.signal(signal.SIGALRM, self._sample)
        # System calls of libraries continue after a sample; event loops wake up for it anyway.
        signal.siginterrupt(signal.SIGALRM, False)
        self._set_timer()

    def costs(self) -> Costs:
        """The CPU time of each function; threads that are not of Python are one ``other``."""
        used = time.process_time_ns() - self._begun_ns - self._sampling_ns
        elsewhere = used - sum(self._used_ns.values())
        return {**self._used_ns, (OTHER, "threads without Python"): elsewhere}

    def _set_timer(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, _PAUSE_S * self._random.uniform(0.5, 1.5))

    def _sample(self, _: int, interrupted: FrameType | None) -> None:
        entered_ns = time.thread_time_ns()
        main = threading.get_native_id()
        frames = sys._current_frames()
        for thread in threading.enumerate():
            if thread.native_id == main:
                self._add(main, _caller_if_just_called(interrupted), entered_ns)
            elif thread.native_id is not None:
                with contextlib.suppress(OSError):  # it has just ended
                    now_ns = time.clock_gettime_ns(_clock_of(thread.native_id))
                    self._add(thread.native_id, frames.get(thread.ident or 0), now_ns)
        self._set_timer()
        left_ns = time.thread_time_ns()
        self._sampling_ns += left_ns - entered_ns
        self._seen[main] = left_ns

    def _add(self, thread: int, frame: FrameType | None, now_ns: int) -> None:
        if frame is not None:
            seen_ns = self._seen.get(thread, 0)
            # A clock that goes back is that of another thread, which has the id of an ended one.
            used_ns = now_ns - seen_ns if now_ns >= seen_ns else now_ns
            function = self._modules.function(frame)
            if function[0] == OTHER:
                # A thread of a pool, which has done its work and waits for more.
                function = self._worked.get(thread, function)
            elif thread != threading.main_thread().native_id:
                self._worked[thread] = function
            self._used_ns[function] += used_ns
            self._seen[thread] = now_ns


class _Entry(NamedTuple):
    """A function: its stage or ``other`` or ``shared``, its name, and what keeps its id."""

    stage: str
    name: str
    code: CodeType


class _Modules:
    """Finds whose cost a frame is."""

    def __init__(self) -> None:
        # By the id, because hashing code itself looks at all its constants.
        self._entries: dict[int, _Entry] = {}

    def entry(self, frame: FrameType) -> _Entry:
        """The function of a frame, and the stage of its module."""
        code = frame.f_code
        entry = self._entries.get(id(code))
        if entry is None:
            module = str(frame.f_globals.get("__name__"))
            name = code.co_qualname
            if code.co_name in _INLINED:
                name = name.removesuffix(f".<locals>.{code.co_name}")
            entry = _Entry(stage_of(module), f"{module}.{name}", code)
            self._entries[id(code)] = entry
        return entry

    def stage(self, frame: FrameType | None) -> str:
        """The stage of the innermost frame that has one: libraries work for their callers."""
        while frame is not None:
            stage = self.entry(frame).stage
            if stage not in (OTHER, SHARED):
                return stage
            frame = frame.f_back
        return OTHER

    def function(self, frame: FrameType) -> Function:
        """The stage, and the innermost function of the server itself."""
        within = frame
        while self.entry(within).stage == OTHER and within.f_back is not None:
            within = within.f_back
        return self.stage(within), self.entry(within).name


def _caller_if_just_called(frame: FrameType | None) -> FrameType | None:
    """A function that has just begun has used nothing yet: the time before was its caller's."""
    if frame is not None and frame.f_code.co_code[frame.f_lasti] == _RESUME:
        return frame.f_back or frame
    return frame


def _clock_of(thread: int) -> int:
    """The clock of a thread's CPU time, as the kernel numbers them.

    ``time.pthread_getcpuclockid`` must not be asked about a thread that has ended.
    """
    return ~thread << 3 | _CPUCLOCK_PERTHREAD_SCHED


def main() -> int:
    """Run the service under the profiler, until it ends; returns its exit status."""
    kind, file, service, *settings = sys.argv[1:]
    profiler: Profiler = Calls() if kind == "calls" else Cpu()

    def write(_: int, __: object) -> None:
        rows = [(*function, cost) for function, cost in profiler.costs().items()]
        written = Path(f"{file}.part")
        written.write_bytes(msgspec.json.encode(rows))
        os.replace(written, file)

    signal.signal(signal.SIGUSR1, write)
    profiler.install()
    return serve(dict(setting.split("=", 1) for setting in settings), service)


if __name__ == "__main__":
    sys.exit(main())
