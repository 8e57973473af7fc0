# Generated from aio/client.py by `make blocking`. Change that file, not this one.
"""A client of a server."""

import random
import time
from collections.abc import (
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import closing
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
from contrail_client.arrow import ArrowReplays
from contrail_client.blocking.consumer import Consumer
from contrail_client.blocking.replay import Replay
from contrail_client.calls import Call, Page, Retries, T
from contrail_client.concurrency import in_order
from contrail_client.configs import ConsumerConfig, StreamConfig
from contrail_client.errors import Conflict, ContrailError, NotFound
from contrail_client.listening import EventReader
from contrail_client.live.blocking import Connection, OrderedReader, Publisher, Subscription
from contrail_client.live.feed import CREDIT_BYTES, CREDIT_MSGS
from contrail_client.live.ordered import GapHandler, Start
from contrail_client.live.outbox import MAX_BYTES, MAX_OUTSTANDING, RETRY_S
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
from contrail_client.times import Duration, Time
from contrail_client.transport import RECONNECT_S, Options, from_environment
from contrail_client.transport.blocking import Transport


class Contrail(ArrowReplays):
    """A server, addressed by its URL. Threads may share one.

    Every method raises `ContrailError` (see `contrail_client.errors`). Reads, and publishes whose
    messages have ids, are tried again when the failure may pass; other requests only when the
    failed attempt certainly had no effect.
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
        """Connect lazily; raises ValueError for an address that is none.

        Without `url` that is the environment's `CONTRAIL_URL`, or this machine; without `token` its
        `CONTRAIL_TOKEN`, if there is one. An empty token is none.

        `timeout_s` is the longest silence of the server beyond what a long poll asked for.
        `reconnect_s` is how long a lost WebSocket, or lost events, are asked for anew before what
        uses them fails.
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
        self._transport = Transport(options)
        self._connection = Connection(self._transport)

    def close(self) -> None:
        """Close every connection; publishers and subscriptions that are still open fail."""
        self._connection.close()
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def rtt(self) -> float:
        """Seconds that the server takes to answer a request for which it does nothing."""
        begun = time.perf_counter()
        self._transport.run(calls.ALIVE)
        return time.perf_counter() - begun

    # Streams -------------------------------------------------------------------------------------

    def create_stream(self, name: str, config: StreamConfig) -> StreamInfo:
        """Create the stream, or find one with an identical configuration.

        Raises `Conflict` when another configuration has the name; its `errors` say what differs.
        """
        return self._transport.run(streams.create(name, config))

    def ensure_stream(self, name: str, config: StreamConfig) -> StreamInfo:
        """Create the stream unless there is one; one that exists is left as it is.

        Where it has another value than asked for a field that `config` gives, `differs` of the
        result says so, and there is a `ConfigDiffers` warning. `put_stream` replaces,
        `update_stream` changes fields.
        """
        for attempt in range(1, ensuring.ATTEMPTS + 1):
            try:
                return self.create_stream(name, config)
            except Conflict as refusal:
                if not ensuring.exists_otherwise(refusal):
                    raise
                try:
                    info = self.get_stream(name)
                except NotFound:
                    if attempt == ensuring.ATTEMPTS:
                        raise refusal from None
                    continue
                differs = ensuring.differences(refusal, config, info.config)
            ensuring.warn(f"stream {name}", differs)
            return replace(info, differs=differs)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def put_stream(
        self,
        name: str,
        config: StreamConfig,
        *,
        if_match: str | None = None,
        only_create: bool = False,
    ) -> StreamInfo:
        """Create the stream, or replace its whole configuration: what is not given is reset.

        Messages beyond new limits are removed. With `if_match` (an `etag`) only that version is
        replaced; with `only_create` none is.
        """
        call = streams.put(name, config, if_match=if_match, only_create=only_create)
        return self._transport.run(call)

    def update_stream(
        self, name: str, changes: Mapping[str, Any], *, if_match: str | None = None
    ) -> StreamInfo:
        """Change the given fields of the configuration; None restores a default."""
        return self._transport.run(streams.update(name, changes, if_match=if_match))

    def get_stream(self, name: str) -> StreamInfo:
        """Configuration and state."""
        return self._transport.run(streams.get(name))

    def list_streams(
        self, *, subject: str | None = None, prefix: str | None = None
    ) -> Iterator[StreamInfo]:
        """Streams by name, page by page."""
        return self._items(
            lambda token: streams.page(subject=subject, prefix=prefix, limit=None, token=token)
        )

    def list_subjects(self, name: str, *, subject: str | None = None) -> Iterator[SubjectCount]:
        """Subjects that have messages, those matching the filter `subject`, page by page."""
        return self._items(
            lambda token: streams.subjects(name, subject=subject, limit=None, token=token)
        )

    def list_deleted(self, name: str, *, shard: int | None = None) -> Iterator[tuple[int, int]]:
        """Sequences inside the stream that were deleted: first and last of each run, by page."""
        return self._items(lambda token: streams.deleted(name, token=token, shard=shard))

    def seal_stream(self, name: str) -> StreamInfo:
        """Make the stream read-only, for good."""
        return self._transport.run(streams.seal(name))

    def delete_stream(self, name: str) -> None:
        """Remove the stream with its messages and consumers."""
        self._transport.run(streams.delete(name))

    def purge_stream(
        self,
        name: str,
        *,
        subject: str | None = None,
        up_to_seq: int | None = None,
        keep: int | None = None,
        shard: int | None = None,
    ) -> int:
        """Remove messages (`up_to_seq` is exclusive); answers how many."""
        call = streams.purge(name, subject=subject, up_to_seq=up_to_seq, keep=keep, shard=shard)
        return self._transport.run(call)

    def erase(
        self,
        stream: str,
        seqs: Sequence[int] | int | None = None,
        *,
        subject: str | None = None,
        shard: int | None = None,
        wait_s: float = 0.0,
    ) -> Erasure:
        """Delete messages and have their bytes leave all files; waits for that up to 60 s."""
        call = erasing.erase(stream, seqs=seqs, subject=subject, shard=shard, wait_s=wait_s)
        return self._transport.run(call)

    def erasure(self, erasure_id: str, *, wait_s: float = 0.0) -> Erasure:
        """The receipt of an erasure; waits for its end up to 60 s."""
        return self._transport.run(erasing.erasure(erasure_id, wait_s=wait_s))

    def snapshot(self, stream: str, *, consumers: bool = True) -> Iterator[bytes]:
        """An archive of the stream as it is now, in chunks; `Unreachable` when it is cut."""
        return self._transport.stream(streams.snapshot(stream, consumers=consumers))

    def restore(self, stream: str, chunks: Iterable[bytes]) -> StreamInfo:
        """Make a stream out of an archive: all of it, or nothing when this raises a refusal."""
        return self._transport.upload(streams.restore(stream), chunks)

    # Publishing ----------------------------------------------------------------------------------

    def publish(
        self,
        subject: str,
        payload: bytes | str = b"",
        *,
        headers: Headers | None = None,
        msg_id: str | None = None,
        expected: Expected | None = None,
        ttl: str | timedelta | None = None,
    ) -> PubAck:
        """Store one message in the stream that captures `subject`; durable when this returns.

        The options are those of `Message`.
        """
        message = Message(subject, payload, headers, msg_id, expected, ttl)
        return self._transport.run(publishing.publish(message))

    def publish_unacked(
        self,
        subject: str,
        payload: bytes | str = b"",
        *,
        headers: Headers | None = None,
        msg_id: str | None = None,
    ) -> None:
        """Hand over one message without a promise: it may get lost, and nobody will say so."""
        message = Message(subject, payload, headers, msg_id)
        self._transport.run(publishing.publish_unacked(message))

    def publish_batch(self, stream: str, messages: Sequence[Message]) -> BatchResult:
        """Store up to 10,000 messages in order with one request, each stored or refused."""
        return self._transport.run(publishing.publish_batch(stream, messages))

    def publish_atomic(self, stream: str, messages: Sequence[Message]) -> AtomicAck:
        """Store all messages or none (at most 1,000 and 2 MiB)."""
        return self._transport.run(publishing.publish_atomic(stream, messages))

    def publish_all(
        self,
        stream: str,
        messages: Iterable[Message],
        *,
        batch_size: int = publishing.BATCH_MESSAGES,
        outstanding: int = 1,
    ) -> Iterator[BatchResult]:
        """Publish any number of messages in batches; yields a result for each, in order.

        Nothing is sent unless the results are iterated. Up to `outstanding` batches are under way
        at once; with more than one, batches may be stored in any order.
        """
        batches = publishing.batches(messages, size=batch_size)
        publishes = (partial(self.publish_batch, stream, batch) for batch in batches)
        return in_order(publishes, outstanding)

    def publisher(
        self,
        *,
        max_outstanding: int = MAX_OUTSTANDING,
        max_bytes: int = MAX_BYTES,
        auto_ids: bool = False,
        retry_s: float = RETRY_S,
    ) -> Publisher:
        """Publish without waiting for one message before the next, over the client's WebSocket.

        At most `max_outstanding` messages or `max_bytes` are under way. Messages with ids survive a
        lost connection, for up to `retry_s`, stored exactly once; with `auto_ids` all have one.
        """
        return Publisher(
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
    ) -> Subscription:
        """Messages of an existing consumer, pushed as they come, to be acknowledged.

        Up to `credit_msgs` messages and `credit_bytes` are sent ahead of what was read.
        """
        return Subscription(
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
    ) -> OrderedReader:
        """Messages of a stream in its order, none twice, and live from its end on.

        `start` is a sequence, a time, or `all`, `last` or `new`. `on_gap` hears of sequences that
        were gone when it was their turn.
        """
        return OrderedReader(
            self._connection,
            stream,
            start=start,
            filter_subjects=filter_subjects,
            on_gap=on_gap,
            credit_msgs=credit_msgs,
            credit_bytes=credit_bytes,
        )

    # Events --------------------------------------------------------------------------------------

    def events(
        self,
        *,
        stream: str | None = None,
        consumer: str | None = None,
        types: Sequence[EventType] = (),
    ) -> Generator[Event, None, None]:
        """What happens to streams, consumers and deliveries, from the first `next` on.

        Goes on across broken connections and restarts; where something was missed there is an event
        `lost`. Closing the generator ends it.
        """
        reader = EventReader(stream, consumer, types, self._transport.reconnecting())
        while True:
            try:
                with closing(self._listen(reader)) as events:
                    yield from events
            except ContrailError as error:
                time.sleep(reader.interrupted(error, time.monotonic(), random.random()))

    def _listen(self, reader: EventReader) -> Generator[Event, None, None]:
        with closing(self._transport.stream(reader.request())) as chunks:
            for chunk in chunks:
                yield from reader.feed(chunk, time.monotonic())
        reader.ended()

    # Reading -------------------------------------------------------------------------------------

    def get_message(self, stream: str, seq: int, *, shard: int | None = None) -> StoredMessage:
        """One message by its sequence."""
        return self._transport.run(reading.get_message(stream, seq, shard=shard))

    def read_range(
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
        """Messages in order; with `wait` the server waits for the first.

        From a sequence on (of `shard`, where there are several), or from the `cursor` on that an
        earlier answer had when it read several shards together.
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
        )
        return self._transport.run(call)

    def last_messages(
        self,
        stream: str,
        *,
        subject: str | None = None,
        up_to_seq: int | None = None,
        up_to_time: Time | None = None,
        shard: int | None = None,
    ) -> Iterator[StoredMessage]:
        """The newest message of each subject matching the filter, page by page.

        As of the sequence `up_to_seq`, or as it was before `up_to_time`; else as of now.
        """
        return self._items(
            lambda token: reading.last_messages(
                stream,
                subject=subject,
                up_to_seq=up_to_seq,
                up_to_time=up_to_time,
                token=token,
                shard=shard,
            )
        )

    def delete_message(self, stream: str, seq: int, *, shard: int | None = None) -> None:
        """Make one message unreadable."""
        self._transport.run(reading.delete_message(stream, seq, shard=shard))

    # Replay --------------------------------------------------------------------------------------

    def replay_plan(
        self, stream: str, bounds: replaying.Bounds | None = None, *, splits: int = 1
    ) -> ReplayPlan:
        """Pin a range of the stream, by default all of it, and cut it into about `splits` parts."""
        call = replaying.plan(stream, bounds or replaying.Bounds(), splits=splits)
        return self._transport.run(call)

    def replay(self, stream: str, bounds: replaying.Bounds | None = None) -> Replay:
        """Every message of a range, by default of what the stream holds when reading begins."""

        def messages() -> Iterator[StoredMessage]:
            plan = self.replay_plan(stream, bounds)
            for split in plan.splits:
                yield from self.read_split(split)

        return Replay(messages())

    def read_split(self, split: ReplaySplit) -> Iterator[StoredMessage]:
        """Every message of a split, once and in order, also across broken connections."""
        reader = replaying.MessageReader(split)
        while not reader.done:
            try:
                with closing(self._read_rest(reader)) as messages:
                    yield from messages
            except ContrailError as error:
                time.sleep(reader.interrupted(error, self._retries, random.random()))

    def _read_rest(self, reader: replaying.MessageReader) -> Generator[StoredMessage, None, None]:
        with closing(self._transport.stream(reader.request())) as chunks:
            for chunk in chunks:
                yield from reader.feed(chunk)
        reader.finish()

    # Consumers -----------------------------------------------------------------------------------

    def create_consumer(
        self, stream: str, name: str | None = None, config: ConsumerConfig | None = None
    ) -> Consumer:
        """Create a consumer: durable with a name, otherwise ephemeral and named by the server.

        One with an identical configuration is found; with another one this raises `Conflict`,
        whose `errors` say what differs. The server removes an ephemeral one when it is unused.
        """
        info = self._transport.run(consumers.create(stream, name, config or {}))
        return Consumer(self._transport, stream, info.name)

    def ensure_consumer(
        self, stream: str, name: str, config: ConsumerConfig | None = None
    ) -> Consumer:
        """Create a durable consumer unless there is one; one that exists is left as it is.

        Where it has another value than asked for a field that `config` gives, `differs` of the
        result says so, and there is a `ConfigDiffers` warning. `put_consumer` replaces,
        `Consumer.update` changes fields.
        """
        for attempt in range(1, ensuring.ATTEMPTS + 1):
            try:
                return self.create_consumer(stream, name, config)
            except Conflict as refusal:
                if not ensuring.exists_otherwise(refusal):
                    raise
                found = self.consumer(stream, name)
                try:
                    existing = found.info()
                except NotFound:
                    if attempt == ensuring.ATTEMPTS:
                        raise refusal from None
                    continue
                found.differs = ensuring.differences(refusal, config or {}, existing.config)
            ensuring.warn(f"consumer {name} of stream {stream}", found.differs)
            return found
        raise AssertionError("unreachable: the last attempt returns or raises")

    def put_consumer(
        self,
        stream: str,
        name: str,
        config: ConsumerConfig | None = None,
        *,
        if_match: str | None = None,
        only_create: bool = False,
    ) -> Consumer:
        """Create a durable consumer, or replace its whole configuration.

        With `if_match` (an `etag`) only that version is replaced; with `only_create` none is.
        """
        call = consumers.put(stream, name, config or {}, if_match=if_match, only_create=only_create)
        self._transport.run(call)
        return Consumer(self._transport, stream, name)

    def consumer(self, stream: str, name: str) -> Consumer:
        """A consumer that exists; nothing is asked of the server yet."""
        return Consumer(self._transport, stream, name)

    def list_consumers(self, stream: str) -> Iterator[ConsumerInfo]:
        """Consumers by name, page by page."""
        return self._items(lambda token: consumers.page(stream, limit=None, token=token))

    # Pages ---------------------------------------------------------------------------------------

    def _items(self, call: Callable[[str | None], Call[Page[T]]]) -> Iterator[T]:
        """What all pages of a list hold; `call` asks for the page that a token names."""
        token: str | None = None
        while True:
            page = self._transport.run(call(token))
            yield from page.items
            token = page.next_page_token
            if token is None:
                return
