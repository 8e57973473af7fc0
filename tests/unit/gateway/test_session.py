"""The session core: credit to the message, the ledger against a naive model, order and gaps."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from contrail_common import errors
from contrail_common.columns.blocks import columns_of
from contrail_common.columns.delivery_columns import DeliveryColumns
from contrail_common.errors import ApiError
from contrail_common.model import ConsumerConfig, ConsumerInfo, SequencePair, StoredMessage
from contrail_common.timeunits import NS_PER_S
from contrail_gateway.core.credit import Credit
from contrail_gateway.core.frames import Ack, AddCredit, Connect, CreditGiven, Nak, Ping, Sub
from contrail_gateway.core.ledger import Ledger
from contrail_gateway.core.pulled import Listed, Pulled
from contrail_gateway.core.session import (
    OUTSTANDING_BYTES_MAX,
    OUTSTANDING_MAX,
    SUBSCRIPTIONS_MAX,
    Session,
    UnauthenticatedError,
)
from contrail_gateway.core.subscription import (
    BATCH_BYTES_MAX,
    BATCH_MAX,
    PullTerms,
    Subscription,
)
from contrail_link.contract.consume import Delivery
from tests.support.each import each

SUBJECT = "abc"
FULL = 1 << 40
IN_COLUMNS = Sub(sid="t", stream="S", ordered=True, cols=True)


def delivery(seq: int, payload_bytes: int = 0, consumer_seq: int | None = None) -> Delivery:
    stored = StoredMessage(seq, SUBJECT, 0, None, bytes(payload_bytes))
    return Delivery(stored, seq if consumer_seq is None else consumer_seq, 1, 0)


def info(**config: Any) -> ConsumerInfo:
    before = SequencePair(0, 0)
    return ConsumerInfo(
        stream="S",
        config=ConsumerConfig(name="c", durable=True, **config),
        created_ns=0,
        version=1,
        delivered=before,
        ack_floor=before,
        num_ack_pending=0,
        num_redelivered=0,
        num_waiting=0,
        num_pending=0,
    )


def subscription(msgs: int | None = None, bytes_: int | None = None, **config: Any) -> Subscription:
    found = Subscription("s", "S", Credit(msgs, bytes_), own=True, ordered=True)
    found.opened(info(**config), 0)
    return found


def session() -> Session:
    return Session(authenticated=True, now_ns=0)


def listed(*deliveries: Delivery) -> Listed:
    return Listed(deliveries)


def columns(first_seq: int, *payload_bytes: int) -> DeliveryColumns:
    """Messages from ``first_seq`` on, each with its number in the stream as its consumer's too."""
    count = len(payload_bytes)
    return DeliveryColumns(
        first_seq,
        0,
        np.arange(first_seq, first_seq + count, dtype=np.int64).tobytes(),
        bytes(8 * count),
        [SUBJECT],
        bytes(4 * count),
        columns_of([bytes(size) for size in payload_bytes], None),
    )


def seqs(pulled: Pulled | None) -> list[int]:
    match pulled:
        case Listed():
            return pulled.seqs
        case DeliveryColumns():
            return [message.seq for message in pulled.messages()]
    return []


# Credit ------------------------------------------------------------------------------------------
sizes = st.lists(st.integers(0, 30), max_size=60)
grants = st.lists(st.tuples(st.integers(0, 10), st.integers(0, 60)), min_size=1, max_size=20)


@given(sizes, grants, st.booleans(), st.booleans(), st.booleans(), st.data())
def test_what_is_sent_is_the_longest_prefix_that_the_credit_allows(
    sizes: list[int],
    grants: list[tuple[int, int]],
    by_msgs: bool,
    by_bytes: bool,
    in_columns: bool,
    data: st.DataObject,
) -> None:
    sub = subscription(0 if by_msgs else None, 0 if by_bytes else None)
    total = 0
    sent: list[int] = []
    msgs = bytes_ = 0
    for more_msgs, more_bytes in grants:
        msgs, bytes_ = msgs + more_msgs, bytes_ + more_bytes
        sub.credit.add(more_msgs, more_bytes)
        sent += seqs(sub.take())
        while (terms := sub.wanted()) is not None and total < len(sizes):
            # Storage gives any number up to what was asked for; it does not count subjects.
            count = data.draw(st.integers(1, min(terms.batch, len(sizes) - total)))
            part = sizes[total : total + count]
            one_by_one = [delivery(total + 1 + at, size) for at, size in enumerate(part)]
            pulled = columns(total + 1, *part) if in_columns else listed(*one_by_one)
            total += count
            sent += seqs(sub.take(pulled))
        expected, spent = 0, 0
        while (
            expected < len(sizes)
            and (not by_msgs or expected < msgs)
            and (not by_bytes or spent < bytes_)
        ):
            spent += sizes[expected] + len(SUBJECT)
            expected += 1
        assert sent == list(range(1, expected + 1))


def test_subscription_without_credit_asks_for_nothing() -> None:
    assert subscription(0).wanted() is None
    assert subscription(None, 0).wanted() is None


def test_pull_is_no_larger_than_credit_batch_and_consumer_allow() -> None:
    assert subscription().wanted() == PullTerms(BATCH_MAX, BATCH_BYTES_MAX)
    assert subscription(5, 9).wanted() == PullTerms(5, 9)
    assert subscription(max_batch=3, max_bytes=7).wanted() == PullTerms(3, 7)


def test_too_large_message_is_asked_for_alone_until_it_came() -> None:
    sub = subscription(9, 1)
    sub.too_large()
    assert sub.take() is None
    assert sub.wanted() == PullTerms(1, 0)
    sub.take(listed(delivery(1, 50)))
    assert sub.wanted() is None
    sub.credit.add(0, 100)
    assert sub.wanted() == PullTerms(8, 48)


def test_messages_held_back_are_given_back_at_the_end() -> None:
    sub = subscription(None, 1)
    assert seqs(sub.take(listed(delivery(1), delivery(2), delivery(3)))) == [1]
    assert sub.wanted() is None
    assert sub.give_back() == [2, 3]
    assert sub.give_back() == []


def test_held_back_message_that_was_settled_meanwhile_is_not_sent() -> None:
    sub = subscription(None, 1)
    sub.take(listed(*map(delivery, (1, 2, 3))))
    sub.settled([2])
    sub.credit.add(0, 100)
    assert seqs(sub.take()) == [3]
    assert sub.take() is None


def test_ack_of_all_settles_what_is_held_back_below_it() -> None:
    sub = subscription(None, 1, ack_policy="all")
    sub.take(listed(*map(delivery, (1, 2, 3, 4))))
    sub.settled([3])
    assert sub.give_back() == [4]
    sub.take(listed(delivery(5), delivery(6)))
    sub.settled([6])
    assert sub.held_back is None


def test_term_settles_nothing_below_it_although_acks_do() -> None:
    sub = subscription(None, 3 * len(SUBJECT), ack_policy="all")
    pulled = sub.take(listed(*map(delivery, (1, 2, 3, 4, 5))))
    assert pulled is not None
    sub.sent(pulled, 0)
    sub.settled([3], "term")
    assert [seq in sub.ledger for seq in (1, 2, 3)] == [True, True, False]
    sub.settled([5], "term")
    assert sub.give_back() == [4]


def test_nak_returns_neither_a_later_delivery_nor_what_is_held_back() -> None:
    sub = subscription(None, 3 * len(SUBJECT))
    sub.sent(listed(*map(delivery, (1, 2, 3))), 0)
    taken = sub.ledger.sendings
    again = sub.take(listed(*map(delivery, (2, 4, 5, 1))))
    assert again is not None
    sub.sent(again, 0)
    sub.returned([1, 2, 3], taken)
    assert [seq in sub.ledger for seq in (1, 2, 3)] == [False, True, False]
    assert sub.give_back() == [1]


# Ledger ------------------------------------------------------------------------------------------
few = st.integers(0, 12)


class LedgerModel(RuleBasedStateMachine):
    """The ledger against a list in which everything is looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(held_max=8)
        self.held: list[int] = []
        self.last_sending: dict[int, int] = {}

    @rule(sent=st.lists(few, max_size=6))
    def send(self, sent: list[int]) -> None:
        self.ledger.sent(sent)
        for seq in sent:
            self.held = [one for one in self.held if one != seq] + [seq]
            self.last_sending[seq] = self.ledger.sendings
        self.held = self.held[-8:]

    @rule(gone=st.lists(few, max_size=4), ago=st.integers(0, 3))
    def give_back(self, gone: list[int], ago: int) -> None:
        sending = self.ledger.sendings - ago
        self.ledger.returned(gone, sending)
        self.held = [
            one for one in self.held if one not in gone or self.last_sending[one] > sending
        ]

    @rule(gone=st.lists(few, max_size=4))
    def settle(self, gone: list[int]) -> None:
        self.ledger.settled(gone)
        self.held = [one for one in self.held if one not in gone]

    @rule(limit=few)
    def settle_up_to(self, limit: int) -> None:
        self.ledger.settled_up_to(limit)
        self.held = [one for one in self.held if one > limit]

    @rule(named=st.lists(few, max_size=3), ranges=st.lists(st.tuples(few, few), max_size=3))
    def find(self, named: list[int], ranges: list[tuple[int, int]]) -> None:
        def inside(low: int, high: int) -> set[int]:
            return {one for one in self.held if low <= one <= high}

        merged = [pair for pair in ranges if pair[0] <= pair[1]]
        reversed_ = len(merged) < len(ranges)
        found, unknown = self.ledger.find(named, ranges)
        held = {one for one in named if one in self.held}
        assert found == sorted(held.union(*(inside(*pair) for pair in merged)))
        if held < set(named):
            assert unknown
        elif not reversed_ and all(inside(*pair) for pair in merged):
            # A range that holds nothing may lie within another that does.
            assert not unknown

    @invariant()
    def holds_the_same(self) -> None:
        assert len(self.ledger) == len(self.held)
        assert all(one in self.ledger for one in self.held)


TestLedgerModel = LedgerModel.TestCase


def test_many_overlapping_ranges_cost_no_more_than_one() -> None:
    ledger = Ledger()
    ledger.sent(range(60_000))
    found, unknown = ledger.find([], [(0, FULL)] * 10_000)
    assert (len(found), unknown) == (60_000, "")


# Order -------------------------------------------------------------------------------------------
def test_foreign_delivery_shows_in_the_consumer_sequence() -> None:
    sub = subscription()
    assert sub.in_order(listed(delivery(1), delivery(2)))
    sub.advance(listed(delivery(1), delivery(2)))
    assert not sub.in_order(listed(delivery(4, consumer_seq=4)))
    assert sub.in_order(listed(delivery(9, consumer_seq=3)))
    assert not sub.in_order(listed(delivery(2, consumer_seq=3))), "a redelivery is not in order"


@each(
    ("first_kept", "before", "lost", "next_seq"),
    [
        (1, 4, None, 3),
        (3, 9, None, 3),
        (6, 9, (3, 5), 6),
        (6, 6, (3, 5), 6),
        (9, 5, (3, 4), 5),
        (9, FULL, (3, 8), 9),
    ],
)
def test_gap_is_what_left_the_stream_before_it_was_sent(
    first_kept: int, before: int, lost: tuple[int, int] | None, next_seq: int
) -> None:
    sub = subscription()
    sub.advance(listed(delivery(2)))
    assert sub.lost_below(first_kept, before) == lost
    assert sub.next_seq == next_seq
    assert sub.lost_below(first_kept, before) is None


def test_stretch_that_held_nothing_is_no_gap() -> None:
    sub = subscription()
    sub.advance(listed(delivery(2)))
    sub.passed(50)
    assert sub.lost_below(40, FULL) is None
    assert sub.lost_below(60, FULL) == (51, 59)


# Session -----------------------------------------------------------------------------------------
def test_socket_that_needs_a_token_does_nothing_before_a_good_one() -> None:
    guarded = Session(authenticated=False, now_ns=0)
    with pytest.raises(UnauthenticatedError):
        guarded.heard(Ping(), 1)
    guarded.heard(Connect(token="x"), 1)
    with pytest.raises(UnauthenticatedError):
        guarded.connect(Connect(token="x"), good_token=False)
    guarded.connect(Connect(token="y"), good_token=True)
    guarded.heard(Ping(), 2)


@pytest.mark.parametrize(("count", "size"), [(OUTSTANDING_MAX, 0), (1, OUTSTANDING_BYTES_MAX)])
def test_full_session_reads_on_when_something_was_answered(count: int, size: int) -> None:
    found = session()
    assert not found.full
    found.begin(count, size)
    assert found.full
    found.finish(1, size)
    assert not found.full


def test_subscriptions_are_bounded() -> None:
    found = session()
    for number in range(SUBSCRIPTIONS_MAX):
        found.subscribe(Sub(sid=str(number), stream="S"))
    with pytest.raises(ApiError) as refused:
        found.subscribe(Sub(sid="more", stream="S"))
    assert refused.value.spec is errors.TOO_MANY_WAITERS


def test_heartbeats_are_due_for_what_was_silent_long_enough() -> None:
    found = session()
    sub = found.subscribe(Sub(sid="s", stream="S", credit=CreditGiven(msgs=9)))
    assert found.beats(FULL) == [], "the consumer is not there yet"
    sub.opened(info(), 0)
    found.connect(Connect(heartbeat="1s"), good_token=True)
    assert found.beats(NS_PER_S - 1) == []
    sub.sent(listed(delivery(7, consumer_seq=3)), NS_PER_S - 1)
    assert found.beats(NS_PER_S) == []
    [beat] = found.beats(2 * NS_PER_S)
    assert (beat.sid, beat.last_consumer_seq, beat.last_stream_seq) == ("s", 3, 7)
    assert found.beats(2 * NS_PER_S) == []
    found.connect(Connect(heartbeat=0), good_token=True)
    assert found.beats(FULL) == []


def test_draining_socket_is_quiet_once_all_is_answered_settled_and_silent() -> None:
    found = session()
    sub = found.subscribe(Sub(sid="s", stream="S"))
    sub.opened(info(), 0)
    sub.sent(listed(delivery(1)), 0)
    found.begin(1, 10)
    later = NS_PER_S
    assert not found.quiet(later)
    found.finish(1, 10)
    assert not found.quiet(later)
    sub.settled([1])
    assert found.quiet(later)
    found.heard(Ping(), later)
    assert not found.quiet(later + 1)
    found.draining = True
    with pytest.raises(ApiError) as refused:
        found.subscribe(Sub(sid="t", stream="S"))
    assert refused.value.spec is errors.SHUTTING_DOWN


def test_settlement_names_what_the_socket_holds() -> None:
    found = session()
    sub = found.subscribe(Sub(sid="s", stream="S"))
    sub.opened(info(), 0)
    sub.sent(listed(*map(delivery, (3, 5, 9))), 0)
    settlement = found.settle(Nak(sid="s", seqs=[9], ranges=[(1, 4)], delay="2s"))
    assert (settlement.kind, settlement.seqs) == ("nak", [3, 9])
    items = settlement.items({0: (1, 2, 3)})
    assert [(item.seqs, item.delay_ns) for item in items] == [([3, 9], 2 * NS_PER_S)]
    sub.settled([3, 9])
    assert found.settle(Ack(sid="s", ranges=[(0, 99)])).seqs == [5]


def test_settlement_leaves_out_what_the_socket_does_not_hold_and_reports_it() -> None:
    found = session()
    sub = found.subscribe(Sub(sid="s", stream="S"))
    sub.opened(info(), 0)
    sub.sent(listed(*map(delivery, (3, 5))), 0)
    settlement = found.settle(Ack(sid="s", seqs=[1, 3, 9], ranges=[(5, 7), (8, 9)]))
    assert settlement.seqs == [3, 5]
    assert settlement.unknown == "not awaiting acknowledgement on this socket: 1, 9, 8 to 9"
    many = found.settle(Ack(sid="s", seqs=[3, *range(10, 99)]))
    assert many.unknown == "not awaiting acknowledgement on this socket: 10, 11, 12, 13, 14 ..."


@pytest.mark.parametrize("fields", [{"ordered": False}, {"ordered": True, "consumer": "c"}])
def test_columns_are_for_ordered_subscriptions(fields: dict[str, Any]) -> None:
    found = Session(authenticated=True, now_ns=0, packed=True)
    with pytest.raises(ApiError) as refused:
        found.subscribe(Sub(sid="s", stream="S", cols=True, **fields))
    assert refused.value.spec is errors.INVALID_FIELD
    assert found.subscribe(IN_COLUMNS).cols


@each(
    ("ask", "spec"),
    [
        (lambda one: one.settle(Ack(sid="s")), errors.INVALID_FIELD),
        (lambda one: one.settle(Ack(sid="s", seqs=[1] * 10_001)), errors.BATCH_TOO_LARGE),
        (lambda one: one.settle(Nak(sid="s", seqs=[1], delay="-1s")), errors.INVALID_FIELD),
        (lambda one: one.settle(Ack(sid="s", seqs=[2])), errors.NOT_SENT_HERE),
        (
            lambda one: one.subscribe(Sub(sid="t", stream="S", ordered=True, cols=True)),
            errors.INVALID_FIELD,
        ),
        (lambda one: one.settle(Ack(sid="x", seqs=[1])), errors.SUBSCRIPTION_NOT_FOUND),
        (lambda one: one.credit(AddCredit(sid="x")), errors.SUBSCRIPTION_NOT_FOUND),
        (lambda one: one.connect(Connect(heartbeat="2h"), good_token=True), errors.INVALID_FIELD),
    ],
)
def test_what_cannot_be_done_is_refused(ask: Callable[[Session], Any], spec: Any) -> None:
    found = session()
    sub = found.subscribe(Sub(sid="s", stream="S"))
    sub.opened(info(), 0)
    sub.sent(listed(delivery(1)), 0)
    with pytest.raises(ApiError) as refused:
        ask(found)
    assert refused.value.spec is spec


def test_credit_beyond_counting_stays_without_limit() -> None:
    credit = Credit(5, None)
    credit.add((1 << 63) - 1, (1 << 63) - 1)
    assert credit.msgs == (1 << 63) - 1
    assert credit.bytes is None
