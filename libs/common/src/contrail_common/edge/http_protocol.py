"""HTTP/1.1 on the wire: uvicorn's httptools protocol with deadlines, size bounds and problems.

uvicorn leaves a connection alone that sends nothing, half a head or half a body, takes any number
of headers, and answers what it cannot parse in plain text. The bounds are enforced here, below
ASGI, so that the application needs no timers. Built on uvicorn 0.54: its private attributes used
here are ``cycle``, ``pipeline``, ``flow`` and ``send_400_response``.
"""

import asyncio
from typing import Any, ClassVar, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from contrail_common import errors
from contrail_common.edge.metrics import EdgeMetrics
from contrail_common.edge.problems import PROBLEM_TYPE, problem_body, problem_headers
from contrail_common.edge.settings import EdgeSettings
from contrail_common.errors import ApiError, ErrorSpec

_PHRASES: Final = {
    400: b"Bad Request",
    408: b"Request Timeout",
    414: b"URI Too Long",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}


class _RefusedError(Exception):
    """Stops the parser: the request is refused while it is being read."""


class EdgeHttpProtocol(HttpToolsProtocol):
    """One connection. While it waits for bytes, a deadline runs; while the app works, none does."""

    settings: ClassVar[EdgeSettings]
    metrics: ClassVar[EdgeMetrics]

    _head_open = True  # the head of a request is awaited or incomplete
    _begun = False  # and its first byte has come
    _body_open = False  # the head is complete, the body is not
    _refused = False  # an error was answered; what still comes is dropped
    _head_fed = 0
    _head_bytes = 0
    _head_lines = 0
    _hosts: tuple[bytes, ...] = ()
    _refusal: ApiError | None = None
    _deadline: asyncio.TimerHandle | None = None
    _armed_at = 0.0
    _progress_at = 0.0
    _unwritten = 0
    _stall: asyncio.TimerHandle | None = None
    _running: RequestResponseCycle | None = None

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
        self._disarm()
        if self._stall is not None:
            self._stall.cancel()
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser and watch over what is still missing."""
        if not self._refused:
            self._feed(data)

    def _feed(self, data: bytes) -> None:
        if self._body_open:
            self._progress_at = self.loop.time()
        fed_before = self._head_open and self._begun
        super().data_received(data)
        if self._refused:
            return
        if self._head_open and fed_before:
            # The parser keeps an unfinished header line to itself: bound what it was fed.
            self._head_fed += len(data)
            if self._head_fed > self.settings.head_bytes_max + self.settings.target_bytes_max:
                self._refuse(ApiError(errors.REQUEST_HEADERS_TOO_LARGE, applied=False))
                return
        if self._app_at_work():
            self._disarm()
        elif self._deadline is None:
            self._arm()

    def _app_at_work(self) -> bool:
        complete = not self._head_open and not self._body_open
        return complete and self.cycle is not None and not self.cycle.response_complete

    # Parser callbacks ----------------------------------------------------------------------------
    def on_message_begin(self) -> None:
        """A request's first byte."""
        super().on_message_begin()
        self._head_open = self._begun = True
        self._head_fed = self._head_bytes = self._head_lines = 0
        self._hosts = ()
        self._disarm()

    def on_url(self, url: bytes) -> None:
        """A piece of the request target."""
        super().on_url(url)
        if len(self.url) > self.settings.target_bytes_max:
            self._stop(errors.URI_TOO_LONG, f"at most {self.settings.target_bytes_max} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header line, or a trailer line, which is counted and dropped."""
        self._head_lines += 1
        self._head_bytes += len(name) + len(value) + 4
        if self._head_lines > self.settings.head_lines_max:
            self._stop(
                errors.REQUEST_HEADERS_TOO_LARGE, f"at most {self.settings.head_lines_max} lines"
            )
        if self._head_bytes > self.settings.head_bytes_max:
            self._stop(
                errors.REQUEST_HEADERS_TOO_LARGE, f"at most {self.settings.head_bytes_max} bytes"
            )
        if self._head_open:
            super().on_header(name, value)
            if len(name) == 4 and name.lower() == b"host":  # noqa: PLR2004
                self._hosts += (value,)

    def on_headers_complete(self) -> None:
        """The head is complete: check its Host and start the application."""
        if len(self._hosts) != 1:
            self._stop(errors.BAD_REQUEST, "exactly one Host header is needed")
        if not self.url.startswith(b"/"):
            self._check_absolute_target()
        self._head_open = self._begun = False
        self._body_open = True
        self._disarm()
        super().on_headers_complete()
        if self.parser.should_upgrade():
            # The parser stops for good after an upgrade that nobody takes up.
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        """The body is complete."""
        self._body_open = False
        self._disarm()
        super().on_message_complete()

    def _check_absolute_target(self) -> None:
        # RFC 9112 section 3.2.2: the target's authority, not the Host header, would count.
        authority = self.url.partition(b"://")[2].partition(b"/")[0]
        if authority.lower() != self._hosts[0].lower():
            self._stop(errors.BAD_REQUEST, "the target is not a path of the Host header's server")

    def _stop(self, spec: ErrorSpec, detail: str) -> None:
        self._refusal = ApiError(spec, detail, applied=False)
        raise _RefusedError

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    # Deadlines -----------------------------------------------------------------------------------
    def _arm(self) -> None:
        now = self.loop.time()
        self._armed_at = self._progress_at = now
        delay_s = self.settings.body_idle_s if self._body_open else self.settings.head_timeout_s
        self._deadline = self.loop.call_at(now + delay_s, self._on_deadline)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_deadline(self) -> None:
        self._deadline = None
        if self._body_open and not self._body_overdue():
            self._deadline = self.loop.call_later(self.settings.body_idle_s, self._on_deadline)
        elif self._begun or self._body_open:
            self._refuse(ApiError(errors.REQUEST_TIMEOUT, applied=False))
        else:
            self.transport.close()

    def _body_overdue(self) -> bool:
        now = self.loop.time()
        if now - self._armed_at > self.settings.body_total_s:
            return True
        # While reading is paused, it is the application that is slow, not the client.
        return not self.flow.read_paused and now - self._progress_at >= self.settings.body_idle_s

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection; one whose last answer is still unread is cut."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

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
        if self.transport.get_write_buffer_size() < self._unwritten:
            self._watch_reader()
        else:
            self.transport.abort()

    # Refusals ------------------------------------------------------------------------------------
    def send_400_response(self, msg: str) -> None:
        """Answer what the parser did not take; uvicorn calls this for every parser error."""
        del msg
        refusal, self._refusal = self._refusal, None
        self._refuse(
            refusal or ApiError(errors.BAD_REQUEST, "the request is not HTTP/1.1", applied=False)
        )

    def _refuse(self, error: ApiError) -> None:
        self._refused = True
        self._disarm()
        self.metrics.refused(error.spec)
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
        self._write_problem(error)

    def _write_problem(self, error: ApiError) -> None:
        status = error.spec.status
        body = problem_body(error)
        lines = [
            b"HTTP/1.1 %d %b" % (status, _PHRASES[status]),
            b"content-type: " + PROBLEM_TYPE.encode(),
            b"content-length: %d" % len(body),
            b"connection: close",
            *(b"%b: %b" % header for header in problem_headers(error)),
        ]
        self.transport.write(b"\r\n".join([*lines, b"", body]))
        # Closing now would reset the connection under a client that still writes, and it would
        # never see the answer: end our side, drop what comes, close a little later.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(self.settings.linger_s, self.transport.abort)


def protocol_class(settings: EdgeSettings, metrics: EdgeMetrics) -> type[EdgeHttpProtocol]:
    """The protocol with its bounds bound, as uvicorn's ``http`` setting takes it."""
    return type(
        "BoundHttpProtocol", (EdgeHttpProtocol,), {"settings": settings, "metrics": metrics}
    )
