"""The log of a node: group commit, failures, recovery, and what happens to old segments."""

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from contrail_storage.wal import (
    LogFailedError,
    LogFullError,
    LogOptions,
    LogRottenError,
    NodeLog,
    RecoveredGroup,
)
from tests.unit.storage.wal_disk import HandLoop, SimDisk

ROOT = Path("/wal")
QUIET = LogOptions(idle_s=1000.0, keep_bytes=0)
SMALL = LogOptions(idle_s=1000.0, segment_bytes=200, keep_bytes=0)


class Node:
    """A log with the groups of a test; remembers what was reported durable."""

    def __init__(
        self,
        disk: SimDisk,
        options: LogOptions = QUIET,
        groups: tuple[int, ...] = (1,),
        keep_from: dict[int, int] | None = None,
    ) -> None:
        self.loop = HandLoop()
        self.durable: dict[int, tuple[int, int]] = dict.fromkeys(groups, (0, 0))
        self.failures: list[Exception] = []
        self.log = NodeLog.open(ROOT, files=disk, options=options, keep_from=keep_from)
        self.new_groups = set(groups) - set(self.log.recovery.groups)
        self.held = {group: self.attach(group) for group in groups}

    def attach(self, group: int) -> RecoveredGroup:
        def on_durable(position: int, index: int) -> None:
            self.durable[group] = (position, index)

        return self.log.attach(group, on_durable)

    def start(self) -> "Node":
        self.log.start(call_soon=self.loop.call_soon, on_failure=self.failures.append)
        for group in self.new_groups:
            self.settle(group, 1)
        return self

    def put(self, group: int, index: int, data: bytes = b"data", term: int = 1) -> int:
        """Append and wait until durable."""
        return self.settle(group, self.log.append(group, index, term, data))

    def settle(self, group: int, position: int) -> int:
        self.loop.run_until(lambda: self.durable[group][0] >= position or bool(self.failures))
        return position


def entries(group: RecoveredGroup) -> list[tuple[int, int, bytes]]:
    return [(index, term, data) for data, index, term in group.entries]


@pytest.fixture
def disk() -> SimDisk:
    return SimDisk()


@pytest.fixture
def node(disk: SimDisk) -> Iterator[Node]:
    node = Node(disk).start()
    yield node
    node.log.close()


def test_new_log_holds_nothing(node: Node) -> None:
    assert node.held[1] == RecoveredGroup()


def test_reopened_log_gives_back_entries_term_and_vote(disk: SimDisk, node: Node) -> None:
    node.log.save_hard_state(1, 3, "b")
    node.put(1, 1, b"one", term=3)
    node.put(1, 2, b"two", term=3)
    held = Node(disk.survivor()).held[1]
    assert entries(held) == [(1, 3, b"one"), (2, 3, b"two")]
    assert (held.term, held.voted_for) == (3, "b")


def test_records_that_arrive_during_a_sync_share_the_next_batch(disk: SimDisk, node: Node) -> None:
    disk.sync_gate.clear()
    disk.syncing.clear()
    node.log.append(1, 1, 1, b"first")
    assert disk.syncing.wait(30)
    for index in range(2, 102):
        last = node.log.append(1, index, 1, b"waits")
    handed_over, syncs = node.loop.handed_over, node.log.stats.syncs.count
    disk.sync_gate.set()
    node.settle(1, last)
    assert node.loop.handed_over - handed_over == 2
    assert node.log.stats.syncs.count - syncs == 2


def test_nothing_is_reported_before_its_sync_ends(disk: SimDisk, node: Node) -> None:
    disk.sync_gate.clear()
    disk.syncing.clear()
    node.log.append(1, 1, 1, b"data")
    assert disk.syncing.wait(30)
    node.loop.run_pending()
    assert node.durable[1][1] == 0
    disk.sync_gate.set()


def test_idle_log_adds_an_empty_batch_so_that_rot_in_the_last_entry_shows(disk: SimDisk) -> None:
    node = Node(disk, LogOptions(idle_s=0.001)).start()
    node.put(1, 1, b"precious")
    while node.log.stats.batches_written < 3:
        disk.syncing.wait(0.001)
    node.log.close()
    (path,) = disk.segments
    content = disk.names[path].content
    content[content.index(b"precious")] ^= 1
    assert Node(disk).log.recovery.rot is not None


def test_closed_log_has_a_successor_after_the_last_entry(disk: SimDisk) -> None:
    node = Node(disk).start()
    node.put(1, 1, b"precious")
    node.log.close()
    (path,) = disk.segments
    content = disk.names[path].content
    content[content.index(b"precious")] ^= 1
    assert Node(disk).log.recovery.rot is not None


def test_truncation_is_recovered(disk: SimDisk, node: Node) -> None:
    for index in range(1, 5):
        node.put(1, index)
    node.settle(1, node.log.truncate(1, 3, 1))
    assert node.durable[1][1] == 2
    assert [index for index, _, _ in entries(Node(disk.survivor()).held[1])] == [1, 2]


def test_reset_leaves_an_empty_log_after_the_new_base(disk: SimDisk, node: Node) -> None:
    node.put(1, 1)
    node.settle(1, node.log.reset(1, 90, 7))
    node.put(1, 91, b"next", term=7)
    held = Node(disk.survivor()).held[1]
    assert (held.base_index, held.base_term, entries(held)) == (90, 7, [(91, 7, b"next")])


@pytest.mark.parametrize("index", [0, 1, 3])
def test_any_entry_but_the_next_is_refused(node: Node, index: int) -> None:
    node.put(1, 1)
    with pytest.raises(ValueError, match="cannot follow 1"):
        node.log.append(1, index, 1, b"data")


def test_queue_at_its_bound_refuses_and_takes_nothing(disk: SimDisk) -> None:
    node = Node(disk, LogOptions(idle_s=1000.0, queue_bytes=1000)).start()
    disk.sync_gate.clear()
    node.log.append(1, 1, 1, bytes(600))
    assert not node.log.has_capacity(600)
    with pytest.raises(LogFullError):
        node.log.append(1, 2, 1, bytes(600))
    node.log.append(1, 2, 1, b"")
    disk.sync_gate.set()
    node.loop.run_until(lambda: node.durable[1][1] == 2)
    assert node.log.queued_bytes == 0
    node.log.close()


def test_applied_entries_are_passed_over_and_the_base_stands_at_the_last_of_them(
    disk: SimDisk, node: Node
) -> None:
    for index in range(1, 6):
        node.put(1, index, term=index)
    held = Node(disk.survivor(), keep_from={1: 3}).held[1]
    assert (held.base_index, held.base_term) == (3, 3)
    assert [index for index, _, _ in entries(held)] == [4, 5]


def test_entries_rewritten_before_they_were_applied_are_passed_over_too(
    disk: SimDisk, node: Node
) -> None:
    for index in range(1, 5):
        node.put(1, index)
    node.settle(1, node.log.truncate(1, 2, 1))
    for index in range(2, 5):
        node.put(1, index, b"new", term=2)
    held = Node(disk.survivor(), keep_from={1: 4}).held[1]
    assert (held.base_index, held.base_term, held.entries) == (4, 2, [])


# Failures


@pytest.mark.parametrize("call", ["write", "sync"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_failed_call_is_reported_once_and_everything_is_refused_until_recovered(
    disk: SimDisk, node: Node, call: str, number: int
) -> None:
    node.put(1, 1, b"acked")
    disk.fail(call, number)
    node.log.append(1, 2, 1, b"lost")
    node.loop.run_until(lambda: bool(node.failures))
    assert [failure.errno for failure in node.failures if isinstance(failure, OSError)] == [number]
    assert node.durable[1][1] == 1
    with pytest.raises(LogFailedError):
        node.log.append(1, 2, 1, b"refused")

    disk.heal()
    node.log.recover()
    node.failures.clear()
    node.put(1, 2, b"again", term=2)
    held = Node(disk.survivor()).held[1]
    assert entries(held) == [(1, 1, b"acked"), (2, 2, b"again")]


def test_records_between_a_failure_and_its_report_are_lost_like_those_before(
    disk: SimDisk, node: Node
) -> None:
    disk.fail("sync")
    node.log.append(1, 1, 1, b"lost")
    while not node.log.failed:
        disk.syncing.wait(0.001)
    node.log.append(1, 2, 1, b"lost too")
    node.loop.run_until(lambda: bool(node.failures))
    disk.heal()
    node.log.recover()
    node.failures.clear()
    node.put(1, 1, b"kept")
    assert entries(Node(disk.survivor()).held[1]) == [(1, 1, b"kept")]


def test_failed_file_is_not_touched_again(disk: SimDisk, node: Node) -> None:
    disk.fail("sync")
    node.log.append(1, 1, 1, b"lost")
    node.loop.run_until(lambda: bool(node.failures))
    (failed,) = disk.segments
    before = bytes(disk.names[failed].content)
    disk.heal()
    node.log.recover()
    node.failures.clear()
    node.put(1, 1, b"kept")
    assert disk.names[failed].content == before


def test_batch_that_reached_the_disk_after_its_failed_sync_does_not_come_back(
    disk: SimDisk, node: Node
) -> None:
    node.put(1, 1, b"acked")
    disk.fail("sync")
    node.log.append(1, 2, 1, b"disowned")
    node.loop.run_until(lambda: bool(node.failures))
    disk.heal()
    node.log.recover()
    held = Node(disk.survivor(keep=1.0)).held[1]
    assert entries(held) == [(1, 1, b"acked")]


@pytest.mark.parametrize("restarts_failing", [0, 1, 2])
def test_bytes_whose_sync_failed_are_written_again_before_a_restart_relies_on_them(
    disk: SimDisk, restarts_failing: int
) -> None:
    node = Node(disk).start()
    node.put(1, 1, b"kept")
    disk.fail("sync")
    node.log.append(1, 2, 1, b"in the page cache alone")
    node.loop.run_until(lambda: bool(node.failures))
    for _ in range(restarts_failing):
        with pytest.raises(OSError, match="Input/output"):
            Node(disk)
    disk.heal()
    restarted = Node(disk).start()
    assert [index for index, _, _ in entries(restarted.held[1])] == [1, 2]
    restarted.put(1, 3, b"behind it")
    after = Node(disk.survivor())
    assert after.log.recovery.rot is None
    assert [data for _, _, data in entries(after.held[1])] == [
        b"kept",
        b"in the page cache alone",
        b"behind it",
    ]
    assert not [path for path in disk.names if path.name.endswith(".new")]


def test_recovery_that_fails_may_be_tried_again(disk: SimDisk, node: Node) -> None:
    node.put(1, 1, b"acked")
    disk.fail("write", errno.ENOSPC)
    node.log.append(1, 2, 1, b"lost")
    node.loop.run_until(lambda: bool(node.failures))
    for _ in range(3):
        with pytest.raises(LogFailedError):
            node.log.recover()
    disk.heal()
    node.log.recover()
    node.failures.clear()
    node.put(1, 2, b"again")
    assert [data for _, _, data in entries(Node(disk.survivor(keep=1.0)).held[1])] == [
        b"acked",
        b"again",
    ]


def test_term_seen_before_a_failure_is_kept_over_it(disk: SimDisk, node: Node) -> None:
    disk.fail("sync")
    node.log.save_hard_state(1, 8, "c")
    node.loop.run_until(lambda: bool(node.failures))
    disk.heal()
    node.log.recover()
    held = Node(disk.survivor()).held[1]
    assert (held.term, held.voted_for) == (8, "c")


def test_failure_while_a_segment_is_opened_loses_nothing_acked(disk: SimDisk) -> None:
    node = Node(disk, SMALL).start()
    node.put(1, 1, bytes(300))
    disk.fail("create", errno.ENOSPC)
    node.log.append(1, 2, 1, b"lost")
    node.loop.run_until(lambda: bool(node.failures))
    disk.heal()
    node.log.recover()
    node.failures.clear()
    node.put(1, 2, b"kept")
    node.log.close()
    assert [index for index, _, _ in entries(Node(disk.survivor()).held[1])] == [1, 2]


# Damage


def test_rot_in_a_closed_segment_names_it_and_the_log_does_not_start(disk: SimDisk) -> None:
    node = Node(disk, SMALL).start()
    for index in range(1, 20):
        node.put(1, index, b"x" * 50)
    node.log.close()
    path = min(disk.names)
    disk.names[path].content[-10] ^= 1
    before = {name: bytes(inode.content) for name, inode in disk.names.items()}
    reopened = Node(disk, SMALL)
    assert reopened.log.recovery.rot is not None
    assert reopened.log.recovery.rot.segment == path.name
    with pytest.raises(LogRottenError):
        reopened.start()
    assert before == {name: bytes(inode.content) for name, inode in disk.names.items()}


def test_segment_that_vanished_from_the_middle_is_rot(disk: SimDisk) -> None:
    node = Node(disk, SMALL).start()
    for index in range(1, 20):
        node.put(1, index, b"x" * 50)
    node.log.close()
    del disk.names[sorted(disk.names)[2]]
    assert Node(disk, SMALL).log.recovery.rot is not None


def test_torn_tail_is_cut_and_said(disk: SimDisk, node: Node) -> None:
    node.put(1, 1, b"acked")
    (inode,) = disk.segments.values()
    inode.content[inode.end : inode.end + 12] = b"half a batch"
    reopened = Node(disk).start()
    tail = reopened.log.recovery.torn_tail
    assert tail is not None
    assert tail.bytes_cut == len(b"half a batch")
    reopened.put(1, 2, b"next")
    reopened.log.close()
    again = Node(disk)
    assert (again.log.recovery.torn_tail, again.log.recovery.rot) == (None, None)
    assert again.held[1].last_index == 2


def test_room_made_ahead_is_no_torn_tail(disk: SimDisk, node: Node) -> None:
    node.put(1, 1, b"acked")
    [(path, inode)] = disk.segments.items()
    assert inode.content.endswith(bytes(QUIET.ahead_bytes - 1000))
    reopened = Node(disk)
    assert (reopened.log.recovery.torn_tail, reopened.log.recovery.rot) == (None, None)
    assert reopened.held[1].last_index == 1
    assert len(disk.names[path].content) == inode.end


def test_zeros_after_a_segment_that_was_left_are_passed_over(disk: SimDisk) -> None:
    node = Node(disk, SMALL).start()
    for index in range(1, 20):
        node.put(1, index, b"x" * 50)
    node.log.close()
    disk.names[sorted(disk.names)[2]].content += bytes(1000)
    again = Node(disk, SMALL)
    assert again.log.recovery.rot is None
    assert again.held[1].last_index == 19


def test_zeros_in_the_place_of_a_batch_with_a_sound_one_after_it_are_rot(
    disk: SimDisk, node: Node
) -> None:
    node.put(1, 1, b"first")
    (inode,) = disk.segments.values()
    begin = inode.end
    node.put(1, 2, b"second")
    end = inode.end
    node.put(1, 3, b"third")
    inode.content[begin:end] = bytes(end - begin)
    assert Node(disk).log.recovery.rot is not None


def test_what_a_killed_process_wrote_is_synced_before_it_counts(disk: SimDisk, node: Node) -> None:
    node.put(1, 1)
    disk.sync_lies = True
    node.put(1, 2)
    disk.sync_lies = False
    Node(disk)
    assert Node(disk.survivor()).held[1].last_index == 2


# Old segments


def filled(disk: SimDisk, groups: tuple[int, ...] = (1,)) -> Node:
    node = Node(disk, SMALL, groups).start()
    for index in range(1, 21):
        node.put(1, index, b"x" * 50)
    return node


def test_segments_with_nothing_above_applied_are_dropped(disk: SimDisk) -> None:
    node = filled(disk)
    before = node.log.stats.segments
    freed = node.log.drop_segments({1: 15})
    assert freed > 0
    assert node.log.stats.segments < before
    held = Node(disk.survivor(), SMALL, keep_from={1: 15}).held[1]
    assert (held.base_index, held.last_index) == (15, 20)
    node.log.close()


def test_tail_of_the_stated_bytes_is_kept(disk: SimDisk) -> None:
    node = filled(disk)
    node.log.drop_segments({1: 20}, keep_bytes=600)
    assert node.log.stats.size_bytes >= 600
    assert Node(disk.survivor(), SMALL).held[1].base_index < 15
    node.log.close()


def test_nothing_applied_drops_nothing_of_a_busy_group(disk: SimDisk) -> None:
    node = filled(disk)
    disk.sync_gate.clear()
    node.log.append(1, 21, 1, b"in flight")
    assert node.log.drop_segments({}) == 0
    disk.sync_gate.set()
    node.log.close()


def test_quiet_group_is_carried_forward_and_pins_no_old_segment(disk: SimDisk) -> None:
    node = Node(disk, SMALL, (1, 2)).start()
    node.log.save_hard_state(2, 4, "b")
    for index in range(1, 4):
        node.put(2, index, f"quiet {index}".encode(), term=4)
    for index in range(1, 21):
        node.put(1, index, b"x" * 50)
    oldest = min(disk.names)
    node.log.drop_segments({1: 20, 2: 1})
    assert oldest not in disk.names
    node.log.close()
    held = Node(disk.survivor(), SMALL, (1, 2), keep_from={1: 20, 2: 1}).held[2]
    assert (held.term, held.voted_for, held.base_index, held.base_term) == (4, "b", 1, 4)
    assert entries(held) == [(2, 4, b"quiet 2"), (3, 4, b"quiet 3")]


def test_group_carried_forward_can_go_on(disk: SimDisk) -> None:
    node = Node(disk, SMALL, (1, 2)).start()
    node.put(2, 1, b"quiet")
    for index in range(1, 21):
        node.put(1, index, b"x" * 50)
    node.log.drop_segments({1: 20})
    node.put(2, 2, b"awake")
    assert node.durable[2][1] == 2
    node.log.close()
    held = Node(disk.survivor(), SMALL, (1, 2)).held[2]
    assert [data for _, _, data in entries(held)] == [b"quiet", b"awake"]


def test_quiet_group_beyond_the_carry_bound_keeps_its_segment(disk: SimDisk) -> None:
    options = LogOptions(idle_s=1000.0, segment_bytes=200, keep_bytes=0, carry_bytes=10)
    node = Node(disk, options, (1, 2)).start()
    node.put(2, 1, b"too much to carry")
    for index in range(1, 21):
        node.put(1, index, b"x" * 50)
    assert node.log.drop_segments({1: 20}) == 0
    node.log.close()
    assert Node(disk.survivor(), SMALL, (1, 2)).held[2].last_index == 1


def test_truncation_of_entries_whose_segment_is_gone_is_recovered(disk: SimDisk) -> None:
    node = Node(disk, SMALL, (1, 2)).start()
    for index in range(1, 10):
        node.put(2, index, b"x" * 50, term=index)
    node.settle(2, node.log.truncate(2, 3, 2))
    node.log.drop_segments({2: 2})
    node.log.close()
    held = Node(disk.survivor(), SMALL, (1, 2)).held[2]
    assert (held.base_index, held.base_term, held.entries) == (2, 2, [])


def test_truncation_older_than_every_segment_left_still_holds(disk: SimDisk) -> None:
    node = Node(disk, SMALL, (1, 2)).start()
    for index in range(1, 6):
        node.put(2, index)
    node.settle(2, node.log.truncate(2, 3, 1))
    for index in range(1, 21):
        node.put(1, index, b"x" * 50)
    node.log.drop_segments({1: 20, 2: 2})
    node.log.close()
    held = Node(disk.survivor(), SMALL, (1, 2)).held[2]
    assert (held.base_index, held.entries) == (2, [])


def test_real_disk_gives_back_what_was_written(tmp_path: Path) -> None:
    loop, durable = HandLoop(), [0]
    log = NodeLog.open(tmp_path / "wal", options=SMALL)
    log.attach(1, lambda _position, index: durable.__setitem__(0, index))
    log.start(call_soon=loop.call_soon, on_failure=lambda error: pytest.fail(str(error)))
    for index in range(1, 51):
        log.append(1, index, 1, b"%d" % index)
    loop.run_until(lambda: durable[0] == 50)
    log.close()
    reopened = NodeLog.open(tmp_path / "wal", options=SMALL)
    held = reopened.attach(1, lambda _position, _index: None)
    assert [data for data, _, _ in held.entries] == [b"%d" % index for index in range(1, 51)]
    reopened.close()


def test_rotated_log_leaves_its_segment_and_all_of_it_can_be_removed(disk: SimDisk) -> None:
    node = Node(disk, groups=(1, 2)).start()
    for index in range(1, 4):
        node.put(1, index, b"secret")
    left, ends = node.log.rotate()
    assert ends == {1: 3, 2: 0}
    assert node.log.first_segment <= left
    node.put(1, 4, b"behind")
    # Nothing is carried forward of what is applied.
    node.log.drop_segments({1: 3}, keep_bytes=0)
    assert node.log.first_segment == left + 1
    node.log.close()
    held = Node(disk.survivor(), keep_from={1: 3}).held[1]
    assert (held.base_index, entries(held)) == (3, [(4, 1, b"behind")])


def test_log_rotated_again_and_again_loses_nothing(disk: SimDisk) -> None:
    node = Node(disk).start()
    for index in range(1, 6):
        node.put(1, index)
        assert node.log.rotate()[1] == {1: index}
        node.log.rotate()
    node.log.close()
    assert len(entries(Node(disk.survivor()).held[1])) == 5


def test_rotation_that_fails_or_comes_too_late_is_refused(disk: SimDisk) -> None:
    node = Node(disk).start()
    node.put(1, 1)
    disk.fail("create", errno.ENOSPC)
    with pytest.raises(LogFailedError):
        node.log.rotate()
    node.loop.run_until(lambda: bool(node.failures))
    with pytest.raises(LogFailedError):
        node.log.rotate()
    disk.heal()
    node.log.recover()
    assert node.log.rotate()[1] == {1: 1}
    node.log.close()
    with pytest.raises(LogFailedError):
        node.log.rotate()
