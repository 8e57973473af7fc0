"""Continues a stream after an operator accepted damage, so that no client mistakes old for new.

The lost entries may have used sequences, log indexes, consumer numbers and epochs after the last
known ones. So all of these continue far above. A token, version or cursor that a client has kept
then names another incarnation, an old epoch, or a version that does not exist.
"""

from typing import Final

import numpy as np

from contrail_common.model import DataLoss
from contrail_common.texts import I64Array, Mask
from contrail_common.timeunits import INT64_MAX
from contrail_storage.core import commands as cmd
from contrail_storage.core import key_layout as keys
from contrail_storage.core.commands import RANGES_MAX
from contrail_storage.core.facts import MessageFacts
from contrail_storage.core.results import Done, Result, Step, Writes
from contrail_storage.core.stream.consumer_changes import forget_gone
from contrail_storage.core.stream.shard_state import ShardState

INDEX_STEP: Final = 1 << 24
"""More entries than a log ever holds: new indexes and versions start this far above the last."""
NUMBER_STEP: Final = 1 << 16
"""More consumers, epochs of a consumer, or shards than are made between two checkpoints."""
_CHUNK: Final = 1 << 20


def accept_loss(state: ShardState, step: Step, command: cmd.AcceptLoss) -> Result:
    """Give the rest of a stream a new incarnation, and record the loss."""
    record = state.record
    assert record is not None
    record.incarnation = command.incarnation
    record.version += INDEX_STEP
    record.next_consumer_id += NUMBER_STEP
    state.write_record(step.writes)
    for consumer in state.consumers.values():
        # Lost messages cannot be acknowledged, and would be pending for ever.
        forget_gone(state, step, consumer, list(consumer.pending))
        consumer.epoch += NUMBER_STEP
        consumer.version += INDEX_STEP
        consumer.write_snapshot(step.writes)
    state.loss = DataLoss(
        accepted_ns=step.now_ns,
        reason=command.reason,
        unknown=command.unknown,
        messages=command.messages,
        ranges=command.ranges,
        times=1 if state.loss is None else state.loss.times + 1,
    )
    state.write_loss(step.writes)
    # Rows of ids may be lost: what is stored of a batch is not known any more.
    state.producers.forget_below(INT64_MAX, step.writes)
    step.writes.delete(keys.shard_key(keys.STOPPED, state.shard_id))
    return Done()


class Recount:
    """Recounts a shard from the messages that can be read, given in order of sequence.

    Not a command: it reads every message. The result is the state of a shard from which the lost
    messages were deleted.
    """

    def __init__(self, state: ShardState, *, marks_lost: bool = False) -> None:
        """``marks_lost``: a row of the deleted sequences may be lost, so it is unknown which."""
        size = state.subjects.size
        texts = state.subjects.numbered.texts
        self._state = state  # unchanged before `finish`
        counters = state.counters
        span = counters.last_seq - counters.first_seq + 1
        # Whether a sequence in a page without a row may have been deleted. Not if the marks that
        # are left account for all that is missing from the count of messages.
        self._doubt_unmarked = marks_lost and span - state.deleted.total != counters.messages
        # By place in the subject table, one element per place:
        self._known = np.array([name is not None for name in texts], np.bool_)  # it has a name
        self._counts = np.zeros(size, np.uint32)  # messages kept so far
        self._first = np.zeros(size, np.int64)  # first sequence kept; 0: none yet
        self._last = np.zeros(size, np.int64)  # last sequence kept so far; 0: none yet
        # Of the messages kept so far: their count, bytes and first sequence (0: none yet).
        self._messages = self._bytes = self._first_seq = 0
        self._next_seq = state.counters.first_seq  # all sequences below have been judged
        self._last_time_ns = state.counters.last_time_ns  # never decreases
        self._lost = 0  # messages lost so far
        self._ranges: list[tuple[int, int]] = []  # lost (first, last), at most RANGES_MAX
        self._to_delete: list[I64Array] = []  # lost sequences after `_first_seq`, ascending

    def take(self, facts: MessageFacts) -> None:
        """Count the next run of messages; everything before it that was not given is lost."""
        self._pass(facts.base_seq)
        start = max(self._next_seq - facts.base_seq, 0)
        if start >= len(facts.sizes):
            return
        at = self._state.subjects.numbered.slots(facts.subject_ids[start:])
        seqs = np.arange(facts.base_seq + start, facts.end_seq)
        live = self._state.deleted.are_live(seqs)
        known = (at >= 0) & (at < len(self._known))
        known[known] = self._known[at[known]]
        # A subject has no message below its first one: such a message belonged to an earlier
        # subject with the same number.
        kept = live & known
        kept[known] &= seqs[known] >= self._state.subjects.first[at[known]]
        if self._doubt_unmarked:
            kept &= self._are_surely_live(seqs, at, kept)
        self._count(at[kept], seqs[kept])
        # Some may be below the first kept message: `finish` trims their marks again.
        self._lose(seqs[live & ~kept])
        self._bytes += int(facts.sizes[start:][kept].sum())
        self._next_seq = facts.end_seq
        self._last_time_ns = max(self._last_time_ns, int(facts.times_ns[-1]))

    def _are_surely_live(self, seqs: I64Array, at: I64Array, known: Mask) -> Mask:
        """Which of ``seqs`` were certainly not deleted; ``at`` are the slots of the known ones.

        A deleted message must not come back: the compactor may even have emptied it. So, without
        the page of its marks, a message is kept only if its subject can have no other one: if the
        bounds of the subject's messages are this sequence.
        """
        table = self._state.subjects
        only = np.zeros(len(seqs), np.bool_)
        only[known] = table.last[at[known]] == seqs[known]
        only[known] &= table.first[at[known]] == seqs[known]
        return only | self._state.deleted.have_page(seqs)

    def _count(self, at: I64Array, seqs: I64Array) -> None:
        if not len(seqs):
            return
        self._messages += len(seqs)
        self._first_seq = self._first_seq or int(seqs[0])
        fresh = self._counts[at] == 0
        # Assignment with repeated indexes keeps the last value: reversed, that is the first one.
        self._first[at[fresh][::-1]] = seqs[fresh][::-1]
        self._last[at] = seqs
        np.add.at(self._counts, at, np.uint32(1))

    def _pass(self, end_seq: int) -> None:
        """Count the sequences up to ``end_seq`` as lost, unless they were deleted."""
        while self._next_seq < end_seq:
            stop = min(self._next_seq + _CHUNK, end_seq)
            seqs = np.arange(self._next_seq, stop)
            self._lose(seqs[self._state.deleted.are_live(seqs)])
            self._next_seq = stop

    def _lose(self, seqs: I64Array) -> None:
        if not len(seqs):
            return
        self._lost += len(seqs)
        _add_ranges(self._ranges, seqs)
        if self._first_seq:  # sequences below the first message need no mark
            self._to_delete.append(seqs)

    def finish(self, last_seq: int, writes: Writes) -> tuple[int, list[tuple[int, int]]]:
        """Write the state; return the number of lost messages, and their first ranges.

        ``last_seq`` is the highest sequence that is known to have been used.
        """
        state, counters = self._state, self._state.counters
        last_seq = max(last_seq, counters.last_seq, self._next_seq - 1)
        self._pass(last_seq + 1)
        counters.messages, counters.bytes = self._messages, self._bytes
        counters.first_seq = self._first_seq or last_seq + 1
        counters.last_seq, counters.last_time_ns = last_seq, self._last_time_ns
        for seqs in self._to_delete:
            state.deleted.add_many(seqs, writes)
        state.deleted.trim(counters.first_seq, writes)
        state.exempt.trim(counters.first_seq, writes)
        state.subjects.recount(self._first, self._last, self._counts, writes)
        state.write_counters(writes)
        return self._lost, self._ranges


def _add_ranges(found: list[tuple[int, int]], seqs: I64Array) -> None:
    starts = np.flatnonzero(np.diff(seqs, prepend=seqs[0] - 2) != 1)
    ends = np.append(starts[1:], len(seqs)) - 1
    for first, last in zip(seqs[starts].tolist(), seqs[ends].tolist(), strict=True):
        if found and found[-1][1] == first - 1:
            found[-1] = found[-1][0], last
        elif len(found) == RANGES_MAX:
            return
        else:
            found.append((first, last))
