"""The process is killed, or the power fails, at calls of a scripted run: every promise holds.

The quick suite tests a part of the calls of every kind; the slow one tests every call.
"""

from pathlib import Path
from typing import Final

import pytest

from tests.crash.disk import Kill, Plan
from tests.crash.script import script
from tests.crash.trials import Trial, broken_promises, kill_points, sample, undisturbed
from tests.crash.zygote import Job, Zygote

SEED: Final = 20_250
NODE_KEYS: Final = (bytes(range(32)),)
POINTS_MIN: Final = 350
HANG_S: Final = 0.05


def job(seed: int = SEED, *, successors: bool = False) -> Job:
    return Job(steps=script(seed), end="stop", successors=successors)


def test_undisturbed_run_keeps_its_promises_and_makes_every_kind_of_call(
    zygote: Zygote, area: Path
) -> None:
    calls = undisturbed(zygote, area, job(), SEED)
    assert len(kill_points(calls)) >= POINTS_MIN
    assert {lane: set(kinds) for lane, kinds in calls.items()} == {
        "log": {"create", "write", "sync", "rename", "unlink"},
        "files": {"create", "write", "sync", "rename", "unlink"},
        "store": {"write", "flush"},
    }


def test_sample_has_calls_of_every_kind_and_three_turns_have_all_of_rare_ones() -> None:
    calls = {"log": ["create", "write", "sync"] * 9, "files": ["write", "unlink"], "store": []}
    calls["store"] = ["write"] * 90
    points = kill_points(calls)
    turns = [sample(points, calls, 40, turn) for turn in range(3)]
    for turn in turns:
        kinds = {(one.lane, calls[one.lane][one.number - 1], one.torn) for one in turn}
        assert len(turn) <= 4 * 3 + 3 + 3 < len(points) / 7
        assert len(kinds) == 8
    rare = {point for point in points if point.lane != "store"}
    assert rare < set().union(*turns)


@pytest.mark.parametrize(
    ("power_cuts", "successors", "stride", "turn"),
    [(False, True, 73, 0), (True, False, 47, 1)],
    ids=["killed", "power cut"],
)
def test_sampled_crash_points_lose_renumber_and_double_nothing(
    zygote: Zygote, area: Path, power_cuts: bool, successors: bool, stride: int, turn: int
) -> None:
    run = job(successors=successors)
    calls = undisturbed(zygote, area, run, SEED)
    points = sample(kill_points(calls), calls, stride, turn)
    assert broken_promises(zygote, area, run, SEED, points, power_cuts=power_cuts) == []


def test_sampled_crash_points_of_an_encrypted_folder_lose_and_double_nothing(
    zygote: Zygote, area: Path
) -> None:
    calls = undisturbed(zygote, area, job(), SEED, node_keys=NODE_KEYS)
    assert calls["files"][:5] == ["sync", "create", "write", "sync", "rename"]  # the first data key
    points = sample(kill_points(calls), calls, 71, turn=2)
    problems = broken_promises(
        zygote, area, job(), SEED, points, power_cuts=True, node_keys=NODE_KEYS
    )
    assert problems == []


@pytest.mark.slow
def test_every_crash_point_of_an_encrypted_folder_loses_and_doubles_nothing(
    zygote: Zygote, area: Path
) -> None:
    points = kill_points(undisturbed(zygote, area, job(), SEED, node_keys=NODE_KEYS))
    problems = broken_promises(
        zygote, area, job(), SEED, points, power_cuts=True, node_keys=NODE_KEYS
    )
    assert problems == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", [SEED, SEED + 1])
@pytest.mark.parametrize("successors", [False, True], ids=["busy log", "idle log"])
@pytest.mark.parametrize("power_cuts", [False, True], ids=["killed", "power cut"])
def test_every_crash_point_loses_renumbers_and_doubles_nothing(
    zygote: Zygote, area: Path, power_cuts: bool, successors: bool, seed: int
) -> None:
    run = job(seed, successors=successors)
    points = kill_points(undisturbed(zygote, area, run, seed))
    assert broken_promises(zygote, area, run, seed, points, power_cuts=power_cuts) == []


def crash_twice(
    zygote: Zygote, directory: Path, first: Kill, second: Kill, *, power_cuts: bool
) -> list[str]:
    trial = Trial(zygote, directory, SEED, power_cuts=power_cuts)
    trial.live(Job(steps=script(SEED), end="stop", plan=Plan(seed=SEED, kill=first)))
    trial.look(second)
    trial.look()
    return [f"seed {SEED}, {first}, then {second}: {problem}" for problem in trial.verdict()]


@pytest.mark.parametrize(
    ("stride", "deep"),
    [(67, 5), pytest.param(7, 14, marks=pytest.mark.slow)],
    ids=["sampled", "all"],
)
def test_crash_while_recovering_from_a_crash_loses_nothing(
    zygote: Zygote, area: Path, stride: int, deep: int
) -> None:
    points = kill_points(undisturbed(zygote, area, job(), SEED))[5::stride]
    problems = []
    for at, first in enumerate(points):
        second = Kill("log", 1 + at % deep, torn=at % 2 == 0)
        again = Kill("store", 1 + at % deep)
        for kill in (second, again):
            problems += crash_twice(
                zygote, area / f"{at} {kill}", first, kill, power_cuts=at % 3 == 0
            )
    assert problems == []


def test_disk_that_hangs_before_the_crash_gets_nothing_acknowledged(
    zygote: Zygote, area: Path
) -> None:
    problems = []
    for number in range(30, 150, 30):
        trial = Trial(zygote, area / f"{number}", SEED, power_cuts=True)
        plan = Plan(seed=SEED, kill=Kill("log", number), linger_s=HANG_S)
        trial.live(Job(steps=script(SEED), plan=plan))
        trial.look()
        problems += trial.verdict()
    assert problems == []
