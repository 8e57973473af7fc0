"""The state of a cluster, as the server tells it."""

from typing import Literal

import msgspec

ClusterStatus = Literal["healthy", "degraded", "unavailable"]
"""`degraded` if something is missing, `unavailable` if a group of nodes has no leader."""


class Disk(msgspec.Struct, frozen=True):
    """The file system with a node's data."""

    bytes: int
    free_bytes: int


class ClusterNode(msgspec.Struct, frozen=True, kw_only=True):
    """A storage node. Of one that did not answer, only `name`, `number` and `up` are known.

    `up`: it answered, or it answers a node that did. `members` has the number of its groups
    by kind: `leader`, `follower`, `restoring` and `suspect`. `problems` says which parts of it are
    not ready, and why.
    """

    name: str
    number: int
    up: bool
    incarnation: int | None = None
    version: str | None = None
    peer_address: str | None = None
    disk: Disk | None = None
    members: dict[str, int] = {}
    erasures_pending: int | None = None
    problems: dict[str, str] = {}


class ClusterMember(msgspec.Struct, frozen=True, kw_only=True):
    """A member of a group; what nobody knows is None.

    `role` is `leader`, `follower` or `unknown`. `current`: its copy is whole and was up to date
    lately. `lag` counts committed log entries.
    """

    name: str
    role: str
    current: bool
    offline: bool
    restoring: bool
    suspect: bool
    lag: int | None = None
    term: int | None = None
    commit: int | None = None
    applied: int | None = None
    durable: int | None = None


class ClusterGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes with copies of the same streams.

    `kind` is `meta` (the names of all streams), `replicated`, or `single` (streams with one
    replica). `leader` is empty if there is none.
    """

    number: int
    kind: str
    leader: str
    term: int
    members: tuple[ClusterMember, ...]


class ClusterState(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes and groups of a cluster; a server alone is a cluster of one node.

    `missing` says in sentences what is missing.
    """

    id: str
    status: ClusterStatus
    missing: tuple[str, ...]
    meta_leader: str
    nodes: tuple[ClusterNode, ...]
    groups: tuple[ClusterGroup, ...]
