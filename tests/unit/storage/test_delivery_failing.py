"""Pulls that leave, commands that fail, streams that go: nothing is lost or sent twice."""

import asyncio

import pytest

from contrail_common import errors
from contrail_common.errors import ApiError, ErrorSpec
from contrail_storage.core import commands as cmd
from tests.unit.storage.dispatcher_rig import (
    SECOND_NS,
    DispatcherRig,
    facts,
    new_rig,
    refused_with,
    run,
    seqs_of,
    turns,
    wait_until,
)


def test_message_is_given_to_the_next_pull_when_a_waiting_one_leaves() -> None:
    async def scene() -> None:
        rig = new_rig()
        leaving, staying = rig.waiting_pull(), rig.waiting_pull()
        await turns()
        rig.publish("b")
        leaving.cancel()
        assert await staying == [1]
        with pytest.raises(asyncio.CancelledError):
            await leaving

    run(scene())


def test_pull_cancelled_while_it_reads_gives_back_new_and_due_messages() -> None:
    async def scene() -> None:
        rig = DispatcherRig(consumer_fields={"ack_wait_ns": SECOND_NS}, cached=False)
        rig.publish("b")
        rig.publish("b")
        assert await rig.pull_seqs() == [1]
        await rig.record()
        rig.log_ns += SECOND_NS
        rig.publish("b")
        rig.source.gate.clear()
        pull = asyncio.create_task(rig.pull(10))
        for _ in range(3):
            await wait_until(lambda: rig.source.waiting == 1)
            if len(rig.dispatcher.in_flight) == 2:
                break
            rig.source.gate.set()
            await wait_until(lambda: rig.source.waiting == 0)
            rig.source.gate.clear()
        pull.cancel()
        rig.source.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await pull
        result = await rig.pull(10)
        assert [facts(each)[:3] for each in result.deliveries] == [(1, 2, 2), (2, 3, 1), (3, 4, 1)]

    run(scene())


def test_pull_cancelled_while_it_waits_for_its_commit_shares_nothing_with_the_next() -> None:
    async def scene() -> None:
        rig = new_rig(max_deliver=5)
        rig.late = True
        rig.publish("b", "b")
        first = asyncio.create_task(rig.pull_seqs())
        await turns()
        first.cancel()
        await turns()
        second = asyncio.create_task(rig.pull_seqs())
        await turns()
        rig.commit()
        assert await second == [2]
        rig.log_ns += SECOND_NS
        rig.late = False
        [one, two] = (await rig.pull(10)).deliveries
        assert (facts(one)[:3], facts(two)[:3]) == ((1, 3, 2), (2, 4, 2))

    run(scene())


def test_position_sent_with_deliveries_does_not_pass_those_of_a_pull_under_way() -> None:
    async def scene() -> None:
        rig = DispatcherRig(consumer_fields={"ack_wait_ns": SECOND_NS}, cached=False, late=True)
        for _ in range(3):
            rig.publish("b")
        assert await rig.pull_seqs() == [1]
        rig.source.gate.clear()
        under_way = asyncio.create_task(rig.pull_seqs(2))
        await wait_until(lambda: rig.source.waiting == 1)
        rig.source.gate.set()
        await wait_until(lambda: 2 in rig.dispatcher.in_flight)
        rig.dispatcher.flush()
        [proposal] = rig.proposals
        assert proposal.command == cmd.Deliver(1, 1, [1], 2)
        assert await under_way == [2, 3]

    run(scene())


@pytest.mark.parametrize("max_deliver", [-1, 5])
def test_lost_deliveries_come_again(max_deliver: int) -> None:
    async def scene() -> None:
        rig = new_rig(max_deliver=max_deliver)
        rig.late = True
        rig.publish("b", "b")
        pull = asyncio.create_task(rig.pull_seqs(2))
        await turns()
        rig.dispatcher.flush()
        rig.lose()
        await turns()
        if max_deliver > 0:
            with refused_with(errors.OUTCOME_UNKNOWN):
                await pull
        else:
            assert await pull == [1, 2]
        rig.late = False
        assert await rig.pull_seqs(10) == [1, 2]
        assert rig.dispatcher.in_flight == set() or max_deliver < 0

    run(scene())


def test_lost_deliveries_come_again_although_later_ones_were_recorded() -> None:
    async def scene() -> None:
        rig = new_rig()
        rig.late = True
        rig.publish(*["b"] * 4)
        await rig.pull(2)
        rig.dispatcher.flush()
        [lost] = rig.proposals
        rig.proposals.clear()
        assert await rig.pull_seqs(2) == [3, 4]
        lost.future.set_exception(ApiError(errors.OUTCOME_UNKNOWN))
        await turns()
        rig.dispatcher.flush()
        rig.commit()
        await turns()
        assert await rig.pull_seqs(10) == [1, 2]
        rig.dispatcher.flush()
        rig.commit()
        assert sorted(rig.consumer.pending) == [1, 2, 3, 4]
        assert rig.consumer.next_seq == 5

    run(scene())


def test_deliveries_that_the_log_refused_for_now_are_recorded_with_later_ones() -> None:
    async def scene() -> None:
        rig = new_rig()
        rig.publish(*["b"] * 3)
        rig.refusing = True
        assert await rig.pull_seqs(2) == [1, 2]
        rig.dispatcher.flush()
        rig.refusing = False
        assert await rig.pull_seqs(1) == [3]
        await rig.record()
        assert sorted(rig.consumer.pending) == [1, 2, 3]
        assert rig.consumer.next_seq == 4

    run(scene())


def test_pull_whose_delivery_the_log_refuses_is_refused_and_the_message_stays() -> None:
    async def scene() -> None:
        rig = new_rig(max_deliver=1)
        rig.publish("b")
        rig.refusing = True
        with refused_with(errors.OVERLOADED):
            await rig.pull()
        rig.refusing = False
        [delivery] = (await rig.pull()).deliveries
        assert facts(delivery) == (1, 1, 1, 0)

    run(scene())


def test_redelivery_that_the_log_refuses_stays_due() -> None:
    async def scene() -> None:
        rig = new_rig(max_deliver=3)
        rig.publish("b")
        await rig.pull()
        rig.log_ns += SECOND_NS
        rig.refusing = True
        with refused_with(errors.OVERLOADED):
            await rig.pull()
        rig.refusing = False
        assert await rig.pull_seqs() == [1]

    run(scene())


def test_message_acknowledged_before_its_delivery_was_recorded_stays_acknowledged() -> None:
    async def scene() -> None:
        rig = new_rig()
        rig.publish("b", "b")
        rig.refusing = True
        await rig.pull()
        rig.dispatcher.flush()
        rig.refusing = False
        rig.propose(cmd.Acknowledge(1, 1, [1]))
        await turns()
        rig.dispatcher = rig.new_dispatcher()
        assert await rig.pull_seqs(10) == [2]
        await rig.record()
        assert sorted(rig.consumer.pending) == [2]

    run(scene())


@pytest.mark.parametrize(
    ("command", "spec"),
    [
        (cmd.DropConsumer(1), errors.CONSUMER_DELETED),
        (cmd.DropStream(), errors.STREAM_NOT_FOUND),
    ],
)
def test_waiting_pulls_end_when_their_consumer_or_stream_is_removed(
    command: cmd.Command, spec: ErrorSpec
) -> None:
    async def scene() -> None:
        rig = new_rig()
        assert not rig.shard.listeners  # a change calls nobody while no pull waits
        waiting = [rig.waiting_pull() for _ in range(2)]
        await turns()
        assert len(rig.shard.listeners) == 1
        rig.apply(command)
        rig.dispatcher.close()
        for pull in waiting:
            with refused_with(spec):
                await pull
        with refused_with(spec):
            await rig.pull()
        assert not rig.shard.listeners

    run(scene())


@pytest.mark.parametrize("max_deliver", [3, -1])
def test_pull_that_reads_while_its_leader_gives_way_delivers_nothing(max_deliver: int) -> None:
    async def scene() -> None:
        fields = {"max_deliver": max_deliver, "ack_wait_ns": SECOND_NS}
        rig = DispatcherRig(consumer_fields=fields, cached=False)
        rig.publish("b")
        assert await rig.pull_seqs() == [1]
        await rig.record()
        rig.log_ns += SECOND_NS
        rig.reader.held = True
        pull = asyncio.create_task(rig.pull())
        await turns()
        rig.dispatcher.close(lambda: ApiError(errors.NOT_LEADER, applied=False))
        rig.reader.held = False
        rig.reader.step()
        # A second delivery would not be recorded, and so not be counted.
        with refused_with(errors.NOT_LEADER):
            await pull
        assert rig.consumer.pending[1].attempts == 1

    run(scene())


def test_stream_dropped_under_a_pull_that_reads_ends_it() -> None:
    async def scene() -> None:
        rig = DispatcherRig(cached=False)
        rig.publish("b")
        rig.source.gate.clear()
        pull = asyncio.create_task(rig.pull())
        await wait_until(lambda: rig.source.waiting == 1)
        rig.apply(cmd.DropStream())
        rig.source.gate.set()
        with refused_with(errors.STREAM_NOT_FOUND):
            await pull

    run(scene())


def test_stream_purged_under_a_pull_that_reads_leaves_it_nothing() -> None:
    async def scene() -> None:
        rig = DispatcherRig(cached=False)
        rig.publish("b")
        rig.source.gate.clear()
        pull = asyncio.create_task(rig.pull_seqs())
        await wait_until(lambda: rig.source.waiting == 1)
        rig.apply(cmd.Trim(1 << 62, 1))
        rig.source.gate.set()
        assert await pull == []

    run(scene())


def test_message_acknowledged_while_it_is_read_again_is_not_sent() -> None:
    async def scene() -> None:
        rig = DispatcherRig(consumer_fields={"ack_wait_ns": SECOND_NS}, cached=False)
        rig.publish("b")
        rig.publish("b")
        await rig.pull(2)
        await rig.record()
        rig.log_ns += SECOND_NS
        rig.source.gate.clear()
        pull = asyncio.create_task(rig.pull_seqs(10))
        await wait_until(lambda: rig.source.waiting == 1)
        await rig.acknowledge(1, 2)
        rig.source.gate.set()
        assert await pull == []

    run(scene())


def test_damaged_shard_refuses_pulls() -> None:
    async def scene() -> None:
        rig = new_rig()
        rig.shard.damaged = "block 1: the checksum does not match"
        with refused_with(errors.DATA_LOST):
            await rig.pull()

    run(scene())


def test_block_that_does_not_read_back_stops_the_shard() -> None:
    async def scene() -> None:
        rig = DispatcherRig(cached=False)
        rig.publish("b")
        [(key, row)] = rig.source.rows.items()
        rig.source.rows[key] = row[:-1] + b"\xff"
        with refused_with(errors.DATA_LOST):
            await rig.pull()
        assert rig.shard.damaged

    run(scene())


def test_dispatcher_of_a_new_leader_continues_where_the_machine_stands() -> None:
    async def scene() -> None:
        rig = new_rig()
        rig.publish(*["b"] * 4)
        assert await rig.pull_seqs(2) == [1, 2]
        await rig.record()
        rig.dispatcher.close()
        rig.dispatcher = rig.new_dispatcher()
        rig.log_ns += SECOND_NS // 2
        result = await rig.pull(10)
        assert [facts(each) for each in result.deliveries] == [(3, 3, 1, 1), (4, 4, 1, 0)]
        await rig.record()
        rig.log_ns += SECOND_NS // 2
        assert await rig.pull_seqs(2) == [1, 2]
        assert seqs_of((await rig.pull(1)).deliveries) == []

    run(scene())


def test_message_acknowledged_under_a_pull_that_leaves_does_not_come_again() -> None:
    async def scene() -> None:
        rig = DispatcherRig(consumer_fields={"ack_wait_ns": SECOND_NS})
        for _ in range(2):
            rig.publish("b")
        assert await rig.pull_seqs() == [1]
        await rig.record()
        rig.log_ns += SECOND_NS
        rig.reader.held = True
        pull = asyncio.create_task(rig.pull(10))
        await turns()
        rig.reader.step()
        await turns()
        # It holds message 1 and waits for the block of message 2.
        assert rig.dispatcher.in_flight == {1}
        rig.reader.held = False
        await rig.acknowledge(1)
        pull.cancel()
        await turns()
        rig.log_ns += SECOND_NS
        assert await rig.pull_seqs(10) == [2]

    run(scene())


def test_delivery_that_the_log_refuses_comes_again_although_a_later_one_went_through() -> None:
    async def scene() -> None:
        rig = new_rig()
        rig.late = True
        rig.publish("b", "b")
        for seq in (1, 2):
            assert await rig.pull_seqs() == [seq]
            await rig.record()
        rig.refuse_one(0)
        rig.commit()
        await turns()
        assert sorted(rig.consumer.pending) == [2]
        rig.dispatcher = rig.new_dispatcher()
        assert await rig.pull_seqs(10) == [1]
        await rig.record()
        rig.commit()
        assert sorted(rig.consumer.pending) == [1, 2]
        assert rig.consumer.next_seq == 3

    run(scene())


def test_pull_cancelled_while_its_delivery_is_committed_gives_its_messages_back_at_once() -> None:
    async def scene() -> None:
        rig = new_rig(max_deliver=3)
        rig.late = True
        rig.publish("b", "b")
        pull = rig.waiting_pull(2)
        await turns()
        pull.cancel()
        await turns()
        waiting = rig.waiting_pull(2)
        await turns()
        rig.late = False
        rig.commit()
        assert await waiting == [1, 2]
        assert [item.attempts for item in rig.consumer.pending.values()] == [2, 2]

    run(scene())


def test_position_follows_once_deliveries_that_were_on_their_way_together_are_recorded() -> None:
    async def scene() -> None:
        rig = new_rig()
        rig.late = True
        rig.publish("b", "b")
        for seq in (1, 2):
            assert await rig.pull_seqs() == [seq]
            await rig.record()
        rig.commit()
        assert rig.consumer.next_seq == 2
        await turns()
        await rig.record()
        rig.commit()
        assert rig.consumer.next_seq == 3
        assert rig.consumer.delivered.consumer_seq == 2

    run(scene())


@pytest.mark.parametrize("times", [1, 2])
def test_delivery_given_up_for_lost_but_applied_comes_again_when_it_is_due(times: int) -> None:
    async def scene() -> None:
        rig = new_rig()
        rig.publish("b")
        for _ in range(times):
            rig.late = True
            assert await rig.pull_seqs() == [1]
            rig.dispatcher.flush()
            await rig.lead_again(pause=10)
            assert rig.dispatcher.consumer_seq == rig.consumer.delivered.consumer_seq
            rig.late = False
            assert await rig.pull_seqs() == []
            rig.log_ns += SECOND_NS
        [delivery] = (await rig.pull()).deliveries
        assert facts(delivery) == (1, times + 1, times + 1, 0)

    run(scene())


def test_message_whose_delivery_and_ack_were_given_up_for_lost_but_applied_is_settled() -> None:
    async def scene() -> None:
        rig = new_rig()
        rig.late = True
        rig.publish("b")
        assert await rig.pull_seqs() == [1]
        await rig.acknowledge(1)
        await rig.lead_again(pause=10)
        rig.late = False
        rig.log_ns += SECOND_NS
        result = await rig.pull(10)
        assert (result.deliveries, result.num_pending) == ([], 0)

    run(scene())


def test_numbers_go_on_from_what_is_recorded_after_a_delivery_among_others_was_refused() -> None:
    async def scene() -> None:
        rig = new_rig()
        rig.late = True
        rig.publish("b", "b", "b")
        for seq in (1, 2):
            assert await rig.pull_seqs() == [seq]
            await rig.record()
        rig.refuse_one(0)
        await turns()
        rig.late = False
        rig.commit()
        await turns()
        result = await rig.pull(10)
        assert [facts(each)[:2] for each in result.deliveries] == [(1, 2), (3, 3)]
        await rig.record()
        assert rig.consumer.delivered.consumer_seq == 3

    run(scene())


def test_messages_that_went_away_before_they_were_recorded_leave_room_for_others() -> None:
    async def scene() -> None:
        rig = new_rig(max_ack_pending=2)
        rig.publish("b", "b")
        assert await rig.pull_seqs(2) == [1, 2]
        waiting = rig.waiting_pull()
        rig.publish("b")
        await turns()
        rig.apply(cmd.Trim(3, 100))
        await turns()
        assert not waiting.done()
        await rig.record()
        await turns()
        assert await waiting == [3]

    run(scene())


def test_num_pending_leaves_out_what_was_delivered_after_a_lost_delivery() -> None:
    async def scene() -> None:
        rig = new_rig(max_deliver=5)
        rig.late = True
        rig.publish("b", "b", "b")
        pulls = [asyncio.create_task(rig.pull_seqs()) for _ in range(2)]
        await turns()
        rig.refuse_one(0)
        rig.commit()
        with refused_with(errors.NOT_READY):
            await pulls[0]
        assert await pulls[1] == [2]
        assert await rig.dispatcher.num_pending() == 2
        assert await rig.new_dispatcher().num_pending() == 2

    run(scene())
