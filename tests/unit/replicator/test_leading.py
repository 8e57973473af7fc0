"""Leaders that are not fit to lead: they hand over or resign, and do not come back too soon.

Each rule is also left out, where the same simulation must fail.
"""

from contextlib import suppress

import pytest

from contrail_replicator.group import NEAR_BYTES
from contrail_replicator.handover import SLOW_AGAIN_S, Willingness
from contrail_replicator.messages import MessageRefusedError
from contrail_replicator.raft_core import RaftCore
from tests.unit.replicator.raft_sim import TICK_S, Cluster, SimNode


def led_by_a() -> tuple[Cluster, SimNode]:
    cluster = Cluster()
    leader = cluster.elect("a")
    cluster.run(0.5)
    return cluster, leader


def run_with_hung_disk(cluster: Cluster, name: str, seconds: float) -> None:
    """Let time pass while the disk of one member answers nothing."""
    end = cluster.now + seconds
    while cluster.now < end:
        cluster.tick()
        while cluster.mail:
            cluster.deliver()
            for node in cluster.nodes.values():
                if node.name != name:
                    node.log.sync()


# A slow disk -------------------------------------------------------------------------------------


def disk_of_the_leader_hangs() -> None:
    cluster, leader = led_by_a()
    leader.group.propose(b"x", "x")
    run_with_hung_disk(cluster, "a", 2.0)
    found = cluster.leaders()
    assert found, "nobody leads"
    assert found != [leader], "the leader has kept its office"
    assert [entry.data for entry in found[0].store if entry.data] == [b"x"]
    found[0].group.propose(b"y", "y")
    run_with_hung_disk(cluster, "a", 0.5)
    assert found[0].acked == ["y"]
    # The old leader learns what became of its proposal as soon as it may.
    assert leader.acked == []
    cluster.run(1.0)
    assert leader.acked == ["x"]


def test_leader_with_a_hung_disk_hands_over() -> None:
    disk_of_the_leader_hangs()


def test_leader_with_a_hung_disk_that_stays_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Willingness, "must_hand_over", lambda _self: False)
    with pytest.raises(AssertionError, match="kept its office"):
        disk_of_the_leader_hangs()


def test_member_with_a_slow_disk_gets_no_leadership_for_a_while() -> None:
    cluster, leader = led_by_a()
    leader.group.propose(b"x", "x")
    run_with_hung_disk(cluster, "a", 2.0)
    [successor] = cluster.leaders()
    cluster.run(1.0)
    assert not successor.group.hand_over("a")
    assert not successor.group.may_take_over("a")
    cluster.run(SLOW_AGAIN_S)
    assert successor.group.may_take_over("a")
    assert successor.group.hand_over("a")


def test_leader_with_a_slow_disk_stays_without_a_better_one() -> None:
    cluster, leader = led_by_a()
    cluster.isolate("c")
    run_with_hung_disk(cluster, "a", 0.2)
    cluster["b"].group.decline()
    cluster.run(0.3)
    leader.group.propose(b"x", "x")
    run_with_hung_disk(cluster, "a", 2.0)
    assert cluster.leaders() == [leader]
    cluster.run(0.2)
    assert leader.acked == ["x"]


# A damaged entry ---------------------------------------------------------------------------------


def entry_is_damaged_in_the_leader() -> None:
    cluster, leader = led_by_a()
    leader.group.propose(b"x", "x")
    cluster.mail.clear()  # before any follower has it
    journal = leader.group._journal
    _, index, term = journal._entries[-1]
    journal._entries[-1] = (b"damaged", index, term)
    for _ in range(200):
        cluster.tick()
        for node in cluster.nodes.values():
            node.log.sync()
        while cluster.mail:
            with suppress(MessageRefusedError):
                cluster.deliver()
    found = cluster.leaders()
    assert found, "nobody leads"
    assert found != [leader], "the leader has kept its office"
    found[0].group.propose(b"y", "y")
    cluster.run(0.5)
    assert found[0].acked == ["y"]
    assert leader.replaced == ["x"]


def test_leader_whose_entry_is_refused_resigns() -> None:
    entry_is_damaged_in_the_leader()


def test_leader_whose_entry_is_refused_and_that_stays_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RaftCore, "is_damaged", False)
    with pytest.raises(AssertionError, match="kept its office"):
        entry_is_damaged_in_the_leader()


# Members that do not take over -------------------------------------------------------------------


def test_nobody_hands_over_to_a_member_that_is_about_to_stop() -> None:
    cluster, leader = led_by_a()
    assert leader.group.may_take_over("b")
    cluster["b"].group.decline()
    cluster.run(0.2)
    assert not leader.group.may_take_over("b")
    assert not leader.group.hand_over("b")
    assert leader.group.hand_over()
    cluster.run(0.5)
    assert [node.name for node in cluster.leaders()] == ["c"]


def test_member_that_lacks_much_may_not_take_over() -> None:
    cluster, leader = led_by_a()
    assert leader.group.may_take_over("c")
    cluster["c"].log.has_space = False  # it takes no entries, and answers
    leader.group.propose(bytes(NEAR_BYTES // 2), 1)
    cluster.run(0.2)
    assert leader.group.may_take_over("c")
    leader.group.propose(bytes(NEAR_BYTES), 2)
    cluster.run(0.2)
    assert not leader.group.may_take_over("c")
    assert leader.group.may_take_over("b")
    cluster["c"].log.has_space = True
    cluster.run(TICK_S + 0.5)
    assert leader.group.may_take_over("c")
