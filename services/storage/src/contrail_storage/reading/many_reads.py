"""Many messages of a shard at once, by sequence or the newest by subject, block by block.

Blocks are read in the order in which the request first needs them. As soon as a message has no room
in the answer, nothing more is read, and all messages that are not yet read are left out.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from contrail_common import errors
from contrail_common.columns.blocks import Block, MessageColumns
from contrail_common.errors import ApiError
from contrail_common.model import Headers, StoredMessage
from contrail_common.texts import I64Array, as_u32
from contrail_storage.reading.answering import removed_too_quickly
from contrail_storage.reading.reader import STEP_BYTES, STEP_MESSAGE_BYTES, Reader
from contrail_storage.replica.shard import Shard
from contrail_storage.seal.content import ContentBrokenError
from contrail_storage.store.block_store import BlockStore

_RETRIES: Final = 8
_TOGETHER_BLOCKS: Final = 32
_TOGETHER_BYTES: Final = 4 << 20
"""Bounds of the blocks that are read together, or at least one."""
_FEW: Final = 8
"""Messages up to which selecting their headers in columns costs more than it saves."""

_Positions = NDArray[np.intp]


@dataclass(slots=True)
class Room:
    """The bytes that an answer may still take. The first message always fits."""

    left_bytes: int
    _is_empty: bool = True
    _is_full: bool = False

    def is_full(self) -> bool:
        """Return True once a message did not fit."""
        return self._is_full

    def take(self, sizes: I64Array) -> int:
        """Take room for messages in their order; return how many of them fit."""
        fitting, size = len(sizes), int(sizes.sum())
        if size > self.left_bytes:
            total = np.cumsum(sizes)
            fitting = int(np.searchsorted(total, self.left_bytes, side="right"))
            fitting = max(fitting, int(self._is_empty))
            size = int(total[fitting - 1]) if fitting else 0
        self.left_bytes -= size
        self._is_empty = self._is_empty and not fitting
        self._is_full = fitting < len(sizes)
        return fitting


@dataclass(slots=True)
class Many:
    """The messages asked for, in order, None for one that is not there.

    ``left_out`` are the positions of those for which there was no room, which are None too.
    """

    found: list[StoredMessage | None]
    left_out: list[int]


class _Group(NamedTuple):
    """Positions in a request, ascending, whose sequences are in one block."""

    at: _Positions
    low_seq: int
    high_seq: int
    base_seq: int
    block_bytes: int

    def is_in(self, block: Block) -> bool:
        """Return True if ``block`` has all these sequences."""
        return block.base_seq <= self.low_seq and self.high_seq <= block.last_seq


@dataclass(slots=True)
class _Asked:
    """A request to one shard, with what was found so far."""

    shard: Shard
    seqs: I64Array
    subjects: Sequence[str] | None
    room: Room
    many: Many

    def visible(self) -> NDArray[np.bool_]:
        """A mask of the sequences that are messages now. Raises ApiError without a stream."""
        shard, seqs = self.shard, self.seqs
        if not shard.machine.exists:
            raise ApiError(errors.STREAM_NOT_FOUND)
        return shard.machine.are_live(seqs) & (seqs <= shard.applied_seq)


class ManyReader:
    """Reads through a reader."""

    def __init__(self, blocks: BlockStore, reader: Reader) -> None:
        self._blocks = blocks
        self._reader = reader

    async def newest(self, shard: Shard, subjects: Sequence[str], room: Room) -> Many:
        """Return the newest message of each of the ``subjects``, which are literal."""
        many = Many([None] * len(subjects), [])
        pending: _Positions = np.arange(len(subjects))
        for _ in range(_RETRIES):
            ids = shard.machine.subjects.ids
            numbers = {at: ids.get(subjects[at]) for at in pending.tolist()}
            known = {at: number for at, number in numbers.items() if number is not None}
            pending = np.array(list(known), np.intp)
            sids = np.array(list(known.values()), np.uint32)
            distinct, inverse = np.unique(sids, return_inverse=True)
            seqs = (await self._reader.newest.find(shard, distinct))[inverse]
            pending, seqs = pending[seqs > 0], seqs[seqs > 0]
            part = await self.read(shard, seqs, room, [subjects[at] for at in pending.tolist()])
            many.left_out += pending[part.left_out].tolist()
            for at, message in zip(pending.tolist(), part.found, strict=True):
                many.found[at] = message
            missing = np.array([message is None for message in part.found], np.bool_)
            # Removed while its block was read. An older one of the subject may be the newest now.
            pending = pending[missing & ~shard.machine.are_live(seqs)]
            if not len(pending):
                return many
        raise removed_too_quickly()

    async def read(
        self, shard: Shard, seqs: I64Array, room: Room, subjects: Sequence[str] | None = None
    ) -> Many:
        """Return the messages with these ``seqs``, in any order; ``subjects`` if they are known."""
        asked = _Asked(shard, seqs, subjects, room, Many([None] * len(seqs), []))
        pending: _Positions = np.arange(len(seqs))
        for _ in range(_RETRIES):
            pending = pending[asked.visible()[pending]]
            if room.is_full() or not len(pending):
                asked.many.left_out += pending.tolist()
                return asked.many
            pending = await self._read_once(asked, pending)
        raise removed_too_quickly()

    async def _read_once(self, asked: _Asked, pending: _Positions) -> _Positions:
        """Read what is ``pending``, and return what is still pending.

        Blocks that are merged or trimmed while they are read are to be looked up again.
        """
        missed = [pending[:0]]
        for groups in _together(self._groups(asked, pending)):
            blocks: list[Block | None] = [None] * len(groups)
            if not asked.room.is_full():
                blocks = await self._load(asked.shard, groups)
            # Checked again after the read: messages may have been removed meanwhile.
            visible, left = asked.visible(), STEP_BYTES
            for group, block in zip(groups, blocks, strict=True):
                if block is None or not group.is_in(block):
                    missed.append(group.at)
                    continue
                for at in _in_steps(asked, block, group.at):
                    if asked.room.is_full():
                        missed.append(at)
                        continue
                    if left < 0:
                        await asyncio.sleep(0)
                        visible, left = asked.visible(), STEP_BYTES
                    before = asked.room.left_bytes
                    self._take(asked, block, at[visible[at]])
                    left -= before - asked.room.left_bytes + STEP_MESSAGE_BYTES * len(at)
            await asyncio.sleep(0)
        return np.concatenate(missed)

    def _groups(self, asked: _Asked, pending: _Positions) -> list[_Group]:
        """Group positions by block, in the order of the first of each group."""
        directory = self._blocks.directory(asked.shard.machine.shard_id)
        order = pending[np.argsort(asked.seqs[pending], kind="stable")]
        ascending = asked.seqs[order]
        groups: list[_Group] = []
        start = 0
        while start < len(order):
            low_seq = int(ascending[start])
            position = directory.position(low_seq)
            if position >= len(directory):
                groups.append(_Group(order[start:], low_seq, int(ascending[-1]), low_seq, 0))
                break
            span = directory.span(position)
            stop = int(ascending.searchsorted(span.end_seq))
            at = np.sort(order[start:stop])
            high_seq = int(ascending[stop - 1])
            groups.append(_Group(at, low_seq, high_seq, span.base_seq, span.bytes))
            start = stop
        groups.sort(key=lambda group: int(group.at[0]))
        return groups

    async def _load(self, shard: Shard, groups: list[_Group]) -> list[Block | None]:
        """Return the block of each group, from memory or read together; None to look again."""
        shard_id = shard.machine.shard_id
        directory = self._blocks.directory(shard_id)
        blocks = [self._blocks.recall(shard_id, group.base_seq) for group in groups]
        absent = [at for at, block in enumerate(blocks) if block is None]
        if absent:
            reads = (self._reader.block_of(shard, groups[at].low_seq) for at in absent)
            for at, block in zip(absent, await asyncio.gather(*reads), strict=True):
                blocks[at] = block
            # The store was opened again, and may have other blocks now.
            if self._blocks.directory(shard_id) is not directory:
                return [None] * len(groups)
        return blocks

    def _take(self, asked: _Asked, block: Block, at: _Positions) -> None:
        """Take the messages at ``at`` from ``block``, as far as there is room."""
        within = asked.seqs[at] - block.base_seq
        gone = self._reader.opener.gone(block.columns)
        if gone is not None:
            at, within = at[~gone[within]], within[~gone[within]]
        fitting = asked.room.take(block.columns.sizes_at(within))
        asked.many.left_out += at[fitting:].tolist()
        positions = at[:fitting].tolist()
        numbers = block.subject_ids[within[:fitting]].tolist()
        if asked.subjects is None:
            table = asked.shard.machine.subjects
            names = {number: table.name(number) for number in dict.fromkeys(numbers)}
            subjects = [names[number] for number in numbers]
        else:
            subjects = [asked.subjects[position] for position in positions]
        messages = self._messages(asked.shard, block, within[:fitting], subjects)
        for position, message in zip(positions, messages, strict=True):
            asked.many.found[position] = message

    def _messages(
        self, shard: Shard, block: Block, positions: _Positions, subjects: list[str]
    ) -> list[StoredMessage | None]:
        """Return the messages at ``positions``; None for one whose key was destroyed."""
        wanted: list[int] = positions.tolist()
        try:
            columns, gone = self._reader.opener.columns(
                shard.machine.shard_id, block.columns, dict.fromkeys(wanted)
            )
        except ContentBrokenError as error:
            raise self._reader.damage(shard, block.base_seq, error) from error
        ends, payload = as_u32(columns.offsets), columns.payload
        messages: list[StoredMessage | None] = [
            StoredMessage(block.base_seq + at, subject, time_ns, headers, payload[start:stop])
            for at, subject, time_ns, headers, start, stop in zip(
                wanted,
                subjects,
                block.times_ns[positions].tolist(),
                _headers(columns, positions),
                ends[positions].tolist(),
                ends[positions + 1].tolist(),
                strict=True,
            )
        ]
        if gone:
            lost = set(gone)
            return [None if at in lost else one for at, one in zip(wanted, messages, strict=True)]
        return messages


def _together(groups: list[_Group]) -> Iterator[list[_Group]]:
    """Divide groups into those whose blocks are read together."""
    some: list[_Group] = []
    size = 0
    for group in groups:
        size += group.block_bytes
        if some and (len(some) == _TOGETHER_BLOCKS or size > _TOGETHER_BYTES):
            yield some
            some, size = [], group.block_bytes
        some.append(group)
    if some:
        yield some


def _in_steps(asked: _Asked, block: Block, at: _Positions) -> Sequence[_Positions]:
    """Divide positions in a block where the headers of their messages take longer than a step."""
    columns = block.columns
    if len(at) == 1 or (columns.headers is None and columns.seals is None):
        return (at,)
    sizes = columns.sizes_at(asked.seqs[at] - block.base_seq) + STEP_MESSAGE_BYTES
    return np.split(at, np.flatnonzero(np.diff(np.cumsum(sizes) // STEP_BYTES)) + 1)


def _headers(columns: MessageColumns, positions: _Positions) -> Sequence[Headers | None]:
    if columns.headers is None:
        return [None] * len(positions)
    if len(positions) <= _FEW:
        return [columns.headers.message(at) for at in positions.tolist()]
    headers = columns.headers.select(positions)
    return [None] * len(positions) if headers is None else headers.each()
