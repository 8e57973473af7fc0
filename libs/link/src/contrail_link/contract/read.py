"""Reads of messages: one, a range, the last of each subject, and bulk replays."""

from collections.abc import AsyncIterator, Callable
from typing import Any, Literal, Protocol

import msgspec

from contrail_common.model import StoredMessage
from contrail_link.contract.remote import ANY, REFUSE, REPEAT, leader_of, remote

ReplayFormat = Literal["arrow", "ndjson", "msgpack"]
Chunk = bytes | memoryview
"""A part of a streamed body."""
Pieces = tuple[Chunk, ...]
"""A chunk in consecutive pieces, to avoid a copy."""


class DiskRead(Protocol):
    """A read of the disk that has begun."""

    def add_done_callback(self, done: Callable[[Any], object], /) -> None:
        """Call ``done`` when the read has ended, whatever has become of it."""
        ...


Peeked = StoredMessage | DiskRead | None
"""A message, a read after which to ask again, or None; see `ReadLink.peek_message`."""


def pieces_of(chunk: Chunk | Pieces) -> Pieces:
    """Return the pieces of a chunk; most chunks are a single piece."""
    return chunk if isinstance(chunk, tuple) else (chunk,)


class RangeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Messages from ``from_seq`` or ``start_time_ns`` on that match ``subject``, if it is given.

    A sequence belongs to one shard. Without ``shard``, all shards are read together from ``cursor``
    on, which comes from an earlier answer ("": from ``start_time_ns`` or the first message on).
    For ``replica``, see `ReadLink.find_replica`.
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
    replica: str = ""


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
    replica: str = ""


class ManyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The messages with these ``seqs`` of one ``shard``, or the newest of each of the ``subjects``.

    Subjects are literal. Messages are left out once the others have ``max_bytes`` bytes of headers
    and payload, but never all of them.
    """

    stream: str
    seqs: list[int] = []
    subjects: list[str] = []
    max_bytes: int = 4 << 20
    shard: int | None = None
    replica: str = ""


class ManyResult(msgspec.Struct, frozen=True):
    """The messages in the order of the request, None for one that is not there or is left out.

    ``left_out`` are the positions for which there was no room, ascending.
    """

    messages: list[StoredMessage | None]
    left_out: list[int]


class DeletedRanges(msgspec.Struct, frozen=True):
    """Deleted sequences as ascending (first, last); ``next_token`` is None on the last page."""

    ranges: list[tuple[int, int]]
    next_token: str | None


class ReadPosition(msgspec.Struct, frozen=True):
    """The position of a replica: the last sequence of a stream, and the applied log index."""

    last_seq: int
    applied_index: int


class ReplicaPosition(ReadPosition, frozen=True):
    """The position of a node's copy: see `ReadLink.find_replica`.

    ``staleness_ns``: the copy has everything that was acknowledged up to that long ago.
    """

    node: str
    staleness_ns: int


class ReplaySplit(msgspec.Struct, frozen=True):
    """A closed range of one shard; ``messages`` and ``bytes`` are estimates for planning."""

    shard: int
    from_seq: int
    to_seq: int
    messages: int
    bytes: int


class ReplayPlanRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Plan a replay of a pinned range, in about ``splits`` parts (closed range, 0 = open end).

    The range is in ``shard``, or in all shards; sequences need a shard. There are more parts if
    these would be much larger than ``split_bytes`` (0: any size). ``subject`` is as in
    `ReplayRequest`.
    """

    stream: str
    splits: int = 1
    from_seq: int = 0
    to_seq: int = 0
    start_time_ns: int = 0
    end_time_ns: int = 0
    subject: str = ""
    shard: int | None = None
    replica: str = ""
    split_bytes: int = 0


class ShardBounds(msgspec.Struct, frozen=True):
    """The oldest and newest sequence of a shard; without messages, first is last plus one."""

    shard: int
    first_seq: int
    last_seq: int


class PinnedReplay(msgspec.Struct, frozen=True):
    """The pinned splits; ``incarnation`` detects a stream that was created again.

    ``shards`` are those that the splits may be in, whatever range was asked for.
    """

    stream: str
    incarnation: str
    splits: list[ReplaySplit]
    shards: list[ShardBounds] = []


class ReplayRequest(msgspec.Struct, frozen=True, kw_only=True):
    """All messages of the closed range, in ``format``; ``columns`` empty means all of them.

    ``subject`` may have several filters, separated by spaces: a message must match one of them.
    """

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
    replica: str = ""


class ReadLink(Protocol):
    """Reads of messages: one, a range, the last of each subject, and bulk replays.

    The leader of the stream reads, unless a read names a ``replica``.
    """

    @remote(51, REPEAT, to=ANY)
    async def find_replica(self, stream: str, shard: int | None = None) -> ReplicaPosition:
        """Find a node with a copy that is whole and recent; later reads of it are not older.

        Its ``node`` is the ``replica`` of these reads. Raises NOT_READY if there is none.
        """
        ...

    @remote(52, REPEAT, to=ANY)
    async def replica_position(
        self, stream: str, shard: int | None, replica: str
    ) -> ReplicaPosition:
        """As :meth:`find_replica`, of the copy of one node; NOT_READY if it does not answer."""
        ...

    @remote(9, REPEAT, to=leader_of("stream"))
    async def get_message(
        self, stream: str, seq: int, shard: int | None = None, replica: str = ""
    ) -> StoredMessage:
        """Return one message (STREAM_NOT_FOUND, MESSAGE_NOT_FOUND).

        ``shard`` is required if the stream has several, as in all methods that take sequences;
        INVALID_FIELD if it is missing or unknown.
        """
        ...

    def peek_message(self, stream: str, seq: int) -> Peeked:
        """Return what :meth:`get_message` would, if it is known at once; never raises.

        If only the disk has to be read, that begins: ask again when the read has ended.

        None if anything has to be asked elsewhere, decrypted or refused: then :meth:`get_message`
        has the answer. So it is in another process, and in a cluster.
        """
        ...

    def peek_last(self, stream: str, subject: str) -> Peeked:
        """As :meth:`peek_message`, for the newest message of a literal subject."""
        ...

    @remote(26, REPEAT, to=leader_of("request.stream"))
    async def get_messages(self, request: ManyRequest) -> ManyResult:
        """Return many messages at once."""
        ...

    @remote(10, REPEAT, to=leader_of("request.stream"), wait_ns=lambda request: request.wait_ns)
    async def read_range(self, request: RangeRequest) -> RangeResult:
        """Return messages in order; if there are none, wait up to ``wait_ns`` for the first.

        Messages of several shards are sorted by time; the order within a shard is kept. A cursor of
        another stream or of an earlier incarnation is INVALID_FIELD.
        """
        ...

    @remote(23, REPEAT, to=leader_of("request.stream"))
    async def last_messages(self, request: LastRequest) -> tuple[list[StoredMessage], str | None]:
        """Return a page of the newest messages of subjects, by sequence, and the next token.

        All pages together have each subject at most once. An empty page need not be the last.
        """
        ...

    @remote(24, REPEAT, to=leader_of("stream"))
    async def deleted_ranges(
        self,
        stream: str,
        limit: int,
        token: str,
        shard: int | None = None,
        replica: str = "",
    ) -> DeletedRanges:
        """Return a page of the deleted sequences between the first and the last message.

        A range that continues on the next page is divided there.
        """
        ...

    @remote(25, REPEAT, to=leader_of("stream"))
    async def read_position(self, stream: str, shard: int | None = None) -> ReadPosition:
        """Return the position of the leader; later reads are not older.

        For several shards together, it is the highest sequence.
        """
        ...

    @remote(12, REPEAT, to=leader_of("stream"))
    async def subject_counts(
        self, stream: str, subject: str, limit: int, token: str, replica: str = ""
    ) -> tuple[list[tuple[str, int]], str | None]:
        """Return a page of (subject, messages) of matching subjects, in byte order."""
        ...

    @remote(14, REPEAT, to=leader_of("request.stream"))
    async def replay_plan(self, request: ReplayPlanRequest) -> PinnedReplay:
        """Pin a range and divide it into splits."""
        ...

    @remote(15, REFUSE, to=leader_of("request.stream"))
    async def replay(self, request: ReplayRequest) -> AsyncIterator[Chunk | Pieces]:
        """Check the request (ApiError); return an iterator over the chunks of the encoded body."""
        ...
