"""The two sub-protocols: JSON in text frames, msgpack in binary ones."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Final, cast

import msgspec
from msgspec import UNSET
from websockets.frames import Opcode

from contrail_common import errors
from contrail_common.columns.delivery_columns import DeliveryColumns
from contrail_common.errors import ApiError
from contrail_common.model import Headers
from contrail_common.timeunits import format_time
from contrail_edge.http.problems import BatchResult, Problem
from contrail_edge.http.steps import Steps
from contrail_edge.inputs.item_steps import Part
from contrail_edge.inputs.json_body import check_nesting, malformed, mistyped
from contrail_edge.inputs.message_items import Item
from contrail_edge.inputs.messages import NO_HEADERS, payload_json
from contrail_gateway.core.frames import (
    OPERATIONS,
    Batch,
    ClientFrame,
    FrameId,
    JsonFrame,
    PackedFrame,
    PackedPlainPub,
    PackedPub,
    PlainPub,
    Publishing,
    ServerFrame,
)
from contrail_gateway.core.pulled import Listed, Pulled
from contrail_gateway.core.subscription import Subscription
from contrail_gateway.deliveries import DeliveryFields, PackedColumns, SignTokens, in_columns
from contrail_gateway.sockets.large_frames import Form, JsonForm, PackedForm, check_frames

_BLANK: Final = b" \t\r\n"
_PACKED_ARRAYS: Final = frozenset({*range(0x90, 0xA0), 0xDC, 0xDD})
"""First bytes of an array in msgpack."""


class BatchAcks(ServerFrame, tag="acks"):
    """The result of each message of a batch, in order."""

    id: FrameId
    results: list[BatchResult]
    stream: str
    durability: str


class Failed(ServerFrame, tag="error"):
    """The request of a frame failed. ``id`` and ``sid`` are those of the frame."""

    problem: Problem
    id: FrameId | None = None
    sid: str | None = None


class PushedMessage(DeliveryFields, gc=False):
    """A delivered message. ``ack_token`` is absent if the subscription needs no acks.

    ``shard`` is present for a stream with several shards; ``seq`` and ``consumer_seq`` then belong
    to that shard.
    """

    ack_token: str | msgspec.UnsetType = msgspec.UNSET
    data: str | msgspec.UnsetType = msgspec.UNSET
    data_base64: bytes | msgspec.UnsetType = msgspec.UNSET
    shard: int | msgspec.UnsetType = msgspec.UNSET


class PackedPushedMessage(DeliveryFields, gc=False):
    """A delivered message in msgpack, with the payload as bytes."""

    data: bytes
    ack_token: str | msgspec.UnsetType = msgspec.UNSET
    shard: int | msgspec.UnsetType = msgspec.UNSET


class Messages(ServerFrame, tag="msgs"):
    """Messages of a subscription.

    ``cursor`` is where an ordered subscription to a stream with several shards continues after
    these messages.
    """

    sid: str
    messages: list[PushedMessage]
    cursor: str = ""


class PackedMessages(ServerFrame, tag="msgs"):
    """The same in msgpack."""

    sid: str
    messages: list[PackedPushedMessage]
    cursor: str = ""


class ColumnMessages(ServerFrame, tag="msgs"):
    """Messages in columns, for a subscription that requested ``cols``. Only in msgpack."""

    sid: str
    cols: PackedColumns


class InvalidTextError(Exception):
    """A text frame that is not UTF-8."""


@dataclass(frozen=True, slots=True)
class Misunderstood:
    """An object that is not a client frame, with the error to answer."""

    id: FrameId | None
    sid: str | None
    error: ApiError


@dataclass(frozen=True, slots=True)
class LargeBatch:
    """A ``pub_batch`` whose messages are read one by one."""

    id: FrameId | None
    stream: str
    items: Iterator[Steps[Part]]


Received = ClientFrame | Misunderstood | LargeBatch


class _Named(msgspec.Struct):
    """The fields of a frame that name it; they are read even if the rest of it is invalid."""

    op: msgspec.Raw
    id: msgspec.Raw = msgspec.Raw(b"")
    sid: msgspec.Raw = msgspec.Raw(b"")


Token = str | msgspec.UnsetType
ShardNumber = int | msgspec.UnsetType
Fields = tuple[str, int, str, str, Headers, int, int, int]
"""The values of :class:`DeliveryFields`, in order."""
Row = tuple[Fields, bytes, Token, ShardNumber]
"""A message in a frame, with its payload."""
Pack = Callable[[str, Iterable[Row]], Messages | PackedMessages]
"""Makes a frame from a sid and messages."""


class Codec:
    """One sub-protocol."""

    def __init__(
        self, opcode: Opcode, frame: Any, plain: Any, form: Any, large: Form, pack: Pack
    ) -> None:
        self.opcode = opcode
        self.packed = opcode is Opcode.BINARY
        # Messages are decoded as a whole. Only if that fails, each frame is decoded by itself.
        self._one = form.Decoder(frame)
        self._many = form.Decoder(list[frame])
        self._plain = form.Decoder(plain)
        self._parts = form.Decoder(list[msgspec.Raw])
        self._named = form.Decoder(_Named)
        self._text = form.Decoder(str)
        self._frame_id = form.Decoder(FrameId)
        self._large = large
        self._pack = pack
        self.encode: Callable[[msgspec.Struct], bytes] = form.Encoder().encode

    def plain_pubs(
        self, messages: list[bytes]
    ) -> Sequence[PlainPub] | Sequence[PackedPlainPub] | None:
        """The frames of short messages, if all of them are a ``pub`` with the usual fields."""
        try:
            return list(map(self._plain.decode, messages))
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None

    def decode(self, message: bytes, payload_bytes_max: int) -> Iterable[Received | None]:
        """The frames of a message; those that take long to read in steps, None in between.

        Raises InvalidTextError, BATCH_TOO_LARGE for more than FRAMES_MAX frames, and MALFORMED_BODY
        for what holds no objects that name an ``op``; frames in front of it may have come then.
        """
        try:
            # Try the usual case first: everything in order, and small enough for one step.
            many = self._is_array(message)
            if not self._large.is_plain(message):
                return self._guarded(message, self._in_steps(message, payload_bytes_max, many))
            if not self.packed:
                check_nesting(message)
            try:
                if not many:
                    return [cast(ClientFrame, self._one.decode(message))]
                frames = cast(list[ClientFrame], self._many.decode(message))
            except msgspec.ValidationError:
                # All of it must be readable; what is wrong with each frame takes longer to say.
                if not self.packed:
                    message.decode()
                parts = self._parts.decode(message) if many else [message]
                check_frames(len(parts))
                return self._guarded(message, (self._part(bytes(part)) for part in parts))
            check_frames(len(frames))
            return frames
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._unreadable(message, error) from None

    def _guarded(
        self, message: bytes, frames: Iterable[Received | None]
    ) -> Iterator[Received | None]:
        try:
            yield from frames
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._unreadable(message, error) from None

    def _unreadable(self, message: bytes, error: Exception) -> Exception:
        if not self.packed:
            try:
                message.decode()
            except UnicodeDecodeError:
                return InvalidTextError()
        return malformed(error)

    def _is_array(self, message: bytes) -> bool:
        if not self.packed:
            return message.lstrip(_BLANK)[:1] == b"["
        return bool(message) and message[0] in _PACKED_ARRAYS

    def _part(self, part: bytes) -> ClientFrame | Misunderstood:
        try:
            return cast(ClientFrame, self._one.decode(part))
        except msgspec.ValidationError as error:
            refusal = mistyped(error)
        try:
            named = self._named.decode(part)
            operation = self._text.decode(named.op)
        except msgspec.ValidationError:
            raise ApiError(errors.MALFORMED_BODY, "a frame must be an object with an op") from None
        if operation not in OPERATIONS:
            refusal = ApiError(errors.OPERATION_UNKNOWN, f"op {operation[:64]!r}")
        refusal.applied = False
        frame_id, sid = _valid(self._frame_id, named.id), _valid(self._text, named.sid)
        return Misunderstood(frame_id, sid, refusal)

    # Large messages ------------------------------------------------------------------------------
    def _in_steps(
        self, message: bytes, payload_bytes_max: int, many: bool
    ) -> Iterator[Received | None]:
        yield from self._large.look_through(message)
        spans = [(0, len(message))]
        if many:
            spans = yield from self._large.frames(message)
        for start, end in spans:
            part = message[start:end]
            if self._large.is_plain(part):
                yield self._part(part)
            else:
                yield from self._large_frame(part, payload_bytes_max)

    def _large_frame(self, part: bytes, payload_bytes_max: int) -> Iterator[Received | None]:
        """Read a frame that takes long: one that publishes, or has long lists."""
        large = self._large
        frame = self._part((yield from large.skeleton(part)))
        yield None
        if isinstance(frame, Misunderstood):
            yield frame
            return
        try:
            if isinstance(frame, Batch):
                spans = yield from large.items(part)
                items = (
                    large.item(part[start:end], f"/messages/{at}", payload_bytes_max)
                    for at, (start, end) in enumerate(spans)
                )
                yield LargeBatch(frame.id, frame.stream, items)
            elif isinstance(frame, Publishing):
                read = yield from large.pub(part, payload_bytes_max)
                if isinstance(read, ApiError):
                    raise read
                yield _publish(frame.id, *read)
            else:
                yield from large.check_lists(part)
                yield self._part(part)
        except ApiError as error:
            error.applied = False
            # The frame is refused by its id; the other frames of the message are handled.
            yield Misunderstood(frame.id, getattr(frame, "sid", None), error)

    def messages(self, sub: Subscription, pulled: Pulled, sign: SignTokens | None) -> bytes:
        """Return the frame with the messages ``pulled``. Without ``sign`` they have no tokens."""
        if not isinstance(pulled, DeliveryColumns):
            rows = _listed_rows(sub.stream, pulled, sign)
        elif sub.cols:
            cols = in_columns(sub.stream, pulled)
            return self.encode(ColumnMessages(sid=sub.sid, cols=cols))
        else:
            rows = _column_rows(sub.stream, pulled)
        frame = self._pack(sub.sid, rows)
        if sub.order is not None:
            frame.cursor = sub.order.sent_to()
        return self.encode(frame)


def _valid(decoder: Any, raw: msgspec.Raw) -> Any:
    """Return the value of ``raw``, or None if it is missing or has another type."""
    try:
        return decoder.decode(raw) if bytes(raw) else None
    except msgspec.DecodeError:
        return None


def _publish(frame_id: FrameId | None, item: Item, payload: bytes) -> PackedPub:
    return PackedPub(
        subject=item.subject,
        data=payload,
        headers=item.headers,
        msg_id=item.msg_id,
        expected=item.expected,
        ttl=item.ttl,
        id=frame_id,
    )


def _listed_rows(stream: str, pulled: Listed, sign: SignTokens | None) -> Iterable[Row]:
    deliveries = pulled.deliveries
    tokens: Iterable[Token] = repeat(UNSET) if sign is None else sign(deliveries)
    for delivery, token in zip(deliveries, tokens, strict=False):
        stored = delivery.message
        fields = (
            stream,
            stored.seq,
            stored.subject,
            format_time(stored.time_ns),
            stored.headers or NO_HEADERS,
            delivery.consumer_seq,
            delivery.num_delivered,
            delivery.num_pending,
        )
        yield fields, stored.payload, token, UNSET if stored.shard is None else stored.shard


def _column_rows(stream: str, pulled: DeliveryColumns) -> Iterable[Row]:
    count, consumer_seq = len(pulled), pulled.first_consumer_seq
    pending = pulled.num_pending + count - 1
    times = pulled.each_time_ns()
    # Messages that came in one batch were stored at one time.
    texts = {time_ns: format_time(time_ns) for time_ns in set(times)}
    fields = zip(
        repeat(stream),
        pulled.each_seq(),
        pulled.each_subject(),
        map(texts.__getitem__, times),
        [headers or NO_HEADERS for headers in pulled.each_headers()],
        range(consumer_seq, consumer_seq + count),
        repeat(1),
        range(pending, pending - count, -1),
    )
    return zip(fields, pulled.each_payload(), repeat(UNSET), repeat(UNSET))


def _json_messages(sid: str, rows: Iterable[Row]) -> Messages:
    shaped = []
    for fields, payload, token, shard in rows:
        text, raw = payload_json(payload, base64=False)
        # A call with one starred tuple takes half the time of one with further arguments.
        shaped.append(PushedMessage(*(fields + (token, text, raw, shard))))  # noqa: RUF005
    return Messages(sid=sid, messages=shaped)


def _packed_messages(sid: str, rows: Iterable[Row]) -> PackedMessages:
    shaped = [
        PackedPushedMessage(*(fields + (payload, token, shard)))  # noqa: RUF005
        for fields, payload, token, shard in rows
    ]
    return PackedMessages(sid=sid, messages=shaped)


CODECS: Final = {
    "contrail.v1.json": Codec(
        Opcode.TEXT, JsonFrame, PlainPub, msgspec.json, JsonForm(), _json_messages
    ),
    "contrail.v1.msgpack": Codec(
        Opcode.BINARY, PackedFrame, PackedPlainPub, msgspec.msgpack, PackedForm(), _packed_messages
    ),
}
"""The sub-protocols by name."""
