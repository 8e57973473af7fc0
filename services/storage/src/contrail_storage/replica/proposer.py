"""From waiting requests to log entries: everything that waits becomes one entry.

An entry closes at 256 KiB or 2,000 messages. While entries are on their way to the disk new
requests wait, so the next entry is larger: group commit without a timer.

Whatever goes wrong on the way, everybody who waits is told: that it was refused, when the log
certainly does not have it, and that the outcome is unknown otherwise.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

import structlog
from msgspec import Raw

from contrail_common import errors
from contrail_common.columns.blocks import BLOCK_MESSAGES_MAX
from contrail_common.columns.message_batch import MessageBatch
from contrail_common.errors import ApiError
from contrail_common.model import PublishMessage
from contrail_link.contract import PubResult
from contrail_storage.core.commands import Command, RestorePart, encode_command, encode_parts
from contrail_storage.core.results import Refused, Result
from contrail_storage.replica.entries import (
    COMMAND_BYTES_MAX,
    COMMAND_OVERHEAD,
    ENTRY_BYTES_MAX,
    LOGGED_BYTES_MAX,
    AppendRequest,
    CommandRequest,
    EntryBuilder,
    EntryContext,
    Outcome,
    Part,
    no_leader,
    not_logged,
    overloaded,
    set_outcome,
    tell_each,
)
from contrail_storage.replica.entry_sizes import in_slices

OUTSTANDING_BYTES_MAX: Final = 4 << 20
"""Half of what a group takes, so that no entry is refused for its size."""
QUEUE_BYTES_MAX: Final = 64 << 20
UNWRITTEN_BYTES_MAX: Final = 32 << 20
_ENTRIES_IN_FLIGHT: Final = 2
"""One would make publishes wait for the records of deliveries and acks, and the other way round."""
_STUCK_S: Final = 10.0
"""When nothing has moved for so long although something waits, the node is not ready."""
_log = structlog.get_logger("contrail.proposer")


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


async def _all(futures: list[asyncio.Future[Result]]) -> Result:
    """The result of a command that was cut into slices: of the last, or of one that failed."""
    outcomes = await asyncio.gather(*futures, return_exceptions=True)
    failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if failed:
        raise failed[0] if len(failed) == len(outcomes) else ApiError(errors.OUTCOME_UNKNOWN)
    results = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
    return next((one for one in results if isinstance(one, Refused)), results[-1])


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
    busy: tuple[type[Exception], ...] = ()
    """What ``group`` raises where too much waits for the disk; nothing was appended then."""
    _queue: deque[AppendRequest | CommandRequest] = field(default_factory=deque)
    _queue_bytes: int = 0
    _held_bytes: int = 0
    _in_flight: int = 0
    _scheduled: bool = False
    _moved_s: float = 0.0
    """When something was last taken, proposed or settled, by the loop's clock."""

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
        request.check_size()
        loop = self._admit(request.size)
        self._queue.append(request)
        self._schedule(loop)

    def command(self, shard: int, command: Command) -> asyncio.Future[Result]:
        """Propose any other command; the future gives its result.

        A long one is cut into slices, of which all are taken or none; when some of them were lost,
        the outcome of the whole is unknown. Raises as :meth:`append` does.
        """
        slices = [(each, self._encoded(each)) for each in in_slices(command)]
        size = sum(len(encoded) + COMMAND_OVERHEAD for _, encoded in slices)
        if isinstance(command, RestorePart):
            self.check_room(size)
        loop = self._admit(size)
        futures: list[asyncio.Future[Result]] = []
        for each, encoded in slices:
            futures.append(loop.create_future())
            self._queue.append(CommandRequest(shard, each, encoded, futures[-1]))
        self._schedule(loop)
        return futures[0] if len(futures) == 1 else asyncio.ensure_future(_all(futures))

    def _encoded(self, command: Command) -> Raw:
        try:
            encoded = encode_command(command)
        except Exception as error:
            _log.exception("command_not_encoded", command=type(command).__name__)
            raise not_logged(f"the command cannot be logged: {error!r}") from error
        if len(encoded) > COMMAND_BYTES_MAX:
            size = len(encoded)
            message = (
                f"{size} bytes do not fit into a log entry (at most {COMMAND_BYTES_MAX} bytes)"
            )
            raise ApiError(errors.BODY_TOO_LARGE, message, applied=False)
        return encoded

    def _admit(self, size: int) -> asyncio.AbstractEventLoop:
        if not self.group.is_leader:
            raise no_leader()
        if self.queued_bytes and self.queued_bytes + size > QUEUE_BYTES_MAX:
            raise overloaded()
        loop = asyncio.get_running_loop()
        if not self._queue and not self._in_flight:
            self._moved_s = loop.time()
        self._queue_bytes += size
        return loop

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Make entries of what waits and propose them, while the log keeps up."""
        self._scheduled = False
        while self._queue and self._may_propose():
            context, parts = self._next_entry()
            if context.waiters:
                self._propose(context, parts)

    def _propose(self, context: EntryContext, parts: list[Part]) -> None:
        try:
            data = encode_parts(context.entry.time_ns, parts)
        except Exception as error:
            _log.exception("entry_not_encoded")
            context.refuse(not_logged(f"the entry cannot be logged: {error!r}"))
            return
        if len(data) > LOGGED_BYTES_MAX:
            _log.critical("entry_too_large", bytes=len(data))
            context.refuse(not_logged(f"an entry of {len(data)} bytes cannot be logged"))
            return
        try:
            self.group.propose(data, context)
        except self.refusals:
            context.refuse(no_leader())
        except self.busy:
            context.refuse(overloaded())
        except Exception:
            _log.exception("entry_not_proposed")
            context.unknown()  # nobody says that the log does not have it
        else:
            self._in_flight += 1
            self._moved_s = asyncio.get_running_loop().time()

    def _may_propose(self) -> bool:
        if self.unwritten_bytes() > UNWRITTEN_BYTES_MAX:
            return False  # the store is behind: :meth:`resume` comes when it has caught up
        if self._in_flight < _ENTRIES_IN_FLIGHT:
            return True
        full = self._queue_bytes >= ENTRY_BYTES_MAX
        return full and self.group.outstanding_bytes < OUTSTANDING_BYTES_MAX

    def _next_entry(self) -> tuple[EntryContext, list[Part]]:
        """What waits, as an entry, and its commands as they are to be encoded."""
        entry = EntryBuilder(self.log_time_ns(), self.hash_key)
        queue = self._queue
        while queue and entry.size < ENTRY_BYTES_MAX and entry.messages < BLOCK_MESSAGES_MAX:
            request = queue[0]
            if entry.size and request.needs_an_entry:
                break
            if isinstance(request, CommandRequest):
                entry.add(request)
            elif not self._take(entry, request):
                continue
            queue.popleft()
            self._queue_bytes -= request.size
        return entry.finish()

    def _take(self, entry: EntryBuilder, request: AppendRequest) -> bool:
        """Take messages of ``request``; True when it is used up."""
        try:
            return entry.take(request)
        except Exception as error:
            _log.exception("messages_not_encoded")
            request.give_up(not_logged(f"the messages cannot be logged: {error!r}"))
            return True

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
        self._moved_s = asyncio.get_running_loop().time()
        self.resume()

    def resume(self) -> None:
        """Something that held entries back may be gone."""
        if self._queue and not self._scheduled:
            self._schedule(asyncio.get_running_loop())

    def fail_all(self) -> None:
        """Leadership or the log is lost: what still waits here was not applied."""
        while self._queue:
            self._queue.popleft().give_up(no_leader())
        self._queue_bytes = 0

    @property
    def problem(self) -> str:
        """Why what waits does not get on, in a sentence; empty while it does."""
        waiting = len(self._queue) + self._in_flight
        stood_s = asyncio.get_running_loop().time() - self._moved_s
        if not waiting or stood_s < _STUCK_S:
            return ""
        cause = "the log does not confirm writes"
        if self.unwritten_bytes() > UNWRITTEN_BYTES_MAX:
            cause = "the store cannot keep up with the log"
        elif not self._in_flight:
            cause = "no entry reaches the log"
        return f"requests have been waiting for {stood_s:.0f} s: {cause}"
