"""Where an ordered subscription stands in each shard, against plain dictionaries."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from contrail_common.cursors import Cursor, read_cursor
from contrail_common.model import (
    ConsumerConfig,
    ConsumerInfo,
    ConsumerShardInfo,
    SequencePair,
    StoredMessage,
    StreamConfig,
    StreamInfo,
    StreamState,
)
from contrail_gateway.core.sharded_order import ShardedOrder
from contrail_link.contract.consume import Delivery
from tests.support.each import each

SHARDS = 3


def stream(first: list[int], last: list[int]) -> StreamInfo:
    states = [
        StreamState(
            messages=0, bytes=0, first_seq=low, first_ts_ns=0, last_seq=high, last_ts_ns=0,
            num_subjects=0, num_deleted=0, consumer_count=0,
        )
        for low, high in zip(first, last, strict=True)
    ]  # fmt: skip
    config = StreamConfig(name="S", shards=SHARDS)
    return StreamInfo(
        config=config, created_ns=0, state=states[0], incarnation="i", version=1, leader="n",
        shards=states,
    )  # fmt: skip


def consumer(places: list[tuple[int, int]]) -> ConsumerInfo:
    nowhere = SequencePair(0, 0)
    shards = [
        ConsumerShardInfo(
            shard=shard, delivered=SequencePair(*place), ack_floor=nowhere, num_ack_pending=0,
            num_redelivered=0, num_pending=0,
        )
        for shard, place in enumerate(places)
    ]  # fmt: skip
    config = ConsumerConfig(name="c", durable=False, ack_policy="none")
    return ConsumerInfo(
        stream="S", config=config, created_ns=0, version=1, delivered=nowhere, ack_floor=nowhere,
        num_ack_pending=0, num_redelivered=0, num_waiting=0, num_pending=0, shards=shards,
    )  # fmt: skip


def delivery(shard: int, seq: int, consumer_seq: int) -> Delivery:
    return Delivery(StoredMessage(seq, "s", 0, None, b"", shard), consumer_seq, 1, 0)


def order(**fields: Any) -> ShardedOrder:
    """A subscription at the beginning of three shards with 10 messages each."""
    first, last = fields.get("first", [1] * SHARDS), fields.get("last", [10] * SHARDS)
    return ShardedOrder(stream(first, last), consumer([(0, 0)] * SHARDS), fields.get("begin"))


pulls = st.lists(
    st.lists(st.tuples(st.integers(0, SHARDS - 1), st.integers(1, 3)), max_size=6), max_size=6
)


@given(pulls)
def test_each_shard_continues_in_order_and_the_cursor_is_after_it(
    steps: list[list[tuple[int, int]]],
) -> None:
    found = order(last=[1_000] * SHARDS)
    next_seqs, consumer_seqs = [1] * SHARDS, [1] * SHARDS
    for step in steps:
        pulled = []
        begun = list(next_seqs)
        for shard, by in step:
            seq = next_seqs[shard] + by - 1
            pulled.append(delivery(shard, seq, consumer_seqs[shard]))
            next_seqs[shard], consumer_seqs[shard] = seq + 1, consumer_seqs[shard] + 1
        assert found.in_order(pulled)
        first = {one.message.shard: one.message.seq for one in reversed(pulled)}
        holes = any(seq > begun[shard or 0] for shard, seq in first.items())
        assert found.leaves_a_hole(pulled) == holes
        found.advance(pulled)
        assert read_cursor(found.taken_to()) == Cursor("i", next_seqs)
        found.sent(pulled)
        assert read_cursor(found.sent_to()) == Cursor("i", next_seqs)


@each(
    "pulled",
    [
        [delivery(0, 1, 2)],
        [delivery(0, 1, 1), delivery(0, 2, 3)],
        [delivery(1, 4, 1), delivery(1, 4, 2)],
        [delivery(1, 1, 1), delivery(2, 1, 2)],
    ],
    ids=["one-missing", "one-missing-amid", "twice", "of-another-shard"],
)
def test_what_somebody_else_was_given_shows_in_the_consumers_sequences(
    pulled: list[Delivery],
) -> None:
    assert not order().in_order(pulled)


def test_sequences_below_the_begin_are_out_of_order() -> None:
    found = order(begin=Cursor("i", [5, 1, 1]))
    assert not found.in_order([delivery(0, 4, 1)])
    assert found.in_order([delivery(0, 5, 1), delivery(1, 1, 1)])


def test_loss_is_reported_once_and_only_of_what_is_gone() -> None:
    found = order(first=[4, 1, 11], last=[10, 10, 10])
    assert list(found.lost()) == [(0, (1, 3)), (2, (1, 10))]
    assert list(found.lost()) == []
    found.look_at(stream([4, 6, 11], [10, 10, 10]))
    pulled = [delivery(1, 3, 1)]
    found.stop_before(pulled)
    assert list(found.lost()) == [(1, (1, 2))]
    assert list(found.lost()) == [(1, (3, 5))]


def test_what_was_looked_through_in_vain_is_not_lost_later() -> None:
    found = order()
    found.cover()
    found.passed()
    found.look_at(stream([11] * SHARDS, [12] * SHARDS))
    assert list(found.lost()) == []
    found.look_at(stream([13] * SHARDS, [12] * SHARDS))
    assert [gap for _, gap in found.lost()] == [(11, 12)] * SHARDS
