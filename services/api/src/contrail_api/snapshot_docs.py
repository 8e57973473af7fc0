"""What the OpenAPI document says of archives of streams."""

from typing import Final

from contrail_api.snapshots import ARCHIVE_TYPES, SnapshotQuery
from contrail_api.stream_docs import CREATED
from contrail_common import errors
from contrail_edge.inputs.negotiation import BYTES_TYPE
from contrail_edge.routing import Answered, Body, Operation

_TAG: Final = "streams"
_ARCHIVE: Final = {
    form: Body(shape={"type": "string", "format": "binary"}) for form in ARCHIVE_TYPES
}

SNAPSHOT: Final = Operation(
    operation_id="snapshot_stream",
    tag=_TAG,
    summary="Take a snapshot of a stream",
    description="Returns an archive of the stream as of one point in time: its messages, subjects, "
    "consumers, and the message ids within the duplicate window. The stream stays "
    "available meanwhile. The archive is not encrypted and does not contain deleted "
    "messages. An incomplete download lacks the end record, and cannot be restored.",
    query=SnapshotQuery,
    answers={200: Answered(description="The archive.", content=_ARCHIVE)},
    errors=(
        errors.STREAM_NOT_FOUND,
        errors.INVALID_FIELD,
        errors.NOT_ACCEPTABLE,
        errors.DATA_LOST,
        errors.OVERLOADED,
    ),
)
RESTORE: Final = Operation(
    operation_id="restore_stream",
    tag=_TAG,
    summary="Restore a stream",
    description="Creates a stream from an archive, under the name in the path, which may "
    "differ from the archived name. Sequences, times, subjects, message ids and "
    "consumers are restored; the stream gets a new incarnation. Either the whole stream "
    "is restored or nothing. The Content-Type may also be "
    "`application/vnd.contrail.snapshot`, or be omitted.",
    body={BYTES_TYPE: _ARCHIVE[BYTES_TYPE]},
    answers={201: CREATED},
    errors=(
        errors.UNSUPPORTED_MEDIA,
        errors.STREAM_RESTORE_EXISTS,
        errors.SUBJECT_OVERLAP,
        errors.ARCHIVE_INVALID,
        errors.STREAM_CONFIG_INVALID,
        errors.STREAM_NAME_SEPARATOR,
        errors.STREAM_LIMIT,
        errors.OVERLOADED,
        errors.OUTCOME_UNKNOWN,
    ),
)
