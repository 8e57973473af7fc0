"""Interest on a node: gaps between blocks, deliveries that remove, slices that finish."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from contrail_common.errors import ApiError
from contrail_common.model import ConsumerConfig, PublishMessage, StreamConfig
from contrail_link.contract.consume import PullRequest
from contrail_link.contract.read import LastRequest, RangeRequest, ReplayPlanRequest, ReplayRequest
from contrail_link.publishing import publish
from contrail_storage.core import commands as cmd
from contrail_storage.link import LocalLink
from contrail_storage.node import StorageNode
from contrail_storage.streams.removals import Removals
from contrail_storage.upkeep import housekeeper
from tests.unit.storage.dispatcher_rig import PATIENCE_S, DispatcherRig, run, turns, wait_until
from tests.unit.storage.machine_rig import picture
from tests.unit.storage.test_restore_node import running

CONFIG = StreamConfig(name="S", subjects=("a.>",), retention="interest")
TURNS = 40


async def filled(node: StorageNode) -> list[int]:
    """A stream of which every third message is wanted; the sequences that it has."""
    link = LocalLink(node)
    await link.put_stream(CONFIG, "create", None, False)
    config = ConsumerConfig(name="c", durable=True, filter_subjects=("a.kept.*",))
    await link.put_consumer("S", config, "create", None, False)
    for turn in range(TURNS):
        await publish(link, "S", [PublishMessage(f"a.kept.{turn % 4}", None, b"%d" % turn)])
        await publish(link, "S", [PublishMessage("a.gone", None, b"x")] * 2)
    return [1 + 3 * turn for turn in range(TURNS)]


async def seqs_by_every_way(link: LocalLink) -> list[list[int]]:
    """The sequences of the stream as a range, a replay, and the splits of a plan have them."""
    found = await link.read_range(RangeRequest(stream="S", limit=1_000))
    ways = [[message.seq for message in found.messages]]
    plan = await link.replay_plan(ReplayPlanRequest(stream="S", splits=3))
    whole = ReplayRequest(stream="S", format="ndjson")
    parts = [
        ReplayRequest(stream="S", from_seq=split.from_seq, to_seq=split.to_seq, format="ndjson")
        for split in plan.splits
    ]
    for requests in ([whole], parts):
        seqs: list[int] = []
        for request in requests:
            body = b"".join([chunk async for chunk in await link.replay(request)])
            records = [msgspec.json.decode(line) for line in body.splitlines()]
            seqs += [record["seq"] for record in records if "seq" in record]
        ways.append(seqs)
    assert sum(split.messages for split in plan.splits) == len(ways[0])
    return ways


def test_reads_pass_over_what_is_in_no_block(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as node:
            link = LocalLink(node)
            kept = await filled(node)
            assert await seqs_by_every_way(link) == [kept] * 3
            info = await link.stream_info("S")
            assert (info.state.messages, info.state.last_seq) == (TURNS, 3 * TURNS)
            for point in range(1, 20):
                last = LastRequest(stream="S", subject="a.kept.*", up_to_seq=point)
                messages, _ = await link.last_messages(last)
                assert [message.seq for message in messages] == [
                    seq for seq in kept if seq <= point
                ][-4:]
            await link.delete_message("S", kept[-1])
            await link.delete_message("S", kept[-5])
            newest, _ = await link.last_messages(LastRequest(stream="S", subject="a.kept.3"))
            assert [one.seq for one in newest] == [kept[-9]]
            assert await link.purge_stream("S", "a.kept.0", 0, 3) == 7

    run(scene())


def test_blocks_with_gaps_are_merged_and_found_again_after_a_restart(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as node:
            kept = await filled(node)
            shard_id = node.streams.shard("S").machine.shard_id
            await wait_until(lambda: len(node.blocks.directory(shard_id)) < TURNS // 2)
            before = picture(node.streams.shard("S").machine)
        async with running(tmp_path) as node:
            assert picture(node.streams.shard("S").machine) == before
            assert await seqs_by_every_way(LocalLink(node)) == [kept] * 3

    run(scene())


def test_archive_of_a_stream_with_gaps_is_restored(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as node:
            link = LocalLink(node)
            kept = await filled(node)
            archive = b"".join([piece async for piece in await link.snapshot("S", True)])
            await link.delete_stream("S")
            token = await link.begin_restore("S")
            await link.append_restore(token, 0, archive)
            info = await link.commit_restore(token)
            assert (info.state.messages, info.state.last_seq) == (TURNS, 3 * TURNS)
            assert await seqs_by_every_way(link) == [kept] * 3
            pull = PullRequest(stream="S", consumer="c", batch=100, no_wait=True)
            assert len((await link.pull(pull)).deliveries) == TURNS

    run(scene())


def test_wanted_messages_after_unwanted_ones_of_their_entry_are_read(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as node:
            link = LocalLink(node)
            await filled(node)
            shard_id = node.streams.shard("S").machine.shard_id
            # What is asked for in one turn goes into one entry; the command keeps both apart.
            unwanted = [PublishMessage("a.gone", None, b"x")]
            wanted = [PublishMessage("a.kept.1", None, b"y")] * 2
            stored = asyncio.get_running_loop().create_future()
            link.publish_then("S", unwanted, lambda _: None)
            node.shard_log.command(shard_id, cmd.EnforceLimits(1))
            link.publish_then("S", wanted, stored.set_result)
            assert (await stored).results[0].seq == 3 * TURNS + 2
            async with asyncio.timeout(PATIENCE_S):
                message = await link.get_message("S", 3 * TURNS + 3)
            assert message.payload == b"y"

    run(scene())


def test_what_a_crash_left_is_finished_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(*_: object) -> None:
        """The node ends here."""

    async def scene() -> None:
        async with running(tmp_path) as node:
            kept = await filled(node)
            assert kept
            with monkeypatch.context() as patched:
                patched.setattr(Removals, "enforce_interest", nothing)
                patched.setattr(housekeeper.Housekeeper, "tick", nothing)
                await LocalLink(node).delete_consumer("S", "c")
                assert node.streams.shard("S").machine.pending_recheck
        async with running(tmp_path) as node:
            machine = node.streams.shard("S").machine
            await wait_until(lambda: not machine.pending_recheck)
            assert machine.counters.messages == 0

    run(scene())


# Deliveries without acks -------------------------------------------------------------------------


def unacked(**fields: object) -> DispatcherRig:
    return DispatcherRig(
        config=StreamConfig(name="S", subjects=("a.*", "b"), retention="interest"),
        consumer_fields={"ack_policy": "none"},
        **fields,  # type: ignore[arg-type]
    )


def test_delivery_without_ack_is_sent_after_its_commit_and_removes() -> None:
    async def scene() -> None:
        rig = unacked(late=True)
        rig.publish("a.1", "a.2", "b")
        pulling = asyncio.create_task(rig.pull_seqs(2))
        await turns()
        assert not pulling.done()
        assert rig.machine.counters.messages == 3
        rig.commit()
        assert await pulling == [1, 2]
        assert rig.machine.counters.messages == 1

    run(scene())


def test_lost_delivery_without_ack_comes_with_the_next_pull() -> None:
    async def scene() -> None:
        rig = unacked(late=True)
        rig.publish("a.1", "a.2", "b")
        first = asyncio.create_task(rig.pull_seqs(1))
        second = asyncio.create_task(rig.pull_seqs(1))
        await turns()
        rig.refuse_one(0)
        rig.commit()
        with pytest.raises(ApiError):
            await first
        assert await second == [2]
        assert [seq for seq in (1, 2, 3) if rig.machine.is_live(seq)] == [1, 3]
        again = asyncio.create_task(rig.pull_seqs(5))
        await turns()
        rig.commit()
        assert await again == [1, 3]
        assert rig.machine.counters.messages == 0

    run(scene())


def test_delivery_continues_in_columns_once_the_stream_has_limits_alone() -> None:
    async def scene() -> None:
        rig = unacked()
        rig.publish("a.1", "a.2", "b")
        assert await rig.pull_seqs(1) == [1]
        rig.apply(cmd.ConfigureStream(StreamConfig(name="S", subjects=("a.*", "b")), "i", b""))
        result = await rig.pull(5, columns=True)
        assert result.columns is not None
        assert (result.columns.first_consumer_seq, result.columns.last_seq) == (2, 3)
        assert rig.machine.counters.messages == 2

    run(scene())
