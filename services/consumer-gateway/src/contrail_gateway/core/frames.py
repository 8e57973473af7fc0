"""The frames of a socket, as both sub-protocols carry them: ``op`` names the kind."""

from typing import Annotated, Final, Literal

import msgspec

from contrail_common.partition import SHARDS_MAX
from contrail_common.timeunits import INT64_MAX
from contrail_edge.inputs.message_items import MessageItem, PackedMessageItem

SID_CHARS_MAX: Final = 256
TEXT_CHARS_MAX: Final = 4096

FrameId = str | Annotated[int, msgspec.Meta(ge=-INT64_MAX - 1, le=INT64_MAX)]
"""What a client names a frame by; it comes back in the one answer."""

Sid = Annotated[str, msgspec.Meta(min_length=1, max_length=SID_CHARS_MAX)]
Sequence = Annotated[int, msgspec.Meta(ge=0, le=INT64_MAX)]
Range = tuple[Sequence, Sequence]
Shard = Annotated[int, msgspec.Meta(ge=0, lt=SHARDS_MAX)]
Count = Annotated[int, msgspec.Meta(ge=0, le=INT64_MAX)]
Text = Annotated[str, msgspec.Meta(max_length=TEXT_CHARS_MAX)]
DurationText = str | int


# From the client ----------------------------------------------------------------------------------
class Connect(msgspec.Struct, tag_field="op", tag="connect", forbid_unknown_fields=True):
    """Start the session. ``client`` is a name for logs, ``heartbeat`` the heartbeat interval."""

    id: FrameId | None = None
    token: Text | None = None
    client: Text | None = None
    heartbeat: DurationText | None = None


class Pub(
    MessageItem, tag_field="op", tag="pub", kw_only=True, forbid_unknown_fields=True, gc=False
):
    """Publish a message to the stream that captures its subject."""

    id: FrameId | None = None


class PackedPub(
    PackedMessageItem, tag_field="op", tag="pub", kw_only=True, forbid_unknown_fields=True, gc=False
):
    """The same in msgpack."""

    id: FrameId | None = None


class PlainPub(
    msgspec.Struct, tag_field="op", tag="pub", kw_only=True, forbid_unknown_fields=True, gc=False
):
    """A ``pub`` with no other fields than most have; it is read faster than one that may."""

    subject: str
    data: str
    msg_id: str | None = None
    id: FrameId | None = None


class PackedPlainPub(
    msgspec.Struct, tag_field="op", tag="pub", kw_only=True, forbid_unknown_fields=True, gc=False
):
    """The same in msgpack."""

    subject: str
    data: bytes
    msg_id: str | None = None
    id: FrameId | None = None


class PubBatch(msgspec.Struct, tag_field="op", tag="pub_batch", forbid_unknown_fields=True):
    """Publish messages to one stream. Each is stored or refused independently."""

    stream: Text
    messages: list[MessageItem]
    id: FrameId | None = None


class PackedPubBatch(msgspec.Struct, tag_field="op", tag="pub_batch", forbid_unknown_fields=True):
    """The same in msgpack."""

    stream: Text
    messages: list[PackedMessageItem]
    id: FrameId | None = None


class CreditGiven(msgspec.Struct, forbid_unknown_fields=True):
    """How much the server may send. Without ``msgs`` or ``bytes``, that kind is unlimited."""

    msgs: Count | None = None
    bytes: Count | None = None


class Sub(msgspec.Struct, tag_field="op", tag="sub", forbid_unknown_fields=True):
    """Subscribe to a named consumer, or to a stream with a consumer that belongs to the socket.

    An ``ordered`` subscription needs no acknowledgements, and over msgpack may request ``cols``.
    Without ``credit`` nothing is sent until credit is added. For a stream with several shards,
    ``opt_start_cursor`` replaces the start sequence; it takes the ``cursor`` of the last messages
    received.
    """

    sid: Sid
    stream: Text
    consumer: Text | None = None
    filter_subjects: list[Text] | None = None
    deliver_policy: (
        Literal["all", "last", "new", "by_start_sequence", "by_start_time", "last_per_subject"]
        | None
    ) = None
    opt_start_seq: Sequence | None = None
    opt_start_time: Text | None = None
    replay_policy: Literal["instant", "original"] | None = None
    ordered: bool = False
    cols: bool = False
    credit: CreditGiven | None = None
    id: FrameId | None = None
    opt_start_cursor: Text | None = None
    num_replicas: Count | None = None
    mem_storage: bool | None = None


class AddCredit(msgspec.Struct, tag_field="op", tag="credit", forbid_unknown_fields=True):
    """Add credit: allow the server to send this much more."""

    sid: Sid
    msgs: Count = 0
    bytes: Count = 0
    id: FrameId | None = None


class Settle(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Settle messages delivered on this socket, or by token messages delivered anywhere.

    ``ranges`` include both ends. An ``error`` names sequences, and ranges without any sequence,
    that the socket does not hold; all others are settled. With an ``id`` the answer comes once
    this is durable. For a stream with several shards, sequences and ranges are given by shard.
    """

    sid: Sid
    seqs: list[Sequence] | dict[Shard, list[Sequence]] = []
    ranges: list[Range] | dict[Shard, list[Range]] = []
    tokens: list[Text] = []
    id: FrameId | None = None


class Ack(Settle, tag_field="op", tag="ack"):
    """The messages were processed."""


class Nak(Settle, tag_field="op", tag="nak"):
    """The messages should be redelivered, after ``delay``."""

    delay: DurationText | None = None


class Term(Settle, tag_field="op", tag="term"):
    """The messages should never be redelivered."""

    reason: Text | None = None


class InProgress(Settle, tag_field="op", tag="in_progress"):
    """The messages are still being processed; their ack wait starts again."""


class Unsub(msgspec.Struct, tag_field="op", tag="unsub", forbid_unknown_fields=True):
    """End a subscription. With ``drain``, delivered messages can still be acknowledged."""

    sid: Sid
    drain: bool = False
    id: FrameId | None = None


class Ping(msgspec.Struct, tag_field="op", tag="ping", forbid_unknown_fields=True):
    """Ask for a ``pong``."""

    id: FrameId | None = None


class Watch(msgspec.Struct, tag_field="op", tag="watch"):
    """Watch a bucket. Not available in this version."""

    id: FrameId | None = None


Settling = Ack | Nak | Term | InProgress
Publishing = Pub | PackedPub
Batch = PubBatch | PackedPubBatch
JsonFrame = (
    Connect
    | Pub
    | PubBatch
    | Sub
    | AddCredit
    | Ack
    | Nak
    | Term
    | InProgress
    | Unsub
    | Ping
    | Watch
)
PackedFrame = (
    Connect
    | PackedPub
    | PackedPubBatch
    | Sub
    | AddCredit
    | Ack
    | Nak
    | Term
    | InProgress
    | Unsub
    | Ping
    | Watch
)
ClientFrame = JsonFrame | PackedFrame
OPERATIONS: Final = frozenset(
    {
        "connect", "pub", "pub_batch", "sub", "credit", "ack", "nak", "term", "in_progress",
        "unsub", "ping", "watch",
    }
)  # fmt: skip


# From the server ----------------------------------------------------------------------------------
class ServerFrame(msgspec.Struct, tag_field="op", kw_only=True, omit_defaults=True, gc=False):
    """What a server sends; a field at its default is left out."""


class Info(ServerFrame, tag="info"):
    """The first frame on a socket: the server and its limits."""

    server: str
    node: str
    max_payload: int
    heartbeat: str


class Ok(ServerFrame, tag="ok"):
    """The request with this ``id`` succeeded."""

    id: FrameId


class Subscribed(ServerFrame, tag="ok"):
    """The subscription was created. Messages follow as credit allows.

    ``cursor`` is the start of an ordered subscription to a stream with several shards.
    """

    id: FrameId
    sid: str
    consumer: str
    num_pending: int
    cursor: str = ""


class Pong(ServerFrame, tag="pong"):
    """The answer to a ``ping``."""

    id: FrameId | None = None


class PubAck(ServerFrame, tag="ack"):
    """The message was stored.

    ``duplicate`` is true if a message with the same id was already stored, under this ``seq``.
    ``shard`` is present for a stream with several shards.
    """

    id: FrameId
    stream: str
    seq: int
    duplicate: bool
    durability: str
    shard: int | None = None


class Beat(ServerFrame, tag="hb"):
    """Nothing was sent for the heartbeat interval. Gives the position of the subscription.

    For a stream with several shards, ``shards`` has the consumer sequence and the stream sequence
    of each shard; ``last_consumer_seq`` is then their sum and ``last_stream_seq`` the highest.
    """

    sid: str
    last_consumer_seq: int
    last_stream_seq: int
    shards: dict[int, tuple[int, int]] | None = None


class Gap(ServerFrame, tag="gap"):
    """Messages ``first`` to ``last`` no longer exist. The subscription continues after them."""

    sid: str
    first: int
    last: int
    cause: str
    shard: int | None = None


class Gone(ServerFrame, tag="gone"):
    """The subscription has ended."""

    sid: str
    reason: str


class Drain(ServerFrame, tag="drain"):
    """The server is shutting down and closes the socket within ``grace``."""

    grace: str
