"""The real disk port and the small node files."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from contrail_storage.disk.files import Files
from contrail_storage.disk.node_file import (
    NO_CLUSTER,
    NodeFileDamagedError,
    NodeIdentity,
    Stage,
    begin_boot,
    copy_of,
    load_identity,
    read_node_file,
    save_identity,
    write_node_file,
)
from tests.support.each import each
from tests.unit.storage.wal_disk import SimDisk

IDENTITY = NodeIdentity("node-1", 7)


def test_write_that_the_system_takes_in_pieces_ends_up_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_pwritev = os.pwritev

    def short_pwritev(descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
        return whole_pwritev(descriptor, [parts[0][:3]], offset)

    monkeypatch.setattr(os, "pwritev", short_pwritev)
    handle = Files().create(tmp_path / "file")
    handle.write([b"", b"0123456789", b"abc", b"defg"])
    handle.sync()
    handle.close()
    assert Files().read(tmp_path / "file") == b"0123456789abcdefg"


def test_small_writes_go_into_room_made_ahead_that_closing_takes_off(tmp_path: Path) -> None:
    path = tmp_path / "file"
    handle = Files().create(path, ahead_bytes=1000)
    sizes = []
    for _ in range(3):
        handle.write([bytes([7]) * 400])
        handle.sync()
        sizes.append(path.stat().st_size)
    assert sizes == [1400, 1400, 1400]
    handle.write([bytes([7]) * 201])
    assert path.stat().st_size == 2401
    handle.sync()
    handle.close()
    assert path.read_bytes() == bytes([7]) * 1401


@pytest.mark.parametrize(("size", "room"), [(32 * 1024, 1000), (32 * 1024 + 1, 0)])
def test_no_room_is_made_for_large_writes(tmp_path: Path, size: int, room: int) -> None:
    handle = Files().create(tmp_path / "file", ahead_bytes=1000)
    handle.write([bytes(size - 1), b"x"])
    assert (tmp_path / "file").stat().st_size == size + room
    handle.close()


def test_room_that_the_disk_has_not_is_gone_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    handle = Files().create(tmp_path / "file", ahead_bytes=1000)
    handle.write([b"data"])
    handle.sync()
    handle.close()
    assert (tmp_path / "file").read_bytes() == b"data"


def test_file_whose_last_write_was_not_synced_is_left_as_it_is(tmp_path: Path) -> None:
    handle = Files().create(tmp_path / "file", ahead_bytes=1000)
    handle.write([b"data"])
    handle.close()
    assert (tmp_path / "file").read_bytes() == b"data" + bytes(1000)


def test_create_refuses_an_existing_file(tmp_path: Path) -> None:
    Files().create(tmp_path / "file").close()
    with pytest.raises(FileExistsError):
        Files().create(tmp_path / "file")


def test_directories_rename_and_unlink_do_what_they_say(tmp_path: Path) -> None:
    files, folder = Files(), tmp_path / "a" / "b"
    files.make_directory(folder)
    files.make_directory(folder)
    handle = files.create(folder / "old")
    handle.write([b"12345"])
    handle.close()
    files.rename(folder / "old", folder / "new")
    files.sync_directory(folder)
    assert files.list_names(folder) == ["new"]
    assert files.read(folder / "new") == b"12345"
    files.unlink(folder / "new")
    assert files.list_names(folder) == []


def test_identity_comes_back_as_saved(tmp_path: Path) -> None:
    assert load_identity(Files(), tmp_path) is None
    save_identity(Files(), tmp_path, IDENTITY)
    save_identity(Files(), tmp_path, NodeIdentity("node-1", 8))
    assert load_identity(Files(), tmp_path) == NodeIdentity("node-1", 8)


def test_start_counts_itself_and_forms_a_cluster_of_one(tmp_path: Path) -> None:
    first = begin_boot(Files(), tmp_path, IDENTITY, b"c" * 16, has_unreplicated=True)
    assert first == load_identity(Files(), tmp_path)
    assert (first.cluster_id, first.node_number, first.boots) == (b"c" * 16, 1, 1)
    second = begin_boot(Files(), tmp_path, first, b"d" * 16, has_unreplicated=False)
    assert (second.cluster_id, second.boots) == (b"c" * 16, 2)
    assert (first.has_unreplicated, second.has_unreplicated) == (True, False)
    waiting = NodeIdentity("node-1", 7, stage=Stage.EMPTY)
    third = begin_boot(Files(), tmp_path, waiting, b"c" * 16, has_unreplicated=False)
    assert third.cluster_id == NO_CLUSTER


def test_identity_of_release_0_2_is_taken_over(tmp_path: Path) -> None:
    old = {"node_id": "node-1", "incarnation": 7, "encrypted": True}
    write_node_file(Files(), tmp_path / "identity", msgspec.msgpack.encode(old))
    found = load_identity(Files(), tmp_path)
    assert found == NodeIdentity("node-1", 7, encrypted=True)
    assert found.stage is Stage.FORMED


def test_identity_of_a_newer_release_is_refused_and_is_no_damage(tmp_path: Path) -> None:
    newer = {"version": 3, "node_id": "node-1", "incarnation": 7, "zone": "a"}
    write_node_file(Files(), tmp_path / "identity", msgspec.msgpack.encode(newer))
    with pytest.raises(OSError, match="newer release"):
        load_identity(Files(), tmp_path)


@pytest.mark.parametrize("damage", [b"", b"\0", b"CTNF"])
def test_damaged_identity_is_an_error_not_a_new_node(tmp_path: Path, damage: bytes) -> None:
    save_identity(Files(), tmp_path, IDENTITY)
    (tmp_path / "identity").write_bytes(damage)
    assert load_identity(Files(), tmp_path) == IDENTITY
    copy_of(tmp_path / "identity").write_bytes(damage)
    with pytest.raises(NodeFileDamagedError):
        load_identity(Files(), tmp_path)


def test_every_flipped_byte_of_a_node_file_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_node_file(Files(), path, b"payload")
    content = path.read_bytes()
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(NodeFileDamagedError):
            read_node_file(Files(), path)


@pytest.mark.parametrize("content", [{"node_id": 3}, {}, [2], 2])
def test_sound_file_with_a_foreign_content_is_no_identity(tmp_path: Path, content: object) -> None:
    write_node_file(Files(), tmp_path / "identity", msgspec.msgpack.encode(content))
    with pytest.raises(NodeFileDamagedError):
        load_identity(Files(), tmp_path)


@each("keep", [0.0, 0.5, 1.0])
def test_power_cut_at_every_call_leaves_the_old_or_the_new_file(keep: float) -> None:
    folder, newer = Path("/node"), NodeIdentity("node-1", 8)
    for cut_at in range(1, 20):
        disk = SimDisk()
        save_identity(disk, folder, IDENTITY)
        disk.cut_at = disk.calls + cut_at
        saved = True
        try:
            save_identity(disk, folder, newer)
        except Exception:
            saved = False
        after = disk.survivor(keep)
        found = load_identity(after, folder)
        assert found == newer if saved else found in (IDENTITY, newer)
        save_identity(after, folder, newer)
        assert load_identity(after, folder) == newer
