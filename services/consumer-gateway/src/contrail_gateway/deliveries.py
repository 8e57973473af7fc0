"""Deliveries as a client sees them: the message, the delivery's counters, the ack token."""

from collections.abc import Callable, Sequence
from itertools import groupby

import msgspec

from contrail_common.ack_tokens import AckTokens
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
