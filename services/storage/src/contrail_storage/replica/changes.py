"""What applied commands changed, for background work that must not ask every shard in turn."""

import sys
from typing import TypeVar

from contrail_storage.core import commands as cmd
from contrail_storage.core.results import ConsumerPut, Result

ConsumerKey = tuple[int, int]
"""The id of a shard, and of a consumer there. Neither is used twice."""
T = TypeVar("T", int, ConsumerKey)


class Changes:
    """What changed since its follower last took it. Used on the event loop only.

    Each set has one follower, which empties it (`take`). What changes again is in it once, so
    memory is bounded by the number of shards and consumers.
    """

    def __init__(self) -> None:
        self.shards: set[int] = set()
        """Shards whose state changed in any way; for the housekeeper."""
        self.deletions: set[int] = set()
        """Shards with deletions, whose state or blocks changed; for the compactor."""
        self.consumers: set[ConsumerKey] = set()
        """Consumers that were created, changed or removed; for the consumer manager."""
        self.all_consumers: set[int] = set()
        """Shards of which every consumer may have changed; for the consumer manager."""

    def note_all(self, shard_id: int) -> None:
        """Note that anything of a shard may have changed: it was made, loaded or removed."""
        self.shards.add(shard_id)
        self.deletions.add(shard_id)
        self.all_consumers.add(shard_id)

    def note_consumer(self, shard_id: int, command: cmd.Command, result: Result) -> None:
        """Note the consumer that a command for a shard changed, if it did."""
        if isinstance(result, ConsumerPut):
            self.consumers.add((shard_id, result.consumer_id))
        elif isinstance(command, cmd.DropConsumer):
            self.consumers.add((shard_id, command.consumer_id))


def take(changed: set[T], most: int = sys.maxsize) -> list[T]:
    """Take up to ``most`` out of one of the sets of `Changes`."""
    return [changed.pop() for _ in range(min(most, len(changed)))]
