"""HTTP/1.1 on the wire: uvicorn's httptools protocol with deadlines, size bounds and problems.

uvicorn has no time limit for a head or a body, no limit on the number of headers, and answers
parse errors in plain text. The limits are enforced here, below ASGI, so that the application needs
no timers. Built on uvicorn 0.54, of which these private attributes are used: ``cycle``,
``pipeline``, ``flow`` and, of a cycle, ``chunked_encoding``.
"""

# One module: all callbacks of a connection work on its fields.

import asyncio
from contextvars import Context
from functools import partial
from typing import Any, ClassVar, Final, cast

import httptools
from starlette.types import Message, Receive, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_edge.app import EdgeApp
from contrail_edge.direct import DirectExchange, DirectHead
from contrail_edge.http.delivery import CUT, GATHER
from contrail_edge.http.guard import bad_request, check_head, too_large_head, too_long_target
from contrail_edge.http.headers import without_upgrade
from contrail_edge.http.last_look import after_a_look
from contrail_edge.http.problems import last_problem
from contrail_edge.http.requests import Request, bodies_overloaded, no_more
from contrail_edge.http.settings import EdgeSettings
from contrail_edge.http_writes import Gather, JoinedWrites, cut
from contrail_edge.tickets import OpenedTicket
from contrail_edge.ws.websocket import SocketEndpoint

# A body with a longer Content-Length is above every limit.
_LENGTH_DIGITS_MAX: Final = 8
_SLICE_BYTES: Final = 8 << 10
"""Bytes that are parsed between two looks at the time: at most some 140 requests."""
_OF_NO_REQUEST: Final = Context()
"""The context of timers. In that of a request, they would keep it in memory after its answer."""


class EdgeHttpProtocol(HttpToolsProtocol):
    """One connection. A deadline runs while it waits for bytes, none while the app works."""

    settings: ClassVar[EdgeSettings]
    edge: ClassVar[EdgeApp]

    _head_open = True  # before the first head, and while one is incomplete
    _begun = False  # the first byte of that head has arrived; implies `_head_open`
    _body_open = False  # the head is complete, the body is not
    _refused = False  # an error was answered; all further bytes are dropped
    _waiting = b""  # bytes that wait for a turn; reading is paused meanwhile
    _unparsed = 0  # bytes fed to the parser since it last completed a part
    _deadline: asyncio.TimerHandle | None = None  # timer of the head or body that is awaited
    _part_ended = False  # a head or body began or ended in these bytes: its deadline is over
    _armed_at = 0.0  # loop time at which the deadline or the body's current window began
    _progress_at = 0.0  # loop time at which bytes last arrived
    _window_bytes = 0  # bytes of the body since `_armed_at`
    _idle_since: float | None = None  # loop time of the last direct answer; None in a request
    _idle_check: asyncio.TimerHandle | None = None  # keep-alive timer of direct answers
    _unwritten = 0  # bytes in the write buffer when `_stall` was set
    _stall: asyncio.TimerHandle | None = None  # set while the peer reads too slowly
    _running: RequestResponseCycle | DirectExchange | None = None  # the last request begun
    _request: Request | None = None  # the last request with a complete head
    _admitted = False  # the guard admits `_request`; if not, its body is dropped
    _buffered = 0  # body bytes that the application has not received yet, counted in `bodies`
    _next: tuple[RequestResponseCycle, Any] | None = None  # waits until the peer reads again
    _direct: DirectExchange | None = None  # the current request, if it is answered directly
    _endpoint: SocketEndpoint | None = None  # set if the request is a WebSocket handshake

    # Connection ----------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the deadline of the first head, or refuse a connection above the limit."""
        super().connection_made(transport)
        if len(self.connections) > self.settings.connections_max:
            self._refuse(ApiError(errors.OVERLOADED, "too many connections", applied=False))
        else:
            self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the connection, in a later pass of the event loop if thousands end at once."""
        self.edge.state.turns.run(partial(self._lost, exc))

    def _lost(self, exc: Exception | None) -> None:
        """Stop the timers and notify the running request, which uvicorn omits if pipelined."""
        self._stop_timers()
        self._next = None
        self.edge.state.unread.forget(self.transport)
        self._took(self._buffered)
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        if isinstance(running, DirectExchange) and running.more_body:
            running.release()  # its body is incomplete, so it is never answered
        super().connection_lost(exc)
        self._let_go()

    def _let_go(self) -> None:
        """End circles of references, so that the connection is freed without a collection."""
        self.parser = self.cycle = self._running = self._direct = None  # type: ignore[assignment]
        self._request = None

    def _stop_timers(self) -> None:
        self._disarm()
        for timer in (self._stall, self._idle_check):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Read the bytes now or, if the turn is over, in a later pass of the event loop."""
        if self._waiting or self.edge.state.turns.over:
            self._wait(data)
        elif self._idle_since is None or not self.edge.answer_known(data, self):
            self._feed(data)

    def _wait(self, data: bytes) -> None:
        if self._waiting:
            self._waiting += data  # somebody has let the transport read again
        else:
            self._waiting = data
            self.transport.pause_reading()
            self.edge.state.turns.add(self._read_waiting)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Close, in a later pass of the event loop if thousands end at once."""
        self.edge.state.answers.flush()
        return self.edge.state.turns.close(self.transport)

    def _read_waiting(self) -> None:
        data, self._waiting = self._waiting, b""
        if self.transport.is_closing():
            return
        if not self.flow.read_paused:
            self.transport.resume_reading()
        if self._idle_since is None or not self.edge.answer_known(data, self):
            self._feed(data)

    def begin_known(self, exchange: DirectExchange) -> bool:
        """Make an exchange the current request, which the parser does not see; False if it must.

        Only after a direct answer: nothing of the next request has been parsed then.
        """
        if self.flow.write_paused or self._refused:
            return False
        self._idle_since = None
        if self.timeout_keep_alive_task is not None:
            self._unset_keepalive_if_required()
        self._request = self._direct = self._running = exchange
        self.cycle = exchange  # type: ignore[assignment]
        return True

    def _feed(self, data: bytes) -> None:
        """Feed the parser, and set or stop the deadline of the missing bytes."""
        if self._refused:
            # Nobody knows where the next request begins: these bytes may be the refused body.
            return
        before, whole = self._direct, not (self._begun or self._body_open)
        if not whole:
            self._progress_at = self.loop.time()
        self._unset_keepalive_if_required()
        left = self._parse(data)
        if left is None:
            return
        direct = self._direct
        if left:
            self._wait(bytes(left))
        elif whole and direct is not None and direct is not before:
            self.edge.known_heads.learn(data, direct)
        if self._part_ended and self._deadline is not None:
            self._disarm()
        self._part_ended = False
        if self._head_open or self._body_open:
            waiting = True
        else:
            # No deadline while the application works, or after a direct answer, which has a timer
            # of its own. Bytes that begin no request (CRLF) have stopped uvicorn's timer, however.
            waiting = self._idle_since is None and self.cycle.response_complete
        if waiting and not self._too_much_unparsed() and self._deadline is None:
            self._arm()

    def _parse(self, data: bytes) -> memoryview | None:
        """Feed the parser until the turn is over, and return the rest; None if it was dropped."""
        left: memoryview | None = memoryview(data)
        try:
            while left:
                left = self._parse_slice(left)
                if left and self.edge.state.turns.over:
                    break
        except httptools.HttpParserError as error:
            # The parser wraps errors that its callbacks raise.
            refusal = error.__context__
            if not isinstance(refusal, ApiError):
                refusal = bad_request("the request is not valid HTTP/1.1")
            self._refuse(refusal)
            return None
        return left

    def _parse_slice(self, left: memoryview) -> memoryview | None:
        """Feed the parser some bytes, and return the others; None if a socket has taken them."""
        size, direct = _SLICE_BYTES, self._direct
        if self._body_open and len(left) > size:
            # A body is not many requests, and joining its pieces would take time. Requests behind
            # a body for the application wait for its answer, so they take little time here.
            whole = len(left)
            if direct is not None:
                whole = int(direct.headers[b"content-length"]) - len(direct.content)
            size = max(size, whole)
        piece = left[:size]
        if self._begun or self._body_open:
            self._unparsed += len(piece)
            self._window_bytes += len(piece)
        try:
            self.parser.feed_data(piece)
            return left[size:]
        except httptools.HttpParserUpgrade as upgrade:
            # The parser has stopped after the head, and says how many bytes it has read.
            size = upgrade.args[0]
        left = left[size:]
        if self._endpoint is not None:
            self._open_socket(self._endpoint, bytes(left))
            return None
        self._read_without_upgrade()
        return left

    def _should_upgrade(self) -> bool:
        return self._endpoint is not None

    def _open_socket(self, endpoint: SocketEndpoint, rest: bytes) -> None:
        """Hand the connection over to a socket, or refuse the handshake."""
        request = self._request
        assert request is not None
        try:
            if self.cycle is not None and not self.cycle.response_complete:
                # Frames of the socket would get into the middle of that answer.
                raise bad_request("an earlier request on the connection is still being answered")
            if request.body_pending:
                raise bad_request("a WebSocket handshake must not have a body")
            self._disarm()
            ticket = self.edge.socket_ticket(request)
        except ApiError as error:
            self._refuse(error)
            return
        if ticket is None:
            self._begin_socket(request, endpoint, rest, proven=False)
            return
        # Until storage has answered, nothing can take frames: leave them in the kernel.
        self.flow.pause_reading()
        task = self.loop.create_task(self._use_ticket(ticket, request, endpoint, rest))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _use_ticket(
        self, ticket: OpenedTicket, request: Request, endpoint: SocketEndpoint, rest: bytes
    ) -> None:
        try:
            await self.edge.use_ticket(ticket)
        except ApiError as error:
            self._refuse(error)
            return
        if not self.transport.is_closing():
            self.flow.resume_reading()
            self._begin_socket(request, endpoint, rest, proven=True)

    def _begin_socket(
        self, request: Request, endpoint: SocketEndpoint, rest: bytes, *, proven: bool
    ) -> None:
        connections = self.server_state.connections
        self.edge.state.answers.flush()
        try:
            socket = self.edge.open_socket(
                request, endpoint, self.transport, connections, proven=proven
            )
        except ApiError as error:
            self._refuse(error)
            return
        self.connections.discard(self)  # the socket has added itself
        self._stop_timers()
        self._let_go()
        if rest:
            socket.data_received(rest)

    def _too_much_unparsed(self) -> bool:
        """Refuse a line that never ends, which the parser would buffer without a limit."""
        limits = self.settings
        if self._begun and len(self.url) > limits.target_bytes_max:
            self._refuse(too_long_target(limits))
            return True
        lines = len(self.headers or ())
        unparsed_max = limits.head_bytes_max + limits.target_bytes_max
        if lines > limits.head_lines_max or self._unparsed > unparsed_max:
            self._refuse(too_large_head(limits))
            return True
        return False

    # Parser callbacks ----------------------------------------------------------------------------
    def on_message_begin(self) -> None:
        """Prepare for a request whose first byte has arrived."""
        super().on_message_begin()
        # The answer to an earlier request in the same bytes has set the timer.
        self._unset_keepalive_if_required()
        self._direct = self._idle_since = None
        self._head_open = self._begun = self._part_ended = True
        self._unparsed = 0

    def on_headers_complete(self) -> None:
        """Check a complete head, and start the application unless it is answered directly."""
        parser = self.parser
        check_head(self.url, self.headers, parser.get_http_version(), self.settings)
        method = parser.get_method()
        if method == b"CONNECT":
            raise bad_request("this server is not a proxy")
        self._head_open = self._begun = False
        self._body_open = self._part_ended = True
        self._unparsed = 0
        if parser.should_upgrade():
            if method == b"GET" and self._get_upgrade() == b"websocket":
                self._endpoint = self.edge.socket_endpoint(self.url)
            if self._endpoint is None:
                return  # the head is read again without the offer, see `_read_without_upgrade`
        scope = cast(Scope, self.scope)
        path, _, query = self.url.partition(b"?")
        scope.update(method=method.decode(), raw_path=path, query_string=query)
        self._request = request = Request(scope, no_more, self.edge.state)
        try:
            self.edge.guard.check(request)
            self._admitted = True
        except ApiError:
            self._admitted = False  # the application answers why, and the body is never buffered
        direct = self._direct_exchange(request, method) if self._admitted else None
        if direct is not None:
            self._request = self._direct = self._running = direct
            self.cycle = direct  # type: ignore[assignment]
        else:
            # uvicorn stops reading when a request has to wait, but may have read thousands by then.
            if len(self.pipeline) >= self.settings.pipelined_max:
                detail = "too many requests are waiting on the connection"
                raise ApiError(errors.OVERLOADED, detail, applied=False)
            super().on_headers_complete()
            if self.pipeline and cast(Any, self._running).awaits_end:
                self.flow.resume_reading()  # a paused connection does not tell of its end
        self.headers = []  # collects trailers from here on, which are ignored

    def _direct_exchange(self, request: Request, method: bytes) -> DirectExchange | None:
        """Return the exchange of a request that is answered without ASGI; None for all others."""
        target = self.edge.direct_target(method, self.url)
        if target is None or (self.cycle is not None and not self.cycle.response_complete):
            return None
        # The application waits until the peer has read the last answer, asks for the body, refuses
        # codings, and drops the body of a handshake.
        if self.flow.write_paused or self.expect_100_continue or self._endpoint is not None:
            return None
        headers = request.headers
        length = headers.get(b"content-length", b"")
        if method == b"GET":
            if request.body_pending:
                return None
            length = b"0"
        if not length or len(length) > _LENGTH_DIGITS_MAX or b"content-encoding" in headers:
            return None
        direct = target.direct
        if int(length) > direct.body_bytes_max:
            return None
        if direct.types and headers.get(b"content-type") not in direct.types:
            return None
        if direct.accepts and headers.get(b"accept", b"*/*") not in direct.accepts:
            return None
        keep_alive = self.parser.get_http_version() != "1.0" and self.parser.should_keep_alive()
        head = DirectHead(request.scope, request.headers)
        return DirectExchange(head, target, self.edge, self, keep_alive=keep_alive)

    def on_direct_answer(self) -> None:
        """Do what uvicorn does after an answer, with one timer for many requests."""
        if self.pipeline or self.transport.is_closing():
            self.on_response_complete()
            return
        if self._begun:
            return  # the next head is incomplete, and has a deadline
        self._idle_since = self.loop.time()
        if self._idle_check is None:
            self._idle_check = self.loop.call_later(
                self.timeout_keep_alive, self._check_idle, context=_OF_NO_REQUEST
            )

    def _check_idle(self) -> None:
        self._idle_check = None
        if self._idle_since is None:
            return  # a request is running
        due_at = self._idle_since + self.timeout_keep_alive
        if self.loop.time() >= due_at:
            self.timeout_keep_alive_handler()
        else:
            self._idle_check = self.loop.call_at(due_at, self._check_idle)

    def on_body(self, body: bytes) -> None:
        """Keep a piece of the body, within the limits of the process."""
        self._unparsed = 0
        direct = self._direct
        if direct is not None:
            direct.hold(len(body))
            direct.content = direct.content + body if direct.content else body
        elif self._admitted and not self.cycle.response_complete:
            # Counted here, because the application may be slow to receive it.
            if not self.edge.state.bodies.take(self._buffered, len(body)):
                raise bodies_overloaded()
            self._buffered += len(body)
            super().on_body(body)

    def _took(self, count: int) -> None:
        """Stop counting body bytes that the application has received and counts itself."""
        # After the loss of the connection, everything has been given back already.
        taken = min(count, self._buffered)
        self._buffered -= taken
        self.edge.state.bodies.give(taken)

    def on_message_complete(self) -> None:
        """Answer a direct request, or hand the end of the body to the application."""
        self._body_open = False
        self._part_ended = True
        direct = self._direct
        if direct is not None:
            self.edge.answer_directly(direct)
        elif self._endpoint is not None or not self.parser.should_upgrade():
            # With an offer to ignore, only the head ended; its body follows when it is read again.
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if self.flow.write_paused:
            # Do not produce an answer while the peer has not read the last one.
            self.flow.pause_reading()
            self._next = cycle, app
            return
        self._running = cycle
        cast(Any, cycle).receive = self._counted(cycle)
        transport = JoinedWrites(self.transport, self.loop, self.edge.state.unread)
        cycle.transport = transport  # type: ignore[assignment]
        scope = cast(Scope, cycle.scope)
        scope["extensions"] = {GATHER: Gather(cycle, transport), CUT: partial(cut, cycle)}
        super()._start_asgi_task(cycle, app)

    def _counted(self, cycle: Any) -> Receive:
        receive, cycle.awaits_end = cycle.receive, False

        async def counted() -> Message:
            cycle.awaits_end = True
            try:
                message: Message = await receive()
            finally:
                cycle.awaits_end = False
            self._took(len(message.get("body", b"")))
            return message

        return counted

    def _read_without_upgrade(self) -> None:
        """Read the head again as a plain one; a server may ignore Upgrade (RFC 9110, 7.8).

        Otherwise the parser treats the body as another protocol's bytes and drops it. Some clients
        offer HTTP/2 with every request.
        """
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        lines += (b"%b: %b" % header for header in without_upgrade(self.headers))
        # All callbacks run again for this head, from `on_message_begin` on.
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        self.parser.feed_data(b"\r\n".join([*lines, b"", b""]))

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
        """Give up, unless the missing bytes have arrived and are only not read yet."""
        self._deadline = after_a_look(self.loop, self._give_up)

    def _give_up(self) -> None:
        if self._waiting:
            self._on_deadline()
            return
        self._deadline = None
        if self._body_open and not self._body_overdue():
            self._deadline = self.loop.call_later(self.settings.body_idle_s, self._on_deadline)
        elif self._begun or self._body_open:
            self._refuse(ApiError(errors.REQUEST_TIMEOUT, applied=False))
        else:
            self.transport.close()  # no byte of a request has arrived, so there is none to answer

    def _body_overdue(self) -> bool:
        now = self.loop.time()
        # While reading is paused, the application is slow, not the client.
        if self.flow.read_paused or self._window_bytes >= self.settings.body_window_bytes_min:
            self._armed_at, self._window_bytes = now, 0
        return not self.flow.read_paused and (
            now - self._armed_at > self.settings.body_window_s
            or now - self._progress_at >= self.settings.body_idle_s
        )

    def on_response_complete(self) -> None:
        """End what refers in a circle to a request that is answered; see `_let_go`."""
        if isinstance(self._running, RequestResponseCycle):
            vars(self._running).pop("receive", None)
            cast(Scope, self._running.scope).pop("extensions", None)
        super().on_response_complete()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, unless its next request has arrived and is not read yet."""
        self.timeout_keep_alive_task = after_a_look(self.loop, self._close_idle)

    def _close_idle(self) -> None:
        """Close the connection, or abort it if the peer has not read the last answer."""
        if self._waiting:
            self.timeout_keep_alive_handler()
            return
        self.timeout_keep_alive_task = None
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()  # which closes

    def pause_writing(self) -> None:
        """Watch that the peer, which reads more slowly than the app writes, reads at all."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """Start the request that waited for the peer to read."""
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        super().resume_writing()
        if self._next is not None and not self._refused:
            (cycle, app), self._next = self._next, None
            self._start_asgi_task(cycle, app)

    def _watch_reader(self) -> None:
        self._unwritten = self.transport.get_write_buffer_size()
        self._stall = self.loop.call_later(self.settings.write_stall_s, self._on_stall)

    def _on_stall(self) -> None:
        """Abort if the peer has read nothing, unless only the event loop was late."""
        self._stall = after_a_look(self.loop, self._cut_stalled)

    def _cut_stalled(self) -> None:
        if self.transport.get_write_buffer_size() < self._unwritten:
            self._watch_reader()
        else:
            self.transport.abort()

    # Refusals ------------------------------------------------------------------------------------
    def _refuse(self, error: ApiError) -> None:
        self._refused = True
        self._disarm()
        self.edge.state.answers.flush()  # they may be of earlier requests on this connection
        self.edge.metrics.refused(error.spec)
        if self.transport.is_closing():
            return
        running = self._running
        if running is not None and not running.response_complete:
            if not self._body_open or running is not self.cycle:
                # An earlier request is whole and still being answered, so it may yet be applied.
                # Close when that answer is complete.
                self.cycle.keep_alive = running.keep_alive = False
                self.pipeline.clear()
                return
            started = running.response_started
            running.disconnected = True
            running.message_event.set()
            if started:
                # The client would read a problem as the rest of the answer that has begun.
                self.transport.abort()
                return
        if self._next is None:
            problem = last_problem(error, None if self._head_open else self._request)
            self.transport.write(problem)
        else:
            # Requests before it wait for the peer to read. None is begun, or gets this answer.
            self._next = None
            self.pipeline.clear()
        # Closing now would reset the connection of a client that is still writing, and it would
        # never see the answers. So end this side, drop what arrives, and close later.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._linger()

    def _linger(self) -> None:
        unread, settings = self.transport.get_write_buffer_size(), self.settings
        wait_s = settings.write_stall_s if unread else settings.linger_s
        self.loop.call_later(wait_s, self._leave, unread)

    def _leave(self, unread: int) -> None:
        """Abort, unless the peer has read some of what was ``unread``."""
        if self.transport.get_write_buffer_size() < unread:
            self._linger()
        else:
            self.transport.abort()


def protocol_class(settings: EdgeSettings, edge: EdgeApp) -> type[EdgeHttpProtocol]:
    """Return a protocol class for uvicorn's ``http`` setting that uses ``settings``."""
    return type("BoundHttpProtocol", (EdgeHttpProtocol,), {"settings": settings, "edge": edge})
