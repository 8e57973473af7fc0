"""Load the stored state: applied indexes, names of streams, their machines and blocks."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

import structlog

from contrail_common.errors import ApiError
from contrail_storage.core import key_layout as keys
from contrail_storage.core.chain import Chain, decode_applied
from contrail_storage.core.commands import META_SHARD
from contrail_storage.core.meta_machine import MetaMachine
from contrail_storage.core.stream.stream_machine import StreamMachine
from contrail_storage.replica.applier import Applier
from contrail_storage.replica.shard import Shard
from contrail_storage.store.block_store import BlockStore
from contrail_storage.store.shard_facts import ShardFacts
from contrail_storage.store.store_errors import StoreCorruptError, StoreError

_log = structlog.get_logger("contrail.node")

_PASSED_MAX: Final = 64
"""Rows that are read to get to later ones. A new scan costs as much as reading about 30 rows."""

Row = tuple[bytes, bytes]
"""Key and value."""

Scan = Callable[[bytes], Iterable[Row]]
"""Yields all rows of a store under a key prefix, in key order."""

ScanRange = Callable[[bytes, bytes], Iterator[Row]]
"""Yields the rows of a store from one key up to, but not including, another; in key order."""


class RowsInOrder:
    """A `Scan` for prefixes that ascend within each kind of row; it scans the store once a kind.

    With a scan for each shard and kind, scans would take most of the time of a start. A call ends
    the iteration of an earlier one of the same kind.
    """

    def __init__(self, scan: ScanRange) -> None:
        self._scan = scan
        self._kinds: dict[bytes, _Kind] = {}

    def __call__(self, prefix: bytes) -> Iterable[Row]:
        """The rows under ``prefix``, which is above the earlier ones of its kind."""
        kind = self._kinds.get(prefix[:1])
        if kind is None:
            kind = self._kinds[prefix[:1]] = _Kind(self._scan, prefix)
        # Most kinds have no row of most shards.
        return kind.under(prefix) if kind.reach(prefix).startswith(prefix) else ()


class _Kind:
    """The rows of one kind, read once and in order."""

    def __init__(self, scan: ScanRange, start: bytes) -> None:
        self._scan = scan
        self._stop = keys.prefix_end(start[:1])
        self._begin(start)

    def _begin(self, start: bytes) -> None:
        self._rows = self._scan(start, self._stop)
        # The first row that nobody has read, or the end.
        self._next = next(self._rows, self._end)

    @property
    def _end(self) -> Row:
        return self._stop, b""

    def reach(self, key: bytes) -> bytes:
        """Pass the rows below ``key``, which nobody asked for; return the key of the next row."""
        passed = 0
        while self._next[0] < key and passed < _PASSED_MAX:
            self._next = next(self._rows, self._end)
            passed += 1
        if self._next[0] < key:
            self._begin(key)
        return self._next[0]

    def under(self, prefix: bytes) -> Iterator[Row]:
        """Yield the rows from the next one on while their keys begin with ``prefix``."""
        while (row := self._next)[0].startswith(prefix):
            self._next = next(self._rows, self._end)
            yield row


def load_applied(scan: Scan, applier: Applier) -> dict[int, bytes]:
    """Load how far each group is applied, and return the rows; the log is read from there on."""
    rows = {keys.last_number(key, 4): row for key, row in scan(keys.APPLIED)}
    for group, row in rows.items():
        applier.written_indexes[group], applier.chains[group] = decode_applied(row)
    return rows


def load_node(
    scan: ScanRange,
    meta: MetaMachine,
    applier: Applier,
    blocks: BlockStore,
    without: frozenset[int] = frozenset(),
    is_replicated: Callable[[int], bool] = lambda group: False,
) -> frozenset[int]:
    """Load the machines of a node, but not the shards of the groups ``without``.

    Returns the replicated groups that cannot be read. They are not loaded, since others have them.
    """
    rows = RowsInOrder(scan)
    unreadable: set[int] = set()
    with _noting(keys.META_GROUP, is_replicated, unreadable):
        load_meta(rows, meta)
    if unreadable:
        meta.take_over(MetaMachine())
        rows = RowsInOrder(scan)
    groups = {
        keys.last_number(key, 4): int.from_bytes(value, "big") for key, value in rows(keys.GROUP)
    }
    # Earlier versions stored no row of the group.
    for entry in meta.streams.values():
        groups.update({one: meta.group_of(one) for one in entry.shard_ids if one not in groups})
    for shard_id, group in sorted(groups.items()):
        if keys.is_in_memory(shard_id) or group in without or group in unreadable:
            continue
        with _noting(group, is_replicated, unreadable):
            shard = load_shard(rows, shard_id, blocks)
        if group in unreadable:
            rows = RowsInOrder(scan)  # of the other one, a scan has ended
            continue
        shard.group = group
        if not holds_anything(shard, blocks):
            # As in a running node, the first command in the log will make the shard.
            blocks.forget(shard_id)
            continue
        applier.shards[shard_id] = shard
        applier.changes.note_all(shard_id)

    for shard_id in [one for one, group in groups.items() if group in unreadable]:
        applier.shards.pop(shard_id, None)
        blocks.forget(shard_id)
    return frozenset(unreadable)


@contextmanager
def _noting(
    group: int, is_replicated: Callable[[int], bool], unreadable: set[int]
) -> Iterator[None]:
    """Note damage of a replicated group, which does not stop the others."""
    try:
        yield
    except StoreCorruptError as error:
        if not is_replicated(group):
            raise
        _log.error("replica_damaged", group=group, reason=str(error))
        unreadable.add(group)


def holds_anything(shard: Shard, blocks: BlockStore) -> bool:
    """Whether a shard has stored anything; names are reserved earlier and released later."""
    machine = shard.machine
    return shard.stopped or machine.holds_anything() or len(blocks.directory(machine.shard_id)) > 0


def applied_rows(scan: Scan) -> dict[int, tuple[int, Chain]]:
    """By group: the applied index of the store, and what is known of the entries up to it."""
    return {keys.last_number(key, 4): decode_applied(row) for key, row in scan(keys.APPLIED)}


def skipped_of(shard_id: int, scan: Scan) -> int:
    """The sum of the jumps of log time in the group of a shard, in nanoseconds."""
    for _, row in scan(keys.shard_key(keys.GROUP, shard_id)):
        known = applied_rows(scan).get(int.from_bytes(row, "big"))
        return 0 if known is None else known[1].skipped_ns
    return 0  # in memory, or of release 0.2: a group of one, whose time never jumps


def applied_indexes(scan: Scan) -> dict[int, int]:
    """By group: the applied index of the store."""
    return {group: index for group, (index, _) in applied_rows(scan).items()}


def load_meta(scan: Scan, meta: MetaMachine) -> None:
    """Load the names of streams, receipts, and the groups and nodes of the cluster."""
    meta.load(scan(keys.shard_key(keys.STREAM, META_SHARD)))
    meta.erasures.load(scan(keys.shard_key(keys.ERASURE, META_SHARD)))
    meta.group_table.load(scan(keys.shard_key(keys.MEMBERS, META_SHARD)))
    meta.node_table.load(scan(keys.shard_key(keys.NODE, META_SHARD)))


def load_shard(scan: Scan, shard_id: int, blocks: BlockStore) -> Shard:
    """Load a shard from its rows."""
    machine = StreamMachine.load(shard_id, ShardFacts(blocks, shard_id), scan)
    pages = scan(keys.shard_key(keys.BLOCK_PAGE, shard_id))
    blocks.load_directory(shard_id, pages, scan(keys.shard_key(keys.BLOCK_INDEX, shard_id)))
    # A shard without a stream has a part of a restore that a crash interrupted. The log has more.
    applied_seq = max(blocks.directory(shard_id).end_seq - 1, machine.counters.last_seq)
    shard = Shard(machine, applied_seq)
    for _, reason in scan(keys.shard_key(keys.STOPPED, shard_id)):
        shard.damaged, shard.stopped = reason.decode(), True
        _log.critical("shard_loaded_stopped", shard=shard_id, reason=shard.damaged)
    return shard


async def reload_shard(
    shard: Shard,
    applier: Applier,
    blocks: BlockStore,
    scan: Scan,
    until_written: Callable[[], Awaitable[None]],
) -> None:
    """Reload a stopped shard from the store, because its state may be partly changed.

    If that cannot be read either, the shard keeps its state, and nobody can read it.
    """
    with suppress(ApiError):  # the store has failed, and is opened again with all shards
        await until_written()
    shard_id = shard.machine.shard_id
    try:
        machine = await asyncio.to_thread(
            StreamMachine.load, shard_id, ShardFacts(blocks, shard_id), scan
        )
    except StoreError as error:
        _log.critical("shard_not_reloaded", shard=shard_id, reason=str(error))
        return
    if shard.stopped and shard.machine.exists:  # otherwise the stream has been removed
        shard.machine = machine
        shard.applied_seq = machine.counters.last_seq
        applier.changes.note_all(shard_id)


def stored_shards(applier: Applier) -> dict[int, Shard]:
    """The shards on disk, except stopped ones."""
    shards = applier.shards.items()
    return {number: one for number, one in shards if not (one.in_memory or one.stopped)}
