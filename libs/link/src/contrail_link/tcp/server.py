"""The storage end of the link: it serves one ``StorageLink`` to many clients."""

import asyncio
import contextlib
import itertools
import math
import secrets
import socket
from collections.abc import Sequence
from typing import Any, Final

import structlog

from contrail_common import errors
from contrail_common.columns.message_batch import MessageBatch
from contrail_common.errors import ApiError
from contrail_common.model import PublishMessage
from contrail_common.timings import Timings
from contrail_link.contract import StorageLink
from contrail_link.contract.publish import PublishAck, PublishContent, PublishOutcome
from contrail_link.contract.read import pieces_of
from contrail_link.request_context import RequestContext, enter_context, leave_context
from contrail_link.tcp import encryption, frames
from contrail_link.tcp.connection import FramedConnection
from contrail_link.tcp.encryption import ServerTls
from contrail_link.tcp.frames import Frame, FrameError
from contrail_link.tcp.handshake import NONCE_BYTES, ONE_END, ServerHandshake
from contrail_link.tcp.limits import LinkLimits
from contrail_link.tcp.listeners import Listener
from contrail_link.tcp.methods import (
    METHODS,
    PUBLISH,
    PUBLISH_BATCH,
    PUBLISH_EACH,
    EachOutcome,
    Method,
    NodeIdentity,
    encode,
)
from contrail_link.tcp.metrics import exposition, server_metrics
from contrail_link.tcp.refusals import encode_error, wire_error

_log: Final = structlog.get_logger("contrail.link")
_MS: Final = 1000.0


class LinkServer:
    """Serves ``link`` to every client that knows one of the keys, which may be changed in place."""

    def __init__(
        self,
        link: StorageLink,
        keys: Sequence[bytes],
        limits: LinkLimits | None = None,
        *,
        node: str = "",
        access_log: bool = False,
    ) -> None:
        self.link = link
        self.identity = NodeIdentity(node)
        self.keys = keys
        self.limits = limits or LinkLimits()
        self.access_log = access_log
        self.stopping = False
        self.connections: set[ServerConnection] = set()
        self.refused = 0
        self.timings: dict[str, Timings] = {}
        """Durations of all requests that were answered or refused, by method."""
        self.failed: dict[str, int] = {}
        """Number of refused requests by method."""
        self.numbers = itertools.count()
        """Numbers for connections, in the order of their arrival."""
        # A refused connection was logged since the last client that proved itself.
        self._complained = False
        # Set by `stop`, and done when no request is running.
        self._quiet: asyncio.Future[None] | None = None
        self._pulse: asyncio.Task[None]
        # Encrypts connections of other machines.
        self._tls: ServerTls | None = None
        self._listener: Listener
        # Accepted connections that are not made yet, because of TLS; the oldest first.
        self._beginning: dict[asyncio.Task[None], socket.socket] = {}

    async def start(self, listening: socket.socket, tls: ServerTls | None = None) -> None:
        """Accept connections on a bound socket.

        Without ``tls``, connections are not encrypted: all clients must be on this machine.
        """
        self._tls = tls
        self._listener = Listener(listening, self._accepted)
        self._pulse = asyncio.create_task(self._keep_pulse())

    def _accepted(self, accepted: socket.socket, host: str) -> None:
        if len(self._beginning) >= self.limits.unproven_max:
            # As in `admits`: strangers cannot keep clients out.
            next(iter(self._beginning)).cancel()
        beginning = asyncio.create_task(self._welcome(accepted, host))
        self._beginning[beginning] = accepted
        beginning.add_done_callback(self._begun)

    def _begun(self, beginning: asyncio.Task[None]) -> None:
        accepted = self._beginning.pop(beginning)
        # Also if it was cancelled at once, and so never ran.
        if beginning.cancelled():
            accepted.close()

    async def _welcome(self, accepted: socket.socket, host: str) -> None:
        tls = None if encryption.is_loopback(host) else self._tls
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = ServerConnection(self, b"" if tls is None else tls.digest)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection,
                accepted,
                ssl=None if tls is None else tls.context,
                ssl_handshake_timeout=None if tls is None else self.limits.handshake_s,
            )
        except asyncio.CancelledError:
            connection.give_up()
            raise
        except OSError as error:
            accepted.close()
            self.turned_away(f"no TLS: {error}; {ONE_END}")

    async def stop(self, grace_s: float) -> None:
        """Refuse new requests, end all waits, and finish when running requests are answered.

        Waits at most ``grace_s`` for them.
        """
        self.stopping = True
        # No new connections and no more pulses; `leave` sends the last readiness.
        self._listener.close()
        for task in (self._pulse, *self._beginning):
            task.cancel()
        for connection in list(self.connections):
            connection.leave()
        self._quiet = asyncio.get_running_loop().create_future()
        self.work_ended()
        await asyncio.wait([self._quiet], timeout=grace_s)
        for connection in list(self.connections):
            connection.close()
        await asyncio.wait([self._pulse])

    @property
    def waiting_for_tls(self) -> int:
        """Number of accepted connections that have not begun, because of TLS."""
        return len(self._beginning)

    @property
    def served(self) -> int:
        """Number of requests that were answered or refused."""
        return sum(timings.count for timings in self.timings.values())

    def request_ended(self, work: "Work", seconds: float) -> None:
        """Count a request that was answered, refused or cancelled, and log it if asked for."""
        name, error = work.method.name, work.error
        timings = self.timings.get(name)
        if timings is None:
            timings = self.timings[name] = Timings()
        timings.add(seconds)
        if error:
            self.failed[name] = self.failed.get(name, 0) + 1
        if self.access_log:
            outer = enter_context(work.context)
            try:
                _log.info("link_request", method=name, error=error or None, seconds=seconds)
            finally:
                leave_context(outer)

    def admits(self) -> bool:
        """Return True if one more connection may begin its handshake.

        Clients finish theirs at once. If all places are taken, the connection that has been in its
        handshake for longest is ended, so that strangers cannot keep clients out.
        """
        unproven = [one for one in self.connections if not one.proven]
        if len(unproven) >= self.limits.unproven_max:
            oldest = min(unproven, key=lambda one: one.number)
            self.connections.discard(oldest)
            oldest.fail("it did not authenticate in time, and other connections are waiting")
        return len(self.connections) < self.limits.connections_max

    def proved(self) -> None:
        """Note that a client has proved that it knows the key."""
        self._complained = False

    def turned_away(self, reason: str) -> None:
        """Count a connection that ended before its proof; only the first one is logged."""
        self.refused += 1
        if not self._complained:
            self._complained = True
            _log.warning("link_client_refused", reason=reason)

    def readiness(self) -> dict[str, str]:
        """Return the readiness that clients get with each pulse."""
        return {"storage": "shutting down"} if self.stopping else self.link.readiness()

    def metrics_text(self) -> str:
        """Return the Prometheus text of the server's metrics."""
        return exposition(server_metrics(self.connections, self.refused, self.timings, self.failed))

    def work_ended(self) -> None:
        """Note that a request has ended; ``stop`` waits for the last one."""
        quiet = self._quiet
        if quiet is not None and not quiet.done() and not any(map(_at_work, self.connections)):
            quiet.set_result(None)

    async def _keep_pulse(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self.limits.pulse_s)
            status = encode(self.readiness())
            for connection in list(self.connections):
                connection.tick(loop.time(), status)


class Work:
    """A running request.

    ``size``: bytes of its arguments. ``credit``: bytes that its stream may still send. ``error``:
    name of the error it was refused with, or "".
    """

    __slots__ = (
        "begun",
        "context",
        "credit",
        "deadline",
        "end_with",
        "error",
        "method",
        "more_credit",
        "request",
        "size",
        "task",
    )

    def __init__(
        self,
        request: int,
        method: Method[Any],
        size: int,
        begun: float,
        deadline: float,
        context: RequestContext | None,
    ) -> None:
        self.request = request
        self.method = method
        self.size = size
        self.begun = begun
        self.deadline = deadline
        self.context = context
        self.error = ""
        self.credit = 0
        self.more_credit: asyncio.Future[None] | None = None
        self.task: asyncio.Task[None] | None = None
        self.end_with: ApiError | None = None

    def wake(self) -> None:
        """Let a stream check again whether it may send."""
        if self.more_credit is not None and not self.more_credit.done():
            self.more_credit.set_result(None)

    def cancel(self, end_with: ApiError | None = None) -> None:
        """Cancel it; the client gets ``end_with`` if that is given."""
        if self.task is not None and not self.task.done():
            self.end_with = end_with
            self.task.cancel()


class ServerConnection(FramedConnection):
    """The connection of one client, with its running requests."""

    def __init__(self, owner: LinkServer, certificate: bytes) -> None:
        self._hello = ServerHandshake(owner.keys, secrets.token_bytes(NONCE_BYTES))
        self._hello.certificate = certificate
        super().__init__(self._hello, owner.limits)
        self.proven = False
        self.number = next(owner.numbers)
        self.busy = self.busy_bytes = self.waits = 0
        self._owner = owner
        self._link = owner.link
        # Running requests by number.
        self._works: dict[int, Work] = {}
        # Loop time at which overdue waits were last ended.
        self._swept_at = 0.0
        # The context of the request with this number, which must be the next one.
        self._context: tuple[int, RequestContext] | None = None

    # Connection ----------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake, or refuse a connection above the limit."""
        super().connection_made(transport)
        if not self._owner.admits():
            self.fail("too many connections")
            return
        self._owner.connections.add(self)
        self._transport.write(self._hello.hello)

    def give_up(self) -> None:
        """End a connection whose beginning was cancelled.

        Just after ``connection_made``, uvloop then closes the transport without a word to its
        protocol: ``connection_lost`` need not come.
        """
        if self in self._owner.connections:
            self._transport.abort()
            self.connection_lost(None)

    def on_open(self) -> None:
        """Send the name of the node and its readiness at once."""
        self.proven = True
        self._owner.proved()
        self.send(frames.RESULT, 0, body=encode(self._owner.identity))
        self.send(frames.PULSE, 0, body=encode(self._owner.readiness()))

    def on_lost(self, reason: str) -> None:
        """Cancel waits and streams. Other requests continue, and their answers are dropped."""
        self._owner.connections.discard(self)
        if not self.proven:
            self._owner.turned_away(reason)
        self._cancel_waits(None)

    def on_flow(self) -> None:
        """Continue or stop reading and streaming, depending on whether the client reads."""
        self._regulate()
        if self.writable:
            for work in self._works.values():
                work.wake()

    def tick(self, now: float, status: bytes) -> None:
        """Send the pulse, and refuse overdue waits; called every ``pulse_s``."""
        if now - self._swept_at >= self.limits.sweep_s:
            self._swept_at = now
            overdue = ApiError(errors.NOT_READY, "the caller's deadline has passed", applied=None)
            for work in list(self._works.values()):
                # Only waits end by themselves. A change that has begun must run to its end and
                # report it.
                if work.method.may_wait and now > work.deadline:
                    work.cancel(overdue)
        self.pulse(now, status)

    def leave(self) -> None:
        """End all waits with an answer, and send the new readiness."""
        self._cancel_waits(ApiError(errors.SHUTTING_DOWN, applied=False))
        if self.proven:
            self.send(frames.PULSE, 0, body=encode(self._owner.readiness()))

    def _cancel_waits(self, end_with: ApiError | None) -> None:
        for work in list(self._works.values()):
            if work.method.may_wait:
                work.cancel(end_with)

    # Frames --------------------------------------------------------------------------------------
    def on_frame(self, frame: Frame) -> None:
        """Begin, cancel or continue a request, as the frame says."""
        if frame.kind == frames.REQUEST:
            self._begin(frame)
            self._regulate()
            return
        if frame.kind == frames.CONTEXT:
            self._context = frame.request, _context_of(frame)
            return
        work = self._works.get(frame.request)
        if frame.kind == frames.CREDIT:
            if work is not None:
                work.credit += frame.value
                work.wake()
        elif frame.kind == frames.CANCEL:
            if work is not None and work.method.may_wait:
                work.cancel()
        elif frame.kind != frames.PULSE:
            raise FrameError(f"a client sent a frame of unexpected kind {frame.kind}")

    def _begin(self, frame: Frame) -> None:
        method = METHODS.get(frame.method)
        # The client could not tell the answers of two requests with one number apart.
        if method is None or frame.request in self._works:
            raise FrameError(f"method {frame.method}, request {frame.request}")
        arguments = method.arguments.decode(frame.body)
        context = self._take_context(frame.request)
        refusal = self._refusal(method)
        if refusal is not None:
            self.send(frames.ERROR, frame.request, body=encode_error(refusal))
            return
        now = self._loop.time()
        work = Work(frame.request, method, len(frame.body), now, now + frame.value / _MS, context)
        self._works[frame.request] = work
        if method.may_wait:
            self.waits += 1
        else:
            self.busy += 1
            self.busy_bytes += work.size
        outer = enter_context(context)
        try:
            if method in (PUBLISH, PUBLISH_BATCH):
                self._run_directly(work, *arguments)
            elif method is PUBLISH_EACH:
                self._run_each(work, *arguments)
            else:
                work.task = self._loop.create_task(self._run(work, arguments))
                # Not in the task itself: a task that is cancelled before its first step never runs.
                work.task.add_done_callback(lambda task: self._ended(work, task))
        finally:
            leave_context(outer)

    def _take_context(self, request: int) -> RequestContext | None:
        held, self._context = self._context, None
        return held[1] if held is not None and held[0] == request else None

    def _refusal(self, method: Method[Any]) -> ApiError | None:
        if self._owner.stopping:
            return ApiError(errors.SHUTTING_DOWN, applied=False)
        # There is no such refusal for the others: above their limit, `_regulate` stops reading.
        if method.may_wait and self.waits >= self.limits.waits_max:
            return ApiError(errors.OVERLOADED, "too many requests are waiting", applied=False)
        return None

    def _regulate(self) -> None:
        limits = self.limits
        wanted = (
            self.writable
            and self.busy < limits.busy_max
            and self.busy_bytes < limits.busy_bytes_max
        )
        if wanted is not self._reading:  # twice for each publish
            self.set_reading(wanted)

    # Requests ------------------------------------------------------------------------------------
    def _run_directly(self, work: Work, stream: str, content: PublishContent) -> None:
        """Run a publish without a task, as this is the most frequent request."""

        def done(outcome: PublishOutcome) -> None:
            if isinstance(outcome, PublishAck):
                self._answer(work, encode(outcome))
            else:
                self._refuse(work, outcome)
            self._end(work)

        try:
            # Storage trusts the columns of a batch. It would find an error in them only when it
            # applies the entry, which must not fail.
            if isinstance(content, MessageBatch) and not content.is_sound():
                raise ApiError(errors.BAD_REQUEST, "the batch is damaged", applied=False)
            self._link.publish_then(stream, content, done)
        except ApiError as error:
            done(error)
        except Exception:
            _log.exception("link_request_failed", method=work.method.name)
            done(ApiError(errors.INTERNAL))

    def _run_each(self, work: Work, messages: list[PublishMessage]) -> None:
        """Run a publish of messages that may be of several streams, which answer by themselves."""
        waiting = len(messages)
        if not waiting:
            raise FrameError("a publish without messages")

        def done(positions: list[int], outcome: PublishOutcome) -> None:
            nonlocal waiting
            if isinstance(outcome, PublishAck):
                answer = EachOutcome(positions, outcome)
            else:
                work.error = outcome.spec.name
                answer = EachOutcome(positions, error=wire_error(outcome))
            self.send(frames.CHUNK, work.request, body=encode(answer))
            waiting -= len(positions)
            if not waiting:
                self.send(frames.END, work.request)
                self._end(work)

        self._link.publish_each_then(messages, done)

    async def _run(self, work: Work, arguments: tuple[Any, ...]) -> None:
        try:
            if work.method.streams:
                await self._stream(work, arguments)
                return
            result = await getattr(self._link, work.method.name)(*arguments)
            self._answer(work, encode(result))
        except ApiError as error:
            self._refuse(work, error)
        except Exception:
            _log.exception("link_request_failed", method=work.method.name)
            self._refuse(work, ApiError(errors.INTERNAL))

    def _ended(self, work: Work, task: "asyncio.Task[None]") -> None:
        if task.cancelled() and work.end_with is not None:
            self._refuse(work, work.end_with)
        self._end(work)

    async def _stream(self, work: Work, arguments: tuple[Any, ...]) -> None:
        chunks = await getattr(self._link, work.method.name)(*arguments)
        try:
            self.send(frames.RESULT, work.request, body=encode(None))
            work.deadline = math.inf  # the reader may take any time
            async for chunk in chunks:
                for piece in pieces_of(chunk):
                    await self._send_chunk(work, memoryview(piece))
            self.send(frames.END, work.request)
        finally:
            close = getattr(chunks, "aclose", None)
            if close is not None:
                with contextlib.suppress(RuntimeError):
                    await close()

    async def _send_chunk(self, work: Work, chunk: memoryview) -> None:
        """Send a chunk within the credit, in pieces, so that answers do not wait long for it."""
        size = self.limits.chunk_bytes
        for at in range(0, len(chunk), size):
            # A piece may exceed the credit: it is bounded, and the rest waits for more credit.
            while work.credit <= 0 or not self.writable:
                await self._more_credit(work)
            piece = chunk[at : at + size]
            work.credit -= len(piece)
            self.send(frames.CHUNK, work.request, body=piece)

    async def _more_credit(self, work: Work) -> None:
        work.more_credit = self._loop.create_future()
        try:
            async with asyncio.timeout(self.limits.stream_stall_s):
                await work.more_credit
        except TimeoutError:
            raise ApiError(
                errors.OVERLOADED, "the receiver of a streamed answer has stopped reading"
            ) from None
        finally:
            work.more_credit = None

    def _answer(self, work: Work, body: bytes) -> None:
        if len(body) > self.limits.frame_bytes_max:
            # The client would end the connection, and fail all other requests on it.
            self._refuse(work, ApiError(errors.OVERLOADED, "the answer is too large"))
        else:
            self.send(frames.RESULT, work.request, body=body)

    def _refuse(self, work: Work, error: ApiError) -> None:
        work.error = error.spec.name
        self.send(frames.ERROR, work.request, body=encode_error(error))

    def _end(self, work: Work) -> None:
        del self._works[work.request]
        if work.method.may_wait:
            self.waits -= 1
        else:
            self.busy -= 1
            self.busy_bytes -= work.size
            self._regulate()
        self._owner.request_ended(work, self._loop.time() - work.begun)
        self._owner.work_ended()


def _context_of(frame: Frame) -> RequestContext:
    try:
        return RequestContext.decode(bytes(frame.body))
    except ValueError as error:
        raise FrameError(str(error)) from None


def _at_work(connection: ServerConnection) -> bool:
    return connection.busy + connection.waits > 0
