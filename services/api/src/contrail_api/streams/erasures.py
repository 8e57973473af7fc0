"""Erasing messages from all files, and the receipts of erasures."""

from contextlib import suppress
from typing import Annotated, Any, Final, Literal

import msgspec
from fastapi import APIRouter, Path, Query
from pydantic import Field
from starlette.requests import Request

from contrail_api.fields import Int64, RequestModel
from contrail_common import errors
from contrail_common.errors import ApiError, FieldProblem
from contrail_edge.http.problems import invalid_field
from contrail_edge.http.responses import Header, Response, json_response
from contrail_edge.inputs import schema_marks
from contrail_edge.inputs.json_body import VALUES_MAX
from contrail_edge.inputs.query import duration_parameter, filter_parameter
from contrail_edge.openapi.declared import KitResponse, StreamName, answer, manage
from contrail_edge.openapi.document import BODY_ERRORS
from contrail_edge.routing import AnswerDoc, BodyDoc, HeaderDoc, Operation
from contrail_link.contract import StorageLink
from contrail_link.contract.admin import ERASE_SEQS_MAX, ErasureReceipt


class ReplicaErasureJson(msgspec.Struct, omit_defaults=True):
    """Progress of one node. ``reason`` tells why the erasure is pending after a failed attempt."""

    node: str
    """Name of the node."""
    status: Literal["pending", "done"]
    """`done` once no file of the node contains the bytes."""
    reason: str = ""
    """Why the last attempt failed; empty if none did."""


class ErasureJson(msgspec.Struct):
    """The receipt of an erasure. It is ``done`` once no file of any replica contains the bytes.

    ``shredded`` is true if the keys of the subjects were destroyed.
    """

    id: str
    """Id of the receipt."""
    status: Literal["pending", "done"]
    """`done` once no file of any replica contains the bytes."""
    messages: int
    """Number of erased messages."""
    shredded: bool
    """True if the keys of the subjects were destroyed."""
    replicas: list[ReplicaErasureJson]
    """Progress of each node."""


Wait = Annotated[
    str,
    Query(
        description="How long to wait for completion, at most 60s.",
        json_schema_extra=schema_marks.DURATION,
    ),
]


class EraseBody(RequestModel):
    """Which messages to erase: by sequence, or by subject."""

    seqs: list[Annotated[Int64, Field(ge=1)]] | None = Field(
        default=None,
        min_length=1,
        max_length=ERASE_SEQS_MAX,
        description="Sequences to erase. They may include messages that were already deleted or "
        "removed.",
    )
    subject: str = Field(default="", description="Erase all messages with matching subjects.")
    shard: Int64 | None = Field(
        default=None, ge=0, description="Shard of the sequences, if the stream has several."
    )


_TAG: Final = "streams"
_ID: Final = "9f86d081884c7d659a2feaa0c55ad015"


def _receipt(status: Literal["pending", "done"]) -> dict[str, BodyDoc]:
    receipt = ErasureJson(_ID, status, 2, False, [ReplicaErasureJson("n1", status)])
    example: Any = msgspec.to_builtins(receipt)
    return {"application/json": BodyDoc(shape=ErasureJson, example=example)}


_LOCATION: Final = HeaderDoc(
    name="Location", description="Path of the receipt.", example=f"/v1/erasures/{_ID}"
)
_ANSWERS: Final = {
    200: AnswerDoc(description="The erasure is complete.", content=_receipt("done")),
    202: AnswerDoc(
        description="The erasure is pending.", headers=(_LOCATION,), content=_receipt("pending")
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
    "\nIf the stream has `erasure: subject_key`, erasing by subject also destroys the "
    "subject's key, and the receipt says `shredded`: no copy of its messages can be read "
    "any more, wherever it is, with several replicas once the receipt is `done`. Erasing "
    "by sequence does not destroy a key, because other messages need it.\n\nNot erased: "
    "sequences, times, hashes of message ids until the duplicate window ends, and subjects "
    "named in configurations.",
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


class ErasureRoutes:
    """The routes of erasures, over one storage link."""

    def __init__(self, link: StorageLink) -> None:
        self._link = link

    def add_to(self, router: APIRouter) -> None:
        """Add the routes with their documentation."""
        manage(router, "POST", "/v1/streams/{stream}/erase", self.erase, ERASE)
        manage(router, "GET", "/v1/erasures/{erasure}", self.get, GET)

    async def erase(
        self, request: Request, stream: StreamName, body: EraseBody, wait: Wait = ""
    ) -> KitResponse:
        """Delete messages, and remove their bytes from all files."""
        wait_ns = duration_parameter("wait", wait)
        if body.seqs is not None and body.subject:
            message = "seqs and subject cannot be used together"
            problem = FieldProblem("/subject", message)
            raise ApiError(errors.CONFLICTING_FIELDS, message, [problem], applied=False)
        if body.seqs is None and not body.subject:
            raise invalid_field("/seqs", "seqs or subject is required")
        filter_parameter("/subject", body.subject)
        receipt = await self._link.erase(stream, body.seqs or [], body.subject, body.shard)
        if wait_ns and receipt.status != "done":
            with suppress(ApiError):  # the erasure goes on, and the receipt says that it is pending
                receipt = await self._link.erasure(receipt.erasure_id, wait_ns)
        return answer(request, _response(receipt))

    async def get(
        self,
        request: Request,
        erasure: Annotated[str, Path(description="Id of the receipt.")],
        wait: Wait = "",
    ) -> KitResponse:
        """Return the receipt of an erasure."""
        receipt = await self._link.erasure(erasure, duration_parameter("wait", wait))
        return answer(request, _response(receipt))


def _response(receipt: ErasureReceipt) -> Response:
    replicas = [ReplicaErasureJson(one.node, one.status, one.reason) for one in receipt.replicas]
    shown = ErasureJson(
        receipt.erasure_id, receipt.status, receipt.messages, receipt.shredded, replicas
    )
    if receipt.status == "done":
        return json_response(200, shown)
    location: Header = (b"location", f"/v1/erasures/{receipt.erasure_id}".encode())
    return json_response(202, shown, [location])
