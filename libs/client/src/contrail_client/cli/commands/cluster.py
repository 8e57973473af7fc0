"""`contrail cluster`: the nodes of a cluster."""

from collections.abc import Iterable, Sequence
from typing import Final

import typer
from msgspec.structs import replace

from contrail_client.cli import ending, show, units
from contrail_client.cli.connection import Session, client_command
from contrail_client.cli.tree import group
from contrail_client.cluster import ClusterGroup, ClusterMember, ClusterNode, ClusterState
from contrail_client.errors import Busy, Unreachable

HEALTHY: Final = 0
DEGRADED: Final = 1
UNAVAILABLE: Final = 2

app = group("Run a cluster on this machine, or show the nodes of one.")


@client_command(app, "status")
def show_status(session: Session) -> None:
    """Show the nodes of a cluster and the groups that they form.

    Ends with 0 if the cluster is healthy, with 1 if something is missing, and with 2 if a group has
    no leader or no server answers.
    """
    try:
        state = session.client.cluster()
    except (Busy, Unreachable) as error:
        failure = replace(ending.failure_of(error), exit_status=UNAVAILABLE)
        ending.report(failure, as_json=session.as_json)
        raise typer.Exit(UNAVAILABLE) from None
    if session.as_json:
        show.json_line(state)
    else:
        _draw(state)
    statuses = {"healthy": HEALTHY, "degraded": DEGRADED}
    raise typer.Exit(statuses.get(state.status, UNAVAILABLE))


def _draw(state: ClusterState) -> None:
    show.done(f"cluster {state.id} is {state.status}", {}, as_json=False)
    for sentence in state.missing:
        show.done(f"- {sentence}", {}, as_json=False)
    show.table(
        ["node", "up", "release", "leads", "follows", "restoring", "damaged", "free space"],
        map(_node, state.nodes),
    )
    show.table(
        ["group", "leader", "term", "member", "role", "lag", "applied", "state"],
        (row for each in state.groups for row in _members(each)),
    )


def _node(node: ClusterNode) -> Sequence[object]:
    kinds = [node.members.get(kind, "") for kind in ("leader", "follower", "restoring", "suspect")]
    free = units.size(node.disk.free_bytes) if node.disk else ""
    return node.name, "yes" if node.up else "no", node.version or "", *kinds, free


def _members(group: ClusterGroup) -> Iterable[Sequence[object]]:
    kind = "" if group.kind == "replicated" else f" ({group.kind})"
    for member in group.members:
        shown = [member.name, member.role, _known(member.lag), _known(member.applied)]
        yield f"{group.number}{kind}", group.leader, group.term, *shown, _state(member)


def _known(number: int | None) -> object:
    return "" if number is None else number


def _state(member: ClusterMember) -> str:
    if member.restoring:
        return "restoring"
    if member.suspect:
        return "damaged"
    if member.offline:
        return "offline"
    return "current" if member.current else "behind"
