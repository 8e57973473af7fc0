"""Records which functions of the rooms a piece of work passes through, in every thread."""

import inspect
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

Function = Callable[..., Any]
_NO_FUNCTIONS = {"<dictcomp>", "<genexpr>", "<listcomp>", "<setcomp>", "<module>"}


@dataclass(frozen=True, slots=True)
class Hop:
    """The first call of one function: where it stands and when it was reached."""

    name: str
    file: Path
    line: int
    summary: str
    thread: str
    after_us: float


@dataclass(frozen=True, slots=True)
class Census:
    """How many calls of the distributions' own functions were made, of how many, in which files."""

    calls: int
    functions: int
    files: frozenset[Path]


class Recorder:
    """Notes the first call of each watched function; install it before threads are started."""

    def __init__(self) -> None:
        self.hops: list[Hop] = []
        self._counts: Counter[CodeType] = Counter()
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
        self._counts.clear()
        self._started = time.perf_counter()
        self._watched = {inspect.unwrap(one).__code__: one for one in functions}

    def _called(self, frame: FrameType, event: str, _argument: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        self._counts[code] += 1
        function = self._watched.pop(code, None)
        if function is None:
            return
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

    def census(self) -> Census:
        """The calls since :meth:`watch`, without comprehensions, which are no functions."""
        own = {
            code: count
            for code, count in list(self._counts.items())  # threads go on
            if "/src/" in code.co_filename and code.co_name not in _NO_FUNCTIONS
        }
        files = frozenset(Path(code.co_filename) for code in own)
        return Census(sum(own.values()), len(own), files)

    def missing(self) -> list[str]:
        """Watched functions that were not reached."""
        return [f"{one.__module__}.{one.__qualname__}" for one in self._watched.values()]
