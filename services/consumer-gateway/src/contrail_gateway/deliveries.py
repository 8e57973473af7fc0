"""Deliveries as a client sees them: the message, the delivery's counters, the ack token."""

from collections.abc import Callable, Sequence
from itertools import groupby

import msgspec

from contrail_common.ack_tokens import AckTokens
from contrail_common.columns.delivery_columns import DeliveryColumns
from contrail_common.timeunits import format_time
from contrail_edge.inputs.messages import NO_HEADERS, MessageFields, payload_json
from contrail_gateway.acks import AckOutcome
from contrail_link.contract.consume import Delivery, PullResult

SignTokens = Callable[[Sequence[Delivery]], list[str]]
"""Returns the ack tokens of deliveries, in order."""


def signer(tokens: AckTokens, stream: str, consumer: str, result: PullResult) -> SignTokens:
    """Return a function that signs the deliveries of ``result``, or a part of them."""

    def sign(deliveries: Sequence[Delivery]) -> list[str]:
        made: list[str] = []
        for address, some in groupby(deliveries, result.address):
            seqs = [delivery.message.seq for delivery in some]
            made += tokens.sign_each(stream, consumer, address, seqs)
        return made

    return sign


class DeliveryFields(MessageFields):
    """The fields that delivered messages have in every format, in HTTP and on WebSockets."""

    consumer_seq: int
    """Sequence of this delivery."""
    num_delivered: int
    """Number of deliveries of the message, including this one."""
    num_pending: int
    """Number of matching messages after this one that are not delivered yet."""


class DeliveredMessage(DeliveryFields):
    """A delivered message. ``num_pending`` counts the messages after it.

    ``shard`` is present for a stream with several shards; ``seq`` and ``consumer_seq`` then belong
    to that shard.
    """

    ack_token: str
    """Text that identifies the delivery when it is acknowledged."""
    data: str | msgspec.UnsetType = msgspec.UNSET
    """Payload, if it is UTF-8 text."""
    data_base64: bytes | msgspec.UnsetType = msgspec.UNSET
    """Payload in base64, if it is not UTF-8 text or base64 was requested."""
    shard: int | msgspec.UnsetType = msgspec.UNSET
    """Shard of the message, if the stream has several."""


class PackedMessage(DeliveryFields):
    """A delivered message in msgpack: the same, with the payload as bytes in ``data``."""

    ack_token: str
    data: bytes
    shard: int | msgspec.UnsetType = msgspec.UNSET


class PackedHeaders(msgspec.Struct, gc=False):
    """Headers in columns: message i has the entries ``entry_offsets[i]`` to ``[i + 1]``.

    Entry e has the name ``names[name_offsets[e]:name_offsets[e + 1]]`` and the values
    ``value_offsets[e]`` to ``[e + 1]``. Value v is ``texts[text_offsets[v]:text_offsets[v + 1]]``.
    Names and texts are UTF-8.
    """

    entry_offsets: bytes
    name_offsets: bytes
    value_offsets: bytes
    text_offsets: bytes
    names: bytes
    texts: bytes


class PackedColumns(msgspec.Struct, gc=False):
    """Delivered messages in columns. Numbers are little-endian; offsets and indexes are u32.

    ``seqs`` and ``times_ns`` (nanoseconds since 1970) are i64, one for each of ``count`` messages.
    Message i has the subject ``subjects[subject_index[i]]``, the payload
    ``data[offsets[i]:offsets[i + 1]]`` and the consumer sequence ``first_consumer_seq + i``. Every
    message is delivered for the first time. ``num_pending`` messages follow the last. Without
    ``headers`` no message has any.
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
    headers: PackedHeaders | msgspec.UnsetType = msgspec.UNSET


class PulledMessages(msgspec.Struct):
    """The answer to a pull. ``ack_results`` is present if the request had ``acks``."""

    messages: list[DeliveredMessage]
    """The messages, in order of delivery."""
    num_pending: int
    """Number of matching messages that are not delivered yet."""
    ack_results: list[AckOutcome] | msgspec.UnsetType = msgspec.UNSET
    """Result of each acknowledgement of the request, in order."""


class PackedMessages(msgspec.Struct):
    """The same in msgpack."""

    messages: list[PackedMessage]
    num_pending: int
    ack_results: list[AckOutcome] | msgspec.UnsetType = msgspec.UNSET


class PulledColumns(msgspec.Struct):
    """The answer to a pull in columns (at least one message), with one token for all of them."""

    cols: PackedColumns
    num_pending: int
    ack_token: str
    ack_results: list[AckOutcome] | msgspec.UnsetType = msgspec.UNSET


def in_columns(stream: str, columns: DeliveryColumns) -> PackedColumns:
    """Return deliveries in columns for msgpack."""
    held = columns.columns
    headers = None if held.headers is None else held.headers.nested()
    return PackedColumns(
        stream,
        len(columns),
        columns.first_consumer_seq,
        columns.num_pending,
        columns.seqs,
        columns.times_ns,
        columns.subjects,
        columns.subject_index,
        held.offsets,
        held.payload,
        msgspec.UNSET if headers is None else PackedHeaders(*msgspec.structs.astuple(headers)),
    )


def delivered_message(
    stream: str, delivery: Delivery, token: str, *, base64: bool
) -> DeliveredMessage:
    """Return a delivery for JSON; with ``base64``, text payloads are encoded too."""
    stored = delivery.message
    text, raw = payload_json(stored.payload, base64=base64)
    return DeliveredMessage(
        stream,
        stored.seq,
        stored.subject,
        format_time(stored.time_ns),
        stored.headers or NO_HEADERS,
        delivery.consumer_seq,
        delivery.num_delivered,
        delivery.num_pending,
        token,
        text,
        raw,
        msgspec.UNSET if stored.shard is None else stored.shard,
    )


def packed_message(stream: str, delivery: Delivery, token: str) -> PackedMessage:
    """Return a delivery for msgpack."""
    stored = delivery.message
    return PackedMessage(
        stream,
        stored.seq,
        stored.subject,
        format_time(stored.time_ns),
        stored.headers or NO_HEADERS,
        delivery.consumer_seq,
        delivery.num_delivered,
        delivery.num_pending,
        token,
        stored.payload,
        msgspec.UNSET if stored.shard is None else stored.shard,
    )
