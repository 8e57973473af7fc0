"""The pace of applying entries: turns of the event loop, and a store that is behind."""

import asyncio
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Final

from contrail_storage.replica.apply_pace import TURN_S, ApplyPace
from contrail_storage.replica.memory_group import MemoryGroup
from contrail_storage.replica.proposer import UNWRITTEN_BYTES_MAX
from contrail_storage.replica.raft_port import Callbacks, Committed

QUICK_S: Final = TURN_S / 100


class Store:
    """Applied entries, as far as the pace asks about them."""

    unwritten_bytes = 0

    def hash_key(self, shard_id: int) -> bytes:
        raise AssertionError


def lost_nothing(contexts: list[object]) -> None:
    raise AssertionError(contexts)


class Owner:
    """A group of shards in memory whose entries take `used_s` each."""

    def __init__(self) -> None:
        self.store = Store()
        self.used_s = QUICK_S
        self.applied: list[bytes] = []
        callbacks = Callbacks(self.commit, lambda leads: None, lost_nothing, lost_nothing)
        self.group = MemoryGroup(callbacks)
        self.pace = ApplyPace(self.store)
        self.group.start()

    def commit(self, entry: Committed) -> bool:
        self.applied.append(entry.data)
        return self.pace.may_go_on(self.group, self.used_s)

    def propose(self, count: int) -> None:
        for number in range(count):
            self.group.propose(b"%d" % number, None)


def on_a_loop(test: Callable[[], Coroutine[None, None, None]]) -> Callable[[], None]:
    return lambda: asyncio.run(test())


async def turn() -> None:
    """Run what is due now, and nothing that becomes due meanwhile."""
    await asyncio.sleep(0)


@on_a_loop
async def test_long_entries_are_applied_one_in_a_turn() -> None:
    owner = Owner()
    owner.used_s = TURN_S
    owner.propose(4)
    seen = [0]
    while len(owner.applied) < 4:
        await turn()
        seen.append(len(owner.applied))
    assert max(after - before for before, after in pairwise(seen)) == 1
    assert owner.applied == [b"0", b"1", b"2", b"3"]


@on_a_loop
async def test_short_entries_share_a_turn() -> None:
    owner = Owner()
    owner.propose(50)
    await turn()
    assert len(owner.applied) == 50


@on_a_loop
async def test_nothing_is_applied_while_the_store_is_behind() -> None:
    owner = Owner()
    owner.store.unwritten_bytes = UNWRITTEN_BYTES_MAX + 1
    owner.propose(3)
    for _ in range(10):
        await turn()
        owner.pace.resume()
    assert owner.applied == [b"0"]  # the entry after which the pace looks
    owner.propose(1)
    await turn()
    assert owner.applied == [b"0"]
    owner.store.unwritten_bytes = UNWRITTEN_BYTES_MAX
    owner.pace.resume()
    await turn()
    assert owner.applied == [b"0", b"1", b"2", b"0"]
