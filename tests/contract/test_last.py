"""The newest message of each subject, as of now, of a sequence, or of a time."""

from typing import Any

import pytest

from tests.contract.conftest import Stream, assert_problem


def last(stream: Stream, **query: Any) -> list[int]:
    """Sequences of all pages."""
    seqs: list[int] = []
    token: str | None = ""
    while token is not None:
        answer = stream.client.get(f"{stream.path}/last", params={**query, "page_token": token})
        assert answer.status_code == 200, answer.text
        seqs += [one["seq"] for one in answer.json()["messages"]]
        token = answer.json()["next_page_token"]
    return sorted(seqs)


def test_last_as_of_a_sequence_is_inclusive(stream: Stream) -> None:
    stream.fill(12)
    assert last(stream, up_to_seq=7) == [3, 4, 5, 6, 7]
    assert last(stream, up_to_seq=1) == [1]
    assert last(stream, up_to_seq=12) == last(stream, up_to_seq=10**18) == last(stream)
    assert last(stream, up_to_seq=7, subject=stream.subject("4")) == [4]
    assert last(stream, up_to_seq=3, subject=stream.subject("4")) == []


def test_last_as_of_a_time_is_exclusive(stream: Stream) -> None:
    stream.publish(b"1", rest="a")
    stream.publish(b"2", rest="b")
    stream.publish(b"3", rest="a")
    query = {"headers": {"accept": "application/json"}}
    times = [
        stream.client.get(f"{stream.path}/messages/{seq}", **query).json()["time"]
        for seq in (1, 2, 3)
    ]
    assert last(stream, up_to_time=times[0]) == []
    assert last(stream, up_to_time=times[2]) == [1, 2]
    assert last(stream, up_to_time="2200-01-01T00:00:00Z") == [2, 3]
    assert last(stream, up_to_time="2000-01-01T00:00:00Z") == []
    assert last(stream, up_to_time="1970-01-01T00:00:00Z") == []


def test_pages_are_of_the_point_that_the_first_one_had(stream: Stream) -> None:
    stream.fill(10)
    first = stream.client.get(f"{stream.path}/last", params={"limit": 2}).json()
    seen = [one["seq"] for one in first["messages"]]
    stream.fill(10)
    stream.publish(rest="new")
    token = first["next_page_token"]
    while token is not None:
        query = {"limit": 2, "page_token": token}
        page = stream.client.get(f"{stream.path}/last", params=query).json()
        seen += [one["seq"] for one in page["messages"]]
        token = page["next_page_token"]
    assert sorted(seen) == [6, 7, 8, 9, 10]


def test_message_removed_between_pages_gives_way_to_an_older_one_or_none(stream: Stream) -> None:
    stream.fill(10)
    stream.publish(rest="once")
    first = stream.client.get(f"{stream.path}/last", params={"limit": 1}).json()
    left = {6, 7, 8, 9, 10, 11} - {one["seq"] for one in first["messages"]}
    for seq in left:
        stream.client.delete(f"{stream.path}/messages/{seq}")
    seen = []
    token = first["next_page_token"]
    while token is not None:
        query = {"limit": 1, "page_token": token}
        page = stream.client.get(f"{stream.path}/last", params=query).json()
        seen += [one["seq"] for one in page["messages"]]
        token = page["next_page_token"]
    assert sorted(seen) == sorted(seq - 5 for seq in left if seq != 11)


def test_page_ends_at_a_mebibyte(stream: Stream) -> None:
    for number in range(5):
        stream.publish(b"x" * 400_000, rest=str(number))
    page = stream.client.get(f"{stream.path}/last").json()
    assert len(page["messages"]) == 3
    assert page["next_page_token"]
    assert last(stream) == [1, 2, 3, 4, 5]


def test_sequence_and_time_together_are_422(stream: Stream) -> None:
    query = "up_to_seq=1&up_to_time=2026-01-31T08:00:00Z"
    answer = stream.client.get(f"{stream.path}/last?{query}")
    assert_problem(answer, 422, 10003, "up_to_time")


@pytest.mark.parametrize("query", ["up_to_seq=-1", "up_to_seq=x", "up_to_time=noon"])
def test_bad_point_is_422(stream: Stream, query: str) -> None:
    answer = stream.client.get(f"{stream.path}/last?{query}")
    assert_problem(answer, 422, None, query.partition("=")[0])


def test_token_of_another_request_is_400(stream: Stream) -> None:
    stream.fill(5)
    token = stream.client.get(f"{stream.path}/last?limit=1").json()["next_page_token"]
    for query in ({"subject": stream.subject("1")}, {"up_to_seq": 3}):
        params = {**query, "page_token": token}
        assert_problem(stream.client.get(f"{stream.path}/last", params=params), 400, 10003)
    assert_problem(stream.client.get(f"{stream.path}/last?page_token=AAAA"), 400, 10003)
