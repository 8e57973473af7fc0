"""The simulated power cut reverts exactly the changes that were not synced."""

import random
from pathlib import Path

import pytest

from tests.crash.history import FileChange
from tests.crash.power import PowerCut


class Dead:
    """Files as a dead process left them, and what it reported."""

    def __init__(self, root: Path) -> None:
        self.data = root / "data"
        self.data.mkdir()
        self._shadow = root / "shadow"
        self._changes: list[FileChange] = []
        self._cut: PowerCut | None = None

    def start(self) -> None:
        self._cut = PowerCut(self.data, self._shadow)

    def create(self, name: str, content: bytes) -> None:
        path = self.data / name
        path.write_bytes(content)
        inode = path.stat().st_ino
        (self._shadow / str(inode)).hardlink_to(path)
        self._changes.append(FileChange("created", name, inode=inode))

    def note(self, kind: str, path: str, target: str = "", size: int = 0) -> None:
        self._changes.append(FileChange(kind, path, target, size))  # type: ignore[arg-type]

    def after(self, seed: int) -> dict[str, bytes]:
        assert self._cut is not None
        self._cut.follow(self._changes)
        self._cut.cut(random.Random(seed))
        return {path.name: path.read_bytes() for path in self.data.iterdir()}


@pytest.fixture(params=range(12))
def seed(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def dead(tmp_path: Path) -> Dead:
    return Dead(tmp_path)


def test_synced_bytes_under_a_synced_name_stay(dead: Dead, seed: int) -> None:
    dead.start()
    dead.create("log", b"sound and torn")
    dead.note("synced", "log", size=5)
    dead.note("directory-synced", ".")
    found = dead.after(seed)["log"]
    assert found[:5] == b"sound"
    assert all(byte in (0, b"sound and torn"[at]) for at, byte in enumerate(found))


def test_file_under_an_unsynced_name_may_be_gone(tmp_path: Path) -> None:
    seen = set()
    for seed in range(12):
        root = tmp_path / str(seed)
        root.mkdir()
        dead = Dead(root)
        dead.start()
        dead.create("log", b"x")
        dead.note("synced", "log", size=1)
        seen.add("log" in dead.after(seed))
    assert seen == {True, False}


def test_unsynced_rename_leaves_the_old_content_or_the_new(dead: Dead, seed: int) -> None:
    (dead.data / "record").write_bytes(b"old")
    dead.start()
    dead.create("record.new", b"new")
    dead.note("synced", "record.new", size=3)
    (dead.data / "record.new").replace(dead.data / "record")
    dead.note("renamed", "record.new", "record")
    assert dead.after(seed)["record"] in (b"old", b"new")


def test_unsynced_removal_may_be_undone_and_a_synced_one_never(dead: Dead, seed: int) -> None:
    (dead.data / "a").write_bytes(b"a")
    (dead.data / "b").write_bytes(b"b")
    dead.start()
    for name in "ab":
        (dead.data / name).unlink()
        dead.note("unlinked", name)
        if name == "a":
            dead.note("directory-synced", ".")
    found = dead.after(seed)
    assert "a" not in found
    assert found.get("b", b"b") == b"b"


def test_store_is_left_alone(dead: Dead, seed: int) -> None:
    (dead.data / "store").mkdir()
    (dead.data / "store" / "table").write_bytes(b"t")
    dead.start()
    (dead.data / "store" / "table").write_bytes(b"tt")
    dead.note("directory-synced", ".")
    dead.data = dead.data / "store"
    assert dead.after(seed) == {"table": b"tt"}
