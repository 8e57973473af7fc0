"""Scripted runs: one with every kind of call, one that fills a store and a log to be damaged."""

import random
from collections.abc import Iterator
from typing import Any, Final

from contrail_common.model import ConsumerConfig, Expected, PublishMessage, StreamConfig
from contrail_common.publishing import with_control
from tests.crash.history import (
    Ack,
    DeleteStream,
    DropConsumer,
    Look,
    Publish,
    Pull,
    Purge,
    PutConsumer,
    PutStream,
    Remove,
    Step,
    TakeCheckpoint,
)

ORDERS: Final = "ORDERS"
EVENTS: Final = "EVENTS"


class _Writer:
    """Makes messages, each with a payload found nowhere else."""

    def __init__(self, seed: int, *, all_ids: bool) -> None:
        self._chance = random.Random(seed)
        self._all_ids = all_ids
        self._count = 0

    def message(
        self, subject: str, msg_id: str | None = None, *, size: int = 0, **expected: Any
    ) -> PublishMessage:
        self._count += 1
        if self._all_ids and msg_id is None:
            msg_id = f"own-{self._count}"
        filler = self._chance.randbytes(size or self._chance.randint(0, 120))
        asked = Expected(**expected) if expected else None
        headers = {"Trace": [f"{self._count:04}", "b"]} if self._count % 3 == 0 else None
        return PublishMessage(
            subject,
            with_control(headers, msg_id, asked),
            f"{subject} {self._count:04} ".encode() + filler,
            msg_id,
            asked,
        )

    def orders(self, *messages: PublishMessage) -> Publish:
        return Publish(ORDERS, list(messages))

    def events(self, *messages: PublishMessage) -> Publish:
        return Publish(EVENTS, list(messages))


def script(seed: int, *, all_ids: bool = False) -> list[Step]:
    """All steps; with `all_ids` every message has an id, so that every publish can be repeated."""
    write = _Writer(seed, all_ids=all_ids)
    return [
        *_publish(write),
        *_consume(write),
        *_remove(write),
        *_reconfigure(write),
        *_make_anew(write),
        *_finish(write),
    ]


def _publish(write: _Writer) -> Iterator[Step]:
    yield [PutStream(StreamConfig(name=ORDERS, subjects=("orders.>",)))]
    yield [PutStream(StreamConfig(name=EVENTS, subjects=("events.*",)))]
    first = write.message("orders.eu.1", "first")
    yield [write.orders(write.message("orders.eu.1"))]
    yield [write.orders(first)]
    yield [write.orders(first)]
    twice = write.message("orders.us.1", "twice")
    yield [
        write.orders(
            write.message("orders.eu.2", "batch-1"),
            twice,
            write.message("orders.us.2"),
            twice,
            first,
            write.message("elsewhere"),
            write.message("orders.us.3", "batch-2", last_seq=99),
        )
    ]
    yield [write.orders(write.message("orders.us.1", "expected", last_seq=5))]
    yield [write.orders(write.message("orders.us.1", "late", last_seq=5))]
    yield [write.orders(write.message("orders.us.1", last_subject_seq=6, last_msg_id="expected"))]
    yield [write.orders(write.message("orders.us.1", "refused", last_subject_seq=1))]
    yield [
        write.orders(write.message("orders.eu.3", "side-1")),
        write.events(write.message("events.a", "side-2")),
        write.orders(write.message("orders.eu.3", "side-3"), write.message("orders.eu.4")),
    ]


def _consume(write: _Writer) -> Iterator[Step]:
    yield [PutConsumer(ORDERS, ConsumerConfig(name="all", durable=True))]
    yield [
        PutConsumer(
            ORDERS,
            ConsumerConfig(
                name="eu", durable=True, filter_subjects=("orders.eu.*",), max_deliver=50
            ),
        )
    ]
    yield [Pull(ORDERS, "all", 4)]
    yield [Ack(ORDERS, "all", "ack", [1], sync=True)]
    yield [Ack(ORDERS, "all", "ack", [2], sync=False)]
    yield [Look(ORDERS, "all")]
    yield [Ack(ORDERS, "all", "nak", [3], sync=True)]
    yield [Pull(ORDERS, "all", 2)]
    yield [Ack(ORDERS, "all", "term", [3], sync=True)]
    yield [Ack(ORDERS, "all", "in_progress", [4], sync=True)]
    yield [Pull(ORDERS, "eu", 2)]
    yield [
        Ack(ORDERS, "eu", "ack", [1, 2], sync=True),
        write.orders(write.message("orders.eu.1", "beside")),
    ]
    yield [PutConsumer(EVENTS, ConsumerConfig(name="new", durable=True, deliver_policy="new"))]
    yield [write.events(write.message("events.b", "for-new"))]
    yield [Look(ORDERS, "all")]


def _remove(write: _Writer) -> Iterator[Step]:
    yield [TakeCheckpoint()]
    yield [Remove(ORDERS, 4)]
    yield [Remove(ORDERS, 7)]
    yield [Purge(ORDERS, up_to_seq=3)]
    yield [write.orders(write.message("orders.big", "big", size=5_000))]
    yield [write.orders(write.message("orders.eu.1", "behind-big"))]
    yield [Pull(ORDERS, "all", 3)]
    yield [Ack(ORDERS, "all", "ack", [8], sync=True)]
    yield [Look(ORDERS, "all")]
    yield [Purge(ORDERS, keep=4)]


def _reconfigure(write: _Writer) -> Iterator[Step]:
    for name in "cdef":
        yield [write.events(write.message(f"events.{name}", f"event-{name}"))]
    yield [TakeCheckpoint()]
    limited = StreamConfig(name=EVENTS, subjects=("events.*", "signals"), max_msgs=4)
    yield [PutStream(limited)]
    yield [write.events(write.message("signals", "signal"), write.message("events.a"))]
    yield [Pull(EVENTS, "new", 10)]
    yield [PutStream(StreamConfig(name=EVENTS, subjects=("events.*",), max_msgs=4))]
    yield [PutStream(StreamConfig(name="SIGNALS", subjects=("signals",)))]
    yield [PutConsumer(ORDERS, ConsumerConfig(name="all", durable=True, max_ack_pending=77))]
    yield [write.events(write.message("events.z", "evicts"))]


def _make_anew(write: _Writer) -> Iterator[Step]:
    yield [DeleteStream(EVENTS)]
    yield [PutStream(StreamConfig(name=EVENTS, subjects=("events.*",), first_seq=101))]
    yield [write.events(write.message("events.a", "side-2"), write.message("events.a", "signal"))]
    yield [PutConsumer(EVENTS, ConsumerConfig(name="new", durable=True))]
    yield [Pull(EVENTS, "new", 1)]
    yield [Ack(EVENTS, "new", "ack", [101], sync=True)]
    yield [DropConsumer(ORDERS, "eu")]
    yield [TakeCheckpoint()]
    yield [Purge("SIGNALS")]
    yield [DeleteStream("SIGNALS")]


def _finish(write: _Writer) -> Iterator[Step]:
    # Two messages of more than half an entry: one request, two entries.
    huge = [write.message("orders.big", f"huge-{at}", size=140_000) for at in range(2)]
    yield [write.orders(*huge)]
    yield [Purge(ORDERS)]
    yield [write.orders(write.message("orders.eu.9", "last"))]
    yield [Pull(ORDERS, "all", 1)]
    yield [Look(ORDERS, "all")]


def archive(seed: int) -> list[Step]:
    """Two streams with messages in two flushed files and in the log behind them."""
    return list(_archive(_Writer(seed, all_ids=True)))


def _archive(write: _Writer) -> Iterator[Step]:
    yield [PutStream(StreamConfig(name=ORDERS, subjects=("orders.>",)))]
    yield [PutStream(StreamConfig(name=EVENTS, subjects=("events.*",)))]
    yield [PutConsumer(ORDERS, ConsumerConfig(name="all", durable=True))]
    for at in range(8):
        yield [write.orders(*[write.message(f"orders.{at}", size=4_000) for _ in range(10)])]
        yield [write.events(write.message("events.a"))]
    yield [Pull(ORDERS, "all", 20)]
    yield [Ack(ORDERS, "all", "ack", list(range(1, 16)), sync=True)]
    yield [Remove(ORDERS, 25)]
    yield [TakeCheckpoint()]
    for at in range(4):
        yield [write.orders(*[write.message(f"orders.{at}", size=1_000) for _ in range(10)])]
        yield [write.events(write.message("events.b"), write.message("events.c"))]
    yield [TakeCheckpoint()]
    for at in range(6):
        yield [write.orders(write.message(f"orders.{at}", size=300), write.message("orders.x"))]
        yield [write.events(write.message("events.d"))]
