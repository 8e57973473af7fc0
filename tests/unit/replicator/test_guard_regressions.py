"""Ways in which the core alone acknowledges or cuts entries wrongly, replayed step by step."""

import hashlib
import importlib
import importlib.metadata
import importlib.util
import pickle
from pathlib import Path

import pytest

from contrail_replicator import LogDivergedError, NotLeaderError, library
from contrail_replicator.messages import (
    Append,
    Reply,
    RequestVote,
    VoteReply,
)
from tests.unit.replicator.raft_sim import Cluster, SimNode
from tests.unit.replicator.stock_faults import pass_everything

AUDITED_SHA256 = "e8bdf06797085d734df86e24ab4802fe87893dff77268565ec036f7ad4a1cfe4"


def old_leader_meets_a_trimmed_log() -> SimNode:
    cluster = Cluster()
    old = cluster.elect("a")
    cluster.isolate("a")
    old.group.propose(b"stale", "stale")
    old.log.sync()
    new = cluster.elect("b")
    for number in range(50):
        new.group.propose(b"%d" % number, number)
        cluster.settle()
    for name in "bc":
        cluster[name].group.trim(cluster[name].group.applied_index)
        cluster[name].log.forget_below(cluster[name].group.applied_index)
    cluster.heal()
    cluster.run(1.0)
    return old


def test_message_without_entries_moves_no_commit_index() -> None:
    old = old_leader_meets_a_trimmed_log()
    assert b"stale" not in [entry.data for entry in old.store]
    assert old.acked == []


def test_message_without_entries_acknowledges_falsely_without_the_guard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pass_everything(monkeypatch)
    with pytest.raises(AssertionError, match="two entries committed"):
        old_leader_meets_a_trimmed_log()


def same_range_sent_twice() -> tuple[int, list[bytes]]:
    """A range arrives again when the entries after it are acknowledged; then the leader dies."""
    cluster = Cluster()
    leader = cluster.elect("a")
    cluster["c"].crash()
    for number in range(60):
        leader.group.propose(b"entry %04d" % number, number)
    leader.log.sync()
    first = next(each for each in cluster.mail if each[1] == "b" and isinstance(each[2], Append))
    cluster.settle()
    acked = len(leader.acked)
    cluster.mail = [first]
    leader.crash()
    cluster.settle()
    cluster["c"].boot()
    cluster.run(3.0)
    return acked, [entry.data for entry in cluster["b"].store if entry.data]


def test_range_sent_twice_cuts_nothing_acknowledged() -> None:
    acked, kept = same_range_sent_twice()
    assert acked == 60
    assert kept == [b"entry %04d" % number for number in range(60)]


def test_range_sent_twice_loses_acknowledged_entries_without_the_guard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pass_everything(monkeypatch)
    with pytest.raises(AssertionError, match="two entries committed"):
        same_range_sent_twice()


def reply(term: int, index: int, success: bool = True) -> Reply:
    return Reply(term, 0, success, index)


def leader_with_an_entry_nobody_has() -> SimNode:
    cluster = Cluster()
    leader = cluster.elect("a")
    cluster.isolate("a")
    leader.group.propose(b"alone", "alone")
    leader.log.sync()
    return leader


def test_acknowledgement_of_an_earlier_term_counts_for_nothing() -> None:
    leader = leader_with_an_entry_nobody_has()
    committed = leader.group.commit_index
    leader.group.receive("b", reply(leader.group.term - 1, leader.group.last_index))
    assert leader.group.commit_index == committed
    leader.group.receive("b", reply(leader.group.term, leader.group.last_index))
    assert leader.acked == ["alone"]


def test_acknowledgement_beyond_the_own_log_counts_for_nothing() -> None:
    leader = leader_with_an_entry_nobody_has()
    leader.group.receive("b", reply(leader.group.term, leader.group.last_index + 1))
    assert leader.acked == []


def test_entry_of_an_earlier_term_is_committed_with_the_first_of_this_term() -> None:
    leader = leader_with_an_entry_nobody_has()
    before, old = leader.group.commit_index, leader.group.last_index
    leader.group.resign()
    leader.group._core.campaign()
    leader.group.tick()
    leader.group.receive("b", VoteReply(leader.group.term, True))
    leader.log.sync()
    assert leader.group.last_index == old + 1
    for index in (before, old):
        leader.group.receive("b", reply(leader.group.term, index))
        assert leader.group.commit_index == before
    leader.group.receive("b", reply(leader.group.term, old + 1))
    assert leader.group.commit_index == old + 1
    assert leader.acked == ["alone"]


def test_reply_of_a_later_term_deposes_the_leader() -> None:
    leader = leader_with_an_entry_nobody_has()
    term = leader.group.term + 5
    leader.group.receive("b", reply(term, 1, success=False))
    assert not leader.group.is_leader
    assert leader.group.term == term


def test_stale_leader_learns_of_the_later_term() -> None:
    cluster = Cluster()
    stale = cluster.elect("a")
    cluster.isolate("a")
    cluster.elect("b")
    cluster.heal()
    cluster.now += 0.1
    stale.group.tick()
    cluster.settle()
    assert not stale.group.is_leader
    assert stale.group.term == cluster["b"].group.term


def test_replies_carry_the_term() -> None:
    cluster = Cluster()
    leader = cluster.elect("a")
    leader.group.propose(b"data", None)
    cluster.sync_all()
    cluster.deliver()
    cluster.sync_all()
    replies = [message for _, _, message in cluster.mail if isinstance(message, Reply)]
    assert [message.term for message in replies] == [leader.group.term]


def test_doubled_vote_counts_once() -> None:
    cluster = Cluster("abcde")
    candidate = cluster["a"]
    cluster.isolate("a")
    candidate.group._core.campaign()
    candidate.group.tick()
    candidate.log.sync()
    vote = VoteReply(candidate.group.term, granted=True)
    for _ in range(3):
        candidate.group.receive("b", vote)
    assert candidate.group._core.led_term() == 0
    candidate.group.receive("c", vote)
    assert candidate.group._core.led_term() == candidate.group.term


def test_vote_and_acknowledgement_leave_only_when_durable() -> None:
    cluster = Cluster()
    cluster.now += 0.3
    cluster["a"].group._core.campaign()
    cluster["a"].group.tick()
    assert cluster.mail == []  # the candidacy waits for the own term
    cluster["a"].log.sync()
    cluster.deliver()
    assert [mail[1] for mail in cluster.mail] == ["c"]  # b's vote waits
    cluster["b"].log.sync()
    assert isinstance(cluster.mail[-1][2], VoteReply)


def test_vote_that_waited_into_a_later_term_is_dropped() -> None:
    cluster = Cluster()
    cluster.now += 0.3
    voter = cluster["b"].group
    voter.receive("a", RequestVote(5, 0, 0, transfer=False))
    voter.receive("c", RequestVote(6, 0, 0, transfer=False))
    cluster["b"].log.sync()
    assert [(mail[1], mail[2].term) for mail in cluster.mail] == [("c", 6)]


def test_follower_commits_nothing_above_its_own_disk() -> None:
    cluster = Cluster()
    leader = cluster.elect("a")
    cluster.run(0.5)
    before = cluster["b"].group.commit_index
    leader.group.propose(b"data", "data")
    cluster["a"].log.sync()
    cluster.deliver(0)
    cluster.deliver(0)
    cluster["c"].log.sync()
    cluster.deliver()
    assert leader.acked == ["data"]
    cluster.now += 0.1
    leader.group.tick()
    while cluster.mail:
        cluster.deliver()
    assert cluster["b"].group.commit_index == before
    cluster["b"].log.sync()
    assert cluster["b"].group.commit_index == before + 1


def test_callback_of_a_deposed_leader_appends_nothing() -> None:
    """A commit that a successor reports is handed out before the loss of leadership is."""
    cluster = Cluster()
    old = cluster.elect("a")
    cluster.run(0.5)
    index, term = old.group.propose(b"data", "data"), old.group.term
    old.log.sync()
    refused: list[NotLeaderError] = []

    def propose() -> None:
        try:
            old.group.propose(b"more", "more")
        except NotLeaderError as error:
            refused.append(error)

    old.then = propose
    old.group.receive("b", Append(term + 1, 1, index, term, index, ((term + 1, b""),)))
    assert old.acked == ["data"]
    assert old.group.last_index == index + 1
    assert refused
    assert not old.group.is_leader


def test_leader_that_would_cut_committed_entries_is_refused() -> None:
    cluster = Cluster()
    cluster.elect("a").group.propose(b"data", None)
    cluster.run(0.5)
    follower = cluster["b"].group
    with pytest.raises(LogDivergedError):
        follower.receive("a", Append(follower.term + 1, 1, 1, 1, 0, ((follower.term + 1, b"x"),)))


def test_full_disk_queue_drops_entries_and_the_leader_sends_them_again() -> None:
    cluster = Cluster()
    leader = cluster.elect("a")
    cluster["b"].log.has_space = False
    leader.group.propose(b"data", "data")
    cluster.settle()
    assert leader.acked == ["data"]
    assert cluster["b"].group.last_index == leader.group.last_index - 1
    cluster["b"].log.has_space = True
    cluster.run(1.0)
    assert cluster["b"].group.applied_index == leader.group.applied_index


def test_library_is_the_audited_one() -> None:
    spec = importlib.util.find_spec("pysyncobj.syncobj")
    assert spec is not None
    assert spec.origin is not None
    assert importlib.metadata.version("pysyncobj") == library.AUDITED_VERSION
    assert hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest() == AUDITED_SHA256


def test_pickles_are_refused_by_the_library() -> None:
    library = importlib.import_module("pysyncobj.pickle")
    with pytest.raises(RuntimeError, match="never pickled"):
        library.loads(pickle.dumps(1))
