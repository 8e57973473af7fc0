"""What all subscriptions have in common: credit, what is unread, and coming back."""

import asyncio
import random
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from typing import Final, Generic, Self, TypeVar

from contrail_client.errors import Closed, ContrailError, SubscriptionEnded
from contrail_client.live.columns import messages_of
from contrail_client.live.connection import AsyncConnection
from contrail_client.live.credit import CreditWindow
from contrail_client.live.frames import (
    Answering,
    ClientFrame,
    Credit,
    CreditGiven,
    Gone,
    Missing,
    Msgs,
    OfSubscription,
    Refused,
    Sub,
    Unsub,
)
from contrail_client.models import Delivered, Gap

T = TypeVar("T")

CREDIT_MSGS: Final = 1_000
CREDIT_BYTES: Final = 4 << 20


class Feed(Generic[T]):
    """A subscription: iterate over it for its messages.

    The server sends ahead what the credit allows; what was read gives credit back. A lost
    connection is opened anew and the subscription goes on. Iterating ends after `drain` or
    `unsubscribe`, and raises when the server ends the subscription or refuses it.
    """

    def __init__(
        self, connection: AsyncConnection, stream: str, *, credit_msgs: int, credit_bytes: int
    ) -> None:
        self.stream = stream
        self._connection = connection
        self._sid = f"s{connection.new_id()}"
        self._window = CreditWindow(credit_msgs, credit_bytes)
        self._unread: OrderedDict[int, Delivered | Gap] = OrderedDict()
        self._unread_bytes = 0
        self._news = asyncio.Event()
        self._control: list[ClientFrame] = []
        self._attached = False
        self._subscribed = False
        self._refusals = 0
        self._refused_since_s = 0.0
        self._retry: asyncio.TimerHandle | None = None
        self._leaving: asyncio.Future[None] | None = None
        self._end: ContrailError | None = None

    # For callers ---------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._attach()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.unsubscribe()

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        found = await self.next()
        if found is None:
            raise StopAsyncIteration
        return found

    async def next(self, *, timeout_s: float | None = None) -> T | None:
        """The next message; None when none came within `timeout_s`, or none will after `drain`.

        Raises `SubscriptionEnded`, the server's refusal, or what ended the connection for good.
        """
        found = self.take_unread(1)
        if found:
            return found[0]
        self._attach()
        try:
            async with asyncio.timeout(timeout_s):
                while await self._more():
                    found = self.take_unread(1)
                    if found:
                        return found[0]
        except TimeoutError:
            pass
        return None

    def take_unread(self, most: int) -> list[T]:
        """Up to `most` messages that are here already, without waiting."""
        found: list[T] = []
        while self._unread and len(found) < most:
            _, each = self._unread.popitem(last=False)
            if isinstance(each, Gap):
                self._passed(each)
                continue
            self._unread_bytes -= each.size
            self._consumed(each)
            found.append(self._give(each))
        return found

    async def drain(self) -> None:
        """Have no more sent; what was sent can still be read and acknowledged."""
        await self._leave()

    async def unsubscribe(self) -> None:
        """End the subscription; what was not read goes back to the server."""
        if self._attached and self._end is None:
            await self._leave()
            await self._return_unread()
            self._connection.detach(self._sid)
        self._finish(Closed("the subscription is closed"))

    # For the connection --------------------------------------------------------------------------

    def connected(self) -> None:
        """As `Participant.connected`."""
        if self._leaving is None:
            self._subscribe()

    def take(self, max_bytes: int) -> Sequence[ClientFrame]:
        """As `Participant.take`."""
        frames = self._control
        self._control = []
        return frames

    def received(self, frame: OfSubscription) -> None:
        """As `Participant.received`."""
        match frame:
            case Msgs():
                messages = frame.messages if frame.cols is None else messages_of(frame.cols)
                for each in messages:
                    self._came(each)
                if frame.cursor:
                    self._reached(frame.cursor)
                self._news.set()
            case Missing():
                self._missing(frame)
                self._news.set()
            case Gone(reason=reason):
                self.failed(SubscriptionEnded(reason))

    def draining(self) -> None:
        """As `Participant.draining`: what was sent can be read and acknowledged meanwhile."""

    def disconnected(self, error: ContrailError) -> None:
        """As `Participant.disconnected`."""
        self._subscribed = False
        self._control.clear()
        self._cancel_retry()
        self._left()

    def failed(self, error: ContrailError) -> None:
        """As `Participant.failed`."""
        self._connection.detach(self._sid)
        self._finish(error)

    # What kinds of subscriptions differ in -------------------------------------------------------

    def _subscribe(self) -> None:
        """A socket is open: `_request` the subscription, now or soon."""
        raise NotImplementedError

    def _give(self, delivered: Delivered) -> T:
        """What a caller gets of a message."""
        raise NotImplementedError

    def _came(self, delivered: Delivered) -> None:
        """A message came."""
        raise NotImplementedError

    def _missing(self, frame: Missing) -> None:
        """The server says that messages are missing."""

    def _reached(self, cursor: str) -> None:
        """What came up to now ends at `cursor`, in a stream that has several shards."""

    def _passed(self, gap: Gap) -> None:
        """The reader has come to a gap."""

    async def _return_unread(self) -> None:
        """The subscription ends: give back what was not read."""

    def _unsubscribe_frame(self, number: int) -> Unsub:
        return Unsub(id=number, sid=self._sid)

    # Itself --------------------------------------------------------------------------------------

    def _attach(self) -> None:
        if not self._attached:
            self._attached = True
            self._connection.attach(self._sid, self)

    def _send(self, *frames: ClientFrame) -> None:
        self._control += frames
        self._connection.wants_to_send(self._sid)

    def _again(self) -> None:
        self._retry = None
        self._subscribe()

    def _request(self, frame: Sub) -> None:
        """Send the frame that subscribes."""
        self._connection.expect(frame.id, self._answered)
        self._send(frame)

    def _credit(self) -> CreditGiven:
        """What the server may send on a new socket: the window without what is unread."""
        self._window.anew()
        return CreditGiven(
            msgs=max(self._window.msgs - len(self._unread), 0),
            bytes=max(self._window.bytes - self._unread_bytes, 0),
        )

    def _answered(self, frame: Answering) -> None:
        if not isinstance(frame, Refused):
            self._subscribed = True
            self._refusals = 0
            self._connection.wants_to_send(self._sid)
            return
        self._refused(frame.error)

    def _refused(self, error: ContrailError) -> None:
        """Subscribing was refused: again after a while if that may help.

        The deadline is that of a lost connection: a server that starts again may refuse first.
        """
        loop = asyncio.get_running_loop()
        if not self._refusals:
            self._refused_since_s = loop.time()
        self._refusals += 1
        retries = self._connection.retries
        pause_s = retries.pause_while(error, True, self._refusals, random.random())
        over_s = self._refused_since_s + self._connection.reconnect_s
        if pause_s is None or loop.time() + pause_s >= over_s:
            self.failed(error)
        else:
            self._retry = loop.call_later(pause_s, self._again)

    def _add_unread(self, key: int, each: Delivered | Gap) -> None:
        self._unread[key] = each
        if isinstance(each, Delivered):
            self._unread_bytes += each.size

    def _consumed(self, delivered: Delivered) -> None:
        """A message was read or passed over: give credit back when it is time."""
        if self._window.consumed(delivered.size) and self._subscribed and self._leaving is None:
            msgs, bytes_ = self._window.give_back()
            self._send(Credit(sid=self._sid, msgs=msgs, bytes=bytes_))

    async def _more(self) -> bool:
        """Wait until there may be something unread; False when nothing will come any more."""
        while not self._unread:
            if self._leaving is not None and self._leaving.done():
                return False
            if self._end is not None:
                raise self._end
            self._news.clear()
            await self._news.wait()
        return True

    async def _leave(self) -> None:
        """Tell the server to send no more, and wait until it does."""
        if self._leaving is None:
            self._leaving = asyncio.get_running_loop().create_future()
            self._cancel_retry()
            if self._subscribed:
                number = self._connection.new_id()
                self._connection.expect(number, lambda _: self._left())
                self._send(self._unsubscribe_frame(number))
            else:
                self._left()
        await asyncio.shield(self._leaving)

    def _left(self) -> None:
        if self._leaving is not None and not self._leaving.done():
            self._leaving.set_result(None)
        self._news.set()

    def _finish(self, error: ContrailError) -> None:
        if self._end is None:
            self._end = error
        self._cancel_retry()
        self._left()

    def _cancel_retry(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
