"""Records the files of the services that some work passes through, in all threads."""

import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

_NO_FUNCTIONS = {"<dictcomp>", "<genexpr>", "<listcomp>", "<setcomp>", "<module>"}


@dataclass(frozen=True, slots=True)
class Hop:
    """The first call in one file by one thread; `about` is the module's first line."""

    name: str
    file: Path
    line: int
    about: str
    thread: str
    after_us: float


@dataclass(frozen=True, slots=True)
class Census:
    """The calls of functions of the distributions: their number, their functions and files."""

    calls: int
    functions: int
    files: frozenset[Path]


class Recorder:
    """Counts calls, and records where they enter a file. Install it before threads start."""

    def __init__(self) -> None:
        # Calls since `watch`, by their code. Threads that were not waited for also add to it.
        self._counts: Counter[CodeType] = Counter()
        self._hops: dict[tuple[str, str], Hop] = {}
        self._started = 0.0

    def install(self) -> None:
        """Hook into this thread and into all threads that start from now on."""
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    def uninstall(self) -> None:
        """Remove the hook from this thread and from future threads."""
        threading.setprofile(None)
        sys.setprofile(None)

    def watch(self) -> None:
        """Forget all calls so far."""
        self._hops.clear()
        self._counts.clear()
        self._started = time.perf_counter()

    def _called(self, frame: FrameType, event: str, _argument: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        self._counts[code] += 1
        entered = code.co_filename, threading.current_thread().name
        if entered not in self._hops and _is_own(code):
            self._hops[entered] = Hop(
                f"{frame.f_globals['__name__']}.{code.co_qualname}",
                Path(code.co_filename),
                code.co_firstlineno,
                (frame.f_globals["__doc__"] or "").partition("\n")[0],
                entered[1],
                (time.perf_counter() - self._started) * 1e6,
            )

    def hops(self) -> list[Hop]:
        """The files in the order in which they were reached."""
        return list(self._hops.values())

    def census(self) -> Census:
        """The calls since :meth:`watch`. Comprehensions do not count as functions."""
        # From here on the calls of this method, and of threads that continue, count elsewhere.
        counts, self._counts = dict(self._counts), Counter()
        own = {code: count for code, count in counts.items() if _is_own(code)}
        files = frozenset(Path(code.co_filename) for code in own)
        return Census(sum(own.values()), len(own), files)


def _is_own(code: CodeType) -> bool:
    return "/src/" in code.co_filename and code.co_name not in _NO_FUNCTIONS
