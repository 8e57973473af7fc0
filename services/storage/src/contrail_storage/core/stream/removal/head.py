"""The head of the stream: removing messages from the oldest on.

The facts of messages come from blocks, and every replica cuts its blocks in its own way. So no step
here or in the modules beside it may end where a block ends: a removal ends at a message, and a
search at a sequence.
"""

from collections.abc import Callable

import numpy as np

from contrail_common.texts import Mask, U32Array
from contrail_storage.core.facts import MessageFacts
from contrail_storage.core.results import Step, Writes
from contrail_storage.core.stream.shard_state import ShardState

Reach = Callable[[MessageFacts, Mask | None], int]
"""Number of sequences to remove from the head; more than the facts have means all of them."""


def remove_head(state: ShardState, step: Step, reach: Reach, messages_max: int) -> int:
    """Remove the messages within ``reach`` of the head, at most ``messages_max``."""
    counters = state.counters
    gone: list[U32Array] = []
    removed = 0
    while counters.messages and removed < messages_max:
        facts, live = _head_facts(state)
        count = min(reach(facts, live), len(facts.sizes))
        if count <= 0:
            break
        sids = _take_head(state, facts, live, count, messages_max - removed)
        removed += len(sids)
        gone.append(sids)
    if removed:
        state.subjects.remove(np.concatenate(gone), counters.first_seq, step)
        _forget_below_head(state, step.writes)
    return removed


def reaches(state: ShardState, reach: Reach) -> bool:
    """Whether the oldest message is still within ``reach``."""
    return state.counters.messages > 0 and reach(*_head_facts(state)) > 0


def move_head(state: ShardState, writes: Writes) -> None:
    """Move the first sequence to the next live message, after the first one was removed."""
    _skip_deleted(state)
    _forget_below_head(state, writes)


def _head_facts(state: ShardState) -> tuple[MessageFacts, Mask | None]:
    """Facts from the first sequence to the end of its run, and which of them are live."""
    first_seq = state.counters.first_seq
    # The head stays in one block for thousands of removals, so its facts are kept.
    facts = state.head
    if facts is None or not facts.base_seq <= first_seq < facts.end_seq:
        facts = state.head = state.facts_at(first_seq)
    at = first_seq - facts.base_seq
    rest = MessageFacts(first_seq, facts.subject_ids[at:], facts.sizes[at:], facts.times_ns[at:])
    return rest, state.deleted.live_mask(first_seq, len(rest.sizes))


def _take_head(
    state: ShardState, facts: MessageFacts, live: Mask | None, count: int, messages_max: int
) -> U32Array:
    """Remove ``count`` sequences, at most ``messages_max`` live; return their subjects."""
    counters = state.counters
    if live is None:
        count = min(count, messages_max)
        positions = np.arange(count)
        sids, sizes = facts.subject_ids[:count], facts.sizes[:count]
    else:
        # Dead messages in between count as sequences, not as removed messages.
        positions = np.flatnonzero(live[:count])[:messages_max]
        count = int(positions[-1]) + 1
        sids, sizes = facts.subject_ids[positions], facts.sizes[positions]
    state.note_removed(positions + facts.base_seq, sids)
    counters.messages -= len(sids)
    counters.bytes -= int(sizes.sum())
    counters.first_seq = facts.base_seq + count
    _skip_deleted(state)
    return sids


def _skip_deleted(state: ShardState) -> None:
    counters = state.counters
    if counters.messages == 0:
        counters.first_seq = counters.last_seq + 1
    else:
        counters.first_seq = state.deleted.next_live(counters.first_seq)


def _forget_below_head(state: ShardState, writes: Writes) -> None:
    first_seq = state.counters.first_seq
    state.deleted.trim(first_seq, writes)
    state.exempt.trim(first_seq, writes)
    # The store removes blocks below it; those that the first sequence divides stay as they are.
    writes.trimmed[state.shard_id] = first_seq
