"""Checks that what the clients of a run were told is true at its end."""

import hashlib
from collections.abc import Sequence

from contrail_client import StoredMessage
from contrail_storage.core.chain import NO_CHAIN
from contrail_storage.node import StorageNode
from tests.cluster import verdict
from tests.sim.cluster import SimCluster
from tests.sim.load import ALL, LOAD, PLAIN, REGISTER, Clients, History, Read, Write

_SHOWN = 5


def problems(cluster: SimCluster, clients: Clients) -> list[str]:
    """Let the clients end, and return all broken promises with a few examples."""
    of_parts = clients.finish()
    history = clients.history
    stored = clients.stored(LOAD)
    found = verdict.problems(history.journal, stored, stored, eager_consumer=ALL)
    plain, register = map(clients.stored, (PLAIN, REGISTER))
    checks: dict[str, Sequence[object]] = {
        **of_parts,
        "published once, and not stored so": misplaced(history.plain, plain),
        "changed in spite of what was expected": misordered(history.writes, register),
        "register changed without a request that may have done it": misplaced(
            history.writes, register
        ),
        "stale reads": stale(history.writes, history.reads),
        "read before it was written": early(history, register),
        "replicas that differ": different(cluster),
        "faults of nodes": faults(cluster),
    }
    return found + [
        f"{name}: {len(found)}, such as {list(found)[:_SHOWN]}"
        for name, found in checks.items()
        if found
    ]


def misplaced(writes: Sequence[Write], stored: Sequence[StoredMessage]) -> list[str]:
    """Writes that are not where they were acknowledged, or are there though refused, or twice."""
    places: dict[str, list[int]] = {}
    for message in stored:
        places.setdefault(message.payload.decode(), []).append(message.seq)
    known = {one.name for one in writes}
    wrong = [f"{name}, never sent" for name in places if name not in known]
    for one in writes:
        at = places.get(one.name, [])
        right = (len(at) < 2) if one.seq is None else at == ([one.seq] if one.seq else [])
        if not right:
            wrong.append(f"{one.name} at {at}, answered {one.seq}")
    return wrong


def misordered(writes: Sequence[Write], stored: Sequence[StoredMessage]) -> list[str]:
    expected = {one.name: one.expected for one in writes}
    wrong, before = [], 0
    for message in stored:
        name = message.payload.decode()
        if expected.get(name) != before:
            wrong.append(f"{name} at {message.seq} follows {before}, not {expected.get(name)}")
        before = message.seq
    return wrong


def stale(writes: Sequence[Write], reads: Sequence[Read]) -> list[str]:
    """Reads that miss what was acknowledged, or read, before they began."""
    facts = [(one.ended_s, one.seq) for one in writes if one.seq]
    facts += [(one.ended_s, one.seq) for one in reads]
    facts.sort()
    wrong, at, highest = [], 0, 0
    for read in sorted(reads, key=lambda one: one.begun_s):
        while at < len(facts) and facts[at][0] < read.begun_s:
            highest = max(highest, facts[at][1])
            at += 1
        if read.seq < highest:
            wrong.append(f"{read.seq} at {read.begun_s:.3f}, after {highest}")
    return wrong


def early(history: History, stored: Sequence[StoredMessage]) -> list[str]:
    names = {message.seq: message.payload.decode() for message in stored}
    begun = {one.name: one.begun_s for one in history.writes}
    return [
        f"{read.seq} at {read.ended_s:.3f}"
        for read in history.reads
        if read.seq and begun.get(names.get(read.seq, ""), float("inf")) > read.ended_s
    ]


def different(cluster: SimCluster) -> list[str]:
    """Groups whose members have other digests, once all have applied the same."""
    members: dict[int, list[StorageNode]] = {}
    for one in cluster.nodes.values():
        for number, group in one.node.logged_groups.items() if one.node is not None else ():
            if not group.is_alone and one.node is not None:
                members.setdefault(number, []).append(one.node)

    def even() -> bool:
        return all(
            len({node.groups[number].applied_index for node in nodes}) == 1
            for number, nodes in members.items()
        )

    def digest_of(node: StorageNode, number: int) -> bytes:
        return node.applier.chains.get(number, NO_CHAIN).digest

    cluster.until(even)
    return [
        f"group {number}"
        for number, nodes in members.items()
        if len({digest_of(node, number) for node in nodes}) > 1
    ]


def digest(cluster: SimCluster) -> str:
    """The time and the digests of all groups, which agree only if all that happened does."""
    found = [f"{cluster.loop.now:.9f}"]
    for one in cluster.nodes.values():
        assert one.node is not None
        chains = sorted(one.node.applier.chains.items())
        found += [f"{number}:{chain.digest.hex()}" for number, chain in chains]
    return hashlib.sha256(" ".join(found).encode()).hexdigest()[:16]


def faults(cluster: SimCluster) -> list[str]:
    nodes = [one.node for one in cluster.nodes.values() if one.node is not None]
    return [node.failure for node in nodes if node.failure] + cluster.loop.errors
