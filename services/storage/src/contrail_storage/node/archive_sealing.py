"""Sealing what a restore brings: archives are plain, and the stream may have subject keys."""

import asyncio

import numpy as np

from contrail_common.blocks import Block, decode_block, encode_block
from contrail_storage.core import archive
from contrail_storage.core.archive import Record, Subjects
from contrail_storage.core.emptying import emptied_columns
from contrail_storage.node.content_sealing import UNMADE, refusal
from contrail_storage.seal.content import seal_columns
from contrail_storage.seal.subject_keys import SubjectKeys


class ArchiveSealer:
    """Seals the blocks of one shard with keys of its own, before they are logged."""

    def __init__(self, keys: SubjectKeys, shard: int) -> None:
        self._keys = keys
        self._shard = shard
        self._names: dict[int, str] = {}

    async def sealed(self, record: Record) -> Record:
        """The record as it is to be logged; subjects come before the blocks that have them."""
        if record.kind == archive.SUBJECTS:
            subjects = archive.decoded(record.payload, Subjects)
            numbers = np.frombuffer(subjects.rows, np.uint32, len(subjects.names))
            self._names.update(zip(numbers.tolist(), subjects.names, strict=True))
        if record.kind != archive.BLOCK:
            return record
        try:
            sealed = await asyncio.to_thread(self._sealed, decode_block(record.payload))
        except UNMADE as error:
            raise refusal(error) from error
        return Record(archive.BLOCK, encode_block(sealed, 0))

    def _sealed(self, block: Block) -> Block:
        """Blocks. What is of no live subject is of no live message: it is emptied."""
        numbers = block.subject_ids.tolist()
        known = [number for number in dict.fromkeys(numbers) if number in self._names]
        wanted = [(self._shard, self._names[number]) for number in known]
        self._keys.make(wanted)
        found = [self._keys.sealing(*one) for one in wanted]
        keys = [key for key in found if key is not None]
        assert len(keys) == len(known), "nothing destroys keys of a stream that is being made"
        places = {number: at for at, number in enumerate(known)}
        live = np.array([number in places for number in numbers])
        columns = emptied_columns(block.columns, live)
        if keys:
            columns = seal_columns(columns, [places.get(number, 0) for number in numbers], keys)
            columns = emptied_columns(columns, live)
        return Block(block.base_seq, block.times_ns, block.subject_ids, columns)
