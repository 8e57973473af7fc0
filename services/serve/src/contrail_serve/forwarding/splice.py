"""A WebSocket whose bytes are passed between its client and the process that serves it."""

import asyncio
from typing import Any, Final, cast

from websockets.frames import Close, Opcode

from contrail_common.errors import ApiError
from contrail_edge.http.budgets import UnreadBudget
from contrail_edge.http.headers import X_REQUEST_ID
from contrail_edge.http.problems import refusal
from contrail_edge.http.requests import Request
from contrail_edge.ws.websocket import CloseCode, frame_head
from contrail_serve.forwarding.frame_ends import FrameEnds
from contrail_serve.forwarding.heads import handshake_head
from contrail_serve.forwarding.peers import Peers

_AHEAD_BYTES_MAX: Final = 64 << 10
"""Bytes that are buffered for the peer before it is connected; then reading is paused."""
# Time for the client to close after it was asked to reconnect.
_LEAVE_S: Final = 2.0
_CLOSE: Final = Close(CloseCode.DRAINING, "the server is shutting down").serialize()
_DRAINING: Final = frame_head(Opcode.CLOSE, len(_CLOSE)) + _CLOSE


class _Half(asyncio.Protocol):
    """One of the two connections. It writes what the other one reads, with back-pressure."""

    def __init__(self) -> None:
        self.other: _Half | None = None
        self.transport: asyncio.Transport | None = None
        self.unread: UnreadBudget | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        # uvloop's transports do not derive from asyncio's.
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Write the bytes to the other connection."""
        if self.other is not None:
            self.other.write(data)

    def write(self, data: bytes) -> None:
        """Send ``data``, unless the connection is closing."""
        transport = self.transport
        if transport is not None and not transport.is_closing():
            transport.write(data)
            if self.unread is not None:
                self.unread.wrote(transport, len(data))

    def pause_writing(self) -> None:
        """Stop reading from the other connection, because the peer of this one is slow."""
        self._set_other_reading(False)

    def resume_writing(self) -> None:
        """Read from the other connection again."""
        self._set_other_reading(True)

    def connection_lost(self, exc: Exception | None) -> None:
        """Close the other connection after everything has been sent."""
        if self.unread is not None and self.transport is not None:
            self.unread.forget(self.transport)
        other, self.other = self.other, None
        if other is not None and other.transport is not None:
            other.other = None
            other.transport.close()

    def _set_other_reading(self, wanted: bool) -> None:
        other = self.other
        if other is None or other.transport is None or other.transport.is_closing():
            return
        if wanted:
            other.transport.resume_reading()
        else:
            other.transport.pause_reading()


class _PeerHalf(_Half):
    """The connection to the peer. When this process stops, a close frame follows a whole frame."""

    def __init__(self) -> None:
        super().__init__()
        self._ends = FrameEnds()
        # A close frame is due at the end of the current frame; it was sent.
        self._leaving = self._left = False
        self._ended = False
        """True once the peer has closed its sending side, and so has this process to the client."""

    def data_received(self, data: bytes) -> None:
        """Write the bytes to the client, up to the end of a frame if this process stops."""
        if self._left:
            return
        end = self._ends.feed(data)
        if self._leaving and end is not None:
            super().data_received(data[:end])
            self._close()
        else:
            super().data_received(data)

    def eof_received(self) -> bool:
        """Close the sending side to the client, and still pass on what the client sends.

        A peer that refuses a message sends the reason, closes its sending side, and drops the rest
        of the message. If the connection were closed, a client that is still writing would never
        see the reason.
        """
        other = self.other
        if other is None or other.transport is None or other.transport.is_closing():
            return False
        self._ended = True
        other.transport.write_eof()
        return True

    def leave(self) -> None:
        """Ask the client to reconnect, at the end of the current frame."""
        self._leaving = True
        if self._ends.between:
            self._close()

    def _close(self) -> None:
        self._left = True
        if self.other is not None and not self._ended:
            self.other.write(_DRAINING)


class Splice(_Half):
    """The connection to the client. The peer gets its handshake unchanged, and answers it."""

    def __init__(
        self,
        request: Request,
        transport: asyncio.Transport,
        connections: set[Any],
        peers: Peers,
    ) -> None:
        super().__init__()
        self.transport = transport
        self.unread = request.state.unread
        self._request = request
        self._connections = connections
        self._peers = peers
        # Bytes for the peer, until it is connected.
        self._ahead: list[bytes] = [handshake_head(request)]
        self._ahead_bytes = 0
        # The other connection, once there is one.
        self._peer: _PeerHalf | None = None
        # Ends a connection whose client does not close it after a shutdown.
        self._cut: asyncio.TimerHandle | None = None
        # Reading is paused until the peer is connected.
        self._paused = False
        transport.set_protocol(self)
        connections.add(self)
        self._joining = asyncio.create_task(self._join())

    async def _join(self) -> None:
        for address in self._peers.in_turn():
            half = await self._peers.connect(address, _PeerHalf)
            if half is not None:
                self._begin(half)
                return
        self._refuse(self._peers.away())

    def _begin(self, half: _PeerHalf) -> None:
        assert half.transport is not None
        assert self.transport is not None
        if self.transport.is_closing():
            half.transport.close()
            return
        half.other, self.other, self._peer = self, half, half
        half.unread = self.unread
        half.write(b"".join(self._ahead))
        self._ahead = []
        if self._paused:
            self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        """Write the bytes to the peer, or buffer them until it is connected."""
        if self.other is not None or self._joining.done():
            super().data_received(data)
            return
        self._ahead.append(data)
        self._ahead_bytes += len(data)
        if self._ahead_bytes > _AHEAD_BYTES_MAX and not self._paused:
            assert self.transport is not None
            self._paused = True
            self.transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop connecting, and close the connection to the peer."""
        self._connections.discard(self)
        if self._cut is not None:
            self._cut.cancel()
        self._joining.cancel()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Ask the client to reconnect, because this process stops.

        For a while, what the client still sends (acknowledgements, its own close frame) is passed
        on to the peer.
        """
        assert self.transport is not None
        self._joining.cancel()
        if self._peer is None:
            self.transport.close()
        elif self._cut is None:
            self._peer.leave()
            # The client may ignore the close frame.
            self._cut = asyncio.get_running_loop().call_later(_LEAVE_S, self.transport.close)

    def _refuse(self, error: ApiError) -> None:
        assert self.transport is not None
        answer = refusal(self._request, error)
        lines = [
            b"HTTP/1.1 %d Service Unavailable" % answer.status,
            *(b"%b: %b" % header for header in answer.wire_headers()),
            X_REQUEST_ID + b": " + self._request.request_id,
            b"connection: close",
        ]
        self.write(b"\r\n".join([*lines, b"", answer.body]))
        self.transport.close()
