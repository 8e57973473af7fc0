"""Load the stored state: applied indexes, names of streams, their machines and blocks."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

import structlog

from contrail_common.errors import ApiError
from contrail_storage.core import key_layout as keys
from contrail_storage.core.commands import META_SHARD
from contrail_storage.core.meta_machine import MetaMachine
from contrail_storage.core.stream.stream_machine import StreamMachine
from contrail_storage.replica.applier import Applier
from contrail_storage.replica.shard import Shard
from contrail_storage.store.block_store import BlockStore, ShardFacts
from contrail_storage.store.store_errors import StoreError

_log = structlog.get_logger("contrail.node")

Scan = Callable[[bytes], Iterable[tuple[bytes, bytes]]]
"""Yields all (key, value) of a store under a key prefix, in key order."""


def load_node(scan: Scan, meta: MetaMachine, applier: Applier, blocks: BlockStore) -> None:
    """Load everything that a node has stored."""
    # First: the log is read from these indexes on.
    applier.written_indexes.update(applied_indexes(scan))
    load_meta(scan, meta)
    for entry in meta.streams.values():
        if not keys.is_in_memory(entry.shard_id):
            for shard_id in entry.shard_ids:
                shard = load_shard(scan, shard_id, blocks)
                if not _holds_anything(shard, blocks):
                    # As in a running node, the first command in the log will make the shard.
                    blocks.forget(shard_id)
                    continue
                applier.shards[shard_id] = shard
                applier.changes.note_all(shard_id)
                if shard.machine.exists:
                    last_ns = shard.machine.counters.last_time_ns
                    applier.last_entry_ns = max(applier.last_entry_ns, last_ns)


def _holds_anything(shard: Shard, blocks: BlockStore) -> bool:
    """Whether a shard has stored anything; names are reserved earlier and released later."""
    machine = shard.machine
    return shard.stopped or machine.holds_anything() or len(blocks.directory(machine.shard_id)) > 0


def applied_indexes(scan: Scan) -> dict[int, int]:
    """By group: the applied index of the store."""
    return {
        keys.last_number(key, 4): int.from_bytes(value[:8], "big")
        for key, value in scan(keys.APPLIED)
    }


def load_meta(scan: Scan, meta: MetaMachine) -> None:
    """Load the names of streams, and receipts."""
    meta.load(scan(keys.shard_key(keys.STREAM, META_SHARD)))
    meta.erasures.load(scan(keys.shard_key(keys.ERASURE, META_SHARD)))


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


def stored_machines(applier: Applier) -> dict[int, StreamMachine]:
    """Machines of the shards on disk, except stopped ones."""
    shards = applier.shards.values()
    return {
        one.machine.shard_id: one.machine for one in shards if not (one.in_memory or one.stopped)
    }
