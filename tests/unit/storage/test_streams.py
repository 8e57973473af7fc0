"""The runtime object of a stream: the same while the stream lives, and never out of date."""

import asyncio
import threading
from collections.abc import Awaitable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from contrail_common import errors
from contrail_common.errors import ApiError, ErrorSpec
from contrail_common.model import PublishMessage, StreamConfig
from contrail_link.contract.publish import PublishAck, PublishOutcome
from contrail_storage.link import LocalLink
from contrail_storage.node import StorageNode
from contrail_storage.streams.manager import StreamManager
from contrail_storage.streams.stream import Stream
from tests.crash.lives import wait_until
from tests.support.calls import calls_of
from tests.unit.storage.test_memory_streams import running

_T = TypeVar("_T")
FIRST = StreamConfig(name="S", subjects=("s.*",))


async def put(link: LocalLink, config: StreamConfig) -> None:
    await link.put_stream(config, "put", None, False)


async def refusal(call: Awaitable[Any]) -> ErrorSpec:
    with pytest.raises(ApiError) as caught:
        await call
    return caught.value.spec


async def published(link: LocalLink, subject: str, stream: str = "") -> PublishAck:
    outcome: asyncio.Future[PublishOutcome] = asyncio.get_running_loop().create_future()
    link.publish_then(stream, [PublishMessage(subject, None, b"x")], outcome.set_result)
    ack = await outcome
    assert isinstance(ack, PublishAck)
    return ack


def test_object_stays_while_the_stream_lives_and_another_takes_its_place(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as (node, link):
            await put(link, FIRST)
            stream = node.streams.stream("S")
            await put(link, StreamConfig(name="T", subjects=("t",)))
            await put(link, StreamConfig(name="S", subjects=("s.*", "more")))
            assert node.streams.stream("S") is node.streams.route("more") is stream
            assert stream.config.subjects == stream.entry.subjects == ("s.*", "more")
            assert node.streams.listed() == [stream, node.streams.stream("T")]

            await link.delete_stream("S")
            assert not stream.exists
            assert await refusal(link.stream_info("S")) is errors.STREAM_NOT_FOUND
            assert await refusal(link.stream_for_subject("s.a")) is errors.NO_STREAM_FOR_SUBJECT
            await put(link, FIRST)
            assert node.streams.stream("S") is not stream
            await link.delete_stream("S")
            await put(link, StreamConfig(name="U", subjects=("s.*",)))
            assert (await published(link, "s.a")).stream == "U"

    asyncio.run(scene())


def test_route_of_a_subject_is_kept_while_its_own_stream_stays_as_it_is(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as (node, link):
            await put(link, FIRST)
            first = calls_of(lambda: node.streams.route("s.a"))
            known = calls_of(lambda: node.streams.route("s.a"))
            assert known < first
            await put(link, StreamConfig(name="T", subjects=("t.*",)))
            await link.delete_stream("T")
            assert calls_of(lambda: node.streams.route("s.a")) == known
            await put(link, StreamConfig(name="S", subjects=("s.b",)))
            assert await refusal(link.stream_for_subject("s.a")) is errors.NO_STREAM_FOR_SUBJECT
            await put(link, StreamConfig(name="U", subjects=("s.a",)))
            assert node.streams.route("s.a").name == "U"

    asyncio.run(scene())


def test_streams_are_listed_and_measured_between_other_requests(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as (_, link):
            numbers = [*range(0, 200, 2), *range(1, 200, 2)]
            for number in numbers:
                subjects = (f"s.{number}.>", f"t.{number % 10}.{number}")
                name = f"{'ab'[number % 2]}{number:03}"
                await put(link, StreamConfig(name=name, subjects=subjects, storage="memory"))
            await link.delete_stream("a004")

            async def listed(subject: str, prefix: str, limit: int) -> list[str]:
                names, token = [], ""
                while True:
                    page = await link.list_streams(subject, prefix, limit, token)
                    names += [info.config.name for info in page.streams]
                    assert len(page.streams) == limit or not page.next_token
                    if not (token := page.next_token):
                        return names

            evens = [f"a{number:03}" for number in range(0, 200, 2) if number != 4]
            odds = [f"b{number:03}" for number in range(1, 200, 2)]
            assert await listed("", "", 33) == evens + odds
            assert await listed("", "a", 99) == evens
            assert await listed("", "b1", 100) == odds[50:]
            assert await listed("t.4.*", "", 3) == evens[6::5][:19]
            assert await listed("", "c", 1) == []

            page, turns = await with_turns(link.list_streams("s.199.x", "", 1, ""))
            assert [info.config.name for info in page.streams] == ["b199"]
            assert turns >= 3
            text, turns = await with_turns(link.metrics_text())
            assert "contrail_streams 199.0" in text
            assert text.count("contrail_stream_last_seq{") == 199
            assert turns >= 3

    asyncio.run(scene())


def test_first_messages_of_streams_are_read_in_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their times are in blocks, which are not in memory after a start."""
    reading: list[int] = []

    async def fill() -> None:
        async with running(tmp_path) as (_, link):
            for number in range(3):
                await put(link, StreamConfig(name=f"S{number}", subjects=(f"s.{number}",)))
                await published(link, f"s.{number}")

    async def scene() -> None:
        async with running(tmp_path) as (node, link):
            read = node.blocks.source.get_once

            def noted(wanted: Sequence[bytes]) -> Any:
                reading.append(threading.get_ident())
                return read(wanted)

            monkeypatch.setattr(node.blocks.source, "get_once", noted)
            assert (await link.stream_info("S0")).state.first_ts_ns
            page = await link.list_streams("", "", 10, "")
            assert all(info.state.first_ts_ns for info in page.streams)

    asyncio.run(fill())
    asyncio.run(scene())
    assert len(reading) == 3
    assert threading.get_ident() not in reading


async def with_turns(call: Coroutine[Any, Any, _T]) -> tuple[_T, int]:
    """The result of ``call``, and how often it let others run."""
    turns, running = 0, asyncio.ensure_future(call)
    while not running.done():
        await asyncio.sleep(0)
        turns += 1
    return running.result(), turns


def test_removal_that_stopped_half_way_hides_the_stream_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stopped(*_: Any) -> None:
        raise ApiError(errors.OUTCOME_UNKNOWN)

    async def scene() -> None:
        async with running(tmp_path) as (node, link):
            await put(link, FIRST)
            assert node.streams.route("s.a").name == "S"  # in the cache of routes from now on
            monkeypatch.setattr(StreamManager, "_drop", stopped)
            assert await refusal(link.delete_stream("S")) is errors.OUTCOME_UNKNOWN
            assert node.meta.streams["S"].stage == "listed"
            assert await refusal(link.stream_info("S")) is errors.STREAM_NOT_FOUND
            assert await refusal(link.stream_for_subject("s.a")) is errors.NO_STREAM_FOR_SUBJECT
            assert node.streams.listed() == []
            monkeypatch.undo()
            await put(link, FIRST)
            assert (await published(link, "s.a")).results[0].seq == 1

    asyncio.run(scene())


@pytest.mark.parametrize("shards", [1, 3])
def test_store_that_is_opened_again_changes_the_machines_below_the_object(
    tmp_path: Path, shards: int
) -> None:
    async def scene() -> None:
        async with running(tmp_path) as (node, link):
            await put(link, StreamConfig(name="S", subjects=("s.*",), shards=shards))
            stream = node.streams.stream("S")
            before = await published(link, "s.a")
            machines = [shard.machine for shard in stream.shards]
            node._store_failed(OSError("No space left on device"))
            assert await refusal(link.purge_stream("S", "", 0, 0)) is errors.STORAGE_FULL
            await wait_until(lambda: node.healing.reopened == 1 and not node.failure)
            await wait_until(lambda: all(group.is_leader for group in node.groups.values()))
            assert node.streams.stream("S") is stream
            assert all(
                shard.machine is not old for shard, old in zip(stream.shards, machines, strict=True)
            )
            after = await published(link, "s.a")
            assert after.results[0].seq == before.results[0].seq + 1
            assert stream.info().state.messages == 2

    asyncio.run(scene())


def test_damage_is_seen_as_soon_as_it_is_found(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as (node, link):
            await put(link, StreamConfig(name="S", subjects=("s.*",), shards=2))
            stream = node.streams.stream("S")
            assert stream.sound_shards() == stream.shards
            stream.shards[1].damaged = "block 1: rot"
            assert await refusal(link.stream_info("S")) is errors.DATA_LOST
            assert stream.sound_shard(0) is stream.shard(0)
            with pytest.raises(ApiError, match="rot"):
                stream.sound_shard(1)
            with pytest.raises(ApiError, match="shards 0 to 1"):
                stream.shard(2)
            with pytest.raises(ApiError, match="give one"):
                stream.shard()
            assert stream.info(damaged=True).config.name == "S"

    asyncio.run(scene())


def test_stream_in_memory_is_there_again_once_all_its_shards_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = StreamConfig(name="M", subjects=("m.*",), storage="memory", shards=3)
    propagate, seen = StreamManager._propagate, list[ErrorSpec]()

    async def looking(self: StreamManager, entry: Any) -> None:
        link = LocalLink(nodes[0])
        seen.append(await refusal(link.stream_info("M")))
        seen.append(await refusal(link.stream_for_subject("m.a")))
        await propagate(self, entry)

    nodes: list[StorageNode] = []
    made: list[Stream] = []

    async def scene() -> None:
        async with running(tmp_path) as (node, link):
            await put(link, config)
            made.append(node.streams.stream("M"))
        monkeypatch.setattr(StreamManager, "_propagate", looking)
        start = StorageNode.start

        async def started(node: StorageNode) -> None:
            nodes.append(node)
            await start(node)

        monkeypatch.setattr(StorageNode, "start", started)
        async with running(tmp_path) as (node, link):
            assert seen == [errors.NOT_READY] * 2
            assert (await link.stream_info("M")).incarnation != made[0].entry.incarnation
            assert (await published(link, "m.a")).durability == "memory"

    asyncio.run(scene())
