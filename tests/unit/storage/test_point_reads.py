"""Blocks for single messages: read together, and each for itself when something is wrong."""

import asyncio
import functools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ParamSpec

import msgspec
import pytest

from contrail_common.columns.blocks import Block, BlockCorruptError
from contrail_storage.core import key_layout as keys
from contrail_storage.reading.point_reads import TURN_BLOCKS, PointReads
from contrail_storage.store.block_store import BlockMissingError, BlockStore, Directory, span_of
from contrail_storage.store.rocks_store import StoreCorruptError, StoreFailedError
from tests.unit.storage.test_block_store import SHARD, HeldSource, block_of

OTHER_SHARD = SHARD + 1
P = ParamSpec("P")


class TurnSource(HeldSource):
    """Rows of two shards; keeps which blocks were read together, and which again."""

    def __init__(self, *base_seqs: int) -> None:
        super().__init__()
        self.turns: list[list[int]] = []
        self.again: list[int] = []
        self.corrupt: set[bytes] = set()
        self.failed = False
        for base_seq in base_seqs:
            self.put(block_of(base_seq, b"%d" % base_seq))

    def get(self, key: bytes) -> bytes | None:
        if key in self.corrupt:
            raise StoreCorruptError("rot")
        return super().get(key)

    def get_once(self, wanted: Sequence[bytes]) -> list[bytes | None]:
        self.again += [keys.last_number(key, 8) for key in wanted]
        return super().get_once(wanted)

    def get_unverified(self, wanted: Sequence[bytes]) -> list[bytes | None]:
        self.turns.append([keys.last_number(key, 8) for key in wanted])
        if self.failed:
            raise StoreFailedError("the disk is gone")
        return super().get_once(wanted)


def key_of(base_seq: int) -> bytes:
    return keys.large_key(keys.BLOCK, SHARD, base_seq)


def on_a_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    @functools.wraps(test)
    def on_its_own(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return on_its_own


async def until_read_begins(source: TurnSource) -> None:
    await asyncio.get_running_loop().run_in_executor(None, source.reading.wait, 10)


def payload_of(block: Block) -> bytes:
    return block.message(0, "").payload


@on_a_loop
async def test_what_is_asked_for_while_others_are_read_shares_the_next_turn() -> None:
    source = TurnSource(1, 2, 3)
    points = PointReads(BlockStore(source))
    source.gate.clear()
    first = asyncio.ensure_future(points.block(SHARD, 1))
    await until_read_begins(source)
    others = [asyncio.ensure_future(points.block(SHARD, base_seq)) for base_seq in (2, 3, 2, 1)]
    await asyncio.sleep(0)
    source.gate.set()
    found = await asyncio.gather(first, *others)
    assert [payload_of(block) for block in found] == [b"1", b"2", b"3", b"2", b"1"]
    assert source.turns == [[1], [2, 3]]


@on_a_loop
async def test_turn_takes_no_more_than_its_bound_and_one_shard() -> None:
    count = TURN_BLOCKS + 1
    source = TurnSource(*range(1, count + 1))
    source.rows[keys.large_key(keys.BLOCK, OTHER_SHARD, 1)] = source.rows[key_of(1)]
    points = PointReads(BlockStore(source))
    asked = [points.block(SHARD, base_seq) for base_seq in range(1, count + 1)]
    found = await asyncio.gather(*asked, points.block(OTHER_SHARD, 1))
    assert [block.base_seq for block in found] == [*range(1, count + 1), 1]
    assert [len(turn) for turn in source.turns] == [TURN_BLOCKS, 1, 1]
    assert source.turns[1:] == [[1], [count]]


@on_a_loop
async def test_what_was_read_is_in_memory_from_then_on() -> None:
    store = BlockStore(TurnSource(1))
    store.directories[SHARD] = Directory()
    found = await PointReads(store).block(SHARD, 1)
    assert store.recall(SHARD, 1) is found


@on_a_loop
async def test_block_is_read_again_only_where_it_is_not_the_one_of_the_directory() -> None:
    source = TurnSource(1, 2, 3)
    store = BlockStore(source)
    for base_seq, behind_ns in ((1, 0), (2, 1), (3, 0)):
        span = span_of(block_of(base_seq, b""))
        later = msgspec.structs.replace(span, last_time_ns=span.last_time_ns + behind_ns)
        store.directory(SHARD).append(later)
    points = PointReads(store)
    found = await asyncio.gather(*(points.block(SHARD, base_seq) for base_seq in (1, 2, 3)))
    assert [block.base_seq for block in found] == [1, 2, 3]
    assert source.again == [2]


@pytest.mark.parametrize("fault", ["missing", "rotten block", "rotten value"])
@on_a_loop
async def test_block_that_cannot_be_read_fails_alone(fault: str) -> None:
    source = TurnSource(1, 2, 3)
    if fault == "missing":
        del source.rows[key_of(2)]
    elif fault == "rotten block":
        source.rows[key_of(2)] = bytes(100)
    else:
        source.corrupt.add(key_of(2))
    points = PointReads(BlockStore(source))
    found = await asyncio.gather(
        *(points.block(SHARD, base_seq) for base_seq in (1, 2, 3)), return_exceptions=True
    )
    assert [type(one) for one in found] == [
        Block,
        {
            "missing": BlockMissingError,
            "rotten block": BlockCorruptError,
            "rotten value": StoreCorruptError,
        }[fault],
        Block,
    ]


@on_a_loop
async def test_failed_store_is_reported_to_all_and_later_reads_continue() -> None:
    source = TurnSource(1, 2)
    points = PointReads(BlockStore(source))
    source.failed = True
    found = await asyncio.gather(
        points.block(SHARD, 1), points.block(SHARD, 2), return_exceptions=True
    )
    assert [type(one) for one in found] == [StoreFailedError] * 2
    source.failed = False
    assert payload_of(await points.block(SHARD, 1)) == b"1"


@on_a_loop
async def test_reader_that_leaves_takes_nothing_from_the_others() -> None:
    source = TurnSource(1)
    points = PointReads(BlockStore(source))
    source.gate.clear()
    leaving, staying = (asyncio.ensure_future(points.block(SHARD, 1)) for _ in range(2))
    await until_read_begins(source)
    leaving.cancel()
    source.gate.set()
    assert payload_of(await staying) == b"1"
    assert leaving.cancelled() or await asyncio.gather(leaving, return_exceptions=True)


@pytest.mark.parametrize("readable", [True, False])
@on_a_loop
async def test_end_of_a_read_is_reported_whatever_became_of_it(readable: bool) -> None:
    source = TurnSource(1)
    source.failed = not readable
    store = BlockStore(source)
    store.directories[SHARD] = Directory()
    points = PointReads(store)
    read, left = points.read(SHARD, 1), points.read(SHARD, 1)
    left.cancel()
    await read
    assert (store.recall(SHARD, 1) is not None) == readable
    assert len(source.turns) == 1
