"""What erasures look like, and what the OpenAPI document says of them."""

from typing import Any, Final, Literal

import msgspec

from contrail_common import errors
from contrail_edge.inputs.json_body import VALUES_MAX
from contrail_edge.openapi.document import BODY_ERRORS
from contrail_edge.routing import Answered, Body, HeaderDoc, Operation
from contrail_link.contract import ERASE_SEQS_MAX


class ReplicaErasureJson(msgspec.Struct, omit_defaults=True):
    """Progress of one node. ``reason`` tells why the erasure is pending after a failed attempt."""

    node: str
    status: Literal["pending", "done"]
    reason: str = ""


class ErasureJson(msgspec.Struct):
    """The receipt of an erasure. It is ``done`` once no file of any replica contains the bytes.

    ``shredded`` is true if the keys of the subjects were destroyed.
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
    name="Location", description="Path of the receipt.", example=f"/v1/erasures/{_ID}"
)
_ANSWERS: Final = {
    200: Answered(description="The erasure is complete.", content=_receipt("done")),
    202: Answered(
        description="The erasure is pending.", headers=(_PLACE,), content=_receipt("pending")
    ),
}
ERASE: Final = Operation(
    operation_id="erase_messages",
    tag=_TAG,
    summary="Erase messages",
    description="Deletes messages immediately, then removes their bytes from every file of every "
    "replica, including tables and log: payloads, headers and, with the last message of "
    "a subject, the subject's name. The receipt tells when this is complete. It is kept "
    "for 7 days, even if the stream is deleted. Messages that were already deleted, "
    "purged or evicted can be erased too. Snapshots that are being read may be aborted.\n"
    "\nIf the stream has `erasure: subject_key`, erasing by subject first destroys the "
    "subject's key, and the receipt says `shredded`: from then on no copy of its "
    "messages can be read, wherever it is. Erasing by sequence does not destroy a key, "
    "because other messages need it.\n\nNot erased: sequences, times, hashes of message "
    "ids until the duplicate window ends, and subjects named in configurations.",
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
    summary="Get the receipt of an erasure",
    description="Tells whether an erasure is complete.",
    answers=_ANSWERS,
    errors=(errors.ERASURE_NOT_FOUND, errors.INVALID_FIELD),
)
