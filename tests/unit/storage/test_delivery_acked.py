"""Acknowledgements that come before their deliveries are recorded: one command for both."""

import asyncio
from typing import Any, cast

import msgspec
import pytest

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_link.contract.consume import AckItem
from contrail_storage.consumers import dispatcher
from contrail_storage.consumers.consumer import Consumer
from contrail_storage.core import commands as cmd
from contrail_storage.streams.stream import Stream
from tests.unit.storage.dispatcher_rig import (
    SECOND_NS,
    new_rig,
    refused_with,
    run,
    run_by_hand,
    seqs_of,
    turns,
    wait_until,
)
from tests.unit.storage.machine_rig import SHARD


@pytest.mark.parametrize(
    ("fields", "acked", "proposed"),
    [
        ({}, [1, 2, 3, 4], [cmd.DeliverAcked(1, 1, [1, 2, 3, 4], 5)]),
        ({}, [4, 1], [cmd.DeliverAcked(1, 1, [1, 2, 3, 4], 5, [4, 1])]),
        (
            {"ack_policy": "all"},
            [2],
            [cmd.Deliver(1, 1, [1, 2, 3, 4], 5), cmd.Acknowledge(1, 1, [2])],
        ),
    ],
)
def test_acks_that_come_before_the_record_of_the_deliveries_are_one_command_with_it(
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, Any],
    acked: list[int],
    proposed: list[cmd.Command],
) -> None:
    monkeypatch.setattr(dispatcher, "JOIN_S", 60.0)  # however long the pulls take

    async def scene() -> None:
        rig = new_rig(**fields)
        rig.late = True
        rig.publish(*["b"] * 6)
        await rig.pull(4)
        await rig.acknowledge(*acked)
        assert [proposal.command for proposal in rig.proposals] == proposed
        rig.commit()
        await turns()
        left = {1, 2, 3, 4} - set(acked) - ({1} if fields else set())
        assert set(rig.consumer.pending) == left
        assert rig.dispatcher.in_flight == set()
        await rig.acknowledge(*left)
        assert rig.proposals[-1].command == cmd.Acknowledge(1, 1, sorted(left))

    run(scene())


def test_acks_are_a_command_of_their_own_beside_naks_and_where_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatcher, "JOIN_S", 60.0)
    monkeypatch.setattr(dispatcher, "SEQS_MAX", 4)

    async def scene() -> None:
        rig = new_rig()
        rig.late = True
        rig.publish(*["b"] * 9)
        await rig.pull(2)
        await rig.acknowledge(1, 2)
        await rig.pull(3)
        await rig.acknowledge(3, 4)
        await rig.pull(2)
        await rig.acknowledge(6, kind="nak")
        assert [type(proposal.command) for proposal in rig.proposals] == [
            cmd.DeliverAcked, cmd.Deliver, cmd.Acknowledge, cmd.Deliver, cmd.Acknowledge,
        ]  # fmt: skip

    run(scene())


def test_deliveries_are_recorded_later_if_the_command_with_their_acks_is_refused() -> None:
    async def scene() -> None:
        rig = new_rig()
        rig.publish(*["b"] * 4)
        await rig.pull(2)
        rig.refusing = True
        with refused_with(errors.OVERLOADED):
            await rig.acknowledge(1, 2)
        rig.refusing = False
        assert await rig.pull_seqs(2) == [3, 4]
        await wait_until(lambda: list(rig.consumer.pending) == [1, 2, 3, 4])
        await rig.acknowledge(1, 2, 3, 4)
        assert not rig.consumer.pending
        assert rig.dispatcher.in_flight == set()
        assert rig.consumer.delivered.consumer_seq == 4

    run(scene())


def test_deliveries_that_are_refused_are_tried_again_whoever_was_refused_last() -> None:
    async def scene() -> None:
        rig = new_rig()
        rig.publish(*["b"] * 3)
        await rig.pull(1)
        config = msgspec.structs.replace(rig.consumer.config, max_deliver=5)
        rig.apply(cmd.PutConsumer(config, 0))
        rig.dispatcher.reconfigured()
        rig.refusing = True
        with refused_with(errors.OVERLOADED):  # from now on, deliveries are recorded first
            await rig.pull(1)
        with refused_with(errors.OVERLOADED):
            await rig.acknowledge(1)
        rig.refusing = False
        await rig.let_pass(SECOND_NS // 2)
        assert list(rig.consumer.pending) == [1]

    run_by_hand(scene())


def test_who_stops_waiting_for_a_durable_ack_takes_back_neither_it_nor_deliveries() -> None:
    async def scene() -> None:
        rig = new_rig()
        rig.late = True
        rig.publish(*["b"] * 6)
        await rig.pull(2)
        stream = cast("Stream", None)  # a consumer asks it for nothing here
        consumer = Consumer(stream, [rig.dispatcher], lambda _: True)
        item = AckItem(SHARD, 1, 1, [1, 2], "ack")
        waiting = asyncio.create_task(consumer.acknowledge([item], sync=True))
        await turns()
        waiting.cancel()
        await turns()
        assert await rig.pull_seqs(4) == [3, 4, 5, 6]
        rig.commit()
        await rig.record()
        rig.commit()
        assert list(rig.consumer.pending) == [3, 4, 5, 6]
        assert rig.dispatcher.consumer_seq == rig.consumer.delivered.consumer_seq == 6

    run(scene())


def test_deliveries_and_their_acks_are_lost_together() -> None:
    async def scene() -> None:
        rig = new_rig()
        rig.late = True
        rig.publish(*["b"] * 4)
        await rig.pull(2)
        lost = await rig.acknowledge(1, 2)
        rig.lose()
        await turns()
        assert isinstance(lost.exception(), ApiError)
        assert [seqs_of((await rig.pull(2)).deliveries) for _ in range(2)] == [[1, 2], [3, 4]]

    run(scene())


def test_pull_that_does_not_wait_for_messages_waits_for_acks_that_make_room() -> None:
    async def scene() -> None:
        rig = new_rig(max_ack_pending=2)
        rig.publish(*["b"] * 4)
        assert await rig.pull_seqs(2, no_wait=True) == [1, 2]
        await rig.record()
        assert await rig.pull_seqs(2, no_wait=True) == []
        rig.late = True
        await rig.acknowledge(1, 2)
        pull = asyncio.create_task(rig.pull_seqs(2, no_wait=True))
        await turns()
        assert not pull.done()
        rig.commit()
        assert await pull == [3, 4]

    run(scene())
