"""What the peer port needs of the network: byte connections, and timers.

``tcp.PeerSockets`` has them over asyncio. A simulation has its own, with a virtual clock; all that
lies above the bytes runs on both.
"""

from collections.abc import Callable
from typing import Protocol

from contrail_replicator.peers.frames import Bytes


class Wire(Protocol):
    """One end of a byte connection. All calls come from the event loop."""

    @property
    def remote(self) -> str:
        """The address of the other end, without its port: text for logs."""

    @property
    def certificate(self) -> bytes:
        """SHA-256 of the listener's certificate as this end sees it; zeros without TLS."""

    @property
    def certified_names(self) -> frozenset[str] | None:
        """The names in the other end's verified certificate; None if none was verified."""

    @property
    def unsent(self) -> int:
        """Bytes written that the operating system has not taken yet."""

    def write(self, data: Bytes) -> None:
        """Send bytes. Without effect after `close`."""

    def close(self) -> None:
        """End the connection at once, also before it is open; `wire_closed` follows."""


class WireUser(Protocol):
    """What happens to a connection."""

    def wire_open(self) -> None:
        """Begin: bytes can be written. Not called if the connection fails before."""

    def wire_bytes(self, data: Bytes) -> None:
        """Take received bytes, which are valid during this call only."""

    def wire_drained(self) -> None:
        """Note that all bytes written have been taken by the operating system."""

    def wire_closed(self, reason: str) -> None:
        """Note that the connection has ended or failed to begin. Called once, as the last."""


class Timer(Protocol):
    """A call that is due later."""

    def cancel(self) -> None:
        """Do not call."""


class PeerNet(Protocol):
    """A node's network and clock."""

    def now(self) -> float:
        """Return the time in seconds; it never goes backwards."""

    def call_later(self, seconds: float, call: Callable[[], None]) -> Timer:
        """Call after a time; after 0 seconds in the next pass of the event loop."""

    def dial(self, address: str, name: str, user: WireUser) -> Wire:
        """Begin a connection to the node of this name, and return its wire.

        Until `wire_open`, the wire can only be closed.
        """

    def chance(self) -> float:
        """Return a random number from 0 up to 1."""

    def random_bytes(self, count: int) -> bytes:
        """Return bytes that nobody can guess."""
