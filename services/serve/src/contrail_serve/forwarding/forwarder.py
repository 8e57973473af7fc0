"""Forwarding of requests over HTTP/1.1, streamed both ways."""

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final
from weakref import WeakSet

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_edge.http.requests import ClientGoneError, Request
from contrail_edge.http.responses import Answer, Header, Response, StreamResponse
from contrail_edge.inputs.negotiation import BYTES_TYPE, EVENTS_TYPE
from contrail_serve.forwarding.connection import Address, Exchange, PeerLostError
from contrail_serve.forwarding.heads import FORWARDED, answer_headers, length_header, request_head
from contrail_serve.forwarding.peers import Peers
from contrail_serve.forwarding.splice import Splice

_WHOLE_BYTES_MAX: Final = 64 << 10
"""Bodies up to this size are forwarded in one write with their head."""
_BODILESS: Final = (204, 304)
_REPEATABLE: Final = frozenset({"GET", "HEAD"})
_OCTETS: Final = BYTES_TYPE.encode()
_EVENTS: Final = EVENTS_TYPE.encode()


class Forwarder(Collector):
    """Forwards to ``peers``; see :class:`contrail_edge.routing.Elsewhere`.

    A peer that refuses connections is skipped. If a connection is lost after a request was sent, a
    read is sent again, to the same or another peer. The outcome of any other request is unknown.
    """

    def __init__(self, peers: Peers, answer_s: float) -> None:
        """``answer_s``: longest wait for an answer to begin, above what any peer may take."""
        self.peers = peers
        self.answer_s = answer_s
        self.draining: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Numbers of forwarded requests, by outcome.
        self._ended: Counter[str] = Counter()
        # Forwarded sockets, for the metrics.
        self._splices: WeakSet[Splice] = WeakSet()

    def drain(self) -> None:
        """End forwarded waits, because this process is about to stop."""
        if not self.draining.done():
            self.draining.set_result(None)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; called by the registry."""
        ended = CounterMetricFamily(
            "contrail_forwarded",
            "Requests forwarded, by outcome: answered, lost (and perhaps repeated), or refused "
            "(error name).",
            labels=["outcome"],
        )
        for outcome, count in self._ended.items():
            ended.add_metric([outcome], count)
        yield ended
        for name, text, value in (
            ("idle_connections", "Idle connections kept for later requests.", self.peers.idle),
            ("sockets", "WebSockets forwarded to a peer.", len(self._splices)),
        ):
            yield GaugeMetricFamily(f"contrail_forward_{name}", text, value)

    def close(self) -> None:
        """End all idle connections."""
        self.peers.close()

    def splice(
        self, request: Request, transport: asyncio.Transport, connections: set[Any]
    ) -> asyncio.Protocol:
        """Join the connection of a handshake with a new connection to a peer."""
        self._check_first_hop(request)
        splice = Splice(request, transport, connections, self.peers)
        self._splices.add(splice)
        return splice

    async def forward(self, request: Request) -> Answer:
        """Return a peer's answer to ``request``."""
        try:
            answer = await self._forward(request)
        except ApiError as error:
            self._ended[error.spec.name] += 1
            raise
        self._ended["answered"] += 1
        return answer

    async def _forward(self, request: Request) -> Answer:
        self._check_first_hop(request)
        waits_to_be_asked = request.waits_to_be_asked
        length = int(request.headers.get(b"content-length", b"0"))
        chunked = b"transfer-encoding" in request.headers
        body = None
        # Only a body that was read here can be sent again to another peer.
        if not (waits_to_be_asked or chunked or length > _WHOLE_BYTES_MAX):
            body = await request.body(_WHOLE_BYTES_MAX)
        if body is not None:
            length = len(body)
        head = request_head(request, None if chunked else length)
        repeatable = body is not None and request.scope["method"] in _REPEATABLE
        tried: set[Address] = set()
        while True:
            connection = await self.peers.connection(tried)
            exchange = connection.begin(
                head, body or b"", request.state.unread, head_only=request.head_only
            )
            forwarding = _Forwarding(self, request, exchange)
            was_kept = connection.used
            try:
                if body is None:
                    forwarding.begin_body(chunked, waits_to_be_asked)
                return await forwarding.answer()
            except PeerLostError:
                forwarding.abandon()
                # An idle connection may have ended before the request reached its peer. So try the
                # same peer again over a new connection, but only once.
                if was_kept:
                    self.peers.forget(connection.address)
                else:
                    tried.add(connection.address)
                self._ended["lost"] += 1
                if not repeatable:
                    detail = f"the connection to the {self.peers.kind} was lost before it answered"
                    raise ApiError(errors.OUTCOME_UNKNOWN, detail) from None
            except BaseException:
                forwarding.abandon()
                raise

    def _check_first_hop(self, request: Request) -> None:
        if FORWARDED in request.headers:
            kind = self.peers.kind
            detail = f"the request was forwarded to this process, but is for {kind} processes"
            raise ApiError(errors.NOT_READY, detail, applied=False)


class _Forwarding:
    """One forwarded request and its answer."""

    def __init__(self, forwarder: Forwarder, request: Request, exchange: Exchange) -> None:
        self._forwarder = forwarder
        self._request = request
        self._exchange = exchange
        self._body: asyncio.Task[None] | None = None
        self._sent = True
        """False while a part of the body is unsent: the connection cannot take another request."""
        # The answer may take long by design, so a stop of this process must end it.
        self._waits = (
            request.raw_path.endswith(b"/next")
            or b"wait=" in request.query_string
            or _EVENTS in request.headers.get(b"accept", b"")
        )

    # The request's body --------------------------------------------------------------------------
    def begin_body(self, chunked: bool, waits_to_be_asked: bool) -> None:
        """Forward the body while it arrives; the answer may come before its end.

        There is no limit here, because the peer knows the route and its limit.
        """
        self._sent = False
        self._body = asyncio.create_task(self._pass_body(chunked, waits_to_be_asked))
        self._body.add_done_callback(self._body_ended)

    def _body_ended(self, body: "asyncio.Task[None]") -> None:
        if not body.cancelled() and body.exception() is not None:
            self._exchange.connection.abort()

    async def _pass_body(self, chunked: bool, waits_to_be_asked: bool) -> None:
        connection, exchange = self._exchange.connection, self._exchange
        if waits_to_be_asked:
            first = {exchange.go_on, exchange.head}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if not exchange.go_on.done():
                return  # the peer has answered without it
            exchange.go_on.result()
        send = connection.send_chunk if chunked else connection.send
        async for piece in self._request.chunks(sys.maxsize):
            await send(piece)
            self._request.consumed(len(piece))
        if chunked:
            await connection.end_chunks()
        self._sent = True

    # The answer ----------------------------------------------------------------------------------
    async def answer(self) -> Answer:
        """Wait for the head of the answer, and for the body if it is small."""
        exchange = self._exchange
        if self._body is not None:
            either: set[asyncio.Future[Any]] = {self._body, exchange.head}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not exchange.head.done():
                self._body.result()
        if not exchange.head.done():
            await self._wait_for_head()
        exchange.head.result()
        headers = answer_headers(exchange.headers)
        length = exchange.length
        if exchange.complete or (length is not None and length <= _WHOLE_BYTES_MAX):
            return await self._whole(headers)
        if length is not None:
            headers.append(length_header(length))
        kind = dict(headers).get(b"content-type", _OCTETS)
        if kind == _EVENTS:
            self._waits = True
        rest = [one for one in headers if one[0] != b"content-type"]
        return StreamResponse(exchange.status, _Pieces(self), kind, rest)

    async def _wait_for_head(self) -> None:
        request, head, forwarder = self._request, self._exchange.head, self._forwarder
        first: set[asyncio.Future[Any]] = {head, request.gone}
        if self._waits:
            first.add(forwarder.draining)
        await asyncio.wait(first, timeout=forwarder.answer_s, return_when=asyncio.FIRST_COMPLETED)
        if head.done():
            return
        if request.gone.done():
            raise ClientGoneError
        # Nothing is lost: a long poll that ends returns its messages to the consumer.
        if self._waits and forwarder.draining.done():
            raise ApiError(errors.SHUTTING_DOWN)
        detail = f"the {forwarder.peers.kind} did not answer in time"
        raise ApiError(errors.OUTCOME_UNKNOWN, detail)

    async def _whole(self, headers: list[Header]) -> Response:
        pieces = []
        while (piece := await self._exchange.next_piece()) is not None:
            pieces.append(piece)
        if self._body is not None and not self._body.done():
            # The peer has answered without the rest of the body. The edge drops that.
            self._body.cancel()
            await asyncio.gather(self._body, return_exceptions=True)
        self.end()
        body = b"".join(pieces)
        length = self._exchange.length if self._request.head_only else len(body)
        if length is not None and self._exchange.status not in _BODILESS:
            headers.append(length_header(length))
        return Response(self._exchange.status, body, None, headers)

    async def next_piece(self) -> bytes | None:
        """Return the next piece of a streamed answer; None at its end or if this process stops."""
        if not self._waits:
            return await self._exchange.next_piece()
        piece = asyncio.ensure_future(self._exchange.next_piece())
        try:
            first: set[asyncio.Future[Any]] = {piece, self._forwarder.draining}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            return piece.result() if piece.done() else None
        finally:
            piece.cancel()

    def end(self) -> None:
        """Keep the connection if the request and its answer are complete; otherwise end it."""
        exchange = self._exchange
        exchange.forget()
        if exchange.complete and exchange.keep_alive and self._sent:
            self._forwarder.peers.keep(exchange.connection)
        else:
            self.abandon()

    def abandon(self) -> None:
        """End the connection, so that the peer stops working on the request."""
        if self._body is not None:
            self._body.cancel()
        self._exchange.forget()
        self._exchange.connection.abort()


class _Pieces(AsyncIterator[bytes]):
    """The body of a streamed answer."""

    def __init__(self, forwarding: _Forwarding) -> None:
        self._forwarding = forwarding

    async def __anext__(self) -> bytes:
        try:
            piece = await self._forwarding.next_piece()
        except PeerLostError:
            # Expected: a peer cuts its own answer too, such as a replay whose stream was deleted.
            detail = "the connection was lost before the answer was complete"
            raise ApiError(errors.OUTCOME_UNKNOWN, detail) from None
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def aclose(self) -> None:
        """End the request: the answer was sent, or its reader has left."""
        self._forwarding.end()
