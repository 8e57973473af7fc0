"""Random faults from one seed, in a cluster in memory."""

from random import Random

from contrail_replicator import GroupBusyError
from contrail_replicator.messages import RESTORING
from tests.unit.replicator.raft_sim import Cluster, SimNode


class Chaos:
    """Random faults from one seed. At the end all is healed and the promises are checked."""

    def __init__(self, seed: int, names: str = "abc") -> None:
        self.random = Random(seed)
        self.cluster = Cluster(names)
        self.proposed = 0
        self.reads: list[list[bool]] = []

    def run(self, steps: int) -> None:
        actions = [
            (75, self._deliver),
            (25, self._sync),
            (30, self._propose),
            (30, self._pass_time),
            (6, self._read),
            (6, self._look),
            (3, self._drop),
            (3, self._double),
            (0.7, self._crash),
            (8, self._boot),
            (0.5, self._isolate),
            (0.5, self._cut),
            (6, self._heal),
            (0.5, self._pause),
            (5, self._resume),
            (0.5, self._hand_over),
            (0.3, self._wipe),
            (2, self._trim),
        ]
        weights, calls = zip(*actions, strict=True)
        for action in self.random.choices(calls, weights, k=steps):
            action()
            self.cluster.check_leaders()
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
