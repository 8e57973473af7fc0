"""Removes messages that exceed the limits of the stream, of their subject, or of age."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from contrail_common.arrays import distinct
from contrail_common.model import StreamConfig
from contrail_common.texts import I64Array, Mask, U32Array
from contrail_storage.core import commands as cmd
from contrail_storage.core.facts import MessageFacts, oldest_in
from contrail_storage.core.results import Removed, Result, Step
from contrail_storage.core.stream.removal import by_subject, head
from contrail_storage.core.stream.shard_state import ShardState

_COUNT_MAX: Final = 0xFFFF_FFFF
"""The highest count that the subject table can store."""


def enforce(state: ShardState, step: Step, config: StreamConfig, sids: U32Array) -> None:
    """Remove messages over the limits after messages of the subjects ``sids`` were stored.

    ``config`` has the limits of this shard (``shard_config``).
    """
    if config.max_msgs_per_subject >= 0:
        most = min(config.max_msgs_per_subject, _COUNT_MAX)
        _enforce_of_subjects(state, step, distinct(sids), most)
    if state.is_over(config):
        _evict(state, step, config, state.counters.messages)


def enforce_limits(state: ShardState, step: Step, command: cmd.EnforceLimits) -> Result:
    """Remove a slice of the messages over the limits of the stream."""
    config = state.shard_config
    removed = _evict(state, step, config, command.messages_max)
    recheck_subjects(state)
    if removed:
        state.write_counters(step.writes)
    return Removed(removed, state.is_over(config))


def among_excess(state: ShardState, sids: U32Array) -> NDArray[np.intp]:
    """Positions of the messages to remove by ``max_msgs_per_subject``: the oldest of each subject.

    ``sids`` has the subject number of each message; they ascend by sequence.
    """
    most, table = state.config.max_msgs_per_subject, state.subjects
    if most < 0:
        return np.zeros(0, np.intp)
    own = distinct(sids)
    excess = table.counts[table.numbered.slots(own)].astype(np.int64) - min(most, _COUNT_MAX)
    return oldest_in(sids, None, own, np.maximum(excess, 0), len(sids))


def excess_by_slot(state: ShardState) -> tuple[I64Array, I64Array]:
    """Slots of the subjects over ``max_msgs_per_subject``, and how many messages each is over."""
    most, table = state.config.max_msgs_per_subject, state.subjects
    counts = table.counts[: table.size]
    over = counts > min(most, _COUNT_MAX) if most >= 0 else np.zeros(0, np.bool_)
    slots = np.flatnonzero(over)
    return slots, counts[slots].astype(np.int64) - most


def recheck_subjects(state: ShardState) -> None:
    """Set ``subjects_over`` by checking the counts of all subjects."""
    most, table = state.config.max_msgs_per_subject, state.subjects
    counts = table.counts[: table.size]
    state.subjects_over = most >= 0 and bool((counts > min(most, _COUNT_MAX)).any())


def expire_age(state: ShardState, step: Step, command: cmd.ExpireAge) -> Result:
    """Remove a slice of the messages past ``max_age``, up to the first one that is exempt.

    If removals leave markers it does nothing: ``Expire`` removes the messages then.
    """
    config = state.config
    if config.max_age_ns <= 0 or config.subject_delete_marker_ttl_ns > 0:
        return Removed(0)
    limit_ns = max(step.now_ns - config.max_age_ns, -1)

    def expired(facts: MessageFacts, _: Mask | None) -> int:
        old = int(np.searchsorted(facts.times_ns, limit_ns, side="right"))
        ages = state.exempt.live_mask(facts.base_seq, old) if old else None
        return old if ages is None or ages.all() else int(np.argmin(ages))

    removed = head.remove_head(state, step, expired, command.messages_max)
    if removed:
        state.write_counters(step.writes)
    return Removed(removed, head.reaches(state, expired))


def _evict(state: ShardState, step: Step, config: StreamConfig, messages_max: int) -> int:
    """Remove the oldest messages over the stream's limits; return how many."""
    counters = state.counters
    # With discard `new`, appends were refused before they could exceed the limit. A limit that is
    # lowered removes nothing.
    if config.discard != "old":
        return 0
    removed = 0
    if 0 <= config.max_msgs < counters.messages:
        over = min(counters.messages - config.max_msgs, messages_max)
        removed = head.remove_head(state, step, lambda facts, _: len(facts.sizes), over)
    if 0 <= config.max_bytes < counters.bytes:

        def over_bytes(facts: MessageFacts, live: Mask | None) -> int:
            over = counters.bytes - config.max_bytes
            if over <= 0:
                return 0
            sizes = facts.sizes if live is None else facts.sizes * live
            # The fewest of the oldest messages whose bytes make up for the excess.
            return int(np.searchsorted(np.cumsum(sizes), over)) + 1

        removed += head.remove_head(state, step, over_bytes, messages_max - removed)
    return removed


def _enforce_of_subjects(state: ShardState, step: Step, sids: U32Array, most: int) -> None:
    """Remove the oldest of each of ``sids`` (ascending) that has more than ``most``."""
    table = state.subjects
    excess = table.counts[table.numbered.slots(sids)].astype(np.int64) - most
    over = excess > 0
    if over.any():
        removed = by_subject.remove_oldest(state, step, sids[over], excess[over])
        # The leader finds what is left over, and proposes `Remove` commands.
        state.subjects_over |= removed < int(excess[over].sum())
