"""``/v1/ws``: the gateway's sockets."""

from collections.abc import Mapping
from typing import Final

from prometheus_client.registry import Collector
from websockets.frames import Opcode

from contrail_common.ack_tokens import AckTokens
from contrail_edge.http.settings import EdgeSettings
from contrail_edge.ws.websocket import EdgeSocket, Opening, SocketHandler
from contrail_gateway.sockets.codec import CODECS
from contrail_gateway.sockets.metrics import SessionCounts
from contrail_gateway.sockets.session import GatewayState, SocketSession
from contrail_link.contract import StorageLink

PATH: Final = "/v1/ws"


class Sockets:
    """Begins a session for each socket."""

    path: str = PATH
    subprotocols: Mapping[str, Opcode] = {name: codec.opcode for name, codec in CODECS.items()}

    def __init__(self, link: StorageLink, tokens: AckTokens, settings: EdgeSettings) -> None:
        counts = SessionCounts()
        self.metrics: Collector = counts
        self._state = GatewayState(link, tokens, settings, counts)

    def open(self, socket: EdgeSocket, opening: Opening) -> SocketHandler:
        """Begin a session."""
        return SocketSession(self._state, CODECS[opening.subprotocol], socket, opening)
