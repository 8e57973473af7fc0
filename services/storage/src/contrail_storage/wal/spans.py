"""Where the entries of a group are in the segments: spans, and the terms at their bounds.

A span is a run of entries of one term in one segment, in the order of their indexes and without a
cut between them. So its entries are the first ones of the group after its start, whatever other
copies the segment has: an entry that was replaced is in no span. A span covers about 1 MiB, which
bounds what is read to find one entry.

The spans of a group are in the order of their indexes, which is also that of their places.
"""

from bisect import bisect_right
from copy import copy
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final, NamedTuple

import msgspec

from contrail_storage.wal.codec import RecordKind

SPAN_BYTES: Final = 1 << 20
_first: Final = attrgetter("first")
_last: Final = attrgetter("last")


class Place(NamedTuple):
    """A record: the number of its segment, the offset of its batch there, and its number in it."""

    segment: int
    offset: int
    record: int


class Span(msgspec.Struct, gc=False):
    """Entries from ``first`` to ``last``, all of ``term``. ``start`` is the place of the first."""

    first: int
    last: int
    term: int
    start: Place


class Change(msgspec.Struct, gc=False):
    """A change of a group's log by one record, or by entries that follow each other.

    For ENTRY: the entries from ``index`` to ``last``; ``record`` is the number of the first one in
    its batch. Otherwise ``index`` and ``term`` are those of the record.
    """

    kind: RecordKind
    index: int
    term: int
    last: int
    record: int


@dataclass(slots=True)
class GroupSpans:
    """The entries of a group that are in the segments.

    ``base_index`` and ``base_term`` are those of the entry before the first span.
    """

    base_index: int = 0
    base_term: int = 0
    spans: list[Span] = field(default_factory=list)
    # Whether the last span had entries that were cut: more entries begin another one.
    _cut: bool = False

    @property
    def last_index(self) -> int:
        """Index of the last entry, or of the base when there is none."""
        return self.spans[-1].last if self.spans else self.base_index

    def change(self, change: Change, segment: int, offset: int) -> None:
        """Note a change by a batch at ``offset`` of ``segment``. Entries follow the last one."""
        if change.kind is RecordKind.ENTRY:
            if self.spans and not self._cut:
                span, start = self.spans[-1], self.spans[-1].start
                near = start.segment == segment and offset - start.offset < SPAN_BYTES
                if near and span.term == change.term:
                    span.last = change.last
                    return
            start = Place(segment, offset, change.record)
            self.spans.append(Span(change.index, change.last, change.term, start))
            self._cut = False
        elif change.kind is RecordKind.TRUNCATE:
            self.cut(change.index, change.term)
        elif change.kind is RecordKind.BASE:
            self.rebase(change.index, change.term)

    def cut(self, from_index: int, last_term: int) -> None:
        """Remove the entries from ``from_index`` on; the one before has ``last_term``."""
        if from_index <= self.base_index:
            self.base_index, self.base_term = from_index - 1, last_term
        while self.spans and self.spans[-1].first >= from_index:
            self.spans.pop()
            self._cut = True
        if self.spans and self.spans[-1].last >= from_index:
            self.spans[-1].last = from_index - 1
            self._cut = True

    def rebase(self, index: int, term: int) -> None:
        """End at (``index``, ``term``): after that entry, or empty if it is not here."""
        if self.term_at(index) == term:
            self.cut(index + 1, term)
        else:
            self.spans.clear()
            self.base_index, self.base_term = index, term

    def term_at(self, index: int) -> int | None:
        """Term of an entry that is here, or of the base; None for any other index."""
        if index == self.base_index:
            return self.base_term
        position = bisect_right(self.spans, index, key=_first) - 1
        if position < 0 or index > self.spans[position].last:
            return None
        return self.spans[position].term

    def from_index(self, index: int, count: int) -> list[Span]:
        """Copies of up to ``count`` spans, from the one with ``index`` on."""
        position = bisect_right(self.spans, index - 1, key=_last)
        return [copy(span) for span in self.spans[position : position + count]]

    def segments_above(self, index: int) -> set[int]:
        """Numbers of the segments that have entries above ``index``."""
        return {span.start.segment for span in self.from_index(index + 1, len(self.spans))}

    def forget(self, segment: int) -> None:
        """Remove the entries up to the last one in ``segment``, which becomes the base."""
        while self.spans and self.spans[0].start.segment <= segment:
            span = self.spans.pop(0)
            self.base_index, self.base_term = span.last, span.term
