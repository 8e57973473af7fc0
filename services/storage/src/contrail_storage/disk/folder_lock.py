"""The lock of a node's folder, held by a process that reads in order to change it."""

import fcntl
import os
from contextlib import suppress
from pathlib import Path


class FolderBusyError(OSError):
    """Another process has the folder."""


class FolderLock:
    """Held from its making until `release`, or until the process ends."""

    def __init__(self, directory: Path) -> None:
        """Raises FolderBusyError. On a file system without such locks the store's own remains."""
        self._descriptor = -1
        self._descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.release()
            raise FolderBusyError("another process is using it") from error
        except OSError:
            self.release()

    def release(self) -> None:
        """Let go of the folder. May be repeated."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with suppress(OSError):
                os.close(descriptor)

    def __del__(self) -> None:
        """Release the folder of a node that was never started."""
        self.release()
