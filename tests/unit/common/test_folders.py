"""What tests find in a folder does not depend on what a compaction does while they look."""

import shutil
from pathlib import Path

import pytest

from tests.support.folders import contents, copy_at_one_moment, files_with


def test_text_that_moves_to_another_file_meanwhile_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "old").write_bytes(b"some text")
    read = Path.read_bytes

    def moved(path: Path) -> bytes:
        if path.name == "old":
            path.rename(tmp_path / "new")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", moved)
    assert files_with(tmp_path, [b"text", b"other"]) == {"new": [b"text"]}


@pytest.mark.parametrize("name", ["old", "new"])
def test_copy_has_what_was_there_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "old").write_bytes(b"1")
    copied = shutil.copytree

    def and_changed(*arguments: Path) -> Path:
        copied(*arguments)
        monkeypatch.undo()
        (folder / name).write_bytes(b"22")
        return tmp_path / "copy"

    monkeypatch.setattr(shutil, "copytree", and_changed)
    assert contents(copy_at_one_moment(folder, tmp_path / "copy")) == contents(folder)
    assert contents(folder)[name] == b"22"


def test_copy_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "copy").mkdir()
    with pytest.raises(FileExistsError):
        copy_at_one_moment(tmp_path / "folder", tmp_path / "copy")
