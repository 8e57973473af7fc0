"""Two connections joined byte by byte: what a client upgraded, served by another process."""

import asyncio
from typing import Any, Final, cast

from websockets.frames import Close, Opcode

from contrail_common.errors import ApiError
from contrail_edge.http.budgets import UnreadBudget
from contrail_edge.http.problems import refusal
from contrail_edge.http.requests import Request
from contrail_edge.ws.websocket import CloseCode, frame_head
from contrail_serve.forwarding.frame_ends import FrameEnds
from contrail_serve.forwarding.heads import handshake_head
from contrail_serve.forwarding.peers import Peers

_AHEAD_BYTES_MAX: Final = 64 << 10
"""What a client may send before the peer is connected; then it waits."""
_LEAVE_S: Final = 2.0
_CLOSE: Final = Close(CloseCode.DRAINING, "the server is shutting down").serialize()
_DRAINING: Final = frame_head(Opcode.CLOSE, len(_CLOSE)) + _CLOSE


class _Half(asyncio.Protocol):
    """One of the two connections: what it reads the other one writes, no faster than that goes."""

    def __init__(self) -> None:
        self.other: _Half | None = None
        self.transport: asyncio.Transport | None = None
        self.unread: UnreadBudget | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        # uvloop's transports do not derive from asyncio's.
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Pass it on."""
        if self.other is not None:
            self.other.write(data)

    def write(self, data: bytes) -> None:
        """Send ``data``, unless the connection ends already."""
        transport = self.transport
        if transport is not None and not transport.is_closing():
            transport.write(data)
            if self.unread is not None:
                self.unread.wrote(transport, len(data))

    def pause_writing(self) -> None:
        """Who reads here is slow: read no more from the other."""
        self._set_other_reading(False)

    def resume_writing(self) -> None:
        """It has caught up."""
        self._set_other_reading(True)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the other one, when it has been sent everything."""
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
    """The peer's half. When this process stops it ends, behind a whole frame, with a close."""

    def __init__(self) -> None:
        super().__init__()
        self._ends = FrameEnds()
        self._leaving = self._left = False
        self._ended = False
        """Whether the peer sends no more, and the client was told so."""

    def data_received(self, data: bytes) -> None:
        """Pass it on, as far as there is something to pass on."""
        if self._left:
            return
        end = self._ends.feed(data)
        if self._leaving and end is not None:
            super().data_received(data[:end])
            self._close()
        else:
            super().data_received(data)

    def eof_received(self) -> bool:
        """End the other side towards the client; what it still sends goes on to the peer.

        A peer that refuses a message says so, ends its side and lets the rest of the message come:
        a client that still writes would otherwise be cut off before it has read why.
        """
        other = self.other
        if other is None or other.transport is None or other.transport.is_closing():
            return False
        self._ended = True
        other.transport.write_eof()
        return True

    def leave(self) -> None:
        """Tell the client to come back, at the end of the frame that is under way."""
        self._leaving = True
        if self._ends.between:
            self._close()

    def _close(self) -> None:
        self._left = True
        if self.other is not None and not self._ended:
            self.other.write(_DRAINING)


class Splice(_Half):
    """The client's half. The handshake goes to a peer as it came, and so does its answer back."""

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
        self._ahead: list[bytes] = [handshake_head(request)]
        self._ahead_bytes = 0
        self._peer: _PeerHalf | None = None
        self._cut: asyncio.TimerHandle | None = None
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
        """Pass it on; keep what comes before there is a peer."""
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
        """The client has left."""
        self._connections.discard(self)
        if self._cut is not None:
            self._cut.cancel()
        self._joining.cancel()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """This process stops: the client is told to come back, to another one.

        What it still sends (acknowledgements, its own close) goes on to the peer for a while.
        """
        assert self.transport is not None
        self._joining.cancel()
        if self._peer is None:
            self.transport.close()
        elif self._cut is None:
            self._peer.leave()
            self._cut = asyncio.get_running_loop().call_later(_LEAVE_S, self.transport.close)

    def _refuse(self, error: ApiError) -> None:
        assert self.transport is not None
        answer = refusal(self._request, error)
        lines = [
            b"HTTP/1.1 %d Service Unavailable" % answer.status,
            *(b"%b: %b" % header for header in answer.wire_headers()),
            b"x-request-id: " + self._request.request_id,
            b"connection: close",
        ]
        self.write(b"\r\n".join([*lines, b"", answer.body]))
        self.transport.close()
