"""Limits of subjects, roll-ups, purge by subject, and batches that are stored as one."""

from typing import Any

import httpx
import pytest

from tests.contract.conftest import Stream, assert_problem

MSGPACK = "application/vnd.msgpack"


def kept(stream: Stream, rest: str | None = None) -> list[tuple[int, str]]:
    """(sequence, payload) of what the stream holds, of one subject when given."""
    query = {} if rest is None else {"subject": stream.subject(rest)}
    messages = stream.client.get(f"{stream.path}/messages", params=query).json()["messages"]
    return [(message["seq"], message["data"]) for message in messages]


# Per subject -------------------------------------------------------------------------------------
def test_subject_keeps_its_newest_messages(stream: Stream) -> None:
    stream.configure(max_msgs_per_subject=2)
    stream.fill(12)
    assert kept(stream, "1") == [(6, "6"), (11, "11")]
    assert kept(stream, "3") == [(3, "3"), (8, "8")]
    state = stream.state()
    assert (state["messages"], state["num_deleted"], state["first_seq"]) == (10, 0, 3)


def test_batch_with_too_many_of_a_subject_keeps_its_last(stream: Stream) -> None:
    stream.configure(max_msgs_per_subject=1)
    messages = [{"subject": stream.subject("a"), "data": str(n)} for n in range(50)]
    assert stream.client.post(f"{stream.path}/messages", json={"messages": messages}).is_success
    assert kept(stream) == [(50, "49")]


def test_lowered_limit_trims_each_subject_at_once(stream: Stream) -> None:
    stream.fill(25)
    assert stream.configure(max_msgs_per_subject=1).status_code == 200
    assert kept(stream) == [(seq, str(seq)) for seq in range(21, 26)]
    assert stream.state()["messages"] == 5


def test_delivered_message_that_its_subject_replaced_is_pending_no_more(stream: Stream) -> None:
    stream.configure(max_msgs_per_subject=1)
    consumer = stream.consumer()
    stream.publish(b"old")
    assert [each["data"] for each in stream.next(consumer)] == ["old"]
    stream.publish(b"new")
    info = stream.client.get(consumer).json()
    assert (info["num_ack_pending"], info["num_pending"]) == (0, 1)
    assert [each["data"] for each in stream.next(consumer)] == ["new"]


def test_full_subject_refuses_where_new_ones_are_discarded(stream: Stream) -> None:
    stream.configure(max_msgs_per_subject=1, discard="new", discard_new_per_subject=True)
    assert stream.publish(b"1").status_code == 201
    refused = assert_problem(stream.publish(b"2"), 507, 10077)
    batch = {"messages": [{"subject": stream.subject(), "data": "3"}]}
    answer = stream.client.post(f"{stream.path}/messages", json=batch)
    [result] = answer.json()["results"]
    assert answer.status_code == 207
    assert (result["problem"]["code"], result["problem"]["status"]) == (10077, 507)
    assert (refused["applied"], result["problem"]["applied"]) == (False, False)
    assert stream.publish(b"3", rest="b").json()["seq"] == 2
    assert stream.client.delete(f"{stream.path}/messages/1").status_code == 204
    assert stream.publish(b"4").json()["seq"] == 3


def test_full_stream_takes_what_replaces_a_message_of_its_subject(stream: Stream) -> None:
    stream.configure(max_msgs=2, max_msgs_per_subject=1, discard="new")
    assert [stream.publish(rest=rest).status_code for rest in "abac"] == [201, 201, 201, 507]
    assert [seq for seq, _ in kept(stream)] == [2, 3]


@pytest.mark.parametrize(
    ("config", "pointer"),
    [
        ({"discard_new_per_subject": True}, "/discard_new_per_subject"),
        ({"discard_new_per_subject": True, "discard": "new"}, "/discard_new_per_subject"),
        ({"allow_rollup_hdrs": True, "deny_purge": True}, "/allow_rollup_hdrs"),
    ],
)
def test_config_that_contradicts_itself_is_422(
    stream: Stream, config: dict[str, Any], pointer: str
) -> None:
    assert_problem(stream.configure(**config), 422, 10052, pointer)


# Roll-up -----------------------------------------------------------------------------------------
def test_rollup_of_a_subject_replaces_its_earlier_messages(stream: Stream) -> None:
    stream.configure(allow_rollup_hdrs=True)
    stream.fill(12)
    assert stream.publish(b"sum", rest="2", Nats_Rollup="sub").json()["seq"] == 13
    assert kept(stream, "2") == [(13, "sum")]
    assert stream.state()["messages"] == 10


def test_rollup_of_the_stream_replaces_everything(stream: Stream) -> None:
    stream.configure(allow_rollup_hdrs=True)
    stream.fill(12)
    assert stream.publish(b"sum", Nats_Rollup="all").json()["seq"] == 13
    assert kept(stream) == [(13, "sum")]
    stream.fill(2)
    assert [seq for seq, _ in kept(stream)] == [13, 14, 15]


def test_rollup_within_a_batch_replaces_what_is_before_it(stream: Stream) -> None:
    stream.configure(allow_rollup_hdrs=True)
    rollups = {2: "sub", 5: "all", 7: "sub"}
    messages = [
        {
            "subject": stream.subject("ab"[number % 2]),
            "data": str(number),
            **({"headers": {"Nats-Rollup": [rollups[number]]}} if number in rollups else {}),
        }
        for number in range(9)
    ]
    answer = stream.client.post(f"{stream.path}/messages", json={"messages": messages})
    assert [each["seq"] for each in answer.json()["results"]] == list(range(1, 10))
    assert kept(stream) == [(7, "6"), (8, "7"), (9, "8")]


@pytest.mark.parametrize(("value", "allowed"), [("sub", False), ("everything", True), ("", True)])
def test_rollup_that_may_not_be_or_makes_no_sense_is_422(
    stream: Stream, value: str, allowed: bool
) -> None:
    stream.configure(allow_rollup_hdrs=allowed)
    stream.publish(b"kept")
    assert_problem(stream.publish(Nats_Rollup=value), 422, 10111)
    assert [payload for _, payload in kept(stream)] == ["kept"]


def test_duplicate_of_a_rollup_replaces_nothing(stream: Stream) -> None:
    stream.configure(allow_rollup_hdrs=True)
    stream.publish(b"sum", Nats_Rollup="sub", Nats_Msg_Id="one")
    stream.publish(b"later")
    again = stream.publish(b"sum", Nats_Rollup="sub", Nats_Msg_Id="one")
    assert (again.status_code, again.json()["seq"]) == (200, 1)
    assert [payload for _, payload in kept(stream)] == ["sum", "later"]


# Purge by subject --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("purge", "purged", "left"),
    [
        ({}, 5, []),
        ({"keep": 2}, 3, [16, 21]),
        ({"keep": 9}, 0, [1, 6, 11, 16, 21]),
        ({"up_to_seq": 11}, 2, [11, 16, 21]),
        ({"up_to_seq": 1}, 0, [1, 6, 11, 16, 21]),
        ({"up_to_seq": 1_000}, 5, []),
    ],
)
def test_purge_of_a_subject_leaves_the_others(
    stream: Stream, purge: dict[str, Any], purged: int, left: list[int]
) -> None:
    stream.fill(25)
    body = {"subject": stream.subject("1"), **purge}
    assert stream.client.post(f"{stream.path}/purge", json=body).json() == {"purged": purged}
    assert [seq for seq, _ in kept(stream, "1")] == left
    assert stream.state()["messages"] == 25 - purged


def test_purge_by_wildcard_keeps_the_newest_of_all_that_match(stream: Stream) -> None:
    for number in range(1, 10):
        stream.publish(rest=f"{'xy'[number % 2]}.{number % 3}")
    body = {"subject": stream.subject("x.*"), "keep": 1}
    assert stream.client.post(f"{stream.path}/purge", json=body).json() == {"purged": 3}
    assert [seq for seq, _ in kept(stream)] == [1, 3, 5, 7, 8, 9]


def test_purge_of_many_subjects_takes_all_of_them(stream: Stream) -> None:
    messages = [{"subject": stream.subject(f"k.{n}"), "data": ""} for n in range(1_000)]
    stream.client.post(f"{stream.path}/messages", json={"messages": messages})
    stream.publish(b"other")
    body = {"subject": stream.subject("k.*")}
    assert stream.client.post(f"{stream.path}/purge", json=body).json() == {"purged": 1_000}
    assert kept(stream) == [(1_001, "other")]
    assert stream.state()["first_seq"] == 1_001


def test_purge_by_subject_of_what_is_denied_is_409(stream: Stream) -> None:
    stream.configure(deny_purge=True)
    stream.publish()
    for rest in ("a", "nothing"):
        body = {"subject": stream.subject(rest)}
        assert_problem(stream.client.post(f"{stream.path}/purge", json=body), 409, 10110)


# Atomic batches ----------------------------------------------------------------------------------
def atomic(stream: Stream, messages: list[dict[str, Any]]) -> httpx.Response:
    body = {"messages": [{"subject": stream.subject(), "data": "x", **each} for each in messages]}
    return stream.client.post(f"{stream.path}/messages?atomic", json=body)


@pytest.fixture
def joint(stream: Stream) -> Stream:
    """A stream that takes atomic batches and roll-ups."""
    assert stream.configure(allow_atomic=True, allow_rollup_hdrs=True).status_code == 200
    return stream


def test_atomic_batch_is_one_run_of_sequences(joint: Stream) -> None:
    joint.publish()
    answer = atomic(joint, [{"data": str(number)} for number in range(1_000)])
    assert answer.status_code == 201
    assert answer.headers["durability"] == "fsync"
    ack = {"stream": joint.name, "first_seq": 2, "last_seq": 1_001, "count": 1_000}
    assert answer.json() == ack
    assert joint.state()["messages"] == 1_001


@pytest.mark.parametrize(
    ("bad", "status", "code"),
    [
        ({"subject": "elsewhere.a"}, 409, None),
        ({"expected": {"last_subject_seq": 7}, "subject_rest": "b"}, 412, 10071),
        ({"msg_id": "known"}, 409, 10201),
        ({"subject": "a..b"}, 422, 20003),
        ({"headers": {"Nats-Rollup": ["x"]}}, 422, 10111),
    ],
)
def test_atomic_batch_with_one_bad_message_stores_nothing(
    joint: Stream, bad: dict[str, Any], status: int, code: int | None
) -> None:
    joint.publish(Nats_Msg_Id="known")
    if "subject_rest" in bad:
        bad = {**bad, "subject": joint.subject(bad["subject_rest"])}
        del bad["subject_rest"]
    before = joint.state()
    assert_problem(atomic(joint, [{}, {"msg_id": "new"}, bad, {}]), status, code)
    assert joint.state() == before
    assert atomic(joint, [{"msg_id": "new"}]).json()["first_seq"] == 2


@pytest.mark.parametrize(
    ("messages", "status", "code", "pointer"),
    [
        ([{}, {"expected": {"last_seq": 0}}], 412, 10164, "/messages/1"),
        ([{"expected": {"last_msg_id": "a"}}], 422, 10177, "/messages/0"),
        ([{}, {"expected": {"last_subject_seq": 1}}], 412, 10164, "/messages/1"),
        ([{}, {"headers": {"Nats-Rollup": ["all"]}}], 422, 10111, "/messages/1"),
        ([{}, {}, {"headers": {"Nats-Rollup": ["sub"]}}], 422, 10111, "/messages/2"),
    ],
)
def test_atomic_batch_that_asks_for_what_it_cannot_have_is_refused(
    joint: Stream, messages: list[dict[str, Any]], status: int, code: int, pointer: str
) -> None:
    assert_problem(atomic(joint, messages), status, code, pointer)
    assert joint.state()["last_seq"] == 0


def test_atomic_batch_with_expectations_and_rollup_of_its_first_messages(joint: Stream) -> None:
    joint.publish(b"old")
    answer = atomic(
        joint,
        [
            {"expected": {"last_seq": 1}, "headers": {"Nats-Rollup": ["sub"]}, "data": "new"},
            {"expected": {"last_subject_seq": 0}, "subject": joint.subject("b"), "data": "b"},
        ],
    )
    assert answer.json()["last_seq"] == 3
    assert kept(joint) == [(2, "new"), (3, "b")]


def test_atomic_batch_of_nothing_is_422(joint: Stream) -> None:
    answer = joint.client.post(f"{joint.path}/messages?atomic=true", json={"messages": []})
    assert_problem(answer, 422, None, "/messages")


@pytest.mark.parametrize("size", [1_001, 300])
def test_atomic_batch_over_its_bounds_is_413(joint: Stream, size: int) -> None:
    data = "x" if size > 1_000 else "x" * 8_192
    lines = b"".join(
        b'{"subject":"%b","data":"%b"}\n' % (joint.subject().encode(), data.encode())
        for _ in range(size)
    )
    answer = joint.client.post(
        f"{joint.path}/messages?atomic=true",
        content=lines,
        headers={"content-type": "application/x-ndjson"},
    )
    assert_problem(answer, 413, 10199)
    assert joint.state()["last_seq"] == 0


def test_atomic_batch_as_large_as_it_may_be_is_stored(joint: Stream) -> None:
    lines = b"".join(
        b'{"subject":"%b","data":"%b"}\n' % (joint.subject().encode(), b"x" * 8_192)
        for _ in range(250)
    )
    answer = joint.client.post(
        f"{joint.path}/messages?atomic=true",
        content=lines,
        headers={"content-type": "application/x-ndjson"},
    )
    assert answer.json()["count"] == 250
    assert joint.state()["bytes"] == 250 * 8_192
