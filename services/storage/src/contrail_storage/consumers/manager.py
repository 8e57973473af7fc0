"""Managing consumers on a node: create, update, remove, pull from and acknowledge to them."""

import asyncio
from contextlib import suppress
from itertools import islice
from typing import Final

import msgspec
import numpy as np

from contrail_common import errors
from contrail_common.config_rules import complete_consumer
from contrail_common.errors import ApiError, FieldProblem
from contrail_common.model import INACTIVE_THRESHOLD_NS, ConsumerConfig, ConsumerInfo
from contrail_link.contract.consume import AckItem, AckResult, PullRequest, PullResult
from contrail_link.contract.streams import CreateMode
from contrail_storage.consumers.ack_none import AckNoneDispatcher
from contrail_storage.consumers.bindings import Binding, Bindings
from contrail_storage.consumers.consumer_puts import ATTEMPTS, is_settled, named
from contrail_storage.consumers.dispatcher import Dispatcher
from contrail_storage.consumers.sharded_consumers import ShardedConsumers
from contrail_storage.core import commands as cmd
from contrail_storage.core.consumer_machine import ConsumerMachine
from contrail_storage.core.pinned import SUBJECTS_MAX, Pinned
from contrail_storage.core.results import ConsumerPut, Done, Refused, Result
from contrail_storage.core.subjects.filters import SubjectFilter
from contrail_storage.reading.reader import Reader
from contrail_storage.replica.log_time import LogTime
from contrail_storage.replica.shard import Shard, volatile_first
from contrail_storage.replica.shard_logs import ShardLog
from contrail_storage.streams.manager import StreamManager, begun, expect
from contrail_storage.streams.sharded_state import bad_cursor

_OK: Final = AckResult()
REASONS_MAX: Final = 256
REASON_CHARS_MAX: Final = 256
"""Reasons are for people to read: what exceeds these limits of a request is not logged."""


class ConsumerManager:
    """Consumers of this node's shards, with a dispatcher for each one used since the start."""

    def __init__(
        self, streams: StreamManager, shard_log: ShardLog, reader: Reader, clock: LogTime
    ) -> None:
        self._streams = streams
        self._shard_log = shard_log
        self._reader = reader
        self._clock = clock
        # By shard number and consumer id.
        self._dispatchers: dict[tuple[int, int], Dispatcher] = {}
        self._bindings = Bindings()
        # Held while a consumer on several shards is created, changed, removed or mended.
        self._lock = asyncio.Lock()
        self._sharded = ShardedConsumers(
            streams,
            reader,
            self._propose,
            lambda shard, name: self._dispatcher(shard, self._find(shard, name)),
            self._creation,
            self._acknowledge,
        )

    # Managing ------------------------------------------------------------------------------------

    async def put(
        self,
        stream: str,
        config: ConsumerConfig,
        mode: CreateMode,
        if_match: int | None,
        if_none: bool,
    ) -> tuple[ConsumerInfo, bool]:
        """Create or update; see ``StorageLink.put_consumer``."""
        config = named(config)
        given = cmd.Precondition(create=mode == "create", version=if_match, absent=if_none)
        if self._streams.entry(stream).shards > 1:
            async with self._lock:
                return await self._sharded.put(stream, config, given)
        if config.opt_start_cursor:
            raise bad_cursor("cannot be used with a stream with one shard; use a sequence")
        shard = self._streams.shard(stream)
        config = complete_consumer(config, shard.machine.config.consumer_limits)
        for _ in range(ATTEMPTS):
            existing = shard.machine.consumer(config.name)
            if is_settled(existing, config, given):
                assert existing is not None
                return await self._info(shard, existing), False
            put = await self._put(shard, config, given, is_there=existing is not None)
            if put is not None:
                consumer = shard.machine.consumers.get(put.consumer_id)
                if consumer is None:
                    raise ApiError(
                        errors.CONSUMER_NOT_FOUND,
                        "the consumer was deleted right after it was created",
                    )
                return await self._info(shard, consumer), put.created
        raise ApiError(errors.OVERLOADED, "the consumer is repeatedly being deleted", applied=False)

    async def _put(
        self, shard: Shard, config: ConsumerConfig, given: cmd.Precondition, *, is_there: bool
    ) -> ConsumerPut | None:
        """Create or update; None when the consumer to update has been deleted meanwhile."""
        if is_there:
            # This command has no start position, so it must not create a consumer that is gone.
            update = msgspec.structs.replace(given, update=True)
            command = cmd.PutConsumer(config, 0, given=update)
        else:
            creation = await self._creation(shard, config)
            command = msgspec.structs.replace(creation, given=given)
        result = await self._propose(shard, command)
        if is_there and result == Refused(errors.CONSUMER_NOT_FOUND.code):
            return None
        put = expect(result, ConsumerPut)
        consumer = shard.machine.consumers.get(put.consumer_id)
        if consumer is not None and not put.created:
            self._dispatcher(shard, consumer).reconfigured()
            with suppress(ApiError):  # the housekeeper continues it
                await self._streams.keep_interest(shard)
        return put

    async def _creation(self, shard: Shard, config: ConsumerConfig) -> cmd.PutConsumer:
        """Return the command that creates a consumer of a shard."""
        if config.deliver_policy == "last_per_subject":
            return await self._pinned(shard, config)
        return cmd.PutConsumer(config, await self._start_seq(shard, config))

    async def _start_seq(self, shard: Shard, config: ConsumerConfig) -> int:
        """The start sequence of a consumer; 0 means after the last message at the apply."""
        first_seq = shard.machine.counters.first_seq
        match config.deliver_policy:
            case "all":
                return first_seq
            case "by_start_sequence":
                return max(config.opt_start_seq, first_seq)
            case "by_start_time":
                return await self._reader.seq_of_time(shard, config.opt_start_time_ns)
            case "last":
                await self._streams.settle_last(shard)  # before, it may be an upper bound
                table = shard.machine.subjects
                found = SubjectFilter(config.filter_subjects).subjects(table)
                return max((table.last_of(sid) for sid, _ in found), default=0)
            case _:
                return 0

    async def _pinned(self, shard: Shard, config: ConsumerConfig) -> cmd.PutConsumer:
        """Return the command that creates a consumer of the last messages as of now."""
        await self._streams.settle_last(shard)  # before, some may be upper bounds
        table = shard.machine.subjects
        sids = SubjectFilter(config.filter_subjects).numbers(table)
        at = table.numbered.slots(sids)
        if len(at) > SUBJECTS_MAX:
            message = f"matches {len(at)} subjects; last_per_subject allows at most {SUBJECTS_MAX}"
            raise ApiError(
                errors.START_INVALID,
                f"filter_subjects: {message}",
                [FieldProblem("/filter_subjects", message)],
                applied=False,
            )
        end_seq = shard.machine.counters.last_seq + 1
        if not len(at):
            return cmd.PutConsumer(config, end_seq)
        order = np.argsort(table.last[at])
        pinned = Pinned(table.last[at[order]], sids[order].astype(np.uint32), end_seq)
        return cmd.PutConsumer(config, int(pinned.seqs[0]), pinned.encode(), end_seq)

    async def info(self, stream: str, name: str) -> ConsumerInfo:
        """Configuration and progress."""
        if self._streams.entry(stream).shards > 1:
            return await self._sharded_info(stream, name)
        shard = self._streams.shard(stream)
        return await self._info(shard, self._find(shard, name))

    async def _sharded_info(self, stream: str, name: str) -> ConsumerInfo:
        dispatcher = self._sharded.dispatcher(stream, name)
        bound = self._bindings.holds(_key(dispatcher.dispatchers[0]))
        return msgspec.structs.replace(await dispatcher.info(), push_bound=bound)

    async def infos(self, stream: str) -> list[ConsumerInfo]:
        """All consumers of a stream by name."""
        shard = self._streams.parts(stream)[0]
        names = sorted(shard.machine.consumer_ids)
        if self._streams.entry(stream).shards > 1:
            return [await self._sharded_info(stream, name) for name in names]
        return [await self._info(shard, self._find(shard, name)) for name in names]

    async def _info(self, shard: Shard, consumer: ConsumerMachine) -> ConsumerInfo:
        dispatcher, stream = self._dispatcher(shard, consumer), shard.name
        await dispatcher.settle()
        return ConsumerInfo(
            stream=stream,
            config=consumer.config,
            created_ns=consumer.created_ns,
            version=consumer.version,
            delivered=consumer.delivered,
            ack_floor=consumer.floor,
            num_ack_pending=len(consumer.pending),
            num_redelivered=sum(1 for item in consumer.pending.values() if item.attempts > 1),
            num_waiting=len(dispatcher.waiters),
            num_pending=await dispatcher.num_pending(),
            push_bound=self._bindings.holds(_key(dispatcher)),
        )

    async def delete(self, stream: str, name: str, if_match: int | None = None) -> None:
        """Remove a consumer; see ``StorageLink.delete_consumer``."""
        if self._streams.entry(stream).shards > 1:
            async with self._lock:
                await self._drop_of_all(stream, name, if_match)
            return
        shard = self._streams.shard(stream)
        await self._drop(shard, self._find(shard, name), if_match)

    async def _drop_of_all(self, stream: str, name: str, if_match: int | None) -> None:
        """Remove a consumer from all shards of its stream; the first shard decides."""
        first, *others = self._sharded.with_consumer(self._streams.parts(stream), name)
        await self._drop(first, self._find(first, name), if_match)
        with begun():
            for shard in others:
                await self._drop(shard, self._find(shard, name), None)

    async def _drop(self, shard: Shard, consumer: ConsumerMachine, if_match: int | None) -> None:
        drop = cmd.DropConsumer(consumer.consumer_id, if_match)
        expect(await self._propose(shard, drop), Done)
        self._close((shard.machine.shard, consumer.consumer_id))
        with suppress(ApiError):  # the housekeeper continues it
            await self._streams.keep_interest(shard)

    def _close(self, key: tuple[int, int]) -> None:
        dispatcher = self._dispatchers.pop(key, None)
        if dispatcher is not None:
            dispatcher.close()
        self._bindings.end(key)

    def close_gone(self) -> None:
        """End the dispatchers of consumers and streams that are gone."""
        for key, dispatcher in list(self._dispatchers.items()):
            machine = dispatcher.shard.machine
            if not machine.exists or dispatcher.consumer.consumer_id not in machine.consumers:
                self._close(key)

    def flush(self) -> None:
        """Propose deliveries that are not recorded yet."""
        for dispatcher in self._dispatchers.values():
            dispatcher.flush()

    def new_term(self) -> None:
        """Begin a term as leader: commands that seemed lost to the dispatchers may be applied."""
        loop = asyncio.get_running_loop()
        for dispatcher in self._dispatchers.values():
            if not dispatcher.shard.volatile:
                # After the callbacks that tell the dispatcher that its last commands are lost.
                loop.call_soon(dispatcher.new_term)

    def rebound(self) -> None:
        """Use the new machines of the durable shards, which are equal to the old ones."""
        for key, dispatcher in list(self._dispatchers.items()):
            consumer = dispatcher.shard.machine.consumers.get(key[1])
            if consumer is None:
                self._close(key)
            elif consumer is not dispatcher.consumer:
                dispatcher.consumer = consumer
                dispatcher.deadlines.turn_to(consumer)
                dispatcher.reconfigured()

    async def drop_inactive(self) -> None:
        """Remove consumers that nobody has used for their ``inactive_threshold``."""
        now_s = asyncio.get_running_loop().time()
        for shard in volatile_first(self._streams.shards()):
            if shard.damaged or not shard.machine.exists:
                continue  # removed while another shard was looked at
            if shard.machine.config.shards > 1:
                await self._drop_inactive_of_all(shard, now_s)
                continue
            for consumer in list(shard.machine.consumers.values()):
                config = consumer.config
                threshold_ns = config.inactive_threshold_ns
                if not threshold_ns and not config.durable:
                    threshold_ns = INACTIVE_THRESHOLD_NS
                dispatcher = self._dispatcher(shard, consumer)
                if not threshold_ns or self._bindings.holds(_key(dispatcher)):
                    continue
                idle_ns = (now_s - dispatcher.last_active_s) * 1e9
                if idle_ns > threshold_ns and consumer.pending:
                    # A client with a delivery is at work until its ack is due (JetStream's rule).
                    due_ns = max(item.deadline_ns for item in consumer.pending.values())
                    idle_ns = min(idle_ns, self._clock.now() - due_ns)
                if idle_ns > threshold_ns and not dispatcher.waiters:
                    with suppress(ApiError):  # changed or deleted meanwhile
                        await self._drop(shard, consumer, consumer.version)

    async def _drop_inactive_of_all(self, shard: Shard, now_s: float) -> None:
        """Do the same for a stream with several shards, when ``shard`` is its first."""
        if any(part.damaged for part in self._streams.parts(shard.name)):
            return
        for name in [] if shard.machine.part else sorted(shard.machine.consumer_ids):
            async with self._lock:
                # Looked up under the lock: the consumer may be created again before that.
                consumer = shard.machine.consumer(name)
                if consumer is None or not shard.machine.exists:
                    continue
                if self._bindings.holds((shard.machine.shard, consumer.consumer_id)):
                    continue
                if self._sharded.is_idle(shard.name, name, now_s, self._clock.now()):
                    with suppress(ApiError):
                        await self._drop_of_all(shard.name, name, consumer.version)

    async def mend_all(self) -> None:
        """Finish or undo changes of consumers on several shards that a crash interrupted."""
        async with self._lock:
            for name in self._streams.names():
                with suppress(ApiError):  # if it fails, the next change of a consumer mends them
                    await self._sharded.mend(self._streams.parts(name))

    def bind(self, stream: str, name: str) -> Binding:
        """Hold a consumer for a subscription; see ``StorageLink.bind_consumer``."""
        first = self._streams.parts(stream)[0]
        dispatcher = self._dispatcher(first, self._find(first, name))
        dispatcher.touch()
        return self._bindings.hold(_key(dispatcher), dispatcher.touch)

    # Delivering ----------------------------------------------------------------------------------

    def _find(self, shard: Shard, name: str) -> ConsumerMachine:
        consumer = shard.machine.consumer(name)
        if consumer is None:
            raise ApiError(
                errors.CONSUMER_NOT_FOUND,
                f"stream {shard.name} has no consumer {name}",
                applied=False,
            )
        return consumer

    def _dispatcher(self, shard: Shard, consumer: ConsumerMachine) -> Dispatcher:
        key = (shard.machine.shard, consumer.consumer_id)
        dispatcher = self._dispatchers.get(key)
        if dispatcher is None:
            number = shard.machine.shard

            def propose(command: cmd.StreamCommand) -> asyncio.Future[Result]:
                return self._shard_log.command(number, command)

            kind = dispatcher_kind(consumer.config)
            dispatcher = kind(shard, consumer, self._reader, propose, self._clock.now)
            self._dispatchers[key] = dispatcher
        return dispatcher

    async def _propose(self, shard: Shard, command: cmd.StreamCommand) -> Result:
        return await self._shard_log.command(shard.machine.shard, command)

    async def pull(self, request: PullRequest) -> PullResult:
        """Deliver up to a batch of messages."""
        if self._streams.entry(request.stream).shards > 1:
            return await self._sharded.dispatcher(request.stream, request.consumer).pull(request)
        shard = self._streams.shard(request.stream)
        dispatcher = self._dispatcher(shard, self._find(shard, request.consumer))
        return await dispatcher.pull(request)

    async def acknowledge(
        self, stream: str, name: str, items: list[AckItem], sync: bool
    ) -> list[AckResult]:
        """Accept acknowledgements; see ``StorageLink.acknowledge``."""
        if self._streams.entry(stream).shards > 1:
            return await self._sharded.acknowledge(stream, name, items, sync=sync)
        return await self._acknowledge(self._streams.shard(stream), name, items, sync=sync)

    async def _acknowledge(
        self, shard: Shard, name: str, items: list[AckItem], *, sync: bool
    ) -> list[AckResult]:
        consumer = self._find(shard, name)
        dispatcher = self._dispatcher(shard, consumer)
        dispatcher.touch()
        results: list[AckResult] = []
        taken: list[AckItem] = []
        for item in items:
            problem = self._token_problem(shard, consumer, item)
            results.append(problem or _OK)
            if problem is None:
                taken.append(item)
        if taken:
            dispatcher.flush()
            command = _command(consumer, taken)
            applied = self._shard_log.command(shard.machine.shard, command)
            dispatcher.track(applied)
            postponed = [item.seq for item in taken if item.kind in ("nak", "in_progress")]
            applied.add_done_callback(lambda done: dispatcher.acknowledged(postponed, done))
            if sync:
                expect(await applied, Done)
        return results

    def _token_problem(
        self, shard: Shard, consumer: ConsumerMachine, item: AckItem
    ) -> AckResult | None:
        if item.shard != shard.machine.shard:
            foreign = item.shard in self._streams.shard_numbers()
            spec = errors.TOKEN_FORGED if foreign else errors.TOKEN_STALE
            return AckResult(spec.code, "the token belongs to another stream")
        if item.consumer_id != consumer.consumer_id:
            foreign = item.consumer_id in shard.machine.consumers
            spec = errors.TOKEN_FORGED if foreign else errors.TOKEN_STALE
            return AckResult(spec.code, "the token belongs to another consumer")
        if item.epoch != consumer.epoch:
            return AckResult(errors.TOKEN_STALE.code, "the consumer was reset")
        return None


def _key(dispatcher: Dispatcher) -> tuple[int, int]:
    return dispatcher.shard.machine.shard, dispatcher.consumer.consumer_id


def dispatcher_kind(config: ConsumerConfig) -> type[Dispatcher]:
    """The kind of dispatcher for a consumer. It is fixed, as the ack policy never changes."""
    return AckNoneDispatcher if config.ack_policy == "none" else Dispatcher


def _command(consumer: ConsumerMachine, items: list[AckItem]) -> cmd.Acknowledge:
    reasons = ((item.seq, item.reason[:REASON_CHARS_MAX]) for item in items if item.reason)
    return cmd.Acknowledge(
        consumer.consumer_id,
        consumer.epoch,
        [item.seq for item in items if item.kind == "ack"],
        [(item.kind, item.seq, item.delay_ns) for item in items if item.kind != "ack"],
        dict(islice(reasons, REASONS_MAX)),
    )
