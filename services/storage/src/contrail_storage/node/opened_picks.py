"""What a replay picked, with the content opened that keys of subjects seal."""

import numpy as np
from numpy.typing import NDArray

from contrail_common.blocks import Block, BlockView, MessageColumns
from contrail_storage.node.picking import Picked, Run
from contrail_storage.seal.content import ContentBrokenError, ContentOpener


def open_picked(opener: ContentOpener, picked: Picked) -> Picked:
    """``picked`` as it is to be encoded; messages whose keys were destroyed are left out.

    Raises ContentBrokenError.
    """
    if all(run.block.seals is None for run in picked.runs):
        return picked
    runs: list[Run] = []
    rows = []
    begin = 0
    for at, run in enumerate(picked.runs):
        opened, positions = _opened(opener, run, picked.positions(at))
        runs.append(opened)
        rows.append(positions + (begin - run.low))
        begin += run.stop - run.low
    return Picked(runs, np.concatenate(rows))


def _opened(
    opener: ContentOpener, run: Run, positions: NDArray[np.intp]
) -> tuple[Run, NDArray[np.intp]]:
    """A run with what is at ``positions`` opened, and those of them that could be."""
    block, low, stop = run
    if block.seals is None:
        return run, positions
    sealed = MessageColumns(
        block.count, block.offsets.tobytes(), bytes(block.payload), None, block.seals
    )
    try:
        columns, gone = opener.columns(sealed, positions.tolist())
    except ContentBrokenError as error:
        error.base_seq = block.base_seq
        raise
    plain = Block(block.base_seq, block.times_ns, block.subject_ids, columns)
    left = np.setdiff1d(positions, np.array(gone, np.intp), assume_unique=True)
    return Run(BlockView.of(plain), low, stop), left
