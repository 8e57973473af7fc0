"""The tests of crashes turn red when the node is broken on purpose."""

from pathlib import Path
from typing import Final

from tests.crash.disk import Kill, Plan
from tests.crash.script import script
from tests.crash.trials import Trial
from tests.crash.zygote import Job, Zygote

SEED: Final = 7
HANG_S: Final = 0.3
ONE_SEGMENT_BYTES: Final = 1 << 20


def test_log_that_is_not_synced_is_reported_as_lost_messages(zygote: Zygote, area: Path) -> None:
    problems = []
    for number in range(40, 60, 4):
        trial = Trial(zygote, area / f"{number}", SEED, power_cuts=True)
        plan = Plan(seed=SEED, kill=Kill("log", number), lies_from=number - 14)
        trial.live(Job(steps=script(SEED), plan=plan, segment_bytes=ONE_SEGMENT_BYTES))
        trial.look()
        problems += trial.verdict()
    assert any("has lost [" in problem for problem in problems), problems


def test_commit_before_the_sync_is_reported_as_lost_messages(zygote: Zygote, area: Path) -> None:
    problems = []
    for number in range(17, 41, 4):
        trial = Trial(zygote, area / f"{number}", SEED)
        plan = Plan(seed=SEED, kill=Kill("log", number), linger_s=HANG_S)
        trial.live(Job(steps=script(SEED), groups="eager", plan=plan))
        trial.look()
        problems += trial.verdict()
    assert any("has lost [" in problem for problem in problems), problems
