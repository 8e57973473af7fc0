"""Who leads the groups of three nodes: before one stops, on request, and after a while."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_link.publishing import publish
from contrail_storage.core.key_layout import META_GROUP
from contrail_storage.leadership import PAUSE_S, REST_S, WELL_S, Leadership
from tests.unit.storage.cluster_rig import NAMES, Nodes, plan, running, turn, until
from tests.unit.storage.test_cluster import create, leader_of, messages

SHARED = [entry.number for entry in plan(NAMES) if len(entry.members) > 1]


async def let_lead(nodes: Nodes, name: str) -> None:
    """Make one node the leader of all groups."""
    for group in (META_GROUP, *SHARED):
        while (leader := nodes.leader(group)) != name:
            if leader:
                await nodes[leader].leadership.hand_over(group, name)
            await turn()


def balancing(nodes: Nodes) -> Callable[[float], None]:
    """How `a` balances, at times that the test gives instead of the clock."""
    for node in nodes.all():
        node.leadership.balance = lambda now: None  # type: ignore[method-assign]
    leadership = nodes["a"].leadership
    leadership._led_since.clear()
    leadership._well_since.clear()
    return partial(Leadership.balance, leadership)


def test_node_that_stops_hands_over_what_it_leads_and_refuses_nothing_for_good(
    tmp_path: Path,
) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            leader = await create(nodes, "S")
            await let_lead(nodes, leader)
            await until(lambda: nodes[leader].readiness() == {})
            sent = 0
            ended = asyncio.Event()

            async def publish_on() -> None:
                nonlocal sent
                while not ended.is_set():
                    work = partial(publish, stream="S", content=messages("S", sent, 1))
                    await nodes.call(leader, work)
                    sent += 1

            publishing = asyncio.create_task(publish_on())
            await until(lambda: sent >= 5)
            await nodes[leader].leave()
            assert not any(nodes[leader].groups.leads(group) for group in (META_GROUP, *SHARED))
            assert nodes[leader].readiness() == {"storage": "stopping"}
            before = sent
            await until(lambda: sent >= before + 5)
            ended.set()
            await publishing
            await nodes.until_led(META_GROUP, *SHARED)
            # Nobody hands anything back to it.
            other = nodes.leader(META_GROUP)
            assert await nodes[other].leadership.hand_over(META_GROUP, leader) == ""
            info = await nodes.call(other, lambda link: link.stream_info("S"))
            assert info.state.last_seq == sent

    asyncio.run(scene())


def test_leader_steps_down_on_request(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            first = await create(nodes, "S")
            await create(nodes, "ALONE", replicas=1)

            async def ask(stream: str, preferred: str = "") -> str:
                leader: str = await nodes.call(
                    first, lambda link: link.step_down(stream, preferred)
                )
                return leader

            assert await ask("S", first) == first
            wanted = next(name for name in NAMES if name != first)
            assert await ask("S", wanted) == wanted
            group = nodes[first].streams.shard("S").group
            await until(lambda: nodes.leader(group) == wanted)
            assert await ask("S") != wanted
            await nodes.until_led(*SHARED)
            for stream, preferred, spec in (
                ("S", "elsewhere", errors.INVALID_FIELD),
                ("ALONE", "", errors.NOT_REPLICATED),
            ):
                with pytest.raises(ApiError) as caught:
                    await ask(stream, preferred)
                assert caught.value.spec is spec
            leader = leader_of(nodes, "S")
            for node in nodes.all():
                if node.options.name != leader:
                    node.groups[group].decline()
            others = [name for name in NAMES if name != leader]
            await until(
                lambda: not any(nodes[leader].groups[group].may_take_over(one) for one in others)
            )
            with pytest.raises(ApiError) as caught:
                await ask("S")
            assert caught.value.spec is errors.NO_FIT_PEER

    asyncio.run(scene())


def test_groups_go_back_to_their_first_members_one_by_one(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            await let_lead(nodes, "a")
            balance = balancing(nodes)

            def led() -> int:
                return sum(nodes["a"].groups.leads(group) for group in SHARED)

            balance(0.0)
            balance(REST_S - 1)
            assert led() == len(SHARED)
            balance(REST_S)
            await until(lambda: led() == len(SHARED) - 1)
            balance(REST_S + PAUSE_S - 1)
            assert led() == len(SHARED) - 1
            balance(REST_S + PAUSE_S)
            await until(lambda: led() == len(SHARED) - 2)
            await nodes.until_led(*SHARED)
            for entry in plan(NAMES):
                if entry.number in SHARED:
                    await until(lambda entry=entry: nodes.leader(entry.number) == entry.members[0])
            # What is where it belongs stays there.
            balance(1_000.0)
            balance(2_000.0)
            assert led() == 1
            assert not any(nodes["a"].groups[group].is_handing_over for group in SHARED)

    asyncio.run(scene())


def test_node_must_have_been_well_for_a_while_to_get_groups_back(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            await let_lead(nodes, "a")
            members_of, balance = nodes["a"].membership.members_of, balancing(nodes)
            balance(0.0)
            nodes.links.part("b")
            nodes.links.part("c")
            nodes.links.cut -= {frozenset("ac")}
            group = next(one for one in SHARED if members_of(one)[0] == "b")
            await until(lambda: not nodes["a"].groups[group].may_take_over("b"))
            balance(REST_S)
            nodes.links.heal()
            await until(lambda: nodes["a"].groups[group].may_take_over("b"))
            balance(REST_S + 1)
            balance(REST_S + WELL_S)
            assert nodes["a"].groups.leads(group)
            assert not nodes["a"].groups[group].is_handing_over

    asyncio.run(scene())
