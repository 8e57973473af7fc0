"""Ages, deadlines, limits and inactive consumers. Each change is a proposed command.

The housekeeper keeps the time at which something may be due in each shard (`due_ns`) and looks at a
shard when that has passed, or after a change. Shards in which nothing happens cost nothing.
"""

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Final

import structlog

from contrail_common.errors import ApiError
from contrail_storage.consumers.manager import ConsumerManager
from contrail_storage.core import commands as cmd
from contrail_storage.core.agenda import Agenda
from contrail_storage.core.results import Removed
from contrail_storage.core.stream.deadlines import NO_DEADLINE
from contrail_storage.replica.changes import take
from contrail_storage.replica.groups import Groups
from contrail_storage.replica.shard import Shard, in_memory_first
from contrail_storage.replica.shard_logs import ShardLog
from contrail_storage.store.rocks_store import StoreError, StoreFailedError
from contrail_storage.streams.manager import StreamManager
from contrail_storage.streams.removals import slice_messages
from contrail_storage.upkeep.backoff import Backoff
from contrail_storage.upkeep.due_messages import DueMessages, ages_singly

TICK_S: Final = 0.1
_RETRY_MAX_S: Final = 60.0
_ENTERED: Final = 1_000
"""Changed shards that are entered in one turn of the event loop."""
_log = structlog.get_logger("contrail.housekeeper")


class Housekeeper:
    """Looks ten times a second at the shards in which something may be due, and proposes it."""

    def __init__(
        self,
        streams: StreamManager,
        consumers: ConsumerManager,
        shard_log: ShardLog,
        shards: Mapping[int, Shard],
        changed: set[int],
        groups: Groups,
        due: DueMessages,
    ) -> None:
        # Tells shards of listed streams from those that are being made or removed.
        self._streams = streams
        # Removes inactive consumers.
        self._consumers = consumers
        # Takes the commands for what is due.
        self._shard_log = shard_log
        # By id; shared with the applier, which changes it.
        self._shards = shards
        # Ids of shards that changed. The applier adds to it, a tick empties it.
        self._changed = changed
        # Know their log time, and whether this node leads. Only then, something is done.
        self._groups = groups
        # Finds single messages that are due.
        self._due = due
        # Shards by id, with `due_ns`, in log time.
        self._agenda = Agenda[int]()
        # Shards whose reads fail. They are in `_paused` instead of `_agenda`.
        self._failing: dict[int, Backoff] = {}
        # Failing shards, with the loop time (s) of the next attempt.
        self._paused = Agenda[int]()
        # Held during a tick.
        self._ticking = asyncio.Lock()

    async def run(self) -> None:
        """Tick until cancelled."""
        waiting = Backoff(TICK_S, TICK_S)
        while True:
            await asyncio.sleep(TICK_S)
            try:
                await self.tick()
                waiting.succeeded()
            except (ApiError, StoreError) as error:
                if waiting.failed(str(error)):
                    _log.info("housekeeping_delayed", reason=str(error))

    async def tick(self) -> None:
        """Do what is due now."""
        async with self._ticking:
            for entered, shard_id in enumerate(take(self._changed)):
                self._enter(shard_id)
                self._free(shard_id)
                if entered % _ENTERED == _ENTERED - 1:
                    await asyncio.sleep(0)
            # Log time may have run at any speed since the last tick, so it is read each time.
            await self._look(self._groups.latest_ns())
            await self._consumers.drop_inactive()

    def _enter(self, shard_id: int) -> None:
        """Enter the time of the next look at a shard."""
        shard = self._shards.get(shard_id)
        if shard is None:
            self._failing.pop(shard_id, None)
            self._paused.leave(shard_id)
        led = shard is not None and self._groups.leads(shard.group)
        at_ns = due_ns(shard) if shard is not None and led else NO_DEADLINE
        if at_ns == NO_DEADLINE:
            self._agenda.leave(shard_id)
        elif shard_id not in self._failing:
            self._agenda.enter(shard_id, at_ns)

    def _free(self, shard_id: int) -> None:
        """Free some removed deliveries and subjects of a shard, the others in the next ticks."""
        shard = self._shards.get(shard_id)
        if shard is not None and shard.machine.has_dropped:
            shard.machine.free_dropped()
            if shard.machine.has_dropped:
                self._changed.add(shard_id)

    async def _look(self, now_ns: int) -> None:
        """Check the shards in which something may be due. Raises ApiError, StoreError."""
        loop_s = asyncio.get_running_loop().time()
        due = self._agenda.take(now_ns) + self._paused.take(loop_s)
        left = in_memory_first([self._shards[one] for one in due if one in self._shards])
        left.reverse()
        try:
            while left:
                await self._look_at(left[-1], self._groups.time_ns(left[-1].group))
                left.pop()
        finally:
            # After an error or a cancellation, nothing is forgotten.
            for shard in left:
                self._enter(shard.machine.shard_id)
                self._retry_if_failing(shard.machine.shard_id, loop_s)

    async def _look_at(self, shard: Shard, now_ns: int) -> None:
        shard_id = shard.machine.shard_id
        if not (self._streams.is_listed(shard_id) and self._groups.leads(shard.group)):
            self._failing.pop(shard_id, None)
            return  # it is noted as changed once its stream is listed, or this node leads it
        try:
            await self._check(shard, now_ns)
        except StoreFailedError as error:
            # The other shards continue, and this one is tried later: the disk may recover.
            backoff = self._failing.setdefault(shard_id, Backoff(TICK_S, _RETRY_MAX_S))
            if backoff.failed(str(error)):
                _log.warning("housekeeping_put_off", stream=shard.name, error=str(error))
            self._retry_if_failing(shard_id, asyncio.get_running_loop().time())
        else:
            self._failing.pop(shard_id, None)
            self._enter(shard_id)

    def _retry_if_failing(self, shard_id: int, loop_s: float) -> None:
        backoff = self._failing.get(shard_id)
        if backoff is not None:
            # Otherwise a shard whose reads fail would delay every tick of all others.
            self._paused.enter(shard_id, loop_s + backoff.pause_s)

    async def _check(self, shard: Shard, now_ns: int) -> None:
        """Propose what is due in one shard. Raises ApiError, StoreError."""
        machine = shard.machine  # its stream may be removed while another shard is checked
        by_deadline = machine.deadlines.earliest_ns <= now_ns
        if machine.exists and (by_deadline or ages_singly(shard)):
            await self._due.remove(shard, now_ns)
        # Messages that age singly are found one by one, by `remove`.
        if (
            machine.exists
            and not ages_singly(shard)
            and not shard.damaged
            and await self._due.age_is_due(shard, now_ns)
        ):
            await self._repeat(shard, cmd.ExpireAge(slice_messages(shard)))
        if machine.exists and machine.over_limits and not shard.damaged:
            # An append removes only a limited number of messages. A crash may also have separated
            # lowered limits from the removals that they cause.
            await self._unless_gone(shard, self._streams.removals.trim_to_limits(shard))
        if shard.machine.pending_recheck and not shard.damaged:
            await self._repeat(shard, cmd.EnforceInterest(slice_messages(shard)))
        if shard.machine.counters.replaced and not shard.damaged:
            await self._unless_gone(shard, self._streams.removals.finish_rollups(shard))

    @staticmethod
    async def _unless_gone(shard: Shard, removal: Awaitable[object]) -> None:
        """Wait for a removal; it may fail if the stream is removed meanwhile."""
        try:
            await removal
        except ApiError:
            if shard.machine.exists:
                raise

    async def _repeat(self, shard: Shard, command: cmd.ExpireAge | cmd.EnforceInterest) -> None:
        more = True
        # A command removes a slice, so that publishes are applied in between.
        while more and shard.machine.exists:
            result = await self._shard_log.command(shard.machine.shard_id, command)
            more = isinstance(result, Removed) and result.more


def due_ns(shard: Shard) -> int:
    """The log time from which on `Housekeeper` may have something to do in a shard.

    It may be too early, and costs a look then. It is never too late while the shard does not
    change. 0: now; NO_DEADLINE: not before it changes. Reads memory only.
    """
    machine = shard.machine
    if not machine.exists or shard.damaged:  # what ends the damage is a change
        return NO_DEADLINE
    if machine.over_limits or machine.pending_recheck or machine.counters.replaced:
        return 0
    # Of a sealed stream, no message goes singly.
    singly, sealed = ages_singly(shard), machine.config.sealed
    due = NO_DEADLINE if sealed else machine.deadlines.earliest_ns
    max_age_ns = machine.config.max_age_ns
    ages = max_age_ns and machine.counters.messages and shard.stay_below <= shard.applied_seq
    if ages and not (sealed and singly):
        # Messages are in order of time, so this holds when the oldest one is gone, too.
        due = min(due, shard.oldest[1] + max_age_ns)
    return due
