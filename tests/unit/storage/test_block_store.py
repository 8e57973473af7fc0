"""Directories with gaps, and a cache that never holds what has been replaced."""

import threading
from collections.abc import Sequence

import numpy as np
import pytest

from contrail_common.columns.blocks import Block, BlockCorruptError, columns_of, encode_block
from contrail_storage.core import key_layout as keys
from contrail_storage.store.block_store import (
    BlockMissingError,
    BlockSpan,
    BlockStore,
    Directory,
    span_of,
)
from tests.support.each import each

SHARD = 3


def block_of(base_seq: int, *payloads: bytes) -> Block:
    count = len(payloads)
    sids = np.zeros(count, np.uint32)
    return Block(base_seq, np.arange(count) + base_seq, sids, columns_of(list(payloads), None))


class HeldSource:
    """Rows; a read that has its value waits for the gate."""

    def __init__(self) -> None:
        self.rows: dict[bytes, bytes] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.reading = threading.Event()

    def put(self, block: Block) -> None:
        key = keys.large_key(keys.BLOCK, SHARD, block.base_seq)
        self.rows[key] = encode_block(block, 0)

    def get(self, key: bytes) -> bytes | None:
        value = self.rows.get(key)
        self.reading.set()
        self.gate.wait(60)
        return value

    def get_once(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return [self.get(key) for key in keys]

    def get_unverified(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return self.get_once(keys)


def read_that_waits(store: BlockStore, source: HeldSource) -> threading.Thread:
    """Begin to read the first block; the read has its value, and waits for the gate."""
    source.gate.clear()
    source.reading.clear()
    reader = threading.Thread(target=store.load, args=(SHARD, 1))
    reader.start()
    assert source.reading.wait(60)
    return reader


def test_block_that_was_replaced_while_it_was_read_is_not_remembered() -> None:
    source = HeldSource()
    store = BlockStore(source, cache_bytes=4_000)
    store.directory(SHARD)
    old, fresh = block_of(1, b"secret", b"kept"), block_of(1, b"", b"kept")
    source.put(old)
    reader = read_that_waits(store, source)
    store.overlay(SHARD, fresh)
    source.put(fresh)
    store.written(SHARD, fresh)
    evicting = block_of(100, b"x" * 3_000)
    store.add(SHARD, evicting)
    store.written(SHARD, evicting)  # for which the cache lets go of the first
    source.gate.set()
    reader.join()
    assert store.recall(SHARD, 1) is None
    assert store.load(SHARD, 1).message(0, "a").payload == b""


def test_block_in_memory_is_not_read_though_its_reader_missed_it_before() -> None:
    source = HeldSource()
    store = BlockStore(source)
    old, fresh = block_of(1, b"secret"), block_of(1, b"")
    source.put(old)
    store.add(SHARD, old)
    store.overlay(SHARD, fresh)
    store.written(SHARD, old)  # late, and replaced already
    times = store.directory(SHARD).last_times_ns([1])
    assert store.load_each(SHARD, [1], times) == [fresh]
    assert store.load_run(SHARD, [1], times) is store.load(SHARD, 1) is fresh
    assert (store.misses, store.cache.size_bytes) == (0, 0)


def test_read_of_a_shard_that_is_dropped_or_replaced_is_not_remembered() -> None:
    source = HeldSource()
    store, replacing = BlockStore(source), BlockStore(source)
    old, fresh = block_of(1, b"secret"), block_of(1, b"")
    for each_store, block in ((store, old), (replacing, fresh)):
        each_store.add(SHARD, block)
        each_store.written(SHARD, block)
    store.forget(SHARD)
    source.put(old)
    assert store.load(SHARD, 1).message(0, "a").payload == b"secret"
    assert store.recall(SHARD, 1) is None
    reader = read_that_waits(store, source)
    source.put(fresh)
    store.adopt(replacing, SHARD)
    source.gate.set()
    reader.join()
    assert store.recall(SHARD, 1) is None
    assert store.load(SHARD, 1).message(0, "a").payload == b""


def test_cache_counts_what_its_blocks_take() -> None:
    count = 1_000
    one_time = block_of(1, *[b"x"] * count)
    one_time.times_ns = np.zeros(count, np.int64)
    # A message takes its payload and 4 bytes for its end; all share their time and subject.
    store = BlockStore(HeldSource(), cache_bytes=2 * (5 * count + 1_000))
    for shard in (SHARD, SHARD + 1, SHARD + 2):
        store.add(shard, one_time)
        store.written(shard, one_time)
        assert store.recall(shard, 1) is not None
    assert store.recall(SHARD, 1) is None
    assert store.recall(SHARD + 1, 1) is not None
    each_at_another_time = block_of(1, *[b"x"] * count)
    store.overlay(SHARD + 2, each_at_another_time)
    store.written(SHARD + 2, each_at_another_time)
    assert store.recall(SHARD + 1, 1) is None


def test_block_of_a_dropped_shard_is_not_cached_when_it_is_written() -> None:
    """The jobs of a shard that was dropped are still written, and nothing reads its blocks."""
    store = BlockStore(HeldSource())
    block = block_of(1, b"secret")
    store.add(SHARD, block)
    store.forget(SHARD)
    assert len(store.directory(SHARD)) == 0  # somebody who read the stream asks once more
    assert SHARD not in store.directories
    store.written(SHARD, block)
    assert store.recall(SHARD, 1) is None


def test_directory_with_gaps_is_walked_in_both_directions() -> None:
    directory = Directory()
    for base_seq in (1, 11, 21, 31):
        directory.append(BlockSpan(base_seq, 10, 100, base_seq))
    directory.cut(11, [])
    directory.cut(21, [BlockSpan(22, 1, 9, 22), BlockSpan(28, 2, 9, 29)])
    spans = [directory.span(at) for at in range(len(directory))]
    assert [(span.base_seq, span.end_seq) for span in spans] == [
        (1, 11),
        (22, 23),
        (28, 30),
        (31, 41),
    ]
    for seq, above, below in (
        (0, 0, -1), (1, 0, 0), (10, 0, 0), (11, 1, 0), (21, 1, 0), (22, 1, 1), (23, 2, 1),
        (27, 2, 1), (28, 2, 2), (30, 3, 2), (31, 3, 3), (40, 3, 3), (41, 4, 3),
    ):  # fmt: skip
        assert (directory.position(seq), directory.position_below(seq)) == (above, below)
    assert directory.totals(0, 4) == (23, 218)
    assert directory.drop_below(30) == [1, 22, 28]
    assert (directory.position(5), directory.position_below(5), len(directory)) == (0, -1, 1)


def test_what_is_known_to_be_empty_belongs_to_the_very_block() -> None:
    directory = Directory()
    span = BlockSpan(1, 10, 100, 9)
    directory.append(span)
    directory.note_emptied(span, 4)
    directory.note_emptied(BlockSpan(1, 9, 100, 9), 7)  # another that stood here before
    assert directory.emptied(0) == 4
    directory.append(BlockSpan(11, 2, 20, 12))
    assert directory.replace([1, 11], BlockSpan(1, 12, 120, 12))
    assert directory.emptied(0) == 0
    assert not directory.holds(span)


def test_small_blocks_are_read_along_and_only_the_first_of_them_may_be_missed() -> None:
    source = HeldSource()
    store = BlockStore(source)
    store.directories[SHARD] = Directory()
    blocks = [block_of(base_seq, b"x" * 10) for base_seq in (1, 5, 6, 9)]
    for block in blocks:
        source.put(block)
        store.directory(SHARD).append(span_of(block))
    source.rows[keys.large_key(keys.BLOCK, SHARD, 5)] = b"rotten"
    del source.rows[keys.large_key(keys.BLOCK, SHARD, 6)]

    def load_run(*base_seqs: int) -> Block:
        return store.load_run(SHARD, base_seqs, store.directory(SHARD).last_times_ns(base_seqs))

    assert load_run(1, 5, 6, 9).base_seq == 1
    known = [store.recall(SHARD, base_seq) is not None for base_seq in (1, 5, 6, 9)]
    assert known == [True, False, False, True]
    with pytest.raises(BlockCorruptError):
        load_run(5, 9)
    with pytest.raises(BlockMissingError):
        load_run(6, 9)


@each(
    ("blocks_max", "bytes_max", "bases"),
    [(9, 10_000, [5, 6, 9]), (2, 10_000, [5, 6]), (1, 0, [5]), (9, 250, [5, 6])],
)
def test_run_of_blocks_ends_at_its_bounds(
    blocks_max: int, bytes_max: int, bases: list[int]
) -> None:
    directory = Directory()
    for base_seq in (1, 5, 6, 9):
        directory.append(BlockSpan(base_seq, 1, 100, base_seq))
    directory.drop_below(4)
    assert directory.run_from(0, blocks_max, bytes_max) == bases


def test_views_are_of_the_store_or_of_what_is_not_written_yet() -> None:
    source = HeldSource()
    store = BlockStore(source)
    stored, held = block_of(1, b"stored"), block_of(2, b"held")
    source.put(stored)
    store.add(SHARD, held)
    views = store.view_many(SHARD, [1, 2])
    assert [view.message(0, "s").payload for view in views] == [b"stored", b"held"]
    with pytest.raises(BlockMissingError):
        store.view_many(SHARD, [1, 3])
    key = keys.large_key(keys.BLOCK, SHARD, 1)
    source.rows[key] = source.rows[key][:-1] + b"?"
    with pytest.raises(BlockCorruptError):
        store.view_many(SHARD, [1, 2])


def test_extents_stay_within_the_bounds_and_the_range() -> None:
    directory = Directory()
    for base_seq in (1, 11, 21, 41):  # nothing from 31 to 40
        directory.append(BlockSpan(base_seq, 10, 100, 0))
    everything = [(1, 10), (11, 10), (21, 10), (41, 10)]
    assert directory.extents_from(1, 99, 40, 400) == everything
    assert directory.extents_from(1, 99, 39, 400) == everything[:3]
    assert directory.extents_from(1, 99, 40, 399) == everything[:3]
    assert directory.extents_from(1, 40, 99, 999) == everything[:3]
    assert directory.extents_from(15, 21, 99, 999) == everything[1:3]
    assert directory.extents_from(31, 99, 99, 999) == everything[3:]
    assert directory.extents_from(1, 99, 1, 1) == everything[:1], "a large one comes alone"
    assert directory.extents_from(51, 99, 99, 999) == []
