"""What the OpenAPI document says of reading, removing and replaying messages."""

from typing import Any, Final

from contrail_api.reads import (
    DeletedPage,
    DeletedQuery,
    LastMessages,
    LastQuery,
    MessageRange,
    RangeQuery,
    ReadQuery,
    SubjectPage,
    SubjectsQuery,
)
from contrail_api.replay import PlanJson, PlanQuery, ReplayQuery
from contrail_common import errors
from contrail_edge.inputs.messages import Message
from contrail_edge.inputs.negotiation import (
    ARROW_TYPE,
    BYTES_TYPE,
    JSON_TYPE,
)
from contrail_edge.routing import Answered, Body, HeaderDoc, Operation

_READING: Final = "reading"
_REPLAY: Final = "replay"
_BINARY: Final = Body(shape={"type": "string", "format": "binary"})

MESSAGE: Final[dict[str, Any]] = {
    "stream": "ORDERS",
    "seq": 42,
    "subject": "orders.eu.created",
    "time": "2026-01-31T08:00:00.500000000Z",
    "headers": {"Nats-Msg-Id": ["order-1017-created"]},
    "data": '{"id":1017}',
}
_MESSAGE_HEADERS: Final = (
    HeaderDoc(name="Nats-Stream", description="Name of the stream.", example="ORDERS"),
    HeaderDoc(
        name="Nats-Subject", description="Subject of the message.", example="orders.eu.created"
    ),
    HeaderDoc(name="Nats-Sequence", description="Sequence of the message.", example="42"),
    HeaderDoc(
        name="Nats-Time-Stamp",
        description="Time at which the message was stored.",
        example="2026-01-31T08:00:00.500000000Z",
    ),
    HeaderDoc(
        name="Contrail-Shard",
        description="Shard of the message, if the stream has several.",
        example="3",
    ),
)
_POSITION: Final = (
    HeaderDoc(
        name="Nats-Last-Sequence",
        description="With `consistency=any`: the replica's last sequence when it started to read.",
        example="42",
    ),
    HeaderDoc(
        name="Contrail-Applied-Index",
        description="With `consistency=any`: the log index up to which the replica had applied "
        "changes.",
        example="1042",
    ),
)

GET: Final = Operation(
    operation_id="get_message",
    tag=_READING,
    summary="Read one message as its payload",
    description="The response body is the payload, with the content type it was published with. "
    "Everything else is in headers: `Msg-Header-<Name>` is the message header `<Name>`, "
    "or `Msg-Header-<Name>*` in RFC 8187 form if the value is not printable ASCII. With "
    "`Accept: application/json` the answer is that of `get_message_json`.",
    query=ReadQuery,
    answers={
        200: Answered(
            description="The payload.",
            content={BYTES_TYPE: _BINARY},
            headers=(*_MESSAGE_HEADERS, *_POSITION),
        )
    },
    errors=(errors.STREAM_NOT_FOUND, errors.MESSAGE_NOT_FOUND, errors.INVALID_FIELD),
)
GET_JSON: Final = Operation(
    operation_id="get_message_json",
    tag=_READING,
    summary="Read one message as JSON",
    description="The message with its subject, time and headers. The payload is in `data` if it is "
    "UTF-8 text, otherwise in `data_base64`.",
    query=ReadQuery,
    answers={
        200: Answered(
            description="The message.",
            content={JSON_TYPE: Body(shape=Message, example=MESSAGE)},
            headers=_POSITION,
        )
    },
    errors=GET.errors,
)
DELETE: Final = Operation(
    operation_id="delete_message",
    tag=_READING,
    summary="Delete one message",
    description="The message can no longer be read once the answer arrives.",
    query=ReadQuery,
    answers={204: Answered(description="The message was deleted.")},
    errors=(
        errors.STREAM_NOT_FOUND,
        errors.SEQUENCE_NOT_FOUND,
        errors.DELETE_DENIED,
        errors.STREAM_SEALED,
        errors.INVALID_FIELD,
        errors.OUTCOME_UNKNOWN,
    ),
)
RANGE: Final = Operation(
    operation_id="read_messages",
    tag=_READING,
    summary="Read messages in order",
    description="Reads messages from a sequence or time onwards. With `wait` the request is a long "
    "poll, which answers 204 if no message arrives in time.\n\nWith `Accept: "
    "application/x-ndjson` the answer has one message per line, and headers tell where "
    "to continue.\n\nWith `Accept: text/event-stream` messages arrive as an endless "
    "stream of events, and `limit`, `max_bytes` and `wait` are ignored. The `id` of an "
    "event is the sequence, and `data` is the message in JSON. An event `gone` ends the "
    "stream of events when the stream is deleted or the server stops.\n\nA stream with "
    "several shards is read as one: ordered by time, while each shard keeps its own "
    "order. The position is then an opaque `cursor`, which replaces `from_seq`, "
    "`next_seq` and the event `id`. With `shard` a single shard is read by its sequences.",
    query=RangeQuery,
    headers=(
        HeaderDoc(
            name="Last-Event-ID",
            description="Events only: the `id` of the last event received. Overrides `from_seq`, "
            "`cursor` and `start_time`.",
            example="42",
        ),
    ),
    answers={
        200: Answered(
            description="The messages. Continue with `next_seq`.",
            content={
                JSON_TYPE: Body(
                    shape=MessageRange,
                    example={"messages": [MESSAGE], "next_seq": 43, "num_pending": 0},
                ),
            },
            headers=(
                HeaderDoc(
                    name="Contrail-Next-Seq",
                    description="NDJSON: the sequence to continue with.",
                    example="43",
                ),
                HeaderDoc(
                    name="Contrail-Cursor",
                    description="NDJSON: the cursor to continue with, if several shards are read "
                    "together.",
                    example="krA1ZjFjMGE5YmUyZDM0ODc2kgUD",
                ),
                HeaderDoc(
                    name="Nats-Num-Pending",
                    description="NDJSON: the number of messages after these.",
                    example="0",
                ),
                *_POSITION,
            ),
        ),
        204: Answered(description="No message arrived within `wait`."),
    },
    errors=(
        errors.STREAM_NOT_FOUND,
        errors.NOT_ACCEPTABLE,
        errors.INVALID_FIELD,
        errors.INVALID_SUBJECT,
        errors.CONFLICTING_FIELDS,
        errors.TOO_MANY_WAITERS,
    ),
)
LAST: Final = Operation(
    operation_id="last_messages",
    tag=_READING,
    summary="Read the newest message of each subject",
    description="Returns the newest message of each matching subject as of `up_to_seq` "
    "(inclusive), as of `up_to_time` (exclusive), or as of the time at which the first "
    "page is read.\n\nAll pages show the same point in time. Messages published later do "
    "not appear. If a message is removed in between, the next older message of its "
    "subject takes its place, if there is one. A page is ordered by sequence and ends at "
    "about 1 MiB. It may contain fewer messages than `limit`, or none, and still have a "
    "next page. A page token is only valid with the parameters of the request that "
    "returned it; otherwise the answer is 400.\n\nFor a stream with several shards, "
    "pages come shard by shard, and `up_to_seq` requires `shard`.",
    query=LastQuery,
    answers={
        200: Answered(
            description="A page of messages; empty if nothing matches.",
            headers=_POSITION,
            content={
                JSON_TYPE: Body(
                    shape=LastMessages, example={"messages": [MESSAGE], "next_page_token": None}
                )
            },
        )
    },
    errors=(
        errors.STREAM_NOT_FOUND,
        errors.BAD_REQUEST,
        errors.INVALID_FIELD,
        errors.INVALID_SUBJECT,
        errors.CONFLICTING_FIELDS,
    ),
)
SUBJECTS: Final = Operation(
    operation_id="list_subjects",
    tag=_READING,
    summary="List subjects of a stream",
    description="Lists the subjects that have messages, in byte order, in pages.",
    query=SubjectsQuery,
    answers={
        200: Answered(
            description="A page of subjects.",
            headers=_POSITION,
            content={
                JSON_TYPE: Body(
                    shape=SubjectPage,
                    example={
                        "items": [{"subject": "orders.eu.created", "messages": 42}],
                        "next_page_token": None,
                    },
                )
            },
        )
    },
    errors=(errors.STREAM_NOT_FOUND, errors.INVALID_FIELD, errors.INVALID_SUBJECT),
)
DELETED: Final = Operation(
    operation_id="list_deleted",
    tag=_READING,
    summary="List deleted sequences of a stream",
    description="Lists the sequences between the first and the last message whose messages were "
    "removed, as ranges `[first, last]` in ascending order, in pages. A long range may "
    "be split at the end of a page.",
    query=DeletedQuery,
    answers={
        200: Answered(
            description="A page of ranges.",
            headers=_POSITION,
            content={
                JSON_TYPE: Body(
                    shape=DeletedPage,
                    example={"items": [[5, 7], [12, 12]], "next_page_token": None},
                )
            },
        )
    },
    errors=(errors.STREAM_NOT_FOUND, errors.BAD_REQUEST, errors.INVALID_FIELD),
)
PLAN: Final = Operation(
    operation_id="plan_replay",
    tag=_REPLAY,
    summary="Plan a bulk replay",
    description="Pins a range and divides it into splits. Reading a split again returns the same "
    "messages as long as they are retained. The range is clipped to the messages that "
    "exist now, so the first split shows where it really starts. For a stream with "
    "several shards, sequences require `shard`; without sequences the plan has splits of "
    "every shard.",
    query=PlanQuery,
    answers={
        200: Answered(
            description="The splits.",
            content={
                JSON_TYPE: Body(
                    shape=PlanJson,
                    example={
                        "stream": "ORDERS",
                        "incarnation": "5f1c0a9be2d34876",
                        "splits": [
                            {
                                "shard": 0,
                                "from_seq": 1,
                                "to_seq": 42,
                                "messages": 42,
                                "bytes": 5120,
                            }
                        ],
                    },
                )
            },
        )
    },
    errors=(errors.STREAM_NOT_FOUND, errors.INVALID_FIELD, errors.INVALID_SUBJECT),
)
REPLAY: Final = Operation(
    operation_id="replay",
    tag=_REPLAY,
    summary="Replay a range",
    description="Returns all messages of a range, both ends included, as an Arrow stream or, "
    "depending on Accept, as `application/x-ndjson` or `application/vnd.msgpack`. NDJSON "
    'and msgpack end with `{"end":true,"messages":n}`, and Arrow with its end-of-stream '
    "mark. An answer without its end is incomplete.",
    query=ReplayQuery,
    answers={
        200: Answered(
            description="The messages.",
            content={
                ARROW_TYPE: _BINARY,
            },
        )
    },
    errors=(
        errors.STREAM_NOT_FOUND,
        errors.NOT_ACCEPTABLE,
        errors.REPLAY_GONE,
        errors.INCARNATION_CHANGED,
        errors.REPLAY_AHEAD,
        errors.INVALID_FIELD,
        errors.INVALID_SUBJECT,
    ),
)
