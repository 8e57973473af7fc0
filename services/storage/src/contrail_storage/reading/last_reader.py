"""The newest message of each subject as of a point of the stream, a page at a time.

The search goes through the subjects in the order of their numbers, some at a time, called "open".
One pass goes backwards from the point over the blocks' subject columns and finds the newest message
of each open subject. It skips blocks that cannot have one, by the subject table, and after a block
without one by windows.

At any time, no open subject has a message between the sequence that the pass has reached and the
point. So the token of a page has only that sequence and the open subjects. A subject appears at
most once, whatever is published or removed between pages. If a message is removed before its page
is read, an older message of its subject is returned instead, if there is one.
"""

import asyncio
import hashlib
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from contrail_common import errors
from contrail_common.columns.blocks import Block, message_size
from contrail_common.errors import ApiError
from contrail_common.model import StoredMessage
from contrail_common.subjects import is_wildcard
from contrail_common.texts import I64Array, U32Array
from contrail_common.timeunits import INT64_MAX
from contrail_link.contract.read import LastRequest, Peeked
from contrail_storage.core.subjects.filters import SubjectFilter
from contrail_storage.core.subjects.subject_table import SubjectTable
from contrail_storage.reading.page_tokens import decode_state, encode_state
from contrail_storage.reading.reader import STEP_BYTES, STEP_MESSAGE_BYTES, Reader
from contrail_storage.replica.shard import Shard

_PAUSE_BLOCKS: Final = 8
"""Blocks in memory are searched without waiting, so after this many others get their turn."""


# A token comes from outside, so its numbers are bounded: none of them may overflow.
_Seq = Annotated[int, msgspec.Meta(ge=0, le=INT64_MAX)]
_Sid = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


@dataclass(slots=True, frozen=True)
class LastBounds:
    """Limits of the cost of one request.

    It searches ``blocks`` for ``subjects`` at a time (a token has no more of them). A page ends
    with the message that reaches ``page_bytes``.
    """

    subjects: int = 1_024
    blocks: int = 512
    page_bytes: int = 1 << 20


class LastToken(msgspec.Struct, array_like=True):
    """The start of the next page. ``gaps`` are the differences between the open subject numbers."""

    request: bytes
    point_seq: _Seq
    next_sid: _Sid
    seq: _Seq
    gaps: list[_Sid]


class LastReader:
    """Reads the newest messages of subjects through a reader."""

    def __init__(self, reader: Reader, bounds: LastBounds | None = None) -> None:
        self._reader = reader
        self._bounds = bounds or LastBounds()

    async def read(
        self, shard: Shard, request: LastRequest
    ) -> tuple[list[StoredMessage], str | None]:
        """Return a page by sequence, and the token of the next (BAD_REQUEST for a foreign one).

        A page may have few or no messages without being the last one: a request searches a limited
        number of blocks.
        """
        newest = await self._newest(shard, request) if _is_of_one_now(request) else None
        if newest is not None:
            return newest, None
        search = await self._begin(shard, request)
        found = await self._reader.filter_of(shard, (request.subject,) if request.subject else ())
        page: list[StoredMessage] = []
        size, left = 0, STEP_BYTES
        missed = full = False
        for _ in range(self._bounds.blocks):
            more = search.aim(shard, found)
            if full or not more:
                return _in_order(page), search.token() if more else None
            left -= STEP_BYTES // _PAUSE_BLOCKS
            if left < 0:
                await asyncio.sleep(0)
                left = STEP_BYTES
            block = None
            if missed:
                # The last messages that the table has are removed, or after the point.
                search.seq = await self._reader.newest_below(
                    shard, search.seq + 1, 0, search.is_open, 1
                )
                missed = False
            else:
                block = await self._reader.block_below(shard, search.seq)
            await self._reader.prepare(shard, found)
            if not shard.machine.exists:
                raise ApiError(errors.STREAM_NOT_FOUND)
            if block is None:
                continue  # searched, or it was removed: aim again
            positions = search.newest_in(shard, block)
            missed = not positions
            for taken, position in enumerate(positions, 1):
                message = self._reader.message(shard, block, position)
                if message is None:
                    continue
                page.append(message)
                own = message_size(message.headers, len(message.payload))
                size += own
                left -= own + STEP_MESSAGE_BYTES
                full = len(page) >= request.limit or size >= self._bounds.page_bytes
                # The rest of the block follows in the next page, or in the next step.
                if full or left < 0:
                    search.take(block, positions[:taken], position)
                    break
            else:
                search.take(block, positions, 0)
        return _in_order(page), search.token() if search.aim(shard, found) else None

    def peek(self, shard: Shard, subject: str) -> Peeked:
        """As `Reader.peek`, for the newest message of a literal subject."""
        table = shard.machine.subjects
        sid = table.ids.get(subject)
        return None if sid is None else self._reader.peek(shard, table.last_of(sid), subject)

    async def _newest(self, shard: Shard, request: LastRequest) -> list[StoredMessage] | None:
        """Return the last message of a literal subject by the table; None if a search is needed.

        A search costs ten times as much, and this is the most frequent read of a key.
        """
        machine, table = shard.machine, shard.machine.subjects
        sid = table.ids.get(request.subject)
        if sid is None and machine.exists:
            return []
        if sid is None:
            return None
        seq = table.last_of(sid)
        if not machine.is_live(seq):
            newest = self._reader.newest
            seq = newest.known(shard, seq) or int(
                (await newest.find(shard, np.array([sid], np.uint32)))[0]
            )
        block = await self._reader.block_of(shard, seq)
        # Removed while the block was read. The search finds an older one, if there is any.
        if block is None or not machine.is_live(seq):
            return None
        message = self._reader.message(shard, block, seq - block.base_seq)
        return None if message is None else [message]

    async def _begin(self, shard: Shard, request: LastRequest) -> "_Search":
        record = shard.machine.record
        if record is None:
            raise ApiError(errors.STREAM_NOT_FOUND)
        asked = (record.incarnation, request.subject, request.up_to_seq, request.up_to_time_ns)
        digest = hashlib.blake2b(msgspec.msgpack.encode(asked), digest_size=8).digest()
        if request.token:
            token = decode_state(request.token, LastToken)
            # Another subject or point, or a stream that was created again: its open subjects mean
            # nothing here.
            if token.request != digest or len(token.gaps) > self._bounds.subjects:
                raise ApiError(errors.BAD_REQUEST, "the page token belongs to another request")
            return _Search.resume(token, shard.applied_seq, self._bounds.subjects)
        point_seq = shard.applied_seq
        if request.up_to_seq:
            point_seq = min(point_seq, request.up_to_seq)
        if request.up_to_time_ns:
            behind_seq = await self._reader.seq_of_time(shard, request.up_to_time_ns)
            point_seq = min(point_seq, behind_seq - 1)
        return _Search(digest, point_seq, self._bounds.subjects)


def _is_of_one_now(request: LastRequest) -> bool:
    """Whether a request only asks for the newest message of one subject."""
    points = request.up_to_seq or request.up_to_time_ns or request.token
    return not points and bool(request.subject) and not is_wildcard(request.subject)


def _in_order(page: list[StoredMessage]) -> list[StoredMessage]:
    return sorted(page, key=lambda message: message.seq)


class _Search:
    """The pass. ``_open`` subjects have no message in ``seq`` + 1 .. ``_point_seq``."""

    def __init__(self, request: bytes, point_seq: int, subjects_max: int) -> None:
        self._request = request
        self._point_seq = point_seq
        self._subjects_max = subjects_max
        # Number of the first subject that was not opened yet.
        self._next_sid = 0
        # Numbers of the open subjects, ascending.
        self._open: I64Array = np.zeros(0, np.int64)
        self.seq = point_seq

    @classmethod
    def resume(cls, token: LastToken, applied_seq: int, subjects_max: int) -> "_Search":
        """Continue where a page ended."""
        search = cls(token.request, min(token.point_seq, applied_seq), subjects_max)
        search._next_sid = token.next_sid
        search._open = np.cumsum(np.array(token.gaps, np.int64))
        search.seq = min(token.seq, search._point_seq)
        return search

    def token(self) -> str:
        """Return the token for :meth:`resume`."""
        gaps = np.diff(self._open, prepend=0).tolist()
        return encode_state(
            LastToken(self._request, self._point_seq, self._next_sid, self.seq, gaps)
        )

    def aim(self, shard: Shard, wanted: SubjectFilter) -> bool:
        """Set ``seq`` to where an open subject may have its message; False at the end."""
        table = shard.machine.subjects
        first_seq = shard.machine.counters.first_seq
        while True:
            at = table.numbered.slots(self._open)
            inside = (at >= 0) & (at < table.size)
            self._open, at = self._open[inside], at[inside]
            oldest = np.maximum(table.first[at], first_seq)
            kept = (table.counts[at] > 0) & (oldest <= self.seq)
            self._open = self._open[kept]
            if len(self._open):
                self.seq = min(self.seq, int(table.last[at[kept]].max()))
                return True
            self._open = self._next_subjects(table, wanted)
            if not len(self._open):
                return False
            self._next_sid = int(self._open[-1]) + 1
            self.seq = self._point_seq

    def is_open(self, sids: U32Array) -> NDArray[np.bool_]:
        """Which of the subjects are open."""
        return np.isin(sids, self._open)

    def _next_subjects(self, table: SubjectTable, wanted: SubjectFilter) -> I64Array:
        """Numbers of the next subjects that have messages up to the point."""
        found = np.zeros(0, np.int64)
        for slots in wanted.live_slots(table, self._next_sid):
            old = slots[table.first[slots] <= self._point_seq]
            found = np.append(found, table.numbered.numbers(old))
            if len(found) >= self._subjects_max:
                break
        return found[: self._subjects_max]

    def newest_in(self, shard: Shard, block: Block) -> list[int]:
        """Positions in ``block`` of open subjects' newest messages up to ``seq``, descending."""
        machine = shard.machine
        low = max(block.base_seq, machine.counters.first_seq) - block.base_seq
        stop = min(self.seq, block.last_seq) + 1 - block.base_seq
        if low >= stop:
            return []
        sids = block.subject_ids[low:stop]
        wanted = np.isin(sids, self._open)
        live = machine.deleted.live_mask(block.base_seq + low, stop - low)
        if live is not None:
            wanted &= live
        backwards = np.flatnonzero(wanted)[::-1]
        _, newest = np.unique(sids[backwards], return_index=True)
        positions: list[int] = (backwards[np.sort(newest)] + low).tolist()
        return positions

    def take(self, block: Block, positions: list[int], below: int) -> None:
        """Close the subjects at ``positions``, and continue below the position ``below``."""
        self._open = self._open[~np.isin(self._open, block.subject_ids[positions])]
        self.seq = block.base_seq + below - 1
