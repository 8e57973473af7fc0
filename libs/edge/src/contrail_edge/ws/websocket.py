"""WebSocket on the wire (RFC 6455): messages in and out, joined writes, budgets, dead peers.

The Sans-I/O protocol of the ``websockets`` library reads frames. Frames to send are built here: a
server's frame is a head and the unchanged payload. All frames of one pass of the event loop go
into one write, which costs about a thirtieth of one write per frame.
"""

import asyncio
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, Protocol

from prometheus_client.registry import Collector
from websockets.exceptions import PayloadTooBig
from websockets.frames import Close, Frame, Opcode
from websockets.protocol import Protocol as Wire
from websockets.protocol import Side, State

from contrail_edge.http.last_look import after_a_look
from contrail_edge.http.requests import EdgeState
from contrail_edge.http.settings import EdgeSettings
from contrail_edge.http.steps import Steps
from contrail_edge.ws.frame_reader import FINAL, FrameReader
from contrail_edge.ws.socket_metrics import SocketCounts

REASON_BYTES_MAX: Final = 123
"""Bytes for the reason after the code in a close frame (RFC 6455, 5.5)."""

# `wait_writable` waits from this number of unsent bytes on, until only the second one is left.
_PACE_BYTES: Final = 1 << 20
_PACED_BYTES: Final = 256 << 10
# A peer that reads nothing for this long is not waited for any more.
_STALL_S: Final = 1.0
# Time for a slow consumer to read up to the close frame.
_UNREAD_LINGER_S: Final = 15.0
# Below these sizes, the length takes one byte of the head, or two more.
_SHORT: Final = 126
_MEDIUM: Final = 1 << 16

_SHORT_HEADS: Final = {
    opcode: [bytes((FINAL | opcode, length)) for length in range(_SHORT)] for opcode in Opcode
}


class CloseCode(IntEnum):
    """Why a socket is closed. Clients reconnect after codes below 4500, but not after others."""

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
    """The callbacks of a socket. Each runs on the event loop and returns at once."""

    def received(self, message: bytes) -> Steps[None] | None:
        """Handle a complete message; its frames are of the sub-protocol's kind.

        Returned steps are the rest of the work. The socket runs them before the next message.
        """
        ...

    def received_together(self, messages: list[bytes]) -> bool:
        """Handle a run of messages at once if they are of a frequent kind; False if they are not.

        Then nothing is done, and each of them is handed to ``received``.
        """
        ...

    def caught_up(self) -> None:
        """Note that all messages that arrived together have been handled."""
        ...

    def drain(self, grace_s: float) -> None:
        """Finish within ``grace_s`` and close the socket, because the process stops."""
        ...

    def lost(self) -> None:
        """Stop: the socket is closed or closing, and nothing can be sent. Called exactly once."""
        ...


@dataclass(frozen=True, slots=True)
class Opening:
    """A handshake that was accepted.

    If it is not ``authenticated``, the first frame must have a token, which ``good_token`` checks.
    """

    subprotocol: str
    authenticated: bool
    good_token: Callable[[str], bool]


class SocketEndpoint(Protocol):
    """Serves the sockets of one path."""

    path: str
    subprotocols: Mapping[str, Opcode]
    """The sub-protocols by name, each with the kind of frame that it uses."""
    metrics: Collector

    def open(self, socket: "EdgeSocket", opening: Opening) -> SocketHandler:
        """Begin a session on ``socket``."""
        ...


def frame_head(opcode: Opcode, length: int) -> bytes:
    """Return the head of an unfragmented, unmasked frame (RFC 6455, 5.2)."""
    if length < _SHORT:
        return _SHORT_HEADS[opcode][length]
    first = FINAL | opcode
    if length < _MEDIUM:
        return struct.pack("!BBH", first, 126, length)
    return struct.pack("!BBQ", first, 127, length)


class EdgeSocket(asyncio.Protocol):
    """One open socket, from its accepted handshake on. All fields belong to the event loop."""

    def __init__(
        self,
        opcode: Opcode,
        settings: EdgeSettings,
        state: EdgeState,
        counts: SocketCounts,
    ) -> None:
        # Reads frames, and builds pongs and close frames. Its size limit grows in `trust`.
        self._wire = Wire(Side.SERVER, max_size=settings.unproven_frame_bytes_max)
        # Reads simple messages faster than `_wire`, and gives it all other bytes.
        self._frames = FrameReader(self._wire, opcode)
        self._opcode = opcode  # the kind of frame of the sub-protocol: text or binary
        self._settings = settings  # bounds of a socket
        self._state = state  # budgets of the process
        self._counts = counts  # metrics of all sockets
        self._loop = asyncio.get_running_loop()  # all fields belong to it
        self._connections: set[Any] = set()  # uvicorn's open connections, which it shuts down
        self._handler: SocketHandler  # set once, in `begin`
        self._transport: asyncio.Transport  # set once, in `begin`
        # Bytes for the next write.
        self._queue: list[bytes] = []
        self._queued = 0  # the number of bytes in `_queue`
        self._flushing = False  # `_flush_in_turn` waits for a turn; True while there are bytes
        # The start of a fragmented message; None between messages.
        self._fragments: bytearray | None = None
        self._arrived: list[bytes] = []
        """Bytes that arrived while ``_left`` was not done, in order."""
        self._left: Steps[None] | None = None
        """The rest of the work for the bytes that were read; reading is paused meanwhile."""
        self._working_bytes = 0
        """Size of the message that ``_left`` is working on, or 0."""
        # `_go_on` waits for a turn. Until then, reading is paused.
        self._waiting = False
        # Bytes of unfinished messages that are counted in `_state.bodies`.
        self._held = 0
        self._proven = False  # the peer has shown its token, or needs none
        self._paused = False  # the handler does not want more messages now
        self._writable = asyncio.Event()  # cleared while the write buffer is full
        self._writable.set()
        self._heard = True  # bytes have arrived since the last look for life
        self._pinged = False  # the last look for life sent a ping
        self._ended = False  # closing or closed; the handler was notified
        self._deaf = False  # arriving bytes are dropped
        self._watch: asyncio.TimerHandle | None = None  # the next look for life
        self._cut: asyncio.TimerHandle | None = None  # aborts a peer that does not close

    # Opening and closing -------------------------------------------------------------------------
    def begin(
        self,
        transport: asyncio.Transport,
        connections: set[Any],
        answer: bytes,
        endpoint: SocketEndpoint,
        opening: Opening,
    ) -> None:
        """Take over ``transport``, and send ``answer``, the answer to the handshake.

        The answer goes into one write with the first frames.
        """
        self._transport = transport
        transport.set_write_buffer_limits(_PACE_BYTES, _PACED_BYTES)
        transport.set_protocol(self)
        self._connections = connections
        self._connections.add(self)
        self._counts.opened(self)
        self._put([answer])
        self._watch = self._loop.call_later(self._settings.socket_ping_s, self._look_for_life)
        if opening.authenticated:
            self.trust()
        self._handler = endpoint.open(self, opening)

    def trust(self) -> None:
        """Accept messages of full size, as the peer has shown its token or needs none."""
        self._proven = True
        self._wire.max_message_size = self._settings.frame_bytes_max

    @property
    def open(self) -> bool:
        """True while messages can be sent."""
        return not self._ended

    def close(self, code: int, reason: str = "") -> None:
        """Send what is queued and a close frame, then give the peer some time to close."""
        if self._ended:
            return
        self._end(code)
        text = reason.encode()[:REASON_BYTES_MAX].decode(errors="ignore")
        if self._wire.state is State.OPEN:
            self._wire.send_close(code, text)
            self._put(self._wire.data_to_send())
        else:
            # After a violation the library is closing already, and would send a code of its own.
            self._put([Frame(Opcode.CLOSE, Close(code, text).serialize()).serialize(mask=False)])
        self._flush()
        # The close frame is behind everything that this peer has not read yet. Give it time to get
        # there, or it would not learn why it was closed.
        unread = code == CloseCode.SLOW_CONSUMER
        self._leave(_UNREAD_LINGER_S if unread else self._settings.linger_s)

    def shutdown(self) -> None:
        """Drain the session. uvicorn calls this for each connection when the server stops."""
        if not self._ended:
            self._handler.drain(self._settings.grace_s / 2)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the session, in a later pass if thousands end at once."""
        self._state.turns.run(self._lost)

    def _lost(self) -> None:
        """End the session, stop the timers, and return all budgets."""
        self._end(1006)
        for timer in (self._watch, self._cut):
            if timer is not None:
                timer.cancel()
        self._left = None
        self._working_bytes = 0
        self._hold(0)
        self._state.unread.forget(self._transport)
        self._connections.discard(self)
        self._writable.set()
        # Ends circles of references, so that everything is freed without a collection.
        self._wire.parser.close()
        del self._handler

    def _end(self, code: int) -> None:
        if not self._ended:
            self._ended = True
            self._counts.closed(self, code)
            self._handler.lost()

    def _leave(self, linger_s: float) -> None:
        """Abort the connection if the peer does not end it within ``linger_s``."""
        self._fragments = None
        self._writable.set()
        self.resume()
        if self._cut is None:
            self._cut = self._loop.call_later(linger_s, self._transport.abort)

    # Reading -------------------------------------------------------------------------------------
    def data_received(self, data: bytes) -> None:
        """Read frames, and hand complete messages to the handler."""
        self._heard = True
        if self._deaf:
            return
        if self._left is not None:
            self._arrived.append(data)
            return
        self._left = self._steps(data)
        if self._state.turns.over:
            self._wait_for_turn()
        else:
            self._go_on()

    def _steps(self, data: bytes) -> Steps[None]:
        for received in self._frames.read(data):
            messages = self._taken(received) if isinstance(received, Frame) else received
            if self._received_together(messages):
                yield
                continue
            for message in messages:
                if self._ended:
                    break
                self._counts.frames_in += 1
                left = self._handler.received(message)
                if left is not None:
                    # The message stays in memory until the work is done, so it still counts.
                    self._working_bytes = len(message)
                    yield from left
                    self._working_bytes = 0
                yield

    def _received_together(self, messages: list[bytes]) -> bool:
        if len(messages) <= 1 or self._ended or not self._handler.received_together(messages):
            return False
        self._counts.frames_in += len(messages)
        return True

    def _go_on(self) -> None:
        """Work until everything is done or the turn is over."""
        if self._left is None:
            return  # the connection was lost while it waited
        turns = self._state.turns
        for _ in self._left:
            if turns.over:
                break
        else:
            self._left = None
        if self._left is None:
            self._handler.caught_up()
            self._answer_control_frames()
        if self._left is not None:
            self._wait_for_turn()
        elif self._arrived and not self._deaf:
            self._left = self._steps(b"".join(self._arrived))
            self._arrived.clear()
            self._wait_for_turn()
        elif self._waiting:
            self._waiting = False
            if not self._paused:
                self._transport.resume_reading()
        if not self._deaf:
            unfinished = len(self._wire.reader.buffer) + len(self._fragments or b"")
            self._hold(unfinished + self._working_bytes)

    def _wait_for_turn(self) -> None:
        if not self._waiting and not self._paused:
            self._transport.pause_reading()
        self._waiting = True
        self._state.turns.add(self._go_on)

    @property
    def busy(self) -> bool:
        """True while messages that were read are not completely handled."""
        return self._left is not None

    def _answer_control_frames(self) -> None:
        answers = self._wire.data_to_send()
        if self._wire.parser_exc is not None:
            self._fail(self._wire.parser_exc, answers)
        elif answers:
            self._answer(answers)

    def eof_received(self) -> bool:
        """Close, as RFC 6455 has no half-open sockets; in a later pass if thousands end at once."""
        return self._state.turns.close(self._transport)

    def _taken(self, frame: Frame) -> list[bytes]:
        """Return the message that ``frame`` completes, if it does."""
        if self._ended:
            return []
        opcode, data = frame.opcode, bytes(frame.data)
        if opcode is Opcode.CONT:
            assert self._fragments is not None
            self._fragments += data
            if frame.fin:
                whole, self._fragments = bytes(self._fragments), None
                return [whole]
        elif opcode is Opcode.TEXT or opcode is Opcode.BINARY:
            if opcode is not self._opcode:
                kind = "text" if self._opcode is Opcode.TEXT else "binary"
                self.close(CloseCode.PROTOCOL_ERROR, f"this sub-protocol only uses {kind} frames")
            elif frame.fin:
                return [data]
            else:
                self._fragments = bytearray(data)
        elif opcode is Opcode.CLOSE:
            assert self._wire.close_rcvd is not None
            self._end(self._wire.close_rcvd.code)
        return []

    def _answer(self, answers: list[bytes]) -> None:
        """Send pongs, or the answer to a close frame, after which the connection ends."""
        self._put([answer for answer in answers if answer])
        if b"" in answers:
            self._flush()
            self._transport.close()
            self._leave(self._settings.linger_s)

    def _fail(self, error: Exception, answers: list[bytes]) -> None:
        """Close because the bytes are not WebSocket or a message is too large."""
        if self._ended:
            return
        if isinstance(error, PayloadTooBig):
            limit = f"the limit is {self._wire.max_message_size} bytes a message"
            self.close(CloseCode.TOO_LARGE, limit)
        else:
            assert self._wire.close_sent is not None
            self.close(self._wire.close_sent.code, self._wire.close_sent.reason)
        self._listen_no_more()

    def _listen_no_more(self) -> None:
        # Closing now would reset the connection of a peer that is still writing, and it would never
        # see the reason. So end this side, drop what arrives, and close later.
        self._deaf = True
        self._arrived.clear()
        self._wire.reader.discard()
        self._state.bodies.give(self._held)
        self._held = 0
        if not self._transport.is_closing():
            self._transport.write_eof()

    def _hold(self, count: int) -> None:
        """Count ``count`` bytes of unfinished messages in the budget of bodies in flight.

        A peer that has not shown its token is not counted: its messages are small, and it must not
        use up the budget of others.
        """
        bodies = self._state.bodies
        if not self._proven:
            return
        if count < self._held:
            bodies.give(self._held - count)
        elif not bodies.take(self._held, count - self._held):
            self.close(CloseCode.RATE_LIMITED, "too many bytes of unfinished messages are held")
            self._listen_no_more()
            return
        self._held = count

    def pause(self) -> None:
        """Stop reading for now, because the peer sends faster than its messages are handled."""
        if not self._paused and not self._ended:
            self._paused = True
            if not self._waiting:
                self._transport.pause_reading()

    def resume(self) -> None:
        """Read again after ``pause``."""
        if self._paused:
            self._paused = False
            if not self._waiting:
                self._transport.resume_reading()

    # Writing -------------------------------------------------------------------------------------
    def send(self, message: bytes) -> None:
        """Send a message. Bytes that the peer leaves unread count against its budget."""
        self.send_all((message,))

    def send_all(self, messages: Sequence[bytes]) -> None:
        """Send messages, as :meth:`send` does each. Together they must be short."""
        if self._ended:
            return
        self._counts.frames_out += len(messages)
        opcode = self._opcode
        parts: list[bytes] = []
        for message in messages:
            parts += frame_head(opcode, len(message)), message
        self._put(parts)
        # A long queue would be joined in one step, and would be invisible to `unread_bytes_max`.
        if self._queued > _PACED_BYTES:
            self._flush()

    def _put(self, parts: list[bytes]) -> None:
        self._queue += parts
        self._queued += sum(map(len, parts))
        if not self._flushing and self._queue:
            self._flushing = True
            self._state.turns.add(self._flush_in_turn)

    def _flush_in_turn(self) -> None:
        self._flushing = False
        self._flush()

    def _flush(self) -> None:
        data = b"".join(self._queue)
        self._queue.clear()
        self._queued = 0
        if data and not self._transport.is_closing():
            self._transport.write(data)
            self._state.unread.wrote(self._transport, len(data))
            if self.unread_bytes > self._settings.unread_bytes_max:
                self.close(CloseCode.SLOW_CONSUMER, "too many bytes were left unread")

    @property
    def unread_bytes(self) -> int:
        """Bytes that the peer has not read yet, without those in the kernel's buffers."""
        return self._queued + self._transport.get_write_buffer_size()

    async def wait_writable(self) -> None:
        """Wait for a peer that reads, but more slowly than the server sends.

        Returns after a second in which the peer has read nothing: such a peer then uses up its
        budget of unread bytes, and is closed as a slow consumer.
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
        """Make ``wait_writable`` wait, because the write buffer is full."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """End the waits of ``wait_writable``, because the peer has read enough."""
        self._writable.set()

    # Silent peers --------------------------------------------------------------------------------
    def _look_for_life(self) -> None:
        """Ping a silent peer. If it was pinged before and is still silent, it is dead."""
        # While reading is paused, silence says nothing about the peer.
        silent = not self._heard and not self._paused and not self.busy
        if silent and self._pinged:
            self._watch = after_a_look(self._loop, self._end_silent)
            return
        self._ping_if(silent)

    def _end_silent(self) -> None:
        if self._heard:  # bytes were there; the event loop was late to read them
            self._ping_if(silent=False)
            return
        self._end(1006)
        self._transport.abort()

    def _ping_if(self, silent: bool) -> None:
        """Send a ping if the peer is ``silent``, and look again later."""
        self._pinged = silent
        if silent and not self._ended:
            self._wire.send_ping(b"")
            self._put(self._wire.data_to_send())
        self._heard = False
        self._watch = self._loop.call_later(self._settings.socket_ping_s, self._look_for_life)
