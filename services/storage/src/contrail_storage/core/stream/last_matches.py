"""The last sequence of a wildcard, from a proof of the leader and the messages after the proof.

To find the last message on a subject that matches a wildcard, all names of subjects are searched.
The leader does so before it proposes an append, in a thread. ``apply`` looks only at the messages
that were stored since. Blocks differ between replicas, so all bounds count sequences and subjects.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np

from contrail_common.subject_tree import SubjectTree
from contrail_storage.core.expected import HashedExpected, wildcard_of
from contrail_storage.core.stream.shard_state import ShardState

SEQS_MAX: Final = 50_000
"""Sequences that one command searches."""
SUBJECTS_MAX: Final = 2_048
"""Names of subjects that one command compares with the patterns."""


class LastMatches:
    """The last sequences of the patterns of one command.

    Invariant: ``newest`` has each pattern that matches a live message after ``searched_to``, with
    the sequence of the last one.
    """

    def __init__(self, state: ShardState, patterns: Mapping[str, int]) -> None:
        """``patterns`` with the lowest ``as_of`` of each."""
        self._state = state
        self._tree: SubjectTree[str] = SubjectTree()
        for pattern in patterns:
            self._tree.add(pattern, pattern)
        self._newest: dict[str, int] = {}
        self._searched_to = self._search(min(patterns.values()))

    @classmethod
    def of(cls, state: ShardState, expected: Mapping[int, HashedExpected]) -> "LastMatches":
        """All wildcards of a command that have a proof; at least one."""
        patterns: dict[str, int] = {}
        for one in expected.values():
            pattern = wildcard_of(one)
            if one.as_of is not None and pattern is not None:
                patterns[pattern] = min(one.as_of, patterns.get(pattern, one.as_of))
        return cls(state, patterns)

    def add(self, subject: str, seq: int) -> None:
        """Note a message that the command stores."""
        for pattern in self._tree.matching(subject):
            self._newest[pattern] = max(seq, self._newest.get(pattern, 0))

    def last(self, pattern: str, as_of: int, newest: int) -> int | None:
        """The last live sequence of ``pattern``, 0 for none; None if the proof cannot tell."""
        found = self._newest.get(pattern)
        if found is not None:
            return found
        # The search was cut, or the message was removed since and nobody knows the one before it.
        if self._searched_to > as_of or (newest and not self._state.is_live(newest)):
            return None
        return newest

    def _search(self, as_of: int) -> int:
        """Search backwards to ``as_of``, within the bounds; return how far everything is known."""
        state, last_seq = self._state, self._state.counters.last_seq
        stop_seq = max(as_of, last_seq - SEQS_MAX, state.counters.first_seq - 1)
        seen: set[int] = set()
        seq = last_seq
        while (seq := state.deleted.previous_live(seq)) > stop_seq:
            facts = state.facts_at(seq)
            low_seq = max(facts.base_seq, stop_seq + 1)
            sids = facts.subject_ids[low_seq - facts.base_seq : seq + 1 - facts.base_seq]
            seqs = np.arange(low_seq, seq + 1)
            live = state.deleted.live_mask(low_seq, len(sids))
            if live is not None:
                sids, seqs = sids[live], seqs[live]
            # The first of each number from behind is the last message of its subject.
            numbers, behind = np.unique(sids[::-1], return_index=True)
            order = np.argsort(behind)
            for sid, at in zip(numbers[order].tolist(), behind[order].tolist(), strict=True):
                if sid in seen:
                    continue
                if len(seen) == SUBJECTS_MAX:
                    return int(seqs[-1 - at])
                seen.add(sid)
                for pattern in self._tree.matching(state.subjects.name(sid)):
                    self._newest.setdefault(pattern, int(seqs[-1 - at]))
            seq = low_seq - 1
        return stop_seq if stop_seq >= state.counters.first_seq else 0
