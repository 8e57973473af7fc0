"""Windows: subject numbers and sizes of messages, in fixed ranges of 4,096 sequences.

A search for messages of some subjects reads these rows, and then only the blocks with matches. A
row takes 1 to 8 bytes for each message, and much less time to read than the blocks.

Rows are derived from the blocks and say the same, so it makes no difference to ``apply`` which of
them it reads. A row is written with the block that fills its window, if all blocks of the window
are in memory. Where a row is missing or damaged, the blocks answer, and a reader stores it again.

A row is valid as long as the sequences have the same messages. Removals, compaction and merges do
not change it, but only the entries of live messages mean anything, as in blocks: a number may be
that of another subject by now. The rows of a shard are removed with the head, with the stream, when
the compactor finds their windows empty, and by a recount after data loss, which may give sequences
to other messages.

Row, little-endian: ``u32 lowest id | u32 lowest size | u8 width of ids | u8 width of sizes``, then
the differences from the lowest in columns of these widths; a width of 0 stands for no difference.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from contrail_common.columns.blocks import Block
from contrail_common.texts import I64Array, U32Array
from contrail_common.timeunits import INT64_MAX
from contrail_storage.core import key_layout as keys
from contrail_storage.core.facts import SubjectFacts
from contrail_storage.core.results import Row
from contrail_storage.store.block_store import BlockMissingError, BlockSpan, BlockStore
from contrail_storage.store.rocks_store import StoreCorruptError

WINDOW_BITS: Final = 12
WINDOW: Final = 1 << WINDOW_BITS
"""Sequences of a window; the first one is a multiple of this.

Most of what a row costs a publish is the same for any number of messages, so fewer would cost more.
"""
_DELETES_MAX: Final = 64
"""Rows that are removed one by one; a range is removed as such."""
_HEAD: Final = struct.Struct("<IIBB")
_DTYPES: Final = {1: "<u1", 2: "<u2", 4: "<u4"}
_WIDTHS: Final = {0, *_DTYPES}


class Extent(NamedTuple):
    """First sequence and number of messages of a block."""

    base_seq: int
    messages: int

    @property
    def end_seq(self) -> int:
        """The sequence after the last message."""
        return self.base_seq + self.messages


def joined(parts: Sequence[SubjectFacts]) -> SubjectFacts:
    """The facts of adjoining ranges, at least one, as one."""
    return SubjectFacts(
        parts[0].base_seq,
        np.concatenate([part.subject_ids for part in parts]),
        np.concatenate([part.sizes for part in parts]),
    )


def facts_of_blocks(base_seq: int, end_seq: int, blocks: Iterable[Block]) -> SubjectFacts:
    """The facts from ``base_seq`` up to ``end_seq``, from all blocks that reach into this range."""
    parts: list[tuple[int, U32Array, I64Array]] = []
    covered = 0
    for block in blocks:
        low, high = max(block.base_seq, base_seq), min(block.last_seq + 1, end_seq)
        if low < high:
            own = slice(low - block.base_seq, high - block.base_seq)
            parts.append((low - base_seq, block.subject_ids[own], block.columns.sizes()[own]))
            covered += high - low
    if covered == end_seq - base_seq > 0:
        sids = np.concatenate([part[1] for part in parts])
        return SubjectFacts(base_seq, sids, np.concatenate([part[2] for part in parts]))
    # Gaps get values that occur, so that the columns of a row stay narrow.
    sids = np.full(end_seq - base_seq, parts[0][1][0] if parts else 0, np.uint32)
    sizes = np.full(end_seq - base_seq, parts[0][2][0] if parts else 0, np.int64)
    for low, part_sids, part_sizes in parts:
        sids[low : low + len(part_sids)] = part_sids
        sizes[low : low + len(part_sizes)] = part_sizes
    return SubjectFacts(base_seq, sids, sizes)


def window_row(shard_id: int, facts: SubjectFacts) -> Row:
    """The row of one full window."""
    low_id, ids = _narrowed(facts.subject_ids)
    low_size, sizes = _narrowed(facts.sizes)
    head = _HEAD.pack(low_id, low_size, len(ids) // WINDOW, len(sizes) // WINDOW)
    key = keys.large_key(keys.WINDOW, shard_id, facts.base_seq >> WINDOW_BITS)
    return "put", key, head + ids + sizes


def _narrowed(values: U32Array | I64Array) -> tuple[int, bytes]:
    low, high = int(values.min()), int(values.max())
    if low == high:
        return low, b""
    span = high - low
    width = 1 if span < 1 << 8 else 2 if span < 1 << 16 else 4
    return low, (values - low).astype(_DTYPES[width]).tobytes()


def read_rows(blocks: BlockStore, shard_id: int, first: int, stop: int) -> SubjectFacts | None:
    """The facts of the windows from ``first`` up to ``stop``, or to the first missing row.

    None if the first row is missing. Blocks; raises the store's errors, except for damage: then a
    row counts as missing.
    """
    wanted = [keys.large_key(keys.WINDOW, shard_id, window) for window in range(first, stop)]
    try:
        rows = blocks.source.get_many(wanted)
    except StoreCorruptError:
        return None
    sids = np.empty(len(rows) << WINDOW_BITS, np.uint32)
    sizes = np.empty(len(rows) << WINDOW_BITS, np.int64)
    end = 0
    for row in rows:
        own = slice(end, end + WINDOW)
        if row is None or not _read_row(row, sids[own], sizes[own]):
            break
        end += WINDOW
    return SubjectFacts(first << WINDOW_BITS, sids[:end], sizes[:end]) if end else None


def _read_row(row: bytes, sids: U32Array, sizes: I64Array) -> bool:
    """Decode a row into the arrays; False if it is not the row of a window."""
    if len(row) < _HEAD.size:
        return False
    low_id, low_size, id_width, size_width = _HEAD.unpack_from(row)
    if not {id_width, size_width} <= _WIDTHS:
        return False
    if len(row) != _HEAD.size + (id_width + size_width) * WINDOW:
        return False
    sids[:] = low_id
    sizes[:] = low_size
    at = _HEAD.size
    if id_width:
        sids += np.frombuffer(row, _DTYPES[id_width], WINDOW, at)
        at += id_width * WINDOW
    if size_width:
        sizes += np.frombuffer(row, _DTYPES[size_width], WINDOW, at)
    return True


def filled_windows(blocks: BlockStore, shard_id: int, span: BlockSpan) -> Iterator[SubjectFacts]:
    """The facts of the windows that the newest block fills, as far as their blocks are in memory.

    For the event loop.
    """
    for window in range(span.base_seq >> WINDOW_BITS, span.end_seq >> WINDOW_BITS):
        low = window << WINDOW_BITS
        facts = facts_in_memory(blocks, shard_id, low, low + WINDOW)
        if facts is not None:
            yield facts


def extents_of(
    blocks: BlockStore, shard_id: int, base_seq: int, end_seq: int, bytes_max: int = INT64_MAX
) -> list[Extent]:
    """The blocks that reach into a range, ascending. For the event loop.

    With ``bytes_max`` only the first ones, at least one.
    """
    directory = blocks.directory(shard_id)
    extents = directory.extents_from(base_seq, end_seq - 1, INT64_MAX, bytes_max)
    return [Extent(*extent) for extent in extents]


def facts_in_memory(
    blocks: BlockStore, shard_id: int, base_seq: int, end_seq: int
) -> SubjectFacts | None:
    """The facts of a range; None if one of its blocks is not in memory. For the event loop."""
    held: list[Block] = []
    for block_seq, _ in extents_of(blocks, shard_id, base_seq, end_seq):
        block = blocks.recall(shard_id, block_seq)
        if block is None:
            return None
        held.append(block)
    return facts_of_blocks(base_seq, end_seq, held)


def read_blocks(
    blocks: BlockStore,
    shard_id: int,
    base_seq: int,
    end_seq: int,
    extents: Sequence[Extent],
) -> SubjectFacts:
    """The facts of a range from its blocks, given as :func:`extents_of` returns them.

    Blocks; raises one of UNREADABLE, or the store's errors. BlockMissingError: the blocks have
    changed meanwhile.
    """

    def each() -> Iterator[Block]:
        # One by one: a block may have 4 MiB, and only its facts are kept.
        for block_seq, messages in extents:
            block = blocks.recall(shard_id, block_seq)
            if block is None:
                (block,) = blocks.load_many(shard_id, [block_seq])
            if block.count < messages:
                raise BlockMissingError(f"block {block_seq} of shard {shard_id} was cut")
            yield block

    return facts_of_blocks(base_seq, end_seq, each())


def delete_row(shard_id: int, window: int) -> Row:
    """The operation that removes the row of one window."""
    return "delete", keys.large_key(keys.WINDOW, shard_id, window)


def deletes_below(shard_id: int, dropped_seq: int, first_seq: int) -> list[Row]:
    """Operations that remove the rows below ``first_seq``, when blocks from ``dropped_seq`` go."""
    first, stop = dropped_seq >> WINDOW_BITS, first_seq >> WINDOW_BITS
    if stop - first > _DELETES_MAX:
        return [_delete_range(shard_id, stop)]
    # One by one: in the long run, many ranges would slow down reads more than many rows.
    return [delete_row(shard_id, window) for window in range(first, stop)]


def _delete_range(shard_id: int, stop: int) -> Row:
    start_key = keys.large_key(keys.WINDOW, shard_id, 0)
    return "delete_range", start_key, keys.large_key(keys.WINDOW, shard_id, stop)
