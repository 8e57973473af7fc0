"""A member's side: the state of a group is replaced by that of its leader.

The member is suspect from before the first change until after the last one, and that is durable. So
whatever interrupts an install, the next start leaves the group's rows alone and begins again.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog

from contrail_storage.core import key_layout as keys
from contrail_storage.core.chain import decode_applied, entry_of, mark_installed
from contrail_storage.core.meta_machine import MetaMachine
from contrail_storage.core.stream.stream_machine import StreamMachine
from contrail_storage.disk.whole_steps import whole
from contrail_storage.replica.applier import Applier
from contrail_storage.replica.loading import RowsInOrder, holds_anything, load_meta, load_shard
from contrail_storage.replica.raft_port import Group
from contrail_storage.replica.shard import Shard
from contrail_storage.state.fetching import Fetching
from contrail_storage.state.messages import Open, Opened
from contrail_storage.state.rows import removals, shards_of
from contrail_storage.store.block_store import BlockStore
from contrail_storage.store.rocks_store import Operation
from contrail_storage.store.sealed_store import Store
from contrail_storage.store.shard_facts import ShardFacts
from contrail_storage.store.store_errors import StoreStalledError

_SHARDS_TOGETHER: Final = 200
_BATCH_ROWS: Final = 1_000
_STALL_WAIT_S: Final = 0.005
_FLAGGED_S: Final = 0.01
_log = structlog.get_logger("contrail.state")


@dataclass(slots=True)
class InstallCounts:
    """For metrics."""

    installed: int = 0
    failed: int = 0
    seconds: float = 0.0


async def _nothing(shard_ids: list[int]) -> None:
    del shard_ids


class Installer:
    """Replaces the state of groups, one at a time. Used on the event loop."""

    def __init__(
        self,
        member: str,
        store: Store,
        blocks: BlockStore,
        applier: Applier,
        until_idle: Callable[[], Awaitable[None]],
        fetching: Fetching,
        counts: InstallCounts,
    ) -> None:
        """``until_idle`` waits until nothing that was applied is on its way to the store."""
        self.counts = counts
        self._member = member
        self._store = store
        self._blocks = blocks
        self._applier = applier
        self._until_idle = until_idle
        self.on_shown: Callable[[list[int]], Awaitable[None]] = _nothing
        """Called with the shards of a group when they are about to be used."""
        self._fetching = fetching

    async def install(self, number: int, group: Group, leader: str) -> bool:
        """Fetch the state of a suspect group from its leader, and go on after it.

        False if the leader's state is older than what was applied here. Raises ApiError if the
        leader ends it, BrokenStateError, and the store's errors; then the group stays suspect.
        """
        begun = time.monotonic()
        while not group.flags_are_durable:  # noqa: ASYNC110 - the log tells only the group
            await asyncio.sleep(_FLAGGED_S)
        await self._give_up_state(number)
        async with self._fetching.open(leader, Open(number, self._member)) as opened:
            installed = await self._install(number, group, leader, opened)
        if installed:
            seconds = time.monotonic() - begun
            self.counts.installed += 1
            self.counts.seconds += seconds
            index = group.applied_index
            _log.info("state_installed", group=number, index=index, seconds=round(seconds, 3))
        return installed

    async def _install(self, number: int, group: Group, leader: str, opened: Opened) -> bool:
        index, term = entry_of(opened.applied)
        if index < group.applied_index:
            return False
        await self._replace_rows(number, leader, opened)
        await whole(self._store.flush)
        if number == keys.META_GROUP:
            await self._show_meta()
        else:
            await self._show_shards(number)
        _, chain = decode_applied(opened.applied)
        self._applier.chains[number], self._applier.written_indexes[number] = chain, index
        group.install(index, term)
        if group.applied_index != index:
            return False
        group.mark_suspect(False)
        return True

    async def _give_up_state(self, number: int) -> None:
        """Forget the shards of the group, and let what is on its way reach the store."""
        shards = [shard for shard in self._applier.shards.values() if shard.group == number]
        for at in range(0, len(shards), _SHARDS_TOGETHER):
            for shard in shards[at : at + _SHARDS_TOGETHER]:
                self._give_up(shard)
            await asyncio.sleep(0)
        self._blocks.forget_all({shard.machine.shard_id for shard in shards})
        await self._until_idle()

    def _give_up(self, shard: Shard) -> None:
        shard_id = shard.machine.shard_id
        shard.machine = StreamMachine(shard_id, ShardFacts(self._blocks, shard_id))
        shard.away, shard.damaged, shard.stopped = True, "", False
        shard.small_runs.clear()
        self._applier.changes.note_all(shard_id)
        shard.notify()

    # Rows ----------------------------------------------------------------------------------------

    async def _replace_rows(self, number: int, leader: str, opened: Opened) -> None:
        stored = await whole(lambda: self._stored_shards(number))
        gone = self._deletions(number, {*stored, *self._known_shards(number)})
        last: Operation = (
            "put",
            keys.shard_key(keys.APPLIED, number),
            mark_installed(opened.applied),
        )
        # The meta machine's rows are few, and change at once: they are loaded whatever the flag
        # says, because a node knows its groups by them.
        at_once = number == keys.META_GROUP
        # From here on, the store says by itself that it has no whole state of the group.
        batch: list[Operation] = [("delete", keys.shard_key(keys.APPLIED, number))]
        for ranges in gone:
            batch += ranges
            if not at_once and len(batch) >= _BATCH_ROWS:
                batch = await self._write(batch)
        async with aclosing(self._fetching.rows(leader, opened, number)) as pieces:
            async for rows in pieces:
                batch += rows
                if not at_once:
                    batch = await self._write(batch)
        # All batches of the store before this one are there if this one is.
        await self._write([*batch, last])

    def _stored_shards(self, number: int) -> list[int]:
        if number == keys.META_GROUP:
            return []
        return shards_of(number, self._store.scan(keys.GROUP, keys.prefix_end(keys.GROUP)))

    def _known_shards(self, number: int) -> list[int]:
        shards = self._applier.shards.items()
        return [shard_id for shard_id, shard in shards if shard.group == number]

    def _deletions(self, number: int, shard_ids: set[int]) -> Iterator[list[Operation]]:
        for ranges in removals(number, sorted(shard_ids)):
            # A shard's rows go together: the one that says whose they are must not go first.
            yield [("delete_range", start, stop) for start, stop in ranges]

    async def _write(self, batch: Sequence[Operation]) -> list[Operation]:
        """Write a batch; return an empty one."""
        while batch:
            try:
                await whole(partial(self._store.write, batch))
            except StoreStalledError:
                await asyncio.sleep(_STALL_WAIT_S)
            else:
                break
        return []

    # Memory --------------------------------------------------------------------------------------

    async def _show_meta(self) -> None:
        fresh = MetaMachine()
        await whole(lambda: load_meta(RowsInOrder(self._store.scan), fresh))
        self._applier.meta.take_over(fresh)
        for shard_id in self._applier.shards:
            self._applier.changes.note_all(shard_id)
        self._applier.on_cluster()

    async def _show_shards(self, number: int) -> None:
        blocks = self._blocks.beside()
        shards = await whole(lambda: self._load(number, blocks))
        for shard_id in set(self._known_shards(number)) - {one.machine.shard_id for one in shards}:
            self._forget(shard_id)
        for at in range(0, len(shards), _SHARDS_TOGETHER):
            for shard in shards[at : at + _SHARDS_TOGETHER]:
                self._show(shard, blocks)
            await asyncio.sleep(0)
        await self.on_shown([shard.machine.shard_id for shard in shards])

    def _forget(self, shard_id: int) -> None:
        """Forget a shard that the group does not have any more."""
        shard = self._applier.shards.pop(shard_id)
        shard.away = False
        self._applier.changes.note_all(shard_id)
        shard.notify()

    def _show(self, fresh: Shard, blocks: BlockStore) -> None:
        """Use a shard's state in ``fresh`` and ``blocks``; others refer to the shard as it was."""
        shard_id = fresh.machine.shard_id
        self._blocks.adopt(blocks, shard_id)
        fresh.machine.read_from(ShardFacts(self._blocks, shard_id))
        known = self._applier.shards.setdefault(shard_id, fresh)
        known.machine, known.group, known.away = fresh.machine, fresh.group, False
        known.applied_seq, known.publishes_wait = fresh.applied_seq, False
        known.stay_below, known.oldest = 0, (0, 0)
        self._applier.changes.note_all(shard_id)
        known.notify()

    def _load(self, number: int, blocks: BlockStore) -> list[Shard]:
        """Load all shards of a group. Blocks."""
        rows = RowsInOrder(self._store.scan)
        shards = []
        for shard_id in self._stored_shards(number):
            shard = load_shard(rows, shard_id, blocks)
            shard.group = number
            if holds_anything(shard, blocks):
                shards.append(shard)
        return shards
