"""Long work in steps, so that the event loop can serve others in between."""

from collections.abc import Generator
from typing import TypeVar

_T = TypeVar("_T")

Steps = Generator[None, None, _T]
"""Work that yields wherever it may be interrupted: each step takes a few milliseconds at most."""


def at_once(steps: Steps[_T]) -> _T:
    """The result of ``steps`` that are known to be few."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: _T = done.value
            return result
