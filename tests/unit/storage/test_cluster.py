"""Three whole nodes that replicate streams: what moves when leadership does, and what stays."""

import asyncio
import time
from pathlib import Path

import pytest

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import ConsumerConfig, PublishMessage, StreamConfig
from contrail_link.contract.admin import EventsRequest
from contrail_link.contract.consume import AckItem, PullRequest
from contrail_link.contract.tickets import TICKET_NS
from contrail_link.publishing import publish
from contrail_serve.groups import SingleMemberGroups
from contrail_storage.core.key_layout import META_GROUP
from contrail_storage.link import LocalLink
from contrail_storage.node import NodeOptions, StorageNode
from contrail_storage.options import Cluster
from contrail_storage.replica.shard import Shard
from tests.unit.storage.cluster_rig import NAMES, Nodes, plan, running, until


async def create(nodes: Nodes, name: str, replicas: int = 3) -> str:
    """Create a stream; return the node that leads it."""
    config = StreamConfig(name=name, subjects=(f"{name}.*",), num_replicas=replicas)
    await nodes.call("a", lambda link: link.put_stream(config, "put", None, False))
    return leader_of(nodes, name)


def leader_of(nodes: Nodes, stream: str) -> str:
    led = [one for one in nodes.all() if one.meta.streams[stream].shard_id in one.applier.shards]
    [leader] = [one for one in led if one.streams.stream(stream).is_led]
    return leader.options.name


def copies_of(nodes: Nodes, asked: str, stream: str) -> list[Shard]:
    """The shard of a stream on all nodes; some may not know its name yet."""
    shard_id = nodes[asked].meta.streams[stream].shard_id
    return [node.applier.shards[shard_id] for node in nodes.all()]


def messages(stream: str, first: int, count: int) -> list[PublishMessage]:
    return [
        PublishMessage(f"{stream}.{n % 7}", None, b"%d" % n, msg_id=f"{n}")
        for n in range(first, first + count)
    ]


def test_stream_survives_its_leader_with_ids_consumers_and_acks(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            first = await create(nodes, "S")
            link = LocalLink(nodes[first])
            await publish(link, "S", messages("S", 0, 100))
            config = ConsumerConfig(name="c", durable=True)
            await link.put_consumer("S", config, "put", None, False)
            pulled = await link.pull(PullRequest(stream="S", consumer="c", batch=40, no_wait=True))
            acks = [
                AckItem(*pulled.address(one), one.message.seq, "ack") for one in pulled.deliveries
            ]
            await link.acknowledge("S", "c", acks, sync=True)
            group = nodes[first].streams.shard("S").group
            nodes.links.part(first)
            others = [name for name in NAMES if name != first]
            await until(lambda: any(nodes[one].groups.leads(group) for one in others))
            second = next(one for one in others if nodes[one].groups.leads(group))
            # What was acknowledged is there, and its ids are known. The new leader may learn of the
            # stream's name later.
            ack = await nodes.call(second, lambda link: publish(link, "S", messages("S", 0, 120)))
            link = LocalLink(nodes[second])
            info = await link.stream_info("S")
            assert info.state.messages == 120
            assert [one.duplicate for one in ack.results] == [True] * 100 + [False] * 20
            pulled = await link.pull(PullRequest(stream="S", consumer="c", batch=99, no_wait=True))
            assert [one.message.seq for one in pulled.deliveries] == list(range(41, 121))
            nodes.links.heal()
            await until(lambda: not nodes[first].groups.leads(group))
            shards = copies_of(nodes, second, "S")
            await until(lambda: all(shard.applied_seq == 120 for shard in shards))
            assert len({shard.machine.counters.digest for shard in shards}) == 1

    asyncio.run(scene())


def test_publish_on_a_leader_that_is_cut_off_is_refused_once_another_entry_has_its_place(
    tmp_path: Path,
) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            first = await create(nodes, "S")
            group = nodes[first].streams.shard("S").group
            nodes.links.part(first)
            cut_off = asyncio.ensure_future(
                publish(LocalLink(nodes[first]), "S", messages("S", 900, 1))
            )
            others = [name for name in NAMES if name != first]
            await until(lambda: any(nodes[one].groups.leads(group) for one in others))
            second = next(one for one in others if nodes[one].groups.leads(group))
            await nodes.call(second, lambda link: publish(link, "S", messages("S", 0, 10)))
            assert not cut_off.done()
            nodes.links.heal()
            ack = await cut_off
            assert [one.code for one in ack.results] == [errors.NOT_LEADER.code]
            shards = copies_of(nodes, second, "S")
            await until(lambda: all(shard.applied_seq == 10 for shard in shards))

    asyncio.run(scene())


def test_leader_that_is_cut_off_answers_no_read(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            leader = await create(nodes, "S")
            link = LocalLink(nodes[leader])
            await publish(link, "S", messages("S", 0, 1))
            await link.put_consumer("S", ConsumerConfig(name="c", durable=True), "put", None, False)
            nodes.links.part(leader)
            # It leads as far as it knows, and cannot know what another leader has stored since.
            assert nodes[leader].streams.stream("S").is_led
            for read in (
                link.get_message("S", 1),
                link.stream_info("S"),
                link.consumer_info("S", "c"),
                link.read_position("S"),
                link.subject_counts("S", "", 10, ""),
            ):
                with pytest.raises(ApiError) as caught:
                    await read
                assert caught.value.spec is errors.NOT_LEADER

    asyncio.run(scene())


def test_event_is_told_by_the_leader_alone(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            leader = await create(nodes, "S")
            links = [LocalLink(node) for node in nodes.all()]
            begins = [(await link.read_events(EventsRequest())).position for link in links]
            config = ConsumerConfig(name="c", durable=True)
            await LocalLink(nodes[leader]).put_consumer("S", config, "put", None, False)
            copies = copies_of(nodes, leader, "S")
            await until(lambda: all(copy.machine.consumer("c") for copy in copies))
            told = [
                event.type
                for link, begin in zip(links, begins, strict=True)
                for event in (await link.read_events(EventsRequest(after=begin))).advisories
            ]
            assert told == ["consumer_action"]

    asyncio.run(scene())


def test_what_would_not_hold_on_all_replicas_is_refused(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            leader = await create(nodes, "S")
            link = LocalLink(nodes[leader])
            await publish(link, "S", messages("S", 0, 1))
            with pytest.raises(ApiError) as caught:
                await link.erase("S", [1], "")
            assert caught.value.spec is errors.NOT_IMPLEMENTED
            assert (await link.get_message("S", 1)).seq == 1
            for node in nodes.all():
                link = LocalLink(node)
                used = link.use_ticket(b"n" * 16, time.time_ns() + TICKET_NS)
                if node.groups.leads(META_GROUP):
                    assert await used
                else:
                    with pytest.raises(ApiError) as caught:
                        await used
                    assert caught.value.spec is errors.NOT_LEADER

    asyncio.run(scene())


def test_folder_of_another_node_is_refused(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path):
            pass

    asyncio.run(scene())
    alone = NodeOptions(tmp_path / "alone", "a")
    StorageNode.open(alone, SingleMemberGroups()).close()
    among = Cluster(NAMES, plan(NAMES), lambda name, body: None)  # type: ignore[arg-type,return-value]
    for options, problem in (
        (NodeOptions(tmp_path / "a", "a"), "it is that of node a of a cluster"),
        (NodeOptions(tmp_path / "a", "b", cluster=among), "it is that of node a, not of b"),
        (NodeOptions(tmp_path / "alone", "a", cluster=among), "a node without a cluster"),
    ):
        with pytest.raises(OSError, match=problem):
            StorageNode.open(options, SingleMemberGroups())


def test_streams_spread_and_any_node_says_who_leads(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            for number in range(6):
                await create(nodes, f"S{number}")
                await create(nodes, f"R{number}", replicas=1)
            groups = {nodes["a"].meta.streams[name].groups for name in nodes["a"].meta.streams}
            assert groups == {(number,) for number in (1, 2, 3, 1024, 1025, 1026)}
            for name in nodes["a"].meta.streams:
                for asked in NAMES:
                    info = await nodes.call(asked, lambda link, name=name: link.stream_info(name))
                    assert info.config.name == name

    asyncio.run(scene())


def test_everything_is_there_after_all_nodes_restarted(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            leader = await create(nodes, "S")
            await publish(LocalLink(nodes[leader]), "S", messages("S", 0, 50))
        async with running(tmp_path) as nodes:
            info = await nodes.call("b", lambda link: link.stream_info("S"))
            assert info.state.messages == 50

    asyncio.run(scene())
