"""Waiting for a quiet machine, because other busy processes would falsify the figures."""

import time
from collections.abc import Callable
from typing import Final

from tests.bench.figures import DISTURBED_CORES, Bench, Run
from tests.bench.processes import Usage

_LOOK_S: Final = 0.3


class Patience:
    """The time for which the rest of a run may wait for other processes."""

    def __init__(self, seconds: float) -> None:
        self.left_s = seconds

    def wait_for_quiet(self) -> None:
        """Return once the other processes use little CPU, or no patience is left."""
        while self.left_s > 0:
            before = Usage.now(None)
            time.sleep(_LOOK_S)
            self.left_s -= _LOOK_S
            if before.other_cores(Usage.now(None)) <= DISTURBED_CORES / 2:
                return


def repeat(bench: Bench, once: Callable[[int], Run]) -> tuple[Run, ...]:
    """Return the runs of a case; ``once`` gets the number of the run.

    While there is patience left, disturbed runs are repeated, up to twice as many runs in all. The
    least disturbed ones count, whatever their result.
    """
    runs: list[Run] = []
    wanted = bench.scale.runs
    while len(runs) < wanted or (
        len(runs) < 2 * wanted
        and bench.patience.left_s > 0
        and sum(run.other_cores <= DISTURBED_CORES for run in runs) < wanted
    ):
        bench.patience.wait_for_quiet()
        runs.append(once(len(runs)))
    return tuple(sorted(runs, key=lambda run: run.other_cores)[:wanted])
