"""A client of a server. `contrail_client.blocking.client` is generated from this module."""

# One module: the methods of one object, which share its connections.

import asyncio
import random
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from datetime import timedelta
from functools import partial
from typing import Any, Self

from msgspec.structs import replace

from contrail_client import calls
from contrail_client.aio.consumer import AsyncConsumer
from contrail_client.aio.replay import AsyncReplay

# blocking: from contrail_client.arrow import ArrowReplays
from contrail_client.calls import Call, Page, Retries, T
from contrail_client.cluster import ClusterState
from contrail_client.concurrency import async_in_order
from contrail_client.configs import ConsumerConfig, StreamConfig
from contrail_client.errors import ApiProblem, Conflict, ContrailError, NotFound
from contrail_client.live.connection import AsyncConnection
from contrail_client.live.feed import CREDIT_BYTES, CREDIT_MSGS
from contrail_client.live.ordered import GapHandler, Start
from contrail_client.live.outbox import MAX_BYTES, MAX_OUTSTANDING, RETRY_S
from contrail_client.live.publisher import AsyncPublisher
from contrail_client.live.reader import AsyncOrderedReader
from contrail_client.live.subscription import AsyncSubscription
from contrail_client.models import (
    AtomicAck,
    BatchResult,
    Consistency,
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
from contrail_client.operations import (
    clusters,
    consumers,
    ensuring,
    erasing,
    publishing,
    reading,
    replaying,
    streams,
)
from contrail_client.operations.listening import EventReader
from contrail_client.times import Duration, Time
from contrail_client.transport import RECONNECT_S, Options, from_environment
from contrail_client.transport.aio import AsyncTransport


class AsyncContrail:  # blocking: class Contrail(ArrowReplays):
    """A server, addressed by its URL. Tasks of one event loop may share one.

    Every method raises `ContrailError` (see `contrail_client.errors`). The client retries requests
    whose failure may pass: reads, and publishes whose messages have ids, always; other requests
    only if the failed attempt certainly had no effect.
    """

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
        """Set the options; the first request connects. ValueError if the address is not valid.

        `url` defaults to the environment variable `CONTRAIL_URL`, or else to this machine. `token`
        defaults to `CONTRAIL_TOKEN`; an empty token means none.

        `timeout_s` is the longest silence of the server, in addition to the wait of a long poll.
        `reconnect_s` is the time for which a lost connection is retried: after it, publishers,
        subscriptions and events fail.
        """
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
        self._connection = AsyncConnection(self._transport)

    async def close(self) -> None:
        """Close every connection; publishers and subscriptions that are still open fail."""
        await self._connection.close()
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def rtt(self) -> float:
        """Seconds from an empty request to its answer."""
        begun = time.perf_counter()
        await self._transport.run(calls.ALIVE)
        return time.perf_counter() - begun

    async def cluster(self) -> ClusterState:
        """The state of the server's storage nodes, and of the groups that they form."""
        return await self._transport.run(clusters.GET)

    # Streams -------------------------------------------------------------------------------------

    async def create_stream(self, name: str, config: StreamConfig) -> StreamInfo:
        """Create a stream; an existing one with an identical configuration is returned.

        Raises `Conflict` if the existing one has another configuration; its `errors` list the
        differences.
        """
        return await self._transport.run(streams.create(name, config))

    async def ensure_stream(self, name: str, config: StreamConfig) -> StreamInfo:
        """Create a stream unless it exists. An existing one is not changed.

        If the existing one has another value for a field of `config`, `differs` of the result says
        so, and a `ConfigDiffers` warning is issued. Use `put_stream` to replace the configuration
        and `update_stream` to change fields of it.
        """
        for attempt in range(1, ensuring.ATTEMPTS + 1):
            try:
                return await self.create_stream(name, config)
            except Conflict as refusal:
                if not ensuring.exists_otherwise(refusal):
                    raise
                try:
                    info = await self.get_stream(name)
                except NotFound:
                    # Another client has deleted it in between: try to create it again.
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
        """Create a stream, or replace its whole configuration. Fields left out get their defaults.

        Messages beyond the new limits are removed. With `if_match` (an `etag`) only that version is
        replaced; with `only_create` nothing is replaced.
        """
        call = streams.put(name, config, if_match=if_match, only_create=only_create)
        return await self._transport.run(call)

    async def update_stream(
        self, name: str, changes: Mapping[str, Any], *, if_match: str | None = None
    ) -> StreamInfo:
        """Change the given fields of the configuration; None restores a default."""
        return await self._transport.run(streams.update(name, changes, if_match=if_match))

    async def get_stream(self, name: str, *, consistency: Consistency | None = None) -> StreamInfo:
        """The configuration and state of a stream."""
        return await self._transport.run(streams.get(name, consistency=consistency))

    def list_streams(
        self, *, subject: str | None = None, prefix: str | None = None
    ) -> AsyncIterator[StreamInfo]:
        """All streams in order of name, fetched page by page."""
        return self._items(
            lambda token: streams.page(subject=subject, prefix=prefix, limit=None, token=token)
        )

    def list_subjects(
        self,
        name: str,
        *,
        subject: str | None = None,
        consistency: Consistency | None = None,
    ) -> AsyncIterator[SubjectCount]:
        """Subjects that have messages and match the filter `subject`, fetched page by page."""
        return self._items(
            lambda token: streams.subjects(
                name, subject=subject, limit=None, token=token, consistency=consistency
            )
        )

    def list_deleted(
        self, name: str, *, shard: int | None = None, consistency: Consistency | None = None
    ) -> AsyncIterator[tuple[int, int]]:
        """Deleted sequences: the first and last of each run, fetched page by page."""
        return self._items(
            lambda token: streams.deleted(name, token=token, shard=shard, consistency=consistency)
        )

    async def seal_stream(self, name: str) -> StreamInfo:
        """Make the stream read-only for good."""
        return await self._transport.run(streams.seal(name))

    async def step_down(self, name: str, *, preferred: str | None = None) -> str:
        """Make another node the leader of the stream; returns its name."""
        return await self._transport.run(streams.step_down(name, preferred=preferred))

    async def delete_stream(self, name: str) -> None:
        """Remove the stream with its messages and consumers."""
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
        """Remove messages; returns how many. `up_to_seq` itself is not removed."""
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
        """Delete messages and remove their bytes from all files; waits up to `wait_s`, at most 60.

        The receipt that it returns has the progress of the erasure.
        """
        call = erasing.erase(stream, seqs=seqs, subject=subject, shard=shard, wait_s=wait_s)
        return await self._transport.run(call)

    async def erasure(self, erasure_id: str, *, wait_s: float = 0.0) -> Erasure:
        """The receipt of an erasure; waits for its end up to `wait_s`, at most 60 s."""
        return await self._transport.run(erasing.erasure(erasure_id, wait_s=wait_s))

    def snapshot(self, stream: str, *, consumers: bool = True) -> AsyncIterator[bytes]:
        """A snapshot of the stream as an archive, in chunks; `Unreachable` if it is cut short."""
        return self._transport.stream(streams.snapshot(stream, consumers=consumers))

    async def restore(self, stream: str, chunks: AsyncIterable[bytes]) -> StreamInfo:
        """Create a stream from an archive. After a refusal nothing of it exists."""
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
        """Store one message in the stream that captures `subject`; it is durable on return.

        The options are those of `Message`.
        """
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
        """Send one message without an acknowledgement: it may be lost without an error."""
        message = Message(subject, payload, headers, msg_id)
        await self._transport.run(publishing.publish_unacked(message))

    async def publish_batch(
        self,
        stream: str,
        messages: Sequence[Message],
        *,
        producer: str | None = None,
        number: int | None = None,
    ) -> BatchResult:
        """Store up to 10,000 messages in order, with one request; each is stored or refused.

        With the `number` of a `producer`'s batch, no message of it is stored twice, however late
        the batch is repeated. Numbers go up, and each message needs an id.
        """
        call = publishing.publish_batch(stream, messages, producer, number)
        return await self._transport.run(call)

    async def publish_atomic(self, stream: str, messages: Sequence[Message]) -> AtomicAck:
        """Store all messages or none (at most 1,000 and 2 MiB)."""
        return await self._transport.run(publishing.publish_atomic(stream, messages))

    def publish_all(
        self,
        stream: str,
        messages: Iterable[Message],
        *,
        batch_size: int = publishing.BATCH_MESSAGES,
        outstanding: int = 1,
    ) -> AsyncIterator[BatchResult]:
        """Publish any number of messages in batches; yields the result of each batch, in order.

        Iterate over the results: otherwise nothing is sent. Up to `outstanding` batches are in
        flight at once; with more than one, they may be stored in any order.
        """
        batches = publishing.batches(messages, size=batch_size)
        publishes = (partial(self.publish_batch, stream, batch) for batch in batches)
        return async_in_order(publishes, outstanding)

    def publisher(
        self,
        *,
        max_outstanding: int = MAX_OUTSTANDING,
        max_bytes: int = MAX_BYTES,
        auto_ids: bool = False,
        retry_s: float = RETRY_S,
    ) -> AsyncPublisher:
        """A publisher over the client's WebSocket, which does not wait for each ack in turn.

        At most `max_outstanding` messages or `max_bytes` bytes are in flight. After a lost
        connection, messages with ids are retried for up to `retry_s` and stored exactly once;
        `auto_ids` gives an id to every message.
        """
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
        """A subscription to an existing consumer. Acknowledge the messages that it yields.

        The server sends up to `credit_msgs` messages and `credit_bytes` bytes ahead of the reader.
        """
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
        """The messages of a stream in order, each once, then live as they are published.

        `start` is a sequence, a time, or `all`, `last` or `new`. `on_gap` is called when the stream
        no longer has some of the sequences.
        """
        return AsyncOrderedReader(
            self._connection,
            stream,
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
        """Events of streams, consumers and deliveries, from the first `next` on.

        Continues after broken connections and restarts of the server. An event `lost` stands for
        events that were missed. Closing the generator ends it.
        """
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
        self,
        stream: str,
        seq: int,
        *,
        shard: int | None = None,
        consistency: Consistency | None = None,
    ) -> StoredMessage:
        """One message by its sequence."""
        call = reading.get_message(stream, seq, shard=shard, consistency=consistency)
        return await self._transport.run(call)

    async def get_messages(
        self,
        stream: str,
        seqs: Sequence[int] | None = None,
        *,
        subjects: Sequence[str] | None = None,
        shard: int | None = None,
        consistency: Consistency | None = None,
    ) -> tuple[StoredMessage | ApiProblem, ...]:
        """Up to 1,000 messages by their sequences, or the newest of each subject, in order.

        A message that is not returned has its problem instead: `message_not_found`, or
        `message_left_out` if the answer, of about 4 MiB, has no room for it.
        """
        call = reading.get_messages(
            stream, seqs=seqs, subjects=subjects, shard=shard, consistency=consistency
        )
        return await self._transport.run(call)

    async def read_range(  # noqa: PLR0913 - all of them are named
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
        consistency: Consistency | None = None,
    ) -> Range:
        """Messages in order; with `wait` the server waits for the first one.

        `from_seq` is a sequence, of `shard` if the stream has several. To read all shards together,
        pass the `cursor` of the previous answer instead.
        """
        call = reading.read_range(
            stream,
            from_seq=from_seq,
            start_time=start_time,
            subject=subject,
            limit=limit,
            max_bytes=max_bytes,
            wait=wait,
            shard=shard,
            consistency=consistency,
        )
        return await self._transport.run(call)

    def last_messages(
        self,
        stream: str,
        *,
        subject: str | None = None,
        up_to_seq: int | None = None,
        up_to_time: Time | None = None,
        shard: int | None = None,
        consistency: Consistency | None = None,
    ) -> AsyncIterator[StoredMessage]:
        """The newest message of each subject that matches the filter, fetched page by page.

        Later messages than `up_to_seq` are ignored, or those from `up_to_time` on.
        """
        return self._items(
            lambda token: reading.last_messages(
                stream,
                subject=subject,
                up_to_seq=up_to_seq,
                up_to_time=up_to_time,
                token=token,
                shard=shard,
                consistency=consistency,
            )
        )

    async def delete_message(self, stream: str, seq: int, *, shard: int | None = None) -> None:
        """Delete one message. `erase` also removes its bytes from all files."""
        await self._transport.run(reading.delete_message(stream, seq, shard=shard))

    # Replay --------------------------------------------------------------------------------------

    async def replay_plan(
        self, stream: str, bounds: replaying.Bounds | None = None, *, splits: int = 1
    ) -> ReplayPlan:
        """Fix a range of the stream, by default all of it, and cut it into about `splits` parts."""
        call = replaying.plan(stream, bounds or replaying.Bounds(), splits=splits)
        return await self._transport.run(call)

    def replay(self, stream: str, bounds: replaying.Bounds | None = None) -> AsyncReplay:
        """The messages of a range, by default all that the stream has when reading begins."""

        async def messages() -> AsyncIterator[StoredMessage]:
            plan = await self.replay_plan(stream, bounds)
            for split in plan.splits:
                async for message in self.read_split(split):
                    yield message

        return AsyncReplay(messages())

    async def read_split(self, split: ReplaySplit) -> AsyncIterator[StoredMessage]:
        """The messages of a split, each once and in order, also across broken connections."""
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
        """Create a consumer: durable with a name, otherwise ephemeral and named by the server.

        An existing one with an identical configuration is returned. Raises `Conflict` if it has
        another configuration; its `errors` list the differences. The server removes an ephemeral
        consumer that is unused for its inactive threshold.
        """
        info = await self._transport.run(consumers.create(stream, name, config or {}))
        return AsyncConsumer(self._transport, stream, info.name)

    async def ensure_consumer(
        self, stream: str, name: str, config: ConsumerConfig | None = None
    ) -> AsyncConsumer:
        """Create a durable consumer unless it exists. An existing one is not changed.

        If the existing one has another value for a field of `config`, `differs` of the result says
        so, and a `ConfigDiffers` warning is issued. Use `put_consumer` to replace the configuration
        and `Consumer.update` to change fields of it.
        """
        for attempt in range(1, ensuring.ATTEMPTS + 1):
            try:
                return await self.create_consumer(stream, name, config)
            except Conflict as refusal:
                if not ensuring.exists_otherwise(refusal):
                    raise
                found = self.consumer(stream, name)
                try:
                    existing = await found.info()
                except NotFound:
                    if attempt == ensuring.ATTEMPTS:
                        raise refusal from None
                    continue
                found.differs = ensuring.differences(refusal, config or {}, existing.config)
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
        """Create a durable consumer, or replace its whole configuration.

        With `if_match` (an `etag`) only that version is replaced; with `only_create` nothing is.
        """
        call = consumers.put(stream, name, config or {}, if_match=if_match, only_create=only_create)
        await self._transport.run(call)
        return AsyncConsumer(self._transport, stream, name)

    def consumer(self, stream: str, name: str) -> AsyncConsumer:
        """A handle to an existing consumer; sends no request."""
        return AsyncConsumer(self._transport, stream, name)

    def list_consumers(self, stream: str) -> AsyncIterator[ConsumerInfo]:
        """All consumers in order of name, fetched page by page."""
        return self._items(lambda token: consumers.page(stream, limit=None, token=token))

    # Pages ---------------------------------------------------------------------------------------

    async def _items(self, call: Callable[[str | None], Call[Page[T]]]) -> AsyncIterator[T]:
        """The items of all pages; `call` makes the request for the page that a token names."""
        token: str | None = None
        while True:
            page = await self._transport.run(call(token))
            for item in page.items:
                yield item
            token = page.next_page_token
            if token is None:
                return
