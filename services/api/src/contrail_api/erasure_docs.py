"""What erasures look like, and what the OpenAPI document says of them."""

from typing import Any, Final, Literal

import msgspec

from contrail_common import errors
from contrail_common.edge.document import BODY_ERRORS
from contrail_common.edge.json_body import VALUES_MAX
from contrail_common.edge.routing import Answered, Body, HeaderDoc, Operation
from contrail_common.link import ERASE_SEQS_MAX


class ReplicaErasureJson(msgspec.Struct, omit_defaults=True):
    """How far one node is; ``reason`` is why it is pending, once a try failed."""

    node: str
    status: Literal["pending", "done"]
    reason: str = ""


class ErasureJson(msgspec.Struct):
    """The receipt of an erasure: done when the bytes are in no file of any replica.

    ``shredded`` from the beginning when the keys of the subjects are destroyed.
    """

    id: str
    status: Literal["pending", "done"]
    messages: int
    shredded: bool
    replicas: list[ReplicaErasureJson]


_TAG: Final = "streams"
_ID: Final = "9f86d081884c7d659a2feaa0c55ad015"


def _receipt(status: Literal["pending", "done"]) -> dict[str, Body]:
    receipt = ErasureJson(_ID, status, 2, False, [ReplicaErasureJson("n1", status)])
    example: Any = msgspec.to_builtins(receipt)
    return {"application/json": Body(shape=ErasureJson, example=example)}


_PLACE: Final = HeaderDoc(
    name="Location", description="Where to ask again.", example=f"/v1/erasures/{_ID}"
)
_ANSWERS: Final = {
    200: Answered(description="The bytes are in no file.", content=_receipt("done")),
    202: Answered(description="It is being done.", headers=(_PLACE,), content=_receipt("pending")),
}
ERASE: Final = Operation(
    operation_id="erase_messages",
    tag=_TAG,
    summary="Erase messages",
    description="Deletes messages at once, then makes their payloads, headers and, with the last "
    "message of a subject, its name leave every file of every replica: tables, log and all else. "
    "The receipt says when that is done; it is kept for 7 days and outlives the stream. Messages "
    "that were deleted, purged or evicted before can be erased too. Snapshots that are being read "
    "may be ended. A subject of a stream with the erasure subject_key is shredded before anything "
    "else, and the receipt says so: copies of its messages cannot be read any more, wherever they "
    "lie. What is erased by sequence is not: its key has others to open. What stays: sequences, "
    "times, hashes of message ids until their window ends, and subjects named in configurations.",
    answers=_ANSWERS,
    errors=(
        *BODY_ERRORS,
        errors.STREAM_NOT_FOUND,
        errors.SEQUENCE_NOT_FOUND,
        errors.STREAM_SEALED,
        errors.DELETE_DENIED,
        errors.PURGE_DENIED,
        errors.CONFLICTING_FIELDS,
        errors.INVALID_SUBJECT,
        errors.ERASURE_LIMIT,
        errors.OUTCOME_UNKNOWN,
    ),
    body_values_max=ERASE_SEQS_MAX + VALUES_MAX,
)
GET: Final = Operation(
    operation_id="get_erasure",
    tag=_TAG,
    summary="How far an erasure is",
    description="The receipt of an erasure, by its id.",
    answers=_ANSWERS,
    errors=(errors.ERASURE_NOT_FOUND, errors.INVALID_FIELD),
)
