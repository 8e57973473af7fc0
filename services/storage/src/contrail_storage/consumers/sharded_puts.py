"""Consumers of streams with several shards: each shard has the consumer, and the first decides.

A consumer exists when the first shard has it, with the configuration that it has there. It is
created on the first shard last, and changed and removed there first. So a crash can only leave
consumers on other shards that do not exist or are out of date: `ShardedPuts.reconcile` drops or
changes them.
"""

from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec

from contrail_common.config_rules import complete_consumer
from contrail_common.errors import ApiError
from contrail_common.model import ConsumerConfig
from contrail_storage.consumers.consumer import Consumer
from contrail_storage.consumers.consumer_puts import is_settled
from contrail_storage.consumers.starts import Starts
from contrail_storage.core import commands as cmd
from contrail_storage.core.results import ConsumerPut, Done, Result
from contrail_storage.replica.shard import Shard
from contrail_storage.streams.outcomes import begun, expect
from contrail_storage.streams.stream import Stream


class ShardedPuts:
    """Creates and changes consumers on all shards of a stream. The caller allows one at a time."""

    def __init__(
        self,
        propose: Callable[[Shard, cmd.StreamCommand], Awaitable[Result]],
        find: Callable[[Stream, str], Consumer],
        starts: Starts,
    ) -> None:
        self._propose = propose
        self._find = find
        self._starts = starts

    async def put(self, stream: Stream, config: ConsumerConfig, given: cmd.Precondition) -> bool:
        """Create or update; return whether the consumer is new."""
        await self.reconcile(stream)
        config = complete_consumer(config, stream.config.consumer_limits)
        existing = stream.shards[0].machine.consumer(config.name)
        if is_settled(existing, config, given):
            return False
        if existing is None:
            await self._create(stream, config, given)
            return True
        await self._update(stream, config, given)
        return False

    async def _update(
        self, stream: Stream, config: ConsumerConfig, given: cmd.Precondition
    ) -> None:
        """Change the consumer on the first shard, which decides, then on the others."""
        update = msgspec.structs.replace(given, update=True)
        for number, shard in enumerate(stream.shards):
            with begun(number > 0):
                put = cmd.PutConsumer(config, 0, given=update)
                expect(await self._propose(shard, put), ConsumerPut)
                self._find(stream, config.name).dispatchers[number].reconfigured()
            update = cmd.Precondition(update=True)

    async def _create(
        self, stream: Stream, config: ConsumerConfig, given: cmd.Precondition
    ) -> None:
        creations = await self._starts.creations(stream.shards, config)
        creations[0] = msgspec.structs.replace(creations[0], given=given)
        try:
            # The first shard last: once it has the consumer, the consumer exists everywhere.
            for shard, put in reversed(list(zip(stream.shards, creations, strict=True))):
                expect(await self._propose(shard, put), ConsumerPut)
        except ApiError:
            with suppress(ApiError):  # if this fails, the next change or start undoes it
                await self.reconcile(stream)
            raise

    async def reconcile(self, stream: Stream) -> None:
        """Make the consumers of all shards the same as those of the first one."""
        first = stream.shards[0].machine
        for number, shard in enumerate(stream.shards[1:], 1):
            for machine in list(shard.machine.consumers.values()):
                name = machine.config.name
                wanted = first.consumer(name)
                if wanted is None:
                    result = await self._propose(shard, cmd.DropConsumer(machine.consumer_id))
                    expect(result, Done)
                elif wanted.config != machine.config:
                    update = cmd.Precondition(update=True)
                    put = cmd.PutConsumer(wanted.config, 0, given=update)
                    expect(await self._propose(shard, put), ConsumerPut)
                    with suppress(ApiError):  # it is not complete on another shard
                        self._find(stream, name).dispatchers[number].reconfigured()
