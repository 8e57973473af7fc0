"""The profile of a case: short runs of it on servers that count calls, and then CPU."""

from dataclasses import replace
from functools import partial
from typing import Final

from tests.bench.figures import Bench, Case, Measured, Scale
from tests.bench.patience import Patience
from tests.bench.server import profiled
from tests.bench.stages import Costs, Profile

_SCALES: Final = {
    # So long that the requests under way at its ends, up to 64, are at most a few percent.
    "calls": Scale(runs=1, seconds=3.0, messages=100_000, held_s=3.0),
    # So many that a replay of them takes at least a hundred samples.
    "cpu": Scale(runs=1, seconds=2.0, messages=1_000_000, held_s=2.0),
}


def profile_of(case: Case, bench: Bench, measured: Measured) -> Profile:
    """What a message costs by function, in calls and in a share of the measured CPU."""
    calls, cpu = (_costs(case, bench, kind) for kind in ("calls", "cpu"))
    return Profile.of(calls, cpu, measured.median_of(lambda run: run.server_us) or 0.0)


def _costs(case: Case, bench: Bench, kind: str) -> Costs:
    bench = replace(
        bench, scale=_SCALES[kind], patience=Patience(0.0), started=partial(profiled, kind)
    )
    measured = case.measure(bench)
    assert measured is not None
    [run] = measured.runs
    assert run.costs is not None
    return run.costs
