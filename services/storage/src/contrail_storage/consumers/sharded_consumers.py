"""Consumers of streams with several shards: each shard has the consumer, and the first decides.

A consumer exists when the first shard has it, with the configuration that it has there. It is
created on the first shard last, and changed and removed there first. So a crash can only leave
consumers on other shards that do not exist or are out of date. Mending drops or changes them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Protocol

import msgspec

from contrail_common import errors
from contrail_common.config_rules import complete_consumer
from contrail_common.errors import ApiError, FieldProblem
from contrail_common.model import INACTIVE_THRESHOLD_NS, ConsumerConfig, ConsumerInfo
from contrail_link.contract.consume import AckItem, AckResult
from contrail_storage.consumers.consumer_puts import is_settled
from contrail_storage.consumers.dispatcher import Dispatcher
from contrail_storage.consumers.sharded_dispatcher import ShardedDispatcher
from contrail_storage.core import commands as cmd
from contrail_storage.core.results import ConsumerPut, Done, Result
from contrail_storage.core.subjects.filters import SubjectFilter
from contrail_storage.reading.reader import Reader
from contrail_storage.replica.shard import Shard
from contrail_storage.streams.manager import StreamManager, begun, expect
from contrail_storage.streams.sharded_state import own_cursor

_DISPATCHERS_MAX = 4_096
"""Dispatchers that are kept at most before those of deleted consumers are dropped."""


class Acknowledge(Protocol):
    """Accepts acknowledgements of one shard."""

    async def __call__(
        self, shard: Shard, name: str, items: list[AckItem], *, sync: bool
    ) -> list[AckResult]:
        """Acknowledge as ``StorageLink.acknowledge`` does, on ``shard`` only."""
        ...


class ShardedConsumers:
    """The part of the consumer manager that works on all shards of a stream together."""

    def __init__(
        self,
        streams: StreamManager,
        reader: Reader,
        propose: Callable[[Shard, cmd.StreamCommand], Awaitable[Result]],
        dispatcher_of: Callable[[Shard, str], Dispatcher],
        creation: Callable[[Shard, ConsumerConfig], Awaitable[cmd.PutConsumer]],
        acknowledge: Acknowledge,
    ) -> None:
        self._streams = streams
        self._reader = reader
        self._propose = propose
        self._dispatcher_of = dispatcher_of
        self._creation = creation
        self._acknowledge = acknowledge
        # By stream and consumer. A dispatcher may be of a deleted consumer, see `dispatcher`.
        self._dispatchers: dict[tuple[str, str], ShardedDispatcher] = {}

    def dispatcher(self, stream: str, name: str) -> ShardedDispatcher:
        """Return the dispatcher of a consumer (CONSUMER_NOT_FOUND)."""
        dispatchers = [self._dispatcher_of(shard, name) for shard in self._streams.parts(stream)]
        known = self._dispatchers.get((stream, name))
        if known is None or not known.is_of(dispatchers):
            if len(self._dispatchers) >= _DISPATCHERS_MAX:
                kept = self._dispatchers.items()
                self._dispatchers = {key: one for key, one in kept if not one.dispatchers[0].closed}
            known = self._dispatchers[stream, name] = ShardedDispatcher(dispatchers)
        return known

    # Managing ------------------------------------------------------------------------------------

    async def put(
        self,
        stream: str,
        config: ConsumerConfig,
        given: cmd.Precondition,
    ) -> tuple[ConsumerInfo, bool]:
        """Create or update; see ``StorageLink.put_consumer``. The caller allows one at a time."""
        shards = self._streams.parts(stream)
        await self.mend(shards)
        config = complete_consumer(config, shards[0].config.consumer_limits)
        existing = shards[0].machine.consumer(config.name)
        if not is_settled(existing, config, given):
            if existing is None:
                return await self._create(shards, config, given), True
            await self._update(shards, config, given)
        return await self.dispatcher(stream, config.name).info(), False

    async def _update(
        self, shards: Sequence[Shard], config: ConsumerConfig, given: cmd.Precondition
    ) -> None:
        """Change the consumer on the first shard, which decides, then on the others."""
        update = msgspec.structs.replace(given, update=True)
        for shard in shards:
            with begun(shard is not shards[0]):
                put = cmd.PutConsumer(config, 0, given=update)
                expect(await self._propose(shard, put), ConsumerPut)
                self._dispatcher_of(shard, config.name).reconfigured()
            update = cmd.Precondition(update=True)

    async def _create(
        self, shards: Sequence[Shard], config: ConsumerConfig, given: cmd.Precondition
    ) -> ConsumerInfo:
        creations = await self._creations(shards, config)
        creations[0] = msgspec.structs.replace(creations[0], given=given)
        try:
            for shard, put in reversed(list(zip(shards, creations, strict=True))):
                expect(await self._propose(shard, put), ConsumerPut)
        except ApiError:
            with suppress(ApiError):  # if this fails, the next change or start undoes it
                await self.mend(shards)
            raise
        return await self.dispatcher(shards[0].name, config.name).info()

    async def _creations(
        self, shards: Sequence[Shard], config: ConsumerConfig
    ) -> list[cmd.PutConsumer]:
        """Return the command for each shard that creates the consumer at its start there."""
        if config.opt_start_cursor:
            cursor = own_cursor(config.opt_start_cursor, shards)
            first = [shard.machine.counters.first_seq for shard in shards]
            starts = [max(pair) for pair in zip(cursor.next_seqs, first, strict=True)]
            return [cmd.PutConsumer(config, start_seq) for start_seq in starts]
        if config.deliver_policy == "by_start_sequence":
            message = (
                "a sequence belongs to a single shard; start by time, or with "
                "deliver_policy all, last or new"
            )
            problem = FieldProblem("/opt_start_seq", message)
            raise ApiError(errors.SHARDED_UNSUPPORTED, message, [problem], applied=False)
        if config.deliver_policy != "last":
            return [await self._creation(shard, config) for shard in shards]
        # The newest message in the order of reads. Other shards begin after their last message.
        newest = [await self._newest(shard, config) for shard in shards]
        at = max(range(len(shards)), key=lambda one: (newest[one][0], one))
        starts = [newest[one][1] if one == at else 0 for one in range(len(shards))]
        return [cmd.PutConsumer(config, start_seq) for start_seq in starts]

    async def _newest(self, shard: Shard, config: ConsumerConfig) -> tuple[int, int]:
        """Time and sequence of the newest matching message; (0, 0) when there is none."""
        table = shard.machine.subjects
        found = SubjectFilter(config.filter_subjects).subjects(table)
        seq = max((table.last_of(sid) for sid, _ in found), default=0)
        block = await self._reader.block_at(shard, seq) if seq else None
        if block is None or not block.base_seq <= seq <= block.last_seq:
            return 0, 0
        return int(block.times_ns[seq - block.base_seq]), seq

    def with_consumer(self, shards: Sequence[Shard], name: str) -> list[Shard]:
        """Return the shards that have the consumer; CONSUMER_NOT_FOUND if the first has not."""
        if shards[0].machine.consumer(name) is None:
            detail = f"stream {shards[0].name} has no consumer {name}"
            raise ApiError(errors.CONSUMER_NOT_FOUND, detail, applied=False)
        return [shard for shard in shards if shard.machine.consumer(name) is not None]

    async def mend(self, shards: Sequence[Shard]) -> None:
        """Make the consumers of all shards the same as those of the first one."""
        first = shards[0].machine
        for shard in shards[1:]:
            for consumer in list(shard.machine.consumers.values()):
                wanted = first.consumer(consumer.config.name)
                if wanted is None:
                    result = await self._propose(shard, cmd.DropConsumer(consumer.consumer_id))
                    expect(result, Done)
                elif wanted.config != consumer.config:
                    update = cmd.Precondition(update=True)
                    put = cmd.PutConsumer(wanted.config, 0, given=update)
                    expect(await self._propose(shard, put), ConsumerPut)

    def is_idle(self, stream: str, name: str, now_s: float, log_ns: int) -> bool:
        """Whether nobody has used the consumer for its ``inactive_threshold``, on any shard."""
        try:
            dispatchers = self.dispatcher(stream, name).dispatchers
        except ApiError:
            return False  # it is being created or removed right now
        config = dispatchers[0].consumer.config
        threshold_ns = config.inactive_threshold_ns
        if not threshold_ns and not config.durable:
            threshold_ns = INACTIVE_THRESHOLD_NS
        if not threshold_ns or any(dispatcher.waiters for dispatcher in dispatchers):
            return False
        idle_ns = (now_s - max(dispatcher.last_active_s for dispatcher in dispatchers)) * 1e9
        deadlines = [
            item.deadline_ns for one in dispatchers for item in one.consumer.pending.values()
        ]
        if idle_ns > threshold_ns and deadlines:
            # A client with a delivery is at work until its ack is due (JetStream's rule).
            idle_ns = min(idle_ns, log_ns - max(deadlines))
        return idle_ns > threshold_ns

    # Acknowledging -------------------------------------------------------------------------------

    async def acknowledge(
        self, stream: str, name: str, items: list[AckItem], *, sync: bool
    ) -> list[AckResult]:
        """Accept acknowledgements, each on the shard that it names."""
        self.dispatcher(stream, name).touch()
        shards = {shard.machine.shard: shard for shard in self._streams.parts(stream)}
        any_shard = next(iter(shards.values()))
        of_shard: dict[int, list[int]] = {}
        for at, item in enumerate(items):
            of_shard.setdefault(item.shard, []).append(at)
        answers = await asyncio.gather(
            *(
                # Any shard refuses a token that is of no shard of the stream.
                self._acknowledge(
                    shards.get(number, any_shard), name, [items[at] for at in places], sync=sync
                )
                for number, places in of_shard.items()
            )
        )
        results: dict[int, AckResult] = {}
        for places, answered in zip(of_shard.values(), answers, strict=True):
            results.update(zip(places, answered, strict=True))
        return [results[at] for at in range(len(items))]
