"""The transport of Raft groups over the connections between nodes.

Heartbeats of all groups to one node, and the answers to them, travel in one frame for each pass of
the event loop.
"""

from collections.abc import Callable
from typing import Final, TypeVar

from contrail_replicator.messages import Heartbeat, HeartbeatReply, Message, MessageRefusedError
from contrail_replicator.peers.codec import (
    APPEND,
    CONTROL_KINDS,
    HEARTBEAT_REPLIES,
    HEARTBEATS,
    decode,
    decode_heartbeat_replies,
    decode_heartbeats,
    encode,
    encode_heartbeat_replies,
    encode_heartbeats,
    wall_ns_of,
)
from contrail_replicator.peers.frames import Bytes, Channel, Frame, frame
from contrail_replicator.peers.hub import PeerHub
from contrail_replicator.ports import GroupEndpoint

_NO_GROUP: Final = 0
_M = TypeVar("_M", Heartbeat, HeartbeatReply)


class GroupLinks:
    """Sends the messages of the node's groups, and hands out those of their other members.

    ``on_fault(group, error)`` is called when a group cannot take a message because it or its
    leader is damaged; it gets no more messages then. ``on_clock(name, ns)`` gets the wall clocks of
    other nodes, as their heartbeats and answers tell them.
    """

    def __init__(
        self,
        hub: PeerHub,
        wall_ns: Callable[[], int],
        on_fault: Callable[[int, Exception], None],
        on_clock: Callable[[str, int], None] = lambda _name, _wall_ns: None,
    ) -> None:
        self._hub = hub
        self._wall_ns = wall_ns
        self._on_fault = on_fault
        # The members that this node hosts, by group.
        self._endpoints: dict[int, GroupEndpoint] = {}
        # By node: what waits for the end of this pass of the event loop, by group.
        self._beats: dict[str, dict[int, Heartbeat]] = {}
        self._replies: dict[str, dict[int, HeartbeatReply]] = {}
        # The last message that was sent, and its frames: a leader sends one to each member.
        self._encoded_from: Message | None = None
        self._encoded: list[tuple[Channel, list[Bytes]]] = []
        # A flush is due.
        self._due = False
        self._on_clock = on_clock
        hub.on_link = self._link_changed
        hub.handle(Channel.CONTROL, HEARTBEATS, self._heartbeats)
        hub.handle(Channel.CONTROL, HEARTBEAT_REPLIES, self._heartbeat_replies)
        hub.handle(Channel.APPEND, APPEND, self._message)
        for kind in CONTROL_KINDS:
            hub.handle(Channel.CONTROL, kind, self._message)

    def attach(self, group: int, endpoint: GroupEndpoint) -> None:
        """Deliver the group's messages and link changes from now on."""
        self._endpoints[group] = endpoint
        for name in self._hub.names:
            if self._hub.reaches(name):
                endpoint.link_changed(name, True)

    def detach(self, group: int) -> None:
        """Deliver nothing more to the group."""
        self._endpoints.pop(group, None)

    def send(self, group: int, peer: str, message: Message) -> None:
        """Send without waiting; drop the message if it cannot be sent."""
        if isinstance(message, Heartbeat):
            self._later(self._beats, peer)[group] = message
        elif isinstance(message, HeartbeatReply):
            self._later(self._replies, peer)[group] = message
        else:
            if message is not self._encoded_from:
                self._encoded_from, self._encoded = message, []
                for channel, kind, body in encode(message):
                    self._encoded.append((channel, frame(kind, group, body)))
            for channel, encoded in self._encoded:
                self._hub.send_frame(peer, channel, encoded)

    def _link_changed(self, name: str, up: bool) -> None:
        for endpoint in list(self._endpoints.values()):
            endpoint.link_changed(name, up)

    def _later(self, waiting: dict[str, dict[int, _M]], peer: str) -> dict[int, _M]:
        if not self._due:
            self._due = True
            self._hub.net.call_later(0, self._flush)
        return waiting.setdefault(peer, {})

    def _flush(self) -> None:
        self._due = False
        beats, self._beats = self._beats, {}
        replies, self._replies = self._replies, {}
        wall_ns = self._wall_ns()
        for peer, beat_of in beats.items():
            body = encode_heartbeats(wall_ns, beat_of.items())
            self._hub.send(peer, Channel.CONTROL, HEARTBEATS, _NO_GROUP, body)
        for peer, reply_of in replies.items():
            body = encode_heartbeat_replies(wall_ns, reply_of.items())
            self._hub.send(peer, Channel.CONTROL, HEARTBEAT_REPLIES, _NO_GROUP, body)

    def _heartbeats(self, peer: str, frame: Frame) -> None:
        self._on_clock(peer, wall_ns_of(frame.body))
        for group, message in decode_heartbeats(frame.body):
            self._deliver(peer, group, message)

    def _heartbeat_replies(self, peer: str, frame: Frame) -> None:
        self._on_clock(peer, wall_ns_of(frame.body))
        for group, message in decode_heartbeat_replies(frame.body):
            self._deliver(peer, group, message)

    def _message(self, peer: str, frame: Frame) -> None:
        self._deliver(peer, frame.group, decode(frame.kind, frame.body))

    def _deliver(self, peer: str, group: int, message: Message) -> None:
        endpoint = self._endpoints.get(group)
        if endpoint is None:
            # A group that this node does not host yet, or no longer.
            return
        try:
            endpoint.receive(peer, message)
        except MessageRefusedError as error:
            hub = self._hub
            hub.complaints.log(hub.net.now(), "peer_message_refused", peer, str(error))
        except Exception as error:
            self.detach(group)
            self._on_fault(group, error)
