"""How far members say that they are, and how old they say that their state is."""

import math

import pytest

from contrail_replicator.standing import Standing
from tests.unit.replicator.raft_chaos import Chaos
from tests.unit.replicator.raft_sim import Cluster

STEPS = 1500
SEEDS = range(1, 200)  # one in forty finds it


def finds_staler_state(seed: int) -> bool:
    try:
        Chaos(seed).run(STEPS)
    except AssertionError as error:
        return "staler than it says" in str(error)
    return False


def test_leader_reports_its_peers() -> None:
    cluster = Cluster()
    leader = cluster.elect("a")
    cluster.run(1.0)
    report = leader.group.report()
    assert (report.role, report.leader, report.commit) == ("leader", "a", leader.group.commit_index)
    assert [(one.name, one.current, one.offline, one.lag) for one in report.peers] == [
        ("b", True, False, 0),
        ("c", True, False, 0),
    ]
    follower = cluster["b"].group.report()
    assert (follower.role, follower.leader, follower.peers) == ("follower", "a", [])
    cluster.isolate("c")
    for number in range(5):
        leader.group.propose(b"%d" % number, number)
    cluster.run(1.0)
    near, away = leader.group.report().peers
    assert (near.current, near.offline, near.lag) == (True, False, 0)
    assert (away.offline, away.lag) == (True, 5)
    cluster.run(2.0)
    assert not leader.group.report().peers[1].current
    cluster.heal()
    cluster.run(1.0)
    assert [one.current and not one.lag for one in leader.group.report().peers] == [True, True]
    cluster["c"].group.mark_suspect(True)
    cluster.run(0.2)
    found = leader.group.report().peers[1]
    assert (found.suspect, found.current) == (True, False)


def test_staleness_grows_while_no_leader_is_heard() -> None:
    cluster = Cluster()
    assert cluster["b"].group.staleness_s() == math.inf
    cluster.elect("a")
    cluster.run(1.0)
    assert max(node.group.staleness_s() for node in cluster.nodes.values()) < 0.2
    cluster.isolate("c")
    cluster.run(5.0)
    assert 4.8 < cluster["c"].group.staleness_s() < 5.2
    # Old heartbeats that waited for the process prove nothing.
    cluster.heal()
    cluster.run(1.0)
    assert cluster["c"].group.staleness_s() < 0.2
    cluster["c"].pause()
    cluster.run(5.0)
    cluster["c"].resume()
    while cluster.mail:
        cluster.deliver()
    assert cluster["c"].group.staleness_s() > 4.8


def test_member_that_has_not_applied_is_stale() -> None:
    cluster = Cluster()
    leader = cluster.elect("a")
    cluster.run(1.0)
    cluster["b"].takes = False  # its store is behind
    for number in range(3):
        leader.group.propose(b"%d" % number, number)
    cluster.run(3.0)
    assert cluster["b"].group.staleness_s() > 2.5
    assert cluster["c"].group.staleness_s() < 0.2
    cluster["b"].takes = True
    cluster["b"].group.resume()
    assert cluster["b"].group.staleness_s() < 0.2


@pytest.mark.parametrize("broken", ["heartbeats after a pause", "heartbeats of a new leader"])
def test_heartbeats_that_prove_nothing_are_caught(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_beat = Standing.note_beat

    def note(standing: Standing, commit: int, applied: int, *, proves: bool) -> None:
        if broken == "heartbeats after a pause":
            standing._beat_at = standing._clock()
        else:
            proves = True
        note_beat(standing, commit, applied, proves=proves)

    monkeypatch.setattr(Standing, "note_beat", note)
    assert any(map(finds_staler_state, SEEDS))
