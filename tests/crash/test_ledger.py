"""The ledger finds every planted anomaly, and nothing in the original history."""

from collections.abc import Callable
from typing import Any, Final

import pytest
from msgspec.structs import replace

from contrail_common.model import SequencePair, StoredMessage
from contrail_link.contract.publish import PubResult
from tests.crash.history import (
    Delivered,
    Drained,
    Invoked,
    Opened,
    Publish,
    Published,
    Purge,
    Record,
    Returned,
    Seen,
    StreamView,
)
from tests.crash.ledger import Ledger
from tests.crash.script import EVENTS, ORDERS, archive
from tests.crash.trials import Trial
from tests.crash.zygote import Job, Zygote

SEED: Final = 5
REMOVED_SEQ: Final = 25
ACKED_SEQ: Final = 3
NUMBER: Final = 900_000

Anomaly = Callable[[list[Record]], list[Record]]


@pytest.fixture(scope="module")
def sound(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    """The history of a run, of a look after it with repeated calls, and of another look."""
    trial = Trial(zygote, tmp_path_factory.mktemp("ledger"), SEED)
    ended = [trial.live(Job(steps=archive(SEED))), trial.look(), trial.look()]
    return [record for life in ended for record in life.records]


def in_last_life(change: Callable[[Seen], Seen]) -> Anomaly:
    """Change what the last process shows."""

    def apply(records: list[Record]) -> list[Record]:
        start = max(at for at, record in enumerate(records) if isinstance(record, Opened))
        return [
            change(record) if at > start and isinstance(record, Seen) else record
            for at, record in enumerate(records)
        ]

    return apply


def in_last_look(**changes: Any) -> Anomaly:
    return in_last_life(lambda seen: replace(seen, **changes))


def in_last_view(change: Callable[[StreamView], dict[str, Any]]) -> Anomaly:
    """Change what the last process shows of a stream."""

    def of(seen: Seen) -> Seen:
        view = replace(seen.streams[ORDERS], **change(seen.streams[ORDERS]))
        return replace(seen, streams={**seen.streams, ORDERS: view})

    return in_last_life(of)


def in_last_drain(change: Callable[[Drained], Drained]) -> Anomaly:
    def apply(records: list[Record]) -> list[Record]:
        at = max(at for at, record in enumerate(records) if isinstance(record, Drained))
        drained = records[at]
        assert isinstance(drained, Drained)
        return [*records[:at], change(drained), *records[at + 1 :]]

    return apply


def in_outcome(kind: type[Any], change: Callable[[Any], Any], *, nth: int = 0) -> Anomaly:
    """Change the n-th outcome of a kind (negative ones count from the end)."""

    def apply(records: list[Record]) -> list[Record]:
        at = [
            at
            for at, record in enumerate(records)
            if isinstance(record, Returned) and isinstance(record.outcome, kind)
        ][nth]
        returned = records[at]
        assert isinstance(returned, Returned)
        changed = replace(returned, outcome=change(returned.outcome))
        return [*records[:at], changed, *records[at + 1 :]]

    return apply


def with_messages(change: Callable[[list[StoredMessage]], list[StoredMessage]]) -> Anomaly:
    """Change the messages of the last look, whichever way they are read."""

    def of(view: StreamView) -> dict[str, Any]:
        messages = change(list(view.messages))
        return {
            "messages": messages,
            "fetched": messages,
            "replayed": [message.seq for message in messages],
        }

    return in_last_view(of)


def swapped(messages: list[StoredMessage]) -> list[StoredMessage]:
    first, second, *rest = messages
    return [replace(second, seq=first.seq), replace(first, seq=second.seq), *rest]


def with_last_doubled(records: list[Record]) -> list[Record]:
    """The last message with an id is stored again, by a repeat whose answer was lost."""
    sent = [
        record.call.messages[-1]
        for record in records
        if isinstance(record, Invoked)
        and isinstance(record.call, Publish)
        and record.call.stream == ORDERS
        and record.call.messages[-1].msg_id
    ][-1]
    lost_call = Invoked(NUMBER, Publish(ORDERS, [sent]))

    def add(messages: list[StoredMessage]) -> list[StoredMessage]:
        seq = messages[-1].seq + 1
        return [*messages, StoredMessage(seq, sent.subject, 0, sent.headers, sent.payload)]

    doubled = with_messages(add)(records)
    return in_doubt(doubled, lost_call)


def in_doubt(records: list[Record], lost_call: Invoked) -> list[Record]:
    """The call was made just before the last process, and never answered."""
    at = max(at for at, record in enumerate(records) if isinstance(record, Opened))
    return [*records[:at], lost_call, *records[at:]]


def half_purged(records: list[Record]) -> list[Record]:
    fewer = with_messages(lambda messages: messages[3:])(records)
    return in_doubt(fewer, Invoked(NUMBER, Purge(ORDERS, up_to_seq=10)))


def shifted(published: Published, by: int) -> Published:
    first, *rest = published.results
    return Published([PubResult(first.seq + by, duplicate=first.duplicate), *rest])


def first_only(drained: Drained, **changes: Any) -> Drained:
    first, *rest = drained.deliveries
    changed = replace(first, message=replace(first.message, **changes))
    return replace(drained, deliveries=[changed, *rest])


def fallen(view: StreamView) -> dict[str, Any]:
    info = replace(view.consumers["all"], ack_floor=SequencePair(0, 0))
    return {"consumers": {"all": info}}


ANOMALIES = {
    "lost": (with_messages(lambda m: m[:5] + m[6:]), "has lost"),
    "lost at the end": (with_messages(lambda m: m[:-1]), "has lost"),
    "renumbered": (with_messages(swapped), "another content"),
    "other payload": (
        with_messages(lambda m: [replace(m[0], payload=b"?"), *m[1:]]),
        "another content",
    ),
    "other headers": (
        with_messages(lambda m: [replace(m[0], headers={"A": ["b"]}), *m[1:]]),
        "another content",
    ),
    "removed one is back": (
        with_messages(lambda m: [*m, replace(m[0], seq=REMOVED_SEQ)]),
        "which were removed",
    ),
    "invented": (
        with_messages(lambda m: [*m, replace(m[-1], seq=m[-1].seq + 1, payload=b"!")]),
        "what nobody sent",
    ),
    "stored twice": (with_last_doubled, "is stored a second time"),
    "removed by half": (half_purged, "a removal by half"),
    "wrong count": (
        in_last_view(lambda v: {"state": replace(v.state, messages=v.state.messages + 1)}),
        "counted are",
    ),
    "wrong last sequence": (
        in_last_view(lambda v: {"state": replace(v.state, last_seq=v.state.last_seq + 1)}),
        "ends at",
    ),
    "reads disagree": (in_last_view(lambda v: {"fetched": v.fetched[1:]}), "single reads"),
    "short replay": (in_last_view(lambda v: {"replayed": v.replayed[:-1]}), "a replay has"),
    "other configuration": (
        in_last_view(lambda v: {"config": replace(v.config, max_msgs=10_000)}),
        "has the configuration",
    ),
    "claims more": (in_last_view(lambda _: {"claimed_subjects": ("orders.>", "x")}), "claims"),
    "consumer gone": (in_last_view(lambda _: {"consumers": {}}), "has lost the consumers"),
    "floor fell": (in_last_view(fallen), "fell from"),
    "stream gone": (in_last_look(streams={}, listed=[]), "is gone"),
    "half-made stream": (in_last_look(half_made=["X is reserved"]), "X is reserved"),
    "unreadable stream": (in_last_look(unreadable={EVENTS: "data_lost: x"}), "cannot be read"),
    "not listed": (in_last_look(listed=[ORDERS]), "listed are"),
    "repeat elsewhere": (in_outcome(Published, lambda p: shifted(p, -1), nth=-2), "a repeat"),
    "sequence twice": (
        in_outcome(Published, lambda _: Published([PubResult(1), PubResult(1)] * 5)),
        "a second time",
    ),
    "false duplicate": (
        in_outcome(Published, lambda p: Published([PubResult(1, duplicate=True), *p.results[1:]])),
        "never stored",
    ),
    "other delivery": (
        in_outcome(
            Delivered,
            lambda d: Delivered(
                [replace(d.deliveries[0], message=replace(d.deliveries[0].message, payload=b"?"))]
            ),
        ),
        "got another content",
    ),
    "settled one comes again": (
        in_last_drain(lambda d: first_only(d, seq=ACKED_SEQ)),
        "again after its confirmed",
    ),
    "never delivered": (
        in_last_drain(lambda d: replace(d, deliveries=d.deliveries[1:])),
        "never gets",
    ),
    "delivered twice at once": (
        in_last_drain(lambda d: replace(d, deliveries=[d.deliveries[0], *d.deliveries])),
        "twice at once",
    ),
}


def test_sound_history_has_no_problems(sound: list[Record]) -> None:
    assert Ledger().take(sound) == []


@pytest.mark.parametrize("name", ANOMALIES)
def test_planted_anomaly_is_found(sound: list[Record], name: str) -> None:
    anomaly, sentence = ANOMALIES[name]
    problems = Ledger().take(anomaly(sound))
    assert any(sentence in problem for problem in problems), problems
