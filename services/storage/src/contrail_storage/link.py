"""The service link within one process: direct calls into the node."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from functools import partial

from contrail_common import errors
from contrail_common.columns.message_batch import MessageBatch
from contrail_common.errors import ApiError
from contrail_common.model import (
    ConsumerConfig,
    ConsumerInfo,
    PublishMessage,
    StoredMessage,
    StreamConfig,
    StreamInfo,
)
from contrail_common.subjects import overlaps
from contrail_link.contract.admin import ErasureReceipt, EventsRequest, EventsResult
from contrail_link.contract.consume import AckItem, AckResult, ConsumerHold, PullRequest, PullResult
from contrail_link.contract.publish import PublishContent, PublishOutcome
from contrail_link.contract.read import (
    Chunk,
    DeletedRanges,
    LastRequest,
    Pieces,
    PinnedReplay,
    RangeRequest,
    RangeResult,
    ReadPosition,
    ReplayPlanRequest,
    ReplayRequest,
)
from contrail_link.contract.streams import CreateMode, Page
from contrail_storage.consumers.consumer import Consumer
from contrail_storage.core.key_layout import META_GROUP
from contrail_storage.metrics import render_metrics
from contrail_storage.node import StorageNode
from contrail_storage.reading.answering import Answer, AnswerDeadline, Done, changes, reads
from contrail_storage.reading.last_reader import LastReader
from contrail_storage.reading.page_tokens import decode_token, encode_token
from contrail_storage.streams.sharded_reads import ShardedReader, with_shard, with_shards
from contrail_storage.streams.stream import Stream
from contrail_storage.used_tickets import UsedTickets


class LocalLink:
    """``contrail_link.contract.StorageLink`` over a node in the same process."""

    def __init__(self, node: StorageNode) -> None:
        self._node = node
        self._last_reader = LastReader(node.reader)
        self._sharded = ShardedReader(node.reader, self._last_reader, node.replayer)
        self._used_tickets = UsedTickets(time.time_ns())
        self.deadline = AnswerDeadline(node.publish_timeout_s, self._log_progress)

    def _log_progress(self) -> tuple[int, ...]:
        return tuple(group.applied_index for group in self._node.groups.values())

    def _stream(self, name: str) -> Stream:
        """The listed stream with that name (STREAM_NOT_FOUND, NOT_LEADER)."""
        stream = self._node.streams.stream(name)
        stream.check_led()
        return stream

    async def _confirmed(self, name: str) -> Stream:
        """As :meth:`_stream`; what is read of the stream is no older than this call."""
        stream = self._stream(name)
        if stream.is_replicated:
            await stream.confirm_led()
        return stream

    def _writable(self, name: str) -> Stream:
        """The listed stream with that name, if it accepts changes now."""
        stream = self._node.streams.stream(name)
        stream.check_writable()
        return stream

    # Streams -------------------------------------------------------------------------------------

    @changes
    async def put_stream(
        self, config: StreamConfig, mode: CreateMode, if_match: int | None, if_none: bool
    ) -> tuple[StreamInfo, bool]:
        """Create a stream, find an identical one, or update it."""
        self._node.check_serving()
        return await self._node.streams.put(config, mode, if_match, if_none)

    @reads
    async def stream_info(self, name: str) -> StreamInfo:
        """Configuration and state of a stream."""
        stream = await self._confirmed(name)
        await self._node.reader.bring_first(stream.shards)
        stream.sound_shards()
        return stream.info()

    @reads
    async def list_streams(self, subject: str, prefix: str, limit: int, token: str) -> Page:
        """Streams by name, paged."""
        infos = []
        async with aclosing(self._node.streams.each_listed(decode_token(token), prefix)) as listed:
            async for stream in listed:
                own = stream.config.subjects
                if subject and not any(overlaps(subject, one) for one in own):
                    continue
                await self._node.reader.bring_first(stream.shards)
                if not stream.shards[0].machine.exists:
                    continue  # removed meanwhile
                infos.append(stream.info(damaged=True))
                # One more than asked for shows that there is another page.
                if len(infos) > limit:
                    last = encode_token(infos[-2].config.name)
                    return Page(streams=infos[:limit], next_token=last)
        return Page(streams=infos)

    @changes
    async def delete_stream(self, name: str, if_match: int | None = None) -> None:
        """Remove a stream with everything in it."""
        self._node.check_serving()
        await self._node.streams.delete(name, if_match)
        self._node.consumers.close_gone()

    @changes
    async def purge_stream(
        self, name: str, subject: str, up_to_seq: int, keep: int, shard: int | None = None
    ) -> int:
        """Remove messages, and return how many."""
        stream = self._writable(name)
        shards = stream.shards if shard is None else [stream.shard(shard)]
        return await self._node.streams.removals.purge(shards, subject, up_to_seq, keep)

    # Messages ------------------------------------------------------------------------------------

    async def stream_for_subject(self, subject: str) -> str:
        """The stream that captures ``subject``."""
        return self._node.streams.route(subject).name

    def publish_then(self, stream: str, content: PublishContent, done: Done) -> None:
        """Store messages; ``done`` is called with the outcome."""
        # Without a name, the subject of the first message decides. A batch is for one stream, and
        # refuses messages that the stream does not capture.
        if not stream and isinstance(content, list) and content:
            target = self._node.streams.route(content[0].subject)
        else:
            target = self._node.streams.stream(stream)
        self._send(target, content, done)

    def _send(self, stream: Stream, content: PublishContent, done: Done) -> None:
        answer = Answer(self.deadline, done)
        stream.publish(content, answer)
        # After the publish: one that is refused at once needs no deadline.
        self.deadline.limit(answer)

    async def may_retry(self, refusal: ApiError, refused_at_s: float) -> bool:
        """False: a refusal of this process's own node is final."""
        return False

    def publish_each_then(
        self, messages: list[PublishMessage], done: Callable[[list[int], PublishOutcome], None]
    ) -> None:
        """Store each message in the stream of its subject; messages of a stream are one batch."""
        together: dict[Stream, list[int]] = {}
        for at, message in enumerate(messages):
            try:
                one = self._node.streams.route(message.subject)
                # Messages of one stream share a request, so they share one command of the log.
                if len(one.shards) == 1:
                    together.setdefault(one, []).append(at)
                else:  # batches over several shards support fewer expectations than messages
                    self._send(one, [message], partial(done, [at]))
            except ApiError as error:
                done([at], error)
        for stream, positions in together.items():
            settle = partial(done, positions)
            try:
                if len(positions) == 1:
                    self._send(stream, [messages[positions[0]]], settle)
                else:
                    batch = MessageBatch.of([messages[at] for at in positions])
                    self._send(stream, batch, settle)
            except ApiError as error:
                settle(error)

    @reads
    async def get_message(self, stream: str, seq: int, shard: int | None = None) -> StoredMessage:
        one = (await self._confirmed(stream)).sound_shard(shard)
        return with_shard(one, await self._node.reader.get(one, seq))

    @reads
    async def read_range(self, request: RangeRequest) -> RangeResult:
        """Messages in order; waits for the first if the request says so."""
        shards = (await self._confirmed(request.stream)).sound_shards(request.shard)
        if len(shards) > 1:
            return await self._sharded.read_range(shards, request)
        return await self._sharded.read_one(shards[0], request)

    @reads
    async def last_messages(self, request: LastRequest) -> tuple[list[StoredMessage], str | None]:
        """A page of the newest messages of subjects."""
        shards = (await self._confirmed(request.stream)).sound_shards(request.shard)
        if len(shards) > 1:
            return await self._sharded.last(shards, request)
        page, token = await self._last_reader.read(shards[0], request)
        return with_shards(shards[0], page), token

    async def deleted_ranges(
        self, stream: str, limit: int, token: str, shard: int | None = None
    ) -> DeletedRanges:
        """Deleted sequences, paged."""
        return self._node.reader.deleted_ranges(
            (await self._confirmed(stream)).sound_shard(shard), limit, token
        )

    async def read_position(self, stream: str, shard: int | None = None) -> ReadPosition:
        """The last applied sequence of the stream, and the applied index of its log."""
        parts = (await self._confirmed(stream)).sound_shards(shard)
        # The index of the log that the stream's entries are in: a replica that has applied it has
        # all of these messages.
        group = self._node.groups[parts[0].group]
        return ReadPosition(max(one.applied_seq for one in parts), group.applied_index)

    @reads
    async def subject_counts(
        self, stream: str, subject: str, limit: int, token: str
    ) -> tuple[list[tuple[str, int]], str | None]:
        """Subjects with their number of messages."""
        shards = (await self._confirmed(stream)).sound_shards()
        if len(shards) > 1:
            return await self._sharded.subject_counts(shards, subject, limit, token)
        return await self._node.reader.subject_counts(shards[0], subject, limit, token)

    @changes
    async def delete_message(self, stream: str, seq: int, shard: int | None = None) -> None:
        """Remove one message."""
        one = self._writable(stream).sound_shard(shard)
        await self._node.streams.removals.delete(one, seq)

    # Replay --------------------------------------------------------------------------------------

    @reads
    async def replay_plan(self, request: ReplayPlanRequest) -> PinnedReplay:
        """Pin a range and cut it into splits."""
        shards = (await self._confirmed(request.stream)).sound_shards(request.shard)
        if len(shards) > 1:
            return await self._sharded.plan(shards, request)
        return await self._node.replayer.plan(shards[0], request)

    @reads
    async def replay(self, request: ReplayRequest) -> AsyncIterator[Chunk | Pieces]:
        """Check the request, then stream the encoded body."""
        shard = self._stream(request.stream).sound_shard(request.shard)
        low, high = self._node.replayer.check(shard, request)
        return self._node.replayer.stream(shard, request, low, high)

    # Archives ------------------------------------------------------------------------------------

    @reads
    async def snapshot(self, stream: str, consumers: bool) -> AsyncIterator[bytes]:
        """Stream the archive of the stream as of now."""
        shards = self._stream(stream).sound_shards()
        # A snapshot reads the store, which may be behind what is applied and acknowledged.
        await self.deadline.wait(self._node.until_written())
        return self._node.snapshotter.stream(shards, consumers=consumers)

    @changes
    async def begin_restore(self, stream: str) -> str:
        """Begin a restore, and return its token."""
        self._node.check_serving()
        return await self._node.restores.begin(stream)

    @changes
    async def append_restore(self, token: str, offset: int, piece: bytes) -> None:
        """Accept the next bytes of the archive."""
        self._node.check_serving()
        await self._node.restores.feed(token, offset, piece)

    @changes
    async def commit_restore(self, token: str) -> StreamInfo:
        """Finish a restore, and create the stream."""
        self._node.check_serving()
        return await self._node.restores.commit(token)

    @changes
    async def abort_restore(self, token: str) -> None:
        """End a restore and remove what it has stored."""
        await self._node.restores.abort(token)

    # Consumers -----------------------------------------------------------------------------------

    def _sound_consumer(self, stream: Stream, name: str) -> Consumer:
        """The consumer with that name (CONSUMER_NOT_FOUND; DATA_LOST if a shard is damaged)."""
        stream.sound_shards()
        return self._node.consumers.find(stream, name)

    @changes
    async def put_consumer(
        self,
        stream: str,
        config: ConsumerConfig,
        mode: CreateMode,
        if_match: int | None,
        if_none: bool,
    ) -> tuple[ConsumerInfo, bool]:
        """Create a consumer, find an identical one, or update it."""
        one = self._writable(stream)
        return await self._node.consumers.put(one, config, mode, if_match, if_none)

    @reads
    async def consumer_info(self, stream: str, consumer: str) -> ConsumerInfo:
        """Configuration and progress of a consumer."""
        found = self._sound_consumer(await self._confirmed(stream), consumer)
        return await self.deadline.wait(found.info())

    @reads
    async def list_consumers(self, stream: str, limit: int, token: str) -> Page:
        """Consumers of a stream by name, paged."""
        one = await self._confirmed(stream)
        one.sound_shards()
        listing = self._node.consumers.infos(one, decode_token(token), limit + 1)
        infos = await self.deadline.wait(listing)
        more = len(infos) > limit
        next_token = encode_token(infos[limit - 1].config.name) if more else None
        return Page(consumers=infos[:limit], next_token=next_token)

    @changes
    async def delete_consumer(
        self, stream: str, consumer: str, if_match: int | None = None
    ) -> None:
        """Remove a consumer."""
        await self._node.consumers.delete(self._writable(stream), consumer, if_match)

    async def bind_consumer(self, stream: str, consumer: str) -> ConsumerHold:
        """Hold a consumer for a subscription."""
        return self._sound_consumer(self._stream(stream), consumer).hold()

    @reads
    async def pull(self, request: PullRequest) -> PullResult:
        """Deliver up to a batch of messages."""
        consumer = self._sound_consumer(self._writable(request.stream), request.consumer)
        return await self.deadline.wait(consumer.pull(request), request.expires_ns)

    async def acknowledge(
        self, stream: str, consumer: str, items: list[AckItem], sync: bool
    ) -> list[AckResult]:
        """Accept acknowledgements; with ``sync``, wait until they are durable."""
        found = self._node.consumers.find(self._writable(stream), consumer)
        # Without `sync`, the caller does not wait for the log, so no deadline is needed.
        work = found.acknowledge(items, sync=sync)
        return await (self.deadline.change(work) if sync else work)

    # Advisories ----------------------------------------------------------------------------------

    async def read_events(self, request: EventsRequest) -> EventsResult:
        """Advisories in order; waits for the first if the request says so."""
        return await self._node.advisories.read(request)

    # Erasing -------------------------------------------------------------------------------------

    @changes
    async def erase(
        self, stream: str, seqs: list[int], subject: str, shard: int | None = None
    ) -> ErasureReceipt:
        """Delete messages, and have their bytes removed from all files."""
        self._node.check_serving()
        one = self._stream(stream)
        if one.is_replicated:
            # The bytes would stay on the other nodes, and the receipt would not say so.
            message = "erasing from a stream with several replicas is not available yet"
            raise ApiError(errors.NOT_IMPLEMENTED, message, applied=False)
        shards = [one.sound_shard(shard)] if seqs else one.sound_shards(shard)
        return await self._node.eraser.erasures.erase(shards, seqs, subject)

    async def erasure(self, erasure_id: str, wait_ns: int) -> ErasureReceipt:
        """A receipt, once its erasure is complete or the wait ends."""
        return await self._node.eraser.erasures.receipt(erasure_id, wait_ns)

    async def use_ticket(self, nonce: bytes, expires_ns: int) -> bool:
        """Whether a ticket is used for the first time. Remembers its use (NOT_LEADER)."""
        node = self._node
        node.groups.check_led(META_GROUP)
        if node.membership.led_meta_ns > self._used_tickets.started_ns:
            self._used_tickets = UsedTickets(node.membership.led_meta_ns)
        return self._used_tickets.use(nonce, expires_ns, time.time_ns())

    # Node ----------------------------------------------------------------------------------------

    def readiness(self) -> dict[str, str]:
        """The reasons why parts are not ready, by part; empty when all are."""
        return self._node.readiness()

    async def metrics_text(self) -> str:
        """The node's metrics as text."""
        return await render_metrics(self._node)
