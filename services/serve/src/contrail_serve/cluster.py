"""The part of a storage process that connects it with the other nodes of its cluster.

A node forms the cluster with the others before it starts: until all nodes have answered once, it
serves nothing. Then its groups exchange messages over the same connections, and so do requests for
the meta group.
"""

import asyncio
import dataclasses
import struct
import time
from collections.abc import Callable
from functools import partial
from typing import Final

import structlog
from msgspec.structs import replace
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

from contrail_common.errors import ApiError
from contrail_link.tcp.metrics import exposition
from contrail_replicator.peers.certificates import (
    CertificateError,
    PeerTls,
    check_certified,
    loaded_tls,
    made_tls,
)
from contrail_replicator.peers.formation import Membership, Stage, node_number
from contrail_replicator.peers.forming import Forming
from contrail_replicator.peers.frames import Channel
from contrail_replicator.peers.handshake import NO_CLUSTER
from contrail_replicator.peers.hub import Node, PeerHub
from contrail_replicator.peers.links import GroupLinks
from contrail_replicator.peers.plan import (
    Place,
    groups_of_five,
    groups_of_other_leaders,
    groups_of_three,
)
from contrail_replicator.peers.registering import Registering, Registration
from contrail_replicator.peers.tcp import PeerSockets
from contrail_serve.cluster_secret import PEER_LABEL, ClusterSecret
from contrail_serve.groups import NodeGroups
from contrail_serve.peer_requests import PeerRequests
from contrail_serve.process import StartError, listen
from contrail_serve.settings import ClusterSettings, parse_address
from contrail_storage.core.group_table import GroupEntry
from contrail_storage.core.node_table import NodeEntry
from contrail_storage.disk import node_file
from contrail_storage.disk.node_file import NodeIdentity, save_identity
from contrail_storage.node import StorageNode
from contrail_storage.options import Cluster

_OPEN_MAX: Final = 256
_FETCHES_MAX: Final = 4
"""Of 1 MiB at most, in either direction: together they fit in what may be unsent."""
_PORTS_MAX: Final = 16
_PORT: Final = struct.Struct("<H")
_FIRST_GROUP: Final = 1_024
_FIVE: Final = 5
_log: Final = structlog.get_logger("contrail.cluster")


def planned(names: tuple[str, ...]) -> tuple[GroupEntry, ...]:
    """The groups of a cluster: one for each node alone, and those that replicate shards."""
    places = [Place(name) for name in names]
    shared = groups_of_three(places)
    if len(names) >= _FIVE:
        shared += groups_of_five(places)
    shared += groups_of_other_leaders(shared)
    alone = [GroupEntry(number, (name,)) for number, name in enumerate(names, start=1)]
    numbered = enumerate(shared, start=_FIRST_GROUP)
    return (*alone, *(GroupEntry(number, tuple(members)) for number, members in numbered))


def _tls_of(settings: ClusterSettings) -> PeerTls:
    """Return how a node speaks TLS with the others. Raises StartError for files of no use."""
    files = settings.certificates
    if files is None:
        return made_tls(settings.name)
    try:
        tls = loaded_tls(files.certificate, files.key, files.authority)
        check_certified(files.certificate, settings.name)
    except CertificateError as error:
        raise StartError(str(error)) from error
    return tls


class Peers:
    """This node among the others. Used on the event loop only."""

    def __init__(self, settings: ClusterSettings, secret: ClusterSecret) -> None:
        """Listen on the peer port; raise StartError if that is not possible."""
        # Gives the secrets that are valid now.
        self._keys = secret.keys(PEER_LABEL)
        # The certificates of connections.
        self._tls = _tls_of(settings)
        self.groups = NodeGroups()
        """Makes the node's groups."""
        # Names, addresses and the secret.
        self._settings = settings
        # Tells this process from others of the node.
        self._process = time.time_ns()
        self.link_port = 0
        """Port on which this node takes requests of the others; 0 if none of them sends any."""
        # The socket of the peer port.
        self._listener = listen(settings.host, settings.port)
        # Set by `form`: this node, its connections, and which of them carries what.
        self._node: StorageNode
        # Makes connections.
        self._sockets: PeerSockets
        # Keeps one of each channel to each other node.
        self._hub: PeerHub
        # To the leader of the meta group.
        self._requests: PeerRequests
        # What members fetch to catch up.
        self._bulk: PeerRequests
        # Lets this node be registered, or others.
        self._registering: Registering
        # By name: the nodes that are being registered.
        self._registrations: dict[str, asyncio.Task[None]] = {}
        # For the ports of links.
        self._ports: PeerRequests

    @property
    def cluster(self) -> Cluster:
        """What the node needs to know of the cluster."""
        names = self._settings.names
        addresses = {name: self._settings.addresses[name] for name in names}
        return Cluster(
            names,
            planned(names),
            self._ask,
            self._fetch,
            addresses,
            self._note_start,
            self._process,
        )

    async def form(self, node: StorageNode) -> None:
        """Connect with the others, and wait until the cluster is formed."""
        settings, identity = self._settings, node.identity
        self._node = node
        self._sockets = PeerSockets(self._tls)
        formed = identity.stage is node_file.Stage.FORMED
        own = Node(
            settings.name,
            identity.cluster_id if formed else NO_CLUSTER,
            identity.incarnation,
            identity.boots,
            self._process,
            identity.node_number,
        )
        self._hub = PeerHub(self._sockets, own, settings.addresses, lambda: self._keys)
        membership, hub = node.membership, self._hub
        self._requests = PeerRequests(hub, Channel.APPEND, membership.answer, open_max=_OPEN_MAX)
        self._bulk = PeerRequests(hub, Channel.BULK, membership.provide, open_max=_FETCHES_MAX)
        self._ports = PeerRequests(hub, Channel.CONTROL, self._tell_port, open_max=_PORTS_MAX)
        self.groups.transport = GroupLinks(
            hub, time.time_ns, self._fault, node.membership.peer_clocks.note
        )
        done = asyncio.Event()
        file = _IdentityFile(node, settings.names)
        forming = Forming(hub, settings.names, file, lambda _: done.set(), self._obstructed)
        registered = partial(_take_up, forming, settings)
        self._registering = Registering(hub, self._register, registered)
        for known in node.meta.node_table.nodes.values():
            self._note_start(known)
        self._sockets.listen(self._listener, self._hub.accept)
        self._hub.start()
        forming.start()
        await done.wait()
        _log.info("cluster_formed", cluster=node.identity.cluster_id.hex())

    def read_certificates_again(self) -> None:
        """Use the certificates in the files for new connections; log why they cannot be used."""
        try:
            self._sockets.tls = _tls_of(self._settings)
        except StartError as error:
            _log.error("peer_certificate_refused", reason=str(error))
        else:
            _log.info("peer_certificate_changed")

    async def close(self) -> None:
        """End all connections."""
        if hasattr(self, "_hub"):
            self._registering.stop()
            for registration in self._registrations.values():
                registration.cancel()
            self._hub.stop()
            await self._sockets.close()
        self._listener.close()

    def _fault(self, group: int, error: Exception) -> None:
        self._node.fail(f"group {group}: {error}")

    def metrics_text(self) -> str:
        """The metrics of the connections to the other nodes."""
        hub = self._hub
        up = GaugeMetricFamily(
            "contrail_peer_up", "Whether another node is connected (1) or not (0).", labels=["peer"]
        )
        for name in hub.names:
            up.add_metric([name], hub.reaches(name))
        dropped = CounterMetricFamily(
            "contrail_peer_dropped",
            "Frames to other nodes that were not sent, because too much was unsent or there was no "
            "connection.",
            labels=["channel"],
        )
        for channel, count in hub.counters.dropped.items():
            dropped.add_metric([channel.name.lower()], count)
        refused = CounterMetricFamily(
            "contrail_peer_refused",
            "Connections to the peer port that did not prove themselves or were not admitted.",
            hub.counters.refused,
        )
        return exposition((up, dropped, refused))

    async def locate(self, name: str) -> tuple[str, int]:
        """Return the address on which another node takes requests. Raises OSError."""
        try:
            (port,) = _PORT.unpack(await self._ports.ask(name, b""))
        except (ApiError, struct.error) as error:
            raise OSError(f"{name} does not tell its address") from error
        host, _ = parse_address(self._settings.addresses[name])
        return host, port

    # Nodes whose disk was lost -------------------------------------------------------------------

    def _obstructed(self, why: str, lost_disk: bool) -> None:
        if lost_disk:
            _log.warning("disk_lost", reason=why)
            self._registering.begin()
        else:
            _log.error("cluster_not_formed", reason=why)

    def _register(self, name: str, token: bytes, answer: Callable[[int, int], None]) -> None:
        if name not in self._registrations:
            task = asyncio.ensure_future(self._have_registered(name, token, answer))
            self._registrations[name] = task

    async def _have_registered(
        self, name: str, token: bytes, answer: Callable[[int, int], None]
    ) -> None:
        try:
            entry = await self._node.membership.register(name, token)
            answer(entry.number, entry.incarnation)
        except ApiError as error:
            _log.info("node_not_registered", node=name, reason=str(error))
        finally:
            del self._registrations[name]

    def _note_start(self, known: NodeEntry) -> None:
        hub = self._hub
        if known.name != hub.node.name:
            hub.require(known.name, known.incarnation, known.boots, known.process)
        elif known.boots > hub.node.boots and known.process == hub.node.process:
            hub.become(dataclasses.replace(hub.node, boots=known.boots))

    async def _tell_port(self, _: bytes) -> bytes:
        return _PORT.pack(self.link_port)

    async def _ask(self, name: str, body: bytes) -> bytes:
        return await self._requests.ask(name, body)

    async def _fetch(self, name: str, body: bytes) -> bytes:
        return await self._bulk.ask(name, body)


class _IdentityFile:
    """A node's membership, in the identity file of its folder."""

    def __init__(self, node: StorageNode, names: tuple[str, ...]) -> None:
        self._node = node
        self._names = names

    def load(self) -> Membership:
        identity = self._node.identity
        return Membership(Stage(identity.stage), identity.cluster_id, identity.incarnation)

    def save(self, membership: Membership) -> None:
        node = self._node
        identity: NodeIdentity = replace(
            node.identity,
            stage=node_file.Stage(membership.stage),
            cluster_id=membership.cluster_id,
            incarnation=membership.incarnation,
            node_number=node_number(node.options.name, self._names),
            nodes=self._names,
        )
        save_identity(node.files, node.options.data_dir, identity)
        node.identity = identity


def _take_up(forming: Forming, settings: ClusterSettings, given: Registration) -> None:
    """Become a member again in a new incarnation."""
    if given.number != node_number(settings.name, settings.names):
        _log.error(
            "cluster_not_formed",
            reason=f"the cluster knows this node by the number {given.number}, so its nodes are "
            f"others than {', '.join(settings.names)}",
        )
        return
    _log.warning("node_registered_anew", incarnation=given.incarnation)
    forming.adopt(Membership(Stage.FORMED, given.cluster_id, given.incarnation))
