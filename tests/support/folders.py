"""Folders in which a running store, log or node creates, renames and removes files."""

import os
import shutil
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

T = TypeVar("T")

_TRIES: Final = 1_000
"""A background job changes a folder a few times and ends; more changes than this are no job."""


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder by its path in it, with all its bytes."""
    return _read(folder, lambda content: content)


def files_with(folder: Path, texts: Iterable[bytes]) -> dict[str, list[bytes]]:
    """The files below a folder that hold any of the texts, with those that they hold."""
    wanted = list(texts)
    found = _read(folder, lambda content: [text for text in wanted if text in content])
    return {name: held for name, held in found.items() if held}


def size_of(folder: Path) -> int:
    """Bytes of the files below a folder; files that are being removed may count or not."""
    return sum(one.st_size for one in _stats(folder).values())


def copy_at_one_moment(folder: Path, copy: Path) -> Path:
    """Copy the folder of a running node as a crash would leave it; return the copy.

    A copy during which a file changed may mix what was never there together, such as a table that
    was written after the list of tables was copied: it is made again.
    """
    for _ in range(_TRIES):
        before = _versions(folder)
        try:
            shutil.copytree(folder, copy)
        except (shutil.Error, FileNotFoundError):
            if before == _versions(folder):
                raise
        if before == _versions(folder):
            return copy
        shutil.rmtree(copy)
    raise AssertionError(f"{folder} does not come to rest")


def _read(folder: Path, read: Callable[[bytes], T]) -> dict[str, T]:
    """What ``read`` makes of each file.

    Nothing that a file held all the time is missed, even if it was moved to another file while
    they were read: a compaction writes new files before it removes the old ones. So all are read
    again until none has come or gone meanwhile.
    """
    for _ in range(_TRIES):
        before = _inodes(folder)
        found = {}
        for name in sorted(before):
            with suppress(FileNotFoundError):
                found[name] = read((folder / name).read_bytes())
        if before == _inodes(folder):
            return found
    raise AssertionError(f"{folder} does not come to rest")


def _inodes(folder: Path) -> dict[str, int]:
    return {name: one.st_ino for name, one in _stats(folder).items()}


def _versions(folder: Path) -> dict[str, tuple[int, int, int]]:
    stats = _stats(folder)
    return {name: (one.st_ino, one.st_size, one.st_mtime_ns) for name, one in stats.items()}


def _stats(folder: Path) -> dict[str, os.stat_result]:
    """Every file that has not gone before it is looked at."""
    assert folder.is_dir(), folder
    found = {}
    for parent, _, names in os.walk(folder):
        for path in (Path(parent, name) for name in names):
            with suppress(FileNotFoundError):
                status = path.stat()
                if stat.S_ISREG(status.st_mode):
                    found[str(path.relative_to(folder))] = status
    return found
