"""HTTP/1.1 on the wire: uvicorn's httptools protocol with deadlines, size bounds and problems.

uvicorn leaves a connection alone that sends nothing, half a head or half a body, takes any number
of headers, and answers what it cannot parse in plain text. The bounds are enforced here, below
ASGI, so that the application needs no timers. Built on uvicorn 0.54: its private attributes used
here are ``cycle``, ``pipeline``, ``flow`` and, of a cycle, ``chunked_encoding``.
"""

import asyncio
import time
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any, ClassVar, Final, cast

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from contrail_common import errors
from contrail_common.edge.app import EdgeApp
from contrail_common.edge.delivery import GATHER
from contrail_common.edge.direct import DirectExchange
from contrail_common.edge.last_look import after_a_look
from contrail_common.edge.problems import PROBLEM_TYPE, problem_body, problem_headers
from contrail_common.edge.requests import Request
from contrail_common.edge.settings import EdgeSettings
from contrail_common.edge.websocket import SocketEndpoint
from contrail_common.errors import ApiError
from contrail_common.link import Chunk, Pieces

_LINE_OVERHEAD: Final = 4
_LENGTH_DIGITS_MAX: Final = 8
_UPGRADE_TOKENS: Final = (b"upgrade", b"http2-settings")


def _too_long_target(limits: EdgeSettings) -> ApiError:
    detail = f"at most {limits.target_bytes_max} bytes"
    return ApiError(errors.URI_TOO_LONG, detail, applied=False)


def _too_large_head(limits: EdgeSettings) -> ApiError:
    detail = f"at most {limits.head_bytes_max} bytes and {limits.head_lines_max} lines"
    return ApiError(errors.REQUEST_HEADERS_TOO_LARGE, detail, applied=False)


def _bad_request(detail: str) -> ApiError:
    return ApiError(errors.BAD_REQUEST, detail, applied=False)


class _RefusedError(Exception):
    """Stops the parser: the request is refused while it is being read."""


class _JoinedWrites:
    """A transport for one answer that sends its head together with the first piece of its body.

    uvicorn writes them apart, and each write is a system call and often a packet of its own. A head
    that no body follows at once goes out by itself with the next pass of the loop.
    """

    __slots__ = ("_handle", "_head", "_loop", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head: bytes | None = None
        self._handle: asyncio.Handle | None = None

    def write(self, data: bytes) -> None:
        """Hold the head back, or send what was held with ``data``."""
        if self._handle is None:
            self._head = data
            self._handle = self._loop.call_soon(self._flush)
        elif self._head is None:
            self._transport.write(data)
        else:
            self._handle.cancel()
            head, self._head = self._head, None
            self._transport.write(head + data)

    def writelines(self, pieces: Iterable[Chunk]) -> None:
        """Send ``pieces`` as they are, behind the head."""
        self._flush()
        self._transport.writelines(pieces)

    def _flush(self) -> None:
        head, self._head = self._head, None
        if head is not None:
            self._transport.write(head)

    def close(self) -> None:
        """Close when everything is sent."""
        self._flush()
        self._transport.close()

    def is_closing(self) -> bool:
        """Whether the connection ends."""
        return self._transport.is_closing()


class _Gather:
    """Sends chunks of one answer's body in pieces; uvicorn would join each with its size."""

    __slots__ = ("_cycle", "_transport")

    def __init__(self, cycle: RequestResponseCycle, transport: _JoinedWrites) -> None:
        self._cycle = cycle
        self._transport = transport

    async def __call__(self, pieces: Pieces) -> None:
        """As ASGI's ``send`` of a body with more to come; the head of the answer was sent."""
        cycle = self._cycle
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        size = sum(map(len, pieces))
        if cycle.disconnected or not size:
            return
        if not cycle.response_started or not cycle.chunked_encoding:
            raise RuntimeError("pieces need a body in chunks that has begun")
        self._transport.writelines([b"%x\r\n" % size, *filter(len, pieces), b"\r\n"])


class EdgeHttpProtocol(HttpToolsProtocol):
    """One connection. While it waits for bytes, a deadline runs; while the app works, none does."""

    settings: ClassVar[EdgeSettings]
    edge: ClassVar[EdgeApp]

    _head_open = True  # the head of a request is awaited or incomplete
    _begun = False  # and its first byte has come
    _body_open = False  # the head is complete, the body is not
    _refused = False  # an error was answered; what still comes is dropped
    _unparsed = 0  # bytes fed to the parser since it last gave something complete
    _refusal: ApiError | None = None
    _deadline: asyncio.TimerHandle | None = None
    _armed_at = 0.0
    _progress_at = 0.0
    _window_bytes = 0  # of the body, since `_armed_at`
    _idle_since: float | None = None  # when the last direct answer left, until the next request
    _idle_check: asyncio.TimerHandle | None = None
    _unwritten = 0
    _stall: asyncio.TimerHandle | None = None
    _running: RequestResponseCycle | DirectExchange | None = None
    _direct: DirectExchange | None = None  # the request whose body is awaited, if it is such a one
    _endpoint: SocketEndpoint | None = None  # what the handshake asks for, if the request is one

    # Connection ----------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the deadline of the first head, or refuse a connection too many."""
        super().connection_made(transport)
        if len(self.connections) > self.settings.connections_max:
            self._refuse(ApiError(errors.OVERLOADED, "too many connections", applied=False))
        else:
            self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers; tell the running request, which uvicorn forgets when pipelined."""
        self._stop_timers()
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        if isinstance(running, DirectExchange) and running.more_body:
            running.request.release()  # nobody is going to answer it
        super().connection_lost(exc)

    def _stop_timers(self) -> None:
        self._disarm()
        for timer in (self._stall, self._idle_check):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Feed the parser and watch over what is still missing."""
        dropped = self._refused
        if dropped:
            return
        if self._begun or self._body_open:
            self._unparsed += len(data)
            self._progress_at = self.loop.time()
            self._window_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            if self._feed(data):
                return
        except httptools.HttpParserError:
            self._refuse(self._refusal or _bad_request("the request is not HTTP/1.1"))
            return
        if not self._head_open and not self._body_open and not self.cycle.response_complete:
            self._disarm()  # the application is at work
        elif not self._too_much_unparsed() and self._deadline is None:
            self._arm()

    def _feed(self, data: bytes) -> bool:
        """Parse ``data``; True when the connection is no longer this protocol's."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            rest = data[upgrade.args[0] :]
            if self._endpoint is not None:
                self._open_socket(self._endpoint, rest)
                return True
            self._read_without_upgrade(rest)
        return False

    def _should_upgrade(self) -> bool:
        return self._endpoint is not None

    def _open_socket(self, endpoint: SocketEndpoint, rest: bytes) -> None:
        """Hand the connection over to a socket, or refuse the handshake."""
        scope = cast(Scope, self.scope)
        path, _, query = self.url.partition(b"?")
        scope.update(method="GET", raw_path=path, query_string=query)
        request = self.edge.direct_request(scope)
        try:
            if self.cycle is not None and not self.cycle.response_complete:
                raise _bad_request("an earlier request of the connection is not answered yet")
            self._disarm()
            connections = self.server_state.connections
            socket = self.edge.open_socket(request, endpoint, self.transport, connections)
        except ApiError as error:
            self._refuse(error, request)
            return
        self.connections.discard(self)
        self._stop_timers()
        if rest:
            socket.data_received(rest)

    def _too_much_unparsed(self) -> bool:
        """Refuse a line that never ends: the parser keeps it to itself, without a bound."""
        limits = self.settings
        if self._begun and len(self.url) > limits.target_bytes_max:
            self._refuse(_too_long_target(limits))
            return True
        lines = len(self.headers or ())
        unparsed_max = limits.head_bytes_max + limits.target_bytes_max
        if lines > limits.head_lines_max or self._unparsed > unparsed_max:
            self._refuse(_too_large_head(limits))
            return True
        return False

    # Parser callbacks ----------------------------------------------------------------------------
    def on_message_begin(self) -> None:
        """A request's first byte."""
        super().on_message_begin()
        # An answer to a request before it in the same bytes has set the timer.
        self._unset_keepalive_if_required()
        self._direct = self._idle_since = None
        self._head_open = self._begun = True
        self._unparsed = 0
        self._disarm()

    def on_headers_complete(self) -> None:
        """The head is complete: check it and start the application."""
        self._check_head()
        self._head_open = self._begun = False
        self._body_open = True
        self._unparsed = 0
        self._disarm()
        if self.parser.should_upgrade() and self._get_upgrade() == b"websocket":
            get = self.parser.get_method() == b"GET"
            self._endpoint = self.edge.socket_endpoint(self.url) if get else None
        if self._asks_for_an_upgrade():
            return
        self._direct = self._direct_exchange()
        if self._direct is None:
            super().on_headers_complete()
        self.headers = []  # of trailers, which nobody sees

    def _direct_exchange(self) -> DirectExchange | None:
        """The exchange of a request that needs no application; it becomes the current cycle."""
        method = self.parser.get_method()
        target = self.edge.direct_target(method, self.url)
        if target is None or (self.cycle is not None and not self.cycle.response_complete):
            return None
        scope = cast(Scope, self.scope)
        path, _, query = self.url.partition(b"?")
        scope.update(method=method.decode(), raw_path=path, query_string=query)
        request = self.edge.direct_request(scope)
        length = request.headers.get(b"content-length", b"")
        if method == b"GET":
            if request.body_pending:
                return None
            length = b"0"
        if not length or len(length) > _LENGTH_DIGITS_MAX:
            return None
        if not target.direct.takes(request.headers.get(b"content-type"), int(length)):
            return None
        if self.expect_100_continue or self.parser.should_upgrade() or request.is_coded:
            return None
        try:
            request.hold(int(length))
        except ApiError:
            return None  # the application says so
        exchange = DirectExchange(
            request,
            target,
            time.perf_counter(),
            self.transport,
            self.server_state.default_headers,
            self.parser.get_http_version() != "1.0" and self.parser.should_keep_alive(),
            self._on_direct_answer,
        )
        self._running = self.cycle = exchange  # type: ignore[assignment]
        return exchange

    def _on_direct_answer(self) -> None:
        """Do what uvicorn does after an answer, with one timer for many requests."""
        if self.pipeline or self.transport.is_closing():
            self.on_response_complete()
            return
        self.server_state.total_requests += 1
        self._idle_since = self.loop.time()
        if self._idle_check is None:
            self._idle_check = self.loop.call_later(self.timeout_keep_alive, self._check_idle)

    def _check_idle(self) -> None:
        self._idle_check = None
        if self._idle_since is None:
            return  # a request is under way
        due_at = self._idle_since + self.timeout_keep_alive
        if self.loop.time() >= due_at:
            self.timeout_keep_alive_handler()
        else:
            self._idle_check = self.loop.call_at(due_at, self._check_idle)

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._unparsed = 0
        direct = self._direct
        if direct is None:
            super().on_body(body)
        else:
            direct.body = direct.body + body if direct.body else body

    def on_message_complete(self) -> None:
        """The body is complete."""
        self._body_open = False
        self._disarm()
        direct = self._direct
        if direct is not None:
            direct.more_body = False
            self.edge.answer_directly(direct)
        elif not self._asks_for_an_upgrade():
            super().on_message_complete()

    def _check_head(self) -> None:
        limits = self.settings
        size, hosts = 0, []
        for name, value in self.headers:
            size += len(name) + len(value) + _LINE_OVERHEAD
            if name == b"host":
                hosts.append(value)
        if len(self.url) > limits.target_bytes_max:
            self._stop(_too_long_target(limits))
        if size > limits.head_bytes_max or len(self.headers) > limits.head_lines_max:
            self._stop(_too_large_head(limits))
        if len(hosts) != 1:
            self._stop(_bad_request("exactly one Host header is needed"))
        if not self.url.startswith(b"/"):
            # RFC 9112 section 3.2.2: the target's authority, not the Host header, would count.
            authority = self.url.partition(b"://")[2].partition(b"/")[0]
            if authority.lower() != hosts[0].lower():
                self._stop(_bad_request("the target is not a path of the Host header's server"))

    def _stop(self, refusal: ApiError) -> None:
        self._refusal = refusal
        raise _RefusedError

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        transport = _JoinedWrites(self.transport, self.loop)
        cycle.transport = transport  # type: ignore[assignment]
        scope = cast(Scope, cycle.scope)
        scope["extensions"] = {GATHER: _Gather(cycle, transport)}
        super()._start_asgi_task(cycle, app)

    def _asks_for_an_upgrade(self) -> bool:
        return self.parser.should_upgrade() and not self._should_upgrade()

    def _read_without_upgrade(self, rest: bytes) -> None:
        """Read the request again as a plain one; a server may ignore Upgrade (RFC 9110, 7.8).

        The parser takes what follows the head for another protocol's and drops the body; some
        clients offer HTTP/2 with every request.
        """
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/1.1"]
        for name, value in self.headers:
            if name == b"connection":
                tokens = [one.strip() for one in value.lower().split(b",")]
                value = b", ".join(one for one in tokens if one not in _UPGRADE_TOKENS)  # noqa: PLW2901
            if name != b"upgrade":
                lines.append(name + b": " + value)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(b"\r\n".join([*lines, b"", b""]) + rest)

    # Deadlines -----------------------------------------------------------------------------------
    def _arm(self) -> None:
        now = self.loop.time()
        self._armed_at = self._progress_at = now
        self._window_bytes = 0
        delay_s = self.settings.body_idle_s if self._body_open else self.settings.head_timeout_s
        self._deadline = self.loop.call_at(now + delay_s, self._on_deadline)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_deadline(self) -> None:
        """The time is up, unless the bytes are there and the server has not come to read them."""
        self._deadline = after_a_look(self.loop, self._give_up)

    def _give_up(self) -> None:
        self._deadline = None
        if self._body_open and not self._body_overdue():
            self._deadline = self.loop.call_later(self.settings.body_idle_s, self._on_deadline)
        elif self._begun or self._body_open:
            self._refuse(ApiError(errors.REQUEST_TIMEOUT, applied=False))
        else:
            self.transport.close()

    def _body_overdue(self) -> bool:
        now = self.loop.time()
        # While reading is paused, it is the application that is slow, not the client.
        if self.flow.read_paused or self._window_bytes >= self.settings.body_window_bytes_min:
            self._armed_at, self._window_bytes = now, 0
        return not self.flow.read_paused and (
            now - self._armed_at > self.settings.body_window_s
            or now - self._progress_at >= self.settings.body_idle_s
        )

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, unless its next request is there and was not read yet."""
        self.timeout_keep_alive_task = after_a_look(self.loop, self._close_idle)

    def _close_idle(self) -> None:
        """Close; where the last answer is still unread, cut."""
        self.timeout_keep_alive_task = None
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()  # which closes

    def pause_writing(self) -> None:
        """The peer reads slower than the application writes: see that it reads at all."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """The peer has caught up."""
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        super().resume_writing()

    def _watch_reader(self) -> None:
        self._unwritten = self.transport.get_write_buffer_size()
        self._stall = self.loop.call_later(self.settings.write_stall_s, self._on_stall)

    def _on_stall(self) -> None:
        """The peer has taken nothing, unless it is the server that did not come to write."""
        self._stall = after_a_look(self.loop, self._cut_stalled)

    def _cut_stalled(self) -> None:
        if self.transport.get_write_buffer_size() < self._unwritten:
            self._watch_reader()
        else:
            self.transport.abort()

    # Refusals ------------------------------------------------------------------------------------
    def _refuse(self, error: ApiError, request: Request | None = None) -> None:
        self._refused = True
        self._disarm()
        self.edge.metrics.refused(error.spec)
        if self.transport.is_closing():
            return
        running = self._running
        if running is not None and not running.response_complete:
            if self._head_open or running is not self.cycle:
                # An earlier request is still being answered: let it end, then close.
                self.cycle.keep_alive = running.keep_alive = False
                self.pipeline.clear()
                return
            started = running.response_started
            running.disconnected = True
            running.message_event.set()
            if started:
                self.transport.abort()
                return
        self._write_problem(error, request)

    def _write_problem(self, error: ApiError, request: Request | None) -> None:
        status = error.spec.status
        headers = problem_headers(error)
        if request is None:
            body = problem_body(error)
        else:
            path, request_id = request.raw_path.decode("latin-1"), request.request_id.decode()
            body = problem_body(error, instance=path, request_id=request_id)
            headers.append((b"x-request-id", request.request_id))
        lines = [
            b"HTTP/1.1 %d %b" % (status, HTTPStatus(status).phrase.encode()),
            b"content-type: " + PROBLEM_TYPE.encode(),
            b"content-length: %d" % len(body),
            b"connection: close",
            *(b"%b: %b" % header for header in headers),
        ]
        self.transport.write(b"\r\n".join([*lines, b"", body]))
        # Closing now would reset the connection under a client that still writes, and it would
        # never see the answer: end our side, drop what comes, close a little later.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(self.settings.linger_s, self.transport.abort)


def protocol_class(settings: EdgeSettings, edge: EdgeApp) -> type[EdgeHttpProtocol]:
    """The protocol with its bounds bound, as uvicorn's ``http`` setting takes it."""
    return type("BoundHttpProtocol", (EdgeHttpProtocol,), {"settings": settings, "edge": edge})
