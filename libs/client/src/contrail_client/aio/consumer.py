"""A consumer. `contrail_client.blocking.consumer` is generated from this module."""

import asyncio
import random
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from contrail_client.errors import ContrailError
from contrail_client.models import ConsumerInfo, Delivery, Difference, Pull
from contrail_client.operations import consumers, pulling
from contrail_client.times import Duration
from contrail_client.transport.aio import AsyncTransport


class AsyncPulledMessage(Delivery, frozen=True, kw_only=True, dict=True):
    """A message that was pulled. Acknowledge it with one of its methods.

    Each of them is one request, and raises `AcksRefused` if the server refuses it. The methods of
    the consumer acknowledge many messages with one request.
    """

    _consumer: ClassVar["AsyncConsumer"]
    """Set on each message. Not a field: so it is neither decoded from answers nor shown."""

    async def ack(self) -> None:
        """Acknowledge the message: it is done."""
        await self._consumer.ack(self)

    async def nak(self, *, delay: Duration | None = None) -> None:
        """Deliver it again, at once or after `delay`."""
        await self._consumer.nak(self, delay=delay)

    async def term(self, *, reason: str | None = None) -> None:
        """Never deliver it again."""
        await self._consumer.term(self, reason=reason)

    async def in_progress(self) -> None:
        """Restart the `ack_wait` of the message: work on it continues."""
        await self._consumer.in_progress(self)

    async def ack_sync(self) -> None:
        """Acknowledge the message; the acknowledgement is durable when this returns."""
        await self._consumer.ack(self, sync=True)


class AsyncConsumer:
    """A consumer of a stream: pull deliveries, then acknowledge them.

    `differs` has the fields for which `ensure_consumer` found another value than requested.
    """

    def __init__(self, transport: AsyncTransport, stream: str, name: str) -> None:
        self._transport = transport
        self.stream = stream
        self.name = name
        self.differs: tuple[Difference, ...] = ()

    async def info(self) -> ConsumerInfo:
        """Configuration and progress."""
        return await self._transport.run(consumers.get(self.stream, self.name))

    async def update(
        self, changes: Mapping[str, Any], *, if_match: str | None = None
    ) -> ConsumerInfo:
        """Change the given fields of the configuration; None restores a default."""
        call = consumers.update(self.stream, self.name, changes, if_match=if_match)
        return await self._transport.run(call)

    async def delete(self) -> None:
        """Remove the consumer; its waiting pulls end."""
        await self._transport.run(consumers.delete(self.stream, self.name))

    async def next(
        self,
        batch: int = 1,
        *,
        expires: Duration | None = "30s",
        max_bytes: int | None = None,
        no_wait: bool | None = None,
    ) -> Pull[AsyncPulledMessage]:
        """Pull up to `batch` messages; waits up to `expires` (at most 60 s) for the first.

        The result is empty if none came. Acknowledge each message with its own `ack`, or many in
        one request with that of the consumer. After an `OutcomeUnknown`, messages that were pulled
        are delivered again after the consumer's `ack_wait`.
        """
        call = consumers.pull(
            self.stream,
            self.name,
            batch=batch,
            expires=None if no_wait else expires,
            max_bytes=max_bytes,
            no_wait=no_wait,
            kind=AsyncPulledMessage,
        )
        return consumers.bound(await self._transport.run(call), self)

    async def messages(
        self,
        batch: int = pulling.BATCH,
        *,
        timeout_s: float | None = None,
        expires: Duration = pulling.EXPIRES,
        max_bytes: int | None = None,
    ) -> AsyncGenerator[AsyncPulledMessage, None]:
        """Messages one by one, pulled in batches. Acknowledge each of them, as with `next`.

        Ends if no message came for `timeout_s`; without it, never. Continues after broken
        connections and restarts of the server, as a subscription does.

        Messages that were pulled and not yielded return to the server when the generator is closed:
        as soon as you leave the loop if it is inside `contextlib.aclosing`, otherwise when Python
        collects the generator.
        """
        pulls = pulling.Pulls(
            self.stream,
            self.name,
            self._transport.reconnecting(),
            batch=batch,
            expires=expires,
            max_bytes=max_bytes,
            timeout_s=timeout_s,
            kind=AsyncPulledMessage,
        )
        while (call := pulls.call(time.monotonic())) is not None:
            try:
                found = consumers.bound(await self._transport.run(call), self)
            except ContrailError as error:
                await asyncio.sleep(pulls.failed(error, time.monotonic(), random.random()))
                continue
            pulls.came(found, time.monotonic())
            unread = deque(found)
            try:
                while unread:
                    yield unread.popleft()
            finally:
                # If the caller leaves the loop, what it has not read returns to the consumer.
                with suppress(ContrailError):  # if it fails, they return after the `ack_wait`
                    await self.nak(*(each for each in unread if each.ack_token), sync=True)

    async def ack(self, *deliveries: Delivery, sync: bool = False) -> None:
        """Acknowledge messages: they are done. With `sync`, return only once that is durable.

        Raises `AcksRefused` if the server refused any of them. So do the next three methods.
        """
        await self._acknowledge("ack", deliveries, sync=sync)

    async def nak(
        self, *deliveries: Delivery, delay: Duration | None = None, sync: bool = False
    ) -> None:
        """Deliver these messages again, at once or after `delay`."""
        await self._acknowledge("nak", deliveries, delay=delay, sync=sync)

    async def term(
        self, *deliveries: Delivery, reason: str | None = None, sync: bool = False
    ) -> None:
        """Never deliver these messages again."""
        await self._acknowledge("term", deliveries, reason=reason, sync=sync)

    async def in_progress(self, *deliveries: Delivery, sync: bool = False) -> None:
        """Restart the `ack_wait` of these messages: work on them continues."""
        await self._acknowledge("in_progress", deliveries, sync=sync)

    async def _acknowledge(
        self, kind: consumers.AckKind, deliveries: Sequence[Delivery], **how: Any
    ) -> None:
        if deliveries:
            call = consumers.acknowledge(self.stream, self.name, kind, deliveries, **how)
            await self._transport.run(call)
