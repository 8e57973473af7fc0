"""What the store holds, taken up: applied indexes, names of streams, their machines and blocks."""

from collections.abc import Callable, Iterable

from contrail_storage.core import key_layout as keys
from contrail_storage.core.commands import META_SHARD
from contrail_storage.core.meta_machine import MetaMachine
from contrail_storage.core.stream_machine import StreamMachine
from contrail_storage.node.applier import Applier
from contrail_storage.node.shard import Shard
from contrail_storage.store.block_store import BlockStore, ShardFacts

Scan = Callable[[bytes], Iterable[tuple[bytes, bytes]]]
"""All (key, value) of a store under a key prefix, in key order."""


def load_node(scan: Scan, meta: MetaMachine, applier: Applier, blocks: BlockStore) -> None:
    """Take up everything of a node that is stored."""
    applier.written_indexes.update(applied_indexes(scan))
    load_meta(scan, meta)
    for entry in meta.streams.values():
        if not keys.is_volatile(entry.shard):
            for number in entry.numbers:
                shard = load_shard(scan, number, blocks)
                applier.shards[number] = shard
                if shard.machine.exists:
                    last_ns = shard.machine.counters.last_time_ns
                    applier.last_entry_ns = max(applier.last_entry_ns, last_ns)


def applied_indexes(scan: Scan) -> dict[int, int]:
    """Of each group the index that the store stands at."""
    return {
        keys.last_number(key, 4): int.from_bytes(value[:8], "big")
        for key, value in scan(keys.APPLIED)
    }


def load_meta(scan: Scan, meta: MetaMachine) -> None:
    """Take up the names of streams, and receipts."""
    meta.load(scan(keys.shard_key(keys.STREAM, META_SHARD)))
    meta.erasures.load(scan(keys.shard_key(keys.ERASURE, META_SHARD)))


def load_shard(scan: Scan, number: int, blocks: BlockStore) -> Shard:
    """A shard as its rows hold it."""
    machine = StreamMachine.load(number, ShardFacts(blocks, number), scan)
    pages = scan(keys.shard_key(keys.BLOCK_PAGE, number))
    blocks.load_directory(number, pages, scan(keys.shard_key(keys.BLOCK_INDEX, number)))
    # Without a stream it holds what a crash left of a restore: the other parts are in the log.
    applied_seq = max(blocks.directory(number).end_seq - 1, machine.counters.last_seq)
    return Shard(machine, applied_seq)


def stored_machines(applier: Applier) -> dict[int, StreamMachine]:
    """Machines of the shards that the disk holds."""
    shards = applier.shards.values()
    return {one.machine.shard: one.machine for one in shards if not one.volatile}
