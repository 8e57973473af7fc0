"""A node whose disk was lost asks the cluster for a new incarnation, over the peer port.

Until it has one it can do nothing else: its folder is empty, and what it has promised under its
name is forgotten. It asks all nodes again and again, with a token that tells this process from
others; a node that can reach the leader of the meta group has it registered, and answers.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from contrail_replicator.peers.frames import Channel, Frame, FrameError
from contrail_replicator.peers.hub import PeerHub
from contrail_replicator.peers.ports import Timer

REGISTER: Final = 13
REGISTERED: Final = 14
_AGAIN_S: Final = 0.5
_NO_GROUP: Final = 0
_TOKEN_BYTES: Final = 16
_ANSWER: Final = struct.Struct("<16s16sIQ")


@dataclass(frozen=True, slots=True)
class Registration:
    """What a node is from now on."""

    cluster_id: bytes
    number: int
    incarnation: int


Register = Callable[[str, bytes, Callable[[int, int], None]], None]
"""Registers a node (name, token), and calls back with its number and incarnation, if it can."""


class Registering:
    """Both ends of it. ``on_registered`` is called once, in the node whose disk was lost."""

    def __init__(
        self, hub: PeerHub, register: Register, on_registered: Callable[[Registration], None]
    ) -> None:
        self._hub = hub
        self._register = register
        self._on_registered = on_registered
        # The token of this process, while it asks; empty otherwise.
        self._token = b""
        self._timer: Timer | None = None
        hub.handle(Channel.CONTROL, REGISTER, self._asked, before_cluster=True)
        hub.handle(Channel.CONTROL, REGISTERED, self._answered, before_cluster=True)

    def begin(self) -> None:
        """Ask until there is an answer."""
        if not self._token:
            self._token = self._hub.net.random_bytes(_TOKEN_BYTES)
            self._ask()

    def stop(self) -> None:
        """Ask no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _ask(self) -> None:
        self._timer = self._hub.net.call_later(_AGAIN_S, self._ask)
        for name in self._hub.names:
            self._hub.send(name, Channel.CONTROL, REGISTER, _NO_GROUP, [self._token])

    def _asked(self, peer: str, frame: Frame) -> None:
        hub, token = self._hub, bytes(frame.body)
        if len(token) != _TOKEN_BYTES:
            raise FrameError("a request for an incarnation that cannot be read")
        # A member of the cluster has not lost its disk.
        if not hub.node.in_cluster or hub.reaches(peer):
            return

        def answer(number: int, incarnation: int) -> None:
            body = _ANSWER.pack(token, hub.node.cluster_id, number, incarnation)
            hub.send(peer, Channel.CONTROL, REGISTERED, _NO_GROUP, [body])

        self._register(peer, token, answer)

    def _answered(self, peer: str, frame: Frame) -> None:
        del peer
        if len(frame.body) != _ANSWER.size:
            raise FrameError("an answer with an incarnation that cannot be read")
        token, cluster_id, number, incarnation = _ANSWER.unpack(frame.body)
        if self._token and token == self._token:
            self._token = b""
            self.stop()
            self._on_registered(Registration(cluster_id, number, incarnation))
