"""Connections between nodes over TCP, with TLS everywhere but on loopback."""

import asyncio
import hashlib
import random
import secrets
import socket
import ssl
from collections.abc import Callable, Coroutine
from typing import Any, Final, cast

from contrail_link.tcp.encryption import explained, is_loopback
from contrail_link.tcp.listeners import Listener, check_accepted
from contrail_replicator.peers.certificates import PeerTls, names_in
from contrail_replicator.peers.frames import Bytes
from contrail_replicator.peers.handshake import PLAIN
from contrail_replicator.peers.ports import Timer, Wire, WireUser

_DIAL_S: Final = 2.0
_RECEIVE_BYTES: Final = 64 << 10
_UNACKNOWLEDGED_MS: Final = 5_000
_KEEPALIVE: Final = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3))

Accept = Callable[[Wire], WireUser]


class PeerSockets:
    """The network of a node: `PeerNet` over sockets, and the listener."""

    def __init__(self, tls: PeerTls, *, encrypted_on_loopback: bool = False) -> None:
        self.tls = tls
        """For connections that begin from now on."""
        self._encrypted_on_loopback = encrypted_on_loopback
        self._loop = asyncio.get_running_loop()
        self._random = random.Random()
        self._listener: Listener | None = None
        # Connections that begin.
        self._tasks: set[asyncio.Task[None]] = set()

    def now(self) -> float:
        """Return the loop's time."""
        return self._loop.time()

    def call_later(self, seconds: float, call: Callable[[], None]) -> Timer:
        """Call after a time; after 0 seconds in the next pass of the event loop."""
        if seconds:
            return self._loop.call_later(seconds, call)
        return self._loop.call_soon(call)

    def chance(self) -> float:
        """Return a random number from 0 up to 1."""
        return self._random.random()

    def random_bytes(self, count: int) -> bytes:
        """Return bytes that nobody can guess."""
        return secrets.token_bytes(count)

    def listen(self, listening: socket.socket, accept: Accept) -> None:
        """Accept connections on a bound socket, one in a pass of the event loop."""

        def accepted(connection: socket.socket, remote: str) -> None:
            wire = _TcpWire(self._loop, remote, self.tls.verified)
            wire.socket = connection
            wire.user = accept(wire)
            context = None if self._is_plain(remote) else self.tls.listening
            if context is not None:
                wire.certificate = self.tls.digest
            self._begin(wire, self._welcome(connection, context, wire))

        self._listener = Listener(listening, accepted)

    def dial(self, address: str, name: str, user: WireUser) -> Wire:
        """Begin a connection to ``host:port``; with verified certificates, to this node."""
        wire = _TcpWire(self._loop, address.rpartition(":")[0], self.tls.verified)
        wire.user = user
        self._begin(wire, self._dial(address, name, wire))
        return wire

    async def close(self) -> None:
        """Stop listening, and give up connections that have not begun."""
        if self._listener is not None:
            self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, wire: "_TcpWire", work: Coroutine[Any, Any, None]) -> None:
        wire.beginning = task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # Not within `work`, which does not even begin if it is cancelled at once.
        task.add_done_callback(wire.begun)

    async def _welcome(
        self, connection: socket.socket, context: ssl.SSLContext | None, wire: "_TcpWire"
    ) -> None:
        _prepare(connection)
        await self._loop.connect_accepted_socket(lambda: wire, connection, ssl=context)

    async def _dial(self, address: str, name: str, wire: "_TcpWire") -> None:
        try:
            async with asyncio.timeout(_DIAL_S):
                wire.socket = connection = await self._connect(address)
                plain = self._is_plain(connection.getpeername()[0])
                await self._loop.create_connection(
                    lambda: wire,
                    sock=connection,
                    ssl=None if plain else self.tls.dialling,
                    server_hostname=None if plain else name,
                )
        except TimeoutError:
            raise OSError(f"no connection within {_DIAL_S:g} s") from None
        except OSError as error:
            raise explained(error) from error

    def _is_plain(self, host: str) -> bool:
        return not self._encrypted_on_loopback and is_loopback(host)

    async def _connect(self, address: str) -> socket.socket:
        host, _, port = address.rpartition(":")
        failure: OSError = OSError(f"{host} has no address")
        found = await self._loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        for family, kind, protocol, _, where in found:
            connection = socket.socket(family, kind, protocol)
            try:
                connection.setblocking(False)
                _prepare(connection)
                await self._loop.sock_connect(connection, where)
                check_accepted(connection)
            except OSError as error:
                connection.close()
                failure = error
            except BaseException:
                connection.close()
                raise
            else:
                return connection
        raise failure


def _prepare(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (*_KEEPALIVE, ("TCP_USER_TIMEOUT", _UNACKNOWLEDGED_MS)):
        # A connection over which nothing arrives for seconds is given up: after a long cut, TCP
        # would try again after minutes only.
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


class _TcpWire(asyncio.BufferedProtocol):
    """A `Wire` over a transport of asyncio or uvloop, with or without TLS."""

    user: WireUser
    beginning: asyncio.Task[None]
    """Makes the connection; `close` cancels it while it is not open."""

    def __init__(self, loop: asyncio.AbstractEventLoop, remote: str, verified: bool) -> None:
        self.remote = remote
        self.certificate = PLAIN
        self.certified_names: frozenset[str] | None = None
        self.socket: socket.socket | None = None
        """The socket, from the moment there is one."""
        self._loop = loop
        self._verified = verified
        self._transport: asyncio.Transport | None = None
        # `close` was called, or the connection has ended; and the user knows of the end.
        self._closed = False
        self._ended = False
        # Received bytes, until they are handled. A view, since asyncio slices it under TLS.
        self._received = memoryview(bytearray(_RECEIVE_BYTES))

    @property
    def unsent(self) -> int:
        """Bytes that the operating system has not taken yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def write(self, data: Bytes) -> None:
        """Send bytes."""
        if self._transport is not None and not self._closed:
            self._transport.write(data)

    def close(self) -> None:
        """End the connection at once, also before it is open."""
        self._closed = True
        if self._transport is not None:
            self._transport.abort()
        else:
            # Later, because the task is not known yet if `close` is called within `accept`.
            self._loop.call_soon(self._give_up)

    def _give_up(self) -> None:
        self.beginning.cancel()

    def begun(self, beginning: "asyncio.Task[None]") -> None:
        """Report why there is no connection, unless there is one."""
        error = None if beginning.cancelled() else beginning.exception()
        if error is None and not beginning.cancelled():
            return
        # Cancelled just after `connection_made`, uvloop closes the transport without a word to its
        # protocol: `connection_lost` need not come.
        if self._transport is not None:
            self._transport.abort()
        elif self.socket is not None:
            self.socket.close()
        self._end("it was given up" if error is None else str(error) or type(error).__name__)

    # Protocol ------------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the facts of TLS, and begin."""
        self._transport = cast(asyncio.Transport, transport)
        # `resume_writing` comes when everything was taken.
        self._transport.set_write_buffer_limits(high=0)
        tls = transport.get_extra_info("ssl_object")
        if tls is not None and self._verified:
            self.certified_names = names_in(tls.getpeercert())
        if tls is not None and not tls.server_side:
            self.certificate = hashlib.sha256(tls.getpeercert(binary_form=True)).digest()
        if self._closed:
            self._transport.abort()
        else:
            self.user.wire_open()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where received bytes go."""
        return self._received

    def buffer_updated(self, nbytes: int) -> None:
        """Hand out received bytes."""
        if not self._closed:
            self.user.wire_bytes(self._received[:nbytes])

    def eof_received(self) -> None:
        """Let the transport close itself."""

    def pause_writing(self) -> None:
        """Do nothing: `unsent` says it."""

    def resume_writing(self) -> None:
        """Report that everything was taken."""
        if not self._closed:
            self.user.wire_drained()

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the end."""
        self._end(str(exc) if exc is not None else "the peer closed the connection")

    def _end(self, reason: str) -> None:
        self._closed = True
        if not self._ended:
            self._ended = True
            self.user.wire_closed(reason)
