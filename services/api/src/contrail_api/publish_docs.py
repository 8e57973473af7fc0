"""What the OpenAPI document says of publishing."""

from typing import Final

import msgspec

from contrail_api.batch import BatchQuery, JsonBatch
from contrail_api.batch_results import BatchResult, BatchResults
from contrail_api.publish import PublishAckJson, PublishQuery
from contrail_common import errors
from contrail_edge.inputs.negotiation import BYTES_TYPE, JSON_TYPE
from contrail_edge.openapi.document import BODY_ERRORS
from contrail_edge.routing import Answered, Body, HeaderDoc, Operation

_TAG: Final = "publishing"

DURABILITY: Final = HeaderDoc(
    name="Durability",
    description="How durable an acknowledged message is: `memory`, `fsync` or `quorum-fsync`.",
    example="fsync",
)
_MESSAGE_HEADERS: Final = (
    HeaderDoc(
        name="Idempotency-Key",
        description="Message id, same as Nats-Msg-Id. A second publish with the same id within the "
        "stream's duplicate window stores nothing.",
        example="order-1017-created",
    ),
    HeaderDoc(
        name="Nats-Msg-Id",
        description="Message id, used to detect duplicates.",
        example="order-1017-created",
    ),
    HeaderDoc(
        name="Nats-Expected-Stream",
        description="Store the message only if this stream captures the subject.",
        example="ORDERS",
    ),
    HeaderDoc(
        name="Nats-Expected-Last-Sequence",
        description="Store the message only if the stream's last sequence has this value.",
        example="41",
    ),
    HeaderDoc(
        name="Nats-Expected-Last-Subject-Sequence",
        description="Store the message only if the subject's last sequence has this value. 0 means "
        "that the subject has no messages.",
        example="40",
    ),
    HeaderDoc(
        name="Nats-Expected-Last-Subject-Sequence-Subject",
        description="Subject or filter to which Nats-Expected-Last-Subject-Sequence applies. "
        "Default: the subject of the message.",
        example="orders.eu.*",
    ),
    HeaderDoc(
        name="Nats-Expected-Last-Msg-Id",
        description="Store the message only if the stream's last message has this id.",
        example="order-1016-created",
    ),
    HeaderDoc(
        name="Nats-Rollup",
        description="Replace all earlier messages of the subject (`sub`) or of the stream (`all`). "
        "The stream must have `allow_rollup_hdrs`.",
        example="sub",
    ),
    HeaderDoc(
        name="Nats-TTL",
        description="How long to keep the message: a number of seconds, a duration of at least 1s, "
        "or `never`, which also exempts the message from max_age. 0 has no effect. The "
        "stream must have `allow_msg_ttl`.",
        example="90s",
    ),
    HeaderDoc(
        name="traceparent",
        description="W3C trace context, stored with the message.",
        example="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    ),
    HeaderDoc(
        name="tracestate",
        description="Vendor-specific W3C trace data, stored with the message.",
        example="congo=t61rcWkgMzE",
    ),
)
_MESSAGE_ERRORS: Final = (
    errors.INVALID_SUBJECT,
    errors.MESSAGE_TOO_LARGE,
    errors.HEADERS_TOO_LARGE,
    errors.EXPECTED_STREAM,
    errors.WRONG_LAST_SEQUENCE,
    errors.LAST_UNSETTLED,
    errors.WRONG_LAST_MSG_ID,
    errors.EXPECTED_SUBJECT_ALONE,
    errors.FEATURE_HEADER,
    errors.ROLLUP_REFUSED,
    errors.TTL_INVALID,
    errors.TTL_DISABLED,
    errors.STREAM_SEALED,
    errors.STORE_FAILED,
    errors.STORAGE_FULL,
    errors.MEMORY_FULL,
    errors.SUBJECT_KEYS_FULL,
    errors.STORAGE_FAILED,
    errors.OUTCOME_UNKNOWN,
)

PUBLISH: Final = Operation(
    operation_id="publish",
    tag=_TAG,
    summary="Publish one message",
    description="The request body is the payload and may have any content type. The message "
    "goes to the stream that captures the subject, and is durable once the answer "
    "arrives. With `ack=none` the answer comes immediately and does not mean that the "
    "message will be stored. Request headers named `Msg-Header-<Name>` are stored as "
    "message headers named `<Name>`. A header named `Msg-Header-<Name>*` takes its value "
    "in RFC 8187 form.",
    query=PublishQuery,
    headers=_MESSAGE_HEADERS,
    body={BYTES_TYPE: Body(shape={"type": "string", "format": "binary"})},
    body_required=False,
    answers={
        201: Answered(
            description="Stored.",
            content={
                JSON_TYPE: Body(
                    shape=PublishAckJson,
                    example={"stream": "ORDERS", "seq": 42, "duplicate": False},
                )
            },
            headers=(DURABILITY,),
        ),
        200: Answered(
            description="A message with this id was already stored, under this sequence.",
            content={
                JSON_TYPE: Body(
                    shape=PublishAckJson, example={"stream": "ORDERS", "seq": 17, "duplicate": True}
                )
            },
            headers=(DURABILITY,),
        ),
        202: Answered(
            description="Accepted with `ack=none`. The message may or may not be stored."
        ),
    },
    errors=(
        errors.NO_STREAM_FOR_SUBJECT,
        errors.UNSUPPORTED_MEDIA,
        errors.SHARDED_UNSUPPORTED,
        *_MESSAGE_ERRORS,
    ),
)

_RESULTS: Final = {
    "results": [
        {"seq": 43, "duplicate": False},
        {
            "problem": {
                "type": "urn:contrail:error:subject_not_captured",
                "title": "the stream does not capture the subject",
                "status": 409,
                "detail": "the stream does not capture the subject",
                "code": 20002,
                "name": "subject_not_captured",
                "retryable": False,
                "errors": [],
            }
        },
    ]
}


class BatchAck(msgspec.Struct):
    """``results`` in the order of the messages or, for an atomic batch, all the other fields.

    ``shard`` is present for a stream with several shards.
    """

    results: list[BatchResult] | msgspec.UnsetType = msgspec.UNSET
    stream: str | msgspec.UnsetType = msgspec.UNSET
    first_seq: int | msgspec.UnsetType = msgspec.UNSET
    last_seq: int | msgspec.UnsetType = msgspec.UNSET
    count: int | msgspec.UnsetType = msgspec.UNSET
    shard: int | msgspec.UnsetType = msgspec.UNSET


BATCH: Final = Operation(
    operation_id="publish_batch",
    tag=_TAG,
    summary="Publish many messages",
    description="Each message is stored or refused independently; the results are in the order of "
    "the messages. A request is limited to 10,000 messages and 16 MiB.\n\nWith "
    "`atomic=true` either all messages are stored, with consecutive sequences, or none. "
    "An atomic batch is limited to 1,000 messages and 2 MiB, and the stream must have "
    "`allow_atomic`.\n\nThe Content-Type selects one of two other body formats. "
    "`application/x-ndjson` has one message per line and is read as a stream. With "
    "`Accept: application/x-ndjson` the results are streamed back line by line; the "
    "status is 200 if the first results are sent before the last are known. "
    "`application/vnd.msgpack` is `[1, [[subject, headers or nil, payload], ...]]`.",
    query=BatchQuery,
    body={
        JSON_TYPE: Body(
            shape=JsonBatch,
            example={
                "messages": [
                    {"subject": "orders.eu.created", "json": {"id": 1017}},
                    {"subject": "orders.eu.paid", "data": "1017", "msg_id": "paid-1017"},
                ]
            },
        ),
    },
    answers={
        201: Answered(
            description="All messages were stored. For an atomic batch, the range of their "
            "sequences.",
            content={
                JSON_TYPE: Body(
                    shape=BatchAck, example={"results": [{"seq": 43, "duplicate": False}]}
                )
            },
            headers=(DURABILITY,),
        ),
        207: Answered(
            description="Some messages were refused, or their outcome is unknown.",
            content={JSON_TYPE: Body(shape=BatchResults, example=_RESULTS)},
            headers=(DURABILITY,),
        ),
    },
    errors=(
        *BODY_ERRORS,
        errors.STREAM_NOT_FOUND,
        errors.NOT_ACCEPTABLE,
        errors.BATCH_TOO_LARGE,
        errors.SUBJECT_NOT_CAPTURED,
        errors.ATOMIC_DISABLED,
        errors.ATOMIC_UNSUPPORTED,
        errors.ATOMIC_DUPLICATE,
        errors.ATOMIC_TOO_LARGE,
        errors.WRONG_LAST_SEQUENCE_IN_BATCH,
        errors.SHARDED_UNSUPPORTED,
        *_MESSAGE_ERRORS,
    ),
)
