"""The cache of blocks: its two bounds, and reads that may be old."""

import numpy as np
import pytest

from contrail_common.columns.blocks import Block, columns_of
from contrail_storage.store import block_cache
from contrail_storage.store.block_cache import BlockCache

SHARD = 3


def block_of(base_seq: int, payload: bytes = b"x") -> Block:
    sids = np.zeros(1, np.uint32)
    return Block(base_seq, np.arange(1) + base_seq, sids, columns_of([payload], None))


def bases_in(cache: BlockCache, *bases: int) -> list[int]:
    return [base for base in bases if cache.get((SHARD, base)) is not None]


def test_bytes_of_all_blocks_are_bounded_and_the_least_recently_used_goes_first() -> None:
    cache = BlockCache(1 << 20)
    cache.put((SHARD, 1), block_of(1, b"x" * 1_000))
    one = cache.size_bytes
    cache = BlockCache(2 * one)
    cache.put((SHARD, 1), block_of(1, b"x" * 1_000))
    cache.put((SHARD, 2), block_of(2, b"x" * 1_000))
    assert (bases_in(cache, 2, 1), cache.size_bytes) == ([2, 1], 2 * one)
    cache.put((SHARD, 1), block_of(1, b"y" * 1_000))  # the same size in the same place
    assert bases_in(cache, 2, 1) == [2, 1]
    cache.put((SHARD, 3), block_of(3))
    assert (bases_in(cache, 1, 2, 3), cache.size_bytes <= 2 * one) == ([1, 3], True)
    cache.put((SHARD, 4), block_of(4, b"x" * 3_000))  # larger than the cache: nothing is left
    assert (bases_in(cache, 1, 2, 3, 4), cache.size_bytes) == ([], 0)


def test_number_of_blocks_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_cache, "CACHE_BLOCKS", 3)
    cache = BlockCache(1 << 30)
    for base in range(1, 4):
        cache.put((SHARD, base), block_of(base))
    assert bases_in(cache, 1, 2, 3) == [1, 2, 3]
    cache.put((SHARD, 4), block_of(4))
    assert bases_in(cache, 1, 2, 3, 4) == [2, 3, 4]


def test_read_that_may_be_old_is_not_taken() -> None:
    cache = BlockCache(1 << 20)
    for change in (
        cache.renew,
        lambda: cache.discard((SHARD, 1)),
        lambda: cache.discard_shards(lambda shard: shard == SHARD),
    ):
        begun = cache.generation
        change()
        cache.put_read((SHARD, 1), block_of(1), begun)
        assert bases_in(cache, 1) == []
    cache.put_read((SHARD, 1), block_of(1, b"read"), cache.generation)
    cache.put((SHARD, 1), block_of(1, b"merged"))
    cache.put_read((SHARD, 1), block_of(1, b"read"), cache.generation)
    found = cache.get((SHARD, 1))
    assert found is not None
    assert found.message(0, "a").payload == b"merged"
    cache.discard_shards(lambda shard: shard == SHARD)
    assert cache.size_bytes == 0
