"""Pulls that leave, commands that fail, streams that go: the desk loses and doubles nothing."""

import asyncio

import pytest

from contrail_common import errors
from contrail_common.errors import ApiError, ErrorSpec
from contrail_storage.core import commands as cmd
from tests.unit.storage.desk_rig import (
    SECOND_NS,
    DeskRig,
    facts,
    refused_with,
    rig,
    run,
    seqs_of,
    turns,
    wait_until,
)


def test_message_goes_to_the_next_pull_when_a_waiting_one_leaves() -> None:
    async def scene() -> None:
        desk = rig()
        leaving, staying = desk.waiting_pull(), desk.waiting_pull()
        await turns()
        desk.publish("b")
        leaving.cancel()
        assert await staying == [1]
        with pytest.raises(asyncio.CancelledError):
            await leaving

    run(scene())


def test_pull_cancelled_while_it_reads_gives_back_new_and_due_messages() -> None:
    async def scene() -> None:
        desk = DeskRig(consumer_fields={"ack_wait_ns": SECOND_NS}, cached=False)
        desk.publish("b")
        desk.publish("b")
        assert await desk.pull_seqs() == [1]
        await desk.record()
        desk.log_ns += SECOND_NS
        desk.publish("b")
        desk.source.gate.clear()
        pull = asyncio.create_task(desk.pull(10))
        for _ in range(3):
            await wait_until(lambda: desk.source.waiting == 1)
            if len(desk.desk.in_flight) == 2:
                break
            desk.source.gate.set()
            await wait_until(lambda: desk.source.waiting == 0)
            desk.source.gate.clear()
        pull.cancel()
        desk.source.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await pull
        result = await desk.pull(10)
        assert [facts(each)[:3] for each in result.deliveries] == [(1, 2, 2), (2, 3, 1), (3, 4, 1)]

    run(scene())


def test_pull_cancelled_while_it_waits_for_its_commit_shares_nothing_with_the_next() -> None:
    async def scene() -> None:
        desk = rig(max_deliver=5)
        desk.late = True
        desk.publish("b", "b")
        first = asyncio.create_task(desk.pull_seqs())
        await turns()
        first.cancel()
        await turns()
        second = asyncio.create_task(desk.pull_seqs())
        await turns()
        desk.commit()
        assert await second == [2]
        desk.log_ns += SECOND_NS
        desk.late = False
        [one, two] = (await desk.pull(10)).deliveries
        assert (facts(one)[:3], facts(two)[:3]) == ((1, 3, 2), (2, 4, 2))

    run(scene())


def test_position_sent_with_deliveries_does_not_pass_those_of_a_pull_under_way() -> None:
    async def scene() -> None:
        desk = DeskRig(consumer_fields={"ack_wait_ns": SECOND_NS}, cached=False, late=True)
        for _ in range(3):
            desk.publish("b")
        assert await desk.pull_seqs() == [1]
        desk.source.gate.clear()
        under_way = asyncio.create_task(desk.pull_seqs(2))
        await wait_until(lambda: desk.source.waiting == 1)
        desk.source.gate.set()
        await wait_until(lambda: 2 in desk.desk.in_flight)
        desk.desk.flush()
        [proposal] = desk.proposals
        assert proposal.command == cmd.Deliver(1, 1, [1], 2)
        assert await under_way == [2, 3]

    run(scene())


@pytest.mark.parametrize("max_deliver", [-1, 5])
def test_lost_deliveries_come_again(max_deliver: int) -> None:
    async def scene() -> None:
        desk = rig(max_deliver=max_deliver)
        desk.late = True
        desk.publish("b", "b")
        pull = asyncio.create_task(desk.pull_seqs(2))
        await turns()
        desk.desk.flush()
        desk.lose()
        await turns()
        if max_deliver > 0:
            with refused_with(errors.OUTCOME_UNKNOWN):
                await pull
        else:
            assert await pull == [1, 2]
        desk.late = False
        assert await desk.pull_seqs(10) == [1, 2]
        assert desk.desk.in_flight == set() or max_deliver < 0

    run(scene())


def test_lost_deliveries_come_again_although_later_ones_were_recorded() -> None:
    async def scene() -> None:
        desk = rig()
        desk.late = True
        desk.publish(*["b"] * 4)
        await desk.pull(2)
        desk.desk.flush()
        [lost] = desk.proposals
        desk.proposals.clear()
        assert await desk.pull_seqs(2) == [3, 4]
        lost.future.set_exception(ApiError(errors.OUTCOME_UNKNOWN))
        await turns()
        desk.desk.flush()
        desk.commit()
        await turns()
        assert await desk.pull_seqs(10) == [1, 2]
        desk.desk.flush()
        desk.commit()
        assert sorted(desk.consumer.pending) == [1, 2, 3, 4]
        assert desk.consumer.next_seq == 5

    run(scene())


def test_deliveries_that_the_log_refused_for_now_are_recorded_with_later_ones() -> None:
    async def scene() -> None:
        desk = rig()
        desk.publish(*["b"] * 3)
        desk.refusing = True
        assert await desk.pull_seqs(2) == [1, 2]
        desk.desk.flush()
        desk.refusing = False
        assert await desk.pull_seqs(1) == [3]
        await desk.record()
        assert sorted(desk.consumer.pending) == [1, 2, 3]
        assert desk.consumer.next_seq == 4

    run(scene())


def test_pull_whose_delivery_the_log_refuses_is_refused_and_the_message_stays() -> None:
    async def scene() -> None:
        desk = rig(max_deliver=1)
        desk.publish("b")
        desk.refusing = True
        with refused_with(errors.OVERLOADED):
            await desk.pull()
        desk.refusing = False
        [delivery] = (await desk.pull()).deliveries
        assert facts(delivery) == (1, 1, 1, 0)

    run(scene())


def test_redelivery_that_the_log_refuses_stays_due() -> None:
    async def scene() -> None:
        desk = rig(max_deliver=3)
        desk.publish("b")
        await desk.pull()
        desk.log_ns += SECOND_NS
        desk.refusing = True
        with refused_with(errors.OVERLOADED):
            await desk.pull()
        desk.refusing = False
        assert await desk.pull_seqs() == [1]

    run(scene())


def test_message_acknowledged_before_its_delivery_was_recorded_stays_acknowledged() -> None:
    async def scene() -> None:
        desk = rig()
        desk.publish("b", "b")
        desk.refusing = True
        await desk.pull()
        desk.desk.flush()
        desk.refusing = False
        desk.propose(cmd.Acknowledge(1, 1, [1]))
        await turns()
        desk.desk = desk.new_desk()
        assert await desk.pull_seqs(10) == [2]
        await desk.record()
        assert sorted(desk.consumer.pending) == [2]

    run(scene())


@pytest.mark.parametrize(
    ("command", "spec"),
    [
        (cmd.DropConsumer(1), errors.CONSUMER_DELETED),
        (cmd.DropStream(), errors.STREAM_NOT_FOUND),
    ],
)
def test_waiting_pulls_end_when_their_consumer_or_stream_goes(
    command: cmd.Command, spec: ErrorSpec
) -> None:
    async def scene() -> None:
        desk = rig()
        waiting = [desk.waiting_pull() for _ in range(2)]
        await turns()
        desk.apply(command)
        desk.desk.close()
        for pull in waiting:
            with refused_with(spec):
                await pull
        with refused_with(spec):
            await desk.pull()
        assert desk.shard.listeners == set()

    run(scene())


def test_stream_dropped_under_a_pull_that_reads_ends_it() -> None:
    async def scene() -> None:
        desk = DeskRig(cached=False)
        desk.publish("b")
        desk.source.gate.clear()
        pull = asyncio.create_task(desk.pull())
        await wait_until(lambda: desk.source.waiting == 1)
        desk.apply(cmd.DropStream())
        desk.source.gate.set()
        with refused_with(errors.STREAM_NOT_FOUND):
            await pull

    run(scene())


def test_stream_purged_under_a_pull_that_reads_leaves_it_nothing() -> None:
    async def scene() -> None:
        desk = DeskRig(cached=False)
        desk.publish("b")
        desk.source.gate.clear()
        pull = asyncio.create_task(desk.pull_seqs())
        await wait_until(lambda: desk.source.waiting == 1)
        desk.apply(cmd.Trim(1 << 62, 1))
        desk.source.gate.set()
        assert await pull == []

    run(scene())


def test_message_acknowledged_while_it_is_read_again_is_not_sent() -> None:
    async def scene() -> None:
        desk = DeskRig(consumer_fields={"ack_wait_ns": SECOND_NS}, cached=False)
        desk.publish("b")
        desk.publish("b")
        await desk.pull(2)
        await desk.record()
        desk.log_ns += SECOND_NS
        desk.source.gate.clear()
        pull = asyncio.create_task(desk.pull_seqs(10))
        await wait_until(lambda: desk.source.waiting == 1)
        await desk.acknowledge(1, 2)
        desk.source.gate.set()
        assert await pull == []

    run(scene())


def test_damaged_shard_refuses_pulls() -> None:
    async def scene() -> None:
        desk = rig()
        desk.shard.damaged = "block 1: the checksum does not match"
        with refused_with(errors.DATA_LOST):
            await desk.pull()

    run(scene())


def test_block_that_does_not_read_back_stops_the_shard() -> None:
    async def scene() -> None:
        desk = DeskRig(cached=False)
        desk.publish("b")
        [(key, row)] = desk.source.rows.items()
        desk.source.rows[key] = row[:-1] + b"\xff"
        with refused_with(errors.DATA_LOST):
            await desk.pull()
        assert desk.shard.damaged

    run(scene())


def test_desk_of_a_new_leader_goes_on_where_the_machine_stands() -> None:
    async def scene() -> None:
        desk = rig()
        desk.publish(*["b"] * 4)
        assert await desk.pull_seqs(2) == [1, 2]
        await desk.record()
        desk.desk.close()
        desk.desk = desk.new_desk()
        desk.log_ns += SECOND_NS // 2
        result = await desk.pull(10)
        assert [facts(each) for each in result.deliveries] == [(3, 3, 1, 1), (4, 4, 1, 0)]
        await desk.record()
        desk.log_ns += SECOND_NS // 2
        assert await desk.pull_seqs(2) == [1, 2]
        assert seqs_of((await desk.pull(1)).deliveries) == []

    run(scene())


def test_message_acknowledged_under_a_pull_that_leaves_does_not_come_again() -> None:
    async def scene() -> None:
        desk = DeskRig(consumer_fields={"ack_wait_ns": SECOND_NS})
        for _ in range(2):
            desk.publish("b")
        assert await desk.pull_seqs() == [1]
        await desk.record()
        desk.log_ns += SECOND_NS
        desk.reader.held = True
        pull = asyncio.create_task(desk.pull(10))
        await turns()
        desk.reader.step()
        await turns()
        # It holds message 1 and waits for the block of message 2.
        assert desk.desk.in_flight == {1}
        desk.reader.held = False
        await desk.acknowledge(1)
        pull.cancel()
        await turns()
        desk.log_ns += SECOND_NS
        assert await desk.pull_seqs(10) == [2]

    run(scene())


def test_delivery_that_the_log_refuses_comes_again_although_a_later_one_went_through() -> None:
    async def scene() -> None:
        desk = rig()
        desk.late = True
        desk.publish("b", "b")
        for seq in (1, 2):
            assert await desk.pull_seqs() == [seq]
            await desk.record()
        desk.refuse_one(0)
        desk.commit()
        await turns()
        assert sorted(desk.consumer.pending) == [2]
        desk.desk = desk.new_desk()
        assert await desk.pull_seqs(10) == [1]
        await desk.record()
        desk.commit()
        assert sorted(desk.consumer.pending) == [1, 2]
        assert desk.consumer.next_seq == 3

    run(scene())


def test_pull_cancelled_while_its_delivery_is_committed_gives_its_messages_back_at_once() -> None:
    async def scene() -> None:
        desk = rig(max_deliver=3)
        desk.late = True
        desk.publish("b", "b")
        pull = desk.waiting_pull(2)
        await turns()
        pull.cancel()
        await turns()
        waiting = desk.waiting_pull(2)
        await turns()
        desk.late = False
        desk.commit()
        assert await waiting == [1, 2]
        assert [item.attempts for item in desk.consumer.pending.values()] == [2, 2]

    run(scene())


def test_position_follows_once_deliveries_that_were_on_their_way_together_are_recorded() -> None:
    async def scene() -> None:
        desk = rig()
        desk.late = True
        desk.publish("b", "b")
        for seq in (1, 2):
            assert await desk.pull_seqs() == [seq]
            await desk.record()
        desk.commit()
        assert desk.consumer.next_seq == 2
        await turns()
        await desk.record()
        desk.commit()
        assert desk.consumer.next_seq == 3
        assert desk.consumer.delivered.consumer_seq == 2

    run(scene())


@pytest.mark.parametrize("times", [1, 2])
def test_delivery_given_up_for_lost_but_applied_comes_again_when_it_is_due(times: int) -> None:
    async def scene() -> None:
        desk = rig()
        desk.publish("b")
        for _ in range(times):
            desk.late = True
            assert await desk.pull_seqs() == [1]
            desk.desk.flush()
            await desk.lead_anew(pause=10)
            assert desk.desk.consumer_seq == desk.consumer.delivered.consumer_seq
            desk.late = False
            assert await desk.pull_seqs() == []
            desk.log_ns += SECOND_NS
        [delivery] = (await desk.pull()).deliveries
        assert facts(delivery) == (1, times + 1, times + 1, 0)

    run(scene())


def test_message_whose_delivery_and_ack_were_given_up_for_lost_but_applied_is_settled() -> None:
    async def scene() -> None:
        desk = rig()
        desk.late = True
        desk.publish("b")
        assert await desk.pull_seqs() == [1]
        await desk.acknowledge(1)
        await desk.lead_anew(pause=10)
        desk.late = False
        desk.log_ns += SECOND_NS
        result = await desk.pull(10)
        assert (result.deliveries, result.num_pending) == ([], 0)

    run(scene())


def test_numbers_go_on_from_what_is_recorded_after_a_delivery_among_others_was_refused() -> None:
    async def scene() -> None:
        desk = rig()
        desk.late = True
        desk.publish("b", "b", "b")
        for seq in (1, 2):
            assert await desk.pull_seqs() == [seq]
            await desk.record()
        desk.refuse_one(0)
        await turns()
        desk.late = False
        desk.commit()
        await turns()
        result = await desk.pull(10)
        assert [facts(each)[:2] for each in result.deliveries] == [(1, 2), (3, 3)]
        await desk.record()
        assert desk.consumer.delivered.consumer_seq == 3

    run(scene())


def test_messages_that_went_away_before_they_were_recorded_leave_room_for_others() -> None:
    async def scene() -> None:
        desk = rig(max_ack_pending=2)
        desk.publish("b", "b")
        assert await desk.pull_seqs(2) == [1, 2]
        waiting = desk.waiting_pull()
        desk.publish("b")
        await turns()
        desk.apply(cmd.Trim(3, 100))
        await turns()
        assert not waiting.done()
        await desk.record()
        await turns()
        assert await waiting == [3]

    run(scene())


def test_num_pending_leaves_out_what_was_delivered_behind_a_lost_delivery() -> None:
    async def scene() -> None:
        desk = rig(max_deliver=5)
        desk.late = True
        desk.publish("b", "b", "b")
        pulls = [asyncio.create_task(desk.pull_seqs()) for _ in range(2)]
        await turns()
        desk.refuse_one(0)
        desk.commit()
        with refused_with(errors.NOT_READY):
            await pulls[0]
        assert await pulls[1] == [2]
        assert await desk.desk.num_pending() == 2
        assert await desk.new_desk().num_pending() == 2

    run(scene())
