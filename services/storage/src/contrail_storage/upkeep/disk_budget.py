"""Disk space: messages are refused while there is still enough for those that were accepted.

A message is written twice: by the log at once, and by the store later. So not every free byte is
available. The store still has to flush its memory (or, after a crash, the contents of the log) and
to compact. Deletes, acks and all other commands continue, because they free space.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

import structlog

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_storage.store.rocks_store import StoreError

_RESERVE_BYTES: Final = 64 << 20
_RESERVE_PART: Final = 8
"""The reserve is at most this fraction (1/8) of the file system."""
_COMPACTION_BYTES_MAX: Final = 256 << 20
_MEASURED_S: Final = 0.25
_REQUEST_BYTES: Final = 512
_log = structlog.get_logger("contrail.disk")


class Debtor(Protocol):
    """A store with bytes that it still has to write."""

    def owed_bytes(self, compaction_max: int) -> int:
        """Bytes to flush, plus at most ``compaction_max`` bytes to compact."""
        ...


class DiskBudget:
    """Limits messages by the free disk space. Used by one thread."""

    def __init__(
        self,
        directory: Path,
        store: Debtor,
        log_bytes: Callable[[], int],
        waiting_bytes: Callable[[], int],
        on_full: Callable[[], None],
    ) -> None:
        """``log_bytes``: size of the log. ``waiting_bytes``: bytes in neither log nor store yet.

        ``on_full`` is called when messages begin to be refused.
        """
        self.short = False
        """Whether messages are refused, or soon will be; then files should be cut early."""
        # Whether `on_full` was called since there was last enough space.
        self._refuses = False
        self._directory = directory
        self._store = store
        self._log_bytes = log_bytes
        self._waiting_bytes = waiting_bytes
        self._on_full = on_full
        # Bytes that messages may still take, counted down since `_measured_s` (monotonic seconds).
        self._left = 0
        self._measured_s = 0.0

    def check(self, size: int) -> None:
        """Count ``size`` bytes of messages; STORAGE_FULL if there is no space for them."""
        # Twice: once in the log, once in the store.
        cost = 2 * size + _REQUEST_BYTES
        self._left -= cost
        # The file system is asked every 250 ms. In between, requests count down.
        if self._left >= 0 and time.monotonic() < self._measured_s + _MEASURED_S:
            return
        left = self.measure()
        if left < cost:
            self._refuse()
            detail = f"not enough disk space: {max(left, 0) >> 20} MiB are left for messages"
            raise ApiError(errors.STORAGE_FULL, detail, retry_after_s=1, applied=False)
        self._left -= cost

    def measure(self) -> int:
        """Measure the bytes that messages may take now, in log and store together; may be < 0."""
        self._measured_s = time.monotonic()
        status = os.statvfs(self._directory)
        free, total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
        try:
            owed = self._store.owed_bytes(_COMPACTION_BYTES_MAX)
        except StoreError:
            owed = 0  # the store has failed, and messages are refused for that
        owed = max(owed, self._log_bytes()) + 2 * self._waiting_bytes()
        reserve = min(_RESERVE_BYTES, total // _RESERVE_PART)
        self._left = free - owed - reserve
        self.short = self._left < reserve
        self._refuses = self._refuses and self.short
        return self._left

    def _refuse(self) -> None:
        if not self._refuses:
            _log.warning("disk_full", directory=str(self._directory))
            self._on_full()
        self._refuses = self.short = True
