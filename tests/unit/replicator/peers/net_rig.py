"""A network in memory with a clock that is set: byte connections with delay, cuts and pauses."""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from contrail_replicator.peers.frames import Bytes
from contrail_replicator.peers.handshake import PLAIN
from contrail_replicator.peers.ports import Wire, WireUser

Accept = Callable[[Wire], WireUser]
KERNEL_BYTES = 64 << 10
"""Bytes under way at most in one direction; more stay unsent at the writer."""


@dataclass(order=True)
class Due:
    at: float
    number: int
    node: str = field(compare=False)
    call: Callable[[], None] | None = field(compare=False)

    def cancel(self) -> None:
        self.call = None


class SimNet:
    """All nodes, their connections and the clock."""

    def __init__(self, seed: int = 0) -> None:
        self.time = 1_000.0
        self.random = Random(seed)
        self.delay_s = 0.0005
        self.cut: set[tuple[str, str]] = set()
        self.paused: set[str] = set()
        self.listening: dict[str, Accept] = {}
        self.certificate: dict[str, bytes] = {}
        self.wires: list[SimWire] = []
        self._due: list[Due] = []
        self._numbers = itertools.count()
        self._held: list[Due] = []

    def at(self, delay: float, node: str, call: Callable[[], None]) -> Due:
        due = Due(self.time + delay, next(self._numbers), node, call)
        heapq.heappush(self._due, due)
        return due

    def run(self, seconds: float) -> None:
        """Let the time pass; calls of a paused node wait until it goes on."""
        end = self.time + seconds
        while self._due and self._due[0].at <= end:
            due = heapq.heappop(self._due)
            self.time = max(self.time, due.at)
            if due.node in self.paused:
                self._held.append(due)
            elif due.call is not None:
                due.call()
        self.time = end

    def run_until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        end = self.time + seconds
        while not condition():
            assert self.time < end, "the condition did not come true"
            self.run(0.001)

    def resume(self, node: str) -> None:
        self.paused.discard(node)
        for due in self._held:
            heapq.heappush(self._due, due)
        self._held.clear()

    def set_cut(self, source: str, target: str, cut: bool) -> None:
        """Stop or restart what travels from one node to another; what was sent is kept."""
        (self.cut.add if cut else self.cut.discard)((source, target))
        for wire in self.wires:
            wire.pump()

    def crash(self, node: str) -> None:
        """End a process: its connections end, and nothing of it is called any more."""
        self.listening.pop(node, None)
        for due in [*self._due, *self._held]:
            if due.node == node:
                due.call = None
        for wire in [wire for wire in self.wires if wire.node == node]:
            wire.gone = True
            wire.other.ends("reset by the peer")

    def port(self, node: str) -> "SimPort":
        return SimPort(self, node)


class SimPort:
    """The network of one node; its address is its name."""

    def __init__(self, net: SimNet, node: str) -> None:
        self.net = net
        self.node = node

    def now(self) -> float:
        return self.net.time

    def call_later(self, seconds: float, call: Callable[[], None]) -> Due:
        return self.net.at(seconds, self.node, call)

    def chance(self) -> float:
        return self.net.random.random()

    def random_bytes(self, count: int) -> bytes:
        return self.net.random.randbytes(count)

    def listen(self, accept: Accept) -> None:
        self.net.listening[self.node] = accept

    def dial(self, address: str, name: str, user: WireUser) -> "SimWire":
        net, wire = self.net, SimWire(self.net, self.node, address)
        other = SimWire(self.net, address, self.node)
        wire.user, wire.other, other.other = user, other, wire

        def connect() -> None:
            if wire.closed:
                return
            if {(self.node, address), (address, self.node)} & net.cut:
                net.at(0.1, self.node, connect)
                return
            accept = net.listening.get(address)
            if accept is None:
                wire.ends("connection refused")
                return
            certificate = net.certificate.get(address, PLAIN)
            wire.certificate = other.certificate = certificate
            net.wires += [wire, other]
            wire.is_open = other.is_open = True
            other.user = accept(other)
            other.user.wire_open()
            wire.user.wire_open()

        net.at(net.delay_s, self.node, connect)
        return wire


class SimWire:
    """One end of a connection."""

    def __init__(self, net: SimNet, node: str, remote: str) -> None:
        self.net = net
        self.node = node
        self.remote = remote
        self.certificate = PLAIN
        self.certified_names: frozenset[str] | None = None
        self.user: WireUser
        self.other: SimWire
        self.is_open = self.closed = self.gone = False
        self.under_way = 0
        self.largest_write = 0
        self.waiting: list[bytes] = []

    @property
    def unsent(self) -> int:
        return sum(map(len, self.waiting))

    def write(self, data: Bytes) -> None:
        assert self.is_open
        self.largest_write = max(self.largest_write, len(data))
        if not self.closed:
            self.waiting.append(bytes(data))
            self.pump()

    def pump(self) -> None:
        """Give waiting bytes to the kernel, as far as it takes them."""
        was_waiting = bool(self.waiting)
        while self.waiting and self.under_way < KERNEL_BYTES:
            if (self.node, self.remote) in self.net.cut:
                return
            piece = self.waiting.pop(0)
            taken, rest = piece[:KERNEL_BYTES], piece[KERNEL_BYTES:]
            if rest:
                self.waiting.insert(0, rest)
            self.under_way += len(taken)
            self.net.at(self.net.delay_s, self.remote, lambda taken=taken: self.arrive(taken))
        if was_waiting and not self.waiting and not self.closed:
            self.net.at(0, self.node, lambda: self.closed or self.user.wire_drained())

    def arrive(self, data: bytes) -> None:
        self.under_way -= len(data)
        if not self.other.closed:
            self.other.user.wire_bytes(data)
        self.pump()

    def close(self) -> None:
        """Send what the kernel has, then the end."""
        self.ends("")
        if self.is_open:
            self.other.ends("the peer closed the connection", self.net.delay_s)

    def ends(self, reason: str, delay: float = 0.0) -> None:
        if self.gone:
            return

        def end() -> None:
            if not self.gone:
                self.gone = self.closed = True
                self.waiting.clear()
                if self in self.net.wires:
                    self.net.wires.remove(self)
                self.user.wire_closed(reason)

        self.closed = self.closed or not delay
        self.net.at(delay, self.node, end)
