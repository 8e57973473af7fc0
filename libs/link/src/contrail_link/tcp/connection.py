"""Either end of one connection of the link: handshake, frames, joined writes and time limits."""

import asyncio
from typing import cast

import msgspec

from contrail_link.tcp import frames
from contrail_link.tcp.frames import Frame, FrameError, FrameReader, frame_head
from contrail_link.tcp.handshake import Handshake, HandshakeError
from contrail_link.tcp.limits import LinkLimits

Body = bytes | memoryview


class FramedConnection(asyncio.Protocol):
    """Sends and receives frames after the handshake. All fields belong to the event loop.

    Frames sent in one pass of the event loop go into one write. The connection is aborted if the
    peer fails the handshake, violates the protocol, or sends or reads nothing for too long;
    :meth:`on_lost` gets the reason.
    """

    def __init__(self, handshake: Handshake, limits: LinkLimits) -> None:
        self.limits = limits
        self.writable = True
        self.lost = False
        # The handshake under way; None once it is done. No frame is read before.
        self._handshake: Handshake | None = handshake
        # Cuts the received bytes into frames.
        self._reader = FrameReader(limits.frame_bytes_max)
        # Heads and bodies for the next write. Not empty only while a call of `_flush` is due.
        self._out: list[Body] = []
        # False while `set_reading` has paused the transport.
        self._reading = True
        # The reason for `on_lost`.
        self._reason = "the connection was closed"
        # Loop times: of the last bytes received, of the last pulse, and of the last moment at
        # which the write buffer was seen to shrink (meaningless while `writable`).
        self._heard_at = self._pulse_at = self._drained_at = 0.0
        # Bytes in the write buffer at the last look; meaningless while `writable`.
        self._unwritten = 0
        # The loop of the connection. Set by `connection_made`, as the next two.
        self._loop: asyncio.AbstractEventLoop
        # Writes to the peer.
        self._transport: asyncio.Transport
        # Aborts a handshake that takes too long.
        self._handshake_timer: asyncio.TimerHandle

    # For subclasses ------------------------------------------------------------------------------
    def on_open(self) -> None:
        """Begin to use the connection: the handshake is done."""
        raise NotImplementedError

    def on_frame(self, frame: Frame) -> None:
        """Handle a frame. Raise FrameError or msgspec.DecodeError to end the connection."""
        raise NotImplementedError

    def on_flow(self) -> None:
        """Note that ``writable`` has changed: the peer has stopped reading, or reads again."""

    def on_lost(self, reason: str) -> None:
        """Note that the connection has ended. Called exactly once."""
        raise NotImplementedError

    # Transport -----------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake."""
        self._loop = asyncio.get_running_loop()
        # uvloop's transports do not derive from asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._heard_at = self._pulse_at = self._drained_at = self._loop.time()
        self._handshake_timer = self._loop.call_later(
            self.limits.handshake_s, self.fail, "the handshake took too long"
        )

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer, and report the reason."""
        if self.lost:
            return
        self.lost = True
        self._out.clear()
        self._handshake_timer.cancel()
        self.on_lost(self._reason if exc is None else f"{self._reason}: {exc}")

    def data_received(self, data: bytes) -> None:
        """Continue the handshake; after it, read frames."""
        if self.lost or self._transport.is_closing():
            return
        self._heard_at = self._loop.time()
        try:
            if self._handshake is not None:
                data = self._shake_hands(self._handshake, data)
            if data:
                for frame in self._reader.feed(data):
                    self.on_frame(frame)
        except HandshakeError as error:
            self.fail(str(error))
        except (FrameError, msgspec.DecodeError) as error:
            self.fail(f"the peer violated the protocol: {error}")

    def _shake_hands(self, handshake: Handshake, data: bytes) -> bytes:
        answer = handshake.feed(data)
        if answer:
            self._transport.write(answer)
        if not handshake.done:
            return b""
        self._handshake_timer.cancel()
        self._handshake = None
        self.on_open()
        return handshake.rest

    def pause_writing(self) -> None:
        """Begin to watch a peer that reads more slowly than this end writes."""
        self.writable = False
        self._drained_at = self._loop.time()
        self._unwritten = self._transport.get_write_buffer_size()
        self.on_flow()

    def resume_writing(self) -> None:
        """Note that the peer has read enough."""
        self.writable = True
        self.on_flow()

    # Sending -------------------------------------------------------------------------------------
    def send(
        self, kind: int, request: int, *, method: int = 0, value: int = 0, body: Body = b""
    ) -> None:
        """Send a frame, in one write with all others of this pass of the event loop."""
        if self.lost:
            return
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(frame_head(kind, method, request, value, len(body)))
        if body:
            self._out.append(body)

    def _flush(self) -> None:
        out, self._out = self._out, []
        if out and not self._transport.is_closing():
            self._transport.writelines(out)

    def set_reading(self, wanted: bool) -> None:
        """Resume or pause reading. While it is paused, TCP slows down the peer."""
        if wanted is self._reading or self.lost or self._transport.is_closing():
            return
        self._reading = wanted
        if wanted:
            self._heard_at = self._loop.time()
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def close(self) -> None:
        """End the connection after everything has been sent."""
        if not self.lost:
            self._flush()
            self._transport.close()

    def fail(self, reason: str) -> None:
        """End the connection at once."""
        if not self.lost and not self._transport.is_closing():
            self._reason = reason
            self._transport.abort()

    # Pulse ---------------------------------------------------------------------------------------
    def pulse(self, now: float, body: Body = b"") -> None:
        """Send a pulse, or end a connection whose peer is silent. Called every ``pulse_s``."""
        if self._handshake is not None:
            return
        # The event loop was held, or the machine was suspended.
        late = now - self._pulse_at > 2 * self.limits.pulse_s
        self._pulse_at = now
        if late or not self._reading:
            # This end did not read, so silence says nothing about the peer.
            self._heard_at = now
        if now - self._heard_at > self.limits.silence_s:
            self.fail(f"nothing was received for {self.limits.silence_s:g} s")
        elif self._stalled(now):
            self.fail("the peer has stopped reading")
        elif self.writable:
            self.send(frames.PULSE, 0, body=body)

    def silent_s(self, now: float) -> float:
        """Return the time since the peer was heard, as of the last pulse."""
        return now - self._heard_at

    def _stalled(self, now: float) -> bool:
        if self.writable:
            return False
        unwritten = self._transport.get_write_buffer_size()
        if unwritten < self._unwritten:
            self._drained_at = now
        self._unwritten = unwritten
        return (
            unwritten > self.limits.unwritten_bytes_max
            or now - self._drained_at > self.limits.stall_s
        )
