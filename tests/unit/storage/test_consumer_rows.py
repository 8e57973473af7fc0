"""A consumer that is loaded from its rows equals the one that wrote them, however it changed."""

from collections.abc import Iterator
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_storage.core import commands as cmd
from contrail_storage.core import consumer_machine, pending_deliveries
from contrail_storage.core import key_layout as keys
from contrail_storage.core.consumer_machine import (
    ConsumerMachine,
    Gone,
    Reconfigured,
    Trimmed,
)
from contrail_storage.core.results import Step, Writes
from tests.unit.storage.machine_rig import SHARD, RowStore, consumer_config

SMALL = 4
steps = st.one_of(
    st.tuples(st.just("deliver"), st.integers(1, 20)),
    st.tuples(st.just("deliver"), st.integers(1, 20)),
    st.tuples(st.just("redeliver"), st.integers(0, 60)),
    st.tuples(st.sampled_from(["ack", "nak", "gone", "exhaust", "trim"]), st.integers(0, 60)),
    st.tuples(st.just("ack_wait"), st.integers(1, 9)),
    st.tuples(st.just("restart"), st.just(0)),
)


@pytest.fixture(autouse=True)
def small_bounds() -> Iterator[None]:
    with (
        patch.object(pending_deliveries, "CHUNK", SMALL),
        patch.object(pending_deliveries, "_FEW", 1),
        patch.object(consumer_machine, "_FOLD_ROWS", 3),
        patch.object(consumer_machine, "_FOLD_BYTES_MIN", 10),
        patch.object(consumer_machine, "_CHUNKS_ENCODED", 2),
    ):
        yield


def write(store: RowStore, consumer: ConsumerMachine, change: consumer_machine.Change) -> None:
    writes = Writes()
    consumer.change(change, Step(1, 7, writes))
    store.write(writes.rows)


def made(store: RowStore, **fields: object) -> ConsumerMachine:
    config = consumer_config("c", max_ack_pending=-1, **fields)
    consumer = ConsumerMachine.create(SHARD, 1, config, 1, 0, 1)
    writes = Writes()
    consumer.write_snapshot(writes)
    store.write(writes.rows)
    return consumer


def loaded(store: RowStore) -> ConsumerMachine:
    [(_, row)] = store.scan(keys.CONSUMER)
    consumer = ConsumerMachine.load(SHARD, 1, row, store.scan)
    for _, delta in store.scan(keys.CONSUMER_DELTA):
        consumer.replay(delta)
    return consumer


def change_of(consumer: ConsumerMachine, kind: str, number: int) -> consumer_machine.Change:
    pending = list(consumer.pending)
    chosen = pending[number % len(pending)] if pending else 1
    match kind:
        case "deliver":
            seqs = range(consumer.next_seq, consumer.next_seq + number)
            return cmd.Deliver(1, 1, list(seqs), seqs[-1] + 1)
        case "redeliver":
            return cmd.Deliver(1, 1, [chosen], 1)
        case "ack":
            return cmd.Acknowledge(1, 1, [chosen])
        case "nak":
            return cmd.Acknowledge(1, 1, [], [("nak", chosen, number)])
        case "gone":
            return Gone(pending[number::2])
        case "exhaust":
            return cmd.Exhaust(1, 1, [chosen])
        case "trim":
            return Trimmed(chosen)
        case _:
            return Reconfigured(msgspec.structs.replace(consumer.config, ack_wait_ns=number))


@given(st.lists(steps, max_size=40), st.sampled_from(["explicit", "all"]))
def test_loaded_consumer_is_equal(script: list[tuple[str, int]], ack_policy: str) -> None:
    store = RowStore()
    consumer = made(store, ack_policy=ack_policy, max_deliver=2)
    for kind, number in script:
        if kind == "restart":
            consumer = loaded(store)
        else:
            write(store, consumer, change_of(consumer, kind, number))
        assert loaded(store).snapshot() == consumer.snapshot()
    writes = Writes()
    consumer.erase(writes)
    store.write(writes.rows)
    assert not store.rows


def test_pending_deliveries_in_the_snapshot_row_are_loaded() -> None:
    """As versions before the rows of pending deliveries wrote them."""
    store = RowStore()
    consumer = made(store)
    write(store, consumer, cmd.Deliver(1, 1, list(range(1, 100)), 100))
    old = msgspec.msgpack.decode(msgspec.msgpack.encode(consumer.snapshot()))[:-1]
    earlier = ConsumerMachine.load(SHARD, 1, msgspec.msgpack.encode(old))
    assert earlier.snapshot() == consumer.snapshot()
    assert len(earlier.pending) == 99


def test_messages_of_a_lost_row_are_delivered_again() -> None:
    store = RowStore()
    consumer = made(store)
    write(store, consumer, cmd.Deliver(1, 1, list(range(1, 10 * SMALL + 1)), 10 * SMALL + 1))
    write(store, consumer, cmd.Acknowledge(1, 1, [1, 2]))
    writes = Writes()
    consumer.write_snapshot(writes)
    store.write(writes.rows)
    del store.rows[store.scan(keys.PENDING)[5][0]]
    damaged = loaded(store)
    assert (damaged.next_seq, len(damaged.pending)) == (3, 9 * SMALL - 2)


def test_snapshot_that_is_due_is_encoded_by_several_changes() -> None:
    store = RowStore()
    consumer = made(store)
    for _ in range(200):
        seq = consumer.next_seq
        write(store, consumer, cmd.Deliver(1, 1, list(range(seq, seq + SMALL)), seq + SMALL))
    encoded: list[int] = []
    with patch.object(pending_deliveries, "_encode", counting(encoded)):
        for seq in [*range(1, 200 * SMALL, SMALL)] * 8:
            encoded.append(0)
            write(store, consumer, cmd.Acknowledge(1, 1, [], [("nak", seq, 1)]))
    assert max(encoded) <= 3 < sum(encoded)
    assert loaded(store).snapshot() == consumer.snapshot()


def counting(encoded: list[int]) -> object:
    encode = msgspec.msgpack.Encoder().encode

    def count(what: object) -> bytes:
        encoded[-1] += 1
        return encode(what)

    return count
