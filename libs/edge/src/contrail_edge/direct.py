"""Requests that the protocol answers itself, without an ASGI cycle or a task, in one write.

An exchange replaces the cycle of a request in uvicorn's protocol, and has the same attributes. So
pipelining, deadlines, disconnects and shutdown work in the same way.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final

import msgspec
import structlog
from starlette.types import Message
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_edge.http.headers import X_REQUEST_ID
from contrail_edge.http.problems import refusal
from contrail_edge.http.requests import Request
from contrail_edge.http.responses import Header, Response
from contrail_edge.routing import Direct

_log: Final = structlog.get_logger(__name__)


class DirectTarget(msgspec.Struct, frozen=True, eq=False):
    """The direct handler of a path, and the path's parameters."""

    template: str
    direct: Direct
    path_values: dict[str, str]


class DirectExchange:
    """One request and its answer on a connection."""

    __slots__ = (
        "_left",
        "begun",
        "body",
        "default_headers",
        "disconnected",
        "keep_alive",
        "more_body",
        "on_response",
        "request",
        "response_complete",
        "target",
        "transport",
    )

    response_started: Final = False
    """Always False, because the whole answer is one write."""

    def __init__(
        self,
        request: Request,
        target: DirectTarget,
        transport: asyncio.Transport,
        default_headers: list[Header],
        keep_alive: bool,
        on_response: Callable[[], None],
    ) -> None:
        self.request = request
        self.target = target
        self.begun = time.perf_counter()
        self.transport = transport
        self.default_headers = default_headers
        self.keep_alive = keep_alive
        self.on_response = on_response
        self.body = b""
        self.more_body = True
        self.disconnected = False
        self.response_complete = False
        # Done when the client has left; None while no handler waits for that.
        self._left: asyncio.Future[None] | None = None
        request.receive = self.receive

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

    def send(self, answer: Response) -> None:
        """Write the whole answer, and close the connection if it is not kept alive."""
        if self.disconnected or self.transport.is_closing():
            self.response_complete = True
            return
        head = self._head(answer)
        if head is None:
            _log.error("unsound_header", path=self.target.template)
            answer = refusal(self.request, ApiError(errors.INTERNAL))
            head = self._head(answer)
            assert head is not None
        data = head + answer.body
        self.transport.write(data)
        self.request.state.unread.wrote(self.transport, len(data))
        self.response_complete = True
        if not self.keep_alive:
            self.transport.close()
        self.on_response()

    def _head(self, answer: Response) -> bytes | None:
        """Return the head of ``answer``, or None if one of its headers has a line break."""
        parts = [STATUS_LINE[answer.status]]
        headers = [
            *self.default_headers,
            *answer.wire_headers(),
            (X_REQUEST_ID, self.request.request_id),
        ]
        if not self.keep_alive:
            headers.append((b"connection", b"close"))
        if self.request.state.cors.enabled:
            headers += self.request.cors_headers([name for name, _ in headers])
        for name, value in headers:
            parts += (name, b": ", value, b"\r\n")
        parts.append(b"\r\n")
        head = b"".join(parts)
        lines = len(headers) + 2
        # A line break in a value, for example from a stored header, would forge headers or an
        # answer.
        return head if head.count(b"\n") == head.count(b"\r") == lines else None
