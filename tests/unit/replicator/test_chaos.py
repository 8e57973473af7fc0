"""Crashes, lost syncs, cut links, doubled and reordered messages: nothing acknowledged is lost."""

import pytest

from contrail_replicator import LogDivergedError, guard
from contrail_replicator.elections import Elections
from contrail_replicator.raft_core import RaftCore
from contrail_replicator.reads import ReadDone
from tests.support.each import each
from tests.unit.replicator.raft_chaos import Chaos
from tests.unit.replicator.stock_faults import pass_everything

STEPS = 1500


def acknowledged(seed: int, names: str = "abc", **weights: float) -> int:
    chaos = Chaos(seed, names, **weights)
    chaos.run(STEPS)
    return chaos.check()


@pytest.mark.long
@each("block", range(5))
def test_three_members_lose_nothing_acknowledged(block: int) -> None:
    assert sum(acknowledged(seed) for seed in range(20 * block, 20 * block + 20)) > 400


@pytest.mark.long
def test_five_members_lose_nothing_acknowledged() -> None:
    assert sum(acknowledged(seed, "abcde") for seed in range(20)) > 100


def test_one_seed_gives_one_run() -> None:
    assert acknowledged(3) == acknowledged(3)


def read_at_once(core: RaftCore, done: ReadDone) -> None:
    done(core.leads())


SWITCHES: dict[str, tuple[object, str, object]] = {
    "a leader that counts itself before its sync": (
        RaftCore,
        "_SyncObj__getCurrentLogIndex",
        lambda core: core._journal.last_index,
    ),
    "promises that do not wait for the disk": (guard, "must_be_durable", lambda _message: False),
    "candidacies without pre-votes": (Elections, "may_campaign", lambda _elections: True),
    "votes against a leader that is heard": (Elections, "may_consider", lambda *_: True),
    "reads without a round": (RaftCore, "read_index", read_at_once),
}
"""What each rule's absence is: owner, name, and what takes its place."""
WEATHER: dict[str, dict[str, float]] = {
    # Leaders that are cut off for long, while the others have few other worries.
    "reads without a round": {
        "heal": 0.3,
        "isolate": 1.2,
        "resume": 0.5,
        "crash": 0.05,
        "wipe": 0.0,
        "pause": 0.0,
        "read": 60.0,
        "boot": 20.0,
        "deliver": 150.0,
        "sync": 80.0,
    },
}
"""What else happens how often, where the usual mixture would take hundreds of seeds."""
ENOUGH_SEEDS = 80


def finds_a_broken_promise(**weights: float) -> bool:
    for seed in range(ENOUGH_SEEDS):
        try:
            acknowledged(seed, **weights)
        except (AssertionError, LogDivergedError):
            return True
    return False


@pytest.mark.long
@pytest.mark.parametrize("switch", SWITCHES)
def test_a_rule_that_is_left_out_is_missed(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*SWITCHES[switch])
    assert finds_a_broken_promise(**WEATHER.get(switch, {}))


@pytest.mark.long
@pytest.mark.parametrize("weather", WEATHER)
def test_nothing_is_lost_in_other_weather(weather: str) -> None:
    for seed in range(10):
        acknowledged(seed, **WEATHER[weather])


def test_append_messages_taken_as_they_come_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    pass_everything(monkeypatch)
    assert finds_a_broken_promise()
