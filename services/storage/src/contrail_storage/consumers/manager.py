"""Managing consumers on a node: find, create, update and remove them."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from functools import partial
from typing import Final

import msgspec

from contrail_common import errors
from contrail_common.config_rules import complete_consumer
from contrail_common.errors import ApiError
from contrail_common.model import ConsumerConfig, ConsumerInfo
from contrail_link.contract.streams import CreateMode
from contrail_storage.consumers.consumer import Consumer, dispatcher_kind
from contrail_storage.consumers.consumer_puts import ATTEMPTS, is_settled, named
from contrail_storage.consumers.dispatcher import Dispatcher, consumer_deleted
from contrail_storage.consumers.inactive import InactiveConsumers
from contrail_storage.consumers.sharded_puts import ShardedPuts
from contrail_storage.consumers.starts import Starts
from contrail_storage.core import commands as cmd
from contrail_storage.core.consumer_machine import ConsumerMachine
from contrail_storage.core.results import ConsumerPut, Done, Refused, Result
from contrail_storage.reading.reader import Reader
from contrail_storage.replica.changes import Changes, ConsumerKey, take
from contrail_storage.replica.raft_port import no_leader
from contrail_storage.replica.shard import Shard
from contrail_storage.replica.shard_logs import ShardLogs
from contrail_storage.streams.manager import StreamManager
from contrail_storage.streams.outcomes import begun, expect
from contrail_storage.streams.sharded_state import bad_cursor
from contrail_storage.streams.stream import Stream

_TOGETHER: Final = 1_000
"""Changes that are noticed in one turn of the event loop."""


class ConsumerManager:
    """The consumers of this node's streams, with a `Consumer` for each one that is in use."""

    def __init__(
        self,
        streams: StreamManager,
        shard_log: ShardLogs,
        reader: Reader,
        changes: Changes,
    ) -> None:
        self._streams = streams
        self._shard_log = shard_log
        self._reader = reader
        self._starts = Starts(reader)
        self._sharded = ShardedPuts(self._propose, self.find, self._starts)
        # Those that were asked for and are not known to be gone; `find` checks them. By the id of
        # the stream's first shard and the consumer's id there.
        self._consumers: dict[int, dict[int, Consumer]] = {}
        # `close_gone` takes those of consumers.
        self._changes = changes
        shard_log.spread.on_lost = self.end_term
        self._inactive = InactiveConsumers(self._find_upkept, self._drop_inactive)
        # Held while a consumer on several shards is created, changed, removed or reconciled.
        self._lock = asyncio.Lock()

    # Finding -------------------------------------------------------------------------------------

    def find(self, stream: Stream, name: str) -> Consumer:
        """Return the consumer of a stream (CONSUMER_NOT_FOUND); call it once for each request.

        The object stays the same until the consumer is removed. A consumer that is created or
        removed right now, and is not on all shards, is not found.
        """
        machine = _machine(stream, stream.shards[0], name)
        consumer = self._consumers.get(machine.shard_id, {}).get(machine.consumer_id)
        if consumer is not None:
            if consumer.is_current() or consumer.rebind():
                return consumer
            self._forget(machine.shard_id, machine.consumer_id)
        machines = [machine, *(_machine(stream, one, name) for one in stream.shards[1:])]
        shards = zip(stream.shards, machines, strict=True)
        dispatchers = [self._dispatcher(stream.groups[0], *one) for one in shards]
        consumer = Consumer(stream, dispatchers, self._streams.is_listed)
        self._consumers.setdefault(machine.shard_id, {})[machine.consumer_id] = consumer
        return consumer

    def _dispatcher(self, home: int, shard: Shard, machine: ConsumerMachine) -> Dispatcher:
        """The dispatcher for a shard of a stream; ``home`` is the group of the first shard."""
        shard_id = machine.shard_id

        def propose(command: cmd.StreamCommand) -> asyncio.Future[Result]:
            return self._shard_log.command(shard_id, command)

        kind, groups = dispatcher_kind(machine.config), self._shard_log.groups
        confirm: Callable[[], Awaitable[None]] | None = None
        if shard.group != home:
            confirm = partial(self._shard_log.spread.confirm_lately, home, shard.group)
        elif not groups[home].is_alone:
            confirm = partial(groups.confirm_led_lately, home)
        elapsed_ns = partial(groups.elapsed_ns, shard.group)
        return kind(shard, machine, self._reader, propose, elapsed_ns, confirm)

    def _forget(
        self, shard_id: int, consumer_id: int, refusal: Callable[[], ApiError] = consumer_deleted
    ) -> None:
        known = self._consumers.get(shard_id, {})
        consumer = known.pop(consumer_id, None)
        if consumer is not None:
            consumer.close(refusal)
            if not known:
                del self._consumers[shard_id]

    def _all(self) -> list[Consumer]:
        return [one for known in self._consumers.values() for one in known.values()]

    async def infos(self, stream: Stream, after: str, limit: int) -> list[ConsumerInfo]:
        """The first ``limit`` consumers of a stream, by name, whose names are above ``after``."""
        infos: list[ConsumerInfo] = []
        for name in sorted(name for name in stream.shards[0].machine.consumer_ids if name > after):
            if len(infos) == limit:
                break
            try:
                infos.append(await self.find(stream, name).info())
            except ApiError as error:
                if error.spec is not errors.CONSUMER_NOT_FOUND:  # removed while others were asked
                    raise
        return infos

    # Changing ------------------------------------------------------------------------------------

    def _changing(self, stream: Stream) -> AbstractAsyncContextManager[object]:
        """The lock for a change of consumers. A single shard decides by itself and needs none."""
        return self._lock if len(stream.shards) > 1 else nullcontext()

    async def put(
        self,
        stream: Stream,
        config: ConsumerConfig,
        mode: CreateMode,
        if_match: int | None,
        if_none: bool,
    ) -> tuple[ConsumerInfo, bool]:
        """Create or update; see ``StorageLink.put_consumer``."""
        config = named(config)
        given = cmd.Precondition(create=mode == "create", version=if_match, absent=if_none)
        async with self._changing(stream):
            if len(stream.shards) > 1:
                created = await self._sharded.put(stream, config, given)
            else:
                created = await self._put(stream, config, given)
            return await self.find(stream, config.name).info(), created

    async def _put(self, stream: Stream, config: ConsumerConfig, given: cmd.Precondition) -> bool:
        """Create or update on the only shard; return whether the consumer is new."""
        if config.opt_start_cursor:
            raise bad_cursor("cannot be used with a stream with one shard; use a sequence")
        shard = stream.shards[0]
        config = complete_consumer(config, stream.config.consumer_limits)
        for _ in range(ATTEMPTS):
            existing = shard.machine.consumer(config.name)
            if is_settled(existing, config, given):
                return False
            put = await self._try_put(stream, config, given, is_there=existing is not None)
            if put is not None:
                if put.consumer_id not in shard.machine.consumers:
                    raise ApiError(
                        errors.CONSUMER_NOT_FOUND,
                        "the consumer was deleted right after it was created",
                    )
                return put.created
        raise ApiError(errors.OVERLOADED, "the consumer is repeatedly being deleted", applied=False)

    async def _try_put(
        self, stream: Stream, config: ConsumerConfig, given: cmd.Precondition, *, is_there: bool
    ) -> ConsumerPut | None:
        """Create or update; None when the consumer to update has been deleted meanwhile."""
        shard = stream.shards[0]
        if is_there:
            # This command has no start position, so it must not create a consumer that is gone.
            update = msgspec.structs.replace(given, update=True)
            command = cmd.PutConsumer(config, 0, given=update)
        else:
            creation = await self._starts.creation(shard, config)
            command = msgspec.structs.replace(creation, given=given)
        result = await self._propose(shard, command)
        if is_there and result == Refused(errors.CONSUMER_NOT_FOUND.code):
            return None
        put = expect(result, ConsumerPut)
        if not put.created and put.consumer_id in shard.machine.consumers:
            self.find(stream, config.name).reconfigured()
            with suppress(ApiError):  # the housekeeper continues it
                await self._streams.removals.enforce_interest(shard)
        return put

    async def delete(self, stream: Stream, name: str, if_match: int | None = None) -> None:
        """Remove a consumer; see ``StorageLink.delete_consumer``."""
        async with self._changing(stream):
            await self._drop(stream, name, if_match)

    async def _drop(self, stream: Stream, name: str, if_match: int | None) -> None:
        """Remove a consumer from all shards of its stream; the first shard decides."""
        for shard in stream.shards:
            machine = shard.machine.consumer(name)
            is_first = shard is stream.shards[0]
            if machine is None:
                if is_first:
                    raise _not_found(stream, name)
                continue
            drop = cmd.DropConsumer(machine.consumer_id, if_match if is_first else None)
            with begun(not is_first):
                expect(await self._propose(shard, drop), Done)
            if is_first:
                self._forget(machine.shard_id, machine.consumer_id)
            with suppress(ApiError):  # the housekeeper continues it
                await self._streams.removals.enforce_interest(shard)

    async def _propose(self, shard: Shard, command: cmd.StreamCommand) -> Result:
        return await self._shard_log.command(shard.machine.shard_id, command)

    # Upkeep --------------------------------------------------------------------------------------

    def close_gone(self, most: int = sys.maxsize) -> bool:
        """Close the consumers that are gone, or whose streams are, after changes.

        Looks at up to ``most`` changes, and returns whether there were any.
        """
        streams = take(self._changes.all_consumers, most)
        consumers = take(self._changes.consumers, most)
        for shard_id, consumer_id in consumers:
            stream = self._streams.stream_of(shard_id)
            if stream is None or stream.entry.shard_id == shard_id:
                self._notice(shard_id, consumer_id)
            else:
                self._notice_of_shard(stream, shard_id, consumer_id)
        for shard_id in streams:
            stream = self._streams.stream_of(shard_id)
            first_id = shard_id if stream is None else stream.entry.shard_id
            there = set() if stream is None else stream.shards[0].machine.consumers.keys()
            for consumer_id in there | self._consumers.get(first_id, {}).keys():
                self._notice(first_id, consumer_id)
        return bool(streams or consumers)

    def _notice_of_shard(self, stream: Stream, shard_id: int, consumer_id: int) -> None:
        """Notice a consumer that changed on another shard than the first, if it can be known."""
        first = stream.shards[0].machine
        machine = stream.shards[shard_id - first.shard_id].machine.consumers.get(consumer_id)
        if machine is not None:
            consumer_id = first.consumer_ids.get(machine.config.name, 0)
            self._notice(first.shard_id, consumer_id)
        else:  # it is gone from this shard, and its name with it
            for consumer_id in list(self._consumers.get(first.shard_id, ())):
                self._notice(first.shard_id, consumer_id)

    def _notice(self, shard_id: int, consumer_id: int) -> None:
        consumer = self._consumers.get(shard_id, {}).get(consumer_id)
        if consumer is not None and not (
            consumer.stream.exists and (consumer.is_current() or consumer.rebind())
        ):
            self._forget(shard_id, consumer_id)
        self._inactive.note([(shard_id, consumer_id)])

    def rebound(self) -> None:
        """Use the new machines of the shards on disk, which are equal to the old ones."""
        for consumer in self._all():
            first = consumer.machine
            if not consumer.rebind():
                self._forget(first.shard_id, first.consumer_id)

    def flush(self) -> None:
        """Propose deliveries that are not recorded yet."""
        for consumer in self._all():
            consumer.flush()

    def new_term(self, group: int) -> None:
        """Begin a term as leader of ``group``."""
        for consumer in self._all():
            consumer.new_term(group)

    def end_term(self, group: int) -> None:
        """End what this node did with the shards of ``group``; another node may go on with it."""
        for consumer in self._all():
            if group in consumer.stream.groups:
                refusal = partial(no_leader, self._shard_log.groups[group].leader)
                self._forget(consumer.machine.shard_id, consumer.machine.consumer_id, refusal)

    async def drop_inactive(self) -> None:
        """Remove consumers that nobody has used for their ``inactive_threshold``.

        Costs by what changed and by what is due, not by the number of consumers.
        """
        more = True
        while more:
            more = self.close_gone(_TOGETHER)
            await asyncio.sleep(0)
        await self._inactive.drop()

    def _find_upkept(self, key: ConsumerKey) -> Consumer | None:
        """The consumer if it needs an object even when nobody uses it; None if not, or if gone."""
        stream = self._streams.stream_of(key[0])
        machine = None if stream is None else stream.shards[0].machine.consumers.get(key[1])
        if stream is None or machine is None or not stream.is_led:
            return None
        config = machine.config
        # A consumer with `max_deliver` gives up on messages, even if nobody pulls.
        if config.durable and not config.inactive_threshold_ns and config.max_deliver <= 0:
            return None
        return self.find(stream, config.name)

    async def _drop_inactive(self, consumer: Consumer, is_inactive: Callable[[], bool]) -> None:
        async with self._changing(consumer.stream):
            if consumer.is_current() and is_inactive():
                machine = consumer.machine
                await self._drop(consumer.stream, machine.config.name, machine.version)

    async def reconcile_all(self) -> None:
        """Finish or undo changes of consumers on several shards that a crash interrupted."""
        async with self._lock:
            for stream in self._streams.with_shards():
                if not stream.is_led:
                    continue
                with suppress(ApiError):  # if it fails, the next change of a consumer does it
                    await self._sharded.reconcile(stream)


def _machine(stream: Stream, shard: Shard, name: str) -> ConsumerMachine:
    machine = shard.machine.consumer(name)
    if machine is None:
        raise _not_found(stream, name)
    return machine


def _not_found(stream: Stream, name: str) -> ApiError:
    if not stream.exists:
        return ApiError(errors.STREAM_NOT_FOUND)
    detail = f"stream {stream.name} has no consumer {name}"
    return ApiError(errors.CONSUMER_NOT_FOUND, detail, applied=False)
