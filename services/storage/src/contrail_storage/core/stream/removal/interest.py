"""Retention ``interest`` and ``workqueue``: remove messages that the consumers have settled.

A consumer needs a message if its filter matches and one of these holds: the message is pending; it
is not delivered yet and was not acknowledged early; or the consumer gave up on it because of
``max_deliver`` (``core.given_up``). This is JetStream's ``needAck``, with one rule for all ack
policies: all messages above the ack floor of a consumer with ack policy ``all`` are such messages.

The command that settles a message also checks whether the message can be removed. After a consumer
was removed, or its filter or the retention changed, ``EnforceInterest`` commands check the messages
that may be left over, a slice in each command.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from contrail_common.texts import I64Array, U32Array
from contrail_storage.core import commands as cmd
from contrail_storage.core.consumer_machine import ConsumerMachine
from contrail_storage.core.results import Removed, Step, Writes
from contrail_storage.core.stream.coverage import Coverage
from contrail_storage.core.stream.removal import by_subject, deletion, purge
from contrail_storage.core.stream.shard_state import ShardState

CHECKS_MAX: Final = 50_000
"""Messages times consumers that one command checks; the limit keeps ``apply`` short."""


@dataclass(slots=True, eq=False)
class _Messages:
    """Live messages, ascending: sequence, subject number and bytes of each."""

    seqs: I64Array
    sids: U32Array
    sizes: I64Array

    def select(self, chosen: NDArray[np.bool_]) -> "_Messages":
        """The messages where ``chosen`` is true."""
        return _Messages(self.seqs[chosen], self.sids[chosen], self.sizes[chosen])


# Caches ------------------------------------------------------------------------------------------


def forget_filter(state: ShardState, consumer_id: int) -> None:
    """Drop cached answers after a consumer was created or removed, or its filters changed."""
    state.wanted = None
    state.filter_matches.forget(consumer_id)


def unwanted(
    state: ShardState, subjects: list[str], subject_index: U32Array
) -> NDArray[np.bool_] | None:
    """A mask of the messages that no consumer's filter matches; None if there are none.

    A stream with retention ``interest`` does not store such messages.
    """
    wanted = state.wanted
    if wanted is None:
        filters = [one.config.filter_subjects for one in state.consumers.values()]
        everything = not all(filters)  # no filter matches every subject
        wanted = Coverage({one for each in filters for one in each}, everything=everything)
        state.wanted = wanted
    outside = [number for number, subject in enumerate(subjects) if not wanted[subject]]
    if not outside:
        return None
    mask = np.zeros(len(subjects), np.bool_)
    mask[outside] = True
    found: NDArray[np.bool_] = mask[subject_index]
    return found if found.any() else None


# Settling ----------------------------------------------------------------------------------------


def settled(state: ShardState, step: Step, consumer: ConsumerMachine, seqs: list[int]) -> None:
    """Remove the messages ``seqs`` that ``consumer`` settled, unless others need them."""
    live = sorted({seq for seq in seqs if state.is_live(seq)})
    if not live:
        return
    if state.config.retention == "interest":
        # An ack with policy `all` may settle a million messages. Its entry notes the range, and
        # further entries check it in slices.
        if len(live) * len(state.consumers) > CHECKS_MAX:
            recheck(state, live[0], live[-1] + 1, step.writes)
            return
        # It has settled them: asking it again would cost as much as asking another one.
        others = [one for one in state.consumers.values() if one is not consumer]
        found = _unneeded(state, _known(state, np.array(live, np.int64)), others)
    else:
        # In a work queue filters do not overlap: no other consumer may have the message.
        found = _known(state, np.array(live, np.int64))
    _take_out(state, step, found)


def passed(state: ShardState, from_seq: int, consumer: ConsumerMachine, writes: Writes) -> None:
    """Note messages to check after a consumer moved on from ``from_seq`` past them.

    No command named them: a consumer without acks got them while the retention was ``limits`` or
    its position was held back; an ack with policy ``all`` covers them and the record of their
    delivery was lost; or only other filters had skipped them.
    """
    recheck(state, from_seq, consumer.next_seq, writes)


def _known(state: ShardState, seqs: I64Array) -> _Messages:
    """The live messages ``seqs`` (ascending), with one facts lookup for each run of blocks."""
    if len(seqs) == 1:
        facts = state.facts_at(int(seqs[0]))
        at = seqs - facts.base_seq
        return _Messages(seqs, facts.subject_ids[at], facts.sizes[at])
    sids, sizes = np.zeros(len(seqs), np.uint32), np.zeros(len(seqs), np.int64)
    start = 0
    while start < len(seqs):
        facts = state.facts_at(int(seqs[start]))
        stop = int(np.searchsorted(seqs, facts.end_seq))
        at = seqs[start:stop] - facts.base_seq
        sids[start:stop], sizes[start:stop] = facts.subject_ids[at], facts.sizes[at]
        start = stop
    return _Messages(seqs, sids, sizes)


def _unneeded(
    state: ShardState, found: _Messages, consumers: Iterable[ConsumerMachine]
) -> _Messages:
    """The messages of ``found`` that none of ``consumers`` needs."""
    if not len(found.seqs):
        return found
    left = dict(zip(found.seqs.tolist(), found.sids.tolist(), strict=True))
    top_seq = int(found.seqs[-1])
    for consumer in consumers:
        for seq in consumer.awaited(left, top_seq):
            if state.filter_matches.matches(consumer, left[seq], state.subjects):
                del left[seq]
        if not left:
            break
    # Usually all or none of them are needed: no copy for all.
    if len(left) == len(found.seqs):
        return found
    return found.select(np.isin(found.seqs, np.fromiter(left, np.int64, len(left))))


def _take_out(state: ShardState, step: Step, gone: _Messages) -> None:
    if not len(gone.seqs):
        return
    deletion.take_out(state, step, gone.seqs, gone.sids, gone.sizes)
    state.write_counters(step.writes)


# Checking again ----------------------------------------------------------------------------------


def recheck(state: ShardState, from_seq: int, end_seq: int, writes: Writes) -> None:
    """Note the messages from ``from_seq`` to before ``end_seq`` to be checked later.

    Only one range is noted: it grows to cover both, which may check more than necessary.
    """
    counters = state.counters
    from_seq = max(from_seq, counters.first_seq)
    end_seq = min(end_seq, counters.last_seq + 1)
    if from_seq >= end_seq:
        return
    if counters.keep_from < counters.keep_to:
        from_seq, end_seq = min(from_seq, counters.keep_from), max(end_seq, counters.keep_to)
    counters.keep_from, counters.keep_to = from_seq, end_seq
    state.write_counters(writes)


def recheck_without(state: ShardState, consumer: ConsumerMachine, writes: Writes) -> None:
    """Note messages to check after a consumer's filter changed, or it was removed."""
    if state.config.retention == "interest":
        # Messages that it gave up on are below its floor, and perhaps nobody needs them now.
        from_seq = 0 if consumer.config.max_deliver > 0 else consumer.floor.stream_seq + 1
        recheck(state, from_seq, state.counters.last_seq + 1, writes)


def recheck_given_up(state: ShardState, consumer: ConsumerMachine, writes: Writes) -> None:
    """Note messages that a consumer gave up on, and is about to forget, to be checked."""
    if state.config.retention == "interest" and consumer.given_up:
        first, last = consumer.given_up.span()
        recheck(state, first, last + 1, writes)


def enforce_interest(state: ShardState, step: Step, command: cmd.EnforceInterest) -> Removed:
    """Check a slice of the noted range."""
    counters = state.counters
    messages = counters.messages
    if state.pending_recheck:
        _check_slice(state, step, command.messages_max)
    return Removed(messages - counters.messages, state.pending_recheck)


def _check_slice(state: ShardState, step: Step, messages_max: int) -> None:
    counters, consumers = state.counters, state.consumers.values()
    seq = max(counters.keep_from, counters.first_seq)
    end_seq = min(counters.keep_to, counters.last_seq + 1)
    if state.config.retention != "interest":
        seq = end_seq  # the retention changed since the range was noted
    elif not consumers and seq == counters.first_seq and end_seq > counters.last_seq:
        # The last consumer is gone. Nobody needs any message, so no message is checked.
        purge.purge_all(state, step.writes)
        seq = end_seq
    else:
        count = max(min(messages_max, CHECKS_MAX // max(len(consumers), 1)), 1)
        found, seq = _slice(state, seq, end_seq, count)
        _take_out(state, step, _unneeded(state, found, consumers))
    if seq >= end_seq:
        seq = end_seq = 0
    counters.keep_from, counters.keep_to = seq, end_seq
    state.write_counters(step.writes)


def _slice(state: ShardState, seq: int, end_seq: int, left: int) -> tuple[_Messages, int]:
    """The first live messages from ``seq`` on, at most ``left``, and the next sequence."""
    deleted = state.deleted
    stop_seq = min(end_seq, seq + by_subject.SEARCH_SEQS)
    parts: list[I64Array] = [np.zeros(0, np.int64)]
    while seq < stop_seq and left > 0:
        seq = deleted.next_live(seq)
        count = min(stop_seq - seq, left)
        if count <= 0:
            break
        live = deleted.live_mask(seq, count)
        seqs = np.arange(seq, seq + count)
        parts.append(seqs if live is None else seqs[live])
        left -= len(parts[-1])
        seq += count
    return _known(state, np.concatenate(parts)), deleted.next_live(seq)
