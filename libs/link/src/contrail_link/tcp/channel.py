"""The client's connection to storage, with its open requests. It reconnects after a loss."""

import asyncio
import itertools
import math
import random
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from time import perf_counter
from typing import Any, Final, Protocol

import msgspec
import structlog

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.timings import Timings
from contrail_link.contract.remote import UNKNOWN
from contrail_link.request_context import current_context
from contrail_link.tcp import encryption, frames
from contrail_link.tcp.connection import FramedConnection
from contrail_link.tcp.frames import Frame, FrameError
from contrail_link.tcp.handshake import NONCE_BYTES, SILENT, ClientHandshake, HandshakeError
from contrail_link.tcp.limits import LinkLimits
from contrail_link.tcp.listeners import check_accepted
from contrail_link.tcp.methods import Method, NodeIdentity
from contrail_link.tcp.refusals import decode_error

_log: Final = structlog.get_logger("contrail.link")
_status: Final = msgspec.msgpack.Decoder(dict[str, str])
_identity: Final = msgspec.msgpack.Decoder(NodeIdentity)
_MS: Final = 1000.0
_NOT_YET: Final = "not connected yet"
_LEFT_MAX: Final = 1_024
"""Cancelled requests whose result may still arrive. It takes one round trip at most."""

Late = Callable[[memoryview], None]
"""Gets the result of a request that was cancelled too late."""

Address = tuple[str, int]
Locate = Callable[[], Awaitable[Address]]
"""Returns the address of a storage process before each attempt to connect. Raises OSError."""


class LinkLostError(Exception):
    """A request was sent, and the connection ended or the time was over before its answer.

    The outcome is unknown: storage may have carried out the request.
    """


class Caller(Protocol):
    """Waits for the answer to a request.

    Exactly one of the methods is called, once; none after the request was cancelled.
    """

    def answered(self, body: memoryview) -> None:
        """Take the result; for a stream, this says that it begins."""
        ...

    def failed(self, error: ApiError | LinkLostError) -> None:
        """Take an ApiError if storage refused, or a LinkLostError if the outcome is unknown."""
        ...

    def may_repeat(self) -> bool:
        """Return True if the request is safe to repeat, although its method says otherwise."""
        ...


class StreamCaller(Caller, Protocol):
    """Reads a stream: ``answered``, then any number of pieces, then ``ended``.

    ``failed`` may come at any point instead, and is then the last call.
    """

    def chunk(self, piece: memoryview) -> None:
        """Take a piece of the stream."""
        ...

    def ended(self) -> None:
        """Note that the stream is complete."""
        ...


class _Pending:
    __slots__ = ("begun", "caller", "deadline", "method", "size", "stream")

    def __init__(
        self,
        method: Method[Any],
        caller: Caller,
        stream: StreamCaller | None,
        size: int,
        deadline: float,
    ) -> None:
        self.method = method
        self.caller = caller
        self.stream = stream
        self.size = size
        self.deadline = deadline
        self.begun = perf_counter()

    @property
    def may_repeat(self) -> bool:
        """True if its request can go to another node. A stream that has begun cannot."""
        if self.method.on_loss is UNKNOWN:
            return self.caller.may_repeat()
        return self.deadline < math.inf


class Channel:
    """A connection to the storage process that ``locate`` finds.

    Requests are refused with NOT_READY without a connection, and with OVERLOADED at the limits.
    All fields belong to the event loop.
    """

    def __init__(self, locate: Locate, keys: Sequence[bytes], limits: LinkLimits) -> None:
        self.limits = limits
        self.losses = 0
        self.timings: dict[str, Timings] = {}
        """Durations of all requests by method, whatever their outcome."""
        self.failed: dict[str, int] = {}
        """Number of refused or lost requests by method."""
        self.status: dict[str, str] = {}
        """Readiness of storage, from its last pulse."""
        self.node = ""
        """Name of the node; "" until it was connected, or if it does not say its name."""
        self.why = _NOT_YET
        """Why there is no connection; meaningless while there is one."""
        # Finds the storage process.
        self._locate = locate
        # Host and port of the last attempt, for logs.
        self._where = ""
        # The keys for the handshake, the current one first. They may be changed in place.
        self._keys = keys
        # For storage on another machine.
        self._tls = encryption.client_context()
        # Number of handshakes that failed since the last connection: each tries the next key.
        self._refused = 0
        # Source of request numbers. `_next_number` skips 0 and those in use.
        self._numbers = itertools.count(1)
        # Requests without an answer by number, and streams that have not ended.
        self._pending: dict[int, _Pending] = {}
        # Cancelled requests by number whose late result somebody wants, oldest first; at most
        # _LEFT_MAX. Disjoint from `_pending`.
        self._left: dict[int, Late] = {}
        # Totals over `_pending`: requests that may wait are in `_waits`, all others in `_busy`,
        # and their bodies in `_busy_bytes`.
        self._busy = self._busy_bytes = self._waits = 0
        # The open connection; None while there is none.
        self._connection: ClientConnection | None = None
        # Set if and only if `_connection` is not None.
        self._up = asyncio.Event()
        # The connection is open, and nothing was heard on it for `doubt_s`.
        self._doubted = False
        # True once `close` was called.
        self._closed = False
        # The task that connects, watches the connection, and connects again; None before `start`.
        self._task: asyncio.Task[None] | None = None

    # Connecting ----------------------------------------------------------------------------------
    def start(self) -> None:
        """Connect, and connect again after each loss, until ``close``."""
        self._task = asyncio.create_task(self._keep_connected())

    async def close(self) -> None:
        """End the connection, and fail pending requests with LinkLostError."""
        self._closed = True
        self.why = "closed"
        if self._connection is not None:
            self._connection.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._lose_all("this process closed the link")

    @property
    def up(self) -> bool:
        """True if requests can be sent."""
        return self._connection is not None

    @property
    def pending(self) -> int:
        """Requests without an answer."""
        return len(self._pending)

    async def wait_until_up(self, timeout_s: float) -> bool:
        """Wait for a connection; return False if there is none after ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._up.wait()
        except TimeoutError:
            return False
        return True

    async def _keep_connected(self) -> None:
        limits = self.limits
        backoff_s = limits.backoff_min_s
        while not self._closed:
            try:
                connection = await self._connect()
                self._refused = 0
                await self._serve(connection)
                backoff_s = limits.backoff_min_s
            except (OSError, TimeoutError, HandshakeError) as error:
                reason = f"{self._where}{str(error) or 'no answer in time'}"
                if reason != self.why:
                    _log.warning("link_down", reason=reason)
                self.why = reason
                self._refused += isinstance(error, HandshakeError)
            # Keep clients that lost the same server from coming back all at the same moment.
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, limits.backoff_max_s)

    async def _connect(self) -> "ClientConnection":
        connection: ClientConnection | None = None
        try:
            async with asyncio.timeout(self.limits.connect_s):
                host, port = await self._locate()
                self._where = f"{host}:{port}: "
                key = self._keys[self._refused % len(self._keys)]
                connection = await self._open(host, port, key)
                # Done with the first pulse, after both ends have proved that they know the secret.
                await connection.opened
        except BaseException as error:
            if connection is not None:
                connection.fail("gave up")
                if isinstance(error, TimeoutError) and connection.is_silent:
                    raise TimeoutError(SILENT) from None
            raise
        return connection

    async def _open(self, host: str, port: int, key: bytes) -> "ClientConnection":
        loop = asyncio.get_running_loop()
        failure = OSError(f"{host} has no address")
        for *_, where in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            context = None if encryption.is_loopback(str(where[0])) else self._tls
            try:
                transport, connection = await loop.create_connection(
                    lambda: ClientConnection(self, ClientHandshake(key, _nonce())),
                    str(where[0]),
                    port,
                    ssl=context,
                )
                try:
                    check_accepted(transport.get_extra_info("socket"))
                except ConnectionRefusedError:
                    transport.abort()
                    raise
            except OSError as error:
                failure = encryption.explained(error)
            else:
                return connection
        raise failure

    async def _serve(self, connection: "ClientConnection") -> None:
        self._connection = connection
        self._up.set()
        _log.info("link_up")
        loop = asyncio.get_running_loop()
        swept_at = 0.0
        while not connection.lost:
            await asyncio.wait([connection.closed], timeout=self.limits.pulse_s)
            now = loop.time()
            connection.pulse(now)
            # The same tick expires requests, so that none of them needs a timer of its own.
            if now - swept_at >= self.limits.sweep_s:
                swept_at = now
                self._expire(now)
            self._doubt(connection.silent_s(now) > self.limits.doubt_s)

    def lost(self, connection: "ClientConnection", reason: str) -> None:
        """Note that a connection has ended, and fail its requests with LinkLostError."""
        if self._connection is connection:
            self._connection = None
            self._doubted = False
            self._up.clear()
            self.losses += 1
            self.why = reason
            if not self._closed:
                _log.warning("link_down", reason=reason)
            self._lose_all(reason)

    # Requests ------------------------------------------------------------------------------------
    def post(
        self,
        method: Method[Any],
        body: bytes,
        timeout_s: float,
        caller: Caller,
        stream: StreamCaller | None = None,
    ) -> int:
        """Send a request, and return its number, by which it can be cancelled.

        ``caller`` gets the outcome. Raises NOT_READY, OVERLOADED or BODY_TOO_LARGE, and has then
        sent nothing.
        """
        connection = self._connection
        if connection is None or self._doubted:
            raise self.away()
        # Everything that can refuse comes before the request is registered: a refusal is without
        # effect.
        self._check_bounds(method, len(body))
        number = self._next_number()
        deadline = connection.now() + timeout_s
        self._pending[number] = _Pending(method, caller, stream, len(body), deadline)
        if method.may_wait:
            self._waits += 1
        else:
            self._busy += 1
            self._busy_bytes += len(body)
        value = min(round(timeout_s * _MS), frames.VALUE_MAX)
        context = current_context()
        if context is not None:
            # The next frame of this connection must be the request: storage keeps one context.
            connection.send(frames.CONTEXT, number, body=context.encode())
        connection.send(frames.REQUEST, number, method=method.number, value=value, body=body)
        return number

    def away(self) -> ApiError:
        """Return the error for a request while there is no connection."""
        return ApiError(
            errors.NOT_READY, "storage cannot be reached", retry_after_s=1, applied=False
        )

    def cancel(self, number: int, late: Late | None = None) -> None:
        """Cancel a request; its caller hears nothing more.

        ``late`` gets the result if storage sends it before it sees the cancellation.
        """
        if self._take(number) is not None and self._connection is not None:
            self._connection.send(frames.CANCEL, number)
            if late is not None:
                self._left[number] = late
                if len(self._left) > _LEFT_MAX:
                    # Storage does not answer a request that it has cancelled, so its entry is left.
                    del self._left[next(iter(self._left))]

    def give_credit(self, number: int, count: int) -> None:
        """Let storage send ``count`` more bytes of a stream."""
        if self._connection is not None:
            self._connection.send(frames.CREDIT, number, value=count)

    def _check_bounds(self, method: Method[Any], size: int) -> None:
        limits = self.limits
        if method.may_wait:
            if self._waits >= limits.waits_max:
                raise _overloaded("too many requests are waiting for storage")
        elif self._busy >= limits.busy_max or self._busy_bytes + size > limits.busy_bytes_max:
            raise _overloaded("too many requests or bytes are in flight to storage")
        if size > limits.frame_bytes_max:
            raise ApiError(errors.BODY_TOO_LARGE, applied=False)

    def _next_number(self) -> int:
        while True:
            number = next(self._numbers) & frames.VALUE_MAX
            # Numbers begin again after 2^32. A long stream may still have an old one, and 0 is no
            # request.
            if number and number not in self._pending and number not in self._left:
                return number

    def _take(self, number: int) -> _Pending | None:
        pending = self._pending.pop(number, None)
        if pending is not None:
            if pending.method.may_wait:
                self._waits -= 1
            else:
                self._busy -= 1
                self._busy_bytes -= pending.size
            timings = self.timings.get(pending.method.name)
            if timings is None:
                timings = self.timings[pending.method.name] = Timings()
            timings.add(perf_counter() - pending.begun)
        return pending

    def _fail(self, pending: _Pending, error: ApiError | LinkLostError) -> None:
        name = pending.method.name
        self.failed[name] = self.failed.get(name, 0) + 1
        pending.caller.failed(error)

    def _expire(self, now: float) -> None:
        overdue = [number for number, one in self._pending.items() if now > one.deadline]
        self._give_up(overdue, "storage did not answer in time")

    def _doubt(self, doubted: bool) -> None:
        """Give up the requests that are safe to repeat; for the others, an answer may come."""
        self._doubted = doubted
        if doubted:
            silent = [number for number, one in self._pending.items() if one.may_repeat]
            self._give_up(silent, "storage is silent")

    def _give_up(self, numbers: list[int], why: str) -> None:
        for number in numbers:
            # Cancel first: storage may still answer, and this caller must hear nothing after that.
            pending = self._pending.get(number)
            if pending is not None:
                self.cancel(number)
                self._fail(pending, LinkLostError(why))

    def _lose_all(self, reason: str) -> None:
        self._left.clear()
        for number in list(self._pending):
            pending = self._take(number)
            if pending is not None:
                self._fail(pending, LinkLostError(reason))

    # Frames --------------------------------------------------------------------------------------
    def take(self, frame: Frame) -> None:
        """Hand a frame to the caller of its request; drop it if the request was cancelled."""
        if frame.kind == frames.PULSE:
            self.status = _status.decode(frame.body)
            return
        pending = self._pending.get(frame.request)
        if frame.kind == frames.RESULT:
            # No request has the number 0. A client that does not know this frame drops it.
            if frame.request == 0:
                self.node = _identity.decode(frame.body).name
            elif pending is not None:
                if pending.stream is None:
                    self._take(frame.request)
                else:
                    # The stream has begun, so its reader decides how long it takes.
                    pending.deadline = math.inf
                pending.caller.answered(frame.body)
            elif (late := self._left.pop(frame.request, None)) is not None:
                late(frame.body)
        elif frame.kind == frames.ERROR:
            error = decode_error(frame.body)
            self._left.pop(frame.request, None)
            if self._take(frame.request) is not None and pending is not None:
                self._fail(pending, error)
        elif frame.kind in (frames.CHUNK, frames.END):
            self._take_stream(frame, None if pending is None else pending.stream)
        else:
            raise FrameError(f"storage sent a frame of unexpected kind {frame.kind}")

    def _take_stream(self, frame: Frame, stream: StreamCaller | None) -> None:
        if stream is None:
            return
        if frame.kind == frames.CHUNK:
            stream.chunk(frame.body)
        else:
            self._take(frame.request)
            stream.ended()


class ClientConnection(FramedConnection):
    """One connection. It is open after the handshake and the first frame, a pulse."""

    def __init__(self, channel: Channel, handshake: ClientHandshake) -> None:
        super().__init__(handshake, channel.limits)
        loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self.now: Callable[[], float] = loop.time
        self._channel = channel
        self._hello = handshake

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake over what TLS has shown."""
        self._hello.certificate = encryption.shown_digest(transport.get_extra_info("ssl_object"))
        super().connection_made(transport)

    @property
    def is_silent(self) -> bool:
        """Whether the peer has sent nothing on a connection that is not encrypted."""
        return self._hello.is_silent and not self._hello.certificate

    def on_open(self) -> None:
        """Do nothing: the connection is open only with the first frame."""

    def on_frame(self, frame: Frame) -> None:
        """Hand the frame to the channel."""
        self._channel.take(frame)
        if frame.kind == frames.PULSE and not self.opened.done():
            self.opened.set_result(None)

    def on_lost(self, reason: str) -> None:
        """Fail the attempt to connect, and notify the channel."""
        if not self.opened.done():
            if self._hello.proof_sent and not self._hello.done:
                reason = "storage refused the cluster secret, or shut down"
            elif self.is_silent:
                reason = SILENT
            self.opened.set_exception(HandshakeError(reason))
            self.opened.exception()  # marks it as seen: the waiting task may have given up
        self.closed.set_result(None)
        self._channel.lost(self, reason)


def _nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def _overloaded(detail: str) -> ApiError:
    return ApiError(errors.OVERLOADED, detail, applied=False)
