"""Records the functions of the services that some work passes through, in all threads."""

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
    """The first call of one function: its source position, and when it was reached."""

    name: str
    file: Path
    line: int
    summary: str
    thread: str
    after_us: float


@dataclass(frozen=True, slots=True)
class Census:
    """The calls of functions of the distributions: their number, their functions and files."""

    calls: int
    functions: int
    files: frozenset[Path]


class Recorder:
    """Records the first call of each watched function. Install it before threads start."""

    def __init__(self) -> None:
        self.hops: list[Hop] = []
        self._counts: Counter[CodeType] = Counter()
        self._watched: dict[CodeType, Function] = {}
        self._started = 0.0

    def install(self) -> None:
        """Hook into this thread and into all threads that start from now on."""
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    def uninstall(self) -> None:
        """Remove the hook from this thread and from future threads."""
        threading.setprofile(None)
        sys.setprofile(None)

    def watch(self, functions: Sequence[Function]) -> None:
        """Forget all calls, and watch `functions` from now on."""
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
        """The calls since :meth:`watch`. Comprehensions do not count as functions."""
        # From here on the calls of this method, and of threads that continue, count elsewhere.
        counts, self._counts = dict(self._counts), Counter()
        own = {
            code: count
            for code, count in counts.items()
            if "/src/" in code.co_filename and code.co_name not in _NO_FUNCTIONS
        }
        files = frozenset(Path(code.co_filename) for code in own)
        return Census(sum(own.values()), len(own), files)

    def missing(self) -> list[str]:
        """Watched functions that were not reached."""
        return [f"{one.__module__}.{one.__qualname__}" for one in self._watched.values()]
