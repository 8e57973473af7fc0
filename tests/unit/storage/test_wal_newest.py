"""The record of the newest segment: one that vanishes is missed, one that never counted is not."""

import errno
from pathlib import Path

import pytest

from contrail_storage.wal.newest_segment import NEWEST_NAME
from tests.unit.storage.test_wal_node_log import ROOT, SMALL, Node
from tests.unit.storage.wal_disk import SimDisk


@pytest.fixture
def disk() -> SimDisk:
    return SimDisk()


@pytest.fixture
def node(disk: SimDisk) -> Node:
    return Node(disk).start()


def test_newest_segment_that_vanished_is_rot_and_changes_nothing(disk: SimDisk) -> None:
    node = Node(disk, SMALL).start()
    for index in range(1, 20):
        node.put(1, index, b"x" * 50)
    node.log.close()
    newest = max(disk.segments)
    del disk.names[newest]
    before = set(disk.names)
    rot = Node(disk, SMALL).log.recovery.rot
    assert rot is not None
    assert str(rot) == f"the newest segment is missing ({newest.name} from byte 0 on)"
    assert set(disk.names) == before


def test_only_segment_that_vanished_is_rot(disk: SimDisk, node: Node) -> None:
    node.put(1, 1, b"acked")
    node.log.close()
    del disk.names[max(disk.segments)]
    assert Node(disk).log.recovery.rot is not None


def test_damaged_record_of_the_newest_segment_is_refused(disk: SimDisk, node: Node) -> None:
    node.log.close()
    disk.names[ROOT / NEWEST_NAME].content[-1] ^= 1
    rot = Node(disk).log.recovery.rot
    assert rot is not None
    assert "newest does not match its checksum" in str(rot)


def test_log_of_before_the_newest_segment_was_recorded_is_opened(disk: SimDisk, node: Node) -> None:
    node.put(1, 1, b"acked")
    node.log.close()
    del disk.names[ROOT / NEWEST_NAME]
    again = Node(disk)
    assert again.log.recovery.rot is None
    assert again.held[1].last_index == 1
    again.log.close()
    del disk.names[max(disk.segments)]
    assert Node(disk).log.recovery.rot is not None


def test_segment_whose_record_failed_takes_no_entry_and_its_loss_is_no_damage(
    disk: SimDisk, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.put(1, 1, b"acked")
    node.log.close()
    rename = disk.rename

    def refuse_the_record(source: Path, target: Path) -> None:
        if target.name == NEWEST_NAME:
            raise OSError(errno.EIO, "error")
        rename(source, target)

    monkeypatch.setattr(disk, "rename", refuse_the_record)
    with pytest.raises(OSError, match="error"):
        Node(disk)
    monkeypatch.undo()
    del disk.names[max(disk.segments)]
    assert Node(disk).held[1].last_index == 1
