"""What the OpenAPI document says of delivery over HTTP."""

from typing import Any, Final

from contrail_common import errors
from contrail_common.edge.document import BODY_ERRORS
from contrail_common.edge.negotiation import JSON_TYPE
from contrail_common.edge.routing import Answered, Body, Operation
from contrail_gateway.acks import AckResults
from contrail_gateway.core.pull_rules import AckBody, PullBody
from contrail_gateway.deliveries import PulledMessages
from contrail_gateway.pull import PullQuery

_TAG: Final = "delivery"

_DELIVERED: Final[dict[str, Any]] = {
    "stream": "ORDERS",
    "seq": 42,
    "subject": "orders.eu.created",
    "time": "2026-01-31T08:00:00.500000000Z",
    "headers": {},
    "consumer_seq": 7,
    "num_delivered": 1,
    "num_pending": 12,
    "ack_token": "BwAAAAMAAAAAAAAATQAAAAFkZWZhdWx0AAAAAAAAACoAAAABCcTbqFPUrbB4EIhi4tOBvg",
    "data": '{"id":1017}',
}
NEXT: Final = Operation(
    operation_id="pull",
    tag=_TAG,
    summary="Pull messages",
    description="A long poll of at most 60s, by default 5s, that answers as soon as there is "
    "something. `acks` of an earlier batch are applied first and answered in `ack_results`; then "
    "an empty poll is 200 without messages. With `Accept: application/vnd.msgpack` payloads are "
    "bytes in `data`. With `Accept: application/x-ndjson` each line is a message, "
    '`{"hb":true,"last_consumer_seq":7,"last_stream_seq":42}` when nothing came for an '
    "`idle_heartbeat` (which needs this form; of a stream with several shards it has `shards`, "
    "each with its two sequences), and at the end "
    '`{"status":{"code":408,"description":"Request Timeout","num_pending":0}}`.',
    query=PullQuery,
    body={JSON_TYPE: Body(shape=PullBody, example={"batch": 100, "expires": "30s"})},
    body_required=False,
    answers={
        200: Answered(
            description="Messages to work on and acknowledge.",
            content={
                JSON_TYPE: Body(
                    shape=PulledMessages, example={"messages": [_DELIVERED], "num_pending": 12}
                ),
            },
        ),
        204: Answered(description="Nothing came in time."),
    },
    errors=(
        *BODY_ERRORS,
        errors.STREAM_NOT_FOUND,
        errors.CONSUMER_NOT_FOUND,
        errors.NOT_ACCEPTABLE,
        errors.PULL_INVALID,
        errors.PULL_LIMIT,
        errors.PULL_TOO_SMALL,
        errors.CONSUMER_DELETED,
        errors.TOO_MANY_WAITERS,
        errors.BATCH_TOO_LARGE,
    ),
)
ACK: Final = Operation(
    operation_id="acknowledge",
    tag=_TAG,
    summary="Acknowledge messages",
    description="One result each, in order: a token that was not made for this consumer is 403, "
    "one of a deleted, recreated or reset consumer 409. With `sync` the answer comes once the "
    "acknowledgements are durable.",
    body={
        JSON_TYPE: Body(
            shape=AckBody,
            example={"acks": [{"token": _DELIVERED["ack_token"], "kind": "ack"}], "sync": True},
        )
    },
    answers={
        200: Answered(
            description="The results.",
            content={JSON_TYPE: Body(shape=AckResults, example={"results": [{"ok": True}]})},
        )
    },
    errors=(
        *BODY_ERRORS,
        errors.STREAM_NOT_FOUND,
        errors.CONSUMER_NOT_FOUND,
        errors.NOT_ACCEPTABLE,
        errors.TOKEN_FORGED,
        errors.TOKEN_STALE,
        errors.BATCH_TOO_LARGE,
        errors.OUTCOME_UNKNOWN,
    ),
)
