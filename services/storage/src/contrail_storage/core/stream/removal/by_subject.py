"""Removes the oldest messages of subjects, wherever they are in the stream."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from contrail_common.texts import I64Array, U32Array
from contrail_storage.core.facts import SubjectSet, oldest_in
from contrail_storage.core.results import Step
from contrail_storage.core.stream.removal import deletion
from contrail_storage.core.stream.shard_state import ShardState

SEARCH_SEQS: Final = 200_000
"""Sequences that one command searches for messages of some subjects."""
REMOVED_MAX: Final = 20_000
"""Messages that an append removes by subject; later entries remove the rest."""


@dataclass(slots=True)
class _Oldest:
    """Messages to remove, ascending.

    ``first`` has a lower bound of the first remaining sequence of each requested subject.
    """

    seqs: I64Array
    sids: U32Array
    sizes: I64Array
    first: I64Array


def remove_oldest(state: ShardState, step: Step, sids: U32Array, quota: I64Array) -> int:
    """Remove the ``quota`` oldest messages of each of ``sids`` (ascending); return how many.

    It removes fewer if there are more than REMOVED_MAX, or if they are too far apart.
    """
    oldest = _find_oldest(state, sids, quota)
    _remove_found(state, step, oldest, sids)
    return len(oldest.seqs)


def sizes_of_oldest(state: ShardState, quota: dict[int, int]) -> dict[int, list[int]]:
    """Sizes of the ``quota`` oldest messages of some subjects, by subject number.

    Fewer if they are too far apart for one command, as in :func:`remove_oldest`.
    """
    sids = np.array(sorted(quota), np.uint32)
    counts = np.array([quota[sid] for sid in sids.tolist()], np.int64)
    oldest = _find_oldest(state, sids, counts)
    found: dict[int, list[int]] = {sid: [] for sid in quota}
    for sid, size in zip(oldest.sids.tolist(), oldest.sizes.tolist(), strict=True):
        found[sid].append(size)
    return found


def _find_oldest(state: ShardState, sids: U32Array, quota: I64Array) -> _Oldest:
    """The ``quota`` oldest messages of each of ``sids`` (ascending)."""
    table = state.subjects
    # Lower bounds of the first sequences. They are raised to where this search ends, so that no
    # search reads the same blocks again.
    first = table.first[table.numbered.slots(sids)].copy()
    seq = max(int(first.min()), state.counters.first_seq)
    stop_seq = min(state.counters.last_seq + 1, seq + SEARCH_SEQS)
    left, wanted = quota.copy(), SubjectSet(sids)
    parts: list[tuple[I64Array, U32Array, I64Array]] = []
    messages_left = REMOVED_MAX
    while messages_left > 0 and left.any():
        # Only live messages are sure to be in a block, so facts are requested only for them.
        seq = min(state.deleted.next_live(seq, stop_seq), stop_seq)
        if seq == stop_seq:
            break
        facts = state.subjects_at(seq)
        base_seq = facts.base_seq
        low, high = seq - base_seq, min(facts.end_seq, stop_seq) - base_seq
        live = state.deleted.live_mask(seq, high - low)
        found = facts.subject_ids[low:high]
        own = wanted.positions(found)
        live = None if live is None else live[own]
        at = own[oldest_in(found[own], live, sids, left, messages_left)] + low
        if len(at):
            parts.append((at + base_seq, facts.subject_ids[at], facts.sizes[at]))
            messages_left -= len(at)
        seq = base_seq + high if messages_left > 0 else base_seq + int(at[-1]) + 1
    # A subject whose quota is met may have more messages before the end of the search.
    unsatisfied = left > 0
    first[unsatisfied] = np.maximum(first[unsatisfied], seq)
    if not parts:
        nothing = np.zeros(0, np.int64)
        return _Oldest(nothing, np.zeros(0, np.uint32), nothing, first)
    seqs, gone, sizes = (np.concatenate(each) for each in zip(*parts, strict=True))
    np.maximum.at(first, np.searchsorted(sids, gone), seqs + 1)
    return _Oldest(seqs, gone, sizes, first)


def _remove_found(state: ShardState, step: Step, oldest: _Oldest, sids: U32Array) -> None:
    """Remove ``oldest``, the oldest messages of ``sids``; the subjects' bounds move either way."""
    state.subjects.remove_oldest(sids, oldest.first, oldest.sids, step, state.are_live)
    if not len(oldest.seqs):
        return
    state.counters.messages -= len(oldest.seqs)
    state.counters.bytes -= int(oldest.sizes.sum())
    state.deleted.add_many(oldest.seqs, step.writes)
    deletion.finish_removal(state, step, oldest.seqs, oldest.sids)
    deletion.forget_replaced(state)
