"""The part of a node that depends on other nodes: its groups, who leads them, and what follows.

A node alone is the only member of its groups and leads all of them. In a cluster, all nodes are
members of the meta group, each node has a group of its own for shards that are not replicated, and
the leader of the meta group makes the groups that replicate shards.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import structlog

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_storage.core import commands as cmd
from contrail_storage.core.chain import NO_CHAIN, Chain
from contrail_storage.core.key_layout import META_GROUP, SHARD_GROUP
from contrail_storage.core.log_clock import agree
from contrail_storage.core.node_table import NodeEntry
from contrail_storage.core.results import Done, Refused
from contrail_storage.options import Cluster
from contrail_storage.replica.elsewhere import Elsewhere
from contrail_storage.replica.group_time import GroupTime, PeerClocks
from contrail_storage.replica.meta_log import MetaLog
from contrail_storage.replica.proposer import Proposer
from contrail_storage.replica.raft_port import Callbacks, Group, GroupFactory
from contrail_storage.replica.spread import Spread
from contrail_storage.store.store_errors import StoreError
from contrail_storage.streams.outcomes import expect
from contrail_storage.wal.log_state import RESTORING

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
        self.clocks = node.options.clocks
        self.peer_clocks = PeerClocks(self.clocks)
        """The wall clocks of the other nodes, as their messages tell."""
        self.led_meta_ns = 0
        """Wall clock (ns) when this node last began to lead a cluster's meta group; 0: never."""
        self._node = node
        self._factory = factory
        self._cluster = cluster
        # Made by `join_first`.
        self.spread: Spread
        """Serves streams with shards that other nodes lead."""
        # By group: the index in the store, from which a group goes on.
        self._ends: Mapping[int, int] = {}
        # Set when something half done may have to be finished or undone.
        self._unreconciled = asyncio.Event()

    @property
    def own_group(self) -> int:
        """The group of the shards on this node that are not replicated."""
        return SHARD_GROUP if self._cluster is None else self._cluster.nodes.index(self.node_id) + 1

    @property
    def problems(self) -> dict[str, str]:
        """What this node waits for before streams can be made, for its readiness."""
        if len(self._node.meta.group_table.groups) < self._node.groups.planned:
            return {"groups": "this node does not know all groups of the cluster yet"}
        return {}

    def members_of(self, group: int) -> tuple[str, ...]:
        """The nodes that have a copy of what a group replicates."""
        entry = self._node.meta.group_table.groups.get(group)
        return (self.node_id,) if entry is None else entry.members

    def join_first(self, ends: Mapping[int, int]) -> tuple[MetaLog, Proposer]:
        """Take part in the meta group and the node's own; return their logs."""
        self._ends = ends
        node, cluster = self._node, self._cluster
        node.groups.planned = 0 if cluster is None else len(cluster.groups)
        proposer = self._join(META_GROUP, () if cluster is None else cluster.nodes)
        ask = None if cluster is None else cluster.ask
        self.spread = Spread(node.groups, node.meta, Elsewhere(node.groups, ask))
        self.spread.on_fresh = self._can_serve
        elsewhere = None if cluster is None else self.spread.elsewhere
        if cluster is not None:
            node.applier.on_reserved = self._reserved
        meta = MetaLog(proposer, node.groups[META_GROUP], elsewhere)
        return meta, self._join(self.own_group)

    def close(self) -> None:
        """End what waits for other nodes."""
        if hasattr(self, "spread"):
            self.spread.close()

    def join_soon(self) -> None:
        """Take part in new groups; in a later turn, because a group that is made calls back."""
        asyncio.get_running_loop().call_soon(self.join)

    def join(self) -> None:
        """Heed the starts of other nodes; take part in the groups that this one is a member of."""
        groups, meta, cluster = self._node.groups, self._node.meta, self._cluster
        if cluster is not None:
            for node in meta.node_table.nodes.values():
                if node.name != self.node_id:
                    cluster.note_start(node)
        for entry in meta.group_table.groups.values():
            if self.node_id in entry.members and entry.number not in groups:
                self._join(entry.number, entry.members, entry.incarnation_of(self.node_id))
                self._node.catching_up.joined(entry.number)
                if self._node.begun:
                    groups[entry.number].start()

    def _is_own(self, group: int) -> bool:
        """Whether this node is the only member of a group."""
        if group == META_GROUP:
            return self._cluster is None
        entry = self._node.meta.group_table.groups.get(group)
        return entry is None or len(entry.members) == 1

    def last_entry_ns(self) -> int:
        """The latest log time in the groups of which this node is the only member."""
        applier = self._node.applier
        entries = [one.time_ns for group, one in applier.chains.items() if self._is_own(group)]
        shards = [one for one in applier.shards.values() if self._is_own(one.group)]
        return max(entries + [one.machine.counters.last_time_ns for one in shards], default=0)

    def vouches_for_clock(self) -> bool:
        """Whether most nodes of the cluster have the wall clock of this one."""
        if self._cluster is None:
            return False
        nodes = self._cluster.nodes
        own_ns, *others = self.peer_clocks.walls_ns(one for one in nodes if one != self.node_id)
        return sum(agree((own_ns, one), 2) for one in others) >= len(nodes) // 2

    def _join(self, number: int, members: Sequence[str] = (), incarnation: int = 1) -> Proposer:
        """Take part in a group whose entries are in the log, of this node and other ``members``.

        If this node was a member in another ``incarnation``, it has forgotten its votes and what it
        acknowledged. Then it begins as a restoring member; before its first message, that is in the
        log, or this is repeated at the next start.
        """
        node = self._node
        peers = [one for one in members if one != self.node_id]
        if peers and node.identity.incarnation != incarnation:
            node.log.begin_new(number, RESTORING)
            _log.warning("member_restoring", group=number)

        def applied() -> Chain:
            return node.applier.chains.get(number, NO_CHAIN)

        jump_max_ns = node.options.clock_jump_max_ns
        group_time = GroupTime(peers, self.clocks, self.peer_clocks, applied, jump_max_ns)

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
        shared_time = group_time if peers else None
        _, proposer = self._node.groups.join(number, make, refusals, busy, shared_time)
        if number != META_GROUP:
            proposer.check_space = self._node.disk_budget.check
        return proposer

    # Leading -------------------------------------------------------------------------------------

    def role_changed(self, number: int, leads: bool) -> None:
        """Begin or end what only the leader of a group does."""
        node = self._node
        self.spread.role_changed(number, leads)
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
            if node.groups[number].is_alone:
                node.notify("domain_leader_elected")
        if not node.groups[number].is_alone:
            self._tell(number, leads)

    def _can_serve(self, home: int) -> None:
        """Do what is due in streams with shards elsewhere, which this node may serve now."""
        for shard_id in self._node.meta.spread_from(home):
            self._node.applier.changes.note_all(shard_id)
        self.reconcile_soon()

    def _tell(self, number: int, leads: bool) -> None:
        """Report that this node has begun or ceased to lead a group of several members."""
        ended_by = self._node.groups[number].ended_by
        if leads:
            self._node.notify("leader_elected", number)
        elif ended_by == "no_quorum":
            self._node.notify("quorum_lost", number)
        else:
            self._node.notify("leader_lost", number, ended_by)

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

    def _reserved(self, name: str) -> None:
        """Finish or undo a creation of an earlier leader, of which this node hears only now."""
        entry = self._node.meta.streams.get(name)
        if entry is not None and self._node.begun and self._node.streams.leads(entry):
            self._node.spawn(self._reconcile_one(name))

    async def _reconcile_one(self, name: str) -> None:
        try:
            await self._node.streams.reconcile(name)
        except (ApiError, StoreError):
            self.reconcile_soon()

    def reconcile_soon(self) -> None:
        """Reconcile: there may be streams of this node that it has just heard of."""
        self._unreconciled.set()

    async def keep_reconciling(self) -> None:
        """Reconcile whenever this node has begun to lead a group, until cancelled."""
        while True:
            await self._unreconciled.wait()
            await self.reconcile()

    # Starts of nodes -----------------------------------------------------------------------------

    async def until_caught_up(self) -> None:
        """Wait until this node knows the cluster again, if its disk was lost."""
        while self.is_catching_up:  # noqa: ASYNC110 - the log tells nobody of its flags
            await asyncio.sleep(_AGAIN_S)

    @property
    def is_catching_up(self) -> bool:
        """Whether this member of the meta group lacks what was committed before."""
        return bool(self._cluster is not None and self._node.log.flags(META_GROUP) & RESTORING)

    async def tell_start(self) -> None:
        """Let all nodes know of this start, so that no older one is taken for it."""
        if self._cluster is None:
            return
        identity, number = self._node.identity, self.own_group
        start = identity.incarnation, identity.boots, self._cluster.process
        self._cluster.note_start(NodeEntry(self.node_id, number, *start))
        command = cmd.NoteStart(self.node_id, number, *start)
        while True:
            with suppress(ApiError):
                result = await self._node.meta_log.command(command)
                if isinstance(result, Refused):
                    self._node.fail(result.detail)
                return
            await asyncio.sleep(_AGAIN_S)

    async def register(self, name: str, token: bytes) -> NodeEntry:
        """Give another node, whose disk was lost, a new incarnation; return its entry.

        The ``token`` is the same in all requests of one process. Raises what a command raises.
        """
        assert self._cluster is not None
        if not self._node.begun:
            raise ApiError(errors.NOT_READY, applied=False)
        meta = self._node.meta
        known = meta.node_table.nodes.get(name)
        if known is None or known.token != token:
            number = self._cluster.nodes.index(name) + 1
            command = cmd.RegisterNode(name, number, token, meta.node_table.incarnation(name))
            expect(await self._node.meta_log.command(command), Done)
            # Looked up again: this node may have fetched the state of meta meanwhile. In the one
            # before, the other node has the incarnation whose disk is lost.
            known = meta.node_table.nodes.get(name)
        if known is None or known.token != token:
            raise ApiError(errors.NOT_READY, f"{name} has been registered anew", applied=False)
        return known

    # Other nodes ---------------------------------------------------------------------------------

    async def answer(self, body: bytes) -> bytes:
        """Answer a request of another node (NOT_LEADER)."""
        return await self.spread.elsewhere.answer(body)

    async def provide(self, body: bytes) -> bytes:
        """Return what another node fetches to catch up, at most 1 MiB: `CatchingUp.provide`."""
        return await self._node.catching_up.provide(body)
