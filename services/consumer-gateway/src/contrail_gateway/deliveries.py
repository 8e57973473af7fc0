"""Deliveries as a client sees them: the message, the facts of the delivery, the ack token."""

from collections.abc import Callable

import msgspec

from contrail_common.edge.messages import NO_HEADERS, payload_json
from contrail_common.link import Delivery
from contrail_common.model import Headers
from contrail_common.timeunits import format_time
from contrail_gateway.acks import AckOutcome

SignToken = Callable[[int, int], str]
"""From sequence and attempt to the ack token."""


class DeliveredMessage(msgspec.Struct):
    """A delivered message in JSON; ``num_pending`` counts what comes after it."""

    stream: str
    seq: int
    subject: str
    time: str
    headers: Headers
    consumer_seq: int
    num_delivered: int
    num_pending: int
    ack_token: str
    data: str | msgspec.UnsetType = msgspec.UNSET
    data_base64: bytes | msgspec.UnsetType = msgspec.UNSET


class PackedMessage(msgspec.Struct):
    """A delivered message in msgpack: the same, with the payload as bytes in ``data``."""

    stream: str
    seq: int
    subject: str
    time: str
    headers: Headers
    consumer_seq: int
    num_delivered: int
    num_pending: int
    ack_token: str
    data: bytes


class PulledMessages(msgspec.Struct):
    """The answer to a pull; ``ack_results`` when it brought acknowledgements."""

    messages: list[DeliveredMessage]
    num_pending: int
    ack_results: list[AckOutcome] | msgspec.UnsetType = msgspec.UNSET


class PackedMessages(msgspec.Struct):
    """The same in msgpack."""

    messages: list[PackedMessage]
    num_pending: int
    ack_results: list[AckOutcome] | msgspec.UnsetType = msgspec.UNSET


def delivered_message(
    stream: str, delivery: Delivery, sign: SignToken, *, base64: bool
) -> DeliveredMessage:
    """A delivery in JSON; ``base64`` keeps text payloads from being shown as text."""
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
        sign(stored.seq, delivery.num_delivered),
        text,
        raw,
    )


def packed_message(stream: str, delivery: Delivery, sign: SignToken) -> PackedMessage:
    """A delivery in msgpack."""
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
        sign(stored.seq, delivery.num_delivered),
        stored.payload,
    )
