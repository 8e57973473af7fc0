"""Random calls over several lives, each ended by a random kill or power cut: promises hold."""

import os
import random
from pathlib import Path
from typing import Final

import pytest

from tests.crash.disk import Kill, Lane, Plan
from tests.crash.history import Stopped
from tests.crash.script import Wanderer
from tests.crash.trials import Trial
from tests.crash.zygote import HELD_S, SOON_S, Job, Zygote

CALLS_MAX: Final[dict[Lane, int]] = {"log": 130, "store": 110, "files": 40}
LIVES: Final = 3
STEPS: Final = 40
NUMBERS: Final = 1_000
SEED: Final = int(os.environ.get("CONTRAIL_SOAK_SEED", "0"))


def crash_repeatedly(zygote: Zygote, directory: Path, seed: int) -> list[str]:
    chance, wanderer = random.Random(seed), Wanderer(seed)
    trial = Trial(zygote, directory, seed, power_cuts=seed % 2 == 0)
    for life in range(LIVES):
        [lane] = chance.choices(list(CALLS_MAX), (5, 3, 1))
        kill = Kill(lane, chance.randint(5, CALLS_MAX[lane]), torn=chance.random() < 0.4)
        ended = trial.live(
            Job(
                steps=wanderer.steps(STEPS),
                look=True,
                first_number=life * NUMBERS,
                plan=Plan(seed=seed, kill=kill),
                successors=seed % 3 == 0,
                hold_s=HELD_S if seed % 4 == 1 else SOON_S,
                end="stop",
            )
        )
        if any(isinstance(record, Stopped) for record in ended.records):
            break
    trial.look()
    return [f"seed {seed}: {problem}" for problem in trial.verdict()]


@pytest.mark.parametrize(
    "runs", [6, pytest.param(400, marks=pytest.mark.slow)], ids=["some seeds", "many seeds"]
)
def test_random_calls_over_crashing_lives_keep_every_promise(
    zygote: Zygote, area: Path, runs: int
) -> None:
    problems = []
    for seed in range(SEED, SEED + runs):
        problems += crash_repeatedly(zygote, area / f"{seed}", seed)
    assert problems == []
