"""Delivery: the leader's side of the consumers of a shard.

A desk per consumer chooses what to deliver on applied state plus its own proposed, not yet applied
deliveries, so that two pulls never get the same message. Deliveries of plain consumers leave at
once and are joined into one command; with ``max_deliver`` they leave after their commit.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.link import Delivery, PullRequest, PullResult
from contrail_common.model import StoredMessage
from contrail_storage.core.commands import Deliver, Exhaust, StreamCommand
from contrail_storage.core.consumer_machine import ConsumerMachine
from contrail_storage.core.results import Result
from contrail_storage.node.filters import SubjectFilter
from contrail_storage.node.reader import Found, Reader
from contrail_storage.node.shard import Shard

JOIN_S: Final = 0.005
PULL_BYTES_MAX: Final = 8 << 20
_STALE_DEADLINES_MAX: Final = 4_096
_MESSAGE_SIZE_HEADER: Final = "Nats-Msg-Size"

Propose = Callable[[StreamCommand], "asyncio.Future[Result]"]


@dataclass(slots=True, frozen=True)
class Chosen:
    """A message chosen for delivery, and which attempt at it this is."""

    seq: int
    message: StoredMessage
    attempt: int


@dataclass(slots=True, eq=False)
class Waiter:
    """A pull that waits for messages."""

    request: PullRequest
    future: asyncio.Future[None]


@dataclass(slots=True, eq=False)
class Desk:
    """Deliveries of one consumer. ``position`` and ``consumer_seq`` run ahead of the machine."""

    shard: Shard
    consumer: ConsumerMachine
    reader: Reader
    propose: Propose
    log_time_ns: Callable[[], int]
    position: int = 0
    consumer_seq: int = 0
    in_flight: dict[int, int] = field(default_factory=dict)
    waiters: deque[Waiter] = field(default_factory=deque)
    deadlines: list[tuple[int, int]] = field(default_factory=list)
    last_active_s: float = 0.0
    closed: bool = False
    _joined: list[int] = field(default_factory=list)
    _join_timer: asyncio.TimerHandle | None = None
    _deadline_timer: asyncio.TimerHandle | None = None
    _filter: SubjectFilter = field(default_factory=lambda: SubjectFilter(()))
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _count: int = 0
    _counted_to: int = -1
    _deletions: int = 0
    _fresh_in_flight: int = 0

    def __post_init__(self) -> None:
        self.position = self.consumer.next_seq
        self.consumer_seq = self.consumer.delivered.consumer_seq
        self._rebuild_deadlines()
        self.reconfigured()
        self.touch()
        self.shard.listeners.add(self.wake)
        self._arm_deadline()

    def touch(self) -> None:
        """Note that a client used the consumer now."""
        self.last_active_s = asyncio.get_running_loop().time()

    def reconfigured(self) -> None:
        """The consumer's configuration changed."""
        self._filter = SubjectFilter(self.consumer.config.filter_subjects)
        self._counted_to = -1

    def close(self) -> None:
        """The consumer or its stream is gone: waiting pulls end."""
        self.closed = True
        self.shard.listeners.discard(self.wake)
        for timer in (self._join_timer, self._deadline_timer):
            if timer is not None:
                timer.cancel()
        self.wake()

    # Waiting -------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Something changed that may give the first waiting pull a message."""
        for waiter in self.waiters if self.closed else list(self.waiters)[:1]:
            if not waiter.future.done():
                waiter.future.set_result(None)

    async def pull(self, request: PullRequest) -> PullResult:
        """Serve a pull: what there is now, or wait for the first message up to ``expires``."""
        self._check_limits(request)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + request.expires_ns / 1e9
        self.touch()
        # First come, first served: who asks while others wait goes behind them.
        queue_first = bool(self.waiters)
        try:
            while True:
                self._check_open()
                deliveries = [] if queue_first else await self._deliver(request)
                queue_first = False
                left = deadline - loop.time()
                if deliveries or request.no_wait or left <= 0:
                    break
                if not await self._wait(request, left):
                    break
        finally:
            self.touch()
            if self.waiters and not self.closed:
                self.wake()
        pending = deliveries[-1].num_pending if deliveries else await self.num_pending()
        return PullResult(
            deliveries,
            pending,
            self.shard.machine.shard,
            self.consumer.consumer_id,
            self.consumer.epoch,
        )

    async def _wait(self, request: PullRequest, timeout_s: float) -> bool:
        if len(self.waiters) >= max(self.consumer.config.max_waiting, 1):
            raise ApiError(errors.TOO_MANY_WAITERS, retry_after_s=1, applied=False)
        waiter = Waiter(request, asyncio.get_running_loop().create_future())
        self.waiters.append(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                await waiter.future
        except TimeoutError:
            return False
        finally:
            if waiter in self.waiters:
                self.waiters.remove(waiter)
        return True

    def _check_open(self) -> None:
        if not self.shard.machine.exists:
            raise ApiError(errors.STREAM_NOT_FOUND)
        if self.closed:
            raise ApiError(errors.CONSUMER_DELETED)
        if self.shard.damaged:
            raise ApiError(errors.DATA_LOST, self.shard.damaged)

    def _check_limits(self, request: PullRequest) -> None:
        config = self.consumer.config
        for limit, asked, what in (
            (config.max_batch, request.batch, "max_batch"),
            (config.max_expires_ns, request.expires_ns, "max_expires"),
            (config.max_bytes, request.max_bytes, "max_bytes"),
        ):
            if limit > 0 and asked > limit:
                raise ApiError(errors.PULL_LIMIT, f"the pull exceeds {what} of {limit}")

    # Choosing ------------------------------------------------------------------------------------

    async def _deliver(self, request: PullRequest) -> list[Delivery]:
        async with self._lock:
            self._check_open()
            batch = _Batch(request)
            exhausted = await self._choose_again(batch)
            pending = await self._count_pending()
            if not batch.full:
                await self._choose_new(batch)
            if exhausted:
                await self.propose(
                    Exhaust(self.consumer.consumer_id, self.consumer.epoch, exhausted)
                )
            if not batch.chosen:
                if batch.too_large:
                    raise ApiError(
                        errors.PULL_TOO_SMALL,
                        f"the next message has {batch.too_large} bytes",
                    )
                return []
            self._count -= sum(1 for chosen in batch.chosen if chosen.attempt == 1)
            deliveries = self._to_deliveries(batch.chosen, pending)
            await self._record([chosen.seq for chosen in batch.chosen])
            return deliveries

    async def _choose_again(self, batch: "_Batch") -> list[int]:
        """Choose expired deliveries again, ascending; answers those that had their last chance."""
        due = self._take_due()
        exhausted: list[int] = []
        limit = self.consumer.config.max_deliver
        try:
            for seq in due:
                pending = self.consumer.pending.get(seq)
                if pending is None or batch.full:
                    continue
                if 0 < limit <= pending.attempts:
                    exhausted.append(seq)
                    continue
                block = await self.reader.block_at(self.shard, seq)
                if block is None or block.base_seq > seq or not self.shard.machine.is_live(seq):
                    exhausted.append(seq)
                    continue
                position = seq - block.base_seq
                message = self.reader.message(self.shard, block, position)
                chosen = Chosen(seq, message, pending.attempts + 1)
                batch.take(chosen, int(block.sizes()[position]))
        finally:
            if batch.full or len(batch.chosen) + len(exhausted) < len(due):
                # Some were not taken (or the pull was cancelled): their deadlines stand.
                self._rebuild_deadlines()
        return exhausted

    def _take_due(self) -> list[int]:
        """Pending sequences whose deadline passed and that are not on their way, ascending."""
        now_ns = self.log_time_ns()
        due: set[int] = set()
        while self.deadlines and self.deadlines[0][0] <= now_ns:
            deadline_ns, seq = heapq.heappop(self.deadlines)
            pending = self.consumer.pending.get(seq)
            if pending and pending.deadline_ns == deadline_ns and seq not in self.in_flight:
                due.add(seq)
        return sorted(due)

    def _room(self) -> int:
        limit = self.consumer.config.max_ack_pending
        if limit < 0 or self.consumer.config.ack_policy == "none":
            return PULL_BYTES_MAX
        return limit - len(self.consumer.pending) - self._fresh_in_flight

    async def _choose_new(self, batch: "_Batch") -> None:
        room = self._room()
        while room > 0 and not batch.full:
            seq = max(self.position, self.shard.machine.counters.first_seq)
            if seq > self.shard.written_seq:
                return
            block = await self.reader.block_at(self.shard, seq)
            if block is None:
                return
            found = self.reader.select(self.shard, block, seq, self._filter)
            taken = self._take_found(batch, found, room)
            if taken is None:
                return
            room -= taken

    def _take_found(self, batch: "_Batch", found: Found, room: int) -> int | None:
        """Take found messages while they fit; None when the batch ended inside the block."""
        taken = 0
        base_seq = found.block.base_seq
        sizes = found.block.sizes()
        for position in found.positions.tolist():
            seq = base_seq + position
            if seq in self.consumer.acked_ahead:
                continue
            if taken >= room or batch.full:
                self.position = seq
                return None
            message = self.reader.message(self.shard, found.block, position)
            if not batch.take(Chosen(seq, message, 1), int(sizes[position])):
                self.position = seq
                return None
            taken += 1
        self.position = found.next_seq
        return taken

    def _to_deliveries(self, chosen: list[Chosen], pending: int) -> list[Delivery]:
        deliveries = []
        for item in chosen:
            self.consumer_seq += 1
            if item.attempt == 1:
                pending -= 1
            message = item.message
            if self.consumer.config.headers_only:
                message = _without_payload(message)
            deliveries.append(Delivery(message, self.consumer_seq, item.attempt, max(pending, 0)))
        return deliveries

    # Recording -----------------------------------------------------------------------------------

    async def _record(self, seqs: list[int]) -> None:
        """Propose the deliveries; wait for the commit only where the consumer's rules need it."""
        for seq in seqs:
            self.in_flight[seq] = self.in_flight.get(seq, 0) + 1
            if seq not in self.consumer.pending:
                self._fresh_in_flight += 1
        self._joined += seqs
        if self.consumer.config.max_deliver > 0:
            committed = self._send_joined()
            if committed is not None:
                await committed
        elif self._join_timer is None:
            loop = asyncio.get_running_loop()
            self._join_timer = loop.call_later(JOIN_S, self._send_joined)

    def flush(self) -> None:
        """Propose joined deliveries now: what follows in the log relies on them."""
        if self._joined:
            self._send_joined()

    def _send_joined(self) -> "asyncio.Future[Result] | None":
        if self._join_timer is not None:
            self._join_timer.cancel()
            self._join_timer = None
        seqs, self._joined = self._joined, []
        if not seqs or self.closed:
            return None
        command = Deliver(self.consumer.consumer_id, self.consumer.epoch, seqs, self.position)
        try:
            future = self.propose(command)
        except ApiError:
            self._undo(seqs)
            return None
        future.add_done_callback(lambda done: self._recorded(seqs, done))
        return future

    def _recorded(self, seqs: list[int], done: "asyncio.Future[Result]") -> None:
        if done.cancelled() or done.exception() is not None:
            self._undo(seqs)
            return
        self._land(seqs)
        for seq in seqs:
            pending = self.consumer.pending.get(seq)
            if pending is not None:
                heapq.heappush(self.deadlines, (pending.deadline_ns, seq))
        if len(self.deadlines) > 2 * len(self.consumer.pending) + _STALE_DEADLINES_MAX:
            # Acknowledged deliveries leave their deadlines behind: begin again without them.
            self._rebuild_deadlines()
        self._arm_deadline()

    def _rebuild_deadlines(self) -> None:
        self.deadlines = [(item.deadline_ns, seq) for seq, item in self.consumer.pending.items()]
        heapq.heapify(self.deadlines)

    def _land(self, seqs: list[int]) -> None:
        for seq in seqs:
            left = self.in_flight.get(seq, 1) - 1
            if left > 0:
                self.in_flight[seq] = left
            else:
                self.in_flight.pop(seq, None)
        self._fresh_in_flight = sum(1 for seq in self.in_flight if seq not in self.consumer.pending)

    def _undo(self, seqs: list[int]) -> None:
        # The deliveries were not recorded: they come again, from the machine's own position.
        self._land(seqs)
        self._rebuild_deadlines()
        if not self.in_flight:
            self.position = self.consumer.next_seq
            self.consumer_seq = self.consumer.delivered.consumer_seq
            self._counted_to = -1

    def postponed(self, seqs: list[int]) -> None:
        """Deadlines of ``seqs`` moved (nak, in_progress)."""
        for seq in seqs:
            pending = self.consumer.pending.get(seq)
            if pending is not None:
                heapq.heappush(self.deadlines, (pending.deadline_ns, seq))
        self._arm_deadline()

    def _arm_deadline(self) -> None:
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
            self._deadline_timer = None
        if self.closed or not self.deadlines:
            return
        delay_s = max((self.deadlines[0][0] - self.log_time_ns()) / 1e9, 0.001)
        loop = asyncio.get_running_loop()
        self._deadline_timer = loop.call_later(delay_s, self._deadline_passed)

    def _deadline_passed(self) -> None:
        self._deadline_timer = None
        while self.deadlines:
            deadline_ns, seq = self.deadlines[0]
            pending = self.consumer.pending.get(seq)
            if pending is not None and pending.deadline_ns == deadline_ns:
                break
            heapq.heappop(self.deadlines)
        if not self.deadlines:
            return
        if self.deadlines[0][0] > self.log_time_ns():
            self._arm_deadline()
            return
        limit = self.consumer.config.max_deliver
        if limit > 0 and not self.waiters:
            self._give_up(limit)
        self.wake()

    def _give_up(self, limit: int) -> None:
        """Let go of deliveries past their last chance although nobody pulls."""
        now_ns = self.log_time_ns()
        over = [
            seq
            for seq, pending in self.consumer.pending.items()
            if pending.deadline_ns <= now_ns and pending.attempts >= limit
        ]
        if over and not self.closed:
            exhausted = Exhaust(self.consumer.consumer_id, self.consumer.epoch, over)
            # Unknown is fine: the next deadline that passes gives up on them again.
            self.propose(exhausted).add_done_callback(lambda done: done.exception())

    # Counting ------------------------------------------------------------------------------------

    async def num_pending(self) -> int:
        """Messages that match and were not yet delivered, as of what is written."""
        async with self._lock:
            return await self._count_pending()

    async def _count_pending(self) -> int:
        # Counted once, then kept up: new messages are added as they come, deliveries taken off.
        machine, written_seq = self.shard.machine, self.shard.written_seq
        low = max(self.position, machine.counters.first_seq)
        if self._filter.matches_all:
            return await self.reader.count(self.shard, low, written_seq, self._filter)
        stale = low > self.position or self._deletions != machine.deletions
        if self._counted_to < 0 or stale:
            self._deletions = machine.deletions
            self._count = await self.reader.count(self.shard, low, written_seq, self._filter)
        else:
            begin = max(self._counted_to + 1, low)
            self._count += await self.reader.count(self.shard, begin, written_seq, self._filter)
        self._counted_to = written_seq
        return self._count


class _Batch:
    """What a pull takes: at most ``batch`` messages and ``max_bytes``."""

    def __init__(self, request: PullRequest) -> None:
        self.chosen: list[Chosen] = []
        self.full = False
        self.too_large = 0
        self._room = request.batch
        self._bytes = 0
        self._bytes_max = request.max_bytes or PULL_BYTES_MAX
        self._strict = request.max_bytes > 0

    def take(self, item: Chosen, size: int) -> bool:
        """Take ``item`` of ``size`` bytes if it fits; otherwise the batch is full."""
        if self.full:
            return False
        first = not self.chosen
        if self._bytes + size > self._bytes_max and (not first or self._strict):
            self.too_large = size if first else 0
            self.full = True
            return False
        self.chosen.append(item)
        self._bytes += size
        self._room -= 1
        self.full = self._room <= 0
        return True


def _without_payload(message: StoredMessage) -> StoredMessage:
    headers = dict(message.headers or {})
    headers[_MESSAGE_SIZE_HEADER] = [str(len(message.payload))]
    return msgspec.structs.replace(message, headers=headers, payload=b"")
