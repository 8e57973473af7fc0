"""The dispatcher of a consumer: who gets which message, when again, and when no more."""

import asyncio
from typing import Any

import pytest

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import StreamConfig
from contrail_storage.consumers import dispatcher
from contrail_storage.core import commands as cmd
from tests.support.each import each
from tests.unit.storage.dispatcher_rig import (
    SECOND_NS,
    DispatcherRig,
    facts,
    new_rig,
    refused_with,
    run,
    run_by_hand,
    turns,
    wait_until,
)
from tests.unit.storage.machine_rig import consumer_config

# What a pull gets --------------------------------------------------------------------------------


def test_pull_gets_up_to_a_batch_with_its_delivery_facts() -> None:
    async def scene() -> None:
        rig = new_rig()
        rig.publish("a.x", "a.y", "b")
        first = await rig.pull(2)
        assert [facts(each) for each in first.deliveries] == [(1, 1, 1, 2), (2, 2, 1, 1)]
        assert [each.message.subject for each in first.deliveries] == ["a.x", "a.y"]
        assert first.num_pending == 1
        second = await rig.pull(2)
        assert [facts(each) for each in second.deliveries] == [(3, 3, 1, 0)]

    run(scene())


@each("fields", [{}, {"no_wait": True}, {"no_wait": True, "expires_s": 5}])
def test_pull_that_need_not_wait_answers_empty_at_once(fields: dict[str, Any]) -> None:
    async def scene() -> None:
        rig = new_rig()
        result = await rig.pull(5, **fields)
        assert (result.deliveries, result.num_pending) == ([], 0)

    run(scene())


def test_waiting_pull_ends_empty_when_its_time_is_up() -> None:
    async def scene() -> None:
        rig = new_rig()
        assert await rig.pull_seqs(expires_s=0.001) == []
        assert len(rig.dispatcher.waiters) == 0

    run(scene())


def test_waiting_pull_answers_as_soon_as_there_is_a_message() -> None:
    async def scene() -> None:
        rig = new_rig()
        waiting = rig.waiting_pull(10)
        await turns()
        rig.publish("b", "b")
        assert await waiting == [1, 2]

    run(scene())


def test_filtered_consumer_gets_only_what_matches_and_wakes_only_for_that() -> None:
    async def scene() -> None:
        rig = new_rig(filter_subjects=("a.*",))
        rig.publish("b", "a.x", "b", "a.y")
        assert await rig.pull_seqs(10) == [2, 4]
        waiting = rig.waiting_pull()
        await turns()
        rig.publish("b")
        await turns()
        assert not waiting.done()
        rig.publish("a.x")
        assert await waiting == [6]

    run(scene())


def test_two_pulls_never_get_the_same_message_though_nothing_is_committed() -> None:
    async def scene() -> None:
        rig = new_rig()
        rig.late = True
        rig.publish(*["b"] * 6)
        pulls = await asyncio.gather(*[rig.pull_seqs(2) for _ in range(4)])
        assert sorted(seq for seqs in pulls for seq in seqs) == [1, 2, 3, 4, 5, 6]
        rig.commit()
        rig.dispatcher.flush()
        rig.commit()
        await turns()
        assert sorted(rig.consumer.pending) == [1, 2, 3, 4, 5, 6]
        assert rig.dispatcher.in_flight == set()

    run(scene())


def test_deliveries_of_several_pulls_are_recorded_as_one_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatcher, "JOIN_S", 60.0)  # however long the pulls take

    async def scene() -> None:
        rig = new_rig()
        rig.late = True
        rig.publish(*["b"] * 6)
        for _ in range(3):
            await rig.pull(2)
        assert len(rig.proposals) == 0
        rig.dispatcher.flush()
        [proposal] = rig.proposals
        assert proposal.command == cmd.Deliver(1, 1, [1, 2, 3, 4, 5, 6], 7)

    run(scene())


def test_headers_only_consumer_gets_the_size_in_place_of_the_payload() -> None:
    async def scene() -> None:
        rig = new_rig(headers_only=True)
        rig.publish("b", size=123)
        [delivery] = (await rig.pull()).deliveries
        assert delivery.message.payload == b""
        assert delivery.message.headers == {"Nats-Msg-Size": ["123"]}

    run(scene())


def test_consumer_without_acks_leaves_nothing_pending_and_never_gets_again() -> None:
    async def scene() -> None:
        rig = new_rig(ack_policy="none", max_ack_pending=1)
        rig.publish(*["b"] * 3)
        assert await rig.pull_seqs(10) == [1, 2, 3]
        await rig.record()
        assert rig.consumer.pending == {}
        assert rig.consumer.floor.stream_seq == 3
        rig.log_ns += 100 * SECOND_NS
        assert await rig.pull_seqs(10) == []

    run(scene())


# Bounds ------------------------------------------------------------------------------------------


def test_pull_ends_before_the_message_that_passes_max_bytes() -> None:
    async def scene() -> None:
        rig = new_rig()
        rig.publish(*["b"] * 5, size=10)
        assert await rig.pull_seqs(5, max_bytes=29) == [1, 2]
        assert await rig.pull_seqs(5, max_bytes=30) == [3, 4, 5]

    run(scene())


def test_first_message_above_max_bytes_refuses_the_pull_and_stays() -> None:
    async def scene() -> None:
        rig = new_rig()
        rig.publish("b", size=10)
        with refused_with(errors.PULL_TOO_SMALL):
            await rig.pull(5, max_bytes=9)
        [delivery] = (await rig.pull(5, max_bytes=10)).deliveries
        assert facts(delivery) == (1, 1, 1, 0)

    run(scene())


def test_refused_waiter_makes_way_for_the_next() -> None:
    async def scene() -> None:
        rig = new_rig()
        small, large = rig.waiting_pull(max_bytes=5), rig.waiting_pull()
        await turns()
        rig.publish("b", size=10)
        with refused_with(errors.PULL_TOO_SMALL):
            await small
        assert await large == [1]

    run(scene())


@each(
    ("limits", "asked"),
    [
        ({"max_batch": 5}, {"batch": 6}),
        ({"max_bytes": 100}, {"max_bytes": 101}),
        ({"max_expires_ns": SECOND_NS}, {"expires_s": 1.001}),
    ],
)
def test_pull_above_a_limit_of_the_consumer_is_refused(
    limits: dict[str, int], asked: dict[str, Any]
) -> None:
    async def scene() -> None:
        rig = new_rig(**limits)
        rig.publish("b")
        with refused_with(errors.PULL_LIMIT):
            await rig.pull(**asked)

    run(scene())


def test_more_waiting_pulls_than_allowed_are_refused() -> None:
    async def scene() -> None:
        rig = new_rig(max_waiting=2)
        waiting = [rig.waiting_pull() for _ in range(2)]
        await turns()
        with refused_with(errors.TOO_MANY_WAITERS):
            await rig.pull(expires_s=1)
        rig.publish("b", "b")
        assert await asyncio.gather(*waiting) == [[1], [2]]

    run(scene())


# Order of pulls ----------------------------------------------------------------------------------


def test_waiting_pulls_are_served_in_the_order_they_came() -> None:
    async def scene() -> None:
        rig = new_rig()
        waiting = [rig.waiting_pull() for _ in range(4)]
        await turns()
        rig.publish("b", "b")
        rig.publish("b", "b")
        assert await asyncio.gather(*waiting) == [[1], [2], [3], [4]]

    run(scene())


def test_message_that_does_not_match_leaves_the_order_of_waiting_pulls() -> None:
    async def scene() -> None:
        rig = new_rig(filter_subjects=("a.*",))
        waiting = [rig.waiting_pull() for _ in range(3)]
        await turns()
        for _ in range(2):
            rig.publish("b")
            await turns()
        rig.publish("a.x", "a.x", "a.x")
        assert await asyncio.gather(*waiting) == [[3], [4], [5]]

    run(scene())


def test_newcomer_queues_after_those_who_wait() -> None:
    async def scene() -> None:
        rig = new_rig()
        waiting = rig.waiting_pull()
        await turns()
        rig.publish("b")
        assert await rig.pull_seqs(no_wait=True) == []
        late = rig.waiting_pull()
        assert await waiting == [1]
        rig.publish("b")
        assert await late == [2]

    run(scene())


# Acknowledgements and redelivery -----------------------------------------------------------------


def test_full_consumer_stalls_and_resumes_with_an_ack() -> None:
    async def scene() -> None:
        rig = new_rig(max_ack_pending=3)
        rig.publish(*["b"] * 5)
        assert await rig.pull_seqs(10) == [1, 2, 3]
        waiting = rig.waiting_pull(10)
        await turns()
        assert not waiting.done()
        await rig.acknowledge(2)
        assert await waiting == [4]
        assert await rig.pull_seqs() == []

    run(scene())


def test_stalled_consumer_still_gets_what_is_due_again() -> None:
    async def scene() -> None:
        rig = new_rig(max_ack_pending=2)
        rig.publish(*["b"] * 3)
        assert await rig.pull_seqs(10) == [1, 2]
        await rig.record()
        rig.log_ns += SECOND_NS
        assert await rig.pull_seqs(10) == [1, 2]

    run(scene())


def test_delivery_comes_again_after_ack_wait_before_new_messages() -> None:
    async def scene() -> None:
        rig = new_rig()
        rig.publish(*["b"] * 3)
        await rig.pull(2)
        await rig.record()
        rig.log_ns += SECOND_NS - 1
        assert await rig.pull_seqs() == [3]
        rig.log_ns += 1
        again = (await rig.pull(10)).deliveries
        assert [facts(each)[:3] for each in again] == [(1, 4, 2), (2, 5, 2)]

    run(scene())


def test_waiting_pull_is_woken_by_a_deadline_that_passes() -> None:
    async def scene() -> None:
        rig = DispatcherRig(consumer_fields={"ack_wait_ns": 1_000_000})
        rig.publish("b")
        await rig.pull()
        rig.dispatcher.flush()
        waiting = rig.waiting_pull()
        await turns()
        assert not waiting.done()
        rig.log_ns += 1_000_000
        assert await waiting == [1]

    run(scene())


def test_late_ack_of_a_message_that_is_due_again_counts() -> None:
    async def scene() -> None:
        rig = new_rig()
        rig.publish("b")
        await rig.pull()
        await rig.record()
        rig.log_ns += 5 * SECOND_NS
        await rig.acknowledge(1)
        assert await rig.pull_seqs() == []
        assert rig.consumer.floor.stream_seq == 1

    run(scene())


def test_backoff_gives_the_pause_before_each_attempt() -> None:
    async def scene() -> None:
        rig = new_rig(backoff_ns=(2 * SECOND_NS, 5 * SECOND_NS))
        rig.publish("b")
        for pause_s in (2, 5, 5):
            assert await rig.pull_seqs() == [1]
            await rig.record()
            rig.log_ns += pause_s * SECOND_NS - 1
            assert await rig.pull_seqs() == []
            rig.log_ns += 1
        assert await rig.pull_seqs() == [1]

    run(scene())


def test_nak_brings_the_message_again_at_once_or_after_its_delay() -> None:
    async def scene() -> None:
        rig = new_rig()
        rig.publish("b", "b")
        await rig.pull(2)
        waiting = rig.waiting_pull()
        await turns()
        await rig.acknowledge(2, kind="nak")
        assert await waiting == [2]
        await rig.acknowledge(1, kind="nak", delay_s=3)
        rig.log_ns += 1
        assert await rig.pull_seqs() == []
        rig.log_ns += 3 * SECOND_NS
        assert await rig.pull_seqs(1) == [1]

    run(scene())


def test_work_in_progress_postpones_and_term_ends_redelivery() -> None:
    async def scene() -> None:
        rig = new_rig()
        rig.publish("b", "b")
        await rig.pull(2)
        await rig.acknowledge(2, kind="term")
        rig.log_ns += SECOND_NS - 1
        await rig.acknowledge(1, kind="in_progress")
        await turns()
        rig.log_ns += SECOND_NS - 1
        assert await rig.pull_seqs(5) == []
        rig.log_ns += 1
        assert await rig.pull_seqs(5) == [1]

    run(scene())


def test_message_is_given_up_after_max_deliver_and_the_floor_moves_on() -> None:
    async def scene() -> None:
        rig = new_rig(max_deliver=2)
        rig.publish("b")
        for attempt in (1, 2):
            [delivery] = (await rig.pull()).deliveries
            assert delivery.num_delivered == attempt
            rig.log_ns += SECOND_NS
        assert await rig.pull_seqs() == []
        assert rig.consumer.pending == {}
        assert rig.consumer.floor.stream_seq == 1

    run(scene())


def test_message_is_given_up_although_nobody_pulls() -> None:
    async def scene() -> None:
        rig = DispatcherRig(consumer_fields={"ack_wait_ns": 1_000_000, "max_deliver": 1})
        rig.publish("b", "b")
        await rig.pull()
        rig.log_ns += 500_000
        await rig.pull()
        rig.log_ns += 500_000
        await wait_until(lambda: 1 not in rig.consumer.pending)
        assert 2 in rig.consumer.pending
        rig.log_ns += 500_000
        await wait_until(lambda: not rig.consumer.pending)

    run(scene())


def test_pull_that_waits_gets_a_later_redelivery_after_an_earlier_message_was_given_up() -> None:
    async def scene() -> None:
        rig = DispatcherRig(consumer_fields={"ack_wait_ns": 1_000_000, "max_deliver": 2})
        rig.publish("b", "b")
        await rig.pull()
        await rig.acknowledge(1, kind="nak")
        rig.log_ns += 1
        assert await rig.pull_seqs() == [1]
        rig.log_ns += 500_000
        assert await rig.pull_seqs() == [2]
        waiting = rig.waiting_pull()
        await turns()
        rig.log_ns += 500_000
        await wait_until(lambda: 1 not in rig.consumer.pending)
        rig.log_ns += 500_000
        assert await waiting == [2]

    run(scene())


def test_delivery_with_max_deliver_leaves_after_its_commit() -> None:
    async def scene() -> None:
        rig = new_rig(max_deliver=3)
        rig.late = True
        rig.publish("b")
        pull = asyncio.create_task(rig.pull_seqs())
        await turns()
        assert not pull.done()
        rig.commit()
        assert await pull == [1]

    run(scene())


def test_removed_message_is_not_delivered_again() -> None:
    async def scene() -> None:
        rig = new_rig()
        rig.publish("b", "b", "b")
        await rig.pull(3)
        await rig.record()
        rig.apply(cmd.DeleteMessage(2))
        rig.apply(cmd.Trim(2, 100))
        rig.log_ns += SECOND_NS
        assert await rig.pull_seqs(10) == [3]
        assert sorted(rig.consumer.pending) == [3]

    run(scene())


def test_messages_evicted_while_pending_are_let_go_when_due() -> None:
    async def scene() -> None:
        stream = StreamConfig(name="S", subjects=("b",), max_msgs=2)
        rig = DispatcherRig(stream, {"ack_wait_ns": SECOND_NS, "max_ack_pending": 2})
        rig.publish("b", "b")
        await rig.pull(2)
        await rig.record()
        rig.publish("b", "b")
        rig.log_ns += SECOND_NS
        assert await rig.pull_seqs(10) == [3, 4]

    run(scene())


def test_raised_max_ack_pending_lets_a_waiting_pull_go_on() -> None:
    async def scene() -> None:
        rig = new_rig(max_ack_pending=1)
        rig.publish("b", "b")
        await rig.pull()
        waiting = rig.waiting_pull()
        await turns()
        wider = consumer_config("red", ack_wait_ns=SECOND_NS, max_ack_pending=5)
        rig.apply(cmd.PutConsumer(wider, 0))
        rig.dispatcher.reconfigured()
        assert await waiting == [2]

    run(scene())


@each("ack_policy", ["explicit", "none"])
@each("late", [False, True])
@each("batch", [1, 9])
def test_another_filter_rechecks_all_after_the_last_delivery(
    ack_policy: str, batch: int, late: bool
) -> None:
    async def scene() -> None:
        rig = new_rig(filter_subjects=("a.x",), ack_policy=ack_policy)
        rig.publish("a.x", "b", "b", "a.x", "b")
        assert await rig.pull_seqs(batch) == [1, 4][:batch]
        if not late:
            await rig.record()
        wider = consumer_config(
            "red", ack_wait_ns=SECOND_NS, ack_policy=ack_policy, filter_subjects=("b",)
        )
        rig.apply(cmd.PutConsumer(wider, 0))
        rig.dispatcher.reconfigured()
        await rig.record()  # what was chosen by the filter before may be recorded behind it
        left = [2, 3, 5] if batch == 1 else [5]
        assert await rig.dispatcher.num_pending() == len(left)
        assert await rig.new_dispatcher().num_pending() == len(left)
        assert rig.consumer.next_seq == left[0]
        assert await rig.pull_seqs(9) == left

    run(scene())


def test_another_filter_skips_nothing_that_a_cancelled_pull_had_chosen() -> None:
    async def scene() -> None:
        rig = new_rig(filter_subjects=("a.x",), max_deliver=5)
        rig.publish("b", "a.x", "b", "a.x", "b")
        rig.late = True
        pull = asyncio.create_task(rig.pull_seqs(9))
        await turns()
        rig.lose()
        with pytest.raises(ApiError):
            await pull
        wider = consumer_config("red", max_deliver=5, filter_subjects=("b",))
        rig.apply(cmd.PutConsumer(wider, 0))
        rig.dispatcher.reconfigured()
        rig.late = False
        assert await rig.pull_seqs(9) == [1, 3, 5]

    run(scene())


def test_ack_wait_that_was_changed_unnoticed_is_the_one_that_counts() -> None:
    async def scene() -> None:
        rig = new_rig()
        rig.publish("b")
        await rig.pull()
        await rig.record()
        waiting = rig.waiting_pull()
        await rig.let_pass(0)
        # Whoever asked for the change has left, so the dispatcher is not notified.
        rig.apply(cmd.PutConsumer(consumer_config("red", ack_wait_ns=3 * SECOND_NS), 0))
        await rig.let_pass(2 * SECOND_NS)
        assert not waiting.done()
        await rig.let_pass(SECOND_NS)
        assert waiting.done()
        assert await waiting == [1]

    run_by_hand(scene())


def test_last_delivery_is_given_up_though_an_earlier_message_waits_for_a_pull() -> None:
    async def scene() -> None:
        rig = new_rig(max_deliver=2)
        rig.publish("b", "b")
        assert await rig.pull_seqs(9) == [1, 2]
        await rig.record()
        await rig.let_pass(SECOND_NS // 2)
        await rig.acknowledge(2, kind="nak")
        assert await rig.pull_seqs(9) == [2]
        await rig.record()
        await rig.let_pass(SECOND_NS * 3 // 4)  # the first is due; nobody pulls
        assert set(rig.consumer.pending) == {1, 2}
        await rig.let_pass(SECOND_NS)
        assert set(rig.consumer.pending) == {1}

    run_by_hand(scene())
