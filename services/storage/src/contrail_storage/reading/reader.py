"""Reading messages of a shard by sequence, time and subject, up to the last applied one."""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from contrail_common import errors
from contrail_common.arrays import consecutive
from contrail_common.columns.blocks import Block, BlockCorruptError, MessageColumns, message_size
from contrail_common.errors import ApiError
from contrail_common.model import StoredMessage
from contrail_common.texts import I64Array, U32Array
from contrail_common.timeunits import INT64_MAX
from contrail_link.contract.read import DeletedRanges, Peeked, RangeRequest, RangeResult
from contrail_storage.core.facts import SubjectFacts
from contrail_storage.core.stream.recent_removals import RemovalMemory
from contrail_storage.core.subjects.filters import SubjectFilter, SubjectLookup, lookup_of_slots
from contrail_storage.reading.answering import removed_too_quickly
from contrail_storage.reading.filter_cache import FilterCache
from contrail_storage.reading.name_order import NameOrders
from contrail_storage.reading.newest import Newest
from contrail_storage.reading.page_tokens import decode_number, decode_token, encode_token
from contrail_storage.reading.point_reads import PointReads
from contrail_storage.reading.window_reads import RUN_WINDOWS, WindowReads
from contrail_storage.replica.shard import Mend, Shard, not_mended
from contrail_storage.seal.content import ContentBrokenError, ContentOpener
from contrail_storage.store.block_store import (
    UNREADABLE,
    BlockMissingError,
    BlockStore,
    Directory,
)
from contrail_storage.store.rocks_store import StoreCorruptError, StoreFailedError
from contrail_storage.store.windows import WINDOW_BITS

_RETRIES = 8
_RUN_BLOCKS = 64
_RUN_BYTES = 32 << 10
"""Bytes of small blocks that are read with the first: a thread for each would cost more."""
_FIRST_WINDOWS = 1
"""Windows that a search reads first; then it reads more and more at a time."""
_TABLE_MAX = 4_096
"""Subjects of a table that is searched as a whole, which takes less than reading a block."""
_NEAR = 4_096
"""Sequences that are counted by their windows, which takes less than asking all subjects."""
_TALLIED = 4
"""Parts of a subject table that are looked at in one step: 262,144 slots, about 2 ms."""
STEP_BYTES = 24 << 10
STEP_MESSAGE_BYTES = 192
"""Bytes, plus these for each message, that are taken out of blocks in one step.

That is 125 messages at most. Of small headers, 24 KiB take 3 to 4 ms.
"""

Pick = Callable[[U32Array], NDArray[np.bool_]]
"""Which of some subject numbers are wanted, as a mask."""


class Found(msgspec.Struct, frozen=True, eq=False):
    """Selected messages of one block: ascending positions, and the next sequence to look at.

    ``matching`` are the live messages that match from ``from_seq`` on, ``positions`` those of them
    that are not being erased.
    """

    block: Block
    positions: NDArray[np.intp]
    next_seq: int
    matching: NDArray[np.intp]
    from_seq: int


class _Tally(NamedTuple):
    """Messages of a range of sequences, by the counts of their subjects."""

    inside: int
    """Messages of the subjects that have all theirs in the range."""
    across: int
    """All messages of the other subjects that may have some in it."""
    bottom_seq: int
    top_seq: int
    """Sequences around all messages of these; ``top_seq`` is 0 if there are none."""
    lookup: SubjectLookup
    """The numbers of these."""


class Reader:
    """Reads through the block store; blocking reads run in the default executor."""

    def __init__(self, blocks: BlockStore, opener: ContentOpener | None = None) -> None:
        """``opener`` decrypts messages sealed with subject keys; None if there are none."""
        self.opener = opener or ContentOpener(None)
        self._blocks = blocks
        self.mend: Mend = not_mended
        """Called with a block that cannot be read."""
        self.removals = RemovalMemory()
        """The recent removals of the shards in which messages are counted."""
        self._points = PointReads(blocks)
        self.windows = WindowReads(blocks)
        self.newest = Newest(self.facts)
        """Finds the newest messages of subjects that lost theirs."""
        self._filters = FilterCache()
        self._names = NameOrders(self._filters)

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
        for attempt in range(_RETRIES):
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
                # Merged or trimmed while it was read: look again. In the end it may be lost.
                if attempt == _RETRIES - 2:
                    await self.mend(shard, base_seq)
            except (BlockCorruptError, StoreCorruptError) as error:
                if not await self.mend(shard, base_seq):
                    raise self.damage(shard, base_seq, error) from error
        raise removed_too_quickly()

    async def bring_first(self, shards: Iterable[Shard]) -> None:
        """Have the blocks of the first messages in memory: `ShardState.state` reads their times.

        A block that cannot be read, and that no other node has, is left to it.
        """
        for shard in shards:
            machine = shard.machine
            first_seq = machine.counters.first_seq
            if not machine.exists or shard.damaged or not machine.counters.messages:
                continue
            if not self._in_memory(shard, first_seq):
                directory = self._blocks.directory(machine.shard_id)
                base_seq = directory.base_seq(directory.position(first_seq))
                try:
                    with suppress(StoreFailedError):
                        await asyncio.to_thread(self._blocks.load, machine.shard_id, base_seq)
                except UNREADABLE:
                    await self.mend(shard, base_seq)

    def damage(self, shard: Shard, base_seq: int, error: Exception) -> ApiError:
        """Mark the shard as damaged by an unreadable block, and return the error."""
        shard.damaged = f"block {base_seq}: {error}"
        return ApiError(errors.DATA_LOST, shard.damaged)

    def select(
        self,
        shard: Shard,
        block: Block,
        from_seq: int,
        subject_filter: SubjectFilter,
        most: int = INT64_MAX,
    ) -> Found:
        """Select the live, applied and matching messages of ``block`` from ``from_seq`` on.

        It may end after ``most`` of them, if that takes less time.
        """
        machine = shard.machine
        # A block may reach below the first sequence, and beyond the last applied one: readers see
        # neither.
        low = max(from_seq, block.base_seq, machine.counters.first_seq) - block.base_seq
        high = min(block.last_seq, shard.applied_seq) + 1 - block.base_seq
        if subject_filter.matches_all:
            high = min(high, max(low, 0) + most)
        next_seq = block.base_seq + max(high, 0)
        if low >= high:
            nothing = np.zeros(0, np.intp)
            return Found(block, nothing, max(next_seq, from_seq), nothing, from_seq)
        live = machine.deleted.live_mask(block.base_seq + low, high - low)
        if not subject_filter.matches_all:
            wanted = subject_filter.select(machine.subjects, block.subject_ids[low:high])
            live = wanted if live is None else live & wanted
        if live is None:
            positions = matching = consecutive(low, high)
        else:
            positions = matching = np.flatnonzero(live) + low
        gone = self.opener.gone(block.columns)
        # Erased, and only waiting to be removed.
        if gone is not None:
            positions = matching[~gone[matching]]
        return Found(block, positions, next_seq, matching, from_seq)

    def message(self, shard: Shard, block: Block, position: int) -> StoredMessage | None:
        """Return the message at ``position`` of ``block``, which is live.

        None when its key was destroyed: the message is about to be removed.
        """
        name = shard.machine.subjects.name(int(block.subject_ids[position]))
        try:
            return self.opener.message(shard.machine.shard_id, block, position, name)
        except ContentBrokenError as error:
            raise self.damage(shard, block.base_seq, error) from error

    def opened(self, shard: Shard, block: Block, positions: Iterable[int]) -> MessageColumns:
        """Return the columns of ``block``; if sealed, those at ``positions`` are decrypted.

        The other messages are blank, and so are those whose keys were destroyed.
        """
        try:
            return self.opener.columns(shard.machine.shard_id, block.columns, positions)[0]
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

    def peek(self, shard: Shard, seq: int, subject: str = "") -> Peeked:
        """Return one message if it is in memory, and in plain; a read if it is on the disk.

        None otherwise. ``subject`` is that of the message, if the caller knows it.
        """
        machine = shard.machine
        if seq > shard.applied_seq or not machine.is_live(seq):
            return None
        directory = self._blocks.directory(machine.shard_id)
        at = directory.position(seq)
        if at == len(directory) or (base_seq := directory.base_seq(at)) > seq:
            return None
        block = self._blocks.recall(machine.shard_id, base_seq)
        if block is None:
            return self._points.read(machine.shard_id, base_seq)
        if block.columns.seals is not None:
            return None
        position = seq - base_seq
        name = subject or machine.subjects.name(int(block.subject_ids[position]))
        return block.message(position, name)

    async def last_match(
        self, shard: Shard, subject_filter: SubjectFilter, up_to_seq: int = INT64_MAX
    ) -> int:
        """The last live message up to ``up_to_seq`` that a filter matches; 0 when there is none.

        Only of subjects that have messages now.
        """
        pick = subject_filter.lookup(shard.machine.subjects).select
        return await self.newest_below(shard, min(up_to_seq, shard.applied_seq) + 1, 0, pick, 1)

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
        subject_filter = await self.filter_of(shard, (request.subject,) if request.subject else ())
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
        wanted = await self.filter_of(shard, (request.subject,) if request.subject else ())
        return await self._collect(shard, request.from_seq, wanted, request)

    async def _collect(
        self, shard: Shard, from_seq: int, subject_filter: SubjectFilter, request: RangeRequest
    ) -> tuple[list[StoredMessage], int]:
        messages: list[StoredMessage] = []
        size = 0
        left = STEP_BYTES
        next_seq = max(from_seq, shard.machine.counters.first_seq)
        missed = False
        while True:
            next_seq = await self.next_match(shard, next_seq, subject_filter, missed=missed)
            block = None
            if next_seq <= shard.applied_seq:
                block = await self.block_at(shard, next_seq)
            if block is None or not shard.machine.exists:
                return messages, next_seq
            await self.prepare(shard, subject_filter)
            found = self.select(shard, block, next_seq, subject_filter)
            missed = not len(found.positions)
            paused = False
            for position in found.positions.tolist():
                if left < 0:
                    await asyncio.sleep(0)
                    left, paused = STEP_BYTES, True
                # It may have been removed in the meantime.
                if paused and not shard.machine.is_live(block.base_seq + position):
                    continue
                message = self.message(shard, block, position)
                if message is None:
                    continue
                own = message_size(message.headers, len(message.payload))
                size += own
                left -= own + STEP_MESSAGE_BYTES
                # The first message is returned whatever its size, or a reader could never pass it.
                if messages and size > request.max_bytes:
                    return messages, message.seq
                messages.append(message)
                if len(messages) >= request.limit:
                    return messages, message.seq + 1
            next_seq = block.last_seq + 1

    async def next_match(
        self,
        shard: Shard,
        from_seq: int,
        subject_filter: SubjectFilter,
        *,
        missed: bool,
        to_seq: int = INT64_MAX,
    ) -> int:
        """A sequence at or after ``from_seq`` before which no message matches.

        It is the next match itself, or it is in a block in memory, which is best looked at. Not so
        if the last block had no match (``missed``). After ``to_seq`` and all messages up to it when
        there is no match.
        """
        if subject_filter.matches_all:
            return from_seq
        seq, windows = self._lower_bound(shard, from_seq, subject_filter), _FIRST_WINDOWS
        seq = max(seq, shard.machine.counters.first_seq)
        if not missed and self._in_memory(shard, seq):
            return seq
        while shard.machine.exists and seq <= (last_seq := min(shard.applied_seq, to_seq)):
            end_seq = min((seq >> WINDOW_BITS) + windows << WINDOW_BITS, last_seq + 1)
            facts = await self.facts(shard, seq, end_seq - 1)
            await self.prepare(shard, subject_filter)
            pick = partial(subject_filter.select, shard.machine.subjects)
            found = self.live(shard, facts, seq, facts.end_seq, pick)
            if len(found):
                return int(found[0])
            seq = max(facts.end_seq, shard.machine.counters.first_seq)
            seq = shard.machine.deleted.next_live(seq, last_seq + 1)
            windows = min(2 * windows, RUN_WINDOWS)
        return seq

    def _in_memory(self, shard: Shard, seq: int) -> bool:
        """Whether the next block is in memory."""
        shard_id = shard.machine.shard_id
        directory = self._blocks.directory(shard_id)
        position = directory.position(seq)
        if position >= len(directory):
            return True  # there is none to read
        return self._blocks.recall(shard_id, directory.base_seq(position)) is not None

    def _lower_bound(self, shard: Shard, from_seq: int, subject_filter: SubjectFilter) -> int:
        """A sequence at or after ``from_seq`` before which no message matches, by the table."""
        table = shard.machine.subjects
        if table.size > _TABLE_MAX and not subject_filter.literal:
            return from_seq
        at = subject_filter.slots(table)
        first = table.first[at[table.last[at] >= from_seq]]
        if not len(first):
            return max(from_seq, shard.applied_seq + 1)
        return max(from_seq, int(first.min()))

    async def facts(self, shard: Shard, from_seq: int, to_seq: int) -> SubjectFacts:
        """Subject numbers and sizes from ``from_seq`` or before it on, without reading blocks.

        They may end before ``to_seq``, which must be applied, after 65,536 sequences: continue at
        their end. The values of sequences that are not live mean nothing. Raises ApiError.
        """
        try:
            return await self.windows.read(shard.machine.shard_id, from_seq, to_seq)
        except (BlockCorruptError, StoreCorruptError) as error:
            raise self.damage(shard, from_seq, error) from error

    def live(
        self, shard: Shard, facts: SubjectFacts, from_seq: int, end_seq: int, pick: Pick
    ) -> I64Array:
        """The live and applied sequences from ``from_seq`` up to ``end_seq`` that ``pick`` picks.

        Only as far as ``facts`` have them.
        """
        machine = shard.machine
        low = max(from_seq, facts.base_seq, machine.counters.first_seq)
        count = min(end_seq, facts.end_seq, shard.applied_seq + 1) - low
        if count <= 0:
            return np.zeros(0, np.int64)
        wanted = pick(facts.subject_ids[low - facts.base_seq :][:count])
        live = machine.deleted.live_mask(low, count)
        return np.flatnonzero(wanted if live is None else wanted & live) + low

    async def count(
        self, shard: Shard, from_seq: int, to_seq: int, subject_filter: SubjectFilter
    ) -> int:
        """Count live matching messages from ``from_seq`` to ``to_seq`` (inclusive, applied)."""
        await self.prepare(shard, subject_filter)
        machine = shard.machine
        low = max(from_seq, machine.counters.first_seq)
        if low > to_seq:
            return 0
        if subject_filter.matches_all:
            return to_seq - low + 1 - machine.deleted.count(low, to_seq)
        table = machine.subjects
        if to_seq - low < _NEAR:
            pick = partial(subject_filter.select, table)
            return await self._count_picked(shard, pick, low, to_seq)
        tally = await self._tally(shard, low, to_seq, subject_filter)
        if not tally.top_seq:
            return tally.inside
        # Fewer messages lie before the range than in it: count those, and subtract them.
        bottom_seq, top_seq, across = tally.bottom_seq, tally.top_seq, tally.lookup.select
        if top_seq <= to_seq and low - bottom_seq < top_seq - low:
            before = await self._count_picked(shard, across, bottom_seq, low - 1)
            return tally.inside + tally.across - before
        top_seq = min(top_seq, to_seq)
        return tally.inside + await self._count_picked(shard, across, low, top_seq)

    async def _tally(
        self, shard: Shard, low: int, to_seq: int, subject_filter: SubjectFilter
    ) -> _Tally:
        """Look at the matching subjects, a part of the table at a time."""
        while True:
            table = shard.machine.subjects
            numbered, chosen = table.numbered, np.zeros(table.size, np.bool_)
            inside = across = top_seq = 0
            bottom_seq = INT64_MAX
            for turn, at in enumerate(subject_filter.live_slots(table), 1):
                first, counts = table.first[at], table.counts[at]
                # Of a subject that lost its newest message it is a bound, perhaps above all.
                last = np.minimum(table.last[at], shard.machine.counters.last_seq)
                whole = (first >= low) & (last <= to_seq)
                inside += int(counts[whole].sum())
                part = ~whole & (last >= low) & (first <= to_seq)
                across += int(counts[part].sum())
                bottom_seq = min(bottom_seq, int(first[part].min(initial=INT64_MAX)))
                top_seq = max(top_seq, int(last[part].max(initial=0)))
                chosen[at[part]] = True
                if turn % _TALLIED == 0:
                    await asyncio.sleep(0)
                    # Messages may come and go meanwhile, but slots must not move.
                    if shard.machine.subjects.numbered is not numbered:
                        break
            else:
                lookup = lookup_of_slots(numbered, chosen)
                return _Tally(inside, across, bottom_seq, top_seq, lookup)

    async def _count_picked(self, shard: Shard, pick: Pick, from_seq: int, to_seq: int) -> int:
        """Count live messages in ``from_seq`` .. ``to_seq`` whose subjects ``pick`` picks."""
        total, seq = 0, max(from_seq, shard.machine.counters.first_seq)
        while seq <= to_seq and shard.machine.exists:
            facts = await self.facts(shard, seq, to_seq)
            total += len(self.live(shard, facts, seq, to_seq + 1, pick))
            seq = facts.end_seq
        return total

    async def newest_below(
        self, shard: Shard, end_seq: int, floor_seq: int, pick: Pick, count: int
    ) -> int:
        """The sequence of the ``count``-th newest live message below ``end_seq`` of ``pick``.

        0 when there are fewer from ``floor_seq`` on.
        """
        windows = 1
        while end_seq > max(floor_seq, shard.machine.counters.first_seq):
            first = max(((end_seq - 1) >> WINDOW_BITS) - windows + 1, 0)
            low = seq = max(first << WINDOW_BITS, floor_seq)
            found: list[I64Array] = []
            while seq < end_seq:
                facts = await self.facts(shard, seq, end_seq - 1)
                found.append(self.live(shard, facts, seq, end_seq, pick))
                seq = facts.end_seq
            held = sum(map(len, found))
            if held >= count:
                return int(np.concatenate(found)[-count])
            count -= held
            end_seq, windows = low, min(2 * windows, RUN_WINDOWS)
        return 0

    def deleted_ranges(self, shard: Shard, limit: int, token: str) -> DeletedRanges:
        """Return deleted sequences inside the stream, paged by sequence."""
        counters = shard.machine.counters
        from_seq = max(decode_number(token), counters.first_seq)
        ranges, next_seq = shard.machine.deleted.ranges(from_seq, counters.last_seq, limit)
        return DeletedRanges(ranges, None if next_seq is None else encode_token(str(next_seq)))

    async def filter_of(self, shard: Shard, patterns: tuple[str, ...]) -> SubjectFilter:
        """Return the filter for ``patterns`` over the shard's subjects, ready for use."""
        return await self._filters.get(shard.machine.subjects, patterns)

    def share_filter(self, shard: Shard, patterns: tuple[str, ...]) -> SubjectFilter:
        """Return the filter for a reader that keeps it, and has it prepared for each use."""
        return self._filters.share(shard.machine.subjects, patterns)

    async def prepare(self, shard: Shard, subject_filter: SubjectFilter) -> None:
        """Have all names matched by a filter that is used next, without a wait in between."""
        await self._filters.prepare(shard.machine.subjects, subject_filter)

    async def subject_counts(
        self, shard: Shard, subject: str, limit: int, token: str
    ) -> tuple[list[tuple[str, int]], str | None]:
        """Return (subject, messages) of matching subjects in byte order, paged by subject."""
        after = decode_token(token)
        wanted = await self.filter_of(shard, (subject,) if subject else ())
        # One more than asked for shows that there is another page.
        found = await self._names.page(shard.machine.subjects, wanted, after, limit + 1)
        page = found[:limit]
        return page, encode_token(page[-1][0]) if len(found) > limit else None
