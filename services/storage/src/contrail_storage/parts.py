"""Makes the background parts of a node, and says when a checkpoint is due."""

from typing import TYPE_CHECKING, NamedTuple

from contrail_storage.core.key_layout import META_GROUP
from contrail_storage.store.split_store import SplitStore
from contrail_storage.upkeep.compactor import Compactor
from contrail_storage.upkeep.disk_budget import DiskBudget
from contrail_storage.upkeep.due_messages import DueMessages
from contrail_storage.upkeep.eraser import Eraser, Erasures
from contrail_storage.upkeep.housekeeper import Housekeeper
from contrail_storage.upkeep.reclaimer import Reclaimer
from contrail_storage.upkeep.scrubber import Scrubber

if TYPE_CHECKING:
    from contrail_storage.node import StorageNode


class Upkeep(NamedTuple):
    """Background parts; the ``run`` of each never ends."""

    scrubber: Scrubber
    compactor: Compactor
    eraser: Eraser
    housekeeper: Housekeeper
    reclaimer: Reclaimer


def upkeep_of(node: "StorageNode", store: SplitStore) -> Upkeep:
    """Make the background parts of ``node`` over its ``store``."""
    options = node.options
    scrubber = Scrubber(
        node.streams.each_listed,
        node.blocks,
        store,
        node.reader.opener,
        bytes_s=options.scrub_bytes_s,
        pause_s=options.scrub_pause_s,
        mend=node.catching_up.mend,
    )
    due = DueMessages(node.reader, node.shard_logs, node.blocks, store.scan, node.until_written)
    housekeeper = Housekeeper(
        node.streams,
        node.consumers,
        node.shard_logs,
        node.applier.shards,
        node.applier.changes.shards,
        node.groups,
        due,
    )
    compactor = Compactor(
        node.streams.is_listed,
        node.blocks,
        node.applier,
        options.compactor,
        node.catching_up.mend,
    )
    reclaimer = Reclaimer(
        node.raw_store, is_short=lambda: node.disk_budget.short and not node.failure
    )
    return Upkeep(scrubber, compactor, _eraser_of(node, compactor), housekeeper, reclaimer)


def _eraser_of(node: "StorageNode", compactor: Compactor) -> Eraser:
    erasures = Erasures(
        node.membership,
        node.groups,
        node.meta,
        node.streams,
        node.meta_log,
        node.shard_logs,
        lambda: node.groups.time_ns(META_GROUP),
        node.shredder,
    )
    node.applier.on_receipts = erasures.changed
    return Eraser(
        erasures,
        node.applier.shards,
        compactor,
        node.cut_log,
        node.raw_store,
        node.options.erase,
        lambda: node.healing.reopened,
        node.key_sharing.keys.destroy_doomed,
    )


def disk_budget_of(node: "StorageNode") -> DiskBudget:
    """Make the disk budget of ``node``, which refuses messages when the disk is nearly full."""

    def waiting_bytes() -> int:
        logs = (node.groups.proposers[number] for number in node.logged_groups)
        queued = sum(log.queued_bytes for log in logs)
        return node.log.queued_bytes + queued + node.applier.unwritten_bytes

    return DiskBudget(
        node.options.data_dir,
        node.raw_store,
        lambda: node.log.stats.size_bytes,
        waiting_bytes,
        lambda: node.notify("server_out_of_space"),
    )


def is_checkpoint_due(node: "StorageNode") -> bool:
    """Whether the log is large, or cutting it would free disk space that messages need."""
    if node.failure:
        return False
    if node.disk_budget.short:
        node.disk_budget.measure()  # deletions may have freed space
    stats = node.log.stats
    # The size of the log is the time of the next start. What is kept for other members stays.
    new_bytes = stats.size_bytes - min(stats.left_bytes, node.log.tail_bytes)
    large = new_bytes >= node.options.checkpoint_bytes
    return large or (node.disk_budget.short and stats.segments > 1)
