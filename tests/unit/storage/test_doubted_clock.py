"""A start under a wall clock that is far ahead: taken only where somebody vouches for it."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import ConsumerConfig, PublishMessage, StreamConfig
from contrail_common.timeunits import NS_PER_S
from contrail_link import publishing
from contrail_link.contract.consume import PullRequest
from contrail_serve.groups import SingleMemberGroups
from contrail_storage.link import LocalLink
from contrail_storage.node import NodeOptions, StorageNode
from contrail_storage.replica import log_time
from contrail_storage.replica.log_time import is_synchronized
from tests.support.folders import copy_at_one_moment

PATIENCE_S = 60.0
HOUR_NS = 3_600 * NS_PER_S
YEAR_NS = 365 * 24 * HOUR_NS


class Clocks:
    """Stands in for the module ``time`` where the node reads its clocks."""

    CLOCK_BOOTTIME = CLOCK_MONOTONIC = time.CLOCK_MONOTONIC

    def __init__(self) -> None:
        self.wall_step_ns = self.boot_step_ns = 0

    def time_ns(self) -> int:
        return time.time_ns() + self.wall_step_ns

    def clock_gettime_ns(self, clock: int) -> int:
        return time.clock_gettime_ns(clock) + self.boot_step_ns


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    clocks = Clocks()
    monkeypatch.setattr(log_time, "time", clocks)
    monkeypatch.setattr(log_time, "_LOOK_S", 0.001)
    monkeypatch.setattr(log_time, "_boot_id", lambda: f"boot-{clocks.boot_step_ns < 0}")
    monkeypatch.setattr(log_time, "is_synchronized", lambda _: False)
    return clocks


@asynccontextmanager
async def running(
    data_dir: Path, jump_max_ns: int = 600 * NS_PER_S
) -> AsyncIterator[tuple[StorageNode, LocalLink]]:
    options = NodeOptions(data_dir, clock_jump_max_ns=jump_max_ns)
    node = StorageNode.open(options, SingleMemberGroups())
    async with asyncio.timeout(PATIENCE_S):
        await node.start()
        try:
            yield node, LocalLink(node)
        finally:
            await node.stop()


async def publish(link: LocalLink, payload: bytes) -> int:
    """The time of a message that is published now."""
    ack = await publishing.publish(link, "S", [PublishMessage("s", None, payload)])
    return (await link.get_message("S", ack.results[0].seq)).time_ns


async def begin(data_dir: Path, **rules: int) -> None:
    async with running(data_dir) as (_, link):
        config = StreamConfig(name="S", subjects=("s",), **rules)  # type: ignore[arg-type]
        await link.put_stream(config, "create", None, False)
        await publish(link, b"one")


def reboot(clocks: Clocks) -> None:
    """The machine starts anew: its boot-time clock begins again."""
    clocks.boot_step_ns = -clocks.clock_gettime_ns(Clocks.CLOCK_BOOTTIME) - 1


async def refused(link: LocalLink) -> ApiError:
    with pytest.raises(ApiError) as refusal:
        await publish(link, b"refused")
    return refusal.value


def test_wall_clock_far_ahead_after_a_reboot_waits_for_a_word_and_ages_nothing(
    tmp_path: Path, clocks: Clocks
) -> None:
    async def scenario() -> None:
        await begin(tmp_path, max_age_ns=24 * HOUR_NS)
        reboot(clocks)
        clocks.wall_step_ns = YEAR_NS
        for _ in range(2):  # a start that waits changes nothing for the next
            async with running(tmp_path) as (node, link):
                reason = node.readiness()["clock"]
                assert "is 365 days ahead of the last recorded time" in reason
                assert "start it once with --max-clock-jump 366d" in reason
                refusal = await refused(link)
                assert (refusal.spec, refusal.applied) == (errors.NOT_READY, False)
                assert refusal.detail == reason
                await node._housekeeper.tick()
                assert (await link.get_message("S", 1)).payload == b"one"
        async with running(tmp_path, jump_max_ns=366 * 24 * HOUR_NS) as (node, link):
            assert node.readiness() == {}
            while (await link.stream_info("S")).state.messages:
                await asyncio.sleep(0)  # it was right: the message is a year old
            assert await publish(link, b"two") >= time.time_ns() + YEAR_NS - HOUR_NS
        async with running(tmp_path) as (node, link):  # for one start alone
            assert node.readiness() == {}

    asyncio.run(scenario())


@pytest.mark.long
@pytest.mark.parametrize("help_comes", ["set right", "synchronized"])
def test_node_that_waits_continues_by_itself_when_the_clock_is_vouched_for(
    tmp_path: Path, clocks: Clocks, monkeypatch: pytest.MonkeyPatch, help_comes: str
) -> None:
    async def scenario() -> None:
        await begin(tmp_path)
        reboot(clocks)
        clocks.wall_step_ns = step_ns = 48 * HOUR_NS
        async with running(tmp_path) as (node, link):
            assert "clock" in node.readiness()
            if help_comes == "set right":
                clocks.wall_step_ns = step_ns = 0
            else:
                monkeypatch.setattr(log_time, "is_synchronized", lambda _: True)
            while node.readiness():
                await asyncio.sleep(0)
            wall_ns = time.time_ns() + step_ns
            assert abs(await publish(link, b"two") - wall_ns) < HOUR_NS

    asyncio.run(scenario())


@pytest.mark.parametrize("killed", [False, True])
def test_node_that_was_off_for_long_on_a_machine_that_was_up_asks_nothing(
    tmp_path: Path, clocks: Clocks, killed: bool
) -> None:
    async def scenario() -> None:
        await begin(tmp_path / "a")
        folder = tmp_path / "a"
        if killed:
            async with running(folder):
                folder = copy_at_one_moment(folder, tmp_path / "b")
        clocks.wall_step_ns = clocks.boot_step_ns = 72 * HOUR_NS
        async with running(folder) as (node, link):
            assert node.readiness() == {}
            assert await publish(link, b"two") >= time.time_ns() + 71 * HOUR_NS
        clocks.wall_step_ns += 2 * HOUR_NS + NS_PER_S * 60  # it was set forth meanwhile
        async with running(folder) as (node, link):
            assert "2 hours ahead" in node.readiness()["clock"]

    asyncio.run(scenario())


def test_clock_that_was_wrong_once_stamps_no_messages_for_ever(
    tmp_path: Path, clocks: Clocks
) -> None:
    async def scenario() -> None:
        clocks.wall_step_ns = YEAR_NS
        await begin(tmp_path)  # a folder without a past has nothing to compare with
        clocks.wall_step_ns = 0
        async with running(tmp_path) as (node, link):
            assert node.readiness() == {}
            ahead_ns = node.clock.distance_ns
            assert abs(ahead_ns - YEAR_NS) < HOUR_NS
            text = await link.metrics_text()
            shown = dict(line.split() for line in text.splitlines() if line[0] != "#")
            shown_ns = float(shown["contrail_log_time_ahead_seconds"]) * NS_PER_S
            assert abs(shown_ns - ahead_ns) < HOUR_NS
            first_ns = await publish(link, b"two")
            clocks.wall_step_ns = clocks.boot_step_ns = YEAR_NS
            half_ns = await publish(link, b"three")
            assert abs(half_ns - first_ns - YEAR_NS // 2) < HOUR_NS
            assert abs(node.clock.distance_ns - YEAR_NS // 2) < HOUR_NS
            clocks.wall_step_ns = clocks.boot_step_ns = 2 * YEAR_NS
            assert abs(await publish(link, b"four") - first_ns - YEAR_NS) < HOUR_NS
            assert abs(node.clock.distance_ns) < HOUR_NS

    asyncio.run(scenario())


def test_deliveries_come_again_while_log_time_is_ahead(tmp_path: Path, clocks: Clocks) -> None:
    async def scenario() -> None:
        clocks.wall_step_ns = YEAR_NS
        await begin(tmp_path)
        clocks.wall_step_ns = 0
        async with running(tmp_path) as (node, link):
            consumer = ConsumerConfig(name="c", durable=True, ack_wait_ns=NS_PER_S // 10)
            await link.put_consumer("S", consumer, "create", None, False)
            pull = PullRequest(stream="S", consumer="c", expires_ns=60 * NS_PER_S)
            counts = [(await link.pull(pull)).deliveries[0].num_delivered for _ in range(3)]
            assert counts == [1, 2, 3]
            assert node.clock.distance_ns > YEAR_NS - HOUR_NS

    asyncio.run(scenario())


def test_damaged_or_missing_record_asks_nothing(tmp_path: Path, clocks: Clocks) -> None:
    async def scenario() -> None:
        await begin(tmp_path)
        clocks.wall_step_ns = YEAR_NS
        (tmp_path / "clock").write_bytes(b"rotten")
        async with running(tmp_path) as (node, _):
            assert node.readiness() == {}

    asyncio.run(scenario())


def test_another_clock_than_the_kernels_is_not_vouched_for() -> None:
    assert not is_synchronized(time.time_ns() + YEAR_NS)
