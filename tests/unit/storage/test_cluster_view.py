"""What the nodes of a cluster say of themselves and of each other."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from contrail_api.cluster.shown import ClusterStateJson, cluster_json
from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import AdvisoryType
from contrail_link.contract.admin import EventsRequest
from contrail_link.publishing import publish
from contrail_storage.link import LocalLink
from tests.unit.storage.cluster_rig import NAMES, Nodes, is_listed, running, turn, until
from tests.unit.storage.test_cluster import create, messages


def test_stream_info_shows_the_other_copies(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            first = await create(nodes, "S")
            others = sorted(name for name in NAMES if name != first)
            link = LocalLink(nodes[first])
            await publish(link, "S", messages("S", 0, 10))
            stream = nodes[first].streams.stream("S")
            # A copy may be current and lag a little, so wait for the last entry too.
            await until(lambda: all(one.current and not one.lag for one in stream.info().replicas))
            info = await link.stream_info("S")
            assert info.leader == first
            assert [(one.name, one.offline) for one in info.replicas] == [
                (name, False) for name in others
            ]
            away, near = others
            nodes.links.part(away)
            for number in range(3):
                await publish(link, "S", messages("S", 10 + number, 1))
            await until(lambda: stream.info().replicas[0].offline)
            lost, kept = (await link.stream_info("S")).replicas
            assert (lost.name, lost.lag, lost.current) == (away, 3, False)
            assert (kept.name, kept.lag, kept.current) == (near, 0, True)
            [listed] = (await link.list_streams("", "", 10, "")).streams
            assert listed.replicas == (await link.stream_info("S")).replicas
            nodes.links.heal()
            await until(lambda: stream.info().replicas[0].current)
            assert stream.info().replicas[0].lag == 0
            # A stream with one copy has no others.
            single = await create(nodes, "R1", replicas=1)
            assert (await LocalLink(nodes[single]).stream_info("R1")).replicas == []

    asyncio.run(scene())


async def state_of(nodes: Nodes) -> ClusterStateJson:
    """The state that an edge shows which reaches all running nodes."""
    views = [view for node in nodes.all() for view in await LocalLink(node).node_views()]
    return cluster_json(views)


def test_cluster_is_healthy_again_after_a_node_was_away(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            while (state := await state_of(nodes)).status != "healthy":
                await turn()
            assert [one.name for one in state.nodes] == list(NAMES)
            assert [one.kind for one in state.groups] == [
                "meta", *["single"] * 3, *["replicated"] * 3
            ]  # fmt: skip
            await nodes.stop("c")
            while "c does not answer" not in (state := await state_of(nodes)).missing:
                await turn()
            # Groups that the node led need an election first.
            while (state := await state_of(nodes)).status != "degraded":
                await turn()
            [single] = [one for one in state.groups if one.kind == "single" and not one.leader]
            assert [one.name for one in single.members] == ["c"]
            await nodes.start("c")
            while (state := await state_of(nodes)).status != "healthy":
                await turn()
            assert state.missing == []

    asyncio.run(scene())


def test_copies_are_read_while_they_are_recent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            first = await create(nodes, "S")
            away, other = (name for name in NAMES if name != first)
            await publish(LocalLink(nodes[first]), "S", messages("S", 0, 10))
            links = {name: LocalLink(nodes[name]) for name in NAMES}
            await until(lambda: is_listed(nodes[away], "S"))
            stream = nodes[away].streams.stream("S")
            await until(lambda: stream.staleness_s() < 1.0)
            found = await links[away].find_replica("S")
            assert (found.node, found.last_seq) == (away, 10)
            assert (await links[away].get_message("S", 3, replica=away)).payload == b"2"
            assert (await links[away].stream_info("S", replica=away)).state.messages == 10
            with pytest.raises(ApiError) as refused:
                await links[away].get_message("S", 3)
            assert refused.value.spec is errors.NOT_LEADER
            assert (await links[away].replica_position("S", None, away)).last_seq == 10
            for read in (
                links[away].get_message("S", 3, replica=other),
                links[away].replica_position("S", None, other),
            ):
                with pytest.raises(ApiError, match="no whole and recent copy"):
                    await read
            # What this member misses, its staleness shows.
            nodes.links.part(away)
            await publish(links[first], "S", messages("S", 10, 5))
            await until(lambda: stream.staleness_s() > 1.0)
            monkeypatch.setattr("contrail_storage.link.STALENESS_MAX_S", 10.0)
            found = await links[away].find_replica("S")
            assert found.last_seq == 10
            assert found.staleness_ns >= 1_000_000_000
            await until(lambda: stream.staleness_s() > 10.0)
            late: list[Coroutine[Any, Any, object]] = [
                links[away].find_replica("S"),
                links[away].get_message("S", 1, replica=away),
            ]
            for read in late:
                with pytest.raises(ApiError, match="no whole and recent copy") as refused:
                    await read
                assert (refused.value.spec, refused.value.applied) == (errors.NOT_READY, False)
            nodes.links.heal()
            await until(lambda: stream.staleness_s() < 1.0)
            assert (await links[away].find_replica("S")).last_seq == 15

    asyncio.run(scene())


def test_leaders_tell_that_they_lead_and_metrics_count_it(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            first = await create(nodes, "S")
            group = nodes[first].streams.stream("S").shards[0].group
            types: tuple[AdvisoryType, ...] = ("leader_elected", "leader_lost", "quorum_lost")
            asked = EventsRequest(types=types)
            after = {name: await LocalLink(nodes[name]).read_events(asked) for name in NAMES}
            nodes.links.part(first)
            others = [name for name in NAMES if name != first]
            await until(lambda: any(nodes[one].groups.leads(group) for one in others))
            await until(lambda: not nodes[first].groups.leads(group))
            second = next(one for one in others if nodes[one].groups.leads(group))
            told = {
                name: [
                    (one.type, one.server)
                    for one in (
                        await LocalLink(nodes[name]).read_events(
                            replace(asked, after=after[name].position)
                        )
                    ).advisories
                    if one.group == group
                ]
                for name in NAMES
            }
            assert told[first] == [("quorum_lost", first)]
            assert told[second] == [("leader_elected", second)]
            assert told[next(name for name in others if name != second)] == []
            text = await LocalLink(nodes[first]).metrics_text()
            counted = f'contrail_raft_step_downs_total{{cause="no_quorum",group="{group}"}} 1.0'
            assert counted in text
            text = await LocalLink(nodes[second]).metrics_text()
            assert f'contrail_raft_leader{{group="{group}"}} 1.0' in text
            assert f'contrail_raft_elections_total{{cause="timeout",group="{group}"}}' in text
            assert f'contrail_raft_lag{{group="{group}",peer="{first}"}}' in text

    asyncio.run(scene())
