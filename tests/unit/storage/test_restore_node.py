"""Restores on a node: whole or not at all, wherever a crash or a caller ends them."""

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.link import AckItem, PullRequest, ReplayRequest
from contrail_common.model import ConsumerConfig, PublishMessage, StreamConfig
from contrail_serve.groups import SingleMemberGroups
from contrail_storage.core import key_layout as keys
from contrail_storage.core.archive import ArchiveReader
from contrail_storage.node import restore, snapshot
from contrail_storage.node.local_link import LocalLink
from contrail_storage.node.node import NodeOptions, StorageNode
from contrail_storage.node.restore import RESTORES_MAX, Restores
from contrail_storage.node.snapshot import SNAPSHOTS_MAX
from tests.unit.storage.machine_rig import picture

PATIENCE_S = 60.0
PIECE = 2_500
KEY = bytes([7]) * 32
CONFIG = StreamConfig(name="S", subjects=("a.>",), compression="zstd")


@contextlib.asynccontextmanager
async def running(data_dir: Path, *node_keys: bytes) -> AsyncIterator[StorageNode]:
    options = NodeOptions(data_dir, node_keys=node_keys, merge_blocks=4)
    node = StorageNode.open(options, SingleMemberGroups())
    await node.start()
    try:
        yield node
    finally:
        await node.stop()


async def fill(link: LocalLink) -> None:
    """Messages in many blocks, ids, deletions, and a consumer in the middle of its deliveries."""
    await link.put_stream(CONFIG, "create", None, False)
    for turn in range(30):
        await link.publish(
            "S",
            [
                PublishMessage(f"a.{at % 7}", {"K": ["v"]}, b"%d" % at * 50, f"id-{turn}-{at}")
                for at in range(9)
            ],
        )
    await link.delete_message("S", 40)
    await link.put_consumer("S", ConsumerConfig(name="c", durable=True), "create", None, False)
    pulled = await link.pull(PullRequest(stream="S", consumer="c", batch=5, no_wait=True))
    # A durable ack stands behind the record of the deliveries.
    ack = AckItem(pulled.shard, pulled.consumer_id, pulled.epoch, 2, "ack")
    await link.acknowledge("S", "c", [ack], True)


async def archive_of(link: LocalLink, name: str = "S") -> bytes:
    return b"".join([chunk async for chunk in await link.snapshot(name, True)])


async def messages_of(link: LocalLink) -> bytes:
    chunks = await link.replay(ReplayRequest(stream="S", format="msgpack"))
    return b"".join([chunk async for chunk in chunks])


async def send(link: LocalLink, token: str, data: bytes, start: int = 0) -> None:
    for at in range(start, len(data), PIECE):
        await link.append_restore(token, at, data[at : at + PIECE])


async def restored(link: LocalLink, data: bytes, name: str = "S") -> None:
    token = await link.begin_restore(name)
    await send(link, token, data)
    await link.commit_restore(token)


def known(node: StorageNode) -> dict[str, object]:
    machine = node.streams.shard("S").machine
    ids = [f"id-{turn}-{at}" for turn in range(30) for at in range(9)]
    found = picture(machine, ())
    assert machine.record is not None
    record = machine.record
    found["record"] = (record.config, record.hash_key, record.created_ns, record.next_consumer_id)
    found["ids"] = len(machine.dedupe)
    assert len(ids) == len(machine.dedupe)
    consumers = found["consumers"]
    assert isinstance(consumers, dict)
    found["consumers"] = {number: {**each, "version": 0} for number, each in consumers.items()}
    return found


def rows_of_streams(node: StorageNode) -> list[bytes]:
    """Keys of all rows that belong to some stream's shard."""
    found: list[bytes] = []
    for kind in keys.SHARD_KINDS:
        found += node._disk.scan_keys(keys.shard_key(kind, 1), keys.prefix_end(kind))
    return found


@pytest.mark.parametrize("node_keys", [(), (KEY,)], ids=["plain", "encrypted"])
def test_crash_at_any_point_leaves_the_whole_stream_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node_keys: tuple[bytes, ...]
) -> None:
    monkeypatch.setattr(restore, "_PART_BYTES", 4_000)
    images: list[tuple[Path, bool]] = []

    def crash(data_dir: Path, whole: bool) -> None:
        # What a killed process leaves: no more of the store than was flushed, all of the log.
        image = tmp_path / f"image-{len(images)}"
        shutil.copytree(data_dir, image)
        images.append((image, whole))

    async def source() -> tuple[bytes, dict[str, object], bytes]:
        async with running(tmp_path / "source") as node:
            link = LocalLink(node)
            await fill(link)
            return await archive_of(link), known(node), await messages_of(link)

    async def target(data: bytes, flushed_at: int) -> None:
        data_dir = tmp_path / f"target-{flushed_at}"
        async with running(data_dir, *node_keys) as node:
            link, listing = LocalLink(node), node.streams._list

            async def seen(name: str, subjects: tuple[str, ...]) -> None:
                crash(data_dir, True)
                await listing(name, subjects)

            monkeypatch.setattr(node.streams, "_list", seen)
            token = await link.begin_restore("S")
            for number, at in enumerate(range(0, len(data), PIECE)):
                await link.append_restore(token, at, data[at : at + PIECE])
                if number == flushed_at:
                    await node.checkpoint()
                if number % 3 == 0:
                    crash(data_dir, False)
            await link.commit_restore(token)
            crash(data_dir, True)

    async def look(image: Path, whole: bool, data: bytes, before: dict[str, object]) -> None:
        async with asyncio.timeout(PATIENCE_S), running(image, *node_keys) as node:
            link = LocalLink(node)
            if not whole:
                assert node.streams.names() == []
                await node.until_written()
                assert rows_of_streams(node) == []
                await restored(link, data)
            assert known(node) == before
            assert await messages_of(link) == messages
            again = ArchiveReader()
            again.feed(await archive_of(link))
            again.finish()
            ack = await link.publish("S", [PublishMessage("a.1", None, b"x", "id-29-8")])
            assert [(one.seq, one.duplicate) for one in ack.results] == [(270, True)]
            ack = await link.publish("S", [PublishMessage("a.1", None, b"x")])
            assert ack.results[0].seq == 271

    data, before, messages = asyncio.run(source())
    assert len(data) > 8 * PIECE
    for flushed_at in (-1, 1, 5):
        asyncio.run(target(data, flushed_at))
    assert {whole for _, whole in images} == {True, False}
    for image, whole in images:
        asyncio.run(look(image, whole, data, before))


def play(tmp_path: Path, scene: object) -> None:
    async def whole() -> None:
        async with asyncio.timeout(PATIENCE_S), running(tmp_path / "data") as node:
            await fill(LocalLink(node))
            await scene(node, LocalLink(node))  # type: ignore[operator]

    asyncio.run(whole())


def test_snapshot_is_of_the_moment_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "_CHUNK_BYTES", 1_000)

    async def scene(node: StorageNode, link: LocalLink) -> None:
        before = known(node)
        chunks = await link.snapshot("S", True)
        first = await anext(chunks)
        await link.publish("S", [PublishMessage("a.1", None, b"later") for _ in range(500)])
        await link.purge_stream("S", "a.2", 0, 0)
        await link.purge_stream("S", "", 100, 0)
        await node.checkpoint()
        data = first + b"".join([chunk async for chunk in chunks])
        assert b"later" not in data
        await link.delete_stream("S")
        await restored(link, data)
        assert known(node) == before

    play(tmp_path, scene)


def test_snapshot_that_nobody_reads_on_gives_its_place_back(tmp_path: Path) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        begun = [await link.snapshot("S", True) for _ in range(SNAPSHOTS_MAX)]
        for chunks in begun:
            await anext(chunks)
        with pytest.raises(ApiError) as refused:
            await link.snapshot("S", True)
        assert refused.value.spec is errors.OVERLOADED
        for chunks in begun:
            await chunks.aclose()  # type: ignore[attr-defined]
        assert await archive_of(link)

    play(tmp_path, scene)


def test_restore_that_is_not_gone_on_with_is_undone(tmp_path: Path) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        data = await archive_of(link)
        await link.delete_stream("S")
        hasty = Restores(node.streams, node.subject_keys, idle_s=0.0)
        token = await hasty.begin("S")
        await hasty.append(token, 0, data[:-1])
        while hasty._open:
            await asyncio.sleep(0)
        with pytest.raises(ApiError) as over:
            await hasty.append(token, len(data) - 1, data[-1:])
        assert over.value.spec is errors.BAD_REQUEST
        assert node.meta.streams == {}
        await restored(link, data)

    play(tmp_path, scene)


def test_caller_that_leaves_and_one_that_is_out_of_step_restore_nothing(tmp_path: Path) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        data = await archive_of(link)
        await link.delete_stream("S")
        token = await link.begin_restore("S")
        leaving = asyncio.ensure_future(link.append_restore(token, 0, data))
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        while node.restores._open:
            await asyncio.sleep(0)
        token = await link.begin_restore("S")
        await link.append_restore(token, 0, data[:PIECE])
        with pytest.raises(ApiError) as refused:
            await link.append_restore(token, 0, data[:PIECE])
        assert refused.value.spec is errors.BAD_REQUEST
        with pytest.raises(ApiError) as over:
            await link.commit_restore(token)
        assert over.value.spec is errors.BAD_REQUEST
        assert rows_of_streams(node) == []
        assert node.meta.streams == {}

    play(tmp_path, scene)


def test_name_under_restore_is_taken_and_restores_are_bounded(tmp_path: Path) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        data = await archive_of(link)
        await link.delete_stream("S")
        token = await link.begin_restore("S")
        await send(link, token, data)
        for wanted in (
            link.begin_restore("S"),
            link.put_stream(CONFIG, "put", None, False),
            link.put_stream(StreamConfig(name="T", subjects=("a.b",)), "put", None, False),
        ):
            with pytest.raises(ApiError) as refused:
                await wanted
            assert refused.value.spec.status == 409
        await node.streams.mend_all()
        others = [await link.begin_restore(f"R{number}") for number in range(1, RESTORES_MAX)]
        with pytest.raises(ApiError) as full:
            await link.begin_restore("more")
        assert full.value.spec is errors.OVERLOADED
        for other in others:
            await link.abort_restore(other)
        assert (await link.commit_restore(token)).state.messages == 269
        await link.abort_restore(token)
        assert (await link.stream_info("S")).state.messages == 269

    play(tmp_path, scene)
