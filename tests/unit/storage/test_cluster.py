"""Three whole nodes that replicate streams: what moves when leadership does, and what stays."""

import asyncio
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import ConsumerConfig, PublishMessage, StreamConfig
from contrail_link.contract.admin import EventsRequest
from contrail_link.contract.consume import AckItem, PullRequest
from contrail_link.contract.tickets import TICKET_NS
from contrail_link.publishing import publish
from contrail_serve.groups import SingleMemberGroups
from contrail_storage.core import commands as cmd
from contrail_storage.core.key_layout import META_GROUP
from contrail_storage.disk.files import Files
from contrail_storage.disk.node_file import Stage, load_identity, save_identity
from contrail_storage.link import LocalLink
from contrail_storage.node import NodeOptions, StorageNode
from contrail_storage.options import Cluster
from contrail_storage.replica.shard import Shard
from tests.unit.storage.cluster_rig import NAMES, Nodes, plan, running, until
from tests.unit.storage.restore_rig import archive_of


async def create(nodes: Nodes, name: str, replicas: int = 3) -> str:
    """Create a stream; return the node that leads it."""
    config = StreamConfig(name=name, subjects=(f"{name}.*",), num_replicas=replicas)
    await nodes.call("a", lambda link: link.put_stream(config, "put", None, False))
    return leader_of(nodes, name)


def leader_of(nodes: Nodes, stream: str) -> str:
    # The others may not have heard of the stream yet.
    known = [one for one in nodes.all() if stream in one.meta.streams]
    [leader] = [
        one
        for one in known
        if one.groups.leads(one.meta.group_of(one.meta.streams[stream].shard_id))
    ]
    return leader.options.name


async def copies_of(nodes: Nodes, asked: str, stream: str) -> list[Shard]:
    """The shard of a stream on all nodes, once they have it; some may not know its name yet."""
    shard_id = nodes[asked].meta.streams[stream].shard_id
    held = [node.applier.shards for node in nodes.all()]
    await until(lambda: all(shard_id in shards for shards in held))
    return [shards[shard_id] for shards in held]


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
                AckItem(*pulled.address(one), [one.message.seq], "ack") for one in pulled.deliveries
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
            shards = await copies_of(nodes, second, "S")
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
            # The refusal of the whole request, which a router sends to the leader then.
            with pytest.raises(ApiError) as caught:
                await cut_off
            refusal = caught.value
            assert (refusal.spec, refusal.applied) == (errors.NOT_LEADER, False)
            shards = await copies_of(nodes, second, "S")
            await until(lambda: all(shard.applied_seq == 10 for shard in shards))

    asyncio.run(scene())


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("part", ["store", "log", "copy"])
def test_node_that_cannot_write_and_leads_no_more_refers_callers_to_the_others(
    tmp_path: Path, shards: int, part: str
) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            config = StreamConfig(name="S", subjects=("S.*",), num_replicas=3, shards=shards)
            await nodes.call("a", lambda link: link.put_stream(config, "put", None, False))
            await nodes.until_listed("S")
            failing = nodes[leader_of(nodes, "S")]
            stream = failing.streams.stream("S")
            match part:
                case "store":
                    failing.healing.fail_store(OSError("No space left on device"))
                case "log":
                    failing.healing.log_failed(OSError("for a test"))
                case "copy":
                    for group in failing.logged_groups.values():
                        group.resign()
                    stream.shards[0].damaged = "block 1: rot"
            batch = [PublishMessage(f"S.{number}", None, b"") for number in range(9)]
            with pytest.raises(ApiError) as refused:
                await publish(LocalLink(failing), "S", batch)
            assert (refused.value.spec, refused.value.applied) == (errors.NOT_LEADER, False)
            with pytest.raises(ApiError) as refused:
                await LocalLink(failing).erase("S", [], "S.1")
            assert (refused.value.spec, refused.value.applied) == (errors.NOT_LEADER, False)

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


def test_leader_that_is_cut_off_does_not_say_that_something_is_not_there(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            leader = await create(nodes, "S")
            await nodes.until_led(META_GROUP)
            names = leader, nodes.leader(META_GROUP)
            link, meta = (LocalLink(nodes[name]) for name in names)
            for name in names:
                nodes.links.part(name)
            # They lead as far as they know. Another leader may have made all of these meanwhile.
            assert nodes[leader].streams.stream("S").is_led
            for request in (
                link.pull(PullRequest(stream="S", consumer="none", batch=1)),
                link.bind_consumer("S", "none"),
                link.acknowledge("S", "none", [], True),
                meta.stream_info("NONE"),
                meta.stream_for_subject("none"),
                publish(meta, "", [PublishMessage("none", None, b"")]),
                publish(meta, "NONE", [PublishMessage("none", None, b"")]),
            ):
                with pytest.raises(ApiError) as caught:
                    await request
                assert caught.value.spec is errors.NOT_LEADER

    asyncio.run(scene())


def test_leader_that_is_cut_off_delivers_nothing(tmp_path: Path) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "counted": {"max_deliver": 3},
        "unacked": {"ack_policy": "none"},
    }

    async def scene() -> None:
        async with running(tmp_path) as nodes:
            leader = await create(nodes, "S")
            link = LocalLink(nodes[leader])
            await publish(link, "S", messages("S", 0, 9))
            for name, kind in kinds.items():
                config = ConsumerConfig(name=name, durable=True, **kind)
                await link.put_consumer("S", config, "put", None, False)
                assert await pulled(link, name) == [1, 2, 3, 4]
                await link.consumer_info("S", name)  # waits until the deliveries are recorded
            group = nodes[leader].groups[nodes[leader].streams.shard("S").group]
            nodes.links.part(leader)
            await until(lambda: not group.heard_majority_within(0.3))
            # It leads as far as it knows, and has messages that another leader may have removed.
            assert group.is_leader
            refused = await asyncio.gather(
                *(pulled(link, name) for name in kinds), return_exceptions=True
            )
            assert [getattr(one, "spec", one) for one in refused] == [errors.NOT_LEADER] * 3
            nodes.links.heal()
            for name in kinds:
                assert await nodes.call(leader, partial(pulled, consumer=name)) == [5, 6, 7, 8]
            for name in kinds:
                await nodes.call(leader, lambda link, name=name: link.consumer_info("S", name))

    asyncio.run(scene())


async def pulled(link: LocalLink, consumer: str) -> list[int]:
    pull = PullRequest(stream="S", consumer=consumer, batch=4, no_wait=True)
    return [one.message.seq for one in (await link.pull(pull)).deliveries]


def test_event_is_told_by_the_leader_alone(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            leader = await create(nodes, "S")
            links = [LocalLink(node) for node in nodes.all()]
            begins = [(await link.read_events(EventsRequest())).position for link in links]
            config = ConsumerConfig(name="c", durable=True)
            await LocalLink(nodes[leader]).put_consumer("S", config, "put", None, False)
            copies = await copies_of(nodes, leader, "S")
            await until(lambda: all(copy.machine.consumer("c") for copy in copies))
            told = [
                event.type
                for link, begin in zip(links, begins, strict=True)
                for event in (await link.read_events(EventsRequest(after=begin))).advisories
            ]
            assert told == ["consumer_action"]

    asyncio.run(scene())


def test_ticket_is_used_at_the_leader_of_the_meta_group_alone(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
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

    async def ask(name: str, body: bytes) -> bytes:
        raise ApiError(errors.NOT_LEADER, name)

    formed = load_identity(Files(), tmp_path / "a")
    assert formed is not None
    save_identity(Files(), tmp_path / "a", replace(formed, stage=Stage.FORMED, nodes=NAMES))
    among, elsewhere = (Cluster(names, plan(names), ask, ask) for names in (NAMES, ("a", "b", "d")))
    for options, problem in (
        (
            NodeOptions(tmp_path / "a", "a", cluster=elsewhere),
            "formed with the nodes a, b, c, not with a, b, d",
        ),
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
            # The node may learn of the last one a moment later.
            await until(lambda: len(nodes["a"].meta.streams) == 12)
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


@pytest.mark.parametrize("replicas", [1, 3])
def test_node_that_does_not_know_all_groups_yet_creates_no_stream(
    tmp_path: Path, replicas: int
) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            config = StreamConfig(name="S", subjects=("S.*",), num_replicas=replicas)
            for node in nodes.all():
                table = node.meta.group_table
                # As after a restart, until the entries of the meta group are applied again.
                known, table.groups = table.groups, dict(list(table.groups.items())[:2])
                with pytest.raises(ApiError) as caught:
                    await LocalLink(node).put_stream(config, "put", None, False)
                assert caught.value.spec is errors.NOT_LEADER
                assert "groups" in node.readiness(strict=True)
                table.groups = known

    asyncio.run(scene())


def test_stream_is_created_that_another_node_has_begun_and_given_up(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            config = StreamConfig(name="S", subjects=("S.*",), num_replicas=3)
            leader = await create(nodes, "S")
            entry = nodes[leader].meta.streams["S"]
            await nodes.call(leader, lambda link: link.delete_stream("S"))
            # The group that leads meta: its own command comes first, so nobody has heard of the
            # reservation when the stream is created.
            reserve = cmd.ReserveStream("S", ("S.*",), "begun", groups=entry.groups)
            meta = nodes[nodes.leader(META_GROUP)]
            reserved = asyncio.ensure_future(meta.meta_log.command(reserve))
            put = LocalLink(nodes[leader]).put_stream(config, "create", None, False)
            (info, created), _ = await asyncio.gather(put, reserved)
            assert created
            assert info.config == config
            assert nodes[leader].meta.streams["S"].incarnation != "begun"

    asyncio.run(scene())


def test_stream_is_restored_that_another_node_has_begun_and_given_up(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            leader = await create(nodes, "S")
            link, entry = LocalLink(nodes[leader]), nodes[leader].meta.streams["S"]
            await publish(link, "S", messages("S", 0, 3))
            data = await archive_of(link)
            await nodes.call(leader, lambda link: link.delete_stream("S"))
            token = await link.begin_restore("S")
            # As in the test before: the name is reserved after the restore has begun.
            reserve = cmd.ReserveStream("S", ("S.*",), "begun", groups=entry.groups)
            meta = nodes[nodes.leader(META_GROUP)]
            reserved = asyncio.ensure_future(meta.meta_log.command(reserve))
            await asyncio.gather(link.append_restore(token, 0, data), reserved)
            info = await link.commit_restore(token)
            assert info.state.messages == 3
            # A stream that is there by then is not replaced.
            token = await link.begin_restore("T")
            taken = cmd.ReserveStream("T", ("T.*",), "begun", groups=entry.groups)
            await nodes[leader].meta_log.command(taken)
            shard_id = nodes[leader].meta.streams["T"].shard_id
            config = StreamConfig(name="T", subjects=("T.*",), num_replicas=3)
            made = cmd.ConfigureStream(config, "begun", b"k" * 32)
            await nodes[leader].shard_log.command(shard_id, made)
            with pytest.raises(ApiError) as caught:
                await link.append_restore(token, 0, data)
            assert caught.value.spec is errors.STREAM_RESTORE_EXISTS

    asyncio.run(scene())
