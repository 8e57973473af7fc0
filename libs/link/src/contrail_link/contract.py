"""The storage link: the interface through which the api and the gateway use a storage node.

Within a process it is a direct call; between processes the same structs travel as framed msgpack.
Every method raises :class:`contrail_common.errors.ApiError` for a refusal or ``OUTCOME_UNKNOWN``.
"""

from collections.abc import AsyncIterator, Callable
from typing import Final, Literal, Protocol

import msgspec

from contrail_common.columns.delivery_columns import DeliveryColumns
from contrail_common.columns.message_batch import MessageBatch
from contrail_common.errors import ApiError
from contrail_common.model import (
    AckKind,
    Advisory,
    AdvisoryType,
    ConsumerConfig,
    ConsumerInfo,
    PublishMessage,
    StoredMessage,
    StreamConfig,
    StreamInfo,
)
from contrail_link.ticket_use import TicketUse

ReplayFormat = Literal["arrow", "ndjson", "msgpack"]
CreateMode = Literal["create", "put"]
Chunk = bytes | memoryview
"""A part of a streamed body."""
Pieces = tuple[Chunk, ...]
"""A chunk in consecutive pieces, to avoid a copy."""


def pieces_of(chunk: Chunk | Pieces) -> Pieces:
    """Return the pieces of a chunk; most chunks are a single piece."""
    return chunk if isinstance(chunk, tuple) else (chunk,)


class PubResult(msgspec.Struct, frozen=True, gc=False):
    """Outcome of one message: a sequence, or the error code and detail of its refusal.

    ``code`` 0 is success; otherwise ``seq`` has no meaning. ``code`` can be ``OUTCOME_UNKNOWN`` if
    a request spans several commits.
    With ``count`` above 1 it is the outcome of a run of messages. If they were stored, their
    sequences ascend from ``seq``; otherwise code and detail are the same for all. ``shard`` is set
    if the stream has several.
    """

    seq: int
    duplicate: bool = False
    code: int = 0
    detail: str = ""
    count: int = 1
    shard: int | None = None

    def each(self) -> "list[PubResult]":
        """Return one outcome for each message of the run."""
        if self.code:
            return [PubResult(0, code=self.code, detail=self.detail)] * self.count
        return [
            PubResult(seq, self.duplicate, shard=self.shard)
            for seq in range(self.seq, self.seq + self.count)
        ]


class PublishAck(msgspec.Struct, frozen=True):
    """Outcome of a publish request: results in the order of the messages.

    A list of messages has one result for each of them; a batch has runs.
    """

    stream: str
    results: list[PubResult]
    durability: str


PublishContent = list[PublishMessage] | MessageBatch
"""The messages of a publish, as a list or in columns."""
PublishOutcome = PublishAck | ApiError
"""The outcome of a publish; an error applies to all its messages."""


class Page(msgspec.Struct, frozen=True):
    """One page of a listing; ``next_token`` is None on the last page."""

    streams: list[StreamInfo] = []
    consumers: list[ConsumerInfo] = []
    next_token: str | None = None


class RangeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Messages from ``from_seq`` or ``start_time_ns`` on that match ``subject``, if it is given.

    A sequence belongs to one shard. Without ``shard``, all shards are read together from ``cursor``
    on, which comes from an earlier answer ("": from ``start_time_ns`` or the first message on).
    """

    stream: str
    from_seq: int = 0
    start_time_ns: int = 0
    subject: str = ""
    limit: int = 256
    max_bytes: int = 1 << 20
    wait_ns: int = 0
    shard: int | None = None
    cursor: str = ""


class RangeResult(msgspec.Struct, frozen=True):
    """The result of a range read. ``next_seq`` continues it; ``num_pending`` messages remain.

    If several shards were read together, ``cursor`` continues it instead, ``next_seq`` is 0, and
    ``begin`` is the cursor of its start.
    """

    messages: list[StoredMessage]
    next_seq: int
    num_pending: int
    cursor: str = ""
    begin: str = ""


class LastRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The newest message of each subject that matches ``subject``, as of one point in the stream.

    The point is ``up_to_seq`` (inclusive, in one ``shard``), ``up_to_time_ns`` (exclusive), or the
    last message at the time of the first page. ``token`` continues after a page of the same
    request.
    """

    stream: str
    subject: str = ""
    up_to_seq: int = 0
    up_to_time_ns: int = 0
    limit: int = 256
    token: str = ""
    shard: int | None = None


class DeletedRanges(msgspec.Struct, frozen=True):
    """Deleted sequences as ascending (first, last); ``next_token`` is None on the last page."""

    ranges: list[tuple[int, int]]
    next_token: str | None


class ReadPosition(msgspec.Struct, frozen=True):
    """The position of a replica: the last sequence of a stream, and the applied log index."""

    last_seq: int
    applied_index: int


class PullRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A pull: up to ``batch`` messages, waiting at most ``expires_ns`` for the first.

    ``columns`` asks for columns; it only has an effect if the consumer has no acknowledgements.
    """

    stream: str
    consumer: str
    batch: int = 1
    expires_ns: int = 0
    max_bytes: int = 0
    no_wait: bool = False
    columns: bool = False


class Delivery(msgspec.Struct, frozen=True, gc=False):
    """One delivered message and its counters; ``num_pending`` counts the messages after it."""

    message: StoredMessage
    consumer_seq: int
    num_delivered: int
    num_pending: int


def in_deliveries(columns: DeliveryColumns) -> list[Delivery]:
    """Return the deliveries of columns as a list."""
    consumer_seq = columns.first_consumer_seq
    pending = columns.num_pending + len(columns) - 1
    return [
        Delivery(message, consumer_seq + at, 1, pending - at)
        for at, message in enumerate(columns.messages())
    ]


class PullResult(msgspec.Struct, frozen=True):
    """Deliveries of one pull; ``shard``, ``consumer_id`` and ``epoch`` go into the ack tokens.

    ``columns`` replaces ``deliveries`` if the pull asked for columns and the consumer allows them.
    If the stream has several shards, ``addresses`` has these three values for each of them.
    """

    deliveries: list[Delivery]
    num_pending: int
    shard: int
    consumer_id: int
    epoch: int
    columns: DeliveryColumns | None = None
    addresses: dict[int, tuple[int, int, int]] | None = None

    def address(self, delivery: Delivery) -> tuple[int, int, int]:
        """Return shard id, consumer id and epoch of one of the deliveries."""
        if self.addresses is None or delivery.message.shard is None:
            return self.shard, self.consumer_id, self.epoch
        return self.addresses[delivery.message.shard]


class AckItem(msgspec.Struct, frozen=True, gc=False):
    """One acknowledgement, addressed by the contents of the ack token."""

    shard: int
    consumer_id: int
    epoch: int
    seq: int
    kind: AckKind
    delay_ns: int = 0
    reason: str = ""


class AckResult(msgspec.Struct, frozen=True, gc=False):
    """Outcome of one acknowledgement; ``code`` 0 is success."""

    code: int = 0
    detail: str = ""


class ReplaySplit(msgspec.Struct, frozen=True):
    """A closed range of one shard; ``messages`` and ``bytes`` are estimates for planning."""

    shard: int
    from_seq: int
    to_seq: int
    messages: int
    bytes: int


class ReplayPlanRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Plan a replay of a pinned range, in about ``splits`` parts (closed range, 0 = open end).

    The range is in ``shard``, or in all shards; sequences need a shard.
    """

    stream: str
    splits: int = 1
    from_seq: int = 0
    to_seq: int = 0
    start_time_ns: int = 0
    end_time_ns: int = 0
    subject: str = ""
    shard: int | None = None


class ReplayPlan(msgspec.Struct, frozen=True):
    """The pinned splits; ``incarnation`` detects a stream that was created again."""

    stream: str
    incarnation: str
    splits: list[ReplaySplit]


class ReplayRequest(msgspec.Struct, frozen=True, kw_only=True):
    """All messages of the closed range, in ``format``; ``columns`` empty means all of them."""

    stream: str
    format: ReplayFormat = "arrow"
    from_seq: int = 0
    to_seq: int = 0
    subject: str = ""
    columns: tuple[str, ...] = ()
    incarnation: str = ""
    schema: Literal["contrail", "spark"] = "contrail"
    clamp: bool = False
    shard: int | None = None


class EventsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """At most ``limit`` events after the position ``after`` ("": from now on).

    ``stream``, ``consumer`` and ``types`` select events, if they are given.
    """

    after: str = ""
    stream: str = ""
    consumer: str = ""
    types: tuple[AdvisoryType, ...] = ()
    limit: int = 256
    wait_ns: int = 0


class EventsResult(msgspec.Struct, frozen=True):
    """Events in order; ``position`` continues after them.

    ``lost`` is the number of earlier events, selected or not, that were not kept; None if the
    number is unknown.
    """

    advisories: list[Advisory]
    position: str
    lost: int | None = 0


RESTORE_PIECE_BYTES_MAX: Final = 1 << 20
ERASE_SEQS_MAX: Final = 10_000


class ReplicaErasure(msgspec.Struct, frozen=True):
    """The progress of an erasure on one node; ``reason`` says why the last attempt failed."""

    node: str
    status: Literal["pending", "done"]
    reason: str = ""


class ErasureReceipt(msgspec.Struct, frozen=True):
    """The receipt of an erasure of ``messages``; it is done when every node is.

    ``shredded``: the keys of their subjects are destroyed, so no copy can be decrypted.
    """

    erasure_id: str
    status: Literal["pending", "done"]
    messages: int
    replicas: list[ReplicaErasure]
    shredded: bool = False


class Held(Protocol):
    """Something that is held open: an iterator without items that can be closed at any time."""

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Return itself; the iteration ends when there is nothing left to hold."""
        ...

    async def aclose(self) -> None:
        """Release it; a second call does nothing."""
        ...


class StorageLink(TicketUse, Protocol):
    """A storage node as the api and the gateway see it."""

    # Streams -------------------------------------------------------------------------------------
    async def put_stream(
        self, config: StreamConfig, mode: CreateMode, if_match: int | None, if_none: bool
    ) -> tuple[StreamInfo, bool]:
        """Create a stream (True), or find it identical or update it (False).

        If the name has another config, ``create`` refuses (STREAM_EXISTS) and ``put`` updates it.
        ``if_match`` is the required config version (0: any); ``if_none`` requires that there is no
        stream (else PRECONDITION_FAILED). The conditions are checked when the change is applied.
        """
        ...

    async def stream_info(self, name: str) -> StreamInfo:
        """Return the stream's configuration and state (STREAM_NOT_FOUND)."""
        ...

    async def list_streams(self, subject: str, prefix: str, limit: int, token: str) -> Page:
        """List streams by name; with ``subject``, only those whose subjects overlap it."""
        ...

    async def delete_stream(self, name: str, if_match: int | None = None) -> None:
        """Remove the stream with its messages and consumers (STREAM_NOT_FOUND).

        ``if_match`` is the required config version (else PRECONDITION_FAILED).
        """
        ...

    async def purge_stream(
        self, name: str, subject: str, up_to_seq: int, keep: int, shard: int | None = None
    ) -> int:
        """Remove messages; return how many (``up_to_seq`` is exclusive; 0 and "" mean not given).

        If the stream has several shards, ``up_to_seq`` needs ``shard``, and ``keep`` needs either
        ``shard`` or a subject whose messages are all in one (INVALID_FIELD).
        """
        ...

    # Messages ------------------------------------------------------------------------------------
    async def stream_for_subject(self, subject: str) -> str:
        """Return the stream that captures the literal ``subject`` (NO_STREAM_FOR_SUBJECT)."""
        ...

    def publish_then(
        self, stream: str, content: PublishContent, done: Callable[[PublishOutcome], None]
    ) -> None:
        """Store messages in order, each by itself; they are durable when ``done`` is called.

        If ``stream`` is "", a list goes to the stream that captures its first message's subject
        (NO_STREAM_FOR_SUBJECT). Headers must be interpreted already.

        ``done`` is called exactly once, on the event loop, while storage applies the entry: it must
        be short and must not raise. It gets refused messages as errors in the results, and an
        ApiError for the whole request: overloaded, or all outcomes unknown. If this method raises
        a refusal, nothing is stored and ``done`` is not called. Coroutines call
        :func:`contrail_link.publishing.publish`.
        """
        ...

    async def may_retry(self, refusal: ApiError, refused_at_s: float) -> bool:
        """Wait until a refused request can be sent again; return False if it should not be.

        ``refused_at_s``: the event loop's time of the first refusal. A request is sent again only
        if it was refused with NOT_READY and had no effect, and for a short time.
        """
        ...

    def publish_each_then(
        self, messages: list[PublishMessage], done: Callable[[list[int], PublishOutcome], None]
    ) -> None:
        """Store each message in the stream of its subject, in order. Never raises.

        Each call of ``done`` has some positions and their outcomes (runs). Calls may come before
        this method returns.
        """
        ...

    async def get_message(self, stream: str, seq: int, shard: int | None = None) -> StoredMessage:
        """Return one message (STREAM_NOT_FOUND, MESSAGE_NOT_FOUND).

        ``shard`` is required if the stream has several, as in all methods that take sequences;
        INVALID_FIELD if it is missing or unknown.
        """
        ...

    async def read_range(self, request: RangeRequest) -> RangeResult:
        """Return messages in order; if there are none, wait up to ``wait_ns`` for the first.

        Messages of several shards are sorted by time; the order within a shard is kept. A cursor of
        another stream or of an earlier incarnation is INVALID_FIELD.
        """
        ...

    async def last_messages(self, request: LastRequest) -> tuple[list[StoredMessage], str | None]:
        """Return a page of the newest messages of subjects, by sequence, and the next token.

        All pages together have each subject at most once. An empty page need not be the last.
        """
        ...

    async def deleted_ranges(
        self, stream: str, limit: int, token: str, shard: int | None = None
    ) -> DeletedRanges:
        """Return a page of the deleted sequences between the first and the last message.

        A range that continues on the next page is divided there.
        """
        ...

    async def read_position(self, stream: str, shard: int | None = None) -> ReadPosition:
        """Return the position of the answering replica; later reads from it are not older.

        For several shards together, it is the highest sequence.
        """
        ...

    async def subject_counts(
        self, stream: str, subject: str, limit: int, token: str
    ) -> tuple[list[tuple[str, int]], str | None]:
        """Return a page of (subject, messages) of matching subjects, in byte order."""
        ...

    async def delete_message(self, stream: str, seq: int, shard: int | None = None) -> None:
        """Make one message unreadable (SEQUENCE_NOT_FOUND, DELETE_DENIED)."""
        ...

    # Replay --------------------------------------------------------------------------------------
    async def erase(
        self, stream: str, seqs: list[int], subject: str, shard: int | None = None
    ) -> ErasureReceipt:
        """Delete messages and remove their bytes from all files. The receipt is mostly pending.

        By ``seqs`` (at most ERASE_SEQS_MAX, also of messages that are gone) or, without any, by
        ``subject`` (a literal or a filter).

        Raises STREAM_NOT_FOUND, SEQUENCE_NOT_FOUND, STREAM_SEALED, DELETE_DENIED, PURGE_DENIED,
        ERASURE_LIMIT.
        """
        ...

    async def erasure(self, erasure_id: str, wait_ns: int) -> ErasureReceipt:
        """Return a receipt when it is done, or after ``wait_ns`` (ERASURE_NOT_FOUND)."""
        ...

    async def replay_plan(self, request: ReplayPlanRequest) -> ReplayPlan:
        """Pin a range and divide it into splits."""
        ...

    async def replay(self, request: ReplayRequest) -> AsyncIterator[Chunk | Pieces]:
        """Check the request (ApiError); return an iterator over the chunks of the encoded body."""
        ...

    # Archives ------------------------------------------------------------------------------------
    async def snapshot(self, stream: str, consumers: bool) -> AsyncIterator[bytes]:
        """Return the chunks of the stream's archive as of one moment, on request with consumers.

        The archive is complete if it ends with its end record. An ApiError cuts it.
        """
        ...

    async def begin_restore(self, stream: str) -> str:
        """Begin a restore into ``stream``, which must not exist (STREAM_RESTORE_EXISTS).

        Returns a token for the calls that follow, which must come one at a time. A restore without
        a call for a minute is undone.
        """
        ...

    async def append_restore(self, token: str, offset: int, piece: bytes) -> None:
        """Add the archive's bytes from ``offset`` on, at most ``RESTORE_PIECE_BYTES_MAX``.

        Any refusal (ARCHIVE_INVALID, SUBJECT_OVERLAP and others) undoes the restore.
        """
        ...

    async def commit_restore(self, token: str) -> StreamInfo:
        """Create the stream durably from the whole archive, or nothing (ARCHIVE_INVALID)."""
        ...

    async def abort_restore(self, token: str) -> None:
        """Undo a restore; does nothing if it has ended."""
        ...

    # Consumers -----------------------------------------------------------------------------------
    async def put_consumer(
        self,
        stream: str,
        config: ConsumerConfig,
        mode: CreateMode,
        if_match: int | None,
        if_none: bool,
    ) -> tuple[ConsumerInfo, bool]:
        """Create, find or update a consumer of ``stream``, as ``put_stream`` does for streams."""
        ...

    async def consumer_info(self, stream: str, consumer: str) -> ConsumerInfo:
        """Return configuration and progress (STREAM_NOT_FOUND, CONSUMER_NOT_FOUND)."""
        ...

    async def list_consumers(self, stream: str, limit: int, token: str) -> Page:
        """List the consumers of the stream by name."""
        ...

    async def delete_consumer(
        self, stream: str, consumer: str, if_match: int | None = None
    ) -> None:
        """Remove the consumer; its waiting pulls end with CONSUMER_DELETED.

        ``if_match`` is as with ``delete_stream``.
        """
        ...

    async def bind_consumer(self, stream: str, consumer: str) -> Held:
        """Mark the consumer as bound (``push_bound``) and in use while the answer is open.

        The answer ends when the consumer is deleted, and with an ApiError if the link is lost.
        Raises STREAM_NOT_FOUND, CONSUMER_NOT_FOUND.
        """
        ...

    async def pull(self, request: PullRequest) -> PullResult:
        """Deliver up to a batch; the result is empty if no message came in time.

        Cancelling the call returns undelivered messages to the consumer.
        """
        ...

    async def acknowledge(
        self, stream: str, consumer: str, items: list[AckItem], sync: bool
    ) -> list[AckResult]:
        """Acknowledge deliveries; with ``sync``, answer only when that is durable.

        Items of another shard or consumer get TOKEN_FORGED; those of an earlier epoch or of a
        deleted consumer with the same name get TOKEN_STALE.
        """
        ...

    # Advisories ----------------------------------------------------------------------------------
    async def read_events(self, request: EventsRequest) -> EventsResult:
        """Return events in order; wait up to ``wait_ns`` for the first (TOO_MANY_WAITERS).

        Events are only kept while someone listens. A reader listens during a call and for a minute
        after it.
        """
        ...

    def readiness(self) -> dict[str, str]:
        """Return why each component is not ready, by name; empty if the node is ready."""
        ...

    def metrics_text(self) -> str:
        """Return the Prometheus text of the node's own metrics."""
        ...
