"""Reading messages of a shard by sequence, time and subject, up to the last applied one."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from contrail_common import errors
from contrail_common.columns.blocks import Block, BlockCorruptError, MessageColumns, message_size
from contrail_common.errors import ApiError
from contrail_common.model import StoredMessage
from contrail_common.texts import I64Array
from contrail_link.contract.read import DeletedRanges, RangeRequest, RangeResult
from contrail_storage.core.subjects.filters import FilterCache, SubjectFilter
from contrail_storage.reading.page_tokens import decode_number, decode_token, encode_token
from contrail_storage.reading.point_reads import PointReads
from contrail_storage.replica.shard import Shard
from contrail_storage.seal.content import ContentBrokenError, ContentOpener
from contrail_storage.store.block_store import BlockMissingError, BlockStore, Directory
from contrail_storage.store.rocks_store import StoreCorruptError

_RETRIES = 8
_RUN_BLOCKS = 64
_RUN_BYTES = 32 << 10
"""Bytes of small blocks that are read with the first: a thread for each would cost more."""


@dataclass(slots=True, frozen=True, eq=False)
class Found:
    """Selected messages of one block: ascending positions, and the next sequence to look at."""

    block: Block
    positions: NDArray[np.intp]
    next_seq: int


class Reader:
    """Reads through the block store; blocking reads run in the default executor."""

    def __init__(self, blocks: BlockStore, opener: ContentOpener | None = None) -> None:
        """``opener`` decrypts messages sealed with subject keys; None if there are none."""
        self.opener = opener or ContentOpener(None)
        self._blocks = blocks
        self._points = PointReads(blocks)
        self._filters = FilterCache()

    async def block_at(self, shard: Shard, seq: int) -> Block | None:
        """Return the first block that ends at or after ``seq``; None when there is none."""
        return await self._block(shard, lambda directory: directory.position(seq))

    async def block_of(self, shard: Shard, seq: int) -> Block | None:
        """Return the block with ``seq``, read for one message; None when there is none."""
        return await self._block(shard, lambda directory: directory.position(seq), of_seq=seq)

    async def block_below(self, shard: Shard, seq: int) -> Block | None:
        """Return the last block that begins at or before ``seq``; None when there is none."""
        return await self._block(shard, lambda directory: directory.position_below(seq))

    async def _block(
        self, shard: Shard, find: Callable[[Directory], int], of_seq: int | None = None
    ) -> Block | None:
        shard_id = shard.machine.shard_id
        for _ in range(_RETRIES):
            directory = self._blocks.directory(shard_id)
            position = find(directory)
            if not 0 <= position < len(directory):
                return None
            base_seq = directory.base_seq(position)
            if of_seq is not None and of_seq < base_seq:
                return None
            block = self._blocks.recall(shard_id, base_seq)
            if block is not None:
                return block
            try:
                if of_seq is not None:
                    block = await self._points.block(shard_id, base_seq)
                else:
                    bases = directory.run_from(position, _RUN_BLOCKS, _RUN_BYTES)
                    times = directory.last_times_ns(bases)
                    block = await asyncio.to_thread(self._blocks.load_run, shard_id, bases, times)
                if self._blocks.directories.get(shard_id) in (directory, None):
                    return block
                # The store was opened again and may have other blocks now: look again.
            except BlockMissingError:
                continue  # merged or trimmed while it was read: look again
            except (BlockCorruptError, StoreCorruptError) as error:
                raise self.damage(shard, base_seq, error) from error
        raise ApiError(
            errors.OVERLOADED,
            "messages in the range are being removed too quickly to read it",
            retry_after_s=1,
        )

    def damage(self, shard: Shard, base_seq: int, error: Exception) -> ApiError:
        """Mark the shard as damaged by an unreadable block, and return the error."""
        shard.damaged = f"block {base_seq}: {error}"
        return ApiError(errors.DATA_LOST, shard.damaged)

    def select(
        self, shard: Shard, block: Block, from_seq: int, subject_filter: SubjectFilter
    ) -> Found:
        """Select the live, applied and matching messages of ``block`` from ``from_seq`` on."""
        machine = shard.machine
        # A block may reach below the first sequence, and beyond the last applied one: readers see
        # neither.
        low = max(from_seq, block.base_seq, machine.counters.first_seq) - block.base_seq
        high = min(block.last_seq, shard.applied_seq) + 1 - block.base_seq
        next_seq = block.base_seq + max(high, 0)
        if low >= high:
            return Found(block, np.zeros(0, np.intp), max(next_seq, from_seq))
        live = machine.deleted.live_mask(block.base_seq + low, high - low)
        if subject_filter.matches_all:
            wanted = np.ones(high - low, np.bool_) if live is None else live
        else:
            wanted = subject_filter.select(machine.subjects, block.subject_ids[low:high])
            if live is not None:
                wanted &= live
        gone = self.opener.gone(block.columns)
        # Erased, and only waiting to be removed.
        if gone is not None:
            wanted &= ~gone[low:high]
        return Found(block, np.flatnonzero(wanted) + low, next_seq)

    def message(self, shard: Shard, block: Block, position: int) -> StoredMessage | None:
        """Return the message at ``position`` of ``block``, which is live.

        None when its key was destroyed: the message is about to be removed.
        """
        name = shard.machine.subjects.name(int(block.subject_ids[position]))
        try:
            return self.opener.message(block, position, name)
        except ContentBrokenError as error:
            raise self.damage(shard, block.base_seq, error) from error

    def opened(self, shard: Shard, block: Block, positions: Iterable[int]) -> MessageColumns:
        """Return the columns of ``block``; if sealed, those at ``positions`` are decrypted.

        The other messages are blank, and so are those whose keys were destroyed.
        """
        try:
            return self.opener.columns(block.columns, positions)[0]
        except ContentBrokenError as error:
            raise self.damage(shard, block.base_seq, error) from error

    async def get(self, shard: Shard, seq: int) -> StoredMessage:
        """Return one message (MESSAGE_NOT_FOUND)."""
        if shard.machine.is_live(seq) and seq <= shard.applied_seq:
            # Checked again after the read: the message may have been removed meanwhile.
            block = await self.block_of(shard, seq)
            if block is not None and shard.machine.is_live(seq):
                message = self.message(shard, block, seq - block.base_seq)
                if message is not None:
                    return message
        raise ApiError(errors.MESSAGE_NOT_FOUND, f"no message with sequence {seq}")

    async def previous_of_subject(self, shard: Shard, seq: int) -> int:
        """The last live message before ``seq`` with the same subject, 0 when there is none."""
        machine = shard.machine
        block = await self.block_at(shard, seq)
        if block is None or not machine.is_live(seq):
            return 0
        sid = int(block.subject_ids[seq - block.base_seq])
        table = machine.subjects
        # No older message of the subject is below it, so the search backwards ends there.
        floor_seq = max(int(table.first[table.numbered.slot(sid)]), machine.counters.first_seq)
        while block is not None and seq > floor_seq:
            stop = min(seq, block.last_seq + 1) - block.base_seq
            wanted = block.subject_ids[:stop] == sid
            live = machine.deleted.live_mask(block.base_seq, stop) if stop else None
            if live is not None:
                wanted = wanted & live
            positions = np.flatnonzero(wanted)
            if len(positions):
                found = block.base_seq + int(positions[-1])
                return found if found >= floor_seq else 0
            seq = block.base_seq
            block = await self.block_below(shard, seq - 1) if seq > floor_seq else None
        return 0

    async def seq_of_time(self, shard: Shard, time_ns: int) -> int:
        """The first sequence at or after ``time_ns``; the next new one when there is none."""
        directory = self._blocks.directory(shard.machine.shard_id)
        position = directory.position_of_time(time_ns)
        if position >= len(directory):
            return shard.machine.counters.last_seq + 1
        block = await self.block_at(shard, directory.span(position).base_seq)
        if block is None:
            return shard.machine.counters.last_seq + 1
        seq = block.base_seq + int(np.searchsorted(block.times_ns, time_ns))
        return max(seq, shard.machine.counters.first_seq)

    async def read_range(self, shard: Shard, request: RangeRequest) -> RangeResult:
        """Return the messages of a range request; wait for the first if it says so."""
        subject_filter = self.filter_of(shard, (request.subject,) if request.subject else ())
        from_seq = request.from_seq
        if request.start_time_ns:
            from_seq = max(from_seq, await self.seq_of_time(shard, request.start_time_ns))
        deadline = asyncio.get_running_loop().time() + request.wait_ns / 1e9
        while True:
            messages, next_seq = await self._collect(shard, from_seq, subject_filter, request)
            left = deadline - asyncio.get_running_loop().time()
            if messages or left <= 0 or not await shard.wait_for_change(left):
                break
            shard.check_readable()
            from_seq = next_seq
        pending = await self.count(shard, next_seq, shard.applied_seq, subject_filter)
        return RangeResult(messages, next_seq, pending)

    async def collect(self, shard: Shard, request: RangeRequest) -> tuple[list[StoredMessage], int]:
        """Return applied messages from ``from_seq`` on, and the next sequence."""
        wanted = self.filter_of(shard, (request.subject,) if request.subject else ())
        return await self._collect(shard, request.from_seq, wanted, request)

    async def _collect(
        self, shard: Shard, from_seq: int, subject_filter: SubjectFilter, request: RangeRequest
    ) -> tuple[list[StoredMessage], int]:
        messages: list[StoredMessage] = []
        size = 0
        next_seq = max(from_seq, shard.machine.counters.first_seq)
        missed = 0
        while True:
            if not missed & (missed - 1):
                # Only after 1, 2, 4 ... blocks without a match: with many subjects, looking into
                # the table costs as much as reading some blocks.
                next_seq = self._skip(shard, next_seq, subject_filter)
            block = None
            if next_seq <= shard.applied_seq:
                block = await self.block_at(shard, next_seq)
            if block is None or not shard.machine.exists:
                return messages, next_seq
            found = self.select(shard, block, next_seq, subject_filter)
            missed = 0 if len(found.positions) else missed + 1
            for position in found.positions.tolist():
                message = self.message(shard, block, position)
                if message is None:
                    continue
                size += message_size(message.headers, len(message.payload))
                # The first message is returned whatever its size, or a reader could never pass it.
                if messages and size > request.max_bytes:
                    return messages, message.seq
                messages.append(message)
                if len(messages) >= request.limit:
                    return messages, message.seq + 1
            next_seq = block.last_seq + 1

    def _skip(self, shard: Shard, from_seq: int, subject_filter: SubjectFilter) -> int:
        """The first sequence at or after ``from_seq`` that may match; after all when none can."""
        if subject_filter.matches_all:
            return from_seq
        table = shard.machine.subjects
        at = table.numbered.slots(subject_filter.numbers(table))
        first = table.first[at[table.last[at] >= from_seq]]
        if not len(first):
            return max(from_seq, shard.applied_seq + 1)
        return max(from_seq, int(first.min()))

    async def count(
        self, shard: Shard, from_seq: int, to_seq: int, subject_filter: SubjectFilter
    ) -> int:
        """Count live matching messages from ``from_seq`` to ``to_seq`` (inclusive, applied)."""
        machine = shard.machine
        low = max(from_seq, machine.counters.first_seq)
        if low > to_seq:
            return 0
        if subject_filter.matches_all:
            return to_seq - low + 1 - machine.deleted.count(low, to_seq)
        table = machine.subjects
        at = table.numbered.slots(subject_filter.numbers(table))
        first, last = table.first[at], table.last[at]
        inside = (first >= low) & (last <= to_seq)
        total = int(table.counts[at[inside]].sum())
        across = ~inside & (last >= low) & (first <= to_seq)
        at, first, last = at[across], first[across], last[across]
        if not len(at):
            return total
        bottom_seq, top_seq = int(first.min()), int(last.max())
        # Fewer messages lie before the range than in it: count those, and subtract them.
        if top_seq <= to_seq and low - bottom_seq < top_seq - low:
            # The table's count of these subjects, less their messages before `low`.
            everything = int(table.counts[at].sum())
            return total + everything - await self._count_of(shard, at, bottom_seq, low - 1)
        return total + await self._count_of(shard, at, low, min(top_seq, to_seq))

    async def _count_of(self, shard: Shard, slots: I64Array, from_seq: int, to_seq: int) -> int:
        """Count live messages of the subjects at ``slots`` in ``from_seq`` .. ``to_seq``."""
        machine = shard.machine
        numbered = machine.subjects.numbered  # the table may rearrange its slots meanwhile
        wanted = np.zeros(int(slots.max()) + 2, np.bool_)  # the last one stands for all others
        wanted[slots] = True
        total, seq = 0, from_seq
        while seq <= to_seq:
            block = await self.block_at(shard, seq)
            if block is None or not machine.exists:
                break
            low = max(seq, block.base_seq, machine.counters.first_seq)
            seq = block.last_seq + 1
            count = min(seq, to_seq + 1) - low
            if count <= 0:
                continue
            at = numbered.slots(block.subject_ids[low - block.base_seq :][:count])
            found = wanted[np.where((at >= 0) & (at < len(wanted)), at, -1)]
            live = machine.deleted.live_mask(low, count)
            total += int(np.count_nonzero(found if live is None else found & live))
        return total

    async def newest_from(self, shard: Shard, subject_filter: SubjectFilter, count: int) -> int:
        """The sequence of the ``count``-th newest match; 0 when there are fewer."""
        seq = shard.applied_seq
        while seq >= shard.machine.counters.first_seq:
            block = await self.block_below(shard, seq)
            if block is None:
                break
            positions = self.select(shard, block, block.base_seq, subject_filter).positions
            if len(positions) >= count:
                return block.base_seq + int(positions[-count])
            count -= len(positions)
            seq = block.base_seq - 1
        return 0

    def deleted_ranges(self, shard: Shard, limit: int, token: str) -> DeletedRanges:
        """Return deleted sequences inside the stream, paged by sequence."""
        counters = shard.machine.counters
        from_seq = max(decode_number(token), counters.first_seq)
        ranges, next_seq = shard.machine.deleted.ranges(from_seq, counters.last_seq, limit)
        return DeletedRanges(ranges, None if next_seq is None else encode_token(str(next_seq)))

    def filter_of(self, shard: Shard, patterns: tuple[str, ...]) -> SubjectFilter:
        """Return the filter for ``patterns`` over the shard's subjects."""
        return self._filters.get(shard.machine.subjects, patterns)

    def subject_counts(
        self, shard: Shard, subject: str, limit: int, token: str
    ) -> tuple[list[tuple[str, int]], str | None]:
        """Return (subject, messages) of matching subjects in byte order, paged by subject."""
        table = shard.machine.subjects
        after = decode_token(token)
        names = sorted(
            name
            for _, name in self.filter_of(shard, (subject,) if subject else ()).subjects(table)
            if not after or name > after
        )
        page = [(name, table.count(name)) for name in names[:limit]]
        more = len(names) > limit
        return page, encode_token(page[-1][0]) if more else None
