"""The part of a node that depends on other nodes: its groups, who leads them, and what follows.

A node alone is the only member of its groups and leads all of them. In a cluster, all nodes are
members of the meta group, each node has a group of its own for shards that are not replicated, and
the leader of the meta group makes the groups that replicate shards.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import structlog

from contrail_common.errors import ApiError
from contrail_storage.core import commands as cmd
from contrail_storage.core.key_layout import META_GROUP, SHARD_GROUP
from contrail_storage.core.results import Done
from contrail_storage.options import Cluster
from contrail_storage.replica.meta_log import MetaLog
from contrail_storage.replica.proposer import Proposer
from contrail_storage.replica.raft_port import Callbacks, Group, GroupFactory, no_leader
from contrail_storage.store.store_errors import StoreError
from contrail_storage.streams.outcomes import expect

if TYPE_CHECKING:
    from contrail_storage.node import StorageNode

_AGAIN_S: Final = 0.5
_log = structlog.get_logger("contrail.membership")


class Membership:
    """The groups of one node. Used on the event loop only."""

    def __init__(self, node: "StorageNode", factory: GroupFactory, cluster: Cluster | None) -> None:
        self.node_id = node.identity.node_id if cluster is None else node.options.name
        """The node's name as a member of groups."""
        self.leading = asyncio.Event()
        """Set once the node leads the groups of which it is the only member."""
        self.led_meta_ns = 0
        """Wall clock (ns) when this node last began to lead a cluster's meta group; 0: never."""
        self._node = node
        self._factory = factory
        self._cluster = cluster
        # By group: the index in the store, from which a group goes on.
        self._ends: Mapping[int, int] = {}
        # Set when something half done may have to be finished or undone.
        self._unreconciled = asyncio.Event()

    @property
    def own_group(self) -> int:
        """The group of the shards on this node that are not replicated."""
        return SHARD_GROUP if self._cluster is None else self._cluster.nodes.index(self.node_id) + 1

    def join_first(self, ends: Mapping[int, int]) -> tuple[MetaLog, Proposer]:
        """Take part in the meta group and the node's own; return their logs."""
        self._ends = ends
        node, cluster = self._node, self._cluster
        proposer = self._join(META_GROUP, () if cluster is None else cluster.nodes)
        forward = None if cluster is None else self._forward
        meta = MetaLog(proposer, node.groups[META_GROUP], node.write_noted, forward)
        return meta, self._join(self.own_group)

    def join_soon(self) -> None:
        """Take part in new groups; in a later turn, because a group that is made calls back."""
        asyncio.get_running_loop().call_soon(self.join)

    def join(self) -> None:
        """Take part in those groups of the table that this node is a member of."""
        groups = self._node.groups
        for entry in self._node.meta.group_table.groups.values():
            if self.node_id in entry.members and entry.number not in groups:
                self._join(entry.number, entry.members)
                if self._node.begun:
                    groups[entry.number].start()

    def _join(self, number: int, members: Sequence[str] = ()) -> Proposer:
        """Take part in a group whose entries are in the log, of this node and other ``members``."""
        peers = [one for one in members if one != self.node_id]

        def make(callbacks: Callbacks) -> Group:
            return self._factory.make(
                group_id=number,
                node_id=self.node_id,
                peers=peers,
                log=self._node.log,
                applied_index=self._ends.get(number, 0),
                on_commit=callbacks.on_commit,
                on_role=callbacks.on_role,
                on_lost=callbacks.on_lost,
                on_replaced=callbacks.on_replaced,
            )

        refusals, busy = self._factory.refusals, self._factory.busy
        _, proposer = self._node.groups.join(number, make, refusals, busy)
        if number != META_GROUP:
            proposer.check_space = self._node.disk_budget.check
        return proposer

    # Leading -------------------------------------------------------------------------------------

    def role_changed(self, number: int, leads: bool) -> None:
        """Begin or end what only the leader of a group does."""
        node = self._node
        if leads and number == META_GROUP and self._cluster is not None:
            self.led_meta_ns = time.time_ns()
            node.spawn(self._make_groups(self._cluster))
        if leads and number != META_GROUP:
            node.consumers.new_term(number)
            # What became due while another node led is done from now on by this one.
            for shard in node.applier.shards.values():
                if shard.group == number:
                    node.applier.changes.note_all(shard.machine.shard_id)
        if not leads and not node.groups[number].is_alone:
            node.consumers.end_term(number)
        if leads and all(group.is_leader for group in self._alone()):
            self.leading.set()
            self._unreconciled.set()
            node.notify("domain_leader_elected")

    def _alone(self) -> list[Group]:
        return [group for group in self._node.logged_groups.values() if group.is_alone]

    async def _make_groups(self, cluster: Cluster) -> None:
        """Make the groups of a new cluster. What is left undone, the next leader does."""
        node = self._node
        while node.groups.leads(META_GROUP):
            known = node.meta.group_table.groups
            missing = [entry for entry in cluster.groups if entry.number not in known]
            if not missing:
                return
            command = cmd.CreateGroup(missing[0].number, missing[0].members)
            try:
                expect(await node.meta_log.command(command), Done)
            except ApiError as error:
                _log.info("group_not_made", group=command.number, reason=str(error))
                await asyncio.sleep(_AGAIN_S)

    async def reconcile(self) -> None:
        """Finish or undo what a failure left half done; if that fails, it is tried again soon."""
        self._unreconciled.clear()
        try:
            await self._node.streams.reconcile_all()
            await self._node.consumers.reconcile_all()
        except (ApiError, StoreError) as error:
            _log.info("not_reconciled", reason=str(error))
            asyncio.get_running_loop().call_later(_AGAIN_S, self._unreconciled.set)

    async def keep_reconciling(self) -> None:
        """Reconcile whenever this node has begun to lead a group, until cancelled."""
        while True:
            await self._unreconciled.wait()
            await self.reconcile()

    # Other nodes ---------------------------------------------------------------------------------

    async def _forward(self, body: bytes) -> bytes:
        assert self._cluster is not None
        leader = self._node.groups[META_GROUP].leader
        if leader in ("", self.node_id):
            raise no_leader("")
        return await self._cluster.ask(leader, body)

    async def answer(self, body: bytes) -> bytes:
        """Answer a request of another node (NOT_LEADER)."""
        self._node.groups.check_led(META_GROUP)
        return await self._node.meta_log.answer(body)
