"""Blocks without the content of messages that are gone."""

from typing import Final

import numpy as np

from contrail_common.columns.blocks import Block, MessageColumns
from contrail_common.columns.header_columns import AnyHeaders, HeaderColumns, UniformHeaders
from contrail_common.texts import I64Array, Mask, Texts, gather, lengths_of, offsets_of

GAP: Final = 32
"""Dead messages between two live ones for which a block is cut: as columns they take 640 bytes."""


def strip_dead(block: Block, live: Mask) -> Block:
    """``block`` with neither payload nor values of headers where a message is not ``live``.

    It is smaller unless there was nothing to remove. Times and subject numbers stay: columns keep
    their order and their length.
    """
    if live.all():
        return block
    kept = strip_dead_columns(block.columns, live)
    return Block(block.base_seq, block.times_ns, block.subject_ids, kept)


def strip_dead_columns(columns: MessageColumns, live: Mask) -> MessageColumns:
    """``columns`` with neither payload nor values of headers where a message is not ``live``."""
    lengths = lengths_of(columns.offsets)
    indices = np.flatnonzero(np.repeat(live, lengths))
    return MessageColumns(
        columns.count,
        offsets_of(np.where(live, lengths, 0), columns.count),
        gather(columns.payload, indices),
        None if columns.headers is None else _strip_dead_headers(columns.headers, live),
        None if columns.seals is None else columns.seals.only(live),
    )


def _strip_dead_headers(headers: AnyHeaders, live: Mask) -> AnyHeaders | None:
    if not live.any():
        return None
    if isinstance(headers, UniformHeaders):
        # All messages share the names, so only values of dead ones can be removed.
        lengths = headers.values.lengths()
        kept = np.repeat(live, headers.names.count)
        indices = np.flatnonzero(np.repeat(kept, lengths))
        offsets = offsets_of(np.where(kept, lengths, 0), headers.values.count)
        return UniformHeaders(headers.names, Texts(offsets, gather(headers.values.heap, indices)))
    positions: I64Array = np.flatnonzero(live)
    chosen = headers.select(positions)
    if chosen is None:
        return None
    entries = np.zeros(len(live), np.int64)
    entries[positions] = lengths_of(chosen.entry_offsets)
    return HeaderColumns(
        offsets_of(entries, len(live)),
        chosen.name_offsets,
        chosen.value_offsets,
        chosen.text_offsets,
        chosen.names,
        chosen.texts,
    )


def between_live(block: Block, live: Mask, gap: int = GAP) -> list[Block]:
    """The blocks that remain of ``block`` without most of its dead messages (at least one is live).

    They span the first to the last live message, without runs of ``gap`` or more dead messages. The
    other dead messages are blank, as after :func:`strip_dead`.
    """
    positions = np.flatnonzero(live)
    gaps = np.flatnonzero(np.diff(positions) > gap)
    starts = positions[np.concatenate(([0], gaps + 1))].tolist()
    stops = (positions[np.concatenate((gaps, [len(positions) - 1]))] + 1).tolist()
    return [_part(block, live, start, stop) for start, stop in zip(starts, stops, strict=True)]


def _part(block: Block, live: Mask, start: int, stop: int) -> Block:
    part = Block(
        block.base_seq + start,
        block.times_ns[start:stop].copy(),
        block.subject_ids[start:stop].copy(),
        block.columns.slice(start, stop),
    )
    return strip_dead(part, live[start:stop])
