"""Calls to the disk fail: nothing is acknowledged that is not durable, and the node recovers."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest

from contrail_common import errors
from contrail_common.errors import ApiError, ErrorSpec
from contrail_common.model import PublishMessage, StreamConfig
from contrail_link.contract.publish import PublishAck
from contrail_link.publishing import publish
from contrail_serve.groups import SingleMemberGroups
from contrail_storage.link import LocalLink
from contrail_storage.node import NodeOptions, StorageNode
from tests.crash.disk import CountedFiles, Failure, Kill, Lane, Plan, Switch
from tests.crash.history import Returned, Stopped, Unknown
from tests.crash.ledger import Ledger
from tests.crash.lives import wait_until
from tests.crash.pipe import Reporter
from tests.crash.script import script
from tests.crash.trials import Trial, calls_of
from tests.crash.zygote import Ended, Job, Zygote

SEED: Final = 99
UNTIL_HEALED: Final = 1_000_000


def failing_trial(zygote: Zygote, directory: Path, plan: Plan) -> tuple[Trial, Ended]:
    """Run the script over a failing disk, insisting; what was not synced is gone at its end."""
    trial = Trial(zygote, directory, SEED, power_cuts=True, ledger=Ledger(trust_async=False))
    job = Job(steps=script(SEED, all_ids=True), insist=True, look=True, plan=plan)
    return trial, trial.live(job)


@pytest.fixture(scope="module")
def whole_run(zygote: Zygote, lasting_area: Path) -> dict[str, list[str]]:
    """The calls of a run over a sound disk."""
    trial = Trial(zygote, lasting_area / "whole", SEED)
    return calls_of(trial.live(Job(steps=script(SEED, all_ids=True))))


CASES: Final[list[tuple[Lane, str, int, int, int, int]]] = [
    # lane, call, error, how often in a row, the first that fails, every how many-th
    ("log", "sync", errno.EIO, 1, 2, 23),
    ("log", "sync", errno.EIO, 3, 10, 53),
    ("log", "write", errno.ENOSPC, 1, 2, 25),
    ("log", "create", errno.ENOSPC, 1, 1, 4),
    ("log", "create", errno.ENOSPC, 2, 3, 5),
    ("log", "rename", errno.EIO, 1, 1, 4),
    ("log", "unlink", errno.EIO, 1, 1, 3),
    ("files", "create", errno.EMFILE, 1, 1, 4),
    ("files", "write", errno.ENOSPC, 1, 1, 3),
    ("files", "sync", errno.EIO, 1, 1, 7),
    ("files", "rename", errno.EIO, 1, 2, 4),
    ("store", "write", errno.EIO, 1, 1, 29),
    ("store", "flush", errno.ENOSPC, 1, 1, 2),
]


def check_failures(
    zygote: Zygote, area: Path, firsts: Iterable[int], failing: Callable[[int], Failure]
) -> list[str]:
    problems = []
    for first in firsts:
        failure = failing(first)
        trial, ended = failing_trial(zygote, area / f"{first}", Plan(failures=(failure,)))
        stopped = [record.reason for record in ended.records if isinstance(record, Stopped)]
        if not all(os.strerror(failure.number) in reason for reason in stopped):
            problems.append(f"{failure}: stopped for another reason: {stopped}")
        trial.look()
        problems += [f"{failure}: {problem}" for problem in trial.verdict()]
    return problems


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_sampled_failures_of_the_disk_lose_and_double_nothing(
    zygote: Zygote,
    area: Path,
    whole_run: dict[str, list[str]],
    case: tuple[Lane, str, int, int, int, int],
) -> None:
    lane, call, number, count, start, stride = case
    firsts = range(start, whole_run[lane].count(call) + 1, stride)
    problems = check_failures(
        zygote, area, firsts, lambda first: Failure(lane, call, first, number, count)
    )
    assert problems == []


@pytest.mark.slow
@pytest.mark.parametrize(("lane", "call", "number"), sorted({case[:3] for case in CASES}))
@pytest.mark.parametrize("count", [1, 2])
def test_every_failure_of_the_disk_loses_and_doubles_nothing(
    zygote: Zygote,
    area: Path,
    whole_run: dict[str, list[str]],
    lane: Lane,
    call: str,
    number: int,
    count: int,
) -> None:
    firsts = range(1, whole_run[lane].count(call) + 1)
    problems = check_failures(
        zygote, area, firsts, lambda first: Failure(lane, call, first, number, count)
    )
    assert problems == []


def test_failed_sync_after_a_removed_segment_does_not_end_checkpoints(
    zygote: Zygote, area: Path, whole_run: dict[str, list[str]]
) -> None:
    calls = whole_run["log"]
    behind_removals = [
        calls[: at + 1].count("sync")
        for at in range(1, len(calls))
        if calls[at - 1 : at + 1] == ["unlink", "sync"]
    ]
    problems = check_failures(
        zygote, area, behind_removals, lambda first: Failure("log", "sync", first, errno.EIO)
    )
    assert behind_removals
    assert problems == []


@pytest.mark.parametrize("stride", [19, pytest.param(3, marks=pytest.mark.slow)])
def test_crash_soon_after_a_failed_sync_loses_nothing(
    zygote: Zygote, area: Path, stride: int
) -> None:
    problems, unknown = [], 0
    for first in range(5, 85, stride):
        failure = Failure("log", "sync", first, errno.EIO)
        kill = Kill("log", 2 * first + first % 5, torn=first % 2 == 0)
        plan = Plan(seed=SEED, kill=kill, failures=(failure,))
        trial, ended = failing_trial(zygote, area / f"{first}", plan)
        unknown += sum(
            isinstance(record, Returned) and isinstance(record.outcome, Unknown)
            for record in ended.records
        )
        trial.look()
        problems += [f"{failure}, {kill}: {problem}" for problem in trial.verdict()]
    assert problems == []
    assert unknown > 0


# One failure, step by step ---------------------------------------------------------------------


@asynccontextmanager
async def node_on_a_switched_disk(data_dir: Path) -> AsyncIterator[tuple[StorageNode, Switch]]:
    reporter = Reporter(os.open(os.devnull, os.O_WRONLY))
    switch = Switch(Plan(), reporter)
    files = CountedFiles(switch, data_dir, reporter)
    node = StorageNode.open(NodeOptions(data_dir, files=files), SingleMemberGroups())
    await node.start()
    try:
        yield node, switch
    finally:
        await node.stop()


async def refusal(link: LocalLink, message: PublishMessage) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await publish(link, "S", [message])
    return caught.value


def note(number: int) -> PublishMessage:
    return PublishMessage("s.a", None, f"{number}".encode(), f"id-{number}")


async def fail_and_heal(data_dir: Path, call: str, number: int, spec: ErrorSpec) -> PublishAck:
    async with node_on_a_switched_disk(data_dir) as (node, switch):
        link = LocalLink(node)
        await link.put_stream(StreamConfig(name="S", subjects=("s.*",)), "put", None, False)
        await publish(link, "S", [note(1)])
        switch.plan = Plan(failures=(Failure("log", call, 1, number, UNTIL_HEALED),))
        assert (await refusal(link, note(2))).spec is errors.OUTCOME_UNKNOWN
        for message in (note(2), note(3)):
            refused = await refusal(link, message)
            assert (refused.spec, refused.applied) == (spec, False)
        assert "storage" in node.readiness()
        assert (await link.get_message("S", 1)).payload == b"1"
        assert (await link.stream_info("S")).state.last_seq == 1
        switch.plan = Plan()
        await wait_until(lambda: not node.readiness())
        await publish(link, "S", [note(2)])
        return await publish(link, "S", [note(1), note(2), note(3)])


@pytest.mark.parametrize(
    ("call", "number", "spec"),
    [
        ("sync", errno.EIO, errors.STORAGE_FAILED),
        ("write", errno.EIO, errors.STORAGE_FAILED),
        ("write", errno.ENOSPC, errors.STORAGE_FULL),
        ("sync", errno.ENOSPC, errors.STORAGE_FULL),
    ],
)
def test_failed_log_answers_unknown_then_refuses_and_heals_with_the_disk(
    area: Path, call: str, number: int, spec: ErrorSpec
) -> None:
    ack = asyncio.run(fail_and_heal(area / "data", call, number, spec))
    assert [(result.seq, result.duplicate) for result in ack.results] == [
        (1, True),
        (2, True),
        (3, False),
    ]


async def fill_during_checkpoint(data_dir: Path) -> int:
    async with node_on_a_switched_disk(data_dir) as (node, switch):
        link = LocalLink(node)
        await link.put_stream(StreamConfig(name="S", subjects=("s.*",)), "put", None, False)
        switch.plan = Plan(failures=(Failure("files", "write", 1, errno.ENOSPC, UNTIL_HEALED),))
        with pytest.raises(OSError, match="No space left"):
            await node.checkpoint()
        ack = await publish(link, "S", [note(1)])
        switch.plan = Plan()
        await node.checkpoint()
        return ack.results[0].seq


def test_checkpoint_without_space_stops_nothing_and_succeeds_later(area: Path) -> None:
    assert asyncio.run(fill_during_checkpoint(area / "data")) == 1
