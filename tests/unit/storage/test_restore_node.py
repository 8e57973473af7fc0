"""Restores on a node: whole or not at all, wherever a crash or a caller ends them."""

import asyncio
from pathlib import Path

import pytest

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import ConsumerConfig, PublishMessage, StreamConfig
from contrail_link.contract.consume import AckItem, PullRequest
from contrail_link.contract.read import ReplayRequest
from contrail_link.publishing import publish
from contrail_storage.core.archive.format import ArchiveReader
from contrail_storage.link import LocalLink
from contrail_storage.node import StorageNode
from contrail_storage.streams import snapshot
from contrail_storage.streams.restore import RESTORES_MAX, Restores
from contrail_storage.streams.snapshot import SNAPSHOTS_MAX
from tests.unit.storage.machine_rig import picture
from tests.unit.storage.restore_rig import (
    PATIENCE_S,
    PIECE,
    RestoreCrashes,
    archive_of,
    restored,
    rows_of_shards,
    running,
    send,
)

KEY = bytes([7]) * 32
CONFIG = StreamConfig(name="S", subjects=("a.>",), compression="zstd")


async def fill(link: LocalLink) -> None:
    """Messages in many blocks, ids, deletions, and a consumer in the middle of its deliveries."""
    await link.put_stream(CONFIG, "create", None, False)
    for turn in range(30):
        await publish(
            link,
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
    ack = AckItem(pulled.shard_id, pulled.consumer_id, pulled.epoch, [2], "ack")
    await link.acknowledge("S", "c", [ack], True)


async def messages_of(link: LocalLink) -> bytes:
    chunks = await link.replay(ReplayRequest(stream="S", format="msgpack"))
    return b"".join([chunk async for chunk in chunks])


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


@pytest.mark.long
@pytest.mark.parametrize("node_keys", [(), (KEY,)], ids=["plain", "encrypted"])
def test_crash_at_any_point_leaves_the_whole_stream_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node_keys: tuple[bytes, ...]
) -> None:
    async def source() -> tuple[bytes, dict[str, object], bytes]:
        async with running(tmp_path / "source") as node:
            link = LocalLink(node)
            await fill(link)
            return await archive_of(link), known(node), await messages_of(link)

    async def look(image: Path, whole: bool, data: bytes, before: dict[str, object]) -> None:
        async with asyncio.timeout(PATIENCE_S), running(image, *node_keys) as node:
            link = LocalLink(node)
            if not whole:
                assert node.streams.listed() == []
                assert await rows_of_shards(node) == []
                await restored(link, data)
            assert known(node) == before
            assert await messages_of(link) == messages
            again = ArchiveReader()
            again.feed(await archive_of(link))
            again.finish()
            ack = await publish(link, "S", [PublishMessage("a.1", None, b"x", "id-29-8")])
            assert [(one.seq, one.duplicate) for one in ack.results] == [(270, True)]
            ack = await publish(link, "S", [PublishMessage("a.1", None, b"x")])
            assert ack.results[0].seq == 271

    data, before, messages = asyncio.run(source())
    crashes = RestoreCrashes(tmp_path, monkeypatch, *node_keys)
    crashes.provoke(data, flushed_at=(-1, 1, 5))
    for image, whole in crashes.images:
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
        await publish(link, "S", [PublishMessage("a.1", None, b"later") for _ in range(500)])
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


def test_restore_that_is_not_continued_is_undone(tmp_path: Path) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        data = await archive_of(link)
        await link.delete_stream("S")
        hasty = Restores(node.streams, node.shard_logs, node.restores._makers, idle_s=0.0)
        token = await hasty.begin("S")
        await hasty.feed(token, 0, data[:-1])
        while hasty._open:
            await asyncio.sleep(0)
        with pytest.raises(ApiError) as over:
            await hasty.feed(token, len(data) - 1, data[-1:])
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
        assert await rows_of_shards(node) == []
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
        await node.streams.reconcile_all()
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
