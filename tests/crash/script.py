"""Scripted runs: one with every kind of call, one that fills a store and a log to be damaged."""

import random
from collections.abc import Iterator
from typing import Any, Final

from contrail_common.model import AckKind, ConsumerConfig, Expected, PublishMessage, StreamConfig
from contrail_edge.inputs.message_items import with_control
from tests.crash.history import (
    Ack,
    AckPulled,
    Call,
    DeleteStream,
    DropConsumer,
    Erase,
    Look,
    Publish,
    Pull,
    Purge,
    PutConsumer,
    PutStream,
    Reclaim,
    Remove,
    Step,
    TakeCheckpoint,
)

REPEATED: Final = 0.15
WITH_ID: Final = 0.7
ODD: Final = 0.1
SYNC: Final = 0.7
ORDERS: Final = "ORDERS"
EVENTS: Final = "EVENTS"
JOBS: Final = "JOBS"
KEYED: Final = "KEYED"


class Writer:
    """Makes messages, each with a unique payload."""

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
    """All steps; with `all_ids`, every message has an id, so every publish can be repeated."""
    write = Writer(seed, all_ids=all_ids)
    return [
        *_publish(write),
        *_consume(write),
        *_work(write),
        *_remove(write),
        *_reconfigure(write),
        *_recreate(write),
        *_finish(write),
    ]


def _publish(write: Writer) -> Iterator[Step]:
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


def _consume(write: Writer) -> Iterator[Step]:
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


def _work(write: Writer) -> Iterator[Step]:
    yield [PutStream(StreamConfig(name=JOBS, subjects=("jobs.*",), retention="workqueue"))]
    yield [PutConsumer(JOBS, ConsumerConfig(name="workers", durable=True))]
    jobs = [write.message(f"jobs.{at % 2}", f"job-{at}") for at in range(6)]
    yield [Publish(JOBS, jobs)]
    yield [Pull(JOBS, "workers", 5)]
    yield [Ack(JOBS, "workers", "ack", [2, 5], sync=True)]
    yield [Ack(JOBS, "workers", "term", [4], sync=True)]
    yield [Publish(JOBS, [write.message("jobs.0", "job-6")])]
    yield [Ack(JOBS, "workers", "ack", [1], sync=True)]
    yield [Pull(JOBS, "workers", 5)]
    yield [Ack(JOBS, "workers", "ack", [7, 6], sync=True)]


def _remove(write: Writer) -> Iterator[Step]:
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


def _reconfigure(write: Writer) -> Iterator[Step]:
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


def _recreate(write: Writer) -> Iterator[Step]:
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


def _finish(write: Writer) -> Iterator[Step]:
    # Two messages of more than half an entry: one request, two entries.
    huge = [write.message("orders.big", f"huge-{at}", size=140_000) for at in range(2)]
    yield [write.orders(*huge)]
    yield [Purge(ORDERS)]
    yield [write.orders(write.message("orders.eu.9", "last"))]
    yield [Pull(ORDERS, "all", 1)]
    yield [Look(ORDERS, "all")]


def erasing(seed: int) -> list[Step]:
    """Messages of two streams, in tables and in the log after them; some of them are erased."""
    return list(_erasing(Writer(seed, all_ids=True)))


def _erasing(write: Writer) -> Iterator[Step]:
    yield [PutStream(StreamConfig(name=ORDERS, subjects=("orders.>",)))]
    yield [PutStream(StreamConfig(name=EVENTS, subjects=("events.*",)))]
    yield [PutConsumer(ORDERS, ConsumerConfig(name="all", durable=True))]
    for at in range(6):
        yield [write.orders(*[write.message(f"orders.name-{at}-{n}", size=60) for n in range(3)])]
        yield [write.events(write.message("events.a", size=60))]
    yield [Pull(ORDERS, "all", 5)]
    yield [TakeCheckpoint()]
    # After a large block, no earlier block waits for a merge any more.
    yield [write.orders(write.message("orders.large", size=40_000))]
    yield [write.orders(write.message("orders.late", size=60))]
    yield [Remove(ORDERS, seq) for seq in (9, 13, 14, 15, 16, 18)]
    yield [Reclaim()]
    yield [Erase(ORDERS, [3, 5, 20])]
    for _ in range(3):
        yield [write.events(write.message("events.b", size=60))]
        yield [write.orders(write.message("orders.name-0-0", size=60))]
    yield [
        Erase(ORDERS, [9, 14]),
        Erase(EVENTS, [2, 3, 7]),
        write.events(write.message("events.c")),
    ]
    yield [Look(ORDERS, "all")]


def shredding(seed: int) -> list[Step]:
    """Messages of a stream with subject keys; subjects are erased, one by one and together."""
    return list(_shredding(Writer(seed, all_ids=True)))


def _shredding(write: Writer) -> Iterator[Step]:
    keyed = StreamConfig(name=KEYED, subjects=("keyed.*",), erasure="subject_key")
    yield [PutStream(keyed)]
    yield [PutConsumer(KEYED, ConsumerConfig(name="all", durable=True))]
    for at in range(4):
        yield [Publish(KEYED, [write.message(f"keyed.{at}-{n}", size=60) for n in range(2)])]
        yield [Publish(KEYED, [write.message("keyed.same", size=60)])]
    yield [Pull(KEYED, "all", 5)]
    yield [TakeCheckpoint()]
    yield [Publish(KEYED, [write.message("keyed.same", size=60)])]
    yield [Erase(KEYED, [], "keyed.same")]
    yield [Publish(KEYED, [write.message("keyed.same", size=60)])]
    yield [Erase(KEYED, [1])]
    yield [Erase(KEYED, [], "keyed.1-1")]
    yield [Publish(KEYED, [write.message(f"keyed.new-{n}", size=60) for n in range(3)])]
    yield [Erase(KEYED, [], "keyed.2-0")]
    yield [Look(KEYED, "all")]


def archive(seed: int) -> list[Step]:
    """Two streams with messages in two flushed files and in the log after them."""
    return list(_archive(Writer(seed, all_ids=True)))


def _archive(write: Writer) -> Iterator[Step]:
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


class Wanderer:
    """Random calls for any number of lives; the same seed gives the same calls."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._write = Writer(seed, all_ids=False)
        self._sent: list[PublishMessage] = []

    def steps(self, count: int) -> list[Step]:
        """The next steps; each life first ensures that its streams and consumers exist."""
        begin: list[Step] = [[PutStream(self._config(name))] for name in (ORDERS, EVENTS)]
        consumers = [(ORDERS, "a"), (ORDERS, "b"), (EVENTS, "a")]
        begin += [[self._put_consumer(stream, name)] for stream, name in consumers]
        makers = (self._publish, self._consume, self._remove, self._rebuild)
        chosen = self._chance.choices(makers, (12, 8, 3, 2), k=count)
        return begin + [maker() for maker in chosen]

    def _config(self, name: str) -> StreamConfig:
        return StreamConfig(
            name=name,
            subjects=(f"{name.lower()}.>",),
            max_msgs=self._chance.choice((-1, -1, 4, 15)),
            max_bytes=self._chance.choice((-1, -1, 1_500)),
            discard=self._chance.choice(("old", "old", "new")),
        )

    def _put_consumer(self, stream: str, name: str) -> Call:
        config = ConsumerConfig(
            name=name,
            durable=True,
            deliver_policy="new" if name == "b" else "all",
            filter_subjects=(f"{stream.lower()}.1",) if name == "b" else (),
            max_deliver=self._chance.choice((-1, 100)),
        )
        return PutConsumer(stream, config)

    def _stream(self) -> str:
        return self._chance.choice((ORDERS, ORDERS, EVENTS))

    def _message(self, stream: str) -> PublishMessage:
        repeatable = [one for one in self._sent if one.subject.startswith(stream.lower())]
        if repeatable and self._chance.random() < REPEATED:
            return self._chance.choice(repeatable[-10:])
        msg_id = f"id-{len(self._sent)}" if self._chance.random() < WITH_ID else None
        subject = f"{stream.lower()}.{self._chance.randrange(4)}"
        expected = {"last_seq": self._chance.randrange(30)} if self._chance.random() < ODD else {}
        message = self._write.message(subject, msg_id, **expected)
        if msg_id:
            self._sent.append(message)
        return message

    def _publish(self) -> Step:
        step: Step = []
        for _ in range(self._chance.choice((1, 1, 1, 2, 3))):
            stream = self._stream()
            count = self._chance.choice((1, 1, 2, 5))
            step.append(Publish(stream, [self._message(stream) for _ in range(count)]))
        if self._chance.random() < ODD:
            step.append(TakeCheckpoint())
        return step

    def _consume(self) -> Step:
        stream, name = self._chance.choice(((ORDERS, "a"), (ORDERS, "b"), (EVENTS, "a")))
        kinds: list[AckKind] = ["ack", "ack", "ack", "nak", "term", "in_progress"]
        kind = self._chance.choice(kinds)
        sync = self._chance.random() < SYNC
        return [
            self._chance.choice(
                (
                    Pull(stream, name, self._chance.randint(1, 6)),
                    AckPulled(stream, name, kind, self._chance.randint(1, 4), sync),
                    Look(stream, name),
                )
            )
        ]

    def _remove(self) -> Step:
        stream, at = self._stream(), self._chance.randint(1, 40)
        calls = (Remove(stream, at), Remove(stream, at), Purge(stream, at), Purge(stream, keep=3))
        return [self._chance.choice(calls)]

    def _rebuild(self) -> Step:
        stream = self._stream()
        calls: tuple[Call, ...] = (
            PutStream(self._config(stream)),
            self._put_consumer(stream, "a"),
            DropConsumer(stream, "a"),
            DeleteStream(stream),
            TakeCheckpoint(),
            TakeCheckpoint(),
        )
        return [self._chance.choice(calls)]
