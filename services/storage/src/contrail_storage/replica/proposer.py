"""Turn waiting requests into log entries. All requests that wait go into one entry.

An entry closes at 256 KiB or 2,000 messages. While entries are on their way to the disk, new
requests wait, so the next entry is larger: group commit without a timer.

Every waiting caller gets an answer when something fails. It is a refusal if the log certainly does
not have the request, and an unknown outcome otherwise.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol

import structlog
from msgspec import Raw

from contrail_common import errors
from contrail_common.columns.blocks import BLOCK_BYTES_MAX, BLOCK_MESSAGES_MAX
from contrail_common.errors import ApiError
from contrail_storage.core.commands import (
    Acknowledge,
    Command,
    Exhaust,
    RestorePart,
)
from contrail_storage.core.entry_codec import encode_command, encode_parts
from contrail_storage.core.results import Refused, Result
from contrail_storage.replica.entries import (
    APPEND_OVERHEAD,
    COMMAND_BYTES_MAX,
    COMMAND_OVERHEAD,
    ENTRY_BYTES_MAX,
    LOGGED_BYTES_MAX,
    AppendRequest,
    CommandRequest,
    Content,
    Done,
    EntryBuilder,
    EntryContext,
    Part,
    not_logged,
    overloaded,
)
from contrail_storage.replica.plain_messages import entry_of_plain
from contrail_storage.replica.raft_port import no_leader

OUTSTANDING_BYTES_MAX: Final = 4 << 20
"""Half of the bytes that a group accepts, so that the group refuses no entry for its size."""
QUEUE_BYTES_MAX: Final = 64 << 20
UNWRITTEN_BYTES_MAX: Final = 32 << 20
SEQS_MAX: Final = 2_000
"""Sequences of one command at most. Each is a changed row, and all are applied in one step."""
SECOND_BYTES_MIN: Final = 64 << 10
"""A second entry under way of so many bytes costs little beside its messages, and keeps the event
loop and the disk at work at the same time."""
_ENTRIES_IN_TURN: Final = 4
"""Making a full entry takes one or two milliseconds."""
_HANDOVER_PAUSE_S: Final = 0.01
_STUCK_S: Final = 10.0
"""The node is not ready when requests wait and nothing has moved for this time, in seconds."""
_log = structlog.get_logger("contrail.proposer")


class Group(Protocol):
    """The part of a Raft group that the proposer uses."""

    @property
    def is_leader(self) -> bool:
        """Whether this node may propose."""
        ...

    @property
    def is_alone(self) -> bool:
        """Whether this node is the only member."""
        ...

    @property
    def leader(self) -> str:
        """Id of the node that leads; empty if none is known."""
        ...

    @property
    def is_handing_over(self) -> bool:
        """Whether this node is about to stop leading, and proposals must wait."""
        ...

    @property
    def outstanding_bytes(self) -> int:
        """Bytes proposed and not yet committed."""
        ...

    def propose(self, data: bytes, context: object) -> int:
        """Append an entry; ``context`` comes back with it when it is committed."""
        ...


class Applied(Protocol):
    """The part of the applier that the proposer uses."""

    @property
    def unwritten_bytes(self) -> int:
        """Bytes of applied entries that the store does not have yet."""
        ...

    def hash_key(self, shard_id: int) -> bytes:
        """Return the key that hashes the message ids of a shard."""
        ...


async def _all(futures: list[asyncio.Future[Result]]) -> Result:
    """Return the result of a sliced command: the first refusal, otherwise that of the last slice.

    Raises the first error if all slices failed, and OUTCOME_UNKNOWN if only some did.
    """
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
    applied: Applied
    refusals: tuple[type[Exception], ...]
    check_space: Callable[[int], None] = lambda size: None
    """Raises ApiError when there is no space for so many bytes of messages."""
    busy: tuple[type[Exception], ...] = ()
    """The errors of ``group`` if too many bytes wait for the disk; nothing was appended."""
    skipped_ns: Callable[[], int] = lambda: 0
    """The sum of the jumps of log time."""
    # All fields belong to the event loop.
    # Requests that are not in an entry yet, in order.
    _queue: deque[AppendRequest | CommandRequest] = field(default_factory=deque)
    # Sum of the sizes of the queued requests.
    _queue_bytes: int = 0
    # Bytes that `hold` counted and that are not queued yet. They count against the queue's limit.
    _held_bytes: int = 0
    # Entries that were proposed and are neither applied nor lost: those without messages, and those
    # with messages. Neither kind waits for the other.
    _in_flight: list[int] = field(default_factory=lambda: [0, 0])
    # The messages in these entries.
    _messages: int = 0
    # Whether `close` was called.
    _closed: bool = False
    # Whether replicas differ.
    _differs: bool = False
    # Whether either is so; then no request is accepted.
    _refuses: bool = False
    # Whether `_flush` is already due in this turn of the loop.
    _scheduled: bool = False
    # Whether requests wait for the end of a handover, which is looked for again and again.
    _handing_over: bool = False
    _moved_s: float = 0.0
    """When a request was last admitted to an idle proposer, proposed or settled (loop time)."""

    def append(self, shard_id: int, content: Content, done: Done) -> None:
        """Propose one message, or a batch of at least one; ``done`` gets the outcomes as runs.

        Raises ApiError (OVERLOADED, NOT_READY, too large, no space) at once, without effect.
        """
        request = AppendRequest.of(shard_id, content, done)
        # Before anything is counted, so that a refusal has nothing to undo.
        self.check_space(request.size)
        if request.size > COMMAND_BYTES_MAX - APPEND_OVERHEAD:
            request.check_size()
        loop = self._admit(request.size)
        self._queue.append(request)
        if not self._scheduled:
            self._schedule(loop)

    def command(self, shard_id: int, command: Command) -> asyncio.Future[Result]:
        """Propose any other command; the future gives its result.

        A long command is cut into slices, of which all are queued or none. When some of them are
        lost, the outcome of the whole command is unknown. Raises as :meth:`append` does.
        """
        slices = [(each, self._encoded(each)) for each in in_slices(command)]
        size = sum(len(encoded) + COMMAND_OVERHEAD for _, encoded in slices)
        if isinstance(command, RestorePart):
            self.check_space(size)
        loop = self._admit(size)
        futures: list[asyncio.Future[Result]] = []
        for each, encoded in slices:
            futures.append(loop.create_future())
            self._queue.append(CommandRequest(shard_id, each, encoded, futures[-1]))
        if not self._scheduled:
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
        if self._refuses or not self.group.is_leader:
            raise self._refusal()
        waiting = self._queue_bytes + self._held_bytes
        # One request is accepted whatever its size, or the largest could never be published.
        if waiting and waiting + size > QUEUE_BYTES_MAX:
            raise overloaded()
        loop = asyncio.get_running_loop()
        if not self._queue and not any(self._in_flight):
            self._moved_s = loop.time()
        self._queue_bytes += size
        return loop

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        self._scheduled = True
        # At the end of this turn of the event loop: requests that arrived together share an entry.
        loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Make entries of the waiting requests and propose them, while the log keeps up."""
        self._scheduled = False
        for _ in range(_ENTRIES_IN_TURN):
            if not self._queue or not self._may_propose():
                return
            context, parts = self._next_entry()
            if context.waiters:
                self._propose(context, parts)
        self.resume()

    def _propose(self, context: EntryContext, parts: list[Part]) -> None:
        assert context.entry is not None
        try:
            data = encode_parts(context.entry.time_ns, parts, context.entry.skipped_ns)
        except Exception as error:
            _log.exception("entry_not_encoded")
            context.refuse(not_logged(f"the entry cannot be logged: {error!r}"))
            return
        if len(data) > LOGGED_BYTES_MAX:
            _log.critical("entry_too_large", bytes=len(data))
            context.refuse(not_logged(f"an entry of {len(data)} bytes cannot be logged"))
            return
        if not self.group.is_alone:
            context.entry = None
        try:
            self.group.propose(data, context)
        except self.refusals:
            context.refuse(self.no_leader())
        except self.busy:
            context.refuse(overloaded())
        except Exception:
            _log.exception("entry_not_proposed")
            context.unknown()  # the entry may be in the log anyway
        else:
            self._in_flight[context.messages > 0] += 1
            self._messages += context.messages
            self._moved_s = asyncio.get_running_loop().time()

    def _may_propose(self) -> bool:
        if self.group.is_handing_over:
            # Refused by `fail_all` if that succeeds, with the name of the new leader.
            self._look_again()
            return False
        if self.applied.unwritten_bytes > UNWRITTEN_BYTES_MAX:
            return False  # the store is behind the log; `resume` is called when it has caught up
        return self._has_room(is_append=isinstance(self._queue[0], AppendRequest))

    def _has_room(self, *, is_append: bool) -> bool:
        """Whether another entry of this kind need not wait for those under way."""
        return not self._in_flight[is_append] or (
            self._queue_bytes >= self._least_bytes(is_append=is_append)
            and self.group.outstanding_bytes < OUTSTANDING_BYTES_MAX
        )

    def _least_bytes(self, *, is_append: bool) -> int:
        """Bytes for which the next entry waits while others of its kind are under way.

        An entry costs as much as tens of messages, so it is better to make one of all that arrive
        until the last one is applied.
        """
        if self._in_flight[is_append] > 1:
            return ENTRY_BYTES_MAX
        # If a message was alone, little is published, and the next one need not take twice as long.
        return 0 if is_append and self._messages == 1 else SECOND_BYTES_MIN

    def _look_again(self) -> None:
        if not self._handing_over:
            self._handing_over = True
            asyncio.get_running_loop().call_later(_HANDOVER_PAUSE_S, self._handover_over)

    def _handover_over(self) -> None:
        self._handing_over = False
        self.resume()

    def _next_entry(self) -> tuple[EntryContext, list[Part]]:
        """Return the next entry, and its commands in the form in which they are encoded."""
        queue, time_ns, skipped_ns = self._queue, self.log_time_ns(), self.skipped_ns()
        if len(queue) <= BLOCK_MESSAGES_MAX and self._queue_bytes <= BLOCK_BYTES_MAX:
            made = entry_of_plain(queue, time_ns, skipped_ns)
            if made is not None:
                queue.clear()
                self._queue_bytes = 0
                return made
        entry = EntryBuilder(time_ns, self.applied.hash_key, skipped_ns)
        # Entries with messages are counted as such, also if a command comes first. If they have to
        # wait, the commands up to the first message do not.
        takes_messages = self._has_room(is_append=True)
        while queue and entry.size < ENTRY_BYTES_MAX and entry.messages < BLOCK_MESSAGES_MAX:
            request = queue[0]
            # A large command goes alone, so that small requests do not wait for its bytes.
            if entry.size and request.needs_an_entry:
                break
            if isinstance(request, CommandRequest):
                entry.add(request)
            elif not takes_messages:
                break
            else:
                try:
                    if not entry.take(request):
                        # The rest of the request follows in the next command or entry. It stays at
                        # the front.
                        continue
                except Exception as error:
                    _log.exception("messages_not_encoded")
                    request.give_up(not_logged(f"the messages cannot be logged: {error!r}"))
            queue.popleft()
            self._queue_bytes -= request.size
        return entry.finish()

    @property
    def queued_bytes(self) -> int:
        """Bytes of the queued requests, and of those that `hold` counts."""
        return self._queue_bytes + self._held_bytes

    def hold(self, size: int) -> None:
        """Count ``size`` bytes that will be appended soon; a negative ``size`` ends the count.

        Raises ApiError (OVERLOADED, NOT_READY) when they would not be accepted now.
        """
        if size > 0:
            self._admit(size)
            self._queue_bytes -= size
        self._held_bytes += size

    def settled(self, context: EntryContext) -> None:
        """Note that the entry of ``context`` is applied or lost, and propose the next one."""
        self._in_flight[context.messages > 0] -= 1
        self._messages -= context.messages
        self._moved_s = asyncio.get_running_loop().time()
        self.resume()

    def resume(self) -> None:
        """Propose again: a condition that held entries back may have ended."""
        if self._queue and not self._scheduled:
            self._schedule(asyncio.get_running_loop())

    def fail_all(self) -> None:
        """Refuse all queued requests: leadership or the log is lost, and they were not applied."""
        while self._queue:
            # What is still queued is in no entry, so its refusal is certain.
            self._queue.popleft().give_up(self.no_leader())
        self._queue_bytes = 0

    def no_leader(self) -> ApiError:
        """The refusal while this node does not lead the group."""
        return no_leader(None if self.group.is_alone else self.group.leader)

    def close(self) -> None:
        """Refuse all queued requests and all later ones. Entries on their way go on."""
        self._closed = self._refuses = True
        self.fail_all()

    def differ(self, differs: bool) -> None:
        """Refuse all requests while ``differs``: nobody knows which replica is right."""
        self._differs, self._refuses = differs, differs or self._closed

    def _refusal(self) -> ApiError:
        if self._differs and not self._closed and self.group.is_leader:
            return ApiError(errors.REPLICAS_DIFFER, retry_after_s=1, applied=False)
        return self.no_leader()

    @property
    def problem(self) -> str:
        """Why waiting requests make no progress, in a sentence; empty while they do."""
        waiting = len(self._queue) + sum(self._in_flight)
        stood_s = asyncio.get_running_loop().time() - self._moved_s
        if not waiting or stood_s < _STUCK_S:
            return ""
        cause = "the log does not confirm writes"
        if self.applied.unwritten_bytes > UNWRITTEN_BYTES_MAX:
            cause = "the store cannot keep up with the log"
        elif not any(self._in_flight):
            cause = "no entry reaches the log"
        return f"requests have been waiting for {stood_s:.0f} s: {cause}"


def in_slices(command: Command) -> list[Command]:
    """Split a long command into short commands that have the same effect in order."""
    if isinstance(command, Exhaust) and len(command.seqs) > SEQS_MAX:
        return [
            Exhaust(command.consumer_id, command.epoch, command.seqs[start : start + SEQS_MAX])
            for start in range(0, len(command.seqs), SEQS_MAX)
        ]
    if isinstance(command, Acknowledge) and len(command.acked) + len(command.others) > SEQS_MAX:
        return list(_acknowledgements(command))  # plain ones first: the order of applying them
    return [command]


def _acknowledgements(command: Acknowledge) -> Iterator[Acknowledge]:
    whole = command.consumer_id, command.epoch
    for start in range(0, len(command.acked), SEQS_MAX):
        yield Acknowledge(*whole, command.acked[start : start + SEQS_MAX])
    for start in range(0, len(command.others), SEQS_MAX):
        others = command.others[start : start + SEQS_MAX]
        reasons = {seq: command.reasons[seq] for _, seq, _ in others if seq in command.reasons}
        yield Acknowledge(*whole, [], others, reasons)
