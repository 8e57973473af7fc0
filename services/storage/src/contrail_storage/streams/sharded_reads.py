"""Reading a stream with several shards as one: merged by time, in order within each shard.

A reader's position is a cursor: the next sequence of each shard. A read covers the messages that
were applied in all shards when it began, so its order by time is complete: later ones are newer.
"""

import asyncio
import hashlib
import heapq
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Final

import msgspec
import numpy as np

from contrail_common import errors
from contrail_common.columns.blocks import message_size
from contrail_common.cursors import Cursor
from contrail_common.errors import ApiError
from contrail_common.model import StoredMessage
from contrail_common.partition import SHARDS_MAX
from contrail_common.timeunits import INT64_MAX
from contrail_link.contract.read import (
    LastRequest,
    ManyRequest,
    ManyResult,
    PinnedReplay,
    RangeRequest,
    RangeResult,
    ReplayPlanRequest,
    ReplaySplit,
)
from contrail_storage.reading.last_reader import LastReader
from contrail_storage.reading.many_reads import ManyReader, Room
from contrail_storage.reading.page_tokens import (
    decode_state,
    decode_token,
    encode_state,
    encode_token,
)
from contrail_storage.reading.reader import Reader
from contrail_storage.reading.replay import SPLITS_MAX, Replayer, bounds_of
from contrail_storage.replica.shard import Shard, woken
from contrail_storage.streams.sharded_state import (
    bad_cursor,
    concerned,
    incarnation_of,
    own_cursor,
    shard_needed,
)

_READ_MESSAGES_MIN: Final = 16
_READ_BYTES_MIN: Final = 64 * 1024
"""Each shard is read in small parts, so that a read of many shards takes little memory."""
_LAST_PAGE_BYTES: Final = 1 << 20

_Seq = Annotated[int, msgspec.Meta(ge=0, le=INT64_MAX)]


class ShardedReader:
    """Reads all shards of a stream together, through the readers of one."""

    def __init__(
        self, reader: Reader, last_reader: LastReader, replayer: Replayer, many_reader: ManyReader
    ) -> None:
        self._reader = reader
        self._last_reader = last_reader
        self._replayer = replayer
        self._many_reader = many_reader

    # Many at once --------------------------------------------------------------------------------

    async def get_messages(self, shard: Shard, request: ManyRequest) -> ManyResult:
        """Return the messages of one shard with the sequences of the request."""
        seqs = np.array(request.seqs, np.int64)
        many = await self._many_reader.read(shard, seqs, Room(request.max_bytes))
        return ManyResult(_numbered(shard, many.found), sorted(many.left_out))

    async def newest(self, shards: Sequence[Shard], request: ManyRequest) -> ManyResult:
        """Return the newest message of each subject of the request, each from its own shard."""
        by_shard: dict[int, list[int]] = {}
        for at, subject in enumerate(request.subjects):
            one = concerned(shards, subject)[0] if len(shards) > 1 else shards[0]
            by_shard.setdefault(shards.index(one), []).append(at)
        room = Room(request.max_bytes)
        found: list[StoredMessage | None] = [None] * len(request.subjects)
        left_out: list[int] = []
        for number, positions in by_shard.items():
            subjects = [request.subjects[at] for at in positions]
            many = await self._many_reader.newest(shards[number], subjects, room)
            messages = _numbered(shards[number], many.found)
            for at, message in zip(positions, messages, strict=True):
                found[at] = message
            left_out += [positions[at] for at in many.left_out]
        return ManyResult(found, sorted(left_out))

    # Ranges --------------------------------------------------------------------------------------

    async def read_range(self, shards: Sequence[Shard], request: RangeRequest) -> RangeResult:
        """Return the messages of a range request; wait for the first if it says so.

        INVALID_FIELD for a sequence without a shard, and for a cursor of another stream.
        """
        if request.from_seq:
            raise shard_needed(len(shards), "or use a cursor")
        begin = await self._begin(shards, request)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + request.wait_ns / 1e9
        with _watched(shards) as changed:
            while True:
                merge = _Merge(self._reader, shards, begin, request)
                messages = await merge.read()
                left = deadline - loop.time()
                if messages or left <= 0 or not await woken(changed, left):
                    break
                for shard in shards:
                    shard.check_readable()
                begin = merge.cursor()
        cursor = merge.cursor()
        pending = await self._pending(shards, cursor, request.subject)
        return RangeResult(messages, 0, pending, cursor.text(), begin.text())

    async def read_one(self, shard: Shard, request: RangeRequest) -> RangeResult:
        """Read a single shard; its positions are sequences (INVALID_FIELD for a cursor)."""
        if request.cursor:
            raise bad_cursor("cannot be used when a single shard is read; use from_seq")
        found = await self._reader.read_range(shard, request)
        messages = with_shards(shard, found.messages)
        return RangeResult(messages, found.next_seq, found.num_pending)

    async def _begin(self, shards: Sequence[Shard], request: RangeRequest) -> Cursor:
        incarnation = incarnation_of(shards)
        if request.cursor:
            return own_cursor(request.cursor, shards)
        if not request.start_time_ns:
            return Cursor(incarnation, [shard.machine.counters.first_seq for shard in shards])
        seqs = [await self._reader.seq_of_time(shard, request.start_time_ns) for shard in shards]
        return Cursor(incarnation, seqs)

    async def _pending(self, shards: Sequence[Shard], cursor: Cursor, subject: str) -> int:
        total = 0
        for shard, next_seq in zip(shards, cursor.next_seqs, strict=True):
            wanted = await self._reader.filter_of(shard, (subject,) if subject else ())
            total += await self._reader.count(shard, next_seq, shard.applied_seq, wanted)
        return total

    # Subjects ------------------------------------------------------------------------------------

    async def subject_counts(
        self, shards: Sequence[Shard], subject: str, limit: int, token: str
    ) -> tuple[list[tuple[str, int]], str | None]:
        """(subject, messages) of matching subjects in byte order. Each subject is in one shard."""
        decode_token(token)
        found = [
            await self._reader.subject_counts(shard, subject, limit, token)
            for shard in concerned(shards, subject)
        ]
        counts = sorted(one for page, _ in found for one in page)
        more = len(counts) > limit or any(next_token for _, next_token in found)
        page = counts[:limit]
        return page, encode_token(page[-1][0]) if more else None

    async def last(
        self, shards: Sequence[Shard], request: LastRequest
    ) -> tuple[list[StoredMessage], str | None]:
        """Return the newest message of each subject, shard by shard, as of the first page.

        INVALID_FIELD for ``up_to_seq``; BAD_REQUEST for a token of another request.
        """
        if request.up_to_seq:
            raise shard_needed(len(shards), "or use up_to_time")
        found = concerned(shards, request.subject)
        position = self._last_position(shards, request)
        messages: list[StoredMessage] = []
        size = 0
        while position.at < len(found):
            shard, point_seq = found[position.at], position.points[position.at]
            token: str | None = None
            if point_seq:
                asked = msgspec.structs.replace(
                    request,
                    up_to_seq=0 if request.up_to_time_ns else point_seq,
                    token=position.token,
                    limit=request.limit - len(messages),
                )
                page, token = await self._last_reader.read(shard, asked)
                messages += with_shards(shard, page)
                size += sum(message_size(one.headers, len(one.payload)) for one in page)
            position = _LastPosition(
                position.request, position.points, position.at + (token is None), token or ""
            )
            if token is not None or len(messages) >= request.limit or size >= _LAST_PAGE_BYTES:
                break
        return messages, encode_state(position) if position.at < len(found) else None

    def _last_position(self, shards: Sequence[Shard], request: LastRequest) -> "_LastPosition":
        asked = (incarnation_of(shards), request.subject, request.up_to_time_ns)
        digest = hashlib.blake2b(msgspec.msgpack.encode(asked), digest_size=8).digest()
        found = concerned(shards, request.subject)
        if not request.token:
            return _LastPosition(digest, [shard.applied_seq for shard in found], 0, "")
        position = decode_state(request.token, _LastPosition)
        if position.request != digest or len(position.points) != len(found):
            raise ApiError(errors.BAD_REQUEST, "the page token belongs to another request")
        return position

    # Replay --------------------------------------------------------------------------------------

    async def plan(self, shards: Sequence[Shard], request: ReplayPlanRequest) -> PinnedReplay:
        """Pin the range in every shard and split it; INVALID_FIELD for sequences of no shard."""
        if request.from_seq or request.to_seq:
            raise shard_needed(len(shards))
        filters = request.subject.split() or [""]
        numbers = {one.machine.shard for each in filters for one in concerned(shards, each)}
        found = [shard for shard in shards if shard.machine.shard in numbers]
        bounds = [bounds_of(shard) for shard in found]
        pinned = [
            (shard, its.last_seq) for shard, its in zip(found, bounds, strict=True) if its.last_seq
        ]
        total = sum(shard.machine.counters.messages for shard, _ in pinned)
        splits: list[ReplaySplit] = []
        for shard, to_seq in pinned:
            part = request.splits * shard.machine.counters.messages // max(total, 1)
            asked = msgspec.structs.replace(request, to_seq=to_seq, splits=max(part, 1))
            most = max(SPLITS_MAX // len(pinned), 1)
            splits += (await self._replayer.plan(shard, asked, most)).splits
        return PinnedReplay(shards[0].name, incarnation_of(shards), splits, bounds)


class _LastPosition(msgspec.Struct, array_like=True):
    """The next page. ``points`` are the shards' last sequences as of the first page."""

    request: bytes
    points: Annotated[list[_Seq], msgspec.Meta(max_length=SHARDS_MAX)]
    at: Annotated[int, msgspec.Meta(ge=0, lt=SHARDS_MAX)]
    token: str


def with_shards(shard: Shard, messages: list[StoredMessage]) -> list[StoredMessage]:
    """Add the shard number to messages of ``shard``, if their stream has several shards."""
    if shard.machine.record is None or shard.machine.config.shards == 1:
        return messages
    number = shard.machine.shard
    return [
        StoredMessage(one.seq, one.subject, one.time_ns, one.headers, one.payload, number)
        for one in messages
    ]


def with_shard(shard: Shard, message: StoredMessage) -> StoredMessage:
    """Add the shard number to one message, as :func:`with_shards` does."""
    return with_shards(shard, [message])[0]


def _numbered(shard: Shard, found: list[StoredMessage | None]) -> list[StoredMessage | None]:
    """Add the shard number to the messages that are there, as :func:`with_shards` does."""
    if shard.machine.record is None or shard.machine.config.shards == 1:
        return found
    return [one if one is None else with_shard(shard, one) for one in found]


class _ShardRun:
    """One shard in a merge: messages that were read in advance, and the next sequence."""

    def __init__(self, reader: Reader, shard: Shard, next_seq: int, asked: RangeRequest) -> None:
        self.next_seq = max(next_seq, shard.machine.counters.first_seq)
        """The sequence after all messages that were taken or searched without a match."""
        self._reader = reader
        self._shard = shard
        self._asked = asked
        # Messages are read up to here, not including; fixed when the merge begins.
        self._end_seq = shard.applied_seq + 1
        # The sequence after the messages in `_ahead`, which are in descending order.
        self._read_to = self.next_seq
        self._ahead: list[StoredMessage] = []

    async def head(self) -> StoredMessage | None:
        """Return the next message without taking it; None at the end."""
        while not self._ahead and self._read_to < self._end_seq:
            asked = msgspec.structs.replace(
                self._asked, from_seq=self._read_to, start_time_ns=0, wait_ns=0
            )
            messages, next_seq = await self._reader.collect(self._shard, asked)
            if next_seq <= self._read_to and not messages:
                break
            self._read_to = next_seq
            inside = [one for one in messages if one.seq < self._end_seq]
            self._ahead = with_shards(self._shard, inside)[::-1]
        if self._ahead:
            return self._ahead[-1]
        self.next_seq = max(self.next_seq, min(self._read_to, self._end_seq))
        return None

    def take(self) -> StoredMessage:
        """Take the message that :meth:`head` returned."""
        message = self._ahead.pop()
        self.next_seq = message.seq + 1
        return message


class _Merge:
    """One pass over all shards from ``begin`` on, ordered by (time, shard)."""

    def __init__(
        self, reader: Reader, shards: Sequence[Shard], begin: Cursor, request: RangeRequest
    ) -> None:
        self._request = request
        self._begin = begin
        self._concerned = {shard.machine.shard for shard in concerned(shards, request.subject)}
        count = len(self._concerned)
        asked = msgspec.structs.replace(
            request,
            limit=min(request.limit, max(2 * request.limit // count, _READ_MESSAGES_MIN)),
            max_bytes=max(request.max_bytes // count, _READ_BYTES_MIN),
        )
        self._runs = [
            _ShardRun(reader, shard, next_seq, asked)
            for shard, next_seq in zip(shards, begin.next_seqs, strict=True)
        ]

    async def read(self) -> list[StoredMessage]:
        """Return messages up to the request's limits."""
        heads: list[tuple[int, int]] = []
        # Only shards that may have the subject; the position of the others stays.
        for number in sorted(self._concerned):
            await self._push(heads, number)
        messages: list[StoredMessage] = []
        size = 0
        while heads and len(messages) < self._request.limit:
            number = heads[0][1]
            message = await self._runs[number].head()
            assert message is not None
            size += message_size(message.headers, len(message.payload))
            if messages and size > self._request.max_bytes:
                break
            heapq.heappop(heads)
            messages.append(self._runs[number].take())
            await self._push(heads, number)
        return messages

    async def _push(self, heads: list[tuple[int, int]], number: int) -> None:
        message = await self._runs[number].head()
        if message is not None:
            # Equal times are ordered by shard, so every read of the range has the same order.
            heapq.heappush(heads, (message.time_ns, number))

    def cursor(self) -> Cursor:
        """Return the cursor at which the next pass begins."""
        return Cursor(self._begin.incarnation, [run.next_seq for run in self._runs])


@contextmanager
def _watched(shards: Sequence[Shard]) -> Iterator[asyncio.Event]:
    """Yield an event that is set whenever one of ``shards`` changes."""
    changed = asyncio.Event()
    for shard in shards:
        shard.listeners[changed.set] = None
    try:
        yield changed
    finally:
        for shard in shards:
            shard.listeners.pop(changed.set, None)
