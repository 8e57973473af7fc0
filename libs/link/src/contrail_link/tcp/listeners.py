"""Accepting connections on a bound socket, and a check for those that nobody has accepted."""

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Final

_BACKLOG: Final = 128
_NO_DESCRIPTOR_PAUSE_S: Final = 1.0
_RESET: Final = struct.pack("ii", 1, 0)


class Listener:
    """Hands out connections, one in a pass of the event loop.

    ``loop.sock_accept`` would not do: cancelled in the pass in which a connection has come, it
    neither returns nor closes it.
    """

    def __init__(
        self, listening: socket.socket, accepted: Callable[[socket.socket, str], None]
    ) -> None:
        """Begin; ``accepted`` gets each connection and the address of its other end."""
        self._listening = listening
        self._accepted = accepted
        self._loop = asyncio.get_running_loop()
        # The end of a pause.
        self._later: asyncio.TimerHandle | None = None
        listening.listen(_BACKLOG)
        listening.setblocking(False)
        self._loop.add_reader(listening, self._accept)

    def close(self) -> None:
        """Accept nothing more, and close the socket."""
        if self._later is not None:
            self._later.cancel()
        if self._listening.fileno() >= 0:
            self._loop.remove_reader(self._listening)
            self._listening.close()

    def _accept(self) -> None:
        try:
            connection, remote = self._listening.accept()
        except (BlockingIOError, ConnectionAbortedError):
            # It went before it was accepted.
            return
        except OSError:
            # No file descriptor is left: connections wait in the kernel meanwhile.
            self._loop.remove_reader(self._listening)
            self._later = self._loop.call_later(_NO_DESCRIPTOR_PAUSE_S, self._resume)
            return
        connection.setblocking(False)
        self._accepted(connection, str(remote[0]))

    def _resume(self) -> None:
        self._later = None
        self._loop.add_reader(self._listening, self._accept)


def check_accepted(connection: socket.socket) -> None:
    """Raise ConnectionRefusedError if a new connection leads to itself; it must then be closed.

    While nobody listens on a port, the kernel may give that very port to a client that tries to
    connect to it. TCP then connects the socket to itself, and whoever wants to listen there cannot.
    """
    if connection.getsockname() == connection.getpeername():
        # Without this, the kernel would keep the port for a minute after the end.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        raise ConnectionRefusedError("nobody listens there: the connection leads to itself")
