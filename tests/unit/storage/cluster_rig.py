"""A cluster of whole nodes in one process, over links that a test cuts."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_replicator.group import GroupBusyError, NotLeaderError, RaftGroup
from contrail_replicator.ports import GroupEndpoint, Message, Timings
from contrail_storage.core.group_table import GroupEntry
from contrail_storage.core.key_layout import META_GROUP
from contrail_storage.link import LocalLink
from contrail_storage.node import NodeOptions, StorageNode
from contrail_storage.options import Cluster
from contrail_storage.replica.raft_port import Group, no_leader

NAMES = "a", "b", "c"
# Long enough for a loaded machine: a test that wants a new leader makes one.
TIMINGS = Timings(election_min_s=2.0, election_max_s=4.0, heartbeat_s=0.2, leader_fallback_s=3.0)
PATIENCE_S = 60.0


def plan(names: Sequence[str]) -> tuple[GroupEntry, ...]:
    """A group of one for each node, and two groups of all that prefer each of them."""
    alone = [GroupEntry(at + 1, (name,)) for at, name in enumerate(names)]
    shared = [
        GroupEntry(1024 + at, (*names[at:], *names[:at])) for at in range(len(names))
    ]  # fmt: skip
    return tuple(alone + shared)


class Links:
    """Carries messages between the nodes of a cluster, in later turns of the loop."""

    def __init__(self) -> None:
        self.cut: set[frozenset[str]] = set()
        self.nodes: dict[str, StorageNode] = {}
        self._ends: dict[tuple[str, int], GroupEndpoint] = {}

    def part(self, name: str) -> None:
        """Cut a node off from all others."""
        self.cut |= {frozenset((name, other)) for other in NAMES if other != name}

    def heal(self) -> None:
        self.cut.clear()

    def reach(self, one: str, other: str) -> bool:
        return frozenset((one, other)) not in self.cut

    def attach(self, name: str, group: int, endpoint: GroupEndpoint) -> None:
        self._ends[name, group] = endpoint
        for (other, number), end in self._ends.items():
            if number == group and other != name:
                endpoint.link_changed(other, True)
                end.link_changed(name, True)

    def detach(self, name: str, group: int) -> None:
        self._ends.pop((name, group), None)

    def send(self, name: str, group: int, peer: str, message: Message) -> None:
        def deliver() -> None:
            end = self._ends.get((peer, group))
            if end is not None and self.reach(name, peer):
                end.receive(name, message)

        asyncio.get_running_loop().call_soon(deliver)

    async def ask(self, name: str, peer: str, body: bytes) -> bytes:
        if peer not in self.nodes or not self.reach(name, peer):
            raise no_leader("")
        answer = await self.nodes[peer].membership.answer(body)
        if not self.reach(name, peer):
            raise ApiError(errors.OUTCOME_UNKNOWN)
        return answer


class Transport:
    """The links of one node."""

    def __init__(self, links: Links, name: str) -> None:
        self._links, self._name = links, name

    def attach(self, group: int, endpoint: GroupEndpoint) -> None:
        self._links.attach(self._name, group, endpoint)

    def detach(self, group: int) -> None:
        self._links.detach(self._name, group)

    def send(self, group: int, peer: str, message: Message) -> None:
        self._links.send(self._name, group, peer, message)


class GroupsOverLinks:
    """Makes the groups of one node."""

    refusals: tuple[type[Exception], ...] = (NotLeaderError,)
    busy: tuple[type[Exception], ...] = (GroupBusyError,)

    def __init__(self, links: Links, name: str) -> None:
        self._transport = Transport(links, name)

    def make(self, **given: Any) -> Group:
        return RaftGroup(transport=self._transport, timings=TIMINGS, **given)


class Nodes:
    """The nodes of a cluster, by name, with their links."""

    def __init__(self, folder: Path) -> None:
        self.links = Links()
        self._folder = folder
        self._exits: dict[str, AsyncExitStack] = {}

    def __getitem__(self, name: str) -> StorageNode:
        return self.links.nodes[name]

    def all(self) -> list[StorageNode]:
        return list(self.links.nodes.values())

    async def start(self, *names: str) -> None:
        async def one(name: str) -> None:
            async def ask(peer: str, body: bytes) -> bytes:
                return await self.links.ask(name, peer, body)

            cluster = Cluster(NAMES, plan(NAMES), ask)
            options = NodeOptions(self._folder / name, name, cluster=cluster)
            node = StorageNode.open(options, GroupsOverLinks(self.links, name))
            self.links.nodes[name] = node
            await node.start()

        await asyncio.gather(*map(one, names))

    async def stop(self, *names: str) -> None:
        await asyncio.gather(*(self.links.nodes.pop(name).stop() for name in names))

    def leader(self, group: int) -> str:
        """The member that leads, and that all reachable ones take for the leader; or ""."""
        led = [name for name, node in self.links.nodes.items() if node.groups.leads(group)]
        return led[0] if len(led) == 1 else ""

    async def until_led(self, *groups: int) -> None:
        await until(lambda: all(self.leader(group) for group in groups))

    async def call(self, name: str, call: Callable[[LocalLink], Any]) -> Any:
        """Call the link of a node, or of the one that it names as the leader.

        Cut links cut the caller off as well: it reaches what the node first asked reaches.
        """
        begun = name
        while True:
            try:
                return await call(LocalLink(self[name]))
            except ApiError as error:
                if error.spec is not errors.NOT_LEADER:
                    raise
                known = error.leader in self.links.nodes
                name = error.leader if known and self.links.reach(begun, error.leader) else begun
            await turn()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await turn()


async def turn() -> None:
    """Let the others work."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0.005, done.set_result, None)
    await done


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Nodes]:
    """Three nodes that have made their groups."""
    nodes = Nodes(folder)
    async with asyncio.timeout(PATIENCE_S):
        try:
            await nodes.start(*NAMES)
            numbers = [entry.number for entry in plan(NAMES)]
            await until(
                lambda: all(len(one.meta.group_table.groups) == len(numbers) for one in nodes.all())
            )
            await nodes.until_led(META_GROUP, *numbers)
            yield nodes
        finally:
            nodes.links.heal()
            await nodes.stop(*list(nodes.links.nodes))
