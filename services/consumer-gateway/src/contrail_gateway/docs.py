"""The OpenAPI documentation of delivery over HTTP."""

from typing import Any, Final

from contrail_common import errors
from contrail_edge.inputs.negotiation import JSON_TYPE
from contrail_edge.openapi.document import BODY_ERRORS
from contrail_edge.routing import AnswerDoc, BodyDoc, Operation
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
    "ack_token": "BwAAAAMAAAAAAAAATQAAAAFkZWZhdWx0AAAAAAAAACoAAAABUHWCmV7xD7P0u7T9DCJxZQ.0",
    "data": '{"id":1017}',
}
NEXT: Final = Operation(
    operation_id="pull",
    tag=_TAG,
    summary="Pull messages",
    description="Waits for messages for up to `expires` (at most 60s, 5s by default), and "
    "answers as soon as there are any. `acks` of an earlier batch are applied first, and "
    "their results are in `ack_results`; if no message arrives, such a request answers "
    "200 without messages instead of 204.\n\nWith `Accept: application/vnd.msgpack` "
    "payloads are bytes in `data`. With `form=columns` in that media type the answer has columns "
    "in `cols` instead of `messages`, and one `ack_token` for all of them; messages that are "
    "delivered again, or are of a stream with several shards, still come in `messages`."
    "\n\nWith `Accept: application/x-ndjson` each line is a "
    "message. If nothing arrives for `idle_heartbeat`, which requires this format, the "
    'line `{"hb":true,"last_consumer_seq":7,"last_stream_seq":42}` is sent; for a stream '
    "with several shards it also has `shards` with both sequences of each. The last line "
    'is `{"status":{"code":408,"description":"Request Timeout","num_pending":0}}`.',
    query=PullQuery,
    body={JSON_TYPE: BodyDoc(shape=PullBody, example={"batch": 100, "expires": "30s"})},
    body_required=False,
    answers={
        200: AnswerDoc(
            description="Messages to process and acknowledge.",
            content={
                JSON_TYPE: BodyDoc(
                    shape=PulledMessages, example={"messages": [_DELIVERED], "num_pending": 12}
                ),
            },
        ),
        204: AnswerDoc(description="No message arrived in time."),
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
    description="Returns one result for each acknowledgement, in order. A token of another "
    "consumer is refused with 403. A token of this consumer from before it was deleted, "
    "re-created or reset is refused with 409. With `sync` the answer comes once the "
    "acknowledgements are durable.",
    body={
        JSON_TYPE: BodyDoc(
            shape=AckBody,
            example={"acks": [{"token": _DELIVERED["ack_token"], "kind": "ack"}], "sync": True},
        )
    },
    answers={
        200: AnswerDoc(
            description="The result of each acknowledgement.",
            content={JSON_TYPE: BodyDoc(shape=AckResults, example={"results": [{"ok": True}]})},
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
