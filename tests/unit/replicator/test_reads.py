"""Reads by rounds, the soft lease, and the outcomes that a former leader learns."""

import pytest

from contrail_replicator.raft_core import RaftCore
from contrail_replicator.reads import ReadDone, Reads
from tests.support.each import each
from tests.unit.replicator.raft_sim import Cluster, SimNode


def stale_leader_and_its_successor() -> tuple[Cluster, SimNode, SimNode]:
    """Two members that lead; the old one has not missed its followers for long enough yet."""
    cluster = Cluster()
    old = cluster.elect("a")
    cluster.run(0.5)
    cluster.isolate("a")
    cluster.now += 0.31
    new = cluster["b"]
    new.group._core.campaign()
    new.group.tick()
    cluster.settle()
    new.group.propose(b"data", "data")
    cluster.settle()
    assert new.acked == ["data"]
    assert old.group.is_leader
    return cluster, old, new


def stale_leader_is_read() -> list[bool]:
    cluster, old, _ = stale_leader_and_its_successor()
    answers = old.read()
    cluster.run(0.5)
    return answers


def test_read_of_a_stale_leader_is_refused() -> None:
    assert stale_leader_is_read() == [False]


def test_read_without_a_round_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(core: RaftCore, done: ReadDone) -> None:
        done(core.leads())

    monkeypatch.setattr(RaftCore, "read_index", at_once)
    with pytest.raises(AssertionError, match="missed an acknowledged entry"):
        stale_leader_is_read()


def test_read_confirmed_by_a_round_sent_before_it_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The answers to the last round before the cut are still on their way."""

    def scene() -> list[bool]:
        cluster = Cluster()
        old = cluster.elect("a")
        cluster.run(0.5)
        cluster.tick(0.1)  # begins a round
        while cluster.mail and any(mail[1] != "a" for mail in cluster.mail):
            cluster.deliver(next(at for at, mail in enumerate(cluster.mail) if mail[1] != "a"))
        answers = list(cluster.mail)
        assert answers
        cluster.isolate("a")
        cluster.now += 0.31
        new = cluster["b"]
        new.group._core.campaign()
        new.group.tick()
        cluster.settle()
        new.group.propose(b"data", "data")
        cluster.settle()
        assert new.acked == ["data"]
        assert old.group.is_leader
        reads = old.read()
        cluster.mail = answers
        cluster.settle()
        cluster.run(0.5)
        return reads

    assert scene() == [False]
    note = Reads.note_round
    monkeypatch.setattr(
        Reads, "note_round", lambda reads, number, index: note(reads, number - 1, index)
    )
    with pytest.raises(AssertionError, match="missed an acknowledged entry"):
        scene()


def test_reads_share_rounds() -> None:
    cluster = Cluster()
    leader = cluster.elect("a")
    cluster.settle()
    before = leader.group._core._rounds.newest
    first = leader.read()
    others = [leader.read() for _ in range(50)]
    assert first == []
    cluster.settle()
    assert first == [True]
    assert all(answers == [True] for answers in others)
    assert leader.group._core._rounds.newest == before + 2


def test_read_waits_until_its_entries_are_handed_out() -> None:
    cluster = Cluster()
    leader = cluster.elect("a")
    cluster.run(0.2)
    leader.takes = False
    leader.group.propose(b"1", 1)
    leader.group.propose(b"2", 2)
    cluster.settle()
    assert leader.acked == [1]
    answers = leader.read()
    cluster.run(0.3)
    assert answers == []
    leader.takes = True
    leader.group.resume()
    assert leader.acked == [1, 2]
    assert answers == [True]


def test_read_at_a_follower_is_refused_and_that_of_a_group_of_one_is_not() -> None:
    cluster = Cluster()
    cluster.elect("a")
    assert cluster["b"].read() == [False]
    single = Cluster("a")
    single.settle()
    assert single["a"].read() == [True]
    assert single["a"].group.heard_majority_within(0.0)
    single["a"].group.stop()
    assert single["a"].read() == [False]


def test_read_at_a_new_leader_waits_for_its_own_entry() -> None:
    cluster = Cluster()
    cluster.now += 0.3
    node = cluster["a"]
    node.group._core.campaign()
    node.group.tick()
    node.log.sync()
    while not node.group._core.leads():
        cluster.sync_all()
        cluster.deliver()
    answers = node.read()
    assert answers == []
    cluster.run(0.2)
    assert answers == [True]


def test_soft_lease_ends_with_the_contact() -> None:
    cluster = Cluster()
    leader = cluster.elect("a")
    cluster.run(0.5)
    assert leader.group.heard_majority_within(0.1)
    assert not cluster["b"].group.heard_majority_within(10.0)
    cluster.isolate("a")
    cluster.tick(0.3)
    assert leader.group.is_leader
    assert not leader.group.heard_majority_within(0.3)


# Outcomes of proposals ---------------------------------------------------------------------------


def leader_with_an_open_proposal(holder: str) -> tuple[Cluster, SimNode]:
    """A leader whose entry only `holder` has too, and who is then cut off."""
    cluster = Cluster()
    old = cluster.elect("a")
    cluster.run(0.2)
    for other in "bc":
        if other != holder:
            cluster.cut_link("a", other)
    cluster.cut_link(holder, "a")
    old.group.propose(b"open", "open")
    cluster.settle()
    cluster.isolate("a")
    return cluster, old


def test_former_leader_learns_that_its_entry_was_committed() -> None:
    cluster, old = leader_with_an_open_proposal("c")
    cluster.run(0.7)
    assert not old.group.is_leader
    assert (old.acked, old.lost) == ([], [])
    cluster.elect("c")
    cluster.heal()
    cluster.run(0.5)
    assert (old.acked, old.lost, old.replaced) == (["open"], [], [])
    assert old.group.outstanding_bytes == 0


def test_former_leader_learns_that_another_entry_took_the_place() -> None:
    cluster, old = leader_with_an_open_proposal("a")
    cluster.elect("b")
    cluster.heal()
    cluster.run(0.5)
    assert (old.acked, old.lost, old.replaced) == ([], [], ["open"])


@each("leads", [True, False])
def test_member_whose_log_fails_waits_for_no_outcome(leads: bool) -> None:
    cluster, old = leader_with_an_open_proposal("c")
    if not leads:
        cluster.run(0.7)
        assert old.lost == []
    assert old.group.is_leader == leads
    old.group.handle_log_failure()
    assert (old.acked, old.lost) == ([], ["open"])
    assert old.group.outstanding_bytes == 0
    # What the others commit is applied here as well, and told to nobody.
    cluster.elect("c")
    cluster.heal()
    old.group.handle_log_recovered()
    cluster.run(0.5)
    assert (old.acked, old.lost, old.replaced) == ([], ["open"], [])


def test_leader_again_does_not_wait_for_entries_that_its_log_has_lost() -> None:
    cluster = Cluster()
    old = cluster.elect("a")
    cluster.run(0.2)
    cluster.isolate("a")
    for number in range(5):
        old.group.propose(b"%d" % number, number)
    cluster.settle()
    cluster.run(0.7)
    new = cluster.elect("b")
    cluster.heal()
    cluster.run(0.3)
    assert (old.acked, old.lost, old.replaced) == ([], [], [0, 1])
    assert new.group.hand_over("a")
    cluster.run(0.3)
    assert old.group.is_leader
    assert (old.acked, old.lost, old.replaced) == ([], [3, 4], [0, 1, 2])
    assert old.group.outstanding_bytes == 0
    old.group.propose(b"more", "more")
    cluster.settle()
    assert old.acked == ["more"]


def test_former_leader_that_learns_nothing_says_so_at_the_deadline() -> None:
    cluster, old = leader_with_an_open_proposal("a")
    cluster.run(9.0)
    assert old.lost == []
    cluster.run(3.0)
    assert (old.acked, old.lost, old.replaced) == ([], ["open"], [])
    assert old.group.outstanding_bytes == 0
