"""The publisher: many messages under way over one WebSocket, each with an outcome of its own."""

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
from contrail_client.publishing import message_headers, payload_bytes

FAILURES_KEPT: Final = 100
"""How many failures that nobody looked at are kept with their errors; more are only counted."""

_FRAME_ROOM: Final = FRAME_BYTES_MAX - (256 << 10)
_PREFIX_BYTES: Final = 12


def outgoing_message(
    subject: str,
    payload: bytes | str,
    headers: Headers | None,
    msg_id: str | None,
    expected: Expected | None,
    ttl: str | timedelta | None,
) -> Message:
    """The message, its payload as bytes; ValueError for one that no frame can carry."""
    data = payload.encode() if isinstance(payload, str) else payload
    message = Message(subject, data, headers, msg_id, expected, ttl)
    if len(message.payload) > _FRAME_ROOM:
        raise ValueError(f"a message of {len(message.payload)} bytes is too large for a frame")
    return message


class AsyncPublication(asyncio.Future[PubAck]):
    """The outcome of one message: awaiting it gives the ack, or raises why there is none."""

    subject: str = ""
    _seen: bool = False

    def __await__(self) -> Generator[Any, None, PubAck]:
        self._seen = True
        return super().__await__()

    def result(self) -> PubAck:
        """The ack; raises why there is none."""
        self._seen = True
        return super().result()

    def exception(self) -> BaseException | None:
        """Why there is no ack."""
        self._seen = True
        return super().exception()

    @property
    def seen(self) -> bool:
        """Whether anyone has asked for the outcome."""
        return self._seen

    def mark_seen(self) -> None:
        """Someone has asked, by other ways."""
        self._seen = True


class AsyncPublisher:
    """Publishes in order, without waiting for one message before the next.

    `publish` waits while `max_outstanding` messages or `max_bytes` have no outcome yet. When the
    connection is lost, messages with an id are sent again under the same id for up to `retry_s`
    after their first sending; keep that below the stream's `duplicate_window`, and each is stored
    exactly once. Of those without an id, only what was certainly not sent goes out again; the rest
    ends in `OutcomeUnknown`. With `auto_ids` every message without an id gets one.

    What certainly was not stored is tried for the client's `reconnect_s` from the first failure on,
    whether the connection was lost, is refused, or the server says that it cannot for the moment.

    Messages are sent in the order they were published. After a lost connection the same order is
    kept; only a message that the server refuses for the moment may be stored after later ones.
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
        self._connection = connection
        self._outbox: Outbox[AsyncPublication] = Outbox(
            max_outstanding, max_bytes, retry_s, connection.reconnect_s
        )
        self._sid = f"publisher {connection.new_id()}"
        self._id_prefix = secrets.token_urlsafe(_PREFIX_BYTES) if auto_ids else None
        self._waiting: deque[asyncio.Event] = deque()
        self._failures: list[AsyncPublication] = []
        self._failures_dropped = 0
        self._held = False
        self._loss: ContrailError = Unreachable("the connection was lost")
        self._end: ContrailError | None = None
        self._pauses: dict[int, asyncio.TimerHandle] = {}
        self._attached = False

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
        """Take a message to publish, once there is room; the result awaits its ack.

        Raises ValueError for a message that no frame can carry, and `Closed` or the error that
        ended the publisher.
        """
        return await self.send(outgoing_message(subject, payload, headers, msg_id, expected, ttl))

    async def send(self, message: Message) -> AsyncPublication:
        """As `publish`, for a message of `outgoing_message`."""
        size = message_bytes(message)
        self._attach()
        if self._waiting or not self._outbox.has_room(size):
            await self._wait_for_room(size)
        key = self._connection.new_id()
        if message.msg_id is None and self._id_prefix is not None:
            message = replace(message, msg_id=f"{self._id_prefix}{key}")
        publication = AsyncPublication(loop=asyncio.get_running_loop())
        publication.subject = message.subject
        self._outbox.add(key, message, size, publication)
        self._connection.wants_to_send(self._sid)
        return publication

    async def flush(self) -> None:
        """Wait until everything published so far has its outcome.

        Raises `PublishesFailed` when messages failed whose outcome nobody has asked for: a failure
        is told at least once.
        """
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
        """Stop; what has no outcome fails with `Closed` or `OutcomeUnknown`. `flush` first."""
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
        """As `Participant.received`; no frame names a publisher."""

    def draining(self) -> None:
        """As `Participant.draining`: what is published now waits for the next socket."""
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

    # Itself --------------------------------------------------------------------------------------

    def _attach(self) -> None:
        if self._end is not None:
            raise self._end
        if not self._attached:
            self._attached = True
            self._connection.attach(self._sid, self)

    async def _wait_for_room(self, size: int) -> None:
        """Wait for a turn, in the order of coming."""
        turn = asyncio.Event()
        self._waiting.append(turn)
        try:
            while self._waiting[0] is not turn or not self._outbox.has_room(size):
                turn.clear()
                await turn.wait()
                if self._end is not None:
                    raise self._end
        finally:
            self._waiting.remove(turn)
            # What made room for this one may be enough for the next.
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
            in_vain = settled.maybe_stored and isinstance(error, ApiProblem) and error.retryable
            self._fail(settled, given_up(settled, error) if in_vain else error)

    def _send_again(self, key: int) -> None:
        self._pauses.pop(key, None)
        self._outbox.send_again(key)
        self._connection.wants_to_send(self._sid)

    def _fail(self, outgoing: Outgoing[AsyncPublication], error: ContrailError) -> None:
        publication = outgoing.about
        self._wake()
        if publication.done():  # its caller cancelled it
            return
        publication.set_exception(error)
        # `flush` tells of it when nobody asks, so the event loop need not complain.
        asyncio.Future.exception(publication)
        if len(self._failures) < FAILURES_KEPT:
            self._failures.append(publication)
        else:
            self._failures_dropped += 1

    def _expire(self) -> None:
        """Give up what was first sent too long ago for the server to know it again."""
        now_s = asyncio.get_running_loop().time()
        for each, error in self._outbox.expired(now_s, self._loss):
            self._fail(each, error)
