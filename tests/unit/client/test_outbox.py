"""What a publisher has outstanding, against a naive model of a server that is lost at any time."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_client.calls import Retries
from contrail_client.errors import ApiProblem, OutcomeUnknown, Unreachable
from contrail_client.live.outbox import Outbox, Outgoing, given_up, message_bytes
from contrail_client.models import Message
from tests.support.each import each

LOST = Unreachable("lost")
BUSY = ApiProblem(503, name="overloaded", retryable=True, applied=False)
MAYBE = ApiProblem(503, name="no_leader", retryable=True)
WRONG = ApiProblem(412, name="wrong_last_sequence", applied=False)


def outbox(
    most: int = 100, most_bytes: int = 1 << 20, retry_s: float = 60.0, patience_s: float = 300.0
) -> Outbox[str]:
    return Outbox(most, most_bytes, retry_s, patience_s)


def add(box: Outbox[str], key: int, msg_id: str | None = None) -> Outgoing[str]:
    message = Message("a", b"x", msg_id=msg_id)
    return box.add(key, message, message_bytes(message), f"about {key}")


def keys(found: list[Outgoing[str]]) -> list[int]:
    return [each.key for each in found]


def test_messages_are_taken_once_and_in_order() -> None:
    box = outbox()
    for key in (1, 2, 3):
        add(box, key)
    assert keys(box.take(1 << 20, 0.0)) == [1, 2, 3]
    assert box.take(1 << 20, 0.0) == []


def test_a_take_is_bounded_but_never_empty_handed() -> None:
    box = outbox()
    for key in (1, 2, 3):
        add(box, key)
    assert keys(box.take(1, 0.0)) == [1]
    assert keys(box.take(2 * add(box, 4).size, 0.0)) == [2, 3]


def test_room_is_bounded_by_messages_and_by_bytes() -> None:
    box = outbox(most=2)
    assert box.has_capacity(1 << 30)
    size = add(box, 1).size
    assert box.has_capacity(size)
    add(box, 2)
    assert not box.has_capacity(size)
    small = outbox(most_bytes=size)
    add(small, 1)
    assert not small.has_capacity(1)
    small.settle(1)
    assert small.has_capacity(1 << 30)


def test_lost_socket_sends_again_what_has_an_id_and_what_was_not_sent() -> None:
    box = outbox()
    add(box, 1, "id")
    add(box, 2)
    box.take(1 << 20, 0.0)
    add(box, 3)
    assert keys(box.lost(0.0)) == [2]
    assert keys(box.take(1 << 20, 1.0)) == [1, 3]


def test_what_was_sent_too_long_ago_is_not_sent_again() -> None:
    box = outbox(retry_s=10.0)
    add(box, 1, "a")
    box.take(1 << 20, 0.0)
    add(box, 2, "b")
    box.lost(0.0)
    assert box.expired(9.9, LOST) == []
    [(over, error)] = box.expired(10.0, LOST)
    assert over.key == 1
    assert isinstance(error, OutcomeUnknown)
    assert keys(box.take(1 << 20, 11.0)) == [2]


def test_error_of_what_is_given_up_says_whether_it_was_sent() -> None:
    box = outbox()
    unsent = add(box, 1)
    assert given_up(unsent, LOST) is LOST
    box.take(1 << 20, 0.0)
    assert isinstance(given_up(unsent, LOST), OutcomeUnknown)


@each(
    ("error", "msg_id", "again"),
    [
        (BUSY, None, True),
        (BUSY, "id", True),
        (MAYBE, None, False),
        (MAYBE, "id", True),
        (WRONG, "id", False),
        (OutcomeUnknown("?"), None, False),
        (OutcomeUnknown("?"), "id", True),
    ],
)
def test_refused_message_is_sent_again_only_when_that_is_safe_and_may_help(
    error: ApiProblem, msg_id: str | None, again: bool
) -> None:
    box = outbox()
    add(box, 1, msg_id)
    box.take(1 << 20, 0.0)
    pause_s = box.refused(1, error, Retries(), 0.5, 0.0)
    assert (pause_s is not None) == again
    assert not box.has_unsent
    box.send_again(1)
    assert box.has_unsent == again


@pytest.mark.parametrize("msg_id", [None, "id"])
def test_refusals_are_borne_until_the_one_deadline(msg_id: str | None) -> None:
    # The server may be away, refuse connections and then not be ready: it is one outage.
    box = outbox(retry_s=60.0, patience_s=300.0)
    add(box, 1, msg_id)
    box.lost(0.0)
    for now_s in range(10, 300, 10):
        assert keys(box.take(1 << 20, now_s)) == [1]
        assert box.refused(1, BUSY, Retries(attempts=2), 0.0, now_s) is not None
        box.send_again(1)
        assert box.expired(now_s, LOST) == []
    box.take(1 << 20, 299.0)
    assert box.refused(1, BUSY, Retries(attempts=2), 0.0, 299.0) is None


def test_what_may_be_stored_is_not_sent_again_once_its_id_may_be_forgotten() -> None:
    box = outbox(retry_s=60.0)
    add(box, 1, "id")
    box.take(1 << 20, 0.0)
    box.lost(1.0)  # it may be stored
    box.take(1 << 20, 50.0)
    assert box.refused(1, BUSY, Retries(), 0.0, 50.0) is not None
    box.send_again(1)
    box.take(1 << 20, 59.9)
    assert box.refused(1, BUSY, Retries(), 0.0, 59.9) is None
    settled = box.settle(1)
    assert settled is not None
    assert isinstance(given_up(settled, BUSY), OutcomeUnknown)


def test_pausing_message_without_an_id_was_not_stored_and_survives_a_lost_socket() -> None:
    box = outbox()
    add(box, 1)
    box.take(1 << 20, 0.0)
    box.refused(1, BUSY, Retries(), 0.0, 0.0)
    assert box.lost(0.0) == []
    assert keys(box.take(1 << 20, 1.0)) == [1]
    box.send_again(1)  # the pause of the earlier socket
    assert not box.has_unsent


def test_late_answers_are_passed_over() -> None:
    box = outbox()
    assert box.settle(7) is None
    assert box.refused(7, BUSY, Retries(), 0.0, 0.0) is None
    box.send_again(7)
    assert not box.has_unsent


@given(seed=st.integers(0, 2**32), with_ids=st.booleans(), count=st.integers(1, 40))
def test_every_message_is_stored_at_most_once_and_those_acked_are_stored(
    seed: int, with_ids: bool, count: int
) -> None:
    chance = random.Random(seed)
    box = outbox(most=8)
    stored: list[int] = []
    known: set[str] = set()
    wire: list[Outgoing[str]] = []
    acked: set[int] = set()
    unknown: set[int] = set()

    def serve(one: Outgoing[str]) -> None:
        if one.message.msg_id not in known:
            stored.append(one.key)
        if one.message.msg_id is not None:
            known.add(one.message.msg_id)

    key = 0
    while len(acked) + len(unknown) < count:
        match chance.randrange(4):
            case 0 if key < count and box.has_capacity(300):
                key += 1
                add(box, key, f"id{key}" if with_ids else None)
            case 1:
                wire += box.take(600, 0.0)
            case 2 if wire:
                one = wire.pop(0)
                serve(one)
                if chance.random() < 0.8:  # otherwise the ack is lost with the socket
                    acked.add(one.key)
                    box.settle(one.key)
                else:
                    wire.clear()
                    unknown |= set(keys(box.lost(0.0)))
            case 3 if chance.random() < 0.1:
                wire.clear()
                unknown |= set(keys(box.lost(0.0)))
    assert set(Counter(stored).values()) <= {1}
    assert acked <= set(stored) <= acked | unknown
    if with_ids:
        assert not unknown
        assert stored == sorted(stored)
