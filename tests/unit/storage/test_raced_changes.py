"""Changes of one thing that are asked for at once: each is decided when it is applied."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from contrail_common import errors
from contrail_common.errors import ApiError, ErrorSpec
from contrail_common.model import ConsumerConfig, PublishMessage, StreamConfig
from contrail_link.publishing import publish
from contrail_storage.core import commands as cmd
from contrail_storage.link import LocalLink
from contrail_storage.node import StorageNode
from tests.unit.storage.sharded_rig import CONFIG as SHARDED
from tests.unit.storage.sharded_rig import fill, play

ONE = StreamConfig(name="S", subjects=("a.>",))
RED = ConsumerConfig(name="red", durable=True)
WIDER = ConsumerConfig(name="red", durable=True, max_ack_pending=7)
COUNT = 100


async def outcome(work: Coroutine[Any, Any, Any]) -> ErrorSpec | None:
    """What it was refused with, None when it was done."""
    try:
        await work
    except ApiError as error:
        return error.spec if error.applied is False else errors.OUTCOME_UNKNOWN
    return None


async def put(
    link: LocalLink, config: ConsumerConfig, if_match: int | None = None, *, only: bool = False
) -> ErrorSpec | None:
    mode: Any = "create" if only else "put"
    return await outcome(link.put_consumer("S", config, mode, if_match, False))


@pytest.mark.parametrize("config", [ONE, SHARDED], ids=["one shard", "several"])
def test_update_that_meets_a_delete_skips_nothing(tmp_path: Path, config: StreamConfig) -> None:
    async def scene(_: StorageNode, link: LocalLink) -> None:
        await fill(link, COUNT)
        for guarded in (False, True):
            await put(link, RED)
            version = (await link.consumer_info("S", "red")).version if guarded else None
            # The delete is on its way when the update finds the consumer still there.
            deleted, updated = await asyncio.gather(
                outcome(link.delete_consumer("S", "red")), put(link, WIDER, version)
            )
            assert deleted is None
            if guarded:
                assert updated is errors.PRECONDITION_FAILED
                assert await outcome(link.consumer_info("S", "red")) is errors.CONSUMER_NOT_FOUND
            else:
                # A PUT makes what is not there: from the beginning, as its configuration says.
                assert updated is None
                info = await link.consumer_info("S", "red")
                assert (info.num_pending, info.config.max_ack_pending) == (COUNT, 7)
                await link.delete_consumer("S", "red")

    play(tmp_path, scene, config)


@pytest.mark.parametrize("config", [ONE, SHARDED], ids=["one shard", "several"])
def test_of_changes_to_one_version_one_wins(tmp_path: Path, config: StreamConfig) -> None:
    async def scene(_: StorageNode, link: LocalLink) -> None:
        for removes in (False, True):
            await put(link, RED)
            version = (await link.consumer_info("S", "red")).version
            narrower = ConsumerConfig(name="red", durable=True, max_ack_pending=3)
            rival = link.delete_consumer("S", "red", version)
            changes = [put(link, WIDER, version), put(link, narrower, version)]
            found = await asyncio.gather(*([outcome(rival)] if removes else []), *changes)
            if not removes:
                rival.close()
            assert sorted(map(repr, found)) == sorted(
                map(repr, [None, *[errors.PRECONDITION_FAILED] * (len(found) - 1)])
            )

    play(tmp_path, scene, config)


@pytest.mark.parametrize("config", [ONE, SHARDED], ids=["one shard", "several"])
def test_of_different_creations_one_wins_and_equal_ones_are_one(
    tmp_path: Path, config: StreamConfig
) -> None:
    async def scene(_: StorageNode, link: LocalLink) -> None:
        found = await asyncio.gather(
            put(link, RED, only=True), put(link, WIDER, only=True), put(link, RED, only=True)
        )
        assert found.count(None) in (1, 2)
        assert found.count(errors.CONSUMER_EXISTS) == 3 - found.count(None)
        assert len((await link.list_consumers("S", 10, "")).consumers) == 1

    play(tmp_path, scene, config)


def test_stream_that_is_changed_while_it_is_removed_stays_removed(tmp_path: Path) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        shard = node.streams.shard("S").machine
        assert shard.record is not None
        record, shard_id = shard.record, shard.shard_id
        larger = StreamConfig(name="S", subjects=("a.>",), max_msgs=7)
        late = cmd.ConfigureStream(
            larger, record.incarnation, record.hash_key, given=cmd.Precondition(update=True)
        )
        drop = asyncio.ensure_future(link.delete_stream("S", record.version))
        while "S" in {one.name for one in node.streams.listed()}:
            await asyncio.sleep(0)
        # From the moment on at which its shard has decided, nobody finds it.
        assert await outcome(link.stream_info("S")) is errors.STREAM_NOT_FOUND
        assert not (await link.list_streams("", "", 10, "")).streams
        await node.shard_log.command(shard_id, late)
        await drop
        assert shard_id not in node.applier.shards
        assert not node.meta.streams
        await link.put_stream(larger, "create", None, False)

    play(tmp_path, scene, ONE)


@pytest.mark.parametrize("storage", ["file", "memory"])
@pytest.mark.parametrize("config", [ONE, SHARDED], ids=["one shard", "several"])
def test_caller_during_a_removal_does_not_find_the_stream(
    tmp_path: Path, config: StreamConfig, storage: Any
) -> None:
    stored = msgspec.structs.replace(config, storage=storage)

    async def scene(_: StorageNode, link: LocalLink) -> None:
        await put(link, RED)
        removal = asyncio.ensure_future(link.delete_stream("S", None))
        work: list[asyncio.Task[ErrorSpec | None]] = []
        while not removal.done():
            names = (f"c{len(work)}", "red")
            wanted = [ConsumerConfig(name=name, durable=True, max_ack_pending=9) for name in names]
            for one in (*(put(link, one) for one in wanted), outcome(link.stream_info("S"))):
                work.append(asyncio.ensure_future(one))
            for look in (link.consumer_info("S", "red"), link.list_consumers("S", 10, "")):
                work.append(asyncio.ensure_future(outcome(look)))
            await asyncio.sleep(0)
        await removal
        met = set(await asyncio.gather(*work))
        assert errors.STREAM_NOT_FOUND in met
        # Of several shards some may have the consumer already.
        assert met <= {None, errors.STREAM_NOT_FOUND, errors.OUTCOME_UNKNOWN}

    play(tmp_path, scene, stored)


def test_stream_is_removed_at_the_version_that_was_named_alone(tmp_path: Path) -> None:
    async def scene(_: StorageNode, link: LocalLink) -> None:
        await publish(link, "S", [PublishMessage("a.1", None, b"x")])
        version = (await link.stream_info("S")).version
        larger = StreamConfig(name="S", subjects=("a.>",), max_msgs=7)
        changed, deleted = await asyncio.gather(
            outcome(link.put_stream(larger, "put", version, False)),
            outcome(link.delete_stream("S", version)),
        )
        assert (changed, deleted) == (None, errors.PRECONDITION_FAILED)
        assert (await link.stream_info("S")).state.messages == 1
        stale = outcome(link.delete_stream("S", version))
        assert await stale is errors.PRECONDITION_FAILED
        assert await outcome(link.delete_stream("S", version + 1)) is None

    play(tmp_path, scene, ONE)


def test_removal_cut_short_after_the_decision_is_finished_by_a_restart(tmp_path: Path) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        await fill(link, 3)
        record = node.streams.shard("S").machine.record
        assert record is not None
        drop = cmd.DropStream(record.incarnation, record.version)
        await node.shard_log.command(node.streams.shard("S").machine.shard_id, drop)

    async def look(node: StorageNode, link: LocalLink) -> None:
        assert not node.meta.streams
        await link.put_stream(ONE, "create", None, False)
        assert (await link.stream_info("S")).state.last_seq == 0

    play(tmp_path, scene, ONE)
    play(tmp_path, look, None)


def test_refused_change_of_subjects_lets_go_of_what_it_claimed(tmp_path: Path) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        shard = node.streams.shard("S").machine
        assert shard.record is not None
        version = shard.record.version
        wider = StreamConfig(name="S", subjects=("a.>", "b"))
        between = cmd.ConfigureStream(
            StreamConfig(name="S", subjects=("a.>",), max_msgs=7),
            shard.record.incarnation,
            shard.record.hash_key,
        )
        changing = asyncio.ensure_future(outcome(link.put_stream(wider, "put", version, False)))
        while node.meta.streams["S"].subjects != wider.subjects:
            await asyncio.sleep(0)
        # The subjects are claimed, the shard is not asked yet: another change comes first.
        between_done = node.shard_log.command(shard.shard_id, between)
        assert await changing is errors.PRECONDITION_FAILED
        await between_done
        assert node.meta.streams["S"].subjects == ("a.>",)
        await link.put_stream(StreamConfig(name="B", subjects=("b",)), "create", None, False)

    play(tmp_path, scene, ONE)


def test_consumer_that_was_changed_is_not_removed_as_idle_by_what_it_was(tmp_path: Path) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        brief = ConsumerConfig(name="red", durable=False, inactive_threshold_ns=1)
        await put(link, brief)
        machine = node.streams.shard("S").machine
        # The change is on its way when the consumer is found idle.
        longer = ConsumerConfig(name="red", durable=False, inactive_threshold_ns=3_600_000_000_000)
        changing = asyncio.ensure_future(put(link, longer))
        await asyncio.sleep(0)
        await node.consumers.drop_inactive()
        assert await changing is None
        consumer = machine.consumer("red")
        assert consumer is not None
        assert consumer.config == longer

    play(tmp_path, scene, ONE)


def test_purge_of_a_stream_that_was_created_again_meanwhile_leaves_the_new_one_alone(
    tmp_path: Path,
) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        await fill(link, 3)
        old = node.streams.stream("S").shards
        await link.delete_stream("S")
        await link.put_stream(ONE, "create", None, False)
        await fill(link, 3)
        # As an erasure does, which has destroyed keys between finding the stream and this.
        for subject in ("", "a.1"):
            assert (
                await outcome(node.streams.removals.purge(old, subject, 0, 0))
                is errors.STREAM_NOT_FOUND
            )
        assert (await link.stream_info("S")).state.messages == 3

    play(tmp_path, scene, ONE)
