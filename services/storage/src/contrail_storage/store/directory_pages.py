"""The stored directory of a shard's blocks: pages, and rows of single blocks that override them.

With one row for each block, the time of a start would grow with the stream. So older blocks are
listed in pages of about a thousand blocks. A page covers the sequences from the number in its key
up to, but not including, its ``stop``. A row of a single block overrides the entry of that block in
its page; an empty row means that the block was removed. Blocks after the last page have a row each.
"""

import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from contrail_storage.core import key_layout as keys
from contrail_storage.core.results import Row

PAGE_BLOCKS: Final = 1_024
"""Blocks of a new page. The newest blocks, up to this number, are in no page."""
_STALE_PART: Final = 4
"""A page is rewritten when rows override this fraction (1/4) of its blocks."""

INDEX_ROW: Final = struct.Struct("<IIq")
"""Messages, bytes, and time of the last message (ns) of a block."""
_STOP: Final = struct.Struct("<Q")
_ROW: Final = np.dtype([("count", "<u4"), ("bytes", "<u4"), ("time", "<i8")])
_SPAN: Final = np.dtype([("base", "<u8"), *((name, _ROW[name]) for name in _ROW.names or ())])
Spans = npt.NDArray[Any]
"""Directory entries in columns, structured as ``_SPAN``."""

Rows = Iterable[tuple[bytes, bytes]]
"""Rows of the store as (key, value), ascending by key."""


class PageRange(NamedTuple):
    """Sequences of a page, from ``start`` up to but not including ``stop``."""

    start: int
    stop: int


@dataclass(slots=True)
class PageRanges:
    """The sequences that the pages of a shard cover, and the rows that override each page."""

    page_blocks: int = PAGE_BLOCKS
    stop: int = 0
    """The first sequence above all pages."""
    starts: list[int] = field(default_factory=list)
    _stale: dict[int, int] = field(default_factory=dict)

    def note(self, base_seq: int, rows: int = 1) -> None:
        """Count ``rows`` that override entries in the page of ``base_seq``, if it is in a page."""
        at = bisect_right(self.starts, base_seq) - 1
        # Blocks after the last page have rows of their own anyway.
        if at >= 0 and base_seq < self.stop:
            start = self.starts[at]
            self._stale[start] = self._stale.get(start, 0) + rows

    def extend(self, stop: int) -> PageRange:
        """A new page after the last one, up to ``stop``."""
        added = PageRange(self.stop, stop)
        self.starts.append(self.stop)
        self.stop = stop
        return added

    def take_stale(self, first_seq: int) -> list[PageRange]:
        """Pages to be rewritten, or removed when they end at or below ``first_seq``."""
        ends = dict(pairwise([*self.starts, self.stop]))
        gone = [start for start in self.starts if ends[start] <= first_seq]
        stale_max = self.page_blocks // _STALE_PART
        # Rewritten before rows override most of it: a start reads each of these rows.
        many = {start for start, rows in self._stale.items() if rows >= stale_max}
        taken = [PageRange(start, ends[start]) for start in sorted(many.union(gone))]
        del self.starts[: len(gone)]
        for start, _ in taken:
            self._stale.pop(start, None)
        return taken


class StoredDirectory:
    """The directory of a shard as it is stored: columns of spans in order of sequence."""

    def __init__(self, pages: Rows, rows: Rows, page_blocks: int = PAGE_BLOCKS) -> None:
        self.ranges = PageRanges(page_blocks)
        parts: list[Spans] = []
        for key, page in pages:
            self.ranges.starts.append(keys.last_number(key, 8))
            self.ranges.stop, spans = _decode(page)
            parts.append(spans)
        over: dict[int, bytes] = {}
        bases: list[int] = []
        values: list[bytes] = []
        for key, value in rows:
            base_seq = keys.last_number(key, 8)
            if base_seq < self.ranges.stop:
                over[base_seq] = value
                self.ranges.note(base_seq)
            # Above all pages, an empty row says nothing: no page lists its block.
            elif value:
                bases.append(base_seq)
                values.append(value)
        self.spans = _spans(bases, values)
        if parts:  # most directories are small
            listed = _overlaid(np.concatenate(parts), over)
            self.spans = np.concatenate([listed, self.spans])

    def index_rows(self) -> Iterator[tuple[int, bytes]]:
        """The first sequence of each block, and its row as if it had one."""
        for base_seq, *rest in self.spans.tolist():
            yield base_seq, INDEX_ROW.pack(*rest)


def page_rows(shard_id: int, at: PageRange, pages: Rows, rows: Rows) -> list[Row]:
    """Return the changes that replace stored ``pages`` and ``rows`` within ``at`` by one page."""
    low = keys.large_key(keys.BLOCK_INDEX, shard_id, at.start)
    high = keys.large_key(keys.BLOCK_INDEX, shard_id, at.stop)
    key = keys.large_key(keys.BLOCK_PAGE, shard_id, at.start)
    listed = np.concatenate([np.empty(0, _SPAN), *(_decode(page)[1] for _, page in pages)])
    over = {keys.last_number(row_key, 8): value for row_key, value in rows}
    spans = _overlaid(listed, over)
    cleared: list[Row] = [("delete_range", low, high)]
    if not len(spans):
        return [*cleared, ("delete", key)]
    return [*cleared, ("put", key, _STOP.pack(at.stop) + spans.tobytes())]


def _decode(page: bytes) -> tuple[int, Spans]:
    (stop,) = _STOP.unpack_from(page)
    return stop, np.frombuffer(page, _SPAN, offset=_STOP.size)


def _overlaid(listed: Spans, over: dict[int, bytes]) -> Spans:
    """The spans of pages, overridden by the rows of single blocks."""
    if not over:
        return listed
    kept = listed[~np.isin(listed["base"], np.array(list(over), np.uint64))]
    # An empty row means that the block is removed.
    there = {base_seq: row for base_seq, row in over.items() if row}
    both = np.concatenate([kept, _spans(list(there), list(there.values()))])
    return both[np.argsort(both["base"])]


def _spans(bases: list[int], values: list[bytes]) -> Spans:
    spans = np.empty(len(bases), _SPAN)
    spans["base"] = bases
    rest = np.frombuffer(b"".join(values), _ROW)
    for name in _ROW.names or ():
        spans[name] = rest[name]
    return spans
