"""What a group costs that has nothing to do: heartbeats, and no call into the core for them."""

import pytest

from contrail_replicator.messages import Append, Heartbeat
from contrail_replicator.raft_core import RaftCore
from tests.unit.replicator.raft_sim import Cluster

IDLE_S = 6.0
PERIOD_S = 0.1  # a heartbeat is due after 75 ms, and sent by the next tick


def ticks_while_idle(monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Calls into the cores of the leader and of a follower while nothing happens."""
    cluster = Cluster()
    leader = cluster.elect("a")
    leader.group.propose(b"x", "x")
    cluster.run(1.0)
    counts = dict.fromkeys(cluster.names, 0)
    tick = RaftCore.tick

    def counted(core: RaftCore) -> None:
        counts[str(core._SyncObj__selfNode.id)] += 1
        tick(core)

    monkeypatch.setattr(RaftCore, "tick", counted)
    cluster.run(IDLE_S)
    assert cluster.leaders() == [leader]
    return counts["a"], counts["b"]


def test_idle_group_calls_its_core_for_heartbeats_only(monkeypatch: pytest.MonkeyPatch) -> None:
    leading, following = ticks_while_idle(monkeypatch)
    assert leading <= IDLE_S / 0.075 + 1
    # A follower looks when its election would be due, and the leader has moved that meanwhile.
    assert following <= IDLE_S / 0.3 + 1


def test_beats_that_all_reach_the_core_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RaftCore, "take_usual", lambda _core, _peer, _message: False)
    leading, following = ticks_while_idle(monkeypatch)
    assert min(leading, following) > IDLE_S / PERIOD_S


def test_heartbeats_of_groups_that_began_apart_leave_together() -> None:
    times = []
    for begun in (0.0, 0.26, 1.31):
        cluster = Cluster()
        cluster.now = begun
        cluster.elect("a")
        while cluster.now < 5.0:
            cluster.tick(5.0 - cluster.now if cluster.now + 0.025 > 5.0 else 0.025)
            cluster.settle()
        cluster.tick(0.075)
        beats = [each for each in cluster.mail if isinstance(each[2], Heartbeat)]
        times.append(len(beats))
        cluster.settle()
        due = cluster["a"].group._core.due
        assert due == pytest.approx((cluster.now // 0.075 + 1) * 0.075)
    assert set(times) == {2}


def test_follower_that_hears_of_a_commit_is_not_taken_for_idle() -> None:
    cluster = Cluster()
    leader = cluster.elect("a")
    cluster.run(0.3)
    leader.group.propose(b"x", "x")
    while leader.acked != ["x"]:
        cluster.sync_all()
        cluster.deliver()
    lost = [each for each in cluster.mail if isinstance(each[2], Append)]
    cluster.mail = [each for each in cluster.mail if each not in lost]
    assert cluster["b"].group.commit_index < leader.group.commit_index
    cluster.run(0.2)
    assert cluster["b"].group.applied_index == leader.group.applied_index
