"""From waiting requests to log entries: everything that waits becomes one entry.

Messages of all requests for one shard are joined into one columnar command; an entry closes at
256 KiB or 2,000 messages. While entries are on their way to the disk new requests wait, so the next
entry is larger: group commit without a timer.
"""

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate
from typing import Final, Protocol

import numpy as np

from contrail_common import errors
from contrail_common.blocks import BLOCK_BYTES_MAX, BLOCK_MESSAGES_MAX, columns_of
from contrail_common.errors import ApiError
from contrail_common.link import PubResult
from contrail_common.model import Expected, PublishMessage, header_size
from contrail_storage.core.commands import (
    Append,
    Command,
    Entry,
    HashedExpected,
    encode_entry,
)
from contrail_storage.core.dedupe import ID_BYTES, NO_ID
from contrail_storage.core.results import Appended, Refused, Result

ENTRY_BYTES_MAX: Final = 256 * 1024
OUTSTANDING_BYTES_MAX: Final = 8 << 20
QUEUE_BYTES_MAX: Final = 64 << 20
UNWRITTEN_BYTES_MAX: Final = 32 << 20
_ENTRIES_IN_FLIGHT: Final = 2
_MESSAGE_OVERHEAD: Final = 32
_UNKNOWN: Final = PubResult(0, code=errors.OUTCOME_UNKNOWN.code)


class Group(Protocol):
    """What the proposer needs of a Raft group."""

    @property
    def is_leader(self) -> bool:
        """Whether this node may propose."""
        ...

    @property
    def outstanding_bytes(self) -> int:
        """Bytes proposed and not yet committed."""
        ...

    def propose(self, data: bytes, context: object) -> int:
        """Append an entry; ``context`` comes back with it when it is committed."""
        ...


class AppendRequest:
    """One publish request: its messages, the results so far, and the future of all of them."""

    __slots__ = ("ends", "future", "messages", "remaining", "results", "shard", "taken")

    def __init__(
        self,
        shard: int,
        messages: list[PublishMessage],
        ends: list[int],
        future: asyncio.Future[list[PubResult]],
    ) -> None:
        self.shard = shard
        self.messages = messages
        self.ends = ends
        self.future = future
        self.taken = 0
        self.remaining = len(messages)
        self.results: list[PubResult] = [_UNKNOWN] * len(messages)

    @property
    def size(self) -> int:
        """Bytes of all messages; ``ends`` are the sums up to each of them."""
        return self.ends[-1]

    @property
    def next_size(self) -> int:
        """Bytes of the first message that is not taken yet."""
        return self.ends[self.taken] - self.bytes_before(self.taken)

    def bytes_before(self, position: int) -> int:
        """Bytes of the messages before ``position``."""
        return self.ends[position - 1] if position else 0

    def settle(self, start: int, results: list[PubResult]) -> None:
        """Results of the messages from position ``start`` on."""
        self.results[start : start + len(results)] = results
        self.remaining -= len(results)
        if self.remaining == 0 and not self.future.done():
            self.future.set_result(self.results)


@dataclass(slots=True, eq=False)
class CommandRequest:
    """A command that is not an append, and the future of its result."""

    shard: int
    command: Command
    future: asyncio.Future[Result]
    size: int


@dataclass(slots=True, eq=False)
class Span:
    """Messages of one request within one append command."""

    request: AppendRequest
    start: int
    count: int


Waiter = list[Span] | asyncio.Future[Result]


@dataclass(slots=True, eq=False)
class EntryContext:
    """What the leader keeps of its own entry: the decoded entry, and who waits for each command."""

    entry: Entry
    waiters: list[Waiter]

    def resolve(self, results: list[Result]) -> None:
        """Hand out the results of the entry's commands."""
        for waiter, result in zip(self.waiters, results, strict=True):
            if isinstance(waiter, list):
                _resolve_append(waiter, result)
            elif not waiter.done():
                waiter.set_result(result)

    def unknown(self) -> None:
        """The outcome will never be known here."""
        self._fail(ApiError(errors.OUTCOME_UNKNOWN))

    def refuse(self) -> None:
        """The entry was certainly not appended."""
        self._fail(ApiError(errors.NOT_READY, "no leader", retry_after_s=1, applied=False))

    def _fail(self, error: ApiError) -> None:
        result = PubResult(0, code=error.spec.code, detail=error.detail)
        for waiter in self.waiters:
            if isinstance(waiter, list):
                for span in waiter:
                    span.request.settle(span.start, [result] * span.count)
            elif not waiter.done():
                waiter.set_exception(error)


def _resolve_append(spans: list[Span], result: Result) -> None:
    position = 0
    if isinstance(result, Refused):
        refused = PubResult(0, code=result.code, detail=result.detail)
        for span in spans:
            span.request.settle(span.start, [refused] * span.count)
        return
    assert isinstance(result, Appended)
    seq = result.first_seq
    exceptions = result.exceptions
    for span in spans:
        if exceptions is None:
            stop = seq + span.count
            results = [PubResult(number) for number in range(seq, stop)]
            seq = stop
        else:
            results = []
            for at in range(position, position + span.count):
                verdict = exceptions.get(at)
                if verdict is None:
                    results.append(PubResult(seq))
                    seq += 1
                elif isinstance(verdict, Refused):
                    results.append(PubResult(0, code=verdict.code, detail=verdict.detail))
                else:
                    results.append(PubResult(verdict, duplicate=True))
        position += span.count
        span.request.settle(span.start, results)


class _AppendBuilder:
    """Collects messages for one append command."""

    def __init__(self, shard: int) -> None:
        self.shard = shard
        self.messages: list[PublishMessage] = []
        self.spans: list[Span] = []
        self.bytes = 0

    def take(self, request: AppendRequest, room: int) -> bool:
        """Take messages of ``request`` while they fit; True when the request is used up."""
        messages, start = request.messages, request.taken
        before = request.bytes_before(start)
        fitting = bisect_right(request.ends, before + BLOCK_BYTES_MAX - self.bytes, start)
        if fitting == start and not self.messages:
            fitting = start + 1  # a message larger than a block has one to itself
        stop = min(fitting, start + min(room, BLOCK_MESSAGES_MAX - len(self.messages)))
        if stop > start:
            whole = stop - start == len(messages)
            self.messages += messages if whole else messages[start:stop]
            self.spans.append(Span(request, start, stop - start))
            self.bytes += request.bytes_before(stop) - before
            request.taken = stop
        return stop == len(messages)

    def build(self, hash_key: bytes) -> Append:
        """The columnar command."""
        messages = self.messages
        subjects = [message.subject for message in messages]
        table = {subject: at for at, subject in enumerate(dict.fromkeys(subjects))}
        index = np.fromiter(map(table.__getitem__, subjects), np.uint32, len(subjects))
        headers = [message.headers for message in messages]
        return Append(
            list(table),
            index.tobytes(),
            columns_of([message.payload for message in messages], headers),
            _ids(messages, hash_key),
            _expected(messages, hash_key),
        )


def hash_id(message_id: str, key: bytes) -> bytes:
    """The 128-bit keyed hash under which a message id is remembered."""
    return blake2b(message_id.encode(), digest_size=ID_BYTES, key=key).digest()


def _ids(messages: list[PublishMessage], key: bytes) -> bytes | None:
    texts = [message.msg_id for message in messages]
    if not any(texts):
        return None
    return b"".join([hash_id(text, key) if text else NO_ID for text in texts])


def _expected(messages: list[PublishMessage], key: bytes) -> dict[int, HashedExpected] | None:
    asked = [message.expected for message in messages]
    if not any(asked):
        return None
    return {at: _hashed(one, key) for at, one in enumerate(asked) if one is not None}


def _hashed(expected: Expected, key: bytes) -> HashedExpected:
    last_id = expected.last_msg_id
    hashed = None
    if last_id is not None:
        hashed = hash_id(last_id, key) if last_id else NO_ID
    return HashedExpected(
        expected.stream,
        expected.last_seq,
        expected.last_subject_seq,
        expected.last_subject_seq_subject,
        hashed,
    )


def _weight(message: PublishMessage) -> int:
    size = len(message.payload) + len(message.subject) + _MESSAGE_OVERHEAD
    return size + header_size(message.headers) if message.headers else size


@dataclass(slots=True, eq=False)
class Proposer:
    """Queues the requests of one Raft group and turns them into entries, in order."""

    group: Group
    log_time_ns: Callable[[], int]
    hash_key: Callable[[int], bytes]
    refusals: tuple[type[Exception], ...]
    unwritten_bytes: Callable[[], int]
    _queue: deque[AppendRequest | CommandRequest] = field(default_factory=deque)
    _queue_bytes: int = 0
    _in_flight: int = 0
    _scheduled: bool = False

    def append(self, shard: int, messages: list[PublishMessage]) -> asyncio.Future[list[PubResult]]:
        """Propose messages (at least one); the future gives a result for each, in order.

        Raises ApiError (OVERLOADED, NOT_READY) at once, without effect.
        """
        ends = list(accumulate(map(_weight, messages)))
        loop = self._admit(ends[-1])
        future: asyncio.Future[list[PubResult]] = loop.create_future()
        self._queue.append(AppendRequest(shard, messages, ends, future))
        self._schedule(loop)
        return future

    def command(self, shard: int, command: Command, size: int = 256) -> asyncio.Future[Result]:
        """Propose any other command; the future gives its result."""
        loop = self._admit(size)
        future: asyncio.Future[Result] = loop.create_future()
        self._queue.append(CommandRequest(shard, command, future, size))
        self._schedule(loop)
        return future

    def _admit(self, size: int) -> asyncio.AbstractEventLoop:
        if not self.group.is_leader:
            raise ApiError(errors.NOT_READY, "no leader", retry_after_s=1, applied=False)
        if self._queue_bytes and self._queue_bytes + size > QUEUE_BYTES_MAX:
            raise ApiError(
                errors.OVERLOADED,
                "too many bytes wait to be written",
                retry_after_s=1,
                applied=False,
            )
        self._queue_bytes += size
        return asyncio.get_running_loop()

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Make entries of what waits and propose them, while the log keeps up."""
        self._scheduled = False
        while self._queue and self._may_propose():
            context = self._next_entry()
            try:
                self.group.propose(encode_entry(context.entry), context)
            except self.refusals:
                context.refuse()
            else:
                self._in_flight += 1

    def _may_propose(self) -> bool:
        if self.unwritten_bytes() > UNWRITTEN_BYTES_MAX:
            return False  # the store is behind: :meth:`resume` comes when it has caught up
        if self._in_flight < _ENTRIES_IN_FLIGHT:
            return True
        full = self._queue_bytes >= ENTRY_BYTES_MAX
        return full and self.group.outstanding_bytes < OUTSTANDING_BYTES_MAX

    def _next_entry(self) -> EntryContext:
        commands: list[tuple[int, Command]] = []
        waiters: list[Waiter] = []
        open_builders: dict[int, _AppendBuilder] = {}

        def close(builder: _AppendBuilder) -> None:
            commands.append((builder.shard, builder.build(self.hash_key(builder.shard))))
            waiters.append(builder.spans)

        size = messages = 0
        queue = self._queue
        while queue and size < ENTRY_BYTES_MAX and messages < BLOCK_MESSAGES_MAX:
            request = queue[0]
            if isinstance(request, CommandRequest):
                builder = open_builders.pop(request.shard, None)
                if builder is not None:
                    close(builder)
                commands.append((request.shard, request.command))
                waiters.append(request.future)
                size += request.size
                self._queue_bytes -= request.size
                queue.popleft()
                continue
            if size and request.next_size > ENTRY_BYTES_MAX:
                break  # it has an entry to itself
            builder = open_builders.get(request.shard)
            if builder is None:
                builder = open_builders[request.shard] = _AppendBuilder(request.shard)
            before_bytes, before = builder.bytes, len(builder.messages)
            used_up = builder.take(request, BLOCK_MESSAGES_MAX - messages)
            messages += len(builder.messages) - before
            size += builder.bytes - before_bytes
            if used_up:
                queue.popleft()
                self._queue_bytes -= request.size
            else:
                close(open_builders.pop(request.shard))
        for builder in open_builders.values():
            close(builder)
        return EntryContext(Entry(self.log_time_ns(), commands), waiters)

    @property
    def queued_bytes(self) -> int:
        """Bytes of requests that wait for an entry."""
        return self._queue_bytes

    def settled(self) -> None:
        """An entry left the flight (applied, or lost): the next may follow."""
        self._in_flight -= 1
        self.resume()

    def resume(self) -> None:
        """Something that held entries back may be gone."""
        if self._queue and not self._scheduled:
            self._schedule(asyncio.get_running_loop())

    def fail_all(self) -> None:
        """Leadership or the log is lost: what still waits here was not applied."""
        refusal = ApiError(errors.NOT_READY, "no leader", retry_after_s=1, applied=False)
        while self._queue:
            request = self._queue.popleft()
            if isinstance(request, CommandRequest):
                if not request.future.done():
                    request.future.set_exception(refusal)
            elif request.taken:
                rest = len(request.messages) - request.taken
                request.settle(request.taken, [_UNKNOWN] * rest)
            elif not request.future.done():
                request.future.set_exception(refusal)
        self._queue_bytes = 0
