"""The state of a cluster for answers, from what its nodes say of themselves."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from contrail_link.contract.cluster import MemberView, NodeView, PeerView

Status = Literal["healthy", "degraded", "unavailable"]
_META: Final = 0


class DiskJson(msgspec.Struct):
    """The file system with a node's data."""

    bytes: int
    """Size of the file system."""
    free_bytes: int
    """Free bytes of it."""


class MembersJson(msgspec.Struct):
    """How many groups a node leads, and in how many it is a member of another kind."""

    leader: int = 0
    """Groups that it leads."""
    follower: int = 0
    """Groups that it follows."""
    restoring: int = 0
    """Groups of which it has yet to restore its copy. It does not vote in them."""
    suspect: int = 0
    """Groups of which its copy is damaged, until it has been replaced."""


class NodeJson(msgspec.Struct, kw_only=True):
    """A storage node. If it did not answer, only ``name``, ``number`` and ``up`` are known."""

    name: str
    """Name of the node."""
    number: int
    """Its number, from 1 on."""
    up: bool
    """True if it answered, or if it answers a node that did."""
    incarnation: int | msgspec.UnsetType = msgspec.UNSET
    """How often it has begun with an empty data folder."""
    version: str | msgspec.UnsetType = msgspec.UNSET
    """Its release."""
    peer_address: str | msgspec.UnsetType = msgspec.UNSET
    """Address at which the other nodes reach it."""
    disk: DiskJson | msgspec.UnsetType = msgspec.UNSET
    """The file system with its data."""
    members: MembersJson | msgspec.UnsetType = msgspec.UNSET
    """Its groups."""
    erasures_pending: int | msgspec.UnsetType = msgspec.UNSET
    """Erasures that it has yet to complete."""
    problems: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    """Why parts of it are not ready, by part; absent if all are."""


class MemberJson(msgspec.Struct, kw_only=True):
    """A member of a group. Fields that nobody knows are absent."""

    name: str
    """Name of the node."""
    role: Literal["leader", "follower", "unknown"]
    """`unknown` if the node did not answer."""
    current: bool = False
    """True if its copy is whole and has been up to date within the last 2 s."""
    offline: bool = False
    """True if it does not answer the leader or, without one, this request."""
    restoring: bool = False
    """True if it has yet to restore its copy. It does not vote."""
    suspect: bool = False
    """True if its copy is damaged, until it has been replaced."""
    lag: int | msgspec.UnsetType = msgspec.UNSET
    """Number of committed log entries that it is behind the leader."""
    term: int | msgspec.UnsetType = msgspec.UNSET
    """Its term."""
    commit: int | msgspec.UnsetType = msgspec.UNSET
    """Index up to which it knows that entries are committed."""
    applied: int | msgspec.UnsetType = msgspec.UNSET
    """Index up to which it has applied entries."""
    durable: int | msgspec.UnsetType = msgspec.UNSET
    """Index up to which its log is on its disk."""


class GroupJson(msgspec.Struct):
    """A Raft group: nodes with copies of the same streams."""

    number: int
    """Number of the group."""
    kind: Literal["meta", "replicated", "single"]
    """`meta`: the names of all streams; `single`: streams with one replica."""
    leader: str
    """Name of the node that leads it; empty if there is none."""
    term: int
    """Its term, which grows with each election."""
    members: list[MemberJson]
    """Its members, the preferred leader first."""


class ClusterStateJson(msgspec.Struct):
    """The nodes and groups of a cluster. A server alone is a cluster of one node."""

    id: str
    """Id of the cluster."""
    status: Status
    """`healthy`; `degraded` if something is missing; `unavailable` if a group has no leader."""
    missing: list[str]
    """What is missing, as sentences; empty if the cluster is healthy."""
    meta_leader: str
    """Name of the node that leads the meta group; empty if there is none."""
    nodes: list[NodeJson]
    """The nodes, by number."""
    groups: list[GroupJson]
    """The groups, by number."""


def cluster_json(views: Sequence[NodeView]) -> ClusterStateJson:
    """Return the state of the cluster from the views of the nodes that answered, at least one."""
    answered = {view.name: view for view in views}
    newest = views[0]
    names = list(newest.nodes) or [newest.name]
    # A leader may hear a node that this process does not reach.
    heard = {
        peer.name
        for view in views
        for member in view.groups
        for peer in member.peers
        if not peer.offline
    }
    nodes = [
        _node(name, number, answered.get(name), up=name in answered or name in heard)
        for number, name in enumerate(names, 1)
    ]
    table = {number: members for view in views for number, members in view.table.items()}
    groups = [_group(number, table[number], answered) for number in sorted(table)]
    missing = [*_missing_nodes(nodes), *_missing_members(groups)]
    meta = next((group.leader for group in groups if group.number == _META), "")
    # A group of one ends with its node; that is no reason to call the others unavailable.
    lost = [one for one in groups if not one.leader and (one.kind != "single" or len(names) == 1)]
    status: Status = "unavailable" if lost else "degraded" if missing else "healthy"
    return ClusterStateJson(newest.cluster_id, status, missing, meta, nodes, groups)


def _node(name: str, number: int, view: NodeView | None, *, up: bool) -> NodeJson:
    shown = NodeJson(name=name, number=number, up=up)
    if view is None:
        return shown
    shown.incarnation, shown.version = view.incarnation, view.version
    shown.peer_address = view.nodes.get(name) or msgspec.UNSET
    shown.disk = DiskJson(view.disk_bytes, view.disk_free_bytes)
    shown.members = MembersJson()
    for one in view.groups:
        kind = "restoring" if one.restoring else "suspect" if one.suspect else one.role
        setattr(shown.members, kind, getattr(shown.members, kind) + 1)
    shown.erasures_pending = view.erasures_pending
    if view.problems:
        shown.problems = view.problems
    return shown


def _group(number: int, members: Sequence[str], views: Mapping[str, NodeView]) -> GroupJson:
    known = {
        name: one
        for name in members
        if name in views
        for one in views[name].groups
        if one.group == number
    }
    # A leader that was cut off may not know yet that another one leads.
    leads = [(one.term, name) for name, one in known.items() if one.role == "leader"]
    term, leader = max(leads, default=(0, ""))
    if not leader:
        term = max((one.term for one in known.values()), default=0)
    seen = {one.name: one for one in known[leader].peers} if leader else {}
    kind: Literal["meta", "replicated", "single"] = "meta"
    if number != _META:
        kind = "single" if len(members) == 1 else "replicated"
    shown = [_member(name, leader, known.get(name), seen.get(name)) for name in members]
    return GroupJson(number, kind, leader, term, shown)


def _member(name: str, leader: str, own: MemberView | None, seen: PeerView | None) -> MemberJson:
    shown = MemberJson(name=name, role="unknown", offline=own is None)
    if seen is not None:
        shown.current, shown.offline, shown.lag = seen.current, seen.offline, seen.lag
        shown.restoring, shown.suspect, shown.applied = seen.restoring, seen.suspect, seen.applied
    if own is not None:
        shown.role = "leader" if name == leader else "follower"
        shown.restoring, shown.suspect = own.restoring, own.suspect
        shown.term, shown.commit = own.term, own.commit
        shown.applied, shown.durable = own.applied, own.durable
    if name == leader:
        shown.current, shown.lag = True, 0
    if shown.restoring or shown.suspect:
        shown.current = False  # the leader may not know of it yet
    return shown


def _missing_nodes(nodes: Sequence[NodeJson]) -> list[str]:
    found = [f"{one.name} does not answer" for one in nodes if not isinstance(one.version, str)]
    for one in nodes:
        if isinstance(one.problems, dict):
            found += [f"{one.name}: {part}: {why}" for part, why in one.problems.items()]
    return found


def _missing_members(groups: Sequence[GroupJson]) -> list[str]:
    found = []
    for group in groups:
        what = "the meta group" if group.kind == "meta" else f"group {group.number}"
        if not group.leader:
            if group.kind == "single":
                what = f"the group of streams with one replica on {group.members[0].name}"
            found.append(f"{what} has no leader")
            continue
        for one in group.members:
            if one.restoring:
                found.append(f"{one.name} is restoring {what}")
            elif one.suspect:
                found.append(f"the copy of {what} on {one.name} is damaged")
            elif one.offline:
                if one.role != "unknown":  # otherwise it is known that the node does not answer
                    found.append(f"{group.leader}, the leader of {what}, does not hear {one.name}")
            elif not one.current:
                found.append(f"{one.name} is {one.lag} entries behind in {what}")
    return found


EXAMPLE: Final[Any] = msgspec.to_builtins(
    cluster_json(
        [
            NodeView(
                name="n1",
                number=1,
                cluster_id="5f1c0a9be2d348765f1c0a9be2d34876",
                incarnation=1,
                version="0.3.0",
                nodes={"n1": "10.0.0.1:7431"},
                disk_bytes=1 << 40,
                disk_free_bytes=1 << 39,
                erasures_pending=0,
                problems={},
                table={0: ("n1",), 1: ("n1",)},
                groups=[
                    MemberView(
                        group=number,
                        role="leader",
                        leader="n1",
                        term=3,
                        durable=1042,
                        commit=1042,
                        applied=1042,
                        restoring=False,
                        suspect=False,
                        peers=[],
                    )
                    for number in (0, 1)
                ],
            )
        ]
    )
)
