"""Finds the newest messages of subjects that lost theirs, by reading blocks backwards.

The table's ``last`` of such a subject is the progress of the search: no live message of the subject
is above it. A search that reached its limit continues from there in the next command.
"""

from typing import Final

import numpy as np

from contrail_common.texts import I64Array
from contrail_storage.core.results import Step
from contrail_storage.core.stream.shard_state import ShardState

APPLY_SEQS: Final = 20_000
"""Sequences that a command searches if it also removed messages."""
ALONE_SEQS: Final = 100_000
"""Sequences that a command searches if it does nothing else."""
SUBJECTS_MAX: Final = 4_096
"""Subjects of one search."""


def search_last(state: ShardState, step: Step, sids: list[int], seqs_max: int) -> None:
    """Settle the newest message of unsettled subjects, within ``seqs_max`` sequences."""
    if not sids:
        return
    table, counters = state.subjects, state.counters
    # Sorted: the order of a set depends on its history, and all replicas must search the same
    # subjects.
    wanted = np.array(sorted(sids)[:SUBJECTS_MAX], np.int64)
    newest: dict[int, int] = {}
    seq = int(table.last[table.numbered.slots(wanted)].max())
    stop_seq = max(seq - seqs_max, counters.first_seq - 1)
    left = wanted
    while len(left):
        highest_seq = int(table.last[table.numbered.slots(left)].max())
        seq = state.deleted.previous_live(min(seq, highest_seq))
        if seq <= stop_seq:
            break
        low_seq, found = _newest_in_run(state, left, stop_seq + 1, seq)
        newest |= found
        left = left[~np.isin(left, list(found))]
        seq = low_seq - 1
    if seq < counters.first_seq:
        # A subject in the table has a message, so this does not happen. If it did, settling the
        # subject anyhow ends a search that would otherwise be asked for forever.
        newest |= dict.fromkeys(left.tolist(), counters.first_seq)
        left = left[:0]
    settled = np.array(sorted(newest), np.int64)
    exact = np.array([newest[sid] for sid in settled.tolist()], np.int64)
    bounds = np.minimum(table.last[table.numbered.slots(left)], seq)
    table.settle(
        np.concatenate((settled, left)),
        np.concatenate((exact, bounds)),
        len(settled),
        step,
    )


def _newest_in_run(
    state: ShardState, sids: I64Array, low_seq: int, seq: int
) -> tuple[int, dict[int, int]]:
    """Search the run that holds the live message ``seq``, from ``low_seq`` up to ``seq``.

    Returns the first sequence that was searched, and the last message of each subject found.
    """
    facts = state.subjects_at(seq)
    low_seq = max(facts.base_seq, low_seq)
    found = facts.subject_ids[low_seq - facts.base_seq : seq + 1 - facts.base_seq]
    wanted = np.isin(found, sids)
    live = state.deleted.live_mask(low_seq, len(found))
    if live is not None:
        wanted &= live
    backwards = np.flatnonzero(wanted)[::-1]
    numbers, at = np.unique(found[backwards], return_index=True)
    seqs = backwards[at] + low_seq
    return low_seq, dict(zip(numbers.tolist(), seqs.tolist(), strict=True))
