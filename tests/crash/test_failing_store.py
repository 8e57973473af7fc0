"""The store below a running node fails: nothing is lost, reads go on, and it heals by itself."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import pytest

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import ConsumerConfig, PublishMessage, StreamConfig
from contrail_link import publishing
from contrail_link.contract.consume import AckItem, PullRequest
from contrail_link.contract.read import RangeRequest
from contrail_serve.groups import SingleMemberGroups
from contrail_storage import healing
from contrail_storage.core.commands import (
    DropStream,
    ReleaseStream,
    ReserveStream,
)
from contrail_storage.link import LocalLink
from contrail_storage.metrics import render_metrics
from contrail_storage.node import NodeOptions, StorageNode
from contrail_storage.store.rocks_store import RocksStore
from contrail_storage.store.store_errors import StoreCorruptError, StoreMissingError
from tests.crash.disk import CountedFiles, Failure, Plan, StoreOpener, Switch
from tests.crash.lives import wait_until
from tests.crash.pipe import Reporter
from tests.support.folders import files_with

UNTIL_HEALED: Final = 1_000_000
SOUND: Final = Plan()


@asynccontextmanager
async def node_over_a_switched_store(
    data_dir: Path, plan: Plan = SOUND, node_keys: tuple[bytes, ...] = ()
) -> AsyncIterator[tuple[StorageNode, Switch]]:
    reporter = Reporter(os.open(os.devnull, os.O_WRONLY))
    switch = Switch(plan, reporter)
    files = CountedFiles(switch, data_dir, reporter)
    opener = StoreOpener(switch, 256)
    options = NodeOptions(data_dir, open_store=opener, files=files, node_keys=node_keys)
    node = StorageNode.open(options, SingleMemberGroups())
    await node.start()
    try:
        yield node, switch
    finally:
        await node.stop()


def note(number: int) -> PublishMessage:
    return PublishMessage(f"s.{number % 7}", None, b"%d " % number * 90, f"id-{number}")


async def publish(link: LocalLink, number: int, stream: str = "S") -> int:
    ack = await publishing.publish(link, stream, [note(number)])
    return ack.results[0].seq


async def everything(link: LocalLink) -> list[bytes]:
    found = await link.read_range(
        RangeRequest(stream="S", from_seq=1, limit=1_000, max_bytes=1 << 30)
    )
    return [message.payload for message in found.messages]


async def fail_and_heal(
    data_dir: Path, call: str, number: int, node_keys: tuple[bytes, ...]
) -> None:
    async with node_over_a_switched_store(data_dir, SOUND, node_keys) as (node, switch):
        link = LocalLink(node)
        await link.put_stream(StreamConfig(name="S", subjects=("s.*",)), "put", None, False)
        memory = StreamConfig(name="M", subjects=("m.*",), storage="memory")
        await link.put_stream(memory, "put", None, False)
        config = ConsumerConfig(name="c", durable=True, ack_wait_ns=10**12)
        await link.put_consumer("S", config, "put", None, False)
        for one in range(40):
            await publish(link, one)
        await node.checkpoint()
        for one in range(40, 80):
            await publish(link, one)
        first = await link.pull(PullRequest(stream="S", consumer="c", batch=30))
        acks = [
            AckItem(first.shard_id, first.consumer_id, first.epoch, [one.message.seq], "ack")
            for one in first.deliveries[:10]
        ]
        await link.acknowledge("S", "c", acks, True)
        await link.consumer_info("S", "c")  # every delivery is recorded
        await node.until_written()
        switch.plan = Plan(failures=(Failure("store", call, 1, number, UNTIL_HEALED),))
        if call == "flush":
            with pytest.raises(Exception, match=os.strerror(number)):
                await node.checkpoint()
        else:
            await publish(link, 80)
        await wait_until(lambda: bool(node.failure))
        spec = errors.STORAGE_FULL if number == errno.ENOSPC else errors.STORAGE_FAILED
        with pytest.raises(ApiError) as caught:
            await publish(link, 81)
        assert (caught.value.spec, caught.value.applied) == (spec, False)
        assert os.strerror(number) in node.readiness()["storage"]
        assert (await everything(link))[:80] == [note(one).payload for one in range(80)]
        await publishing.publish(link, "M", [PublishMessage("m.a", None, b"goes on", None)])
        assert (await link.get_message("M", 1)).payload == b"goes on"
        assert not node.fatal.done()
        switch.plan = Plan()
        await wait_until(lambda: not node.readiness())
        last = 81 if call == "flush" else 82
        await publish(link, 81)
        payloads = await everything(link)
        assert payloads[:80] == [note(one).payload for one in range(80)]
        assert (payloads[-1], len(payloads)) == (note(81).payload, last)
        again = await publishing.publish(link, "S", [note(one) for one in range(80)])
        assert all(result.duplicate for result in again.results)
        info = await link.consumer_info("S", "c")
        assert (info.num_ack_pending, info.ack_floor.stream_seq) == (20, 10)
        rest = await link.pull(PullRequest(stream="S", consumer="c", batch=100))
        assert [one.message.seq for one in rest.deliveries] == list(range(31, last + 1))
        assert (await link.get_message("M", 1)).payload == b"goes on"
        await link.purge_stream("S", "s.1", 0, 0)
        await node.checkpoint()


@pytest.mark.parametrize("node_keys", [(), (bytes(32),)], ids=["plain", "encrypted"])
@pytest.mark.parametrize("call", ["write", "flush"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_failed_store_is_opened_again_and_the_log_replayed(
    area: Path, call: str, number: int, node_keys: tuple[bytes, ...]
) -> None:
    asyncio.run(fail_and_heal(area / "data", call, number, node_keys))


async def fail_between_a_name_and_its_shard(data_dir: Path, *, removed: bool) -> None:
    names = {"listed": StreamConfig(name="S", subjects=("s.*",))}
    names["half"] = StreamConfig(name="T", subjects=("t.*",))
    async with node_over_a_switched_store(data_dir) as (node, switch):
        link = LocalLink(node)
        await link.put_stream(names["listed"], "put", None, False)
        if removed:
            await link.put_stream(names["half"], "put", None, False)
            await node.shard_log.command(node.meta.streams["T"].shard_id, DropStream())
        else:
            await node.meta_log.command(ReserveStream("T", ("t.*",), "abc"))
        await node.until_written()
        switch.plan = Plan(failures=(Failure("store", "write", 1, errno.EIO, UNTIL_HEALED),))
        if removed:
            await node.meta_log.command(ReleaseStream("T"))
        await publish(link, 1)
        await wait_until(lambda: bool(node.healing.store_failure))
        switch.plan = SOUND
        await wait_until(lambda: node.fatal.done() or not node.readiness())
        assert not node.fatal.done(), node.failure
        await wait_until(lambda: "T" not in node.meta.streams)
        assert set(node.applier.shards) == {node.meta.streams["S"].shard_id}
        await link.put_stream(names["half"], "put", None, False)
        assert await publish(link, 2) == 2
        await publishing.publish(link, "T", [PublishMessage("t.a", None, b"anew", None)])
    async with node_over_a_switched_store(data_dir) as (node, _):
        assert len(node.applier.shards) == 2
        assert await everything(LocalLink(node)) == [note(one).payload for one in (1, 2)]


@pytest.mark.parametrize("removed", [False, True], ids=["being made", "being removed"])
def test_store_that_fails_between_a_name_and_its_shard_is_opened_again(
    area: Path, removed: bool
) -> None:
    asyncio.run(fail_between_a_name_and_its_shard(area / "data", removed=removed))


async def look_into_a_store_at_work(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with node_over_a_switched_store(data_dir) as (node, _):
        link = LocalLink(node)
        await link.put_stream(StreamConfig(name="S", subjects=("s.*",)), "put", None, False)
        for one in range(40):
            await publish(link, one)
        await node.until_written()
        await asyncio.to_thread(node.raw_store.flush)
        # Room for what the store lacks, which is nothing, and for less than the log holds.
        free = SimpleNamespace(f_bavail=healing._SPARE_BYTES, f_frsize=1)
        monkeypatch.setattr(healing.os, "statvfs", lambda _: free)
        opened: list[Path] = []
        open_store = StoreOpener.__call__

        def racing(opener: StoreOpener, path: Path) -> RocksStore:
            opened.append(path)
            if len(opened) <= 2:
                raise (StoreCorruptError, StoreMissingError)[len(opened) - 1]("no 000104.sst")
            return open_store(opener, path)

        monkeypatch.setattr(StoreOpener, "__call__", racing)
        node.healing.fail_store(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        await wait_until(lambda: node.fatal.done() or not node.readiness())
        assert not node.fatal.done(), node.failure
        assert len(opened) > 2
        assert await everything(link) == [note(one).payload for one in range(40)]


def test_file_that_a_store_at_work_has_just_removed_is_no_damage(
    area: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads of the failed store continue, and remove files that a second reader just saw."""
    asyncio.run(look_into_a_store_at_work(area / "data", monkeypatch))


async def flush_after_a_failure(data_dir: Path, *, cut: bool) -> tuple[float, float]:
    async with node_over_a_switched_store(data_dir) as (node, _):
        node.healing.fail_store(OSError(errno.EIO, os.strerror(errno.EIO)))
        await wait_until(lambda: node.fatal.done() or not node.readiness())
        longer_s = node.healing._pause_s
        await (node.cut_log() if cut else node.checkpoint())
        return longer_s, node.healing._pause_s


@pytest.mark.parametrize("cut", [False, True], ids=["checkpoint", "cut"])
def test_flush_of_everything_ends_the_longer_pauses(area: Path, cut: bool) -> None:
    longer_s, after_s = asyncio.run(flush_after_a_failure(area / "data", cut=cut))
    assert longer_s > after_s == healing._PAUSE_S


async def start_on_a_full_disk(data_dir: Path) -> None:
    config = StreamConfig(name="S", subjects=("s.*",))
    async with node_over_a_switched_store(data_dir) as (node, switch):
        link = LocalLink(node)
        await link.put_stream(config, "put", None, False)
        await link.put_stream(
            StreamConfig(name="M", subjects=("m.*",), storage="memory"), "put", None, False
        )
        for one in range(40):
            await publish(link, one)
        await node.checkpoint()
        for one in range(40, 80):
            await publish(link, one)
        # The last flush fails: the log alone holds the newest messages.
        switch.plan = Plan(failures=(Failure("store", "flush", 1, errno.EIO, UNTIL_HEALED),))
    full = Failure("log", "create", 1, errno.ENOSPC, UNTIL_HEALED)
    async with node_over_a_switched_store(data_dir, Plan(failures=(full,))) as (node, switch):
        link = LocalLink(node)
        assert "No space left" in node.readiness()["storage"]
        assert await everything(link) == [note(one).payload for one in range(80)]
        assert (await link.stream_info("S")).state.last_seq == 80
        page = await link.list_streams("", "", 9, "")
        assert [info.config.name for info in page.streams or []] == ["S"]
        await render_metrics(node)
        for stream in ("S", "M"):
            with pytest.raises(ApiError) as caught:
                await publish(link, 80, stream)
            assert caught.value.applied is False
            assert caught.value.spec.status in (503, 507)
        with pytest.raises(ApiError) as caught:
            await publish(link, 80)
        assert caught.value.spec is errors.STORAGE_FULL
        switch.plan = Plan()
        await wait_until(lambda: not node.readiness())
        assert await publish(link, 80) == 81
        assert await everything(link) == [note(one).payload for one in range(81)]
        again = await publishing.publish(link, "S", [note(one) for one in range(80)])
        assert all(result.duplicate for result in again.results)
        await publishing.publish(link, "M", [PublishMessage("m.a", None, b"anew", None)])
    async with node_over_a_switched_store(data_dir) as (node, _):
        assert await everything(LocalLink(node)) == [note(one).payload for one in range(81)]


def test_start_on_a_full_disk_serves_reads_and_heals(area: Path) -> None:
    asyncio.run(start_on_a_full_disk(area / "data"))


async def erase_while_the_store_fails(data_dir: Path) -> None:
    secret = b"the bytes that are to leave every file " * 30
    async with node_over_a_switched_store(data_dir) as (node, switch):
        link = LocalLink(node)
        await link.put_stream(StreamConfig(name="S", subjects=("s.*",)), "put", None, False)
        for one in range(20):
            await publish(link, one)
        await publishing.publish(link, "S", [PublishMessage("s.1", None, secret, "secret")])
        await node.checkpoint()
        switch.plan = Plan(failures=(Failure("store", "flush", 2, errno.EIO, UNTIL_HEALED),))
        receipt = await link.erase("S", [21], "")
        await wait_until(lambda: bool(node.healing.store_failure))
        assert (await link.erasure(receipt.erasure_id, 0)).status == "pending"
        switch.plan = SOUND
        await wait_until(lambda: not node.readiness())
        assert (await link.erasure(receipt.erasure_id, 20_000_000_000)).status == "done"
        assert files_with(data_dir, [secret[:39]]) == {}
        assert await everything(link) == [note(one).payload for one in range(20)]


def test_erasure_continues_after_a_failed_store_and_leaves_no_bytes(area: Path) -> None:
    asyncio.run(erase_while_the_store_fails(area / "data"))
