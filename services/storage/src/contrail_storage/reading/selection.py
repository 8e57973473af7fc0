"""Select messages of stored blocks for a scan, and their columns, without a loop over messages.

Messages sealed with subject keys are decrypted last, and only the selected ones.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from contrail_common.columns.blocks import Block, BlockView, MessageColumns
from contrail_common.texts import I64Array, U32Array
from contrail_link.contract.read import Chunk
from contrail_storage.core.subjects.filters import SubjectLookup
from contrail_storage.seal.content import ContentBrokenError, ContentOpener

_PIECE_BYTES_MIN: Final = 4_096
"""Payloads with a smaller average are joined, because a system call handles each piece alone."""


class Run(NamedTuple):
    """The messages of a block from position ``low`` up to, not including, ``stop``."""

    block: BlockView
    low: int
    stop: int


class Selection:
    """Messages of consecutive runs; ``rows`` (None: all) count from the start of the first run."""

    def __init__(
        self,
        runs: Sequence[Run],
        rows: NDArray[np.intp] | None = None,
        subject_ids: U32Array | None = None,
    ) -> None:
        """``subject_ids`` are those of the selected messages, if they are known."""
        self.runs = runs
        self.rows = rows
        self._subject_ids = subject_ids
        counts = [stop - low for _, low, stop in runs]
        self._bounds = np.zeros(len(counts) + 1, np.intp)
        np.cumsum(counts, out=self._bounds[1:])
        self.count = int(self._bounds[-1]) if rows is None else len(rows)

    def _rows(self, values: Callable[[Run], NDArray[Any]]) -> NDArray[Any]:
        joined = np.concatenate([values(run) for run in self.runs])
        return joined if self.rows is None else joined[self.rows]

    def sequences(self) -> I64Array:
        """Sequences of the messages."""
        firsts = [run.block.base_seq + run.low for run in self.runs]
        if self.rows is None:
            return np.concatenate(
                [
                    np.arange(first, first + run.stop - run.low, dtype=np.int64)
                    for first, run in zip(firsts, self.runs, strict=True)
                ]
            )
        shifts = np.array(firsts, np.int64) - self._bounds[:-1]
        sequences: I64Array = self.rows + shifts[self._run_slots(self.rows)]
        return sequences

    def _run_slots(self, rows: NDArray[np.intp]) -> NDArray[np.intp]:
        """The index in `runs` of the run of each row."""
        return self._bounds.searchsorted(rows, "right") - 1

    def times_ns(self) -> I64Array:
        """Times of the messages."""
        return self._rows(lambda run: run.block.times_ns[run.low : run.stop])

    def subject_ids(self) -> U32Array:
        """Subject numbers of the messages."""
        if self._subject_ids is None:
            self._subject_ids = self._rows(lambda run: run.block.subject_ids[run.low : run.stop])
        return self._subject_ids

    def payloads(self) -> tuple[NDArray[np.int32], list[Chunk]]:
        """Offsets of the concatenated payloads, and the payloads in pieces."""
        offsets = np.zeros(self.count + 1, np.int32)
        if self.rows is not None:
            return offsets, self._selected_payloads(self.rows, offsets)
        pieces: list[Chunk] = []
        at = size = 0
        for block, low, stop in self.runs:
            ends = block.offsets[low : stop + 1].view(np.int32)
            first, last = int(ends[0]), int(ends[-1])
            pieces.append(block.payload[first:last])
            # The offsets of this run, after those of the others.
            end = at + stop - low
            np.add(ends[1:], size - first, out=offsets[at + 1 : end + 1])
            size += last - first
            at = end
        return offsets, _in_pieces(pieces, size)

    def _selected_payloads(self, rows: NDArray[np.intp], offsets: NDArray[np.int32]) -> list[Chunk]:
        slots = self._run_slots(rows)
        ends = np.concatenate([run.block.offsets[run.low : run.stop + 1] for run in self.runs])
        at = rows + slots  # each run has one offset more than messages
        starts, stops = ends[at], ends[at + 1]
        np.cumsum(stops - starts, out=offsets[1:])
        # Adjoining payloads are one piece.
        breaks = np.flatnonzero((starts[1:] != stops[:-1]) | (slots[1:] != slots[:-1])) + 1
        first, last = np.append(0, breaks), np.append(breaks, len(rows)) - 1
        payloads = [run.block.payload for run in self.runs]
        pieces: list[Chunk] = [
            payloads[slot][start:stop]
            for slot, start, stop in zip(
                slots[first].tolist(), starts[first].tolist(), stops[last].tolist(), strict=True
            )
        ]
        return _in_pieces(pieces, int(offsets[-1]))

    def positions(self, at: int) -> NDArray[np.intp]:
        """Positions of a run's messages in its block."""
        _, low, stop = self.runs[at]
        if self.rows is None:
            return np.arange(low, stop)
        first, last = self.rows.searchsorted(self._bounds[at : at + 2])
        positions: NDArray[np.intp] = self.rows[first:last] + (low - self._bounds[at])
        return positions

    def by_run(self) -> Iterator[tuple[BlockView, NDArray[np.intp]]]:
        """Yield the blocks, each with the positions of its messages."""
        for at, run in enumerate(self.runs):
            positions = self.positions(at)
            if len(positions):
                yield run.block, positions

    def take(self, column: Callable[[BlockView], pa.Array]) -> list[pa.Array]:
        """Return the messages' rows of a column over whole blocks, block by block."""
        if self.rows is None:
            return [column(block).slice(low, stop - low) for block, low, stop in self.runs]
        return [column(block).take(_as_array(positions)) for block, positions in self.by_run()]


def select(
    runs: Sequence[Run],
    live: Sequence[NDArray[np.bool_] | None],
    lookup: SubjectLookup | None,
) -> Selection:
    """Select what is ``live`` (a mask over each run; None: all) and in ``lookup`` (None: all)."""
    everything = Selection(runs)
    if not everything.count:
        return everything
    mask: NDArray[np.bool_] | None = None
    if lookup is not None:
        mask = lookup.select(everything.subject_ids())
    # Usually every message is live, and nothing is joined.
    if any(alive is not None for alive in live):
        alive = np.concatenate(
            [
                np.ones(run.stop - run.low, np.bool_) if one is None else one
                for run, one in zip(runs, live, strict=True)
            ]
        )
        mask = alive if mask is None else mask & alive
    if mask is None or mask.all():
        return everything
    rows = np.flatnonzero(mask)
    return Selection(runs, rows, None if lookup is None else everything.subject_ids()[rows])


def _in_pieces(pieces: list[Chunk], size: int) -> list[Chunk]:
    return [b"".join(pieces)] if size < len(pieces) * _PIECE_BYTES_MIN else pieces


def _as_array(positions: NDArray[np.intp]) -> pa.Array:
    sequence = positions.astype(np.int64)
    return pa.Array.from_buffers(pa.int64(), len(sequence), [None, pa.py_buffer(sequence)])


def unseal(opener: ContentOpener, shard_id: int, selection: Selection) -> Selection:
    """Decrypt ``selection``; leave out messages whose keys were destroyed.

    Raises as `ContentOpener` does.
    """
    if all(run.block.seals is None for run in selection.runs):
        return selection
    runs: list[Run] = []
    rows = []
    begin = 0
    for at, run in enumerate(selection.runs):
        opened, positions = _opened(opener, shard_id, run, selection.positions(at))
        runs.append(opened)
        rows.append(positions + (begin - run.low))
        begin += run.stop - run.low
    return Selection(runs, np.concatenate(rows))


def _opened(
    opener: ContentOpener, shard_id: int, run: Run, positions: NDArray[np.intp]
) -> tuple[Run, NDArray[np.intp]]:
    """Return a run with ``positions`` decrypted, and the positions whose keys exist."""
    block, low, stop = run
    if block.seals is None:
        return run, positions
    sealed = MessageColumns(
        block.count, block.offsets.tobytes(), bytes(block.payload), None, block.seals
    )
    try:
        columns, gone = opener.columns(shard_id, sealed, positions.tolist())
    except ContentBrokenError as error:
        error.base_seq = block.base_seq
        raise
    plain = Block(block.base_seq, block.times_ns, block.subject_ids, columns)
    left = np.setdiff1d(positions, np.array(gone, np.intp), assume_unique=True)
    return Run(BlockView.of(plain), low, stop), left
