"""Failures of a node's disk, and how the node recovers from them. Runs on the event loop.

The log and the store may fail, separately or together. Until they work again, the durable groups do
not lead, so nothing is proposed to them; reads continue, and so do streams in memory. A failed log
continues in a new segment. A failed store is opened again, and the log after it is replayed
(`rebuild`); meanwhile the failed store still answers reads. A disk that is still full or broken
is tried again after pauses.

Failures are logged once they are handled: a line that cannot be written must not get in the way.

A node whose folder cannot be written at the start is opened for reading, and recovers the same way.
"""

import asyncio
import os
import secrets
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from contrail_storage.core import key_layout as keys
from contrail_storage.disk.files import Files
from contrail_storage.disk.node_file import begin_boot
from contrail_storage.disk.whole_steps import whole
from contrail_storage.repair.among_others import mark_unusable
from contrail_storage.repair.rebuild import Rebuilt, rebuild
from contrail_storage.repair.swap import STORE_NAME, discard_unfinished
from contrail_storage.replica.loading import applied_indexes
from contrail_storage.store.rocks_store import (
    StoreCorruptError,
    StoreError,
    StoreFailedError,
    StoreLockedError,
    StoreMissingError,
)
from contrail_storage.store.sealed_store import SealedStore
from contrail_storage.wal.node_log import LogRottenError

if TYPE_CHECKING:
    from contrail_storage.node import StorageNode

_FULL: Final = "No space left", "quota exceeded"
_LOG_PAUSE_S: Final = 0.5
_PAUSE_S: Final = 0.5
_PAUSE_MAX_S: Final = 8.0
_SPARE_BYTES: Final = 16 << 20
_PROBE_NAME: Final = "probe"
_PROBE_BYTES: Final = 1 << 16
_log = structlog.get_logger("contrail.healing")


class Healing:
    """Tracks and repairs failures of the disk below one node; used on the event loop only."""

    def __init__(self, node: "StorageNode") -> None:
        self._node = node
        self.log_failure = ""
        """Why the log takes no entries; empty when it does."""
        self.store_failure = ""
        """Why the store has less than what is applied; empty once it is opened again."""
        self.reopened = 0
        """Number of times the store was opened again. Each time, unflushed writes were lost."""
        self.closed = False
        """Whether the node stops; then failures are not repaired."""
        self._pause_s = _PAUSE_S
        self._replayed = False
        """Whether everything that is stored can be read.

        Before that, a failed log ends the start. A failed store is handled later: the log is
        applied all the same, and its effects stay in memory.
        """

    @property
    def disk_full(self) -> bool:
        """Whether writes are refused because the disk is full."""
        failure = self.log_failure or self.store_failure
        return any(text in failure for text in _FULL)

    # The log -------------------------------------------------------------------------------------

    def log_failed(self, error: Exception) -> None:
        """Fail entries that are not durable with an unknown outcome; retry with a new segment."""
        self.log_failure = f"the log failed: {error}"
        self._notify_if_full()
        for group in self._node.groups.values():
            group.handle_log_failure()
        if not self.closed:
            self._node.spawn(self._recover_log())
        _log.error("log_failed", error=str(error))

    async def _recover_log(self) -> None:
        while True:
            try:
                await whole(self._node.log.recover)
            except OSError as error:
                if not self._replayed:
                    # A waiting start serves nothing. The next start opens the folder for reading.
                    self._node.fail(f"the log failed and could not be recovered: {error}")
                    return
                _log.warning("log_recovery_failed", error=str(error))
                await asyncio.sleep(_LOG_PAUSE_S)
            else:
                break
        self.log_failure = ""
        self._take_part()
        _log.info("log_recovered")

    def _notify_if_full(self) -> None:
        if self.disk_full:
            self._node.notify("server_out_of_space")

    def _take_part(self) -> None:
        """Let the groups lead again, once log and store work."""
        if not (self.log_failure or (self.store_failure and self._replayed)):
            for group in self._node.groups.values():
                group.decline(self._node.leadership.leaving)
                group.handle_log_recovered()

    # The store -----------------------------------------------------------------------------------

    def fail_store(self, error: Exception) -> None:
        """Continue without the store after a failed write or flush, and open it again.

        End the node if that would not help: a file of the store is damaged, or there is a defect.
        """
        # The first failure starts the recovery; the others are its consequence.
        if self.store_failure:
            return
        self._note(error)
        if not isinstance(error, (OSError, StoreFailedError)):
            for group in self._node.logged_groups.values():
                group.resign()
            self._node.spawn(self._end(f"the store failed: {error!r}", error))
            return
        self._notify_if_full()
        # Before that, `all_replayed` does it: the rest of the log is applied in memory first.
        if self._replayed:
            self._give_up_store()
        _log.error("store_failed", error=str(error))

    def all_replayed(self) -> bool:
        """Note that the whole log is applied. True if the store failed meanwhile; then heal it."""
        self._replayed = True
        if self.store_failure:
            self._give_up_store()
        return bool(self.store_failure)

    def _give_up_store(self) -> None:
        for group in self._node.logged_groups.values():
            group.decline()
            group.resign()
        self._node.applier.flush()
        if not self.closed:
            self._node.spawn(self.reopen())

    async def _end(self, reason: str, error: Exception) -> None:
        """Fail the node. If other nodes have everything, its next start sets the store aside."""
        node = self._node
        has_all = node.options.cluster is not None and not node.identity.has_unreplicated
        if has_all and isinstance(error, (StoreCorruptError, StoreMissingError)):
            with suppress(OSError):  # then the next start meets the damage as this one has
                await whole(lambda: mark_unusable(node.files, node.options.data_dir, str(error)))
        node.fail(reason)

    def worked(self) -> None:
        """Reset the pause: the store has flushed everything, so the next failure is a new one."""
        self._pause_s = _PAUSE_S

    def _note(self, error: Exception) -> None:
        self.store_failure = f"the store cannot be written: {error}"

    async def reopen(self) -> None:
        """Open the store again, with as many attempts as needed, and continue."""
        while True:
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, _PAUSE_MAX_S)
            try:
                await self._reopen()
            # Damage, or a state that differs from the one that answered requests. Trying again
            # would not help, and going on could serve wrong data.
            except (StoreCorruptError, StoreMissingError, LogRottenError, RuntimeError) as error:
                await self._end(f"the store cannot be reopened: {error}", error)
                return
            except (OSError, StoreError) as error:
                self._note(error)
                _log.warning("store_reopening_failed", error=str(error))
            else:
                break
        self.store_failure = ""
        _log.info("store_reopened")
        # A start that could not write has not replayed its log yet: it begins now.
        if self._node.begun:
            self._take_part()
        else:
            await self._node.begin()

    async def _reopen(self) -> None:
        """Open the store for writing, with everything applied. Raises the errors of `rebuild`."""
        node = self._node
        await whole(self._check_writable)
        if not node.begun:
            await whole(self._begin_log)
        # A job that is on its way must not reach the new store: the log has it already.
        await self._until_lost()
        groups = list(node.logged_groups.values())
        try:
            # Other nodes go on to send entries. Applied while the store is opened, they would be
            # missing in the state that is rebuilt.
            for group in groups:
                group.keep_applied(True)
            await self._open_at(node.applied())
            # Only when the new state is in place: no job of the old one may reach the new store.
            node.writer.go_on()
        finally:
            for group in groups:
                group.keep_applied(False)

    async def _open_at(self, applied: Mapping[int, int]) -> None:
        node = self._node
        # RocksDB's lock allows one open store, so the failed one must be closed first.
        await whole(node.raw_store.suspend)
        try:
            self._take_over(await self._rebuild(applied, writable=True))
        except (OSError, StoreError) as error:
            # The failed store is closed. Opened for reading, it at least answers reads until the
            # next attempt.
            with suppress(OSError, StoreError):  # if this fails too, nothing can be read for now
                self._take_over(await self._rebuild(applied, writable=False))
            raise error

    def _check_writable(self) -> None:
        """Raise OSError when the store could not be written completely anyway. Blocks."""
        folder = self._node.options.data_dir / STORE_NAME
        status = os.statvfs(folder)
        free, needed = status.f_bavail * status.f_frsize, self._node.log.stats.size_bytes
        if free < needed + _SPARE_BYTES:
            try:
                needed = self._unflushed_bytes()
            except (StoreCorruptError, StoreMissingError) as error:
                # The failed store is still open and may have removed a file that was just listed.
                # Real damage shows once the store is opened alone.
                raise StoreFailedError(f"what the store lacks is not known yet: {error}") from error
        if free < needed + _SPARE_BYTES:
            raise OSError(
                f"No space left on device: {free >> 20} MiB are free, but writing the contents "
                f"of the log needs {needed + _SPARE_BYTES >> 20} MiB"
            )
        _probe(folder / _PROBE_NAME)

    def _unflushed_bytes(self) -> int:
        """Size of the log after what the store's files have. Blocks; raises the `rebuild` errors.

        A store that failed after a flush may have much of the log, which no checkpoint has cut.
        """
        node = self._node
        store = node.options.open_store(node.options.data_dir / STORE_NAME)
        try:
            kept = store if node.keyring is None else SealedStore(store, node.keyring)
            flushed = applied_indexes(lambda prefix: kept.scan(prefix, keys.prefix_end(prefix)))
            return node.log.bytes_above(flushed)
        finally:
            store.close()

    async def _until_lost(self) -> None:
        """Wait until no earlier job is on its way to the store."""
        writer = self._node.writer
        self._node.applier.flush()
        writer.failed = True
        queued = writer.submitted
        while writer.settled < queued:
            await self._node.write_noted()

    async def _rebuild(self, applied: Mapping[int, int] | None, *, writable: bool) -> Rebuilt:
        """Run `rebuild` in a thread; when cancelled, make the thread give up and wait for it."""
        node, given_up = self._node, threading.Event()
        without = node.catching_up.suspects
        rebuilding = partial(
            rebuild, node.options, node.keyring, node.log, applied, without=without
        )
        work = asyncio.ensure_future(
            asyncio.to_thread(rebuilding, writable=writable, given_up=given_up.is_set)
        )
        try:
            rebuilt = await asyncio.shield(work)
        except asyncio.CancelledError:
            # The thread would go on reading and writing the folder after the node has released it.
            given_up.set()
            await asyncio.wait([work])
            if work.exception() is None:
                await asyncio.to_thread(work.result().store.close)
            raise
        if applied is not None and applied != node.applied():
            await whole(rebuilt.store.close)
            raise StoreFailedError("entries were applied while the store was being opened")
        return rebuilt

    def _take_over(self, rebuilt: Rebuilt) -> None:
        node = self._node
        try:
            node.applier.take_over(rebuilt.applier, rebuilt.without)
        except BaseException:
            rebuilt.store.close()
            raise
        node.raw_store.take_over(rebuilt.store)
        self.reopened += 1
        if self._replayed:  # before that, no client uses a consumer
            node.consumers.rebound()

    # A start that cannot write -------------------------------------------------------------------

    def try_to_write(self) -> None:
        """Begin to change files: everything stored is known to be sound. Blocks.

        If files cannot be changed, the log stays closed, and the folder's contents can be read.
        """
        node = self._node
        held = bool(node.log.recovery.groups)
        try:
            # The store first: its lock keeps other processes out before the log is changed.
            node.raw_store.begin_writing()
            self._begin_log()
        except (StoreLockedError, StoreMissingError):
            raise
        except (OSError, StoreFailedError) as error:
            if not held:
                raise  # a new folder has nothing to read
            self._note(error)

    def _begin_log(self) -> None:
        node = self._node
        discard_unfinished(node.options.data_dir)
        if node.keyring is not None:
            node.keyring.rotate(node.options.node_keys[0])
        if not node.log.is_open:
            files, folder = node.options.files or Files(), node.options.data_dir
            node.identity = begin_boot(
                files,
                folder,
                node.identity,
                secrets.token_bytes(16),
                has_unreplicated=node.catching_up.has_unreplicated,
            )
            node.log.begin_segment()

    async def start_reading(self) -> dict[int, int]:
        """Show everything in the store and the log, although nothing can be written.

        Returns the last index by group. Raises OSError.
        """
        node = self._node
        _log.error("started_read_only", error=self.store_failure)
        await whole(node.raw_store.suspend)
        try:
            rebuilt = await self._rebuild(None, writable=False)
        except (StoreError, LogRottenError) as error:
            raise OSError(str(error)) from error
        node.meta.take_over(rebuilt.meta)
        node.applier.shards.clear()  # they have the state of the store, which is before the log's
        self._take_over(rebuilt)
        self._replayed = True
        return dict(rebuilt.ends)


def _probe(path: Path) -> None:
    """Write and sync a file at ``path``, and remove it."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, bytes(_PROBE_BYTES))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    finally:
        with suppress(OSError):
            path.unlink()
