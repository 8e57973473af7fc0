"""Streams in memory on a whole node: nothing in files, nothing left by a restart, bounded."""

import asyncio
import contextlib
import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import ConsumerConfig, PublishMessage, StreamConfig, StreamInfo
from contrail_link.contract.consume import AckItem, PullRequest
from contrail_link.contract.read import ReplayPlanRequest, ReplayRequest
from contrail_link.publishing import publish
from contrail_serve.groups import SingleMemberGroups
from contrail_storage.core import commands as cmd
from contrail_storage.link import LocalLink
from contrail_storage.node import NodeOptions, StorageNode
from tests.crash.disk import CountedFiles, Failure, Plan, Switch
from tests.crash.lives import wait_until
from tests.crash.pipe import Reporter
from tests.support.folders import files_with, size_of

PATIENCE_S = 60.0
SECRET = b"found-in-no-file"
MEMORY = StreamConfig(name="M", subjects=("m.*",), storage="memory", first_seq=5)


@contextlib.asynccontextmanager
async def running(data_dir: Path, **options: Any) -> AsyncIterator[tuple[StorageNode, LocalLink]]:
    """A node over ``data_dir``."""
    node = StorageNode.open(NodeOptions(data_dir, **options), SingleMemberGroups())
    await node.start()
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield node, LocalLink(node)
    finally:
        await node.stop()


def message(payload: bytes = b"x", subject: str = "m.a", **fields: Any) -> PublishMessage:
    return PublishMessage(subject, None, payload, **fields)


async def create(link: LocalLink, config: StreamConfig = MEMORY) -> StreamInfo:
    info, _ = await link.put_stream(config, "put", None, False)
    return info


async def refusal(call: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await call
    return caught.value


def test_stream_in_memory_acknowledges_as_memory_and_no_file_grows(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as (node, link):
            info = await create(link)
            assert (info.durability, info.config.storage) == ("memory", "memory")
            await node.checkpoint()
            before = size_of(tmp_path)
            for _ in range(50):
                ack = await publish(link, "M", [message(SECRET * 100) for _ in range(100)])
                assert ack.durability == "memory"
            await link.put_consumer("M", ConsumerConfig(name="c", durable=True), "put", None, False)
            pulled = await link.pull(PullRequest(stream="M", consumer="c", batch=10, no_wait=True))
            assert len(pulled.deliveries) == 10
            await node.until_written()
            assert (await link.get_message("M", 5_004)).payload == SECRET * 100
            # The log may note by itself that its groups lead; the messages are 8 MB.
            assert size_of(tmp_path) - before < 1_000
            await node.checkpoint()
        assert files_with(tmp_path, [SECRET]) == {}

    asyncio.run(scene())


def test_restart_keeps_the_stream_empty_with_another_identity(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as (_, link):
            await link.put_stream(
                StreamConfig(name="F", subjects=("f",)), "put", None, False
            )  # the other shards are not touched by any of this
            await publish(link, "F", [message(subject="f")])
            before = await create(link)
            await publish(link, "M", [message(msg_id="1"), message()])
            await link.put_consumer("M", ConsumerConfig(name="c", durable=True), "put", None, False)
            pulled = await link.pull(PullRequest(stream="M", consumer="c", no_wait=True))
            plan = await link.replay_plan(ReplayPlanRequest(stream="M"))
        async with running(tmp_path) as (_, link):
            after = await link.stream_info("M")
            assert after.config == before.config
            assert (after.state.messages, after.state.first_seq, after.state.last_seq) == (0, 5, 4)
            assert (await link.list_consumers("M", 10, "")).consumers == []
            assert after.incarnation != before.incarnation
            assert after.version != before.version
            hit = link.put_stream(MEMORY, "put", before.version, False)
            assert (await refusal(hit)).spec is errors.PRECONDITION_FAILED
            asked = ReplayRequest(stream="M", incarnation=plan.incarnation)
            assert (await refusal(link.replay(asked))).spec is errors.INCARNATION_CHANGED
            await link.put_consumer("M", ConsumerConfig(name="c", durable=True), "put", None, False)
            token = AckItem(pulled.shard_id, pulled.consumer_id, pulled.epoch, [5], "ack")
            (result,) = await link.acknowledge("M", "c", [token], True)
            assert result.code == errors.TOKEN_STALE.code
            ack = await publish(link, "M", [message(msg_id="1")])
            assert [(one.seq, one.duplicate) for one in ack.results] == [(5, False)]
            assert (await link.stream_info("F")).state.messages == 1

    asyncio.run(scene())


def test_changed_configuration_survives_a_restart(tmp_path: Path) -> None:
    async def scene() -> None:
        changed = StreamConfig(
            name="M", subjects=("n.*",), storage="memory", first_seq=5, max_msgs=3
        )
        async with running(tmp_path) as (_, link):
            await create(link)
            await create(link, changed)
        for _ in range(2):
            async with running(tmp_path) as (_, link):
                assert (await link.stream_info("M")).config == changed
                assert await link.stream_for_subject("n.a") == "M"
                assert (await refusal(link.stream_for_subject("m.a"))).applied is False
        async with running(tmp_path) as (_, link):
            await link.delete_stream("M")
        async with running(tmp_path) as (_, link):
            assert (await refusal(link.stream_info("M"))).spec is errors.STREAM_NOT_FOUND

    asyncio.run(scene())


@pytest.mark.parametrize("step", ["reserved", "unlisted"])
def test_half_made_or_half_removed_stream_is_gone_after_a_restart(
    tmp_path: Path, step: str
) -> None:
    async def scene() -> None:
        async with running(tmp_path) as (node, link):
            if step == "unlisted":
                await create(link)
                command: cmd.MetaCommand = cmd.UnlistStream("M")
            else:
                command = cmd.ReserveStream("M", MEMORY.subjects, "i", in_memory=True)
            await node.meta_log.command(command)
        async with running(tmp_path) as (node, link):
            assert node.meta.streams == {}
            await create(link)

    asyncio.run(scene())


def test_half_made_change_of_subjects_is_undone_by_a_restart(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as (node, link):
            await create(link)
            claim = cmd.ListStream("M", ("m.*", "n.*"), MEMORY)
            await node.meta_log.command(claim)
        async with running(tmp_path) as (node, link):
            assert node.meta.streams["M"].subjects == MEMORY.subjects
            assert (await link.stream_info("M")).config == MEMORY

    asyncio.run(scene())


def test_many_streams_are_created_again_together(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as (_, link):
            for number in range(300):
                name = f"S{number}"
                config = StreamConfig(name=name, subjects=(name,), storage="memory")
                await create(link, config)
        async with running(tmp_path) as (node, link):
            assert len(node.streams.listed()) == 300
            assert node.log.stats.batches_written < 30
            assert (await publish(link, "S299", [message(subject="S299")])).results[0].seq == 1

    asyncio.run(scene())


def test_storage_of_a_stream_cannot_be_changed(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as (_, link):
            await create(link)
            filed = StreamConfig(name="M", subjects=("m.*",), first_seq=5)
            assert (await refusal(create(link, filed))).spec is errors.STREAM_UPDATE_REFUSED

    asyncio.run(scene())


def test_publish_beyond_the_bound_is_refused_and_room_comes_back(tmp_path: Path) -> None:
    bound = 1 << 20

    async def scene() -> None:
        async with running(tmp_path, memory_max_bytes=bound) as (node, link):
            await create(link)
            payload = b"x" * 10_000
            stored = 0
            while True:
                try:
                    await publish(link, "M", [message(payload)])
                except ApiError as error:
                    full = error
                    break
                stored += 1
                await node.until_written()
                assert node.memory.size_bytes <= bound
            assert (full.spec, full.applied) == (errors.MEMORY_FULL, False)
            assert stored > 90  # of 104 that would fit without any overhead
            room = bound - node.memory.size_bytes
            assert room < len(payload) + 500
            assert (await link.get_message("M", 5)).payload == payload
            assert (await link.stream_info("M")).state.messages == stored
            await publish(link, "M", [message(b"x" * 16)])  # there is room for a small one
            assert await link.purge_stream("M", "", 0, 0) == stored + 1
            await node.until_written()
            await publish(link, "M", [message(payload)])

    asyncio.run(scene())


def test_requests_that_wait_together_do_not_pass_the_bound(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path, memory_max_bytes=100_000) as (_, link):
            await create(link)
            calls = [publish(link, "M", [message(b"x" * 10_000)]) for _ in range(20)]
            found = await asyncio.gather(*calls, return_exceptions=True)
            refused = [one for one in found if isinstance(one, ApiError)]
            assert len(refused) == 11
            assert (await link.stream_info("M")).state.messages == 9

    asyncio.run(scene())


def test_streams_in_memory_go_on_while_the_log_fails(tmp_path: Path) -> None:
    async def scene() -> None:
        reporter = Reporter(os.open(os.devnull, os.O_WRONLY))
        switch = Switch(Plan(), reporter)
        files = CountedFiles(switch, tmp_path, reporter)
        async with running(tmp_path, files=files) as (node, link):
            aging = StreamConfig(name="F", subjects=("f",), max_age_ns=10**8)
            await link.put_stream(aging, "put", None, False)
            await publish(link, "F", [message(subject="f")])
            config = StreamConfig(name="M", subjects=("m.*",), storage="memory", max_age_ns=10**8)
            await create(link, config)
            consumer = ConsumerConfig(name="c", durable=True)
            await link.put_consumer("M", consumer, "put", None, False)
            switch.plan = Plan(failures=(Failure("log", "write", 1, errno.ENOSPC, 1_000_000),))
            lost = await refusal(publish(link, "F", [message(subject="f")]))
            assert lost.spec is errors.OUTCOME_UNKNOWN
            full = await refusal(publish(link, "F", [message(subject="f")]))
            assert (full.spec, full.applied) == (errors.STORAGE_FULL, False)
            assert "streams in memory are served" in node.readiness()["storage"]
            assert (await publish(link, "M", [message()])).results[0].seq == 1
            pulled = await link.pull(PullRequest(stream="M", consumer="c", no_wait=True))
            token = AckItem(pulled.shard_id, pulled.consumer_id, pulled.epoch, [1], "ack")
            assert (await link.acknowledge("M", "c", [token], True))[0].code == 0
            await wait_until(
                lambda: node.applier.shards[pulled.shard_id].machine.counters.messages == 0
            )
            switch.plan = Plan()
            await wait_until(lambda: not node.readiness())
            assert (await link.stream_info("M")).state.last_seq == 1

    asyncio.run(scene())


def test_archive_of_a_stream_in_memory_restores_as_one(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as (node, link):
            await create(link)
            await publish(link, "M", [message(b"%d" % number) for number in range(500)])
            archive = b"".join([chunk async for chunk in await link.snapshot("M", True)])
            await link.delete_stream("M")
            token = await link.begin_restore("R")
            await link.append_restore(token, 0, archive)
            info = await link.commit_restore(token)
            assert (info.config.storage, info.durability) == ("memory", "memory")
            assert (await link.get_message("R", 504)).payload == b"499"
            assert node.log.stats.bytes_written < len(archive)
        async with running(tmp_path) as (_, link):
            assert (await link.stream_info("R")).state.messages == 0

    asyncio.run(scene())


def test_restore_beyond_the_bound_leaves_nothing(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path / "a") as (_, link):
            await create(link)
            await publish(link, "M", [message(b"x" * 100_000) for _ in range(10)])
            archive = b"".join([chunk async for chunk in await link.snapshot("M", True)])
        async with running(tmp_path / "b", memory_max_bytes=300_000) as (node, link):
            token = await link.begin_restore("R")
            refused = await refusal(link.append_restore(token, 0, archive))
            assert (refused.spec, refused.applied) == (errors.MEMORY_FULL, False)
            assert (await refusal(link.stream_info("R"))).spec is errors.STREAM_NOT_FOUND
            await node.until_written()
            assert node.memory.size_bytes < 1_000

    asyncio.run(scene())


def test_erasure_in_memory_is_done_without_a_new_log(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as (node, link):
            await create(link)
            await publish(link, "M", [message(SECRET), message()])
            segment = node.log.first_segment
            receipt = await link.erase("M", [5], "")
            done = await link.erasure(receipt.erasure_id, 10 * 10**9)
            assert (done.status, done.messages) == ("done", 1)
            assert node.log.first_segment == segment
            shard = node.streams.shard("M")
            assert SECRET not in b"".join(
                bytes(value)
                for table in node.memory.store._tables.values()
                for value in table.values.values()
            )
            assert shard.machine.counters.messages == 1

    asyncio.run(scene())


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_stream_that_must_be_encrypted_and_compressed_may_be_in_memory(
    tmp_path: Path, compression: Any
) -> None:
    async def scene() -> None:
        async with running(tmp_path) as (_, link):
            config = StreamConfig(
                name="M", subjects=("m.*",), storage="memory", encrypted=True,
                compression=compression,
            )  # fmt: skip
            await create(link, config)
            await publish(link, "M", [message(b"y" * 5_000)])
            assert (await link.get_message("M", 1)).payload == b"y" * 5_000

    asyncio.run(scene())
