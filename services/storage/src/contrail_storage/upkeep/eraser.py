"""Erasing: messages are deleted at once, then their bytes are removed from every file of the node.

A request deletes messages and records a receipt. The eraser works on all pending receipts in one
cycle:

1. It removes the content of dead messages from the blocks of their shards.
2. It begins a new log segment, flushes the store, and removes all older segments.
3. It rewrites the tables that have blocks and names of the shards.

Then the receipts are done. After a failure they stay pending, and are tried again after a growing
pause. A receipt whose stream has unreadable blocks waits until the stream is no longer damaged.
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
from contrail_storage.replica.shard import Shard, check_removal
from contrail_storage.replica.shard_logs import ShardLog
from contrail_storage.store.rocks_store import StoreClosedError, StoreError
from contrail_storage.streams.manager import StreamManager
from contrail_storage.streams.outcomes import expect
from contrail_storage.upkeep.backoff import Backoff
from contrail_storage.upkeep.compactor import Compactor
from contrail_storage.upkeep.shredder import Shredder
from contrail_storage.wal.node_log import LogRottenError

_TOGETHER: Final = 128
"""Messages that are deleted together, in about one entry, so that ``apply`` stays short."""
_FINISHED_TOGETHER: Final = 256
_CUT_S: Final = 60.0
_RETRY_S: Final = 1.0
_RETRY_MAX_S: Final = 60.0
_OLD_S: Final = 3_600.0
_LOOK_S: Final = 1.0
"""Seconds between checks of receipts of damaged streams: the stream may have been deleted."""
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


class Erasures:
    """Accepts requests to erase, and returns receipts."""

    def __init__(
        self,
        node_id: str,
        ledger: ErasureLedger,
        streams: StreamManager,
        meta_log: MetaLog,
        shard_log: ShardLog,
        clock_ns: Callable[[], int],
        shredder: Shredder,
    ) -> None:
        self._shredder = shredder
        self.asked = asyncio.Event()
        self.reasons: dict[str, str] = {}
        """By receipt: why it is still pending on this node, once something has failed."""
        # Set and replaced at each change of receipts.
        self._changed = asyncio.Event()
        self._node_id = node_id
        self._ledger = ledger
        self._streams = streams
        self._meta_log = meta_log
        self._shard_log = shard_log
        self._clock_ns = clock_ns

    async def erase(self, shards: list[Shard], seqs: list[int], subject: str) -> ErasureReceipt:
        """Delete messages of ``shards``, and record the receipt; see ``StorageLink.erase``.

        All shards belong to one stream. ``seqs`` are sequences of the first shard.
        """
        first, name = shards[0], shards[0].name
        check_removal(first, by_subject=not seqs)
        # Before anything is deleted: without a receipt, nobody would remove the bytes.
        if self._ledger.is_full:
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
        erasure_id = secrets.token_hex(16)
        record = cmd.RecordErasure(
            erasure_id,
            name,
            tuple(shard.machine.shard_id for shard in shards),
            messages,
            [self._node_id],
            self._clock_ns(),
            shredded,
        )
        try:
            expect(await self._meta_log.command(record), Done)
        except ApiError as error:
            # The messages are deleted already.
            raise ApiError(errors.OUTCOME_UNKNOWN, str(error)) from error
        self.asked.set()
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
        found = self._ledger.receipts.get(erasure_id)
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
        return self._ledger.pending(self._node_id)

    async def finish(self, erasures: Sequence[Erasure]) -> None:
        """Mark ``erasures`` as done by this node. Without any, only remove expired receipts."""
        ids = [one.erasure_id for one in erasures]
        for start in range(0, max(len(ids), 1), _FINISHED_TOGETHER):
            some = ids[start : start + _FINISHED_TOGETHER]
            finish = cmd.FinishErasures(some, self._node_id, self._clock_ns())
            expect(await self._meta_log.command(finish), Done)
        for erasure_id in ids:
            self.reasons.pop(erasure_id, None)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def forget_old(self) -> None:
        """Remove receipts that were done at least seven days ago."""
        if self._ledger.has_old(self._clock_ns()):
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
    ) -> None:
        """``reopened`` counts how often the store was reopened and lost unflushed writes."""
        self._reopened = reopened
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
                    await asyncio.wait_for(asked.wait(), _LOOK_S if self._stuck else _OLD_S)
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

    def _workable(self) -> list[Erasure]:
        """Pending receipts, without stuck ones whose stream is still damaged."""
        pending = self.erasures.pending()
        self._stuck.intersection_update(one.erasure_id for one in pending)
        return [
            one
            for one in pending
            if one.erasure_id not in self._stuck or not any(map(self._damage, one.shards))
        ]

    def _damage(self, shard_id: int) -> str:
        """The damage of a shard as a sentence; empty if it has none or does not exist."""
        shard = self._shards.get(shard_id)
        if shard is None or not shard.machine.exists or not shard.damaged:
            return ""
        return f"stream {shard.name} is damaged: {shard.damaged}"

    async def cycle(self) -> None:
        """Work once on all receipts that can make progress; an error leaves them pending."""
        begun = perf_counter()
        # Taken once: a receipt that arrives during the cycle may have content in files that were
        # already rewritten.
        pending = self._workable()
        # A store that fails and is reopened loses the rewritten blocks that it had not flushed.
        reopened = self._reopened()
        shard_ids = sorted({shard_id for one in pending for shard_id in one.shards})
        # Blocks first: rewritten tables and the new log segment must contain their new versions
        # only.
        left = {shard_id for shard_id in shard_ids if not await self._empty(shard_id)}
        stored = [shard_id for shard_id in shard_ids if not is_in_memory(shard_id)]
        if stored:  # shards in memory never had anything in a file
            # The log first: cutting it flushes the store, so that every row is in a table when the
            # tables are rewritten.
            async with asyncio.timeout(_CUT_S):
                await self._cut_log()
            await asyncio.to_thread(self._store.rewrite, _ranges(stored), self._bounds.patience_s)
        if self._reopened() != reopened:
            # The receipts stay pending, and the next cycle repeats all of it.
            raise StoreError("the store was reopened in the meantime")
        done = [one for one in pending if left.isdisjoint(one.shards)]
        if done:
            await self.erasures.finish(done)
        self.counts.done += len(done)
        self.counts.cycles += 1
        self.counts.seconds += perf_counter() - begun
        for one in pending:
            if not left.isdisjoint(one.shards):
                self._note_stuck(one)

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
