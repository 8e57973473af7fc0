"""The service link within one process: direct calls into the node."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from typing import Final

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
from contrail_common.timeunits import NS_PER_S
from contrail_link.contract.admin import ErasureReceipt, EventsRequest, EventsResult
from contrail_link.contract.cluster import NodeView
from contrail_link.contract.consume import AckItem, AckResult, ConsumerHold, PullRequest, PullResult
from contrail_link.contract.publish import PublishContent, PublishOutcome
from contrail_link.contract.read import (
    Chunk,
    DeletedRanges,
    LastRequest,
    ManyRequest,
    ManyResult,
    Peeked,
    Pieces,
    PinnedReplay,
    RangeRequest,
    RangeResult,
    ReadPosition,
    ReplayPlanRequest,
    ReplayRequest,
    ReplicaPosition,
)
from contrail_link.contract.streams import CreateMode, Page
from contrail_link.publishing import positions_by_subject
from contrail_storage.consumers.consumer import Consumer
from contrail_storage.core.key_layout import META_GROUP
from contrail_storage.metrics import render_metrics
from contrail_storage.node import StorageNode
from contrail_storage.node_view import view_of
from contrail_storage.reading.answering import Answer, AnswerDeadline, Done, changes, reads
from contrail_storage.reading.last_reader import LastReader
from contrail_storage.reading.many_reads import ManyReader
from contrail_storage.reading.page_tokens import decode_token, encode_token
from contrail_storage.replica.shard import Shard
from contrail_storage.streams.sharded_reads import ShardedReader, with_shard, with_shards
from contrail_storage.streams.stream import Stream
from contrail_storage.used_tickets import UsedTickets

STALENESS_MAX_S: Final = 10.0
"""How old a copy may be that is read instead of the leader's."""
_ABSENT: Final = (
    errors.STREAM_NOT_FOUND,
    errors.NO_STREAM_FOR_SUBJECT,
    errors.CONSUMER_NOT_FOUND,
)


class LocalLink:
    """``contrail_link.contract.StorageLink`` over a node in the same process."""

    def __init__(self, node: StorageNode) -> None:
        self._node = node
        self._last_reader = LastReader(node.reader)
        many_reader = ManyReader(node.blocks, node.reader)
        self._sharded = ShardedReader(node.reader, self._last_reader, node.replayer, many_reader)
        self._used_tickets = UsedTickets(time.time_ns())
        self.deadline = AnswerDeadline(node.publish_timeout_s, self._log_progress)

    def _log_progress(self) -> tuple[int, ...]:
        return tuple(group.applied_index for group in self._node.groups.values())

    def _stream(self, name: str) -> Stream:
        """The listed stream with that name (STREAM_NOT_FOUND, NOT_LEADER)."""
        stream = self._node.streams.stream(name)
        stream.check_led()
        return stream

    async def _confirmed(self, name: str, replica: str = "", shard: int | None = None) -> Stream:
        """As :meth:`_stream`; what is read of the stream, or its shard, is no older than this call.

        With ``replica``, which must be the name of this node, the own copy is read, if it is recent
        (NOT_READY).
        """
        if replica:
            return self._copy(name, replica)[0]
        stream = self._stream(name)
        if stream.is_replicated:
            await stream.confirm_led(shard)
        return stream

    def _copy(self, name: str, replica: str) -> tuple[Stream, float]:
        """The stream as this node has it, and its staleness in seconds (NOT_READY)."""
        stream = self._node.streams.stream(name)
        staleness_s = stream.staleness_s()
        damaged = stream.is_replicated and any(shard.damaged for shard in stream.shards)
        if replica != self._node.options.name or damaged or staleness_s > STALENESS_MAX_S:
            detail = "this node has no whole and recent copy of the stream"
            raise ApiError(errors.NOT_READY, detail, retry_after_s=1, applied=False)
        return stream, staleness_s

    async def confirm_absent(self, error: ApiError) -> None:
        """Raise NOT_LEADER if another node may have the stream or consumer that is not found here.

        A leader that was stopped or cut off does not know what another one has made since.
        """
        if error.spec in _ABSENT:
            groups = self._node.groups
            led = [number for number in groups if groups.leads(number)]
            replicated = [number for number in led if not groups[number].is_alone]
            await asyncio.gather(*map(groups.confirm_led, replicated))

    async def _refuse(self, refusal: ApiError, done: Done) -> None:
        outcome = ApiError(errors.NOT_LEADER, applied=False)
        try:
            await self.confirm_absent(refusal)
            outcome = refusal
        except ApiError as error:
            outcome = error
        finally:
            done(outcome)

    def _writable(self, name: str) -> Stream:
        """The listed stream with that name, if it accepts changes now."""
        stream = self._node.streams.stream(name)
        stream.check_writable()
        return stream

    async def _changing(self, name: str) -> Stream:
        """As :meth:`_writable`, for a change that depends on what is in the stream now."""
        stream = self._writable(name)
        if len(stream.groups) > 1:
            await stream.confirm_led()
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
    async def stream_info(self, name: str, replica: str = "") -> StreamInfo:
        """Configuration and state of a stream."""
        stream = await self._confirmed(name, replica)
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
        stream = await self._changing(name)
        shards = stream.shards if shard is None else [stream.shard(shard)]
        return await self._node.streams.removals.purge(shards, subject, up_to_seq, keep)

    @reads
    async def step_down(self, stream: str, preferred: str) -> str:
        """Make another node the leader of a stream."""
        one = self._stream(stream)
        if not one.is_replicated:
            raise ApiError(errors.NOT_REPLICATED, applied=False)
        return await self._node.leadership.step_down(one.shards[0].group, preferred)

    # Messages ------------------------------------------------------------------------------------

    @reads
    async def stream_for_subject(self, subject: str) -> str:
        """The stream that captures ``subject``."""
        return self._node.streams.route(subject).name

    def publish_then(self, stream: str, content: PublishContent, done: Done) -> None:
        """Store messages; ``done`` is called with the outcome."""
        # Without a name, the subject of the first message decides. A batch is for one stream, and
        # refuses messages that the stream does not capture.
        try:
            if not stream and isinstance(content, list) and content:
                target = self._node.streams.route(content[0].subject)
            else:
                target = self._node.streams.stream(stream)
        except ApiError as error:
            if error.spec not in _ABSENT or self._node.groups[META_GROUP].is_alone:
                raise
            self._node.spawn(self._refuse(error, done))
            return
        opened = self.deadline.open_answers
        answer = Answer(done, target.entry.name, target.durability, opened)
        target.publish(content, answer)
        # After the publish: one that is refused at once needs no deadline.
        self.deadline.limit(answer)

    async def may_retry(self, refusal: ApiError, refused_at_s: float) -> bool:
        """False: a refusal of this process's own node is final."""
        return False

    def publish_each_then(
        self, messages: list[PublishMessage], done: Callable[[list[int], PublishOutcome], None]
    ) -> None:
        """Store each message in the stream of its subject; messages of a stream are one batch."""
        for stream, positions in positions_by_subject(messages, self._capturing).items():
            # Messages of one stream share a request, so they share one command of the log.
            if stream is not None and len(stream.shards) == 1 and len(positions) > 1:
                batch = MessageBatch.of([messages[at] for at in positions])
                self._publish(stream.name, batch, partial(done, positions))
                continue
            # Batches over several shards support fewer expectations than messages.
            for at in positions:
                self._publish("", [messages[at]], partial(done, [at]))

    def _capturing(self, subject: str) -> Stream | None:
        """The stream that captures ``subject``; None if there is none, or it is not known here."""
        try:
            return self._node.streams.route(subject)
        except ApiError:
            return None

    def _publish(self, stream: str, content: PublishContent, done: Done) -> None:
        """As `publish_then`, but a refusal goes to ``done`` too."""
        try:
            self.publish_then(stream, content, done)
        except ApiError as error:
            done(error)

    def _peekable(self, name: str) -> Shard | None:
        """The only shard of a listed stream of this node alone, if it is sound; None otherwise."""
        stream = self._node.streams.find(name)
        if stream is None or stream.is_replicated or len(stream.shards) > 1:
            return None
        shard = stream.shards[0]
        return None if shard.damaged else shard

    def peek_message(self, stream: str, seq: int) -> Peeked:
        """One message, if it is in memory, or the read that brings it there."""
        shard = self._peekable(stream)
        return None if shard is None else self._node.reader.peek(shard, seq)

    def peek_last(self, stream: str, subject: str) -> Peeked:
        """The newest message of a subject, if it is in memory, or the read that brings it there."""
        shard = self._peekable(stream)
        return None if shard is None else self._last_reader.peek(shard, subject)

    @reads
    async def get_message(
        self, stream: str, seq: int, shard: int | None = None, replica: str = ""
    ) -> StoredMessage:
        """One message."""
        one = (await self._confirmed(stream, replica, shard)).sound_shard(shard)
        return with_shard(one, await self._node.reader.get(one, seq))

    @reads
    async def get_messages(self, request: ManyRequest) -> ManyResult:
        """Many messages at once."""
        stream = await self._confirmed(request.stream, request.replica, request.shard)
        if request.subjects:
            return await self._sharded.newest(stream.sound_shards(request.shard), request)
        return await self._sharded.get_messages(stream.sound_shard(request.shard), request)

    @reads
    async def read_range(self, request: RangeRequest) -> RangeResult:
        """Messages in order; waits for the first if the request says so."""
        stream = await self._confirmed(request.stream, request.replica, request.shard)
        shards = stream.sound_shards(request.shard)
        if len(shards) > 1:
            return await self._sharded.read_range(shards, request)
        return await self._sharded.read_one(shards[0], request)

    @reads
    async def last_messages(self, request: LastRequest) -> tuple[list[StoredMessage], str | None]:
        """A page of the newest messages of subjects."""
        stream = await self._confirmed(request.stream, request.replica, request.shard)
        shards = stream.sound_shards(request.shard)
        if len(shards) > 1:
            return await self._sharded.last(shards, request)
        page, token = await self._last_reader.read(shards[0], request)
        return with_shards(shards[0], page), token

    async def deleted_ranges(
        self,
        stream: str,
        limit: int,
        token: str,
        shard: int | None = None,
        replica: str = "",
    ) -> DeletedRanges:
        """Deleted sequences, paged."""
        one = (await self._confirmed(stream, replica, shard)).sound_shard(shard)
        return self._node.reader.deleted_ranges(one, limit, token)

    async def find_replica(self, stream: str, shard: int | None = None) -> ReplicaPosition:
        """The position of this node's copy."""
        return await self.replica_position(stream, shard, self._node.options.name)

    async def replica_position(
        self, stream: str, shard: int | None, replica: str
    ) -> ReplicaPosition:
        """The position of this node's copy; ``replica`` must be its name."""
        one, staleness_s = self._copy(stream, replica)
        parts = one.sound_shards(shard)
        return ReplicaPosition(
            max(part.applied_seq for part in parts),
            self._node.groups[parts[0].group].applied_index,
            replica,
            round(staleness_s * NS_PER_S),
        )

    @reads
    async def read_position(self, stream: str, shard: int | None = None) -> ReadPosition:
        """The last applied sequence of the stream, and the applied index of its log."""
        one = self._node.streams.stream(stream)
        if shard is None or len(one.groups) == 1:
            await self._confirmed(stream)
        else:  # asked where messages for this shard are accepted
            await one.confirm_shard(shard)
        parts = one.sound_shards(shard)
        # The index of the log that the stream's entries are in: a replica that has applied it has
        # all of these messages.
        group = self._node.groups[parts[0].group]
        return ReadPosition(max(part.applied_seq for part in parts), group.applied_index)

    @reads
    async def subject_counts(
        self, stream: str, subject: str, limit: int, token: str, replica: str = ""
    ) -> tuple[list[tuple[str, int]], str | None]:
        """Subjects with their number of messages."""
        shards = (await self._confirmed(stream, replica)).sound_shards()
        if len(shards) > 1:
            return await self._sharded.subject_counts(shards, subject, limit, token)
        return await self._node.reader.subject_counts(shards[0], subject, limit, token)

    @changes
    async def delete_message(self, stream: str, seq: int, shard: int | None = None) -> None:
        """Remove one message."""
        one = (await self._changing(stream)).sound_shard(shard)
        await self._node.streams.removals.delete(one, seq)

    # Replay --------------------------------------------------------------------------------------

    @reads
    async def replay_plan(self, request: ReplayPlanRequest) -> PinnedReplay:
        """Pin a range and cut it into splits."""
        stream = await self._confirmed(request.stream, request.replica, request.shard)
        shards = stream.sound_shards(request.shard)
        if len(shards) > 1:
            return await self._sharded.plan(shards, request)
        return await self._node.replayer.plan(shards[0], request)

    @reads
    async def replay(self, request: ReplayRequest) -> AsyncIterator[Chunk | Pieces]:
        """Check the request, then stream the encoded body."""
        stream = await self._confirmed(request.stream, request.replica, request.shard)
        shard = stream.sound_shard(request.shard)
        low, high = self._node.replayer.check(shard, request)
        return self._node.replayer.stream(shard, request, low, high)

    # Archives ------------------------------------------------------------------------------------

    @reads
    async def snapshot(self, stream: str, consumers: bool) -> AsyncIterator[bytes]:
        """Stream the archive of the stream as of now."""
        shards = (await self._confirmed(stream)).sound_shards()
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
        one = await self._changing(stream)
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

    @reads
    async def bind_consumer(self, stream: str, consumer: str) -> ConsumerHold:
        """Hold a consumer for a subscription."""
        return self._sound_consumer(self._stream(stream), consumer).hold()

    @reads
    async def pull(self, request: PullRequest) -> PullResult:
        """Deliver up to a batch of messages."""
        consumer = self._sound_consumer(self._writable(request.stream), request.consumer)
        return await self.deadline.wait(consumer.pull(request), request.expires_ns)

    @reads
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
        # A leader that was replaced does not know which sequences exist by now.
        one = await self._confirmed(stream)
        # Only then: the refusal of a node that does not lead must not be final.
        self._node.check_serving()
        shards = [one.sound_shard(shard)] if seqs else one.sound_shards(shard)
        return await self._node.eraser.erasures.erase(shards, seqs, subject)

    async def erasure(self, erasure_id: str, wait_ns: int) -> ErasureReceipt:
        """A receipt, once its erasure is complete or the wait ends (NOT_LEADER)."""
        groups = self._node.groups
        groups.check_led(META_GROUP)
        if not groups[META_GROUP].is_alone:
            await groups.confirm_led(META_GROUP)
        return await self._node.eraser.erasures.receipt(erasure_id, wait_ns)

    async def use_ticket(self, nonce: bytes, expires_ns: int) -> bool:
        """Whether a ticket is used for the first time. Remembers its use (NOT_LEADER)."""
        node = self._node
        node.groups.check_led(META_GROUP)
        if node.membership.led_meta_ns > self._used_tickets.started_ns:
            self._used_tickets = UsedTickets(node.membership.led_meta_ns)
        return self._used_tickets.use(nonce, expires_ns, time.time_ns())

    # Cluster -------------------------------------------------------------------------------------

    async def node_views(self) -> list[NodeView]:
        """This node's view."""
        return [view_of(self._node)]

    # Node ----------------------------------------------------------------------------------------

    def readiness(self, *, strict: bool = False) -> dict[str, str]:
        """The reasons why parts are not ready, by part; empty when all are."""
        return self._node.readiness(strict=strict)

    async def metrics_text(self) -> str:
        """The node's metrics as text."""
        return await render_metrics(self._node)
