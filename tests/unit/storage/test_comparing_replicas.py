"""Replicas whose state differs: the odd one leaves, and one against one stops the writes."""

import asyncio
from pathlib import Path

import pytest

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_link.publishing import publish
from contrail_replicator import comparisons
from contrail_storage.core.chain import Chain
from contrail_storage.link import LocalLink
from tests.unit.storage.cluster_rig import NAMES, Nodes, running, turn, until
from tests.unit.storage.test_cluster import copies_of, create, messages

SUSPECT = 2


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparisons, "EVERY_S", 0.2)


def damage(nodes: Nodes, name: str, group: int) -> None:
    """Let a replica have applied something else."""
    chains = nodes[name].applier.chains
    chains[group] = Chain(chains[group].time_ns, bytes(16))


def test_odd_replica_is_suspect_and_all_others_are_not(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            leader = await create(nodes, "S")
            group = nodes[leader].streams.shard("S").group
            odd, other = (name for name in NAMES if name != leader)
            await publish(LocalLink(nodes[leader]), "S", messages("S", 0, 20))
            copies = await copies_of(nodes, leader, "S")
            await until(lambda: {one.applied_seq for one in copies} == {20})
            damage(nodes, odd, group)
            for first in (20, 25):
                await publish(LocalLink(nodes[leader]), "S", messages("S", first, 5))
            await until(lambda: nodes[odd].log.flags(group) == SUSPECT)
            ack = await publish(LocalLink(nodes[leader]), "S", messages("S", 30, 5))
            assert ack.results[-1].seq == 35
            # No member of any other group was taken for damaged.
            found = {
                (name, number): nodes[name].log.flags(number)
                for name in NAMES
                for number, one in nodes[name].groups.items()
                if not one.is_alone
            }
            assert {at for at, flags in found.items() if flags} == {(odd, group)}
            assert len(found) == 12
            assert other

    asyncio.run(scene())


def test_one_against_one_refuses_writes_until_a_third_decides(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            leader = await create(nodes, "S")
            group = nodes[leader].streams.shard("S").group
            odd, away = (name for name in NAMES if name != leader)
            link = LocalLink(nodes[leader])
            await publish(link, "S", messages("S", 0, 20))
            copies = await copies_of(nodes, leader, "S")
            await until(lambda: {one.applied_seq for one in copies} == {20})
            await nodes.stop(away)
            damage(nodes, odd, group)

            async def outcome() -> int | None:
                try:
                    ack = await publish(link, "S", messages("S", 100, 1))
                except ApiError as error:
                    return error.spec.code
                return ack.results[0].code

            while await outcome() != errors.REPLICAS_DIFFER.code:
                await turn()
            assert (await link.stream_info("S")).state.messages == 21
            await nodes.start(away)
            await until(lambda: nodes[odd].log.flags(group) == SUSPECT)
            while await outcome() == errors.REPLICAS_DIFFER.code:
                await turn()
            assert (await link.stream_info("S")).state.messages == 21

    asyncio.run(scene())
