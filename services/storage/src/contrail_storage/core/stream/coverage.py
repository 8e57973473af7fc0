"""Which subjects match sets of patterns, with a cache of the answers.

These are caches: they follow from the state of a shard, and dropping one changes nothing but time.
"""

from collections.abc import Iterable
from typing import Final

from contrail_common.subjects import is_wildcard, matches, matches_any
from contrail_storage.core.consumer_machine import ConsumerMachine
from contrail_storage.core.subjects.subject_table import SubjectTable

SUBJECTS_MAX: Final = 65_536
"""Subjects whose answers a :class:`Coverage` keeps; a full cache is cleared."""
_NUMBERS_MAX: Final = 4_096
"""Subjects whose answers :class:`FilterMatches` keeps for each consumer."""


class Coverage:
    """The subjects that some of ``patterns`` match; with ``everything``, all of them."""

    def __init__(self, patterns: Iterable[str], *, everything: bool = False) -> None:
        patterns = set(patterns)
        self.everything = everything or ">" in patterns
        self._wildcards = sorted(filter(is_wildcard, patterns))
        self._literals = patterns.difference(self._wildcards)
        self._known: dict[str, bool] = {}

    def outside(self, subjects: list[str]) -> list[int]:
        """Positions of the subjects that no pattern matches, ascending."""
        if self.everything:
            return []
        known, found = self._known, []
        for position, subject in enumerate(subjects):
            covered = known.get(subject)
            if covered is None:
                covered = self._learn(subject)
            if not covered:
                found.append(position)
        return found

    def _learn(self, subject: str) -> bool:
        covered = subject in self._literals or any(
            matches(pattern, subject) for pattern in self._wildcards
        )
        if len(self._known) >= SUBJECTS_MAX:
            self._known.clear()
        self._known[subject] = covered
        return covered


class FilterMatches:
    """Whether the filters of consumers match subjects, by consumer and subject number."""

    def __init__(self) -> None:
        self._answers: dict[int, dict[int, bool]] = {}
        # `SubjectTable.rounds` of the numbers in `_answers`: later ones mean other subjects.
        self._rounds = 0

    def forget(self, consumer_id: int) -> None:
        """Drop the answers for a consumer that is new or gone, or whose filter changed."""
        self._answers.pop(consumer_id, None)

    def matches(self, consumer: ConsumerMachine, sid: int, table: SubjectTable) -> bool:
        """Whether the consumer's filter matches the subject numbered ``sid``, which is live."""
        filters = consumer.config.filter_subjects
        if not filters:
            return True
        if self._rounds != table.rounds:
            self._answers.clear()
            self._rounds = table.rounds
        answers = self._answers.setdefault(consumer.consumer_id, {})
        answer = answers.get(sid)
        if answer is None:
            if len(answers) >= _NUMBERS_MAX:
                answers.clear()
            answer = answers[sid] = matches_any(filters, table.name(sid))
        return answer
