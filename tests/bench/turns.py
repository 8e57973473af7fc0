"""Measuring a case in turns with the figures that it is compared with."""

from collections.abc import Mapping
from dataclasses import replace

from tests.bench.figures import Bench, Case, Measured


def measured_in_turns(case: Case, cases: Mapping[str, Case], bench: Bench) -> Measured | None:
    """Measure ``case``, and in turns with it the references that it names for that.

    None if something that the case needs is not installed.
    """
    names = [beside.reference for beside in case.beside if beside.in_turns]
    if not names:
        return case.measure(bench)
    one_run = replace(bench, scale=replace(bench.scale, runs=1))
    rounds: list[Measured] = []
    beside: dict[str, list[Measured]] = {name: [] for name in names}
    for _ in range(bench.scale.runs):
        for name in names:
            reference = cases[name].measure(one_run)
            if reference is not None:
                beside[name].append(reference)
        found = case.measure(one_run)
        if found is None:
            return None
        rounds.append(found)
    joined = {name: _joined(found) for name, found in beside.items() if found}
    return replace(_joined(rounds), beside=joined)


def _joined(rounds: list[Measured]) -> Measured:
    return replace(rounds[-1], runs=tuple(run for one in rounds for run in one.runs))
