"""The scrub finds what no longer reads back, and nothing else."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from contrail_common import errors
from contrail_common.columns.blocks import Block
from contrail_common.errors import ApiError
from contrail_common.model import ConsumerConfig, PublishMessage, StreamConfig
from contrail_link.publishing import publish
from contrail_serve.groups import SingleMemberGroups
from contrail_storage.core import key_layout as keys
from contrail_storage.link import LocalLink
from contrail_storage.node import NodeOptions, StorageNode
from contrail_storage.store.rocks_store import RocksStore, StoreFailedError
from contrail_storage.upkeep import scrubber

MESSAGES = [PublishMessage(f"a.{n % 7}", {"N": [str(n)]}, b"x" * 500) for n in range(1_000)]
NODE_KEY = bytes(range(32))


@asynccontextmanager
async def filled(data_dir: Path, *node_keys: bytes) -> AsyncIterator[tuple[StorageNode, LocalLink]]:
    """A node with stream ``S`` of a few blocks, and another one."""
    options = NodeOptions(data_dir, node_keys=node_keys, scrub_bytes_s=1 << 40)
    node = await asyncio.to_thread(StorageNode.open, options, SingleMemberGroups())
    await node.start()
    try:
        link = LocalLink(node)
        for name, subject in (("S", "a.>"), ("T", "t")):
            config = StreamConfig(name=name, subjects=(subject,))
            await link.put_stream(config, "put", None, False)
        await link.put_consumer("S", ConsumerConfig(name="c", durable=True), "put", None, False)
        await publish(link, "S", MESSAGES)
        await node.until_written()  # an ack does not wait for the store
        yield node, link
    finally:
        await node.stop()


def scrub(
    data_dir: Path, damage: Callable[[StorageNode], object], *node_keys: bytes
) -> dict[str, str]:
    """What a scrub finds after ``damage``: why each stream cannot serve."""

    async def scenario() -> dict[str, str]:
        async with filled(data_dir, *node_keys) as (node, _):
            damage(node)
            await node.scrubber.round()
            assert node.scrubber.counts.rounds == 1
            shards = node.applier.shards.values()
            return {shard.name: shard.damaged for shard in shards if shard.damaged}

    return asyncio.run(scenario())


def raw_store(node: StorageNode) -> RocksStore:
    """The store below the seals."""
    store = node._disk
    return store if isinstance(store, RocksStore) else store._store


def row(node: StorageNode, kind: bytes) -> tuple[bytes, bytes]:
    """The last row of ``kind`` of the stream ``S``, as it is stored."""
    shard_id = node.streams.shard("S").machine.shard_id
    prefix = keys.shard_key(kind, shard_id)
    return list(raw_store(node).scan(prefix, keys.prefix_end(prefix)))[-1]


def flip(node: StorageNode, kind: bytes) -> None:
    """Change one bit in the middle of a row."""
    key, value = row(node, kind)
    middle = len(value) // 2
    flipped = value[:middle] + bytes([value[middle] ^ 1]) + value[middle + 1 :]
    raw_store(node).write([("put", key, flipped)])


@pytest.mark.parametrize("node_keys", [(), (NODE_KEY,)])
def test_sound_node_is_read_whole_and_nothing_is_found(
    tmp_path: Path, node_keys: tuple[bytes, ...]
) -> None:
    async def scenario() -> None:
        async with filled(tmp_path / "data", *node_keys) as (node, link):
            await node.scrubber.round()
            counts = node.scrubber.counts
            assert (counts.rounds, counts.damaged) == (1, 0)
            assert counts.blocks == len(
                node.blocks.directory(node.streams.shard("S").machine.shard_id)
            )
            assert counts.bytes > sum(len(message.payload) for message in MESSAGES)
            assert node.readiness() == {}
            assert "contrail_scrub_rounds_total 1.0" in await link.metrics_text()

    asyncio.run(scenario())


@pytest.mark.parametrize("node_keys", [(), (NODE_KEY,)])
def test_block_that_changed_stops_its_stream_alone(
    tmp_path: Path, node_keys: tuple[bytes, ...]
) -> None:
    found = scrub(tmp_path / "data", lambda node: flip(node, keys.BLOCK), *node_keys)
    assert list(found) == ["S"]
    assert found["S"].startswith("block ")


def test_block_that_is_gone_is_found(tmp_path: Path) -> None:
    def remove(node: StorageNode) -> None:
        raw_store(node).write([("delete", row(node, keys.BLOCK)[0])])

    assert "not in the store" in scrub(tmp_path / "data", remove)["S"]


def test_sealed_row_that_changed_is_found(tmp_path: Path) -> None:
    found = scrub(tmp_path / "data", lambda node: flip(node, keys.SUBJECT_NAME), NODE_KEY)
    assert found["S"].startswith("rows of kind N: ")


def test_stopped_stream_refuses_with_the_reason_and_the_node_says_so(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with filled(tmp_path / "data") as (node, link):
            flip(node, keys.BLOCK)
            await node.scrubber.round()
            for refused in (publish(link, "S", MESSAGES[:1]), link.get_message("S", 1)):
                with pytest.raises(ApiError) as caught:
                    await refused
                assert caught.value.spec is errors.DATA_LOST
            assert "stream S" in node.readiness()
            assert node.scrubber.counts.damaged == 1
            await node.scrubber.round()
            assert node.scrubber.counts.damaged == 1, "what is known is not read again"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "change",
    [
        lambda link: link.purge_stream("S", "", 400, 0),
        lambda link: link.purge_stream("S", "", 0, 0),
        lambda link: link.delete_stream("S"),
    ],
)
def test_blocks_that_go_while_they_are_read_are_no_damage(
    tmp_path: Path,
    change: Callable[[LocalLink], Awaitable[object]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scrubber, "CHUNK_BYTES", 1)

    async def scenario() -> None:
        async with filled(tmp_path / "data") as (node, link):
            changed = False

            async def change_once() -> None:
                nonlocal changed
                if not changed:
                    changed = True
                    await change(link)

            read = node.scrubber._broken

            def read_late(shard_id: int, spans: list[object]) -> list[object]:
                # The directory named these blocks; now they go.
                asyncio.run_coroutine_threadsafe(change_once(), loop).result(60)
                return read(shard_id, spans)  # type: ignore[arg-type, return-value]

            loop = asyncio.get_running_loop()
            monkeypatch.setattr(node.scrubber, "_broken", read_late)
            await node.scrubber.round()
            assert changed
            assert node.scrubber.counts.damaged == 0

    asyncio.run(scenario())


def test_scrub_runs_by_itself_and_ends_with_the_node(tmp_path: Path) -> None:
    async def scenario() -> None:
        options = NodeOptions(tmp_path / "data", scrub_pause_s=0.0)
        node = await asyncio.to_thread(StorageNode.open, options, SingleMemberGroups())
        await node.start()
        async with asyncio.timeout(60):
            while node.scrubber.counts.rounds < 3:
                await asyncio.sleep(0)
        await node.stop()

    asyncio.run(scenario())


def test_block_that_the_disk_fails_to_read_keeps_no_other_stream_from_its_scrub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with filled(tmp_path) as (node, _):
            failing = node.streams.shard("S").machine.shard_id
            load_many, looked = node.blocks.load_many, []

            def load(shard_id: int, base_seqs: list[int]) -> list[Block]:
                looked.append(shard_id)
                if shard_id == failing:
                    raise StoreFailedError("IO error: Input/output error")
                return load_many(shard_id, base_seqs)

            monkeypatch.setattr(node.blocks, "load_many", load)
            await publish(LocalLink(node), "T", [PublishMessage("t", None, b"x")])
            await node.until_written()
            await node.scrubber.round()
            assert set(looked) == {failing, node.streams.shard("T").machine.shard_id}
            assert node.scrubber.counts.rounds == 1
            assert node.readiness() == {}

    asyncio.run(scenario())
