"""The publisher: many messages in flight over one WebSocket, each with its own outcome."""

import asyncio
import random
import secrets
from collections import deque
from collections.abc import Generator
from datetime import timedelta
from functools import partial
from typing import Any, Final, Self

from msgspec.structs import replace

from contrail_client.errors import ApiProblem, Closed, ContrailError, PublishesFailed, Unreachable
from contrail_client.live.connection import AsyncConnection
from contrail_client.live.frames import (
    FRAME_BYTES_MAX,
    Answering,
    ClientFrame,
    OfSubscription,
    Pub,
    PubAcked,
    Refused,
)
from contrail_client.live.outbox import (
    MAX_BYTES,
    MAX_OUTSTANDING,
    RETRY_S,
    Outbox,
    Outgoing,
    given_up,
    message_bytes,
)
from contrail_client.models import Expected, Headers, Message, PubAck
from contrail_client.operations.publishing import message_headers, payload_bytes

FAILURES_KEPT: Final = 100
"""Unseen failures that are kept with their errors. Further ones are only counted."""

# A payload may have this many bytes; the rest of a frame is for subject, headers and envelope.
_FRAME_CAPACITY: Final = FRAME_BYTES_MAX - (256 << 10)
# Random bytes in generated ids, so that no two publishers generate the same one.
_PREFIX_BYTES: Final = 12


def outgoing_message(
    subject: str,
    payload: bytes | str,
    headers: Headers | None,
    msg_id: str | None,
    expected: Expected | None,
    ttl: str | timedelta | None,
) -> Message:
    """A message with its payload as bytes; raises ValueError if it does not fit in a frame."""
    data = payload.encode() if isinstance(payload, str) else payload
    message = Message(subject, data, headers, msg_id, expected, ttl)
    if len(message.payload) > _FRAME_CAPACITY:
        raise ValueError(f"a message of {len(message.payload)} bytes is too large for a frame")
    return message


class AsyncPublication(asyncio.Future[PubAck]):
    """The outcome of one message: await it for the ack, or for the error if there is none."""

    subject: str = ""
    _seen: bool = False

    def __await__(self) -> Generator[Any, None, PubAck]:
        self._seen = True
        return super().__await__()

    def result(self) -> PubAck:
        """The ack; raises the error if the publish failed."""
        self._seen = True
        return super().result()

    def exception(self) -> BaseException | None:
        """The error of a failed publish; None if there is an ack."""
        self._seen = True
        return super().exception()

    @property
    def seen(self) -> bool:
        """Whether the caller has asked for the outcome."""
        return self._seen

    def mark_seen(self) -> None:
        """Note that the caller asked for the outcome in another way."""
        self._seen = True


class AsyncPublisher:
    """Publishes in order, without waiting for the ack of one message before sending the next.

    `publish` waits while `max_outstanding` messages or `max_bytes` bytes have no outcome yet.

    After a lost connection, a message with an id is sent again under the same id for up to
    `retry_s` after it was first sent. Keep `retry_s` below the stream's `duplicate_window`: then
    each message is stored exactly once. A message without an id is sent again only if it certainly
    was not sent before; otherwise it fails with `OutcomeUnknown`. `auto_ids` gives an id to every
    message that has none.

    A message that certainly was not stored is retried for the client's `reconnect_s` after its
    first failure: a lost connection, a refused connection, or a temporary refusal by the server.

    Messages are sent in the order in which they were published, also after a lost connection. Only
    a message that the server refuses temporarily may be stored after later ones.
    """

    def __init__(
        self,
        connection: AsyncConnection,
        *,
        max_outstanding: int = MAX_OUTSTANDING,
        max_bytes: int = MAX_BYTES,
        auto_ids: bool = False,
        retry_s: float = RETRY_S,
    ) -> None:
        if max_outstanding < 1:
            raise ValueError("max_outstanding must be at least 1")
        # Everything here belongs to the event loop of the connection.
        self._connection = connection
        self._outbox: Outbox[AsyncPublication] = Outbox(
            max_outstanding, max_bytes, retry_s, connection.reconnect_s
        )
        """Messages without an outcome: every pending publication is in here."""
        self._sid = f"publisher {connection.new_id()}"
        """Name among the participants of the connection. No frame carries it."""
        self._id_prefix = secrets.token_urlsafe(_PREFIX_BYTES) if auto_ids else None
        """Begins the generated message ids; None without `auto_ids`."""
        self._waiting: deque[asyncio.Event] = deque()
        """Callers that wait for room in the outbox, oldest first. Only the first one is woken."""
        self._failures: list[AsyncPublication] = []
        """Failures since the last `flush`, at most `FAILURES_KEPT`."""
        self._failures_dropped = 0
        """Failures since the last `flush` that did not fit into `_failures`."""
        self._held = False
        """The server drains this socket: send nothing until the next one is open."""
        self._loss: ContrailError = Unreachable("the connection was lost")
        """Why the last socket was lost: the error of messages that expire."""
        self._end: ContrailError | None = None
        """Why the publisher has ended. Once set, nothing is accepted and nothing is pending."""
        self._pauses: dict[int, asyncio.TimerHandle] = {}
        """Timers of messages that were refused temporarily, by key."""
        self._attached = False
        """Whether the connection knows this publisher; it opens the socket for the first one."""

    async def __aenter__(self) -> Self:
        self._attach()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                await self.flush()
        finally:
            self.close()

    # For callers ---------------------------------------------------------------------------------

    async def publish(
        self,
        subject: str,
        payload: bytes | str = b"",
        *,
        headers: Headers | None = None,
        msg_id: str | None = None,
        expected: Expected | None = None,
        ttl: str | timedelta | None = None,
    ) -> AsyncPublication:
        """Accept a message, once there is room for it. Await the result for its ack.

        Raises ValueError if the message does not fit in a frame, and `Closed` or another
        `ContrailError` if the publisher has ended.
        """
        return await self.send(outgoing_message(subject, payload, headers, msg_id, expected, ttl))

    async def send(self, message: Message) -> AsyncPublication:
        """Publish a message that `outgoing_message` has made; otherwise as `publish`."""
        size = message_bytes(message)
        self._attach()
        # A small message must not overtake those that wait, even if it would fit.
        if self._waiting or not self._outbox.has_capacity(size):
            await self._wait_for_capacity(size)
        key = self._connection.new_id()
        if message.msg_id is None and self._id_prefix is not None:
            message = replace(message, msg_id=f"{self._id_prefix}{key}")
        publication = AsyncPublication(loop=asyncio.get_running_loop())
        publication.subject = message.subject
        self._outbox.add(key, message, size, publication)
        self._connection.wants_to_send(self._sid)
        return publication

    async def flush(self) -> None:
        """Wait until every message published so far has an outcome.

        Raises `PublishesFailed` if messages failed and nobody has asked for their outcomes. So
        every failure is reported at least once.
        """
        # Only the messages so far: other callers may publish without end.
        waiting = [each.about for each in self._outbox.messages]
        if waiting:
            await asyncio.wait(waiting)
        failed, self._failures = self._failures, []
        dropped, self._failures_dropped = self._failures_dropped, 0
        errors = [
            (each.subject, error)
            for each in failed
            if not each.seen and isinstance(error := each.exception(), ContrailError)
        ]
        if errors:
            raise PublishesFailed(errors, len(errors) + dropped)

    def close(self) -> None:
        """End the publisher. Call `flush` first to wait for the acks.

        Messages without an outcome fail: with `Closed` if they certainly were not stored,
        otherwise with `OutcomeUnknown`.
        """
        if self._end is None:
            self.failed(Closed("the publisher is closed"))

    # For the connection --------------------------------------------------------------------------

    def connected(self) -> None:
        """As `Participant.connected`."""
        self._held = False
        self._expire()
        if self._outbox.has_unsent:
            self._connection.wants_to_send(self._sid)

    def take(self, max_bytes: int) -> list[ClientFrame]:
        """As `Participant.take`."""
        if self._held:
            return []
        now_s = asyncio.get_running_loop().time()
        frames: list[ClientFrame] = []
        for each in self._outbox.take(max_bytes, now_s):
            self._connection.expect(each.key, self._answered)
            message = each.message
            frames.append(
                Pub(
                    id=each.key,
                    subject=message.subject,
                    data=payload_bytes(message),
                    headers=message_headers(message),
                )
            )
        return frames

    def received(self, frame: OfSubscription) -> None:
        """Do nothing: no frame names a publisher."""

    def draining(self) -> None:
        """Keep messages that are published from now on for the next socket."""
        self._held = True

    def disconnected(self, error: ContrailError) -> None:
        """As `Participant.disconnected`."""
        for pause in self._pauses.values():
            pause.cancel()
        self._pauses.clear()
        self._loss = error
        for each in self._outbox.lost(asyncio.get_running_loop().time()):
            self._fail(each, given_up(each, error))
        self._expire()

    def failed(self, error: ContrailError) -> None:
        """As `Participant.failed`."""
        self._end = error
        self._connection.detach(self._sid)
        for pause in self._pauses.values():
            pause.cancel()
        for each in self._outbox.messages:
            self._outbox.settle(each.key)
            self._fail(each, given_up(each, error))
        for turn in self._waiting:
            turn.set()

    def _attach(self) -> None:
        if self._end is not None:
            raise self._end
        if not self._attached:
            self._attached = True
            self._connection.attach(self._sid, self)

    async def _wait_for_capacity(self, size: int) -> None:
        """Wait until `size` bytes fit; callers are served in the order in which they came."""
        turn = asyncio.Event()
        self._waiting.append(turn)
        try:
            while self._waiting[0] is not turn or not self._outbox.has_capacity(size):
                turn.clear()
                await turn.wait()
                if self._end is not None:
                    raise self._end
        finally:
            self._waiting.remove(turn)
            # The room may be enough for the next caller too, and nobody else would wake it.
            self._wake()

    def _wake(self) -> None:
        if self._waiting:
            self._waiting[0].set()

    def _answered(self, frame: Answering) -> None:
        match frame:
            case PubAcked(id=key):
                ack = PubAck(
                    frame.stream, frame.seq, frame.duplicate, frame.durability, frame.shard
                )
                settled = self._outbox.settle(key)
                # The caller may have cancelled it.
                if settled is not None and not settled.about.done():
                    settled.about.set_result(ack)
                self._wake()
            case Refused(id=int(key)):
                self._refused(key, frame.error)

    def _refused(self, key: int, error: ContrailError) -> None:
        loop = asyncio.get_running_loop()
        retries, chance = self._connection.retries, random.random()
        pause_s = self._outbox.refused(key, error, retries, chance, loop.time())
        if pause_s is not None:
            self._pauses[key] = loop.call_later(pause_s, partial(self._send_again, key))
            return
        settled = self._outbox.settle(key)
        if settled is not None:
            # A temporary refusal concerns this attempt only: an earlier one may have been stored.
            in_vain = settled.maybe_stored and isinstance(error, ApiProblem) and error.retryable
            self._fail(settled, given_up(settled, error) if in_vain else error)

    def _send_again(self, key: int) -> None:
        self._pauses.pop(key, None)
        self._outbox.send_again(key)
        self._connection.wants_to_send(self._sid)

    def _fail(self, outgoing: Outgoing[AsyncPublication], error: ContrailError) -> None:
        publication = outgoing.about
        self._wake()
        if publication.done():  # the caller cancelled it
            return
        publication.set_exception(error)
        # Reading the exception keeps asyncio from logging it as never retrieved: if nobody asks
        # for it, `flush` reports it.
        asyncio.Future.exception(publication)
        if len(self._failures) < FAILURES_KEPT:
            self._failures.append(publication)
        else:
            self._failures_dropped += 1

    def _expire(self) -> None:
        """Fail messages whose time for retries is over."""
        now_s = asyncio.get_running_loop().time()
        for each, error in self._outbox.expired(now_s, self._loss):
            self._fail(each, error)
