"""The service link of one process: a direct call into the node."""

from collections.abc import AsyncIterator, Callable

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.link import (
    AckItem,
    AckResult,
    Chunk,
    CreateMode,
    DeletedRanges,
    ErasureReceipt,
    EventsRequest,
    EventsResult,
    LastRequest,
    Page,
    PublishAck,
    PublishOutcome,
    PullRequest,
    PullResult,
    RangeRequest,
    RangeResult,
    ReadPosition,
    ReplayPlan,
    ReplayPlanRequest,
    ReplayRequest,
)
from contrail_common.message_batch import MessageBatch
from contrail_common.model import (
    ConsumerConfig,
    ConsumerInfo,
    PublishMessage,
    StoredMessage,
    StreamConfig,
    StreamInfo,
)
from contrail_common.subjects import overlaps
from contrail_storage.node.last_reader import LastReader
from contrail_storage.node.node import SHARD_GROUP, StorageNode
from contrail_storage.node.page_tokens import decode_token, encode_token
from contrail_storage.node.proposer import Outcome
from contrail_storage.node.shard import Shard
from contrail_storage.node.volatile_group import VOLATILE_GROUP

_UNKNOWN = errors.OUTCOME_UNKNOWN.code


class LocalLink:
    """``contrail_common.link.StorageLink`` over a node in the same process."""

    def __init__(self, node: StorageNode) -> None:
        self._node = node
        self._last_reader = LastReader(node.reader)

    def _shard(self, stream: str) -> Shard:
        shard = self._node.streams.shard(stream)
        if shard.damaged:
            raise ApiError(errors.DATA_LOST, shard.damaged, applied=False)
        return shard

    def _writable(self, stream: str) -> Shard:
        """The shard of a stream that takes changes now."""
        shard = self._shard(stream)
        self._node.check_serving(volatile=shard.volatile)
        return shard

    async def _readable(self, stream: str) -> Shard:
        """The shard of a stream once everything acknowledged so far can be read."""
        shard = self._shard(stream)
        await shard.catch_up()
        return shard

    # Streams -------------------------------------------------------------------------------------

    async def put_stream(
        self, config: StreamConfig, mode: CreateMode, if_match: int | None, if_none: bool
    ) -> tuple[StreamInfo, bool]:
        """Create, find identical, or update."""
        self._node.check_serving()
        return await self._node.streams.put(config, mode, if_match, if_none)

    async def stream_info(self, name: str) -> StreamInfo:
        """Configuration and state."""
        return self._node.streams.info(self._shard(name))

    async def list_streams(self, subject: str, prefix: str, limit: int, token: str) -> Page:
        """Streams by name, paged."""
        streams = self._node.streams
        infos = []
        after = decode_token(token)
        for name in streams.names():
            if name <= after or not name.startswith(prefix):
                continue
            info = streams.info(streams.shard(name))
            if subject and not any(overlaps(subject, own) for own in info.config.subjects):
                continue
            infos.append(info)
            if len(infos) > limit:
                return Page(streams=infos[:limit], next_token=encode_token(infos[-2].config.name))
        return Page(streams=infos)

    async def delete_stream(self, name: str) -> None:
        """Remove a stream."""
        self._node.check_serving()
        await self._node.streams.delete(name)
        self._node.consumers.close_gone()

    async def purge_stream(self, name: str, subject: str, up_to_seq: int, keep: int) -> int:
        """Remove messages, answer how many."""
        self._writable(name)
        return await self._node.streams.purge(name, subject, up_to_seq, keep)

    # Messages ------------------------------------------------------------------------------------

    def _captured_by(self, subject: str) -> str:
        stream = self._node.streams.route(subject)
        if stream is None:
            raise ApiError(errors.NO_STREAM_FOR_SUBJECT, applied=False)
        return stream

    async def stream_for_subject(self, subject: str) -> str:
        """The stream that captures a subject."""
        return self._captured_by(subject)

    async def publish(self, stream: str, messages: list[PublishMessage]) -> PublishAck:
        """Store messages; durable when this returns."""
        if not stream and messages:
            stream = self._captured_by(messages[0].subject)
        shard = self._writable(stream)
        if not messages:
            return PublishAck(stream, [], shard.durability)
        number = shard.machine.shard
        results = await self._node.shard_logs.of(number).append(number, messages)
        outcome = _outcome(stream, shard, results)
        if isinstance(outcome, ApiError):
            raise outcome
        return outcome

    async def publish_batch(self, stream: str, batch: MessageBatch) -> PublishAck:
        """Store a batch; durable when this returns."""
        shard = self._writable(stream)
        if not batch.count:
            return PublishAck(stream, [], shard.durability)
        number = shard.machine.shard
        runs = await self._node.shard_logs.of(number).append_batch(number, batch)
        outcome = _outcome(stream, shard, runs)
        if isinstance(outcome, ApiError):
            raise outcome
        return outcome

    def publish_batch_then(
        self, stream: str, batch: MessageBatch, done: Callable[[PublishOutcome], None]
    ) -> None:
        """Store a batch; ``done`` gets the outcome."""
        shard = self._writable(stream)
        if not batch.count:
            done(PublishAck(stream, [], shard.durability))
            return
        number = shard.machine.shard
        self._node.shard_logs.of(number).append_batch_then(
            number, batch, lambda runs: done(_outcome(stream, shard, runs))
        )

    def publish_then(
        self, stream: str, messages: list[PublishMessage], done: Callable[[PublishOutcome], None]
    ) -> None:
        """Store messages (at least one); ``done`` gets the outcome."""
        stream = stream or self._captured_by(messages[0].subject)
        shard = self._writable(stream)
        number = shard.machine.shard
        self._node.shard_logs.of(number).append_then(
            number, messages, lambda results: done(_outcome(stream, shard, results))
        )

    async def get_message(self, stream: str, seq: int) -> StoredMessage:
        """One message."""
        return await self._node.reader.get(await self._readable(stream), seq)

    async def read_range(self, request: RangeRequest) -> RangeResult:
        """Messages in order, waiting for the first when asked to."""
        return await self._node.reader.read_range(await self._readable(request.stream), request)

    async def last_messages(self, request: LastRequest) -> tuple[list[StoredMessage], str | None]:
        """A page of the newest messages of subjects."""
        return await self._last_reader.read(await self._readable(request.stream), request)

    async def deleted_ranges(self, stream: str, limit: int, token: str) -> DeletedRanges:
        """Deleted sequences, paged."""
        return self._node.reader.deleted_ranges(await self._readable(stream), limit, token)

    async def read_position(self, stream: str) -> ReadPosition:
        """How far this node is."""
        shard = self._shard(stream)
        group = VOLATILE_GROUP if shard.volatile else SHARD_GROUP
        return ReadPosition(shard.written_seq, self._node.applied_indexes().get(group, 0))

    async def subject_counts(
        self, stream: str, subject: str, limit: int, token: str
    ) -> tuple[list[tuple[str, int]], str | None]:
        """Subjects with their number of messages."""
        return self._node.reader.subject_counts(await self._readable(stream), subject, limit, token)

    async def delete_message(self, stream: str, seq: int) -> None:
        """Make one message unreadable."""
        self._writable(stream)
        await self._node.streams.delete_message(stream, seq)

    # Replay --------------------------------------------------------------------------------------

    async def replay_plan(self, request: ReplayPlanRequest) -> ReplayPlan:
        """Pin a range and cut it into splits."""
        return await self._node.replayer.plan(await self._readable(request.stream), request)

    async def replay(self, request: ReplayRequest) -> AsyncIterator[Chunk]:
        """Check the request, then stream the encoded body."""
        shard = await self._readable(request.stream)
        low, high = self._node.replayer.check(shard, request)
        return self._node.replayer.stream(shard, request, low, high)

    # Archives ------------------------------------------------------------------------------------

    async def snapshot(self, stream: str, consumers: bool) -> AsyncIterator[bytes]:
        """Stream the archive of a stream as it is now."""
        shard = await self._readable(stream)
        await self._node.until_written()
        return self._node.snapshotter.stream(shard, consumers=consumers)

    async def begin_restore(self, stream: str) -> str:
        """Begin a restore; its token."""
        self._node.check_serving()
        return await self._node.restores.begin(stream)

    async def append_restore(self, token: str, offset: int, piece: bytes) -> None:
        """Take the next bytes of the archive."""
        self._node.check_serving()
        await self._node.restores.append(token, offset, piece)

    async def commit_restore(self, token: str) -> StreamInfo:
        """Make the stream."""
        self._node.check_serving()
        return await self._node.restores.commit(token)

    async def abort_restore(self, token: str) -> None:
        """Undo."""
        await self._node.restores.abort(token)

    # Consumers -----------------------------------------------------------------------------------

    async def put_consumer(
        self,
        stream: str,
        config: ConsumerConfig,
        mode: CreateMode,
        if_match: int | None,
        if_none: bool,
    ) -> tuple[ConsumerInfo, bool]:
        """Create, find identical, or update."""
        self._writable(stream)
        return await self._node.consumers.put(stream, config, mode, if_match, if_none)

    async def consumer_info(self, stream: str, consumer: str) -> ConsumerInfo:
        """Configuration and progress."""
        await self._readable(stream)
        return await self._node.consumers.info(stream, consumer)

    async def list_consumers(self, stream: str, limit: int, token: str) -> Page:
        """Consumers of a stream by name, paged."""
        after = decode_token(token)
        infos = [
            info for info in await self._node.consumers.infos(stream) if info.config.name > after
        ]
        more = len(infos) > limit
        next_token = encode_token(infos[limit - 1].config.name) if more else None
        return Page(consumers=infos[:limit], next_token=next_token)

    async def delete_consumer(self, stream: str, consumer: str) -> None:
        """Remove a consumer."""
        self._writable(stream)
        await self._node.consumers.delete(stream, consumer)

    async def pull(self, request: PullRequest) -> PullResult:
        """Deliver up to a batch."""
        self._writable(request.stream)
        await self._readable(request.stream)
        return await self._node.consumers.pull(request)

    async def acknowledge(
        self, stream: str, consumer: str, items: list[AckItem], sync: bool
    ) -> list[AckResult]:
        """Take acknowledgements."""
        self._writable(stream)
        return await self._node.consumers.acknowledge(stream, consumer, items, sync)

    # Advisories ----------------------------------------------------------------------------------

    async def read_events(self, request: EventsRequest) -> EventsResult:
        """Advisories in order, waiting for the first when asked to."""
        return await self._node.advisories.read(request)

    # Erasing -------------------------------------------------------------------------------------

    async def erase(self, stream: str, seqs: list[int], subject: str) -> ErasureReceipt:
        """Delete messages, and have their bytes leave all files."""
        self._node.check_serving()
        self._shard(stream)
        return await self._node.eraser.erasures.erase(stream, seqs, subject)

    async def erasure(self, erasure_id: str, wait_ns: int) -> ErasureReceipt:
        """A receipt, once it is done or the wait is over."""
        return await self._node.eraser.erasures.receipt(erasure_id, wait_ns)

    # Node ----------------------------------------------------------------------------------------

    def readiness(self) -> dict[str, str]:
        """What is not ready, and why."""
        return self._node.readiness()

    def metrics_text(self) -> str:
        """The node's metrics."""
        return self._node.metrics_text()


def _outcome(stream: str, shard: Shard, results: Outcome) -> PublishOutcome:
    if isinstance(results, ApiError):
        return results
    if all(result.code == _UNKNOWN for result in results):
        return ApiError(errors.OUTCOME_UNKNOWN)
    return PublishAck(stream, results, shard.durability)
