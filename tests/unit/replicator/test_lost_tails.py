"""Members whose disk has lost the end of their log, which nothing on it shows."""

from collections.abc import Callable

import pytest

from contrail_replicator.messages import RESTORING, Append, Forgotten, Message
from contrail_replicator.raft_core import RaftCore
from tests.unit.replicator.raft_chaos import Chaos
from tests.unit.replicator.raft_sim import Cluster, SimNode


def lose_tail(node: SimNode, from_index: int) -> None:
    """Stop a member, lose entries that were durable, and start it again."""
    node.crash(from_index - 1)
    node.log.durable.cut(from_index)
    node.boot()


def pass_on(cluster: Cluster, passes: Callable[[Message], bool], turns: int = 10) -> None:
    """Let time pass; of the messages on their way, only some arrive."""
    for _ in range(turns):
        cluster.tick()
        while cluster.mail:
            cluster.sync_all()
            if passes(cluster.mail[0][2]):
                cluster.deliver()
            else:
                cluster.mail.pop(0)
        cluster.sync_all()


def contents(node: SimNode) -> list[bytes]:
    return [entry.data for entry in node.store]


def acknowledged_by_two(count: int = 5) -> tuple[Cluster, SimNode, SimNode]:
    """A leads and B has acknowledged what C has not got; C is cut off."""
    cluster = Cluster()
    leader = cluster.elect("a")
    cluster.run(0.5)
    cluster.isolate("c")
    for number in range(count):
        leader.group.propose(b"data %d" % number, number)
    cluster.settle()
    assert leader.acked == list(range(count))
    return cluster, leader, cluster["b"]


def leader_fails_before_the_tail_is_sent_again() -> None:
    cluster, leader, loser = acknowledged_by_two()
    lose_tail(loser, loser.log.durable.last_index() - 2)
    pass_on(cluster, lambda message: not (isinstance(message, Append) and message.entries))
    cluster.mail.clear()
    leader.crash()
    cluster.heal()
    cluster.run(3.0)
    for node in cluster.leaders():
        node.group.propose(b"other", "other")
    cluster.run(0.5)
    leader.boot()
    cluster.run(3.0)
    stores = {tuple(contents(node)) for node in cluster.nodes.values()}
    assert len(stores) == 1
    assert {b"data %d" % number for number in range(5)} <= {*stores.pop()}
    assert [node.group.flags for node in cluster.nodes.values()] == [0, 0, 0]


def test_member_without_what_it_acknowledged_does_not_vote() -> None:
    leader_fails_before_the_tail_is_sent_again()


def test_vote_without_what_was_acknowledged_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RaftCore, "_remind", lambda *_: None)
    with pytest.raises(AssertionError, match="two entries committed"):
        leader_fails_before_the_tail_is_sent_again()


def test_member_votes_again_once_it_has_everything() -> None:
    cluster, leader, loser = acknowledged_by_two()
    cluster.heal()
    cluster.run(0.5)
    lose_tail(loser, 3)
    pass_on(cluster, lambda message: not (isinstance(message, Append) and message.entries))
    assert loser.log.durable.flags == RESTORING
    cluster.run(1.0)
    assert loser.group.flags == 0
    assert contents(loser) == contents(leader)
    assert leader.group.is_leader


def test_reminder_of_what_the_log_has_changes_nothing() -> None:
    _, leader, member = acknowledged_by_two()
    held = member.group.durable_index
    for term, index, flags in (
        (leader.group.term, held, 0),
        (leader.group.term - 1, held + 1, 0),
        (leader.group.term, held + 1, RESTORING),
    ):
        member.group.receive("a", Forgotten(term, index))
        assert member.group.flags == flags


def test_restart_without_loss_is_no_loss() -> None:
    cluster, leader, member = acknowledged_by_two()
    for _ in range(3):
        leader.group.propose(b"more", "more")
        cluster.tick()
        while cluster.mail:
            cluster.deliver()  # nothing is synced
        member.crash(2)
        member.boot()
        cluster.run(0.3)
        assert member.group.flags == 0
    assert contents(member) == contents(leader)


@pytest.mark.long
def test_late_answers_flag_no_member(monkeypatch: pytest.MonkeyPatch) -> None:
    flagged, obey, reminded = [], RaftCore._obey, []

    def watched(core: RaftCore, message: Message) -> None:
        obey(core, message)
        if isinstance(message, Forgotten):
            reminded.append(message)
            flagged.append(core._journal.flags & RESTORING)

    monkeypatch.setattr(RaftCore, "_obey", watched)
    for seed in range(30):
        chaos = Chaos(seed, wipe=0.0)
        chaos.run(1_500)
        chaos.check()
    assert reminded
    assert not any(flagged)
