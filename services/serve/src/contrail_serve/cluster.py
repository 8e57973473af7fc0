"""The part of a storage process that connects it with the other nodes of its cluster.

A node forms the cluster with the others before it starts: until all nodes have answered once, it
serves nothing. Then its groups exchange messages over the same connections, and so do requests for
the meta group.
"""

import asyncio
import itertools
import secrets
import struct
import time
from typing import Final

import structlog
from msgspec.structs import replace

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_link.tcp.handshake import derived_key
from contrail_link.tcp.refusals import decode_error, encode_error
from contrail_replicator.peers.certificates import made_tls
from contrail_replicator.peers.formation import Membership, Stage, node_number
from contrail_replicator.peers.forming import Forming
from contrail_replicator.peers.frames import Channel, Frame, FrameError
from contrail_replicator.peers.handshake import NO_CLUSTER
from contrail_replicator.peers.hub import Node, PeerHub
from contrail_replicator.peers.links import GroupLinks
from contrail_replicator.peers.plan import Place, groups_of_five, groups_of_three
from contrail_replicator.peers.tcp import PeerSockets
from contrail_serve.groups import NodeGroups
from contrail_serve.process import listen
from contrail_serve.settings import ClusterSettings, parse_address
from contrail_storage.core.group_table import GroupEntry
from contrail_storage.disk import node_file
from contrail_storage.disk.node_file import NodeIdentity, save_identity
from contrail_storage.node import StorageNode
from contrail_storage.options import Cluster

_PEER_LABEL: Final = "peers"
_ASK: Final = 20
_ANSWER: Final = 21
_NO_GROUP: Final = 0
_HEAD: Final = struct.Struct("<QB")
_ANSWERED: Final = 0
_REFUSED: Final = 1
_ANSWER_S: Final = 10.0
"""Longer than a command for the meta group waits for a leader."""
_FIRST_GROUP: Final = 1_024
_FIVE: Final = 5
_log: Final = structlog.get_logger("contrail.cluster")


def planned(names: tuple[str, ...]) -> tuple[GroupEntry, ...]:
    """The groups of a cluster: one for each node alone, and those that replicate shards."""
    places = [Place(name) for name in names]
    shared = groups_of_three(places)
    if len(names) >= _FIVE:
        shared += groups_of_five(places)
    alone = [GroupEntry(number, (name,)) for number, name in enumerate(names, start=1)]
    numbered = enumerate(shared, start=_FIRST_GROUP)
    return (*alone, *(GroupEntry(number, tuple(members)) for number, members in numbered))


class Peers:
    """This node among the others. Used on the event loop only."""

    def __init__(self, settings: ClusterSettings) -> None:
        """Listen on the peer port; raise StartError if that is not possible."""
        self.groups = NodeGroups()
        """Makes the node's groups."""
        self._settings = settings
        host, _ = parse_address(settings.addresses[settings.name])
        self._listener = listen(host, settings.port)
        self._node: StorageNode
        self._sockets: PeerSockets
        self._hub: PeerHub
        # Requests to other nodes that have no answer yet, by number.
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self._numbers = itertools.count(secrets.randbits(32))
        self._answering: set[asyncio.Task[None]] = set()

    @property
    def cluster(self) -> Cluster:
        """What the node needs to know of the cluster."""
        return Cluster(self._settings.names, planned(self._settings.names), self._ask)

    async def form(self, node: StorageNode) -> None:
        """Connect with the others, and wait until the cluster is formed."""
        settings, identity = self._settings, node.identity
        self._node = node
        key = derived_key(settings.secret, _PEER_LABEL)
        self._sockets = PeerSockets(made_tls(settings.name))
        formed = identity.stage is node_file.Stage.FORMED
        own = Node(
            settings.name,
            identity.cluster_id if formed else NO_CLUSTER,
            identity.incarnation,
            identity.boots,
            time.time_ns(),
            identity.node_number,
        )
        self._hub = PeerHub(self._sockets, own, settings.addresses, lambda: [key])
        self._hub.handle(Channel.APPEND, _ASK, self._asked_by)
        self._hub.handle(Channel.APPEND, _ANSWER, self._answered_by)
        self.groups.transport = GroupLinks(self._hub, time.time_ns, self._fault)
        done = asyncio.Event()
        file = _IdentityFile(node, settings.names)
        forming = Forming(self._hub, settings.names, file, lambda _: done.set(), _obstructed)
        self._sockets.listen(self._listener, self._hub.accept)
        self._hub.start()
        forming.start()
        await done.wait()
        _log.info("cluster_formed", cluster=node.identity.cluster_id.hex())

    async def close(self) -> None:
        """End all connections."""
        self._listener.close()
        if hasattr(self, "_hub"):
            self._hub.stop()
            await self._sockets.close()

    def _fault(self, group: int, error: Exception) -> None:
        self._node.fail(f"group {group}: {error}")

    # Requests ------------------------------------------------------------------------------------

    async def _ask(self, name: str, body: bytes) -> bytes:
        number = next(self._numbers)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        head = _HEAD.pack(number, 0)
        try:
            if not self._hub.send(name, Channel.APPEND, _ASK, _NO_GROUP, [head, body]):
                raise ApiError(errors.NOT_LEADER, applied=False)
            async with asyncio.timeout(_ANSWER_S):
                return await answer
        except TimeoutError:
            raise ApiError(errors.OUTCOME_UNKNOWN, f"{name} does not answer") from None
        finally:
            del self._asked[number]

    def _asked_by(self, name: str, frame: Frame) -> None:
        number, _, body = _taken_apart(frame)
        task = asyncio.ensure_future(self._answer(name, number, body))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, name: str, number: int, body: bytes) -> None:
        kind = _ANSWERED
        try:
            answer = await self._node.membership.answer(body)
        except ApiError as error:
            kind, answer = _REFUSED, encode_error(error)
        except Exception as error:
            _log.exception("request_of_peer_failed", peer=name)
            kind, answer = _REFUSED, encode_error(ApiError(errors.OUTCOME_UNKNOWN, repr(error)))
        head = _HEAD.pack(number, kind)
        self._hub.send(name, Channel.APPEND, _ANSWER, _NO_GROUP, [head, answer])

    def _answered_by(self, name: str, frame: Frame) -> None:
        del name
        number, kind, body = _taken_apart(frame)
        waiting = self._asked.get(number)
        if waiting is None or waiting.done():
            return
        if kind == _ANSWERED:
            waiting.set_result(body)
        else:
            waiting.set_exception(decode_error(body))


def _taken_apart(frame: Frame) -> tuple[int, int, bytes]:
    """Number, kind and body of a request or answer. Raises FrameError."""
    if len(frame.body) < _HEAD.size:
        raise FrameError("a request that is cut short")
    number, kind = _HEAD.unpack_from(frame.body)
    return number, kind, bytes(frame.body[_HEAD.size :])


class _IdentityFile:
    """A node's membership, in the identity file of its folder."""

    def __init__(self, node: StorageNode, names: tuple[str, ...]) -> None:
        self._node = node
        self._names = names

    def load(self) -> Membership:
        identity = self._node.identity
        return Membership(Stage(identity.stage), identity.cluster_id)

    def save(self, membership: Membership) -> None:
        node = self._node
        identity: NodeIdentity = replace(
            node.identity,
            stage=node_file.Stage(membership.stage),
            cluster_id=membership.cluster_id,
            node_number=node_number(node.options.name, self._names),
        )
        save_identity(node.files, node.options.data_dir, identity)
        node.identity = identity


def _obstructed(why: str, lost_disk: bool) -> None:
    _log.error("cluster_not_formed", reason=why, lost_disk=lost_disk)
