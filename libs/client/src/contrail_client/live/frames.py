"""The frames of `contrail.v1.msgpack`, in both directions. Pure: values to bytes and back."""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from contrail_client.calls import Problem, problem_of
from contrail_client.columns import Columns
from contrail_client.errors import ContrailError, UnexpectedAnswer
from contrail_client.models import Delivered
from contrail_client.times import Duration

SUBPROTOCOL: Final = "contrail.v1.msgpack"
FRAMES_MAX: Final = 10_000
"""The most frames in one WebSocket message: a limit of the server."""
FRAME_BYTES_MAX: Final = 8 << 20
"""The most bytes in one WebSocket message, in both directions."""

CLOSE_FINAL: Final = range(4500, 5000)
"""Close codes after which the client must not reconnect."""

_MALFORMED: Final = frozenset({1002, 1003, 1007, 1008, 1009, 1010})
"""Close codes of RFC 6455 that blame the sender: sending the same again would end the same way."""


class ClientFrame(msgspec.Struct, tag_field="op", omit_defaults=True, kw_only=True):
    """A frame from the client. Fields that have their default are left out."""


class Connect(ClientFrame, tag="connect"):
    """The first frame: the name of the client, and how often it wants heartbeats."""

    client: str
    heartbeat: Duration


class Pub(ClientFrame, tag="pub"):
    """Publish a message; without `id` there is no answer."""

    subject: str
    data: bytes
    id: int | None = None
    headers: dict[str, list[str]] | None = None


class Credit(ClientFrame, tag="credit"):
    """Allow the server to send this many more messages and bytes."""

    sid: str
    msgs: int
    bytes: int


class CreditGiven(msgspec.Struct):
    """The credit with which a subscription begins."""

    msgs: int
    bytes: int


class Sub(ClientFrame, tag="sub"):
    """Subscribe to a consumer, or without `consumer` to a stream."""

    id: int
    sid: str
    stream: str
    credit: CreditGiven
    consumer: str | None = None
    filter_subjects: Sequence[str] = ()
    deliver_policy: str | None = None
    opt_start_seq: int | None = None
    opt_start_time: str | None = None
    ordered: bool = False
    cols: bool = False
    opt_start_cursor: str | None = None


class Unsub(ClientFrame, tag="unsub"):
    """End a subscription; with `drain`, messages that were sent can still be acknowledged."""

    id: int
    sid: str
    drain: bool = False


class Settle(ClientFrame):
    """Acknowledge messages of a subscription.

    With `id` there is an answer, once the acknowledgements are durable.
    """

    sid: str
    id: int | None = None
    seqs: list[int] = []
    ranges: list[tuple[int, int]] = []
    tokens: list[str] = []


class Ack(Settle, tag="ack"):
    """The messages are done."""


class Nak(Settle, tag="nak"):
    """Deliver the messages again, at once or after `delay`."""

    delay: Duration | None = None


class Term(Settle, tag="term"):
    """Never deliver the messages again."""

    reason: str | None = None


class InProgress(Settle, tag="in_progress"):
    """Restart the `ack_wait` of the messages: work on them continues."""


class ServerFrame(msgspec.Struct, tag_field="op", kw_only=True):
    """A frame from the server. Fields that this version does not know are ignored."""


class Info(ServerFrame, tag="info"):
    """The first frame from the server: its name, its node and its limits."""

    server: str
    node: str
    max_payload: int
    heartbeat: str


class Ok(ServerFrame, tag="ok"):
    """The request in frame `id` is done. The other fields are only set for a `Sub`."""

    id: int
    sid: str = ""
    consumer: str = ""
    num_pending: int = 0
    cursor: str = ""


class PubAcked(ServerFrame, tag="ack"):
    """The answer to a `Pub`: the message is stored."""

    id: int
    stream: str
    seq: int
    duplicate: bool = False
    durability: str = ""
    shard: int | None = None


class Refused(ServerFrame, tag="error"):
    """The request in frame `id` was refused; `id` is None if that frame had none."""

    problem: Problem
    id: int | None = None

    @property
    def error(self) -> ContrailError:
        """The refusal as an exception."""
        return problem_of(self.problem)


class Msgs(ServerFrame, tag="msgs"):
    """Messages of a subscription, in order.

    They are in `cols` if the client asked for columns and the server supports them, otherwise in
    `messages`.
    """

    sid: str
    messages: list[Delivered] = []
    cols: Columns | None = None
    cursor: str = ""


class Beat(ServerFrame, tag="hb"):
    """The heartbeat of a quiet subscription, with its progress."""

    sid: str
    last_consumer_seq: int
    last_stream_seq: int


class Missing(ServerFrame, tag="gap"):
    """The stream no longer has `first` to `last`; the subscription continues after `last`."""

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
    """The server is about to stop, and closes the socket within `grace`."""

    grace: str


class Pong(ServerFrame, tag="pong"):
    """The answer to a `ping`."""


Received = Info | Ok | PubAcked | Refused | Msgs | Beat | Missing | Gone | Drain | Pong
OfSubscription = Msgs | Beat | Missing | Gone
Answering = Ok | PubAcked | Refused

_decoder: Final = msgspec.msgpack.Decoder(list[Received])
_encoder: Final = msgspec.msgpack.Encoder()
_FIXED_ARRAYS: Final = range(0x90, 0xA0)
_LONG_ARRAYS: Final = (0xDC, 0xDD)
_ARRAY_OF_ONE: Final = b"\x91"


def encode(frames: Sequence[ClientFrame]) -> bytes:
    """One WebSocket message that holds all of `frames`."""
    return _encoder.encode(frames)


def decode(message: bytes) -> list[Received]:
    """The frames of a WebSocket message: one, or an array of them.

    Raises UnexpectedAnswer when it holds anything else.
    """
    if message and message[0] not in _FIXED_ARRAYS and message[0] not in _LONG_ARRAYS:
        # A message is one frame or an array of them. With one decoder for both, make it an array.
        message = _ARRAY_OF_ONE + message
    try:
        return _decoder.decode(message)
    except msgspec.DecodeError as error:
        raise UnexpectedAnswer(f"a frame sent by the server cannot be read: {error}") from error


def may_return(code: int | None) -> bool:
    """Whether to reconnect after a close with `code`; None means that the socket broke."""
    return code is None or (code not in CLOSE_FINAL and code not in _MALFORMED)


def settle_frame(kind: str, option: Any, sid: str, **what: Any) -> Settle:
    """The frame of one kind of acknowledgement.

    `option` is the delay of a `nak` or the reason of a `term`.
    """
    match kind:
        case "nak":
            return Nak(sid=sid, delay=option, **what)
        case "term":
            return Term(sid=sid, reason=option, **what)
        case "in_progress":
            return InProgress(sid=sid, **what)
    return Ack(sid=sid, **what)
