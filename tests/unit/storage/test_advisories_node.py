"""Advisories of a whole node: of a disk that fills, and what a restart does not repeat."""

import asyncio
import errno
from pathlib import Path

import pytest

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import PublishMessage, StreamConfig
from contrail_link.contract.admin import EventsRequest
from contrail_link.publishing import publish
from contrail_storage.link import LocalLink
from tests.crash.disk import Failure, Plan
from tests.crash.test_failing_disk import node_on_a_switched_disk

UNTIL_HEALED = 1_000_000
WAIT_NS = 60_000_000_000
MESSAGE = PublishMessage("a", None, b"x")


async def reported(link: LocalLink, count: int, after: str) -> list[tuple[str, str]]:
    """The next ``count`` advisories: type and server."""
    found: list[tuple[str, str]] = []
    while len(found) < count:
        result = await link.read_events(EventsRequest(after=after, wait_ns=WAIT_NS))
        after = result.position
        found += [(each.type, each.server) for each in result.advisories]
    return found


async def fail_and_heal(data_dir: Path, number: int) -> list[tuple[str, str]]:
    async with node_on_a_switched_disk(data_dir) as (node, switch):
        link = LocalLink(node)
        await link.put_stream(StreamConfig(name="S", subjects=("a",)), "put", None, False)
        begin = (await link.read_events(EventsRequest())).position
        switch.plan = Plan(failures=(Failure("log", "write", 1, number, UNTIL_HEALED),))
        with pytest.raises(ApiError) as failed:
            await publish(link, "S", [MESSAGE])
        assert failed.value.spec is errors.OUTCOME_UNKNOWN
        found = await reported(link, 1, begin) if number == errno.ENOSPC else []
        switch.plan = Plan()
        return found + (await reported(link, len(found) + 1, begin))[len(found) :]


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, ["server_out_of_space", "domain_leader_elected"]),
        (errno.EIO, ["domain_leader_elected"]),
    ],
)
def test_full_disk_is_reported_at_once_and_so_is_that_the_node_leads_again(
    tmp_path: Path, number: int, expected: list[str]
) -> None:
    found = asyncio.run(fail_and_heal(tmp_path / "data", number))
    assert found == [(kind, "n1") for kind in expected]


def test_start_repeats_nothing_to_who_listens_then(tmp_path: Path) -> None:
    async def scene() -> None:
        async with node_on_a_switched_disk(tmp_path / "data") as (node, _):
            link = LocalLink(node)
            before = (await link.read_events(EventsRequest())).position
            await link.put_stream(StreamConfig(name="S", subjects=("a",)), "put", None, False)
        async with node_on_a_switched_disk(tmp_path / "data") as (node, _):
            link = LocalLink(node)
            found = await link.read_events(EventsRequest(after=before))
            assert (found.advisories, found.lost) == ([], None)
            begin = found.position
            await link.delete_stream("S")
            found = await link.read_events(EventsRequest(after=begin))
            assert [(each.type, each.action) for each in found.advisories] == [
                ("stream_action", "delete")
            ]

    asyncio.run(scene())
