"""Subject filters over a subject table: which subject numbers match, kept up as subjects come."""

import numpy as np
from numpy.typing import NDArray

from contrail_common.subjects import is_wildcard, matches_any
from contrail_common.texts import U32Array
from contrail_storage.core.subject_table import SubjectTable


class SubjectFilter:
    """The subjects of ``table`` that match any of ``patterns``; no patterns match everything.

    Each subject is matched once, when it is first seen; a scan then only looks its number up.
    """

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self.patterns = tuple(pattern for pattern in patterns if pattern != ">")
        if len(self.patterns) < len(patterns):
            self.patterns = ()
        self._base = 0
        self._seen = 0
        self._mask = np.zeros(64, np.bool_)

    @property
    def matches_all(self) -> bool:
        """Whether every message passes."""
        return not self.patterns

    def _catch_up(self, table: SubjectTable) -> None:
        if self._base != table.base:
            # The table let go of dead numbers (or was cleared): realign by starting over.
            self._base, self._seen = table.base, 0
            self._mask = np.zeros(64, np.bool_)
        total = len(table.names)
        if total > len(self._mask):
            grown = np.zeros(max(total, 2 * len(self._mask)), np.bool_)
            grown[: self._seen] = self._mask[: self._seen]
            self._mask = grown
        for at in range(self._seen, total):
            name = table.names[at]
            self._mask[at] = name is not None and matches_any(self.patterns, name)
        self._seen = total

    def select(self, table: SubjectTable, sids: U32Array) -> NDArray[np.bool_]:
        """Which of the numbers match; numbers that the table no longer knows do not."""
        self._catch_up(table)
        at = sids.astype(np.int64) - self._base
        known = (at >= 0) & (at < self._seen)
        selected: NDArray[np.bool_] = np.zeros(len(sids), np.bool_)
        selected[known] = self._mask[at[known]]
        return selected

    def subjects(self, table: SubjectTable) -> list[tuple[int, str]]:
        """(sid, name) of the live subjects that match."""
        if len(self.patterns) == 1 and not is_wildcard(self.patterns[0]):
            sid = table.ids.get(self.patterns[0])
            return [] if sid is None else [(sid, self.patterns[0])]
        self._catch_up(table)
        return (
            [(sid, name) for sid, name in table.live() if self._mask[sid - table.base]]
            if (self.patterns)
            else list(table.live())
        )
