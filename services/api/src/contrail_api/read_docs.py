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
from contrail_common.edge.messages import Message
from contrail_common.edge.negotiation import (
    ARROW_TYPE,
    BYTES_TYPE,
    JSON_TYPE,
)
from contrail_common.edge.routing import Answered, Body, HeaderDoc, Operation

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
    HeaderDoc(name="Nats-Stream", description="The stream.", example="ORDERS"),
    HeaderDoc(name="Nats-Subject", description="The subject.", example="orders.eu.created"),
    HeaderDoc(name="Nats-Sequence", description="The sequence.", example="42"),
    HeaderDoc(
        name="Nats-Time-Stamp",
        description="When it was stored.",
        example="2026-01-31T08:00:00.500000000Z",
    ),
    HeaderDoc(
        name="Contrail-Shard", description="The shard, where there are several.", example="3"
    ),
)
_POSITION: Final = (
    HeaderDoc(
        name="Nats-Last-Sequence",
        description="With `consistency=any`: the last sequence that the replica had before.",
        example="42",
    ),
    HeaderDoc(
        name="Contrail-Applied-Index",
        description="With `consistency=any`: the log index that it had applied.",
        example="1042",
    ),
)

GET: Final = Operation(
    operation_id="get_message",
    tag=_READING,
    summary="Read one message as its payload",
    description="The body is the payload, of the type it was published with, and headers "
    "tell the rest. Those that begin with `Msg-Header-` are the message's own: `<Name>` is sent "
    "as `Msg-Header-<Name>`, or as "
    "`Msg-Header-<Name>*` in RFC 8187 form where its value is not printable ASCII. A request that "
    "asks for `application/json` by name is answered as `get_message_json` is.",
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
    description="The message with its subject, time and headers; a payload that is not UTF-8 text "
    "stands in `data_base64`.",
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
    description="It is unreadable when the answer comes.",
    query=ReadQuery,
    answers={204: Answered(description="It is unreadable.")},
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
    description="From a sequence or a time on. With `wait` a long poll: 204 when nothing came. "
    "With `Accept: application/x-ndjson` each line of the answer is a message, and headers say "
    "what continues. With `Accept: text/event-stream` the messages come as events "
    "without an end (`limit`, `max_bytes` and `wait` then mean nothing): the `id` is the sequence, "
    "`data` the "
    "message in JSON, and an event `gone` ends it when the stream is deleted or the server stops. "
    "A stream with several shards is read as one, by time and in the order of each shard; the "
    "position is then an opaque `cursor`, also as `id`, in place of `from_seq` and `next_seq`. "
    "With `shard` one is read by its sequences.",
    query=RangeQuery,
    headers=(
        HeaderDoc(
            name="Last-Event-ID",
            description="Events only: the last `id` that was seen; wins over `from_seq`, `cursor` "
            "and `start_time`.",
            example="42",
        ),
    ),
    answers={
        200: Answered(
            description="The messages; `next_seq` continues.",
            content={
                JSON_TYPE: Body(
                    shape=MessageRange,
                    example={"messages": [MESSAGE], "next_seq": 43, "num_pending": 0},
                ),
            },
            headers=(
                HeaderDoc(
                    name="Contrail-Next-Seq", description="NDJSON: what continues.", example="43"
                ),
                HeaderDoc(
                    name="Contrail-Cursor",
                    description="NDJSON: what continues over several shards.",
                    example="krA1ZjFjMGE5YmUyZDM0ODc2kgUD",
                ),
                HeaderDoc(
                    name="Nats-Num-Pending", description="NDJSON: what remains.", example="0"
                ),
                *_POSITION,
            ),
        ),
        204: Answered(description="Nothing came within `wait`."),
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
    summary="Newest message of each subject",
    description="Of each matching subject the newest message as of `up_to_seq` (inclusive) or "
    "`up_to_time` (exclusive), or as of when the first page is read. All pages are of that one "
    "point: what is published meanwhile is not in them, and a message that is removed meanwhile "
    "gives way to an older one of its subject, or to none. A page is in order of sequence and ends "
    "at about 1 MiB; it may hold fewer messages than `limit`, or none, and still have a next one. "
    "A token goes with the parameters that it was given for, else it is a 400. Of several shards "
    "the pages come shard by shard, and `up_to_seq` needs a `shard`.",
    query=LastQuery,
    answers={
        200: Answered(
            description="A page of messages, empty when nothing matches.",
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
    summary="Subjects of a stream",
    description="Subjects that hold messages, in byte order, a page at a time.",
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
    summary="Deleted sequences of a stream",
    description="Sequences between the first message and the last that have none any more, as "
    "`[first, last]` of each run, ascending, a page at a time. A long run may be cut where a page "
    "ends.",
    query=DeletedQuery,
    answers={
        200: Answered(
            description="A page of runs.",
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
    description="Pins a range and cuts it into splits: reading a split twice gives the same "
    "messages while they are retained. What lies outside of the messages kept now is clipped, so "
    "the first split tells where the range really begins. Sequences need a `shard` where there are "
    "several; otherwise every shard has splits.",
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
    summary="Replay a closed range",
    description="All messages of the range, as an Arrow stream or in the form that is accepted: "
    "`application/x-ndjson` or `application/vnd.msgpack`. NDJSON and msgpack end "
    'with `{"end":true,"messages":n}`, Arrow with its end-of-stream mark: a body without it was '
    "cut.",
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
