"""Periodic work: ages, deadlines and inactive consumers. Each change is a proposed command."""

import asyncio
from typing import Final

import structlog

from contrail_common.errors import ApiError
from contrail_storage.consumers.manager import ConsumerManager
from contrail_storage.core import commands as cmd
from contrail_storage.core.results import Removed
from contrail_storage.replica.log_time import LogTime
from contrail_storage.replica.shard import Shard, in_memory_first
from contrail_storage.replica.shard_logs import ShardLog
from contrail_storage.store.block_store import BlockStore
from contrail_storage.store.rocks_store import StoreError, StoreFailedError
from contrail_storage.streams.manager import StreamManager
from contrail_storage.streams.stream import shard_state
from contrail_storage.upkeep.backoff import Backoff
from contrail_storage.upkeep.due_messages import DueMessages, ages_singly

TICK_S: Final = 0.1
_RETRY_MAX_S: Final = 60.0
_SLICE_MESSAGES: Final = 20_000
_log = structlog.get_logger("contrail.housekeeper")


class Housekeeper:
    """Checks every shard ten times a second, and proposes what is due."""

    def __init__(
        self,
        streams: StreamManager,
        consumers: ConsumerManager,
        shard_log: ShardLog,
        blocks: BlockStore,
        clock: LogTime,
        due: DueMessages,
    ) -> None:
        self._streams = streams
        self._consumers = consumers
        self._shard_log = shard_log
        self._blocks = blocks
        self._clock = clock
        self._due = due
        self._failing: dict[int, tuple[Backoff, float]] = {}
        """Shards whose reads fail: the pause, and the loop time (s) of the next attempt."""

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
        """Check all shards once."""
        now_ns = self._clock.now()
        for shard in in_memory_first(self._streams.shards()):
            shard_id = shard.machine.shard_id
            loop_s = asyncio.get_running_loop().time()
            backoff, due_s = self._failing.get(shard_id, (None, 0.0))
            # A shard whose reads fail would otherwise delay every tick of all others.
            if loop_s < due_s:
                continue
            try:
                await self._check(shard, now_ns)
                self._failing.pop(shard_id, None)
            except StoreFailedError as error:
                # The other shards continue, and this one is tried later: the disk may recover.
                backoff = backoff or Backoff(TICK_S, _RETRY_MAX_S)
                if backoff.failed(str(error)):
                    _log.warning("housekeeping_put_off", stream=shard.name, error=str(error))
                self._failing[shard_id] = backoff, loop_s + backoff.pause_s
        self._consumers.close_gone()
        await self._consumers.drop_inactive()

    async def _check(self, shard: Shard, now_ns: int) -> None:
        """Propose what is due in one shard. Raises ApiError, StoreError."""
        machine = shard.machine  # its stream may be removed while another shard is checked
        by_deadline = machine.deadlines.earliest_ns <= now_ns
        if machine.exists and (by_deadline or ages_singly(shard)):
            await self._due.remove(shard, now_ns)
        if machine.exists and self._age_due(shard, now_ns):
            await self._repeat(shard, cmd.ExpireAge(_SLICE_MESSAGES))
        if machine.exists and machine.over_limits and not shard.damaged:
            # An append removes only a limited number of messages. A crash may also have separated
            # lowered limits from the removals that they cause.
            await self._repeat(shard, cmd.EnforceLimits(_SLICE_MESSAGES))
        if shard.machine.pending_recheck and not shard.damaged:
            await self._repeat(shard, cmd.EnforceInterest(_SLICE_MESSAGES))
        for subject in [] if shard.damaged else list(shard.machine.counters.replaced):
            await self._repeat(shard, cmd.FinishRollup(subject, _SLICE_MESSAGES))

    def _age_due(self, shard: Shard, now_ns: int) -> bool:
        machine = shard.machine
        max_age_ns = machine.config.max_age_ns
        if not max_age_ns or not machine.counters.messages or shard.damaged:
            return False
        if ages_singly(shard):
            return False  # `DueMessages` finds them one by one
        return shard_state(shard).first_ts_ns <= now_ns - max_age_ns

    async def _repeat(
        self,
        shard: Shard,
        command: cmd.ExpireAge | cmd.EnforceLimits | cmd.FinishRollup | cmd.EnforceInterest,
    ) -> None:
        more = True
        # A command removes a slice, so that publishes are applied in between.
        while more and shard.machine.exists:
            result = await self._shard_log.command(shard.machine.shard_id, command)
            more = isinstance(result, Removed) and result.more
