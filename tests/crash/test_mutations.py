"""The crash tests fail when the node is broken on purpose."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.crash.disk import Kill, Plan
from tests.crash.features import AGED, BATCHES, LATEST, SHARED, TIMED, features
from tests.crash.history import (
    Ack,
    Call,
    PassTime,
    Publish,
    Purge,
    PutConsumer,
    PutStream,
    Restore,
    Step,
    TakeCheckpoint,
)
from tests.crash.mutants import MUTANTS
from tests.crash.script import script
from tests.crash.trials import Trial, calls_of
from tests.crash.zygote import HELD_S, Job, Zygote

SEED: Final = 7
HANG_S: Final = 0.3
ONE_SEGMENT_BYTES: Final = 1 << 20


def check_reported(sentence: str, verdicts: Iterable[list[str]]) -> None:
    """Check that a trial reports the sentence. Those after it are not made."""
    found = []
    for problems in verdicts:
        found += problems
        if any(sentence in problem for problem in problems):
            return
    raise AssertionError(f"{sentence!r} is not in {found}")


def test_log_that_is_not_synced_is_reported_as_lost_messages(zygote: Zygote, area: Path) -> None:
    def verdicts() -> Iterator[list[str]]:
        for number in range(40, 60, 4):
            trial = Trial(zygote, area / f"{number}", SEED, power_cuts=True)
            plan = Plan(seed=SEED, kill=Kill("log", number), lies_from=number - 14)
            trial.live(Job(steps=script(SEED), plan=plan, segment_bytes=ONE_SEGMENT_BYTES))
            trial.look()
            yield trial.verdict()

    check_reported("has lost [", verdicts())


def test_commit_before_the_sync_is_reported_as_lost_messages(zygote: Zygote, area: Path) -> None:
    def verdicts() -> Iterator[list[str]]:
        for number in range(16, 38):  # the first messages
            trial = Trial(zygote, area / f"{number}", SEED)
            plan = Plan(seed=SEED, kill=Kill("log", number), linger_s=HANG_S)
            trial.live(Job(steps=script(SEED), groups="eager", plan=plan))
            trial.look()
            yield trial.verdict()

    check_reported("has lost [", verdicts())


def up_to(kind: type[Call], stream: str = "", nth: int = 0) -> list[Step]:
    """The steps over the rules of streams up to the n-th call of a kind, then a checkpoint."""
    steps = features(SEED)
    found = [at for at, [call, *_] in enumerate(steps) if _is(call, kind, stream)]
    return [*steps[: found[nth] + 1], [TakeCheckpoint()]]


def _is(call: Any, kind: type[Call], stream: str) -> bool:
    name = call.config.name if isinstance(call, PutStream) else getattr(call, "stream", "")
    return isinstance(call, kind) and name == stream


STILL: Final = "which were due"
NOT_PROVEN: Final = "does not serve: stored data is missing or changed"
CAUGHT: Final = [
    ("late deadlines", up_to(Publish, TIMED), STILL),
    ("no deadlines", up_to(Publish, TIMED), STILL),
    ("late markers", up_to(PassTime), NOT_PROVEN),
    ("no never-pages", up_to(Publish, AGED, 1), "AGED has lost [3]"),
    ("no pinned messages", up_to(PutConsumer, BATCHES), "which it does not want"),
    ("late settling", up_to(Ack, SHARED, 1), NOT_PROVEN),
    ("late roll-ups", up_to(Publish, LATEST, 9), "which were removed"),
    ("late subject limits", up_to(Publish, LATEST, 17), "which were removed"),
    ("late purges", up_to(Purge, LATEST), NOT_PROVEN),
    ("late lowered limits", up_to(PutStream, "ANOTHER"), "ANOTHER says"),
    ("out of order", up_to(Ack, LATEST), "again after its confirmed"),
    ("job dropped", up_to(PutConsumer, LATEST), "LATEST has lost"),
    ("joined parts kept", up_to(Publish, SHARED, 5), "twice"),
    ("merged parts kept", up_to(Publish, LATEST, 7), "LATEST"),
]


@pytest.mark.parametrize(("mutant", "steps", "sentence"), CAUGHT, ids=[one[0] for one in CAUGHT])
def test_broken_rule_is_reported_after_a_crash_after_a_checkpoint(
    zygote: Zygote, area: Path, mutant: str, steps: list[Step], sentence: str
) -> None:
    trial = Trial(zygote, area / "broken", SEED)
    trial.live(Job(steps=steps, hold_s=HELD_S, mutant=mutant))
    trial.look()
    problems = trial.verdict()
    assert any(sentence in problem for problem in problems), problems


def test_atomic_batch_in_entries_of_its_messages_is_reported_as_stored_by_half(
    zygote: Zygote, area: Path
) -> None:
    steps = [step for step in features(SEED) if _is(step[0], PutStream, BATCHES)][:1]
    steps += [step for step in features(SEED) if _is(step[0], Publish, BATCHES)][:3]

    def verdicts() -> Iterator[list[str]]:
        for number in range(12, 32, 2):
            trial = Trial(zygote, area / f"{number}", SEED)
            plan = Plan(seed=SEED, kill=Kill("log", number))
            trial.live(Job(steps=steps, plan=plan, mutant="batch in parts"))
            trial.look()
            yield trial.verdict()

    check_reported("a part of an atomic batch", verdicts())


def test_restore_that_is_not_undone_is_reported_as_half_made(zygote: Zygote, area: Path) -> None:
    steps = up_to(Restore, SHARED)
    begin = Trial(zygote, area / "before", SEED)
    before = calls_of(begin.live(Job(steps=steps[:-2])))["log"]

    def verdicts() -> Iterator[list[str]]:
        for ahead in (4, 6, 8):
            trial = Trial(zygote, area / f"{ahead}", SEED)
            plan = Plan(seed=SEED, kill=Kill("log", len(before) + ahead))
            trial.live(Job(steps=steps, plan=plan))
            trial.live(Job(look=True, mutant="restores not undone"))
            yield trial.verdict()

    check_reported(" is reserved", verdicts())


def test_every_mutant_is_caught() -> None:
    others = {"batch in parts", "restores not undone"}
    assert {one[0] for one in CAUGHT} | others == set(MUTANTS)
