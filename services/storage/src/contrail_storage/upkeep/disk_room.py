"""Room on the disk: messages are refused while there is enough for what was taken already.

A message is written twice, by the log at once and by the store later. So not every free byte may be
taken: the store still has to flush what it holds in memory (or, after a crash, what the log holds)
and to compact. Deletes, acks and everything else that is no message go on, for they make room.
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
"""On a small file system the reserve is no more than this part of it."""
_COMPACTION_BYTES_MAX: Final = 256 << 20
_MEASURED_S: Final = 0.25
_REQUEST_BYTES: Final = 512
_log = structlog.get_logger("contrail.room")


class Debtor(Protocol):
    """What still has to write."""

    def owed_bytes(self, compaction_max: int) -> int:
        """Bytes to be flushed, and at most so many to be compacted."""
        ...


class DiskRoom:
    """How many bytes of messages may still come. For one thread."""

    def __init__(
        self,
        directory: Path,
        store: Debtor,
        log_bytes: Callable[[], int],
        waiting_bytes: Callable[[], int],
        on_full: Callable[[], None],
    ) -> None:
        """``log_bytes`` is the size of the log, ``waiting_bytes`` what neither of them has yet.

        ``on_full`` is called when messages begin to be refused.
        """
        self.short = False
        """Whether messages are refused, or will be soon: what can be dropped should be."""
        self._refuses = False
        self._directory = directory
        self._store = store
        self._log_bytes = log_bytes
        self._waiting_bytes = waiting_bytes
        self._on_full = on_full
        self._left = 0
        self._measured_s = 0.0

    def check(self, size: int) -> None:
        """Take note of ``size`` bytes of messages; STORAGE_FULL where they are too many."""
        cost = 2 * size + _REQUEST_BYTES
        self._left -= cost
        if self._left >= 0 and time.monotonic() < self._measured_s + _MEASURED_S:
            return
        left = self.measure()
        if left < cost:
            self._refuse()
            detail = f"not enough disk space: {max(left, 0) >> 20} MiB are left for messages"
            raise ApiError(errors.STORAGE_FULL, detail, retry_after_s=1, applied=False)
        self._left -= cost

    def measure(self) -> int:
        """Bytes that messages may take now, in log and store together; below zero: too many did."""
        self._measured_s = time.monotonic()
        status = os.statvfs(self._directory)
        free, total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
        try:
            owed = self._store.owed_bytes(_COMPACTION_BYTES_MAX)
        except StoreError:
            owed = 0  # it failed, and messages are refused for that
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
