"""Members that were wiped: what they acknowledged is forgotten, and they vote when it is safe."""

import pytest

from contrail_replicator.messages import RESTORING, Append, HeartbeatReply, PreVote, RequestVote
from contrail_replicator.readmissions import Readmissions
from tests.unit.replicator.raft_sim import Cluster, SimNode


def wiped_member_meets_only_a_stale_leader() -> None:
    """C leads with A, is cut off, A and B elect A and commit; B is wiped and meets only C."""
    cluster = Cluster()
    stale = cluster.elect("c")
    cluster.run(0.5)
    cluster.isolate("c")
    cluster.now += 0.31
    new = cluster["a"]
    new.group._core.campaign()
    new.group.tick()
    cluster.settle()
    new.group.propose(b"data", "data")
    cluster.settle()
    assert new.acked == ["data"]
    assert stale.group.is_leader
    cluster["b"].wipe()
    cluster.heal()
    cluster.isolate("a")
    stale.group.link_changed("b", True)
    for _ in range(8):  # a stale leader gives up soon
        if stale.group.is_leader:
            cluster.tick()
            cluster.settle()
    new.crash()
    cluster.run(3.0)
    for leader in cluster.leaders():
        leader.group.propose(b"other", "other")
    cluster.run(0.5)
    cluster.heal()
    new.boot()
    cluster.run(3.0)
    assert len({tuple(entry.data for entry in node.store) for node in cluster.nodes.values()}) == 1


def old_acknowledgement_of_a_wiped_member_is_counted() -> None:
    """B acknowledges an entry that its leader is still syncing, is wiped, and votes again."""
    cluster = Cluster()
    leader = cluster.elect("a")
    cluster.run(0.5)
    leader.group.propose(b"data", "data")

    def pass_on(*, entries_to: str = "") -> None:
        """Deliver everything but entries, except to one member; nothing is synced at the leader."""
        for _ in range(30):
            for name in "bc":
                cluster[name].log.sync()
            while cluster.mail:
                _, target, message = cluster.mail[0]
                if isinstance(message, Append) and message.entries and target != entries_to:
                    cluster.mail.pop(0)
                else:
                    cluster.deliver()

    pass_on(entries_to="b")
    assert cluster["b"].log.durable.last_index() == 2
    cluster["b"].wipe()
    for index in range(40):
        cluster.tick()
        # B gets the first entry again, but not the second one.
        for at in reversed(range(len(cluster.mail))):
            source, target, message = cluster.mail[at]
            if isinstance(message, Append) and target == "b" and len(message.entries) > 1:
                first = Append(
                    message.term,
                    message.round,
                    message.previous_index,
                    message.previous_term,
                    message.commit,
                    message.entries[:1],
                )
                cluster["b"].endpoint.receive(source, first)
        pass_on()
        if index > 5 and not cluster["b"].log.durable.flags:
            break
    leader.log.sync()  # is the old acknowledgement counted now?
    cluster.mail.clear()
    leader.crash()
    cluster.run(3.0)
    for node in cluster.leaders():
        node.group.propose(b"other", "other")
    cluster.run(0.5)
    leader.boot()
    cluster.run(3.0)
    assert len({tuple(entry.data for entry in node.store) for node in cluster.nodes.values()}) == 1


def test_wiped_member_is_not_taken_in_by_a_stale_leader() -> None:
    wiped_member_meets_only_a_stale_leader()


def test_readmission_without_a_round_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    index_for = Readmissions.index_for

    def without(one: Readmissions, peer: str, reply: HeartbeatReply, _round: int) -> int | None:
        return index_for(one, peer, reply, 1 << 60)

    monkeypatch.setattr(Readmissions, "index_for", without)
    with pytest.raises(AssertionError, match="two entries committed"):
        wiped_member_meets_only_a_stale_leader()


def test_old_acknowledgement_of_a_wiped_member_does_not_count() -> None:
    old_acknowledgement_of_a_wiped_member_is_counted()


def test_acknowledgement_kept_over_a_wipe_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    note = Readmissions.note_flags

    def keep(one: Readmissions, peer: str, flags: int) -> bool:
        note(one, peer, flags)
        return False

    monkeypatch.setattr(Readmissions, "note_flags", keep)
    with pytest.raises(AssertionError, match="two entries committed"):
        old_acknowledgement_of_a_wiped_member_is_counted()


def restoring_member() -> tuple[Cluster, SimNode]:
    cluster = Cluster()
    leader = cluster.elect("a")
    leader.group.propose(b"data", "data")
    cluster.run(0.5)
    cluster["b"].wipe()
    return cluster, leader


def test_restoring_member_neither_votes_nor_campaigns() -> None:
    cluster, leader = restoring_member()
    leader.crash()
    restoring = cluster["b"]
    cluster.mail.clear()
    cluster.run(3.0)
    assert cluster.leaders() == []
    restoring.group.receive("c", PreVote(restoring.group.term, 99, 99))
    assert not cluster.mail.pop()[2].granted
    restoring.group.receive("c", RequestVote(restoring.group.term + 1, 99, 99, transfer=True))
    assert not cluster.mail.pop()[2].granted
    assert restoring.group.flags == RESTORING


def test_restoring_member_does_not_count_for_commits_rounds_and_leadership() -> None:
    cluster, leader = restoring_member()
    cluster.isolate("c")
    leader.group.propose(b"more", "more")
    answers = leader.read()
    cluster.run(0.3)
    assert leader.acked == ["data"]
    assert answers == []
    cluster.run(0.5)
    assert not leader.group.is_leader
    assert answers == [False]


def test_restoring_member_votes_again_when_it_has_everything() -> None:
    cluster, leader = restoring_member()
    cluster.run(0.5)
    restored = cluster["b"]
    assert restored.group.flags == restored.log.durable.flags == 0
    cluster["c"].crash()
    leader.group.propose(b"more", "more")
    cluster.run(0.3)
    assert leader.acked == ["data", "more"]
    assert restored.store == [*restored.store[:0], *leader.store] or len(restored.store) == 3


def test_member_that_votes_again_can_lead_though_nothing_new_is_logged() -> None:
    cluster, leader = restoring_member()
    cluster.run(0.5)
    assert leader.group.hand_over("b")
    cluster.run(0.5)
    assert cluster.leaders() == [cluster["b"]]


def test_flag_that_is_taken_away_counts_until_that_is_durable() -> None:
    cluster, _ = restoring_member()
    restoring = cluster["b"]
    while restoring.group._journal._flags != 0:
        cluster.tick()
        while cluster.mail and restoring.group._journal._flags:
            cluster.deliver()
            cluster["a"].log.sync()
            cluster["c"].log.sync()
            if restoring.group._journal._flags:
                restoring.log.sync()
    assert restoring.group.flags == RESTORING
    restoring.crash()
    restoring.boot()
    assert restoring.group.flags == RESTORING
    cluster.run(0.5)
    assert restoring.group.flags == 0
