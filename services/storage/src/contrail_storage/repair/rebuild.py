"""Opens a store again and rebuilds all state from it and from the log, as a start does.

A failed store has lost the changes that it did not flush. The log still has them, because a
checkpoint removes segments only after a flush. So machines and blocks are loaded from the rows, and
the log is applied up to the indexes of the node. All of this runs beside the running node.
"""

import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from contrail_common.columns.blocks import BlockCodec
from contrail_storage.core import key_layout as keys
from contrail_storage.core.meta_machine import MetaMachine
from contrail_storage.options import NodeOptions
from contrail_storage.repair.swap import STORE_NAME
from contrail_storage.replica.advisories import AdvisoryHub
from contrail_storage.replica.applier import Applier
from contrail_storage.replica.loading import load_applied, load_node
from contrail_storage.replica.store_writer import Job, StoreWriter
from contrail_storage.replica.write_behind import ReplayBehind
from contrail_storage.seal.keyring import Keyring
from contrail_storage.store.block_store import BlockStore
from contrail_storage.store.rocks_store import (
    RocksStore,
    StoreClosedError,
    StoreFailedError,
    StoreStalledError,
)
from contrail_storage.store.sealed_store import SealedStore, Store
from contrail_storage.wal.node_log import NodeLog

_UNWRITTEN_BYTES_MAX: Final = 32 << 20
_WAIT_S: Final = 60.0
_LOOK_S: Final = 0.1


@dataclass(slots=True, frozen=True)
class Rebuilt:
    """An open store, and the state from it and the log."""

    store: RocksStore
    meta: MetaMachine
    applier: Applier
    ends: Mapping[int, int]
    """By group: the last entry that was applied."""
    without: frozenset[int]
    """The groups whose shards are left out."""


def rebuild(
    options: NodeOptions,
    keyring: Keyring | None,
    log: NodeLog,
    applied: Mapping[int, int] | None,
    *,
    without: frozenset[int],
    writable: bool,
    given_up: Callable[[], bool],
) -> Rebuilt:
    """Open the store, load it, and apply the log up to the indexes ``applied`` (None: all of it).

    Shards of the groups ``without`` are left out.

    If not ``writable``, the store is opened for reading, and later state stays in memory. Blocks;
    ``given_up`` is called from this thread and says that nobody waits any longer. Raises OSError,
    StoreError (also when given up), or LogRottenError; then nothing is open.
    """
    store = options.open_store(options.data_dir / STORE_NAME)
    try:
        if writable:
            store.begin_writing()
        kept = store if keyring is None else SealedStore(store, keyring)
        work = _Rebuilding(kept, options, given_up, writable=writable)
        try:
            ends = work.run(log, applied, without)
        finally:
            work.stop()
    except BaseException:
        store.close()
        raise
    return Rebuilt(store, work.meta, work.applier, ends, without)


class _Rebuilding:
    """Machines and blocks over one store. Used by one thread; the writer's reports to it.

    ``_reports`` passes reports from the writer's thread to the thread that uses this object.
    """

    def __init__(
        self, store: Store, options: NodeOptions, given_up: Callable[[], bool], *, writable: bool
    ) -> None:
        self.meta = MetaMachine()
        self._store = store
        self._writable = writable
        self._given_up = given_up
        self._blocks = BlockStore(store, page_blocks=options.page_blocks)
        self._reports: queue.SimpleQueue[list[Job] | Exception] = queue.SimpleQueue()
        self._writer = StoreWriter(
            store if writable else _Nowhere(),
            StoreStalledError,
            self._reports.put,
            self._reports.put,
            self._codec_of,
        )
        self.applier = Applier(
            self.meta,
            self._blocks,
            self._writer,
            lambda: None,
            AdvisoryHub(),
            options.merge_blocks,
            sink=ReplayBehind(self._writer, self._blocks, self._written),
        )
        self._writer.start()

    def run(
        self, log: NodeLog, applied: Mapping[int, int] | None, without: frozenset[int]
    ) -> dict[int, int]:
        # The rows are the state at the indexes of the store, and the log continues from there.
        load_applied(lambda kind: self._store.scan(kind, keys.prefix_end(kind)), self.applier)
        load_node(self._store.scan, self.meta, self.applier, self._blocks, without)
        ends = dict(self.applier.written_indexes)
        for group, held in sorted(log.read_back(ends).items()):
            if group in without:
                continue
            for data, index, term in held.entries:
                # Entries after the node's index are not committed, or not applied yet. They reach
                # the machines through the group.
                if applied is not None and index > applied[group]:
                    break
                self._check_wanted()
                self.applier.apply(group, index, term, data, None)
                ends[group] = index
                # Unwritten blocks are in memory: a log of any length must not fill it.
                self._take_reports(_UNWRITTEN_BYTES_MAX)
        self.applier.flush()
        self._take_reports(0)
        return ends

    def stop(self) -> None:
        """End the writer's thread."""
        self._writer.stop()

    def _take_reports(self, left_bytes: int) -> None:
        """Handle reports of the writer until at most ``left_bytes`` are unwritten."""
        writer = self._writer
        while not self._reports.empty() or (
            writer.submitted != writer.settled
            and (not left_bytes or self.applier.unwritten_bytes > left_bytes)
        ):
            report = self._next_report()
            if isinstance(report, Exception):
                raise report
            writer.settle(len(report))
            self._written(report)

    def _next_report(self) -> list[Job] | Exception:
        deadline = time.monotonic() + _WAIT_S
        # In short waits, because a node that stops waits for this thread.
        while time.monotonic() < deadline:
            self._check_wanted()
            with suppress(queue.Empty):
                return self._reports.get(timeout=_LOOK_S)
        raise StoreFailedError("the store is not accepting writes")

    def _check_wanted(self) -> None:
        if self._given_up():
            raise StoreClosedError("nobody waits for the store any more")

    def _written(self, jobs: list[Job]) -> None:
        if self._writable:
            self.applier.written(jobs)  # otherwise their blocks must stay in memory

    def _codec_of(self, shard_id: int) -> BlockCodec | None:
        return self.applier.codec_of(shard_id)


class _Nowhere:
    """Replaces a store that cannot be written."""

    def scan(self, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield nothing: no page of a directory is made meanwhile."""
        yield from ()

    def write(self, operations: Sequence[object]) -> None:
        """Drop the operations: the log has them."""
