"""The store fails while a node starts, or the node is stopped during its start.

A start that finds all acknowledged messages serves them, even if the store fails. A start that does
not complete leaves nothing open: the same process can open the folder again.
"""

import asyncio
import errno
import os
import shutil
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import ConsumerConfig, PublishMessage, StreamConfig
from contrail_link.contract.consume import PullRequest
from contrail_link.publishing import publish
from contrail_serve.groups import SingleMemberGroups
from contrail_storage.disk.files import AppendHandle, Files
from contrail_storage.disk.node_file import LOG_NAME
from contrail_storage.link import LocalLink
from contrail_storage.node import NodeOptions, StorageNode
from contrail_storage.store.rocks_store import Operation
from contrail_storage.wal.log_state import list_segments
from contrail_storage.wal.newest_segment import missing_newest
from tests.crash.disk import CountedFiles, CountedStore, Failure, Plan, StoreOpener, Switch
from tests.crash.lives import wait_until
from tests.crash.pipe import Reporter
from tests.crash.test_failing_store import (
    SOUND,
    UNTIL_HEALED,
    everything,
    node_over_a_switched_store,
)
from tests.support.folders import copy_at_one_moment

COUNT: Final = 60
LARGE: Final = 384 << 10
"""More than one pass of a replay, which takes 8 MiB."""
NOT_WRITABLE: Final = Plan(failures=(Failure("log", "create", 1, errno.ENOSPC, UNTIL_HEALED),))


def large(number: int) -> PublishMessage:
    return PublishMessage(f"s.{number % 7}", None, b"%9d" % number * (LARGE // 9), f"id-{number}")


PAYLOADS: Final = [large(number).payload for number in range(COUNT)]


def unwritable_from(first: int, number: int = errno.EIO) -> Plan:
    return Plan(failures=(Failure("store", "write", first, number, UNTIL_HEALED),))


async def fill(folder: Path) -> None:
    """Put all messages into the log only: `folder` is as a killed process leaves it."""
    async with node_over_a_switched_store(folder.with_name("lived")) as (node, _):
        link = LocalLink(node)
        await link.put_stream(StreamConfig(name="S", subjects=("s.*",)), "put", None, False)
        memory = StreamConfig(name="M", subjects=("m.*",), storage="memory")
        await link.put_stream(memory, "put", None, False)
        await node.checkpoint()
        for number in range(COUNT):
            await publish(link, "S", [large(number)])
        await asyncio.to_thread(copy_at_one_moment, folder.with_name("lived"), folder)


@pytest.fixture(scope="module")
def filled(lasting_area: Path) -> Path:
    folder = lasting_area / "filled"
    asyncio.run(fill(folder))
    return folder


@pytest.fixture
def data_dir(filled: Path, area: Path) -> Path:
    """A copy of the folder that `fill` makes."""
    return shutil.copytree(filled, area / "data")


class Gate:
    """While it is shut, holds all threads that pass by until it is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.reached = 0
        self.held = 0

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def pass_by(self) -> None:
        if threading.current_thread() is threading.main_thread():
            return  # the loop's own small writes
        self.reached += 1
        self.held += 1
        self._open.wait()
        self.held -= 1


class GatedStore(CountedStore):
    """The store behind a switch and a gate."""

    writes: Gate

    def write(self, operations: list[Operation]) -> None:  # type: ignore[override]
        self.writes.pass_by()
        super().write(operations)


class GatedFiles(CountedFiles):
    """Files behind a switch, and those of the log behind a gate where they are made."""

    creates: Gate

    def create(self, path: Path, *, ahead_bytes: int = 0) -> AppendHandle:
        if path.parent.name == LOG_NAME:
            self.creates.pass_by()
        return super().create(path, ahead_bytes=ahead_bytes)


class GatedOpener(StoreOpener):
    """Opens stores whose writes pass a gate; counts how often."""

    def __init__(self, switch: Switch) -> None:
        super().__init__(switch, 256)
        self.gate = Gate()
        self.opened = 0

    def __call__(self, path: Path) -> CountedStore:
        self.opened += 1
        store = GatedStore.open_reading(path, self._options)
        store.switch, store.writes = self._switch, self.gate
        return store


class Rig:
    """A node that is opened over a disk with faults, and started by the test."""

    def __init__(self, data_dir: Path, plan: Plan = SOUND) -> None:
        reporter = Reporter(os.open(os.devnull, os.O_WRONLY))
        self.switch = Switch(plan, reporter)
        self.opener = GatedOpener(self.switch)
        self.gate = self.opener.gate
        files = GatedFiles(self.switch, data_dir, reporter)
        self.creates = files.creates = Gate()
        options = NodeOptions(data_dir, open_store=self.opener, files=files)
        self.node = StorageNode.open(options, SingleMemberGroups())
        self.starting: asyncio.Task[None] | None = None

    def start(self) -> None:
        self.starting = asyncio.create_task(self.node.start())

    @property
    def started(self) -> bool:
        assert self.starting is not None
        return self.starting.done()


async def settled(link: LocalLink) -> None:
    """Check that all messages exist, and that new ones follow them."""
    assert await everything(link) == PAYLOADS
    again = await publish(link, "S", [large(0), large(COUNT - 1)])
    assert all(result.duplicate for result in again.results)
    await publish(link, "M", [PublishMessage("m.a", None, b"anew", None)])


async def fail_while_replaying(data_dir: Path, first: int, number: int) -> None:
    rig = Rig(data_dir, unwritable_from(first, number))
    rig.start()
    await wait_until(lambda: rig.started)
    node, link = rig.node, LocalLink(rig.node)
    await wait_until(lambda: bool(node.failure))
    assert os.strerror(number) in node.readiness()["storage"]
    assert await everything(link) == PAYLOADS
    spec = errors.STORAGE_FULL if number == errno.ENOSPC else errors.STORAGE_FAILED
    with pytest.raises(ApiError) as caught:
        await publish(link, "S", [PublishMessage("s.a", None, b"no")])
    assert (caught.value.spec, caught.value.applied) == (spec, False)
    rig.switch.plan = SOUND
    await wait_until(lambda: not node.readiness())
    await settled(link)
    await node.stop()
    async with node_over_a_switched_store(data_dir) as (node, _):
        await settled(LocalLink(node))


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("first", [1, 4])
def test_store_that_fails_while_the_log_is_replayed_is_read_and_healed(
    data_dir: Path, first: int, number: int
) -> None:
    asyncio.run(fail_while_replaying(data_dir, first, number))


async def ask_before_it_can_write(data_dir: Path) -> None:
    async with node_over_a_switched_store(data_dir) as (node, _):
        link = LocalLink(node)
        await link.put_stream(StreamConfig(name="S", subjects=("s.*",)), "put", None, False)
        config = ConsumerConfig(name="c", durable=True, ack_wait_ns=1)
        await link.put_consumer("S", config, "put", None, False)
        await publish(link, "S", [PublishMessage("s.a", None, b"%d" % one) for one in range(9)])
        await link.pull(PullRequest(stream="S", consumer="c", batch=9))
        await link.consumer_info("S", "c")
    full = Failure("log", "create", 1, errno.ENOSPC, UNTIL_HEALED)
    async with node_over_a_switched_store(data_dir, Plan(failures=(full,))) as (node, switch):
        link = LocalLink(node)
        with suppress(ApiError):
            await link.pull(PullRequest(stream="S", consumer="c", batch=9))
        await link.consumer_info("S", "c")
        assert node.consumers._all()
        switch.plan = SOUND
        await wait_until(lambda: not node.readiness())
        assert all(consumer.is_current() for consumer in node.consumers._all())


def test_consumer_asked_for_before_a_start_could_write_is_the_one_that_is_acknowledged(
    area: Path,
) -> None:
    asyncio.run(ask_before_it_can_write(area / "data"))


async def fail_to_begin_the_log(data_dir: Path, call: str, first: int) -> None:
    rig = Rig(data_dir, Plan(failures=(Failure("log", call, first, errno.EIO),)))
    assert not rig.node.log.is_open, "half a segment was taken for one"
    rig.start()
    await wait_until(lambda: rig.started)
    node, link = rig.node, LocalLink(rig.node)
    await wait_until(lambda: not node.readiness())
    await settled(link)
    await node.checkpoint()  # which drops the segments of before
    folder = data_dir / LOG_NAME
    assert missing_newest(Files(), folder, list_segments(Files(), folder)) == ""
    await node.stop()
    async with node_over_a_switched_store(data_dir) as (node, _):
        await settled(LocalLink(node))


@pytest.mark.parametrize(
    ("call", "first"),
    [("sync", 3), ("write", 2), ("sync", 4), ("write", 3), ("sync", 5), ("rename", 2)],
    ids=["its name", "its head", "head's sync", "the note", "note's sync", "note's name"],
)
def test_segment_that_the_log_could_not_begin_is_not_continued(
    data_dir: Path, call: str, first: int
) -> None:
    asyncio.run(fail_to_begin_the_log(data_dir, call, first))


# Stopped in the midst of it ---------------------------------------------------------------------


async def stop_while(
    data_dir: Path, plan: Plan, prepare: Callable[[Rig], Awaitable[None]], how: str
) -> None:
    """Stop a node at the moment that ``prepare`` waits for; then open the folder again."""
    threads = set(threading.enumerate())
    rig = Rig(data_dir, plan)
    await prepare(rig)
    tasks = asyncio.all_tasks()
    assert rig.starting is not None
    if how == "cancel":
        rig.starting.cancel()
        stopping: asyncio.Future[object] = rig.starting
    else:
        stopping = asyncio.create_task(rig.node.stop())
    for _ in range(10):
        await asyncio.sleep(0)  # until all that is to end was told so
    rig.gate.open()
    await wait_until(stopping.done)
    await asyncio.gather(stopping, rig.starting, return_exceptions=True)
    await rig.node.stop()  # once more changes nothing
    assert {one for one in asyncio.all_tasks() & tasks if not one.done()} == {
        asyncio.current_task()
    }
    left = [
        one for one in threading.enumerate() if one not in threads and "asyncio" not in one.name
    ]
    assert left == []
    async with node_over_a_switched_store(data_dir) as (node, _):
        await settled(LocalLink(node))


async def replaying(rig: Rig) -> None:
    rig.gate.shut()
    rig.start()
    await wait_until(lambda: rig.gate.reached > 0)


async def reading(rig: Rig) -> None:
    """The store is opened for reading, and the log behind it is applied."""
    seen: list[bool] = []
    node = rig.node
    rebuild = node.healing._rebuild
    opened = rig.opener.opened

    async def noted(*arguments: object, **named: object) -> object:
        seen.append(True)
        return await rebuild(*arguments, **named)  # type: ignore[arg-type]

    node.healing._rebuild = noted  # type: ignore[method-assign, assignment]
    rig.start()
    await wait_until(lambda: bool(seen) and rig.opener.opened > opened)


async def healing(rig: Rig) -> None:
    """The store failed, and the log is written into the one that was opened again."""
    rig.start()
    await wait_until(lambda: rig.started)
    await wait_until(lambda: bool(rig.node.healing.store_failure))
    rig.gate.shut()
    rig.switch.plan = SOUND
    reached = rig.gate.reached
    await wait_until(lambda: rig.gate.reached > reached)


@pytest.mark.parametrize("how", ["cancel", "stop"])
@pytest.mark.parametrize(
    ("moment", "plan"),
    [(replaying, SOUND), (reading, NOT_WRITABLE), (healing, unwritable_from(1))],
    ids=["replaying", "reading", "healing"],
)
def test_node_that_is_stopped_during_it_leaves_nothing_behind(
    data_dir: Path, moment: Callable[[Rig], Awaitable[None]], plan: Plan, how: str
) -> None:
    if (moment, how) == (healing, "cancel"):
        pytest.skip("it has started")
    asyncio.run(stop_while(data_dir, plan, moment, how))


async def beginning(rig: Rig) -> None:
    """Started for reading; the log begins its first segment."""
    rig.creates.shut()
    rig.switch.plan = SOUND


async def recovering(rig: Rig) -> None:
    """The log failed, and goes on in a new segment."""
    await wait_until(lambda: not rig.node.readiness())
    rig.creates.shut()
    rig.switch.plan = Plan(failures=(Failure("log", "write", 1, errno.EIO, UNTIL_HEALED),))
    with pytest.raises(ApiError):
        await publish(LocalLink(rig.node), "S", [PublishMessage("s.a", None, b"no")])
    rig.switch.plan = SOUND


async def stop_while_the_log_is_made(
    data_dir: Path, plan: Plan, prepare: Callable[[Rig], Awaitable[None]]
) -> None:
    rig = Rig(data_dir, plan)
    rig.start()
    await wait_until(lambda: rig.started)
    await prepare(rig)
    await wait_until(lambda: rig.creates.held > 0)
    held_at_end: list[int] = []
    group = rig.node.groups[0]
    end_group = group.stop

    def noted() -> None:
        held_at_end.append(rig.creates.held)
        end_group()

    group.stop = noted  # type: ignore[method-assign]
    stopping = asyncio.create_task(rig.node.stop())
    for _ in range(20):
        await asyncio.sleep(0)  # until all that is to end was told so
    rig.creates.open()
    await stopping
    assert held_at_end == [0], "the folder was let go while a thread still changed it"
    async with node_over_a_switched_store(data_dir) as (node, _):
        await settled(LocalLink(node))


@pytest.mark.parametrize(
    ("moment", "plan"),
    [(beginning, NOT_WRITABLE), (recovering, SOUND)],
    ids=["beginning", "recovering"],
)
def test_stop_waits_for_the_thread_that_makes_a_segment_of_the_log(
    data_dir: Path, moment: Callable[[Rig], Awaitable[None]], plan: Plan
) -> None:
    asyncio.run(stop_while_the_log_is_made(data_dir, plan, moment))


async def fail_to_start(data_dir: Path) -> None:
    threads = set(threading.enumerate())
    # The log fails in the start, and takes no new segment: nothing could be served.
    calls = ("write", "create")
    rig = Rig(data_dir)
    rig.switch.plan = Plan(
        failures=tuple(Failure("log", call, 1, errno.EIO, UNTIL_HEALED) for call in calls)
    )
    with pytest.raises(OSError, match="the log failed"):
        await rig.node.start()
    left = [
        one for one in threading.enumerate() if one not in threads and "asyncio" not in one.name
    ]
    assert left == []
    assert asyncio.all_tasks() == {asyncio.current_task()}
    async with node_over_a_switched_store(data_dir) as (node, _):
        await settled(LocalLink(node))


def test_start_that_failed_lets_go_of_the_folder(data_dir: Path) -> None:
    asyncio.run(fail_to_start(data_dir))


async def stop_unstarted(data_dir: Path) -> None:
    rig = Rig(data_dir)
    await rig.node.stop()
    with pytest.raises(OSError, match="stopped before it started"):
        await rig.node.start()
    async with node_over_a_switched_store(data_dir) as (node, _):
        await settled(LocalLink(node))


def test_node_that_was_opened_and_never_started_is_stopped(data_dir: Path) -> None:
    asyncio.run(stop_unstarted(data_dir))
