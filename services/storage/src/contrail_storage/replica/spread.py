"""Streams whose shards are in several groups, as the leader of the first shard serves them.

That group is the *home* of the stream. All groups of a stream have the same members, so the leader
of the home has copies of all shards. It reads from them, and sends commands to the other leaders. A
copy is *fresh* if it has everything from before this node began to lead the home: then nothing that
an earlier leader has confirmed can be missing, and no other node serves the stream meanwhile.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

from contrail_common.errors import ApiError
from contrail_storage.core.meta_machine import MetaMachine
from contrail_storage.replica.elsewhere import Elsewhere
from contrail_storage.replica.groups import LATELY_S, Groups
from contrail_storage.replica.raft_port import no_leader

_AGAIN_S: Final = 0.05


class Spread:
    """Which copies are fresh. Used on the event loop only."""

    def __init__(self, groups: Groups, meta: MetaMachine, elsewhere: Elsewhere) -> None:
        self.on_fresh: Callable[[int], None] = lambda home: None
        """Learns of a home with a further copy that is fresh."""
        self.on_lost: Callable[[int], None] = lambda group: None
        """Learns of a group whose copy may have ceased to be fresh."""
        self.groups = groups
        """The groups of this node."""
        # Knows the streams.
        self._meta = meta
        self.elsewhere = elsewhere
        """Reaches the leaders of other shards."""
        elsewhere.on_lost = self.lose
        # By home that this node leads: the other groups with a fresh copy.
        self._fresh: dict[int, set[int]] = {}
        # By home and other group: what waits for the copy to be fresh.
        self._asking: dict[tuple[int, int], asyncio.Task[None]] = {}

    def close(self) -> None:
        """End what waits."""
        self.elsewhere.close()
        for task in self._asking.values():
            task.cancel()

    def role_changed(self, number: int, leads: bool) -> None:
        """Note that this node begins or ceases to lead a group."""
        self.lose(number)
        self._fresh.pop(number, None)
        for (home, _), task in list(self._asking.items()):
            if home == number:
                task.cancel()
        if leads:
            for other in {*self._meta.spread_from(number).values()} - {number}:
                self._ask(number, other)

    def lose(self, group: int) -> None:
        """Make sure that the copy of a group is fresh before it is used again.

        Its leader may have changed, or commands for it may be lost.
        """
        homes = [home for home, fresh in self._fresh.items() if group in fresh]
        for home in homes:
            self._fresh[home].discard(group)
            self._ask(home, group)
        if homes:
            self.on_lost(group)

    def is_fresh(self, groups: Iterable[int]) -> bool:
        """Whether this node may serve the stream with shards in ``groups``, the home first.

        If it leads the home and some copy is not fresh, it begins to make sure that it is.
        """
        home, *others = groups
        if not self.groups.leads(home):
            return False
        fresh = self._fresh.get(home, ())
        for group in others:
            if group not in fresh:
                self._ask(home, group)
        return all(one in fresh and not self.groups[one].flags for one in others)

    def check(self, groups: Iterable[int]) -> None:
        """Raise NOT_LEADER unless :meth:`is_fresh`."""
        home, *others = groups
        self.groups.check_led(home)
        if not self.is_fresh((home, *others)):
            raise no_leader("")

    def lacks_copies(self, home: int) -> bool:
        """Whether streams of ``home`` have shards in groups of which this node has no whole copy.

        Then another node should lead the home, until this one has fetched what it lacks.
        """
        others = {*self._meta.spread_from(home).values()} - {home}
        return any(self.groups[one].flags for one in others if one in self.groups)

    async def confirm(self, groups: Iterable[int]) -> None:
        """Wait until the copies of ``groups`` are no older than this call (NOT_LEADER)."""
        await asyncio.gather(*map(self.elsewhere.confirm, groups))

    async def confirm_lately(self, home: int, group: int) -> None:
        """As :meth:`confirm`, but what is read may be 0.3 s old. Mostly waits for nothing."""
        await self.groups.confirm_led_lately(home)
        if self.groups.leads(group):
            await self.groups.confirm_led_lately(group)
        elif self.groups[group].staleness_s() > LATELY_S:
            await self.elsewhere.confirm(group)
        self.check((home, group))

    def _ask(self, home: int, group: int) -> None:
        if (home, group) in self._asking:
            return
        task = asyncio.ensure_future(self._until_fresh(home, group))
        self._asking[home, group] = task
        task.add_done_callback(lambda _: self._asking.pop((home, group), None))

    async def _until_fresh(self, home: int, group: int) -> None:
        while self.groups.leads(home):
            term = self.groups[home].term
            try:
                await self.elsewhere.confirm(group)
            except ApiError:
                await asyncio.sleep(_AGAIN_S)
                continue
            if self.groups.leads(home) and self.groups[home].term == term:
                self._fresh.setdefault(home, set()).add(group)
                self.on_fresh(home)
                return
