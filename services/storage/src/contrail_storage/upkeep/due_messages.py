"""Messages of a shard that are due by TTL or age. The leader finds them and proposes removals.

Deadlines are read from the store, ages from the blocks. Ages are read only if the due messages are
not simply the oldest ones: because some messages are exempt from age, or because subjects get
markers.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from contrail_common import errors, model
from contrail_common.arrays import distinct
from contrail_common.columns.blocks import BLOCK_MESSAGES_MAX, Block
from contrail_common.columns.header_columns import AnyHeaders, UniformHeaders
from contrail_common.errors import ApiError
from contrail_common.model import Headers
from contrail_common.texts import I64Array
from contrail_storage.core import commands as cmd
from contrail_storage.core import key_layout as keys
from contrail_storage.core.results import Removed
from contrail_storage.core.stream.deadlines import NO_DEADLINE, first_outside
from contrail_storage.reading.reader import Reader
from contrail_storage.replica.shard import Shard
from contrail_storage.replica.shard_logs import ShardLog
from contrail_storage.store.block_store import BlockStore
from contrail_storage.store.rocks_store import StoreCorruptError
from contrail_storage.streams.stream import shard_state

_MESSAGES_MAX: Final = 4_096
_ROWS_MAX: Final = 4_096
_BLOCKS_MAX: Final = 64
"""Limits of one command: messages, rows and blocks that ``apply`` reads. Markers fill one block."""
_SLICES_MAX: Final = 64
"""Slices of one shard in a tick, so that the other shards are checked in time."""
_PAUSE_BLOCKS: Final = 32
_MARKER_REASON: Final = model.MARKER_REASON.lower()
_KV_OPERATION: Final = model.KV_OPERATION.lower()
_UNMARKED: Final = (["DEL"], ["PURGE"])

Part = tuple[Block, NDArray[np.int64]]
"""A block, and the positions of some of its messages, ascending."""
Scan = Callable[[bytes, bytes], Iterator[tuple[bytes, bytes]]]


@dataclass(slots=True)
class _Rows:
    """Due deadline rows: their keys and sequences. ``next_ns`` is the deadline of the next row."""

    keys: list[tuple[int, int]]
    seqs: list[I64Array]
    next_ns: int


class DueMessages:
    """Removes due messages from shards that this node leads."""

    def __init__(
        self,
        reader: Reader,
        shard_log: ShardLog,
        blocks: BlockStore,
        scan: Scan,
        until_written: Callable[[], Awaitable[None]],
    ) -> None:
        """``until_written`` waits until the store of ``scan`` has what is applied now."""
        self._reader = reader
        self._shard_log = shard_log
        self._blocks = blocks
        self._scan = scan
        self._until_written = until_written

    async def remove(self, shard: Shard, now_ns: int) -> None:
        """Remove messages due at ``now_ns``, in at most 64 slices. Raises ApiError, StoreError."""
        for _ in range(_SLICES_MAX):
            if shard.damaged or not shard.machine.exists:
                return
            if shard.machine.config.sealed:
                return
            by_row = shard.machine.deadlines.earliest_ns <= now_ns
            if not by_row and not (ages_singly(shard) and await self.age_is_due(shard, now_ns)):
                return
            take = self._remove_rows if by_row else self._remove_aged
            if not await take(shard, now_ns):
                return

    # By TTL --------------------------------------------------------------------------------------

    async def _remove_rows(self, shard: Shard, now_ns: int) -> bool:
        """Remove a slice of messages past their deadline; True to check again."""
        machine = shard.machine
        if not machine.exists:
            return False
        deadlines = machine.deadlines
        from_ns = deadlines.earliest_ns
        # Appends during the scan may have earlier deadlines than the row at which it ends.
        deadlines.begin_scan()
        # The rows are read from the store, which may be behind what is applied: without this a due
        # row could be missed, and the bound of all deadlines raised above it.
        await self._until_written()
        rows = await asyncio.to_thread(self._due_rows, shard, from_ns, now_ns)
        # `apply` reads the facts of these messages: one block for each row in the worst case.
        self._keep_few_blocks(machine.shard_id, rows)
        if rows.keys:
            seqs = distinct(np.concatenate(rows.seqs))
            await self._propose(shard, await self._parts(shard, seqs), rows.keys)
        deadlines.end_scan(rows.next_ns)
        return machine.exists

    def _due_rows(self, shard: Shard, from_ns: int, now_ns: int) -> _Rows:
        shard_id = shard.machine.shard_id
        start = keys.deadline_key(shard_id, from_ns, 0)
        stop = keys.prefix_end(keys.shard_key(keys.DEADLINE, shard_id))
        found = _Rows([], [], NO_DEADLINE)
        messages_left = _messages_max(shard)
        try:
            for key, row in self._scan(start, stop):
                deadline_ns, first_seq = keys.deadline_of(key)
                messages_left -= len(row) // 8
                full = found.keys and (messages_left < 0 or len(found.keys) >= _ROWS_MAX)
                if deadline_ns > now_ns or full:
                    found.next_ns = deadline_ns
                    break
                found.keys.append((deadline_ns, first_seq))
                found.seqs.append(np.frombuffer(row, np.int64))
        except StoreCorruptError as error:
            shard.damaged = f"its deadlines: {error}"
            raise ApiError(errors.DATA_LOST, shard.damaged) from error
        return found

    def _keep_few_blocks(self, shard_id: int, rows: _Rows) -> None:
        """Leave rows for the next slice that would make a command read more than 64 blocks."""
        directory = self._blocks.directory(shard_id)
        seen: set[int] = set()
        for at, (deadline_ns, first_seq) in enumerate(rows.keys):
            seen.add(directory.position(first_seq))
            if len(seen) > _BLOCKS_MAX:
                rows.next_ns = deadline_ns
                del rows.keys[at:], rows.seqs[at:]
                return

    async def _parts(self, shard: Shard, seqs: I64Array) -> list[Part]:
        """Return the blocks of ``seqs`` (ascending) that still exist, with their positions."""
        parts: list[Part] = []
        at = 0
        while at < len(seqs):
            block = await self._reader.block_at(shard, int(seqs[at]))
            # All sequences from here on were removed in the meantime.
            if block is None:
                break
            stop = int(np.searchsorted(seqs, block.last_seq, side="right"))
            positions = seqs[at:stop] - block.base_seq
            parts.append((block, positions[positions >= 0]))
            at = stop
        return parts

    # By age --------------------------------------------------------------------------------------

    async def age_is_due(self, shard: Shard, now_ns: int) -> bool:
        """Whether the oldest message that is subject to age exceeds ``max_age``.

        Reads a block at most once for each message that is the oldest, and never on the event
        loop. Raises ApiError, StoreError.
        """
        machine = shard.machine
        max_age_ns = machine.config.max_age_ns
        if not max_age_ns or shard.stay_below > shard.applied_seq:
            return False
        seq, time_ns = shard.oldest
        if not machine.is_live(seq) or seq < shard.stay_below:
            from_seq = max(shard.stay_below, machine.counters.first_seq)
            seq = first_outside((machine.deleted, machine.exempt), from_seq, shard.applied_seq)
            shard.stay_below = seq
            block = await self._reader.block_of(shard, seq) if seq <= shard.applied_seq else None
            if block is None:
                if machine.is_live(seq) and seq <= shard.applied_seq:
                    shard_state(shard)  # the block is lost: raises DATA_LOST
                return False
            time_ns = int(block.times_ns[seq - block.base_seq])
            shard.oldest = seq, time_ns
        return time_ns <= now_ns - max_age_ns

    async def _remove_aged(self, shard: Shard, now_ns: int) -> bool:
        """Remove a slice of messages older than ``max_age``; True to check again."""
        if not shard.machine.exists:
            return False
        limit_ns = now_ns - shard.machine.config.max_age_ns
        messages_left = _messages_max(shard)
        parts: list[Part] = []
        seq = shard.oldest[0]
        while messages_left and seq <= shard.applied_seq and len(parts) < _BLOCKS_MAX:
            block = await self._reader.block_at(shard, seq)
            if block is None or not shard.machine.exists:
                break
            applied = min(block.count, shard.applied_seq + 1 - block.base_seq)
            old = int(np.searchsorted(block.times_ns[:applied], limit_ns, side="right"))
            positions = _ageing(shard, block, max(seq - block.base_seq, 0), old)[:messages_left]
            parts.append((block, positions))
            messages_left -= len(positions)
            seq = block.base_seq + (old if messages_left else int(positions[-1]) + 1)
            if old < block.count:
                break
        removed = await self._propose(shard, parts, [])
        # Others removed messages meanwhile, so nothing was left. The next tick searches again, from
        # the oldest message.
        if not removed.count:
            return False
        # All messages below are exempt from age, so later searches begin here.
        shard.stay_below = max(shard.stay_below, seq)
        return True

    # Both ----------------------------------------------------------------------------------------

    async def _propose(
        self, shard: Shard, parts: list[Part], rows: list[tuple[int, int]]
    ) -> Removed:
        if not shard.machine.exists:
            return Removed(0)
        seqs, markers = _choose(self._reader, shard, parts)
        if not len(seqs) and not rows:
            return Removed(0)
        command = cmd.Expire(seqs.tobytes(), np.array(rows, np.int64).tobytes(), markers.tobytes())
        result = await self._shard_log.command(shard.machine.shard_id, command)
        shard.notify()  # a consumer whose pending messages were removed can take more
        return result if isinstance(result, Removed) else Removed(0)


def ages_singly(shard: Shard) -> bool:
    """Whether age may remove other messages than the oldest, or leaves markers."""
    machine = shard.machine
    return machine.exempt.total > 0 or machine.config.subject_delete_marker_ttl_ns > 0


def _ageing(shard: Shard, block: Block, low: int, stop: int) -> NDArray[np.int64]:
    """Positions of a block from ``low`` up to ``stop`` whose messages are subject to age."""
    machine = shard.machine
    positions = np.arange(low, max(stop, low))
    seqs = positions + block.base_seq
    ageing: NDArray[np.int64] = positions[
        machine.deleted.are_live(seqs) & machine.exempt.are_live(seqs)
    ]
    return ageing


def _messages_max(shard: Shard) -> int:
    marks = shard.machine.config.subject_delete_marker_ttl_ns > 0
    return BLOCK_MESSAGES_MAX if marks else _MESSAGES_MAX


def _choose(reader: Reader, shard: Shard, parts: list[Part]) -> tuple[I64Array, I64Array]:
    """The sequences of the live messages of ``parts``, and those of them that are markers."""
    machine = shard.machine
    seqs, markers = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for block, positions in parts:
        live = positions[machine.are_live(positions + block.base_seq)]
        seqs.append(live + block.base_seq)
        if machine.config.subject_delete_marker_ttl_ns > 0:
            markers.append(_markers(reader, shard, block, live) + block.base_seq)
    return np.concatenate(seqs), np.concatenate(markers)


def _markers(
    reader: Reader, shard: Shard, block: Block, positions: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Which of the messages mark their subject as empty."""
    headers = reader.opened(shard, block, positions.tolist()).headers
    # A look at the names of all headers together rules out nearly every block.
    if headers is None or not _may_be_markers(headers):
        return np.zeros(0, np.int64)
    found = [at for at in positions.tolist() if _is_marker(headers.message(at) or {})]
    return np.array(found, np.int64)


def _may_be_markers(headers: AnyHeaders) -> bool:
    names = headers.names.heap if isinstance(headers, UniformHeaders) else headers.names
    lowered = names.lower()
    return _MARKER_REASON.encode() in lowered or _KV_OPERATION.encode() in lowered


def _is_marker(headers: Headers) -> bool:
    """Whether a message marks its subject as empty: a marker, or a delete of a key-value bucket."""
    asked = {name.lower(): values[:1] for name, values in headers.items()}
    return _MARKER_REASON in asked or asked.get(_KV_OPERATION) in _UNMARKED
