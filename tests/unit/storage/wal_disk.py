"""A disk in memory that knows what is durable, and an event loop that runs when it is told to."""

import errno
import os
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from contrail_storage.disk.files import Files


class PowerCutError(Exception):
    """The disk is gone; whoever still uses it only sees this."""


@dataclass(slots=True)
class Inode:
    content: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    updates: list[tuple[int, bytes]] = field(default_factory=list)
    """What was written in place since the last sync."""
    end: int = 0
    """Where what was appended ends; behind it are zeros."""
    durable_end: int = 0
    dropped_end: int = 0
    """Up to here a failed sync counts bytes as written that are not: no later one writes them."""

    def sync(self) -> None:
        """All that is written becomes durable, but for what a failed sync gave up."""
        kept = bytes(self.content)
        if self.dropped_end > self.durable_end:
            lost = slice(self.durable_end, self.dropped_end)
            kept = kept[: lost.start] + bytes(lost.stop - lost.start) + kept[lost.stop :]
        self.durable, self.durable_end = kept, self.end

    def update(self, offset: int, data: bytes) -> None:
        self.content = _updated(self.content, offset, data)
        self.updates.append((offset, data))

    def survivor(self, keep: float) -> bytes:
        if not self.updates:
            kept = self.durable_end + int((self.end - self.durable_end) * keep)
            unsynced = bytes(self.content[self.durable_end : kept])
            return self.durable[: self.durable_end] + unsynced + self.durable[kept:]
        content = bytearray(self.durable)
        size = int(sum(len(data) for _, data in self.updates) * keep)
        for offset, data in self.updates:
            content = _updated(content, offset, data[:size])
            size -= min(size, len(data))
        return bytes(content)


def _updated(content: bytearray, offset: int, data: bytes) -> bytearray:
    content = content + bytes(max(offset - len(content), 0) if data else 0)
    content[offset : offset + len(data)] = data
    return content


class SimDisk(Files):
    """Files in memory. `cut_at` is the number of the changing call at which the power goes.

    `survivor(keep)` is the disk after the cut: names and bytes that were synced, and `keep`
    (0.0 to 1.0) of the bytes that were not. With 1.0 the names are kept too, as if only the
    process had been killed.
    """

    def __init__(self, *, cut_at: int | None = None, sync_lies: bool = False) -> None:
        self.names: dict[Path, Inode] = {}
        self.durable_names: dict[Path, Inode] = {}
        self.calls = 0
        self.cut_at = cut_at
        self.sync_lies = sync_lies
        self.failing: dict[str, int] = {}
        self.sync_gate = threading.Event()
        self.sync_gate.set()
        self.syncing = threading.Event()

    @property
    def segments(self) -> dict[Path, Inode]:
        """The files of the log, by path."""
        return {path: inode for path, inode in self.names.items() if path.suffix == ".wal"}

    def fail(self, call: str, number: int = errno.EIO) -> None:
        """Let `call` (write, sync, create) fail with an error number until `heal`."""
        self.failing[call] = number

    def heal(self) -> None:
        self.failing.clear()

    def step(self, call: str) -> None:
        self.calls += 1
        if self.cut_at is not None and self.calls >= self.cut_at:
            raise PowerCutError(f"power cut at {call}")
        if call in self.failing:
            number = self.failing[call]
            raise OSError(number, os.strerror(number))

    def survivor(self, keep: float = 0.0) -> "SimDisk":
        after = SimDisk()
        names = self.names if keep == 1.0 else self.durable_names
        for path, inode in names.items():
            content = inode.survivor(keep)
            size = len(content)
            after.names[path] = Inode(bytearray(content), content, end=size, durable_end=size)
        after.durable_names = dict(after.names)
        return after

    def create(self, path: Path, *, ahead_bytes: int = 0) -> "SimHandle":
        self.step("create")
        if path in self.names:
            raise FileExistsError(path)
        inode = self.names[path] = Inode()
        return SimHandle(self, inode, ahead_bytes)

    def update(self, path: Path) -> "SimUpdateHandle":
        if path not in self.names:
            raise FileNotFoundError(path)
        return SimUpdateHandle(self, self.names[path])

    def read(self, path: Path) -> bytes:
        if path not in self.names:
            raise FileNotFoundError(path)
        return bytes(self.names[path].content)

    def read_part(self, path: Path, offset: int, size: int) -> bytes:
        return self.read(path)[offset : offset + size]

    def list_names(self, directory: Path) -> list[str]:
        return sorted(path.name for path in self.names if path.parent == directory)

    def rename(self, source: Path, target: Path) -> None:
        self.step("rename")
        self.names[target] = self.names.pop(source)

    def unlink(self, path: Path) -> None:
        if path not in self.names:
            raise FileNotFoundError(path)
        self.step("unlink")
        del self.names[path]

    def make_directory(self, path: Path) -> None:
        self.step("make_directory")

    def sync_directory(self, path: Path) -> None:
        self.step("sync_directory")
        for name in {*self.names, *self.durable_names}:
            if name.parent != path:
                continue
            if name in self.names:
                self.durable_names[name] = self.names[name]
            else:
                del self.durable_names[name]


@dataclass(slots=True)
class SimHandle:
    disk: SimDisk
    inode: Inode
    ahead_bytes: int

    def write(self, parts: Sequence[bytes]) -> None:
        data = b"".join(parts)
        try:
            self.disk.step("write")
        except Exception:
            self._put(data[: len(data) // 2])
            raise
        self._put(data)
        missing = self.inode.end - len(self.inode.content) + 1
        if missing > 0:
            self.inode.content += bytes(self.ahead_bytes)

    def _put(self, data: bytes) -> None:
        end = self.inode.end + len(data)
        self.inode.content[self.inode.end : end] = data
        self.inode.end = end

    def sync(self) -> None:
        self.disk.syncing.set()
        assert self.disk.sync_gate.wait(30)
        try:
            self.disk.step("sync")
        except OSError:
            self.inode.dropped_end = self.inode.end
            raise
        if not self.disk.sync_lies:
            self.inode.sync()

    def close(self) -> None:
        if self.inode.end == self.inode.durable_end:
            del self.inode.content[self.inode.end :]


@dataclass(slots=True)
class SimUpdateHandle:
    disk: SimDisk
    inode: Inode

    def read(self, offset: int, size: int) -> bytes:
        return bytes(self.inode.content[offset : offset + size])

    def write(self, offset: int, data: bytes) -> None:
        try:
            self.disk.step("write")
        except Exception:
            self.inode.update(offset, data[: len(data) // 2])
            raise
        self.inode.update(offset, data)

    def sync(self) -> None:
        self.disk.step("sync")
        if not self.disk.sync_lies:
            self.inode.durable = bytes(self.inode.content)
            self.inode.updates.clear()

    def close(self) -> None:
        return


class HandLoop:
    """Callbacks given from other threads, run by the test."""

    def __init__(self) -> None:
        self._callbacks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.handed_over = 0

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.handed_over += 1
        self._callbacks.put(callback)

    def run_until(self, condition: Callable[[], bool]) -> None:
        """Run callbacks until the condition holds; fails when none comes for 30 s."""
        while not condition():
            self._callbacks.get(timeout=30)()

    def run_pending(self) -> None:
        while not self._callbacks.empty():
            self._callbacks.get_nowait()()
