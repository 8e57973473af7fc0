"""Trials: one life that is cut short, another that looks at the remaining data, and a verdict."""

import random
import shutil
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import msgspec

from tests.crash.disk import LANES, Kill, Lane, Plan
from tests.crash.history import FileChange, Finished, Stopped
from tests.crash.ledger import Ledger
from tests.crash.power import PowerCut
from tests.crash.zygote import Ended, Job, Zygote

_FOLLOW_UP_NUMBER: Final = 10_000
_RARE: Final = 20
_RARE_STRIDE: Final = 3
_TURNS: Final = 3


@dataclass(eq=False)
class Trial:
    """One data folder over several lives, with its history."""

    zygote: Zygote
    directory: Path
    seed: int
    power_cuts: bool = False
    node_keys: tuple[bytes, ...] = ()
    ledger: Ledger = field(default_factory=Ledger)
    lives: int = 0

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)

    @property
    def data_dir(self) -> Path:
        """Where the node keeps its data."""
        return self.directory / "data"

    def live(self, job: Job) -> Ended:
        """Run one life on the trial's data; then cut the power if the trial says so."""
        self.lives += 1
        cut: PowerCut | None = None
        plan = job.plan
        if self.power_cuts:
            shadow = self.directory / f"shadow-{self.lives}"
            cut = PowerCut(self.data_dir, shadow)
            plan = msgspec.structs.replace(plan, shadow=str(shadow))
        ended = self.zygote.live(
            msgspec.structs.replace(
                job, data_dir=str(self.data_dir), node_keys=self.node_keys, plan=plan
            )
        )
        self.ledger.take(ended.records)
        if cut is not None:
            cut.follow(record for record in ended.records if isinstance(record, FileChange))
            cut.cut(random.Random(f"{self.seed} {plan.kill} {self.lives}"))
        return ended

    def look(self, kill: Kill | None = None) -> Ended:
        """Open the remaining data, look, repeat calls in doubt, look again, then end hard.

        With `kill`, the life ends earlier, at that call.
        """
        job = Job(look=True, steps=self.ledger.follow_up(), plan=Plan(seed=self.seed, kill=kill))
        job = msgspec.structs.replace(job, first_number=_FOLLOW_UP_NUMBER * self.lives)
        ended = self.live(job)
        if kill is None:
            refusals = [r.reason for r in ended.records if isinstance(r, Stopped)]
            self.ledger.problems += [f"the node does not serve: {reason}" for reason in refusals]
        return ended

    def verdict(self) -> list[str]:
        """All broken promises. Without any, the data of the trial is removed."""
        if not self.ledger.problems:
            shutil.rmtree(self.directory)
        return self.ledger.problems


def calls_of(ended: Ended) -> dict[str, list[str]]:
    """The kinds of the calls to the disk that a complete life made, per lane."""
    return [record for record in ended.records if isinstance(record, Finished)][-1].calls


def kill_points(calls: dict[str, list[str]]) -> list[Kill]:
    """A kill at every call of a life; writes of files have two, the second one torn."""
    return [
        Kill(lane, number, torn)
        for lane in LANES
        for number, call in enumerate(calls[lane], 1)
        for torn in ((False, True) if call == "write" and lane != "store" else (False,))
    ]


def sample(
    points: Sequence[Kill], calls: dict[str, list[str]], stride: int, turn: int = 0
) -> list[Kill]:
    """Every third point of a rare kind of call, and every `stride`-th of another; one at least.

    Turns 0, 1 and 2 together have all points of rare kinds.
    """
    kinds: defaultdict[tuple[Lane, str, bool], list[Kill]] = defaultdict(list)
    for point in points:
        call = calls[point.lane][point.number - 1]
        kinds[point.lane, call, point.torn].append(point)
    chosen: list[Kill] = []
    for each in kinds.values():
        step = min(stride, _RARE_STRIDE) if len(each) <= _RARE else stride
        first = turn * step // _TURNS
        chosen += each[first::step] or each[-1:]
    return chosen


def undisturbed(
    zygote: Zygote, area: Path, job: Job, seed: int, *, node_keys: tuple[bytes, ...] = ()
) -> dict[str, list[str]]:
    """The calls of a life without a kill; checks that it keeps all promises."""
    trial = Trial(zygote, area / "whole", seed, node_keys=node_keys)
    ended = trial.live(job)
    trial.look()
    assert trial.verdict() == []
    return calls_of(ended)


def broken_promises(
    zygote: Zygote,
    area: Path,
    job: Job,
    seed: int,
    points: Sequence[Kill],
    *,
    power_cuts: bool = False,
    node_keys: tuple[bytes, ...] = (),
) -> list[str]:
    """Run a life once for each point, killed there, and look at the remaining data."""
    found = []
    for at, kill in enumerate(points):
        trial = Trial(zygote, area / f"{at}", seed, power_cuts=power_cuts, node_keys=node_keys)
        trial.live(msgspec.structs.replace(job, plan=Plan(seed=seed, kill=kill)))
        trial.look()
        found += [f"seed {seed}, {kill}: {problem}" for problem in trial.verdict()]
    return found


class Tried(Protocol):
    """Makes a run, killed at `kill` or complete; returns its problems and the calls it made."""

    def __call__(
        self,
        zygote: Zygote,
        area: Path,
        kill: Kill | None = None,
        *,
        power_cuts: bool = False,
        node_keys: tuple[bytes, ...] = (),
    ) -> tuple[list[str], dict[str, list[str]]]:
        """Make the run in `area`."""
        ...


def problems_anywhere(
    tried: Tried,
    zygote: Zygote,
    area: Path,
    stride: int,
    turn: int,
    *,
    power_cuts: bool,
    node_keys: tuple[bytes, ...],
) -> list[str]:
    """The problems after runs that are killed, at the points of :func:`sample`."""
    _, calls = tried(zygote, area / "whole", node_keys=node_keys)
    problems: list[str] = []
    for at, kill in enumerate(sample(kill_points(calls), calls, stride, turn)):
        found, _ = tried(zygote, area / f"{at}", kill, power_cuts=power_cuts, node_keys=node_keys)
        problems += found
    return problems
