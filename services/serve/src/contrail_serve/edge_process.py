"""The processes without data: ``contrail api`` and ``contrail gateway``.

Each serves its own routes over the link to storage, and forwards all other public paths to a
process of the other kind.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import contrail_api
import contrail_gateway
from contrail_edge.app import build_app
from contrail_edge.http.settings import EdgeSettings
from contrail_edge.routing import EdgeModule
from contrail_link.contract import StorageLink
from contrail_link.routed.link import RoutedLink
from contrail_link.tcp.channel import Address
from contrail_link.tcp.client import RemoteLink
from contrail_link.tcp.limits import LinkLimits, limits_in_cluster
from contrail_serve.cluster_secret import ACK_LABEL, LINK_LABEL, ClusterSecret
from contrail_serve.forwarding.forwarder import Forwarder
from contrail_serve.forwarding.peers import Peers
from contrail_serve.process import (
    LINK_LATER_S,
    edge_settings,
    hangup_signal,
    listen,
    on_hangup,
    serve_http,
    stop_signal,
)
from contrail_serve.settings import EdgeProcessSettings

_LONG_POLL_S: Final = 120.0
"""More than any long poll takes."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of edge process: the module it serves, and the one it forwards to ``others``."""

    name: str
    own: Callable[[StorageLink, EdgeSettings], EdgeModule]
    foreign: Callable[[StorageLink, EdgeSettings], EdgeModule]
    others: str


_API: Final = _Kind("api", contrail_api.edge_module, contrail_gateway.edge_module, "gateway")
_GATEWAY: Final = _Kind("gateway", contrail_gateway.edge_module, contrail_api.edge_module, "api")


class _Storage:
    """The link to storage: to its only node, or to all nodes of a cluster."""

    def __init__(self, addresses: Sequence[Address], keys: Sequence[bytes], call_s: float) -> None:
        if len(addresses) == 1:
            self._nodes = [RemoteLink(addresses[0], keys, LinkLimits(call_s=call_s))]
            self._routed = None
            self.link = self._nodes[0].link
        else:
            limits = limits_in_cluster(call_s)
            self._nodes = [RemoteLink(one, keys, limits) for one in addresses]
            self._routed = RoutedLink(self._nodes, answer_s=call_s)
            self.link = self._routed.link

    def start(self) -> None:
        """Connect in the background."""
        for node in self._nodes:
            node.start()

    async def close(self) -> None:
        """End all connections."""
        if self._routed is not None:
            await self._routed.close()
        for node in self._nodes:
            await node.close()


async def serve_api(settings: EdgeProcessSettings) -> bool:
    """Run an api. Always returns True, because an api survives the end of storage and peers."""
    return await _serve(settings, _API)


async def serve_gateway(settings: EdgeProcessSettings) -> bool:
    """Run a gateway. Always returns True, as :func:`serve_api` does."""
    return await _serve(settings, _GATEWAY)


async def _serve(settings: EdgeProcessSettings, kind: _Kind) -> bool:
    stopping = stop_signal()
    listener = listen(settings.host, settings.port)
    with contextlib.closing(listener):
        secret = ClusterSecret(settings.cluster_secret)
        edge = edge_settings(settings, secret.keys(ACK_LABEL))
        # Storage knows more about the reason, so let it give up first.
        call_s = settings.publish_timeout_s + LINK_LATER_S
        storage = _Storage(settings.storage, secret.keys(LINK_LABEL), call_s)
        forwarder = Forwarder(Peers(kind.others, settings.peers), call_s + _LONG_POLL_S)
        # Its routes are declared here as well, so that every process documents all paths.
        foreign = replace(kind.foreign(storage.link, edge), elsewhere=forwarder)
        app = build_app([kind.own(storage.link, edge), foreign], edge)
        app.metrics.add(forwarder)
        storage.start()
        hung_up = hangup_signal(wanted=secret.file is not None)
        following = asyncio.create_task(on_hangup(hung_up, [secret.read_again]))
        try:
            await serve_http(
                app, edge, listener, stopping.wait(), service=kind.name, leaving=forwarder.drain
            )
        finally:
            following.cancel()
            forwarder.close()
            await storage.close()
    return True
