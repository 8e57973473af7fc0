"""The client side of HTTP/1.1 to another process: one request at a time, streamed both ways."""

import asyncio
from collections import deque
from typing import Final, cast

import httptools

from contrail_edge.http.budgets import UnreadBudget
from contrail_edge.http.responses import Header

# Reading an answer pauses above this number of buffered bytes, and goes on below the second one.
_READ_AHEAD: Final = 256 << 10
_READ_AGAIN: Final = 64 << 10
_CONTINUE: Final = 100
_FINAL: Final = 200
"""An answer with a lower status is followed by another one (RFC 9110, section 15.2)."""
_LAST_CHUNK: Final = b"0\r\n\r\n"


Address = tuple[str, int]


class PeerLostError(Exception):
    """The connection ended before the answer was complete."""


class PeerConnection(asyncio.Protocol):
    """One connection to a peer; it carries one request at a time."""

    def __init__(self, address: Address) -> None:
        self.address = address
        # It has carried a request: if it is lost now, the peer may have closed it as idle.
        self.used = False
        self.lost = False
        # Loop time at which it became idle.
        self.idle_since = 0.0
        # The answer that is being received; None between requests.
        self._exchange: Exchange | None = None
        # Cleared while the write buffer is full.
        self._writable = asyncio.Event()
        self._writable.set()
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        # uvloop's transports do not derive from asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the current request."""
        self.lost = True
        self._writable.set()
        if self._exchange is not None:
            self._exchange.cut()

    def data_received(self, data: bytes) -> None:
        """Feed the current answer; without one, end the connection, as its peer is out of step."""
        if self._exchange is None:
            self.abort()
        else:
            self._exchange.feed(data)

    def pause_writing(self) -> None:
        """Make ``send`` wait, because the peer reads more slowly than this process writes."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Let ``send`` go on, because the peer has read enough."""
        self._writable.set()

    @property
    def usable(self) -> bool:
        """True if a request can be sent."""
        return not self.lost and not self._transport.is_closing()

    def begin(
        self, head: bytes, body: bytes, unread: UnreadBudget, *, head_only: bool
    ) -> "Exchange":
        """Send the head of a request, with its whole ``body`` or with b"" if pieces follow."""
        self._exchange = Exchange(self, unread, head_only=head_only)
        self._transport.write(head + body if body else head)
        return self._exchange

    async def send(self, piece: bytes) -> None:
        """Send a piece of the body, and wait while the peer does not read."""
        if self.usable:
            self._transport.write(piece)
            await self._writable.wait()
        if not self.usable:
            raise PeerLostError

    async def send_chunk(self, piece: bytes) -> None:
        """Send a chunk of a body without a declared length."""
        await self.send(b"%x\r\n%b\r\n" % (len(piece), piece))

    async def end_chunks(self) -> None:
        """Send the mark after the last chunk."""
        await self.send(_LAST_CHUNK)

    def set_reading(self, wanted: bool) -> None:
        """Resume or pause reading. While it is paused, TCP slows down the peer."""
        if not self.usable:
            return
        if wanted:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def finished(self) -> None:
        """Note that the current answer is complete."""
        self._exchange = None
        self.used = True

    def abort(self) -> None:
        """End the connection at once, so that the peer stops working on the request."""
        if not self.lost:
            self._transport.abort()


class _LeftOverError(Exception):
    """Stops the parser, because the peer has sent bytes after the end of its answer."""


class Exchange:
    """An answer that is being received. ``head`` is done with its head, or with PeerLostError."""

    def __init__(
        self, connection: PeerConnection, unread: UnreadBudget, *, head_only: bool
    ) -> None:
        loop = asyncio.get_running_loop()
        self.connection = connection
        self.status = 0
        self.headers: list[Header] = []
        self.heard = False
        """True once a byte of the answer has arrived."""
        self.complete = False
        self.keep_alive = False
        self.length: int | None = None
        """Bytes of the body, or None if the head does not say."""
        self.head: asyncio.Future[None] = loop.create_future()
        self.go_on: asyncio.Future[None] = loop.create_future()
        """Done when the peer answers 100 Continue, so that the body can be sent."""
        self._head_only = head_only
        self._unread = unread
        self._parser = httptools.HttpResponseParser(self)
        # Pieces of the body that the client has not got yet, and their size.
        self._pieces: deque[bytes] = deque()
        self._held = 0
        # Reading from the peer is paused, because `_held` is above its limit.
        self._paused = False
        # The answer is incomplete and will stay so.
        self._lost = False
        # Wakes the reader that waits for a piece.
        self._news: asyncio.Future[None] | None = None

    # Parser callbacks ----------------------------------------------------------------------------
    def on_message_begin(self) -> None:
        """Stop at a second answer, because only one request was sent."""
        if self.complete:
            raise _LeftOverError

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header."""
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Keep the status and length of a final answer; skip the head of an interim one."""
        self.status = self._parser.get_status_code()
        if self.status < _FINAL:
            self.headers = []
            if self.status == _CONTINUE and not self.go_on.done():
                self.go_on.set_result(None)
            return
        self.keep_alive = self._parser.should_keep_alive()
        declared = dict(self.headers).get(b"content-length")
        self.length = None if declared is None else int(declared)
        if not self.head.done():
            self.head.set_result(None)
        if self._head_only:
            # The parser does not know the method, and would wait for the body that HEAD leaves out.
            self._end()

    def on_body(self, piece: bytes) -> None:
        """Buffer a piece of the body; stop reading while too many bytes are buffered."""
        if self.complete:
            raise _LeftOverError
        self._pieces.append(piece)
        self._held += len(piece)
        self._unread.wrote(self, len(piece))
        if self._held > _READ_AHEAD and not self._paused:
            self._paused = True
            self.connection.set_reading(False)
        self._wake()

    def on_message_complete(self) -> None:
        """End the exchange, unless this was an interim answer."""
        if self.status >= _FINAL:
            self._end()

    def _end(self) -> None:
        if not self.complete:
            self.complete = True
            self.connection.finished()
            self._wake()

    # Connection ----------------------------------------------------------------------------------
    def feed(self, data: bytes) -> None:
        """Take bytes of the answer."""
        self.heard = True
        try:
            self._parser.feed_data(data)
        # The parser may have stopped in the middle: the connection cannot be trusted with another
        # answer.
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.connection.abort()

    def cut(self) -> None:
        """End the exchange, because the connection has ended."""
        if self.complete:
            return
        self._lost = True
        for waited in (self.head, self.go_on):
            if not waited.done():
                waited.set_exception(PeerLostError())
                waited.exception()  # marks it as seen: often nobody waits for it
        self._wake()

    def get_write_buffer_size(self) -> int:
        """Return the bytes of the answer that are buffered for the client."""
        return self._held

    def abort(self) -> None:
        """Drop the answer, because the client does not read it."""
        self._pieces.clear()
        self._held = 0
        self._lost = True
        self.connection.abort()
        self._wake()

    def forget(self) -> None:
        """Stop counting the answer: it was passed on, or nobody wants it."""
        self._unread.forget(self)

    # Reading -------------------------------------------------------------------------------------
    async def next_piece(self) -> bytes | None:
        """Return the next piece of the body, or None after the last one. Raises PeerLostError."""
        while not self._pieces:
            if self._lost:
                raise PeerLostError
            if self.complete:
                return None
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        piece = self._pieces.popleft()
        self._held -= len(piece)
        if self._paused and self._held < _READ_AGAIN:
            self._paused = False
            self.connection.set_reading(True)
        return piece

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)
