"""Consumers of streams with several shards: one interface, a position in each shard."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contrail_common import errors
from contrail_common.columns.blocks import Block
from contrail_common.errors import ApiError, ErrorSpec
from contrail_common.model import AckKind, ConsumerConfig, StreamConfig
from contrail_common.partition import shard_of
from contrail_link.contract.consume import AckItem, Delivery, PullRequest, PullResult
from contrail_link.contract.read import RangeRequest
from contrail_link.publishing import publish
from contrail_storage.core import commands as cmd
from contrail_storage.core.results import Result
from contrail_storage.link import LocalLink
from contrail_storage.metrics import render_metrics
from contrail_storage.node import StorageNode
from contrail_storage.replica.proposer import Proposer
from contrail_storage.replica.shard import Shard
from tests.support.folders import copy_at_one_moment
from tests.unit.storage.sharded_rig import (
    CONFIG,
    PATIENCE_S,
    SHARDS,
    fill,
    message,
    play,
    read_all,
    running,
)

SECOND_NS = 1_000_000_000


def consumer(name: str = "c", **fields: Any) -> ConsumerConfig:
    return ConsumerConfig(name=name, durable=True, **fields)


async def make(link: LocalLink, name: str = "c", **fields: Any) -> None:
    await link.put_consumer("S", consumer(name, **fields), "put", None, False)


async def pull(link: LocalLink, batch: int = 100, **fields: Any) -> PullResult:
    fields.setdefault("no_wait", "expires_ns" not in fields)
    return await link.pull(PullRequest(stream="S", consumer="c", batch=batch, **fields))


async def settle(
    link: LocalLink, result: PullResult, deliveries: list[Delivery], kind: AckKind = "ack"
) -> None:
    items = [AckItem(*result.address(one), [one.message.seq], kind) for one in deliveries]
    answers = await link.acknowledge("S", "c", items, True)
    assert [one.code for one in answers] == [0] * len(items)


def payloads(deliveries: list[Delivery]) -> list[int]:
    return sorted(int(one.message.payload) for one in deliveries)


async def refused(work: Coroutine[Any, Any, Any], spec: ErrorSpec, field: str = "") -> None:
    with pytest.raises(ApiError) as error:
        await work
    assert error.value.spec is spec
    assert not field or [one.pointer for one in error.value.fields] == [field]


def test_everything_is_delivered_once_and_settled_where_it_came_from(tmp_path: Path) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        await fill(link, 60)
        await make(link)
        found: list[Delivery] = []
        while True:
            result = await pull(link, 7)
            if not result.deliveries:
                break
            assert len(result.deliveries) <= 7
            pending = [one.num_pending for one in result.deliveries]
            assert pending == list(range(pending[0], pending[0] - len(pending), -1))
            assert result.num_pending == pending[-1]
            found += result.deliveries
            await settle(link, result, result.deliveries)
        assert payloads(found) == list(range(60))
        for shard in range(SHARDS):
            own = [one for one in found if one.message.shard == shard]
            assert [one.message.seq for one in own] == list(range(1, len(own) + 1))
            assert [one.consumer_seq for one in own] == list(range(1, len(own) + 1))
        info = await link.consumer_info("S", "c")
        assert info.delivered.consumer_seq == info.ack_floor.consumer_seq == 60
        assert (info.num_ack_pending, info.num_pending) == (0, 0)
        assert sum(one.delivered.consumer_seq for one in info.shards) == 60
        state = await link.stream_info("S")
        assert state.state.consumer_count == 1
        assert [one.delivered.stream_seq for one in info.shards] == [
            one.last_seq for one in state.shards
        ]

    play(tmp_path, scene)


def test_every_shard_has_its_turn(tmp_path: Path) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        await fill(link, 200, keys=40)
        await make(link)
        shards = [(await pull(link, 1)).deliveries[0].message.shard for _ in range(3 * SHARDS)]
        assert sorted(shards[:SHARDS]) == list(range(SHARDS))
        assert shards[SHARDS:] == shards[: 2 * SHARDS]

    play(tmp_path, scene)


def test_pending_acks_of_all_shards_together_are_limited(tmp_path: Path) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        await fill(link, 60)
        await make(link, max_ack_pending=5)
        both = await asyncio.gather(pull(link, 4), pull(link, 4))
        assert sorted(len(one.deliveries) for one in both) == [1, 4]
        assert (await link.consumer_info("S", "c")).num_ack_pending == 5
        waiting = asyncio.ensure_future(pull(link, 4, expires_ns=int(PATIENCE_S * 1e9)))
        await asyncio.sleep(0)
        result = max(both, key=lambda one: len(one.deliveries))
        await settle(link, result, result.deliveries[:2])
        assert 1 <= len((await waiting).deliveries) <= 2
        assert (await link.consumer_info("S", "c")).num_ack_pending <= 5

    play(tmp_path, scene)


def test_waiting_pulls_are_served_in_their_order_from_any_shard(tmp_path: Path) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        await make(link, max_waiting=3)
        wait_ns = int(PATIENCE_S * 1e9)
        waiting = [asyncio.ensure_future(pull(link, expires_ns=wait_ns)) for _ in range(3)]
        while (await link.consumer_info("S", "c")).num_waiting < 3:
            await asyncio.sleep(0)
        await refused(pull(link, expires_ns=wait_ns), errors.TOO_MANY_WAITERS)
        for number, one in enumerate(waiting):
            await publish(link, "S", [message(f"k{number}", b"%d" % number)])
            assert payloads((await one).deliveries) == [number]
        assert (await pull(link, expires_ns=1_000_000)).deliveries == []
        waiting = [asyncio.ensure_future(pull(link, expires_ns=wait_ns)) for _ in range(2)]
        while (await link.consumer_info("S", "c")).num_waiting < 2:
            await asyncio.sleep(0)
        await link.delete_consumer("S", "c")
        for one in waiting:
            await refused(one, errors.CONSUMER_DELETED)  # type: ignore[arg-type]
        assert all(not shard.machine.consumers for shard in node.applier.shards.values())

    play(tmp_path, scene)


def test_pull_that_comes_while_others_wait_queues_after_them(tmp_path: Path) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        await make(link)
        wait_ns = int(PATIENCE_S * 1e9)
        first = asyncio.ensure_future(pull(link, expires_ns=wait_ns))
        while (await link.consumer_info("S", "c")).num_waiting < 1:
            await asyncio.sleep(0)
        publishing = asyncio.ensure_future(publish(link, "S", [message("k", b"1")]))
        second = asyncio.ensure_future(pull(link, expires_ns=wait_ns))
        assert payloads((await first).deliveries) == [1]
        await publishing
        assert not second.done()
        await publish(link, "S", [message("k", b"2")])
        assert payloads((await second).deliveries) == [2]

    play(tmp_path, scene)


def test_consumer_of_a_stream_created_again_with_other_shards_starts_over(tmp_path: Path) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        for shards in (SHARDS, 2, 7, 1, 3):
            config = msgspec.structs.replace(CONFIG, shards=shards)
            await link.put_stream(config, "put", None, False)
            await fill(link, 20)
            await make(link)
            assert len((await pull(link, 20)).deliveries) == 20
            await link.delete_stream("S")

    play(tmp_path, scene, None)


def test_pull_that_was_cancelled_gives_its_messages_back(tmp_path: Path) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        await fill(link, 40)
        await make(link, ack_wait_ns=3_600 * SECOND_NS)
        for patience in range(12):
            leaving = asyncio.ensure_future(pull(link, 30))
            for _ in range(patience):
                await asyncio.sleep(0)
            if leaving.done():
                await settle(link, leaving.result(), leaving.result().deliveries, "nak")
                continue
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
        found: list[Delivery] = []
        while len(found) < 40:
            found += (await pull(link, 40, expires_ns=int(PATIENCE_S * 1e9))).deliveries
        assert payloads(found) == list(range(40))

    play(tmp_path, scene)


def test_naks_and_ack_waits_bring_messages_back(tmp_path: Path) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        await fill(link, 20)
        await make(link, ack_wait_ns=3_600 * SECOND_NS)
        result = await pull(link, 20)
        await settle(link, result, result.deliveries[:6], "nak")
        await settle(link, result, result.deliveries[6:], "term")
        again = await pull(link, 20, expires_ns=int(PATIENCE_S * 1e9))
        found = list(again.deliveries)
        while len(found) < 6:
            found += (await pull(link, 20, expires_ns=int(PATIENCE_S * 1e9))).deliveries
        assert payloads(found) == payloads(result.deliveries[:6])
        assert {one.num_delivered for one in found} == {2}
        assert (await link.consumer_info("S", "c")).num_redelivered == 6

    play(tmp_path, scene)


def test_waiting_pull_gets_a_message_due_after_one_that_was_acknowledged_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        await make(link, ack_wait_ns=SECOND_NS // 5)
        await fill(link, 2, keys=1)
        first = await pull(link, 1)
        await node.consumers.find(node.streams.stream("S"), "c").info()  # its time runs now
        second = await pull(link, 1)
        await settle(link, second, second.deliveries, "in_progress")
        find, asked = node.reader.block_at, 0

        async def block_at(shard: Shard, seq: int) -> Block | None:
            nonlocal asked
            asked += 1
            if asked == 1:
                await settle(link, first, first.deliveries)
            return await find(shard, seq)

        monkeypatch.setattr(node.reader, "block_at", block_at)
        again = await pull(link, expires_ns=3_600 * SECOND_NS)
        assert [one.message.seq for one in again.deliveries] == [2]

    play(tmp_path, scene)


def test_pull_keeps_to_its_bytes_over_all_shards(tmp_path: Path) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        for key in range(12):
            await publish(link, "S", [message(key, b"x" * 100)])
        await make(link)
        assert len((await pull(link, 12, max_bytes=350)).deliveries) == 3
        await refused(pull(link, 12, max_bytes=99), errors.PULL_TOO_SMALL)
        assert len((await pull(link, 12)).deliveries) == 9

    play(tmp_path, scene)


def test_start_of_a_consumer_is_found_in_every_shard(tmp_path: Path) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        await fill(link, 50)
        everything = await read_all(link)

        async def first_pull(**fields: Any) -> list[int]:
            await make(link, ack_policy="none", **fields)
            found = payloads((await pull(link, 100)).deliveries)
            await link.delete_consumer("S", "c")
            return found

        assert await first_pull(deliver_policy="new") == []
        late = everything[30].time_ns
        assert await first_pull(deliver_policy="by_start_time", opt_start_time_ns=late) == list(
            range(30, 50)
        )
        assert await first_pull(deliver_policy="last") == [49]
        only = {"filter_subjects": ("a.2", "a.3")}
        assert await first_pull(deliver_policy="last", **only) == [45]
        page = await link.read_range(RangeRequest(stream="S", limit=20))
        by_cursor = {"deliver_policy": "by_start_sequence", "opt_start_cursor": page.cursor}
        assert await first_pull(**by_cursor) == list(range(20, 50))
        seq = consumer(deliver_policy="by_start_sequence", opt_start_seq=3)
        await refused(
            link.put_consumer("S", seq, "put", None, False),
            errors.SHARDED_UNSUPPORTED,
            "/opt_start_seq",
        )
        bad = consumer(deliver_policy="by_start_sequence", opt_start_cursor="x")
        await refused(
            link.put_consumer("S", bad, "put", None, False), errors.INVALID_FIELD, "cursor"
        )

    play(tmp_path, scene)


def test_update_reaches_every_shard_under_one_version(tmp_path: Path) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        await make(link)
        before = await link.consumer_info("S", "c")
        changed = consumer(max_ack_pending=7, ack_wait_ns=SECOND_NS)
        after, created = await link.put_consumer("S", changed, "put", before.version, False)
        assert (after.version, created) == (before.version + 1, False)
        configs = [shard.machine.consumer("c").config for shard in node.streams.stream("S").shards]  # type: ignore[union-attr]
        assert configs == [after.config] * SHARDS
        stale = link.put_consumer("S", consumer(), "put", before.version, False)
        await refused(stale, errors.PRECONDITION_FAILED)
        await refused(
            link.put_consumer("S", consumer(ack_policy="none"), "put", None, False),
            errors.CONSUMER_UPDATE_REFUSED,
        )
        await refused(
            link.put_consumer("S", consumer(), "create", None, False), errors.CONSUMER_EXISTS
        )
        page = await link.list_consumers("S", 10, "")
        assert [one.config.name for one in page.consumers] == ["c"]

    play(tmp_path, scene)


def test_tokens_of_elsewhere_are_refused(tmp_path: Path) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        await fill(link, 8)
        await make(link)
        await make(link, "d")
        other = StreamConfig(name="OTHER", subjects=("other.>",), shards=2)
        await link.put_stream(other, "put", None, False)
        there = node.streams.shard("OTHER", 1).machine.shard_id
        result = await pull(link, 8)
        one = result.deliveries[0]
        shard, consumer_id, epoch = result.address(one)
        items = [
            AckItem(shard, consumer_id, epoch, [one.message.seq], "ack"),
            AckItem(shard, consumer_id + 1, epoch, [one.message.seq], "ack"),
            AckItem(99, consumer_id, epoch, [one.message.seq], "ack"),
            AckItem(there, consumer_id, epoch, [one.message.seq], "ack"),
            AckItem(shard, consumer_id, epoch + 1, [one.message.seq], "ack"),
        ]
        answers = await link.acknowledge("S", "c", items, True)
        forged, stale = errors.TOKEN_FORGED.code, errors.TOKEN_STALE.code
        assert [each.code for each in answers] == [0, forged, stale, forged, stale]

        await link.delete_stream("OTHER")
        answers = await link.acknowledge("S", "c", items[3:4], True)
        assert [each.code for each in answers] == [stale]

    play(tmp_path, scene)


def test_idle_consumer_is_removed_from_all_shards_at_once(tmp_path: Path) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        await fill(link, 20)
        ephemeral = ConsumerConfig(
            name="c", durable=False, inactive_threshold_ns=1, ack_wait_ns=SECOND_NS
        )
        await link.put_consumer("S", ephemeral, "put", None, False)
        while node.streams.shard("S", 0).machine.consumers:
            await asyncio.sleep(0)
        while any(shard.machine.consumers for shard in node.applier.shards.values()):
            await asyncio.sleep(0)
        await refused(link.consumer_info("S", "c"), errors.CONSUMER_NOT_FOUND)

    play(tmp_path, scene)


def test_crash_at_any_entry_leaves_a_consumer_on_all_shards_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = consumer(max_ack_pending=9, description="d")
    images: list[tuple[Path, str]] = []

    def crash(data_dir: Path, during: str) -> None:
        image = tmp_path / f"image-{len(images)}"
        copy_at_one_moment(data_dir, image)
        images.append((image, during))

    async def scene(node: StorageNode, link: LocalLink) -> None:
        propose, during = Proposer.command, ""

        def command(log: Proposer, shard: int, one: cmd.Command) -> "asyncio.Future[Result]":
            future = propose(log, shard, one)
            if isinstance(one, cmd.PutConsumer | cmd.DropConsumer):
                future.add_done_callback(lambda _: crash(tmp_path / "data", during))
            return future

        monkeypatch.setattr(Proposer, "command", command)
        await fill(link, 10)
        during = "create"
        await make(link)
        during = "update"
        await link.put_consumer("S", changed, "put", None, False)
        during = "delete"
        await link.delete_consumer("S", "c")
        monkeypatch.undo()

    async def look(image: Path) -> str:
        async with asyncio.timeout(PATIENCE_S), running(image) as node:
            link = LocalLink(node)
            found = [shard.machine.consumer("c") for shard in node.streams.stream("S").shards]
            configs = [None if one is None else one.config for one in found]
            assert len({repr(config) for config in configs}) == 1
            if configs[0] is None:
                await make(link)
            result = await pull(link, 10)
            while len(result.deliveries) < 9:
                more = await pull(link, 10)
                assert more.deliveries, payloads(result.deliveries)
                result.deliveries.extend(more.deliveries)
            if configs[0] is None:
                return "none"
            return "after" if configs[0].description else "before"

    play(tmp_path / "data", scene)
    found = {during: set[str]() for during in ("create", "update", "delete")}
    for image, during in images:
        found[during].add(asyncio.run(look(image)))
    assert found == {"create": {"none", "before"}, "update": {"after"}, "delete": {"none"}}


steps = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.lists(st.integers(0, 12), min_size=1, max_size=6)),
        st.tuples(st.just("pull"), st.integers(1, 9)),
        st.tuples(st.just("ack"), st.integers(1, 6)),
        st.tuples(st.just("nak"), st.integers(1, 6)),
    ),
    max_size=14,
)


@settings(max_examples=15, deadline=None)
@given(steps, st.integers(1, 12))
def test_nothing_is_skipped_and_no_more_is_pending_than_may(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, Any]], limit: int
) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        await make(link, max_ack_pending=limit, ack_wait_ns=3_600 * SECOND_NS)
        published = 0
        held: list[tuple[PullResult, Delivery]] = []
        done: list[int] = []
        for step, argument in steps:
            if step == "publish":
                batch = [message(key, b"%d" % (published + at)) for at, key in enumerate(argument)]
                await publish(link, "S", batch)
                published += len(batch)
            elif step == "pull":
                result = await pull(link, argument)
                held += [(result, one) for one in result.deliveries]
                assert len({one.message.payload for _, one in held}) == len(held) <= limit
            else:
                taken, held = held[:argument], held[argument:]
                for result, one in taken:
                    await settle(link, result, [one], "ack" if step == "ack" else "nak")
                done += [int(one.message.payload) for _, one in taken] if step == "ack" else []
        for result, one in held:
            await settle(link, result, [one])
            done.append(int(one.message.payload))
        while len(done) < published:
            result = await pull(link, limit)
            assert result.deliveries
            await settle(link, result, result.deliveries)
            done += payloads(result.deliveries)
        assert sorted(done) == list(range(published))
        info = await link.consumer_info("S", "c")
        assert (info.num_pending, info.num_ack_pending) == (0, 0)

    play(tmp_path_factory.mktemp("node"), scene)


def test_figures_are_of_the_whole_stream_once(tmp_path: Path) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        await fill(link, 30)
        await make(link)
        result = await pull(link, 12)
        await settle(link, result, result.deliveries[:2])
        await link.consumer_info("S", "c")  # which waits until all is recorded
        lines = (await render_metrics(node)).splitlines()
        samples = [line for line in lines if 'stream="S"' in line]
        assert len({line.rpartition(" ")[0] for line in samples}) == len(samples)
        for sample in (
            'contrail_stream_messages{stream="S"} 30.0',
            'contrail_stream_consumers{stream="S"} 1.0',
            'contrail_stream_ack_pending{stream="S"} 10.0',
            'contrail_consumer_deliveries_total{consumer="c",stream="S"} 12.0',
            'contrail_consumer_ack_pending{consumer="c",stream="S"} 10.0',
            'contrail_consumer_lag{consumer="c",stream="S"} 18.0',
        ):
            assert sample in samples
        assert "contrail_streams 1.0" in lines

    play(tmp_path, scene)


def test_filters_choose_in_every_shard(tmp_path: Path) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        await fill(link, 70)
        await make(link, filter_subjects=("a.1", "a.4", "a.6"))
        info = await link.consumer_info("S", "c")
        assert info.num_pending == 30
        found = (await pull(link, 100)).deliveries
        assert {one.message.subject for one in found} == {"a.1", "a.4", "a.6"}
        assert len(found) == 30
        for one in found:
            assert one.message.shard == shard_of(one.message.subject, SHARDS, (2,))
        headers = msgspec.structs.replace(
            consumer(filter_subjects=("a.1", "a.4", "a.6")), headers_only=True
        )
        await link.put_consumer("S", headers, "put", None, False)

    play(tmp_path, scene)
