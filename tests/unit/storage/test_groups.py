"""A node that is a member of several groups: where shards lie, and what a restart brings back."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import ConsumerConfig, PublishMessage, StreamConfig
from contrail_link.contract.consume import AckItem, PullRequest
from contrail_link.publishing import publish
from contrail_serve.cluster import planned
from contrail_serve.groups import SingleMemberGroups
from contrail_storage.core import commands as cmd
from contrail_storage.core.group_table import GroupEntry
from contrail_storage.core.key_layout import SHARD_GROUP
from contrail_storage.core.results import Done, Refused, Result
from contrail_storage.link import LocalLink
from contrail_storage.node import NodeOptions, StorageNode
from contrail_storage.streams.placement import choose_group, choose_groups
from tests.crash.lives import wait_until
from tests.support.folders import copy_at_one_moment

PATIENCE_S = 60.0
GROUPS = 1024, 1025


@asynccontextmanager
async def running(data_dir: Path) -> AsyncIterator[tuple[StorageNode, LocalLink]]:
    node = StorageNode.open(NodeOptions(data_dir), SingleMemberGroups())
    async with asyncio.timeout(PATIENCE_S):
        await node.start()
        try:
            yield node, LocalLink(node)
        finally:
            await node.stop()


async def create_group(node: StorageNode, number: int, *members: str) -> Result:
    command = cmd.CreateGroup(number, members or (node.identity.node_id,))
    return await node.meta_log.command(command)


async def create_stream(link: LocalLink, name: str, shards: int = 1) -> None:
    config = StreamConfig(name=name, subjects=(f"{name}.*",), shards=shards)
    await link.put_stream(config, "put", None, False)


def groups_of(node: StorageNode, stream: str) -> list[int]:
    return [shard.group for shard in node.streams.stream(stream).shards]


def test_shards_of_all_groups_serve_and_come_back_with_a_restart(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as (node, link):
            await create_stream(link, "before")
            for number in GROUPS:
                assert await create_group(node, number) == Done()
            await wait_until(lambda: all(n in node.groups for n in GROUPS))
            await wait_until(lambda: all(node.groups[n].is_leader for n in GROUPS))
            for name in ("a", "b"):
                await create_stream(link, name)
            await create_stream(link, "wide", shards=4)
            assert groups_of(node, "before") == [SHARD_GROUP]
            assert sorted(groups_of(node, "a") + groups_of(node, "b")) == list(GROUPS)
            assert len(set(groups_of(node, "wide"))) == 1
            await link.put_consumer("b", ConsumerConfig(name="c", durable=True), "put", None, False)
            for name in ("before", "a", "b", "wide"):
                batch = [
                    PublishMessage(f"{name}.{n}", None, b"%d" % n, msg_id=f"{n}") for n in range(40)
                ]
                await publish(link, name, batch)
            pulled = await link.pull(PullRequest(stream="b", consumer="c", batch=40, no_wait=True))
            done = [
                AckItem(*pulled.address(one), [one.message.seq], "ack")
                for one in pulled.deliveries[:30]
            ]
            await link.acknowledge("b", "c", done, sync=True)
            indexes = {n: node.groups[n].applied_index for n in GROUPS}
            assert all(indexes.values())
        async with running(tmp_path) as (node, link):
            assert sorted(groups_of(node, "a") + groups_of(node, "b")) == list(GROUPS)
            assert len(set(groups_of(node, "wide"))) == 1
            assert all(node.groups[n].applied_index > indexes[n] for n in GROUPS)
            for name in ("before", "a", "b", "wide"):
                info = await link.stream_info(name)
                assert info.state.messages == 40
                # The ids of the first life are still known.
                batch = [
                    PublishMessage(f"{name}.{n}", None, b"%d" % n, msg_id=f"{n}") for n in range(40)
                ]
                await publish(link, name, batch)
                assert (await link.stream_info(name)).state.messages == 40
            assert (await link.consumer_info("b", "c")).num_ack_pending == 10
            await link.delete_stream("a")
            await create_stream(link, "again")
            assert groups_of(node, "again") != groups_of(node, "wide")[:1]

    asyncio.run(scene())


def test_shard_whose_name_the_meta_group_does_not_have_yet_is_loaded_all_the_same(
    tmp_path: Path,
) -> None:
    """The entries of two groups reach a member independently of each other."""

    async def scene() -> None:
        configure = cmd.ConfigureStream(
            StreamConfig(name="S", subjects=("s.*",)), "incarnation", b"k" * 32
        )
        async with running(tmp_path) as (node, _):
            await create_group(node, GROUPS[0])
            await wait_until(lambda: GROUPS[0] in node.groups)
            log = node.groups.proposers[GROUPS[0]]
            await wait_until(lambda: log.group.is_leader)
            assert await log.command(77, configure) == Done()
        async with running(tmp_path) as (node, _):
            shard = node.applier.shards[77]
            assert (shard.group, shard.config.name) == (GROUPS[0], "S")

    asyncio.run(scene())


def test_store_that_is_further_than_the_last_checkpoint_opens_whatever_the_group(
    tmp_path: Path,
) -> None:
    """RocksDB may flush by itself at any time."""
    running_folder, crashed = tmp_path / "running", tmp_path / "crashed"

    async def scene() -> None:
        async with running(running_folder) as (node, link):
            await create_group(node, GROUPS[0])
            await wait_until(lambda: node.groups.leads(GROUPS[0]))
            await create_stream(link, "a")
            await publish(link, "a", [PublishMessage("a.1", None, b"1")])
            await node.checkpoint()
            await publish(link, "a", [PublishMessage("a.2", None, b"2")])
            await node.until_written()
            node.raw_store.flush()
            copy_at_one_moment(running_folder, crashed)
        async with running(crashed) as (_, link):
            assert (await link.stream_info("a")).state.messages == 2

    asyncio.run(scene())


def test_group_is_made_once_and_only_soundly(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as (node, link):
            assert await create_group(node, 1024, "n8", "n9") == Done()
            assert await create_group(node, 1024, "n8", "n9") == Done(changed=False)
            for number, members in ((1024, ("n8",)), (0, ("n8",)), (1025, ("n8", "n8"))):
                assert isinstance(await create_group(node, number, *members), Refused)
            assert isinstance(await create_group(node, 1 << 31, "n8"), Refused)
            assert set(node.meta.group_table.groups) == {1024}
            # Not a member: it takes no part.
            assert 1024 not in node.groups
            config = StreamConfig(name="R", subjects=("r",), num_replicas=3)
            with pytest.raises(ApiError) as caught:
                await link.put_stream(config, "put", None, False)
            assert caught.value.spec is errors.REPLICAS_UNSUPPORTED

    asyncio.run(scene())


NODES = "abcde"
RING = [
    GroupEntry(1024 + n, tuple(NODES[(n + step) % len(NODES)] for step in range(3)))
    for n in range(len(NODES))
]


@given(st.lists(st.integers(1, 8), max_size=30))
def test_shards_spread_evenly_over_leaders_and_nodes(streams: list[int]) -> None:
    led, stored, shards_in = Counter[str](), Counter[str](), Counter[int]()
    for shards in streams:
        chosen = choose_group(3, RING, shards_in)
        assert chosen is not None
        assert led[chosen.members[0]] == min(led[one] for one in NODES)
        shards_in[chosen.number] += shards
        led[chosen.members[0]] += shards
        for member in chosen.members:
            stored[member] += shards
    # No node is ahead by more than one large stream, and stores more than three led ones do.
    assert max(led[one] for one in NODES) - min(led[one] for one in NODES) <= 8
    assert max(stored[one] for one in NODES) - min(stored[one] for one in NODES) <= 3 * 8
    assert choose_group(5, RING, shards_in) is None


@pytest.mark.parametrize(("nodes", "replicas"), [(3, 3), (4, 3), (5, 3), (5, 5), (6, 3), (6, 5)])
def test_each_member_leads_shards_of_a_stream(nodes: int, replicas: int) -> None:
    table, shards_in = planned(tuple(f"n{one}" for one in range(nodes))), Counter[int]()
    by_number = {entry.number: entry for entry in table}
    for shards in (3, 1, 8, 5, 2):
        first = choose_group(replicas, table, shards_in)
        assert first is not None
        chosen = [by_number[one] for one in choose_groups(first, shards, table, shards_in)]
        assert {frozenset(entry.members) for entry in chosen} == {frozenset(first.members)}
        led = Counter(entry.members[0] for entry in chosen)
        assert len(led) == min(shards, replicas)
        assert max(led.values()) - min(led.values()) <= 1
        shards_in.update(entry.number for entry in chosen)
