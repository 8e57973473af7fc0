"""Waiting for a quiet machine: a figure taken beside other busy processes says little."""

import time
from collections.abc import Callable
from typing import Final

from tests.bench.figures import DISTURBED_CORES, Bench, Run
from tests.bench.processes import Usage

_LOOK_S: Final = 0.3


class Patience:
    """How long a whole run may still wait for other processes."""

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
    """As many runs as the scale asks for; ``once`` is given the number of the run.

    With patience left, runs that were disturbed are repeated, at most as many again. The least
    disturbed ones count, whatever they brought.
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
