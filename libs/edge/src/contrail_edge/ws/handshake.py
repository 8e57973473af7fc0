"""The handshake of a WebSocket (RFC 6455, section 4.2): accepted, or refused with a problem."""

from typing import Final

from websockets.datastructures import Headers
from websockets.http11 import Request as WireRequest
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_edge.http.requests import Request
from contrail_edge.ws.websocket import SocketEndpoint

VERSION: Final = b"13"
_SWITCHING: Final = 101


def accept(request: Request, endpoint: SocketEndpoint) -> tuple[bytes, str]:
    """Return the answer that opens the socket, and the chosen sub-protocol.

    permessage-deflate is never accepted, so a compressed frame is a protocol error. Raises
    UPGRADE_REQUIRED, SUBPROTOCOL_UNKNOWN and BAD_REQUEST.
    """
    if request.headers.get(b"sec-websocket-version") != VERSION:
        raise ApiError(errors.UPGRADE_REQUIRED, "WebSocket version 13 is required", applied=False)
    chosen = _subprotocol(request, endpoint)
    wire = ServerProtocol(subprotocols=[chosen])
    target = request.raw_path.decode("latin-1")
    lines = [(name.decode(), value.decode("latin-1")) for name, value in request.raw_headers]
    answer = wire.accept(WireRequest(target, Headers(lines)))
    if answer.status_code != _SWITCHING:
        raise ApiError(errors.BAD_REQUEST, str(wire.handshake_exc), applied=False)
    return answer.serialize(), chosen


def _subprotocol(request: Request, endpoint: SocketEndpoint) -> Subprotocol:
    """The first of the offered sub-protocols that is known."""
    offered = [
        token.strip()
        for name, value in request.raw_headers
        if name == b"sec-websocket-protocol"
        for token in value.decode("latin-1").split(",")
    ]
    for one in offered:
        if one in endpoint.subprotocols:
            return Subprotocol(one)
    known = " or ".join(endpoint.subprotocols)
    raise ApiError(errors.SUBPROTOCOL_UNKNOWN, f"request {known}", applied=False)
