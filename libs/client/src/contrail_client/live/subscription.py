"""Push subscriptions to a consumer: messages with acknowledgements."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from contrail_client.errors import ContrailError
from contrail_client.live.connection import AsyncConnection
from contrail_client.live.feed import CREDIT_BYTES, CREDIT_MSGS, Feed
from contrail_client.live.frames import Answering, ClientFrame, Refused, Settle, Sub, Unsub
from contrail_client.live.settling import Kind, Option, Settlement, Settling
from contrail_client.models import Delivered, MessageFacts
from contrail_client.times import Duration, wire

Waiter = asyncio.Future[None]


class AsyncPushedMessage(MessageFacts):
    """A message of a subscription. Acknowledge it with one of its methods.

    `ack`, `nak`, `term` and `in_progress` are sent with the next frame and have no answer. If one
    is lost, the message is delivered again after the consumer's `ack_wait`. `ack_sync` returns once
    the acknowledgement is durable: the message will not be delivered again.
    """

    __slots__ = ("_claimed", "_subscription")

    def __init__(self, delivered: Delivered, subscription: "AsyncSubscription") -> None:
        super().__init__(delivered)
        self._subscription = subscription
        self._claimed = False

    async def ack(self) -> None:
        """Acknowledge the message: it is done."""
        self.settle("ack")

    async def nak(self, *, delay: Duration | None = None) -> None:
        """Deliver it again, at once or after `delay`."""
        self.settle("nak", wire(delay))

    async def term(self, *, reason: str | None = None) -> None:
        """Never deliver it again."""
        self.settle("term", reason)

    async def in_progress(self) -> None:
        """Restart the `ack_wait` of the message: work on it continues."""
        self._subscription.settle(self.delivered, "in_progress", None)

    async def ack_sync(self) -> None:
        """Acknowledge the message; the acknowledgement is durable when this returns.

        Raises the server's refusal, or the error that ended the subscription. After an error it may
        be called again.
        """
        self.claim()
        waiter = asyncio.get_running_loop().create_future()
        self._subscription.settle(self.delivered, "ack", None, waiter)
        try:
            await waiter
        except BaseException:
            self._claimed = False
            raise

    def settle(self, kind: Kind, option: Option = None) -> None:
        """Acknowledge the message, without an answer; ValueError if that was done before."""
        self.claim()
        self.settle_claimed(kind, option)

    def settle_claimed(self, kind: Kind, option: Option = None) -> None:
        """Send an acknowledgement after `claim`; may run in another thread than `claim`."""
        self._subscription.settle(self.delivered, kind, option)

    def claim(self) -> None:
        """Mark the message as acknowledged; ValueError if it was before."""
        if self._claimed:
            raise ValueError(f"message {self.seq} was already acknowledged")
        self._claimed = True


class AsyncSubscription(Feed[AsyncPushedMessage]):
    """Messages of a consumer, pushed as they are published.

    Several subscriptions of one consumer share its messages. After a lost connection a subscription
    continues, and messages that were read before can still be acknowledged. A message that is not
    acknowledged in time is delivered again; `num_delivered` counts its deliveries.
    """

    def __init__(
        self,
        connection: AsyncConnection,
        stream: str,
        consumer: str,
        *,
        credit_msgs: int = CREDIT_MSGS,
        credit_bytes: int = CREDIT_BYTES,
    ) -> None:
        super().__init__(connection, stream, credit_msgs=credit_msgs, credit_bytes=credit_bytes)
        self.consumer = consumer
        # Acknowledgements that are not sent yet.
        self._settling: Settling[Waiter] = Settling(self._sid)
        # Acknowledgements in frames whose answer somebody waits for, by the frame's number.
        self._awaited: dict[int, Sequence[Settlement[Waiter]]] = {}
        # Set when queued acknowledgements were taken for sending, or the feed has ended.
        self._settled = asyncio.Event()

    def settle(
        self, delivered: Delivered, kind: Kind, option: Option, waiter: Waiter | None = None
    ) -> None:
        """Acknowledge a message with the next frame; `waiter` is done when that is durable."""
        if self._end is not None:
            if waiter is not None:
                waiter.set_exception(self._end)
        elif not delivered.ack_token:  # the consumer's `ack_policy` is `none`
            if waiter is not None:
                waiter.set_result(None)
        else:
            self._put(Settlement(kind, option, delivered.place, delivered.ack_token, waiter))
            if kind in ("ack", "term"):
                self._drop_unread(delivered.place)

    def take(self, max_bytes: int) -> Sequence[ClientFrame]:
        """As `Participant.take`."""
        if not self._subscribed:  # until then the server cannot check the tokens
            return super().take(max_bytes)
        settled: Sequence[Settle] = self._settling.take(self._new_id)
        self._settled.set()
        # Acknowledgements go first: the server would ignore them after the end of a subscription.
        return [*settled, *super().take(max_bytes)]

    def disconnected(self, error: ContrailError) -> None:
        """As `Participant.disconnected`."""
        self._settling.lost()
        for group in self._awaited.values():
            for each in group:
                self._settling.add(each)
        self._awaited.clear()
        super().disconnected(error)

    def _subscribe(self) -> None:
        self._request(
            Sub(
                id=self._connection.new_id(),
                sid=self._sid,
                stream=self.stream,
                consumer=self.consumer,
                credit=self._credit(),
            )
        )

    def _give(self, delivered: Delivered) -> AsyncPushedMessage:
        return AsyncPushedMessage(delivered, self)

    def _came(self, delivered: Delivered) -> None:
        # In a stream with several shards only the token identifies a delivery.
        if delivered.ack_token and delivered.shard is None:
            self._settling.delivered(delivered.seq)
        self._drop_unread(delivered.place)  # of two copies, keep the one with the newer token
        self._add_unread(delivered.place, delivered)

    def _unsubscribe_frame(self, number: int) -> Unsub:
        return Unsub(id=number, sid=self._sid, drain=True)

    async def _return_unread(self) -> None:
        for each in self._unread.values():
            if isinstance(each, Delivered) and each.ack_token:
                self._put(Settlement("nak", None, each.place, each.ack_token))
        self._unread.clear()
        while self._settling and self._subscribed and self._end is None:
            self._settled.clear()
            await self._settled.wait()

    def _put(self, settlement: Settlement[Waiter]) -> None:
        self._settling.add(settlement)
        if self._subscribed:
            self._connection.wants_to_send(self._sid)

    def _new_id(self, group: Sequence[Settlement[Waiter]]) -> int:
        number = self._connection.new_id()
        self._awaited[number] = group
        self._connection.expect(number, self._settled_answer)
        return number

    def _settled_answer(self, frame: Answering) -> None:
        if frame.id is None:
            return
        group = self._awaited.pop(frame.id, ())
        error = frame.error if isinstance(frame, Refused) else None
        if error is not None and len(group) > 1:
            # The answer does not say which of them was refused: send each one again by itself.
            for each in group:
                self._put(replace(each, alone=True))
            return
        for each in group:
            if error is None:
                self._drop_unread(each.seq)
            _notify(each.about, error)

    def _drop_unread(self, seq: int) -> None:
        """Drop an unread copy of a message that is acknowledged.

        After a lost connection the server may have sent it again before the acknowledgement
        arrived.
        """
        copy = self._unread.pop(seq, None)
        if isinstance(copy, Delivered):
            self._unread_bytes -= copy.size
            self._consumed(copy)

    def _finish(self, error: ContrailError) -> None:
        super()._finish(error)
        waiting = self._settling.clear()
        for group in self._awaited.values():
            waiting += [each.about for each in group if each.about is not None]
        self._awaited.clear()
        for waiter in waiting:
            _notify(waiter, error)
        self._settled.set()


def _notify(waiter: Waiter | None, error: ContrailError | None) -> None:
    if waiter is None or waiter.done():
        return
    if error is None:
        waiter.set_result(None)
    else:
        waiter.set_exception(error)
