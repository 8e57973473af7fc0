"""Both ends of a connection between nodes: handshake first, then frames in one direction.

The end that dialled sends frames, and the end that accepted reads them. So no rule is needed for
two nodes that dial each other at once, and a failure in one direction looks like what it is.
"""

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from contrail_link.tcp.handshake import SILENT
from contrail_replicator.peers.frames import (
    BODY_BYTES_MAX,
    Bytes,
    Channel,
    Frame,
    FrameCutter,
    FrameError,
)
from contrail_replicator.peers.handshake import (
    NONCE_BYTES,
    PLAIN,
    UNPROVEN_BYTES_MAX,
    DiallerHandshake,
    HandshakeError,
    Hello,
    ListenerHandshake,
    refusal,
)
from contrail_replicator.peers.outbox import Outbox
from contrail_replicator.peers.ports import PeerNet, Wire

HANDSHAKE_S: Final = 5.0
UNSENT_BYTES_MAX: Final = {
    Channel.CONTROL: 1 << 20,
    Channel.APPEND: 16 << 20,
    Channel.BULK: 9 << 20,
}

Keys = Callable[[], Sequence[bytes]]
"""Gives the keys that are valid now: the first is the newest."""


class AcceptedOwner(Protocol):
    """What an accepted connection needs of the node."""

    def admit(self, hello: Hello, names: frozenset[str] | None) -> Hello:
        """Return the own hello for a node that knows the secret, or raise HandshakeError.

        ``names`` are those of its verified certificate, None without one.
        """

    def accepted_open(self, connection: "Accepted", peer: Hello) -> None:
        """Note that frames of this peer follow."""

    def accepted_frame(self, connection: "Accepted", peer: Hello, given: Frame) -> None:
        """Handle a frame. Raises FrameError if it breaks the protocol."""

    def accepted_closed(self, connection: "Accepted", reason: str) -> None:
        """Note the end of a connection. Called once."""


class _Connection:
    """What both ends have in common."""

    def __init__(self, net: PeerNet, keys: Keys) -> None:
        self.net = net
        self.keys = keys
        self.wire: Wire
        self.peer: Hello | None = None
        """The other end; None before it has proved itself."""
        self.reason = ""
        """Why this end has closed the connection; empty while it has not."""
        # Ends a handshake that takes too long, from the first byte of TLS on.
        self.timer = net.call_later(HANDSHAKE_S, self.late)

    def late(self) -> None:
        """End the connection unless the handshake is done."""
        if self.peer is None:
            self.fail(f"the handshake took longer than {HANDSHAKE_S:g} s")

    def fail_if_older(self, incarnation: int, reason: str) -> None:
        """End a connection with an older incarnation of the peer."""
        if self.peer is not None and self.peer.incarnation < incarnation:
            self.fail(reason)

    def fail(self, reason: str) -> None:
        """End the connection at once."""
        self.reason = reason
        self.wire.close()


class Accepted(_Connection):
    """The end that accepted: it reads frames and sends none."""

    def __init__(self, net: PeerNet, wire: Wire, keys: Keys, owner: AcceptedOwner) -> None:
        super().__init__(net, keys)
        self.wire = wire
        self._owner = owner
        self._handshake: ListenerHandshake
        self._cutter: FrameCutter

    def wire_open(self) -> None:
        """Send the nonce."""
        nonce = self.net.random_bytes(NONCE_BYTES)
        certificate = self.wire.certificate
        self._handshake = ListenerHandshake(self.keys(), nonce, certificate, self._admit)
        self.wire.write(self._handshake.first)

    def _admit(self, hello: Hello) -> Hello:
        return self._owner.admit(hello, self.wire.certified_names)

    def wire_bytes(self, data: Bytes) -> None:
        """Go on with the handshake; after it, hand out frames."""
        try:
            if self.peer is None:
                self._shake_hands(bytes(data[: UNPROVEN_BYTES_MAX + 1]))
                return
            for frame in self._cutter.feed(data):
                self._owner.accepted_frame(self, self.peer, frame)
        except HandshakeError as error:
            self.wire.write(refusal(str(error)))
            self.fail(str(error))
        except FrameError as error:
            self.fail(f"the peer broke the protocol: {error}")

    def _shake_hands(self, data: bytes) -> None:
        answer = self._handshake.feed(data)
        if answer:
            self.wire.write(answer)
        peer = self._handshake.peer
        if peer is None:
            return
        if self._handshake.rest:
            # The dialler sends nothing before it has seen the listener's proof.
            raise HandshakeError("it went on before the handshake was done")
        self.timer.cancel()
        self.peer = peer
        self._cutter = FrameCutter(BODY_BYTES_MAX[peer.channel])
        self._owner.accepted_open(self, peer)

    def wire_drained(self) -> None:
        """Do nothing: no frame is sent here."""

    def wire_closed(self, reason: str) -> None:
        """Report the end."""
        self.timer.cancel()
        self._owner.accepted_closed(self, self.reason or reason)


class DialledOwner(Protocol):
    """What a dialled connection needs of the node."""

    def check(self, peer: Hello, names: frozenset[str] | None) -> None:
        """Raise HandshakeError if this node must not send to the one that answered."""

    def dialled_open(self, peer: Hello, outbox: Outbox) -> None:
        """Note that frames can be sent."""

    def dialled_closed(self, reason: str, *, refused: bool) -> None:
        """Note the end of the connection; ``refused`` if the handshake failed. Called once."""


class Dialled(_Connection):
    """The end that dialled: it sends frames and reads none."""

    def __init__(
        self, net: PeerNet, address: str, keys: Keys, owner: DialledOwner, hello: Hello
    ) -> None:
        super().__init__(net, keys)
        self._owner = owner
        self._hello = hello
        self._handshake: DiallerHandshake
        self._outbox: Outbox | None = None
        # The handshake failed, and not the network.
        self._refused = False
        # The connection is open and not encrypted, and the listener has sent nothing.
        self._silent = False
        self.wire = net.dial(address, hello.target, self)

    def wire_open(self) -> None:
        """Await the listener's nonce."""
        nonce = self.net.random_bytes(NONCE_BYTES)
        certificate = self.wire.certificate
        self._silent = certificate == PLAIN
        self._handshake = DiallerHandshake(self.keys(), nonce, certificate, self._hello)

    def wire_bytes(self, data: Bytes) -> None:
        """Go on with the handshake; nothing may come after it."""
        self._silent = False
        if self._outbox is not None:
            self.fail("the peer broke the protocol: it sent bytes on a connection it accepted")
            return
        try:
            answer = self._handshake.feed(bytes(data))
            if answer:
                self.wire.write(answer)
            peer = self._handshake.peer
            if peer is None:
                return
            self._owner.check(peer, self.wire.certified_names)
            self.timer.cancel()
            self.peer = peer
            self._outbox = Outbox(self.net, self.wire, UNSENT_BYTES_MAX[self._hello.channel])
            self._owner.dialled_open(peer, self._outbox)
        except HandshakeError as error:
            self._refused = True
            self.fail(str(error))

    def wire_drained(self) -> None:
        """Go on sending."""
        if self._outbox is not None:
            self._outbox.drained()

    def wire_closed(self, reason: str) -> None:
        """Report the end."""
        self.timer.cancel()
        if self._outbox is not None:
            self._outbox.close()
        reason = self.reason or reason
        if self._silent:
            reason = f"{reason}; {SILENT}"
        self._owner.dialled_closed(reason, refused=self._refused)
