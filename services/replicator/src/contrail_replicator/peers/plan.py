"""Which nodes make up which groups.

The nodes stand on a ring on which zones alternate. Each node begins two sets of three: one with the
next two nodes of the ring, one that skips the second of them. So every node leads as many groups as
any other, and what a lost node led and held spreads over all others. Each set has a group for each
of its members to lead, so that all of them may lead shards of one stream.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby, zip_longest
from typing import Final, NamedTuple

NODES_MAX: Final = 32


class Place(NamedTuple):
    """A node and its failure domain. Nodes without a zone all have the empty one."""

    name: str
    zone: str = ""


def ring(nodes: Iterable[Place]) -> list[Place]:
    """Return the nodes by name, such that zones alternate as long as there are several."""
    by_zone = sorted(nodes, key=lambda one: (one.zone, one.name))
    zones = [list(members) for _, members in groupby(by_zone, key=lambda one: one.zone)]
    zones.sort(key=len, reverse=True)
    return [one for row in zip_longest(*zones) for one in row if one is not None]


def member_set(nodes: Sequence[Place], first: int, replicas: int, skip: int = 0) -> list[str]:
    """Return the members of one group; the first is its preferred leader.

    ``skip`` suitable nodes are passed over before the last member is chosen, as far as there are
    that many. A node is suitable if no member is in its zone, or if all zones have a member.
    """
    members = [nodes[first]]
    walk = [nodes[(first + step) % len(nodes)] for step in range(1, len(nodes))]
    while len(members) < replicas:
        taken = {one.zone for one in members}
        others = [one for one in walk if one not in members]
        # The walk goes on behind the newest member.
        behind = walk.index(members[-1]) + 1 if len(members) > 1 else 0
        ordered = [one for one in walk[behind:] + walk[:behind] if one in others]
        suitable = [one for one in ordered if one.zone not in taken] or ordered
        last = len(members) == replicas - 1
        members.append(suitable[skip % len(suitable) if last else 0])
    return [one.name for one in members]


def groups_of_three(nodes: Iterable[Place]) -> list[list[str]]:
    """Return the members of the 2n groups with three replicas; there are at least three nodes."""
    around = ring(nodes)
    return [member_set(around, first, 3, skip) for skip in range(2) for first in range(len(around))]


def groups_of_five(nodes: Iterable[Place]) -> list[list[str]]:
    """Return the members of the n groups with five replicas; there are at least five nodes."""
    around = ring(nodes)
    return [member_set(around, first, 5) for first in range(len(around))]


def groups_of_other_leaders(groups: Iterable[Sequence[str]]) -> list[list[str]]:
    """Return what the groups lack for each member of a set to lead a group with these members."""
    led: dict[frozenset[str], list[str]] = {}
    for group in groups:
        led.setdefault(frozenset(group), []).append(group[0])
    return [
        [name, *sorted(members - {name})]
        for members, leaders in led.items()
        for name in sorted(members.difference(leaders))
    ]


def meta_members(nodes: Iterable[Place]) -> list[str]:
    """Return the members of the meta group: one of up to two nodes, else three, and five from five.

    Raises ValueError for no node.
    """
    around = ring(nodes)
    if not around:
        raise ValueError("a cluster has at least one node")
    replicas = next(size for size in (5, 3, 1) if size <= len(around))
    return member_set(around, 0, replicas)
