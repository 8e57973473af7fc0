"""Raft groups over the connections between nodes, on a network in memory."""

from collections.abc import Iterator, Sequence
from contextlib import suppress

import pytest
from structlog.testing import capture_logs

from contrail_replicator import CommittedEntry, GroupBusyError, NotLeaderError, RaftGroup
from contrail_replicator.group import TERM_LEAP_MAX
from contrail_replicator.messages import (
    Append,
    Heartbeat,
    Message,
    PreVote,
    Reply,
    RequestVote,
    VoteReply,
)
from tests.unit.replicator.peers.host_rig import NAMES, Host
from tests.unit.replicator.peers.net_rig import SimNet
from tests.unit.replicator.raft_sim import GROUP, TICK_S, SimLog

SYNC_S = 0.002


class Member(Host):
    """A node with one Raft group, whose log is synced after a short time."""

    def __init__(self, net: SimNet, name: str) -> None:
        super().__init__(net, name)
        self.log = SimLog()
        self.applied: list[bytes] = []
        self.acked: list[object] = []
        self.unsure: list[object] = []
        self.group: RaftGroup

    def boot(self, peers: Sequence[str] = NAMES) -> None:
        super().boot()
        self.applied.clear()
        self.group = RaftGroup(
            group_id=GROUP,
            node_id=self.name,
            peers=peers,
            log=self.log,
            transport=self.links,
            applied_index=0,
            on_commit=self.commit,
            on_role=lambda leads: None,
            on_lost=self.unsure.extend,
            member_log=self.log,
            clock=self.port.now,
        )
        self.group.start()
        self.tick()
        self.sync()

    def tick(self) -> None:
        self.port.call_later(TICK_S, self.tick)
        self.group.tick()

    def sync(self) -> None:
        self.port.call_later(SYNC_S, self.sync)
        self.log.read_all()
        self.log.sync()

    def crash(self) -> None:
        self.net.crash(self.name)
        self.log.lose_unsynced()

    def commit(self, entry: CommittedEntry) -> bool:
        if entry.data:
            self.applied.append(entry.data)
        if entry.context is not None:
            self.acked.append(entry.context)
        return True


class Trio:
    """Three members of one group."""

    def __init__(self, seed: int) -> None:
        self.net = SimNet(seed)
        self.members = {name: Member(self.net, name) for name in NAMES}
        for member in self.members.values():
            member.boot()

    def others(self, but: Member) -> list[Member]:
        return [one for one in self.members.values() if one is not but]

    def leader(self, *but: Member, within: float = 5.0) -> Member:
        def found() -> Iterator[Member]:
            return (one for one in self.members.values() if one not in but and one.group.is_leader)

        self.net.run_until(lambda: any(found()), within)
        return next(found())

    def commit(self, data: bytes, *but: Member, within: float = 5.0) -> None:
        leader = self.leader(*but, within=within)
        leader.group.propose(data, data)
        self.net.run_until(lambda: data in leader.acked, within)

    def wait_for_all(self, *data: bytes) -> None:
        members = self.members.values()
        self.net.run_until(lambda: all(one.applied == list(data) for one in members))


SEEDS = pytest.mark.parametrize("seed", range(8))


@SEEDS
def test_a_killed_leader_is_replaced_and_catches_up(seed: int) -> None:
    trio = Trio(seed)
    trio.commit(b"one")
    first = trio.leader()
    first.crash()
    began = trio.net.time
    trio.commit(b"two", first)
    assert trio.net.time - began < 1.5
    first.boot()
    trio.wait_for_all(b"one", b"two")


@SEEDS
def test_a_paused_leader_is_replaced_and_acknowledges_nothing_more(seed: int) -> None:
    trio = Trio(seed)
    trio.commit(b"one")
    paused = trio.leader()
    trio.net.paused.add(paused.name)
    began = trio.net.time
    trio.commit(b"two", paused)
    assert trio.net.time - began < 1.5
    # To itself it still leads, until it reads what it was sent.
    paused.group.propose(b"never", b"never")
    trio.net.resume(paused.name)
    trio.wait_for_all(b"one", b"two")
    assert b"never" not in paused.acked


@SEEDS
@pytest.mark.parametrize("mute", [True, False])
def test_a_leader_cut_off_in_one_direction_is_replaced(seed: int, mute: bool) -> None:
    trio = Trio(seed)
    trio.commit(b"one")
    cut_off = trio.leader()
    for other in trio.others(cut_off):
        ends = (cut_off.name, other.name) if mute else (other.name, cut_off.name)
        trio.net.set_cut(*ends, True)
    began = trio.net.time
    trio.net.run_until(lambda: not cut_off.group.is_leader, 1.5)
    trio.commit(b"two", cut_off)
    assert trio.net.time - began < 2.5
    for other in trio.others(cut_off):
        trio.net.set_cut(cut_off.name, other.name, False)
        trio.net.set_cut(other.name, cut_off.name, False)
    trio.wait_for_all(b"one", b"two")


@SEEDS
def test_a_follower_that_hears_nothing_does_not_disturb(seed: int) -> None:
    trio = Trio(seed)
    trio.commit(b"one")
    leader = trio.leader()
    deaf = trio.others(leader)[0]
    term = leader.group.term
    trio.net.set_cut(leader.name, deaf.name, True)
    trio.net.run(10)
    trio.commit(b"two")
    assert (leader.group.term, leader.group.is_leader) == (term, True)
    trio.net.set_cut(leader.name, deaf.name, False)
    trio.wait_for_all(b"one", b"two")


def test_a_lost_connection_costs_no_election() -> None:
    trio = Trio(0)
    trio.commit(b"one")
    leader = trio.leader()
    term = leader.group.term
    for member in trio.members.values():
        for connection in list(member.hub._accepted.values()):
            connection.fail("for the test")
    trio.net.run(2)
    trio.commit(b"two")
    trio.wait_for_all(b"one", b"two")
    assert leader.group.term == term


def test_a_large_entry_reaches_all() -> None:
    trio = Trio(0)
    data = trio.net.random.randbytes(4 << 20)
    trio.commit(data)
    trio.wait_for_all(data)


class Storm:
    """Random crashes, cuts and pauses, while entries are proposed to whoever leads."""

    def __init__(self, seed: int) -> None:
        self.trio = Trio(seed)
        self.net = self.trio.net
        self.down: set[Member] = set()
        self.proposed = 0
        self.acked: set[object] = set()
        self.leaders: dict[int, str] = {}

    def propose(self) -> None:
        for member in self.trio.members.values():
            if member in self.down or member.name in self.net.paused:
                continue
            if member.group.is_leader:
                led_by = self.leaders.setdefault(member.group.term, member.name)
                assert led_by == member.name, "two leaders in one term"
                self.proposed += 1
                data = b"%d" % self.proposed
                with suppress(GroupBusyError, NotLeaderError):
                    member.group.propose(data, data)

    def disturb(self) -> None:
        random, members = self.net.random, list(self.trio.members.values())
        victim, other = random.sample(members, 2)
        match random.randrange(4):
            case 0 if victim not in self.down and victim.name not in self.net.paused:
                self.acked.update(victim.acked)
                victim.acked.clear()
                victim.crash()
                self.down.add(victim)
            case 1 if victim in self.down:
                self.down.remove(victim)
                victim.boot()
            case 2:
                ends = victim.name, other.name
                self.net.set_cut(*ends, ends not in self.net.cut)
            case 3 if victim not in self.down and not self.net.paused:
                self.net.paused.add(victim.name)
            case _:
                self.calm_pauses()

    def calm_pauses(self) -> None:
        for name in list(self.net.paused):
            self.net.resume(name)

    def calm(self) -> None:
        self.calm_pauses()
        for ends in list(self.net.cut):
            self.net.set_cut(*ends, False)
        for member in list(self.down):
            member.boot()
        self.down.clear()

    def run(self, seconds: float) -> None:
        end = self.net.time + seconds
        while self.net.time < end:
            self.net.run(self.net.random.uniform(0, 0.3))
            self.propose()
            if self.net.random.random() < 0.3:
                self.disturb()


@pytest.mark.parametrize("seed", range(8))
def test_nothing_acknowledged_is_lost_in_a_storm(seed: int) -> None:
    storm = Storm(seed)
    storm.run(20)
    storm.calm()
    members = list(storm.trio.members.values())
    began = storm.net.time
    storm.trio.commit(b"calm")
    assert storm.net.time - began < 5
    storm.net.run_until(lambda: all(b"calm" in one.applied for one in members))
    storm.net.run(1)
    assert members[0].applied == members[1].applied == members[2].applied
    storm.acked.update(*(one.acked for one in members))
    assert storm.acked <= set(members[0].applied)
    assert len(members[0].applied) == len(set(members[0].applied))
    assert len(storm.acked) > 3


# Lies --------------------------------------------------------------------------------------------
def test_a_peer_that_lies_about_terms_changes_nothing() -> None:
    trio = Trio(0)
    trio.commit(b"one")
    leader = trio.leader()
    term = leader.group.term
    liar = trio.others(leader)[0]
    lie = term + TERM_LEAP_MAX + 1
    lies: list[Message] = [
        PreVote(lie, 1 << 40, lie),
        RequestVote(lie, 1 << 40, lie, True),
        VoteReply(lie, True),
        Heartbeat(lie, 1, 1),
        Append(lie, 1, 0, 0, 1 << 40, ()),
        Reply(lie, 1, True, 1 << 40),
    ]
    with capture_logs() as logs:
        for message in lies:
            liar.links.send(GROUP, leader.name, message)
        trio.net.run(1)
    assert (leader.group.term, leader.group.is_leader) == (term, True)
    # One line for all of them.
    (line,) = [line for line in logs if line["event"] == "peer_message_refused"]
    assert line["reason"] == f"group 1: {liar.name} speaks of term {lie}; it is {term}"
    trio.commit(b"two")
    trio.wait_for_all(b"one", b"two")


def test_a_node_that_is_no_member_has_no_vote() -> None:
    net = SimNet(0)
    members = {name: Member(net, name) for name in ("a", "b")}
    for member in members.values():
        member.boot(peers=("a", "b"))
    stranger = Host(net, "c")
    stranger.boot()
    a, b = members.values()
    net.run_until(lambda: stranger.hub.reaches("a") and (a.group.is_leader or b.group.is_leader))
    term = a.group.term
    with capture_logs() as logs:
        stranger.links.send(GROUP, "a", RequestVote(term + 1, 1 << 40, term, True))
        net.run(1)
    assert a.group.term == term
    assert not a.faults
    assert [line["reason"] for line in logs if line["event"] == "peer_message_refused"] == [
        "group 1: c is not a member"
    ]
