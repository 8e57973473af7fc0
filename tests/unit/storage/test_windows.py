"""Rows of windows on a whole node: what they hold, when they go, and what a search reads."""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_common.columns.blocks import Block, columns_of
from contrail_common.model import ConsumerConfig, PublishMessage, StreamConfig
from contrail_link import publishing
from contrail_link.contract.consume import PullRequest
from contrail_link.contract.read import RangeRequest, ReplayRequest, pieces_of
from contrail_serve.groups import SingleMemberGroups
from contrail_storage.core import key_layout as keys
from contrail_storage.core.subjects.filters import SubjectFilter
from contrail_storage.link import LocalLink
from contrail_storage.node import NodeOptions, StorageNode
from contrail_storage.reading.reader import Reader
from contrail_storage.replica.shard import Shard
from contrail_storage.store import windows as rows_of_windows
from contrail_storage.store.rocks_store import StoreCorruptError
from contrail_storage.store.windows import WINDOW, facts_of_blocks, read_rows, window_row
from contrail_storage.upkeep.compactor import CompactorBounds
from tests.unit.storage.naive_subjects import naive_matches

SHARD = 7
PATIENCE_S = 60.0
SUBJECTS = [f"k.{number % 3}.{number}" for number in range(60)]
FILTERS = ["k.1.*", "k.*.17", "k.0.3", "none.*", "k.2.>"]


# Rows --------------------------------------------------------------------------------------------


class Rows:
    """A source that has rows only."""

    def __init__(self, rows: dict[bytes, bytes]) -> None:
        self.source = self
        self.rows = rows

    def get_many(self, wanted: Sequence[bytes]) -> list[bytes | None]:
        return [self.rows.get(key) for key in wanted]


@given(
    st.sampled_from([0, 1, 1_000_000]),
    st.lists(st.tuples(st.sampled_from([1, 90, 2_000]), st.sampled_from([0, 5, 3_000]))),
    st.sampled_from([1, 200, 60_000, 2**32]),
    st.sampled_from([1, 200, 3_000]),
    st.integers(0, 3_000),
)
def test_row_holds_number_and_size_of_each_message(
    window: int, runs: list[tuple[int, int]], highest: int, largest: int, before: int
) -> None:
    rng = np.random.default_rng(before)
    seq = max(window * WINDOW - before, 1)
    blocks = []
    for count, gap in runs:
        sids = rng.integers(0, highest, count).astype(np.uint32)
        columns = columns_of([bytes(size) for size in rng.integers(0, largest, count)], None)
        blocks.append(Block(seq, np.zeros(count, np.int64), sids, columns))
        seq += count + gap
    _, key, row = window_row(SHARD, facts_of_blocks(window * WINDOW, (window + 1) * WINDOW, blocks))
    found = read_rows(Rows({key: row}), SHARD, window, window + 3)
    assert found is not None
    assert (found.base_seq, found.end_seq) == (window * WINDOW, (window + 1) * WINDOW)
    for block in blocks:
        for at in range(block.count):
            seq = block.base_seq + at
            if found.base_seq <= seq < found.end_seq:
                own = seq - found.base_seq
                assert found.subject_ids[own] == block.subject_ids[at]
                assert found.sizes[own] == block.columns.sizes()[at]
    assert len(row) <= 10 + 8 * WINDOW


def test_what_is_not_a_row_counts_as_missing() -> None:
    key = keys.large_key(keys.WINDOW, SHARD, 5)
    for wrong in (b"", b"x" * 9, b"x" * 10, bytes(8) + b"\x03\x00" + bytes(3 * WINDOW)):
        assert read_rows(Rows({key: wrong}), SHARD, 5, 6) is None


# Whole nodes -------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def running(data_dir: Path) -> AsyncIterator[StorageNode]:
    options = NodeOptions(data_dir, compactor=CompactorBounds(3_600.0, 1 << 40))
    node = StorageNode.open(options, SingleMemberGroups())
    await node.start()
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield node
    finally:
        await node.stop()


async def make(node: StorageNode, **fields: Any) -> None:
    config = StreamConfig(name="S", subjects=("k.>",), **fields)
    await LocalLink(node).put_stream(config, "create", None, False)


async def publish(node: StorageNode, subjects: Sequence[str], size: int = 20) -> None:
    messages = [PublishMessage(one, None, b"x" * (size + len(one))) for one in subjects]
    ack = await publishing.publish(LocalLink(node), "S", messages)
    assert not any(one.code for one in ack.results)


async def written(node: StorageNode) -> None:
    node.applier.flush()
    await node.until_written()
    while node.writer.submitted != node.writer.settled:
        await asyncio.sleep(0)


def shard_of(node: StorageNode) -> Shard:
    return node.streams.shard("S")


def stored_windows(node: StorageNode) -> list[int]:
    prefix = keys.shard_key(keys.WINDOW, shard_of(node).machine.shard_id)
    found = node._store.scan(prefix, keys.prefix_end(prefix))
    return [keys.last_number(key, 8) for key, _ in found]


def check_rows(node: StorageNode) -> list[int]:
    """Return the windows that have rows: all that are full, and none before the first block."""
    machine, stored = shard_of(node).machine, stored_windows(node)
    end = (machine.counters.last_seq + 1) // WINDOW
    full = range(machine.counters.first_seq // WINDOW, end)
    base_seq = node.blocks.directory(machine.shard_id).base_seq(0)
    assert set(full) <= set(stored) <= set(range(base_seq // WINDOW, end))
    return stored


Model = dict[int, str]
"""The subjects of live messages by sequence."""


async def check_all(node: StorageNode, model: Model, rng: random.Random) -> None:
    """Compare facts and searches with the model."""
    shard, reader = shard_of(node), node.reader
    machine, seq = shard.machine, shard_of(node).machine.counters.first_seq
    sizes = {at: 20 + len(name) for at, name in model.items()}
    while seq <= shard.applied_seq:
        facts = await reader.facts(shard, seq, shard.applied_seq)
        for at in range(max(seq, facts.base_seq), min(facts.end_seq, shard.applied_seq + 1)):
            if at in model:
                sid = int(facts.subject_ids[at - facts.base_seq])
                assert machine.subjects.name(sid) == model[at]
                assert facts.sizes[at - facts.base_seq] == sizes[at]
        seq = facts.end_seq
    for pattern in FILTERS:
        await check_filter(shard, reader, model, pattern, rng)
    for seq in rng.sample(sorted(model), 5):
        older = max((at for at in model if at < seq and model[at] == model[seq]), default=0)
        own = machine.subjects.ids[model[seq]]
        assert await reader.newest_below(shard, seq, 0, partial(np.equal, own), 1) == older


async def check_filter(
    shard: Shard, reader: Reader, model: Model, pattern: str, rng: random.Random
) -> None:
    matching = [at for at, name in sorted(model.items()) if naive_matches(pattern, name)]
    wanted = SubjectFilter((pattern,))
    for from_seq in [0, *rng.sample(range(1, shard.applied_seq + 1), 4)]:
        after = [at for at in matching if at >= from_seq]
        for missed in (False, True):
            reached = await reader.next_match(shard, from_seq, wanted, missed=missed)
            assert from_seq <= reached
            assert not after or reached <= after[0]
        high = rng.randint(from_seq, shard.applied_seq)
        count = await reader.count(shard, from_seq, high, wanted)
        assert count == sum(at <= high for at in after)
    for count in (1, 3, len(matching), len(matching) + 1):
        expected = matching[-count] if 0 < count <= len(matching) else 0
        pick = wanted.lookup(shard.machine.subjects).select
        newest = await reader.newest_below(shard, shard.applied_seq + 1, 0, pick, max(count, 1))
        assert not count or newest == expected
    request = RangeRequest(stream="S", subject=pattern, from_seq=0, limit=len(model))
    messages, _ = await reader.collect(shard, request)
    assert [message.seq for message in messages] == matching


async def fill(node: StorageNode, rng: random.Random) -> Model:
    """Publish in batches of many sizes, and delete some messages one by one and some by subject."""
    model: Model = {}
    for count in (1, 700, 1, 1, 30, 2_000, 5, 900, 1_300, 2, 600, *[2_000] * 5):
        names = [rng.choice(SUBJECTS[:40]) for _ in range(count)]
        await publish(node, names)
        last_seq = shard_of(node).machine.counters.last_seq
        model |= dict(enumerate(names, last_seq - count + 1))
    link = LocalLink(node)
    for seq in rng.sample(sorted(model), 20):
        await link.delete_message("S", seq)
        del model[seq]
    await link.purge_stream("S", SUBJECTS[4], 0, 0)
    model = {seq: name for seq, name in model.items() if name != SUBJECTS[4]}
    # A run without a live message, which the compactor removes.
    for seq in range(1_100, 1_500):
        if seq in model:
            await link.delete_message("S", seq)
            del model[seq]
    return model


def without_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Search by rows, however few subjects there are and however new the windows are."""
    monkeypatch.setattr("contrail_storage.reading.reader._TABLE_MAX", -1)
    monkeypatch.setattr("contrail_storage.reading.window_reads._RECENT_WINDOWS", -1)


@pytest.mark.parametrize("storage", ["file", "memory"])
def test_searches_find_what_the_model_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: str
) -> None:
    """After publishing, after a restart, without rows, and after compaction and a purge."""
    rng = random.Random(1)
    without_table(monkeypatch)

    async def work(node: StorageNode, model: Model) -> None:
        await written(node)
        await check_all(node, model, rng)
        check_rows(node)
        shard_id = shard_of(node).machine.shard_id
        prefix = keys.shard_key(keys.WINDOW, shard_id)
        node._store.write([("delete_range", prefix, keys.prefix_end(prefix))])
        assert not stored_windows(node)
        await check_all(node, model, rng)
        await written(node)
        check_rows(node)  # made again
        await node.compactor.tick()
        await written(node)
        await check_all(node, model, rng)

    async def first_life() -> Model:
        async with running(tmp_path) as node:
            await make(node, storage=storage)
            model = await fill(node, rng)
            await work(node, model)
            return model

    async def second_life(model: Model) -> None:
        async with running(tmp_path) as node:
            await check_all(node, model, rng)
            await LocalLink(node).purge_stream("S", "", 6_000, 0)
            model = {seq: name for seq, name in model.items() if seq >= 6_000}
            await work(node, model)

    model = asyncio.run(first_life())
    if storage == "file":
        asyncio.run(second_life(model))


def test_rows_go_with_the_head_and_with_the_stream(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as node:
            await make(node, max_msgs=10_000)
            for _ in range(26):
                await publish(node, ["k.a"] * 1_000)
            await written(node)
            assert check_rows(node)[-3:] == [3, 4, 5]
            link, shard = LocalLink(node), shard_of(node)
            facts = await node.reader.facts(shard, 4 * WINDOW, 4 * WINDOW)
            await link.purge_stream("S", "", 0, 0)
            await publish(node, ["k.a"])
            node.applier.keep_window(shard.machine.shard_id, facts)  # a read that ends too late
            await written(node)
            assert stored_windows(node) == []
            for _ in range(5):
                await publish(node, ["k.a"] * 2_000)
            await written(node)
            assert check_rows(node)
            prefix = keys.shard_key(keys.WINDOW, shard.machine.shard_id)
            await link.delete_stream("S")
            node.applier.keep_window(shard.machine.shard_id, facts)
            await written(node)
            assert list(node._store.scan(prefix, keys.prefix_end(prefix))) == []

    asyncio.run(scene())


def test_damaged_rows_are_made_again_from_the_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        async with running(tmp_path) as node:
            await make(node)
            for low in range(0, 6_000, 2_000):
                await publish(node, [f"k.{at}" for at in range(low, low + 2_000)])
            await written(node)
            without_table(monkeypatch)
            shard = shard_of(node)
            get_many = node.blocks.source.get_many

            def damaged(wanted: Sequence[bytes]) -> list[bytes | None]:
                raise StoreCorruptError("a checksum differs")

            monkeypatch.setattr(node.blocks.source, "get_many", damaged)
            facts = await node.reader.facts(shard, 1, 6_000)
            names = [shard.machine.subjects.name(sid) for sid in facts.subject_ids[1:].tolist()]
            assert names == [f"k.{at}" for at in range(WINDOW - 1)]
            monkeypatch.setattr(node.blocks.source, "get_many", get_many)
            assert not shard.damaged

    asyncio.run(scene())


class Counted:
    """Counts the blocks that are read from the store."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, node: StorageNode) -> None:
        self.blocks = 0
        for name in ("get_once", "get_unverified"):
            monkeypatch.setattr(node.blocks.source, name, self.counting(node, name))

    def counting(self, node: StorageNode, name: str) -> Any:
        read = getattr(node.blocks.source, name)

        def counted(wanted: Sequence[bytes]) -> Any:
            self.blocks += len(wanted)
            return read(wanted)

        return counted


@pytest.mark.parametrize("ack_policy", ["explicit", "none"])
def test_pull_of_a_sparse_filter_reads_blocks_with_matches_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ack_policy: str
) -> None:
    rare = {3_000, 9_000, 9_700, 10_400, 11_100}
    names = [f"k.rare.{at}" if at in rare else f"k.often.{at % 9}" for at in range(1, 12_001)]

    async def fill() -> None:
        async with running(tmp_path) as node:
            await make(node)
            for at in range(0, len(names), 1_000):
                await publish(node, names[at : at + 1_000], 500)

    async def scene() -> None:
        async with running(tmp_path) as node:  # with nothing in memory
            monkeypatch.setattr("contrail_storage.reading.reader._TABLE_MAX", -1)
            link = LocalLink(node)
            config = ConsumerConfig(
                name="c", durable=True, filter_subjects=("k.rare.*",), ack_policy=ack_policy
            )
            await link.put_consumer("S", config, "create", None, False)
            counted = Counted(monkeypatch, node)
            pull = PullRequest(stream="S", consumer="c", batch=10, no_wait=True)
            pulled = await link.pull(pull)
            assert {one.message.seq for one in pulled.deliveries} == rare
            directory = node.blocks.directory(shard_of(node).machine.shard_id)
            newest = len(directory) - directory.position(len(names) // WINDOW * WINDOW)
            assert counted.blocks <= len(rare) + newest + 1

    asyncio.run(fill())
    asyncio.run(scene())


@pytest.mark.parametrize("form", ["ndjson", "arrow"])
def test_replay_of_a_sparse_filter_reads_blocks_with_matches_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Any
) -> None:
    rare = [3_000, 3_001, 9_000, 11_100]
    names = [f"k.rare.{at}" if at in rare else f"k.often.{at % 9}" for at in range(1, 12_001)]
    viewed: list[int] = []

    async def fill() -> None:
        async with running(tmp_path) as node:
            await make(node)
            for at in range(0, len(names), 500):
                await publish(node, names[at : at + 500], 500)

    async def scene() -> None:
        async with running(tmp_path) as node:
            directory = node.blocks.directory(shard_of(node).machine.shard_id)
            assert len(directory) > 12
            view = node.blocks.view_many

            def noted(shard_id: int, bases: list[int]) -> Any:
                viewed.extend(bases)
                return view(shard_id, bases)

            monkeypatch.setattr(node.blocks, "view_many", noted)
            for low, high, wanted in ((0, 0, rare), (3_001, 10_999, rare[1:3]), (4_000, 8_000, [])):
                asked = ReplayRequest(
                    stream="S", format=form, subject="k.rare.*", from_seq=low, to_seq=high
                )
                chunks = await LocalLink(node).replay(asked)
                body = b"".join([bytes(piece) async for one in chunks for piece in pieces_of(one)])
                if form == "ndjson":
                    found = [json.loads(line).get("seq") for line in body.splitlines()[:-1]]
                else:
                    found = pa.ipc.open_stream(body).read_all().column("seq").to_pylist()
                assert found == wanted
                assert viewed == sorted(
                    {directory.base_seq(directory.position(seq)) for seq in wanted}
                )
                viewed.clear()

    asyncio.run(fill())
    asyncio.run(scene())


def test_append_over_a_limit_finds_what_it_removes_without_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest messages of its subjects lie far apart, in windows that were written long ago."""
    names = [f"k.{at * 7 % 4_000}" for at in range(12_000)]

    async def fill() -> None:
        async with running(tmp_path) as node:
            await make(node, max_msgs_per_subject=3)
            for at in range(0, len(names), 1_000):
                await publish(node, names[at : at + 1_000], 500)

    async def scene() -> None:
        async with running(tmp_path) as node:  # with nothing in memory
            counted = Counted(monkeypatch, node)
            await publish(node, [f"k.{at * 97 % 4_000}" for at in range(200)])
            machine = shard_of(node).machine
            assert machine.counters.messages == len(names)
            assert {machine.subjects.count(name) for name in names} == {3}
            removed = machine.counters.last_seq - len(names)
            assert (removed, counted.blocks) == (200, 0)

    asyncio.run(fill())
    asyncio.run(scene())


def test_row_is_written_with_the_block_that_fills_its_window(tmp_path: Path) -> None:
    """Also where single messages fill it, and not for the window that a restart divided."""

    async def scene() -> None:
        async with running(tmp_path) as node:
            await make(node)
            for count in (2_000, 1_900, *[1] * (WINDOW - 3_890)):
                await publish(node, ["k.a"] * count)
            await written(node)
            assert stored_windows(node) == [0]
        async with running(tmp_path) as node:
            shard_id = shard_of(node).machine.shard_id
            directory = node.blocks.directory(shard_id)
            for at in range(len(directory)):
                node.blocks.discard(shard_id, directory.base_seq(at))
            for _ in range(5):
                await publish(node, ["k.a"] * 2_000)
            await written(node)
            assert stored_windows(node) == [0, 2]
            await node.reader.facts(shard_of(node), WINDOW, WINDOW)
            await written(node)
            assert stored_windows(node) == [0, 1, 2]

    asyncio.run(scene())


def test_rows_of_windows_without_messages_go_and_searches_pass_over_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys that are overwritten again and again, behind one that never is."""
    rng, count = random.Random(2), 20 * WINDOW
    names = ["k.2.2", *(SUBJECTS[10 + at % 20] for at in range(count - 1))]
    model = {1: "k.2.2"} | {at: names[at - 1] for at in range(count - 19, count + 1)}
    without_table(monkeypatch)

    async def fill() -> None:
        async with running(tmp_path) as node:
            await make(node, max_msgs_per_subject=1)
            for at in range(0, count, 2 * WINDOW):
                await publish(node, names[at : at + 2 * WINDOW])
            await written(node)
            assert len(stored_windows(node)) == 20
            await node.compactor.tick()
            await written(node)
            assert stored_windows(node)[0] == 0
            assert len(stored_windows(node)) <= 4
            await check_all(node, model, rng)

    async def scene() -> None:
        async with running(tmp_path) as node:
            await check_all(node, model, rng)
            await written(node)
            assert len(stored_windows(node)) <= 4  # none was made again

    asyncio.run(fill())
    asyncio.run(scene())


def test_many_rows_are_removed_as_a_range() -> None:
    few = rows_of_windows.deletes_below(SHARD, 5 * WINDOW + 3, 7 * WINDOW)
    assert few == [("delete", keys.large_key(keys.WINDOW, SHARD, window)) for window in (5, 6)]
    assert rows_of_windows.deletes_below(SHARD, 5, WINDOW - 1) == []
    (all_of_them,) = rows_of_windows.deletes_below(SHARD, 3 * WINDOW, 500 * WINDOW)
    start, stop = (keys.large_key(keys.WINDOW, SHARD, window) for window in (0, 500))
    assert all_of_them == ("delete_range", start, stop)
