"""The routes of the gateway: sockets, pulls and acknowledgements, over a storage link."""

from contrail_common.ack_tokens import AckTokens
from contrail_edge.http.settings import EdgeSettings
from contrail_edge.routing import EdgeModule, Route
from contrail_gateway import docs
from contrail_gateway.acks import Acknowledger
from contrail_gateway.pull import Pulls
from contrail_gateway.sockets.endpoint import Sockets
from contrail_link.contract import StorageLink

_CONSUMER = "/v1/streams/{stream}/consumers/{consumer}"


def edge_module(link: StorageLink, settings: EdgeSettings) -> EdgeModule:
    """Return the part of the public interface that delivers to consumers."""
    tokens = AckTokens(settings.account, settings.ack_keys)
    acks = Acknowledger(link, tokens, settings)
    pulls = Pulls(link, tokens, acks, settings)
    return EdgeModule(
        link=link,
        routes=(
            Route("POST", f"{_CONSUMER}/next", pulls.next, docs.NEXT, pulls.direct),
            Route("POST", f"{_CONSUMER}/ack", acks.ack, docs.ACK),
        ),
        sockets=(Sockets(link, tokens, settings),),
    )
