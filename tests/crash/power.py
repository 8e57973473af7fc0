"""A simulated power cut: reverts changes of the node's files that were not synced.

The dead process has reported every call that returned, and every file has a second link outside the
data folder. So the files can be laid out as the disk may hold them:

- Bytes after the last sync are gone, kept in part, or zeros, with or without preallocated space.
- Names that were created, replaced or removed since the last sync of their folder are as before, or
  as after up to some point.
- Folders that were renamed go back, the newest first, unless a sync of a folder confirmed it.

The files of the store are left alone: it has no log here, and syncs the files that it flushes.
"""

import os
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from tests.crash.disk import UNDO
from tests.crash.history import FileChange

STORE: Final = "store"


@dataclass(slots=True, eq=False)
class _Inode:
    shadow: Path
    synced: int = 0


@dataclass(slots=True, eq=False)
class _Directory:
    names: dict[str, _Inode] = field(default_factory=dict)
    durable: dict[str, _Inode] = field(default_factory=dict)
    unsynced: list[dict[str, _Inode | None]] = field(default_factory=list)

    def change(self, change: dict[str, _Inode | None]) -> None:
        _update(self.names, change)
        self.unsynced.append(change)

    def sync(self) -> None:
        self.durable = dict(self.names)
        self.unsynced.clear()


class PowerCut:
    """Follows the changes of one process to the files of `data_dir`, then cuts the power."""

    def __init__(self, data_dir: Path, shadow: Path) -> None:
        self._data_dir = data_dir
        self._shadow = shadow
        self._directories: dict[str, _Directory] = {}
        self._moved: list[tuple[str, str]] = []
        """Folders renamed since the last sync of any folder: the journal has one order for all."""
        shadow.mkdir()
        for path in _own_files(data_dir):
            self._adopt(path)

    def _adopt(self, path: Path) -> None:
        inode = path.stat().st_ino
        os.link(path, self._shadow / str(inode))
        directory, name = self._find(str(path.relative_to(self._data_dir)))
        directory.names[name] = _Inode(self._shadow / str(inode), path.stat().st_size)
        directory.sync()

    def _find(self, path: str) -> tuple[_Directory, str]:
        parent, _, name = path.rpartition("/")
        return self._directories.setdefault(parent, _Directory()), name

    def follow(self, changes: Iterable[FileChange]) -> None:
        """Record calls that have returned, in order."""
        for change in changes:
            self._take(change)

    def _take(self, change: FileChange) -> None:
        if change.kind == "directory-synced":
            path = "" if change.path == "." else change.path
            self._directories.setdefault(path, _Directory()).sync()
            self._moved.clear()
            return
        if change.kind == "renamed" and (self._data_dir / change.target).is_dir():
            self._move(change.path, change.target)
            self._moved.append((change.path, change.target))
            return
        directory, name = self._find(change.path)
        match change.kind:
            case "created":
                directory.change({name: _Inode(self._shadow / str(change.inode))})
            case "synced":
                directory.names[name].synced = change.size
            case "unlinked":
                directory.change({name: None})
            case "renamed":
                _, target = self._find(change.target)
                directory.change({name: None, target: directory.names[name]})

    def _move(self, path: str, target: str) -> None:
        self._directories = {
            target + where[len(path) :] if f"{where}/".startswith(f"{path}/") else where: directory
            for where, directory in self._directories.items()
        }

    def cut(self, chance: random.Random) -> None:
        """Lay the files out as the disk may hold them after the power cut."""
        for path in _own_files(self._data_dir):
            path.unlink()
        for parent, directory in self._directories.items():
            if not (self._data_dir / parent).is_dir():
                continue  # removed with its content
            names = dict(directory.durable)
            for change in directory.unsynced[: chance.randint(0, len(directory.unsynced))]:
                _update(names, change)
            for name, inode in names.items():
                (self._data_dir / parent / name).write_bytes(_survivor(inode, chance))
        for path, target in self._moved[chance.randint(0, len(self._moved)) :][::-1]:
            (self._data_dir / target).rename(self._data_dir / path)


def _survivor(inode: _Inode, chance: random.Random) -> bytes:
    """The synced bytes, then of the rest nothing, its beginning, or zeros and perhaps its end."""
    content = _undone(inode.shadow, chance)
    sound, rest = content[: inode.synced], content[inode.synced :].rstrip(b"\0")
    kept = rest[: chance.randint(0, len(rest))]
    zeros = bytes(len(kept))
    survived = sound + chance.choice((b"", kept, zeros, zeros + rest[len(kept) :]))
    room = max(len(content) - len(survived), 0)
    return survived + bytes(chance.choice((0, room)))


def _undone(shadow: Path, chance: random.Random) -> bytes:
    """The content without some of the newest writes in place, of those that were not synced."""
    content = bytearray(shadow.read_bytes())
    undo = shadow.with_name(shadow.name + UNDO)
    data = undo.read_bytes() if undo.exists() else b""
    before: list[tuple[int, bytes]] = []
    while data:
        size = int.from_bytes(data[:4], "little")
        before.append(msgspec.msgpack.decode(data[4 : 4 + size], type=tuple[int, bytes]))
        data = data[4 + size :]
    for offset, replaced in before[chance.randint(0, len(before)) :][::-1]:
        content[offset : offset + len(replaced)] = replaced
    return bytes(content)


def _update(names: dict[str, _Inode], change: dict[str, _Inode | None]) -> None:
    for name, inode in change.items():
        if inode is None:
            names.pop(name, None)
        else:
            names[name] = inode


def _own_files(data_dir: Path) -> list[Path]:
    if not data_dir.is_dir():
        return []
    return [
        Path(folder, name)
        for folder, _, names in os.walk(data_dir)
        if STORE not in Path(folder).relative_to(data_dir).parts
        for name in names
    ]
