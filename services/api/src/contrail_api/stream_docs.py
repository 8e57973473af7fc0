"""What the OpenAPI document says of the management of streams."""

from typing import Any, Final

import msgspec

from contrail_api.stream_json import Purged, StreamInfoJson, StreamPage, info_json
from contrail_common import errors, model
from contrail_common.edge.document import BODY_ERRORS
from contrail_common.edge.negotiation import MERGE_PATCH_TYPE
from contrail_common.edge.routing import Answered, Body, HeaderDoc, Operation
from contrail_common.timeunits import parse_time

_TAG: Final = "streams"

_EXAMPLE: Final[Any] = msgspec.to_builtins(
    info_json(
        model.StreamInfo(
            config=model.StreamConfig(name="ORDERS", subjects=("orders.>",)),
            created_ns=parse_time("2026-01-31T08:00:00Z"),
            state=model.StreamState(
                messages=2,
                bytes=64,
                first_seq=1,
                first_ts_ns=parse_time("2026-01-31T08:01:00Z"),
                last_seq=2,
                last_ts_ns=parse_time("2026-01-31T08:02:00.5Z"),
                num_subjects=1,
                num_deleted=0,
                consumer_count=0,
            ),
            incarnation="",
            version=1,
            leader="n1",
        )
    )
)
ETAG: Final = HeaderDoc(
    name="ETag", description="The configuration's version, for If-Match.", example='"3"'
)
DURABILITY: Final = HeaderDoc(
    name="Durability",
    description="What an ack of the stream means: `memory`, `fsync` or `quorum-fsync`.",
    example="fsync",
)
LOCATION: Final = HeaderDoc(
    name="Location", description="Where the new resource is.", example="/v1/streams/ORDERS"
)
IF_MATCH: Final = HeaderDoc(
    name="If-Match",
    description="Only if the configuration has this version, an `ETag` of before (else 412).",
    example='"3"',
)
IF_NONE_MATCH: Final = HeaderDoc(
    name="If-None-Match", description="`*`: only if there is none yet (else 412).", example="*"
)
PATCH_BODY: Final = {
    MERGE_PATCH_TYPE: Body(
        shape={
            "type": "object",
            "additionalProperties": True,
            "description": "RFC 7396: the fields to change, and null for those to reset.",
        },
        example={"description": None, "metadata": {"team": "billing"}},
    )
}
_INFO: Final = {"application/json": Body(shape=StreamInfoJson, example=_EXAMPLE)}
_FOUND: Final = Answered(description="The stream.", content=_INFO, headers=(ETAG, DURABILITY))
CREATED: Final = Answered(
    description="The stream was created.", content=_INFO, headers=(ETAG, DURABILITY, LOCATION)
)
_CONFIG_ERRORS: Final = (
    *BODY_ERRORS,
    errors.STREAM_CONFIG_INVALID,
    errors.STREAM_NAME_SEPARATOR,
    errors.REPLICAS_UNSUPPORTED,
    errors.REPLICAS_NEGATIVE,
    errors.PEDANTIC,
    errors.SUBJECT_OVERLAP,
    errors.STREAM_LIMIT,
    errors.OUTCOME_UNKNOWN,
)
_UPDATE_ERRORS: Final = (
    *_CONFIG_ERRORS,
    errors.STREAM_NAME_MISMATCH,
    errors.STREAM_UPDATE_REFUSED,
    errors.PRECONDITION_FAILED,
)

LIST: Final = Operation(
    operation_id="list_streams",
    tag=_TAG,
    summary="List streams",
    description="Streams by name, a page at a time.",
    answers={
        200: Answered(
            description="A page of streams.",
            content={
                "application/json": Body(
                    shape=StreamPage, example={"items": [_EXAMPLE], "next_page_token": None}
                )
            },
        )
    },
    errors=(errors.INVALID_FIELD, errors.INVALID_SUBJECT),
)
CREATE: Final = Operation(
    operation_id="create_stream",
    tag=_TAG,
    summary="Create a stream",
    description="An identical stream that is there already is answered with 200, a different one "
    "under the name is refused.",
    answers={201: CREATED, 200: _FOUND},
    errors=(*_CONFIG_ERRORS, errors.STREAM_EXISTS),
)
PUT: Final = Operation(
    operation_id="put_stream",
    tag=_TAG,
    summary="Create or replace a stream's configuration",
    description="An omitted field takes its default. `If-None-Match: *` only creates, `If-Match` "
    "only replaces the version it names.",
    headers=(IF_MATCH, IF_NONE_MATCH),
    answers={200: _FOUND, 201: CREATED},
    errors=_UPDATE_ERRORS,
)
PATCH: Final = Operation(
    operation_id="patch_stream",
    tag=_TAG,
    summary="Change fields of a stream's configuration",
    description="A JSON merge patch over the configuration.",
    headers=(IF_MATCH,),
    body=PATCH_BODY,
    answers={200: _FOUND},
    errors=(*_UPDATE_ERRORS, errors.STREAM_NOT_FOUND),
)
GET: Final = Operation(
    operation_id="get_stream",
    tag=_TAG,
    summary="A stream's configuration and state",
    description="The ETag is the configuration's version; the state does not change it.",
    answers={200: _FOUND},
    errors=(errors.STREAM_NOT_FOUND,),
)
DELETE: Final = Operation(
    operation_id="delete_stream",
    tag=_TAG,
    summary="Delete a stream",
    description="Removes the stream with its messages and consumers.",
    headers=(IF_MATCH,),
    answers={204: Answered(description="It is gone.")},
    errors=(errors.STREAM_NOT_FOUND, errors.PRECONDITION_FAILED, errors.OUTCOME_UNKNOWN),
)
PURGE: Final = Operation(
    operation_id="purge_stream",
    tag=_TAG,
    summary="Remove messages of a stream",
    description="All messages, those of a subject, those below `up_to_seq` (exclusive), or all but "
    "the newest `keep`. Message ids are remembered beyond a purge. Where there are several shards, "
    "`up_to_seq` needs a `shard`, and so does `keep` unless the subjects lie in one.",
    answers={
        200: Answered(
            description="How many were removed.",
            content={"application/json": Body(shape=Purged, example={"purged": 2})},
        )
    },
    errors=(
        *BODY_ERRORS,
        errors.STREAM_NOT_FOUND,
        errors.STREAM_SEALED,
        errors.PURGE_DENIED,
        errors.CONFLICTING_FIELDS,
        errors.INVALID_SUBJECT,
        errors.OUTCOME_UNKNOWN,
    ),
)
SEAL: Final = Operation(
    operation_id="seal_stream",
    tag=_TAG,
    summary="Seal a stream",
    description="For good: nothing is published, ages out or is removed any more.",
    headers=(IF_MATCH,),
    answers={200: _FOUND},
    errors=(errors.STREAM_NOT_FOUND, errors.PRECONDITION_FAILED, errors.OUTCOME_UNKNOWN),
)
