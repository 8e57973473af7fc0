"""What the nodes of a cluster say of themselves and of each other."""

from typing import Literal, Protocol

import msgspec

from contrail_link.contract.remote import ALL, REPEAT, remote


class PeerView(msgspec.Struct, frozen=True):
    """Another member of a group, as the leader sees it; ``lag`` in committed entries."""

    name: str
    lag: int
    applied: int
    current: bool
    offline: bool
    restoring: bool
    suspect: bool


class MemberView(msgspec.Struct, frozen=True, kw_only=True):
    """What a node knows of one of its groups.

    ``leader`` is the member that leads as far as this one knows. The indexes are its own. ``peers``
    is empty unless it leads.
    """

    group: int
    role: Literal["leader", "follower"]
    leader: str
    term: int
    durable: int
    commit: int
    applied: int
    restoring: bool
    suspect: bool
    peers: list[PeerView]


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A node, and what it knows of its cluster.

    ``nodes`` are the peer addresses of all nodes of the cluster by name, in the order of their
    numbers; of a node alone it is empty. ``problems`` are the reasons why parts are not ready.
    ``table`` has the members of all groups, the preferred leader first; ``groups`` are those that
    this node is a member of.
    """

    name: str
    number: int
    cluster_id: str
    incarnation: int
    version: str
    nodes: dict[str, str]
    disk_bytes: int
    disk_free_bytes: int
    erasures_pending: int
    problems: dict[str, str]
    table: dict[int, tuple[str, ...]]
    groups: list[MemberView]


class ClusterLink(Protocol):
    """The state of the cluster."""

    @remote(50, REPEAT, to=ALL)
    async def node_views(self) -> list[NodeView]:
        """Return the views of all nodes that answer in time, at least one."""
        ...
