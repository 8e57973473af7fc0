"""Nodes become a cluster over a network in memory, with crashes at each save."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from contrail_replicator.peers.formation import Membership, Report, Stage
from contrail_replicator.peers.forming import Forming, decode_report, encode_report
from contrail_replicator.peers.frames import FrameError
from contrail_replicator.peers.handshake import NO_CLUSTER
from contrail_replicator.peers.hub import Node, PeerHub
from contrail_replicator.peers.registering import Registering
from tests.unit.replicator.peers.net_rig import SimNet

NAMES = ("a", "b", "c")


class Crash(Exception):  # noqa: N818
    pass


class Founder:
    """A node with a disk that is kept over crashes."""

    def __init__(self, net: SimNet, name: str, names: tuple[str, ...] = NAMES) -> None:
        self.net = net
        self.name = name
        self.names = names
        self.disk = Membership()
        self.boots = 0
        self.saves = 0
        self.crash_at = -1
        self.formed: list[Membership] = []
        self.obstacles: list[tuple[str, bool]] = []
        self.links: set[str] = set()
        self.hub: PeerHub
        self.up = False
        self.registrar: Registrar | None = None

    def load(self) -> Membership:
        return self.disk

    def save(self, membership: Membership) -> None:
        """Crash before or after the save, if the test says so: the even and the odd numbers."""
        self.crash_if(2 * self.saves)
        self.disk = membership
        self.crash_if(2 * self.saves + 1)
        self.saves += 1

    def crash_if(self, number: int) -> None:
        if number == self.crash_at:
            self.crash_at = -1
            self.saves += 1
            self.crash()
            raise Crash

    def crash(self) -> None:
        self.up = False
        self.links.clear()
        self.net.crash(self.name)
        # Another process starts it again.
        self.net.at(0.3, "supervisor", self.boot)

    def boot(self) -> None:
        self.boots += 1
        self.up = True
        port = self.net.port(self.name)
        node = Node(self.name, self.disk_id(), self.disk.incarnation, self.boots, self.boots)
        peers = {name: name for name in self.names}
        self.hub = PeerHub(port, node, peers, lambda: [bytes(32)])
        self.hub.on_link = self.note_link
        forming = Forming(
            self.hub,
            self.names,
            self,
            self.formed.append,
            self.note_obstacle,
        )
        if self.registrar is not None:
            self.registering = Registering(
                self.hub,
                self.registrar.register,
                lambda given: forming.adopt(
                    Membership(Stage.FORMED, given.cluster_id, given.incarnation)
                ),
            )
        port.listen(self.hub.accept)
        self.hub.start()
        with suppress(Crash):
            forming.start()

    def note_obstacle(self, reason: str, lost: bool) -> None:
        self.obstacles.append((reason, lost))
        if lost and self.registrar is not None:
            self.registering.begin()

    def disk_id(self) -> bytes:
        return self.disk.cluster_id if self.disk.stage is Stage.FORMED else NO_CLUSTER

    def note_link(self, name: str, up: bool) -> None:
        (self.links.add if up else self.links.discard)(name)


class CrashingNet(SimNet):
    """A network on which a crash ends only the process it happens in."""

    def run(self, seconds: float) -> None:
        end = self.time + seconds
        while self.time < end:
            with suppress(Crash):
                super().run(end - self.time)


def founders(net: SimNet, *names: str) -> list[Founder]:
    return [Founder(net, name) for name in names or NAMES]


def all_formed(nodes: list[Founder]) -> bool:
    return len({node.disk for node in nodes}) == 1 and all(
        node.disk.stage is Stage.FORMED and node.links == set(NAMES) - {node.name} for node in nodes
    )


def test_three_nodes_become_a_cluster_and_stay_it() -> None:
    net = SimNet()
    nodes = founders(net)
    for node in nodes:
        node.boot()
    net.run_until(lambda: all_formed(nodes))
    assert [node.hub.node.node_number for node in nodes] == [1, 2, 3]
    cluster_id = nodes[0].disk.cluster_id
    for node in nodes:
        node.crash()
    net.run(1)
    net.run_until(lambda: all_formed(nodes))
    assert nodes[0].disk.cluster_id == cluster_id
    assert all(len(node.formed) == 2 and not node.obstacles for node in nodes)


@pytest.mark.parametrize("victim", range(3))
@pytest.mark.parametrize("crash_at", range(4))
def test_a_crash_at_any_save_repeats_the_step(victim: int, crash_at: int) -> None:
    net = CrashingNet()
    nodes = founders(net)
    nodes[victim].crash_at = crash_at
    for node in nodes:
        node.boot()
    net.run_until(lambda: all_formed(nodes) and nodes[victim].boots == 2)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.floats(0, 1.5), st.sampled_from(range(3)), st.booleans()), max_size=6))
def test_crashes_and_cuts_at_any_time(events: list[tuple[float, int, bool]]) -> None:
    net = SimNet()
    nodes = founders(net)
    for node in nodes:
        node.boot()
    for moment, number, crash in events:
        node, other = nodes[number], nodes[number - 1]
        if crash:
            net.at(moment, "chance", lambda node=node: node.up and node.crash())  # type: ignore[misc]
        else:
            ends = node.name, other.name
            net.at(moment, "chance", lambda ends=ends: net.set_cut(*ends, True))  # type: ignore[misc]
            net.at(moment + 1, "chance", lambda ends=ends: net.set_cut(*ends, False))  # type: ignore[misc]
    net.run(3)
    net.run_until(lambda: all_formed(nodes))
    assert not any(node.obstacles for node in nodes)


def test_a_node_that_lost_its_disk_says_so_and_stays_outside() -> None:
    net = SimNet()
    nodes = founders(net)
    for node in nodes:
        node.boot()
    net.run_until(lambda: all_formed(nodes))
    lost = nodes[0]
    lost.crash()
    lost.disk, lost.boots = Membership(), 0
    net.run_until(lambda: bool(lost.obstacles))
    (reason, lost_disk) = lost.obstacles[0]
    assert reason.endswith("is part of a formed cluster, and this folder is empty")
    assert lost_disk
    net.run(5)
    assert lost.disk == Membership()
    assert not lost.links
    assert nodes[1].links == {"c"}


class Registrar:
    """The table of nodes that the cluster would have: it counts up the incarnation of each."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[bytes]] = {}

    def register(self, name: str, token: bytes, answer: Callable[[int, int], None]) -> None:
        known = self.tokens.setdefault(name, [])
        if token not in known:
            known.append(token)
        answer(NAMES.index(name) + 1, 1 + len(known))


def test_a_node_that_lost_its_disk_is_a_member_in_a_new_incarnation() -> None:
    net, registrar = SimNet(), Registrar()
    nodes = founders(net)
    for node in nodes:
        node.registrar = registrar
        node.boot()
    net.run_until(lambda: all_formed(nodes))
    lost, other, _ = nodes
    cluster_id = other.disk.cluster_id
    for incarnation in (2, 3):
        lost.crash()
        lost.disk, lost.boots = Membership(), 0
        net.run_until(lambda: lost.disk.stage is Stage.FORMED)
        assert lost.disk == Membership(Stage.FORMED, cluster_id, incarnation)
        net.run_until(lambda: all(one.links == set(NAMES) - {one.name} for one in nodes))
        # However often it has asked, and whoever has answered: one for each lost disk.
        assert len(registrar.tokens["a"]) == incarnation - 1
    assert not registrar.tokens.get("b")
    # What is left of an older disk is refused from now on.
    lost.crash()
    lost.disk, lost.boots = Membership(Stage.FORMED, cluster_id, 2), 99
    with capture_logs() as logs:
        net.run(3)
    assert "b" not in lost.links
    assert any("came with incarnation 2, but 3 is known" in str(line) for line in logs)


def test_nodes_with_other_names_do_not_form() -> None:
    net = SimNet()
    a, b, c = founders(net)
    c.names = ("a", "b", "c", "d")
    for node in (a, b, c):
        node.boot()
    net.run(5)
    assert ("c was started with the nodes a, b, c, d; this node with a, b, c", False) in a.obstacles
    assert {a.disk, b.disk, c.disk} == {Membership()}


def test_a_node_alone_is_a_cluster() -> None:
    node = Founder(SimNet(), "a", ("a",))
    node.boot()
    assert node.disk.stage is Stage.FORMED
    assert node.hub.node == replace(node.hub.node, cluster_id=node.disk.cluster_id, node_number=1)


@given(st.binary(max_size=100))
def test_any_bytes_are_a_report_or_refused(data: bytes) -> None:
    with suppress(FrameError):
        assert encode_report(decode_report(data)) == data


def test_bytes_of_a_report() -> None:
    report = Report(Membership(Stage.PREPARED, b"0123456789abcdef"), ("n1", "n22"))
    assert encode_report(report) == b"\x010123456789abcdef\x02\x02n1\x03n22"
    assert decode_report(encode_report(report)) == report
