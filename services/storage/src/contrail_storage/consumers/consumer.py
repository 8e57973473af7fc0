"""One consumer at run time: the object that requests work with.

A `Consumer` has a dispatcher for each shard of its stream, and each dispatcher refers to the
consumer's machine there. Only `ConsumerManager.find` makes these objects. It compares their
machines with those that the shards have now, so a consumer that was deleted and created again, or
whose machines were loaded again, is never served by an outdated object.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, islice
from typing import Final

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import (
    INACTIVE_THRESHOLD_NS,
    ConsumerConfig,
    ConsumerInfo,
    ConsumerShardInfo,
    SequencePair,
)
from contrail_common.timeunits import NS_PER_S
from contrail_link.contract.consume import AckItem, AckResult, PullRequest, PullResult
from contrail_storage.consumers.ack_none import AckNoneDispatcher
from contrail_storage.consumers.binding import Binding
from contrail_storage.consumers.dispatcher import Dispatcher, consumer_deleted
from contrail_storage.consumers.sharded_dispatcher import ShardedDispatcher
from contrail_storage.core.commands import Acknowledge
from contrail_storage.core.consumer_machine import ConsumerMachine
from contrail_storage.core.results import Done, Result
from contrail_storage.streams.outcomes import begun, expect
from contrail_storage.streams.stream import Stream

_OK: Final = AckResult()
_SETTLED_MAX: Final = 4_096
"""Messages that one ack with policy ``all`` settles in one step, about."""
REASONS_MAX: Final = 256
REASON_CHARS_MAX: Final = 256
"""Reasons are for people to read: what exceeds these limits of a request is not logged."""


class Consumer:
    """A consumer of a listed stream, on its one or more shards. Used on the event loop only."""

    __slots__ = ("_bindings", "_is_listed", "_puller", "dispatchers", "stream")

    def __init__(
        self, stream: Stream, dispatchers: Sequence[Dispatcher], is_listed: Callable[[int], bool]
    ) -> None:
        """``is_listed`` returns whether a listed stream has a shard with that id."""
        self.stream = stream
        """The stream. It may be removed while somebody still holds this object."""
        self.dispatchers = tuple(dispatchers)
        """One for each shard, in order; never replaced."""
        # What serves pulls: the only dispatcher, or all of them together.
        self._puller = ShardedDispatcher(dispatchers) if len(dispatchers) > 1 else dispatchers[0]
        # Subscriptions that keep it from being removed as inactive.
        self._bindings: set[Binding] = set()
        # Tells a token of another stream from one of a stream that is gone.
        self._is_listed = is_listed

    # Lifetime ------------------------------------------------------------------------------------

    @property
    def machine(self) -> ConsumerMachine:
        """The machine on the first shard, which decides about configuration and version."""
        return self.dispatchers[0].consumer

    def is_current(self) -> bool:
        """Whether the shards still have the machines that the dispatchers refer to."""
        for one in self.dispatchers:
            if one.shard.machine.consumers.get(one.consumer.consumer_id) is not one.consumer:
                return False
        return True

    def rebind(self) -> bool:
        """Refer to the machines that the shards have now; False when one has none.

        The machines are equal to the earlier ones: they were loaded again from the store. A
        consumer that is created again has another id, so it is never mistaken for this one.
        """
        machines: list[ConsumerMachine] = []
        for one in self.dispatchers:
            machine = one.shard.machine.consumers.get(one.consumer.consumer_id)
            if machine is None:
                return False
            machines.append(machine)
        for one, machine in zip(self.dispatchers, machines, strict=True):
            if machine is not one.consumer:
                one.turn_to(machine)
        return True

    def close(self, refusal: Callable[[], ApiError] = consumer_deleted) -> None:
        """End waiting pulls with ``refusal``, and bindings: no messages are delivered any more."""
        for one in self.dispatchers:
            one.close(refusal)
        for binding in self._bindings:
            binding.end(None if refusal is consumer_deleted else refusal())
        self._bindings.clear()

    def new_term(self, group: int) -> None:
        """Begin a term as leader of ``group``: commands that seemed lost may be applied."""
        loop = asyncio.get_running_loop()
        for one in self.dispatchers:
            if one.shard.group == group:
                # After the callbacks that notify the dispatcher that its last commands are lost.
                loop.call_soon(one.new_term)

    def flush(self) -> None:
        """Propose deliveries that are not recorded yet."""
        for one in self.dispatchers:
            one.flush()

    def reconfigured(self) -> None:
        """Use the configuration that the machines have now."""
        for one in self.dispatchers:
            one.reconfigured()

    # Use -----------------------------------------------------------------------------------------

    def touch(self) -> None:
        """Note that a client uses the consumer now."""
        for one in self.dispatchers:
            one.touch()

    def hold(self) -> Binding:
        """Bind the consumer to a subscription; see ``StorageLink.bind_consumer``."""

        def release(binding: Binding) -> None:
            if binding in self._bindings:
                self._bindings.discard(binding)
                self.touch()

        self.touch()
        binding = Binding(release)
        self._bindings.add(binding)
        return binding

    @property
    def inactive_threshold_ns(self) -> int:
        """The time without use after which the consumer is removed; 0: never."""
        config = self.machine.config
        if config.inactive_threshold_ns or config.durable:
            return config.inactive_threshold_ns
        return INACTIVE_THRESHOLD_NS

    def inactive_from_s(self, now_s: float) -> float | None:
        """The loop time from which on the consumer is inactive if nobody uses it; None: never.

        It is not known while somebody uses the consumer now; then it is the earliest time possible.
        Deliveries may keep the consumer active for longer, see `is_at_work`.
        """
        threshold_s = self.inactive_threshold_ns / NS_PER_S
        if not threshold_s:
            return None
        # The end of a binding or pull is a use.
        if self._bindings or any(one.waiters for one in self.dispatchers):
            return now_s + threshold_s
        return max(one.last_active_s for one in self.dispatchers) + threshold_s

    def is_at_work(self) -> bool:
        """Whether some delivery was to be acknowledged within the last ``inactive_threshold``.

        A client with a delivery is at work until its ack is due (JetStream's rule).
        """
        from_ns = self.dispatchers[0].elapsed_ns() - self.inactive_threshold_ns
        return any(one.consumer.pending.is_any_due_from(from_ns) for one in self.dispatchers)

    async def info(self) -> ConsumerInfo:
        """Configuration and progress; the sums of all shards, and each shard if it has several."""
        shards = [await _shard_info(one) for one in self.dispatchers]
        first = self.dispatchers[0]
        return ConsumerInfo(
            stream=first.shard.name,
            config=first.consumer.config,
            created_ns=first.consumer.created_ns,
            version=first.consumer.version,
            delivered=_sum([one.delivered for one in shards]),
            ack_floor=_sum([one.ack_floor for one in shards]),
            num_ack_pending=sum(one.num_ack_pending for one in shards),
            num_redelivered=sum(one.num_redelivered for one in shards),
            num_waiting=len(first.waiters),
            num_pending=sum(one.num_pending for one in shards),
            push_bound=bool(self._bindings),
            shards=shards if len(shards) > 1 else [],
        )

    async def pull(self, request: PullRequest) -> PullResult:
        """Deliver up to a batch of messages; see ``StorageLink.pull``."""
        return await self._puller.pull(request)

    # Acknowledging -------------------------------------------------------------------------------

    async def acknowledge(self, items: list[AckItem], *, sync: bool) -> list[AckResult]:
        """Accept acknowledgements, each on the shard that it names; see ``StorageLink``."""
        self.touch()
        if len(self.dispatchers) == 1:
            return await self._acknowledge(self.dispatchers[0], items, sync=sync)
        dispatchers = {one.shard.machine.shard_id: one for one in self.dispatchers}
        positions: dict[int, list[int]] = {}
        for position, item in enumerate(items):
            positions.setdefault(item.shard_id, []).append(position)
        answers = await asyncio.gather(
            *(
                # Any shard refuses a token that is of no shard of the stream.
                self._acknowledge(
                    dispatchers.get(shard_id, self.dispatchers[0]),
                    [items[position] for position in some],
                    sync=sync,
                )
                for shard_id, some in positions.items()
            )
        )
        results: dict[int, AckResult] = {}
        for some, answered in zip(positions.values(), answers, strict=True):
            results.update(zip(some, answered, strict=True))
        return [results[position] for position in range(len(items))]

    async def _acknowledge(
        self, dispatcher: Dispatcher, items: list[AckItem], *, sync: bool
    ) -> list[AckResult]:
        results: list[AckResult] = []
        taken: list[AckItem] = []
        for item in items:
            problem = self._token_problem(dispatcher, item)
            results.append(problem or _OK)
            if problem is None:
                taken.append(item)
        if taken:
            applied = _propose(dispatcher, _command(dispatcher.consumer, taken))
            postponed = any(item.kind in ("nak", "in_progress") for item in taken)
            applied.add_done_callback(partial(dispatcher.acknowledged, postponed=postponed))
            if sync:
                # Not cancelled with the caller: it may record deliveries of others too.
                expect(await asyncio.shield(applied), Done)
        return results

    def _token_problem(self, dispatcher: Dispatcher, item: AckItem) -> AckResult | None:
        machine, consumer = dispatcher.shard.machine, dispatcher.consumer
        if item.shard_id != machine.shard_id:
            spec = errors.TOKEN_FORGED if self._is_listed(item.shard_id) else errors.TOKEN_STALE
            return AckResult(spec.code, "the token belongs to another stream")
        if item.consumer_id != consumer.consumer_id:
            foreign = item.consumer_id in machine.consumers
            spec = errors.TOKEN_FORGED if foreign else errors.TOKEN_STALE
            return AckResult(spec.code, "the token belongs to another consumer")
        if item.epoch != consumer.epoch:
            return AckResult(errors.TOKEN_STALE.code, "the consumer was reset")
        return None


def dispatcher_kind(config: ConsumerConfig) -> type[Dispatcher]:
    """The kind of dispatcher for a consumer. It is fixed, as the ack policy never changes."""
    return AckNoneDispatcher if config.ack_policy == "none" else Dispatcher


def _command(consumer: ConsumerMachine, items: list[AckItem]) -> Acknowledge:
    reasons = (
        (seq, item.reason[:REASON_CHARS_MAX]) for item in items if item.reason for seq in item.seqs
    )
    acked = [item.seqs for item in items if item.kind == "ack"]
    return Acknowledge(
        consumer.consumer_id,
        consumer.epoch,
        acked[0] if len(acked) == 1 else list(chain.from_iterable(acked)),
        [
            (item.kind, seq, item.delay_ns)
            for item in items
            if item.kind != "ack"
            for seq in item.seqs
        ],
        dict(islice(reasons, REASONS_MAX)),
    )


def _propose(dispatcher: Dispatcher, acks: Acknowledge) -> asyncio.Future[Result]:
    """Propose ``acks``, in several steps if acks with policy ``all`` settle very much."""
    consumer = dispatcher.consumer
    if consumer.config.ack_policy == "all" and acks.acked:
        cuts = consumer.pending.cuts(max(acks.acked), _SETTLED_MAX)
        if cuts:
            dispatcher.flush()
            applied = asyncio.ensure_future(_propose_in_steps(dispatcher, acks, cuts))
            dispatcher.track(applied)
            return applied
    return dispatcher.acknowledge(acks)


async def _propose_in_steps(dispatcher: Dispatcher, acks: Acknowledge, cuts: list[int]) -> Result:
    """Acknowledge up to each of ``cuts`` before ``acks``.

    Each step is an entry, so none holds the event loop for long. If one is lost, the next settles
    its messages too.
    """
    for number, seq in enumerate(cuts):
        with begun(number > 0):
            applied = dispatcher.propose(Acknowledge(acks.consumer_id, acks.epoch, [seq]))
        await asyncio.wait([applied])
        dispatcher.acknowledged(applied, postponed=False)
    with begun():
        return await dispatcher.propose(acks)


async def _shard_info(dispatcher: Dispatcher) -> ConsumerShardInfo:
    await dispatcher.settle()
    pending = dispatcher.consumer.pending
    return ConsumerShardInfo(
        shard=dispatcher.shard.machine.shard,
        delivered=dispatcher.consumer.delivered,
        ack_floor=dispatcher.consumer.floor,
        num_ack_pending=len(pending),
        num_redelivered=pending.redelivered,
        num_pending=await dispatcher.num_pending(),
    )


def _sum(pairs: Sequence[SequencePair]) -> SequencePair:
    """Add the positions of all shards: the sum of consumer sequences, the highest of others."""
    return SequencePair(
        sum(pair.consumer_seq for pair in pairs),
        max(pair.stream_seq for pair in pairs),
        max(pair.last_active_ns for pair in pairs),
    )
