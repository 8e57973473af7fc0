"""Erasing: messages are deleted at once, then their bytes are removed from every file.

A request deletes messages and records a receipt, which names all nodes with a copy of them. Each
node does its part once it has applied the deletion itself: an entry that it has yet to get may
still bring the messages. Its eraser works on all these receipts in one cycle:

1. It removes the content of dead messages from the blocks of their shards.
2. It begins a new log segment, flushes the store, and removes all older segments.
3. It rewrites the tables that have blocks and names of the shards.

Then the node reports the receipts as done. After a failure they stay pending, and are tried again
after a growing pause. A receipt whose stream has unreadable blocks waits until the stream is no
longer damaged.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Final, Protocol

import structlog

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_link.contract.admin import ERASE_SEQS_MAX, ErasureReceipt, ReplicaErasure
from contrail_storage.core import commands as cmd
from contrail_storage.core import key_layout as keys
from contrail_storage.core.erasures import Erasure, ErasureLedger
from contrail_storage.core.key_layout import is_in_memory
from contrail_storage.core.results import Done, Removed
from contrail_storage.replica.meta_log import MetaLog
from contrail_storage.replica.raft_port import Group
from contrail_storage.replica.shard import Shard, check_removal
from contrail_storage.replica.shard_logs import ShardLog
from contrail_storage.store.rocks_store import StoreClosedError, StoreError
from contrail_storage.streams.manager import StreamManager
from contrail_storage.streams.outcomes import expect
from contrail_storage.upkeep.backoff import Backoff
from contrail_storage.upkeep.compactor import Compactor
from contrail_storage.upkeep.shredder import Shredder
from contrail_storage.wal.node_log import LogFailedError, LogRottenError

_TOGETHER: Final = 128
"""Messages that are deleted together, in about one entry, so that ``apply`` stays short."""
_FINISHED_TOGETHER: Final = 256
_TRIMMED_TOGETHER: Final = 8_192
_CUT_S: Final = 60.0
_RETRY_S: Final = 1.0
_RETRY_MAX_S: Final = 60.0
_OLD_S: Final = 3_600.0
_LOOK_S: Final = 1.0
"""Seconds between checks of receipts of damaged streams: the stream may have been deleted."""
_BEHIND_S: Final = 0.1
"""Seconds between checks of receipts whose deletions this node has yet to apply."""
_RANGES_MAX: Final = 32
"""Up to so many shards are rewritten one by one; with more, the range from first to last is."""
_CONTENT_KINDS: Final = (keys.BLOCK, keys.COUNTERS, keys.SUBJECT_NAME)
"""The kinds of rows that have payloads, headers or names of subjects."""
_log = structlog.get_logger("contrail.erase")


@dataclass(slots=True, frozen=True)
class EraseBounds:
    """Seconds for which an open scan, such as a snapshot, may delay the removal of files."""

    patience_s: float = 30.0


@dataclass(slots=True)
class EraseCounts:
    """Counters since the start of the node."""

    done: int = 0
    cycles: int = 0
    failed: int = 0
    seconds: float = 0.0


class RewritableStore(Protocol):
    """The part of the store that the eraser uses."""

    def rewrite(self, ranges: Sequence[tuple[bytes, bytes]], patience_s: float) -> None:
        """Rewrite the files of ``ranges`` with only their current rows."""
        ...


class Homes(Protocol):
    """The part of the membership that erasures use."""

    @property
    def node_id(self) -> str:
        """The name of this node as a member of groups."""
        ...

    def members_of(self, group: int) -> tuple[str, ...]:
        """The nodes that have a copy of what a group replicates."""
        ...


class Receipts(Protocol):
    """The part of the meta machine that erasures use."""

    @property
    def erasures(self) -> ErasureLedger:
        """All receipts."""
        ...


class Erasures:
    """Accepts requests to erase, and returns receipts."""

    def __init__(
        self,
        homes: Homes,
        groups: Mapping[int, Group],
        meta: Receipts,
        streams: StreamManager,
        meta_log: MetaLog,
        shard_log: ShardLog,
        clock_ns: Callable[[], int],
        shredder: Shredder,
    ) -> None:
        self.asked = asyncio.Event()
        """Set when receipts have changed."""
        self.reasons: dict[str, str] = {}
        """By receipt: why it is still pending on this node, once something has failed."""
        # Set and replaced at each change of receipts.
        self._changed = asyncio.Event()
        # Held while this node tells the others that it is done, or no longer is.
        self._telling = asyncio.Lock()
        self._homes = homes  # knows which nodes have copies
        self._node_id = homes.node_id  # this node in receipts
        self._groups = groups  # by number, those that this node is a member of
        self._meta = meta  # has the receipts
        self._streams = streams  # removes messages by subject
        self._meta_log = meta_log  # where receipts are recorded and done
        self._shard_log = shard_log  # where messages are deleted
        self._clock_ns = clock_ns  # log time of the receipts: of all nodes, not of this one
        self._shredder = shredder  # destroys the keys of subjects

    async def erase(self, shards: list[Shard], seqs: list[int], subject: str) -> ErasureReceipt:
        """Delete messages of ``shards``, and record the receipt; see ``StorageLink.erase``.

        All shards belong to one stream. ``seqs`` are sequences of the first shard.
        """
        first, name = shards[0], shards[0].name
        check_removal(first, by_subject=not seqs)
        # Before anything is deleted: without a receipt, nobody would remove the bytes.
        if self._meta.erasures.is_full:
            raise ApiError(errors.ERASURE_LIMIT, retry_after_s=1, applied=False)
        shredded = False
        if seqs:
            wanted = sorted(set(seqs))
            await self._delete(first, wanted)
            messages = len(wanted)
        else:
            async with self._shredder.shredded(shards, subject) as shredded:
                messages = await self._streams.removals.purge(
                    shards, subject, 0, 0, shredded=shredded
                )
        groups = {shard.group for shard in shards}
        erasure_id = secrets.token_hex(16)
        record = cmd.RecordErasure(
            erasure_id,
            name,
            tuple(shard.machine.shard_id for shard in shards),
            messages,
            sorted({node for group in groups for node in self._homes.members_of(group)}),
            self._clock_ns(),
            shredded,
            # This node has applied the deletions, and perhaps later entries.
            {
                group: self._groups[group].applied_index
                for group in groups
                if not is_in_memory(group)
            },
        )
        try:
            expect(await self._meta_log.command(record), Done)
        except ApiError as error:
            # The messages are deleted already.
            raise ApiError(errors.OUTCOME_UNKNOWN, str(error)) from error
        return self._receipt(erasure_id)

    async def _delete(self, shard: Shard, seqs: list[int]) -> None:
        """Delete those of ``seqs`` (ascending) that exist. May raise OUTCOME_UNKNOWN."""
        if len(seqs) > ERASE_SEQS_MAX:
            raise ApiError(
                errors.INVALID_FIELD,
                f"a request must not list more than {ERASE_SEQS_MAX} sequences",
            )
        last_seq = shard.applied_seq
        if seqs[0] < 1 or seqs[-1] > last_seq:
            wrong = seqs[0] if seqs[0] < 1 else seqs[-1]
            raise ApiError(
                errors.SEQUENCE_NOT_FOUND, f"sequence {wrong} has never existed", applied=False
            )
        begun = False
        for start in range(0, len(seqs), _TOGETHER):
            try:
                begun |= await self._delete_together(shard, seqs[start : start + _TOGETHER])
            except ApiError as error:
                # Some messages are deleted, so the request can't be refused as a whole. It may be
                # repeated.
                if begun:
                    raise ApiError(errors.OUTCOME_UNKNOWN, str(error)) from error
                raise
        shard.notify()

    async def _delete_together(self, shard: Shard, seqs: list[int]) -> bool:
        """Delete ``seqs`` in about one entry; return whether any of them existed."""
        shard_id = shard.machine.shard_id
        live = [seq for seq in seqs if shard.machine.is_live(seq)]
        found = await asyncio.gather(
            *[self._shard_log.command(shard_id, cmd.DeleteMessage(seq)) for seq in live],
            # All commands end before an error is raised: none is left without a reader of its
            # result.
            return_exceptions=True,
        )
        for result in found:
            if isinstance(result, BaseException):
                raise ApiError(errors.OUTCOME_UNKNOWN, str(result)) from result
            # A message that a limit has removed meanwhile counts as deleted.
            if getattr(result, "code", 0) != errors.SEQUENCE_NOT_FOUND.code:
                expect(result, Removed)
        return bool(live)

    async def receipt(self, erasure_id: str, wait_ns: int) -> ErasureReceipt:
        """Return a receipt once it is done, or after ``wait_ns``. Raises ERASURE_NOT_FOUND."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_ns / 1e9):
                while self._receipt(erasure_id).status != "done":
                    await self._changed.wait()
        return self._receipt(erasure_id)

    def _receipt(self, erasure_id: str) -> ErasureReceipt:
        found = self._meta.erasures.receipts.get(erasure_id)
        if found is None:
            raise ApiError(errors.ERASURE_NOT_FOUND, f"there is no erasure {erasure_id}")
        replicas = [
            ReplicaErasure(
                self._streams.node if node == self._node_id else node,
                "done" if done_ns else "pending",
                "" if done_ns else self._reason(node, erasure_id),
            )
            for node, done_ns in found.replicas.items()
        ]
        return ErasureReceipt(
            erasure_id,
            "done" if found.done_ns else "pending",
            found.messages,
            replicas,
            found.shredded,
        )

    def _reason(self, node: str, erasure_id: str) -> str:
        return self.reasons.get(erasure_id, "") if node == self._node_id else ""

    def pending(self) -> list[Erasure]:
        """The receipts that this node has not finished."""
        return self._meta.erasures.pending(self._node_id)

    def is_applied(self, erasure: Erasure) -> bool:
        """Whether this node has applied the deletions, in all groups that it is a member of."""
        return all(
            self._has_applied(group, index)
            for group, index in erasure.indexes.items()
            if self._node_id in self._homes.members_of(group)
        )

    def _has_applied(self, number: int, index: int) -> bool:
        group = self._groups.get(number)
        return group is not None and not group.flags and group.applied_index >= index

    def changed(self, command: cmd.MetaCommand | None = None) -> None:
        """Note that receipts have changed, by a ``command`` or in some other way."""
        self.asked.set()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        if isinstance(command, cmd.FinishErasures):
            self._drop_entries(command.erasure_ids)

    def _drop_entries(self, erasure_ids: Sequence[str]) -> None:
        """Drop the entries with the messages of done receipts from memory.

        All members have applied them. Only a node that has lost its disk could ask for them, and
        it would write them to its log again.
        """
        receipts = self._meta.erasures.receipts
        known = (receipts[one] for one in erasure_ids if one in receipts)
        upto: dict[int, int] = {}
        for receipt in known:
            if receipt.done_ns:
                for group, index in receipt.indexes.items():
                    upto[group] = max(upto.get(group, 0), index)
        for group in upto.keys() & self._groups.keys():
            # In a later turn: an entry of that group may just be handed out.
            asyncio.get_running_loop().call_soon(self._trim, self._groups[group], upto[group])

    def _trim(self, group: Group, index: int) -> None:
        if not group.trim(index, _TRIMMED_TOGETHER):
            asyncio.get_running_loop().call_soon(self._trim, group, index)

    async def finish(self, erasures: Sequence[Erasure]) -> None:
        """Mark ``erasures`` as done by this node. Without any, only remove expired receipts."""
        ids = [one.erasure_id for one in erasures]
        async with self._telling:
            for start in range(0, max(len(ids), 1), _FINISHED_TOGETHER):
                some = ids[start : start + _FINISHED_TOGETHER]
                finish = cmd.FinishErasures(some, self._node_id, self._clock_ns())
                expect(await self._meta_log.command(finish), Done)
        for erasure_id in ids:
            self.reasons.pop(erasure_id, None)

    async def reopen(self) -> None:
        """Do this node's part of all pending receipts again. Raises what a meta command raises.

        To be called before the node gets data of another one, which may have bytes that are to be
        erased.
        """
        async with self._telling:
            expect(await self._meta_log.command(cmd.ReopenErasures(self._node_id)), Done)

    async def forget_old(self) -> None:
        """Remove receipts that were done at least seven days ago."""
        if self._meta.erasures.has_old(self._clock_ns()):
            await self.finish([])


class Eraser:
    """Works on receipts: removes the bytes of deleted messages from every file."""

    def __init__(
        self,
        erasures: Erasures,
        shards: Mapping[int, Shard],
        compactor: Compactor,
        cut_log: Callable[[], Awaitable[None]],
        store: RewritableStore,
        bounds: EraseBounds,
        reopened: Callable[[], int] = lambda: 0,
        destroy_keys: Callable[[], None] = lambda: None,
    ) -> None:
        """``reopened`` counts how often the store was reopened and lost unflushed writes.

        ``destroy_keys`` destroys the subject keys that are shredded. Blocks; raises OSError.
        """
        self._reopened = reopened
        self._destroy_keys = destroy_keys
        self.counts = EraseCounts()
        self.erasures = erasures
        self._shards = shards
        self._compactor = compactor
        self._cut_log = cut_log
        self._store = store
        self._bounds = bounds
        self._backoff = Backoff(_RETRY_S, _RETRY_MAX_S)
        self._stuck: set[str] = set()
        """Receipts that only wait for blocks that cannot be read."""

    async def run(self) -> None:
        """Work on pending receipts until cancelled."""
        asked = self.erasures.asked
        while True:
            try:
                if self._workable():
                    await self.cycle()
                    self._backoff.succeeded()
                    continue
                await self.erasures.forget_old()
                with suppress(TimeoutError):
                    # `wait_for` would swallow a cancellation in the turn in which the event is set.
                    async with asyncio.timeout(self._pause_s()):
                        await asked.wait()
                asked.clear()
            except StoreClosedError:
                return
            except (OSError, StoreError, LogRottenError, ApiError) as error:
                if self._put_off(str(error)):
                    _log.warning("erasure_put_off", error=str(error))
                await asyncio.sleep(self._backoff.pause_s)
            except Exception as error:
                # The node still serves, so this must not end it. The receipts stay pending.
                if self._put_off(repr(error)):
                    _log.exception("erasure_failed")
                await asyncio.sleep(self._backoff.pause_s)

    def _put_off(self, reason: str) -> bool:
        """Note a failure in the pending receipts; True if its reason is new, to be logged."""
        self.counts.failed += 1
        waiting = (one.erasure_id for one in self._workable())
        self.erasures.reasons |= dict.fromkeys(waiting, reason)
        return self._backoff.failed(reason)

    def _pause_s(self) -> float:
        """How long to wait for a change while nothing can be done."""
        if any(one.erasure_id not in self._stuck for one in self.erasures.pending()):
            return _BEHIND_S
        return _LOOK_S if self._stuck else _OLD_S

    def _workable(self) -> list[Erasure]:
        """Pending receipts that are applied, without stuck ones whose stream is still damaged."""
        pending = self.erasures.pending()
        self._stuck.intersection_update(one.erasure_id for one in pending)
        return [
            one
            for one in pending
            if self.erasures.is_applied(one)
            and (one.erasure_id not in self._stuck or not any(map(self._damage, one.shards)))
        ]

    def _damage(self, shard_id: int) -> str:
        """The damage of a shard as a sentence; empty if it has none or does not exist."""
        shard = self._shards.get(shard_id)
        if shard is None or not shard.machine.exists or not shard.damaged:
            return ""
        return f"stream {shard.name} is damaged: {shard.damaged}"

    async def _cut(self) -> None:
        try:
            async with asyncio.timeout(_CUT_S):
                await self._cut_log()
        except TimeoutError:
            # A member that lacks something, or a group without a leader, may apply nothing for now.
            reason = f"the log has entries that were not applied within {_CUT_S:.0f} seconds"
            raise LogFailedError(reason) from None

    async def cycle(self) -> None:
        """Work once on all receipts that can make progress; an error leaves them pending."""
        begun = perf_counter()
        # Taken once: a receipt that arrives during the cycle may have content in files that were
        # already rewritten.
        pending = self._workable()
        # A store that fails and is reopened loses the rewritten blocks that it had not flushed.
        reopened = self._reopened()
        shard_ids = sorted({shard_id for one in pending for shard_id in one.shards})
        before = [self._machine(shard_id) for shard_id in shard_ids]
        # What has been applied may have shredded keys.
        await asyncio.to_thread(self._destroy_keys)
        # Blocks first: rewritten tables and the new log segment must contain their new versions
        # only.
        left = {shard_id for shard_id in shard_ids if not await self._empty(shard_id)}
        stored = [shard_id for shard_id in shard_ids if not is_in_memory(shard_id)]
        if stored:  # shards in memory never had anything in a file
            # The log first: cutting it flushes the store, so that every row is in a table when the
            # tables are rewritten.
            await self._cut()
            await asyncio.to_thread(self._store.rewrite, _ranges(stored), self._bounds.patience_s)
        if self._reopened() != reopened:
            # The receipts stay pending, and the next cycle repeats all of it.
            raise StoreError("the store was reopened in the meantime")
        # Shards that another member has sent meanwhile: the next cycle does all of it again.
        fresh = {
            shard_id
            for shard_id, machine in zip(shard_ids, before, strict=True)
            if self._machine(shard_id) is not machine
        }
        done = [one for one in pending if (left | fresh).isdisjoint(one.shards)]
        self.counts.done += len(done)
        self.counts.cycles += 1
        self.counts.seconds += perf_counter() - begun
        if done:
            await self.erasures.finish(done)
        for one in pending:
            if not left.isdisjoint(one.shards):
                self._note_stuck(one)

    def _machine(self, shard_id: int) -> object:
        """The state of a shard; another object once it was replaced."""
        shard = self._shards.get(shard_id)
        return None if shard is None else shard.machine

    def _note_stuck(self, erasure: Erasure) -> None:
        """Stop trying a receipt while its stream is damaged, and log this once."""
        reason = "; ".join(filter(None, map(self._damage, erasure.shards)))
        self.counts.failed += 1
        self._stuck.add(erasure.erasure_id)
        self.erasures.reasons[erasure.erasure_id] = reason
        _log.warning("erasure_put_off", erasure=erasure.erasure_id, error=reason)

    async def _empty(self, shard_id: int) -> bool:
        """Remove the content of dead messages from a shard's blocks; False if one is unreadable."""
        shard = self._shards.get(shard_id)
        if shard is None or not shard.machine.exists:
            return True  # it has no current content
        return await self._compactor.empty(shard)


def _ranges(shards: list[int]) -> list[tuple[bytes, bytes]]:
    """Key ranges with present or past content of ``shards`` (ascending, at least one)."""
    spans = [(shard_id, shard_id) for shard_id in shards]
    if len(spans) > _RANGES_MAX:
        # Rewriting also shards in between costs time. Many short ranges would cost more: each waits
        # for running compactions.
        spans = [(shards[0], shards[-1])]
    return [
        (keys.shard_key(kind, first), keys.prefix_end(keys.shard_key(kind, last)))
        for kind in _CONTENT_KINDS
        for first, last in spans
    ]
