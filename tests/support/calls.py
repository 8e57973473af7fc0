"""Costs as numbers of calls, which are the same on every machine and under any load."""

import gc
import sys
from collections.abc import Callable


def calls_of(work: Callable[[], object]) -> int:
    """Number of calls that ``work`` makes on this thread, to functions in Python or C.

    The garbage of other tests is left alone meanwhile: its finalizers would be counted too.
    """
    calls = 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    collects = gc.isenabled()
    gc.disable()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
        if collects:
            gc.enable()
    return calls
