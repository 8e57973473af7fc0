"""Crashes, lost syncs, cut links, doubled and reordered messages: nothing acknowledged is lost."""

import pytest

from contrail_replicator import LogDivergedError
from contrail_replicator.raft_core import RaftCore
from tests.support.each import each
from tests.unit.replicator.raft_chaos import Chaos
from tests.unit.replicator.stock_faults import pass_everything

STEPS = 1500


def acknowledged(seed: int, names: str = "abc") -> int:
    chaos = Chaos(seed, names)
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


def broken_seeds(seeds: int) -> int:
    """Number of seeds in which the simulation finds a broken promise."""
    broken = 0
    for seed in range(seeds):
        try:
            acknowledged(seed)
        except (AssertionError, LogDivergedError):
            broken += 1
    return broken


def test_leader_that_counts_itself_before_its_sync_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        RaftCore, "_SyncObj__getCurrentLogIndex", lambda core: core._journal.last_index
    )
    assert broken_seeds(10)


def test_promise_that_does_not_wait_for_the_disk_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("contrail_replicator.guard.must_be_durable", lambda _message: False)
    assert broken_seeds(20)


def test_append_messages_taken_as_they_come_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    pass_everything(monkeypatch)
    assert broken_seeds(20)
