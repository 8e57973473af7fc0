"""Commands about consumers: creating, changing and dropping them, deliveries, acknowledgements."""

from typing import Final

import numpy as np

from contrail_common import config_rules, errors, retention_rules
from contrail_common.model import Advisory, AdvisoryAction
from contrail_common.timeunits import INT64_MAX
from contrail_storage.core import commands as cmd
from contrail_storage.core.consumer_machine import (
    ConsumerMachine,
    Gone,
    Reconfigured,
    Trimmed,
    allows_more,
)
from contrail_storage.core.pinned import Pinned
from contrail_storage.core.results import ConsumerPut, Done, Refused, Result, Step
from contrail_storage.core.stream.removal import interest
from contrail_storage.core.stream.shard_state import ShardState

_ONE_BY_ONE: Final = 8
"""Up to so many sequences, a loop takes less time than numpy."""


def put(state: ShardState, step: Step, command: cmd.PutConsumer) -> Result:
    """Create a consumer, or change its configuration."""
    existing = state.consumer(command.config.name)
    refused = _put_refused(state, command, existing)
    if refused is not None:
        return refused
    if existing is None:
        return _create(state, step, command)
    old, new = existing.config, command.config
    if old != new:
        if old.filter_subjects != new.filter_subjects:
            interest.forget_filter(state, existing.consumer_id)
            interest.recheck_without(state, existing, step.writes)
        elif allows_more(old, new):
            interest.recheck_given_up(state, existing, step.writes)
        existing.change(Reconfigured(new), step)
        _report(state, step, existing, "modify")
    return ConsumerPut(existing.consumer_id, created=False)


def _create(state: ShardState, step: Step, command: cmd.PutConsumer) -> Result:
    record, last_seq = state.record, state.counters.last_seq
    assert record is not None
    if 0 <= record.config.max_consumers <= len(state.consumers):
        return Refused(errors.CONSUMER_LIMIT.code)
    pinned = Pinned.decode(command.pinned, command.pinned_end) if command.pinned else None
    if command.pinned and (pinned is None or pinned.end_seq > last_seq + 1):
        return Refused(errors.INTERNAL.code, "the messages to deliver first are inconsistent")
    consumer_id = record.next_consumer_id
    record.next_consumer_id += 1
    state.write_record(step.writes)
    start_seq = max(command.start_seq, 1) if command.start_seq else last_seq + 1
    consumer = ConsumerMachine.create(
        state.shard_id, consumer_id, command.config, start_seq, step.now_ns, step.index
    )
    if pinned is not None:
        consumer.pin(pinned, step.writes)
    consumer.write_snapshot(step.writes)
    state.consumers[consumer_id] = consumer
    state.consumer_ids[command.config.name] = consumer_id
    interest.forget_filter(state, consumer_id)
    _report(state, step, consumer, "create")
    return ConsumerPut(consumer_id, created=True)


def _put_refused(
    state: ShardState, command: cmd.PutConsumer, existing: ConsumerMachine | None
) -> Refused | None:
    config, given, stream = command.config, command.given, state.config
    if given is not None:
        refused = given.refusal(
            None if existing is None else existing.version,
            errors.CONSUMER_EXISTS,
            errors.CONSUMER_NOT_FOUND,
            same=existing is not None and existing.config == config,
        )
        if refused is not None:
            return refused
    over = config_rules.over_limits(config, stream.consumer_limits)
    if over is not None:
        return Refused(over.code)
    others = [one.config for one in state.consumers.values() if one is not existing]
    problem = (
        retention_rules.replicas_problem(config, stream.num_replicas)
        or retention_rules.kind_problem(config, stream.retention)
        or retention_rules.collision(config, stream.retention, others)
    )
    if problem is None and given is not None and existing is not None and not state.shard:
        # The first shard decides; the others take over its decision.
        problem = config_rules.consumer_update_problem(existing.config, config)
    return None if problem is None else Refused.of(problem)


def drop(state: ShardState, step: Step, command: cmd.DropConsumer) -> Result:
    """Remove a consumer."""
    consumer = state.consumers.get(command.consumer_id)
    if consumer is None:
        return Refused(errors.CONSUMER_NOT_FOUND.code)
    if command.version not in (None, 0, consumer.version):
        return Refused(errors.PRECONDITION_FAILED.code, f"the version is {consumer.version}")
    del state.consumers[command.consumer_id]
    del state.consumer_ids[consumer.config.name]
    consumer.erase(step.writes)
    interest.forget_filter(state, consumer.consumer_id)
    interest.recheck_without(state, consumer, step.writes)
    _report(state, step, consumer, "delete")
    return Done()


def change(state: ShardState, step: Step, command: cmd.ConsumerChange) -> Result:
    """Record deliveries or acknowledgements, and remove what they settled where that is due."""
    consumer = state.consumers.get(command.consumer_id)
    if consumer is None:
        return Refused(errors.CONSUMER_NOT_FOUND.code)
    # An ack token from before accepted data loss: its sequence may be another message now.
    if consumer.epoch != command.epoch:
        return Refused(errors.TOKEN_STALE.code)
    from_seq, last_seq = consumer.next_seq, consumer.delivered.stream_seq
    settled = consumer.change(command, step)
    if consumer.pending.has_dropped:
        state.dropping.add(consumer.consumer_id)
    if isinstance(command, (cmd.Deliver, cmd.DeliverAcked)):
        # In the same entry, so that no reader sees a pending message that is not in the stream.
        forget_gone(state, step, consumer, command.seqs)
    if state.config.retention != "limits":
        interest.settled(state, step, consumer, settled)
        if isinstance(command, cmd.DeliverAcked):
            from_seq = max(from_seq, command.position)  # where an ack after `Deliver` begins
        # What it got while its position was held back, it seemed to need until now.
        held_back = consumer.config.ack_policy == "none" and from_seq <= last_seq
        if held_back or isinstance(command, (cmd.Advance, cmd.Acknowledge, cmd.DeliverAcked)):
            interest.passed(state, from_seq, consumer, step.writes)
    return Done()


def forget_gone(state: ShardState, step: Step, consumer: ConsumerMachine, seqs: list[int]) -> None:
    """Remove the ``seqs`` from pending that are no longer in the stream.

    A delivery is recorded after it was sent. A message that was removed in between must leave
    pending here: its removal is over, so no later command would do it.
    """
    if not consumer.pending:
        return
    if len(seqs) > _ONE_BY_ONE and (last_seq := max(seqs)) <= INT64_MAX:
        if state.are_all_live(min(seqs), last_seq):
            return
        numbers = np.array(seqs, np.int64)
        seqs = numbers[~state.are_live(numbers)].tolist()
    gone = [seq for seq in seqs if not state.is_live(seq) and seq in consumer.pending]
    if gone:
        consumer.change(Gone(gone), step)


def forget_trimmed(state: ShardState, step: Step) -> None:
    """Remove the messages below the first sequence from the consumers' pending."""
    first_seq = state.counters.first_seq
    for consumer in state.consumers.values():
        # No delta: a load trims by the first sequence of the stream too.
        consumer.given_up.trim(first_seq)
        if consumer.pending and consumer.floor.stream_seq + 1 < first_seq:
            consumer.change(Trimmed(first_seq), step)
            if consumer.pending.has_dropped:
                state.dropping.add(consumer.consumer_id)


def _report(
    state: ShardState, step: Step, consumer: ConsumerMachine, action: AdvisoryAction
) -> None:
    if not state.shard:  # a consumer is on all shards; only the first reports it
        name = consumer.config.name
        advisory = Advisory(type="consumer_action", consumer=name, action=action)
        step.writes.advisories.append(advisory)
