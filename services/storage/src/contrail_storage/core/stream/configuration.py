"""Creates, changes and removes the stream of a shard."""

from typing import Final

from contrail_common import config_rules, errors, retention_rules
from contrail_common.model import Advisory
from contrail_storage.core import commands as cmd
from contrail_storage.core import key_layout as keys
from contrail_storage.core.results import Done, Refused, Result, Step
from contrail_storage.core.stream.removal import interest, limits
from contrail_storage.core.stream.shard_state import ShardState, StreamRecord

FIRST_SEQ_MAX: Final = 1 << 62
"""Highest first sequence of a stream; sequences after it never exceed 64 bits."""


def configure(state: ShardState, step: Step, command: cmd.ConfigureStream) -> Result:
    """Create the stream, or change its configuration."""
    refused = _refused(state, command)
    if refused is not None:
        return refused
    config, record = command.config, state.record
    state.captured = None
    if record is None:
        # Versions start at the log index and each entry adds at most one. So a re-created
        # stream never has a version of its predecessor, and an old If-Match never matches it.
        state.record = StreamRecord(
            config,
            command.incarnation,
            command.hash_key,
            step.now_ns,
            command.version or step.index,
            1,
            command.shard,
        )
        state.counters.first_seq = config.first_seq
        state.counters.last_seq = config.first_seq - 1
        state.write_counters(step.writes)
    elif record.config == config and command.version in (0, record.version):
        return Done(changed=False)
    else:
        if config.retention == "interest" != record.config.retention:
            interest.recheck(state, 0, state.counters.last_seq + 1, step.writes)
        record.config = config
        record.live_seq = state.live_ids_from
        record.version = command.version or record.version + 1
        limits.recheck_subjects(state)
        if not record.shard:  # all shards apply this; only the first reports it
            step.writes.advisories.append(Advisory(type="stream_action", action="modify"))
    state.write_record(step.writes)
    return Done()


def drop(state: ShardState, step: Step, command: cmd.DropStream) -> Result:
    """Remove the stream, or the parts of one whose restore was given up."""
    record = state.record
    if not state.holds_anything():
        return Refused(errors.STREAM_NOT_FOUND.code)
    if record is not None and command.incarnation not in ("", record.incarnation):
        return Refused(errors.STREAM_NOT_FOUND.code)
    if record is not None and command.version not in (None, 0, record.version):
        return Refused(errors.PRECONDITION_FAILED.code, f"the version is {record.version}")
    state.clear()
    for kind in keys.SHARD_KINDS:
        prefix = keys.shard_key(kind, state.shard_id)
        step.writes.delete_range(prefix, keys.prefix_end(prefix))
    step.writes.dropped.append(state.shard_id)
    return Done()


def _refused(state: ShardState, command: cmd.ConfigureStream) -> Refused | None:
    config, record = command.config, state.record
    refused = None if command.given is None else _unexpected(state, command, command.given)
    if refused is not None:
        return refused
    if not 1 <= config.first_seq <= FIRST_SEQ_MAX:
        return Refused(errors.STREAM_CONFIG_INVALID.code, "first_seq is out of range")
    if any(
        config_rules.over_limits(one.config, config.consumer_limits)
        for one in state.consumers.values()
    ):
        return Refused(errors.STREAM_CONFIG_INVALID.code, "a consumer exceeds consumer_limits")
    if record is not None and not retention_rules.may_become(
        record.config.retention, config.retention
    ):
        return Refused(errors.STREAM_UPDATE_REFUSED.code, "retention change not permitted")
    return None


def _unexpected(
    state: ShardState, command: cmd.ConfigureStream, given: cmd.Precondition
) -> Refused | None:
    """The refusal of a command whose condition does not hold, or whose change is not allowed."""
    record = state.record
    if record is not None and record.incarnation != command.incarnation:
        # The caller meant an earlier stream of this name.
        return Refused(errors.STREAM_NOT_FOUND.code)
    version = None if record is None else record.version
    same = record is not None and record.config == command.config
    refused = given.refusal(version, errors.STREAM_EXISTS, errors.STREAM_NOT_FOUND, same=same)
    if refused is not None or record is None or same:
        return refused
    consumers = [one.config for one in state.consumers.values()]
    problem = config_rules.stream_update_problem(
        record.config, command.config
    ) or config_rules.consumers_problem(command.config, consumers)
    return None if problem is None else Refused.of(problem)
