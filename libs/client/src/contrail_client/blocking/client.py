# Generated from aio/client.py by `make blocking`. Change that file, not this one.
"""A client of a server."""

# One module: the methods of one object, which share its connections.

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

from contrail_client import calls
from contrail_client.arrow import ArrowReplays
from contrail_client.blocking.consumer import Consumer
from contrail_client.blocking.replay import Replay
from contrail_client.calls import Call, Page, Retries, T
from contrail_client.cluster import ClusterState
from contrail_client.concurrency import in_order
from contrail_client.configs import ConsumerConfig, StreamConfig
from contrail_client.errors import ApiProblem, Conflict, ContrailError, NotFound
from contrail_client.live.blocking import Connection, OrderedReader, Publisher, Subscription
from contrail_client.live.feed import CREDIT_BYTES, CREDIT_MSGS
from contrail_client.live.ordered import GapHandler, Start
from contrail_client.live.outbox import MAX_BYTES, MAX_OUTSTANDING, RETRY_S
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
from contrail_client.transport.blocking import Transport


class Contrail(ArrowReplays):
    """A server, addressed by its URL. Threads may share one.

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
        """Seconds from an empty request to its answer."""
        begun = time.perf_counter()
        self._transport.run(calls.ALIVE)
        return time.perf_counter() - begun

    def cluster(self) -> ClusterState:
        """The state of the server's storage nodes, and of the groups that they form."""
        return self._transport.run(clusters.GET)

    # Streams -------------------------------------------------------------------------------------

    def create_stream(self, name: str, config: StreamConfig) -> StreamInfo:
        """Create a stream; an existing one with an identical configuration is returned.

        Raises `Conflict` if the existing one has another configuration; its `errors` list the
        differences.
        """
        return self._transport.run(streams.create(name, config))

    def ensure_stream(self, name: str, config: StreamConfig) -> StreamInfo:
        """Create a stream unless it exists. An existing one is not changed.

        If the existing one has another value for a field of `config`, `differs` of the result says
        so, and a `ConfigDiffers` warning is issued. Use `put_stream` to replace the configuration
        and `update_stream` to change fields of it.
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
                    # Another client has deleted it in between: try to create it again.
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
        """Create a stream, or replace its whole configuration. Fields left out get their defaults.

        Messages beyond the new limits are removed. With `if_match` (an `etag`) only that version is
        replaced; with `only_create` nothing is replaced.
        """
        call = streams.put(name, config, if_match=if_match, only_create=only_create)
        return self._transport.run(call)

    def update_stream(
        self, name: str, changes: Mapping[str, Any], *, if_match: str | None = None
    ) -> StreamInfo:
        """Change the given fields of the configuration; None restores a default."""
        return self._transport.run(streams.update(name, changes, if_match=if_match))

    def get_stream(self, name: str, *, consistency: Consistency | None = None) -> StreamInfo:
        """The configuration and state of a stream."""
        return self._transport.run(streams.get(name, consistency=consistency))

    def list_streams(
        self, *, subject: str | None = None, prefix: str | None = None
    ) -> Iterator[StreamInfo]:
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
    ) -> Iterator[SubjectCount]:
        """Subjects that have messages and match the filter `subject`, fetched page by page."""
        return self._items(
            lambda token: streams.subjects(
                name, subject=subject, limit=None, token=token, consistency=consistency
            )
        )

    def list_deleted(
        self, name: str, *, shard: int | None = None, consistency: Consistency | None = None
    ) -> Iterator[tuple[int, int]]:
        """Deleted sequences: the first and last of each run, fetched page by page."""
        return self._items(
            lambda token: streams.deleted(name, token=token, shard=shard, consistency=consistency)
        )

    def seal_stream(self, name: str) -> StreamInfo:
        """Make the stream read-only for good."""
        return self._transport.run(streams.seal(name))

    def step_down(self, name: str, *, preferred: str | None = None) -> str:
        """Make another node the leader of the stream; returns its name."""
        return self._transport.run(streams.step_down(name, preferred=preferred))

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
        """Remove messages; returns how many. `up_to_seq` itself is not removed."""
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
        """Delete messages and remove their bytes from all files; waits up to `wait_s`, at most 60.

        The receipt that it returns has the progress of the erasure.
        """
        call = erasing.erase(stream, seqs=seqs, subject=subject, shard=shard, wait_s=wait_s)
        return self._transport.run(call)

    def erasure(self, erasure_id: str, *, wait_s: float = 0.0) -> Erasure:
        """The receipt of an erasure; waits for its end up to `wait_s`, at most 60 s."""
        return self._transport.run(erasing.erasure(erasure_id, wait_s=wait_s))

    def snapshot(self, stream: str, *, consumers: bool = True) -> Iterator[bytes]:
        """A snapshot of the stream as an archive, in chunks; `Unreachable` if it is cut short."""
        return self._transport.stream(streams.snapshot(stream, consumers=consumers))

    def restore(self, stream: str, chunks: Iterable[bytes]) -> StreamInfo:
        """Create a stream from an archive. After a refusal nothing of it exists."""
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
        """Store one message in the stream that captures `subject`; it is durable on return.

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
        """Send one message without an acknowledgement: it may be lost without an error."""
        message = Message(subject, payload, headers, msg_id)
        self._transport.run(publishing.publish_unacked(message))

    def publish_batch(
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
        return self._transport.run(call)

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
        """Publish any number of messages in batches; yields the result of each batch, in order.

        Iterate over the results: otherwise nothing is sent. Up to `outstanding` batches are in
        flight at once; with more than one, they may be stored in any order.
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
        """A publisher over the client's WebSocket, which does not wait for each ack in turn.

        At most `max_outstanding` messages or `max_bytes` bytes are in flight. After a lost
        connection, messages with ids are retried for up to `retry_s` and stored exactly once;
        `auto_ids` gives an id to every message.
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
        """A subscription to an existing consumer. Acknowledge the messages that it yields.

        The server sends up to `credit_msgs` messages and `credit_bytes` bytes ahead of the reader.
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
        """The messages of a stream in order, each once, then live as they are published.

        `start` is a sequence, a time, or `all`, `last` or `new`. `on_gap` is called when the stream
        no longer has some of the sequences.
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
        """Events of streams, consumers and deliveries, from the first `next` on.

        Continues after broken connections and restarts of the server. An event `lost` stands for
        events that were missed. Closing the generator ends it.
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

    def get_message(
        self,
        stream: str,
        seq: int,
        *,
        shard: int | None = None,
        consistency: Consistency | None = None,
    ) -> StoredMessage:
        """One message by its sequence."""
        call = reading.get_message(stream, seq, shard=shard, consistency=consistency)
        return self._transport.run(call)

    def get_messages(
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
        return self._transport.run(call)

    def read_range(  # noqa: PLR0913 - all of them are named
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
        return self._transport.run(call)

    def last_messages(
        self,
        stream: str,
        *,
        subject: str | None = None,
        up_to_seq: int | None = None,
        up_to_time: Time | None = None,
        shard: int | None = None,
        consistency: Consistency | None = None,
    ) -> Iterator[StoredMessage]:
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

    def delete_message(self, stream: str, seq: int, *, shard: int | None = None) -> None:
        """Delete one message. `erase` also removes its bytes from all files."""
        self._transport.run(reading.delete_message(stream, seq, shard=shard))

    # Replay --------------------------------------------------------------------------------------

    def replay_plan(
        self, stream: str, bounds: replaying.Bounds | None = None, *, splits: int = 1
    ) -> ReplayPlan:
        """Fix a range of the stream, by default all of it, and cut it into about `splits` parts."""
        call = replaying.plan(stream, bounds or replaying.Bounds(), splits=splits)
        return self._transport.run(call)

    def replay(self, stream: str, bounds: replaying.Bounds | None = None) -> Replay:
        """The messages of a range, by default all that the stream has when reading begins."""

        def messages() -> Iterator[StoredMessage]:
            plan = self.replay_plan(stream, bounds)
            for split in plan.splits:
                yield from self.read_split(split)

        return Replay(messages())

    def read_split(self, split: ReplaySplit) -> Iterator[StoredMessage]:
        """The messages of a split, each once and in order, also across broken connections."""
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

        An existing one with an identical configuration is returned. Raises `Conflict` if it has
        another configuration; its `errors` list the differences. The server removes an ephemeral
        consumer that is unused for its inactive threshold.
        """
        info = self._transport.run(consumers.create(stream, name, config or {}))
        return Consumer(self._transport, stream, info.name)

    def ensure_consumer(
        self, stream: str, name: str, config: ConsumerConfig | None = None
    ) -> Consumer:
        """Create a durable consumer unless it exists. An existing one is not changed.

        If the existing one has another value for a field of `config`, `differs` of the result says
        so, and a `ConfigDiffers` warning is issued. Use `put_consumer` to replace the configuration
        and `Consumer.update` to change fields of it.
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

        With `if_match` (an `etag`) only that version is replaced; with `only_create` nothing is.
        """
        call = consumers.put(stream, name, config or {}, if_match=if_match, only_create=only_create)
        self._transport.run(call)
        return Consumer(self._transport, stream, name)

    def consumer(self, stream: str, name: str) -> Consumer:
        """A handle to an existing consumer; sends no request."""
        return Consumer(self._transport, stream, name)

    def list_consumers(self, stream: str) -> Iterator[ConsumerInfo]:
        """All consumers in order of name, fetched page by page."""
        return self._items(lambda token: consumers.page(stream, limit=None, token=token))

    # Pages ---------------------------------------------------------------------------------------

    def _items(self, call: Callable[[str | None], Call[Page[T]]]) -> Iterator[T]:
        """The items of all pages; `call` makes the request for the page that a token names."""
        token: str | None = None
        while True:
            page = self._transport.run(call(token))
            yield from page.items
            token = page.next_page_token
            if token is None:
                return
