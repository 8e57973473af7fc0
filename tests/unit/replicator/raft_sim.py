"""A cluster in memory: logs that sync when told, links that lose, a clock that is set."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from contrail_replicator import CommittedEntry, GroupEndpoint, LogEntry, Message, RaftGroup

GROUP = 1


@dataclass
class Held:
    """The durable log of a group."""

    term: int = 0
    voted_for: str | None = None
    base_index: int = 0
    base_term: int = 0
    entries: list[LogEntry] = field(default_factory=list)

    def last_index(self) -> int:
        return self.base_index + len(self.entries)

    def cut(self, from_index: int) -> None:
        del self.entries[from_index - self.base_index - 1 :]


class SimLog:
    """A node's log for one group. Nothing is durable before `sync`."""

    def __init__(self) -> None:
        self.durable = Held()
        self.has_space = True
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
        self.roles: list[bool] = []
        self.up = False
        self.then: Callable[[], None] = lambda: None  # called after each commit, as an owner may
        self.group: RaftGroup
        self.endpoint: GroupEndpoint

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
            clock=lambda: self.cluster.now,
        )
        self.up = True
        for peer in peers:
            self.group.link_changed(peer, True)
        self.group.start()

    def crash(self, flushed: int | None = None) -> None:
        """Lose what is not synced; the store keeps its first `flushed` entries, or all."""
        self.up = False
        self.log.lose_unsynced()
        if flushed is not None:
            del self.store[flushed:]

    def attach(self, group: int, endpoint: GroupEndpoint) -> None:
        self.endpoint = endpoint

    def detach(self, group: int) -> None:
        return

    def send(self, group: int, peer: str, message: Message) -> None:
        self.cluster.post(self.name, peer, message)

    def _commit(self, entry: CommittedEntry) -> bool:
        assert entry.index == len(self.store) + 1
        assert entry.index <= self.log.durable.last_index()
        self.cluster.check_chosen(entry)
        self.store.append(entry)
        if entry.context is not None:
            self.acked.append(entry.context)
        self.then()
        return True


class Cluster:
    """Members, the messages between them, and the entry chosen at each index so far."""

    def __init__(self, names: str = "abc") -> None:
        self.names = list(names)
        self.now = 0.0
        self.mail: list[tuple[str, str, Message]] = []
        self.cut: set[frozenset[str]] = set()
        self.chosen: dict[int, tuple[int, bytes]] = {}
        self.nodes = {name: SimNode(self, name) for name in names}
        for node in self.nodes.values():
            node.boot()

    def __getitem__(self, name: str) -> SimNode:
        return self.nodes[name]

    def check_chosen(self, entry: CommittedEntry) -> None:
        found = self.chosen.setdefault(entry.index, (entry.term, entry.data))
        assert found == (entry.term, entry.data), f"two entries committed at {entry.index}"

    def post(self, source: str, target: str, message: Message) -> None:
        if frozenset((source, target)) not in self.cut and self.nodes[target].up:
            self.mail.append((source, target, copy.deepcopy(message)))

    def deliver(self, position: int = 0) -> None:
        source, target, message = self.mail.pop(position)
        if self.nodes[target].up:
            self.nodes[target].endpoint.receive(source, message)

    def isolate(self, name: str) -> None:
        self.cut |= {frozenset((name, other)) for other in self.names if other != name}
        self.mail = [mail for mail in self.mail if name not in mail[:2]]

    def heal(self) -> None:
        self.cut.clear()

    def sync_all(self) -> None:
        for node in self.nodes.values():
            if node.up:
                node.log.sync()

    def settle(self, rounds: int = 200) -> None:
        """Sync and deliver until nothing moves."""
        for _ in range(rounds):
            self.sync_all()
            if not self.mail:
                return
            while self.mail:
                self.deliver()
        raise AssertionError("messages never end")

    def run(self, seconds: float, step: float = 0.05) -> None:
        """Let time pass with everything working."""
        end = self.now + seconds
        while self.now < end:
            self.now += step
            for node in self.nodes.values():
                if node.up:
                    node.group.tick()
            self.settle()

    def elect(self, name: str) -> SimNode:
        """Make a member the leader, the others willing."""
        node = self.nodes[name]
        for other in self.leaders():
            if frozenset((name, other.name)) not in self.cut:
                other.group.resign()
        node.group._core.campaign()
        node.group.tick()
        self.settle()
        if not node.group.is_leader:
            self.run(0.9)  # another member has to be brought up first
        assert node.group.is_leader
        return node

    def leaders(self) -> list[SimNode]:
        return [node for node in self.nodes.values() if node.up and node.group.is_leader]


class Chaos:
    """Random faults from one seed. At the end all is healed and the promises are checked."""

    def __init__(self, seed: int, names: str = "abc") -> None:
        self.random = Random(seed)
        self.cluster = Cluster(names)
        self.proposed = 0

    def run(self, steps: int) -> None:
        actions = [
            (60, self._deliver),
            (25, self._sync),
            (25, self._propose),
            (30, self._pass_time),
            (3, self._drop),
            (3, self._double),
            (2, self._crash),
            (8, self._boot),
            (2, self._isolate),
            (6, self.cluster.heal),
        ]
        weights, calls = zip(*actions, strict=True)
        for action in self.random.choices(calls, weights, k=steps):
            action()
        self._recover()

    def check(self) -> int:
        """Assert that every acknowledged proposal is in every store; return their number."""
        stores = [[entry.data for entry in node.store] for node in self.cluster.nodes.values()]
        assert all(store == stores[0] for store in stores)
        acked = {context for node in self.cluster.nodes.values() for context in node.acked}
        missing = acked - {data.decode() for data in stores[0] if data}
        assert not missing, f"acknowledged and lost: {sorted(map(str, missing))}"
        return len(acked)

    def _recover(self) -> None:
        self.cluster.heal()
        for node in self.cluster.nodes.values():
            if not node.up:
                node.boot()
        self.cluster.run(12.0)
        assert len(self.cluster.leaders()) == 1
        leader = self.cluster.leaders()[0]
        leader.group.propose(b"end", "end")
        self.cluster.run(3.0)

    def _deliver(self) -> None:
        for _ in range(self.random.randint(1, 6)):
            if self.cluster.mail:
                near = min(len(self.cluster.mail), 12)
                self.cluster.deliver(self.random.randrange(near))

    def _sync(self) -> None:
        node = self._any()
        if node.up and node.log.waiting:
            node.log.sync(self.random.randint(1, node.log.waiting))

    def _propose(self) -> None:
        for node in self.cluster.leaders():
            self.proposed += 1
            text = f"p{self.proposed}"
            node.group.propose(text.encode(), text)

    def _pass_time(self) -> None:
        self.cluster.now += self.random.uniform(0.0, 0.15)
        for node in self.cluster.nodes.values():
            if node.up:
                node.group.tick()

    def _drop(self) -> None:
        if self.cluster.mail:
            self.cluster.mail.pop(self.random.randrange(len(self.cluster.mail)))

    def _double(self) -> None:
        if self.cluster.mail:
            self.cluster.mail.append(copy.deepcopy(self.random.choice(self.cluster.mail)))

    def _crash(self) -> None:
        node = self._any()
        if node.up:
            keep = max(0, len(node.store) - self.random.randint(0, 20))
            node.crash(keep)

    def _boot(self) -> None:
        node = self._any()
        if not node.up:
            node.boot()

    def _isolate(self) -> None:
        self.cluster.isolate(self._any().name)

    def _any(self) -> SimNode:
        return self.random.choice(list(self.cluster.nodes.values()))
