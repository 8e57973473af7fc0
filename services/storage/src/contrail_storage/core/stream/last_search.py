"""Finding the newest messages of subjects that lost theirs, by reading the blocks backwards.

The table's ``last`` of such a subject is the progress of the search: no live message of the subject
is above it. A search that reached its limit continues from there in the next command.
"""

from typing import TYPE_CHECKING, Final

import numpy as np

from contrail_common.texts import I64Array
from contrail_storage.core.results import Writes

if TYPE_CHECKING:
    from contrail_storage.core.stream.stream_machine import StreamMachine

APPLY_SEQS: Final = 20_000
"""Sequences that a command searches if it also removed messages."""
ALONE_SEQS: Final = 100_000
"""Sequences that a command searches if it does nothing else."""
SUBJECTS_MAX: Final = 4_096
"""Subjects of one search."""


def search_last(
    machine: "StreamMachine", sids: list[int], seqs_max: int, index: int, writes: Writes
) -> None:
    """Settle the newest message of unsettled subjects, as far as ``seqs_max`` sequences go."""
    if not sids:
        return
    table, counters = machine.subjects, machine.counters
    wanted = np.array(sorted(sids)[:SUBJECTS_MAX], np.int64)
    newest: dict[int, int] = {}
    seq = int(table.last[table.numbered.slots(wanted)].max())
    stop_seq = max(seq - seqs_max, counters.first_seq - 1)
    left = wanted
    while len(left):
        highest_seq = int(table.last[table.numbered.slots(left)].max())
        seq = machine.deleted.previous_live(min(seq, highest_seq))
        if seq <= stop_seq:
            break
        low_seq, found = _newest_in_run(machine, left, stop_seq + 1, seq)
        newest |= found
        left = left[~np.isin(left, list(found))]
        seq = low_seq - 1
    if seq < counters.first_seq:
        # They have messages, so this is not met; but nothing may ask for more of it forever.
        newest |= dict.fromkeys(left.tolist(), counters.first_seq)
        left = left[:0]
    settled = np.array(sorted(newest), np.int64)
    exact = np.array([newest[sid] for sid in settled.tolist()], np.int64)
    bounds = np.minimum(table.last[table.numbered.slots(left)], seq)
    table.settle(
        np.concatenate((settled, left)),
        np.concatenate((exact, bounds)),
        len(settled),
        index,
        writes,
    )


def _newest_in_run(
    machine: "StreamMachine", sids: I64Array, low_seq: int, seq: int
) -> tuple[int, dict[int, int]]:
    """What the run holding ``seq``, which is live, has from ``low_seq`` up to there.

    Where it was looked from, and the last message by subject. Runs are cut anyhow, so that a search
    may not end with one.
    """
    facts = machine.facts_at(seq)
    low_seq = max(facts.base_seq, low_seq)
    found = facts.subject_ids[low_seq - facts.base_seq : seq + 1 - facts.base_seq]
    wanted = np.isin(found, sids)
    live = machine.deleted.live_mask(low_seq, len(found))
    if live is not None:
        wanted &= live
    backwards = np.flatnonzero(wanted)[::-1]
    numbers, at = np.unique(found[backwards], return_index=True)
    seqs = backwards[at] + low_seq
    return low_seq, dict(zip(numbers.tolist(), seqs.tolist(), strict=True))
