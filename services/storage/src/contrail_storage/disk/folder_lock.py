"""The lock of a data folder, held by the process that will change it."""

import fcntl
import os
from contextlib import suppress
from pathlib import Path


class FolderBusyError(OSError):
    """Another process holds the lock of the folder."""


class FolderLock:
    """An exclusive lock. It is held from construction until `release` or the end of the process."""

    def __init__(self, directory: Path) -> None:
        """Take the lock. Raises FolderBusyError if another process has it, and OSError."""
        # For `__del__`, which also runs if `os.open` raises.
        self._descriptor = -1
        self._descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.release()
            raise FolderBusyError("another process is using it") from error
        except OSError:
            # A file system without such locks. RocksDB's own lock still keeps others out.
            self.release()

    def release(self) -> None:
        """Release the lock. May be repeated."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with suppress(OSError):
                os.close(descriptor)

    def __del__(self) -> None:
        """Release the folder of a node that was never started."""
        self.release()
