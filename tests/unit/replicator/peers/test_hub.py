"""Connections between nodes in memory: who is let in, what is sent, what is dropped."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from contrail_replicator.peers.frames import BODY_BYTES_MAX, HEAD_BYTES, Channel, Frame, frame
from contrail_replicator.peers.handshake import NO_CLUSTER
from contrail_replicator.peers.hub import UNPROVEN_MAX, Node, PeerHub
from contrail_replicator.peers.outbox import SLICE_BYTES
from contrail_replicator.peers.ports import Wire
from tests.unit.replicator.peers.net_rig import SimNet

KEY, OTHER_KEY = bytes(32), bytes([1]) * 32
CLUSTER, OTHER_CLUSTER = b"c" * 16, b"d" * 16
NAMES = ("a", "b", "c")
NOTE, EARLY = 200, 201


class Peer:
    """A node that notes what it gets."""

    def __init__(self, net: SimNet, name: str, *, keys: tuple[bytes, ...] = (KEY,)) -> None:
        self.net = net
        self.keys = keys
        self.got: list[tuple[str, Channel, int, bytes]] = []
        self.links: dict[str, bool] = {}
        self.changes: list[tuple[str, bool]] = []
        self.node = Node(name, CLUSTER, 1, 1, hash_of(name))
        self.hub: PeerHub

    def start(self) -> "Peer":
        port = self.net.port(self.node.name)
        self.hub = PeerHub(port, self.node, {name: name for name in NAMES}, lambda: self.keys)
        self.hub.on_link = self.note_link
        for channel in Channel:
            self.hub.handle(channel, NOTE, self.note(channel))
        self.hub.handle(Channel.CONTROL, EARLY, self.note(Channel.CONTROL), before_cluster=True)
        port.listen(self.hub.accept)
        self.hub.start()
        return self

    def note(self, channel: Channel) -> Callable[[str, Frame], None]:
        def handle(peer: str, given: Frame) -> None:
            self.got.append((peer, channel, given.group, bytes(given.body)))

        return handle

    def note_link(self, name: str, up: bool) -> None:
        self.links[name] = up
        self.changes.append((name, up))

    def reaches(self, *names: str) -> bool:
        return all(self.links.get(name) for name in names)


def hash_of(name: str) -> int:
    return sum(name.encode())


def cluster(net: SimNet) -> list[Peer]:
    peers = [Peer(net, name).start() for name in NAMES]
    net.run_until(lambda: all(peer.reaches(*set(NAMES) - {peer.node.name}) for peer in peers))
    return peers


def pair(net: SimNet, **changes: object) -> tuple[Peer, Peer]:
    """Two nodes, of which the second has other facts; both have tried to connect."""
    a, b = Peer(net, "a"), Peer(net, "b")
    b.node = replace(b.node, **changes)  # type: ignore[arg-type]
    a.start()
    b.start()
    net.run(2)
    return a, b


def reasons(logs: list[dict[str, object]], event: str) -> set[str]:
    return {str(line["reason"]) for line in logs if line["event"] == event}


def test_three_nodes_reach_each_other_on_each_channel() -> None:
    a, b, c = cluster(SimNet())
    for channel in Channel:
        a.hub.send("b", channel, NOTE, 7, [b"one ", b"frame"])
        b.hub.send("a", channel, NOTE, 8, [])
    c.net.run(1)
    assert b.got == [("a", channel, 7, b"one frame") for channel in Channel]
    assert a.got == [("b", channel, 8, b"") for channel in Channel]
    assert c.got == []


def test_entries_are_dialled_after_heartbeats_and_fall_with_them() -> None:
    net = SimNet()
    a, b, _ = cluster(net)
    accepted = b.hub._accepted
    accepted["a", Channel.CONTROL].fail("for the test")
    net.run_until(lambda: not a.reaches("b"))
    assert not a.hub.send("b", Channel.APPEND, NOTE, 1, [b"x"])
    net.run_until(lambda: a.reaches("b"))
    assert a.changes.count(("b", False)) == 1
    assert a.hub.counters.dropped[Channel.APPEND] == 1
    net.run_until(lambda: a.hub.send("b", Channel.BULK, NOTE, 1, [b"x"]))


def test_a_node_that_comes_back_is_found_again() -> None:
    net = SimNet()
    a, _, c = cluster(net)
    net.crash("b")
    net.run_until(lambda: not a.reaches("b") and not c.reaches("b"))
    b = Peer(net, "b")
    b.node = replace(b.node, boots=2, process=999)
    b.start()
    net.run_until(lambda: a.reaches("b") and c.reaches("b") and b.reaches("a", "c"))


def test_a_cut_in_one_direction_leaves_the_other() -> None:
    net = SimNet()
    a, b, _ = cluster(net)
    net.set_cut("a", "b", True)
    a.hub.send("b", Channel.CONTROL, NOTE, 1, [b"lost for now"])
    b.hub.send("a", Channel.CONTROL, NOTE, 1, [b"heard"])
    net.run(5)
    assert a.got
    assert not b.got
    net.set_cut("a", "b", False)
    net.run(1)
    assert [body for *_, body in b.got] == [b"lost for now"]


def test_the_newest_known_start_is_required_also_of_a_node_that_was_never_seen() -> None:
    net = SimNet()
    a = Peer(net, "a").start()
    a.hub.require("b", 1, 5, 50)
    b, c = Peer(net, "b"), Peer(net, "c").start()
    b.node = replace(b.node, boots=4, process=40)  # a folder that was set back
    with capture_logs() as logs:
        b.start()
        net.run(2)
    assert not a.reaches("b")
    assert c.reaches("a", "b")
    told = "another process with start 5 is known: is its folder a copy?"
    assert any(told in one for one in reasons(logs, "peer_refused"))


# Bounds ------------------------------------------------------------------------------------------
def test_what_a_peer_does_not_take_is_dropped_at_the_limit_and_counted() -> None:
    net = SimNet()
    a, b, _ = cluster(net)
    net.set_cut("a", "b", True)
    body = bytes((64 << 10) - HEAD_BYTES)
    sent = sum(a.hub.send("b", Channel.CONTROL, NOTE, 1, [body]) for _ in range(20))
    assert sent == 16  # of 64 KiB with the head, within 1 MiB
    assert a.hub.counters.dropped[Channel.CONTROL] == 4
    assert a.hub.unsent("b", Channel.CONTROL) == 1 << 20
    net.run(1)
    assert not a.hub.send("b", Channel.CONTROL, NOTE, 1, [])
    net.set_cut("a", "b", False)
    net.run(1)
    assert len(b.got) == 16
    assert a.hub.unsent("b", Channel.CONTROL) == 0


def test_a_large_frame_is_written_in_slices() -> None:
    net = SimNet()
    a, b, _ = cluster(net)
    body = net.random.randbytes(BODY_BYTES_MAX[Channel.APPEND])
    assert a.hub.send("b", Channel.APPEND, NOTE, 1, [body[:100], body[100:]])
    net.run(1)
    assert [got for *_, got in b.got] == [body]
    assert {wire.largest_write for wire in net.wires if wire.node == "a"} >= {SLICE_BYTES}
    assert max(wire.largest_write for wire in net.wires) == SLICE_BYTES


@pytest.mark.parametrize("channel", list(Channel))
def test_a_frame_above_the_limit_ends_the_connection_unread(channel: Channel) -> None:
    net = SimNet()
    a, b, _ = cluster(net)
    a.hub.send("b", channel, NOTE, 1, [bytes(BODY_BYTES_MAX[channel] + 1)])
    net.run_until(lambda: not a.hub.connected("b", channel))
    # Without the channel for bulk data, the messages of groups go on.
    assert a.reaches("b") is (channel is Channel.BULK)
    assert b.got == []
    net.run_until(lambda: a.hub.send("b", channel, NOTE, 1, []) and a.reaches("b"))


def test_frames_that_nobody_knows_end_the_connection() -> None:
    net = SimNet()
    a, b, _ = cluster(net)
    a.hub.send("b", Channel.CONTROL, NOTE + 9, 1, [])
    net.run_until(lambda: not a.reaches("b"))
    assert b.got == []


# Who is let in -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        pytest.param(
            {"cluster_id": OTHER_CLUSTER},
            f"b belongs to cluster {OTHER_CLUSTER.hex()}, and a to {CLUSTER.hex()}",
            id="of another cluster",
        ),
        pytest.param(
            {"name": "z"}, "z is not one of the nodes that a knows", id="with another name"
        ),
    ],
)
def test_others_are_refused_in_one_sentence(changes: dict[str, object], sentence: str) -> None:
    with capture_logs() as logs:
        a, b = pair(SimNet(), **changes)
    assert not a.reaches("b")
    assert not b.reaches("a")
    assert sentence in reasons(logs, "peer_refused")
    # Its operator sees the sentence as well.
    assert f"a: {sentence}" in reasons(logs, "peer_not_trusted")


def test_another_secret_is_refused_and_logged_once_a_minute() -> None:
    net = SimNet()
    b = Peer(net, "b", keys=(OTHER_KEY,))
    with capture_logs() as logs:
        a = Peer(net, "a").start()
        b.start()
        net.run(50)
    assert not a.links
    assert not b.links
    assert a.hub.counters.refused > 5
    found = [line for line in logs if line["event"] == "peer_refused" and line["address"] == "b"]
    assert [line["reason"] for line in found] == ["it has a different cluster secret"]


def test_secrets_are_changed_one_node_after_the_other() -> None:
    net = SimNet()
    peers = cluster(net)
    for keys in [(OTHER_KEY, KEY), (OTHER_KEY,)]:
        for peer in peers:
            peer.keys = keys
            for connection in list(peer.hub._accepted.values()):
                connection.fail("for the test")
            net.run_until(
                lambda: not all(one.reaches(*set(NAMES) - {one.node.name}) for one in peers)
            )
            net.run_until(lambda: all(one.reaches(*set(NAMES) - {one.node.name}) for one in peers))


def test_an_old_incarnation_is_closed_and_refused() -> None:
    net = SimNet()
    a, b, c = cluster(net)
    with capture_logs() as logs:
        a.hub.require("b", 2)
        net.run(5)
    assert not a.reaches("b")
    assert not b.reaches("a")
    assert c.reaches("b")
    sentence = "b came with incarnation 1, but 2 is known"
    assert sentence in reasons(logs, "peer_refused")
    b.hub.become(replace(b.node, incarnation=2))
    net.run_until(lambda: a.reaches("b") and b.reaches("a"))


def test_a_copy_of_a_node_is_refused() -> None:
    net = SimNet()
    a, b, _ = cluster(net)
    with capture_logs() as logs:
        copy = Peer(net, "b")
        copy.node = replace(b.node, process=77)
        copy.start()
        net.run(5)
    assert not copy.links
    assert any("is its folder a copy?" in reason for reason in reasons(logs, "peer_refused"))
    assert a.hub._accepted["b", Channel.CONTROL].peer.process == b.node.process  # type: ignore[union-attr]


def test_a_node_that_lost_its_disk_is_heard_once_its_old_process_is_gone() -> None:
    net = SimNet()
    a, b, _ = cluster(net)
    b.hub.become(replace(b.node, boots=7))
    net.run_until(lambda: a.reaches("b") and b.reaches("a"))
    wiped = Peer(net, "b")
    wiped.node = replace(b.node, cluster_id=NO_CLUSTER, incarnation=0, boots=1, process=5)
    with capture_logs() as logs:
        wiped.start()
        net.run(2)
    sentence = "b is connected already, and its folder is not empty"
    assert sentence in reasons(logs, "peer_refused")
    b.hub.stop()
    # Both processes of this test have one name, which the crash of the first one would end.
    wiped.hub.send("a", Channel.CONTROL, EARLY, 0, [b"too soon"])
    net.run_until(lambda: wiped.hub.send("a", Channel.CONTROL, EARLY, 0, [b"I lost my disk"]), 20)
    net.run(1)
    assert a.got[-1] == ("b", Channel.CONTROL, 0, b"I lost my disk")
    assert not a.reaches("b")


def test_before_the_cluster_is_formed_only_its_formation_is_spoken_of() -> None:
    net = SimNet()
    a, b = pair(net, cluster_id=NO_CLUSTER)
    assert not a.links
    assert not b.links
    b.hub.send("a", Channel.CONTROL, EARLY, 0, [b"hello"])
    a.hub.send("b", Channel.CONTROL, EARLY, 0, [b"hello"])
    net.run(1)
    assert a.got
    assert b.got
    b.hub.send("a", Channel.CONTROL, NOTE, 0, [b"too early"])
    net.run(1)
    assert len(a.got) == 1
    b.hub.become(replace(b.node, cluster_id=CLUSTER))
    net.run_until(lambda: a.reaches("b") and b.reaches("a"))


def test_a_node_behind_another_address_is_not_taken_for_the_right_one() -> None:
    net = SimNet()
    a, c = Peer(net, "a"), Peer(net, "c")
    c.start()
    net.listening["b"] = c.hub.accept
    with capture_logs() as logs:
        a.start()
        net.run(1)
    assert "b was dialled, but this is c" in reasons(logs, "peer_refused")
    assert not a.links.get("b")


# Strangers ---------------------------------------------------------------------------------------
class Stranger:
    """Connects to a node and sends what it likes."""

    def __init__(self, net: SimNet, target: str, data: bytes = b"") -> None:
        self.data = data
        self.got = b""
        self.ended = False
        self.wire: Wire = net.port("x").dial(target, target, self)

    def wire_open(self) -> None:
        if self.data:
            self.wire.write(self.data)

    def wire_bytes(self, data: object) -> None:
        self.got += bytes(data)  # type: ignore[call-overload]

    def wire_drained(self) -> None:
        return

    def wire_closed(self, reason: str) -> None:
        self.ended = True


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        b"\x16\x03\x01",
        b"CTRLPR\x00\x01" + bytes(300),
        b"CTRLPR\x00\x01" + bytes(32) + b"\xff\xff",
        b"CTRLPR\x00\x01" + bytes(32) + b"\x05\x00" + bytes(5) + b"\x03" + bytes(96),
        b"CTRLPR\x00\x01" + bytes(32) + b"\x05\x00" + bytes(5) + b"\x01" + bytes(32),
    ],
)
def test_a_stranger_is_turned_away_at_once(data: bytes) -> None:
    net = SimNet()
    a = Peer(net, "a").start()
    stranger = Stranger(net, "a", data)
    net.run_until(lambda: stranger.ended, 0.1)
    assert a.hub.counters.refused == 1
    assert not a.got


def test_a_silent_stranger_is_turned_away_after_five_seconds() -> None:
    net = SimNet()
    a = Peer(net, "a").start()
    stranger = Stranger(net, "a", b"CTRLPR\x00\x01")
    net.run(4.9)
    assert not stranger.ended
    net.run(0.2)
    assert stranger.ended
    assert not a.hub._unproven


def test_strangers_cannot_keep_nodes_out() -> None:
    net = SimNet()
    a = Peer(net, "a").start()
    strangers = [Stranger(net, "a") for _ in range(UNPROVEN_MAX + 10)]
    net.run(0.01)
    assert [one.ended for one in strangers] == [True] * 10 + [False] * UNPROVEN_MAX
    b = Peer(net, "b").start()
    net.run_until(lambda: b.reaches("a"), 1.0)
    assert len(a.hub._unproven) <= UNPROVEN_MAX


def test_a_replayed_handshake_proves_nothing() -> None:
    net = SimNet()
    a = Peer(net, "a").start()
    said: list[bytes] = []
    write = type(net.port("b").dial("nowhere", "a", Stranger(net, "nowhere"))).write

    def overhear(wire: object, data: bytes) -> None:
        if wire.node == "b" and wire.remote == "a":  # type: ignore[attr-defined]
            said.append(bytes(data))
        write(wire, data)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.unit.replicator.peers.net_rig.SimWire.write", overhear)
        b = Peer(net, "b").start()
        net.run_until(lambda: b.reaches("a"))
        b.hub.send("a", Channel.CONTROL, NOTE, 1, [b"once"])
        net.run(1)
    net.crash("b")
    refused, got = a.hub.counters.refused, list(a.got)
    assert got
    replaying = Stranger(net, "a", said[0] + b"".join(said[1:]))
    net.run_until(lambda: replaying.ended, 1.0)
    assert a.hub.counters.refused == refused + 1
    assert a.got == got


def test_a_man_in_the_middle_with_the_right_bytes_and_a_wrong_certificate_fails() -> None:
    net = SimNet()
    net.certificate["a"] = b"A" * 32
    Peer(net, "a").start()
    b = Peer(net, "b")
    # B sees the certificate of the man in the middle, who passes everything on to A.
    port = net.port("b")
    dial = port.dial

    def intercepted(address: str, name: str, user: object) -> object:
        wire = dial(address, name, user)  # type: ignore[arg-type]
        opened = user.wire_open  # type: ignore[attr-defined]

        def wire_open() -> None:
            wire.certificate = b"M" * 32
            opened()

        user.wire_open = wire_open  # type: ignore[attr-defined]
        return wire

    port.dial = intercepted  # type: ignore[method-assign,assignment]
    b.hub = PeerHub(port, b.node, {"a": "a"}, lambda: b.keys)
    b.hub.on_link = b.note_link
    with capture_logs() as logs:
        b.hub.start()
        net.run(1)
    assert not b.links
    assert reasons(logs, "peer_refused") == {"it has a different cluster secret"}


def test_a_half_frame_changes_nothing() -> None:
    net = SimNet()
    a, b, _ = cluster(net)
    whole = b"".join(frame(NOTE, 1, [b"x" * 100]))
    outbox = a.hub._dialled["b", Channel.CONTROL].outbox
    assert outbox is not None
    outbox.send([whole[:-1]])
    net.run(1)
    net.crash("a")
    net.run(1)
    assert b.got == []
    assert ("a", Channel.CONTROL) not in b.hub._accepted
