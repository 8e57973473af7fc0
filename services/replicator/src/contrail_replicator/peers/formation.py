"""How nodes with empty folders become one cluster, decided without IO.

Each node tells its state to all others again and again. Only the node with the smallest name
proposes, and only when *all* named nodes have answered:

1. All are ``empty``, or ``prepared`` for one and the same id: the proposer makes itself
   ``prepared``, for that id or a new one.
2. The others follow the proposer: they make themselves ``prepared`` for its id.
3. All are ``prepared`` for one id: the proposer makes itself ``formed``.
4. The others follow any node that is ``formed`` for the id for which they are ``prepared``.

A stage is on disk before it is told, so a crash repeats a step. If two of three disks are lost, the
two nodes do not form a new cluster beside the third, which holds acknowledged data: they need its
answer, and that is ``formed``.
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from contrail_replicator.peers.handshake import NO_CLUSTER, is_node_name
from contrail_replicator.peers.plan import NODES_MAX

_SMALLEST: Final = 3


class Stage(enum.IntEnum):
    """How far a node is part of a cluster."""

    EMPTY = 0
    PREPARED = 1
    FORMED = 2


@dataclass(frozen=True, slots=True)
class Membership:
    """What a node has on disk about its cluster: ``cluster_id`` is 16 zero bytes while empty.

    Its incarnation is 1 unless the cluster has registered it after the loss of its disk.
    """

    stage: Stage = Stage.EMPTY
    cluster_id: bytes = NO_CLUSTER
    incarnation: int = 1


class MembershipFile(Protocol):
    """The node's record of its membership."""

    def load(self) -> Membership:
        """Return what was saved last. Raises OSError."""

    def save(self, membership: Membership) -> None:
        """Replace it durably. After an OSError, the old one is intact."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a node tells the others: its membership, and all names it was started with, sorted."""

    membership: Membership
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """The next step of a node: what to save, or why it cannot go on by itself."""

    save: Membership | None = None
    obstacle: str = ""
    """A sentence for the operator; empty while the node only waits."""
    lost_disk: bool = False
    """The cluster exists and knows this name, but this folder is empty: the disk was lost."""


def checked_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the sorted names of a new cluster. Raises ValueError with a sentence."""
    given = list(names)
    for name in given:
        if not is_node_name(name):
            raise ValueError(f"not a node name: {name!r}")
    found = tuple(sorted(set(given)))
    if len(found) != len(given):
        raise ValueError("a node is named twice")
    if not found or 1 < len(found) < _SMALLEST:
        raise ValueError(
            f"a cluster begins with 1 or at least {_SMALLEST} nodes, not {len(found)}: two nodes "
            "survive no failure"
        )
    if len(found) > NODES_MAX:
        raise ValueError(f"a cluster has at most {NODES_MAX} nodes, not {len(found)}")
    return found


def node_number(name: str, names: tuple[str, ...]) -> int:
    """Return the number of a node of a newly formed cluster: 1 for the smallest name."""
    return names.index(name) + 1


def decide(
    name: str, own: Membership, names: tuple[str, ...], heard: Mapping[str, Report], new_id: bytes
) -> Decision:
    """Return what a node does next. ``heard`` has the newest report of each node that sent one.

    ``new_id`` is random; it becomes the cluster's id if this node is the first to propose one.
    """
    if own.stage is Stage.FORMED:
        return Decision()
    others = {other: report for other, report in heard.items() if other in names and other != name}
    obstacle = _obstacle(own, names, others)
    if obstacle is not None:
        return obstacle
    if any(report.membership.stage is Stage.FORMED for report in others.values()):
        return Decision(save=Membership(Stage.FORMED, own.cluster_id))
    proposer = names[0]
    if name == proposer:
        return _propose(own, [one.membership for one in others.values()], names, new_id)
    proposed = others[proposer].membership if proposer in others else Membership()
    if own.stage is Stage.EMPTY and proposed.stage is Stage.PREPARED:
        return Decision(save=proposed)
    return Decision()


def _propose(
    own: Membership, others: Sequence[Membership], names: tuple[str, ...], new_id: bytes
) -> Decision:
    if len(others) < len(names) - 1:
        return Decision()
    if own.stage is Stage.EMPTY:
        return Decision(save=Membership(Stage.PREPARED, next(iter(_ids(others)), new_id)))
    if all(other == own for other in others):
        return Decision(save=Membership(Stage.FORMED, own.cluster_id))
    return Decision()


def _obstacle(
    own: Membership, names: tuple[str, ...], others: Mapping[str, Report]
) -> Decision | None:
    formed = {
        other: report.membership.cluster_id
        for other, report in others.items()
        if report.membership.stage is Stage.FORMED
    }
    ids = _ids([own, *(report.membership for report in others.values())])
    if len(ids) > 1:
        shown = ", ".join(sorted(one.hex() for one in ids))
        return Decision(obstacle=f"the nodes belong to different clusters: {shown}")
    if formed and own.stage is Stage.EMPTY:
        return Decision(
            obstacle=f"{min(formed)} is part of a formed cluster, and this folder is empty",
            lost_disk=True,
        )
    for other, report in sorted(others.items()):
        # A formed cluster may have other nodes by now.
        if other not in formed and report.names != names:
            return Decision(
                obstacle=f"{other} was started with the nodes {', '.join(report.names)}; this node "
                f"with {', '.join(names)}"
            )
    return None


def _ids(memberships: Iterable[Membership]) -> set[bytes]:
    return {one.cluster_id for one in memberships if one.stage is not Stage.EMPTY}
