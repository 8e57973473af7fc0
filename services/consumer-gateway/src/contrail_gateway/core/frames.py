"""The frames of a socket, as both sub-protocols carry them: ``op`` names the kind."""

from typing import Annotated, Final, Literal

import msgspec

from contrail_common.edge.message_items import MessageItem, PackedMessageItem
from contrail_common.partition import SHARDS_MAX
from contrail_common.timeunits import INT64_MAX

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
    """Who connects. ``client`` is a name for the log, ``heartbeat`` the longest silence wanted."""

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


class PubBatch(msgspec.Struct, tag_field="op", tag="pub_batch", forbid_unknown_fields=True):
    """Publish messages to one stream, each for itself."""

    stream: Text
    messages: list[MessageItem]
    id: FrameId | None = None


class PackedPubBatch(msgspec.Struct, tag_field="op", tag="pub_batch", forbid_unknown_fields=True):
    """The same in msgpack."""

    stream: Text
    messages: list[PackedMessageItem]
    id: FrameId | None = None


class CreditGiven(msgspec.Struct, forbid_unknown_fields=True):
    """How much may be sent; without ``msgs`` or ``bytes`` there is no limit of that kind."""

    msgs: Count | None = None
    bytes: Count | None = None


class Sub(msgspec.Struct, tag_field="op", tag="sub", forbid_unknown_fields=True):
    """Subscribe to a consumer by name, or to a stream through one of the socket's own.

    ``ordered`` subscriptions acknowledge nothing and come back by themselves where they were; over
    msgpack they may ask for ``cols``. Without ``credit`` nothing is sent until some is added. Where
    a stream has several shards ``opt_start_cursor`` stands for a sequence: the ``cursor`` of the
    last messages that came.
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
    """Allow that much more to be sent."""

    sid: Sid
    msgs: Count = 0
    bytes: Count = 0
    id: FrameId | None = None


class Settle(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Acknowledge what this socket was sent, or by token what anyone was.

    ``ranges`` are closed. Sequences that are not held, and ranges that hold none that is, are named
    in an ``error``; the others are settled all the same. With an ``id`` the answer comes once the
    acknowledgement is durable. Of a stream with several shards both are given by shard.
    """

    sid: Sid
    seqs: list[Sequence] | dict[Shard, list[Sequence]] = []
    ranges: list[Range] | dict[Shard, list[Range]] = []
    tokens: list[Text] = []
    id: FrameId | None = None


class Ack(Settle, tag_field="op", tag="ack"):
    """The messages are done."""


class Nak(Settle, tag_field="op", tag="nak"):
    """The messages are to come again, after ``delay``."""

    delay: DurationText | None = None


class Term(Settle, tag_field="op", tag="term"):
    """The messages are never to come again."""

    reason: Text | None = None


class InProgress(Settle, tag_field="op", tag="in_progress"):
    """The messages are still being worked on."""


class Unsub(msgspec.Struct, tag_field="op", tag="unsub", forbid_unknown_fields=True):
    """End a subscription; with ``drain`` what was sent can still be acknowledged."""

    sid: Sid
    drain: bool = False
    id: FrameId | None = None


class Ping(msgspec.Struct, tag_field="op", tag="ping", forbid_unknown_fields=True):
    """Ask for a ``pong``."""

    id: FrameId | None = None


class Watch(msgspec.Struct, tag_field="op", tag="watch"):
    """Watch a bucket; refused in this version."""

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
    """The first frame of all: who serves, and under which terms."""

    server: str
    node: str
    max_payload: int
    heartbeat: str


class Ok(ServerFrame, tag="ok"):
    """What the frame ``id`` asked for is done."""

    id: FrameId


class Subscribed(ServerFrame, tag="ok"):
    """The subscription stands; messages follow as credit allows.

    ``cursor`` is where an ordered one begins, where there are several shards.
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
    """A message is stored; ``duplicate`` when its id had been stored before, under ``seq``.

    ``shard`` is that of a stream that has several.
    """

    id: FrameId
    stream: str
    seq: int
    duplicate: bool
    durability: str
    shard: int | None = None


class Beat(ServerFrame, tag="hb"):
    """Nothing was sent for a while; how far the subscription has come.

    ``shards`` has the consumer sequence and the stream sequence in each shard, where there are
    several; the two numbers are their sum and the highest of them then.
    """

    sid: str
    last_consumer_seq: int
    last_stream_seq: int
    shards: dict[int, tuple[int, int]] | None = None


class Gap(ServerFrame, tag="gap"):
    """The subscription goes on behind ``last``; what lay from ``first`` on is no longer there."""

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
    """The server is about to stop; the socket is closed within ``grace``."""

    grace: str
