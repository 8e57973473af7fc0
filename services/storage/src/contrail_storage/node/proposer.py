"""From waiting requests to log entries: everything that waits becomes one entry.

Messages of all requests for one shard are joined into one columnar command; an entry closes at
256 KiB or 2,000 messages. Batches come in columns and stay in them; single messages are put into
columns together, when their entry is made. While entries are on their way to the disk new requests
wait, so the next entry is larger: group commit without a timer.
"""

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from time import perf_counter
from typing import Final, Protocol

import numpy as np

from contrail_common import errors
from contrail_common.blocks import BLOCK_BYTES_MAX, BLOCK_MESSAGES_MAX
from contrail_common.errors import ApiError
from contrail_common.link import PubResult
from contrail_common.message_batch import MessageBatch, join_batches
from contrail_common.model import Expected, PublishMessage, header_size
from contrail_storage.core.commands import (
    Append,
    Command,
    Entry,
    HashedExpected,
    RestorePart,
    encode_entry,
)
from contrail_storage.core.results import Appended, Refused, Result
from contrail_storage.node.message_ids import hash_id, hash_ids

ENTRY_BYTES_MAX: Final = 256 * 1024
OUTSTANDING_BYTES_MAX: Final = 4 << 20
"""Half of what a group takes: an entry has up to 4 MiB, and none is to be refused for its size."""
WHOLE_BYTES_MAX: Final = BLOCK_BYTES_MAX * 3 // 2
"""A request up to here has a larger block to itself: to cut it copies what is cut off."""
QUEUE_BYTES_MAX: Final = 64 << 20
UNWRITTEN_BYTES_MAX: Final = 32 << 20
_ENTRIES_IN_FLIGHT: Final = 2
"""One would make publishes wait for the records of deliveries and acks, and the other way round."""
_MESSAGE_OVERHEAD: Final = 32


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


Outcome = list[PubResult] | ApiError
"""What became of the messages, in order; or why none of them was appended."""

Content = PublishMessage | MessageBatch
"""What one request publishes."""


class AppendRequest:
    """One publish request: its messages, the outcomes so far, and who is told all of them."""

    __slots__ = (
        "_ends", "_outcomes", "atomic", "content", "count", "done", "firsts", "remaining", "shard",
        "size", "taken",
    )  # fmt: skip

    def __init__(self, shard: int, content: Content, done: Callable[[Outcome], None]) -> None:
        self.shard = shard
        self.content = content
        self.done = done
        self.taken = 0
        self.atomic, self.firsts = _apart(content)
        self.count = self.remaining = _count(content)
        self.size = _size(content)
        self._ends: list[int] | None = None
        self._outcomes: list[tuple[int, list[PubResult]]] = []

    @property
    def ends(self) -> list[int]:
        """The sums of the messages' bytes, up to each of them; ``size`` is the last."""
        if self._ends is None:  # most requests need none: they are taken whole
            self._ends = _ends(self.content)
        return self._ends

    @property
    def needs_an_entry(self) -> bool:
        """Whether the first message that is not taken yet is larger than an entry's bound."""
        if self.size <= ENTRY_BYTES_MAX:
            return False
        return self.ends[self.taken] - self.bytes_before(self.taken) > ENTRY_BYTES_MAX

    def stop_before(self, taken: int) -> int:
        """Up to where messages can stand in a command that has ``taken`` others before them."""
        if taken and self.taken in self.firsts:
            return self.taken
        return min((at for at in self.firsts if at > self.taken), default=self.count)

    def bytes_before(self, position: int) -> int:
        """Bytes of the messages before ``position``."""
        return self.ends[position - 1] if position else 0

    def settle(self, start: int, count: int, runs: list[PubResult]) -> None:
        """Outcomes of the ``count`` messages from position ``start`` on."""
        self._outcomes.append((start, runs))
        self.remaining -= count
        if self.remaining:
            return
        if len(self._outcomes) > 1:
            # Parts are settled in order, except for what was lost.
            parts = sorted(self._outcomes, key=itemgetter(0))
            runs = [run for _, part in parts for run in part]
        self.done(runs)


def _apart(content: Content) -> tuple[bool, Collection[int]]:
    """Whether the content is a command of its own, and which positions must begin one.

    That is what replaces the whole stream, the messages just before it included.
    """
    if isinstance(content, PublishMessage):
        return False, (0,) if content.rollup == "all" else ()
    if content.rollups is None:
        return content.atomic, ()
    return content.atomic, [at for at, rollup in content.rollups.items() if rollup == "all"]


def _count(content: Content) -> int:
    return 1 if isinstance(content, PublishMessage) else content.count


def _size(content: Content) -> int:
    if not isinstance(content, PublishMessage):
        return content.size() + content.count * _MESSAGE_OVERHEAD
    size = len(content.payload) + len(content.subject) + _MESSAGE_OVERHEAD
    return size + header_size(content.headers) if content.headers else size


def _ends(content: Content) -> list[int]:
    if isinstance(content, PublishMessage):
        return [_size(content)]
    ends: list[int] = np.cumsum(content.sizes() + _MESSAGE_OVERHEAD).tolist()
    return ends


def set_outcome(future: asyncio.Future[list[PubResult]], outcome: Outcome) -> None:
    """Give ``outcome`` to whoever still waits for ``future``."""
    if future.done():
        return
    if isinstance(outcome, ApiError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def tell_each(done: Callable[[Outcome], None], outcome: Outcome) -> None:
    """Call ``done`` with a result for each message instead of runs."""
    if isinstance(outcome, ApiError):
        done(outcome)
    else:
        done([result for run in outcome for result in run.each()])


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

    def settle(self, runs: list[PubResult]) -> None:
        """Outcomes of these messages."""
        self.request.settle(self.start, self.count, runs)

    def refuse(self, code: int, detail: str) -> None:
        """None of these messages was stored, or it is not known."""
        self.settle([PubResult(0, code=code, detail=detail, count=self.count)])


Waiter = list[Span] | asyncio.Future[Result]


@dataclass(slots=True, eq=False)
class EntryContext:
    """What the leader keeps of its own entry: the decoded entry, and who waits for each command."""

    entry: Entry
    waiters: list[Waiter]
    begun: float = field(default_factory=perf_counter)

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
        for waiter in self.waiters:
            if isinstance(waiter, list):
                for span in waiter:
                    span.refuse(error.spec.code, error.detail)
            elif not waiter.done():
                waiter.set_exception(error)


def _resolve_append(spans: list[Span], result: Result) -> None:
    if isinstance(result, Refused):
        for span in spans:
            span.refuse(result.code, result.detail)
        return
    assert isinstance(result, Appended)
    seq = result.first_seq
    position = 0
    for span in spans:
        if result.exceptions is None:
            runs = [PubResult(seq, count=span.count)]
            seq += span.count
        else:
            runs, seq = _runs(result.exceptions, position, span.count, seq)
        position += span.count
        span.settle(runs)


def _runs(
    exceptions: dict[int, Refused | int], start: int, count: int, seq: int
) -> tuple[list[PubResult], int]:
    """Outcomes of ``count`` messages from ``start`` on, and the sequence behind the last stored.

    The first of them that was stored has sequence ``seq``.
    """
    runs: list[PubResult] = []
    stored = 0
    for at in range(start, start + count):
        verdict = exceptions.get(at)
        if verdict is None:
            stored += 1
            continue
        if stored:
            runs.append(PubResult(seq, count=stored))
            seq += stored
            stored = 0
        if isinstance(verdict, Refused):
            runs.append(PubResult(0, code=verdict.code, detail=verdict.detail))
        else:
            runs.append(PubResult(verdict, duplicate=True))
    if stored:
        runs.append(PubResult(seq, count=stored))
    return runs, seq + stored


class _AppendBuilder:
    """Collects messages for one append command."""

    def __init__(self, shard: int) -> None:
        self.shard = shard
        self.spans: list[Span] = []
        self.count = 0
        self.bytes = 0
        self._parts: list[MessageBatch] = []
        self._singles: list[PublishMessage] = []

    def take(self, request: AppendRequest, room: int) -> bool:
        """Take messages of ``request`` while they fit; True when the request is used up."""
        start = request.taken
        room = min(room, BLOCK_MESSAGES_MAX - self.count)
        if request.atomic:
            if not self.count:
                self._add(request, 0, request.count, request.size)
            return request.taken > 0
        if request.firsts:
            room = min(room, request.stop_before(self.count) - start)
        whole_max = BLOCK_BYTES_MAX if self.count else WHOLE_BYTES_MAX
        if not start and request.count <= room and self.bytes + request.size <= whole_max:
            self._add(request, 0, request.count, request.size)
            return True
        before = request.bytes_before(start)
        fitting = bisect_right(request.ends, before + BLOCK_BYTES_MAX - self.bytes, start)
        if fitting == start and not self.count:
            fitting = start + 1  # a message larger than a block has one to itself
        stop = min(fitting, start + room)
        if stop > start:
            self._add(request, start, stop, request.bytes_before(stop) - before)
        return stop == request.count

    def _add(self, request: AppendRequest, start: int, stop: int, size: int) -> None:
        content = request.content
        if isinstance(content, PublishMessage):
            self._singles.append(content)
        else:
            self._join_singles()
            self._parts.append(content.slice(start, stop))
        self.spans.append(Span(request, start, stop - start))
        self.count += stop - start
        self.bytes += size
        request.taken = stop

    def _join_singles(self) -> None:
        if self._singles:
            self._parts.append(MessageBatch.of(self._singles))
            self._singles = []

    def build(self, hash_key: bytes) -> Append:
        """The columnar command."""
        self._join_singles()
        batch = join_batches(self._parts)
        expected = None
        if batch.expected is not None:
            expected = {at: _hashed(one, hash_key) for at, one in batch.expected.items()}
        return Append(
            batch.subjects,
            batch.subject_index,
            batch.columns,
            None if batch.ids is None else hash_ids(batch.ids, hash_key),
            expected,
            batch.rollups,
            batch.atomic,
            batch.ttls,
        )


def _hashed(expected: Expected, key: bytes) -> HashedExpected:
    last_id = expected.last_msg_id
    return HashedExpected(
        expected.stream,
        expected.last_seq,
        expected.last_subject_seq,
        expected.last_subject_seq_subject,
        None if last_id is None else hash_id(last_id, key),
    )


@dataclass(slots=True, eq=False)
class Proposer:
    """Queues the requests of one Raft group and turns them into entries, in order."""

    group: Group
    log_time_ns: Callable[[], int]
    hash_key: Callable[[int], bytes]
    refusals: tuple[type[Exception], ...]
    unwritten_bytes: Callable[[], int]
    check_room: Callable[[int], None] = lambda size: None
    """Raises ApiError when there is no room for so many bytes of messages."""
    _queue: deque[AppendRequest | CommandRequest] = field(default_factory=deque)
    _queue_bytes: int = 0
    _held_bytes: int = 0
    _in_flight: int = 0
    _scheduled: bool = False

    def append(self, shard: int, messages: list[PublishMessage]) -> asyncio.Future[list[PubResult]]:
        """Propose messages (at least one); the future gives a result for each, in order.

        Raises ApiError (OVERLOADED, NOT_READY) at once, without effect.
        """
        future: asyncio.Future[list[PubResult]] = asyncio.get_running_loop().create_future()
        self.append_then(shard, messages, partial(set_outcome, future))
        return future

    def append_then(
        self, shard: int, messages: list[PublishMessage], done: Callable[[Outcome], None]
    ) -> None:
        """Propose messages; ``done`` is called once, in the midst of applying: it must not raise.

        Raises as :meth:`append` does.
        """
        if len(messages) == 1:
            self._enqueue(AppendRequest(shard, messages[0], done))
        else:
            self._enqueue(AppendRequest(shard, MessageBatch.of(messages), partial(tell_each, done)))

    def append_batch(self, shard: int, batch: MessageBatch) -> asyncio.Future[list[PubResult]]:
        """Propose a batch of at least one message; the future gives its outcomes as runs.

        Raises as :meth:`append` does.
        """
        future: asyncio.Future[list[PubResult]] = asyncio.get_running_loop().create_future()
        self.append_batch_then(shard, batch, partial(set_outcome, future))
        return future

    def append_batch_then(
        self, shard: int, batch: MessageBatch, done: Callable[[Outcome], None]
    ) -> None:
        """Propose a batch; ``done`` gets its outcomes as runs, as :meth:`append_then` calls it."""
        self._enqueue(AppendRequest(shard, batch, done))

    def _enqueue(self, request: AppendRequest) -> None:
        self.check_room(request.size)
        loop = self._admit(request.size)
        self._queue.append(request)
        self._schedule(loop)

    def command(self, shard: int, command: Command, size: int = 256) -> asyncio.Future[Result]:
        """Propose any other command; the future gives its result."""
        if isinstance(command, RestorePart):
            self.check_room(size)
        loop = self._admit(size)
        future: asyncio.Future[Result] = loop.create_future()
        self._queue.append(CommandRequest(shard, command, future, size))
        self._schedule(loop)
        return future

    def _admit(self, size: int) -> asyncio.AbstractEventLoop:
        if not self.group.is_leader:
            raise ApiError(errors.NOT_READY, "no leader", retry_after_s=1, applied=False)
        if self.queued_bytes and self.queued_bytes + size > QUEUE_BYTES_MAX:
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
            if size and request.needs_an_entry:
                break  # it has an entry to itself
            builder = open_builders.get(request.shard)
            if builder is None:
                builder = open_builders[request.shard] = _AppendBuilder(request.shard)
            before_bytes, before = builder.bytes, builder.count
            used_up = builder.take(request, BLOCK_MESSAGES_MAX - messages)
            messages += builder.count - before
            size += builder.bytes - before_bytes
            if used_up:
                queue.popleft()
                self._queue_bytes -= request.size
            if request.atomic or not used_up:
                close(open_builders.pop(request.shard))
        for builder in open_builders.values():
            close(builder)
        return EntryContext(Entry(self.log_time_ns(), commands), waiters)

    @property
    def queued_bytes(self) -> int:
        """Bytes of requests that wait for an entry, and of what is held in front of them."""
        return self._queue_bytes + self._held_bytes

    def hold(self, size: int) -> None:
        """Count ``size`` bytes that are on their way here (negative: no longer).

        Raises ApiError (OVERLOADED, NOT_READY) for what would not be taken now.
        """
        if size > 0:
            self._admit(size)
            self._queue_bytes -= size
        self._held_bytes += size

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
                rest = request.count - request.taken
                unknown = PubResult(0, code=errors.OUTCOME_UNKNOWN.code, count=rest)
                request.settle(request.taken, rest, [unknown])
            else:
                request.done(refusal)
        self._queue_bytes = 0
