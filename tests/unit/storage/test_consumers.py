"""One object for each consumer: found once for a request, and another one when it must be."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import ConsumerConfig, StreamConfig
from contrail_link.contract.consume import AckItem, PullRequest, PullResult
from contrail_link.publishing import publish
from contrail_storage.consumers import dispatcher
from contrail_storage.core import commands as cmd
from contrail_storage.link import LocalLink
from contrail_storage.node import StorageNode
from tests.unit.storage.sharded_rig import CONFIG as SHARDED
from tests.unit.storage.sharded_rig import fill, message, play

ONE = StreamConfig(name="S", subjects=("a.>",))
FORMS = pytest.mark.parametrize("config", [ONE, SHARDED], ids=["one shard", "several"])
LONG_NS = 3_600_000_000_000


class CountedName(str):
    """A name that counts how often a dictionary looks it up."""

    looked_up: int

    def __new__(cls, name: str) -> "CountedName":
        counted = super().__new__(cls, name)
        counted.looked_up = 0
        return counted

    def __hash__(self) -> int:
        self.looked_up += 1
        return super().__hash__()


async def put(link: LocalLink, name: str = "c", **fields: Any) -> None:
    config = ConsumerConfig(name=name, durable=True, **fields)
    await link.put_consumer("S", config, "put", None, False)


async def pull(link: LocalLink, name: str = "c", **fields: Any) -> PullResult:
    fields.setdefault("no_wait", "expires_ns" not in fields)
    return await link.pull(PullRequest(stream="S", consumer=name, batch=9, **fields))


async def ack(link: LocalLink, result: PullResult, *seqs: int, name: str = "c") -> None:
    items = [
        AckItem(*result.address(one), [one.message.seq], "ack")
        for one in result.deliveries
        if not seqs or one.message.seq in seqs
    ]
    answers = await link.acknowledge("S", name, items, True)
    assert [one.code for one in answers] == [0] * len(items)


@FORMS
def test_request_looks_the_name_of_its_consumer_up_once(
    tmp_path: Path, config: StreamConfig
) -> None:
    async def scene(_: StorageNode, link: LocalLink) -> None:
        await fill(link, 9)
        await put(link)
        await pull(link, expires_ns=1)

        pulled = CountedName("c")
        result = await pull(link, pulled)
        assert pulled.looked_up == 1
        acked = CountedName("c")
        await ack(link, result, name=acked)
        assert acked.looked_up == 1
        described = CountedName("c")
        await link.consumer_info("S", described)
        assert described.looked_up == 1

    play(tmp_path, scene, config)


@FORMS
@pytest.mark.parametrize("removed", ["consumer", "stream"])
def test_consumer_created_again_under_its_name_is_another_one(
    tmp_path: Path, config: StreamConfig, removed: str
) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        await put(link)
        consumer = node.consumers.find(node.streams.stream("S"), "c")
        assert node.consumers.find(node.streams.stream("S"), "c") is consumer
        held = await link.bind_consumer("S", "c")
        waiting = asyncio.ensure_future(pull(link, expires_ns=LONG_NS))
        while not consumer.dispatchers[0].waiters:
            await asyncio.sleep(0)

        if removed == "consumer":
            await link.delete_consumer("S", "c")
        else:
            await link.delete_stream("S")
            await link.put_stream(config, "create", None, False)
        await put(link)
        with pytest.raises(ApiError) as ended:
            await waiting
        assert ended.value.spec in (errors.CONSUMER_DELETED, errors.STREAM_NOT_FOUND)
        assert [item async for item in held] == []  # type: ignore[attr-defined]
        await held.aclose()
        assert not (await link.consumer_info("S", "c")).push_bound
        assert node.consumers.find(node.streams.stream("S"), "c") is not consumer
        await fill(link, 3)
        assert len((await pull(link)).deliveries) == 3

    play(tmp_path, scene, config)


@FORMS
def test_consumer_that_is_removed_while_others_are_listed_is_left_out(
    tmp_path: Path, config: StreamConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        for name in ("a", "b", "d"):
            await put(link, name)
        await fill(link, 3)
        await pull(link, "a")
        dropping = asyncio.ensure_future(node.consumers.delete(node.streams.stream("S"), "b"))
        await asyncio.sleep(0)
        # The info of "a" waits until its delivery is recorded, which is after the removal.
        page = await link.list_consumers("S", 9, "")
        await dropping
        assert [info.config.name for info in page.consumers] == ["a", "d"]
        first = await link.list_consumers("S", 1, "")
        second = await link.list_consumers("S", 1, first.next_token or "")
        names = [info.config.name for info in first.consumers + second.consumers]
        assert names == ["a", "d"]
        assert second.next_token is None

    monkeypatch.setattr(dispatcher, "JOIN_S", 3_600.0)
    play(tmp_path, scene, config)


@FORMS
@pytest.mark.parametrize("policy", ["last", "last_per_subject"])
def test_consumer_of_the_last_message_begins_with_one_that_is_there(
    tmp_path: Path, config: StreamConfig, policy: str
) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        await put(link)
        subjects = ["k.1", *["k.2"] * 3, "k.1"]
        await publish(link, "S", [message(one, b"%d" % at) for at, one in enumerate(subjects)])
        await ack(link, await pull(link), 5)
        machines = [shard.machine for shard in node.streams.stream("S").shards]
        assert any(machine.last_live("a.k.1") is None for machine in machines)
        await put(link, "last", deliver_policy=policy, filter_subjects=("a.k.1",))
        result = await pull(link, "last")
        assert [one.message.payload for one in result.deliveries] == [b"0"]

    play(tmp_path, scene, msgspec.structs.replace(config, retention="interest"))


@FORMS
def test_raised_limit_of_pending_acks_serves_the_pull_that_waits(
    tmp_path: Path, config: StreamConfig
) -> None:
    """Also if the client that raised it has left before the change was applied."""

    async def scene(node: StorageNode, link: LocalLink) -> None:
        await put(link, max_ack_pending=1, ack_wait_ns=LONG_NS)
        await fill(link, 2, keys=1)
        assert len((await pull(link)).deliveries) == 1
        stream = node.streams.stream("S")
        await link.consumer_info("S", "c")  # the delivery is recorded: nothing else will wake it
        waiting = asyncio.ensure_future(pull(link, expires_ns=LONG_NS))
        while not node.consumers.find(stream, "c").dispatchers[0].waiters:
            await asyncio.sleep(0)
        for shard in stream.shards:
            known = shard.machine.consumer("c")
            assert known is not None
            raised = msgspec.structs.replace(known.config, max_ack_pending=2)
            change = cmd.PutConsumer(raised, 0, given=cmd.Precondition(update=True))
            await node.shard_logs.command(shard.machine.shard_id, change)
        assert [one.message.payload for one in (await waiting).deliveries] == [b"1"]

    play(tmp_path, scene, config)


@FORMS
def test_new_consumer_does_not_disturb_the_pulls_of_others(
    tmp_path: Path, config: StreamConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, taken = dispatcher.Dispatcher.take, 0

    async def counted(self: dispatcher.Dispatcher, request: PullRequest) -> Any:
        nonlocal taken
        taken += self.consumer.config.name == "c"
        return await take(self, request)

    async def scene(node: StorageNode, link: LocalLink) -> None:
        await put(link)
        waiting = asyncio.ensure_future(pull(link, expires_ns=LONG_NS))
        consumer = node.consumers.find(node.streams.stream("S"), "c")
        while not consumer.dispatchers[0].waiters:
            await asyncio.sleep(0)
        await put(link, "settled")  # a pull from several shards tries them once more
        before = taken
        for number in range(9):
            await put(link, f"other-{number}")
        assert taken == before
        await fill(link, 1)
        assert len((await waiting).deliveries) == 1
        assert taken > before

    monkeypatch.setattr(dispatcher.Dispatcher, "take", counted)
    play(tmp_path, scene, config)


@FORMS
@pytest.mark.parametrize("retention", ["limits", "interest"])
def test_ack_of_all_holds_for_deliveries_whose_record_is_lost_with_their_leader(
    tmp_path: Path, config: StreamConfig, retention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        await put(link, ack_policy="all")
        await fill(link, 5, keys=1)
        result = await pull(link)
        for group in node.streams.stream("S").groups:
            node.consumers.end_term(group)
        await ack(link, result, 4)
        assert [one.message.seq for one in (await pull(link)).deliveries] == [5]
        if retention == "interest":
            while (await link.stream_info("S")).state.messages > 1:
                await asyncio.sleep(0)

    monkeypatch.setattr(dispatcher, "JOIN_S", 3_600.0)
    play(tmp_path, scene, msgspec.structs.replace(config, retention=retention))
