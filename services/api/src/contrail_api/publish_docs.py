"""What the OpenAPI document says of publishing."""

from typing import Final

import msgspec

from contrail_api.batch import BatchQuery, JsonBatch
from contrail_api.batch_results import BatchResult, BatchResults
from contrail_api.publish import PublishAckJson, PublishQuery
from contrail_common import errors
from contrail_common.edge.document import BODY_ERRORS
from contrail_common.edge.negotiation import BYTES_TYPE, JSON_TYPE
from contrail_common.edge.routing import Answered, Body, HeaderDoc, Operation

_TAG: Final = "publishing"

DURABILITY: Final = HeaderDoc(
    name="Durability",
    description="What the ack means: `memory`, `fsync` or `quorum-fsync`.",
    example="fsync",
)
_MESSAGE_HEADERS: Final = (
    HeaderDoc(
        name="Idempotency-Key",
        description="The message id, as Nats-Msg-Id: a second publish of it within the stream's "
        "duplicate window stores nothing.",
        example="order-1017-created",
    ),
    HeaderDoc(name="Nats-Msg-Id", description="The message id.", example="order-1017-created"),
    HeaderDoc(
        name="Nats-Expected-Stream", description="The stream that must take it.", example="ORDERS"
    ),
    HeaderDoc(
        name="Nats-Expected-Last-Sequence",
        description="The stream's last sequence must be this.",
        example="41",
    ),
    HeaderDoc(
        name="Nats-Expected-Last-Subject-Sequence",
        description="The subject's last sequence must be this; 0 is none.",
        example="40",
    ),
    HeaderDoc(
        name="Nats-Expected-Last-Subject-Sequence-Subject",
        description="The subject, or filter, that the former is about.",
        example="orders.eu.*",
    ),
    HeaderDoc(
        name="Nats-Expected-Last-Msg-Id",
        description="The id of the stream's last message must be this.",
        example="order-1016-created",
    ),
    HeaderDoc(
        name="Nats-Rollup",
        description="`sub` or `all`: replace all earlier messages of the subject, or of the "
        "stream, where the stream allows it.",
        example="sub",
    ),
    HeaderDoc(
        name="Nats-TTL",
        description="How long the message lives, where the stream allows it: seconds, a duration "
        "of at least 1s, or `never` (then max_age does not count either). 0 asks for nothing.",
        example="90s",
    ),
    HeaderDoc(
        name="traceparent",
        description="W3C trace context, stored with the message.",
        example="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    ),
    HeaderDoc(
        name="tracestate",
        description="What vendors of tracing add to it, stored with the message.",
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
    description="The body is the payload, of any content type. The message goes to the stream that "
    "captures the subject and is durable when the answer comes. With `ack=none` the answer comes "
    "at once and promises nothing. Request headers that begin with `Msg-Header-` are stored with "
    "the message, `Msg-Header-<Name>` as `<Name>`; with `*` at the end the value is in RFC 8187 "
    "form.",
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
            description="A message with this id was stored before, under this sequence.",
            content={
                JSON_TYPE: Body(
                    shape=PublishAckJson, example={"stream": "ORDERS", "seq": 17, "duplicate": True}
                )
            },
            headers=(DURABILITY,),
        ),
        202: Answered(description="Taken without a promise (`ack=none`)."),
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
    """What was stored: ``results`` in order, or of an atomic batch all the other fields.

    ``shard`` is that of a stream that has several.
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
    description="Each message is stored or refused for itself; the results are in order. At most "
    "10,000 messages or 16 MiB. With `atomic=true` all are stored, as one run of sequences, or "
    "none: at most 1,000 messages and 2 MiB, for streams with `allow_atomic`. Two more forms of "
    "the body are taken by their Content-Type. `application/x-ndjson` has a message in each line "
    "and is consumed as a stream; with `Accept: application/x-ndjson` the results stream back "
    "line by line, as 200 where the first of them are sent before the last are known. "
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
            description="All were stored; of an atomic batch, the range of its sequences.",
            content={
                JSON_TYPE: Body(
                    shape=BatchAck, example={"results": [{"seq": 43, "duplicate": False}]}
                )
            },
            headers=(DURABILITY,),
        ),
        207: Answered(
            description="Some were refused, or their outcome is unknown.",
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
