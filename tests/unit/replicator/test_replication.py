"""Entries on their way to peers: bounded, repaired after a loss, read from the disk, installed."""

from collections.abc import Sequence

import pytest

from contrail_replicator import progress
from contrail_replicator.journal import GroupJournal
from contrail_replicator.messages import Append, HeartbeatReply, Reply
from contrail_replicator.progress import FRAME_BYTES, WINDOW_BYTES, State
from tests.unit.replicator.raft_sim import Cluster, SimNode


def led_by_a() -> tuple[Cluster, SimNode]:
    cluster = Cluster()
    leader = cluster.elect("a")
    cluster.run(0.5)
    return cluster, leader


def data_of(node: SimNode) -> list[bytes]:
    return [entry.data for entry in node.store if entry.data]


def sent_to(cluster: Cluster, name: str) -> list[Append]:
    return [each[2] for each in cluster.mail if each[1] == name and isinstance(each[2], Append)]


def size(messages: Sequence[Append]) -> int:
    return sum(len(data) for message in messages for _, data in message.entries)


def peer_does_not_answer() -> int:
    """Bytes on their way to a peer that has not answered anything."""
    cluster, leader = led_by_a()
    for number in range(10):
        for _ in range(2):
            leader.group.propose(bytes([number]) * (400 << 10), number)
        leader.log.sync()
        # The other peer takes part, so that more can be proposed.
        for at in reversed(range(len(cluster.mail))):
            if "b" not in cluster.mail[at][:2]:
                cluster.deliver(at)
        cluster["c"].log.sync()
        while (
            at := next((i for i, m in enumerate(cluster.mail) if m[1] == "a"), None)
        ) is not None:
            cluster.deliver(at)
    return size(sent_to(cluster, "b"))


def test_unanswered_messages_are_bounded_by_the_window() -> None:
    assert WINDOW_BYTES <= peer_does_not_answer() <= WINDOW_BYTES + FRAME_BYTES


def test_flood_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "WINDOW_BYTES", 1 << 40)
    assert peer_does_not_answer() > WINDOW_BYTES + FRAME_BYTES


def test_messages_have_up_to_a_mebibyte_and_a_larger_entry_goes_alone() -> None:
    cluster, leader = led_by_a()
    cluster.isolate("b")
    for _ in range(5):
        leader.group.propose(bytes(400 << 10), None)
        cluster.settle()
    leader.group.propose(bytes(3 << 20), None)
    cluster.settle()
    cluster.heal()
    sent: list[Append] = []
    for _ in range(60):
        cluster.sync_all()
        if not cluster.mail:
            cluster.tick()
        elif isinstance(message := cluster.mail[0][2], Append) and cluster.mail[0][1] == "b":
            sent.append(message)
        if cluster.mail:
            cluster.deliver()
    sizes = [[len(data) for _, data in message.entries] for message in sent if message.entries]
    assert [3 << 20] in sizes
    assert all(sum(one) <= FRAME_BYTES or len(one) == 1 for one in sizes)
    assert data_of(cluster["b"]) == data_of(leader)


def test_lost_messages_are_sent_again_without_a_reconnect() -> None:
    cluster, leader = led_by_a()
    for number in range(5):
        leader.group.propose(b"%d" % number, number)
    cluster.mail = [mail for mail in cluster.mail if mail[1] != "b"]
    cluster.run(0.5)
    assert data_of(cluster["b"]) == data_of(leader) == [b"0", b"1", b"2", b"3", b"4"]


def test_new_leader_finds_the_end_of_a_diverged_log_in_few_messages() -> None:
    cluster, old = led_by_a()
    cluster.isolate("a")
    for number in range(100):
        old.group.propose(b"lost %d" % number, number)
    old.log.sync()
    cluster.run(1.0)
    new = cluster.leaders()[0]
    for number in range(100):
        new.group.propose(b"kept %d" % number, number)
    cluster.settle()
    cluster.heal()
    refusals = 0
    for _ in range(80):
        cluster.sync_all()
        if not cluster.mail:
            cluster.tick()
        else:
            message = cluster.mail[0][2]
            refusals += isinstance(message, Reply) and not message.success
            cluster.deliver()
    cluster.run(0.3)
    assert refusals <= 4
    assert data_of(old) == data_of(new) == [b"kept %d" % number for number in range(100)]


# Far behind --------------------------------------------------------------------------------------


def member_misses_more_than_the_memory_has() -> tuple[Cluster, SimNode]:
    cluster, leader = led_by_a()
    cluster.isolate("b")
    for number in range(50):
        leader.group.propose(b"%d" % number, number)
        cluster.settle()
    cluster.run(0.2)
    for name in "ac":
        cluster[name].group.trim(cluster[name].group.applied_index)
        assert len(cluster[name].group._journal) == 1
    return cluster, leader


def member_far_behind_returns() -> None:
    cluster, leader = member_misses_more_than_the_memory_has()
    cluster.heal()
    cluster.run(1.0)
    leader.group.propose(b"more", "more")
    cluster.run(0.2)
    assert data_of(cluster["b"]) == data_of(leader), "it has not caught up"
    assert len(data_of(leader)) == 51


def test_member_far_behind_catches_up_from_the_disk() -> None:
    member_far_behind_returns()


def test_member_far_behind_stays_there_without_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GroupJournal, "term_on_disk", lambda _journal, _index: None)
    with pytest.raises(AssertionError, match="has not caught up"):
        member_far_behind_returns()


def test_late_answer_of_the_disk_is_ignored_after_the_leadership() -> None:
    cluster, leader = member_misses_more_than_the_memory_has()
    cluster.heal()
    while not leader.log.reads:
        if not cluster.mail:
            cluster.tick()
        while cluster.mail and not leader.log.reads:
            cluster.deliver()
            for name in "bc":
                cluster[name].log.sync()
    leader.group.resign()
    cluster.mail.clear()
    leader.log.read_all()
    assert cluster.mail == []
    cluster.run(1.5)
    assert data_of(cluster["b"]) == data_of(leader)


def member_that_needs_a_snapshot() -> tuple[Cluster, SimNode]:
    cluster, leader = member_misses_more_than_the_memory_has()
    for name in "ac":
        cluster[name].log.forget_below(cluster[name].group.applied_index)
    cluster.heal()
    cluster.run(0.5)
    assert leader.needy == ["b"]
    return cluster, leader


def test_member_whose_entries_are_gone_needs_a_snapshot_and_gets_heartbeats() -> None:
    cluster, leader = member_that_needs_a_snapshot()
    assert leader.group._core._replication.state("b") is State.SNAPSHOT
    cluster.mail.clear()
    cluster.tick(0.1)
    assert sent_to(cluster, "b") == []
    assert any(each[1] == "b" for each in cluster.mail)
    cluster.run(2.0)
    assert leader.group.is_leader
    assert leader.needy == ["b"]


def test_installed_member_goes_on_with_the_log() -> None:
    cluster, leader = member_that_needs_a_snapshot()
    behind = cluster["b"]
    assert behind.install(leader)
    assert (behind.group.applied_index, behind.group.commit_index) == (51, 51)
    leader.group.propose(b"more", "more")
    cluster.run(0.3)
    assert data_of(behind) == data_of(leader)
    assert behind.log.durable.base_index == 51
    behind.crash()
    behind.boot()
    cluster["c"].crash()
    leader.group.propose(b"last", "last")
    cluster.run(0.3)
    assert leader.acked[-1] == "last"
    assert data_of(behind) == data_of(leader)


def test_snapshot_that_the_own_log_has_changes_nothing() -> None:
    cluster, leader = led_by_a()
    leader.group.propose(b"data", "data")
    cluster.settle()
    follower = cluster["b"]
    term, last = follower.group.term, follower.group.last_index
    assert follower.group.commit_index < last
    assert not follower.group.install(last, term)
    assert not follower.group.install(1, term)
    assert not leader.group.install(99, term)
    assert follower.group.last_index == last
    assert follower.log.waiting == 0


def test_snapshot_replaces_a_log_that_differs_and_gives_up_its_proposals() -> None:
    cluster, old = led_by_a()
    cluster.isolate("a")
    old.group.propose(b"lost", "lost")
    old.log.sync()
    cluster.run(1.0)
    new = cluster.leaders()[0]
    new.group.propose(b"data", "data")
    cluster.settle()
    cluster.tick()
    old.group.receive(new.name, HeartbeatReply(new.group.term, 0, 0, 0, 0))
    assert old.install(new)
    assert old.lost == ["lost"]
    cluster.heal()
    cluster.run(0.5)
    assert data_of(old) == data_of(new) == [b"data"]


def suspect_member_behind_a_snapshot() -> tuple[Cluster, SimNode, SimNode]:
    """A member that became suspect, and got entries of which a snapshot has the first two."""
    cluster, leader = led_by_a()
    member = cluster["b"]
    member.group.mark_suspect(True)
    cluster.settle()
    for data in b"1", b"2":
        leader.group.propose(data, data)
    cluster.run(0.3)
    member.store[:] = leader.store
    return cluster, leader, member


def test_suspect_member_logs_entries_and_applies_none_until_it_is_whole() -> None:
    cluster, leader, member = suspect_member_behind_a_snapshot()
    index, term = leader.group.applied_index, leader.group.term
    assert member.group.flags_are_durable
    assert member.group.applied_index < index == member.group.durable_index
    leader.group.propose(b"3", "3")
    cluster.run(0.3)
    assert not member.group.install(index, term)
    assert member.group.applied_index == index
    cluster.run(0.3)
    assert member.group.applied_index == index
    member.group.mark_suspect(False)
    cluster.run(0.3)
    assert data_of(member) == data_of(leader) == [b"1", b"2", b"3"]


def test_suspect_member_stays_one_over_a_restart() -> None:
    cluster, leader, member = suspect_member_behind_a_snapshot()
    member.crash()
    member.store.clear()
    member.boot()
    cluster.run(0.3)
    assert member.store == []
    assert not member.group.may_hand_over
    assert leader.group.may_hand_over
    leader.group.mark_suspect(True)
    cluster.run(1.5)
    assert [node.name for node in cluster.leaders()] == ["c"]


def test_leader_knows_who_lags_until_the_member_is_installed() -> None:
    cluster, leader = member_that_needs_a_snapshot()
    assert leader.group.lagging == ["b"]
    behind = cluster["b"]
    behind.group.mark_suspect(True)
    cluster.run(0.2)
    assert behind.install(leader)
    behind.group.mark_suspect(False)
    cluster.run(0.3)
    assert leader.group.lagging == []
    # A later leader knows at once that this member has what is committed, although neither has an
    # entry left to compare.
    cluster["c"].log.forget_below(cluster["c"].group.applied_index)
    leader.crash()
    cluster.run(2.0)
    (later,) = cluster.leaders()
    later.group.propose(b"later", "later")
    cluster.run(0.3)
    assert later.group.lagging == []
    assert data_of(cluster["b"]) == data_of(cluster["c"])


def test_suspect_member_takes_no_more_than_fits_into_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("contrail_replicator.journal.HELD_BYTES_MAX", 10)
    cluster, leader, member = suspect_member_behind_a_snapshot()
    for number in range(20):
        leader.group.propose(b"12345", number)
        cluster.run(0.1)
    assert member.group._journal.size <= 15
    member.store[:] = leader.store
    assert member.install(leader)
    member.group.mark_suspect(False)
    leader.group.propose(b"last", "last")
    cluster.run(0.5)
    assert data_of(member) == data_of(leader)


def test_old_entries_are_forgotten_seldom_and_many_at_once() -> None:
    _, leader = led_by_a()
    journal, tail, forgotten = leader.group._journal, 64 << 10, 0
    first = journal.last_index + 1
    for index in range(first, first + 1_000):
        journal.append(bytes(1 << 10), index, leader.group.term)
        anchor = journal.anchor_index
        journal.trim_to_size(index - 1, tail)
        assert journal.size <= tail + (1 << 10)  # the last entry is not applied
        if journal.anchor_index > anchor:
            forgotten += 1
            assert 0 <= tail * 7 // 8 - journal.size < 1 << 10
            assert journal.last_index == index
    assert 0 < forgotten <= 1_000 / (64 / 8)
