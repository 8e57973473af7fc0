"""The storage node: opens log and store, recovers, runs the Raft groups and serves the link.

Two groups of one member share the write-ahead log: the meta group, and the group of all shards that
are on disk. The start opens the store (which locks the data), loads the machines at their applied
indexes, lets the groups replay the rest of the log, and then leads.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final

import structlog

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import Advisory, AdvisoryType
from contrail_storage.catching_up import CatchingUp
from contrail_storage.consumers.manager import ConsumerManager
from contrail_storage.core import key_layout as keys
from contrail_storage.core.key_layout import MEMORY_GROUP, META_GROUP
from contrail_storage.core.meta_machine import MetaMachine
from contrail_storage.disk.files import Files
from contrail_storage.disk.folder_lock import FolderLock
from contrail_storage.disk.node_file import LOG_NAME, NodeIdentity
from contrail_storage.disk.whole_steps import whole
from contrail_storage.healing import Healing
from contrail_storage.key_sharing import KeySharing
from contrail_storage.leadership import Leadership
from contrail_storage.membership import Membership
from contrail_storage.opening import open_node
from contrail_storage.options import NodeOptions
from contrail_storage.parts import disk_budget_of, is_checkpoint_due, upkeep_of
from contrail_storage.readiness import problems_of, unfit_members
from contrail_storage.reading.reader import Reader
from contrail_storage.reading.replay import Replayer
from contrail_storage.repair.swap import drop_kept_aside
from contrail_storage.replica.advisories import AdvisoryHub
from contrail_storage.replica.applier import Applier
from contrail_storage.replica.content_sealing import KeyMakers, SealingLog
from contrail_storage.replica.groups import Groups
from contrail_storage.replica.loading import load_applied, load_node, reload_shard, stored_shards
from contrail_storage.replica.log_time import LogTime
from contrail_storage.replica.memory_group import MemoryGroup, NotLeadingError
from contrail_storage.replica.raft_port import Group, GroupFactory
from contrail_storage.replica.shard import Shard
from contrail_storage.replica.shard_logs import ShardLogs
from contrail_storage.replica.store_writer import Job, StoreWriter
from contrail_storage.seal.keyring import Keyring
from contrail_storage.seal.subject_keys import SubjectKeys
from contrail_storage.store.block_store import BlockStore
from contrail_storage.store.rocks_store import (
    RocksStore,
    StoreError,
    StoreFailedError,
    StoreStalledError,
)
from contrail_storage.store.sealed_store import SealedStore, Store
from contrail_storage.store.split_store import SplitStore
from contrail_storage.streams.manager import StreamManager
from contrail_storage.streams.memory_budget import MemoryBudget
from contrail_storage.streams.restore import Restores
from contrail_storage.streams.snapshot import Snapshotter
from contrail_storage.upkeep.checkpointer import Checkpointer, DataLostError, when_due
from contrail_storage.upkeep.shredder import Shredder, stop_without_keys
from contrail_storage.wal.node_log import LogRottenError, NodeLog

__all__ = ["NodeOptions", "StorageNode"]

_TICK_S: Final = 0.025
_TICK_ALONE_S: Final = 0.05
_STOP_GRACE_S: Final = 10.0
_log = structlog.get_logger("contrail.node")


class StorageNode:
    """One storage node, on the event loop. :meth:`open` builds it, :meth:`start` starts it."""

    def __init__(
        self,
        options: NodeOptions,
        identity: NodeIdentity,
        store: Store,
        groups: GroupFactory,
        keyring: Keyring | None = None,
    ) -> None:
        self.identity = identity
        self.publish_timeout_s = options.publish_timeout_s
        self.keyring = keyring
        self.options = options
        self.files = options.files or Files()
        """Blocking: used in threads, or before the start."""
        self._disk = store  # the store in the folder; `_store` adds the shards in memory
        self.memory = MemoryBudget(options.memory_max_bytes)
        self._store = SplitStore(store, self.memory.store)  # written by the writer's thread too
        self.meta = MetaMachine()
        self.blocks = BlockStore(self._store, options.cache_max_bytes, options.page_blocks)
        self.writer = StoreWriter(
            self._store,
            StoreStalledError,
            self._soon(self._written),
            self._soon(self._store_failed),
            lambda shard_id: self.applier.codec_of(shard_id),  # noqa: PLW0108 - made below
            self._soon(self._lost),
        )
        self.advisories = AdvisoryHub()
        self.applier = Applier(
            self.meta,
            self.blocks,
            self.writer,
            self._write_noted,
            self.advisories,
            options.merge_blocks,
        )
        self.applier.on_stopped = lambda shard: self.spawn(
            reload_shard(shard, self.applier, self.blocks, self._scan, self.until_written)
        )
        self.membership = Membership(self, groups, options.cluster)
        self.applier.on_cluster = self.membership.join_soon
        self.subject_keys = SubjectKeys(self.files, options.data_dir, keyring)
        self.key_sharing = KeySharing(self, options.cluster)
        self.reader = Reader(self.blocks, self.key_sharing.opener)
        self.reader.windows.keep = self.applier.keep_window
        self.replayer = Replayer(self.blocks, self.reader)
        self.snapshotter = Snapshotter(self._store, self.key_sharing.opener)
        self.log: NodeLog
        self.lock: FolderLock | None = None
        """The lock of the folder, held until the node is closed."""
        self.groups = Groups(
            self.membership.node_id,
            self.applier,
            self.log_time_ns,
            self.membership.role_changed,
            self.fail,
        )
        self.applier.tells = self.groups.tells
        self.catching_up = CatchingUp(self, options.cluster)
        self.healing = Healing(self)
        self.begun = self._ended = False
        """Whether the log accepts entries (not yet if the start could not write); `close` ran."""
        self._defect = ""  # why the node has failed for good; empty when it has not
        self.fatal: asyncio.Future[str]
        self._tasks: set[asyncio.Task[None]] = set()  # cancelled by `_end`
        self._loop: asyncio.AbstractEventLoop  # set by `_start`; the writer's thread calls it
        self._ready = False
        """Whether writes are accepted, apart from failures; not before the node has led."""
        self._starting: asyncio.Task[None] | None = None  # runs `start`
        self._write_seen = asyncio.Event()  # set when jobs are written, lost or fail

    # Opening -------------------------------------------------------------------------------------

    @classmethod
    def open(cls, options: NodeOptions, groups: GroupFactory) -> "StorageNode":
        """Open and recover the data. Blocks. DataLostError and OSError explain what is wrong."""
        return open_node(
            options,
            lambda identity, store, keyring: cls(options, identity, store, groups, keyring),
        )

    @property
    def parts(self) -> tuple[Store, Keyring | None]:
        """The store on the disk, and the keyring of an encrypted folder (None: not encrypted)."""
        return self._disk, self.keyring

    def recover(self, files: Files) -> None:
        """Load the contents of the folder without changing it. Blocks; raises as `open_node`."""
        applied = load_applied(self._scan, self.applier)
        self.log = NodeLog.open(
            self.options.data_dir / LOG_NAME,
            files=files,
            options=self.options.log,
            keep_from=self.applier.written_indexes,
            sealer=self.keyring,
            begin=False,
        )
        suspect, is_replicated = self.catching_up.prepare(applied), self.catching_up.is_replicated
        damaged = load_node(
            self._store.scan, self.meta, self.applier, self.blocks, suspect, is_replicated
        )
        # Flushes the store and removes log segments.
        self._checkpointer = Checkpointer(self._disk, files, self.options.data_dir)
        if self.log.recovery.rot is not None:
            rot = self.log.recovery.rot
            raise DataLostError(f"the write-ahead log is damaged: {rot}", store_is_whole=True)
        without = suspect | damaged
        damaged |= self._checkpointer.verify(
            self.log, self.applier.written_indexes, self._shards(), without, is_replicated
        )
        self.catching_up.add_damaged(damaged)
        self.subject_keys.load()
        self.key_sharing.load()
        stop_without_keys(self.subject_keys, self.applier.shards.values(), is_replicated)

    def _shards(self) -> dict[int, Shard]:
        return stored_shards(self.applier)

    def _scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        return self._store.scan(prefix, keys.prefix_end(prefix))

    # Running -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start threads and groups, then `begin`; later if nothing can be written yet.

        Raises OSError. If it fails or is cancelled, the node is closed completely.
        """
        if self._ended:
            raise OSError("the node was stopped before it started")
        self._starting = asyncio.current_task()
        try:
            await self._start()
        except BaseException:
            await self._end(flushed=False)
            raise
        finally:
            self._starting = None

    async def _start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.fatal = self._loop.create_future()
        self.writer.start()
        ends: Mapping[int, int] = self.applier.written_indexes
        if not self.log.is_open:
            ends = await self.healing.start_reading()
        self.clock = LogTime(
            self.membership.last_entry_ns(),
            self.files,
            self.options.data_dir,
            self.options.clock_jump_max_ns,
            self.membership.clocks,
            self.membership.vouches_for_clock,
        )
        self.disk_budget = disk_budget_of(self)
        self.meta_log, self.shard_log = self.membership.join_first(ends)
        self._memory_group, self.memory_log = self.groups.join(
            MEMORY_GROUP, MemoryGroup, (NotLeadingError,)
        )
        spread = self.membership.spread
        self.leadership = Leadership(self.groups, self.membership.members_of, spread.lacks_copies)
        self.membership.join()
        self.memory.guard(self.memory_log, self._memory_group, self.applier)
        shards, keys = self.applier.shards, self.subject_keys
        makers = KeyMakers(keys, self.key_sharing.keys, self.key_sharing.make)
        sealing = SealingLog(self.groups.proposers, makers, shards)
        self.shard_logs = ShardLogs(self.groups, self.meta, sealing, shards, spread)
        self.streams = StreamManager(
            self.options.name,
            self.meta,
            shards,
            self.meta_log,
            self.shard_logs,
            self.reader,
            self.check_serving,
            encrypts=self.keyring is not None,
        )
        self.restores = Restores(self.streams, self.shard_logs, makers)
        self.consumers = ConsumerManager(
            self.streams, self.shard_logs, self.reader, self.applier.changes
        )
        self.shredder = Shredder(
            keys,
            self.key_sharing,
            self.groups,
            self.streams,
            shards,
            self.shard_logs,
            self.snapshotter,
            self.reader,
        )
        self._upkeep = upkeep = upkeep_of(self, self._store)  # run while the node leads
        self.scrubber, self.compactor, self.eraser, self._housekeeper = upkeep[:4]
        if self.log.is_open:
            await self.begin()
        else:
            self.spawn(self.healing.reopen())

    async def begin(self) -> None:
        """Replay the log and lead; lead later if the store fails meanwhile. Raises OSError."""
        self.begun = True
        self.log.start(call_soon=self._loop.call_soon_threadsafe, on_failure=self._log_failed)
        self.catching_up.begin()
        for group in self.groups.values():
            group.start()
        self.spawn(self._tick_groups())
        self.spawn(self.key_sharing.run())
        await self._replay()
        self.spawn(self.membership.tell_start())
        knows_meta = self.catching_up.meta_known.is_set()
        if self.healing.store_failure or self.membership.is_catching_up or not knows_meta:
            self.spawn(self._lead())
        else:
            await self._lead()

    async def _lead(self) -> None:
        """Wait until this node leads, finish half-made streams, and then accept writes."""
        await self.membership.leading.wait()
        await self.catching_up.meta_known.wait()
        self.clock.begin_term(self.membership.last_entry_ns())
        await self.clock.keep()
        self.spawn(self.clock.follow())
        self.spawn(self.groups.follow_clocks())
        await self.membership.until_caught_up()
        self._begin_in_memory()
        await self.membership.reconcile()
        await self.shredder.reconcile()
        for work in (*self._upkeep, self.shredder):
            self.spawn(work.run())
        self.spawn(self.membership.keep_reconciling())
        self.spawn(self.leadership.keep_balanced())
        self.spawn(when_due(lambda: is_checkpoint_due(self), self.checkpoint))
        self._ready = True

    async def _replay(self) -> None:
        """Drive the groups without a pause until they lead and the log is replayed."""
        leading = asyncio.ensure_future(self.membership.leading.wait())
        either: set[asyncio.Future[Any]] = {leading, self.fatal}
        try:
            while not leading.done():
                for group in self.groups.values():
                    group.tick()
                await asyncio.wait(either, timeout=0.001, return_when=asyncio.FIRST_COMPLETED)
                if self.fatal.done():
                    raise OSError(f"the log cannot be replayed: {self.failure}")
        finally:
            leading.cancel()
        if self.healing.all_replayed():
            self.membership.leading.clear()

    def _begin_in_memory(self) -> None:
        """Lead the shards in memory. The indexes identify this start: each start raises one."""
        groups = META_GROUP, self.membership.own_group
        self._memory_group.begin(sum(self.groups[number].applied_index for number in groups))
        self.applier.written_indexes[MEMORY_GROUP] = self._memory_group.applied_index

    def log_time_ns(self) -> int:
        """Log time of the node's own groups, in nanoseconds."""
        return self.clock.now()

    def rotate_keys(self, node_keys: tuple[bytes, ...]) -> bool:
        """Change to the first of ``node_keys``; False when it is in use already. Blocks.

        After an OSError the old key stays in use, but a restart may need either of the two keys.
        """
        if self.keyring is None:
            raise ValueError("the node does not encrypt stored data")
        return self.keyring.rotate(node_keys[0])

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        """Run ``work`` until the node stops. If it raises, the node fails."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.fail(f"a background task ended: {task.exception()!r}")

    async def _tick_groups(self) -> None:
        while True:
            alone = all(group.is_alone for group in self.groups.values())
            period = _TICK_ALONE_S if alone else _TICK_S
            # At multiples of the period, as the heartbeats are, so that none of them waits.
            rest = period - self._loop.time() % period
            await asyncio.sleep(rest if rest > period / 2 else rest + period)
            for group in self.groups.values():
                group.tick()

    async def checkpoint(self) -> None:
        """Flush the store, so that the log before it can be removed. OSError or StoreError."""
        self.applier.store_pages()
        arguments = self.log, self._shards, self.applied, self._until_written
        with self._heeding_the_store():
            await self._checkpointer.run(*arguments)

    async def cut_log(self) -> None:
        """Flush the store, and remove the whole current log and the files that were kept aside."""
        await whole(lambda: drop_kept_aside(self.options.data_dir))
        arguments = self.log, self._shards, self.applied, self._until_written
        with self._heeding_the_store():
            await self._checkpointer.cut(*arguments)

    @contextmanager
    def _heeding_the_store(self) -> Iterator[None]:
        """Around a flush of the store: note that it failed, or that everything was written."""
        try:
            yield
        except StoreFailedError as error:
            self._store_failed(error)
            raise
        self.healing.worked()

    def applied(self) -> dict[int, int]:
        """Applied indexes of the groups in the log."""
        return self._applied_of(self.logged_groups)

    def _applied_of(self, groups: Mapping[int, Group]) -> dict[int, int]:
        # What a suspect group had applied last may never have reached the store.
        written, is_suspect = self.applier.written_indexes, self.catching_up.is_suspect
        return {
            number: written.get(number, 0) if is_suspect(number) else group.applied_index
            for number, group in groups.items()
        }

    async def until_written(self) -> None:
        """Wait until the store has everything that is applied now (ApiError when it fails)."""
        try:
            await self._until_written(self._applied_of(self.groups))
        except StoreFailedError as error:
            raise ApiError(errors.STORAGE_FAILED, str(error), retry_after_s=1) from error

    async def write_noted(self) -> None:
        """Wait until jobs are written or lost."""
        self._write_seen.clear()
        await self._write_seen.wait()

    async def _until_written(self, indexes: Mapping[int, int]) -> None:
        self.applier.flush()
        written = self.applier.written_indexes
        while any(
            written.get(group, 0) < index and not self.catching_up.is_suspect(group)
            for group, index in indexes.items()
        ):
            if self.healing.store_failure:
                raise StoreFailedError(self.failure)
            await self.write_noted()

    async def leave(self) -> None:
        """Prepare to stop: not ready any more, and groups that other nodes can lead are theirs."""
        await self.leadership.leave()

    async def stop(self) -> None:
        """Stop cleanly: groups, log, writer. Flush, so that the next start has little to replay.

        Accepted requests are applied first, within a grace time: no caller waits for publishes
        without an ack, for acks, or for the records of deliveries. It may be called at any time
        and repeatedly. A start in progress is cancelled.
        """
        if self._starting is not None:
            if not self._starting.cancelling():  # a second cancel would interrupt its cleaning up
                self._starting.cancel()
            await asyncio.wait([self._starting])
        elif self._ended or not self.groups:  # never started, or ended already
            await asyncio.to_thread(self.close)
        else:
            self._ready = False
            self.consumers.flush()
            self.restores.close()
            await self._until_applied()
            await self._end(flushed=True)

    async def _end(self, *, flushed: bool) -> None:
        """Stop everything that runs, and close everything that is open."""
        self.healing.closed = True
        self.membership.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if flushed:
            self.groups.close()
            await self._until_applied()
        for group in self.groups.values():
            group.stop()
        await asyncio.to_thread(self.log.close)
        self.applier.flush()
        await asyncio.to_thread(self.writer.stop)
        await asyncio.sleep(0)
        if flushed:
            await self._flush_last()
        await asyncio.to_thread(self.close)

    async def _flush_last(self) -> None:
        unflushed = self.failure
        if not unflushed:
            try:
                await self.checkpoint()
                await self.clock.keep()
            except (OSError, StoreError, LogRottenError) as error:
                unflushed = str(error)
        if unflushed:  # acknowledged messages are durable in the log
            _log.warning("stopped_without_flush", reason=unflushed)

    def close(self) -> None:
        """Release the folder and close what is open in it; nothing may run any more. Blocks."""
        self._ended = True
        if self.keyring is not None:
            self.keyring.close()
        self.subject_keys.close()
        self.key_sharing.keys.close()
        self.log.close()
        with suppress(StoreError):
            self._disk.close()
        if self.lock is not None:
            self.lock.release()

    async def _until_applied(self) -> None:
        """Wait until nothing is queued or on its way to the log; at most for the grace time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_STOP_GRACE_S):
                while not self.failure and self.groups.busy:
                    await self.write_noted()

    # Failures ------------------------------------------------------------------------------------

    def _soon(self, callback: Callable[[Any], None]) -> Callable[[Any], None]:
        def soon(argument: Any) -> None:
            self._loop.call_soon_threadsafe(callback, argument)

        return soon

    def _written(self, jobs: list[Job]) -> None:
        self.writer.settle(len(jobs))
        self.applier.written(jobs)

    def _lost(self, jobs: list[Job]) -> None:
        self.writer.settle(len(jobs))
        self.applier.lost(jobs)

    def _write_noted(self) -> None:
        self._write_seen.set()
        self.groups.resume()

    def _store_failed(self, error: Exception) -> None:
        self._write_seen.set()
        self.healing.fail_store(error)

    def fail(self, reason: str) -> None:
        """Fail-stop: refuse all requests, and ask the owner to end the process."""
        self._defect = self._defect or reason
        self._ready, self.groups.failed = False, True
        self._write_seen.set()
        if not self.fatal.done():
            self.fatal.set_result(reason)
            # Fail pending proposals with an unknown outcome.
            self._loop.call_soon(self._resign)

    def _resign(self) -> None:
        for group in self.groups.values():
            group.resign()
        self.memory_log.fail_all()

    def _log_failed(self, error: Exception) -> None:
        self.healing.log_failed(error)
        self._write_seen.set()

    def notify(self, kind: AdvisoryType, group: int | None = None, reason: str = "") -> None:
        """Report an event of the node, or of a group."""
        name = self.options.name
        advisory = Advisory(type=kind, server=name, group=group, reason=reason)
        self.advisories.notify([advisory], self.log_time_ns())

    @property
    def failure(self) -> str:
        """Why no writes are accepted; empty when they are."""
        return self._defect or self.healing.log_failure or self.healing.store_failure

    @property
    def raw_store(self) -> RocksStore:
        """The store on the disk, below the layer that seals its values."""
        return self._disk.below if isinstance(self._disk, SealedStore) else self._disk

    @property
    def logged_groups(self) -> dict[int, Group]:
        """The groups whose entries are in the log."""
        return {n: group for n, group in self.groups.items() if not keys.is_in_memory(n)}

    def check_serving(self, *, in_memory: bool = False, is_replicated: bool = False) -> None:
        """Raise ApiError while writes are refused. Shards in memory (``in_memory``) need no log.

        Replicated shards do not depend on the clock of this node.
        """
        healing = self.healing
        failure = self._defect or healing.log_failure or healing.store_failure
        unready = not self._ready or (self.clock.doubt and not is_replicated)
        if unready or (failure and not (in_memory and not self.fatal.done())):
            spec = errors.STORAGE_FULL if healing.disk_full else errors.STORAGE_FAILED
            if not failure:
                spec = errors.NOT_READY
            raise ApiError(spec, failure or self.clock.doubt, retry_after_s=1, applied=False)

    def readiness(self, *, strict: bool = False) -> dict[str, str]:
        """The reasons why parts are not ready, by part; empty when all are.

        After a start the node is not ready until it has caught up in all groups: before that,
        stopping another node could leave a group without a majority. Later, being behind counts
        only if ``strict``.
        """
        groups, shards = self.groups.values(), self.applier.shards.values()
        if self.leadership.leaving:
            return {"storage": "stopping"}
        clock = {"clock": self.clock.doubt} if self.clock.doubt else {}
        logs = self.groups.proposers.values()
        problems = clock | problems_of(self.failure, groups, shards, logs, serves=self._ready)
        unfit = unfit_members(self.groups) | self.membership.problems | self.key_sharing.problems
        if unfit and self.catching_up.mended:
            unfit["folder"] = self.catching_up.mended
        self.leadership.caught_up |= self._ready and not unfit
        return problems if self.leadership.caught_up and not strict else unfit | problems
