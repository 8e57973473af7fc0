"""Records which functions of the rooms a piece of work passes through, in every thread."""

import inspect
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Hop:
    """The first call of one function: where it stands and when it was reached."""

    name: str
    file: Path
    line: int
    summary: str
    thread: str
    after_us: float


class Recorder:
    """Notes the first call of each watched function; install it before threads are started."""

    def __init__(self) -> None:
        self.hops: list[Hop] = []
        self._watched: dict[CodeType, Function] = {}
        self._started = 0.0

    def install(self) -> None:
        """Hook into this thread and into every thread that is started from now on."""
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    def uninstall(self) -> None:
        """Take the hook out of this thread and of those to come."""
        threading.setprofile(None)
        sys.setprofile(None)

    def watch(self, functions: Sequence[Function]) -> None:
        """Begin anew with ``functions``."""
        self.hops = []
        self._started = time.perf_counter()
        self._watched = {inspect.unwrap(one).__code__: one for one in functions}

    def _called(self, frame: FrameType, event: str, _argument: object) -> None:
        if event != "call":
            return
        function = self._watched.pop(frame.f_code, None)
        if function is None:
            return
        code = frame.f_code
        self.hops.append(
            Hop(
                f"{function.__module__}.{function.__qualname__}",
                Path(code.co_filename),
                code.co_firstlineno,
                (inspect.getdoc(function) or "").partition("\n")[0],
                threading.current_thread().name,
                (time.perf_counter() - self._started) * 1e6,
            )
        )

    def missing(self) -> list[str]:
        """Watched functions that were not reached."""
        return [f"{one.__module__}.{one.__qualname__}" for one in self._watched.values()]
