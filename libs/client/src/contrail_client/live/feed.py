"""The base of all subscriptions: credit, unread messages, and subscribing again."""

import asyncio
import random
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from typing import Final, Generic, Self, TypeVar

from contrail_client.columns import messages_of
from contrail_client.errors import Closed, ContrailError, SubscriptionEnded
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

    The server may send as many messages ahead as the credit allows; reading messages gives credit
    back. After a lost connection the client reconnects and the subscription continues. Iteration
    ends after `drain` or `unsubscribe`. It raises an error if the server refuses or ends the
    subscription.
    """

    def __init__(
        self, connection: AsyncConnection, stream: str, *, credit_msgs: int, credit_bytes: int
    ) -> None:
        # Everything here belongs to the event loop of the connection.
        self.stream = stream
        # Sends the frames of this subscription, and calls it with those that come.
        self._connection = connection
        self._sid = f"s{connection.new_id()}"
        """Name of the subscription in frames, unique on this connection."""
        self._window = CreditWindow(credit_msgs, credit_bytes)
        """Counts messages that were read and whose credit was not returned yet."""
        self._unread: OrderedDict[int, Delivered | Gap] = OrderedDict()
        """Messages and gaps that no caller has read yet, oldest first, by `Delivered.place`."""
        self._unread_bytes = 0
        """The sum of the sizes of the messages in `_unread`."""
        self._news = asyncio.Event()
        """Set when a waiting reader has to check again: a message arrived, or the feed ended."""
        self._control: list[ClientFrame] = []
        """Frames to send on the current socket. They are dropped when it is lost."""
        self._attached = False
        """Whether the connection knows this subscription."""
        self._subscribed = False
        """Whether the server has confirmed the subscription on the current socket."""
        self._refusals = 0
        """Refusals in a row; 0 after the server has confirmed."""
        self._refused_since_s = 0.0
        """Loop time of the first of these refusals."""
        self._retry: asyncio.TimerHandle | None = None
        """The timer of the next attempt to subscribe; None when none is scheduled."""
        self._leaving: asyncio.Future[None] | None = None
        """Set by `drain` or `unsubscribe`; done once the server sends no more."""
        self._end: ContrailError | None = None
        """Why the subscription has ended; set at most once."""

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
        """The next message; None if none came within `timeout_s`, or after the last one of `drain`.

        Raises `SubscriptionEnded`, the server's refusal, or the error that ended the connection.
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
        """Up to `most` messages that have already arrived; does not wait."""
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
        """Stop new messages. Those that were sent can still be read and acknowledged."""
        await self._leave()

    async def unsubscribe(self) -> None:
        """End the subscription and return unread messages to the server."""
        if self._attached and self._end is None:
            await self._leave()
            # Only after the server has stopped sending: a later message would be left out.
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
        """Do nothing: messages that were sent can be read and acknowledged meanwhile."""

    def disconnected(self, error: ContrailError) -> None:
        """As `Participant.disconnected`."""
        self._subscribed = False
        self._control.clear()
        self._cancel_retry()
        # An unsubscribe that was sent gets no answer any more, and nothing else will come either.
        self._left()

    def failed(self, error: ContrailError) -> None:
        """As `Participant.failed`."""
        self._connection.detach(self._sid)
        self._finish(error)

    # For subclasses ------------------------------------------------------------------------------

    def _subscribe(self) -> None:
        """Call `_request`, now or soon: a socket is open."""
        raise NotImplementedError

    def _give(self, delivered: Delivered) -> T:
        """The form in which a caller gets a message."""
        raise NotImplementedError

    def _came(self, delivered: Delivered) -> None:
        """Accept a message from the server."""
        raise NotImplementedError

    def _missing(self, frame: Missing) -> None:
        """Note that the server reports missing messages."""

    def _reached(self, cursor: str) -> None:
        """Note the position after all messages that came; only for streams with several shards."""

    def _passed(self, gap: Gap) -> None:
        """Report a gap: the reader has read everything before it."""

    async def _return_unread(self) -> None:
        """Return unread messages to the server: the subscription ends."""

    def _unsubscribe_frame(self, number: int) -> Unsub:
        return Unsub(id=number, sid=self._sid)

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
        self._connection.expect(frame.id, self._answered)
        self._send(frame)

    def _credit(self) -> CreditGiven:
        """The credit for a new socket: the window, less the unread messages."""
        self._window.restart()
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
        """Schedule another attempt to subscribe, or fail if the refusal will not pass.

        The deadline is `reconnect_s`, as for a lost connection: a server that has just restarted
        may refuse at first.
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
        """Count a message that was read or skipped, and give credit back when it is time."""
        if self._window.consumed(delivered.size) and self._subscribed and self._leaving is None:
            msgs, bytes_ = self._window.give_back()
            self._send(Credit(sid=self._sid, msgs=msgs, bytes=bytes_))

    async def _more(self) -> bool:
        """Wait until something is unread; False if nothing will come any more."""
        while not self._unread:
            if self._leaving is not None and self._leaving.done():
                return False
            if self._end is not None:
                raise self._end
            self._news.clear()
            await self._news.wait()
        return True

    async def _leave(self) -> None:
        """Ask the server to send no more, and wait until it confirms."""
        if self._leaving is None:
            self._leaving = asyncio.get_running_loop().create_future()
            self._cancel_retry()
            if self._subscribed:
                number = self._connection.new_id()
                self._connection.expect(number, lambda _: self._left())
                self._send(self._unsubscribe_frame(number))
            else:
                self._left()
        # Several callers may wait for this answer. Cancelling one must not cancel the others.
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
