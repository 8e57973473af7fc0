"""A stream with subject keys: what was erased leaves no key on any disk, and no other key is lost.

The clients of a run have no keys. The checker does: it reads those of the members from inside.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from random import Random
from typing import Final

from contrail_common.subjects import matches
from contrail_link.contract import StorageLink
from contrail_storage.node import StorageNode
from contrail_storage.seal.shared_keys import SharedKeys
from tests.sim.cluster import SimNode
from tests.sim.load import Clients
from tests.sim.removals import Removals

SEALED: Final = "SEALED"


class SealedRemovals(Removals):
    """Publishes to a stream with subject keys, and erases its subjects."""

    stream = SEALED
    erasure = "subject_key"
    erased_subjects = 0.15

    def __init__(self, clients: Clients) -> None:
        super().__init__(clients)
        # By subject: all keys that have sealed messages.
        self._keys: defaultdict[str, set[bytes]] = defaultdict(set)

    def finish(self) -> dict[str, Sequence[object]]:
        """The broken promises."""
        found = super().finish()
        nodes = self._clients.cluster.nodes.values()
        self._clients.cluster.until(lambda: have_the_same_keys(nodes, content=True))
        plain = self.found_on_disks([f"<{SEALED} ".encode()])
        return {**found, f"{SEALED}: content that is not sealed": plain}

    async def _store(self, link: StorageLink, number: int, random: Random) -> None:
        stored = len(self._stored)
        await super()._store(link, number, random)
        for one in list(self._stored.values())[stored:]:
            self._note_keys(one.subject)

    def _traces(self, pattern: str, removed: list[int]) -> list[bytes]:
        erased = [one for one in self._keys if pattern and matches(pattern, one)]
        for subject in erased:
            self._note_keys(subject)
        keys = {key for subject in erased for key in self._keys[subject]}
        return super()._traces(pattern, removed) + sorted(keys)

    def _note_keys(self, subject: str) -> None:
        for one in self._clients.cluster.nodes.values():
            node = one.node
            entry = node.meta.streams.get(SEALED) if node is not None else None
            if node is not None and entry is not None and _keys_of(node).exists:
                keys = _keys_of(node)
                mark = keys._mark(entry.shard_id, subject)
                found = keys._slots_of(entry.shard_id, mark)
                self._keys[subject].update(slot.key for _, slot in found)


def have_the_same_keys(nodes: Iterable[SimNode], *, content: bool = False) -> bool:
    """Whether all nodes run, and members have the same keys.

    ``content`` compares all of each key, and leaves out those that are not named: a leader that
    failed leaves some, which seal nothing and stay until a later key is named.
    """
    by_shard: defaultdict[int, set[frozenset[object]]] = defaultdict(set)
    for one in nodes:
        if one.node is None or not one.runs or _keys_of(one.node).is_behind:
            return False
        for shard_id, shard in one.node.applier.shards.items():
            if one.node.catching_up.is_replicated(shard.group):
                by_shard[shard_id].add(frozenset(_held(_keys_of(one.node), shard_id, content)))
    return all(len(found) == 1 for found in by_shard.values())


def _held(keys: SharedKeys, shard_id: int, content: bool) -> Iterable[object]:
    if content:
        return keys.give(shard_id, keys.ids_of(keys.slots_of_shard(shard_id)))
    # One that most members have may be named soon: it must not be lost either.
    return keys.ids_of(keys._live_slots(shard_id).tolist())


def _keys_of(node: StorageNode) -> SharedKeys:
    return node.key_sharing.keys
