"""Entries of the log: how requests become commands, and how each request gets its outcome.

Consecutive messages for one shard are joined into one columnar command, across requests. Batches
come in columns and stay in columns. Single messages are put into columns together when their entry
is made.

Other commands are encoded when they are proposed, so their exact size is known. The size of an
append is not, so an upper bound is counted for each message (`content_sizes`).
"""

import asyncio
import operator
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from functools import partial
from time import perf_counter
from typing import Final

import msgspec
import structlog

from contrail_common import errors
from contrail_common.columns.blocks import BLOCK_BYTES_MAX, BLOCK_MESSAGES_MAX
from contrail_common.columns.message_batch import MessageBatch, join_batches
from contrail_common.errors import ApiError
from contrail_common.model import Expected, Numbered, PublishMessage
from contrail_link.contract.publish import PublishContent, PubResult
from contrail_storage.core.commands import (
    Acknowledge,
    Append,
    Command,
    Deliver,
    DeliverAcked,
    Entry,
    Exhaust,
    NumberedAppend,
)
from contrail_storage.core.expected import HashedExpected, ProvenExpected
from contrail_storage.core.results import Appended, Refused, Result
from contrail_storage.replica.content_sizes import batch_size, content_ends, entry_bytes
from contrail_storage.replica.message_ids import hash_id, hash_ids

ENTRY_BYTES_MAX: Final = 256 * 1024
"""An entry closes at this size. A larger command has an entry to itself.

A request up to this size may have a block to itself, as cutting it would copy all of it.
"""
LOGGED_BYTES_MAX: Final = 4 << 20
"""The largest entry that a group accepts."""
COMMAND_BYTES_MAX: Final = LOGGED_BYTES_MAX - 4_096
"""The largest command. Only a message of the maximum size comes near it."""
COMMAND_OVERHEAD: Final = 16
"""Bytes of a command in an entry in addition to its own: the shard, and the head of the pair."""
APPEND_OVERHEAD: Final = 544
"""Bytes per command: heads of fields and columns, the shard, the last offsets, and a producer."""
_APPEND_WEIGHT: Final = 32
_COMMAND_WEIGHT: Final = 5
"""Messages that a command counts as: of an entry, all commands are applied in one step.

Appends of messages with nothing but a payload take a third of the time, and count nothing.
"""
_ENTRY_WEIGHT_MAX: Final = BLOCK_MESSAGES_MAX + 2 * _APPEND_WEIGHT
"""Up to this weight an entry is filled: two requests of a thousand messages with ids fit uncut."""
_log = structlog.get_logger("contrail.proposer")

Content = PublishMessage | MessageBatch
"""The messages of one request."""

Outcome = list[PubResult] | ApiError
"""The results of the messages, in order; or the error if none of them was appended."""
Done = Callable[[Outcome], None]
"""Called exactly once, maybe while the entry is being applied. It must not raise."""


class AppendRequest(msgspec.Struct, eq=False):
    """One publish request: its messages, their outcomes so far, and the callback for all of them.

    Used on the event loop only. Most requests are whole in one command; of others, each command has
    a `Span`.
    """

    shard_id: int
    content: Content
    done: Done
    count: int
    size: int
    atomic: bool = False
    numbered: Numbered | None = None
    firsts: Collection[int] = ()
    """Positions that must begin a command: messages that replace the whole stream."""
    taken: int = 0
    """Messages that are in entries."""
    running_sums: list[int] | None = None
    """Those of :attr:`ends`, once they are needed."""
    settled: int = 0
    """Messages of spans that have outcomes."""
    outcomes: list[tuple[int, list[PubResult]]] = []
    """Of these spans: the position of the first message, and results."""

    def __repr__(self) -> str:
        """Short, and without payloads: logged errors show variables, and an entry has thousands."""
        return f"AppendRequest(shard_id={self.shard_id}, count={self.count}, size={self.size})"

    @classmethod
    def of(cls, shard_id: int, content: Content, done: Done) -> "AppendRequest":
        """Return the request to append one message, or a batch of at least one."""
        if isinstance(content, PublishMessage):
            if content.rollup == "all":
                return cls(shard_id, content, done, 1, entry_bytes(content), firsts=(0,))
            return cls(shard_id, content, done, 1, entry_bytes(content))
        request = cls(
            shard_id,
            content,
            done,
            content.count,
            batch_size(content),
            content.atomic,
            content.numbered,
        )
        if content.rollups is not None:
            request.firsts = [at for at, rollup in content.rollups.items() if rollup == "all"]
        return request

    @property
    def ends(self) -> list[int]:
        """The running sums of the messages' bytes; the last one is ``size``."""
        if self.running_sums is None:  # most requests are taken whole and need none
            self.running_sums = content_ends(self.content)
        return self.running_sums

    @property
    def needs_an_entry(self) -> bool:
        """Whether the next message to take is larger than an entry's bound."""
        if self.size <= ENTRY_BYTES_MAX:
            return False
        return self.ends[self.taken] - self.bytes_before(self.taken) > ENTRY_BYTES_MAX

    def check_size(self) -> None:
        """Raise ApiError when one of the messages, or an atomic batch, does not fit an entry.

        Called for requests that are larger than that.
        """
        spec, size = errors.ATOMIC_TOO_LARGE, self.size
        if not self.atomic:
            ends = self.ends
            spec = errors.MESSAGE_TOO_LARGE
            size = max(map(operator.sub, ends, [0, *ends[:-1]]))
        if size > COMMAND_BYTES_MAX - APPEND_OVERHEAD:
            message = (
                f"{size} bytes do not fit into a log entry (at most {COMMAND_BYTES_MAX} bytes)"
            )
            raise ApiError(spec, message, applied=False)

    def stop_before(self, taken: int) -> int:
        """The position up to which messages may join a command that has ``taken`` others first."""
        # It must begin a command: the roll-up removes everything before it, also earlier messages
        # of this request.
        if taken and self.taken in self.firsts:
            return self.taken
        return min((at for at in self.firsts if at > self.taken), default=self.count)

    def bytes_before(self, position: int) -> int:
        """Bytes of the messages before ``position``."""
        return self.ends[position - 1] if position else 0

    def give_up(self, error: ApiError) -> None:
        """Fail the messages that are not taken yet; they are certainly not in the log."""
        if not self.taken:
            self.done(error)
            return
        # Some messages are in an entry already, so the request as a whole is neither refused nor
        # done.
        rest = self.count - self.taken
        start, self.taken = self.taken, self.count
        unknown = PubResult(0, code=errors.OUTCOME_UNKNOWN.code, count=rest)
        self.settle(start, rest, [unknown])

    def refuse(self, code: int, detail: str) -> None:
        """Set the same error for all messages: not stored, or unknown."""
        self.done([PubResult(0, code=code, detail=detail, count=self.count)])

    def settle(self, start: int, count: int, runs: list[PubResult]) -> None:
        """Set the outcomes of the ``count`` messages from position ``start`` on."""
        self.outcomes.append((start, runs))
        self.settled += count
        # Only when all parts have an outcome: a caller gets one answer.
        if self.settled < self.count:
            return
        # Parts are settled in order, except for parts that are lost.
        parts = sorted(self.outcomes, key=operator.itemgetter(0))
        self.done([run for _, part in parts for run in part])


def contents_of(messages: PublishContent, done: Done) -> tuple[Content, Done]:
    """Several messages as the content of a request, and the callback for this request.

    For a list, ``done`` gets one result for each message; for a batch, it gets runs.
    """
    if isinstance(messages, MessageBatch):
        return messages, done
    return MessageBatch.of(messages), partial(_for_each, done)


def _for_each(done: Done, outcome: Outcome) -> None:
    """Call ``done`` with one result per message instead of runs."""
    if isinstance(outcome, ApiError):
        done(outcome)
    else:
        done([result for run in outcome for result in run.each()])


class CommandRequest(msgspec.Struct, eq=False):
    """A command that is not an append, in its logged form, with the future of its result."""

    shard_id: int
    command: Command
    encoded: msgspec.Raw
    future: asyncio.Future[Result]

    @property
    def weight(self) -> int:
        """The number of messages that it counts as, because applying each sequence takes time."""
        command = self.command
        if isinstance(command, Deliver | Exhaust):
            return len(command.seqs)
        if isinstance(command, Acknowledge):
            return len(command.acked) + len(command.others)
        if isinstance(command, DeliverAcked):
            acked = command.seqs if command.acked is None else command.acked
            return len(command.seqs) + len(acked)
        return _COMMAND_WEIGHT

    @property
    def size(self) -> int:
        """Bytes that it takes in an entry."""
        return len(self.encoded) + COMMAND_OVERHEAD

    @property
    def needs_an_entry(self) -> bool:
        """Whether it is larger than an entry's bound."""
        return self.size > ENTRY_BYTES_MAX

    def give_up(self, error: ApiError) -> None:
        """Fail the command, which is certainly not in the log."""
        if not self.future.done():
            self.future.set_exception(error)


class Span(msgspec.Struct, eq=False):
    """Messages of one request within one append command, if others of it are not."""

    request: AppendRequest
    start: int
    count: int

    def done(self, runs: list[PubResult]) -> None:
        """Set the outcomes of these messages."""
        self.request.settle(self.start, self.count, runs)

    def refuse(self, code: int, detail: str) -> None:
        """Set the same error for all these messages: not stored, or unknown."""
        self.done([PubResult(0, code=code, detail=detail, count=self.count)])


Appending = list[AppendRequest | Span]
"""Whose messages an append command has, in order; a request stands for all of its messages."""
Waiter = Appending | asyncio.Future[Result]
Part = tuple[int, Command | msgspec.Raw]
"""A shard and a command for it, which may be encoded already."""


class Unapplied(msgspec.Struct, frozen=True):
    """The result of a command whose shard stopped before it: the command is logged, not applied."""

    reason: str


class EntryContext(msgspec.Struct, eq=False):
    """An entry that this node proposed, and the waiter of each of its commands.

    ``entry`` is None if it is to be decoded from the log's bytes, as other members do. ``messages``
    is the number of messages in it.
    """

    entry: Entry | None
    waiters: list[Waiter]
    messages: int
    begun: float = msgspec.field(default_factory=perf_counter)

    def resolve(self, results: Sequence[Result | Unapplied]) -> None:
        """Hand the results of the entry's commands to the waiters."""
        for waiter, result in zip(self.waiters, results, strict=True):
            # The command is in the log. If only a read failed, the next start applies it, so the
            # command is not refused.
            if isinstance(result, Unapplied):
                _fail(waiter, ApiError(errors.OUTCOME_UNKNOWN, result.reason))
            elif isinstance(waiter, list):
                _resolve_append(waiter, result)
            elif not waiter.done():
                waiter.set_result(result)

    def unknown(self) -> None:
        """Fail all waiters with an unknown outcome: this node will never know it."""
        self._fail(ApiError(errors.OUTCOME_UNKNOWN))

    def refuse(self, error: ApiError) -> None:
        """Fail all waiters: the entry was certainly not appended."""
        self._fail(error)

    def _fail(self, error: ApiError) -> None:
        for waiter in self.waiters:
            _fail(waiter, error)


def _fail(waiter: Waiter, error: ApiError) -> None:
    if isinstance(waiter, list):
        for one in waiter:
            one.refuse(error.spec.code, error.detail)
    elif not waiter.done():
        waiter.set_exception(error)


def has_failed(done: asyncio.Future[Result]) -> bool:
    """Whether a command was refused or lost; then nothing may rely on its effect."""
    return done.cancelled() or done.exception() is not None or isinstance(done.result(), Refused)


def overloaded() -> ApiError:
    """The refusal of a request when too many bytes wait already."""
    message = "too many bytes are waiting to be written"
    return ApiError(errors.OVERLOADED, message, retry_after_s=1, applied=False)


def not_logged(what: str) -> ApiError:
    """The refusal of a request that cannot be logged at all, because of a defect of the server."""
    return ApiError(errors.INTERNAL, what, applied=False)


def _resolve_append(waiting: Appending, result: Result) -> None:
    if isinstance(result, Refused):
        for one in waiting:
            one.refuse(result.code, result.detail)
        return
    assert isinstance(result, Appended)
    seq = result.first_seq
    position = 0
    for one in waiting:
        count = one.count
        if result.exceptions is None:
            runs = [PubResult(seq, count=count)]
            seq += count
        else:
            runs, seq = _runs(result.exceptions, position, count, seq)
        position += count
        one.done(runs)


def _runs(
    exceptions: dict[int, Refused | int], start: int, count: int, seq: int
) -> tuple[list[PubResult], int]:
    """Return outcomes of ``count`` messages from ``start`` on, and the next sequence after them.

    ``seq`` is the sequence of the first stored message among them.
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
            runs.append(PubResult(verdict.seq, code=verdict.code, detail=verdict.detail))
        else:
            runs.append(PubResult(verdict, duplicate=True))
    if stored:
        runs.append(PubResult(seq, count=stored))
    return runs, seq + stored


class _AppendBuilder:
    """Collects consecutive messages for one append command. At most one block of them."""

    def __init__(self, shard_id: int) -> None:
        self.shard_id = shard_id
        self.waiting: Appending = []
        self.count = 0
        self.bytes = 0
        # Whether the entry counts the command itself.
        self.is_weighed = False
        # Of all messages: the producer that has numbered them.
        self._numbered: Numbered | None = None
        # Batches in columns; `_singles` come after all of them.
        self._parts: list[MessageBatch] = []
        # Single messages that are not in columns yet.
        self._singles: list[PublishMessage] = []

    def take(self, request: AppendRequest, count_max: int) -> bool:
        """Take at most ``count_max`` messages of ``request``; True when all of them are taken."""
        start, content = request.taken, request.content
        count_max = min(count_max, BLOCK_MESSAGES_MAX - self.count)
        if request.firsts:
            count_max = min(count_max, request.stop_before(self.count) - start)
        whole_max = BLOCK_BYTES_MAX if self.count else ENTRY_BYTES_MAX
        if request.atomic:
            # An atomic batch has a command to itself: `apply` refuses all messages of an atomic
            # command.
            stop, size = (0, 0) if self.count else (request.count, request.size)
        elif self.count and request.numbered != self._numbered:
            stop = size = 0
        elif not start and request.count <= count_max and self.bytes + request.size <= whole_max:
            stop, size = request.count, request.size
        elif self.bytes >= BLOCK_BYTES_MAX:
            return False  # without the sums below, which take as long as a large request to encode
        else:
            before = request.bytes_before(start)
            fitting = bisect_right(request.ends, before + BLOCK_BYTES_MAX - self.bytes, start)
            if fitting == start and not self.count:
                fitting = start + 1  # a message larger than a block has one to itself
            stop = min(fitting, start + count_max)
            size = request.bytes_before(stop) - before
        if stop <= start:
            return False
        if isinstance(content, PublishMessage):
            self._singles.append(content)
        else:
            if self._singles:
                self._join_singles()
            self._parts.append(content.slice(start, stop))
        self._numbered = request.numbered
        whole = stop - start == request.count
        self.waiting.append(request if whole else Span(request, start, stop - start))
        self.count += stop - start
        self.bytes += size
        request.taken = stop
        return stop == request.count

    def _join_singles(self) -> None:
        self._parts.append(MessageBatch.of(self._singles))
        self._singles = []

    def build(self, hash_key_of: Callable[[int], bytes]) -> Append:
        """Return the columnar command."""
        if self._singles:
            self._join_singles()
        batch = self._parts[0] if len(self._parts) == 1 else join_batches(self._parts)
        ids = expected = None
        if batch.ids is not None:
            ids = hash_ids(batch.ids, hash_key_of(self.shard_id))
        if batch.expected is not None:
            key = hash_key_of(self.shard_id)
            expected = {at: _hashed(one, key) for at, one in batch.expected.items()}
        command = Append(
            batch.subjects,
            batch.subject_index,
            batch.columns,
            ids,
            expected,
            batch.rollups,
            batch.atomic,
            batch.ttls,
        )
        return command if batch.numbered is None else NumberedAppend.of(command, batch.numbered)


class EntryBuilder:
    """Collects commands for one entry. Consecutive messages of a shard share one command."""

    def __init__(
        self, time_ns: int, hash_key_of: Callable[[int], bytes], skipped_ns: int = 0
    ) -> None:
        self.size = self.messages = 0
        self._time_ns = time_ns
        self._skipped_ns = skipped_ns
        self._hash_key_of = hash_key_of
        # Three lists of equal length: what to apply, what to encode, and who waits for the result.
        self._commands: list[tuple[int, Command]] = []
        self._parts: list[Part] = []
        self._waiters: list[Waiter] = []
        # Messages in the commands of these lists.
        self._appended = 0
        # By shard: the append command that later messages may join. It is not in the lists yet.
        self._open: dict[int, _AppendBuilder] = {}

    def add(self, request: CommandRequest) -> None:
        # Messages that came before this command must be applied before it.
        builder = self._open.pop(request.shard_id, None)
        if builder is not None:
            self._close(builder)
        self._commands.append((request.shard_id, request.command))
        self._parts.append((request.shard_id, request.encoded))
        self._waiters.append(request.future)
        self.size += request.size
        self.messages += request.weight

    def take(self, request: AppendRequest) -> bool:
        """Take messages of ``request`` while they fit; True when all of them are taken."""
        builder = self._open.get(request.shard_id)
        if builder is None:
            builder = self._open[request.shard_id] = _AppendBuilder(request.shard_id)
            self.size += APPEND_OVERHEAD
        before_bytes, before = builder.bytes, builder.count
        used_up = builder.take(request, _ENTRY_WEIGHT_MAX - self.messages)
        self.messages += builder.count - before
        if builder.count > before and not builder.is_weighed and _asks_for_more(request.content):
            builder.is_weighed = True
            self.messages += _APPEND_WEIGHT
        self.size += builder.bytes - before_bytes
        # The command is full, or must not have other messages. Later ones begin another command.
        if request.atomic or not used_up:
            self._close(self._open.pop(request.shard_id))
        return used_up

    def _close(self, builder: _AppendBuilder) -> None:
        if not builder.count:
            return
        try:
            command = builder.build(self._hash_key_of)
        except Exception as error:
            _log.exception("command_not_built")
            for one in builder.waiting:
                one.refuse(errors.INTERNAL.code, f"the messages cannot be logged: {error!r}")
            return
        self._commands.append((builder.shard_id, command))
        self._parts.append((builder.shard_id, command))
        self._waiters.append(builder.waiting)
        self._appended += builder.count

    def finish(self) -> tuple[EntryContext, list[Part]]:
        """Return the entry with its waiters, and its commands in the form to encode."""
        for builder in self._open.values():
            self._close(builder)
        entry = Entry(self._time_ns, self._commands, self._skipped_ns)
        return EntryContext(entry, self._waiters, self._appended), self._parts


def _asks_for_more(content: Content) -> bool:
    """Whether messages have ids, conditions or the like: see `_APPEND_WEIGHT`."""
    if isinstance(content, PublishMessage):
        return bool(content.msg_id or content.expected or content.rollup)
    return (
        content.ids is not None
        or content.atomic
        or content.expected is not None
        or content.rollups is not None
    )


def _hashed(expected: Expected, key: bytes) -> HashedExpected:
    last_id = expected.last_msg_id
    return HashedExpected(
        expected.stream,
        expected.last_seq,
        expected.last_subject_seq,
        expected.last_subject_seq_subject,
        None if last_id is None else hash_id(last_id, key),
        *((expected.as_of, expected.newest) if isinstance(expected, ProvenExpected) else ()),
    )
