"""The disk without waiting for it: in a story a node may be killed, but no machine loses power."""

from collections.abc import Sequence
from pathlib import Path

from contrail_storage.disk.files import AppendHandle, Files


class UnsyncedFiles(Files):
    """Files that the operating system writes out when it likes."""

    def create(self, path: Path, *, ahead_bytes: int = 0) -> AppendHandle:
        """Open a new file for appending."""
        return _UnsyncedFile(super().create(path, ahead_bytes=ahead_bytes))

    def sync_directory(self, path: Path) -> None:
        """Leave the directory to the operating system."""


class _UnsyncedFile:
    def __init__(self, handle: AppendHandle) -> None:
        self._handle = handle

    def write(self, parts: Sequence[bytes]) -> None:
        self._handle.write(parts)

    def sync(self) -> None:
        """Leave it to the operating system."""

    def close(self) -> None:
        self._handle.close()
