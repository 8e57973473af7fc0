"""The unversioned routes: liveness, readiness, metrics, and the document with a page to read it."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from contrail_common import errors
from contrail_common.errors import ApiError, FieldProblem
from contrail_edge.http.requests import Request
from contrail_edge.http.responses import Answer, Response, json_response
from contrail_edge.inputs.query import parse_query
from contrail_edge.metrics import EdgeMetrics
from contrail_edge.openapi.docs_page import docs_page
from contrail_edge.routing import AnswerDoc, BodyDoc, Operation, Route
from contrail_edge.tickets import Ticket, Tickets
from contrail_link.contract import StorageLink

_METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
# The page runs its own inline script and style, and fetches nothing but the document beside it.
_PAGE_POLICY: Final = (
    b"default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; "
    b"style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'"
)


class Liveness(msgspec.Struct, frozen=True):
    """The process is running."""

    status: str
    """Always `ok`."""


class Readiness(msgspec.Struct, frozen=True):
    """The process is ready to serve. With ``verbose`` the answer lists the checks."""

    status: str
    """Always `ready`."""
    components: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    """State of each check by name."""


class ReadinessQuery(msgspec.Struct):
    """Parameters of the readiness probe."""

    verbose: bool = False
    """List the checks."""
    strict: bool = False
    """Not ready while a replica on this node is incomplete or a second behind."""


class Probes:
    """The routes about the process itself: health, metrics, documentation, tickets."""

    def __init__(
        self,
        links: Sequence[StorageLink],
        metrics: EdgeMetrics,
        document: Callable[[], Awaitable[Mapping[str, Any]]],
        tickets: Tickets,
    ) -> None:
        self._links = links
        self._metrics = metrics
        self._document = document
        self._tickets = tickets

    def routes(self) -> tuple[Route, ...]:
        """Return the routes with their documentation."""
        return (
            Route("GET", "/livez", self._livez, _LIVEZ),
            Route("GET", "/readyz", self._readyz, _READYZ),
            Route("GET", "/metrics", self._metrics_text, _METRICS),
            Route("GET", "/openapi.json", self._openapi),
            Route("GET", "/docs", self._docs),
            Route("GET", "/", self._start),
            Route("POST", "/v1/tickets", self._ticket, _TICKETS),
        )

    async def _livez(self, request: Request) -> Answer:
        del request
        return json_response(200, Liveness("ok"))

    async def _readyz(self, request: Request) -> Answer:
        asked = parse_query(request.query_string, ReadinessQuery)
        reasons: dict[str, str] = {}
        unfit: dict[str, str] = {}
        for link in self._links:
            reasons |= link.readiness(strict=asked.strict)
            unfit |= link.readiness(strict=True)
        if not reasons:
            shown = {"storage": "ready", **unfit} if asked.verbose else msgspec.UNSET
            return json_response(200, Readiness("ready", shown))
        fields = [FieldProblem(name, why) for name, why in reasons.items() if asked.verbose]
        raise ApiError(errors.NOT_READY, f"not ready: {', '.join(reasons)}", fields, applied=False)

    async def _metrics_text(self, request: Request) -> Answer:
        del request
        texts = [
            self._metrics.text(),
            *[(await link.metrics_text()).encode() for link in self._links],
        ]
        return Response(200, b"".join(texts), _METRICS_TYPE.encode())

    async def _openapi(self, request: Request) -> Answer:
        del request
        return json_response(200, await self._document())

    async def _start(self, request: Request) -> Answer:
        del request
        return Response(307, headers=[(b"location", b"/docs"), (b"content-length", b"0")])

    async def _ticket(self, request: Request) -> Answer:
        del request
        # A cached ticket would be used twice, and refused.
        headers = [(b"cache-control", b"no-store")]
        return json_response(200, self._tickets.issue(time.time_ns()), headers)

    async def _docs(self, request: Request) -> Answer:
        del request
        headers = [(b"content-security-policy", _PAGE_POLICY)]
        page = await asyncio.to_thread(docs_page)
        return Response(200, page, b"text/html; charset=utf-8", headers)


_LIVEZ: Final = Operation(
    operation_id="livez",
    tag="service",
    summary="Liveness",
    description="Answers as long as the process is running. Needs no token.",
    needs_token=False,
    answers={
        200: AnswerDoc(
            description="Alive.",
            content={"application/json": BodyDoc(shape=Liveness, example={"status": "ok"})},
        )
    },
)
_READYZ: Final = Operation(
    operation_id="readyz",
    tag="service",
    summary="Readiness",
    description="Tells whether the process is ready to serve. With `verbose` the answer gives the "
    "reasons if it is not. Needs no token.",
    query=ReadinessQuery,
    needs_token=False,
    answers={
        200: AnswerDoc(
            description="Ready.",
            content={"application/json": BodyDoc(shape=Readiness, example={"status": "ready"})},
        )
    },
    errors=(errors.INVALID_FIELD,),
)
_METRICS: Final = Operation(
    operation_id="metrics",
    tag="service",
    summary="Prometheus metrics",
    description="Metrics of this process and its storage in the Prometheus text format.",
    answers={
        200: AnswerDoc(
            description="The metrics.",
            content={_METRICS_TYPE: BodyDoc(shape={"type": "string"})},
        )
    },
)
_TICKETS: Final = Operation(
    operation_id="issue_ticket",
    tag="service",
    summary="Create a ticket for a browser",
    description="A web page cannot send headers when it opens a WebSocket or an EventSource. "
    "Instead it requests a ticket, sending its token, and adds `?ticket=` to the URL of "
    "`/v1/ws`, `/v1/events` or a stream's messages as events. A ticket can be used once "
    "and expires after 30 s.",
    answers={
        200: AnswerDoc(
            description="The ticket.",
            content={
                "application/json": BodyDoc(
                    shape=Ticket,
                    example={
                        "ticket": "kq0b4sV4m5Jx3xJ0Z8l7pwGQ8m4b1yWAq2c0o9b6Wk1u3tqv5z7iXw",
                        "expires_at": "2026-01-31T08:00:30.000000000Z",
                    },
                )
            },
        )
    },
)
