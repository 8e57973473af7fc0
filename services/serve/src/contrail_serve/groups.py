"""Raft groups of one member for a storage node, made from the replicator's parts."""

from collections.abc import Callable, Sequence
from typing import Any

from contrail_replicator.group import RaftGroup
from contrail_replicator.ports import Transport
from contrail_replicator.proposals import GroupBusyError, NotLeaderError
from contrail_replicator.transport import NullTransport
from contrail_serve.member_log import NodeMemberLog
from contrail_storage.core.entry_codec import is_sound
from contrail_storage.replica.raft_port import Committed, Group
from contrail_storage.wal.node_log import NodeLog


class SingleMemberGroups:
    """Creates groups with this node as their only member."""

    refusals: tuple[type[Exception], ...] = (NotLeaderError,)
    busy: tuple[type[Exception], ...] = (GroupBusyError,)

    def __init__(self) -> None:
        # For groups without other members.
        self._nowhere = NullTransport()

    def _transport(self, peers: Sequence[str]) -> Transport:
        """What reaches the other members of a group."""
        return self._nowhere

    def make(  # noqa: PLR0913 - all of them are named
        self,
        *,
        group_id: int,
        node_id: str,
        peers: Sequence[str],
        log: NodeLog,
        applied_index: int,
        on_commit: Callable[[Any], bool],
        on_role: Callable[[bool], None],
        on_lost: Callable[[list[object]], None],
        on_replaced: Callable[[list[object]], None],
    ) -> Group:
        """Return a group with one member over ``log``, applied up to ``applied_index``."""
        group = RaftGroup(
            group_id=group_id,
            node_id=node_id,
            peers=peers,
            log=log,
            transport=self._transport(peers),
            applied_index=applied_index,
            on_commit=on_commit,
            on_role=on_role,
            on_lost=on_lost,
            on_replaced=on_replaced,
            member_log=NodeMemberLog(log) if peers else None,
            is_sound=is_sound,
        )
        if peers:
            log.keep_tail(group_id)
        return group


class NodeGroups(SingleMemberGroups):
    """Creates groups whose other members are on other nodes."""

    transport: Transport
    """Reaches the other nodes; set before the first group is created."""

    def _transport(self, peers: Sequence[str]) -> Transport:
        return self.transport if peers else self._nowhere


__all__ = ["Committed", "NodeGroups", "SingleMemberGroups"]
