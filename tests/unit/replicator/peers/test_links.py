"""Messages of groups over the connections between nodes, on a network in memory."""

import pytest

from contrail_replicator.messages import Append, Heartbeat, HeartbeatReply, Message, PreVote, Reply
from contrail_replicator.peers.frames import Channel
from contrail_replicator.peers.hub import PeerHub
from tests.unit.replicator.peers.host_rig import NAMES, Host
from tests.unit.replicator.peers.net_rig import SimNet


class Noted:
    """An endpoint that keeps what it gets."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.got: list[tuple[str, Message]] = []
        self.links: list[tuple[str, bool]] = []

    def receive(self, peer: str, message: Message) -> None:
        self.got.append((peer, message))
        if self.error is not None:
            raise self.error

    def link_changed(self, peer: str, connected: bool) -> None:
        self.links.append((peer, connected))


@pytest.fixture
def hosts() -> list[Host]:
    net = SimNet()
    found = [Host(net, name) for name in NAMES]
    for host in found:
        host.boot()
    net.run_until(lambda: all(len(host.hub._up) == 2 for host in found))
    return found


def test_messages_reach_the_group_they_are_for(hosts: list[Host]) -> None:
    a, b, _ = hosts
    here, there, other = Noted(), Noted(), Noted()
    a.links.attach(5, here)
    b.links.attach(5, there)
    b.links.attach(6, other)
    assert here.links == [("b", True), ("c", True)]
    append = Append(1, 2, 3, 4, 5, ((1, b"data"), (1, b"")))
    a.links.send(5, "b", append)
    a.links.send(5, "b", PreVote(1, 2, 3))
    a.links.send(7, "b", PreVote(1, 2, 3))  # b has no such group
    b.links.send(5, "a", Reply(1, 2, True, 3))
    a.net.run(1)
    assert sorted(there.got, key=repr) == [("a", append), ("a", PreVote(1, 2, 3))]
    assert here.got == [("b", Reply(1, 2, True, 3))]
    assert other.got == []


def test_heartbeats_of_all_groups_share_one_frame(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, _ = hosts
    groups = range(100, 164)
    led, followed = [Noted() for _ in groups], [Noted() for _ in groups]
    for group, leader, follower in zip(groups, led, followed, strict=True):
        a.links.attach(group, leader)
        b.links.attach(group, follower)
    sent: list[str] = []
    send = PeerHub.send

    def noted(hub: PeerHub, name: str, *rest: object) -> bool:
        sent.append(hub.node.name)
        return send(hub, name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(PeerHub, "send", noted)
    for group in groups:
        a.links.send(group, "b", Heartbeat(1, 1, 1))
        a.links.send(group, "b", Heartbeat(1, 2, group))  # replaces the one before
    a.net.run(1)
    assert [one.got for one in followed] == [[("a", Heartbeat(1, 2, group))] for group in groups]
    for group in groups:
        b.links.send(group, "a", HeartbeatReply(1, 2, group, 4, 5))
    a.net.run(1)
    assert [one.got for one in led] == [
        [("b", HeartbeatReply(1, 2, group, 4, 5))] for group in groups
    ]
    assert sent == ["a", "b"]
    for one, other in ((a, "b"), (b, "a")):
        assert 0 <= int(a.net.time * 1e9) - one.clock_of[other] < 3e9


def test_a_damaged_group_gets_no_more_and_its_node_learns_of_it(hosts: list[Host]) -> None:
    a, b, _ = hosts
    damaged, sound = Noted(ValueError("it differs")), Noted()
    b.links.attach(5, damaged)
    b.links.attach(6, sound)
    for _ in range(2):
        for group in (5, 6):
            a.links.send(group, "b", PreVote(1, 2, 3))
    a.net.run(1)
    assert b.faults == [(5, "it differs")]
    assert [len(one.got) for one in (damaged, sound)] == [1, 2]
    assert b.hub.reaches("a")


def test_the_end_of_a_link_is_told_to_each_group(hosts: list[Host]) -> None:
    a, b, _ = hosts
    noted = [Noted(), Noted()]
    for group, one in enumerate(noted):
        a.links.attach(group, one)
    b.hub._accepted["a", Channel.APPEND].fail("for the test")
    a.net.run(1)
    assert [one.links[-2:] for one in noted] == [[("b", False), ("b", True)]] * 2
