"""Random walks: many weighted steps from a seed, checked after each, and cut down when one fails.

Hypothesis varies whole histories, and seldom gets behind the first steps of a long one. A walk
costs only its steps, so that many of them can be long. Every step has a seed of its own, from which
come its rule and its arguments: a history without some of its steps is still one.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

from hypothesis import settings

SHRINKS_MAX = 400
"""Histories that may be tried to find a short one that fails."""

Method = TypeVar("Method", bound=Callable[..., Any])


def rule(weight: int = 4, **choices: Sequence[Any]) -> Callable[[Method], Method]:
    """A step that is taken as often as ``weight`` says; each argument is one of its ``choices``."""

    def mark(method: Method) -> Method:
        method.rule = (weight, choices)  # type: ignore[attr-defined]
        return method

    return mark


class Walk:
    """Steps from a seed. Methods with :func:`rule` are the steps; ``begin`` is the first one."""

    _rules: ClassVar[dict[type, tuple[list[str], list[int]]]] = {}

    def __init__(self) -> None:
        self.rng = random.Random(0)
        """Of the present step."""
        self.taken: list[str] = []
        """The steps so far."""

    def begin(self) -> None:
        """Make what the steps change."""

    def agree(self) -> None:
        """Check what holds after each step."""

    def end(self) -> None:
        """Finish what the last step left open."""

    def one_of(self, values: Sequence[Any]) -> Any:
        """One of ``values``."""
        return values[self.rng.randrange(len(values))]

    def take(self, seed: str) -> None:
        """Take the step of ``seed``."""
        self.rng = random.Random(seed)
        names, weights = self._names()
        [name] = self.rng.choices(names, weights)
        _, choices = self._marked(name)
        arguments = {each: self.one_of(values) for each, values in choices.items()}
        self.taken.append(f"{name}({', '.join(f'{at}={one!r}' for at, one in arguments.items())})")
        getattr(self, name)(**arguments)
        self.agree()

    @classmethod
    def _names(cls) -> tuple[list[str], list[int]]:
        found = Walk._rules.get(cls)
        if found is None:
            names = [name for name in sorted(dir(cls)) if cls._marked(name)[0]]
            found = Walk._rules[cls] = (names, [cls._marked(name)[0] for name in names])
        return found

    @classmethod
    def _marked(cls, name: str) -> tuple[int, dict[str, Sequence[Any]]]:
        for one in cls.__mro__:
            found = getattr(one.__dict__.get(name), "rule", None)
            if found is not None:
                return found  # type: ignore[no-any-return]
        return 0, {}


def explore(kind: type[Walk], steps: int = 60, share: float = 1) -> None:
    """Take walks of ``steps`` steps: ``share`` of as many as the profile tries examples."""
    count = max(round(settings().max_examples * share), 1)
    salt = "" if settings().derandomize else random.SystemRandom().randbytes(8).hex()
    for number in range(count):
        seeds = [f"{salt}{kind.__name__} {number} {at}" for at in range(steps)]
        if _failure(kind, seeds) is not None:
            failing = _shrunk(kind, seeds)
            error = _failure(kind, failing)
            assert error is not None
            raise error


def _failure(kind: type[Walk], seeds: list[str]) -> Exception | None:
    """What goes wrong, with the names of the steps up to there."""
    walk = kind()
    try:
        walk.rng = random.Random(seeds[0].rpartition(" ")[0])
        walk.begin()
        walk.agree()
        for seed in seeds:
            walk.take(seed)
        walk.end()
    except Exception as error:
        error.add_note("\n".join(["Steps:", *walk.taken]))
        return error
    return None


def _shrunk(kind: type[Walk], seeds: list[str]) -> list[str]:
    """A history that fails too, without the steps that this does not need."""
    left, size = SHRINKS_MAX, len(seeds) // 2
    while size:
        at = 0
        while at < len(seeds) and left:
            left -= 1
            fewer = seeds[:at] + seeds[at + size :]
            if fewer and _failure(kind, fewer) is not None:
                seeds = fewer
            else:
                at += size
        size //= 2
    return seeds
