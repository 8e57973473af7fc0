"""WebSocket on the wire (RFC 6455): messages in and out, joined writes, budgets, dead peers.

Frames are read by the Sans-I/O protocol of the ``websockets`` library. Those sent are built here:
a server's frames are a head and the payload as it is, and all frames of one pass of the loop leave
in one write, which costs a thirtieth of a write for each.
"""

import asyncio
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, Protocol

from prometheus_client.registry import Collector
from websockets.exceptions import PayloadTooBig
from websockets.frames import Close, Frame, Opcode
from websockets.protocol import Protocol as Wire
from websockets.protocol import Side, State

from contrail_common.edge.frame_reader import FINAL, FrameReader
from contrail_common.edge.last_look import after_a_look
from contrail_common.edge.requests import EdgeState
from contrail_common.edge.settings import EdgeSettings
from contrail_common.edge.socket_metrics import SocketCounts

REASON_BYTES_MAX: Final = 123
"""What fits behind the code in a control frame (RFC 6455, 5.5)."""

_PACE_BYTES: Final = 1 << 20
_PACED_BYTES: Final = 256 << 10
_STALL_S: Final = 1.0
_UNREAD_LINGER_S: Final = 15.0
_SHORT: Final = 126
_MEDIUM: Final = 1 << 16


class CloseCode(IntEnum):
    """Why a socket is closed; below 4500 a client comes back, above it does not."""

    INVALID_DATA = 1007
    DRAINING = 4000
    SLOW_CONSUMER = 4008
    RATE_LIMITED = 4029
    LEADER_LOST = 4050
    PROTOCOL_ERROR = 4500
    UNAUTHENTICATED = 4501
    FORBIDDEN = 4503
    REPLACED = 4509
    TOO_LARGE = 4513


class SocketHandler(Protocol):
    """What happens on a socket; every method is called on the event loop and returns at once."""

    def received(self, message: bytes) -> None:
        """A whole message came, in the kind of frame that the sub-protocol uses."""
        ...

    def caught_up(self) -> None:
        """All messages that came together with the last one were handed over."""
        ...

    def drain(self, grace_s: float) -> None:
        """The process is about to stop: finish within ``grace_s``, then close the socket."""
        ...

    def lost(self) -> None:
        """The socket is closed or closing; nothing more can be sent. Called once."""
        ...


@dataclass(frozen=True, slots=True)
class Opening:
    """A handshake that was accepted.

    Unless it is ``authenticated``, a token is still to come, which ``good_token`` checks.
    """

    subprotocol: str
    authenticated: bool
    good_token: Callable[[str], bool]


class SocketEndpoint(Protocol):
    """What serves the sockets of one path."""

    path: str
    subprotocols: Mapping[str, Opcode]
    """The sub-protocols by name, each with the kind of frame that it uses."""
    metrics: Collector

    def open(self, socket: "EdgeSocket", opening: Opening) -> SocketHandler:
        """Begin a session on ``socket``."""
        ...


def frame_head(opcode: Opcode, length: int) -> bytes:
    """The head of a server's unfragmented frame (RFC 6455, 5.2)."""
    first = FINAL | opcode
    if length < _SHORT:
        return bytes((first, length))
    if length < _MEDIUM:
        return struct.pack("!BBH", first, 126, length)
    return struct.pack("!BBQ", first, 127, length)


class EdgeSocket(asyncio.Protocol):
    """One open socket, from its accepted handshake on."""

    def __init__(
        self,
        opcode: Opcode,
        settings: EdgeSettings,
        state: EdgeState,
        counts: SocketCounts,
    ) -> None:
        self._wire = Wire(Side.SERVER, max_size=settings.frame_bytes_max)
        self._frames = FrameReader(self._wire, opcode, settings.frame_bytes_max)
        self._opcode = opcode
        self._settings = settings
        self._state = state
        self._counts = counts
        self._loop = asyncio.get_running_loop()
        self._connections: set[Any] = set()
        self._handler: SocketHandler
        self._transport: asyncio.Transport
        self._queue: list[bytes] = []
        self._queued = 0
        self._flushing: asyncio.Handle | None = None
        self._fragments: bytearray | None = None
        self._held = 0
        self._paused = False
        self._writable = asyncio.Event()
        self._writable.set()
        self._heard = True
        self._pinged = False
        self._ended = False
        self._deaf = False
        self._watch: asyncio.TimerHandle | None = None
        self._cut: asyncio.TimerHandle | None = None

    # Beginning and end ---------------------------------------------------------------------------
    def begin(
        self,
        transport: asyncio.Transport,
        connections: set[Any],
        answer: bytes,
        endpoint: SocketEndpoint,
        opening: Opening,
    ) -> None:
        """Take over ``transport``; ``answer`` opens the socket, in one write with what follows."""
        self._transport = transport
        transport.set_write_buffer_limits(_PACE_BYTES, _PACED_BYTES)
        transport.set_protocol(self)
        self._connections = connections
        self._connections.add(self)
        self._counts.opened(self)
        self._put([answer])
        self._watch = self._loop.call_later(self._settings.socket_ping_s, self._look_for_life)
        self._handler = endpoint.open(self, opening)

    @property
    def open(self) -> bool:
        """Whether messages can still be sent."""
        return not self._ended

    def close(self, code: int, reason: str = "") -> None:
        """Send what is queued and a close frame; the peer's own has a while to come."""
        if self._ended:
            return
        self._end(code)
        text = reason.encode()[:REASON_BYTES_MAX].decode(errors="ignore")
        if self._wire.state is State.OPEN:
            self._wire.send_close(code, text)
            self._put(self._wire.data_to_send())
        else:
            self._put([Frame(Opcode.CLOSE, Close(code, text).serialize()).serialize(mask=False)])
        self._flush()
        unread = code == CloseCode.SLOW_CONSUMER
        self._leave(_UNREAD_LINGER_S if unread else self._settings.linger_s)

    def shutdown(self) -> None:
        """The server stops; uvicorn calls this on each of its connections."""
        if not self._ended:
            self._handler.drain(self._settings.grace_s / 2)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._end(1006)
        for timer in (self._watch, self._cut, self._flushing):
            if timer is not None:
                timer.cancel()
        self._hold(0)
        self._connections.discard(self)
        self._writable.set()

    def _end(self, code: int) -> None:
        if not self._ended:
            self._ended = True
            self._counts.closed(self, code)
            self._handler.lost()

    def _leave(self, linger_s: float) -> None:
        """Cut the connection when the peer does not end it within ``linger_s``."""
        self._fragments = None
        self._writable.set()
        self.resume()
        if self._cut is None:
            self._cut = self._loop.call_later(linger_s, self._transport.abort)

    # Reading -------------------------------------------------------------------------------------
    def data_received(self, data: bytes) -> None:
        """Read frames; the messages they complete go to the handler."""
        self._heard = True
        wire = self._wire
        if self._deaf:
            return
        for received in self._frames.read(data):
            if isinstance(received, Frame):
                self._take(received)
            elif not self._ended:
                self._message(received)
        self._handler.caught_up()
        answers = wire.data_to_send()
        if wire.parser_exc is not None:
            self._fail(wire.parser_exc, answers)
        elif answers:
            self._answer(answers)
        if not self._deaf:
            self._hold(len(wire.reader.buffer) + len(self._fragments or b""))

    def eof_received(self) -> None:
        """The peer sends no more: the connection ends, as RFC 6455 has no half-open sockets."""

    def _take(self, frame: Frame) -> None:
        if self._ended:
            return
        opcode, data = frame.opcode, bytes(frame.data)
        if opcode is Opcode.CONT:
            assert self._fragments is not None
            self._fragments += data
            if frame.fin:
                whole, self._fragments = bytes(self._fragments), None
                self._message(whole)
        elif opcode is Opcode.TEXT or opcode is Opcode.BINARY:
            if opcode is not self._opcode:
                kind = "text" if self._opcode is Opcode.TEXT else "binary"
                self.close(CloseCode.PROTOCOL_ERROR, f"this sub-protocol uses {kind} frames")
            elif frame.fin:
                self._message(data)
            else:
                self._fragments = bytearray(data)
        elif opcode is Opcode.CLOSE:
            assert self._wire.close_rcvd is not None
            self._end(self._wire.close_rcvd.code)

    def _message(self, message: bytes) -> None:
        self._counts.frames_in += 1
        self._handler.received(message)

    def _answer(self, answers: list[bytes]) -> None:
        """Pongs; or the answer to a close frame, behind which the connection ends."""
        self._put([answer for answer in answers if answer])
        if b"" in answers:
            self._flush()
            self._transport.close()
            self._leave(self._settings.linger_s)

    def _fail(self, error: Exception, answers: list[bytes]) -> None:
        """What came is not WebSocket, or is too large: say so and listen no more."""
        if self._ended:
            return
        if isinstance(error, PayloadTooBig):
            limit = f"a message is at most {self._settings.frame_bytes_max} bytes"
            self.close(CloseCode.TOO_LARGE, limit)
        else:
            assert self._wire.close_sent is not None
            self.close(self._wire.close_sent.code, self._wire.close_sent.reason)
        self._listen_no_more()

    def _listen_no_more(self) -> None:
        # Closing now would reset the connection under a peer that still writes, and it would never
        # see why: end this side, drop what comes, close a little later.
        self._deaf = True
        self._wire.reader.discard()
        self._state.bodies_bytes -= self._held
        self._held = 0
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def _hold(self, count: int) -> None:
        """Count the bytes of messages that are not complete with the bodies in flight."""
        self._state.bodies_bytes += count - self._held
        self._held = count
        if count and self._state.bodies_bytes > self._state.bodies_bytes_max:
            self.close(CloseCode.RATE_LIMITED, "too many bytes of messages are in flight")
            self._listen_no_more()

    def pause(self) -> None:
        """Read no more for now: the peer sends faster than its messages can be worked on."""
        if not self._paused and not self._ended:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read again."""
        if self._paused:
            self._paused = False
            self._transport.resume_reading()

    # Writing -------------------------------------------------------------------------------------
    def send(self, message: bytes) -> None:
        """Send a message; what the peer leaves unread counts against its budget."""
        if self._ended:
            return
        self._counts.frames_out += 1
        self._put([frame_head(self._opcode, len(message)), message])
        if self._queued > _PACED_BYTES:
            self._flush()

    def send_all(self, messages: Iterable[bytes]) -> None:
        """Send messages, as :meth:`send` does each."""
        for message in messages:
            self.send(message)

    def _put(self, parts: list[bytes]) -> None:
        self._queue += parts
        self._queued += sum(map(len, parts))
        if self._flushing is None and self._queue:
            self._flushing = self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        data = b"".join(self._queue)
        self._queue.clear()
        self._queued = 0
        if data and not self._transport.is_closing():
            self._transport.write(data)
            if self.unread_bytes > self._settings.unread_bytes_max:
                self.close(CloseCode.SLOW_CONSUMER, "the unread budget is spent")

    @property
    def unread_bytes(self) -> int:
        """Bytes that the peer has not taken yet, without those in the kernel's buffers."""
        return self._queued + self._transport.get_write_buffer_size()

    async def room(self) -> None:
        """Wait while the peer reads, but slower than it is sent to.

        For a peer that takes nothing at all there is no waiting: it spends its budget.
        """
        while not self._ended and not self._writable.is_set():
            before = self._transport.get_write_buffer_size()
            try:
                async with asyncio.timeout(_STALL_S):
                    await self._writable.wait()
            except TimeoutError:
                if self._transport.get_write_buffer_size() >= before:
                    return

    def pause_writing(self) -> None:
        """The peer reads slower than it is sent to."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """The peer has caught up."""
        self._writable.set()

    # Life ----------------------------------------------------------------------------------------
    def _look_for_life(self) -> None:
        """Ping a peer that is silent; one that stays silent is dead."""
        silent = not self._heard and not self._paused
        if silent and self._pinged:
            self._watch = after_a_look(self._loop, self._end_silent)
            return
        self._ping_if(silent)

    def _end_silent(self) -> None:
        if self._heard:  # it is we who did not listen
            self._ping_if(silent=False)
            return
        self._end(1006)
        self._transport.abort()

    def _ping_if(self, silent: bool) -> None:
        """Send a ping, maybe, and look again later."""
        self._pinged = silent
        if silent and not self._ended:
            self._wire.send_ping(b"")
            self._put(self._wire.data_to_send())
        self._heard = False
        self._watch = self._loop.call_later(self._settings.socket_ping_s, self._look_for_life)
