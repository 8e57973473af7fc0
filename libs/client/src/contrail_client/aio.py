"""The asynchronous client: `Contrail` with `await`, on the same calls."""

import asyncio
import random
import time
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from datetime import timedelta
from functools import partial
from typing import Any, Self

from msgspec.structs import replace

from contrail_client import (
    calls,
    consumers,
    ensuring,
    erasing,
    publishing,
    reading,
    replaying,
    streams,
)
from contrail_client.aio_consumer import AsyncConsumer
from contrail_client.calls import Retries
from contrail_client.configs import ConsumerConfig, StreamConfig
from contrail_client.errors import Conflict, ContrailError, NotFound
from contrail_client.listening import EventReader
from contrail_client.live.connection import Connection
from contrail_client.live.feed import CREDIT_BYTES, CREDIT_MSGS
from contrail_client.live.ordered import Start
from contrail_client.live.publisher import MAX_BYTES, MAX_OUTSTANDING, RETRY_S, AsyncPublisher
from contrail_client.live.reader import AsyncOrderedReader, GapHandler
from contrail_client.live.subscription import AsyncSubscription
from contrail_client.models import (
    AtomicAck,
    BatchResult,
    ConsumerInfo,
    Erasure,
    Event,
    EventType,
    Expected,
    Headers,
    Message,
    PubAck,
    Range,
    ReplayPlan,
    ReplaySplit,
    StoredMessage,
    StreamInfo,
    SubjectCount,
)
from contrail_client.tables import AsyncReplay
from contrail_client.times import Duration, Time
from contrail_client.transport import RECONNECT_S, AsyncTransport, Options, from_environment


class AsyncContrail:
    """As `Contrail`, for asyncio. Tasks of one event loop may share one."""

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        timeout_s: float = 30.0,
        connections: int = 32,
        retries: Retries | None = None,
        reconnect_s: float = RECONNECT_S,
    ) -> None:
        """As `Contrail`."""
        url, token = from_environment(url, token)
        self._retries = retries or Retries()
        options = Options(
            url=url,
            token=token,
            timeout_s=timeout_s,
            connections=connections,
            retries=self._retries,
            reconnect_s=reconnect_s,
        )
        self._transport = AsyncTransport(options)
        self._connection = Connection(options)

    async def close(self) -> None:
        """As `Contrail.close`."""
        await self._connection.close()
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def rtt(self) -> float:
        """As `Contrail.rtt`."""
        begun = time.perf_counter()
        await self._transport.run(calls.ALIVE)
        return time.perf_counter() - begun

    # Streams -------------------------------------------------------------------------------------

    async def create_stream(self, name: str, config: StreamConfig) -> StreamInfo:
        """As `Contrail.create_stream`."""
        return await self._transport.run(streams.create(name, config))

    async def ensure_stream(self, name: str, config: StreamConfig) -> StreamInfo:
        """As `Contrail.ensure_stream`."""
        for attempt in range(1, ensuring.ATTEMPTS + 1):
            try:
                return await self.create_stream(name, config)
            except Conflict as refusal:
                if not ensuring.exists_otherwise(refusal):
                    raise
                try:
                    info = await self.get_stream(name)
                except NotFound:
                    if attempt == ensuring.ATTEMPTS:
                        raise refusal from None
                    continue
                differs = ensuring.differences(refusal, config, info.config)
            ensuring.warn(f"stream {name}", differs)
            return replace(info, differs=differs)
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def put_stream(
        self,
        name: str,
        config: StreamConfig,
        *,
        if_match: str | None = None,
        only_create: bool = False,
    ) -> StreamInfo:
        """As `Contrail.put_stream`."""
        call = streams.put(name, config, if_match=if_match, only_create=only_create)
        return await self._transport.run(call)

    async def update_stream(
        self, name: str, changes: Mapping[str, Any], *, if_match: str | None = None
    ) -> StreamInfo:
        """As `Contrail.update_stream`."""
        return await self._transport.run(streams.update(name, changes, if_match=if_match))

    async def get_stream(self, name: str) -> StreamInfo:
        """As `Contrail.get_stream`."""
        return await self._transport.run(streams.get(name))

    async def list_streams(
        self, *, subject: str | None = None, prefix: str | None = None
    ) -> AsyncIterator[StreamInfo]:
        """As `Contrail.list_streams`."""
        token: str | None = None
        while True:
            call = streams.page(subject=subject, prefix=prefix, limit=None, token=token)
            page = await self._transport.run(call)
            for info in page.items:
                yield info
            token = page.next_page_token
            if token is None:
                return

    async def list_subjects(
        self, name: str, *, subject: str | None = None
    ) -> AsyncIterator[SubjectCount]:
        """As `Contrail.list_subjects`."""
        token: str | None = None
        while True:
            call = streams.subjects(name, subject=subject, limit=None, token=token)
            page = await self._transport.run(call)
            for found in page.items:
                yield found
            token = page.next_page_token
            if token is None:
                return

    async def list_deleted(
        self, name: str, *, shard: int | None = None
    ) -> AsyncIterator[tuple[int, int]]:
        """As `Contrail.list_deleted`."""
        token: str | None = None
        while True:
            page = await self._transport.run(streams.deleted(name, token=token, shard=shard))
            for run in page.items:
                yield run
            token = page.next_page_token
            if token is None:
                return

    async def seal_stream(self, name: str) -> StreamInfo:
        """As `Contrail.seal_stream`."""
        return await self._transport.run(streams.seal(name))

    async def delete_stream(self, name: str) -> None:
        """As `Contrail.delete_stream`."""
        await self._transport.run(streams.delete(name))

    async def purge_stream(
        self,
        name: str,
        *,
        subject: str | None = None,
        up_to_seq: int | None = None,
        keep: int | None = None,
        shard: int | None = None,
    ) -> int:
        """As `Contrail.purge_stream`."""
        call = streams.purge(name, subject=subject, up_to_seq=up_to_seq, keep=keep, shard=shard)
        return await self._transport.run(call)

    async def erase(
        self,
        stream: str,
        seqs: Sequence[int] | int | None = None,
        *,
        subject: str | None = None,
        shard: int | None = None,
        wait_s: float = 0.0,
    ) -> Erasure:
        """As `Contrail.erase`."""
        call = erasing.erase(stream, seqs=seqs, subject=subject, shard=shard, wait_s=wait_s)
        return await self._transport.run(call)

    async def erasure(self, erasure_id: str, *, wait_s: float = 0.0) -> Erasure:
        """As `Contrail.erasure`."""
        return await self._transport.run(erasing.erasure(erasure_id, wait_s=wait_s))

    def snapshot(self, stream: str, *, consumers: bool = True) -> AsyncIterator[bytes]:
        """As `Contrail.snapshot`."""
        return self._transport.stream(streams.snapshot(stream, consumers=consumers))

    async def restore(self, stream: str, chunks: AsyncIterable[bytes]) -> StreamInfo:
        """As `Contrail.restore`."""
        return await self._transport.upload(streams.restore(stream), chunks)

    # Publishing ----------------------------------------------------------------------------------

    async def publish(
        self,
        subject: str,
        payload: bytes | str = b"",
        *,
        headers: Headers | None = None,
        msg_id: str | None = None,
        expected: Expected | None = None,
        ttl: str | timedelta | None = None,
    ) -> PubAck:
        """As `Contrail.publish`."""
        message = Message(subject, payload, headers, msg_id, expected, ttl)
        return await self._transport.run(publishing.publish(message))

    async def publish_unacked(
        self,
        subject: str,
        payload: bytes | str = b"",
        *,
        headers: Headers | None = None,
        msg_id: str | None = None,
    ) -> None:
        """As `Contrail.publish_unacked`."""
        message = Message(subject, payload, headers, msg_id)
        await self._transport.run(publishing.publish_unacked(message))

    async def publish_batch(self, stream: str, messages: Sequence[Message]) -> BatchResult:
        """As `Contrail.publish_batch`."""
        return await self._transport.run(publishing.publish_batch(stream, messages))

    async def publish_atomic(self, stream: str, messages: Sequence[Message]) -> AtomicAck:
        """As `Contrail.publish_atomic`."""
        return await self._transport.run(publishing.publish_atomic(stream, messages))

    async def publish_all(
        self,
        stream: str,
        messages: Iterable[Message],
        *,
        batch_size: int = publishing.BATCH_MESSAGES,
        outstanding: int = 1,
    ) -> AsyncIterator[BatchResult]:
        """As `Contrail.publish_all`."""
        under_way: deque[asyncio.Task[BatchResult]] = deque()
        try:
            for batch in publishing.batches(messages, size=batch_size):
                under_way.append(asyncio.create_task(self.publish_batch(stream, batch)))
                if len(under_way) >= outstanding:
                    yield await under_way.popleft()
            while under_way:
                yield await under_way.popleft()
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    def publisher(
        self,
        *,
        max_outstanding: int = MAX_OUTSTANDING,
        max_bytes: int = MAX_BYTES,
        auto_ids: bool = False,
        retry_s: float = RETRY_S,
    ) -> AsyncPublisher:
        """As `Contrail.publisher`."""
        return AsyncPublisher(
            self._connection,
            max_outstanding=max_outstanding,
            max_bytes=max_bytes,
            auto_ids=auto_ids,
            retry_s=retry_s,
        )

    # Live ----------------------------------------------------------------------------------------

    def subscribe(
        self,
        stream: str,
        consumer: str,
        *,
        credit_msgs: int = CREDIT_MSGS,
        credit_bytes: int = CREDIT_BYTES,
    ) -> AsyncSubscription:
        """As `Contrail.subscribe`."""
        return AsyncSubscription(
            self._connection,
            stream,
            consumer,
            credit_msgs=credit_msgs,
            credit_bytes=credit_bytes,
        )

    def ordered(
        self,
        stream: str,
        *,
        start: Start = "all",
        filter_subjects: Sequence[str] = (),
        on_gap: GapHandler | None = None,
        credit_msgs: int = CREDIT_MSGS,
        credit_bytes: int = CREDIT_BYTES,
    ) -> AsyncOrderedReader:
        """As `Contrail.ordered`."""
        return AsyncOrderedReader(
            self._connection,
            stream,
            partial(self.get_stream, stream),
            start=start,
            filter_subjects=filter_subjects,
            on_gap=on_gap,
            credit_msgs=credit_msgs,
            credit_bytes=credit_bytes,
        )

    # Events --------------------------------------------------------------------------------------

    async def events(
        self,
        *,
        stream: str | None = None,
        consumer: str | None = None,
        types: Sequence[EventType] = (),
    ) -> AsyncGenerator[Event, None]:
        """As `Contrail.events`."""
        reader = EventReader(stream, consumer, types, self._transport.reconnecting())
        while True:
            try:
                async with aclosing(self._listen(reader)) as events:
                    async for event in events:
                        yield event
            except ContrailError as error:
                await asyncio.sleep(reader.interrupted(error, time.monotonic(), random.random()))

    async def _listen(self, reader: EventReader) -> AsyncGenerator[Event, None]:
        async with aclosing(self._transport.stream(reader.request())) as chunks:
            async for chunk in chunks:
                for event in reader.feed(chunk, time.monotonic()):
                    yield event
        reader.ended()

    # Reading -------------------------------------------------------------------------------------

    async def get_message(
        self, stream: str, seq: int, *, shard: int | None = None
    ) -> StoredMessage:
        """As `Contrail.get_message`."""
        return await self._transport.run(reading.get_message(stream, seq, shard=shard))

    async def read_range(
        self,
        stream: str,
        *,
        from_seq: int | str | None = None,
        start_time: Time | None = None,
        subject: str | None = None,
        limit: int | None = None,
        max_bytes: int | None = None,
        wait: Duration | None = None,
        shard: int | None = None,
    ) -> Range:
        """As `Contrail.read_range`."""
        call = reading.read_range(
            stream,
            from_seq=from_seq,
            start_time=start_time,
            subject=subject,
            limit=limit,
            max_bytes=max_bytes,
            wait=wait,
            shard=shard,
        )
        return await self._transport.run(call)

    async def last_messages(
        self,
        stream: str,
        *,
        subject: str | None = None,
        up_to_seq: int | None = None,
        up_to_time: Time | None = None,
        shard: int | None = None,
    ) -> AsyncIterator[StoredMessage]:
        """As `Contrail.last_messages`."""
        token: str | None = None
        while True:
            call = reading.last_messages(
                stream,
                subject=subject,
                up_to_seq=up_to_seq,
                up_to_time=up_to_time,
                token=token,
                shard=shard,
            )
            page = await self._transport.run(call)
            for found in page.messages:
                yield found
            token = page.next_page_token
            if token is None:
                return

    async def delete_message(self, stream: str, seq: int, *, shard: int | None = None) -> None:
        """As `Contrail.delete_message`."""
        await self._transport.run(reading.delete_message(stream, seq, shard=shard))

    # Replay --------------------------------------------------------------------------------------

    async def replay_plan(
        self, stream: str, bounds: replaying.Bounds | None = None, *, splits: int = 1
    ) -> ReplayPlan:
        """As `Contrail.replay_plan`."""
        call = replaying.plan(stream, bounds or replaying.Bounds(), splits=splits)
        return await self._transport.run(call)

    def replay(self, stream: str, bounds: replaying.Bounds | None = None) -> AsyncReplay:
        """As `Contrail.replay`."""

        async def messages() -> AsyncIterator[StoredMessage]:
            plan = await self.replay_plan(stream, bounds)
            for split in plan.splits:
                async for message in self.read_split(split):
                    yield message

        return AsyncReplay(messages())

    async def read_split(self, split: ReplaySplit) -> AsyncIterator[StoredMessage]:
        """As `Contrail.read_split`."""
        reader = replaying.MessageReader(split)
        while not reader.done:
            try:
                async with aclosing(self._read_rest(reader)) as messages:
                    async for message in messages:
                        yield message
            except ContrailError as error:
                await asyncio.sleep(reader.interrupted(error, self._retries, random.random()))

    async def _read_rest(
        self, reader: replaying.MessageReader
    ) -> AsyncGenerator[StoredMessage, None]:
        async with aclosing(self._transport.stream(reader.request())) as chunks:
            async for chunk in chunks:
                for message in reader.feed(chunk):
                    yield message
        reader.finish()

    # Consumers -----------------------------------------------------------------------------------

    async def create_consumer(
        self, stream: str, name: str | None = None, config: ConsumerConfig | None = None
    ) -> AsyncConsumer:
        """As `Contrail.create_consumer`."""
        info = await self._transport.run(consumers.create(stream, name, config or {}))
        return AsyncConsumer(self._transport, stream, info.name)

    async def ensure_consumer(
        self, stream: str, name: str, config: ConsumerConfig | None = None
    ) -> AsyncConsumer:
        """As `Contrail.ensure_consumer`."""
        for attempt in range(1, ensuring.ATTEMPTS + 1):
            try:
                return await self.create_consumer(stream, name, config)
            except Conflict as refusal:
                if not ensuring.exists_otherwise(refusal):
                    raise
                found = self.consumer(stream, name)
                try:
                    existing = (await found.info()).config
                except NotFound:
                    if attempt == ensuring.ATTEMPTS:
                        raise refusal from None
                    continue
                found.differs = ensuring.differences(refusal, config or {}, existing)
            ensuring.warn(f"consumer {name} of stream {stream}", found.differs)
            return found
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def put_consumer(
        self,
        stream: str,
        name: str,
        config: ConsumerConfig | None = None,
        *,
        if_match: str | None = None,
        only_create: bool = False,
    ) -> AsyncConsumer:
        """As `Contrail.put_consumer`."""
        call = consumers.put(stream, name, config or {}, if_match=if_match, only_create=only_create)
        await self._transport.run(call)
        return AsyncConsumer(self._transport, stream, name)

    def consumer(self, stream: str, name: str) -> AsyncConsumer:
        """As `Contrail.consumer`."""
        return AsyncConsumer(self._transport, stream, name)

    async def list_consumers(self, stream: str) -> AsyncIterator[ConsumerInfo]:
        """As `Contrail.list_consumers`."""
        token: str | None = None
        while True:
            page = await self._transport.run(consumers.page(stream, limit=None, token=token))
            for info in page.items:
                yield info
            token = page.next_page_token
            if token is None:
                return
