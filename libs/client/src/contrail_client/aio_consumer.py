"""A consumer, for asyncio."""

import asyncio
import random
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from contrail_client import consumers, pulling
from contrail_client.errors import ContrailError
from contrail_client.models import ConsumerInfo, Delivery, Difference, Pull
from contrail_client.times import Duration
from contrail_client.transport import AsyncTransport


class AsyncPulledMessage(Delivery, frozen=True, kw_only=True, dict=True):
    """As `PulledMessage`, for asyncio."""

    _consumer: ClassVar["AsyncConsumer"]

    async def ack(self) -> None:
        """As `PulledMessage.ack`."""
        await self._consumer.ack(self)

    async def nak(self, *, delay: Duration | None = None) -> None:
        """As `PulledMessage.nak`."""
        await self._consumer.nak(self, delay=delay)

    async def term(self, *, reason: str | None = None) -> None:
        """As `PulledMessage.term`."""
        await self._consumer.term(self, reason=reason)

    async def in_progress(self) -> None:
        """As `PulledMessage.in_progress`."""
        await self._consumer.in_progress(self)

    async def ack_sync(self) -> None:
        """As `PulledMessage.ack_sync`."""
        await self._consumer.ack(self, sync=True)


class AsyncConsumer:
    """As `Consumer`, for asyncio."""

    def __init__(self, transport: AsyncTransport, stream: str, name: str) -> None:
        self._transport = transport
        self.stream = stream
        self.name = name
        self.differs: tuple[Difference, ...] = ()

    async def info(self) -> ConsumerInfo:
        """As `Consumer.info`."""
        return await self._transport.run(consumers.get(self.stream, self.name))

    async def update(
        self, changes: Mapping[str, Any], *, if_match: str | None = None
    ) -> ConsumerInfo:
        """As `Consumer.update`."""
        call = consumers.update(self.stream, self.name, changes, if_match=if_match)
        return await self._transport.run(call)

    async def delete(self) -> None:
        """As `Consumer.delete`."""
        await self._transport.run(consumers.delete(self.stream, self.name))

    async def next(
        self,
        batch: int = 1,
        *,
        expires: Duration | None = "30s",
        max_bytes: int | None = None,
        no_wait: bool | None = None,
    ) -> Pull[AsyncPulledMessage]:
        """As `Consumer.next`."""
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
        """As `Consumer.messages`; leave the loop under `contextlib.aclosing` to give back at once.

        Otherwise the event loop does so when it finds the time.
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
        loop = asyncio.get_running_loop()
        while (call := pulls.call(loop.time())) is not None:
            try:
                found = consumers.bound(await self._transport.run(call), self)
            except ContrailError as error:
                await asyncio.sleep(pulls.failed(error, loop.time(), random.random()))
                continue
            pulls.came(found, loop.time())
            unread = deque(found)
            try:
                while unread:
                    yield unread.popleft()
            finally:
                with suppress(ContrailError):  # then they come again after the `ack_wait`
                    await self.nak(*(each for each in unread if each.ack_token), sync=True)

    async def ack(self, *deliveries: Delivery, sync: bool = False) -> None:
        """As `Consumer.ack`."""
        await self._acknowledge("ack", deliveries, sync=sync)

    async def nak(
        self, *deliveries: Delivery, delay: Duration | None = None, sync: bool = False
    ) -> None:
        """As `Consumer.nak`."""
        await self._acknowledge("nak", deliveries, delay=delay, sync=sync)

    async def term(
        self, *deliveries: Delivery, reason: str | None = None, sync: bool = False
    ) -> None:
        """As `Consumer.term`."""
        await self._acknowledge("term", deliveries, reason=reason, sync=sync)

    async def in_progress(self, *deliveries: Delivery, sync: bool = False) -> None:
        """As `Consumer.in_progress`."""
        await self._acknowledge("in_progress", deliveries, sync=sync)

    async def _acknowledge(
        self, kind: consumers.AckKind, deliveries: Sequence[Delivery], **how: Any
    ) -> None:
        if deliveries:
            call = consumers.acknowledge(self.stream, self.name, kind, deliveries, **how)
            await self._transport.run(call)
