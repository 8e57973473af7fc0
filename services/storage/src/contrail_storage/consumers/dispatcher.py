"""Delivery: the leader's side of the consumers of a shard.

The dispatcher of a consumer selects messages by the applied state and by its own deliveries that
are proposed and not applied yet, so two pulls never get the same message. Deliveries of plain
consumers are sent at once and recorded together in one command. With ``max_deliver`` they are sent
after their commit.
"""

# One module: waiting, selecting, recording and counting share the fields of one consumer.

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from contrail_common import errors
from contrail_common.columns.blocks import Block
from contrail_common.columns.delivery_columns import DeliveryColumns
from contrail_common.errors import ApiError
from contrail_common.model import AckKind, ConsumerConfig
from contrail_link.contract.consume import Delivery, PullRequest, PullResult
from contrail_storage.consumers.exhaustion import RETRY_S, Exhaustion
from contrail_storage.consumers.pending_count import PendingCount, count_live
from contrail_storage.consumers.pull_batch import (
    PULL_BYTES_MAX,
    Batch,
    Selected,
    check_limits,
    deliveries_in_steps,
    without_payload,
)
from contrail_storage.core.commands import (
    Acknowledge,
    Advance,
    Deliver,
    DeliverAcked,
    Exhaust,
    StreamCommand,
)
from contrail_storage.core.consumer_machine import ConsumerMachine
from contrail_storage.core.pending_deliveries import DUE_MAX
from contrail_storage.core.results import Refused, Result
from contrail_storage.core.subjects.filters import SubjectFilter
from contrail_storage.reading.reader import Found, Reader
from contrail_storage.replica.entries import has_failed
from contrail_storage.replica.proposer import SEQS_MAX
from contrail_storage.replica.shard import Shard, woken

JOIN_S: Final = 0.005
_TIMER_MIN_S: Final = 0.001
_DUE_SLICE: Final = 100
"""Messages that are delivered again in one step."""
DELIVERED_MAX: Final = 10_000
"""Deliveries of one command at most. A pull has no more, but refused commands add up to more."""

Propose = Callable[[StreamCommand], "asyncio.Future[Result]"]


def consumer_deleted() -> ApiError:
    """The refusal of a pull whose consumer or stream is removed while it waits."""
    return ApiError(errors.CONSUMER_DELETED)


@dataclass(slots=True, eq=False)
class Dispatcher:
    """Selects and records the deliveries of one consumer, on the event loop.

    ``position`` and ``consumer_seq`` are ahead of the machine, which has only what is applied. The
    recorded position is at most the sequence after ``_top_seq``: if the filters change, they may
    match messages after it that the old ones passed over.
    """

    shard: Shard
    consumer: ConsumerMachine
    """What is applied. Replaced by an equal machine when the store is opened again."""
    reader: Reader
    propose: Propose
    """Proposes a command for the shard; raises ApiError when it is refused at once."""
    elapsed_ns: Callable[[], int]
    """Returns the elapsed time now, on which the deadlines of deliveries run."""
    confirm_led: Callable[[], Awaitable[None]] | None = None
    """Returns if no other node led the shard until now (NOT_LEADER); None: none ever does.

    Called before messages leave: a node that was stopped or cut off would send stale ones.
    """
    position: int = 0
    """The next sequence to consider. What is below was delivered, or is not wanted, or is gone."""
    consumer_seq: int = 0
    """Number of the last delivery. Falls back when deliveries are not recorded."""
    in_flight: set[int] = field(default_factory=set)
    """Selected sequences whose deliveries the machine does not have yet."""
    waiters: deque[asyncio.Event] = field(default_factory=deque)
    """Waiting pulls, first come, first served. Only the first one is woken.

    While there are some, the shard calls `wake` after each change.
    """
    last_active_s: float = 0.0
    """Loop time of the last use by a client."""
    closed: bool = False
    """Whether the consumer is gone, or led elsewhere. Then no more deliveries are recorded."""
    # Makes the error of pulls while it is closed.
    _refusal: Callable[[], ApiError] = consumer_deleted
    # Proposed commands without an outcome yet; `settle` waits for them.
    _proposed: "set[asyncio.Future[Result]]" = field(default_factory=set)
    # Selected sequences that are not proposed yet, in order; all of them are in flight.
    _joined: list[int] = field(default_factory=list)
    # Gives up on messages whose last allowed delivery was not acknowledged in time.
    _exhaustion: Exhaustion = field(default_factory=Exhaustion)
    # Whether the last command had a position before the one that was reached. A further command
    # records that one when nothing is in flight.
    _held_back: bool = False
    # The highest sequence that was delivered or is in flight.
    _top_seq: int = 0
    # Where selecting began when the filters last changed. If the machine's position is before it,
    # it has still to pass messages that only other filters skipped.
    _refiltered_seq: int = 0
    # Due when `_joined` must be proposed; None while nothing is joined.
    _join_timer: asyncio.TimerHandle | None = None
    # Due at the earliest deadline, stale or not; None while there is none.
    _deadline_timer: asyncio.TimerHandle | None = None
    # The configuration as of the last `reconfigured`, see `_notice_change`.
    _config: ConsumerConfig = field(init=False)
    # Made of `_filters`.
    _filter: SubjectFilter = field(init=False)
    # May be older than `_config`, see `_take_filters`.
    _filters: tuple[str, ...] = ()
    # Held while messages are selected or counted, so that nobody else moves the position forward.
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    # Counts the messages from `position` on.
    _count: PendingCount = field(init=False)
    # The dispatchers of the consumer's other shards, which share `_lock`.
    _siblings: "tuple[Dispatcher, ...]" = ()

    def __post_init__(self) -> None:
        self.position = self.consumer.next_seq
        self.consumer_seq = self.consumer.delivered.consumer_seq
        self._top_seq = self.consumer.delivered.stream_seq
        self._count = PendingCount(self.shard, self.reader)
        self.touch()
        self._filters = self.consumer.config.filter_subjects
        self._filter = self.reader.share_filter(self.shard, self._filters)
        self.reconfigured()

    def touch(self) -> None:
        """Note that a client used the consumer now."""
        self.last_active_s = asyncio.get_running_loop().time()

    def turn_to(self, consumer: ConsumerMachine) -> None:
        """Use an equal machine from now on, because the store was opened again."""
        self.consumer = consumer
        self._filter = self.reader.share_filter(self.shard, self._filters)
        self.reconfigured()

    def reconfigured(self) -> None:
        """Look at all deadlines again: the consumer's configuration has changed."""
        self._config = self.consumer.config
        self.consumer.pending.note_all()
        self._deadlines_changed()

    def _deadlines_changed(self) -> None:
        """Let the first waiting pull check, now and at the earliest deadline."""
        self.arm_deadline()
        self.wake()

    def _notice_change(self) -> None:
        """Use a configuration that was changed without a call of `reconfigured`.

        The request that changed it may have ended before the change was applied.
        """
        if self._config is not self.consumer.config:
            self.reconfigured()

    def _take_filters(self) -> None:
        """Use the filters that the consumer has now; the caller holds the lock.

        New filters recheck all messages after the last delivered one.
        """
        self._notice_change()
        if self._filters != self.consumer.config.filter_subjects:
            self._filters = self.consumer.config.filter_subjects
            self._filter = self.reader.share_filter(self.shard, self._filters)
            self._count.invalidate()
            after_last = max(self._top_seq, self.consumer.delivered.stream_seq) + 1
            self.position = min(self.position, after_last)
            self._refiltered_seq = after_last

    def new_term(self) -> None:
        """Begin a term as leader: commands that seemed lost may have been applied."""
        self.consumer_seq = self.consumer.delivered.consumer_seq + len(self._joined)
        self.reconfigured()

    def close(self, refusal: Callable[[], ApiError] = consumer_deleted) -> None:
        """End the waiting pulls with ``refusal``: no messages are delivered any more."""
        self.closed, self._refusal = True, refusal
        self._exhaustion.close()
        self._siblings = ()
        for later in (self._join_timer, self._deadline_timer):
            if later is not None:
                later.cancel()
        self.wake()

    # Waiting -------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Let the first waiting pull recheck; all of them when the dispatcher is closed."""
        for waiter in self.waiters:
            waiter.set()
            if not self.closed:
                return

    async def pull(self, request: PullRequest) -> PullResult:
        """Serve a pull with what is available, or wait up to ``expires`` for the first message."""
        found: list[Delivery] | DeliveryColumns = []

        async def attempt() -> bool:
            nonlocal found
            found = await self.take(request)
            return bool(found)

        await serve((self,), request, attempt)
        return await self._answer(found)

    async def _answer(self, found: list[Delivery] | DeliveryColumns) -> PullResult:
        shard, consumer = self.shard.machine.shard_id, self.consumer
        address = (shard, consumer.consumer_id, consumer.epoch)
        if isinstance(found, DeliveryColumns):
            return PullResult([], found.num_pending, *address, found)
        pending = found[-1].num_pending if found else await self.num_pending()
        return PullResult(found, pending, *address)

    def enqueue(self, waiter: asyncio.Event) -> None:
        """Queue ``waiter``, which is set when there may be messages for it."""
        self.waiters.append(waiter)
        self.shard.listeners[self.wake] = None

    def leave(self, waiter: asyncio.Event) -> None:
        """Take ``waiter`` out of the queue."""
        self.waiters.remove(waiter)
        if not self.waiters:
            self.shard.listeners.pop(self.wake, None)

    def check_open(self) -> None:
        """Raise ApiError once nothing can be delivered any more."""
        if not self.shard.machine.exists:
            raise ApiError(errors.STREAM_NOT_FOUND)
        if self.closed:
            raise self._refusal()
        if self.shard.damaged:
            raise ApiError(errors.DATA_LOST, self.shard.damaged)

    # Several shards ------------------------------------------------------------------------------

    def join(self, siblings: "tuple[Dispatcher, ...]", lock: asyncio.Lock) -> None:
        """Make this a dispatcher of a sharded consumer: only one of them selects at a time."""
        self._siblings, self._lock = siblings, lock

    def give_back(self, deliveries: list[Delivery]) -> None:
        """Return undelivered messages to the queue: they are due again at once."""
        self._return([one.message.seq for one in deliveries])

    def _return(self, seqs: list[int]) -> None:
        if seqs and self.consumer.config.ack_policy != "none":
            self.flush()
            self._give_back(seqs)

    # Selecting -----------------------------------------------------------------------------------

    async def take(self, request: PullRequest) -> list[Delivery] | DeliveryColumns:
        """Deliver what is available now, without waiting for messages."""
        async with self._lock:
            self.check_open()
            self._take_filters()
            batch = self._batch(request)
            try:
                await self._collect(batch)
                pending = await self._count_pending() if batch.seqs else 0
                if batch.seqs and self.confirm_led is not None:
                    await self.confirm_led()
                # Once it is closed, deliveries are not recorded; then they must not be sent.
                self.check_open()
                committed = self._record(batch.seqs)
            except BaseException:
                # A cancelled pull ends here too: its messages go to the next pull.
                self._undo(batch.seqs)
                raise
            found = self._to_deliveries(batch, pending)
        if batch.too_large:
            raise ApiError(errors.PULL_TOO_SMALL, f"the next message has {batch.too_large} bytes")
        if committed is not None:
            try:
                result = await asyncio.shield(committed)
                if self.confirm_led is not None:
                    await self.confirm_led()
            except asyncio.CancelledError:
                self._give_back(batch.seqs)
                raise
            if isinstance(result, Refused):
                raise consumer_deleted()
        if not isinstance(found, DeliveryColumns) or request.columns:
            return found
        try:
            return await deliveries_in_steps(found)
        except asyncio.CancelledError:
            self._return(batch.seqs)
            raise

    def _batch(self, request: PullRequest) -> Batch:
        opened = partial(self.reader.opened, self.shard)
        return Batch(request, opened, headers_only=self.consumer.config.headers_only)

    async def _collect(self, batch: Batch) -> None:
        """Select messages that are due again, then new ones; all of them become in flight."""
        exhausted = await self._collect_due(batch)
        if exhausted:
            await asyncio.shield(self._exhaustion.give_up(self, exhausted))
        # Nothing may be awaited after the last check for new messages, or a wake would be missed.
        if not batch.full:
            await self._collect_new(batch)

    async def _collect_due(self, batch: Batch) -> list[int]:
        """Select expired deliveries; return those that have no attempt left."""
        exhausted: list[int] = []
        while not batch.full and len(exhausted) < DUE_MAX:
            pending, now_ns = self.consumer.pending, self.elapsed_ns()
            due = pending.take_due(now_ns, self.in_flight, batch.left)
            if not due:
                earliest_ns = pending.earliest_ns
                if earliest_ns is None or earliest_ns > now_ns:
                    break
                await asyncio.sleep(0)  # not all chunks are read yet
                continue
            try:
                await self._take_due(batch, due, exhausted)
            except BaseException:
                self.consumer.pending.note([*due, *exhausted])
                raise
        return exhausted

    async def _take_due(self, batch: Batch, due: list[int], exhausted: list[int]) -> None:
        limit = self.consumer.config.max_deliver
        for at, seq in enumerate(due):
            if batch.full:
                self.consumer.pending.note(due[at:])
                return
            if at % _DUE_SLICE == _DUE_SLICE - 1:
                await asyncio.sleep(0)
            await batch.pause()
            block = await self.reader.block_at(self.shard, seq)
            pending = self.consumer.pending.get(seq)
            if pending is None:
                continue  # acknowledged meanwhile
            gone = block is None or block.base_seq > seq or not self.shard.machine.is_live(seq)
            if block is None or gone or 0 < limit <= pending.attempts:
                exhausted.append(seq)
                continue
            position = seq - block.base_seq
            message = self.reader.message(self.shard, block, position)
            if message is None:
                continue  # the message is being erased, and will leave the pending ones
            selected = Selected(seq, message, pending.attempts + 1)
            if batch.take(selected):
                self.in_flight.add(seq)
            else:
                self.consumer.pending.note([seq])

    def _ack_capacity(self, wanted: int) -> int:
        """Messages that the consumer may get beside those that are not acknowledged.

        There may be more if the answer is at least ``wanted``.
        """
        limit = self.consumer.config.max_ack_pending
        if limit < 0 or self.consumer.config.ack_policy == "none":
            return PULL_BYTES_MAX
        all_shards = (self, *self._siblings)
        # Those in flight may be pending as well. Which ones takes time to find out.
        least = limit - sum(len(one.consumer.pending) + len(one.in_flight) for one in all_shards)
        if least >= wanted:
            return least
        return limit - sum(
            len(one.consumer.pending) + len(one._fresh(one.in_flight)) for one in all_shards
        )

    def _fresh(self, seqs: set[int]) -> set[int]:
        """Those of ``seqs`` that are not pending in the machine: first deliveries."""
        if not self.consumer.pending:
            return seqs
        return seqs - self.consumer.pending.among(seqs)

    async def _collect_new(self, batch: Batch) -> None:
        capacity = self._ack_capacity(batch.left)
        missed = False
        while capacity > 0 and not batch.full:
            await batch.pause()
            if not await self._pass_others(missed=missed):
                return
            position = self.position
            wanted = self._filter
            block = await self.reader.block_at(self.shard, position)
            if block is None:
                return
            await self.reader.prepare(self.shard, wanted)
            self.check_open()
            # Filters that changed under the read hold for all that is selected from now on.
            self._take_filters()
            if self._filter is not wanted or self._catch_up() != position:
                continue  # messages went away meanwhile, or deliveries were undone
            found = self._select(block, position, min(capacity, batch.left))
            missed = not len(found.positions)
            taken = self._take_found(batch, found, capacity)
            if taken is None:
                return
            capacity -= taken

    async def _pass_others(self, *, missed: bool) -> bool:
        """Move the position to where the next match may be; False if there is none by now.

        ``missed``: the last block had no match. Filters that change meanwhile move it back.
        """
        passed = False
        while (position := self._catch_up()) <= self.shard.applied_seq and not passed:
            pinned = self.consumer.pinned
            if pinned is not None and position < pinned.end_seq:
                return True  # it is one of the pinned messages
            reached = await self.reader.next_match(
                self.shard, position, self._filter, missed=missed
            )
            if self._catch_up() == position:  # otherwise deliveries were undone
                self.position, passed = reached, True
                self._count.moved(position, reached)
        return self.position <= self.shard.applied_seq

    def _catch_up(self) -> int:
        """Move the position past settled and removed messages, and return it."""
        low = max(self.consumer.next_seq, self.shard.machine.counters.first_seq)
        self.position = max(self.position, low)
        if self.consumer.pinned is not None:  # messages that it skips were never counted
            self.position = self.consumer.pinned.next(self.position)
        return self.position

    def _select(self, block: Block, from_seq: int, most: int) -> Found:
        """Find messages of ``block`` that the consumer gets, at least ``most`` if it has them."""
        found = self.reader.select(self.shard, block, from_seq, self._filter, most)
        pinned = self.consumer.pinned
        if pinned is None or block.base_seq >= pinned.end_seq:
            return found
        positions, matching = (
            some[pinned.mask(some + block.base_seq)] for some in (found.positions, found.matching)
        )
        return Found(block, positions, found.next_seq, matching, from_seq)

    def _take_found(self, batch: Batch, found: Found, capacity: int) -> int | None:
        """Take messages while they fit; return how many, or None when the batch is complete."""
        in_columns = batch.takes_columns(len(found.positions))
        take = self._take_columns if in_columns else self._take_each
        try:
            return take(batch, found, capacity)
        finally:
            self._count.passed(found, self.position)

    def _take_each(self, batch: Batch, found: Found, capacity: int) -> int | None:
        taken = 0
        base_seq = found.block.base_seq
        for position in found.positions.tolist():
            seq = base_seq + position
            if not self._is_out(seq):
                self.position = seq
                if taken >= capacity or batch.full:
                    return None
                if batch.step_over:
                    return taken
                message = self.reader.message(self.shard, found.block, position)
                if message is not None:
                    if not batch.take(Selected(seq, message, 1)):
                        return None
                    self.in_flight.add(seq)
                    self._top_seq = max(self._top_seq, seq)
                    taken += 1
        self.position = found.next_seq
        return taken

    def _take_columns(self, batch: Batch, found: Found, capacity: int) -> int | None:
        fresh, base_seq = self._without_out(found), found.block.base_seq
        seqs = batch.take_columns(found.block, fresh[:capacity], self.shard.machine.subjects)
        self.in_flight.update(seqs)
        if seqs:
            self._top_seq = max(self._top_seq, seqs[-1])
        if len(seqs) < len(fresh):
            self.position = int(fresh[len(seqs)]) + base_seq
            return None if batch.full else len(seqs)
        self.position = found.next_seq
        return len(seqs)

    def _without_out(self, found: Found) -> NDArray[np.intp]:
        """The positions of the found messages that are not delivered, see :meth:`_is_out`."""
        consumer, fresh = self.consumer, found.positions
        top_seq = max(self._top_seq, consumer.delivered.stream_seq, consumer.acked_top)
        if not len(fresh) or int(fresh[0]) + found.block.base_seq > top_seq:
            return fresh
        seqs = (fresh + found.block.base_seq).tolist()
        out = self.in_flight | consumer.acked_ahead | consumer.pending.among(set(seqs))
        return fresh[[seq not in out for seq in seqs]]

    def _is_out(self, seq: int) -> bool:
        """Whether a message at or after ``position`` is delivered, as after an undo or new term."""
        consumer = self.consumer
        return seq in consumer.acked_ahead or seq in consumer.pending or seq in self.in_flight

    def _to_deliveries(self, batch: Batch, pending: int) -> list[Delivery] | DeliveryColumns:
        if batch.in_columns and batch.seqs:
            columns = batch.columns(self.consumer_seq + 1, pending)
            self.consumer_seq = columns.last_consumer_seq
            return columns
        deliveries: list[Delivery] = []
        selected = batch.selected
        pending += sum(1 for item in selected if item.attempt == 1)
        for item in selected:
            self.consumer_seq += 1
            if item.attempt == 1:
                pending -= 1
            message = item.message
            if self.consumer.config.headers_only:
                message = without_payload(message)
            deliveries.append(Delivery(message, self.consumer_seq, item.attempt, pending))
        return deliveries

    # Recording -----------------------------------------------------------------------------------

    def _record(self, seqs: list[int]) -> "asyncio.Future[Result] | None":
        """Have the deliveries recorded. If a future is returned, await it before sending them."""
        if not seqs:
            return None
        self._joined += seqs
        if self._commits_first():
            return self._send_joined()
        self._send_soon(JOIN_S)
        return None

    def _commits_first(self) -> bool:
        """Whether deliveries are recorded before they are sent."""
        return self.consumer.config.max_deliver > 0

    def _send_soon(self, delay_s: float) -> None:
        if self._join_timer is None:
            loop = asyncio.get_running_loop()
            self._join_timer = loop.call_later(delay_s, self.flush)

    def flush(self) -> None:
        """Propose joined deliveries now, because later log entries rely on them."""
        with contextlib.suppress(ApiError):  # then another attempt follows
            self._send_joined()

    def _send_joined(self) -> "asyncio.Future[Result] | None":
        self._end_join_timer()
        future: asyncio.Future[Result] | None = None
        while not self.closed and (self._joined or (self._held_back and not self.in_flight)):
            future = self._send(self._joined[:DELIVERED_MAX])
        return future

    def _end_join_timer(self) -> None:
        if self._join_timer is not None:
            self._join_timer.cancel()
            self._join_timer = None

    def _send(self, seqs: list[int], acks: Acknowledge | None = None) -> "asyncio.Future[Result]":
        """Propose ``seqs``, which are the first of the joined deliveries, and then ``acks``."""
        consumer = self.consumer
        who = consumer.consumer_id, consumer.epoch
        passes_others = self._passes_others()
        # The machine's position must stay before messages that it does not know yet. Otherwise
        # they would be skipped if their command is lost and this one is not.
        unknown = self._fresh(self.in_flight.difference(() if passes_others else seqs))
        reached = min(self.position, self._top_seq + 1)
        position = min(reached, min(unknown, default=reached))
        if passes_others:
            # Unlike the record of deliveries, this command has the stream check what it passes.
            advanced = self.propose_or_retry(Advance(*who, 0, 0, position))
            self.track(advanced)
            advanced.add_done_callback(has_failed)  # the next record moves the position again
        delivered = *who, seqs, position
        command: StreamCommand = Deliver(*delivered)
        if acks is not None:
            command = DeliverAcked(*delivered, None if acks.acked == seqs else acks.acked)
        future = self.propose_or_retry(command)
        self._joined = self._joined[len(seqs) :]
        self._held_back = position < reached
        self.track(future)
        future.add_done_callback(lambda done: self._recorded(seqs, done))
        return future

    def _passes_others(self) -> bool:
        """Whether the position has to pass messages that only other filters skipped.

        By the filters of now, the consumer needs them until then. With ``interest`` retention,
        nobody else may do so.
        """
        consumer = self.consumer
        return self.shard.machine.config.retention == "interest" and (
            self._filters != consumer.config.filter_subjects
            or consumer.next_seq < self._refiltered_seq
        )

    def propose_or_retry(self, command: StreamCommand) -> "asyncio.Future[Result]":
        """Propose a record of deliveries. If that raises, the next attempt is in a moment."""
        try:
            return self.propose(command)
        except ApiError:
            # The clients have the messages, so a later command records them.
            if not self.shard.damaged:
                self._send_soon(RETRY_S)
            raise

    def acknowledge(self, acks: Acknowledge) -> "asyncio.Future[Result]":
        """Propose acknowledgements, after all deliveries that are not recorded yet.

        A client that pulls usually acknowledges what it got last: that is one command.
        """
        if self._may_join(acks):
            future = self._send(self._joined, acks)
            self._end_join_timer()
            return future
        self.flush()
        future = self.propose(acks)
        self.track(future)
        return future

    def _may_join(self, acks: Acknowledge) -> bool:
        """Whether one command may have all joined deliveries, and then ``acks``."""
        count = len(self._joined) + len(acks.acked)
        return (
            bool(self._joined)
            and not acks.others
            and not self.closed
            and self.consumer.config.ack_policy == "explicit"
            and count <= SEQS_MAX
        )

    @property
    def is_settled(self) -> bool:
        """Whether no change of the consumer is on its way."""
        return not self._proposed

    def track(self, proposed: "asyncio.Future[Result]") -> None:
        """Note that a change of the consumer is proposed."""
        self._proposed.add(proposed)
        proposed.add_done_callback(self._proposed.discard)

    async def settle(self) -> None:
        """Wait until the consumer's state has everything that this dispatcher sent and received."""
        self.flush()
        if self._proposed:
            await asyncio.wait(set(self._proposed))

    def _recorded(self, seqs: list[int], done: "asyncio.Future[Result]") -> None:
        if has_failed(done):
            self.consumer_seq -= len(seqs)
            self._undo(seqs)
            return
        self.in_flight.difference_update(seqs)
        # A nak in the entry of the delivery made them due before this call, so they were passed.
        self.consumer.pending.note_passed(seqs)
        self.arm_deadline()
        if self._held_back and not self.in_flight:
            self._send_soon(JOIN_S)
        if self.waiters:
            recorded = set(seqs)
            if self.consumer.pending.among(recorded) != recorded:
                self.wake()  # messages that were removed before they were recorded leave capacity

    def _undo(self, seqs: list[int]) -> None:
        """Make deliveries that were selected and not recorded available again."""
        self.in_flight.difference_update(seqs)
        self._joined = [seq for seq in self._joined if seq in self.in_flight]
        self._top_seq = max(self._given_seq(), self.consumer.delivered.stream_seq, *self.in_flight)
        # The machine's position is past messages that are settled; it does not know the others.
        fresh = [seq for seq in seqs if seq >= self.consumer.next_seq]
        if fresh:
            self.position = min(self.position, *fresh)
        self.consumer.pending.note(seqs)
        self._deadlines_changed()

    def _given_seq(self) -> int:
        """The highest sequence that is sent, not in flight and unknown to the machine."""
        return 0

    def _give_back(self, seqs: list[int]) -> None:
        """Make deliveries due again at once that are recorded, but reached no client."""
        consumer = self.consumer
        naks: list[tuple[AckKind, int, int]] = [("nak", seq, 0) for seq in seqs]
        with contextlib.suppress(ApiError):  # if refused, they are due after ack_wait
            given_back = self.propose(Acknowledge(consumer.consumer_id, consumer.epoch, [], naks))
            self.track(given_back)
            given_back.add_done_callback(partial(self.acknowledged, postponed=True))

    def acknowledged(self, done: "asyncio.Future[Result]", *, postponed: bool) -> None:
        """Note applied or lost acknowledgements; ``postponed``: they moved deadlines."""
        if has_failed(done) or self.closed:
            return
        if postponed:
            self.arm_deadline()
        self.wake()

    def arm_deadline(self, soonest_s: float = 0.0) -> None:
        """Set the timer for the earliest deadline, but not before ``soonest_s`` from now."""
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
            self._deadline_timer = None
        earliest_ns = self.consumer.pending.earliest_ns
        if self.closed or self.shard.damaged or earliest_ns is None:
            return
        delay_s = max((earliest_ns - self.elapsed_ns()) / 1e9, soonest_s, _TIMER_MIN_S)
        loop = asyncio.get_running_loop()
        self._deadline_timer = loop.call_later(delay_s, self._deadline_passed)

    def arm_again(self, soonest_s: float) -> None:
        """As `arm_deadline`, unless the timer is set."""
        if self._deadline_timer is None:
            self.arm_deadline(soonest_s)

    def _deadline_passed(self) -> None:
        self._deadline_timer = None
        self._notice_change()
        self.consumer.pending.drop_stale(self.elapsed_ns())
        earliest_ns = self.consumer.pending.earliest_ns
        if earliest_ns is None:
            return
        if earliest_ns > self.elapsed_ns():
            self.arm_deadline()
            return
        limit = self.consumer.config.max_deliver
        if limit > 0 and not self.waiters:
            self._exhaustion.search(self, limit)
        self.wake()

    def propose_exhaust(self, seqs: list[int]) -> "asyncio.Future[Result]":
        """Propose to give up on ``seqs``; raises ApiError."""
        return self.propose(Exhaust(self.consumer.consumer_id, self.consumer.epoch, seqs))

    # Counting ------------------------------------------------------------------------------------

    async def num_pending(self) -> int:
        """Matching messages that are not delivered yet, as of the applied state."""
        async with self._lock:
            self._take_filters()
            return await self._count_pending()

    async def _count_pending(self) -> int:
        await self.reader.prepare(self.shard, self._filter)
        count = await self._count.count(self.consumer, self._filter, self._catch_up)
        # Delivered messages are subtracted, also those that the filter no longer matches because it
        # has changed. The result is then too low until the position is after them.
        return max(count - self._count_out(self.position), 0)

    def _count_out(self, low: int) -> int:
        """Count live messages from ``low`` on that are delivered already, see :meth:`_is_out`."""
        consumer, machine = self.consumer, self.shard.machine
        out = 0
        if low <= consumer.acked_top:
            out = count_live(machine, low, consumer.acked_ahead)
        if low > max(self._top_seq, consumer.delivered.stream_seq):
            return out
        # A pending message is live.
        fresh = self._fresh(self.in_flight) - consumer.acked_ahead
        return out + consumer.pending.count_from(low) + count_live(machine, low, fresh)


async def serve(
    dispatchers: Sequence[Dispatcher], request: PullRequest, attempt: Callable[[], Awaitable[bool]]
) -> None:
    """Serve a pull: call ``attempt`` until it has found messages, or the time of the pull is over.

    ``dispatchers`` are those of all shards. A waiting pull is queued at every one of them, in the
    same order, so whichever shard has messages wakes the first pull.
    """
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + request.expires_ns / 1e9
    for one in dispatchers:
        check_limits(one.consumer.config, request)
        one.check_open()
        one.touch()
    # First come, first served: a new pull queues after those that wait.
    queue_first = bool(dispatchers[0].waiters)
    waiter: asyncio.Event | None = None
    tried = partial(_tried_twice, dispatchers, attempt) if request.no_wait else attempt
    try:
        while queue_first or not await tried():
            left_s = deadline_s - loop.time()
            if request.no_wait or left_s <= 0:
                return
            if waiter is None:
                waiter = _queue_up(dispatchers)
                if len(dispatchers) > 1 and not queue_first:
                    waiter.set()  # messages that came after their shard was tried woke nobody
            queue_first = False
            for one in dispatchers:
                one.arm_deadline()  # that of the last timer may have passed without a message
            if not await woken(waiter, left_s):
                return
            for one in dispatchers:
                one.check_open()
    finally:
        for one in dispatchers:
            if waiter is not None:
                one.leave(waiter)
            one.touch()
            if not one.closed:
                one.wake()


async def _tried_twice(
    dispatchers: Sequence[Dispatcher], attempt: Callable[[], Awaitable[bool]]
) -> bool:
    """Call ``attempt``, and again once all acknowledgements before it are applied.

    They may allow more deliveries, also if they came with this pull.
    """
    found = await attempt()
    if found or all(one.is_settled for one in dispatchers):
        return found
    await asyncio.gather(*(one.settle() for one in dispatchers))
    for one in dispatchers:
        one.check_open()
    return await attempt()


def _queue_up(dispatchers: Sequence[Dispatcher]) -> asyncio.Event:
    first = dispatchers[0]
    if len(first.waiters) >= max(first.consumer.config.max_waiting, 1):
        raise ApiError(errors.TOO_MANY_WAITERS, retry_after_s=1, applied=False)
    waiter = asyncio.Event()
    for one in dispatchers:
        one.enqueue(waiter)
    return waiter
