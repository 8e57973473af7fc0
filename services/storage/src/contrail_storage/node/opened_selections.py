"""What a replay selected, with the content opened that keys of subjects seal."""

import asyncio

import numpy as np

from contrail_common.blocks import Block
from contrail_storage.node.arrow_encoding import Selection
from contrail_storage.node.reader import Reader
from contrail_storage.node.shard import Shard
from contrail_storage.seal.content import ContentBrokenError, ContentOpener


async def open_selections(
    reader: Reader, shard: Shard, selections: list[Selection]
) -> list[Selection]:
    """``selections`` as they are to be encoded; messages whose keys were destroyed are left out."""
    if all(selection.block.columns.seals is None for selection in selections):
        return selections
    try:
        found = await asyncio.to_thread(
            lambda: [_opened(reader.opener, selection) for selection in selections]
        )
    except ContentBrokenError as error:
        raise reader.damage(shard, selections[0].block.base_seq, error) from error
    return [selection for selection in found if selection is not None]


def _opened(opener: ContentOpener, selection: Selection) -> Selection | None:
    block, low, stop = selection.block, selection.low, selection.stop
    if block.columns.seals is None:
        return selection
    kept = np.zeros(block.count, np.bool_)
    kept[low:stop] = True if selection.mask is None else selection.mask
    columns, gone = opener.columns(block.columns, np.flatnonzero(kept).tolist())
    kept[gone] = False
    if not kept.any():
        return None
    plain = Block(block.base_seq, block.times_ns, block.subject_ids, columns)
    return Selection(plain, low, stop, kept[low:stop])
