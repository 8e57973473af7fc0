"""Subject filters over a subject table: which subject numbers match, updated for new subjects.

Names are matched with RE2, many at a time: a name takes about 0.1 µs, and 0.06 µs for its copy.
Expressions see UTF-8 as bytes, which is right here: only "." has a meaning, and no part of another
character has its value.
"""

import functools
import itertools
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from contrail_common.subjects import is_wildcard, matches_any
from contrail_common.texts import I64Array, U32Array
from contrail_storage.core.subjects.subject_names import SubjectNames
from contrail_storage.core.subjects.subject_table import SubjectTable

DIRECT: Final = 4_096
"""New names that a filter matches when it is used; more must be matched before, in a thread.

Fewer if its patterns are long: an expression of 1 MiB is made in 50 to 1,500 ms.
"""
PIECE: Final = 16_384
"""Names that are matched in one step of a thread: about 3 ms, and 64 MiB with the longest names."""
WINDOW: Final = 65_536
"""Slots that are looked at together for subjects that match."""
_COMPARED: Final = 16
"""Names that are compared one by one, which costs less than making an expression."""
_SHORT_CHARS: Final = 4_096
_COMPARED_CHARS: Final = 300_000
"""Names times characters of patterns that are compared in about 5 ms."""
_EXPRESSION_CHARS: Final = 16_384
"""Patterns with more characters become several expressions, so that RE2 has memory for each."""


_NO_NAMES: Final = SubjectNames(0)
_NO_ANSWERS: Final = np.zeros(0, np.bool_)


class SubjectLookup(Protocol):
    """The subject numbers that match, as of one moment. Any thread may use it."""

    def select(self, sids: I64Array | U32Array) -> NDArray[np.bool_]:
        """A mask of the numbers that match; numbers of subjects without messages may or may not."""


class _Every(NamedTuple):
    """A lookup that every number passes."""

    def select(self, sids: I64Array | U32Array) -> NDArray[np.bool_]:
        return np.ones(len(sids), np.bool_)


class _ByNumber(NamedTuple):
    """A lookup of a few numbers, which ascend."""

    matches: I64Array

    def select(self, sids: I64Array | U32Array) -> NDArray[np.bool_]:
        if len(self.matches) != 1:
            return np.isin(sids, self.matches)
        found: NDArray[np.bool_] = sids == self.matches[0]
        return found


class _BySlot(NamedTuple):
    """A lookup by slot of ``numbered``. Numbers without a slot do not match."""

    numbered: SubjectNames
    matches: NDArray[np.bool_]

    def select(self, sids: I64Array | U32Array) -> NDArray[np.bool_]:
        if not len(self.matches):
            return np.zeros(len(sids), np.bool_)
        # Slots below zero become large numbers, after the last slot.
        at = self.numbered.slots(sids).view(np.uint64)
        found: NDArray[np.bool_] = self.matches.take(at, mode="clip")
        found &= at < len(self.matches)
        return found


def lookup_of_slots(numbered: SubjectNames, matches: NDArray[np.bool_]) -> SubjectLookup:
    """A lookup of the numbers with the slots of ``numbered`` that ``matches`` has."""
    return _BySlot(numbered, matches)


class Rest(NamedTuple):
    """Subjects that a filter must look at: ``work`` is for any thread, and its result for `accept`.

    These are the slots of ``before`` from ``seen`` on, or all that have moved to ``numbered``.
    """

    before: SubjectNames
    seen: int
    numbered: SubjectNames
    work: Callable[[], NDArray[np.bool_]]


class SubjectFilter:
    """The subjects of a table that match any of ``patterns``; no patterns match everything.

    Each subject is matched once, when it is first seen; a scan then only looks its number up. Names
    without wildcards are looked up in the table instead, and need no memory here. A filter with
    wildcards takes a byte for each subject.

    Before a use, work through :meth:`rest`. A use matches whatever is left, however long it takes.
    """

    __slots__ = (
        "__weakref__", "_mask", "_match", "_numbered", "_rounds", "_seen", "literal", "patterns"
    )  # fmt: skip

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self.patterns = () if ">" in patterns else patterns
        self.literal = bool(self.patterns) and not any(map(is_wildcard, self.patterns))
        """Whether the filter only has names without wildcards."""
        self._match = _Matcher(self.patterns)
        # The names whose answers `_mask` has, by slot, up to and not including `_seen`.
        self._numbered = _NO_NAMES
        self._seen = 0
        self._rounds = 0
        # Answers never change, and new ones come after them: lookups share the array.
        self._mask = _NO_ANSWERS

    @property
    def matches_all(self) -> bool:
        """Whether every message passes."""
        return not self.patterns

    @property
    def is_wild(self) -> bool:
        """Whether names must be matched, and the answers kept."""
        return bool(self.patterns) and not self.literal

    # Matching ------------------------------------------------------------------------------------

    def rest(self, table: SubjectTable) -> Rest | None:
        """What to do in a thread before the filter is used; None if at most `DIRECT` names are new.

        Ask again after :meth:`accept`.
        """
        if not self.is_wild:
            return None
        numbered = table.numbered
        if self._numbered is not numbered and not self._moves_at_once(table):
            return Rest(self._numbered, self._seen, numbered, self._mover(numbered))
        low = self._seen
        high = min(table.size, low + PIECE)
        if high - low <= self._match.direct:
            return None
        self._reserve(table.size)
        return Rest(numbered, low, numbered, partial(self._match, numbered, low, high))

    def accept(self, rest: Rest, answers: NDArray[np.bool_]) -> None:
        """Take what ``rest.work`` returned, unless the filter was used meanwhile."""
        if self._numbered is rest.before and self._seen == rest.seen:
            if rest.numbered is not rest.before:
                self._begin(rest.numbered)
            self._put(answers)

    def _moves_at_once(self, table: SubjectTable) -> bool:
        """Follow the table to its new slots if that is quick: few are known, or none is of use."""
        if self._rounds != table.rounds or not self._seen:
            # Numbers of another run may be those of other subjects.
            self._rounds = table.rounds
            self._begin(table.numbered)
        elif self._seen > DIRECT:
            return False
        else:
            answers = self._mover(table.numbered)()
            self._begin(table.numbered)
            self._put(answers)
        return True

    def _begin(self, numbered: SubjectNames) -> None:
        # Lookups still use the answers by the former slots.
        self._numbered, self._seen, self._mask = numbered, 0, _NO_ANSWERS

    def _mover(self, numbered: SubjectNames) -> Callable[[], NDArray[np.bool_]]:
        """Return the work of moving the known answers to the slots that numbers have now."""
        before = _BySlot(self._numbered, self._mask[: self._seen])
        known = numbered.slot_from(self._numbered.number(self._seen))
        return lambda: before.select(numbered.numbers(np.arange(known)))

    def _reserve(self, size: int) -> None:
        if size > len(self._mask):
            grown = np.zeros(size + size // 4, np.bool_)
            grown[: self._seen] = self._mask[: self._seen]
            self._mask = grown

    def _put(self, answers: NDArray[np.bool_]) -> None:
        end = self._seen + len(answers)
        self._reserve(end)
        self._mask[self._seen : end] = answers
        self._seen = end

    def _catch_up(self, table: SubjectTable) -> None:
        while (rest := self.rest(table)) is not None:
            self.accept(rest, rest.work())
        if self._seen < table.size:
            self._put(self._match(table.numbered, self._seen, table.size))

    # Use -----------------------------------------------------------------------------------------

    def lookup(self, table: SubjectTable) -> SubjectLookup:
        """A lookup for messages that are live now. Other threads may use it."""
        if not self.patterns:
            return _Every()
        if self.literal:
            return _ByNumber(self._literal_numbers(table))
        self._catch_up(table)
        return _BySlot(self._numbered, self._mask[: self._seen])

    def select(self, table: SubjectTable, sids: U32Array) -> NDArray[np.bool_]:
        """Which of the numbers match; numbers that the table no longer knows do not."""
        return self.lookup(table).select(sids)

    def _literal_numbers(self, table: SubjectTable) -> I64Array:
        found = (table.ids.get(name, -1) for name in self.patterns)
        return np.array(sorted(sid for sid in found if sid >= 0), np.int64)

    def matches(self, table: SubjectTable) -> NDArray[np.bool_] | None:
        """Which slots match, for a filter with wildcards; None if all of them do."""
        if not self.patterns:
            return None
        self._catch_up(table)
        return self._mask[: self._seen]

    @property
    def prefix(self) -> str:
        """What all names that match begin with: whole tokens."""
        return _prefix(self.patterns[0]) if len(self.patterns) == 1 else ""

    def count_at_most(self, table: SubjectTable) -> int:
        """A number that the live subjects which match do not exceed."""
        if self.literal:
            return len(self.patterns)
        matches = self.matches(table)
        return len(table) if matches is None else int(np.count_nonzero(matches))

    def live_slots(self, table: SubjectTable, from_sid: int = 0) -> Iterator[I64Array]:
        """Yield the slots of the live subjects that match, by number from ``from_sid`` on.

        Each array is of a bounded part of the table. The table must not change meanwhile.
        """
        if self.literal:
            sids = self._literal_numbers(table)
            yield table.numbered.slots(sids[sids >= from_sid])
            return
        matches = self.matches(table)
        for begin, end in _ranges(table, from_sid):
            for low in range(begin, end, WINDOW):
                wanted = table.counts[low : min(low + WINDOW, end)] > 0
                if matches is not None:
                    wanted &= matches[low : low + len(wanted)]
                yield np.flatnonzero(wanted) + low

    def slots(self, table: SubjectTable, from_sid: int = 0) -> I64Array:
        """Slots of the live subjects that match, by number from ``from_sid`` on."""
        return np.concatenate([np.zeros(0, np.int64), *self.live_slots(table, from_sid)])

    def numbers(self, table: SubjectTable, from_sid: int = 0) -> I64Array:
        """Numbers of the live subjects that match, ascending from ``from_sid`` on."""
        return table.numbered.numbers(self.slots(table, from_sid))


def _ranges(table: SubjectTable, from_sid: int) -> list[tuple[int, int]]:
    """Ranges of slots that have the numbers from ``from_sid`` on, ascending."""
    numbered = table.numbered
    begin = numbered.slot_from(from_sid)
    if not numbered.origin:
        return [(begin, table.size)]
    # Numbers below the origin come last by slot.
    lowest = numbered.slot_from(0)
    if from_sid >= numbered.origin:
        return [(begin, lowest)]
    return [(begin, table.size), (0, lowest)]


class _Matcher:
    """Matches names with patterns. Any thread may use it."""

    __slots__ = ("_decides", "_patterns", "_prefix", "direct")

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self._patterns = patterns
        # The beginning of the names that match, and whether nothing else decides.
        self._prefix = _prefix(patterns[0]) if len(patterns) == 1 else ""
        self._decides = f"{self._prefix}>" in patterns
        chars = sum(map(len, patterns))
        self.direct = DIRECT
        """Names that are matched in a few milliseconds."""
        if chars > _SHORT_CHARS:
            self.direct = min(_COMPARED, _COMPARED_CHARS // chars)

    def __call__(self, numbered: SubjectNames, low: int, high: int) -> NDArray[np.bool_]:
        """Which of the names in the slots from ``low`` up to, not including, ``high`` match."""
        if high - low <= _COMPARED:
            names = numbered.texts[low:high]
            found = [bool(name and matches_any(self._patterns, name)) for name in names]
            return np.array(found, np.bool_)
        array = packed_names(numbered, low, high)
        if self._prefix:
            # A sixth of the time of an expression, and often no name has the prefix.
            begin = _as_mask(pc.starts_with(array, self._prefix))
            if self._decides or not begin.any():
                return begin
        matching = [pc.match_substring_regex(array, one) for one in self._expressions()]
        return _as_mask(functools.reduce(pc.or_, matching))

    def _expressions(self) -> Iterator[str]:
        some: list[str] = []
        for pattern in self._patterns:
            some.append(_expression(pattern))
            if sum(map(len, some)) >= _EXPRESSION_CHARS:
                yield f"^(?:{'|'.join(some)})$"
                some = []
        if some:
            yield f"^(?:{'|'.join(some)})$"


def _as_mask(answers: pa.Array) -> NDArray[np.bool_]:
    # Not `to_numpy`: it imports pandas first, which takes a second if pandas is installed.
    bits = np.frombuffer(answers.buffers()[1], np.uint8)
    end = answers.offset + len(answers)
    unpacked = np.unpackbits(bits, count=end, bitorder="little")
    return unpacked[answers.offset :].view(np.bool_)


def packed_names(numbered: SubjectNames, low: int, high: int) -> pa.Array:
    """The names in the slots from ``low`` up to ``high`` as bytes; a missing name is empty."""
    return numbered.array(low, high).cast(pa.binary())


def _prefix(pattern: str) -> str:
    literal = itertools.takewhile(lambda token: token not in ("*", ">"), pattern.split("."))
    return "".join(f"{token}." for token in literal)


def _expression(pattern: str) -> str:
    """The expression for a pattern, in the syntax of RE2."""
    wild = {"*": "[^.]+", ">": ".+"}
    return r"\.".join(wild.get(token) or re.escape(token) for token in pattern.split("."))
