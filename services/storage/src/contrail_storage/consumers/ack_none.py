"""The dispatcher of a consumer without acknowledgements: a delivered message is settled.

Nothing is pending and nothing is delivered again. So messages are selected a block at a time and
stay in columns, and only the consumer's position is recorded. Streams with interest retention
remove messages by the record of their delivery. There this dispatcher works as others do, and
records deliveries before it sends them.
"""

import asyncio
from dataclasses import dataclass

from msgspec.structs import replace

from contrail_common import errors
from contrail_common.columns.delivery_columns import DeliveryColumns
from contrail_common.errors import ApiError
from contrail_link.contract.consume import Delivery, PullRequest
from contrail_storage.consumers.dispatcher import JOIN_S, Dispatcher
from contrail_storage.consumers.pull_batch import Batch, deliveries_in_steps
from contrail_storage.core.commands import Advance
from contrail_storage.core.results import Result
from contrail_storage.reading.reader import Found
from contrail_storage.replica.entries import has_failed


@dataclass(slots=True, eq=False)
class AckNoneDispatcher(Dispatcher):
    """The dispatcher of a consumer with ack policy ``none``: it records positions only."""

    _given: int = 0  # the position after the last delivered message
    _unrecorded: bool = False  # whether ``_given`` is not proposed yet

    def new_term(self) -> None:
        """Begin a term as leader: another node may have delivered more in the meantime."""
        self.consumer_seq = max(self.consumer_seq, self.consumer.delivered.consumer_seq)
        self._send_soon(JOIN_S)
        self.wake()

    # Selecting -----------------------------------------------------------------------------------

    def _commits_first(self) -> bool:
        return True

    def _settles(self) -> bool:
        """Whether the stream removes delivered messages, so that each delivery is recorded.

        Also true when it did so until now and deliveries from that time are not recorded yet.
        """
        return self.shard.machine.config.retention == "interest" or bool(self.in_flight)

    async def take(self, request: PullRequest) -> list[Delivery] | DeliveryColumns:
        """Deliver what is available now, without waiting for messages."""
        if self._settles():
            return await Dispatcher.take(self, request)
        async with self._lock:
            self.check_open()
            self._take_filters()
            batch = self._batch(replace(request, columns=True))
            begun = self._catch_up()
            try:
                await self._collect_columns(batch)
                pending = await self._count_pending() if batch.seqs else 0
                if batch.seqs and self.confirm_led is not None:
                    await self.confirm_led()
                if batch.seqs:
                    found = batch.columns(self.consumer_seq + 1, pending)
                    deliveries = [] if request.columns else await deliveries_in_steps(found)
                self.check_open()
            except BaseException:
                # A cancelled pull ends here too: its messages go to the next pull.
                self.position = begun
                self.wake()
                raise
            if batch.too_large:
                detail = f"the next message has {batch.too_large} bytes"
                raise ApiError(errors.PULL_TOO_SMALL, detail)
            if not batch.seqs:
                return []
            self._give_out(found)
        return found if request.columns else deliveries

    async def _collect_columns(self, batch: Batch) -> None:
        # Nothing may be awaited after the last check for new messages, or a wake would be missed.
        missed = False
        while not batch.full:
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
            if not batch.seqs:
                self._take_filters()
            elif self._filters != self.consumer.config.filter_subjects:
                return  # the next pull selects by the new filters, from after these messages
            # Otherwise messages were removed meanwhile, or other ones are wanted.
            if self._filter is wanted and self._catch_up() == position:
                found = self._select(block, position, batch.left)
                missed = not len(found.positions)
                self._take_block(batch, found)

    def _take_block(self, batch: Batch, found: Found) -> None:
        """Take messages while they fit, and move the position past them."""
        fresh = self._without_out(found)  # acknowledged by token, although nothing needs to be
        taken = len(batch.take_columns(found.block, fresh, self.shard.machine.subjects))
        self.position = found.next_seq
        if taken < len(fresh):
            self.position = int(fresh[taken]) + found.block.base_seq
        self._count.passed(found, self.position)

    # Recording -----------------------------------------------------------------------------------

    def _give_out(self, found: DeliveryColumns) -> None:
        self.consumer_seq = found.last_consumer_seq
        self._top_seq = found.last_seq
        self._given = found.last_seq + 1
        self._unrecorded = True
        self._send_soon(JOIN_S)

    def _given_seq(self) -> int:
        return self._given - 1

    def _send_joined(self) -> "asyncio.Future[Result] | None":
        self._end_join_timer()
        moved = self._send_position()
        return Dispatcher._send_joined(self) or moved

    def _send_position(self) -> "asyncio.Future[Result] | None":
        if self.closed or not self._unrecorded:
            return None
        consumer = self.consumer
        future = self.propose_or_retry(
            Advance(
                consumer.consumer_id,
                consumer.epoch,
                self.consumer_seq,
                self._top_seq,
                self._given,
            )
        )
        self._unrecorded = False
        self.track(future)
        future.add_done_callback(self._advanced)
        return future

    def _advanced(self, done: "asyncio.Future[Result]") -> None:
        if has_failed(done):
            # The clients have the messages. The position is recorded with the next deliveries, or
            # by the next term if this node no longer leads.
            self._unrecorded = True
