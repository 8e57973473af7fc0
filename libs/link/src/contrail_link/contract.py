"""The service link: what the api and the gateway ask of a storage node.

In one process it is a direct call; between processes the same structs travel as framed msgpack.
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
"""A part of a body that is streamed."""
Pieces = tuple[Chunk, ...]
"""A chunk in pieces, one behind the other, that were not worth a copy."""


def pieces_of(chunk: Chunk | Pieces) -> Pieces:
    """The pieces of a chunk, which is mostly one itself."""
    return chunk if isinstance(chunk, tuple) else (chunk,)


class PubResult(msgspec.Struct, frozen=True, gc=False):
    """Outcome of one message: a sequence, or the error code and detail of its refusal.

    ``code`` 0 is success; otherwise ``seq`` means nothing. ``OUTCOME_UNKNOWN`` stands here too when
    a request spans several commits.
    With ``count`` above 1 it is the outcome of a run of messages: when they were stored their
    sequences ascend from ``seq``, otherwise code and detail are the same for each. ``shard`` is
    where they are stored, of a stream that has several.
    """

    seq: int
    duplicate: bool = False
    code: int = 0
    detail: str = ""
    count: int = 1
    shard: int | None = None

    def each(self) -> "list[PubResult]":
        """The outcome of each message of the run."""
        if self.code:
            return [PubResult(0, code=self.code, detail=self.detail)] * self.count
        return [
            PubResult(seq, self.duplicate, shard=self.shard)
            for seq in range(self.seq, self.seq + self.count)
        ]


class PublishAck(msgspec.Struct, frozen=True):
    """Outcome of a publish request: results in the order of the messages."""

    stream: str
    results: list[PubResult]
    durability: str


PublishOutcome = PublishAck | ApiError
"""What became of a publish; an error is the outcome of all its messages."""


class Page(msgspec.Struct, frozen=True):
    """One page of a listing; ``next_token`` None ends it."""

    streams: list[StreamInfo] = []
    consumers: list[ConsumerInfo] = []
    next_token: str | None = None


class RangeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Messages from ``from_seq`` (or ``start_time_ns``) on, matching ``subject`` when given.

    A sequence is of one shard. Without ``shard`` all are read together, from ``cursor`` on, which
    an earlier answer gave ("": from ``start_time_ns`` or the first message on).
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
    """What a range read found; ``next_seq`` continues it, ``num_pending`` is what remains.

    Where several shards were read together ``cursor`` continues it instead (``next_seq`` is 0),
    and ``begin`` is the cursor of where it began.
    """

    messages: list[StoredMessage]
    next_seq: int
    num_pending: int
    cursor: str = ""
    begin: str = ""


class LastRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The newest message of each subject matching ``subject`` when given, as of a point.

    That is ``up_to_seq`` (inclusive) or ``up_to_time_ns`` (exclusive), or the last message when the
    first page is read. ``token`` continues a page of the same request. ``up_to_seq`` is of one
    ``shard``.
    """

    stream: str
    subject: str = ""
    up_to_seq: int = 0
    up_to_time_ns: int = 0
    limit: int = 256
    token: str = ""
    shard: int | None = None


class DeletedRanges(msgspec.Struct, frozen=True):
    """Deleted sequences as (first, last), ascending; ``next_token`` None ends them."""

    ranges: list[tuple[int, int]]
    next_token: str | None


class ReadPosition(msgspec.Struct, frozen=True):
    """How far a replica's readers see: the last sequence of a stream, and the applied log index."""

    last_seq: int
    applied_index: int


class PullRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A pull: up to ``batch`` messages, waiting at most ``expires_ns`` for the first.

    ``columns`` asks for them in columns where the consumer acknowledges nothing.
    """

    stream: str
    consumer: str
    batch: int = 1
    expires_ns: int = 0
    max_bytes: int = 0
    no_wait: bool = False
    columns: bool = False


class Delivery(msgspec.Struct, frozen=True, gc=False):
    """One delivered message with its delivery facts; ``num_pending`` is after this message."""

    message: StoredMessage
    consumer_seq: int
    num_delivered: int
    num_pending: int


def in_deliveries(columns: DeliveryColumns) -> list[Delivery]:
    """The same deliveries, one by one."""
    consumer_seq = columns.first_consumer_seq
    pending = columns.num_pending + len(columns) - 1
    return [
        Delivery(message, consumer_seq + at, 1, pending - at)
        for at, message in enumerate(columns.messages())
    ]


class PullResult(msgspec.Struct, frozen=True):
    """Deliveries of one pull; ``shard``, ``consumer_id`` and ``epoch`` go into the ack tokens.

    ``columns`` stands in place of ``deliveries`` when the pull asked for that and could have it. Of
    a stream with several shards ``addresses`` has the three for the shard that a delivery names.
    """

    deliveries: list[Delivery]
    num_pending: int
    shard: int
    consumer_id: int
    epoch: int
    columns: DeliveryColumns | None = None
    addresses: dict[int, tuple[int, int, int]] | None = None

    def address(self, delivery: Delivery) -> tuple[int, int, int]:
        """Shard id, consumer id and epoch of one of the deliveries."""
        if self.addresses is None or delivery.message.shard is None:
            return self.shard, self.consumer_id, self.epoch
        return self.addresses[delivery.message.shard]


class AckItem(msgspec.Struct, frozen=True, gc=False):
    """One acknowledgement, addressed by what the ack token held."""

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

    Of all shards, or of one; sequences are of one.
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
    """The pinned splits; ``incarnation`` guards against a stream made anew."""

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
    """Advisories behind the position ``after`` ("": from now on), at most ``limit`` of them.

    ``stream``, ``consumer`` and ``types`` select when they are given.
    """

    after: str = ""
    stream: str = ""
    consumer: str = ""
    types: tuple[AdvisoryType, ...] = ()
    limit: int = 256
    wait_ns: int = 0


class EventsResult(msgspec.Struct, frozen=True):
    """Advisories in order; ``position`` continues behind them.

    ``lost`` is how many before them, selected or not, are no longer known; None: nobody knows how
    many.
    """

    advisories: list[Advisory]
    position: str
    lost: int | None = 0


RESTORE_PIECE_BYTES_MAX: Final = 1 << 20
ERASE_SEQS_MAX: Final = 10_000


class ReplicaErasure(msgspec.Struct, frozen=True):
    """How far one node is with an erasure; ``reason`` is why it is pending once a try failed."""

    node: str
    status: Literal["pending", "done"]
    reason: str = ""


class ErasureReceipt(msgspec.Struct, frozen=True):
    """What became of an erasure of ``messages``; done when it is done on every node.

    ``shredded``: the keys of their subjects are destroyed, so nothing opens any copy of them.
    """

    erasure_id: str
    status: Literal["pending", "done"]
    messages: int
    replicas: list[ReplicaErasure]
    shredded: bool = False


class Held(Protocol):
    """Something that is held open: an iterator without content that can be closed at any time."""

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Itself; it ends when there is nothing to hold any more."""
        ...

    async def aclose(self) -> None:
        """Hold it no longer; nothing to do the second time."""
        ...


class StorageLink(TicketUse, Protocol):
    """A storage node as the edge services see it."""

    # Streams -------------------------------------------------------------------------------------
    async def put_stream(
        self, config: StreamConfig, mode: CreateMode, if_match: int | None, if_none: bool
    ) -> tuple[StreamInfo, bool]:
        """Create (True) or find identical / update (False).

        ``create`` refuses another config under the name (STREAM_EXISTS); ``put`` updates it.
        ``if_match`` is the config version that must stand (0: any), ``if_none`` that none may
        (PRECONDITION_FAILED otherwise). All of it is decided when the change is applied.
        """
        ...

    async def stream_info(self, name: str) -> StreamInfo:
        """The stream's configuration and state (STREAM_NOT_FOUND)."""
        ...

    async def list_streams(self, subject: str, prefix: str, limit: int, token: str) -> Page:
        """Streams by name, those whose subjects overlap ``subject`` when given."""
        ...

    async def delete_stream(self, name: str, if_match: int | None = None) -> None:
        """Remove the stream with its messages and consumers (STREAM_NOT_FOUND).

        ``if_match`` is the config version that must stand (PRECONDITION_FAILED otherwise).
        """
        ...

    async def purge_stream(
        self, name: str, subject: str, up_to_seq: int, keep: int, shard: int | None = None
    ) -> int:
        """Remove messages, answer how many (``up_to_seq`` exclusive; 0 and "" are not given).

        Of all shards, or of one; where there are several ``up_to_seq`` needs one, and ``keep`` one
        or a subject whose messages are all in one (INVALID_FIELD).
        """
        ...

    # Messages ------------------------------------------------------------------------------------
    async def stream_for_subject(self, subject: str) -> str:
        """Name of the stream that captures the literal ``subject`` (NO_STREAM_FOR_SUBJECT)."""
        ...

    async def publish(self, stream: str, messages: list[PublishMessage]) -> PublishAck:
        """Store messages in order, each for itself; durable when this returns.

        A ``stream`` of "" is the one that captures the first message's subject
        (NO_STREAM_FOR_SUBJECT).
        Messages are interpreted already. Refusals are per message in the results; ApiError is for
        the whole request (stream unknown, overloaded before any effect, all outcomes unknown).
        """
        ...

    async def publish_batch(self, stream: str, batch: MessageBatch) -> PublishAck:
        """Store the messages of ``batch`` as :meth:`publish` does; the results are runs."""
        ...

    def publish_then(
        self, stream: str, messages: list[PublishMessage], done: Callable[[PublishOutcome], None]
    ) -> None:
        """Store messages as :meth:`publish` does, without a task: ``done`` gets the outcome, once.

        ``done`` runs on the event loop, in the midst of storage's work: it is short and does not
        raise. What is refused at once is raised here, and ``done`` is not called.
        """
        ...

    def publish_batch_then(
        self, stream: str, batch: MessageBatch, done: Callable[[PublishOutcome], None]
    ) -> None:
        """Store ``batch`` as :meth:`publish_batch` does, in the way of :meth:`publish_then`."""
        ...

    def publish_each_then(
        self, messages: list[PublishMessage], done: Callable[[list[int], PublishOutcome], None]
    ) -> None:
        """Store each message in the stream of its subject, in order; nothing is raised.

        ``done`` gets the outcomes (runs) of some positions at a time, some maybe before the return.
        """
        ...

    async def get_message(self, stream: str, seq: int, shard: int | None = None) -> StoredMessage:
        """One message (STREAM_NOT_FOUND, MESSAGE_NOT_FOUND).

        ``shard`` is needed where a stream has several, here and with all that names sequences;
        INVALID_FIELD when it is missing, or is none of the stream's.
        """
        ...

    async def read_range(self, request: RangeRequest) -> RangeResult:
        """Messages in order; waits up to ``wait_ns`` for the first when there is none.

        Over several shards: by time, and in the order of each; a cursor of another stream, or of
        the one before it was made anew, is INVALID_FIELD.
        """
        ...

    async def last_messages(self, request: LastRequest) -> tuple[list[StoredMessage], str | None]:
        """A page of the newest messages of subjects, by sequence, and the token of the next.

        All pages together hold each subject at most once; one may be empty and not the last.
        """
        ...

    async def deleted_ranges(
        self, stream: str, limit: int, token: str, shard: int | None = None
    ) -> DeletedRanges:
        """Deleted sequences between the first and the last one, paged.

        A range that goes on behind its page is cut there.
        """
        ...

    async def read_position(self, stream: str, shard: int | None = None) -> ReadPosition:
        """How far the answering replica is; what is read of it afterwards is no older.

        Of several shards together it is the highest sequence.
        """
        ...

    async def subject_counts(
        self, stream: str, subject: str, limit: int, token: str
    ) -> tuple[list[tuple[str, int]], str | None]:
        """(subject, messages) of matching subjects in byte order, paged."""
        ...

    async def delete_message(self, stream: str, seq: int, shard: int | None = None) -> None:
        """Make one message unreadable (SEQUENCE_NOT_FOUND, DELETE_DENIED)."""
        ...

    # Replay --------------------------------------------------------------------------------------
    async def erase(
        self, stream: str, seqs: list[int], subject: str, shard: int | None = None
    ) -> ErasureReceipt:
        """Delete messages, and have their bytes leave all files; the receipt, pending mostly.

        By ``seqs`` (at most ERASE_SEQS_MAX, also of messages that are gone) or, without any, by
        ``subject`` (a literal or a filter).

        Raises STREAM_NOT_FOUND, SEQUENCE_NOT_FOUND, STREAM_SEALED, DELETE_DENIED, PURGE_DENIED,
        ERASURE_LIMIT.
        """
        ...

    async def erasure(self, erasure_id: str, wait_ns: int) -> ErasureReceipt:
        """A receipt, once it is done or ``wait_ns`` have passed; ERASURE_NOT_FOUND."""
        ...

    async def replay_plan(self, request: ReplayPlanRequest) -> ReplayPlan:
        """Pin a range and cut it into splits."""
        ...

    async def replay(self, request: ReplayRequest) -> AsyncIterator[Chunk | Pieces]:
        """Check the request (ApiError), then an iterator over the encoded body's chunks."""
        ...

    # Archives ------------------------------------------------------------------------------------
    async def snapshot(self, stream: str, consumers: bool) -> AsyncIterator[bytes]:
        """The stream's archive as of one moment, in chunks; without its consumers when not asked.

        It is whole when it ends with its end record; ApiError where it is cut.
        """
        ...

    async def begin_restore(self, stream: str) -> str:
        """Begin a restore into ``stream``, which must not exist (STREAM_RESTORE_EXISTS).

        The token answered is for the calls that follow, one at a time. A restore that is not gone
        on with for a minute is undone.
        """
        ...

    async def append_restore(self, token: str, offset: int, piece: bytes) -> None:
        """The archive's bytes from ``offset`` on, at most ``RESTORE_PIECE_BYTES_MAX`` of them.

        Any refusal (ARCHIVE_INVALID, SUBJECT_OVERLAP and others) undoes the restore.
        """
        ...

    async def commit_restore(self, token: str) -> StreamInfo:
        """That was all: make the stream, durably, or restore nothing (ARCHIVE_INVALID)."""
        ...

    async def abort_restore(self, token: str) -> None:
        """Undo what was restored so far; nothing to do when the restore has ended."""
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
        """As ``put_stream``, for a consumer of ``stream``."""
        ...

    async def consumer_info(self, stream: str, consumer: str) -> ConsumerInfo:
        """Configuration and progress (STREAM_NOT_FOUND, CONSUMER_NOT_FOUND)."""
        ...

    async def list_consumers(self, stream: str, limit: int, token: str) -> Page:
        """Consumers of the stream by name."""
        ...

    async def delete_consumer(
        self, stream: str, consumer: str, if_match: int | None = None
    ) -> None:
        """Remove the consumer; its waiting pulls end with CONSUMER_DELETED.

        ``if_match`` is as with ``delete_stream``.
        """
        ...

    async def bind_consumer(self, stream: str, consumer: str) -> Held:
        """Show the consumer as bound (``push_bound``) and in use while the answer is open.

        It ends when the consumer is gone, and with an ApiError when the link is lost.
        Raises STREAM_NOT_FOUND, CONSUMER_NOT_FOUND.
        """
        ...

    async def pull(self, request: PullRequest) -> PullResult:
        """Deliver up to a batch; an empty result when nothing came in time.

        Cancelling the call gives back what was not delivered.
        """
        ...

    async def acknowledge(
        self, stream: str, consumer: str, items: list[AckItem], sync: bool
    ) -> list[AckResult]:
        """Take acknowledgements; with ``sync`` answer only once they are durable.

        Items of another shard or consumer are TOKEN_FORGED, of an earlier epoch or consumer
        of the same name TOKEN_STALE.
        """
        ...

    # Advisories ----------------------------------------------------------------------------------
    async def read_events(self, request: EventsRequest) -> EventsResult:
        """Advisories in order; waits up to ``wait_ns`` for the first (TOO_MANY_WAITERS).

        Who reads listens, and so does who comes back within a minute: what happens while nobody
        listens is not kept.
        """
        ...

    def readiness(self) -> dict[str, str]:
        """Component name to why it is not ready; empty when the node serves everything."""
        ...

    def metrics_text(self) -> str:
        """Prometheus exposition text of the node's own metrics."""
        ...
