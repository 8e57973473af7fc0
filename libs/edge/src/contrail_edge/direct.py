"""Requests that the protocol answers itself, without an ASGI cycle, in one write.

An exchange is the request and its answer, in one object. It replaces the cycle of a request in
uvicorn's protocol, and has the same attributes. So pipelining, deadlines, disconnects and shutdown
work in the same way.
"""

import asyncio
import time
from typing import Final, Protocol

import msgspec
import structlog
from starlette.types import Message, Scope
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_edge.http.headers import X_REQUEST_ID
from contrail_edge.http.problems import refusal
from contrail_edge.http.requests import EdgeState, Request, no_more
from contrail_edge.http.responses import Response, header_lines
from contrail_edge.metrics import RouteTimings
from contrail_edge.routing import Direct

SERVER_ERROR: Final = 500
"""From this status on, an answer is logged if it is not expected under load."""
_log: Final = structlog.get_logger(__name__)


class DirectTarget(msgspec.Struct, frozen=True, eq=False):
    """The direct handler of a path, the path's parameters, and what counts its answers."""

    template: str
    direct: Direct
    path_values: dict[str, str]
    timings: RouteTimings

    def with_last(self, value: str) -> "DirectTarget":
        """Return this target with another value of the parameter that ends the path."""
        name = self.template.rpartition("/")[2][1:-1]
        values = {**self.path_values, name: value}
        return DirectTarget(self.template, self.direct, values, self.timings)


class DirectHead(msgspec.Struct, frozen=True, eq=False):
    """The head of a request. Nothing of it must change: later requests may have the same one.

    ``scope`` and ``headers`` then have the target or the Content-Length of the request that it was
    learned from, which says nothing about others. ``prepared`` is what the handler has made of the
    head. ``target`` is None if it may differ, as in a known read, or is not found yet.
    """

    scope: Scope
    headers: dict[bytes, bytes]
    target: DirectTarget | None = None
    prepared: object = None


class Edge(Protocol):
    """What an exchange needs of the application."""

    state: EdgeState

    def refusal(self, request: Request, error: ApiError) -> Response:
        """Return the answer to a refused request."""
        ...

    def log_answer(self, request: Request, status: int, seconds: float) -> None:
        """Log an answered request if that is due."""
        ...


class Connection(Protocol):
    """What an exchange needs of the connection that its request came on."""

    transport: asyncio.Transport
    flow: FlowControl

    def begin_known(self, exchange: "DirectExchange") -> bool:
        """Make the exchange of a known head the current request; False if it must be parsed."""
        ...

    def on_direct_answer(self) -> None:
        """Begin what follows an answer that was written."""
        ...


class DirectExchange(Request):
    """One request and its answer on a connection."""

    __slots__ = (
        "_connection",
        "_edge",
        "_left",
        "begun",
        "content",
        "disconnected",
        "handling",
        "keep_alive",
        "more_body",
        "response_complete",
        "target",
    )

    response_started: Final = False
    """Always False, because the whole answer is one write."""

    def __init__(
        self,
        head: DirectHead,
        target: DirectTarget,
        edge: Edge,
        connection: Connection,
        *,
        content: bytes = b"",
        keep_alive: bool = True,
        request_id: bytes | None = None,
    ) -> None:
        """``content`` is counted in ``edge.state.bodies``.

        ``request_id`` is None if the client may have sent one.
        """
        # All fields of `Request`: to call its constructor for each message would take longer.
        scope = self.scope = head.scope
        self.method = scope["method"]
        self.raw_path = scope["raw_path"]
        self.query_string = scope["query_string"]
        self.raw_headers = scope["headers"]
        self.headers = head.headers
        self.path_values = target.path_values
        self.prepared = head.prepared
        self.head_only = False
        self.body_pending = True
        self.state = edge.state
        self._receive = no_more
        self._reserved = len(content)
        self._gone = None
        self._id = request_id
        self.begun = time.perf_counter()
        self.target = target
        self.keep_alive = keep_alive
        self.content = content
        """The body, as far as it has arrived."""
        self.more_body = True
        self.handling = False
        """Whether the handler is being called, so that other requests may follow at once."""
        self.disconnected = False
        self.response_complete = False
        self._edge = edge
        self._connection = connection
        # Done when the client has left; None while no handler waits for that.
        self._left: asyncio.Future[None] | None = None

    @property
    def awaits_end(self) -> bool:
        """Whether the handler waits for the client to leave."""
        return self._left is not None and not self._left.done()

    @property
    def message_event(self) -> "DirectExchange":
        """What the protocol sets when the client has left."""
        return self

    def set(self) -> None:
        """Wake the handler if it waits for the end of the connection."""
        if self._left is not None and not self._left.done():
            self._left.set_result(None)

    async def receive(self) -> Message:
        """Return when the client has left. The handler has the body already."""
        if not self.disconnected:
            # A paused connection does not tell of its end, and may wait with a request behind this.
            self._connection.flow.resume_reading()
            self._left = asyncio.get_running_loop().create_future()
            await self._left
        return {"type": "http.disconnect"}

    def reply(self, answer: Response | ApiError) -> None:
        """Answer the request: called exactly once, with the handler's answer or refusal."""
        if isinstance(answer, ApiError):
            answer = self._edge.refusal(self, answer)
        self.release()
        self._send(answer)
        status, seconds = answer.status, time.perf_counter() - self.begun
        self.target.timings.answered(status, seconds)
        if status >= SERVER_ERROR or self.state.access_log:
            self._edge.log_answer(self, status, seconds)

    def _send(self, answer: Response) -> None:
        """Write the whole answer, and close the connection if it is not kept alive."""
        self.response_complete = True
        transport, state = self._connection.transport, self.state
        if self.disconnected or transport.is_closing():
            return
        lines = answer.lines
        if not lines or answer.headers or not self.keep_alive or state.cors.enabled:
            answer, lines = self._sound(answer)
        data = b"%b%b%bx-request-id: %b\r\n\r\n%b" % (
            STATUS_LINE[answer.status],
            state.common_lines,
            lines,
            self._id or self.request_id,
            answer.body,
        )
        if self.handling:
            state.answers.add(transport, data)
        else:
            state.answers.write(transport, data)
        if not self.keep_alive:
            state.answers.flush()
            transport.close()
        self._connection.on_direct_answer()

    def _sound(self, answer: Response) -> tuple[Response, bytes]:
        """Return ``answer``, or a refusal if it is unsound, and the lines of its headers."""
        lines = self._lines(answer)
        if lines is None:
            _log.error("unsound_header", path=self.target.template)
            answer = refusal(self, ApiError(errors.INTERNAL))
            lines = self._lines(answer)
            assert lines is not None
        return answer, lines

    def _lines(self, answer: Response) -> bytes | None:
        headers = answer.wire_headers()
        if not self.keep_alive:
            headers = [*headers, (b"connection", b"close")]
        cors = self.state.cors
        if cors.enabled:
            names = [*(name for name, _ in headers), X_REQUEST_ID]
            headers = [*headers, *self.cors_headers(names)]
        return header_lines(headers)
