"""Elections: a healthy leader stays, a lost one is replaced, and a handover loses nothing.

Each rule is also left out, as it is in the library's core, where the same simulation must fail.
"""

import pytest

from contrail_replicator import GroupBusyError
from contrail_replicator.elections import Elections
from contrail_replicator.messages import (
    SUSPECT,
    Heartbeat,
    PreVote,
    PreVoteReply,
    RequestVote,
    Resigned,
    VoteReply,
)
from contrail_replicator.raft_core import RaftCore
from contrail_replicator.rounds import Rounds
from tests.unit.replicator.raft_sim import Cluster, SimNode


def led_by_a(names: str = "abc") -> tuple[Cluster, SimNode]:
    cluster = Cluster(names)
    leader = cluster.elect("a")
    cluster.run(0.5)
    return cluster, leader


def assert_still_led_by_a(cluster: Cluster, term: int) -> None:
    assert [node.name for node in cluster.leaders()] == ["a"], "the leader was deposed"
    assert cluster["a"].group.term == term, "the leader was deposed"


# A healthy leader stays --------------------------------------------------------------------------


def member_returns_after_a_while() -> None:
    cluster, leader = led_by_a()
    term = leader.group.term
    cluster.isolate("c")
    cluster.run(5.0)
    cluster.heal()
    cluster.run(2.0)
    assert_still_led_by_a(cluster, term)
    assert cluster["c"].group.term == term


def member_hears_nothing() -> None:
    cluster, leader = led_by_a()
    term = leader.group.term
    cluster.cut_link("a", "c")
    cluster.run(5.0)
    assert_still_led_by_a(cluster, term)


def late_candidate_meets_a_live_leader() -> None:
    cluster, leader = led_by_a()
    term = leader.group.term
    cluster["b"].group.receive("c", RequestVote(term + 1, 99, term, transfer=False))
    cluster.run(1.0)
    assert_still_led_by_a(cluster, term)


def test_member_that_returns_does_not_depose_the_leader() -> None:
    member_returns_after_a_while()


def test_member_that_hears_nothing_does_not_depose_the_leader() -> None:
    member_hears_nothing()


def test_member_that_returns_deposes_the_leader_without_pre_votes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RaftCore, "_SyncObj__connectedToAnyone", lambda _core: True)
    with pytest.raises(AssertionError, match="deposed"):
        member_returns_after_a_while()
    monkeypatch.setattr(Elections, "may_consider", lambda _elections, _request: True)
    with pytest.raises(AssertionError, match="deposed"):
        member_hears_nothing()


def test_late_candidate_is_ignored_by_those_who_hear_the_leader() -> None:
    late_candidate_meets_a_live_leader()


def test_late_candidate_deposes_the_leader_without_loyalty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Elections, "may_consider", lambda _elections, _request: True)
    with pytest.raises(AssertionError, match="deposed"):
        late_candidate_meets_a_live_leader()


def test_busy_follower_reads_its_sockets_before_it_misses_the_leader() -> None:
    cluster, leader = led_by_a()
    follower = cluster["b"].group
    cluster.now += 2.0  # the follower's process was busy; the leader was not
    follower.tick()
    assert not [mail for mail in cluster.mail if isinstance(mail[2], PreVote)]
    follower.receive("a", Heartbeat(leader.group.term, 99, 0))
    follower.tick()
    assert not [mail for mail in cluster.mail if isinstance(mail[2], PreVote)]


def test_candidate_with_a_later_term_costs_one_election() -> None:
    cluster, leader = led_by_a()
    cluster.isolate("c")
    cluster.run(1.0)
    alone = cluster["c"].group
    for _ in range(5):  # as if it had no pre-votes
        alone._core.campaign()
        alone.tick()
        cluster.run(0.1)
    assert alone.term == leader.group.term + 5
    leader.group.propose(b"data", "data")
    cluster.heal()
    cluster.run(2.0)
    assert len(cluster.leaders()) == 1
    assert cluster.leaders()[0].group.term > alone.term - 1
    assert leader.acked == ["data"]
    assert len(cluster["c"].store) == len(leader.store)


# Pre-votes ---------------------------------------------------------------------------------------


def member_behind_is_the_first_to_miss_the_leader() -> None:
    cluster, leader = led_by_a()
    cluster.isolate("c")
    leader.group.propose(b"data", "data")
    cluster.settle()
    term = leader.group.term
    leader.crash()
    cluster.heal()
    cluster.now += 0.3
    for _ in range(20):
        cluster["c"].group._core._SyncObj__raftElectionDeadline = cluster.now - 1.0
        cluster["b"].group._core._SyncObj__raftElectionDeadline = cluster.now + 1.0
        cluster.tick()
        cluster.settle()
    assert cluster["c"].group.term == term, "a member that cannot win has raised the term"
    cluster.run(2.0)
    assert [node.name for node in cluster.leaders()] == ["b"]


def two_candidates_of_one_term() -> None:
    cluster, leader = led_by_a()
    leader.crash()
    cluster.now += 0.7
    for name in "bc":
        cluster[name].group._core.campaign()
        cluster[name].group.tick()
    assert cluster["b"].group.term == cluster["c"].group.term
    cluster.run(3.0)
    assert cluster.leaders(), "nobody was elected"


def test_pre_vote_is_refused_to_a_member_that_is_behind() -> None:
    member_behind_is_the_first_to_miss_the_leader()


def test_pre_vote_by_liveness_alone_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Elections,
        "answer",
        lambda one, question: PreVoteReply(
            one._voter.term(), question.term, granted=not one.is_loyal()
        ),
    )
    with pytest.raises(AssertionError, match="raised the term"):
        member_behind_is_the_first_to_miss_the_leader()


def test_candidates_answer_pre_votes() -> None:
    two_candidates_of_one_term()


def test_candidates_that_do_not_answer_pre_votes_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = Elections.answer

    def silent(one: Elections, question: PreVote) -> PreVoteReply:
        if one._voter._voters or one._voter._SyncObj__raftState == 1:  # type: ignore[attr-defined]
            return PreVoteReply(question.term, question.term, granted=False)
        return answer(one, question)

    monkeypatch.setattr(Elections, "answer", silent)
    with pytest.raises(AssertionError, match="nobody was elected"):
        two_candidates_of_one_term()


def test_pre_vote_of_a_member_in_an_earlier_term_counts() -> None:
    cluster = Cluster()
    asker = cluster["a"].group
    cluster.isolate("a")
    asker.receive("b", VoteReply(7, granted=False))
    assert asker.term == 7
    cluster.now += 1.0
    asker.tick()
    asker.tick()
    asker.receive("c", PreVoteReply(2, 7, granted=True))
    assert asker.term == 8  # a majority supports its candidacy


def test_pre_vote_changes_nothing_and_answers_carry_the_term() -> None:
    cluster, leader = led_by_a()
    term, before = leader.group.term, cluster["b"].log.waiting
    cluster.isolate("c")
    cluster.now += 0.4
    cluster.heal()
    cluster.mail.clear()
    cluster["b"].group.receive("c", PreVote(term + 5, 99, term + 5))
    assert (cluster["b"].group.term, cluster["b"].log.waiting) == (term, before)
    assert cluster.mail == [("b", "c", PreVoteReply(term, term + 5, granted=True))]


# Votes -------------------------------------------------------------------------------------------


def first_answer_is_lost() -> None:
    cluster = Cluster()
    cluster["c"].crash()
    cluster.now += 0.3
    candidate = cluster["a"].group
    candidate._core.campaign()
    candidate.tick()
    term = candidate.term
    candidate._core._SyncObj__raftElectionDeadline = cluster.now + 0.3
    cluster["a"].log.sync()
    cluster.deliver()
    cluster["b"].log.sync()
    assert isinstance(cluster.mail.pop()[2], VoteReply)
    cluster.run(0.29)
    assert candidate.is_leader, "the vote is lost"
    assert candidate.term == term


def test_vote_whose_answer_was_lost_is_given_again() -> None:
    first_answer_is_lost()


def test_vote_whose_answer_was_lost_is_missed_without_repetition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RaftCore, "_request_votes", lambda _core: None)
    with pytest.raises(AssertionError, match="the vote is lost"):
        first_answer_is_lost()


# A lost leader -----------------------------------------------------------------------------------


def leader_is_paused_with_full_sockets() -> None:
    cluster, old = led_by_a()
    cluster.tick(0.1)
    answers = [mail for mail in cluster.mail if mail[1] != "a"]
    old.pause()
    while cluster.mail:
        cluster.deliver()
    assert answers
    assert old.inbox  # answers to its last round
    cluster.run(5.0)
    new = cluster.leaders()[0]
    new.group.propose(b"data", "data")
    cluster.run(1.0)
    assert new.acked == ["data"]
    cluster.isolate("a")
    old.resume()
    while cluster.mail:
        cluster.deliver()
        old.check_lease()
    old.group.tick()
    assert not old.group.is_leader, "it believes in answers to old rounds"


def test_leader_that_was_stopped_does_not_believe_old_answers() -> None:
    leader_is_paused_with_full_sockets()


def test_answers_timed_by_their_receipt_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    note = Rounds.note_answer

    def by_receipt(rounds: Rounds, peer: str, number: int) -> None:
        note(rounds, peer, number)
        rounds._heard[peer] = rounds._clock()

    monkeypatch.setattr(Rounds, "note_answer", by_receipt)
    with pytest.raises(AssertionError, match=r"a lease has outlived|it believes in answers"):
        leader_is_paused_with_full_sockets()


def test_leader_that_hears_nobody_gives_up_and_says_so() -> None:
    cluster, leader = led_by_a()
    cluster.cut_link("b", "a")
    cluster.cut_link("c", "a")
    cluster.run(1.0)
    assert not leader.group.is_leader
    assert len(cluster.leaders()) == 1


def test_cut_off_leader_gives_up_within_the_bound() -> None:
    cluster, leader = led_by_a()
    cluster.isolate("a")
    since = cluster.now
    while leader.group.is_leader:
        cluster.tick()
    assert 0.5 < cluster.now - since < 0.75
    assert not leader.group.heard_majority_within(10.0)


def test_successor_is_elected_within_a_second() -> None:
    for names in ("abc", "abcde"):
        cluster, leader = led_by_a(names)
        leader.crash()
        since = cluster.now
        while not cluster.leaders():
            cluster.tick()
            cluster.settle()
        assert cluster.now - since < 1.3


# Handing over ------------------------------------------------------------------------------------


def test_handover_under_load_waits_for_the_target_and_refuses_proposals() -> None:
    cluster, leader = led_by_a()
    for number in range(20):
        leader.group.propose(b"%d" % number, number)
    assert leader.group.hand_over("b")
    with pytest.raises(GroupBusyError):
        leader.group.propose(b"later", "later")
    since = cluster.now
    cluster.run(0.2)
    assert [node.name for node in cluster.leaders()] == ["b"]
    assert cluster["b"].group.term == leader.group.term
    assert leader.acked == list(range(20))
    assert cluster.now - since < 0.3  # no election time-out was needed
    assert leader.roles[-2:] == [True, False]


def test_handover_to_a_member_that_cannot_catch_up_is_given_up() -> None:
    cluster, leader = led_by_a()
    cluster["b"].log.has_space = False
    leader.group.propose(b"data", "data")
    assert leader.group.hand_over("b")
    cluster.run(0.7)
    assert leader.group.is_leader
    leader.group.propose(b"more", "more")
    cluster.settle()
    assert leader.acked == ["data", "more"]


def test_handover_picks_a_member_that_answers_and_is_whole() -> None:
    cluster, leader = led_by_a()
    cluster.isolate("b")
    cluster.run(1.0)
    assert not leader.group.hand_over("b")
    assert leader.group.hand_over()
    cluster.run(0.3)
    assert [node.name for node in cluster.leaders()] == ["c"]


def test_resignation_starts_an_election_at_once() -> None:
    cluster, leader = led_by_a()
    leader.group.resign()
    assert [type(mail[2]) for mail in cluster.mail] == [Resigned, Resigned]
    cluster.run(0.25)
    assert len(cluster.leaders()) == 1
    assert cluster.leaders()[0] is not leader


def test_suspect_leader_hands_on_and_serves_nothing() -> None:
    cluster, leader = led_by_a()
    leader.group.mark_suspect(True)
    assert leader.roles[-1] is False
    assert leader.read() == [False]
    cluster.run(0.5)
    assert cluster.leaders()[0] is not leader
    assert leader.log.durable.flags == SUSPECT
    leader.crash()
    leader.boot()
    assert leader.group.flags == SUSPECT
    leader.group.mark_suspect(False)
    cluster.run(0.1)
    assert leader.group.flags == 0


def test_suspect_member_that_alone_has_an_acknowledged_entry_leads_to_hand_it_on() -> None:
    cluster, leader = led_by_a()
    cluster["b"].group.mark_suspect(True)
    cluster.isolate("c")
    leader.group.propose(b"data", "data")
    cluster.settle()
    assert leader.acked == ["data"]
    leader.crash()
    cluster.heal()
    cluster.run(4.0)
    assert [node.name for node in cluster.leaders()] == ["c"]
    assert cluster["b"].roles.count(True) == 0
    assert b"data" in [entry.data for entry in cluster["c"].store]


def test_a_start_after_another_election_draws_other_timeouts() -> None:
    def draws(node: SimNode) -> list[float]:
        return [node.group._core._random.random() for _ in range(3)]

    first, again = Cluster(), Cluster()
    assert draws(first["a"]) == draws(again["a"])
    assert draws(first["a"]) != draws(first["b"])
    first.elect("b")
    first["a"].crash()
    first["a"].boot()
    again["a"].crash()
    again["a"].boot()
    assert draws(first["a"]) != draws(again["a"])
