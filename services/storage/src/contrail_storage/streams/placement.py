"""Chooses the group that gets the shards of a new stream."""

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
