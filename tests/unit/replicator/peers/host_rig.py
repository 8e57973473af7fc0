"""A node on a network in memory: its connections, and the links of its groups."""

from contrail_replicator.peers.hub import Node, PeerHub
from contrail_replicator.peers.links import GroupLinks
from tests.unit.replicator.peers.net_rig import SimNet

CLUSTER = b"c" * 16
NAMES = ("a", "b", "c")


class Host:
    """A node: its connections, and what the test attaches to them."""

    def __init__(self, net: SimNet, name: str) -> None:
        self.net = net
        self.name = name
        self.boots = 0
        self.faults: list[tuple[int, str]] = []
        self.clock_of: dict[str, int] = {}
        self.hub: PeerHub
        self.links: GroupLinks

    def boot(self) -> None:
        self.boots += 1
        self.port = self.net.port(self.name)
        self.hub = PeerHub(
            self.port,
            Node(self.name, CLUSTER, 1, self.boots, self.boots),
            {name: name for name in NAMES},
            lambda: [bytes(32)],
        )
        self.links = GroupLinks(
            self.hub,
            lambda: int(self.net.time * 1e9),
            lambda group, error: self.faults.append((group, str(error))),
            self.clock_of.__setitem__,
        )
        self.port.listen(self.hub.accept)
        self.hub.start()
