"""A scripted run of configured behaviour: limits, times, interest, archives."""

from collections.abc import Iterator
from typing import Any, Final

from contrail_common.model import TTL_NEVER, ConsumerConfig, PublishMessage, StreamConfig
from tests.crash.history import (
    Ack,
    DeleteStream,
    DropConsumer,
    Erase,
    Look,
    PassTime,
    Publish,
    Pull,
    Purge,
    PutConsumer,
    PutStream,
    Remove,
    Restore,
    Save,
    Step,
    TakeCheckpoint,
    WriteOut,
)
from tests.crash.script import Writer

_S: Final = 1_000_000_000
_DAY_NS: Final = 86_400 * _S
_HOUR_NS: Final = 3_600 * _S
MARKER_NS: Final = 60 * _S
TTL_NS: Final = 90 * _S
AGE_NS: Final = 150 * _S
LATER_NS: Final = 100 * _S
LATEST: Final = "LATEST"
SLOTS: Final = "SLOTS"
BATCHES: Final = "BATCHES"
TIMED: Final = "TIMED"
AGED: Final = "AGED"
SHARED: Final = "SHARED"
PASSING: Final = "PASSING"


def features(seed: int) -> list[Step]:
    write = Writer(seed, all_ids=True)
    return [
        *_keep_latest(write),
        *_share(write),
        *_end_by_time(write),
        *_batch(write),
        *_restore(write),
        *_drop(write),
        *_age(Writer(seed, all_ids=False)),
        *_lower(write),
    ]


def _stream(name: str, **rules: Any) -> PutStream:
    rules = {"duplicate_window_ns": _DAY_NS, **rules}
    return PutStream(StreamConfig(name=name, subjects=(f"{name.lower()}.*",), **rules))


def _consumer(stream: str, name: str, **rules: Any) -> PutConsumer:
    return PutConsumer(
        stream, ConsumerConfig(name=name, durable=True, ack_wait_ns=_HOUR_NS, **rules)
    )


def _asking(message: PublishMessage, **asked: Any) -> PublishMessage:
    for name, value in asked.items():
        setattr(message, name, value)
    return message


def _keep_latest(write: Writer) -> Iterator[Step]:
    yield [_stream(LATEST, max_msgs_per_subject=3, allow_rollup_hdrs=True)]
    for name in "abaabab":
        yield [Publish(LATEST, [write.message(f"latest.{name}")])]
    yield [Publish(LATEST, [write.message(f"latest.{name}") for name in "acacb"])]
    yield [WriteOut()]
    every = {"deliver_policy": "last_per_subject", "filter_subjects": ("latest.*",)}
    yield [_consumer(LATEST, "newest", **every)]
    narrow = {"deliver_policy": "last_per_subject", "filter_subjects": ("latest.b",)}
    yield [_consumer(LATEST, "newest-b", **narrow)]
    yield [Publish(LATEST, [write.message("latest.d")])]
    yield [Pull(LATEST, "newest", 2)]
    yield [Ack(LATEST, "newest", "ack", [10], sync=True)]
    yield [TakeCheckpoint()]
    yield [Publish(LATEST, [_asking(write.message("latest.a"), rollup="sub")])]
    yield [Publish(LATEST, [write.message("latest.b"), write.message("latest.c")])]
    yield [Purge(LATEST, subject="latest.b", keep=1)]
    yield [Purge(LATEST, subject="latest.c", up_to_seq=12)]
    yield [Purge(LATEST, subject="latest.*", keep=3)]
    yield [Publish(LATEST, [_asking(write.message("latest.a"), rollup="all")])]
    yield [Publish(LATEST, [write.message("latest.a"), write.message("latest.b")])]
    yield [Erase(LATEST, [17])]
    yield [Publish(LATEST, [write.message("latest.e")])]
    for _ in range(4):
        yield [Publish(LATEST, [write.message("latest.b")])]
    yield [_stream(SLOTS, discard="new", max_msgs_per_subject=1, discard_new_per_subject=True)]
    yield [Publish(SLOTS, [write.message("slots.a"), write.message("slots.b")])]
    yield [Publish(SLOTS, [write.message("slots.c"), write.message("slots.a")])]
    yield [Remove(SLOTS, 1)]
    yield [Publish(SLOTS, [write.message("slots.a"), write.message("slots.b")])]


def _share(write: Writer) -> Iterator[Step]:
    yield [_stream(SHARED, retention="interest")]
    yield [Publish(SHARED, [write.message("shared.a")])]
    yield [_consumer(SHARED, "all")]
    yield [_consumer(SHARED, "only-a", filter_subjects=("shared.a",))]
    for name in "abab":
        yield [Publish(SHARED, [write.message(f"shared.{name}")])]
    yield [Publish(SHARED, [write.message(f"shared.{name}") for name in "aab"])]
    yield [Pull(SHARED, "all", 5)]
    yield [Pull(SHARED, "only-a", 3)]
    yield [Ack(SHARED, "all", "ack", [2, 3], sync=True)]
    yield [Ack(SHARED, "only-a", "ack", [2], sync=True)]
    yield [WriteOut()]
    yield [Ack(SHARED, "only-a", "ack", [4], sync=True)]
    yield [Ack(SHARED, "all", "ack", [4], sync=False)]
    yield [Ack(SHARED, "all", "term", [5], sync=True)]
    yield [_consumer(SHARED, "only-b", filter_subjects=("shared.b",))]
    yield [Publish(SHARED, [write.message("shared.b"), write.message("shared.a")])]
    yield [Pull(SHARED, "all", 5)]
    yield [Ack(SHARED, "all", "ack", [6, 7, 9], sync=True)]
    yield [DropConsumer(SHARED, "only-b")]
    yield [Look(SHARED, "all")]


def _end_by_time(write: Writer) -> Iterator[Step]:
    yield [_stream(TIMED, allow_msg_ttl=True, subject_delete_marker_ttl_ns=MARKER_NS)]
    first = [_asking(write.message(f"timed.{name}"), ttl_ns=TTL_NS) for name in "ab"]
    yield [Publish(TIMED, first)]
    yield [Publish(TIMED, [write.message("timed.a")])]
    yield [Publish(TIMED, [_asking(write.message("timed.c"), ttl_ns=TTL_NEVER)])]
    yield [Publish(TIMED, [_asking(write.message("timed.d"), ttl_ns=2 * TTL_NS)])]
    yield [PassTime(LATER_NS)]
    yield [Publish(TIMED, [_asking(write.message("timed.b"), ttl_ns=TTL_NS)])]
    yield [TakeCheckpoint()]
    yield [PassTime(LATER_NS)]
    yield [Publish(TIMED, [write.message("timed.e")])]


def _batch(write: Writer) -> Iterator[Step]:
    yield [_stream(BATCHES, allow_atomic=True)]
    for size in (2, 5, 3):
        messages = [write.message(f"batches.{at % 2}") for at in range(size)]
        yield [Publish(BATCHES, messages, atomic=True)]
    yield [Publish(BATCHES, [write.message("batches.0", last_seq=99)] * 2, atomic=True)]
    yield [WriteOut()]
    alone = Publish(BATCHES, [write.message("batches.1")])
    yield [alone, Publish(BATCHES, [write.message("batches.0") for _ in range(4)], atomic=True)]
    every = {"deliver_policy": "last_per_subject", "filter_subjects": ("batches.*",)}
    yield [_consumer(BATCHES, "newest", **every)]
    yield [TakeCheckpoint()]
    yield [Pull(BATCHES, "newest", 1)]
    yield [_stream(BATCHES, allow_atomic=True, sealed=True)]
    yield [Publish(BATCHES, [write.message("batches.9")])]
    yield [Remove(BATCHES, 2)]
    yield [Purge(BATCHES)]


def _restore(write: Writer) -> Iterator[Step]:
    yield [Save(SHARED)]
    yield [Save(LATEST)]
    yield [Publish(SHARED, [write.message("shared.a")])]
    yield [DeleteStream(SHARED)]
    yield [Restore(SHARED, SHARED)]
    yield [DeleteStream(LATEST)]
    yield [Restore("ANOTHER", LATEST)]
    yield [Publish("ANOTHER", [write.message("latest.a")])]
    yield [Pull("ANOTHER", "newest", 1)]
    yield [Pull(SHARED, "all", 5)]
    yield [Ack(SHARED, "all", "ack", [8], sync=True)]


def _drop(write: Writer) -> Iterator[Step]:
    yield [_stream(PASSING)]
    for _ in range(6):
        yield [Publish(PASSING, [write.message("passing.a")])]
    yield [DeleteStream(PASSING)]
    yield [_stream(PASSING, first_seq=50)]
    for _ in range(5):
        yield [Publish(PASSING, [write.message("passing.b", size=300)])]
    yield [Purge(PASSING, up_to_seq=52)]
    yield [TakeCheckpoint()]
    for _ in range(3):
        yield [Publish(PASSING, [write.message("passing.c")])]
    yield [Remove(PASSING, 56)]
    yield [Erase(PASSING, [53, 55])]
    yield [Publish(PASSING, [write.message("passing.d")])]


def _age(write: Writer) -> Iterator[Step]:
    yield [_stream(AGED, max_age_ns=AGE_NS, duplicate_window_ns=LATER_NS, allow_msg_ttl=True)]
    yield [Publish(AGED, [write.message("aged.a"), write.message("aged.b")])]
    yield [Publish(AGED, [_asking(write.message("aged.a"), ttl_ns=TTL_NEVER)])]
    yield [TakeCheckpoint()]
    yield [PassTime(LATER_NS)]
    yield [Publish(AGED, [write.message("aged.c")])]
    yield [PassTime(LATER_NS)]
    yield [Publish(AGED, [_asking(write.message("aged.d"), ttl_ns=TTL_NS)])]


def _lower(write: Writer) -> Iterator[Step]:
    for name in "abab":
        yield [Publish("ANOTHER", [write.message(f"latest.{name}")])]
    lowered = StreamConfig(
        name="ANOTHER",
        subjects=("latest.*",),
        max_msgs_per_subject=1,
        max_msgs=3,
        allow_rollup_hdrs=True,
        duplicate_window_ns=_DAY_NS,
    )
    yield [PutStream(lowered)]
    yield [Publish("ANOTHER", [write.message("latest.f")])]
    yield [_stream(PASSING, first_seq=50, max_msgs=2)]
    yield [TakeCheckpoint()]
    yield [Publish(PASSING, [write.message("passing.e")])]
