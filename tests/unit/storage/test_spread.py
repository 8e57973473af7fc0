"""Streams whose shards are led by several nodes, and are one stream for clients."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import ConsumerConfig, PublishMessage, StoredMessage, StreamConfig
from contrail_common.partition import shard_of
from contrail_link.contract.consume import AckItem, Delivery, PullRequest
from contrail_link.contract.read import RangeRequest
from contrail_link.publishing import publish
from contrail_storage.core import commands as cmd
from contrail_storage.core.key_layout import META_GROUP
from contrail_storage.core.results import Result
from contrail_storage.link import LocalLink
from contrail_storage.node import StorageNode
from contrail_storage.replica import elsewhere
from tests.unit.storage.cluster_rig import NAMES, Nodes, is_listed, running, turn, until

SHARDS = 3
CONFIG = StreamConfig(name="S", subjects=("s.*",), shards=SHARDS, num_replicas=3)


def play(folder: Path, scene: Callable[[Nodes], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        async with running(folder) as nodes:
            for group in (1024, 1025, 1026):
                await give(nodes, group, NAMES[group - 1024])
            await nodes.call("a", lambda link: link.put_stream(CONFIG, "put", None, False))
            await nodes.until_listed("S")
            await scene(nodes)

    asyncio.run(whole())


async def give(nodes: Nodes, group: int, to: str) -> None:
    """Let a node lead a group."""
    while (leader := nodes.leader(group)) != to:
        if leader:
            await nodes[leader].leadership.hand_over(group, to)
        await turn()


def groups_of(nodes: Nodes) -> tuple[int, ...]:
    known = next(node for node in nodes.all() if "S" in node.meta.streams)
    return known.meta.streams["S"].groups


def home_of(nodes: Nodes) -> str:
    """The node that serves the stream."""
    return nodes.leader(groups_of(nodes)[0])


async def until_served(nodes: Nodes, but: str = "") -> LocalLink:
    """The link of the node that serves the stream, and is not the one named."""

    def serving() -> list[StorageNode]:
        return [
            node
            for name, node in nodes.links.nodes.items()
            if name != but and is_listed(node, "S") and node.streams.stream("S").is_led
        ]

    await until(lambda: len(serving()) == 1)
    return LocalLink(serving()[0])


async def fill(nodes: Nodes, first: int, count: int) -> None:
    """Publish messages one by one, each at the leader of its shard; payloads by number."""
    for number in range(first, first + count):
        subject = f"s.{number % 11}"
        group = groups_of(nodes)[shard_of(subject, SHARDS)]
        sent = [PublishMessage(subject, None, b"%d" % number, msg_id=f"{number}")]

        async def at_leader(link: LocalLink, sent: list[PublishMessage] = sent) -> None:
            ack = await publish(link, "S", sent)
            assert not ack.results[0].code

        await until(lambda group=group: bool(nodes.leader(group)))
        await nodes.call(nodes.leader(group), at_leader)


async def pull(link: LocalLink, batch: int = 100) -> tuple[list[Delivery], list[AckItem]]:
    result = await link.pull(PullRequest(stream="S", consumer="c", batch=batch, no_wait=True))
    acks = [AckItem(*result.address(one), [one.message.seq], "ack") for one in result.deliveries]
    return result.deliveries, acks


async def read_all(link: LocalLink) -> list[StoredMessage]:
    return (await link.read_range(RangeRequest(stream="S", limit=1_000))).messages


def numbers(messages: list[StoredMessage]) -> list[int]:
    return sorted(int(one.payload) for one in messages)


def test_shards_are_led_by_all_nodes_and_are_one_stream(tmp_path: Path) -> None:
    async def scene(nodes: Nodes) -> None:
        assert {nodes.leader(group) for group in groups_of(nodes)} == set(NAMES)
        await fill(nodes, 0, 60)
        link = await until_served(nodes)
        info = await link.stream_info("S")
        assert info.state.messages == sum(one.messages for one in info.shards) == 60
        assert info.leader == home_of(nodes)
        assert [one.leader for one in info.shards] == [
            nodes.leader(one) for one in groups_of(nodes)
        ]
        assert numbers(await read_all(link)) == list(range(60))
        await link.put_consumer("S", ConsumerConfig(name="c", durable=True), "put", None, False)
        found: list[Delivery] = []
        while len(found) < 60:
            some, acks = await pull(link, 7)
            found += some
            assert not any(one.code for one in await link.acknowledge("S", "c", acks, True))
        assert numbers([one.message for one in found]) == list(range(60))
        consumer = await link.consumer_info("S", "c")
        assert (consumer.num_pending, consumer.num_ack_pending) == (0, 0)
        assert consumer.ack_floor.consumer_seq == 60
        # A message that arrives at another node wakes a pull that waits here.
        waiting = asyncio.ensure_future(
            link.pull(PullRequest(stream="S", consumer="c", batch=1, expires_ns=60 * 10**9))
        )
        other = next(
            one
            for one in range(11)
            if groups_of(nodes)[shard_of(f"s.{one}", SHARDS)] != groups_of(nodes)[0]
        )
        await fill(nodes, 66 + other, 1)
        assert int((await waiting).deliveries[0].message.payload) == 66 + other
        one = (await read_all(link))[0]
        await link.delete_message("S", one.seq, one.shard)
        assert await link.purge_stream("S", "", 0, 0) == 60
        assert (await link.stream_info("S")).state.messages == 0
        await link.delete_stream("S")
        await until(lambda: not any(node.meta.streams for node in nodes.all()))
        await until(
            lambda: (
                not any(
                    shard.machine.exists
                    for node in nodes.all()
                    for shard in node.applier.shards.values()
                )
            )
        )

    play(tmp_path, scene)


def test_nodes_refuse_what_another_one_does(tmp_path: Path) -> None:
    async def scene(nodes: Nodes) -> None:
        groups = groups_of(nodes)
        several = [PublishMessage(f"s.{n}", None, b"") for n in range(11)]
        for name in NAMES:
            with pytest.raises(ApiError) as refused:
                await publish(LocalLink(nodes[name]), "S", several)
            assert refused.value.spec is errors.NOT_LEADER
            if name != home_of(nodes):
                with pytest.raises(ApiError) as refused:
                    await LocalLink(nodes[name]).stream_info("S")
                assert (refused.value.spec, refused.value.leader) == (
                    errors.NOT_LEADER,
                    home_of(nodes),
                )
            for number, group in enumerate(groups):
                asked = LocalLink(nodes[name]).read_position("S", number)
                if nodes.leader(group) == name:
                    assert (await asked).last_seq == 0
                else:
                    with pytest.raises(ApiError) as refused:
                        await asked
                    assert refused.value.leader == nodes.leader(group)

    play(tmp_path, scene)


def failing(node: StorageNode, step: str) -> None:
    """Let a node end in the middle of a change: this step, and what would follow, is not done."""

    async def ends(*_: Any, **__: Any) -> None:
        raise ApiError(errors.OUTCOME_UNKNOWN)

    setattr(node.streams, step, ends)


@pytest.mark.parametrize(
    ("step", "stays"), [("_configure", False), ("_propagate", True), ("_list", True)]
)
def test_next_leader_finishes_or_undoes_a_creation(tmp_path: Path, step: str, stays: bool) -> None:
    async def scene(nodes: Nodes) -> None:
        failing(nodes["a"], step)
        config = replace(CONFIG, name="T", subjects=("t.*",))
        with pytest.raises(ApiError):
            await LocalLink(nodes["a"]).put_stream(config, "put", None, False)
        home = nodes["a"].meta.streams["T"].groups[0]
        await give(nodes, home, "b")

        def is_done(node: StorageNode) -> bool:
            names = [stream.name for stream in node.streams.listed()]
            shards = [one for one in node.applier.shards.values() if one.machine.exists]
            if stays:
                return names == ["S", "T"] and len(shards) == 2 * SHARDS
            return "T" not in node.meta.streams and len(shards) == SHARDS

        await until(lambda: all(map(is_done, nodes.all())))

    play(tmp_path, scene)


def test_next_leader_finishes_a_change_and_a_removal(tmp_path: Path) -> None:
    async def scene(nodes: Nodes) -> None:
        failing(nodes["a"], "_propagate")
        config = replace(CONFIG, max_msgs=30)
        with pytest.raises(ApiError):
            await LocalLink(nodes["a"]).put_stream(config, "put", None, False)
        await give(nodes, groups_of(nodes)[0], "b")
        await until(
            lambda: all(
                shard.config.max_msgs == 30
                for node in nodes.all()
                for shard in node.streams.stream("S").shards
            )
        )
        failing(nodes["b"], "_drop")
        with pytest.raises(ApiError):
            await (await until_served(nodes)).delete_stream("S")
        await give(nodes, groups_of(nodes)[0], "c")
        await until(
            lambda: (
                not any(
                    node.meta.streams
                    or any(one.machine.exists for one in node.applier.shards.values())
                    for node in nodes.all()
                )
            )
        )

    play(tmp_path, scene)


@pytest.mark.parametrize("which", [0, 1])
def test_what_was_acked_is_delivered_to_nobody_after_a_leader_is_lost(
    tmp_path: Path, which: int
) -> None:
    """With the first shard, the node is lost that serves the stream; else one that has a shard."""

    async def scene(nodes: Nodes) -> None:
        await fill(nodes, 0, 60)
        link = await until_served(nodes)
        await link.put_consumer("S", ConsumerConfig(name="c", durable=True), "put", None, False)
        acked: list[Delivery] = []
        while len(acked) < 30:
            some, acks = await pull(link, 10)
            assert not any(one.code for one in await link.acknowledge("S", "c", acks, True))
            acked += some
        group = groups_of(nodes)[which]
        lost = nodes.leader(group)
        nodes.links.part(lost)
        left = [name for name in NAMES if name != lost]
        await until(lambda: any(nodes[name].groups.leads(group) for name in left))
        link = await until_served(nodes, lost)
        found: list[Delivery] = []
        while len(found) < 30:
            some, acks = await pull(link, 10)
            assert not any(one.code for one in await link.acknowledge("S", "c", acks, True))
            found += some
        assert numbers([one.message for one in [*acked, *found]]) == list(range(60))
        nodes.links.heal()
        await until(lambda: all(nodes.leader(one) for one in groups_of(nodes)))
        await fill(nodes, 60, 20)
        link = await until_served(nodes)
        assert numbers(await read_all(link)) == list(range(80))

    play(tmp_path, scene)


def test_commands_that_wait_for_another_leader_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elsewhere, "QUEUE_BYTES_MAX", 1 << 20)

    async def scene(nodes: Nodes) -> None:
        other = next(name for name in NAMES if name != nodes.leader(META_GROUP))
        asked = nodes[other].membership.spread.elsewhere
        large = cmd.ReleaseStream("N" * 100_000, "")

        def command() -> asyncio.Future[Result]:
            return asked.command(META_GROUP, META_GROUP, cmd.META_SHARD, large)

        for _ in range(2):  # what was sent makes room
            taken = [command() for _ in range(10)]
            with pytest.raises(ApiError) as refused:
                command()
            assert (refused.value.spec, refused.value.applied) == (errors.OVERLOADED, False)
            assert refused.value.detail == "too many commands wait for the leader of their group"
            await asyncio.wait(taken)
            assert not any(one.exception() for one in taken)
        # One is taken whatever its size.
        monkeypatch.setattr(elsewhere, "QUEUE_BYTES_MAX", 1)
        await command()

    play(tmp_path, scene)
