"""The network between simulated nodes: byte connections on the loop of the simulation."""

from collections.abc import Callable
from random import Random
from typing import Any

from tests.sim.loop import Process, SimLoop
from tests.unit.replicator.peers.net_rig import SimNet, SimPort


class _Due:
    """A call that is due on the loop."""

    arrives = True

    def __init__(self, call: Callable[[], object]) -> None:
        self._call: Callable[[], object] | None = call

    def cancel(self) -> None:
        self._call = None

    def __call__(self) -> None:
        if self._call is not None:
            self._call()


class LoopNet(SimNet):
    """All nodes and their connections; delays vary."""

    def __init__(self, loop: SimLoop, processes: dict[str, Process], seed: int) -> None:
        super().__init__()
        self.random = Random(f"net {seed}")
        self._loop = loop
        self._processes = processes

    @property
    def time(self) -> float:  # type: ignore[override]
        return self._loop.now

    @time.setter
    def time(self, value: float) -> None:
        pass

    def at(self, delay: float, node: str, call: Callable[[], object]) -> Any:
        """Make a call in the process of a node."""
        due = _Due(call)
        self._loop.call_later(delay, due, context=self._processes[node].context.copy())
        return due

    def crash(self, node: str) -> None:
        """End the connections of a node; its calls have ended with the process."""
        self.listening.pop(node, None)
        for wire in [wire for wire in self.wires if wire.node == node]:
            wire.gone = True
            wire.other.ends("reset by the peer")
            if wire in self.wires:
                self.wires.remove(wire)


class Sockets(SimPort):
    """Takes the place of `PeerSockets` in the process of a node."""

    def dial(self, address: str, name: str, user: Any) -> Any:
        """Connect; the host in an address is the name of its node."""
        return super().dial(address.partition(":")[0], name, user)

    def listen(self, listener: object, accept: Any = None) -> None:  # type: ignore[override]
        del listener
        super().listen(accept)

    async def close(self) -> None:
        """Listen no longer."""
        self.net.listening.pop(self.node, None)


class Listener:
    """Takes the place of a listening socket."""

    def close(self) -> None:
        pass
