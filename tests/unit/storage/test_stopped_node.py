"""A real node over a folder in which one byte of a block has flipped: one stream stops, for good.

It stands still before the command that needs the block. The node goes on, stops and starts, whether
it ends cleanly or is killed, and `accept_data_loss` gives what is left of the stream back.
"""

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

from contrail_common import errors
from contrail_common.errors import ApiError, ErrorSpec
from contrail_common.model import ConsumerConfig, PublishMessage, StreamConfig
from contrail_link import publishing
from contrail_link.contract.consume import AckItem, PullRequest
from contrail_link.contract.publish import PublishOutcome
from contrail_link.contract.read import RangeRequest
from contrail_storage.link import LocalLink
from contrail_storage.node import StorageNode
from contrail_storage.wal.node_log import LogOptions
from tests.support.folders import copy_at_one_moment
from tests.unit.storage.test_open_damaged_node import play, running

COUNT = 2_000
MARK = b"a payload of the first block"
PATIENCE_S = 60.0


def payload(number: int) -> bytes:
    return (MARK if number == 1 else b"another payload").ljust(100, b".")


async def fill(_: StorageNode, link: LocalLink) -> None:
    """Stream ``S`` is as full as it may be, a consumer has its first messages; ``T`` is beside."""
    config = StreamConfig(name="S", subjects=("s",), max_msgs=COUNT)
    await link.put_stream(config, "create", None, False)
    await link.put_stream(StreamConfig(name="T", subjects=("t",)), "create", None, False)
    await link.put_consumer("S", ConsumerConfig(name="c", durable=True), "create", None, False)
    messages = [PublishMessage("s", None, payload(at)) for at in range(1, COUNT + 1)]
    for start in range(0, COUNT, 500):
        await publishing.publish(link, "S", messages[start : start + 500])
    await publishing.publish(link, "T", [PublishMessage("t", None, b"one")])
    await link.pull(PullRequest(stream="S", consumer="c", batch=10))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in which a byte of the oldest block of ``S`` has flipped."""
    data_dir = tmp_path / "data"
    play(data_dir, fill)
    flip(data_dir, MARK)
    return data_dir


def flip(data_dir: Path, mark: bytes) -> None:
    """Flip the lowest bit of the first byte of ``mark``, which one file of the store has."""
    files = [path for path in (data_dir / "store").iterdir() if path.is_file()]
    [path] = [path for path in files if mark in path.read_bytes()]
    content = bytearray(path.read_bytes())
    content[content.index(mark)] ^= 1
    path.write_bytes(content)


async def refusal(call: Awaitable[Any]) -> ErrorSpec:
    with pytest.raises(ApiError) as caught:
        await call
    return caught.value.spec


async def publish(link: LocalLink, stream: str) -> list[int]:
    ack = await publishing.publish(link, stream, [PublishMessage(stream.lower(), None, b"more")])
    return [result.seq for result in ack.results]


async def stop_stream(node: StorageNode, link: LocalLink) -> None:
    """Publish what the rotten block would have to make room for."""
    outcomes: list[PublishOutcome] = []
    for _ in range(3):
        link.publish_then("S", [PublishMessage("s", None, b"more")], outcomes.append)
    assert await refusal(publish(link, "S")) is errors.OUTCOME_UNKNOWN
    assert [one.spec for one in outcomes if isinstance(one, ApiError)] == [
        errors.OUTCOME_UNKNOWN
    ] * 3
    shard = node.streams.shard("S")
    while shard.machine.counters.last_seq != COUNT:  # until its state is that of the store again
        await asyncio.sleep(0)
    await look_at_stopped(node, link)


async def look_at_stopped(node: StorageNode, link: LocalLink) -> None:
    """The damaged stream says so wherever it is asked for, and the other one is served."""
    assert list(node.readiness()) == ["stream S"]
    assert "cannot be read back" in node.readiness()["stream S"]
    shard_id = node.streams.shard("S").machine.shard_id
    calls = (
        publishing.publish(link, "S", [PublishMessage("s", None, b"x")]),
        link.stream_info("S"),
        link.get_message("S", 2),
        link.read_range(RangeRequest(stream="S")),
        link.pull(PullRequest(stream="S", consumer="c")),
        link.acknowledge("S", "c", [AckItem(shard_id, 1, 1, [1], "ack")], True),
        link.consumer_info("S", "c"),
        link.list_consumers("S", 10, ""),
        link.purge_stream("S", "", 0, 0),
        link.delete_consumer("S", "c"),
        link.delete_message("S", COUNT),
    )
    assert [await refusal(call) for call in calls] == [errors.DATA_LOST] * len(calls)
    before = (await link.stream_info("T")).state.last_seq
    assert await publish(link, "T") == [before + 1]
    shown = (await link.list_streams("", "", 10, "")).streams
    assert [(one.config.name, one.state.last_seq) for one in shown] == [
        ("S", COUNT),
        ("T", before + 1),
    ]
    await node.checkpoint()


def test_stream_with_a_rotten_block_stops_alone_and_the_node_starts_again(folder: Path) -> None:
    play(folder, stop_stream)
    for _ in range(2):
        play(folder, look_at_stopped)


def test_killed_node_finds_the_stream_where_it_stopped(folder: Path, tmp_path: Path) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        assert await refusal(publish(link, "S")) is errors.OUTCOME_UNKNOWN
        # The entry is in the log, and nothing of it in the store's files yet.
        await asyncio.to_thread(copy_at_one_moment, folder, tmp_path / "replayed")
        await node.checkpoint()
        await asyncio.to_thread(copy_at_one_moment, folder, tmp_path / "flushed")

    play(folder, scene)
    for left in ("replayed", "flushed"):
        play(tmp_path / left, look_at_stopped)


def test_stopped_stream_can_be_removed_and_created_again(folder: Path) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        await stop_stream(node, link)
        await link.delete_stream("S")
        assert node.readiness() == {}
        await link.put_stream(StreamConfig(name="S", subjects=("s",)), "create", None, False)
        assert await publish(link, "S") == [1]

    async def after(node: StorageNode, link: LocalLink) -> None:
        assert node.readiness() == {}
        assert (await link.stream_info("S")).state.messages == 1

    play(folder, scene)
    play(folder, after)


async def look_at_healed(node: StorageNode, link: LocalLink) -> None:
    """What does not read back is counted as lost, the rest of the stream goes on."""
    assert node.readiness() == {}
    info = await link.stream_info("S")
    assert info.data_loss is not None
    assert 0 < info.data_loss.messages < COUNT
    assert info.state.messages == COUNT - info.data_loss.messages
    assert await publish(link, "S") == [info.state.last_seq + 1]
    await link.consumer_info("S", "c")


@pytest.mark.parametrize("killed", [False, True])
def test_accepted_loss_lets_a_stopped_stream_go_on(
    folder: Path, tmp_path: Path, killed: bool
) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        await stop_stream(node, link)
        copy_at_one_moment(folder, tmp_path / "killed")

    play(folder, scene)
    left = tmp_path / "killed" if killed else folder
    play(left, look_at_healed, accept_data_loss=True)

    async def once_more(node: StorageNode, link: LocalLink) -> None:
        assert node.readiness() == {}
        assert await publish(link, "S")

    play(left, once_more)


def test_stream_whose_block_reads_back_again_continues_when_that_is_accepted(folder: Path) -> None:
    play(folder, stop_stream)
    flip(folder, bytes([MARK[0] ^ 1]) + MARK[1:])
    play(folder, look_at_stopped)

    async def healed(node: StorageNode, link: LocalLink) -> None:
        assert node.readiness() == {}
        info = await link.stream_info("S")
        assert info.state.messages == COUNT
        assert info.data_loss is not None
        assert info.data_loss.messages == 0
        assert await publish(link, "S") == [COUNT + 1]

    play(folder, healed, accept_data_loss=True)


def test_waits_for_a_stream_that_stops_end_with_an_error(folder: Path) -> None:
    async def whole() -> None:
        async with asyncio.timeout(PATIENCE_S), running(folder) as node:
            link = LocalLink(node)
            config = ConsumerConfig(name="late", durable=True, deliver_policy="new")
            await link.put_consumer("S", config, "create", None, False)
            pull = PullRequest(stream="S", consumer="late", expires_ns=50_000_000_000)
            waiting = asyncio.ensure_future(link.pull(pull))
            tail = RangeRequest(stream="S", from_seq=COUNT + 1, wait_ns=50_000_000_000)
            following = asyncio.ensure_future(link.read_range(tail))
            while not (await link.consumer_info("S", "late")).num_waiting:
                await asyncio.sleep(0)
            assert await refusal(publish(link, "S")) is errors.OUTCOME_UNKNOWN
            assert await refusal(waiting) is errors.DATA_LOST
            assert await refusal(following) is errors.DATA_LOST

    asyncio.run(whole())


def test_log_is_not_kept_for_a_stream_that_stands_still(folder: Path) -> None:
    segment_bytes = 16_384

    async def scene(node: StorageNode, link: LocalLink) -> None:
        await stop_stream(node, link)
        for _ in range(20):
            await publishing.publish(
                link, "T", [PublishMessage("t", None, bytes(segment_bytes // 2))]
            )
        assert node.log.stats.size_bytes > 5 * segment_bytes
        await node.checkpoint()
        assert node.log.stats.size_bytes <= 2 * segment_bytes

    play(folder, scene, log=LogOptions(segment_bytes, keep_bytes=0))
    play(folder, look_at_stopped)
