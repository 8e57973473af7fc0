"""A disk that counts every changing call and, at a chosen one, ends the process or fails.

Calls are counted in three lanes, because threads of a node write side by side: the write-ahead log,
the small node files with their directories, and the store. Within a lane the order of a script's
calls is the same in every run.
"""

import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

import msgspec

from contrail_storage.disk.files import AppendHandle, Files, UpdateHandle
from contrail_storage.store.rocks_store import (
    Operation,
    RocksStore,
    StoreFailedError,
    StoreOptions,
)
from contrail_storage.wal.codec import BATCH_HEADER_BYTES
from tests.crash.history import ChangeKind, FileChange
from tests.crash.pipe import Reporter

Lane = Literal["log", "files", "store"]
UNDO: Final = ".undo"
"""Suffix of the file with the bytes that unsynced writes in place have replaced."""
LANES: Final[tuple[Lane, ...]] = ("log", "files", "store")


class Kill(msgspec.Struct, frozen=True):
    """End the process before call `number` of a lane; with `torn`, after a part of its bytes."""

    lane: Lane
    number: int
    torn: bool = False

    def __str__(self) -> str:
        return f"{self.lane} call {self.number}{' (torn)' if self.torn else ''}"


class Failure(msgspec.Struct, frozen=True):
    """Make `count` calls of a kind fail with an error number, starting with call `first`."""

    lane: Lane
    call: str
    first: int
    number: int
    count: int = 1


class Plan(msgspec.Struct, frozen=True):
    """What the disk does in one life of the node."""

    seed: int = 0
    kill: Kill | None = None
    failures: tuple[Failure, ...] = ()
    lies_from: int = 0
    """From this call of the log on, syncs of its files report success and do nothing; 0: never."""
    linger_s: float = 0.0
    """Seconds that the fatal call hangs first, unless something is reported meanwhile."""
    shadow: str = ""
    """Folder for a second link to every file, from which a power cut can restore it."""


class Switch:
    """Counts the calls and carries out the plan. Thread-safe."""

    def __init__(self, plan: Plan, reporter: Reporter) -> None:
        self.plan = plan
        self._reporter = reporter
        self.calls: dict[str, list[str]] = {lane: [] for lane in LANES}
        self._kinds: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def step(self, lane: Lane, call: str) -> bool:
        """Count a call that is about to be made. If True, write a part of it, then `die`.

        Raises OSError if the plan makes it fail.
        """
        with self._lock:
            self.calls[lane].append(call)
            self._kinds[lane, call] += 1
            number, of_kind = len(self.calls[lane]), self._kinds[lane, call]
        kill = self.plan.kill
        if kill is not None and (kill.lane, kill.number) == (lane, number):
            if kill.torn and call == "write":
                return True
            self.die()
        for failure in self.plan.failures:
            if (failure.lane, failure.call) == (lane, call) and (
                failure.first <= of_kind < failure.first + failure.count
            ):
                raise OSError(failure.number, os.strerror(failure.number))
        return False

    @property
    def lies(self) -> bool:
        """Whether syncs of the log's files do nothing."""
        return 0 < self.plan.lies_from <= len(self.calls["log"])

    def die(self) -> NoReturn:
        """End the process as `kill -9` does."""
        if self.plan.linger_s:
            self._reporter.wait_for_more(self.plan.linger_s)
        os.kill(os.getpid(), signal.SIGKILL)
        raise SystemExit("unreachable: SIGKILL cannot be survived")

    def tear(self, size: int) -> int:
        """Bytes of a torn write of `size` bytes that reach the file: from none to nearly all."""
        kill = self.plan.kill
        return random.Random(f"{self.plan.seed} {kill}").randrange(1, max(size, 2))


class CountedFiles(Files):
    """The real disk behind a switch; reports its calls if the plan has a shadow."""

    def __init__(self, switch: Switch, root: Path, reporter: Reporter) -> None:
        self._switch = switch
        self._root = root
        self._reporter = reporter
        self.lonely = False
        """Whether the newest batch of the log has no successor yet."""
        self._shadow = Path(switch.plan.shadow) if switch.plan.shadow else None

    def create(self, path: Path, *, ahead_bytes: int = 0) -> AppendHandle:
        self._switch.step(_lane(path), "create")
        handle = super().create(path, ahead_bytes=ahead_bytes)
        inode = path.stat().st_ino
        if self._shadow is not None:
            os.link(path, self._shadow / str(inode))
        self.report("created", path, inode=inode)
        return _CountedHandle(self, self._switch, path, handle)

    def update(self, path: Path) -> UpdateHandle:
        inode = path.stat().st_ino
        undo = None if self._shadow is None else self._shadow / f"{inode}{UNDO}"
        return _CountedUpdate(self, self._switch, path, super().update(path), undo)

    def rename(self, source: Path, target: Path) -> None:
        self._switch.step(_lane(target), "rename")
        super().rename(source, target)
        self.report("renamed", source, target)

    def unlink(self, path: Path) -> None:
        if not path.exists():
            raise FileNotFoundError(path)
        self._switch.step(_lane(path), "unlink")
        super().unlink(path)
        self.report("unlinked", path)

    def sync_directory(self, path: Path) -> None:
        self._switch.step(_lane(path), "sync")
        super().sync_directory(path)
        self.report("directory-synced", path)

    def report(
        self,
        kind: ChangeKind,
        path: Path,
        target: Path | None = None,
        *,
        size: int = 0,
        inode: int = 0,
    ) -> None:
        """Report a call that has returned."""
        if self._shadow is not None and path.is_relative_to(self._root):
            where = str(target.relative_to(self._root)) if target is not None else ""
            name = str(path.relative_to(self._root))
            self._reporter.send(FileChange(kind, name, where, size, inode))


class _CountedHandle:
    def __init__(
        self, files: CountedFiles, switch: Switch, path: Path, handle: AppendHandle
    ) -> None:
        self._files = files
        self._switch = switch
        self._path = path
        self._handle = handle
        self._size = 0

    def write(self, parts: Sequence[bytes]) -> None:
        data = b"".join(parts)
        part = data[: self._switch.tear(len(data))]
        try:
            torn = self._switch.step(_lane(self._path), "write")
        except OSError:
            self._handle.write([part])
            raise
        if torn:
            self._handle.write([part])
            self._switch.die()
        self._handle.write([data])
        self._size += len(data)
        if _lane(self._path) == "log":
            self._files.lonely = len(data) > BATCH_HEADER_BYTES

    def sync(self) -> None:
        self._switch.step(_lane(self._path), "sync")
        if _lane(self._path) != "log" or not self._switch.lies:
            self._handle.sync()
            self._files.report("synced", self._path, size=self._size)

    def close(self) -> None:
        self._handle.close()


class _CountedUpdate:
    """A file that is changed in place. The bytes that unsynced writes replace are kept."""

    def __init__(
        self,
        files: CountedFiles,
        switch: Switch,
        path: Path,
        handle: UpdateHandle,
        undo: Path | None,
    ) -> None:
        self._files = files
        self._switch = switch
        self._path = path
        self._handle = handle
        self._undo = undo

    def read(self, offset: int, size: int) -> bytes:
        return self._handle.read(offset, size)

    def write(self, offset: int, data: bytes) -> None:
        part = data[: self._switch.tear(len(data))]
        if self._undo is not None:
            before = msgspec.msgpack.encode((offset, self._handle.read(offset, len(data))))
            with self._undo.open("ab") as noted:
                noted.write(len(before).to_bytes(4, "little") + before)
        try:
            torn = self._switch.step("files", "write")
        except OSError:
            self._handle.write(offset, part)
            raise
        if torn:
            self._handle.write(offset, part)
            self._switch.die()
        self._handle.write(offset, data)

    def sync(self) -> None:
        self._switch.step("files", "sync")
        self._handle.sync()
        if self._undo is not None:
            self._undo.unlink(missing_ok=True)
        self._files.report("synced", self._path, size=self._path.stat().st_size)

    def close(self) -> None:
        self._handle.close()


class CountedStore(RocksStore):
    """The real store behind a switch."""

    switch: Switch

    def write(self, operations: Sequence[Operation]) -> None:
        self._step("write")
        super().write(operations)

    def flush(self) -> None:
        self._step("flush")
        super().flush()

    def _put_some_again(self, database: Any, keys: list[bytes]) -> bool:
        self._step("write")
        return super()._put_some_again(database, keys)

    def _step(self, call: str) -> None:
        try:
            self.switch.step("store", call)
        except OSError as error:
            raise StoreFailedError(f"IO error: {error.strerror}") from error


class StoreOpener:
    """Opens stores whose writes and flushes a switch counts, and remembers the last one."""

    def __init__(self, switch: Switch, blob_bytes_min: int) -> None:
        self._switch = switch
        self._options = StoreOptions(blob_bytes_min=blob_bytes_min)
        self.store: CountedStore

    def __call__(self, path: Path) -> CountedStore:
        self.store = CountedStore.open_reading(path, self._options)
        self.store.switch = self._switch
        return self.store


def _lane(path: Path) -> Lane:
    return "log" if "wal" in (path.name, path.parent.name) else "files"
