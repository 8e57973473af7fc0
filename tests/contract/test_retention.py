"""Streams that keep messages for their consumers: interest, workqueue; and what comes first."""

from typing import Any

import pytest

from tests.contract.conftest import Stream, assert_problem
from tests.support.each import each

MERGE_PATCH = {"content-type": "application/merge-patch+json"}


def patched(stream: Stream, **fields: Any) -> Any:
    return stream.client.patch(stream.path, json=fields, headers=MERGE_PATCH)


@pytest.fixture
def workqueue(unused: Stream) -> Stream:
    assert unused.configure(retention="workqueue").status_code == 201
    return unused


@pytest.fixture
def interest(unused: Stream) -> Stream:
    assert unused.configure(retention="interest").status_code == 201
    return unused


# Workqueue ---------------------------------------------------------------------------------------


def test_message_of_a_workqueue_is_removed_once_it_is_acknowledged(workqueue: Stream) -> None:
    workqueue.fill(3)
    consumer = workqueue.consumer()
    first, second, third = workqueue.next(consumer, batch=3)
    workqueue.ack(consumer, second["ack_token"])
    workqueue.ack(consumer, third["ack_token"], kind="term")
    state = workqueue.state()
    assert (state["messages"], state["first_seq"], state["last_seq"]) == (1, 1, 3)
    assert_problem(workqueue.client.get(f"{workqueue.path}/messages/2"), 404, 10037)
    workqueue.ack(consumer, first["ack_token"])
    state = workqueue.state()
    assert (state["messages"], state["first_seq"], state["num_deleted"]) == (0, 4, 0)
    again = workqueue.ack(consumer, first["ack_token"])
    assert again == [{"ok": True}]


@each(
    ("config", "code", "pointer"),
    [
        ({"ack_policy": "none"}, 10084, "/ack_policy"),
        ({"ack_policy": "all"}, 10084, "/ack_policy"),
        ({"deliver_policy": "new"}, 10101, "/deliver_policy"),
        ({"deliver_policy": "last"}, 10101, "/deliver_policy"),
    ],
)
def test_consumer_that_a_workqueue_cannot_have_is_422(
    workqueue: Stream, config: dict[str, Any], code: int, pointer: str
) -> None:
    answer = workqueue.client.put(f"{workqueue.path}/consumers/c", json=config)
    assert_problem(answer, 422, code, pointer)
    assert workqueue.state()["consumer_count"] == 0


def test_second_consumer_without_a_filter_is_409(workqueue: Stream) -> None:
    workqueue.consumer("one")
    path = f"{workqueue.path}/consumers/two"
    assert_problem(workqueue.client.put(path, json={}), 409, 10099, "/filter_subjects")
    taken = {"filter_subject": workqueue.subject("1")}
    assert_problem(workqueue.client.put(path, json=taken), 409, 10100, "/filter_subjects")
    assert_problem(workqueue.client.post(f"{workqueue.path}/consumers", json={}), 409, 10099)


def test_filters_that_share_a_subject_are_409_on_update_too(workqueue: Stream) -> None:
    one, two = workqueue.subject("*.new"), workqueue.subject("eu.*")
    workqueue.consumer("one", filter_subject=one)
    path = f"{workqueue.path}/consumers/two"
    assert_problem(workqueue.client.put(path, json={"filter_subject": two}), 409, 10100)
    apart = {"filter_subject": workqueue.subject("eu.old")}
    assert workqueue.client.put(path, json=apart).status_code == 201
    assert_problem(workqueue.client.put(path, json={"filter_subject": two}), 409, 10100)
    update = workqueue.client.patch(path, json={"filter_subject": None}, headers=MERGE_PATCH)
    assert_problem(update, 409)


@pytest.mark.parametrize("retention", ["limits", "interest"])
def test_workqueue_stays_one(workqueue: Stream, retention: str) -> None:
    assert_problem(patched(workqueue, retention=retention), 409, 10052, "/retention")
    assert workqueue.client.get(workqueue.path).json()["config"]["retention"] == "workqueue"


@pytest.mark.parametrize("retention", ["limits", "interest"])
def test_no_stream_becomes_a_workqueue(unused: Stream, retention: str) -> None:
    unused.configure(retention=retention)
    assert_problem(patched(unused, retention="workqueue"), 409, 10052, "/retention")


# Interest ----------------------------------------------------------------------------------------


def test_message_that_nobody_wants_has_a_sequence_and_is_not_stored(interest: Stream) -> None:
    answer = interest.publish(Nats_Msg_Id="once")
    assert (answer.status_code, answer.json()["seq"]) == (201, 1)
    again = interest.publish(Nats_Msg_Id="once")
    assert (again.status_code, again.json()["duplicate"]) == (200, True)
    state = interest.state()
    assert (state["messages"], state["first_seq"], state["last_seq"]) == (0, 2, 1)
    assert state["last_ts"]
    assert_problem(interest.publish(Nats_Expected_Last_Sequence="0"), 412, 10071)
    subject_seq = interest.publish(Nats_Expected_Last_Subject_Sequence="0")
    assert subject_seq.json()["seq"] == 2


def test_message_is_removed_when_all_who_want_it_have_settled_it(interest: Stream) -> None:
    narrow = interest.consumer("narrow", filter_subject=interest.subject("1"))
    interest.fill(3)
    assert interest.state()["messages"] == 1
    wide = interest.consumer("wide")
    interest.fill(2)
    [first, second] = interest.next(narrow, batch=9)
    interest.ack(narrow, first["ack_token"], second["ack_token"])
    assert interest.state()["messages"] == 3
    tokens = [delivery["ack_token"] for delivery in interest.next(wide, batch=9)]
    interest.ack(wide, *tokens)
    assert interest.state()["messages"] == 0


def test_delivery_without_acks_removes(interest: Stream) -> None:
    consumer = interest.consumer(ack_policy="none")
    interest.fill(5)
    assert [delivery["seq"] for delivery in interest.next(consumer, batch=3)] == [1, 2, 3]
    state = interest.state()
    assert (state["messages"], state["first_seq"]) == (2, 4)


def test_removed_consumer_and_another_filter_leave_nothing_that_nobody_wants(
    interest: Stream,
) -> None:
    wide = interest.consumer("wide")
    interest.consumer("narrow", filter_subject=interest.subject("1"))
    interest.fill(10)
    assert interest.client.delete(wide).status_code == 204
    assert interest.state()["messages"] == 2
    path = f"{interest.path}/consumers/narrow"
    change = {"filter_subject": interest.subject("2")}
    assert interest.client.patch(path, json=change, headers=MERGE_PATCH).status_code == 200
    assert interest.state()["messages"] == 0


def test_limits_and_interest_may_be_exchanged(stream: Stream) -> None:
    stream.fill(10)
    stream.consumer(filter_subject=stream.subject("1"))
    answer = patched(stream, retention="interest")
    assert (answer.status_code, answer.json()["state"]["messages"]) == (200, 2)
    assert patched(stream, retention="limits").status_code == 200
    stream.fill(5)
    assert stream.state()["messages"] == 7


def test_limits_hold_with_interest_too(interest: Stream) -> None:
    interest.configure(retention="interest", max_msgs=2, discard="new")
    interest.consumer(filter_subject=interest.subject("a"))
    assert interest.publish().status_code == 201
    assert interest.publish().status_code == 201
    assert_problem(interest.publish(), 507, 10077)
    assert interest.publish(rest="unwanted").status_code == 201


# Last per subject --------------------------------------------------------------------------------


def test_consumer_begins_with_the_last_message_of_each_subject(stream: Stream) -> None:
    stream.fill(12)
    wanted = [stream.subject("0"), stream.subject("1")]
    consumer = stream.consumer(deliver_policy="last_per_subject", filter_subjects=wanted)
    assert stream.client.get(consumer).json()["num_pending"] == 2
    stream.fill(2)
    found = stream.next(consumer, batch=9)
    assert [delivery["seq"] for delivery in found] == [10, 11, 13]
    assert [delivery["num_pending"] for delivery in found] == [2, 1, 0]


def test_last_per_subject_needs_a_filter(stream: Stream) -> None:
    path = f"{stream.path}/consumers/c"
    answer = stream.client.put(path, json={"deliver_policy": "last_per_subject"})
    assert_problem(answer, 422, 10094, "/filter_subjects")
    assert "is required by deliver_policy" in answer.json()["detail"]
