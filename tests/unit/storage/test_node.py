"""A whole node in this process, where it must stop: replays cut short, entries it cannot apply."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import ConsumerConfig, PublishMessage, StreamConfig
from contrail_link import publishing
from contrail_link.contract.consume import AckItem, PullRequest
from contrail_link.contract.publish import PublishOutcome
from contrail_link.contract.read import ReplayRequest
from contrail_replicator.group import RaftGroup
from contrail_serve.groups import SingleMemberGroups
from contrail_storage.core.commands import ConfigureStream
from contrail_storage.core.key_layout import SHARD_GROUP
from contrail_storage.core.results import Result
from contrail_storage.core.stream.stream_machine import StreamMachine
from contrail_storage.link import LocalLink
from contrail_storage.node import NodeOptions, StorageNode
from contrail_storage.replica import log_time
from tests.support.folders import copy_at_one_moment

PATIENCE_S = 60.0
PAYLOAD = b"x" * 1_000
Scene = Callable[[StorageNode, LocalLink], Coroutine[Any, Any, None]]


@contextlib.asynccontextmanager
async def running(data_dir: Path) -> AsyncIterator[StorageNode]:
    """A node with stream ``S`` on ``a``."""
    node = StorageNode.open(NodeOptions(data_dir), SingleMemberGroups())
    await node.start()
    try:
        yield node
    finally:
        await node.stop()


def play(data_dir: Path, scene: Scene) -> None:
    """Run ``scene`` on a node with a stream ``S``."""

    async def whole() -> None:
        async with asyncio.timeout(PATIENCE_S), running(data_dir) as node:
            link = LocalLink(node)
            await link.put_stream(StreamConfig(name="S", subjects=("a",)), "create", None, False)
            await scene(node, link)

    asyncio.run(whole())


async def publish(link: LocalLink, count: int) -> None:
    ack = await publishing.publish(
        link, "S", [PublishMessage("a", None, PAYLOAD) for _ in range(count)]
    )
    assert [result.code for result in ack.results] == [0] * count


def test_request_of_many_entries_is_stored_whole(tmp_path: Path) -> None:
    async def scene(_: StorageNode, link: LocalLink) -> None:
        await publish(link, 16_000)  # twice what a Raft group takes at once
        assert (await link.stream_info("S")).state.messages == 16_000

    play(tmp_path, scene)


@pytest.mark.parametrize("form", ["arrow", "ndjson", "msgpack"])
def test_replay_overtaken_by_a_purge_is_cut_and_then_refused(tmp_path: Path, form: Any) -> None:
    async def scene(_: StorageNode, link: LocalLink) -> None:
        await publish(link, 10_000)  # three pieces of a replay
        asked = ReplayRequest(stream="S", format=form, from_seq=1, to_seq=10_000)
        chunks = await link.replay(asked)
        assert await anext(chunks)
        await link.purge_stream("S", "", 10_000, 0)
        with pytest.raises(ApiError) as cut:
            async for _ in chunks:
                pass
        assert cut.value.spec is errors.REPLAY_GONE
        with pytest.raises(ApiError) as refused:
            await link.replay(asked)
        assert refused.value.spec is errors.REPLAY_GONE

    play(tmp_path, scene)


def test_entry_that_cannot_be_applied_ends_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        await publish(link, 1)

        def broken(*_: object) -> None:
            raise ZeroDivisionError("a fault of the machine")

        monkeypatch.setattr(StreamMachine, "apply", broken)
        waiting = asyncio.ensure_future(publish(link, 1))
        reason = await node.fatal
        assert "a fault of the machine" in reason
        # Nobody is told that it was stored, nothing more is taken, and the probe says why.
        with pytest.raises(ApiError) as unknown:
            await waiting
        assert unknown.value.spec is errors.OUTCOME_UNKNOWN
        with pytest.raises(ApiError) as refused:
            await publish(link, 1)
        assert refused.value.spec is errors.STORAGE_FAILED
        assert "a fault of the machine" in str(link.readiness())
        monkeypatch.undo()

    play(tmp_path, scene)

    async def after() -> None:
        # The entry is in the log: a sound version of the machine applies it at the next start.
        async with asyncio.timeout(PATIENCE_S), running(tmp_path) as node:
            info = await LocalLink(node).stream_info("S")
            assert info.state.messages == 2

    asyncio.run(after())


def test_entries_after_one_that_cannot_be_applied_wait_for_the_next_start_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        apply, faults = StreamMachine.apply, iter([ZeroDivisionError("a passing fault")])

        def broken(*arguments: Any) -> Result:
            for fault in faults:
                raise fault
            return apply(*arguments)

        monkeypatch.setattr(StreamMachine, "apply", broken)
        outcomes: list[PublishOutcome] = []
        for _ in range(1_000):
            link.publish_then("S", [PublishMessage("a", None, PAYLOAD)], outcomes.append)
        await node.fatal
        while len(outcomes) < 1_000:
            await asyncio.sleep(0)
        assert all(isinstance(outcome, ApiError) for outcome in outcomes)
        assert (await link.stream_info("S")).state.messages == 0

    play(tmp_path, scene)

    async def after() -> None:
        async with asyncio.timeout(PATIENCE_S), running(tmp_path) as node:
            messages = (await LocalLink(node).stream_info("S")).state.messages
            assert 250 <= messages <= 1_000  # all that was in the log, from the first entry on

    asyncio.run(after())


def test_delivery_whose_command_outlives_its_term_comes_again_when_it_is_due(
    tmp_path: Path,
) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        config = ConsumerConfig(name="red", durable=True, ack_wait_ns=50_000_000)
        await link.put_consumer("S", config, "create", None, False)
        await publish(link, 1)
        pull = PullRequest(stream="S", consumer="red", expires_ns=10_000_000_000)
        assert [one.num_delivered for one in (await link.pull(pull)).deliveries] == [1]
        group = node.groups[SHARD_GROUP]
        assert isinstance(group, RaftGroup)
        last_index = group.last_index
        recorded = asyncio.ensure_future(link.consumer_info("S", "red"))
        while group.last_index == last_index:
            await asyncio.sleep(0)
        group.resign()
        group.start()
        await recorded
        while node.readiness():
            await asyncio.sleep(0)
        assert [one.num_delivered for one in (await link.pull(pull)).deliveries] == [2]

    play(tmp_path, scene)


def test_what_nobody_waits_for_is_stored_and_recorded_before_a_clean_stop(tmp_path: Path) -> None:
    outcomes: list[PublishOutcome] = []

    async def scene(_: StorageNode, link: LocalLink) -> None:
        config = ConsumerConfig(name="red", durable=True)
        await link.put_consumer("S", config, "create", None, False)
        await publish(link, 2)
        pulled = await link.pull(PullRequest(stream="S", consumer="red", batch=2))
        address = (pulled.shard_id, pulled.consumer_id, pulled.epoch)
        await link.acknowledge("S", "red", [AckItem(*address, [1], "ack")], False)
        for _ in range(3_000):  # more than two entries, which may be on their way at once
            link.publish_then("S", [PublishMessage("a", None, PAYLOAD)], outcomes.append)

    async def after() -> None:
        async with asyncio.timeout(PATIENCE_S), running(tmp_path) as node:
            link = LocalLink(node)
            assert (await link.stream_info("S")).state.messages == 3_002
            info = await link.consumer_info("S", "red")
            assert (info.delivered.stream_seq, info.num_ack_pending) == (2, 1)

    play(tmp_path, scene)
    assert len(outcomes) == 3_000
    assert not any(isinstance(outcome, ApiError) for outcome in outcomes)
    asyncio.run(after())


def test_log_time_continues_after_replayed_entries_when_the_wall_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(_: StorageNode, link: LocalLink) -> None:
        await publish(link, 1)
        # What a crash leaves: the message is in the log alone.
        copy_at_one_moment(tmp_path / "early", tmp_path / "left")

    async def look() -> None:
        async with asyncio.timeout(PATIENCE_S), running(tmp_path / "left") as node:
            stored = await LocalLink(node).get_message("S", 1)
            assert node.clock.now() >= stored.time_ns > time.time_ns()

    ahead = SimpleNamespace(
        **{name: getattr(time, name) for name in dir(time) if not name.startswith("_")}
    )
    ahead.time_ns = lambda: time.time_ns() + 3_600_000_000_000
    with monkeypatch.context() as patch:
        patch.setattr(log_time, "time", ahead)
        play(tmp_path / "early", scene)
    asyncio.run(look())


@pytest.mark.parametrize("asked_again", [False, True])
def test_limits_whose_enforcement_was_lost_with_a_crash_are_kept_all_the_same(
    tmp_path: Path, asked_again: bool
) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        await publish(link, 5)
        shard = node.streams.shard("S")
        record = shard.machine.record
        assert record is not None
        lowered = StreamConfig(name="S", subjects=("a",), max_msgs=2)
        change = ConfigureStream(lowered, record.incarnation, record.hash_key)
        await node.shard_log.command(shard.machine.shard_id, change)
        if asked_again:
            await link.put_stream(lowered, "put", None, False)
            assert (await link.stream_info("S")).state.messages == 2
        while (await link.stream_info("S")).state.messages > 2:
            await asyncio.sleep(0)

    play(tmp_path, scene)
