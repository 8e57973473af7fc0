"""Blocks on their way to the store: readable at once, joined when they adjoin, in order."""

import asyncio
from pathlib import Path

import pytest

from contrail_common.model import StreamConfig
from contrail_storage.core import key_layout as keys
from contrail_storage.link import LocalLink
from contrail_storage.node import StorageNode
from contrail_storage.replica import write_behind
from tests.unit.storage.cluster_rig import until
from tests.unit.storage.test_node import PATIENCE_S, PAYLOAD, play, publish, running

NEVER_S = 1_000.0


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits is written when it is asked for, and not before."""
    monkeypatch.setattr(write_behind, "HOLD_S", NEVER_S)
    monkeypatch.setattr(write_behind, "SOON_S", NEVER_S)


def bases(node: StorageNode) -> list[int]:
    """First sequences of the blocks that are in the store."""
    found = node._disk.scan_keys(keys.BLOCK, keys.prefix_end(keys.BLOCK))
    return [keys.last_number(key, 8) for key in found]


@pytest.mark.usefixtures("held")
def test_message_is_read_before_it_reaches_the_store(tmp_path: Path) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        await publish(link, 1)
        assert bases(node) == []
        assert (await link.get_message("S", 1)).payload == PAYLOAD
        await node.until_written()
        assert bases(node) == [1]
        assert (await link.get_message("S", 1)).payload == PAYLOAD

    play(tmp_path, scene)


@pytest.mark.usefixtures("held")
def test_adjoining_blocks_are_written_as_one(tmp_path: Path) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        for _ in range(3):
            await publish(link, 5)
        await node.until_written()
        assert bases(node) == [1]
        await publish(link, 5)
        await node.until_written()
        assert bases(node) == [1, 16]
        assert [(await link.get_message("S", seq)).seq for seq in range(1, 21)] == [*range(1, 21)]

    play(tmp_path, scene)


@pytest.mark.usefixtures("held")
def test_block_is_joined_up_to_the_bytes_of_a_block(tmp_path: Path) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        for _ in range(3):
            await publish(link, 60)  # about 60 KB each: two of them fit
        await node.until_written()
        assert bases(node) == [1, 121]

    play(tmp_path, scene)


@pytest.mark.usefixtures("held")
def test_full_batch_does_not_wait(tmp_path: Path) -> None:
    each = 120  # one block of about 120 KB
    fitting = write_behind.HOLD_BYTES_MAX // (each * len(PAYLOAD))

    async def scene(node: StorageNode, link: LocalLink) -> None:
        await node.until_written()
        for _ in range(fitting):
            await publish(link, each)
        assert bases(node) == []
        await publish(link, each)
        await until(lambda: bool(bases(node)))
        assert bases(node) == [1 + each * number for number in range(fitting + 1)]

    play(tmp_path, scene)


@pytest.mark.usefixtures("held")
def test_block_removed_while_it_waits_is_not_written_again(tmp_path: Path) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        config = StreamConfig(name="S", subjects=("a",), max_msgs=1)
        await link.put_stream(config, "put", None, False)
        for _ in range(3):
            await publish(link, 1)
        await node.until_written()
        assert bases(node) == [3]

    async def again() -> None:
        async with asyncio.timeout(PATIENCE_S), running(tmp_path) as node:
            assert bases(node) == [3]
            assert node.blocks.directory(node.streams.shard("S").machine.shard_id).end_seq == 4

    play(tmp_path, scene)
    asyncio.run(again())


@pytest.mark.usefixtures("held")
def test_stream_deleted_while_its_blocks_wait_leaves_none(tmp_path: Path) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        await publish(link, 2)
        await publish(link, 2)
        await link.delete_stream("S")
        await node.until_written()
        assert bases(node) == []
        assert node.blocks.directories == {}

    play(tmp_path, scene)


def test_small_batch_waits_longer_than_one_that_is_worth_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_behind, "HOLD_S", NEVER_S)
    monkeypatch.setattr(write_behind, "SOON_S", 0.0)

    async def scene(node: StorageNode, link: LocalLink) -> None:
        await node.until_written()
        small = write_behind.WORTH_BYTES // len(PAYLOAD) // 4
        for _ in range(3):
            await publish(link, small)
        assert bases(node) == []
        await publish(link, 2 * small)
        assert bases(node) == [1]

    play(tmp_path, scene)
