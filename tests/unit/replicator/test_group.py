"""A group of one on the node's real log, over a simulated disk."""

import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from contrail_replicator import (
    MAX_ENTRY_BYTES,
    CommittedEntry,
    GroupBusyError,
    LogGapError,
    NotLeaderError,
    NullTransport,
    RaftGroup,
)
from contrail_replicator.messages import Append, MessageRefusedError
from contrail_replicator.raft_core import RaftCore
from contrail_storage.wal import LogOptions, NodeLog
from tests.support.each import each
from tests.unit.storage.wal_disk import HandLoop, SimDisk

ROOT = Path("/wal")
OPTIONS = LogOptions(idle_s=1000.0)


class Member:
    """A node with one group of one; `store` is what was applied."""

    def __init__(
        self, disk: SimDisk, applied: int = 0, keep_from: int | None = None, group_id: int = 1
    ) -> None:
        self.disk = disk
        self.loop = HandLoop()
        self.store: list[CommittedEntry] = []
        self.lost: list[object] = []
        self.roles: list[bool] = []
        self.failures: list[Exception] = []
        self.on_commit: Callable[[CommittedEntry], None] = lambda _entry: None
        self.answers: Iterator[bool] = iter(())  # whether the next entry is taken, then always
        kept = applied if keep_from is None else keep_from
        self.log = NodeLog.open(ROOT, files=disk, options=OPTIONS, keep_from={group_id: kept})
        self.group = self.make_group(group_id, applied)

    def make_group(self, group_id: int, applied: int) -> RaftGroup:
        return RaftGroup(
            group_id=group_id,
            node_id="a",
            peers=["a"],
            log=self.log,
            transport=NullTransport(),
            applied_index=applied,
            on_commit=self._commit,
            on_role=self.roles.append,
            on_lost=self.lost.extend,
        )

    def start(self) -> "Member":
        self.log.start(call_soon=self.loop.call_soon, on_failure=self._log_failed)
        self.group.start()
        return self

    def lead(self) -> "Member":
        self.start()
        self.loop.run_until(lambda: self.group.is_leader)
        return self

    def wait_applied(self, index: int) -> None:
        self.loop.run_until(lambda: self.group.applied_index >= index)

    def close(self) -> None:
        self.group.stop()
        self.log.close()

    def recover(self) -> None:
        self.log.recover()
        self.failures.clear()
        self.group.handle_log_recovered()

    def _commit(self, entry: CommittedEntry) -> bool:
        self.store.append(entry)
        self.on_commit(entry)
        return next(self.answers, True)

    def _log_failed(self, error: Exception) -> None:
        self.failures.append(error)
        self.group.handle_log_failure()


def rows(member: Member) -> list[tuple[int, bytes, object]]:
    return [(entry.index, entry.data, entry.context) for entry in member.store]


def test_group_of_one_leads_at_once_and_reports_its_first_entry() -> None:
    member = Member(SimDisk()).lead()
    assert rows(member) == [(1, b"", None)]
    assert member.roles == [True]
    assert (member.group.term, member.group.applied_index) == (1, 1)
    member.close()
    assert member.roles == [True, False]


def test_entries_come_back_in_order_once_each_with_their_contexts() -> None:
    member = Member(SimDisk()).lead()
    indexes = [member.group.propose(b"%d" % number, number) for number in range(100)]
    assert member.group.outstanding_bytes == 190
    member.wait_applied(101)
    assert indexes == list(range(2, 102))
    assert rows(member)[1:] == [(number + 2, b"%d" % number, number) for number in range(100)]
    assert member.group.outstanding_bytes == 0
    assert member.lost == []
    member.close()


def test_sync_that_never_ends_commits_nothing() -> None:
    disk = SimDisk()
    member = Member(disk)
    disk.sync_gate.clear()
    member.start()
    for _ in range(100):
        member.group.tick()
        member.loop.run_pending()
    assert (member.group.last_index, member.group.durable_index) == (1, 0)
    assert (member.group.commit_index, member.store, member.roles) == (0, [], [])
    with pytest.raises(NotLeaderError):
        member.group.propose(b"data", None)
    disk.sync_gate.set()
    member.loop.run_until(lambda: member.group.is_leader)
    disk.sync_gate.clear()
    member.group.propose(b"data", "context")
    for _ in range(100):
        member.group.tick()
        member.loop.run_pending()
    assert (member.group.last_index, member.group.commit_index) == (2, 1)
    assert rows(member) == [(1, b"", None)]
    disk.sync_gate.set()
    member.wait_applied(2)
    member.close()


def test_restarted_member_replays_what_the_store_does_not_hold() -> None:
    disk = SimDisk()
    first = Member(disk).lead()
    for number in range(10):
        first.group.propose(b"%d" % number, None)
    first.wait_applied(11)
    second = Member(disk.survivor(), applied=6).lead()
    assert rows(second) == [
        (7, b"5", None),
        (8, b"6", None),
        (9, b"7", None),
        (10, b"8", None),
        (11, b"9", None),
        (12, b"", None),
    ]
    assert second.group.term == first.group.term + 1
    second.close()
    first.close()


def test_store_ahead_of_the_log_is_refused() -> None:
    disk = SimDisk()
    Member(disk).lead().close()
    with pytest.raises(LogGapError):
        Member(disk, applied=5)


def test_log_that_begins_after_the_store_is_refused() -> None:
    disk = SimDisk()
    member = Member(disk).lead()
    member.group.propose(b"data", None)
    member.wait_applied(2)
    member.close()
    with pytest.raises(LogGapError):
        Member(disk, applied=1, keep_from=2)


def test_owner_that_refuses_the_next_entry_gets_it_later_in_order() -> None:
    disk = SimDisk()
    first = Member(disk).lead()
    for number in range(200):
        first.group.propose(b"%d" % number, number)
    first.wait_applied(201)
    first.close()
    second = Member(disk)
    second.answers = iter([True, False] * 150)
    second.start()
    second.loop.run_until(lambda: second.group.commit_index == 202)
    handed_out = [len(second.store)]
    while handed_out[-1] < 202:
        for _ in range(3):
            second.group.tick()
        assert len(second.store) == handed_out[-1]
        assert second.roles == []
        second.group.resume()
        handed_out.append(len(second.store))
    assert handed_out == list(range(2, 203, 2))
    assert second.roles == [True]
    assert rows(second) == [
        *rows(first)[:1],
        *((n + 2, b"%d" % n, None) for n in range(200)),
        (202, b"", None),
    ]
    second.close()


def paused_with_four_open() -> Member:
    """A leader whose owner has one of three committed entries, and has refused the next."""
    disk = SimDisk()
    member = Member(disk).lead()
    member.answers = iter([False] * 3)
    for number in range(3):
        member.group.propose(b"%d" % number, number)
    member.loop.run_until(lambda: member.group.commit_index == 4)
    assert rows(member)[1:] == [(2, b"0", 0)]
    disk.sync_gate.clear()
    member.group.propose(b"open", "open")
    return member


@each("end", ["handle_log_failure", "resign"])
def test_committed_entries_keep_their_contexts_when_leadership_ends(end: str) -> None:
    member = paused_with_four_open()
    getattr(member.group, end)()
    assert (member.roles, member.lost) == ([True, False], ["open"])
    member.group.resume()
    member.group.resume()
    assert rows(member)[1:] == [(2, b"0", 0), (3, b"1", 1), (4, b"2", 2)]
    assert member.group.outstanding_bytes == 0
    assert member.lost == ["open"]
    member.disk.sync_gate.set()
    member.close()


def test_stopped_member_hands_out_nothing_more() -> None:
    member = paused_with_four_open()
    member.group.stop()
    member.group.resume()
    assert rows(member)[1:] == [(2, b"0", 0)]
    assert (member.roles, member.lost) == ([True, False], [1, 2, "open"])
    member.disk.sync_gate.set()
    member.log.close()


def test_callback_that_ticks_does_not_get_the_next_entry_inside_the_current_one() -> None:
    member = Member(SimDisk()).lead()
    depths: list[int] = []
    inside: list[int] = []

    def tick(entry: CommittedEntry) -> None:
        inside.append(entry.index)
        depths.append(len(inside))
        member.group.tick()
        member.group.resume()
        inside.pop()

    member.on_commit = tick
    for number in range(5):
        member.group.propose(b"%d" % number, number)
    member.wait_applied(6)
    assert depths == [1] * 5
    member.close()


@pytest.mark.parametrize("size", [0, MAX_ENTRY_BYTES + 1])
def test_entry_of_a_forbidden_size_is_refused(size: int) -> None:
    member = Member(SimDisk()).lead()
    with pytest.raises(ValueError, match="bytes"):
        member.group.propose(bytes(size), None)
    member.close()


def test_too_many_outstanding_bytes_are_refused_and_nothing_is_appended() -> None:
    disk = SimDisk()
    member = Member(disk).lead()
    disk.sync_gate.clear()
    member.group.propose(bytes(4 << 20), None)
    member.group.propose(bytes(4 << 20), None)
    last = member.group.last_index
    with pytest.raises(GroupBusyError):
        member.group.propose(b"x", None)
    assert member.group.last_index == last
    disk.sync_gate.set()
    member.wait_applied(last)
    member.group.propose(b"x", None)
    member.close()


def test_applied_entries_are_not_held_in_memory() -> None:
    member = Member(SimDisk()).lead()
    for number in range(200):
        member.group.propose(b"data", number)
    member.wait_applied(201)
    assert len(member.group._journal) == 1
    assert member.group._journal.size == 0
    member.close()


def test_group_of_one_at_rest_has_nothing_due(monkeypatch: pytest.MonkeyPatch) -> None:
    member = Member(SimDisk()).lead()
    member.group.propose(b"data", None)
    member.wait_applied(2)
    member.group.tick()
    ticks: list[RaftCore] = []
    monkeypatch.setattr(RaftCore, "tick", ticks.append)
    for _ in range(10):
        member.group.tick()
    assert ticks == []
    member.close()


def test_entry_proposed_while_one_is_applied_is_committed() -> None:
    member = Member(SimDisk()).lead()

    def follow_up(entry: CommittedEntry) -> None:
        if entry.context == "first":
            member.group.propose(b"second", "second")

    member.on_commit = follow_up
    member.group.propose(b"first", "first")
    member.wait_applied(3)
    assert rows(member)[1:] == [(2, b"first", "first"), (3, b"second", "second")]
    member.close()


@each("call", ["write", "sync"])
@each("number", [errno.EIO, errno.ENOSPC])
def test_failed_disk_loses_the_outstanding_resigns_and_recovers(call: str, number: int) -> None:
    disk = SimDisk()
    member = Member(disk).lead()
    member.group.propose(b"acked", "acked")
    member.wait_applied(2)
    disk.fail(call, number)
    member.group.propose(b"lost", "lost")
    member.loop.run_until(lambda: bool(member.failures))
    assert (member.lost, member.roles) == (["lost"], [True, False])
    assert (member.group.last_index, member.group.outstanding_bytes) == (2, 0)
    with pytest.raises(NotLeaderError):
        member.group.propose(b"refused", None)

    disk.heal()
    member.recover()
    member.loop.run_until(lambda: member.group.is_leader)
    member.group.propose(b"again", "again")
    member.wait_applied(4)
    assert rows(member)[1:] == [(2, b"acked", "acked"), (3, b"", None), (4, b"again", "again")]
    again = Member(disk.survivor(keep=1.0)).lead()
    assert [entry.data for entry in again.store] == [b"", b"acked", b"", b"again", b""]
    again.close()
    member.close()


def test_disk_that_fails_again_right_after_recovery_is_recovered_again() -> None:
    disk = SimDisk()
    member = Member(disk).lead()
    for attempt in range(3):
        disk.fail("sync")
        member.group.propose(b"lost", attempt)
        member.loop.run_until(lambda: bool(member.failures))
        disk.heal()
        member.recover()
        member.loop.run_until(lambda: member.group.is_leader)
    assert member.lost == [0, 1, 2]
    assert member.roles == [True, False] * 3 + [True]
    member.close()


def test_stopped_member_reports_its_outstanding_proposals_lost() -> None:
    disk = SimDisk()
    member = Member(disk).lead()
    disk.sync_gate.clear()
    member.group.propose(b"data", "context")
    member.group.stop()
    assert (member.lost, member.roles) == (["context"], [True, False])
    disk.sync_gate.set()
    member.log.close()
    member.loop.run_pending()
    assert rows(member) == [(1, b"", None)]


def test_resigned_member_leads_again_only_when_started() -> None:
    member = Member(SimDisk()).lead()
    member.group.resign()
    for _ in range(10):
        member.group.tick()
    assert not member.group.is_leader
    member.group.start()
    member.loop.run_until(lambda: member.group.is_leader)
    assert (member.roles, member.group.term) == ([True, False, True], 2)
    member.close()


def test_two_groups_share_one_sync() -> None:
    disk = SimDisk()
    member = Member(disk)
    other = member.make_group(2, 0)
    member.lead()
    other.start()
    member.loop.run_until(lambda: other.is_leader)
    disk.sync_gate.clear()
    disk.syncing.clear()
    member.group.propose(b"starts a sync", None)
    assert disk.syncing.wait(30)
    for _ in range(10):
        member.group.propose(b"a", None)
        other.propose(b"b", None)
    syncs = member.log.stats.syncs.count
    disk.sync_gate.set()
    member.loop.run_until(lambda: other.applied_index == 11)
    assert member.log.stats.syncs.count == syncs + 2
    other.stop()
    member.close()


def test_follower_of_a_group_of_three_does_not_lead_alone() -> None:
    member = Member(SimDisk())
    trio = RaftGroup(
        group_id=9,
        node_id="a",
        peers=["b", "c"],
        log=member.log,
        transport=NullTransport(),
        applied_index=0,
        on_commit=lambda entry: pytest.fail(str(entry)),
        on_role=lambda role: pytest.fail(str(role)),
        on_lost=lambda contexts: pytest.fail(str(contexts)),
    )
    member.lead()
    trio.start()
    for _ in range(10):
        trio.tick()
    assert not trio.is_leader
    member.close()


def test_entry_that_is_not_what_was_proposed_is_not_logged(tmp_path: Path) -> None:
    log = NodeLog.open(tmp_path / "wal", options=OPTIONS)
    group = RaftGroup(
        group_id=1,
        node_id="a",
        peers=["b", "c"],
        log=log,
        transport=NullTransport(),
        applied_index=0,
        on_commit=lambda _entry: True,
        on_role=lambda _leads: None,
        on_lost=lambda _contexts: None,
        is_sound=lambda data: data != b"rotten",
    )
    group.start()
    with pytest.raises(MessageRefusedError, match="not what was proposed"):
        group.receive("b", Append(1, 1, 0, 0, 0, ((1, b"first"), (1, b"rotten"))))
    assert group.last_index == 0
    group.receive("b", Append(1, 1, 0, 0, 0, ((1, b"first"), (1, b"sound"))))
    assert group.last_index == 2
    group.stop()
    log.close()
