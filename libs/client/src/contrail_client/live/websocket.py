"""One WebSocket. The only module that knows the websockets library."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI
from websockets.typing import Subprotocol

from contrail_client.calls import Answer, refusal
from contrail_client.errors import ContrailError, SocketRefused, UnexpectedAnswer, Unreachable
from contrail_client.live.frames import FRAME_BYTES_MAX, SUBPROTOCOL, may_return
from contrail_client.transport import CONNECT_S, Options, beyond_loopback

PING_S: Final = 10.0
"""Seconds between pings. The socket is lost if a ping is not answered within this time."""

# Messages that the library buffers. When the buffer is full, TCP slows down the server.
_QUEUED_FRAMES: Final = 64
# Longest wait for the server's close frame.
_CLOSE_S: Final = 2.0
_PATH: Final = "/v1/ws"


@dataclass(frozen=True, slots=True)
class Socket:
    """An open WebSocket.

    Once it is lost, `send` and `messages` raise `Unreachable`, or `SocketRefused` if its close code
    forbids to reconnect.
    """

    _wire: ClientConnection

    async def send(self, message: bytes) -> None:
        """Send a message; waits while the server reads too slowly."""
        try:
            await self._wire.send(message)
        except ConnectionClosed as error:
            raise _lost(error) from error

    async def messages(self) -> AsyncIterator[bytes]:
        """The messages of the server. Ends with an exception only, when the socket is lost."""
        try:
            while True:
                yield await self._wire.recv(decode=False)
        except ConnectionClosed as error:
            raise _lost(error) from error

    async def close(self) -> None:
        """Close the socket, after sending everything that was given to `send`."""
        await self._wire.close()


async def open_socket(options: Options) -> Socket:
    """Connect; raises the server's refusal, `Unreachable`, or `UnexpectedAnswer`.

    ValueError if the address is not valid.
    """
    address = options.url.rstrip("/")
    headers = {"Authorization": f"Bearer {options.token}"} if options.token else None
    try:
        wire = await connect(
            "ws" + address.removeprefix("http") + _PATH,  # https becomes wss
            subprotocols=[Subprotocol(SUBPROTOCOL)],
            additional_headers=headers,
            compression=None,
            proxy=True if beyond_loopback(options.url) else None,
            max_size=FRAME_BYTES_MAX,
            max_queue=_QUEUED_FRAMES,
            open_timeout=CONNECT_S,
            ping_interval=PING_S,
            ping_timeout=PING_S,
            close_timeout=_CLOSE_S,
        )
    except InvalidStatus as error:
        raise _refused(error) from error
    except InvalidURI as error:
        raise ValueError(f"{options.url!r} is not a valid server URL") from error
    except InvalidHandshake as error:
        if isinstance(error.__cause__, EOFError):  # the server closed without an answer
            raise Unreachable(f"{options.url}: {error.__cause__}") from error
        raise UnexpectedAnswer(f"no WebSocket connection to {options.url}: {error}") from error
    except (OSError, EOFError, ConnectionClosed) as error:  # TimeoutError is an OSError
        raise Unreachable(f"{options.url}: {error or type(error).__name__}") from error
    if wire.subprotocol != SUBPROTOCOL:
        await wire.close()
        raise UnexpectedAnswer(f"{options.url} does not speak {SUBPROTOCOL}")
    return Socket(wire)


def _refused(error: InvalidStatus) -> ContrailError:
    """The error in the server's answer to the handshake."""
    response = error.response
    headers = {name.lower(): value for name, value in response.headers.raw_items()}
    return refusal(Answer(response.status_code, headers, bytes(response.body or b"")))


def _lost(error: ConnectionClosed) -> ContrailError:
    received = error.rcvd
    code = received.code if received is not None else None
    reason = received.reason if received is not None else ""
    if may_return(code):
        return Unreachable(f"the connection was lost: {reason or error}")
    return SocketRefused(code or 0, reason)
