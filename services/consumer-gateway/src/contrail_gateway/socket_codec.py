"""The two sub-protocols: JSON in text frames, msgpack in binary ones."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Final, cast

import msgspec
from msgspec import UNSET
from websockets.frames import Opcode

from contrail_common import errors
from contrail_common.delivery_columns import DeliveryColumns
from contrail_common.edge.json_body import check_nesting, malformed, mistyped
from contrail_common.edge.messages import NO_HEADERS, payload_json
from contrail_common.edge.problems import Problem
from contrail_common.errors import ApiError
from contrail_common.model import Headers
from contrail_common.timeunits import format_time
from contrail_gateway.core.frames import (
    OPERATIONS,
    ClientFrame,
    FrameId,
    JsonFrame,
    PackedFrame,
    ServerFrame,
)
from contrail_gateway.core.lots import Listed, Lot
from contrail_gateway.core.subscription import Subscription
from contrail_gateway.deliveries import SignToken

_BLANK: Final = b" \t\r\n"
_PACKED_ARRAYS: Final = frozenset({*range(0x90, 0xA0), 0xDC, 0xDD})
"""How an array begins in msgpack."""


class BatchResult(msgspec.Struct, gc=False):
    """Where a message of a batch was stored, or why it was not (``problem``).

    ``shard`` is that of a stream that has several.
    """

    seq: int | msgspec.UnsetType = msgspec.UNSET
    duplicate: bool | msgspec.UnsetType = msgspec.UNSET
    problem: Problem | msgspec.UnsetType = msgspec.UNSET
    shard: int | msgspec.UnsetType = msgspec.UNSET


class BatchAcks(ServerFrame, tag="acks"):
    """The result of each message of a batch, in order."""

    id: FrameId
    results: list[BatchResult]
    stream: str
    durability: str


class Failed(ServerFrame, tag="error"):
    """Why what a frame asked for was not done; ``id`` and ``sid`` are the frame's."""

    problem: Problem
    id: FrameId | None = None
    sid: str | None = None


class PushedMessage(msgspec.Struct, gc=False):
    """A delivered message in JSON; without a token where nothing is acknowledged.

    ``shard`` is that of a stream that has several; ``seq`` and ``consumer_seq`` are of it then.
    """

    stream: str
    seq: int
    subject: str
    time: str
    headers: Headers
    consumer_seq: int
    num_delivered: int
    num_pending: int
    ack_token: str | msgspec.UnsetType = msgspec.UNSET
    data: str | msgspec.UnsetType = msgspec.UNSET
    data_base64: bytes | msgspec.UnsetType = msgspec.UNSET
    shard: int | msgspec.UnsetType = msgspec.UNSET


class PackedPushedMessage(msgspec.Struct, gc=False):
    """A delivered message in msgpack, with the payload as bytes."""

    stream: str
    seq: int
    subject: str
    time: str
    headers: Headers
    consumer_seq: int
    num_delivered: int
    num_pending: int
    data: bytes
    ack_token: str | msgspec.UnsetType = msgspec.UNSET
    shard: int | msgspec.UnsetType = msgspec.UNSET


class Messages(ServerFrame, tag="msgs"):
    """Messages of a subscription.

    ``cursor`` is what an ordered one goes on from behind them, where there are several shards.
    """

    sid: str
    messages: list[PushedMessage]
    cursor: str = ""


class PackedMessages(ServerFrame, tag="msgs"):
    """The same in msgpack."""

    sid: str
    messages: list[PackedPushedMessage]
    cursor: str = ""


class PushedHeaders(msgspec.Struct, gc=False):
    """Headers in columns: message i has the entries ``entry_offsets[i]`` to ``[i + 1]``.

    Entry e has the name ``names[name_offsets[e]:name_offsets[e + 1]]`` and the values
    ``value_offsets[e]`` to ``[e + 1]``; value v is ``texts[text_offsets[v]:text_offsets[v + 1]]``.
    Names and texts are UTF-8.
    """

    entry_offsets: bytes
    name_offsets: bytes
    value_offsets: bytes
    text_offsets: bytes
    names: bytes
    texts: bytes


class PushedColumns(msgspec.Struct, gc=False):
    """The messages of a frame in columns; numbers are little-endian, offsets and index are u32.

    ``seqs`` and ``times_ns`` (nanoseconds since 1970) are i64, one for each of ``count`` messages.
    Message i has the subject ``subjects[subject_index[i]]``, the payload
    ``data[offsets[i]:offsets[i + 1]]`` and the consumer sequence ``first_consumer_seq + i``; it is
    its first delivery, and ``num_pending`` is behind the last. Without ``headers`` none has any.
    """

    stream: str
    count: int
    first_consumer_seq: int
    num_pending: int
    seqs: bytes
    times_ns: bytes
    subjects: list[str]
    subject_index: bytes
    offsets: bytes
    data: bytes
    headers: PushedHeaders | msgspec.UnsetType = msgspec.UNSET


class ColumnMessages(ServerFrame, tag="msgs"):
    """The same in columns, for a subscription that asked for ``cols``; in msgpack alone."""

    sid: str
    cols: PushedColumns


class InvalidTextError(Exception):
    """A text frame that is not UTF-8."""


@dataclass(frozen=True, slots=True)
class Misunderstood:
    """An object that is no frame of a client, and why."""

    id: FrameId | None
    sid: str | None
    error: ApiError


Token = str | msgspec.UnsetType
ShardNumber = int | msgspec.UnsetType
Row = tuple[int, str, str, Headers, int, int, int, bytes, Token, ShardNumber]
"""What stands of a message in a frame, as :class:`PackedPushedMessage` behind its stream."""
Pack = Callable[[str, str, Iterable[Row]], Messages | PackedMessages]
"""From sid, stream and messages to the frame that carries them."""


class Codec:
    """One sub-protocol."""

    def __init__(self, opcode: Opcode, frame: Any, form: Any, pack: Pack) -> None:
        self.opcode = opcode
        self.packed = opcode is Opcode.BINARY
        self._one = form.Decoder(frame)
        self._many = form.Decoder(list[frame])
        self._parts = form.Decoder(list[msgspec.Raw])
        self._untyped = form.Decoder()
        self._pack = pack
        self.encode: Callable[[msgspec.Struct], bytes] = form.Encoder().encode

    def decode(self, message: bytes) -> Sequence[ClientFrame | Misunderstood]:
        """The frames of a message.

        Raises InvalidTextError, and MALFORMED_BODY for what holds no objects that name an ``op``.
        """
        try:
            if self.opcode is Opcode.TEXT:
                check_nesting(message)
            many = self._is_array(message)
            try:
                if many:
                    return cast(list[ClientFrame], self._many.decode(message))
                return [cast(ClientFrame, self._one.decode(message))]
            except msgspec.ValidationError:
                self._untyped.decode(message)  # the rest must be readable at all
                parts = self._parts.decode(message) if many else [message]
            return [self._part(bytes(part)) for part in parts]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if self.opcode is Opcode.TEXT:
                _check_utf8(message)
            raise malformed(error) from None

    def _is_array(self, message: bytes) -> bool:
        if self.opcode is Opcode.TEXT:
            return message.lstrip(_BLANK)[:1] == b"["
        return bool(message) and message[0] in _PACKED_ARRAYS

    def _part(self, part: bytes) -> ClientFrame | Misunderstood:
        try:
            return cast(ClientFrame, self._one.decode(part))
        except msgspec.ValidationError as error:
            value = self._untyped.decode(part)
            operation = value.get("op") if isinstance(value, dict) else None
            if not isinstance(operation, str):
                raise ApiError(errors.MALFORMED_BODY, "a frame is an object with an op") from None
            refusal = mistyped(error)
            if operation not in OPERATIONS:
                refusal = ApiError(errors.OPERATION_UNKNOWN, f"op {operation[:64]!r}")
            refusal.applied = False
            frame_id, sid = value.get("id"), value.get("sid")
            return Misunderstood(
                frame_id if _is_id(frame_id) else None,
                sid if isinstance(sid, str) else None,
                refusal,
            )

    def messages(self, sub: Subscription, lot: Lot, sign: SignToken | None) -> bytes:
        """The frame that carries ``lot``; ``sign`` None gives its messages no tokens."""
        if not isinstance(lot, DeliveryColumns):
            rows = _listed_rows(lot, sign)
        elif sub.cols:
            return self.encode(_in_columns(sub, lot))
        else:
            rows = _column_rows(lot)
        frame = self._pack(sub.sid, sub.stream, rows)
        if sub.order is not None:
            frame.cursor = sub.order.sent_to()
        return self.encode(frame)


def _is_id(value: object) -> bool:
    try:
        msgspec.convert(value, FrameId)
    except msgspec.ValidationError:
        return False
    return True


def _check_utf8(message: bytes) -> None:
    try:
        message.decode()
    except UnicodeDecodeError as error:
        raise InvalidTextError from error


def _listed_rows(lot: Listed, sign: SignToken | None) -> Iterable[Row]:
    for delivery in lot.deliveries:
        stored = delivery.message
        yield (
            stored.seq,
            stored.subject,
            format_time(stored.time_ns),
            stored.headers or NO_HEADERS,
            delivery.consumer_seq,
            delivery.num_delivered,
            delivery.num_pending,
            stored.payload,
            UNSET if sign is None else sign(delivery),
            UNSET if stored.shard is None else stored.shard,
        )


def _column_rows(lot: DeliveryColumns) -> Iterable[Row]:
    count, consumer_seq = len(lot), lot.first_consumer_seq
    pending = lot.num_pending + count - 1
    times = lot.each_time_ns()
    # Messages that came in one batch were stored at one time.
    texts = {time_ns: format_time(time_ns) for time_ns in set(times)}
    return zip(
        lot.each_seq(),
        lot.each_subject(),
        map(texts.__getitem__, times),
        [headers or NO_HEADERS for headers in lot.each_headers()],
        range(consumer_seq, consumer_seq + count),
        repeat(1),
        range(pending, pending - count, -1),
        lot.each_payload(),
        repeat(UNSET),
        repeat(UNSET),
    )


def _in_columns(sub: Subscription, lot: DeliveryColumns) -> ServerFrame:
    columns, headers = lot.columns, None
    if columns.headers is not None:
        headers = columns.headers.nested()
    return ColumnMessages(
        sid=sub.sid,
        cols=PushedColumns(
            sub.stream,
            len(lot),
            lot.first_consumer_seq,
            lot.num_pending,
            lot.seqs,
            lot.times_ns,
            lot.subjects,
            lot.subject_index,
            columns.offsets,
            columns.payload,
            UNSET
            if headers is None
            else PushedHeaders(
                headers.entry_offsets,
                headers.name_offsets,
                headers.value_offsets,
                headers.text_offsets,
                headers.names,
                headers.texts,
            ),
        ),
    )


def _json_messages(sid: str, stream: str, rows: Iterable[Row]) -> Messages:
    shaped = []
    for seq, subject, at, headers, consumer_seq, delivered, pending, payload, token, shard in rows:
        text, raw = payload_json(payload, base64=False)
        shaped.append(
            PushedMessage(
                stream,
                seq,
                subject,
                at,
                headers,
                consumer_seq,
                delivered,
                pending,
                token,
                text,
                raw,
                shard,
            )
        )
    return Messages(sid=sid, messages=shaped)


def _packed_messages(sid: str, stream: str, rows: Iterable[Row]) -> PackedMessages:
    shaped = [PackedPushedMessage(stream, *row) for row in rows]
    return PackedMessages(sid=sid, messages=shaped)


CODECS: Final = {
    "contrail.v1.json": Codec(Opcode.TEXT, JsonFrame, msgspec.json, _json_messages),
    "contrail.v1.msgpack": Codec(Opcode.BINARY, PackedFrame, msgspec.msgpack, _packed_messages),
}
"""The sub-protocols by name."""
