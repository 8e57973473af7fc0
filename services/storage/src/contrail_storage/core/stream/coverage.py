"""Which subjects match sets of patterns, with caches of the answers.

These are caches: they follow from the state of a shard, and dropping one changes nothing but time.
"""

from collections.abc import Iterable
from typing import Final

from contrail_common.subject_tree import SubjectTree
from contrail_common.subjects import is_wildcard
from contrail_storage.core.consumer_machine import ConsumerMachine
from contrail_storage.core.subjects.subject_table import SubjectTable

SUBJECTS_MAX: Final = 65_536
"""Subjects whose answers a :class:`Coverage` keeps; a full cache is cleared."""
_NUMBERS_MAX: Final = 4_096
"""Subjects whose answers :class:`FilterMatches` keeps for each consumer."""

_PREFIXES_MAX: Final = 8
"""So many prefixes are compared one by one."""


class Coverage(dict[str, bool]):
    """Whether some of ``patterns`` match a subject; with ``everything``, all subjects match.

    ``coverage[subject]`` finds the answer if it is not known yet.
    """

    def __init__(self, patterns: Iterable[str], *, everything: bool = False) -> None:
        super().__init__()
        patterns = set(patterns)
        self._everything = everything or ">" in patterns
        self._tree = _tree(patterns)
        # The usual pattern is decided in a fifth of the time that the tree takes.
        below = [one[:-1] for one in patterns if one.endswith(".>") and not is_wildcard(one[:-2])]
        self._prefixes = tuple(sorted(below)) if len(below) <= _PREFIXES_MAX else ()

    def __missing__(self, subject: str) -> bool:
        if self._everything:
            return True
        covered = subject.startswith(self._prefixes) or bool(self._tree.matching(subject))
        # Most subjects occur again. A full cache starts over: keeping the order of use would cost
        # more than it saves.
        if len(self) >= SUBJECTS_MAX:
            self.clear()
        self[subject] = covered
        return covered


class FilterMatches:
    """Whether the filters of consumers match subjects, by consumer and subject number."""

    def __init__(self) -> None:
        self._answers: dict[int, tuple[SubjectTree[str], dict[int, bool]]] = {}
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
        known = self._answers.get(consumer.consumer_id)
        if known is None:
            known = self._answers[consumer.consumer_id] = _tree(filters), {}
        tree, answers = known
        answer = answers.get(sid)
        if answer is None:
            if len(answers) >= _NUMBERS_MAX:
                answers.clear()
            answer = answers[sid] = bool(tree.matching(table.name(sid)))
        return answer


def _tree(patterns: Iterable[str]) -> SubjectTree[str]:
    tree: SubjectTree[str] = SubjectTree()
    for pattern in patterns:
        tree.add(pattern, pattern)
    return tree
