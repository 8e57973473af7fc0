"""Room that deleted messages leave, on a whole node: counted in blocks and bytes of the store."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from contrail_common.model import PublishMessage, StreamConfig
from contrail_link import publishing
from contrail_link.contract.read import LastRequest, RangeRequest, ReplayPlanRequest, ReplayRequest
from contrail_serve.groups import SingleMemberGroups
from contrail_storage.core import key_layout as keys
from contrail_storage.link import LocalLink
from contrail_storage.node import NodeOptions, StorageNode
from contrail_storage.store.rocks_store import StoreFailedError
from contrail_storage.upkeep import compactor
from contrail_storage.upkeep.compactor import Compactor, CompactorBounds

PAYLOAD = b"p" * 400
BLOCK = 250
"""Messages of PAYLOAD that make a block."""


@asynccontextmanager
async def running(
    data_dir: Path, **options: object
) -> AsyncIterator[tuple[StorageNode, LocalLink]]:
    """A node whose compaction goes on when it is told to, not by itself."""
    whole = NodeOptions(data_dir, compactor=CompactorBounds(3_600.0, 1 << 40), **options)  # type: ignore[arg-type]
    node = StorageNode.open(whole, SingleMemberGroups())
    await node.start()
    try:
        yield node, LocalLink(node)
    finally:
        await node.stop()


async def make(link: LocalLink, **fields: object) -> None:
    config = StreamConfig(name="S", subjects=("k.>",), **fields)  # type: ignore[arg-type]
    await link.put_stream(config, "create", None, False)


async def publish(link: LocalLink, *subjects: str) -> None:
    for start in range(0, len(subjects), BLOCK):
        some = subjects[start : start + BLOCK]
        messages = [PublishMessage(each, {"H": [each]}, PAYLOAD) for each in some]
        assert not any(one.code for one in (await publishing.publish(link, "S", messages)).results)
        await link._node.until_written()  # each a block of its own


async def compacted(node: StorageNode) -> None:
    """Make all the room there is."""
    await node.until_written()
    await node.compactor.tick()
    await until_written(node)


async def until_written(node: StorageNode) -> None:
    node.applier.flush()
    while node.writer.submitted != node.writer.settled:
        await asyncio.sleep(0)


def stored(node: StorageNode) -> tuple[int, int]:
    """Blocks of ``S`` in the store, and their bytes."""
    prefix = keys.shard_key(keys.BLOCK, node.streams.shard("S").machine.shard_id)
    rows = list(node._store.scan(prefix, keys.prefix_end(prefix)))
    return len(rows), sum(len(value) for _, value in rows)


async def everything(link: LocalLink) -> list[int]:
    """Sequences of all messages, a page of a read at a time."""
    seqs: list[int] = []
    from_seq = 1
    while True:
        page = await link.read_range(RangeRequest(stream="S", from_seq=from_seq, limit=100))
        seqs += [message.seq for message in page.messages]
        assert all(message.payload == PAYLOAD for message in page.messages)
        assert all(message.headers == {"H": [message.subject]} for message in page.messages)
        if not page.messages:
            return seqs
        from_seq = page.next_seq


def test_keys_overwritten_again_and_again_keep_the_store_small(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (node, link):
            await make(link, max_msgs_per_subject=1)
            await publish(link, "k.cold")
            await publish(link, *[f"k.{at % 10}" for at in range(20 * BLOCK)])
            assert stored(node)[0] == 21
            await compacted(node)
            # The cold key's block, the last one, and the one in front of it that has waited for it.
            blocks, size = stored(node)
            assert blocks <= 3
            assert size < 3 * BLOCK * len(PAYLOAD)
            assert len(node.blocks.directory(node.streams.shard("S").machine.shard_id)) == blocks
            assert await everything(link) == [1, *range(20 * BLOCK - 8, 20 * BLOCK + 2)]
            # On and on: it never grows.
            for _ in range(3):
                await publish(link, *[f"k.{at % 10}" for at in range(5 * BLOCK)])
                await compacted(node)
                assert stored(node)[0] <= 3
            assert node.compactor.counts.dropped >= 30

    asyncio.run(scenario())


def test_block_with_few_live_messages_is_cut_to_them(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (node, link):
            await make(link)
            await publish(link, *["k.a"] * (3 * BLOCK))
            before = stored(node)
            for seq in (*range(1, 80), *range(85, 160), *range(165, 240)):
                await link.delete_message("S", seq + BLOCK)
            await compacted(node)
            blocks, size = stored(node)
            assert blocks == before[0] + 2
            assert before[1] - size > 220 * len(PAYLOAD)
            directory = node.blocks.directory(node.streams.shard("S").machine.shard_id)
            spans = [directory.span(at) for at in (1, 2, 3)]
            assert [span.base_seq for span in spans] == [BLOCK + 80, BLOCK + 160, BLOCK + 240]
            assert [span.count for span in spans] == [5, 5, 11]
            live = [*range(80, 85), *range(160, 165), *range(240, 251)]
            expected = [*range(1, BLOCK + 1), *(BLOCK + seq for seq in live)]
            expected += range(2 * BLOCK + 1, 3 * BLOCK + 1)
            assert await everything(link) == expected
            # Fewer than half of what has content: nothing to gain.
            await link.delete_message("S", BLOCK + 80)
            rewritten = node.compactor.counts.rewritten
            await compacted(node)
            assert node.compactor.counts.rewritten == rewritten == 1

    asyncio.run(scenario())


def test_every_read_passes_over_what_is_missing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (node, link):
            await make(link)
            await publish(link, "k.first", *["k.b"] * (4 * BLOCK), "k.last", "k.first")
            last_seq = 4 * BLOCK + 3
            await link.purge_stream("S", "k.b", 0, 0)
            await publish(link, "k.c")
            await compacted(node)
            assert stored(node)[0] <= 3
            assert await everything(link) == [1, last_seq - 1, last_seq, last_seq + 1]
            # Backwards: the message before, the newest of each subject as of the gap, what to keep.
            asked = LastRequest(stream="S", subject="k.>", up_to_seq=3 * BLOCK, limit=10)
            page, token = await link.last_messages(asked)
            assert ([message.seq for message in page], token) == ([1], None)
            await link.delete_message("S", last_seq)
            asked = LastRequest(stream="S", subject="k.first", limit=10)
            assert [one.seq for one in (await link.last_messages(asked))[0]] == [1]
            plan = await link.replay_plan(ReplayPlanRequest(stream="S", splits=4, from_seq=2))
            assert sum(split.messages for split in plan.splits) == 2
            body = b"".join(
                [
                    chunk
                    async for chunk in await link.replay(
                        ReplayRequest(stream="S", format="ndjson", from_seq=2, to_seq=2 * BLOCK)
                    )
                ]
            )
            assert body == b'{"end":true,"messages":0}\n'
            found = await link.read_range(
                RangeRequest(stream="S", from_seq=2 * BLOCK, subject="k.>", limit=1)
            )
            assert [message.seq for message in found.messages] == [last_seq - 1]
            assert await link.purge_stream("S", "k.>", 0, 2) == 1
            assert await everything(link) == [last_seq - 1, last_seq + 1]
            await node.scrubber.round()
            assert node.scrubber.counts.damaged == 0

    asyncio.run(scenario())


def test_purge_of_a_subject_searches_over_what_is_missing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (node, link):
            await make(link)
            await publish(link, "k.a", *["k.b"] * (4 * BLOCK), "k.a", *["k.c"] * (2 * BLOCK))
            await link.purge_stream("S", "k.b", 0, 0)
            await compacted(node)
            assert await link.purge_stream("S", "k.a", 0, 0) == 2
            assert (await link.stream_info("S")).state.messages == 2 * BLOCK

    asyncio.run(scenario())


def test_room_is_made_again_after_a_restart_and_nothing_is_lost(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (node, link):
            await make(link, max_msgs_per_subject=1)
            await publish(link, "k.cold", *[f"k.{at % 7}" for at in range(6 * BLOCK)])
            live = await everything(link)
        async with running(tmp_path) as (node, link):
            before = stored(node)
            await compacted(node)
            assert stored(node)[0] < before[0]
            assert await everything(link) == live
        async with running(tmp_path) as (node, link):
            assert await everything(link) == live
            rewritten = node.compactor.counts
            await compacted(node)
            assert (rewritten.dropped, rewritten.rewritten) == (0, 0)

    asyncio.run(scenario())


def test_small_blocks_that_wait_for_a_merge_are_left_to_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, merge_blocks=8) as (node, link):
            await make(link)
            for _ in range(7):
                await publish(link, "k.a")
            await link.delete_message("S", 3)
            await compacted(node)
            assert stored(node)[0] == 7
            await publish(link, "k.a")
            await until_written(node)
            assert stored(node)[0] == 1
            assert await everything(link) == [1, 2, 4, 5, 6, 7, 8]

    asyncio.run(scenario())


def test_snapshot_of_a_stream_with_gaps_is_restored(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (node, link):
            await make(link)
            await publish(link, "k.a", *["k.b"] * (4 * BLOCK), "k.a", "k.c")
            await link.purge_stream("S", "k.b", 0, 0)
            await compacted(node)
            live = await everything(link)
            data = b"".join([chunk async for chunk in await link.snapshot("S", True)])
            assert len(data) < 100 * len(PAYLOAD)
            await link.delete_stream("S")
            token = await link.begin_restore("S")
            await link.append_restore(token, 0, data)
            await link.commit_restore(token)
            assert await everything(link) == live

    asyncio.run(scenario())


def test_block_damaged_before_it_is_rewritten_stops_its_stream(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (node, link):
            await make(link)
            await publish(link, *["k.a"] * (3 * BLOCK))
            for seq in range(2, BLOCK):
                await link.delete_message("S", seq)
        async with running(tmp_path) as (node, link):
            shard_id = node.streams.shard("S").machine.shard_id
            key = keys.large_key(keys.BLOCK, shard_id, 1)
            node._store.write([("put", key, b"rotten")])
            await compacted(node)
            assert node.streams.shard("S").damaged.startswith("block 1: ")

    asyncio.run(scenario())


def test_block_that_the_disk_failed_to_read_is_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (node, link):
            await make(link)
            await publish(link, *["k.a"] * (3 * BLOCK))
            for seq in range(2, BLOCK):
                await link.delete_message("S", seq)
        async with running(tmp_path) as (node, link):

            def failing(*_: object) -> None:
                raise StoreFailedError("IO error: Input/output error")

            with monkeypatch.context() as patch:
                patch.setattr(node.blocks, "load_many", failing)
                with pytest.raises(StoreFailedError):
                    await compacted(node)
            assert node.compactor.counts.rewritten == 0
            assert not node.streams.shard("S").damaged
            await compacted(node)
            assert node.compactor.counts.rewritten == 1

    asyncio.run(scenario())


def test_failing_disk_is_said_in_a_line_and_keeps_no_stream_in_memory_waiting(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (node, link):
            await make(link)
            memory = StreamConfig(name="M", subjects=("m.>",), storage="memory")
            await link.put_stream(memory, "create", None, False)
            await publish(link, *["k.a"] * (3 * BLOCK))
            some = [PublishMessage("m.a", None, PAYLOAD)] * BLOCK
            for _ in range(3):
                await publishing.publish(link, "M", some)
                await until_written(node)
            for seq in range(2, BLOCK):
                await link.delete_message("S", seq)
                await link.delete_message("M", seq)
            await node.until_written()
            node.writer.failed = True
            bounds = CompactorBounds(0.001, 1 << 40)
            compactor = Compactor(node.streams.is_listed, node.blocks, node.applier, bounds)
            with capture_logs() as lines:
                running_on = asyncio.create_task(compactor.run())
                while not lines:
                    await asyncio.sleep(0)
                running_on.cancel()
            assert [line["event"] for line in lines] == ["compaction_put_off"]
            assert not any("exc_info" in line for line in lines)
            assert compactor.counts.rewritten == 1
            node.writer.go_on()
            await compacted(node)
            assert node.compactor.counts.rewritten == 1

    asyncio.run(scenario())


def listed_rows(node: StorageNode) -> tuple[int, int]:
    """Pages and rows of single blocks in the directory of ``S`` as it is stored."""
    shard_id = node.streams.shard("S").machine.shard_id
    kinds = keys.shard_key(keys.BLOCK_PAGE, shard_id), keys.shard_key(keys.BLOCK_INDEX, shard_id)
    pages, rows = (len(list(node._store.scan(one, keys.prefix_end(one)))) for one in kinds)
    return pages, rows


@pytest.mark.long
def test_blocks_in_pages_are_found_again_whatever_became_of_them(tmp_path: Path) -> None:
    def opened() -> AbstractAsyncContextManager[tuple[StorageNode, LocalLink]]:
        return running(tmp_path, page_blocks=8)

    async def scenario() -> None:
        async with opened() as (node, link):
            await make(link)
            await publish(link, *["k.a"] * (40 * BLOCK))
            await node.checkpoint()
            await until_written(node)  # a checkpoint does not wait for pages
            assert listed_rows(node) == (4, 8)
            await link.purge_stream("S", "", 10 * BLOCK, 0)
            for seq in range(15 * BLOCK + 1, 16 * BLOCK):
                await link.delete_message("S", seq)
            await compacted(node)
            expected = [*range(10 * BLOCK, 15 * BLOCK + 1), *range(16 * BLOCK, 40 * BLOCK + 1)]
            assert await everything(link) == expected
        async with opened() as (node, link):
            assert await everything(link) == expected
            await node.checkpoint()
            await until_written(node)
            assert listed_rows(node) == (3, 8)
            assert await everything(link) == expected
        async with opened() as (node, link):
            assert await everything(link) == expected
            await link.purge_stream("S", "", 0, 0)
            await node.checkpoint()
            await until_written(node)
            assert listed_rows(node) == (0, 0)
        async with opened() as (_, link):
            assert await everything(link) == []

    asyncio.run(scenario())


def test_look_at_many_blocks_is_in_steps_of_a_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of deletions may have many small blocks: others get their turn between these."""
    monkeypatch.setattr(compactor, "_PAUSE_BLOCKS", 4)

    async def scenario() -> None:
        async with running(tmp_path) as (node, link):
            await make(link)
            await publish(link, *(f"k.{number % 7}" for number in range(40 * BLOCK)))
            await link.purge_stream("S", "k.3", 0, 0)
            await node.until_written()
            looks, most, ended = 0, 0, False
            find = Compactor._find

            def counted(self: Compactor, *asked: Any) -> Any:
                nonlocal looks, most
                looks += 1
                most = max(most, looks)
                return find(self, *asked)

            async def others() -> None:
                nonlocal looks
                while not ended:
                    looks = 0
                    await asyncio.sleep(0)

            monkeypatch.setattr(Compactor, "_find", counted)
            other = asyncio.create_task(others())
            await node.compactor.tick()
            ended = True
            await other
            assert 0 < most <= 4

    asyncio.run(scenario())
