"""Chooses the groups that get the shards of a new stream."""

from collections import Counter
from collections.abc import Collection, Mapping

from contrail_storage.core.group_table import GroupEntry


def choose_groups(
    shards: int, replicas: int, table: Collection[GroupEntry], shards_in: Mapping[int, int]
) -> tuple[int, ...]:
    """Return the group of each of ``shards`` shards; empty if no group has so many members.

    ``shards_in`` has the number of shards in each group. The shards are spread over the preferred
    leaders of the groups, because a node that leads several of them publishes no faster. Among
    these, groups whose fullest member stores the fewest shards come first.
    """
    fitting = [entry for entry in table if len(entry.members) == replicas]
    if not fitting:
        return ()
    stored: Counter[str] = Counter()
    for entry in table:
        for member in entry.members:
            stored[member] += shards_in.get(entry.number, 0)
    led: Counter[str] = Counter()
    chosen: list[int] = []
    taken: Counter[int] = Counter(shards_in)
    for _ in range(shards):
        best = min(
            fitting,
            key=lambda entry: (
                led[entry.members[0]],
                max(stored[member] for member in entry.members),
                taken[entry.number],
                entry.number,
            ),
        )
        chosen.append(best.number)
        taken[best.number] += 1
        led[best.members[0]] += 1
        for member in best.members:
            stored[member] += 1
    return tuple(chosen)
