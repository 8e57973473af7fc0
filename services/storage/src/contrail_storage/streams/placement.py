"""Chooses the groups that get the shards of a new stream."""

from collections import Counter
from collections.abc import Collection, Mapping

from contrail_storage.core.group_table import GroupEntry


def choose_group(
    replicas: int, table: Collection[GroupEntry], shards_in: Mapping[int, int]
) -> GroupEntry | None:
    """Return the group for a new stream; None if no group has so many members.

    ``shards_in`` has the number of shards in each group. The group whose preferred leader leads the
    fewest shards comes first, and among these the one whose fullest member stores the fewest.
    """
    led: Counter[str] = Counter()
    stored: Counter[str] = Counter()
    for entry in table:
        shards = shards_in.get(entry.number, 0)
        led[entry.members[0]] += shards
        for member in entry.members:
            stored[member] += shards

    def load(entry: GroupEntry) -> tuple[int, int, int, int]:
        fullest = max(stored[member] for member in entry.members)
        return led[entry.members[0]], fullest, shards_in.get(entry.number, 0), entry.number

    fitting = (entry for entry in table if len(entry.members) == replicas)
    return min(fitting, key=load, default=None)


def choose_groups(
    first: GroupEntry, shards: int, table: Collection[GroupEntry], shards_in: Mapping[int, int]
) -> tuple[int, ...]:
    """Return the group of each shard of a new stream; ``first`` is that of the first shard.

    They have the same members, since the leader of the first shard serves all of them from its own
    copies. Their preferred leaders differ as far as possible.
    """
    members = set(first.members)
    alike = [entry for entry in table if set(entry.members) == members]
    counts = Counter(shards_in)
    chosen = [first]
    while len(chosen) < shards:
        counts[chosen[-1].number] += 1
        leads = Counter(entry.members[0] for entry in chosen)
        fewest = min(leads[entry.members[0]] for entry in alike)
        others = [entry for entry in alike if leads[entry.members[0]] == fewest]
        chosen.append(choose_group(len(members), others, counts) or first)
    return tuple(entry.number for entry in chosen)
