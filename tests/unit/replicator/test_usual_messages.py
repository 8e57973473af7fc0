"""Entries that followers hand out in groups, and the messages that take the short way."""

import pytest

from contrail_replicator.raft_core import RaftCore
from tests.unit.replicator.raft_chaos import Chaos
from tests.unit.replicator.raft_sim import Cluster, SimNode


def led() -> tuple[Cluster, SimNode, SimNode]:
    """A cluster at rest, its leader, and a follower that has handed out everything."""
    cluster = Cluster()
    leader = cluster.elect("a")
    cluster.run(0.3)
    return cluster, leader, cluster["b"]


def propose(cluster: Cluster, leader: SimNode, count: int, size: int = 1) -> None:
    """Propose entries one after the other, without any time passing."""
    for number in range(count):
        leader.group.propose(bytes([1]) * size, number)
        cluster.settle()


def test_follower_hands_out_a_few_small_entries_with_its_next_tick() -> None:
    cluster, leader, follower = led()
    before = follower.group.applied_index
    propose(cluster, leader, 5)
    assert leader.group.applied_index == before + 5
    assert follower.group.applied_index == before
    follower.group.tick()
    assert follower.group.applied_index == before + 4  # it learns of the last with a heartbeat
    cluster.run(0.1)
    assert follower.group.applied_index == before + 5


def test_follower_with_many_entries_does_not_wait() -> None:
    cluster, leader, follower = led()
    before = follower.group.applied_index
    propose(cluster, leader, 64)
    assert follower.group.applied_index == before
    propose(cluster, leader, 1)
    assert follower.group.applied_index == before + 64


def test_follower_with_large_entries_does_not_wait() -> None:
    cluster, leader, follower = led()
    before = follower.group.applied_index
    propose(cluster, leader, 2, size=16 << 10)
    assert follower.group.applied_index == before + 1


def test_entry_is_the_same_message_for_all_followers() -> None:
    cluster, leader, _ = led()
    leader.group.propose(b"one", "one")
    assert len(cluster.mail) == 2
    assert cluster.mail[0][2] is cluster.mail[1][2]


@pytest.mark.parametrize("short", [True, False])
def test_promises_hold_with_and_without_the_short_way(
    monkeypatch: pytest.MonkeyPatch, short: bool
) -> None:
    taken = 0
    usual = RaftCore.take_usual

    def take(core: RaftCore, peer: str, message: object) -> bool:
        nonlocal taken
        done = short and usual(core, peer, message)  # type: ignore[arg-type]
        taken += done
        return done

    monkeypatch.setattr(RaftCore, "take_usual", take)
    for seed in range(3):
        chaos = Chaos(seed)
        chaos.run(500)
        assert chaos.check() > 0
    assert (taken > 0) is short


def what_a_majority_holds(core: RaftCore, index: int, members: int) -> bool:
    return 2 * (1 + sum(core.matched(peer) >= index for peer in core._nodes)) > members


@pytest.mark.parametrize("names", ["abc", "abcd", "abcde"])
def test_leader_commits_what_raft_says(monkeypatch: pytest.MonkeyPatch, names: str) -> None:
    counted = 0
    commit = RaftCore.commit

    def compared(core: RaftCore) -> bool:
        nonlocal counted
        journal, before = core._journal, core.commit_index()
        held = [before] + [
            index
            for index in range(before + 1, journal.durable_index + 1)
            if journal.term_at(index) == core.led_term() > 0
            and what_a_majority_holds(core, index, len(names))
        ]
        more = commit(core)
        assert core.commit_index() == held[-1]
        assert more is (held[-1] > before)
        counted += more
        return more

    monkeypatch.setattr(RaftCore, "commit", compared)
    for seed in range(3):
        chaos = Chaos(seed, names)
        chaos.run(500)
        chaos.check()
    assert counted
