"""Members that have made something else of the same entries are found, and the odd one leaves."""

from hashlib import blake2b

import pytest

from contrail_replicator.comparisons import EVERY_ENTRIES, EVERY_S, KEPT, Comparison
from contrail_replicator.messages import SUSPECT, DigestAnswer, DigestQuestion, Distrust
from tests.unit.replicator.raft_sim import Cluster, SimNode


class Digests:
    """The digests that the members note; those of `wrong` members differ."""

    def __init__(self, cluster: Cluster) -> None:
        self.wrong: dict[str, bytes] = {}
        self.differs: dict[str, list[bool]] = {name: [] for name in cluster.names}
        for node in cluster.nodes.values():
            node.then = lambda node=node: self.note(node)  # type: ignore[misc]
            self.follow(node)

    def note(self, node: SimNode) -> None:
        applied = b"".join(entry.data for entry in node.store) + self.wrong.get(node.name, b"")
        node.group.comparison.note(len(node.store), blake2b(applied, digest_size=16).digest())

    def follow(self, node: SimNode) -> None:
        node.group.comparison.on_differs = self.differs[node.name].append


def compared(names: str = "abc") -> tuple[Cluster, SimNode, Digests]:
    cluster = Cluster(names)
    digests = Digests(cluster)
    leader = cluster.elect("a")
    leader.group.propose(b"data", "data")
    cluster.run(0.5)
    return cluster, leader, digests


def flags(cluster: Cluster) -> list[int]:
    return [node.group.flags for node in cluster.nodes.values()]


def more(cluster: Cluster, leader: SimNode) -> None:
    """Commit an entry, and let the time of the next comparison come."""
    leader.group.propose(b"more", "more")
    cluster.run(EVERY_S + 0.5)


def test_members_that_agree_go_on() -> None:
    cluster, leader, digests = compared()
    for _ in range(3):
        more(cluster, leader)
    assert flags(cluster) == [0, 0, 0]
    assert leader.group.is_leader
    assert digests.differs["a"] == []


def test_odd_member_is_suspect_and_the_others_go_on() -> None:
    cluster, leader, digests = compared()
    digests.wrong["b"] = b"x"
    more(cluster, leader)
    assert flags(cluster) == [0, SUSPECT, 0]
    assert cluster["b"].log.durable.flags == SUSPECT
    assert leader.group.is_leader
    leader.group.propose(b"after", "after")
    cluster.run(0.5)
    assert leader.acked[-1] == "after"
    # The leader goes: the one that is left leads, and not the one in the wrong.
    leader.crash()
    cluster.run(5.0)
    assert [node.name for node in cluster.leaders() if node.group.is_leader] == ["c"]


def test_odd_leader_hands_over() -> None:
    cluster, leader, digests = compared("abcde")
    digests.wrong["a"] = b"x"
    more(cluster, leader)
    cluster.run(3.0)
    assert flags(cluster) == [SUSPECT, 0, 0, 0, 0]
    (new,) = (node for node in cluster.nodes.values() if node.group.is_leader)
    assert new.name != "a"
    more(cluster, new)
    assert flags(cluster) == [SUSPECT, 0, 0, 0, 0]


def test_one_against_one_waits_for_a_third() -> None:
    cluster, leader, digests = compared()
    cluster["c"].crash()
    digests.wrong["b"] = b"x"
    more(cluster, leader)
    assert digests.differs["a"] == [True]
    assert [node.group.flags for node in cluster.nodes.values() if node.up] == [0, 0]
    cluster["c"].boot()
    digests.follow(cluster["c"])
    cluster.run(EVERY_S + 1.0)
    assert digests.differs["a"] == [True, False]
    assert flags(cluster) == [0, SUSPECT, 0]


def test_new_leader_begins_anew() -> None:
    cluster, leader, digests = compared()
    cluster["c"].crash()
    digests.wrong["b"] = b"x"
    more(cluster, leader)
    assert digests.differs["a"] == [True]
    cluster["c"].boot()
    digests.follow(cluster["c"])
    leader.group.hand_over("b")
    cluster.run(1.0)
    assert [node.name for node in cluster.leaders()] == ["b"]
    cluster.run(EVERY_S + 2.0)
    # Two of three have outvoted the leader.
    assert flags(cluster) == [0, SUSPECT, 0]
    assert [node.name for node in cluster.leaders()] != ["b"]


def asked(comparison_messages: list[tuple[str, object]]) -> list[int]:
    return [each.index for _, each in comparison_messages if isinstance(each, DigestQuestion)]


def test_leader_asks_after_some_time_or_some_entries_but_not_twice() -> None:
    sent: list[tuple[str, object]] = []
    leader = Comparison("a", ("b",), lambda peer, message: sent.append((peer, message)))
    leader.note(1, b"1")
    leader.ask_if_due(7, 100.0)
    assert asked(sent) == []
    leader.ask_if_due(7, 100.0 + EVERY_S)
    leader.ask_if_due(7, 100.0 + 3 * EVERY_S)  # nothing is new
    assert asked(sent) == [1]
    for index in range(2, EVERY_ENTRIES + 2):
        leader.ask_if_due(7, 100.0 + EVERY_S)
        leader.note(index, b"%d" % index)
    leader.ask_if_due(7, 100.0 + EVERY_S)
    assert asked(sent) == [1, EVERY_ENTRIES + 1]


def test_question_is_answered_when_its_entry_is_applied_as_far_as_it_is_known() -> None:
    sent: list[tuple[str, object]] = []
    member = Comparison("b", ("a",), lambda peer, message: sent.append((peer, message)))
    for index in range(1, KEPT + 11):
        member.note(index, b"%d" % index)
    for index in (10, 11, KEPT + 10, KEPT + 11):  # the first is forgotten, the last is to come
        member.answer("a", 3, index)
    member.note(KEPT + 11, b"new")
    answered = [(each.index, each.digest) for _, each in sent if isinstance(each, DigestAnswer)]
    assert answered == [(11, b"11"), (KEPT + 10, b"%d" % (KEPT + 10)), (KEPT + 11, b"new")]
    # After a snapshot, what was noted before is of another part of the log.
    member.note(KEPT + 99, b"later")
    member.answer("a", 3, KEPT + 11)
    assert len(sent) == 3


@pytest.mark.parametrize("stale", ["term", "index"])
def test_late_answers_do_not_count(stale: str) -> None:
    leader = Comparison("a", ("b", "c"), lambda peer, message: None)
    told: list[bool] = []
    leader.on_differs = told.append
    leader.note(1, b"right")
    leader.ask_if_due(7, 100.0)
    leader.ask_if_due(7, 100.0 + EVERY_S)
    term, index = (6, 1) if stale == "term" else (7, 0)
    for peer in "bc":
        assert leader.note_answer(peer, DigestAnswer(term, index, b"other")) == set()
    assert told == []
    assert leader.note_answer("b", DigestAnswer(7, 1, b"other")) == set()
    assert told == [True]
    assert leader.note_answer("c", DigestAnswer(7, 1, b"other")) == {"a"}
    assert told == [True, False]


def test_only_the_leader_is_believed() -> None:
    cluster, leader, _ = compared()
    member = cluster["b"].group
    for peer, term in (("c", leader.group.term), ("a", leader.group.term - 1)):
        member.receive(peer, Distrust(term, 1))
    assert member.flags == 0
    member.receive("a", Distrust(leader.group.term, 1))
    cluster.run(0.1)
    assert member.flags == SUSPECT
