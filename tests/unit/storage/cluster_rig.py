"""A cluster of whole nodes in one process, over links that a test cuts."""

import asyncio
import secrets
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_replicator.group import GroupBusyError, NotLeaderError, RaftGroup
from contrail_replicator.messages import Heartbeat, HeartbeatReply
from contrail_replicator.ports import GroupEndpoint, Message, Timings
from contrail_serve.member_log import NodeMemberLog
from contrail_storage.core.entry_codec import is_sound
from contrail_storage.core.group_table import GroupEntry
from contrail_storage.core.key_layout import META_GROUP
from contrail_storage.disk.node_file import Stage, save_identity
from contrail_storage.link import LocalLink
from contrail_storage.node import NodeOptions, StorageNode
from contrail_storage.options import Cluster
from contrail_storage.replica.log_time import Clocks
from contrail_storage.replica.raft_port import Group, no_leader

NAMES = "a", "b", "c"
# In seconds of `GroupClock`. Long enough for a loaded machine: a test that wants a new leader makes
# one.
TIMINGS = Timings(
    election_min_s=2.0,
    election_max_s=4.0,
    heartbeat_s=0.2,
    leader_fallback_s=3.0,
    slow_disk_s=600.0,
    outcome_s=20.0,
)
PATIENCE_S = 180.0
_TURN_S = 0.005


class GroupClock:
    """The clock of all groups of all nodes, in seconds: ten times as fast as the machine's.

    It goes on by turns of the loop, in which every node works as well, so that a busy machine makes
    nobody miss a heartbeat.
    """

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    async def run(self) -> None:
        """Go on; until cancelled."""
        while True:
            await turn()
            self.now_s += 10 * _TURN_S


def plan(names: Sequence[str]) -> tuple[GroupEntry, ...]:
    """A group of one for each node, and two groups of all that prefer each of them."""
    alone = [GroupEntry(at + 1, (name,)) for at, name in enumerate(names)]
    shared = [
        GroupEntry(1024 + at, (*names[at:], *names[:at])) for at in range(len(names))
    ]  # fmt: skip
    return tuple(alone + shared)


class SteppedClocks(Clocks):
    """The clocks of a machine, which a test sets."""

    wall_step_ns = boot_step_ns = 0

    def wall_ns(self) -> int:
        return super().wall_ns() + self.wall_step_ns

    def boot_ns(self) -> int:
        return super().boot_ns() + self.boot_step_ns


class Links:
    """Carries messages between the nodes of a cluster, in later turns of the loop."""

    def __init__(self) -> None:
        self.cut: set[frozenset[str]] = set()
        self.withheld: set[tuple[str, int]] = set()
        """Nodes with groups of which they get no messages."""
        self.nodes: dict[str, StorageNode] = {}
        self.clocks = {name: SteppedClocks() for name in NAMES}
        """They keep what a test sets, also over a restart of their node."""
        self.group_clock = GroupClock()
        self._ends: dict[tuple[str, int], GroupEndpoint] = {}

    def part(self, name: str) -> None:
        """Cut a node off from all others."""
        self.cut |= {frozenset((name, other)) for other in NAMES if other != name}

    def heal(self) -> None:
        self.cut.clear()
        self.withheld.clear()

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
            withheld = (peer, group) in self.withheld
            if end is not None and self.reach(name, peer) and not withheld:
                if isinstance(message, (Heartbeat, HeartbeatReply)) and peer in self.nodes:
                    wall_ns = self.clocks[name].wall_ns()
                    self.nodes[peer].membership.peer_clocks.note(name, wall_ns)
                end.receive(name, message)

        asyncio.get_running_loop().call_soon(deliver)

    async def ask(self, name: str, peer: str, body: bytes, *, bulk: bool = False) -> bytes:
        if peer not in self.nodes or not self.reach(name, peer):
            raise no_leader("")
        asked = self.nodes[peer].membership
        answer = await (asked.provide if bulk else asked.answer)(body)
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
        self._clock = links.group_clock

    def make(self, **given: Any) -> Group:
        log, peers = given["log"], given["peers"]
        members = NodeMemberLog(log) if peers else None
        group = RaftGroup(
            transport=self._transport,
            timings=TIMINGS,
            clock=self._clock,
            member_log=members,
            is_sound=is_sound,
            **given,
        )
        if peers:
            log.keep_tail(given["group_id"])
        return group


def is_listed(node: StorageNode, stream: str) -> bool:
    """Whether a node knows the stream by its name and has its shards; either may come first."""
    entry = node.meta.streams.get(stream)
    if entry is None or entry.stage != "listed":
        return False
    return all(
        shard_id in node.applier.shards and node.applier.shards[shard_id].machine.exists
        for shard_id, group in zip(entry.shard_ids, entry.groups, strict=True)
        if group in node.groups
    )


class Nodes:
    """The nodes of a cluster, by name, with their links."""

    def __init__(self, folder: Path, **given: Any) -> None:
        """``given`` are `NodeOptions`."""
        self.links = Links()
        self._folder = folder
        self._given = given
        self._exits: dict[str, AsyncExitStack] = {}
        self._processes = 0
        self._wiped: set[str] = set()

    def __getitem__(self, name: str) -> StorageNode:
        return self.links.nodes[name]

    def all(self) -> list[StorageNode]:
        return list(self.links.nodes.values())

    async def start(self, *names: str, accept_data_loss: bool = False) -> None:
        async def one(name: str) -> None:
            async def ask(peer: str, body: bytes) -> bytes:
                return await self.links.ask(name, peer, body)

            async def fetch(peer: str, body: bytes) -> bytes:
                return await self.links.ask(name, peer, body, bulk=True)

            self._processes += 1
            cluster = Cluster(NAMES, plan(NAMES), ask, fetch, process=self._processes)
            options = NodeOptions(
                self._folder / name,
                name,
                cluster=cluster,
                clocks=self.links.clocks[name],
                accept_data_loss=accept_data_loss,
                **self._given,
            )
            node = StorageNode.open(options, GroupsOverLinks(self.links, name))
            self.links.nodes[name] = node
            if node.identity.stage is not Stage.FORMED:
                await self._form(node, anew=name in self._wiped or accept_data_loss)
            await node.start()

        await asyncio.gather(*map(one, names))

    def wipe(self, name: str) -> None:
        """Lose the disk of a node that is stopped."""
        shutil.rmtree(self._folder / name)
        self._wiped.add(name)

    async def _form(self, node: StorageNode, *, anew: bool) -> None:
        """Do what a node does at its peer port, also if the others tell it that it is known."""
        name, incarnation = node.options.name, 1
        if anew:
            other = next(one for one in self.all() if one is not node and one.begun)
            entry = await other.membership.register(name, secrets.token_bytes(16))
            incarnation = entry.incarnation
        node.identity = replace(node.identity, stage=Stage.FORMED, incarnation=incarnation)
        save_identity(node.files, node.options.data_dir, node.identity)
        self._wiped.discard(name)

    async def stop(self, *names: str) -> None:
        await asyncio.gather(*(self.links.nodes.pop(name).stop() for name in names))

    def leader(self, group: int) -> str:
        """The member that leads, and that all reachable ones take for the leader; or ""."""
        led = [name for name, node in self.links.nodes.items() if node.groups.leads(group)]
        return led[0] if len(led) == 1 else ""

    async def until_led(self, *groups: int) -> None:
        await until(lambda: all(self.leader(group) for group in groups))

    async def until_listed(self, stream: str) -> None:
        """Wait until all nodes know a stream; before, some refer those who ask to the leader."""
        await until(lambda: all(is_listed(node, stream) for node in self.all()))

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
    timer = asyncio.get_running_loop().call_later(_TURN_S, done.set_result, None)
    try:
        await done
    finally:
        timer.cancel()


@asynccontextmanager
async def running(folder: Path, **given: Any) -> AsyncIterator[Nodes]:
    """Three nodes that have made their groups; ``given`` are `NodeOptions`."""
    nodes = Nodes(folder, **given)
    time = asyncio.ensure_future(nodes.links.group_clock.run())
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
            time.cancel()
