"""Random faults from one seed, in a cluster in memory."""

from random import Random
from typing import Final

from contrail_replicator import GroupBusyError, library
from contrail_replicator.messages import RESTORING
from tests.unit.replicator.raft_sim import Cluster, SimNode

NEVER = float("-inf")

MEMORY_S = 2.0
"""For how long an answer to a question for a pre-vote may be on its way."""


class Watch:
    """Sees that no election begins while a majority hears a leader, and nobody votes who does."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._missed: dict[str, float] = {}  # when a member last missed a leader
        self._loyal: set[str] = set()  # who has heard one lately, as of the last look
        self._votes: dict[str, tuple[int, str | None]] = {}
        self._candidacies: dict[str, int] = {}  # the term of each member's last one
        self._transfers: set[tuple[int, str | None]] = set()  # those that a leader asked for

    def look(self) -> None:
        """Look at all members after each step."""
        loyal = set()
        for node in self._cluster.nodes.values():
            if not node.up:
                continue
            if node.group._core._elections.is_loyal():
                loyal.add(node.name)
            else:
                self._missed[node.name] = self._cluster.now
            self._check_candidacy(node)
            self._check_vote(node, loyal)
        self._loyal = loyal

    def _check_candidacy(self, node: SimNode) -> None:
        core = node.group._core
        is_candidate = core._SyncObj__raftState == library.CANDIDATE
        if not is_candidate or self._candidacies.get(node.name) == core.term():
            return
        self._candidacies[node.name] = core.term()
        if core._elections.is_transfer:
            self._transfers.add((core.term(), node.name))
            return
        heard_s = core._elections._heard_at - MEMORY_S
        others = [one for one in self._cluster.names if one != node.name]
        support = sum(self._missed.get(one, NEVER) >= heard_s for one in others)
        majority = len(self._cluster.names) // 2 + 1
        assert support + 1 >= majority, "an election without need"

    def _check_vote(self, node: SimNode, loyal: set[str]) -> None:
        journal = node.group._journal
        vote, before = (journal.term, journal.voted_for), self._votes.get(node.name)
        self._votes[node.name] = vote
        other = vote[1] if vote[1] != node.name else None
        if other is None or vote == before or node.name not in self._loyal & loyal:
            return
        assert vote in self._transfers, "a vote against a leader that was heard"


_WEIGHTS: Final[dict[str, float]] = {
    "deliver": 75,
    "sync": 25,
    "propose": 30,
    "pass_time": 30,
    "read": 6,
    "look": 6,
    "drop": 3,
    "double": 3,
    "crash": 0.7,
    "boot": 8,
    "isolate": 0.5,
    "cut": 0.5,
    "heal": 6,
    "pause": 0.5,
    "resume": 5,
    "hand_over": 0.5,
    "wipe": 0.3,
    "trim": 2,
}


class Chaos:
    """Random faults from one seed. At the end all is healed and the promises are checked."""

    def __init__(self, seed: int, names: str = "abc", **weights: float) -> None:
        """``weights``: how often some actions happen, if not as usual."""
        self.random = Random(seed)
        self.cluster = Cluster(names)
        self.proposed = 0
        self.reads: list[list[bool]] = []
        self.watch = Watch(self.cluster)
        self._weights = _WEIGHTS | weights

    def run(self, steps: int) -> None:
        calls = [getattr(self, f"_{name}") for name in self._weights]
        weights = list(self._weights.values())
        for action in self.random.choices(calls, weights, k=steps):
            action()
            self.cluster.check_leaders()
            self.watch.look()
        self._recover()

    def check(self) -> int:
        """Assert that every acknowledged proposal is in every store; return their number."""
        nodes = self.cluster.nodes.values()
        stores = [[entry.data for entry in node.store] for node in nodes]
        assert all(store == stores[0] for store in stores)
        stored = {data.decode() for data in stores[0] if data}
        acked = {context for node in nodes for context in node.acked}
        assert not acked - stored, f"acknowledged and lost: {sorted(map(str, acked - stored))}"
        replaced = {context for node in nodes for context in node.replaced}
        assert not replaced & stored, f"refused and stored: {sorted(map(str, replaced & stored))}"
        assert all(node.group.flags == 0 for node in nodes), "a member was not taken in again"
        assert all(len(answers) <= 1 for answers in self.reads)
        return len(acked)

    def _recover(self) -> None:
        self.cluster.heal()
        for node in self.cluster.nodes.values():
            node.resume()
            if not node.up:
                node.boot()
        self.cluster.run(12.0)
        assert len(self.cluster.leaders()) == 1
        leader = self.cluster.leaders()[0]
        leader.group.propose(b"end", "end")
        reads = leader.read()
        self.cluster.run(1.0)
        assert reads == [True]

    def _deliver(self) -> None:
        for _ in range(self.random.randint(1, 8)):
            if self.cluster.mail:
                near = min(len(self.cluster.mail), 12)
                self.cluster.deliver(self.random.randrange(near))

    def _sync(self) -> None:
        node = self._any()
        if node.runs:
            node.log.read_all()
            if node.log.waiting:
                node.log.sync(self.random.randint(1, node.log.waiting))

    def _propose(self) -> None:
        for node in self.cluster.leaders():
            self.proposed += 1
            text = f"p{self.proposed}"
            try:
                node.group.propose(text.encode(), text)
            except GroupBusyError:
                assert node.group._core.handover is not None

    def _pass_time(self) -> None:
        self.cluster.tick(self.random.uniform(0.0, 0.1))

    def _read(self) -> None:
        for node in self.cluster.leaders():
            self.reads.append(node.read())

    def _look(self) -> None:
        for node in self.cluster.leaders():
            node.check_lease()
        for node in self.cluster.nodes.values():
            if node.runs:
                node.check_staleness()

    def _drop(self) -> None:
        if self.cluster.mail:
            self.cluster.mail.pop(self.random.randrange(len(self.cluster.mail)))

    def _double(self) -> None:
        if self.cluster.mail:
            self.cluster.mail.append(self.random.choice(self.cluster.mail))

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

    def _cut(self) -> None:
        self.cluster.cut_link(self._any().name, self._any().name)

    def _heal(self) -> None:
        self.cluster.heal()

    def _pause(self) -> None:
        node = self._any()
        if node.up:
            node.pause()

    def _resume(self) -> None:
        node = self._any()
        if node.paused:
            node.resume()

    def _hand_over(self) -> None:
        for node in self.cluster.leaders():
            node.group.hand_over()

    def _wipe(self) -> None:
        """Wipe a member, if all others are whole: more is not tolerated."""
        node = self._any()
        others = [one for one in self.cluster.nodes.values() if one is not node]
        if not any(one.log.durable.flags & RESTORING for one in others):
            node.wipe()

    def _trim(self) -> None:
        node = self._any()
        if node.runs:
            node.group.trim(node.group.applied_index)

    def _any(self) -> SimNode:
        return self.random.choice(list(self.cluster.nodes.values()))
