"""A cluster in memory: logs that sync when told, links that lose, a clock that is set."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from contrail_replicator import CommittedEntry, GroupEndpoint, LogEntry, Message, RaftGroup
from contrail_replicator.messages import RESTORING, Heartbeat

GROUP = 1
TICK_S = 0.025
LEASE_S = 0.3
STALENESS_SLACK_S = 0.7
"""A leader that was cut off may believe in itself for 0.6 s, and messages take their time. What is
overtaken here by later messages may take longer; see `SimNode.late_s`."""


@dataclass
class Held:
    """The durable log of a group."""

    term: int = 0
    voted_for: str | None = None
    flags: int = 0
    base_index: int = 0
    base_term: int = 0
    entries: list[LogEntry] = field(default_factory=list)

    def last_index(self) -> int:
        return self.base_index + len(self.entries)

    def cut(self, from_index: int) -> None:
        del self.entries[from_index - self.base_index - 1 :]

    def term_at(self, index: int) -> int | None:
        if index == self.base_index:
            return self.base_term
        at = index - self.base_index - 1
        return self.entries[at][2] if 0 <= at < len(self.entries) else None


class SimLog:
    """A node's log for one group. Nothing is durable before `sync`."""

    def __init__(self, flags: int = 0) -> None:
        self.durable = Held(flags=flags)
        self.has_space = True
        self.reads: list[Callable[[], None]] = []  # of the disk, that wait for their turn
        self._pending: list[Callable[[Held], None]] = []
        self._position = 0
        self._on_durable: Callable[[int, int], None] | None = None

    def attach(self, group: int, on_durable: Callable[[int, int], None]) -> Held:
        assert group == GROUP
        self._on_durable = on_durable
        return copy.deepcopy(self.durable)

    def detach(self, group: int) -> None:
        self._on_durable = None

    def has_capacity(self, size: int) -> bool:
        return self.has_space

    def append(self, group: int, index: int, term: int, data: bytes) -> int:
        if data and not self.has_space:
            raise BlockingIOError("the queue is full")

        def change(held: Held) -> None:
            assert index == held.last_index() + 1
            held.entries.append((data, index, term))

        return self._put(change)

    def truncate(self, group: int, from_index: int, last_term: int) -> int:
        return self._put(lambda held: held.cut(from_index))

    def save_hard_state(self, group: int, term: int, voted_for: str | None) -> int:
        def change(held: Held) -> None:
            held.term, held.voted_for = term, voted_for

        return self._put(change)

    def flags(self, group: int) -> int:
        return self.durable.flags

    def save_flags(self, group: int, flags: int) -> int:
        def change(held: Held) -> None:
            held.flags = flags

        return self._put(change)

    def reset(self, group: int, index: int, term: int) -> int:
        def change(held: Held) -> None:
            held.base_index, held.base_term, held.entries = index, term, []

        return self._put(change)

    def term_at(self, group: int, index: int) -> int | None:
        return self.durable.term_at(index)

    def read(
        self,
        group: int,
        from_index: int,
        max_bytes: int,
        on_read: Callable[[Sequence[LogEntry]], None],
    ) -> None:
        at = from_index - self.durable.base_index - 1
        entries = self.durable.entries[at : at + 5] if at >= 0 else []
        self.reads.append(lambda: on_read(entries))

    def forget_below(self, index: int) -> None:
        """Drop the entries up to `index` from the disk."""
        held = self.durable
        term = held.term_at(index)
        assert term is not None
        held.entries = held.entries[index - held.base_index :]
        held.base_index, held.base_term = index, term

    def read_all(self) -> None:
        reads, self.reads = self.reads, []
        for read in reads:
            read()

    def sync(self, count: int | None = None) -> None:
        """Make the first `count` waiting records durable, or all."""
        changes = self._pending[:count]
        del self._pending[:count]
        for change in changes:
            change(self.durable)
        if changes and self._on_durable is not None:
            self._on_durable(self._position - len(self._pending), self.durable.last_index())

    def lose_unsynced(self) -> None:
        self._pending.clear()
        self.reads.clear()
        self._position = 0
        self._on_durable = None

    @property
    def waiting(self) -> int:
        return len(self._pending)

    def _put(self, change: Callable[[Held], None]) -> int:
        self._pending.append(change)
        self._position += 1
        return self._position


class SimNode:
    """One member with its log and its store (what it applied, in order)."""

    def __init__(self, cluster: "Cluster", name: str) -> None:
        self.cluster = cluster
        self.name = name
        self.log = SimLog()
        self.store: list[CommittedEntry] = []
        self.acked: list[object] = []
        self.lost: list[object] = []
        self.replaced: list[object] = []
        self.roles: list[bool] = []
        self.needy: list[str] = []  # peers that need a snapshot
        self.up = False
        self.paused = False
        self.inbox: list[tuple[str, Message]] = []  # what arrived while paused
        self.late_s = 0.0  # how long a heartbeat was on its way at most
        self.takes = True  # whether the owner takes the next entry at once
        self.then: Callable[[], None] = lambda: None  # called after each commit, as an owner may
        self.group: RaftGroup
        self.endpoint: GroupEndpoint

    @property
    def runs(self) -> bool:
        return self.up and not self.paused

    def boot(self) -> None:
        peers = [name for name in self.cluster.names if name != self.name]
        self.group = RaftGroup(
            group_id=GROUP,
            node_id=self.name,
            peers=peers,
            log=self.log,
            transport=self,
            applied_index=len(self.store),
            on_commit=self._commit,
            on_role=self.roles.append,
            on_lost=self.lost.extend,
            on_replaced=self.replaced.extend,
            on_needs_snapshot=self.needy.append,
            member_log=self.log,
            is_sound=lambda data: b"damaged" not in data,
            clock=lambda: self.cluster.now,
        )
        self.up = True
        for peer in peers:
            self.group.link_changed(peer, True)
            if self.cluster.nodes[peer].up:
                self.cluster.nodes[peer].group.link_changed(self.name, True)
        self.group.start()

    def crash(self, flushed: int | None = None) -> None:
        """Lose what is not synced; the store keeps its first `flushed` entries, or all."""
        self.up = self.paused = False
        self.inbox.clear()
        self.log.lose_unsynced()
        if flushed is not None:
            # A base stands for a snapshot, whose state is durable.
            del self.store[max(flushed, self.log.durable.base_index) :]

    def wipe(self) -> None:
        """Lose the disk, and start again as a new incarnation, whose flag the cluster has set."""
        self.crash()
        self.log, self.store = SimLog(RESTORING), []
        mail = self.cluster.mail
        self.cluster.mail = [each for each in mail if self.name not in each[:2]]
        for node in self.cluster.nodes.values():
            node.inbox = [each for each in node.inbox if each[0] != self.name]
        self.boot()

    def pause(self) -> None:
        """Stop the process; what arrives waits in its sockets."""
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        waiting = [(source, self.name, message) for source, message in self.inbox]
        self.cluster.note_beats(waiting)
        self.cluster.mail[:0] = waiting
        self.inbox.clear()

    def install(self, source: "SimNode") -> bool:
        """Take the state of another member, as after a fetched snapshot."""
        index = source.group.applied_index
        self.store[:] = source.store[:index]
        return self.group.install(index, source.store[index - 1].term)

    def attach(self, group: int, endpoint: GroupEndpoint) -> None:
        self.endpoint = endpoint

    def detach(self, group: int) -> None:
        return

    def send(self, group: int, peer: str, message: Message) -> None:
        self.cluster.post(self.name, peer, message)

    def read(self) -> list[bool]:
        """Ask for a read; the list gets its answer, and the state must then be recent."""
        answers: list[bool] = []
        floor = self.cluster.acked[-1][1] if self.cluster.acked else 0

        def done(may: bool) -> None:
            answers.append(may)
            if may:
                assert self.group.applied_index >= floor, "a read has missed an acknowledged entry"

        self.group.read_index(done)
        return answers

    def check_lease(self) -> None:
        """With a soft lease, a leader has everything that was acknowledged before it began."""
        if self.group.is_leader and self.group.heard_majority_within(LEASE_S):
            since = self.cluster.now - LEASE_S
            known = [index for time, index in self.cluster.acked if time < since]
            assert self.group.commit_index >= max(known, default=0), "a lease has outlived its term"

    def check_staleness(self) -> None:
        """A member has applied what was acknowledged before the time that it says it is behind."""
        since = self.cluster.now - self.group.staleness_s() - STALENESS_SLACK_S - self.late_s
        known = [index for time, index in self.cluster.acked if time < since]
        assert self.group.applied_index >= max(known, default=0), "a member is staler than it says"

    def _commit(self, entry: CommittedEntry) -> bool:
        assert entry.index == len(self.store) + 1
        assert entry.index <= self.log.durable.last_index()
        self.cluster.check_chosen(entry)
        self.store.append(entry)
        if entry.context is not None:
            self.acked.append(entry.context)
            newest = self.cluster.acked[-1][1] if self.cluster.acked else 0
            if entry.index > newest:
                self.cluster.acked.append((self.cluster.now, entry.index))
        self.then()
        return self.takes


class Cluster:
    """Members, the messages between them, and the entry chosen at each index so far."""

    def __init__(self, names: str = "abc") -> None:
        self.names = list(names)
        self.now = 0.0
        self.mail: list[tuple[str, str, Message]] = []
        self.cut: set[tuple[str, str]] = set()  # directed: from, to
        self.chosen: dict[int, tuple[int, bytes]] = {}
        self.acked: list[tuple[float, int]] = []  # (time, index) of answers to clients
        # When heartbeats on their way began it: (from, to, term, round).
        self.beats: dict[tuple[str, str, int, int], float] = {}
        self.led: dict[int, str] = {}  # the leader of each term
        self.nodes = {name: SimNode(self, name) for name in names}
        for node in self.nodes.values():
            node.boot()

    def __getitem__(self, name: str) -> SimNode:
        return self.nodes[name]

    def check_chosen(self, entry: CommittedEntry) -> None:
        found = self.chosen.setdefault(entry.index, (entry.term, entry.data))
        assert found == (entry.term, entry.data), f"two entries committed at {entry.index}"

    def check_leaders(self) -> None:
        for node in self.nodes.values():
            term = node.group._core.led_term() if node.up else 0
            if term:
                assert self.led.setdefault(term, node.name) == node.name, "two leaders of one term"

    def post(self, source: str, target: str, message: Message) -> None:
        if (source, target) not in self.cut and self.nodes[target].up:
            self.note_beats([(source, target, message)])
            self.mail.append((source, target, message))

    def note_beats(self, mail: list[tuple[str, str, Message]]) -> None:
        """Note when heartbeats begin their way, or wait in sockets that are read again."""
        for source, target, message in mail:
            if isinstance(message, Heartbeat):
                self.beats[source, target, message.term, message.round] = self.now

    def deliver(self, position: int = 0) -> None:
        source, target, message = self.mail.pop(position)
        node = self.nodes[target]
        if isinstance(message, Heartbeat):
            sent = self.beats.pop((source, target, message.term, message.round), self.now)
            node.late_s = max(node.late_s, self.now - sent)
        if node.paused:
            node.inbox.append((source, message))
        elif node.up:
            node.endpoint.receive(source, message)

    def isolate(self, name: str) -> None:
        for other in self.names:
            self.cut_link(name, other)
            self.cut_link(other, name)

    def cut_link(self, source: str, target: str) -> None:
        """Lose everything that one member sends to another."""
        self.cut.add((source, target))
        self.mail = [mail for mail in self.mail if mail[:2] != (source, target)]

    def heal(self) -> None:
        """Let messages pass again, over new connections."""
        healed, self.cut = self.cut, set()
        for source, target in sorted(healed):
            if source != target and self.nodes[source].up:
                self.nodes[source].group.link_changed(target, True)

    def sync_all(self) -> None:
        for node in self.nodes.values():
            if node.runs:
                node.log.sync()
                node.log.read_all()

    def settle(self, rounds: int = 200) -> None:
        """Sync and deliver until nothing moves."""
        for _ in range(rounds):
            self.sync_all()
            if not self.mail and not any(one.runs and one.log.reads for one in self.nodes.values()):
                return
            while self.mail:
                self.deliver()
        raise AssertionError("messages never end")

    def tick(self, seconds: float = TICK_S) -> None:
        """Let time pass, and call the timers once."""
        self.now += seconds
        for node in self.nodes.values():
            if node.runs:
                node.group.tick()
        self.check_leaders()

    def run(self, seconds: float) -> None:
        """Let time pass with everything working."""
        end = self.now + seconds
        while self.now < end:
            self.tick()
            self.settle()
            self.check_leaders()

    def elect(self, name: str) -> SimNode:
        """Make a member the leader, the others willing."""
        node = self.nodes[name]
        for other in self.leaders():
            if (name, other.name) not in self.cut:
                other.group.resign()
        self.now += 0.3  # nobody has heard a leader lately
        node.group._core.campaign()
        node.group.tick()
        self.settle()
        if not node.group.is_leader:
            self.run(0.9)  # another member has to be brought up first
        assert node.group.is_leader
        return node

    def leaders(self) -> list[SimNode]:
        return [node for node in self.nodes.values() if node.runs and node.group.is_leader]
