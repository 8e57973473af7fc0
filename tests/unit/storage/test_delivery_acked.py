"""Acknowledgements that come before their deliveries are recorded: one command for both."""

from typing import Any

import pytest

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_storage.consumers import dispatcher
from contrail_storage.core import commands as cmd
from tests.unit.storage.dispatcher_rig import (
    new_rig,
    refused_with,
    run,
    seqs_of,
    turns,
    wait_until,
)


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
