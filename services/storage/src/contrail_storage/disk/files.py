"""The port through which the log and the small node files reach the disk.

A test replaces the disk by subclassing `Files`: it can drop unsynced bytes, stop at any call, or
make a call fail.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Protocol

_MAX_PARTS: Final = 512
_AHEAD_WRITE_MAX: Final = 32 * 1024
"""Larger writes are slow for their own bytes; writing zeros ahead would double their cost."""
_FILE_MODE: Final = 0o600
_DIRECTORY_MODE: Final = 0o700


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Add the file name to the error of a failed read; the system adds it to failed opens only."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


class AppendHandle(Protocol):
    """One open file that only grows."""

    def write(self, parts: Sequence[bytes]) -> None:
        """Append all parts in order. After an OSError, any part of them may have been written."""

    def sync(self) -> None:
        """Return once everything written so far survives a power cut. Raises OSError."""

    def close(self) -> None:
        """Release the file; says nothing about what was not synced."""


class UpdateHandle(Protocol):
    """One open file, parts of which are read and overwritten in place."""

    def read(self, offset: int, size: int) -> bytes:
        """Return the bytes from `offset` on, at most `size`. Raises OSError."""

    def write(self, offset: int, data: bytes) -> None:
        """Overwrite from `offset` on, also beyond the end. Raises OSError."""

    def sync(self) -> None:
        """Return once everything written so far survives a power cut. Raises OSError."""

    def close(self) -> None:
        """Release the file; says nothing about what was not synced."""


class Files:
    """The real disk. Every method raises OSError as the system call does."""

    def create(self, path: Path, *, ahead_bytes: int = 0) -> AppendHandle:
        """Open a new, empty file for appending. Raises FileExistsError if the name is taken.

        With `ahead_bytes`, small writes overwrite zeros that were written in advance, so that a
        sync has no metadata to write. `close` cuts unused zeros off; they remain after a failure,
        or if the process is killed.
        """
        return _AppendFile(path, ahead_bytes)

    def update(self, path: Path) -> UpdateHandle:
        """Open an existing file to change it in place. Raises FileNotFoundError."""
        return _UpdateFile(path)

    def read(self, path: Path) -> bytes:
        """Return the whole content of a file."""
        with _named(path):
            return path.read_bytes()

    def read_part(self, path: Path, offset: int, size: int) -> bytes:
        """Return the bytes of a file from `offset` on, at most `size`."""
        with _named(path), path.open("rb", buffering=0) as file:
            return os.pread(file.fileno(), size, offset)

    def list_names(self, directory: Path) -> list[str]:
        """Return the names in a directory, sorted."""
        return sorted(os.listdir(directory))

    def rename(self, source: Path, target: Path) -> None:
        """Give `source` the name `target`, replacing a file of that name."""
        os.replace(source, target)

    def unlink(self, path: Path) -> None:
        """Remove a file's name."""
        os.unlink(path)

    def make_directory(self, path: Path) -> None:
        """Create a directory, with its parents, so that it survives a power cut."""
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)
        # A directory survives a power cut only if the entry in its parent was synced.
        for folder in missing:
            self.sync_directory(folder.parent)

    def sync_directory(self, path: Path) -> None:
        """Make creations, renames and removals in a directory durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class _AppendFile:
    def __init__(self, path: Path, ahead_bytes: int) -> None:
        # O_EXCL: no segment or node file is ever opened twice, so a file under this name is a
        # mistake that must not cost its content.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, _FILE_MODE)
        self._ahead = bytes(ahead_bytes)
        self._end = 0
        self._synced_end = 0
        self._ahead_end = 0

    def write(self, parts: Sequence[bytes]) -> None:
        begun = self._end
        pending: list[bytes | memoryview] = [part for part in parts if part]
        while pending:
            # At most 512 parts per call (the kernel takes 1,024), and a call may write less than it
            # was given: the loop continues where it ended.
            written = os.pwritev(self._descriptor, pending[:_MAX_PARTS], self._end)
            self._end += written
            while pending and written >= len(pending[0]):
                written -= len(pending.pop(0))
            if written:
                pending[0] = memoryview(pending[0])[written:]
        if self._ahead and self._end > self._ahead_end and self._end - begun <= _AHEAD_WRITE_MAX:
            self._write_ahead()

    def _write_ahead(self) -> None:
        # Without space in advance the next writes are only slower; they report a full disk.
        with suppress(OSError):
            self._ahead_end = self._end + os.pwrite(self._descriptor, self._ahead, self._end)

    def sync(self) -> None:
        # Without the times of the file; a changed size is still written.
        os.fdatasync(self._descriptor)
        self._synced_end = self._end

    def close(self) -> None:
        # After a failure the file is left as it is: readers skip zeros at the end.
        if self._ahead_end > self._end == self._synced_end:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._end)
        os.close(self._descriptor)


class _UpdateFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def read(self, offset: int, size: int) -> bytes:
        with _named(self._path):
            return os.pread(self._descriptor, size, offset)

    def write(self, offset: int, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            written = os.pwrite(self._descriptor, rest, offset)
            rest, offset = rest[written:], offset + written

    def sync(self) -> None:
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)
