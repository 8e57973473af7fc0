"""The public ASGI application: guard, one table of all routes, fast lane or FastAPI, metrics."""

import asyncio
import importlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

import structlog
from starlette.types import Receive, Scope, Send

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_edge.direct import SERVER_ERROR, Connection, DirectExchange, DirectTarget
from contrail_edge.http import problems
from contrail_edge.http.budgets import BodyBudget, UnreadBudget
from contrail_edge.http.cors import Cors
from contrail_edge.http.delivery import Wire, cut, deliver
from contrail_edge.http.guard import Guard
from contrail_edge.http.requests import (
    CLIENT_GONE_STATUS,
    REQUEST_KEY,
    ClientGoneError,
    EdgeState,
    Request,
    request_ids,
)
from contrail_edge.http.responses import Answer, Header, Response
from contrail_edge.http.settings import EdgeSettings
from contrail_edge.inputs.paths import canonical_path, split_path
from contrail_edge.known_heads import KnownHeads
from contrail_edge.metrics import UNMATCHED, EdgeMetrics
from contrail_edge.probes import Probes
from contrail_edge.routing import EdgeModule, Elsewhere, PathTable, Route
from contrail_edge.tickets import OpenedTicket, Tickets
from contrail_edge.ws.handshake import accept
from contrail_edge.ws.socket_metrics import SocketCounts
from contrail_edge.ws.websocket import EdgeSocket, Opening, SocketEndpoint
from contrail_link.request_context import enter_context, leave_context

if TYPE_CHECKING:
    from contrail_edge.openapi.declared import DeclaredRoutes

_log: Final = structlog.get_logger(__name__)

BUSY_STATUS: Final = 503
"""Not logged: readiness and metrics show it, and a line for each refusal would add load."""

_EVENT_TEMPLATES: Final = frozenset({"/v1/events", "/v1/streams/{stream}/messages"})
"""Routes that accept a ticket, because a browser's EventSource cannot send a token."""
# Entries of the cache of direct targets for each method, and the longest URL in it.
_DIRECT_URLS_MAX: Final = 4096
_DIRECT_URL_BYTES_MAX: Final = 256
_UNKNOWN: Final = object()


async def _no_upgrade(request: Request) -> Answer:
    raise ApiError(
        errors.UPGRADE_REQUIRED, f"{request.raw_path.decode()} only accepts WebSocket connections"
    )


@dataclass(frozen=True, slots=True)
class _Target:
    """The target of a method and path. If ``route`` is None, FastAPI runs a management route.

    If ``elsewhere`` is set, the request is forwarded to another process, whatever its route.
    """

    template: str
    route: Route | None
    elsewhere: Elsewhere | None = None


class EdgeApp:
    """The ASGI application of one process, with the routes and sockets of its modules.

    All fields belong to the event loop, except where the loader thread is named.
    """

    def __init__(self, modules: Sequence[EdgeModule], settings: EdgeSettings) -> None:
        # Limits and options; never change.
        self._settings = settings
        # Budgets, CORS rules and the drain flag, shared with all connections.
        self.state = EdgeState(
            BodyBudget(settings.bodies_in_flight_bytes_max),
            UnreadBudget(settings.unread_bytes_of_all_max, settings.connections_max),
            Cors(settings.allowed_origins),
            settings.waiting_max,
            access_log=settings.access_log,
        )
        # Checks tokens and sites.
        self.guard = Guard(settings)
        # Issues tickets and checks their signatures; storage notes which are used.
        self._tickets = Tickets(settings.ack_keys)
        # Never empty: the link of the first module records used tickets.
        self._modules = tuple(modules)
        self.metrics = EdgeMetrics(self.state)
        links = list({id(module.link): module.link for module in modules}.values())
        probes = Probes(links, self.metrics, self.document, self._tickets).routes()
        # WebSocket endpoints by path.
        self._sockets = {end.path.encode(): end for module in modules for end in module.sockets}
        # The process that serves each of these paths, or None for this one; the same keys.
        self._sockets_elsewhere = {
            end.path.encode(): module.elsewhere for module in modules for end in module.sockets
        }
        # Metrics of all open sockets.
        self._socket_counts = SocketCounts()
        for collector in (self._socket_counts, *(end.metrics for end in self._sockets.values())):
            self.metrics.add(collector)
        handshakes = [Route("GET", path.decode(), _no_upgrade) for path in self._sockets]
        # All routes of the data plane: those that do not need FastAPI.
        self._routes = (
            *probes,
            *handshakes,
            *(route for module in modules for route in module.routes),
        )
        # Targets by method. The loader thread replaces them once, by tables with management
        # routes, before it sets `_declared`; the tables themselves are never changed.
        self._tables = self._make_tables()
        # Cache by method and URL; None for a URL that is not answered directly. A method's part
        # is emptied when it is full.
        self._direct_targets: dict[bytes, dict[bytes, DirectTarget | None]] = {
            b"GET": {}, b"POST": {},
        }  # fmt: skip
        self.known_heads = KnownHeads(settings.target_bytes_max)
        """The heads of requests that the protocol has answered itself."""
        # The FastAPI application; None until the loader thread has set it, which it does once.
        self._declared: DeclaredRoutes | None = None
        # Held while a thread makes the document, which is made once and takes longer than a step.
        self._documenting = asyncio.Lock()
        # The load under way or done; None before the first call of `load`, and after a failure.
        self._loading: asyncio.Future[DeclaredRoutes] | None = None

    @property
    def has_management(self) -> bool:
        """Whether any module has routes that are declared with FastAPI."""
        return any(module.management is not None for module in self._modules)

    async def load(self) -> "DeclaredRoutes":
        """Return the routes declared with FastAPI; the first call loads them in a thread.

        The process calls this when it starts to serve. A request that needs FastAPI waits for it.
        If loading fails, for example because too many files are open, the next call tries again.
        """
        if self._loading is None:
            self._loading = asyncio.ensure_future(asyncio.to_thread(self._load))
            self._loading.add_done_callback(self._loaded)
        return await asyncio.shield(self._loading)

    def _loaded(self, loading: "asyncio.Future[DeclaredRoutes]") -> None:
        if loading.cancelled() or loading.exception() is not None:
            self._loading = None

    def _load(self) -> "DeclaredRoutes":
        module = importlib.import_module("contrail_edge.openapi.declared")
        declared: DeclaredRoutes = module.DeclaredRoutes(
            self._modules, self._routes, self._settings
        )
        tables = self._make_tables()
        for method, template, elsewhere in declared.managed():
            table = tables.setdefault(method, PathTable())
            table.add(template, _Target(template, None, elsewhere))
        self._tables = tables
        self._declared = declared
        return declared

    async def document(self) -> dict[str, Any]:
        """Return the OpenAPI document of all routes."""
        declared = await self.load()
        async with self._documenting:
            return await asyncio.to_thread(declared.document)

    def drain(self) -> None:
        """End all long polls. The process calls this when it begins to stop."""
        self.state.drain()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request."""
        begun = time.perf_counter()
        request = Request(scope, receive, self.state)
        enter_context(request)  # each request has a task of its own
        label, status = UNMATCHED, CLIENT_GONE_STATUS
        try:
            try:
                asked = self._preflight(request)
                if asked is not None:
                    status = asked.status
                    await deliver(request, asked, send, self._settings.linger_s)
                    return
                target = await self._target(request)
                label = target.template
                if target.elsewhere is not None:
                    answer = await target.elsewhere.forward(request)
                elif target.route is None or not self._settings.fast_lane:
                    status = await self._run_declared(request, send)
                    return
                else:
                    answer = await target.route.handler(request)
            except ApiError as error:
                answer = self.refusal(request, error)
            except ClientGoneError:
                raise
            except Exception:
                _log.exception("request_failed")
                answer = self.refusal(request, ApiError(errors.INTERNAL))
            status = answer.status
            await deliver(request, answer, send, self._settings.linger_s)
        except ClientGoneError:
            status = CLIENT_GONE_STATUS
        except ApiError as error:
            # The head was sent, so the only way to report the error is an incomplete body.
            _log.warning("answer_cut", error=error.spec.name, detail=str(error))
            cut(request)
        finally:
            request.release()
            seconds = time.perf_counter() - begun
            self.metrics.route(request.method, label).answered(status, seconds)
            self.log_answer(request, status, seconds)

    # Direct answers ------------------------------------------------------------------------------
    def direct_target(self, method: bytes, url: bytes) -> DirectTarget | None:
        """Return the target of a request that the protocol may answer itself, else None."""
        known = self._direct_targets.get(method)
        if known is None:
            return None
        # A read may have a query, which is not part of the key. A target with a fragment is not
        # valid, so it goes to the application whole.
        if method == b"GET" and b"#" not in url:
            url = url.partition(b"?")[0]
        start, _, last = url.rpartition(b"/")
        # No template has a number in it, so it is a parameter, and the targets differ only by it.
        number = last.decode() if last.isdigit() else ""
        if number:
            url = start + b"/0"
        target = known.get(url, _UNKNOWN)
        if target is _UNKNOWN:
            target = self._find_direct(method, url)
            if len(known) >= _DIRECT_URLS_MAX:
                known.clear()
            # Long subjects would let a client fill the memory with the keys of this cache.
            if len(url) <= _DIRECT_URL_BYTES_MAX:
                known[url] = target
        found = cast("DirectTarget | None", target)
        return found.with_last(number) if number and found is not None else found

    def _find_direct(self, method: bytes, url: bytes) -> DirectTarget | None:
        if not self._settings.fast_lane or b"?" in url or b"#" in url or url[:1] != b"/":
            return None
        try:
            found = self._tables[method.decode()].match(split_path(url))
        except ApiError:
            return None  # the application answers with the error
        if found is None or found[0].elsewhere is not None:
            return None
        route = found[0].route
        if route is None or route.direct is None:
            return None
        timings = self.metrics.route(route.method, route.template)
        return DirectTarget(route.template, route.direct, found[1], timings)

    def answer_known(self, data: bytes, connection: Connection) -> bool:
        """Answer the request ``data``, with its body, if its head is known.

        False for all others, and for a request that is to be refused before it is handled.
        """
        found = self.known_heads.split(data)
        if found is None:
            return False
        known, part, content = found
        target = known.target or self.direct_target(b"GET", part)
        if target is None or not self.state.bodies.take(0, len(content)):
            return False
        new_id = next(request_ids)  # such a head has none
        exchange = DirectExchange(
            known, target, self, connection, content=content, request_id=new_id
        )
        if known.target is None:
            exchange.raw_path, _, exchange.query_string = part.partition(b"?")
            try:
                self.guard.check(exchange)  # some paths need no token, and others do
            except ApiError:
                return False
        if not connection.begin_known(exchange):
            exchange.release()
            return False
        self.answer_directly(exchange)
        return True

    def answer_directly(self, exchange: DirectExchange) -> None:
        """Call the direct handler of a request whose body is complete."""
        exchange.more_body = exchange.body_pending = False
        exchange.handling = True
        outer = enter_context(exchange)
        try:
            exchange.target.direct.handler(exchange, exchange.content, exchange.reply)
        except ApiError as error:
            exchange.reply(error)
        except Exception:
            _log.exception("request_failed")
            exchange.reply(ApiError(errors.INTERNAL))
        finally:
            exchange.handling = False
            leave_context(outer)

    def log_answer(self, request: Request, status: int, seconds: float) -> None:
        """Log an answered request if access logs are on or the server failed."""
        if self.state.access_log or (status >= SERVER_ERROR and status != BUSY_STATUS):
            outer = enter_context(request)
            try:
                _log.log(
                    logging.WARNING if status >= SERVER_ERROR else logging.INFO,
                    "request",
                    method=request.scope["method"],
                    path=request.raw_path.decode("latin-1"),
                    status=status,
                    seconds=round(seconds, 6),
                )
            finally:
                leave_context(outer)

    # Sockets -------------------------------------------------------------------------------------
    def socket_endpoint(self, url: bytes) -> SocketEndpoint | None:
        """Return the WebSocket endpoint of a URL, or None."""
        return self._sockets.get(url.partition(b"?")[0])

    def open_socket(
        self,
        request: Request,
        endpoint: SocketEndpoint,
        transport: asyncio.Transport,
        connections: set[Any],
        *,
        proven: bool,
    ) -> asyncio.Protocol:
        """Answer a handshake and begin its session, or raise ApiError to refuse it.

        ``proven`` means that the handshake had a valid ticket, which is now used.
        """
        if self.state.drained:
            raise ApiError(errors.SHUTTING_DOWN, applied=False)
        authenticated = proven or self.guard.check_socket(request)
        enter_context(request.context)  # from here on, the connection only serves the socket
        elsewhere = self._sockets_elsewhere.get(request.raw_path)
        if elsewhere is not None:
            return elsewhere.splice(request, transport, connections)
        answer, subprotocol = accept(request, endpoint)
        opening = Opening(subprotocol, authenticated, self.guard.good_token)
        opcode = endpoint.subprotocols[subprotocol]
        socket = EdgeSocket(opcode, self._settings, self.state, self._socket_counts)
        socket.begin(transport, connections, answer, endpoint, opening)
        return socket

    def socket_ticket(self, request: Request) -> OpenedTicket | None:
        """Return the ticket that the caller must use before ``open_socket``, or None.

        A process that the handshake is forwarded to uses the ticket itself. Raises UNAUTHENTICATED.
        """
        ticket = self._open_ticket(request)
        return None if self._sockets_elsewhere.get(request.raw_path) is not None else ticket

    def _open_ticket(self, request: Request) -> OpenedTicket | None:
        ticket = self.guard.ticket(request)
        if ticket is None:
            return None
        self.guard.check_site(request)
        return self._tickets.open(ticket, time.time_ns())

    async def use_ticket(self, ticket: OpenedTicket) -> None:
        """Record in storage that a ticket is used.

        Raises UNAUTHENTICATED if it was used before, and OVERLOADED.
        """
        if not await self._modules[0].link.use_ticket(ticket.nonce, ticket.expires_ns):
            detail = "the ticket was already used, or issued before the server started"
            raise ApiError(errors.UNAUTHENTICATED, detail, applied=False)

    # Requests ------------------------------------------------------------------------------------
    def _preflight(self, request: Request) -> Response | None:
        """Return the answer to a CORS preflight request, which has no token, or None."""
        answer = self.state.cors.preflight(request.method, request.headers)
        if answer is not None:
            self.guard.check_site(request)
        return answer

    async def _target(self, request: Request) -> _Target:
        ticket = self._open_ticket(request)
        if ticket is None:
            self.guard.check(request)
        if request.method == "HEAD":
            request.head_only = True
            request.method = "GET"
        segments = split_path(request.raw_path)
        found = self._find(request.method, segments)
        # The management routes are loaded after the start. A path that is not known yet may be one.
        if found is None and self._declared is None:
            await self.load()
            found = self._find(request.method, segments)
        if found is None:
            known = self._allowed(segments)
            raise ApiError(errors.METHOD_NOT_ALLOWED if known else errors.NOT_FOUND, applied=False)
        target, request.path_values = found
        if ticket is not None:
            if target.template not in _EVENT_TEMPLATES:
                raise ApiError(
                    errors.UNAUTHENTICATED, "this path does not accept tickets", applied=False
                )
            # A ticket can be used once. The other process checks it again, and needs to be the one
            # to use it.
            if target.elsewhere is None:
                await self.use_ticket(ticket)
        return target

    def _find(self, method: str, segments: list[str]) -> tuple[_Target, dict[str, str]] | None:
        table = self._tables.get(method)
        return None if table is None else table.match(segments)

    def _allowed(self, segments: list[str]) -> list[str]:
        methods = {method for method, table in self._tables.items() if table.match(segments)}
        if "GET" in methods:
            methods.add("HEAD")
        return sorted(methods)

    async def _run_declared(self, request: Request, send: Send) -> int:
        raw = request.raw_path
        path = canonical_path(split_path(raw)) if b"%" in raw else raw.decode("ascii")
        scope = {
            **request.scope, "method": request.method, "path": path, REQUEST_KEY: request,
        }  # fmt: skip
        declared = await self.load()
        wire = Wire(request, send, self._settings.linger_s)
        try:
            await declared.app(scope, request.receive, wire.send)
        except ClientGoneError:
            raise
        except Exception:
            if wire.status is None:
                raise
            _log.exception("request_failed")
            cut(request)
        return CLIENT_GONE_STATUS if wire.status is None else wire.status

    def refusal(self, request: Request, error: ApiError) -> Response:
        """Return the answer to a refused request."""
        headers: tuple[Header, ...] = ()
        if error.spec is errors.METHOD_NOT_ALLOWED:
            allowed = ", ".join(self._allowed(split_path(request.raw_path)))
            headers = ((b"allow", allowed.encode()),)
        return problems.refusal(request, error, headers)

    def _make_tables(self) -> dict[str, PathTable[_Target]]:
        """Return the targets of the data plane's routes, by method."""
        tables: dict[str, PathTable[_Target]] = {}
        away = {id(route): module.elsewhere for module in self._modules for route in module.routes}
        for route in self._routes:
            target = _Target(route.template, route, away.get(id(route)))
            tables.setdefault(route.method, PathTable()).add(route.template, target)
        return tables


def build_app(modules: Sequence[EdgeModule], settings: EdgeSettings) -> EdgeApp:
    """Return the ASGI application that serves ``modules`` on one origin."""
    return EdgeApp(modules, settings)
