"""A simulated disk: a crash leaves what was made durable, and perhaps more."""

import errno
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

from sortedcontainers import SortedDict

from contrail_storage.disk.files import AppendHandle, Files, UpdateHandle
from contrail_storage.store.rocks_store import Operation
from contrail_storage.wal.log_state import SUFFIX
from tests.sim import threads

_SYNC_S: Final = 0.04


@dataclass(slots=True)
class _File:
    """Bytes as they are read now, and how many of them a power cut leaves for sure."""

    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""


class Disk:
    """The disk of one node, through all of its lives."""

    lies = False
    """Whether syncs of the log return without effect."""

    def __init__(self, random: Random, *, in_thread: Callable[[], bool]) -> None:
        self.random = random
        self.sync_s = _SYNC_S
        """How long a sync takes at the longest."""
        self.life = 0
        """Counts the crashes: who has opened a file before cannot change it after."""
        self.names: dict[Path, _File] = {}
        self.store = SimStore(self)
        # Changes of names that no sync of their directory has made durable, in order.
        self._pending: list[tuple[Path, Callable[[], None]]] = []
        self._durable: dict[Path, _File] = {}
        self._in_thread = in_thread

    def crash(self, *, power: bool) -> None:
        """End a life; with ``power``, what no sync has made durable may be lost."""
        self.life += 1
        self.store = self.store.after_crash(self.random)
        if not power:
            return
        kept = self.random.randint(0, len(self._pending))
        for _, change in self._pending[:kept]:
            change()
        self._pending.clear()
        self.names = dict(self._durable)
        for file in self.names.values():
            rest = len(file.data) - len(file.synced)
            if rest > 0 and file.data.startswith(file.synced):
                kept = self.random.randint(0, rest)
                file.data = file.data[: len(file.synced) + kept]
            else:
                file.data = bytearray(file.synced)
            file.synced = bytes(file.data)

    def wipe(self) -> None:
        """Replace the disk by an empty one."""
        self.life += 1
        self.names, self._durable, self._pending = {}, {}, []
        self.store = SimStore(self)

    def damage(self, path: Path) -> None:
        """Lose a file, if there is one, or change some of its bytes."""
        if path in self.names and self.random.random() < 0.5:
            file = self.names[path]
            at = self.random.randrange(len(file.data))
            file.data[at:] = self.random.randbytes(len(file.data) - at)
            file.synced = bytes(file.data)
        else:
            self.names.pop(path, None)
            self._durable.pop(path, None)

    def cut_log(self) -> None:
        """Lose some of the end of the log, even if it was synced."""
        logs = [path for path in self.names if path.name.endswith(SUFFIX)]
        if logs:
            file = self.names[max(logs)]
            del file.data[self.random.randint(0, len(file.data)) :]
            file.synced = bytes(file.data)

    def change(self, directory: Path, change: Callable[[dict[Path, _File]], None]) -> None:
        """Change names now, and durably with the next sync of the directory."""
        change(self.names)
        self._pending.append((directory, lambda: change(self._durable)))

    def move(self, source: Path, target: Path) -> None:
        """Move a directory, durably."""
        self.sync_directory(source)
        for names in (self.names, self._durable):
            for path in [one for one in names if one.parent == source]:
                names[target / path.name] = names.pop(path)

    def sync_directory(self, directory: Path) -> None:
        """Make the changes of a directory durable."""
        left = []
        for where, change in self._pending:
            if where == directory:
                change()
            else:
                left.append((where, change))
        self._pending = left

    def contents(self) -> Iterator[tuple[str, bytes]]:
        """All that the disk has, also what only a power cut would bring back: (where, bytes)."""
        for names in (self.names, self._durable):
            for path, file in names.items():
                if path.parent.exists():  # else its whole directory was removed
                    yield path.name, bytes(file.data)
                    yield path.name, file.synced
        yield from self.store.contents()

    def wait(self) -> None:
        """Let a sync take its time, in a thread; a start runs without one."""
        if self._in_thread():
            threads.sleep(self.random.random() * self.sync_s)

    def check(self, life: int) -> None:
        """Raise OSError in a process that has ended."""
        if life != self.life:
            raise OSError(errno.EIO, "the process has ended")


class SimFiles(Files):
    """The files of one life of a node."""

    def __init__(self, disk: Disk) -> None:
        self._disk, self._life = disk, disk.life

    def _file(self, path: Path) -> _File:
        file = self._disk.names.get(path)
        if file is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return file

    def create(self, path: Path, *, ahead_bytes: int = 0) -> AppendHandle:
        del ahead_bytes
        self._disk.check(self._life)
        if path in self._disk.names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        file = _File()
        self._disk.change(path.parent, lambda names: names.__setitem__(path, file))
        return _Handle(self._disk, file, path)

    def update(self, path: Path) -> UpdateHandle:
        return _Handle(self._disk, self._file(path), path)

    def read(self, path: Path) -> bytes:
        return bytes(self._file(path).data)

    def read_part(self, path: Path, offset: int, size: int) -> bytes:
        return bytes(self._file(path).data[offset : offset + size])

    def list_names(self, directory: Path) -> list[str]:
        return sorted(path.name for path in self._disk.names if path.parent == directory)

    def rename(self, source: Path, target: Path) -> None:
        self._disk.check(self._life)
        if source.is_dir():
            source.rename(target)
            self._disk.move(source, target)
            return
        file = self._file(source)

        def change(names: dict[Path, _File]) -> None:
            names.pop(source, None)
            names[target] = file

        self._disk.change(source.parent, change)

    def unlink(self, path: Path) -> None:
        self._disk.check(self._life)
        self._file(path)
        self._disk.change(path.parent, lambda names: names.pop(path, None) and None)

    def make_directory(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def sync_directory(self, path: Path) -> None:
        self._disk.wait()
        self._disk.check(self._life)
        self._disk.sync_directory(path)


class _Handle:
    """An open file, to append to or to change in place."""

    def __init__(self, disk: Disk, file: _File, path: Path) -> None:
        self._disk, self._file, self._life = disk, file, disk.life
        self._lies = disk.lies and path.name.endswith(SUFFIX)

    def read(self, offset: int, size: int) -> bytes:
        return bytes(self._file.data[offset : offset + size])

    def write(self, where: Any, data: Any = None) -> None:
        """Write parts at the end, or data at an offset."""
        self._disk.check(self._life)
        if data is None:
            self._file.data += b"".join(where)
        else:
            beyond = where - len(self._file.data)
            if beyond > 0:  # the end was lost in a power cut; a file has zeros there
                self._file.data += bytes(beyond)
            self._file.data[where : where + len(data)] = data

    def sync(self) -> None:
        content = bytes(self._file.data)
        self._disk.wait()
        self._disk.check(self._life)
        if not self._lies:
            self._file.synced = content

    def close(self) -> None:
        pass


class SimStore:
    """RocksDB without its log.

    A crash keeps the batches up to the last flush, and perhaps some of the following ones.
    """

    def __init__(self, disk: Disk) -> None:
        self._disk, self._life = disk, disk.life
        self._rows: SortedDict[bytes, bytes] = SortedDict()
        self._flushed: SortedDict[bytes, bytes] = SortedDict()
        self._batches: list[tuple[Operation, ...]] = []

    def after_crash(self, random: Random) -> "SimStore":
        """The store as the next life finds it."""
        store = SimStore(self._disk)
        store._flushed = self._flushed
        for batch in self._batches[: random.randint(0, len(self._batches))]:
            _write(store._flushed, batch)
        store._rows = store._flushed.copy()
        return store

    def contents(self) -> Iterator[tuple[str, bytes]]:
        """All rows, also those that a crash would bring back: (where, bytes)."""
        for rows in (self._rows, self._flushed):
            for key, value in rows.items():
                yield f"row {key.hex()}", key + value
        for operation in itertools.chain.from_iterable(self._batches):
            if operation[0] == "put":
                yield f"batch with {operation[1].hex()}", operation[1] + operation[2]

    def write(self, operations: Sequence[Operation]) -> None:
        """As `RocksStore.write`, and so on."""
        self._disk.check(self._life)
        _write(self._rows, operations)
        self._batches.append(tuple(operations))

    def flush(self) -> None:
        count = len(self._batches)
        self._disk.wait()
        self._disk.check(self._life)
        for batch in self._batches[:count]:
            _write(self._flushed, batch)
        del self._batches[:count]

    def get(self, key: bytes) -> bytes | None:
        return self._rows.get(key)

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return [self._rows.get(key) for key in keys]

    get_once = get_unverified = get_many

    def scan(self, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        rows = self._rows
        return iter([(key, rows[key]) for key in _range(rows, start, stop)])

    def scan_keys(self, start: bytes, stop: bytes) -> Iterator[bytes]:
        return iter(_range(self._rows, start, stop))

    @contextmanager
    def view(self) -> Iterator["SimStore"]:
        view = SimStore(self._disk)
        view._rows = self._rows.copy()
        yield view

    def begin_writing(self) -> None:
        pass

    def rewrite(self, ranges: object, patience_s: float) -> None:
        """Nothing of a removed row is left."""

    def reclaim(self, *, pressing: bool = False) -> int:
        del pressing
        return 0

    def owed_bytes(self, compaction_max: int) -> int:
        del compaction_max
        return 0

    def stats(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        pass


def _range(rows: "SortedDict[bytes, bytes]", start: bytes, stop: bytes) -> list[bytes]:
    return list(rows.irange(start, stop, (True, False)))


def _write(rows: "SortedDict[bytes, bytes]", operations: Sequence[Operation]) -> None:
    for operation in operations:
        if operation[0] == "put":
            rows[operation[1]] = operation[2]
        elif operation[0] == "delete":
            rows.pop(operation[1], None)
        else:
            for key in _range(rows, operation[1], operation[2]):
                del rows[key]
