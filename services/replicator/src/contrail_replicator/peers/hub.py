"""All connections of a node with the other nodes: who is let in, what is sent, who hears of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from contrail_replicator.peers.connections import Accepted, Dialled, Keys
from contrail_replicator.peers.frames import Bytes, Channel, Frame, FrameError, frame
from contrail_replicator.peers.handshake import (
    NO_CLUSTER,
    HandshakeError,
    Hello,
    common_protocol,
)
from contrail_replicator.peers.outbox import Outbox
from contrail_replicator.peers.ports import PeerNet, Wire, WireUser
from contrail_replicator.peers.refusals import Complaints

UNPROVEN_MAX: Final = 64
_BACKOFF_MIN_S: Final = 0.05
_BACKOFF_MAX_S: Final = 1.0
_REFUSED_BACKOFF_MAX_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Node:
    """This node, as it tells the others: see `Hello`."""

    name: str
    cluster_id: bytes
    incarnation: int
    boots: int
    process: int
    node_number: int = 0

    @property
    def in_cluster(self) -> bool:
        """Whether it is part of a cluster."""
        return self.cluster_id != NO_CLUSTER

    def hello(self, target: str, channel: Channel) -> Hello:
        """Return the hello to a node."""
        return Hello(
            self.name,
            target,
            channel,
            self.cluster_id,
            self.incarnation,
            self.boots,
            self.process,
            self.node_number,
        )


@dataclass(slots=True)
class Counters:
    """Counts since the start."""

    dropped: dict[Channel, int] = field(default_factory=lambda: dict.fromkeys(Channel, 0))
    """Frames that were not sent: no connection, or too much was unsent."""
    refused: int = 0
    """Connections that ended before the other end had proved itself, or were not admitted."""


Handler = Callable[[str, Frame], None]
"""Takes the name of the peer and a frame. Raises FrameError to end the connection."""


class PeerHub:
    """Sends frames to the nodes it dials, and hands out those of the nodes it accepted.

    Messages of groups can be sent to a node of the same cluster while its channels for them are
    open; the channel for bulk data comes and goes by itself. A node without a cluster id uses the
    control channel only, for kinds that were registered with ``before_cluster``.
    """

    def __init__(
        self,
        net: PeerNet,
        node: Node,
        peers: Mapping[str, str],
        keys: Keys,
    ) -> None:
        """Know the other nodes by name and address; nothing is dialled before `start`."""
        self.net = net
        self.node = node
        self.counters = Counters()
        self.complaints = Complaints()
        self.on_link: Callable[[str, bool], None] = lambda _name, _up: None
        """Told when messages of groups can be sent to a node, or no longer."""
        # The keys that are valid now.
        self._keys = keys
        # Handlers by channel and kind, and the kinds that need no cluster.
        self._handlers: dict[tuple[Channel, int], Handler] = {}
        self._before_cluster: set[int] = set()
        # Connections this node dials, by name and channel.
        self._dialled = {
            (name, channel): _Dialler(self, name, address, channel)
            for name, address in peers.items()
            if name != node.name
            for channel in Channel
        }
        # Connections that were accepted: those without a proof, in order, and one for each channel.
        self._unproven: dict[Accepted, None] = {}
        self._accepted: dict[tuple[str, Channel], Accepted] = {}
        # The newest start of each node that was seen or demanded.
        self._newest: dict[str, _Start] = {}
        # Nodes of which `on_link` has said that they are up.
        self._up: set[str] = set()
        self._running = False

    @property
    def names(self) -> list[str]:
        """Names of the other nodes."""
        return sorted({name for name, _ in self._dialled})

    def handle(
        self, channel: Channel, kind: int, handler: Handler, *, before_cluster: bool = False
    ) -> None:
        """Register the handler of a kind of frame."""
        self._handlers[channel, kind] = handler
        if before_cluster:
            self._before_cluster.add(kind)

    def start(self) -> None:
        """Dial the other nodes, again and again."""
        self._running = True
        for (_, channel), dialler in self._dialled.items():
            if channel is Channel.CONTROL:
                dialler.dial()

    def stop(self) -> None:
        """Close everything for good."""
        self._running = False
        self._close_all("this node stops")

    def become(self, node: Node) -> None:
        """Take another identity, and connect anew under it."""
        self.node = node
        self._close_all("this node has another identity now")

    def require(self, name: str, incarnation: int, boots: int = 0, process: int = 0) -> None:
        """Refuse older starts of a node, and close connections of an older incarnation."""
        newest = self._newest.get(name)
        if newest is not None and (newest.incarnation, newest.boots) >= (incarnation, boots):
            return
        self._newest[name] = _Start(incarnation, boots, process)
        if newest is None or newest.incarnation < incarnation:
            self._close_older(name, incarnation)

    def _close_older(self, name: str, incarnation: int) -> None:
        """Close the connections of an older incarnation of a node."""
        reason = f"{name} has incarnation {incarnation} by now"
        for channel in Channel:
            accepted = self._accepted.get((name, channel))
            if accepted is not None:
                accepted.fail_if_older(incarnation, reason)
            if (name, channel) in self._dialled:
                self._dialled[name, channel].end_older(incarnation, reason)

    def reaches(self, name: str) -> bool:
        """True while messages of groups can be sent to a node."""
        return name in self._up

    def send(
        self, name: str, channel: Channel, kind: int, group: int, body: Sequence[Bytes]
    ) -> bool:
        """Send a frame; False if it was dropped. Raises KeyError for an unknown node."""
        return self.send_frame(name, channel, frame(kind, group, body))

    def send_frame(self, name: str, channel: Channel, encoded: Sequence[Bytes]) -> bool:
        """As `send`, with a frame in pieces, which may be sent to several nodes."""
        outbox = self._dialled[name, channel].outbox
        if outbox is None or not outbox.send(encoded):
            self.counters.dropped[channel] += 1
            return False
        return True

    def connected(self, name: str, channel: Channel) -> bool:
        """True while frames can be sent to a node on a channel."""
        return self._dialled[name, channel].outbox is not None

    def unsent(self, name: str, channel: Channel) -> int:
        """Bytes that wait to be sent to a node."""
        outbox = self._dialled[name, channel].outbox
        return 0 if outbox is None else outbox.unsent

    # Accepted connections ------------------------------------------------------------------------
    def accept(self, wire: Wire) -> WireUser:
        """Return what handles a connection that has come in.

        If 64 are in their handshake, the one that has been for longest is ended, so that strangers
        cannot keep nodes out.
        """
        connection = Accepted(self.net, wire, self._keys, self)
        if len(self._unproven) >= UNPROVEN_MAX:
            oldest = next(iter(self._unproven))
            del self._unproven[oldest]
            oldest.fail("it did not prove itself in time, and others are waiting")
        self._unproven[connection] = None
        if not self._running:
            connection.fail("this node stops")
        return connection

    def admit(self, hello: Hello, names: frozenset[str] | None) -> Hello:
        """Return the own hello for a dialler that knows the secret. Raises HandshakeError."""
        if (hello.name, Channel.CONTROL) not in self._dialled:
            raise HandshakeError(
                f"{hello.name} is not one of the nodes that {self.node.name} knows"
            )
        if hello.target != self.node.name:
            raise HandshakeError(f"{hello.target} was dialled, but this is {self.node.name}")
        self.check(hello, names)
        own = self.node.hello(hello.name, hello.channel)
        common_protocol(own, hello)
        if self.is_member(hello):
            # What an older incarnation has sent must not be heard after the newer one.
            self.require(hello.name, hello.incarnation, hello.boots, hello.process)
            return own
        connected = self._accepted.get((hello.name, hello.channel))
        if connected is not None and connected.peer is not None and self.is_member(connected.peer):
            raise HandshakeError(f"{hello.name} is connected already, and its folder is not empty")
        return own

    def check(self, hello: Hello, names: frozenset[str] | None) -> None:
        """Raise HandshakeError if the other end must not take part."""
        name = hello.name
        if names is not None and name not in names:
            shown = ", ".join(sorted(names)) or "nobody"
            raise HandshakeError(f"the certificate of {name} names {shown}")
        own_id, other_id = self.node.cluster_id, hello.cluster_id
        if NO_CLUSTER not in (own_id, other_id) and own_id != other_id:
            raise HandshakeError(
                f"{name} belongs to cluster {other_id.hex()}, and {self.node.name} to "
                f"{own_id.hex()}"
            )
        if hello.channel is not Channel.CONTROL and not self.is_member(hello):
            raise HandshakeError(f"{name} and {self.node.name} are not of one cluster yet")
        newest = self._newest.get(name)
        # A node that lost its disk counts from the beginning, and may say so.
        if newest is None or not self.is_member(hello):
            return
        if hello.incarnation < newest.incarnation:
            raise HandshakeError(
                f"{name} came with incarnation {hello.incarnation}, but {newest.incarnation} is "
                "known"
            )
        if hello.incarnation > newest.incarnation:
            return
        if hello.boots < newest.boots or (
            hello.boots == newest.boots and hello.process != newest.process and newest.process
        ):
            raise HandshakeError(
                f"{name} came with start {hello.boots}, but another process with start "
                f"{newest.boots} is known: is its folder a copy?"
            )

    def is_member(self, hello: Hello) -> bool:
        """True for a node of the same cluster."""
        return hello.cluster_id == self.node.cluster_id != NO_CLUSTER

    def accepted_open(self, connection: Accepted, peer: Hello) -> None:
        """Replace an older connection of the same channel."""
        self._unproven.pop(connection, None)
        older = self._accepted.get((peer.name, peer.channel))
        self._accepted[peer.name, peer.channel] = connection
        if older is not None:
            older.fail("the peer has connected anew")

    def accepted_frame(self, connection: Accepted, peer: Hello, given: Frame) -> None:
        """Hand out a frame, unless a newer connection has replaced this one."""
        if self._accepted.get((peer.name, peer.channel)) is not connection or connection.reason:
            return
        handler = self._handlers.get((peer.channel, given.kind))
        if handler is None:
            raise FrameError(f"a frame of unknown kind {given.kind}")
        if given.kind not in self._before_cluster and not self.is_member(peer):
            raise FrameError(f"a frame of kind {given.kind} from outside the cluster")
        handler(peer.name, given)

    def accepted_closed(self, connection: Accepted, reason: str) -> None:
        """Forget the connection; complain about one that was not admitted."""
        self._unproven.pop(connection, None)
        peer, remote, now = connection.peer, connection.wire.remote, self.net.now()
        if peer is None:
            self.counters.refused += 1
            self.complaints.log(now, "peer_refused", remote, reason)
            return
        if connection.reason:
            self.complaints.log(now, "peer_closed", remote, f"{peer.name}: {reason}")
        if self._accepted.get((peer.name, peer.channel)) is connection:
            del self._accepted[peer.name, peer.channel]

    # Dialled connections -------------------------------------------------------------------------
    def dialled_changed(self, name: str) -> None:
        """Dial the other channels once heartbeats can be sent; report the link."""
        control, *others = (self._dialled[name, channel] for channel in Channel)
        for other in others:
            if control.member:
                other.dial()
            else:
                other.fail("the control channel is closed")
        up = control.member and self._dialled[name, Channel.APPEND].member
        if up != (name in self._up):
            if up:
                self._up.add(name)
            else:
                self._up.discard(name)
            self.on_link(name, up)

    def new_connection(self, dialler: "_Dialler") -> Dialled | None:
        """Begin a connection to a node; None while none is wanted."""
        wanted = (
            dialler.channel is Channel.CONTROL
            or self._dialled[dialler.name, Channel.CONTROL].member
        )
        if not self._running or not wanted:
            return None
        hello = self.node.hello(dialler.name, dialler.channel)
        return Dialled(self.net, dialler.address, self._keys, dialler, hello)

    def _close_all(self, reason: str) -> None:
        for connection in [*self._unproven, *self._accepted.values()]:
            connection.fail(reason)
        for dialler in self._dialled.values():
            dialler.fail(reason)


@dataclass(frozen=True, slots=True)
class _Start:
    incarnation: int
    boots: int
    process: int


class _Dialler:
    """One channel to one node: dials it again and again, with growing pauses."""

    def __init__(self, hub: PeerHub, name: str, address: str, channel: Channel) -> None:
        self._hub = hub
        self.name = name
        self.address = address
        self.channel = channel
        self.outbox: Outbox | None = None
        """Takes frames; None while there is no connection."""
        self.member = False
        """True while connected with a node of the same cluster."""
        # The connection, open or not yet; None during a pause.
        self._connection: Dialled | None = None
        # A pause is under way, at whose end the node is dialled.
        self._pausing = False
        self._backoff_s = _BACKOFF_MIN_S

    def dial(self) -> None:
        """Dial, unless that has been done."""
        if self._connection is None and not self._pausing:
            self._connection = self._hub.new_connection(self)

    def fail(self, reason: str) -> None:
        """End the connection, if there is one; it is dialled again if it is still wanted."""
        if self._connection is not None:
            self._connection.fail(reason)

    def end_older(self, incarnation: int, reason: str) -> None:
        """End a connection with an older incarnation of the node."""
        if self._connection is not None:
            self._connection.fail_if_older(incarnation, reason)

    def check(self, peer: Hello, names: frozenset[str] | None) -> None:
        """Raise HandshakeError if this node must not send to the one that answered."""
        self._hub.check(peer, names)

    def dialled_open(self, peer: Hello, outbox: Outbox) -> None:
        """Send from now on."""
        self.outbox = outbox
        self.member = self._hub.is_member(peer)
        self._backoff_s = _BACKOFF_MIN_S
        self._hub.dialled_changed(self.name)

    def dialled_closed(self, reason: str, *, refused: bool) -> None:
        """Pause, then dial again."""
        hub, was_open = self._hub, self.outbox is not None
        self._connection = self.outbox = None
        self.member = False
        event = "peer_not_trusted" if refused else "peer_lost" if was_open else "peer_unreachable"
        hub.complaints.log(hub.net.now(), event, self.address, f"{self.name}: {reason}")
        self._pausing = True
        hub.net.call_later(self._backoff_s * (0.5 + hub.net.chance()), self._pause_over)
        most = _REFUSED_BACKOFF_MAX_S if refused else _BACKOFF_MAX_S
        self._backoff_s = min(2 * self._backoff_s, most)
        hub.dialled_changed(self.name)

    def _pause_over(self) -> None:
        self._pausing = False
        self.dial()
