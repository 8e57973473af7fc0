"""The desk of a consumer: who gets which message, when again, and when no more."""

import asyncio
from typing import Any

import pytest

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import StreamConfig
from contrail_storage.consumers import delivery
from contrail_storage.core import commands as cmd
from tests.unit.storage.desk_rig import (
    SECOND_NS,
    DeskRig,
    facts,
    refused_with,
    rig,
    run,
    turns,
    wait_until,
)
from tests.unit.storage.machine_rig import consumer_config

# What a pull gets --------------------------------------------------------------------------------


def test_pull_gets_up_to_a_batch_with_its_delivery_facts() -> None:
    async def scene() -> None:
        desk = rig()
        desk.publish("a.x", "a.y", "b")
        first = await desk.pull(2)
        assert [facts(each) for each in first.deliveries] == [(1, 1, 1, 2), (2, 2, 1, 1)]
        assert [each.message.subject for each in first.deliveries] == ["a.x", "a.y"]
        assert first.num_pending == 1
        second = await desk.pull(2)
        assert [facts(each) for each in second.deliveries] == [(3, 3, 1, 0)]

    run(scene())


@pytest.mark.parametrize("fields", [{}, {"no_wait": True}, {"no_wait": True, "expires_s": 5}])
def test_pull_that_need_not_wait_answers_empty_at_once(fields: dict[str, Any]) -> None:
    async def scene() -> None:
        desk = rig()
        result = await desk.pull(5, **fields)
        assert (result.deliveries, result.num_pending) == ([], 0)

    run(scene())


def test_waiting_pull_ends_empty_when_its_time_is_up() -> None:
    async def scene() -> None:
        desk = rig()
        assert await desk.pull_seqs(expires_s=0.001) == []
        assert len(desk.desk.waiters) == 0

    run(scene())


def test_waiting_pull_answers_as_soon_as_there_is_a_message() -> None:
    async def scene() -> None:
        desk = rig()
        waiting = desk.waiting_pull(10)
        await turns()
        desk.publish("b", "b")
        assert await waiting == [1, 2]

    run(scene())


def test_filtered_consumer_gets_only_what_matches_and_wakes_only_for_that() -> None:
    async def scene() -> None:
        desk = rig(filter_subjects=("a.*",))
        desk.publish("b", "a.x", "b", "a.y")
        assert await desk.pull_seqs(10) == [2, 4]
        waiting = desk.waiting_pull()
        await turns()
        desk.publish("b")
        await turns()
        assert not waiting.done()
        desk.publish("a.x")
        assert await waiting == [6]

    run(scene())


def test_two_pulls_never_get_the_same_message_though_nothing_is_committed() -> None:
    async def scene() -> None:
        desk = rig()
        desk.late = True
        desk.publish(*["b"] * 6)
        pulls = await asyncio.gather(*[desk.pull_seqs(2) for _ in range(4)])
        assert sorted(seq for seqs in pulls for seq in seqs) == [1, 2, 3, 4, 5, 6]
        desk.commit()
        desk.desk.flush()
        desk.commit()
        await turns()
        assert sorted(desk.consumer.pending) == [1, 2, 3, 4, 5, 6]
        assert desk.desk.in_flight == set()

    run(scene())


def test_deliveries_of_several_pulls_are_recorded_as_one_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(delivery, "JOIN_S", 60.0)  # however long the pulls take

    async def scene() -> None:
        desk = rig()
        desk.late = True
        desk.publish(*["b"] * 6)
        for _ in range(3):
            await desk.pull(2)
        assert len(desk.proposals) == 0
        desk.desk.flush()
        [proposal] = desk.proposals
        assert proposal.command == cmd.Deliver(1, 1, [1, 2, 3, 4, 5, 6], 7)

    run(scene())


def test_headers_only_consumer_gets_the_size_in_place_of_the_payload() -> None:
    async def scene() -> None:
        desk = rig(headers_only=True)
        desk.publish("b", size=123)
        [delivery] = (await desk.pull()).deliveries
        assert delivery.message.payload == b""
        assert delivery.message.headers == {"Nats-Msg-Size": ["123"]}

    run(scene())


def test_consumer_without_acks_leaves_nothing_pending_and_never_gets_again() -> None:
    async def scene() -> None:
        desk = rig(ack_policy="none", max_ack_pending=1)
        desk.publish(*["b"] * 3)
        assert await desk.pull_seqs(10) == [1, 2, 3]
        await desk.record()
        assert desk.consumer.pending == {}
        assert desk.consumer.floor.stream_seq == 3
        desk.log_ns += 100 * SECOND_NS
        assert await desk.pull_seqs(10) == []

    run(scene())


# Bounds ------------------------------------------------------------------------------------------


def test_pull_ends_before_the_message_that_passes_max_bytes() -> None:
    async def scene() -> None:
        desk = rig()
        desk.publish(*["b"] * 5, size=10)
        assert await desk.pull_seqs(5, max_bytes=29) == [1, 2]
        assert await desk.pull_seqs(5, max_bytes=30) == [3, 4, 5]

    run(scene())


def test_first_message_above_max_bytes_refuses_the_pull_and_stays() -> None:
    async def scene() -> None:
        desk = rig()
        desk.publish("b", size=10)
        with refused_with(errors.PULL_TOO_SMALL):
            await desk.pull(5, max_bytes=9)
        [delivery] = (await desk.pull(5, max_bytes=10)).deliveries
        assert facts(delivery) == (1, 1, 1, 0)

    run(scene())


def test_refused_waiter_makes_way_for_the_next() -> None:
    async def scene() -> None:
        desk = rig()
        small, large = desk.waiting_pull(max_bytes=5), desk.waiting_pull()
        await turns()
        desk.publish("b", size=10)
        with refused_with(errors.PULL_TOO_SMALL):
            await small
        assert await large == [1]

    run(scene())


@pytest.mark.parametrize(
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
        desk = rig(**limits)
        desk.publish("b")
        with refused_with(errors.PULL_LIMIT):
            await desk.pull(**asked)

    run(scene())


def test_more_waiting_pulls_than_allowed_are_refused() -> None:
    async def scene() -> None:
        desk = rig(max_waiting=2)
        waiting = [desk.waiting_pull() for _ in range(2)]
        await turns()
        with refused_with(errors.TOO_MANY_WAITERS):
            await desk.pull(expires_s=1)
        desk.publish("b", "b")
        assert await asyncio.gather(*waiting) == [[1], [2]]

    run(scene())


# Order of pulls ----------------------------------------------------------------------------------


def test_waiting_pulls_are_served_in_the_order_they_came() -> None:
    async def scene() -> None:
        desk = rig()
        waiting = [desk.waiting_pull() for _ in range(4)]
        await turns()
        desk.publish("b", "b")
        desk.publish("b", "b")
        assert await asyncio.gather(*waiting) == [[1], [2], [3], [4]]

    run(scene())


def test_message_that_does_not_match_leaves_the_order_of_waiting_pulls() -> None:
    async def scene() -> None:
        desk = rig(filter_subjects=("a.*",))
        waiting = [desk.waiting_pull() for _ in range(3)]
        await turns()
        for _ in range(2):
            desk.publish("b")
            await turns()
        desk.publish("a.x", "a.x", "a.x")
        assert await asyncio.gather(*waiting) == [[3], [4], [5]]

    run(scene())


def test_newcomer_goes_behind_those_who_wait() -> None:
    async def scene() -> None:
        desk = rig()
        waiting = desk.waiting_pull()
        await turns()
        desk.publish("b")
        assert await desk.pull_seqs(no_wait=True) == []
        late = desk.waiting_pull()
        assert await waiting == [1]
        desk.publish("b")
        assert await late == [2]

    run(scene())


# Acknowledgements and redelivery -----------------------------------------------------------------


def test_full_consumer_stalls_and_resumes_with_an_ack() -> None:
    async def scene() -> None:
        desk = rig(max_ack_pending=3)
        desk.publish(*["b"] * 5)
        assert await desk.pull_seqs(10) == [1, 2, 3]
        waiting = desk.waiting_pull(10)
        await turns()
        assert not waiting.done()
        await desk.acknowledge(2)
        assert await waiting == [4]
        assert await desk.pull_seqs() == []

    run(scene())


def test_stalled_consumer_still_gets_what_is_due_again() -> None:
    async def scene() -> None:
        desk = rig(max_ack_pending=2)
        desk.publish(*["b"] * 3)
        assert await desk.pull_seqs(10) == [1, 2]
        await desk.record()
        desk.log_ns += SECOND_NS
        assert await desk.pull_seqs(10) == [1, 2]

    run(scene())


def test_delivery_comes_again_after_ack_wait_before_new_messages() -> None:
    async def scene() -> None:
        desk = rig()
        desk.publish(*["b"] * 3)
        await desk.pull(2)
        await desk.record()
        desk.log_ns += SECOND_NS - 1
        assert await desk.pull_seqs() == [3]
        desk.log_ns += 1
        again = (await desk.pull(10)).deliveries
        assert [facts(each)[:3] for each in again] == [(1, 4, 2), (2, 5, 2)]

    run(scene())


def test_waiting_pull_is_woken_by_a_deadline_that_passes() -> None:
    async def scene() -> None:
        desk = DeskRig(consumer_fields={"ack_wait_ns": 1_000_000})
        desk.publish("b")
        await desk.pull()
        desk.desk.flush()
        waiting = desk.waiting_pull()
        await turns()
        assert not waiting.done()
        desk.log_ns += 1_000_000
        assert await waiting == [1]

    run(scene())


def test_late_ack_of_a_message_that_is_due_again_counts() -> None:
    async def scene() -> None:
        desk = rig()
        desk.publish("b")
        await desk.pull()
        await desk.record()
        desk.log_ns += 5 * SECOND_NS
        await desk.acknowledge(1)
        assert await desk.pull_seqs() == []
        assert desk.consumer.floor.stream_seq == 1

    run(scene())


def test_backoff_gives_the_pause_before_each_attempt() -> None:
    async def scene() -> None:
        desk = rig(backoff_ns=(2 * SECOND_NS, 5 * SECOND_NS))
        desk.publish("b")
        for pause_s in (2, 5, 5):
            assert await desk.pull_seqs() == [1]
            await desk.record()
            desk.log_ns += pause_s * SECOND_NS - 1
            assert await desk.pull_seqs() == []
            desk.log_ns += 1
        assert await desk.pull_seqs() == [1]

    run(scene())


def test_nak_brings_the_message_again_at_once_or_after_its_delay() -> None:
    async def scene() -> None:
        desk = rig()
        desk.publish("b", "b")
        await desk.pull(2)
        waiting = desk.waiting_pull()
        await turns()
        await desk.acknowledge(2, kind="nak")
        assert await waiting == [2]
        await desk.acknowledge(1, kind="nak", delay_s=3)
        desk.log_ns += 1
        assert await desk.pull_seqs() == []
        desk.log_ns += 3 * SECOND_NS
        assert await desk.pull_seqs(1) == [1]

    run(scene())


def test_work_in_progress_postpones_and_term_ends_redelivery() -> None:
    async def scene() -> None:
        desk = rig()
        desk.publish("b", "b")
        await desk.pull(2)
        await desk.acknowledge(2, kind="term")
        desk.log_ns += SECOND_NS - 1
        await desk.acknowledge(1, kind="in_progress")
        await turns()
        desk.log_ns += SECOND_NS - 1
        assert await desk.pull_seqs(5) == []
        desk.log_ns += 1
        assert await desk.pull_seqs(5) == [1]

    run(scene())


def test_message_is_given_up_after_max_deliver_and_the_floor_moves_on() -> None:
    async def scene() -> None:
        desk = rig(max_deliver=2)
        desk.publish("b")
        for attempt in (1, 2):
            [delivery] = (await desk.pull()).deliveries
            assert delivery.num_delivered == attempt
            desk.log_ns += SECOND_NS
        assert await desk.pull_seqs() == []
        assert desk.consumer.pending == {}
        assert desk.consumer.floor.stream_seq == 1

    run(scene())


def test_message_is_given_up_although_nobody_pulls() -> None:
    async def scene() -> None:
        desk = DeskRig(consumer_fields={"ack_wait_ns": 1_000_000, "max_deliver": 1})
        desk.publish("b", "b")
        await desk.pull()
        desk.log_ns += 500_000
        await desk.pull()
        desk.log_ns += 500_000
        await wait_until(lambda: 1 not in desk.consumer.pending)
        assert 2 in desk.consumer.pending
        desk.log_ns += 500_000
        await wait_until(lambda: not desk.consumer.pending)

    run(scene())


def test_pull_that_waits_gets_a_later_redelivery_after_an_earlier_message_was_given_up() -> None:
    async def scene() -> None:
        desk = DeskRig(consumer_fields={"ack_wait_ns": 1_000_000, "max_deliver": 2})
        desk.publish("b", "b")
        await desk.pull()
        await desk.acknowledge(1, kind="nak")
        desk.log_ns += 1
        assert await desk.pull_seqs() == [1]
        desk.log_ns += 500_000
        assert await desk.pull_seqs() == [2]
        waiting = desk.waiting_pull()
        await turns()
        desk.log_ns += 500_000
        await wait_until(lambda: 1 not in desk.consumer.pending)
        desk.log_ns += 500_000
        assert await waiting == [2]

    run(scene())


def test_delivery_with_max_deliver_leaves_after_its_commit() -> None:
    async def scene() -> None:
        desk = rig(max_deliver=3)
        desk.late = True
        desk.publish("b")
        pull = asyncio.create_task(desk.pull_seqs())
        await turns()
        assert not pull.done()
        desk.commit()
        assert await pull == [1]

    run(scene())


def test_removed_message_is_not_delivered_again() -> None:
    async def scene() -> None:
        desk = rig()
        desk.publish("b", "b", "b")
        await desk.pull(3)
        await desk.record()
        desk.apply(cmd.DeleteMessage(2, 1))
        desk.apply(cmd.Trim(2, 100))
        desk.log_ns += SECOND_NS
        assert await desk.pull_seqs(10) == [3]
        assert sorted(desk.consumer.pending) == [3]

    run(scene())


def test_messages_evicted_while_pending_are_let_go_when_due() -> None:
    async def scene() -> None:
        stream = StreamConfig(name="S", subjects=("b",), max_msgs=2)
        desk = DeskRig(stream, {"ack_wait_ns": SECOND_NS, "max_ack_pending": 2})
        desk.publish("b", "b")
        await desk.pull(2)
        await desk.record()
        desk.publish("b", "b")
        desk.log_ns += SECOND_NS
        assert await desk.pull_seqs(10) == [3, 4]

    run(scene())


def test_raised_max_ack_pending_lets_a_waiting_pull_go_on() -> None:
    async def scene() -> None:
        desk = rig(max_ack_pending=1)
        desk.publish("b", "b")
        await desk.pull()
        waiting = desk.waiting_pull()
        await turns()
        wider = consumer_config("red", ack_wait_ns=SECOND_NS, max_ack_pending=5)
        desk.apply(cmd.PutConsumer(wider, 0))
        desk.desk.reconfigured()
        assert await waiting == [2]

    run(scene())


@pytest.mark.parametrize("ack_policy", ["explicit", "none"])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("batch", [1, 9])
def test_another_filter_looks_at_all_behind_the_last_delivery(
    ack_policy: str, batch: int, late: bool
) -> None:
    async def scene() -> None:
        desk = rig(filter_subjects=("a.x",), ack_policy=ack_policy)
        desk.publish("a.x", "b", "b", "a.x", "b")
        assert await desk.pull_seqs(batch) == [1, 4][:batch]
        if not late:
            await desk.record()
        wider = consumer_config(
            "red", ack_wait_ns=SECOND_NS, ack_policy=ack_policy, filter_subjects=("b",)
        )
        desk.apply(cmd.PutConsumer(wider, 0))
        desk.desk.reconfigured()
        await desk.record()  # what was chosen by the filter before may be recorded behind it
        left = [2, 3, 5] if batch == 1 else [5]
        assert await desk.desk.num_pending() == len(left)
        assert await desk.new_desk().num_pending() == len(left)
        assert desk.consumer.next_seq == left[0]
        assert await desk.pull_seqs(9) == left

    run(scene())


def test_another_filter_skips_nothing_that_a_cancelled_pull_had_chosen() -> None:
    async def scene() -> None:
        desk = rig(filter_subjects=("a.x",), max_deliver=5)
        desk.publish("b", "a.x", "b", "a.x", "b")
        desk.late = True
        pull = asyncio.create_task(desk.pull_seqs(9))
        await turns()
        desk.lose()
        with pytest.raises(ApiError):
            await pull
        wider = consumer_config("red", max_deliver=5, filter_subjects=("b",))
        desk.apply(cmd.PutConsumer(wider, 0))
        desk.desk.reconfigured()
        desk.late = False
        assert await desk.pull_seqs(9) == [1, 3, 5]

    run(scene())
