"""Deletes messages anywhere in the stream, and updates the consumers and the head."""

import numpy as np
from numpy.typing import NDArray

from contrail_common import errors
from contrail_common.texts import I64Array, U32Array
from contrail_storage.core import commands as cmd
from contrail_storage.core.consumer_machine import Gone
from contrail_storage.core.results import Refused, Removed, Result, Step, Writes
from contrail_storage.core.stream.removal import head
from contrail_storage.core.stream.shard_state import ShardState


def delete(state: ShardState, step: Step, command: cmd.DeleteMessage) -> Result:
    """Remove one message."""
    config = state.config
    if config.sealed:
        return Refused(errors.STREAM_SEALED.code)
    if config.deny_delete:
        return Refused(errors.DELETE_DENIED.code)
    seq = command.seq
    if not state.is_live(seq):
        return Refused(errors.SEQUENCE_NOT_FOUND.code, f"sequence {seq} not found")
    facts = state.facts_at(seq)
    at = slice(seq - facts.base_seq, seq - facts.base_seq + 1)
    take_out(state, step, np.array([seq]), facts.subject_ids[at], facts.sizes[at])
    state.write_counters(step.writes)
    return Removed(1)


def live_among(state: ShardState, seqs: I64Array) -> NDArray[np.intp]:
    """Positions of the live messages of ``seqs``, which ascend."""
    return np.flatnonzero(state.are_live(seqs))


def live_messages(
    state: ShardState, seqs: I64Array
) -> tuple[I64Array, U32Array, I64Array, I64Array]:
    """Sequences, subject numbers, sizes and times of the live messages of ``seqs`` (ascending)."""
    seqs = seqs[live_among(state, seqs)]
    parts: list[tuple[I64Array, U32Array, I64Array, I64Array]] = []
    start = 0
    while start < len(seqs):
        facts = state.facts_at(int(seqs[start]))
        stop = int(np.searchsorted(seqs, facts.end_seq))
        within = seqs[start:stop]
        at = within - facts.base_seq
        parts.append((within, facts.subject_ids[at], facts.sizes[at], facts.times_ns[at]))
        start = stop
    if not parts:
        nothing = np.zeros(0, np.int64)
        return nothing, np.zeros(0, np.uint32), nothing, nothing
    seqs, sids, sizes, times_ns = (np.concatenate(each) for each in zip(*parts, strict=True))
    return seqs, sids, sizes, times_ns


def take_out(
    state: ShardState,
    step: Step,
    seqs: I64Array,
    sids: U32Array,
    sizes: I64Array,
    *,
    oldest: bool = False,
) -> None:
    """Remove live messages anywhere (ascending), given with subject number and bytes of each.

    ``oldest``: they are the oldest of their subjects.
    """
    state.counters.messages -= len(seqs)
    state.counters.bytes -= int(sizes.sum())
    state.deleted.add_many(seqs, step.writes)
    finish_removal(state, step, seqs, sids)
    table, floor_seq = state.subjects, state.counters.first_seq
    if len(seqs) == 1 and not oldest:
        table.take_out_one(int(sids[0]), int(seqs[0]), floor_seq, step)
    else:
        table.take_out(sids, seqs, floor_seq, step, state.are_live if oldest else None)
    forget_replaced(state)


def finish_removal(state: ShardState, step: Step, seqs: I64Array, sids: U32Array) -> None:
    """After messages were removed anywhere: update the consumers, and move the head.

    They are given with a sequence and a subject number for each.
    """
    state.note_removed(seqs, sids)
    state.exempt.discard_many(seqs, step.writes)
    # A consumer must not redeliver a message that is gone, or wait for its ack.
    consumers = [one for one in state.consumers.values() if one.pending or one.given_up]
    gone = set(seqs.tolist()) if consumers else set()
    for consumer in consumers:
        given_up = {seq for seq in gone if seq in consumer.given_up} if consumer.given_up else set()
        forgotten = sorted(given_up | consumer.pending.among(gone))
        if forgotten:
            consumer.change(Gone(forgotten), step)
    if int(seqs[0]) == state.counters.first_seq or not state.counters.messages:
        head.move_head(state, step.writes)


def leave_out(state: ShardState, seqs: I64Array, writes: Writes) -> None:
    """Mark sequences as deleted that were just assigned to messages that are not stored."""
    counters = state.counters
    if counters.messages:
        state.deleted.add_many(seqs, writes)
    # Without messages the head moves past all of them, so none needs a mark.
    if not counters.messages or int(seqs[0]) == counters.first_seq:
        head.move_head(state, writes)


def forget_replaced(state: ShardState) -> None:
    """Drop unfinished roll-ups of subjects that have no messages left."""
    counters, known = state.counters, state.subjects.ids
    if counters.replaced:
        counters.replaced = {name: seq for name, seq in counters.replaced.items() if name in known}
