"""Consumers without acknowledgements: every message once, in columns or in a list."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from contrail_common import errors
from contrail_common.columns.delivery_columns import DeliveryColumns
from contrail_common.model import Headers, StreamConfig
from contrail_link.contract.consume import PullResult, in_deliveries
from contrail_storage.core import commands as cmd
from tests.support.each import each
from tests.unit.storage.dispatcher_rig import (
    DispatcherRig,
    facts,
    refused_with,
    run,
    run_by_hand,
    turns,
)
from tests.unit.storage.dispatcher_rig import new_rig as new_acked_rig
from tests.unit.storage.machine_rig import Message, append_of
from tests.unit.storage.test_delivery_model import (
    Step,
    Story,
    a_stream,
    failing,
    logging,
    publishing,
    pulling,
    reading,
    removing,
    streams,
    waiting,
)


def new_rig(**fields: Any) -> DispatcherRig:
    """A consumer that acknowledges nothing."""
    return new_acked_rig(ack_policy="none", **fields)


def in_columns(result: PullResult) -> DeliveryColumns:
    """The columns of an answer that holds nothing else."""
    assert result.columns is not None
    assert result.deliveries == []
    assert result.num_pending == result.columns.num_pending
    return result.columns


# What a pull gets --------------------------------------------------------------------------------


def test_columns_hold_what_a_list_would() -> None:
    async def scene() -> None:
        found = []
        for columns in (False, True):
            rig = new_rig(filter_subjects=("a.*",))
            headers: list[Headers | None] = [{"N": ["1", "2"]}, None, {"N": ["3"], "M": []}]
            for first in ("a.x", "b", "a.y"):
                rig.apply(
                    append_of(
                        [
                            Message(subject, f"{first} {at}".encode(), headers[at])
                            for at, subject in enumerate([first, "b", "a.z"])
                        ]
                    )
                )
            result = await rig.pull(4, columns=columns)
            found.append(in_deliveries(in_columns(result)) if columns else result.deliveries)
        assert found[0] == found[1]
        assert [facts(each) for each in found[0]] == [
            (1, 1, 1, 4),
            (3, 2, 1, 3),
            (6, 3, 1, 2),
            (7, 4, 1, 1),
        ]

    run(scene())


def test_columns_are_also_for_consumers_with_acks() -> None:
    async def scene() -> None:
        rig = new_acked_rig()
        rig.publish("b", "b", "b")
        assert list(map(facts, in_deliveries(in_columns(await rig.pull(2, columns=True))))) == [
            (1, 1, 1, 2),
            (2, 2, 1, 1),
        ]
        await rig.acknowledge(1, kind="nak")
        # A message that comes again has no place in columns, nor have those that come with it.
        result = await rig.pull(5, columns=True)
        assert result.columns is None
        assert [facts(each) for each in result.deliveries] == [(1, 3, 2, 1), (3, 4, 1, 0)]

    run(scene())


def test_empty_answer_has_no_columns() -> None:
    async def scene() -> None:
        rig = new_rig(filter_subjects=("a.*",))
        rig.publish("b", "b")
        result = await rig.pull(columns=True)
        assert (result.columns, result.deliveries, result.num_pending) == (None, [], 0)

    run(scene())


def test_headers_only_leaves_out_payloads_and_shows_their_sizes() -> None:
    async def scene() -> None:
        rig = new_rig(headers_only=True)
        rig.apply(append_of([Message("b", b"123", {"N": ["v"]}), Message("b", b"")]))
        columns = in_columns(await rig.pull(2, columns=True))
        assert [(one.payload, one.headers) for one in columns.messages()] == [
            (b"", {"N": ["v"], "Nats-Msg-Size": ["3"]}),
            (b"", {"Nats-Msg-Size": ["0"]}),
        ]

    run(scene())


@each(("limit", "expected"), [(29, [1, 2]), (30, [1, 2, 3]), (99, [1, 2, 3, 4])])
def test_pull_ends_before_the_message_that_passes_max_bytes(
    limit: int, expected: list[int]
) -> None:
    async def scene() -> None:
        rig = new_rig()
        for _ in range(2):
            rig.publish("b", "b", size=10)
        assert await rig.pull_seqs(9, max_bytes=limit) == expected

    run(scene())


def test_message_larger_than_max_bytes_is_refused_and_stays() -> None:
    async def scene() -> None:
        rig = new_rig()
        rig.publish("b", size=10)
        with refused_with(errors.PULL_TOO_SMALL):
            await rig.pull(max_bytes=9)
        assert await rig.pull_seqs(max_bytes=10) == [1]

    run(scene())


def test_message_that_was_acknowledged_although_its_delivery_was_lost_is_passed_over() -> None:
    async def scene() -> None:
        rig = new_rig()
        rig.publish("b", "b", "b")
        rig.apply(cmd.Acknowledge(1, 1, [2]))
        result = await rig.pull(9)
        assert [facts(each) for each in result.deliveries] == [(1, 1, 1, 1), (3, 2, 1, 0)]

    run(scene())


def test_filter_that_changes_under_a_pull_holds_for_what_the_pull_has_not_selected() -> None:
    async def scene(*, selected: bool) -> None:
        rig = new_rig(filter_subjects=("b",))
        if selected:
            rig.publish("b")
        rig.publish("a.x", "b")
        rig.reader.held = True
        reading_ = rig.waiting_pull(2)
        await turns()
        if selected:
            rig.reader.step()
            await turns()
        config = msgspec.structs.replace(rig.consumer.config, filter_subjects=())
        rig.apply(cmd.PutConsumer(config, 0))
        rig.reader.held = False
        rig.reader.step()
        first = await reading_
        assert [*first, *await rig.pull_seqs(9)] == ([1, 2, 3] if selected else [1, 2])

    run(scene(selected=False))
    run(scene(selected=True))


# What is recorded --------------------------------------------------------------------------------


def test_record_of_many_pulls_is_one_position() -> None:
    async def scene() -> None:
        rig = new_rig()
        rig.late = True
        rig.publish(*["b"] * 9)
        for _ in range(3):
            await rig.pull(2)
        await rig.record()
        [proposal] = rig.proposals
        assert proposal.command == cmd.Advance(1, 1, 6, 6, 7)
        rig.commit()
        assert (rig.consumer.delivered.consumer_seq, rig.consumer.next_seq) == (6, 7)
        assert rig.consumer.floor.stream_seq == 6

    run_by_hand(scene())  # the pulls come at one time, however busy the machine is


def test_record_does_not_pass_what_a_pull_has_chosen_and_not_given_out() -> None:
    async def scene() -> None:
        rig = new_rig()
        rig.publish("b")
        assert await rig.pull_seqs() == [1]
        rig.publish("b")
        rig.publish("b")
        rig.reader.held = True
        reading_ = rig.waiting_pull(2)
        await turns()
        rig.reader.step()  # the first of two blocks
        await turns()
        assert rig.dispatcher.position == 3
        await rig.record()
        assert rig.consumer.next_seq == 2
        reading_.cancel()
        await turns()
        rig.reader.held = False
        assert await rig.pull_seqs(9) == [2, 3]

    run(scene())


def test_lost_record_delivers_nothing_again_and_is_made_up_by_the_next() -> None:
    async def scene() -> None:
        rig = new_rig()
        rig.late = True
        rig.publish("b", "b", "b")
        assert await rig.pull_seqs(2) == [1, 2]
        await rig.record()
        rig.lose()
        rig.late = False
        assert await rig.pull_seqs(2) == [3]
        await rig.record()
        assert (rig.consumer.delivered.consumer_seq, rig.consumer.next_seq) == (3, 4)

    run(scene())


def test_refused_record_is_tried_again() -> None:
    async def scene() -> None:
        rig = new_rig()
        rig.publish("b")
        rig.refusing = True
        await rig.pull()
        await rig.let_pass(10_000_000)
        assert rig.consumer.next_seq == 1
        rig.refusing = False
        await rig.let_pass(200_000_000)
        assert rig.consumer.next_seq == 2

    run_by_hand(scene())


def test_leader_of_a_new_term_numbers_on_after_what_another_assigned() -> None:
    async def scene() -> None:
        rig = new_rig()
        rig.publish("b", "b", "b")
        rig.apply(cmd.Advance(1, 1, 2, 2, 3))
        rig.dispatcher.new_term()
        [delivery] = (await rig.pull(9)).deliveries
        assert facts(delivery) == (3, 3, 1, 0)

    run(scene())


def test_record_lost_with_the_lead_is_made_up_for_in_the_next_term() -> None:
    async def scene() -> None:
        rig = new_rig()
        rig.late = True
        rig.publish("b", "b")
        assert await rig.pull_seqs(2) == [1, 2]
        rig.dispatcher.flush()
        await rig.lead_again(applied=0, pause=2)
        rig.late = False
        await rig.let_pass(10_000_000)
        assert (rig.consumer.delivered.consumer_seq, rig.consumer.next_seq) == (2, 3)

    run_by_hand(scene())


# Whatever happens --------------------------------------------------------------------------------


@dataclass
class UnackedStory(Story):
    """A story without acknowledgements: ``given`` is what this dispatcher gave out."""

    given: set[int] = field(default_factory=set)
    restarts: int = 0

    def collect(self) -> None:
        for pull in self.pulls:
            if pull.done() and not pull.cancelled() and not pull.exception():
                result = pull.result()
                if result.columns is not None:
                    result.deliveries.extend(in_deliveries(result.columns))
        super().collect()

    def note(self, seq: int, consumer_seq: int) -> None:
        assert consumer_seq == self.last_consumer_seq + 1
        assert seq not in self.given
        self.last_consumer_seq += 1
        self.given.add(seq)
        self.sent.append(seq)

    async def check(self) -> None:
        rig = self.rig
        if rig.reader.held:
            return
        assert await rig.dispatcher.num_pending() == len(self.fresh())
        if self.pulls:
            assert not self.fresh(), "a pull waits although there is something for it"

    async def do_pull(self, choice: tuple[int, int]) -> None:
        batch, kind = choice
        await super().do_pull(choice)
        if kind % 2:
            self.pulls.append(asyncio.create_task(self.rig.pull(batch, columns=True)))

    async def do_new_leader(self, choice: int) -> None:
        await super().do_new_leader(choice)
        self.restarts += 1
        self.last_consumer_seq = self.rig.dispatcher.consumer_seq
        self.given.clear()


acking = st.tuples(st.just("ack"), st.integers(0, 9))
steps = [publishing, publishing, pulling, pulling, acking, waiting, removing, reading, logging]
scripts = st.lists(st.one_of(*steps, failing), min_size=10, max_size=40)
filters = st.sampled_from([(), ("a.*",), ("b", "a.x")])


async def played(script: list[Step], stream: StreamConfig, patterns: tuple[str, ...]) -> None:
    story = UnackedStory(DispatcherRig(stream, {"ack_policy": "none", "filter_subjects": patterns}))
    await story.play(script)
    drained = await story.drain()
    wanted = set(story.rig.wanted())
    assert len(set(drained)) == len(drained)
    assert wanted <= {*story.sent, *drained}
    assert story.given.isdisjoint(drained)
    story.rig.dispatcher.flush()
    await story.rig.let_pass(0)
    consumer = story.rig.consumer
    assert consumer.pending == {}
    if not story.restarts:
        assert consumer.delivered.consumer_seq == len(story.sent) + len(drained)
    assert await story.rig.new_dispatcher().num_pending() == 0


@pytest.mark.long
@settings(max_examples=2 * settings().max_examples)
@given(scripts, streams, filters)
@example([("publish", ["b"]), ("pull", (1, 3)), ("new leader", 0), ("ack", 0)], a_stream(), ())
def test_everything_is_given_out_once_in_order_and_nothing_is_skipped(
    script: list[Step], stream: StreamConfig, patterns: tuple[str, ...]
) -> None:
    run_by_hand(played(script, stream, patterns))
