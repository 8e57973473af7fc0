"""Faults that come at random: crashes, power cuts, pauses, partitions, slow disks, wrong clocks."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from random import Random
from typing import Any, Final

from contrail_storage.seal.key_file import SHARED_KEYS_NAME
from tests.sim.cluster import SimCluster, SimNode
from tests.sim.subject_keys import have_the_same_keys

KINDS: Final = (
    "kill",
    "power_cut",
    "pause",
    "part",
    "deafen",
    "slow_disk",
    "wrong_clock",
    "wipe",
    "lose_keys",
    "lose_log_end",
    "all_down",
)
_YEAR_S: Final = 365 * 86_400.0
_PATIENCE: Final = 300


class Nemesis:
    """Lets faults happen until it is stopped, then ends all of them."""

    def __init__(self, cluster: SimCluster, only: Sequence[str] = ()) -> None:
        """Let faults of all kinds happen, or ``only`` those named."""
        self.done: list[str] = []
        """What happened, with times."""
        self._cluster = cluster
        self._random = Random(f"faults {cluster.seed}")
        self._stopped = False
        self._faults = [getattr(self, name) for name in only or KINDS]
        self._busy: set[str] = set()

    async def run(self) -> None:
        """Let faults happen, sometimes several at a time."""
        running: set[asyncio.Task[None]] = set()
        while not self._stopped:
            await asyncio.sleep(self._random.uniform(0.2, 3.0))
            free = [one for name, one in self._cluster.nodes.items() if name not in self._busy]
            if free and not self._stopped:
                node, fault = self._random.choice(free), self._random.choice(self._faults)
                running.add(asyncio.ensure_future(self._do(fault, node)))
        await asyncio.gather(*running)

    def stop(self) -> None:
        """Let no more faults happen."""
        self._stopped = True

    async def _do(
        self, fault: Callable[[SimNode], Coroutine[Any, Any, None]], node: SimNode
    ) -> None:
        self._busy.add(node.name)
        now = self._cluster.loop.now
        self.done.append(f"{now:.3f} {fault.__name__} {node.name}")
        await fault(node)
        self._busy.discard(node.name)

    async def _for(self, most_s: float) -> None:
        await asyncio.sleep(self._random.random() ** 2 * most_s)

    async def kill(self, node: SimNode) -> None:
        node.crash(power=False)
        await self._for(6.0)
        node.start()

    async def power_cut(self, node: SimNode) -> None:
        node.crash(power=True)
        await self._for(6.0)
        node.start()

    async def pause(self, node: SimNode) -> None:
        node.pause()
        await self._for(6.0)
        node.go_on()

    async def part(self, node: SimNode) -> None:
        """Cut a node off from the others; clients may still reach it."""
        others = [name for name in self._cluster.nodes if name != node.name]
        if self._random.random() < 0.5:
            others += [name for name in self._cluster.processes if name not in self._cluster.nodes]
        await self._cut([(node.name, one) for one in others] + [(one, node.name) for one in others])

    async def deafen(self, node: SimNode) -> None:
        """Cut one direction, to some of the others."""
        others = [name for name in self._cluster.nodes if name != node.name]
        some = self._random.sample(others, self._random.randint(1, len(others)))
        hears = self._random.random() < 0.5
        await self._cut([(node.name, one) if hears else (one, node.name) for one in some])

    async def _cut(self, cuts: list[tuple[str, str]]) -> None:
        for source, target in cuts:
            self._cluster.net.set_cut(source, target, True)
        await self._for(6.0)
        for source, target in cuts:
            self._cluster.net.set_cut(source, target, False)

    async def slow_disk(self, node: SimNode) -> None:
        before, node.disk.sync_s = node.disk.sync_s, self._random.uniform(0.05, 1.0)
        await self._for(6.0)
        node.disk.sync_s = before

    async def wrong_clock(self, node: SimNode) -> None:
        """Set a clock to another time, sometimes by a year."""
        process, ahead_s = node.process, self._random.uniform(-300.0, 300.0)
        if self._random.random() < 0.3:
            ahead_s = _YEAR_S
        before_ns, process.clock_ahead_ns = process.clock_ahead_ns, round(ahead_s * 1e9)
        await self._for(6.0)
        node.process.clock_ahead_ns = before_ns

    async def wipe(self, node: SimNode) -> None:
        """Replace a disk by an empty one, unless that could lose what was acknowledged."""
        if self._all_are_whole() and have_the_same_keys(self._cluster.nodes.values()):
            node.crash(power=True)
            node.wipe()
            await self._for(4.0)
            node.start()

    async def lose_keys(self, node: SimNode) -> None:
        """Lose the file with the subject keys, or damage some of them, if others have them all."""
        if have_the_same_keys(self._cluster.nodes.values()):
            node.crash(power=False)
            node.disk.damage(node.folder / SHARED_KEYS_NAME)
            await self._for(4.0)
            node.start()

    async def lose_log_end(self, node: SimNode) -> None:
        """Lose the end of a log although it was synced, unless nobody else could know of that.

        The leaders of a node's groups know it, as long as they lead. So this comes alone.
        """
        others = {*self._cluster.nodes} - {node.name}
        if self._busy != {node.name} or not self._all_are_whole():
            return
        self._busy |= others
        node.crash(power=False)  # others lead then
        await asyncio.sleep(3.0)
        node.start()
        if await self._become_whole() and not self._leads(node):
            node.crash(power=True)
            node.disk.cut_log()
            node.start()
            await self._become_whole()
        self._busy -= others

    async def _become_whole(self) -> bool:
        """Wait until all nodes are whole, but not for ever; return whether they are."""
        for _ in range(_PATIENCE):
            await asyncio.sleep(0.1)
            if self._all_are_whole():
                return True
        return False

    def _all_are_whole(self) -> bool:
        return all(map(self._is_whole, self._cluster.nodes.values()))

    def _leads(self, node: SimNode) -> bool:
        return node.node is None or any(
            one.is_leader and not one.is_alone for one in node.node.logged_groups.values()
        )

    def _is_whole(self, node: SimNode) -> bool:
        if not node.runs or node.node is None:
            return False
        groups = node.node.logged_groups
        hosted = {number for number in groups if number in self._plan(node.name)}
        return hosted == self._plan(node.name) and not any(one.flags for one in groups.values())

    def _plan(self, name: str) -> set[int]:
        """The groups of a node that are in the table."""
        nodes = [one.node for one in self._cluster.nodes.values() if one.runs and one.node]
        tables = [node.meta.group_table.groups for node in nodes]
        table = max(tables, key=len)
        return {number for number, entry in table.items() if name in entry.members}

    async def all_down(self, node: SimNode) -> None:
        """End all processes, and start them again, each after a while."""
        if self._busy != {node.name}:
            return
        nodes = list(self._cluster.nodes.values())
        self._busy.update(one.name for one in nodes)
        for one in nodes:
            one.crash(power=self._random.random() < 0.5)
        for one in nodes:
            await self._for(2.0)
            one.start()
        self._busy.difference_update(one.name for one in nodes if one is not node)
