"""Purges of the stream and of subjects, and removals of messages that a roll-up replaces."""

from contrail_common import errors
from contrail_common.texts import I64Array, Mask, U32Array
from contrail_storage.core import commands as cmd
from contrail_storage.core.facts import MessageFacts
from contrail_storage.core.results import Refused, Removed, Result, Step, Writes
from contrail_storage.core.stream.removal import by_subject, deletion, head, limits
from contrail_storage.core.stream.shard_state import ShardState


def trim(state: ShardState, step: Step, command: cmd.Trim) -> Result:
    """Purge a slice of the messages below a sequence, or all messages at once."""
    refused = _refused(state)
    if refused is not None:
        return refused
    to_seq = command.to_seq
    if command.keep:
        to_seq = min(to_seq, _first_of_newest(state, command.keep))
    if to_seq > state.counters.last_seq:
        return Removed(purge_all(state, step.writes))

    def below(facts: MessageFacts, _: Mask | None) -> int:
        return to_seq - facts.base_seq

    removed = head.remove_head(state, step, below, command.messages_max)
    if removed:
        state.write_counters(step.writes)
    return Removed(removed, head.reaches(state, below))


def remove(state: ShardState, step: Step, command: cmd.Remove) -> Result:
    """Remove the messages of the command that are still there."""
    messages = command.messages()
    if messages is None:
        return Refused(errors.INTERNAL.code, "the columns of the messages are inconsistent")
    refused = _refused(state) if command.reason == "purge" else None
    if refused is not None:
        return refused
    seqs, sids, sizes = messages
    counters = state.counters
    if state.recounted:
        seqs, sids, sizes, _ = deletion.live_messages(state, seqs)
    at = deletion.live_among(state, seqs)
    if command.reason == "limit":
        at = at[limits.among_excess(state, sids[at])]
    if len(at):
        deletion.take_out(state, step, seqs[at], sids[at], sizes[at], oldest=True)
    for subject, to_seq in command.finished.items():
        if counters.replaced.get(subject) == to_seq:
            counters.replaced.pop(subject)
    if len(at) or command.finished:
        state.write_counters(step.writes)
    return Removed(len(at))


def purge_all(state: ShardState, writes: Writes) -> int:
    """Remove all messages in one step, however many; return their number."""
    counters = state.counters
    removed = counters.messages
    # Sequences continue: a purge never makes a sequence mean another message.
    counters.first_seq = counters.last_seq + 1
    counters.messages = counters.bytes = 0
    counters.replaced = {}
    state.forget_removals()
    state.subjects.clear(writes)
    state.deleted.clear(writes)
    state.deadlines.clear(writes)
    if state.exempt.total:
        state.exempt.clear(writes)
    writes.trimmed[state.shard_id] = counters.first_seq
    state.write_counters(writes)
    return removed


def replace_older(
    state: ShardState, step: Step, sids: U32Array, quota: I64Array, below: I64Array
) -> None:
    """Remove the ``quota`` oldest of each of ``sids`` (ascending), which are ``below`` a sequence.

    Messages that one append cannot remove are noted; ``Remove`` commands remove them.
    """
    older = quota > 0
    if not older.any():
        return
    sids, quota, below = sids[older], quota[older], below[older]
    removed = by_subject.remove_oldest(state, step, sids, quota)
    if removed < int(quota.sum()):
        # By name and in the counters: later entries continue, also after a restart and after the
        # number has become another one.
        names = [state.subjects.name(sid) for sid in sids.tolist()]
        state.counters.replaced |= dict(zip(names, below.tolist(), strict=True))


def _first_of_newest(state: ShardState, count: int) -> int:
    """The smallest sequence from which at most ``count`` messages are live."""
    counters, deleted = state.counters, state.deleted
    low, high = counters.first_seq, counters.last_seq + 1
    while low < high:
        middle = (low + high) // 2
        live = counters.last_seq - middle + 1 - deleted.count(middle, counters.last_seq)
        if live > count:
            low = middle + 1
        else:
            high = middle
    return low


def _refused(state: ShardState) -> Refused | None:
    config = state.config
    if config.sealed:
        return Refused(errors.STREAM_SEALED.code)
    if config.deny_purge:
        return Refused(errors.PURGE_DENIED.code)
    return None
