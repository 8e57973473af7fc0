"""What the OpenAPI document says of archives of streams."""

from typing import Final

from contrail_api.snapshots import ARCHIVE_TYPES, SnapshotQuery
from contrail_api.stream_docs import CREATED
from contrail_common import errors
from contrail_common.edge.negotiation import BYTES_TYPE
from contrail_common.edge.routing import Answered, Body, Operation

_TAG: Final = "streams"
_ARCHIVE: Final = {
    form: Body(shape={"type": "string", "format": "binary"}) for form in ARCHIVE_TYPES
}

SNAPSHOT: Final = Operation(
    operation_id="snapshot_stream",
    tag=_TAG,
    summary="Take a snapshot of a stream",
    description="The stream as of one moment, with its messages, subjects, message ids within the "
    "duplicate window and consumers, as an archive to restore. The stream goes on meanwhile. An "
    "archive that was cut lacks its end record, and is not restored. It is not encrypted; what was "
    "deleted is not in it.",
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
    description="Makes a stream out of an archive, under the name of the path, which need not be "
    "the archive's. Sequences, times, subjects, message ids and consumers are those of the "
    "archive; the incarnation is new. The stream is there as a whole or not at all. The "
    "Content-Type may also be `application/vnd.contrail.snapshot`, or left out.",
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
