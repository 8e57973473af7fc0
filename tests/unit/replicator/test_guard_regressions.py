"""Ways in which the core alone acknowledges or cuts entries wrongly, replayed step by step."""

import hashlib
import importlib
import importlib.metadata
import importlib.util
import pickle
from pathlib import Path

import pytest

from contrail_replicator import LogDivergedError, Message, NotLeaderError, raft_core
from contrail_replicator.raft_core import RaftCore
from tests.unit.replicator.raft_sim import Cluster, SimNode

AUDITED_SHA256 = "e8bdf06797085d734df86e24ab4802fe87893dff77268565ec036f7ad4a1cfe4"


def pass_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the core have append messages as they come, and cut as it likes."""
    monkeypatch.setattr(RaftCore, "_screen_append", lambda _core, message: message)
    monkeypatch.setattr(
        RaftCore,
        "_SyncObj__getEntries",
        lambda core, index, count=None, size=None: (
            [] if index is None else core._journal.slice(index, count, size)
        ),
    )


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
    cluster.heal()
    cluster.run(1.0)
    return old


def test_snapshot_message_moves_no_commit_index() -> None:
    old = old_leader_meets_a_trimmed_log()
    assert b"stale" not in [entry.data for entry in old.store]
    assert old.acked == []
    assert old.lost == ["stale"]


def test_snapshot_message_acknowledged_falsely_without_the_guard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pass_everything(monkeypatch)
    with pytest.raises(AssertionError, match="two entries committed"):
        old_leader_meets_a_trimmed_log()


def same_range_sent_twice(monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[bytes]]:
    """Two resets, one range sent twice, the leader dies behind the second's first message."""
    monkeypatch.setattr(raft_core, "MESSAGE_BYTES", 100)
    cluster = Cluster()
    leader = cluster.elect("a")
    cluster["c"].crash()
    cluster.isolate("b")
    for number in range(60):
        leader.group.propose(b"entry %04d" % number, number)
    leader.log.sync()
    cluster.heal()
    for _ in range(2):  # two heartbeats that b must answer with a reset
        cluster.now += 0.3
        leader.group.tick()
    for _ in range(2):
        cluster.deliver()
    resets = [mail for mail in cluster.mail if mail[2]["type"] == "next_node_idx"]
    assert [mail[2]["reset"] for mail in resets] == [True, True]
    cluster.mail.clear()
    for mail in resets:
        cluster.mail.append(mail)
        cluster.deliver(len(cluster.mail) - 1)
        cluster.now += 0.3
        leader.group.tick()
    appends = [mail for mail in cluster.mail if mail[1] == "b"]
    passes = [index for index, mail in enumerate(appends) if mail[2]["prevLogIdx"] == 1]
    second = next(index for index in passes if index > 0)
    cluster.mail = appends[:second]
    cluster.settle()
    acked = len(leader.acked)
    cluster.mail = appends[second : second + 1]
    leader.crash()
    cluster.settle()
    cluster["c"].boot()
    cluster.elect("b")
    return acked, [entry.data for entry in cluster["b"].store if entry.data]


def test_range_sent_twice_cuts_nothing_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    acked, kept = same_range_sent_twice(monkeypatch)
    assert acked == 60
    assert kept == [b"entry %04d" % number for number in range(60)]


def test_range_sent_twice_loses_acknowledged_entries_without_the_guard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pass_everything(monkeypatch)
    with pytest.raises(AssertionError, match="two entries committed"):
        same_range_sent_twice(monkeypatch)


def reply(term: int, next_index: int, success: bool = True) -> Message:
    return {
        "type": "next_node_idx",
        "term": term,
        "next_node_idx": next_index,
        "reset": False,
        "success": success,
    }


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
    leader.group.receive("b", reply(leader.group.term - 1, leader.group.last_index + 1))
    assert leader.group.commit_index == committed
    leader.group.receive("b", reply(leader.group.term, leader.group.last_index + 1))
    assert leader.acked == ["alone"]


def test_acknowledgement_beyond_the_own_log_counts_for_nothing() -> None:
    leader = leader_with_an_entry_nobody_has()
    leader.group.receive("b", reply(leader.group.term, leader.group.last_index + 2))
    assert leader.acked == []


def test_reply_of_a_later_term_deposes_the_leader() -> None:
    leader = leader_with_an_entry_nobody_has()
    term = leader.group.term + 5
    leader.group.receive("b", reply(term, 1, success=False))
    assert not leader.group.is_leader
    assert leader.group.term == term
    assert leader.lost == ["alone"]


def test_stale_leader_learns_of_the_later_term() -> None:
    cluster = Cluster()
    stale = cluster.elect("a")
    cluster.isolate("a")
    cluster.elect("b")
    cluster.heal()
    cluster.now += 0.3
    stale.group.tick()
    cluster.settle()
    assert not stale.group.is_leader


def test_replies_carry_the_term() -> None:
    cluster = Cluster()
    leader = cluster.elect("a")
    leader.group.propose(b"data", None)
    cluster.sync_all()
    cluster.deliver()
    cluster.sync_all()
    replies = [message for _, _, message in cluster.mail if message["type"] == "next_node_idx"]
    assert [message["term"] for message in replies] == [leader.group.term]


def test_doubled_vote_counts_once() -> None:
    cluster = Cluster("abcde")
    candidate = cluster["a"]
    cluster.isolate("a")
    candidate.group._core.campaign()
    candidate.group.tick()
    candidate.log.sync()
    vote = {"type": "response_vote", "term": candidate.group.term}
    for _ in range(3):
        candidate.group.receive("b", vote)
    assert candidate.group._core.led_term() == 0
    candidate.group.receive("c", vote)
    assert candidate.group._core.led_term() == candidate.group.term


def test_vote_and_acknowledgement_leave_only_when_durable() -> None:
    cluster = Cluster()
    cluster["a"].group._core.campaign()
    cluster["a"].group.tick()
    assert cluster.mail == []  # the candidacy waits for the own term
    cluster["a"].log.sync()
    cluster.deliver()
    assert [mail[1] for mail in cluster.mail] == ["c"]  # b's vote waits
    cluster["b"].log.sync()
    assert cluster.mail[-1][2]["type"] == "response_vote"


def test_vote_that_waited_into_a_later_term_is_dropped() -> None:
    cluster = Cluster()
    voter = cluster["b"].group
    request = {"type": "request_vote", "term": 5, "last_log_index": 0, "last_log_term": 0}
    voter.receive("a", request)
    voter.receive("c", {**request, "term": 6, "last_log_index": 0})
    cluster["b"].log.sync()
    assert [(mail[1], mail[2]["term"]) for mail in cluster.mail] == [("c", 6)]


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
    cluster.now += 0.3
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
    old.group.receive(
        "b",
        {
            "type": "append_entries",
            "term": term + 1,
            "commit_index": index,
            "prevLogIdx": index,
            "prevLogTerm": term,
            "entries": [(b"", index + 1, term + 1)],
        },
    )
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
        follower.receive(
            "a",
            {
                "type": "append_entries",
                "term": follower.term + 1,
                "commit_index": 0,
                "prevLogIdx": 1,
                "prevLogTerm": 1,
                "entries": [(b"other", 2, follower.term + 1)],
            },
        )


@pytest.mark.parametrize(
    "change",
    [
        {"transmission": "start", "data": b"x"},
        {"entries": [(b"x", 9, 1)]},
    ],
)
def test_unfit_append_message_is_dropped(change: Message) -> None:
    cluster = Cluster()
    cluster.elect("a")
    follower = cluster["b"].group
    last = follower.last_index
    good = {
        "type": "append_entries",
        "term": follower.term,
        "commit_index": 99,
        "prevLogIdx": last,
        "prevLogTerm": follower.term,
        "entries": [],
    }
    follower.receive("a", {**good, **change})
    assert follower.last_index == last
    assert cluster.mail == []


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
    assert importlib.metadata.version("pysyncobj") == raft_core.AUDITED_VERSION
    assert hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest() == AUDITED_SHA256


def test_pickles_are_refused_by_the_library() -> None:
    library = importlib.import_module("pysyncobj.pickle")
    with pytest.raises(RuntimeError, match="never pickled"):
        library.loads(pickle.dumps(1))
