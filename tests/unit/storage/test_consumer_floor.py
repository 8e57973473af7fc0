"""The ack floor of a consumer: below the lowest of all that is pending, whatever was settled."""

from hypothesis import given
from hypothesis import strategies as st

from contrail_storage.core import commands as cmd
from contrail_storage.core import key_layout as keys
from contrail_storage.core.consumer_machine import ConsumerMachine, Gone, Trimmed
from contrail_storage.core.results import Step, Writes
from tests.unit.storage.machine_rig import SHARD, RowStore, consumer_config

steps = st.one_of(
    st.tuples(st.just("deliver"), st.integers(1, 30)),
    st.tuples(st.sampled_from(["ack", "term", "gone", "exhaust"]), st.integers(0, 60)),
    st.tuples(st.just("trim"), st.integers(0, 40)),
    st.tuples(st.just("restart"), st.just(0)),
)


def restarted(consumer: ConsumerMachine) -> ConsumerMachine:
    writes, store = Writes(), RowStore()
    consumer.write_snapshot(writes)
    store.write(writes.rows)
    [(_, row)] = store.scan(keys.CONSUMER)
    return ConsumerMachine.load(SHARD, 1, row, store.scan)


@given(st.lists(steps, max_size=60), st.sampled_from(["explicit", "all"]))
def test_floor_lies_below_the_lowest_pending_after_any_change(
    taken: list[tuple[str, int]], ack_policy: str
) -> None:
    config = consumer_config("c", ack_policy=ack_policy, max_deliver=1)
    consumer = ConsumerMachine.create(SHARD, 1, config, 1, 0, 1)
    highest = 0
    for step, number in taken:
        seqs = range(consumer.next_seq, consumer.next_seq + number)
        chosen = consumer.floor.stream_seq + number
        if step == "deliver":
            change = cmd.Deliver(1, 1, list(seqs[::2]) or [seqs[0]], seqs[-1] + 1)
        elif step == "ack":
            change = cmd.Acknowledge(1, 1, [chosen])
        elif step == "term":
            change = cmd.Acknowledge(1, 1, [], [("term", chosen, 0)])
        elif step == "gone":
            change = Gone([chosen])
        elif step == "exhaust":
            change = cmd.Exhaust(1, 1, [chosen])
        elif step == "trim":
            change = Trimmed(chosen)
        else:
            consumer = restarted(consumer)
            continue
        consumer.change(change, Step(1, 0, Writes()))
        lowest = min(consumer.pending, default=consumer.delivered.stream_seq + 1)
        highest = max(highest, lowest - 1)
        assert consumer.floor.stream_seq == highest


def test_what_was_settled_above_the_lowest_pending_is_let_go_of() -> None:
    config = consumer_config("c", max_ack_pending=-1)
    consumer = ConsumerMachine.create(SHARD, 1, config, 1, 0, 1)
    consumer.change(cmd.Deliver(1, 1, [1], 2), Step(1, 0, Writes()))
    for first in range(2, 20_000, 1_000):
        seqs = list(range(first, first + 1_000))
        consumer.change(cmd.Deliver(1, 1, seqs, seqs[-1] + 1), Step(1, 0, Writes()))
        consumer.change(cmd.Acknowledge(1, 1, seqs), Step(1, 0, Writes()))
    assert consumer.floor.stream_seq == 0
    assert len(consumer.pending._chunks) == 1
    consumer.change(cmd.Acknowledge(1, 1, [1]), Step(1, 0, Writes()))
    assert consumer.floor.stream_seq == consumer.delivered.stream_seq


def test_delivery_that_a_purge_overtook_counts_and_the_floor_is_at_it() -> None:
    consumer = ConsumerMachine.create(SHARD, 1, consumer_config("c"), 1, 0, 1)
    consumer.change(cmd.Deliver(1, 1, [1], 2), Step(1, 0, Writes()))
    consumer.change(Trimmed(13), Step(1, 0, Writes()))
    consumer.change(cmd.Deliver(1, 1, [2, 3], 4), Step(1, 0, Writes()))
    assert not consumer.pending
    assert (consumer.delivered.consumer_seq, consumer.delivered.stream_seq) == (3, 3)
    assert (consumer.floor.consumer_seq, consumer.floor.stream_seq) == (3, 3)
    assert consumer.next_seq == 13


def test_message_given_up_on_beyond_the_position_is_not_delivered_again() -> None:
    config = consumer_config("c", max_deliver=1)
    consumer = ConsumerMachine.create(SHARD, 1, config, 1, 0, 1)
    # Messages before it are on their way to another client, so the position stays.
    consumer.change(cmd.Deliver(1, 1, [5], 2), Step(1, 0, Writes()))
    consumer.change(cmd.Exhaust(1, 1, [5]), Step(1, 0, Writes()))
    # To the next leader, what is from the position on and not listed here has not been delivered.
    assert consumer.next_seq == 2
    assert 5 in consumer.acked_ahead
    assert 5 in consumer.given_up


def test_ack_of_all_covers_what_was_delivered_before_it_though_no_record_says_so() -> None:
    consumer = ConsumerMachine.create(SHARD, 1, consumer_config("c", ack_policy="all"), 1, 0, 1)
    consumer.change(cmd.Deliver(1, 1, [1, 2], 3), Step(1, 0, Writes()))
    # The record of the deliveries 3 to 5 was lost with their leader; a client has the messages.
    settled = consumer.change(cmd.Acknowledge(1, 1, [5]), Step(1, 0, Writes()))
    assert settled == [1, 2, 5]
    assert (consumer.next_seq, consumer.floor.stream_seq) == (6, 5)
    assert not consumer.acked_ahead
    # A record that comes late changes nothing.
    consumer.change(cmd.Deliver(1, 1, [3, 4], 5), Step(1, 0, Writes()))
    assert not consumer.pending
    assert consumer.floor.stream_seq == 5


batches = st.lists(
    # Deliveries, how far the recorded position is behind them, and acknowledgements of any.
    st.tuples(
        st.lists(st.integers(1, 40), min_size=1, max_size=12, unique=True).map(sorted),
        st.integers(0, 30),
        st.lists(st.integers(1, 40), max_size=12),
    ),
    max_size=8,
)


@given(batches)
def test_deliveries_in_one_pass_are_recorded_as_one_by_one(
    taken: list[tuple[list[int], int, list[int]]],
) -> None:
    config = consumer_config("c", max_ack_pending=-1)
    states = []
    for in_one_pass in (True, False):
        consumer = ConsumerMachine.create(SHARD, 1, config, 1, 0, 1)
        for number, (seqs, behind, acked) in enumerate(taken, 1):
            # The position is behind while earlier deliveries are on their way to the log.
            position = max(seqs[-1] + 1 - behind, 1)
            changes = [cmd.Deliver(1, 1, seqs, position)]
            if not in_one_pass:
                changes = [cmd.Deliver(1, 1, [seq], 1) for seq in seqs]
                changes[-1].position = position
            for change in [*changes, cmd.Acknowledge(1, 1, acked)]:
                consumer.change(change, Step(number, number, Writes()))
        states.append(consumer.snapshot())
    assert states[0] == states[1]


@given(batches, st.sampled_from(["explicit", "all", "none"]), st.booleans())
def test_deliveries_with_their_acknowledgements_are_the_two_changes_one_after_the_other(
    taken: list[tuple[list[int], int, list[int]]], ack_policy: str, all_acked: bool
) -> None:
    config = consumer_config("c", max_ack_pending=-1, ack_policy=ack_policy)
    states, settled = [], []
    for at_once in (True, False):
        consumer = ConsumerMachine.create(SHARD, 1, config, 1, 0, 1)
        for number, (seqs, behind, acked) in enumerate(taken, 1):
            position = max(seqs[-1] + 1 - behind, 1)
            step = Step(number, number, Writes())
            if at_once:
                both = cmd.DeliverAcked(1, 1, seqs, position, None if all_acked else acked)
                settled.append(consumer.change(both, step))
            else:
                first = consumer.change(cmd.Deliver(1, 1, seqs, position), step)
                acks = cmd.Acknowledge(1, 1, seqs if all_acked else acked)
                settled.append(first + consumer.change(acks, step))
        states.append(consumer.snapshot())
    assert states[0] == states[1]
    assert settled[: len(taken)] == settled[len(taken) :]
