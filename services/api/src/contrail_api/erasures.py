"""Erasing messages so that no file holds their bytes, and the receipts of it."""

from contextlib import suppress
from typing import Annotated

from fastapi import APIRouter, Path, Query
from pydantic import Field
from starlette.requests import Request

from contrail_api import erasure_docs as docs
from contrail_api.erasure_docs import ErasureJson, ReplicaErasureJson
from contrail_api.fields import Int64, RequestModel
from contrail_common import errors
from contrail_common.errors import ApiError, FieldProblem
from contrail_edge.http.problems import invalid_field
from contrail_edge.http.responses import Header, Response, json_response
from contrail_edge.inputs import schema_marks
from contrail_edge.inputs.query import duration_parameter, filter_parameter
from contrail_edge.openapi.declared import KitResponse, StreamName, answer, manage
from contrail_link.contract import ERASE_SEQS_MAX, ErasureReceipt, StorageLink

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


class ErasureRoutes:
    """The routes of erasures, over one storage link."""

    def __init__(self, link: StorageLink) -> None:
        self._link = link

    def add_to(self, router: APIRouter) -> None:
        """Add the routes, with their documents."""
        manage(router, "POST", "/v1/streams/{stream}/erase", self.erase, docs.ERASE)
        manage(router, "GET", "/v1/erasures/{erasure}", self.get, docs.GET)

    async def erase(
        self, request: Request, stream: StreamName, body: EraseBody, wait: Wait = ""
    ) -> KitResponse:
        """Delete messages at once, and have their bytes leave all files."""
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
            with suppress(ApiError):  # it is asked for all the same
                receipt = await self._link.erasure(receipt.erasure_id, wait_ns)
        return answer(request, _response(receipt))

    async def get(
        self,
        request: Request,
        erasure: Annotated[str, Path(description="Id of the receipt.")],
        wait: Wait = "",
    ) -> KitResponse:
        """How far an erasure is."""
        receipt = await self._link.erasure(erasure, duration_parameter("wait", wait))
        return answer(request, _response(receipt))


def _response(receipt: ErasureReceipt) -> Response:
    replicas = [ReplicaErasureJson(one.node, one.status, one.reason) for one in receipt.replicas]
    shown = ErasureJson(
        receipt.erasure_id, receipt.status, receipt.messages, receipt.shredded, replicas
    )
    if receipt.status == "done":
        return json_response(200, shown)
    place: Header = (b"location", f"/v1/erasures/{receipt.erasure_id}".encode())
    return json_response(202, shown, [place])
