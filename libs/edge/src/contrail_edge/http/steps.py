"""Long work in steps, so that the event loop can do other work in between."""

from collections.abc import Generator
from typing import Any, TypeVar

_T = TypeVar("_T")

Steps = Generator[Any, None, _T]
"""Work that yields where it may be interrupted. A step takes a few milliseconds at most.

It yields True before one that takes about ten: then it must be interrupted. Else it yields nothing.
"""


def at_once(steps: Steps[_T]) -> _T:
    """Run ``steps``, which must be few, without interruption, and return their result."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: _T = done.value
            return result
