"""A request: its headers, its body within the limits, and the end of its client's connection."""

import asyncio
import itertools
import secrets
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from starlette.types import Message, Receive, Scope

from contrail_common import errors
from contrail_common.errors import ApiError, ErrorSpec
from contrail_edge.http.budgets import BodyBudget, UnreadBudget
from contrail_edge.http.cors import Cors
from contrail_edge.http.grouped import GroupedAnswers
from contrail_edge.http.headers import X_REQUEST_ID
from contrail_edge.http.turns import SharedTurns
from contrail_link.request_context import REQUEST_ID, RequestContext

REQUEST_KEY: Final = "contrail.request"
"""Key of the ASGI scope under which a request that FastAPI serves has its ``Request``."""

CLIENT_GONE_STATUS: Final = 499
"""Status in the metrics for a request whose client left before the answer."""

_T = TypeVar("_T")

_IDENTITY: Final = b"identity"
request_ids: Final = map(f"{secrets.token_hex(4)}-%x".encode().__mod__, itertools.count(1))
"""New request ids, without an end."""


class ClientGoneError(Exception):
    """The client has disconnected, so no answer is needed."""


@dataclass(slots=True)
class EdgeState:
    """State that the requests of one process share: limits on memory and waits, drain signal."""

    bodies: BodyBudget
    unread: UnreadBudget
    cors: Cors
    waiting_max: int
    waiting: int = 0
    turns: SharedTurns = field(default_factory=SharedTurns)
    """Bounds what connections do in one pass of the event loop."""
    access_log: bool = False
    """Whether each answered request is logged."""
    answers: GroupedAnswers = field(init=False)
    """Sends direct answers."""
    common_lines: bytes = b""
    """The header lines of all answers, such as Date; made once a second."""
    _draining: asyncio.Future[None] | None = field(default=None)
    _drained: bool = False

    def __post_init__(self) -> None:
        self.answers = GroupedAnswers(self.unread)

    def drain(self) -> None:
        """End all waits, because the process is about to stop."""
        self._drained = True
        if self._draining is not None and not self._draining.done():
            self._draining.set_result(None)

    @property
    def drained(self) -> bool:
        """True if the process is about to stop."""
        return self._drained

    def draining(self) -> asyncio.Future[None]:
        """A future that is done when the process drains. Waits end when it is."""
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_future()
            if self._drained:
                self._draining.set_result(None)
        return self._draining


async def no_more() -> Message:
    """Receive function of a request whose body the protocol collects."""
    raise ClientGoneError


def bodies_overloaded() -> ApiError:
    """Return the error for more body bytes than one or all connections may hold."""
    detail = "too many bytes of request bodies are in flight"
    return ApiError(errors.OVERLOADED, detail, applied=False)


class Request:
    """One request. ``path_values`` are the decoded path parameters of the matched route.

    ``state`` is shared by all requests of the process.
    """

    __slots__ = (
        "_gone",
        "_id",
        "_receive",
        "_reserved",
        "body_pending",
        "head_only",
        "headers",
        "method",
        "path_values",
        "prepared",
        "query_string",
        "raw_headers",
        "raw_path",
        "scope",
        "state",
    )

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        state: EdgeState,
        headers: dict[bytes, bytes] | None = None,
    ) -> None:
        """``headers`` are those of an earlier request with the same ones, and must not change."""
        self.scope = scope
        self.method: str = scope["method"]
        self.raw_path: bytes = scope["raw_path"]
        # Without the question mark.
        self.query_string: bytes = scope["query_string"]
        self.raw_headers: list[tuple[bytes, bytes]] = scope["headers"]
        self.headers = dict(self.raw_headers) if headers is None else headers
        self.path_values: dict[str, str] = {}
        # What a direct handler has made of the head; it gets this again with the same head.
        self.prepared: object = None
        # The request was HEAD, and is handled as GET: its answer has no body.
        self.head_only = False
        self._receive = receive
        self.state = state
        # Bytes of the body that are counted in `state.bodies`.
        self._reserved = 0
        # Made when somebody waits for the end of the connection.
        self._gone: asyncio.Task[None] | None = None
        # Made when it is first needed.
        self._id: bytes | None = None
        # True until the body has been read completely. The protocol clears it for direct requests.
        self.body_pending = (
            self.headers.get(b"content-length", b"0") != b"0"
            or b"transfer-encoding" in self.headers
        )

    def receive(self) -> Awaitable[Message]:
        """The next message of the client: a piece of the body, or that it has left."""
        return self._receive()

    def cors_headers(self, names: Iterable[bytes]) -> list[tuple[bytes, bytes]]:
        """Return the CORS headers for an answer that has headers of these ``names``."""
        cors = self.state.cors
        return cors.headers(self.headers.get(b"origin"), names) if cors.enabled else []

    @property
    def request_id(self) -> bytes:
        """The client's X-Request-Id if it is valid, otherwise a new one."""
        if self._id is None:
            given = self.headers.get(X_REQUEST_ID)
            if given is not None and REQUEST_ID.fullmatch(given):
                self._id = given
            else:
                self._id = next(request_ids)
        return self._id

    @property
    def context(self) -> RequestContext:
        """The request id and trace, for log lines and for storage."""
        return RequestContext.of(self.request_id, self.headers.get(b"traceparent", b""))

    @property
    def waits_to_be_asked(self) -> bool:
        """True if the client waits for 100 Continue before the body (RFC 9110 section 10.1.1)."""
        return self.headers.get(b"expect", b"").lower() == b"100-continue"

    # Body ----------------------------------------------------------------------------------------
    async def body(self, limit: int, too_large: ErrorSpec = errors.BODY_TOO_LARGE) -> bytes:
        """Read the whole body; raise ``too_large`` as soon as it is known to exceed ``limit``."""
        self.check_declared_length(limit, too_large)
        if not self.body_pending:
            return b""
        self._check_coding()
        first, more = await self._next_chunk(limit, too_large)
        if not more:
            return first
        chunks, total = [first], len(first)
        while more:
            chunk, more = await self._next_chunk(limit - total, too_large)
            chunks.append(chunk)
            total += len(chunk)
        return b"".join(chunks)

    async def chunks(self, limit: int) -> AsyncGenerator[bytes, None]:
        """Yield the body as it arrives. Each chunk counts as in flight until :meth:`consumed`."""
        self.check_declared_length(limit)
        left, more = limit, self.body_pending
        if more:
            self._check_coding()
        while more:
            chunk, more = await self._next_chunk(left, errors.BODY_TOO_LARGE)
            left -= len(chunk)
            if chunk:
                yield chunk

    def consumed(self, count: int) -> None:
        """Stop counting ``count`` bytes of the body as in flight."""
        self._reserved -= count
        self.state.bodies.give(count)

    def check_declared_length(
        self, limit: int, too_large: ErrorSpec = errors.BODY_TOO_LARGE
    ) -> None:
        """Refuse a Content-Length above ``limit`` before any of it is read."""
        declared = self.headers.get(b"content-length")
        if declared is not None and int(declared) > limit:
            raise ApiError(too_large, f"the body is larger than {limit} bytes", applied=False)

    def _check_coding(self) -> None:
        # The server does not store the coding (RFC 9110 section 8.4), so readers could not decode
        # such a payload.
        if self.headers.get(b"content-encoding", _IDENTITY).lower() != _IDENTITY:
            detail = "request bodies with a Content-Encoding are not supported"
            raise ApiError(errors.UNSUPPORTED_MEDIA, detail, applied=False)

    async def _next_chunk(self, limit: int, too_large: ErrorSpec) -> tuple[bytes, bool]:
        message = await self.receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        chunk: bytes = message.get("body", b"")
        more: bool = message.get("more_body", False)
        self.body_pending = more
        if len(chunk) > limit:
            raise ApiError(too_large, "the body is larger than the limit", applied=False)
        self.hold(len(chunk))
        return chunk, more

    async def discard_body(self) -> None:
        """Read the rest of the body, and drop it."""
        while self.body_pending:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            self.body_pending = message.get("more_body", False)

    def hold(self, count: int) -> None:
        """Count ``count`` bytes of the body as in flight until :meth:`release`.

        Raises OVERLOADED.
        """
        if not self.state.bodies.take(self._reserved, count):
            raise bodies_overloaded()
        self._reserved += count

    # Waiting -------------------------------------------------------------------------------------
    @property
    def gone(self) -> asyncio.Task[None]:
        """A task that ends when the client disconnects. The body must have been read."""
        if self._gone is None:
            self._gone = asyncio.create_task(self._until_disconnect())
        return self._gone

    async def _until_disconnect(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def while_wanted(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Return the result of ``work``; cancel it if the client leaves or the process drains.

        Raises ClientGoneError, SHUTTING_DOWN, or TOO_MANY_WAITERS if too many requests wait.
        """
        state = self.state
        if state.waiting >= state.waiting_max:
            # Python warns of a coroutine that is neither awaited nor closed.
            work.close()
            raise ApiError(errors.TOO_MANY_WAITERS, applied=False)
        state.waiting += 1
        task = asyncio.create_task(work)
        draining = state.draining()
        first_of: set[asyncio.Future[Any]] = {task, self.gone, draining}
        try:
            await asyncio.wait(first_of, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        finally:
            state.waiting -= 1
            if not task.done():
                task.cancel()
                # Let the work release its resources before this request ends.
                await asyncio.gather(task, return_exceptions=True)
        if draining.done():
            raise ApiError(errors.SHUTTING_DOWN, applied=False)
        raise ClientGoneError

    def release(self) -> None:
        """Return the budgets that the request uses. Called once, after it was answered."""
        if self._gone is not None:
            self._gone.cancel()
        self.state.bodies.held -= self._reserved
        self._reserved = 0
