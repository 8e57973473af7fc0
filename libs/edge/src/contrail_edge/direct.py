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
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_edge.http.headers import X_REQUEST_ID
from contrail_edge.http.problems import refusal
from contrail_edge.http.requests import EdgeState, Request, no_more
from contrail_edge.http.responses import Response
from contrail_edge.routing import Direct

_log: Final = structlog.get_logger(__name__)
_LINE: Final = b"%b: %b\r\n"


class DirectTarget(msgspec.Struct, frozen=True, eq=False):
    """The direct handler of a path, and the path's parameters."""

    template: str
    direct: Direct
    path_values: dict[str, str]

    def with_last(self, value: str) -> "DirectTarget":
        """Return this target with another value of the parameter that ends the path."""
        name = self.template.rpartition("/")[2][1:-1]
        return DirectTarget(self.template, self.direct, {**self.path_values, name: value})


class Edge(Protocol):
    """What an exchange needs of the application."""

    state: EdgeState

    def refusal(self, request: Request, error: ApiError) -> Response:
        """Return the answer to a refused request."""
        ...

    def account(self, request: Request, template: str, status: int, seconds: float) -> None:
        """Count an answered request, and log it if that is due."""
        ...


class Connection(Protocol):
    """What an exchange needs of the connection that its request came on."""

    transport: asyncio.Transport

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
        "keep_alive",
        "more_body",
        "response_complete",
        "target",
    )

    response_started: Final = False
    """Always False, because the whole answer is one write."""

    def __init__(
        self,
        scope: Scope,
        target: DirectTarget,
        edge: Edge,
        connection: Connection,
        *,
        keep_alive: bool = True,
        headers: dict[bytes, bytes] | None = None,
    ) -> None:
        """``headers``: as in `Request`."""
        super().__init__(scope, no_more, edge.state, headers)
        self.begun = time.perf_counter()
        self.target = target
        self.path_values = target.path_values
        self.keep_alive = keep_alive
        self.content = b""
        """The body, as far as it has arrived."""
        self.more_body = True
        self.disconnected = False
        self.response_complete = False
        self._edge = edge
        self._connection = connection
        # Done when the client has left; None while no handler waits for that.
        self._left: asyncio.Future[None] | None = None

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
            self._left = asyncio.get_running_loop().create_future()
            await self._left
        return {"type": "http.disconnect"}

    def reply(self, answer: Response | ApiError) -> None:
        """Answer the request: called exactly once, with the handler's answer or refusal."""
        if isinstance(answer, ApiError):
            answer = self._edge.refusal(self, answer)
        self.release()
        self._send(answer)
        seconds = time.perf_counter() - self.begun
        self._edge.account(self, self.target.template, answer.status, seconds)

    def _send(self, answer: Response) -> None:
        """Write the whole answer, and close the connection if it is not kept alive."""
        self.response_complete = True
        transport = self._connection.transport
        if self.disconnected or transport.is_closing():
            return
        head = self._head(answer)
        if head is None:
            _log.error("unsound_header", path=self.target.template)
            answer = refusal(self, ApiError(errors.INTERNAL))
            head = self._head(answer)
            assert head is not None
        data = head + answer.body
        transport.write(data)
        self.state.unread.wrote(transport, len(data))
        if not self.keep_alive:
            transport.close()
        self._connection.on_direct_answer()

    def _head(self, answer: Response) -> bytes | None:
        """Return the head of ``answer``, or None if one of its headers has a line break."""
        headers = answer.wire_headers()
        if not self.keep_alive:
            headers = [*headers, (b"connection", b"close")]
        cors = self.state.cors
        if cors.enabled:
            names = [*(name for name, _ in headers), X_REQUEST_ID]
            headers = [*headers, *self.cors_headers(names)]
        lines = b"".join(map(_LINE.__mod__, headers))
        # A line break in a value, for example from a stored header, would forge headers or an
        # answer.
        if not lines.count(b"\n") == lines.count(b"\r") == len(headers):
            return None
        status, common = STATUS_LINE[answer.status], self.state.common_lines
        return b"%b%b%bx-request-id: %b\r\n\r\n" % (status, common, lines, self.request_id)
