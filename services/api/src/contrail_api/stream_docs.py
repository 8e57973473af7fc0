"""What the OpenAPI document says of the management of streams."""

from typing import Any, Final

import msgspec

from contrail_api.stream_json import Purged, StreamInfoJson, StreamPage, info_json
from contrail_common import errors, model
from contrail_common.timeunits import parse_time
from contrail_edge.inputs.negotiation import MERGE_PATCH_TYPE
from contrail_edge.openapi.document import BODY_ERRORS
from contrail_edge.routing import Answered, Body, HeaderDoc, Operation

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
    name="ETag", description="Version of the configuration, for If-Match.", example='"3"'
)
DURABILITY: Final = HeaderDoc(
    name="Durability",
    description="How durable an acknowledged message of the stream is: `memory`, `fsync` or "
    "`quorum-fsync`.",
    example="fsync",
)
LOCATION: Final = HeaderDoc(
    name="Location", description="Path of the new resource.", example="/v1/streams/ORDERS"
)
IF_MATCH: Final = HeaderDoc(
    name="If-Match",
    description="`ETag` of an earlier answer: change the configuration only if it still has this "
    "version; otherwise answer 412.",
    example='"3"',
)
IF_NONE_MATCH: Final = HeaderDoc(
    name="If-None-Match",
    description="`*`: only create; answer 412 if it already exists.",
    example="*",
)
PATCH_BODY: Final = {
    MERGE_PATCH_TYPE: Body(
        shape={
            "type": "object",
            "additionalProperties": True,
            "description": (
                "JSON merge patch (RFC 7396): the fields to change. null resets a field to "
                "its default."
            ),
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
    description="Lists streams by name, in pages.",
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
    description="If an identical stream already exists, the answer is 200. A stream with the same "
    "name and a different configuration is refused.",
    answers={201: CREATED, 200: _FOUND},
    errors=(*_CONFIG_ERRORS, errors.STREAM_EXISTS),
)
PUT: Final = Operation(
    operation_id="put_stream",
    tag=_TAG,
    summary="Create or replace a stream's configuration",
    description="Omitted fields take their defaults. With `If-None-Match: *` a stream is only "
    "created, never replaced. With `If-Match` the configuration is only replaced if it "
    "has the given version.",
    headers=(IF_MATCH, IF_NONE_MATCH),
    answers={200: _FOUND, 201: CREATED},
    errors=_UPDATE_ERRORS,
)
PATCH: Final = Operation(
    operation_id="patch_stream",
    tag=_TAG,
    summary="Change fields of a stream's configuration",
    description="Applies a JSON merge patch to the configuration.",
    headers=(IF_MATCH,),
    body=PATCH_BODY,
    answers={200: _FOUND},
    errors=(*_UPDATE_ERRORS, errors.STREAM_NOT_FOUND),
)
GET: Final = Operation(
    operation_id="get_stream",
    tag=_TAG,
    summary="Get a stream's configuration and state",
    description="The ETag is the version of the configuration. Changes of the state do not "
    "affect it.",
    answers={200: _FOUND},
    errors=(errors.STREAM_NOT_FOUND,),
)
DELETE: Final = Operation(
    operation_id="delete_stream",
    tag=_TAG,
    summary="Delete a stream",
    description="Deletes the stream with its messages and consumers.",
    headers=(IF_MATCH,),
    answers={204: Answered(description="The stream was deleted.")},
    errors=(errors.STREAM_NOT_FOUND, errors.PRECONDITION_FAILED, errors.OUTCOME_UNKNOWN),
)
PURGE: Final = Operation(
    operation_id="purge_stream",
    tag=_TAG,
    summary="Purge messages of a stream",
    description="Removes all messages, only those with matching subjects, only those below "
    "`up_to_seq` (exclusive), or all but the newest `keep`. A purge does not affect "
    "duplicate detection: the ids of removed messages are still remembered. For a stream "
    "with several shards, `up_to_seq` requires `shard`, and so does `keep` unless all "
    "matching subjects are in one shard.",
    answers={
        200: Answered(
            description="The number of messages removed.",
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
    description="Makes the stream read-only for good. No message can be published, removed, or "
    "expire any more.",
    headers=(IF_MATCH,),
    answers={200: _FOUND},
    errors=(errors.STREAM_NOT_FOUND, errors.PRECONDITION_FAILED, errors.OUTCOME_UNKNOWN),
)
