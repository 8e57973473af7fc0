"""The cases of the benchmark, their results, and the references to compare them with."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.bench.stages import Costs, Profile

if TYPE_CHECKING:
    from tests.bench.patience import Patience
    from tests.bench.server import Server

DISTURBED_CORES: Final = 0.25
"""The report marks a run if other processes used more CPU than this at the same time."""


PULLED_MAX: Final = 200_000
"""Messages that a consumer gets in one run."""


class BenchError(Exception):
    """A measurement that cannot be trusted: a wrong answer, or a lost or doubled message."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run: ``value`` in the unit of its case, CPU in microseconds per message.

    ``other_cores`` is the CPU that neither the server nor the client used, in cores. ``costs`` are
    those of each function per message, if the server had a profiler.
    """

    value: float
    server_us: float | None = None
    client_us: float | None = None
    p50_s: float | None = None
    p99_s: float | None = None
    other_cores: float = 0.0
    costs: Costs | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """The runs of one case; ``note`` explains the numbers, ``profile`` where the CPU goes.

    ``beside`` has the runs of a reference that were measured in turns with these.
    """

    runs: tuple[Run, ...]
    note: str = ""
    profile: Profile | None = None
    beside: "Mapping[str, Measured]" = field(default_factory=dict)

    @property
    def value(self) -> float:
        """The median run."""
        return statistics.median(run.value for run in self.runs)

    def ratio_to(self, other: "Measured", quantity: Callable[[Run], float | None]) -> float | None:
        """The median of the ratios of a quantity to that of the other's run of the same turn."""
        pairs = [
            (quantity(own), quantity(one)) for own, one in zip(self.runs, other.runs, strict=True)
        ]
        ratios = [own / one for own, one in pairs if own is not None and one]
        return statistics.median(ratios) if ratios else None

    @property
    def spread(self) -> tuple[float, float]:
        """The lowest and the highest run."""
        values = [run.value for run in self.runs]
        return min(values), max(values)

    @property
    def disturbed(self) -> bool:
        """Whether other processes took CPU away from a run."""
        return any(run.other_cores > DISTURBED_CORES for run in self.runs)

    def median_of(self, quantity: Callable[[Run], float | None]) -> float | None:
        """The median of a quantity over the runs that have it."""
        values = [value for run in self.runs if (value := quantity(run)) is not None]
        return statistics.median(values) if values else None


@dataclass(frozen=True, slots=True)
class Scale:
    """How long and how often to measure; ``held_s`` is the time for sustained rates."""

    runs: int
    seconds: float
    messages: int
    held_s: float


FULL: Final = Scale(runs=3, seconds=3.0, messages=1_000_000, held_s=60.0)
QUICK: Final = Scale(runs=1, seconds=1.0, messages=100_000, held_s=3.0)


@dataclass(frozen=True, slots=True)
class Bench:
    """The means with which a case measures.

    ``folder`` is on the measured disk; ``worker`` is the process of the load generator. ``started``
    starts a server on a folder, by default everything in one process.
    """

    folder: Path
    worker: ProcessPoolExecutor
    scale: Scale
    patience: "Patience"
    started: "Callable[[Path], AbstractContextManager[Server]] | None" = None


@dataclass(frozen=True, slots=True)
class Beside:
    """A figure to compare another one with.

    ``factor`` makes one operation of the ``reference`` comparable: a disk that syncs 5,000 times a
    second, each time for 64 messages, stores at most 320,000. ``aim`` is the ratio to reach, for
    cases whose aim is a ratio.

    ``in_turns``: the reference is measured again, in turns with the case. A shared machine may be
    twice as fast a minute later, and then says more of a ratio than the code does.
    """

    reference: str
    factor: float
    meaning: str
    aim: float | None = None
    in_turns: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """One figure: how to measure it, its aim, and the figures to compare it with.

    ``measure`` returns None if something that it needs is not installed.
    """

    name: str
    title: str
    unit: str
    measure: Callable[[Bench], Measured | None]
    aim: float | None = None
    smaller_is_better: bool = False
    beside: Sequence[Beside] = ()

    def meets_aim(self, measured: Measured) -> bool | None:
        """Whether the median reaches the aim; None without one."""
        return self.reaches(measured.value, self.aim)

    def reaches(self, value: float, aim: float | None) -> bool | None:
        """Whether ``value`` is on the good side of ``aim``; None without one."""
        if aim is None:
            return None
        return value <= aim if self.smaller_is_better else value >= aim
