"""Delivery over HTTP: pulls, acknowledgements, redelivery."""

import base64
import json
import threading
import time
from typing import Any

import httpx
import msgspec
import pytest

from tests.contract.conftest import Stream, assert_problem
from tests.contract.raw_http import RawConnection
from tests.contract.talk import wait_until
from tests.support.each import each

DELIVERY_FIELDS = {
    "stream", "seq", "subject", "time", "headers", "data", "consumer_seq", "num_delivered",
    "num_pending", "ack_token",
}  # fmt: skip


def seqs(deliveries: list[dict[str, Any]]) -> list[int]:
    return [one["seq"] for one in deliveries]


def tokens(deliveries: list[dict[str, Any]]) -> list[str]:
    return [one["ack_token"] for one in deliveries]


def redelivered(stream: Stream, consumer: str, timeout: str = "20s") -> list[dict[str, Any]]:
    return stream.next(consumer, batch=100, expires=timeout)


# Pulls -------------------------------------------------------------------------------------------
def test_pull_delivers_in_order(stream: Stream) -> None:
    stream.fill(10)
    consumer = stream.consumer()
    answer = stream.client.post(f"{consumer}/next", json={"batch": 3})
    body = answer.json()
    assert body.keys() == {"messages", "num_pending"}
    assert seqs(body["messages"]) == [1, 2, 3]
    assert body["messages"][0].keys() == DELIVERY_FIELDS
    assert [one["consumer_seq"] for one in body["messages"]] == [1, 2, 3]
    assert [one["num_pending"] for one in body["messages"]] == [9, 8, 7]
    assert body["num_pending"] == 7
    assert seqs(stream.next(consumer, batch=100)) == [4, 5, 6, 7, 8, 9, 10]


def test_pull_without_a_body_asks_for_one(stream: Stream) -> None:
    stream.fill(3)
    consumer = stream.consumer()
    assert seqs(stream.client.post(f"{consumer}/next").json()["messages"]) == [1]


def test_empty_pull_is_204(stream: Stream) -> None:
    consumer = stream.consumer()
    begun = time.monotonic()
    answer = stream.client.post(f"{consumer}/next", json={"expires": "300ms"})
    assert (answer.status_code, answer.content) == (204, b"")
    assert 0.25 < time.monotonic() - begun < 30
    assert stream.client.post(f"{consumer}/next", json={"no_wait": True}).status_code == 204


def test_waiting_pull_answers_as_soon_as_a_message_comes(stream: Stream) -> None:
    consumer = stream.consumer()
    answers: list[httpx.Response] = []
    url = f"{stream.client.base_url}{consumer}/next"
    pull = threading.Thread(
        target=lambda: answers.append(httpx.post(url, json={"expires": "30s"}, timeout=60))
    )
    pull.start()
    deadline = time.monotonic() + 60
    while stream.client.get(consumer).json()["num_waiting"] == 0:
        assert time.monotonic() < deadline
    stream.publish(b"news")
    pull.join(60)
    assert answers[0].json()["messages"][0]["data"] == "news"


def test_consumer_deleted_under_a_waiting_pull_is_410(stream: Stream) -> None:
    consumer = stream.consumer()
    answers: list[httpx.Response] = []
    url = f"{stream.client.base_url}{consumer}/next"
    pull = threading.Thread(
        target=lambda: answers.append(httpx.post(url, json={"expires": "30s"}, timeout=60))
    )
    pull.start()
    deadline = time.monotonic() + 60
    while stream.client.get(consumer).json()["num_waiting"] == 0:
        assert time.monotonic() < deadline
    stream.client.delete(consumer)
    pull.join(60)
    assert_problem(answers[0], 410)


def test_pull_that_was_given_up_leaves_its_message_to_the_next(stream: Stream) -> None:
    consumer = stream.consumer()
    with RawConnection(str(stream.client.base_url)) as given_up:
        lines = ("Content-Type: application/json", "Content-Length: 17")
        given_up.request("POST", f"{consumer}/next", *lines, body=b'{"expires":"60s"}')
        wait_until(lambda: stream.client.get(consumer).json()["num_waiting"] == 1)
    wait_until(lambda: stream.client.get(consumer).json()["num_waiting"] == 0)
    stream.publish()
    [message] = stream.next(consumer)
    assert message["num_delivered"] == 1


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, [1, 2, 3, 4, 5, 6]),
        ({"deliver_policy": "last"}, [6]),
        ({"deliver_policy": "new"}, []),
        ({"deliver_policy": "by_start_sequence", "opt_start_seq": 4}, [4, 5, 6]),
        (
            {"deliver_policy": "by_start_time", "opt_start_time": "2020-01-01T00:00:00Z"},
            [1, 2, 3, 4, 5, 6],
        ),
        ({"deliver_policy": "by_start_time", "opt_start_time": "2200-01-01T00:00:00Z"}, []),
    ],
)
def test_delivery_begins_where_the_policy_says(
    stream: Stream, config: dict[str, Any], expected: list[int]
) -> None:
    stream.fill(6)
    assert seqs(stream.next(stream.consumer(**config), batch=100)) == expected


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (["{}.1"], [1, 6]),
        (["{}.1", "{}.2"], [1, 2, 6, 7]),
        (["{}.*"], list(range(1, 8))),
        (["x.y"], []),
    ],
)
def test_only_matching_subjects_are_delivered(
    stream: Stream, filters: list[str], expected: list[int]
) -> None:
    stream.fill(7)
    given = [one.format(stream.prefix) for one in filters]
    assert seqs(stream.next(stream.consumer(filter_subjects=given), batch=100)) == expected


def test_headers_only_leaves_the_payload_out(stream: Stream) -> None:
    stream.publish(b"12345")
    [message] = stream.next(stream.consumer(headers_only=True))
    assert (message["data"], message["headers"]["Nats-Msg-Size"]) == ("", ["5"])


def test_ndjson_pull_ends_with_its_status(stream: Stream) -> None:
    stream.fill(2)
    headers = {"accept": "application/x-ndjson"}
    answer = stream.client.post(f"{stream.consumer()}/next", json={"batch": 5}, headers=headers)
    assert answer.headers["content-type"] == "application/x-ndjson"
    *messages, status = map(json.loads, answer.text.splitlines())
    assert seqs(messages) == [1, 2]
    assert status["status"].keys() == {"code", "description", "num_pending"}


def test_heartbeats_fill_the_wait_of_an_ndjson_pull(stream: Stream) -> None:
    target, headers = f"{stream.consumer()}/next", {"accept": "application/x-ndjson"}
    pull = {"expires": "30s", "idle_heartbeat": "200ms"}
    with stream.client.stream("POST", target, json=pull, headers=headers) as answer:
        lines = map(json.loads, answer.iter_lines())
        for _ in range(2):
            assert next(lines) == {"hb": True, "last_consumer_seq": 0, "last_stream_seq": 0}
        stream.publish(b"ends the wait")
        *_, message, _ = lines
    assert message["seq"] == 1
    answer = stream.client.post(target, json={**pull, "expires": "500ms"}, headers=headers)
    assert json.loads(answer.text.splitlines()[-1])["status"]["code"] == 408


def test_msgpack_pull_has_payloads_as_bytes(stream: Stream) -> None:
    stream.publish(b"\x00\xff")
    headers = {"accept": "application/vnd.msgpack"}
    answer = stream.client.post(f"{stream.consumer()}/next", json={}, headers=headers)
    assert msgspec.msgpack.decode(answer.content)["messages"][0]["data"] == b"\x00\xff"


@each(
    ("pull", "pointer"),
    [
        ({"batch": 0}, "/batch"),
        ({"batch": "1"}, "/batch"),
        ({"expires": "61s"}, "/expires"),
        ({"expires": "-1s"}, "/expires"),
        ({"idle_heartbeat": "1s", "expires": "5s"}, "/idle_heartbeat"),
        ({"group": "g"}, "/group"),
        ({"priority": 3}, "/priority"),
        ({"max_bytes": -1}, "/max_bytes"),
        ({"acks": [{"token": 1}]}, "/acks/0/token"),
        ({"nonsense": 1}, "/nonsense"),
    ],
)
def test_invalid_pull_is_422_at_its_field(
    stream: Stream, pull: dict[str, Any], pointer: str
) -> None:
    answer = stream.client.post(f"{stream.consumer()}/next", json=pull)
    assert_problem(answer, 422, None, pointer)


@pytest.mark.parametrize(
    ("config", "pull"),
    [
        ({"max_batch": 5}, {"batch": 6}),
        ({"max_expires": "1s"}, {"expires": "2s"}),
        ({"max_bytes": 100}, {"max_bytes": 101}),
    ],
)
def test_pull_over_a_limit_of_the_consumer_is_409(
    stream: Stream, config: dict[str, Any], pull: dict[str, Any]
) -> None:
    assert_problem(stream.client.post(f"{stream.consumer(**config)}/next", json=pull), 409)


def test_message_larger_than_max_bytes_is_409_and_stays(stream: Stream) -> None:
    stream.publish(b"x" * 1000)
    consumer = stream.consumer()
    assert_problem(stream.client.post(f"{consumer}/next", json={"max_bytes": 500}), 409)
    [message] = stream.next(consumer)
    assert message["num_delivered"] == 1


def test_max_bytes_ends_a_batch(stream: Stream) -> None:
    for _ in range(5):
        stream.publish(b"x" * 1000)
    assert len(stream.next(stream.consumer(), batch=5, max_bytes=2500)) == 2


def test_pull_in_another_form_or_type_is_refused(stream: Stream) -> None:
    consumer = stream.consumer()
    answer = stream.client.post(f"{consumer}/next", headers={"accept": "text/html"})
    assert_problem(answer, 406)
    answer = stream.client.post(f"{consumer}/next", content=b"x", headers={"content-type": "a/b"})
    assert_problem(answer, 415)
    answer = stream.client.post(
        f"{consumer}/next", content=b"{", headers={"content-type": "application/json"}
    )
    assert_problem(answer, 400, 10025)


# Acknowledgements --------------------------------------------------------------------------------
def test_acked_messages_are_done(stream: Stream) -> None:
    stream.fill(3)
    consumer = stream.consumer(ack_wait="1s")
    delivered = stream.next(consumer, batch=3)
    assert stream.client.get(consumer).json()["num_ack_pending"] == 3
    assert stream.ack(consumer, *tokens(delivered)) == [{"ok": True}] * 3
    info = stream.client.get(consumer).json()
    assert (info["num_ack_pending"], info["num_pending"]) == (0, 0)
    assert info["ack_floor"]["stream_seq"] == 3
    assert redelivered(stream, consumer, "2s") == []


def test_ack_of_what_is_acked_is_taken(stream: Stream) -> None:
    stream.fill(1)
    consumer = stream.consumer()
    taken = tokens(stream.next(consumer))
    assert stream.ack(consumer, *taken) == stream.ack(consumer, *taken) == [{"ok": True}]


def test_unacked_message_comes_again_after_ack_wait(stream: Stream) -> None:
    stream.fill(2)
    consumer = stream.consumer(ack_wait="1s")
    first = stream.next(consumer, batch=2)
    stream.ack(consumer, first[1]["ack_token"])
    [again] = redelivered(stream, consumer)
    assert (again["seq"], again["num_delivered"]) == (1, 2)
    assert again["consumer_seq"] == 3
    assert stream.client.get(consumer).json()["num_redelivered"] == 1
    # A late ack, with the token of the first delivery, counts.
    assert stream.ack(consumer, first[0]["ack_token"]) == [{"ok": True}]
    assert stream.client.get(consumer).json()["num_ack_pending"] == 0


def test_nak_brings_a_message_back_at_once_or_after_its_delay(stream: Stream) -> None:
    stream.fill(1)
    consumer = stream.consumer()
    [first] = stream.next(consumer)
    stream.ack(consumer, first["ack_token"], kind="nak")
    [second] = redelivered(stream, consumer)
    begun = time.monotonic()
    stream.ack(consumer, second["ack_token"], kind="nak", delay="700ms")
    [third] = redelivered(stream, consumer)
    assert time.monotonic() - begun > 0.6
    assert third["num_delivered"] == 3


def test_term_ends_a_message(stream: Stream) -> None:
    stream.fill(1)
    consumer = stream.consumer(ack_wait="1s")
    [message] = stream.next(consumer)
    assert stream.ack(consumer, message["ack_token"], kind="term", reason="poison") == [
        {"ok": True}
    ]
    assert redelivered(stream, consumer, "2s") == []


def test_in_progress_restarts_the_ack_wait(stream: Stream) -> None:
    stream.fill(1)
    consumer = stream.consumer(ack_wait="3s")
    delivered = stream.next(consumer)
    # Nothing comes for a second. On a slow machine it may be the message again.
    delivered += stream.next(consumer, expires="1s")
    begun = time.monotonic()
    stream.ack(consumer, delivered[-1]["ack_token"], kind="in_progress")
    assert redelivered(stream, consumer)[0]["num_delivered"] == len(delivered) + 1
    assert time.monotonic() - begun > 2.9


def test_message_is_delivered_max_deliver_times(stream: Stream) -> None:
    stream.fill(1)
    consumer = stream.consumer(ack_wait="300ms", max_deliver=2)
    assert stream.next(consumer)[0]["num_delivered"] == 1
    assert redelivered(stream, consumer)[0]["num_delivered"] == 2
    assert redelivered(stream, consumer, "1s") == []
    assert stream.state()["messages"] == 1


def test_max_ack_pending_stalls_delivery_until_acks_come(stream: Stream) -> None:
    stream.fill(5)
    consumer = stream.consumer(max_ack_pending=2)
    first = stream.next(consumer, batch=5)
    assert seqs(first) == [1, 2]
    assert stream.next(consumer, batch=5) == []
    stream.ack(consumer, *tokens(first))
    assert seqs(stream.next(consumer, batch=5)) == [3, 4]


def test_consumer_without_acks_never_redelivers(stream: Stream) -> None:
    stream.fill(2)
    consumer = stream.consumer(ack_policy="none")
    assert seqs(stream.next(consumer, batch=5)) == [1, 2]
    assert stream.client.get(consumer).json()["num_ack_pending"] == 0


def test_acks_ride_on_the_next_pull(stream: Stream) -> None:
    stream.fill(4)
    consumer = stream.consumer()
    first = stream.next(consumer, batch=2)
    acks = [{"token": token, "kind": "ack"} for token in tokens(first)]
    second = stream.client.post(f"{consumer}/next", json={"batch": 2, "acks": acks}).json()
    assert second["ack_results"] == [{"ok": True}] * 2
    assert seqs(second["messages"]) == [3, 4]
    acks = [{"token": token} for token in tokens(second["messages"])]
    empty = stream.client.post(f"{consumer}/next", json={"no_wait": True, "acks": acks})
    assert (empty.status_code, empty.json()["messages"]) == (200, [])


def test_ephemeral_consumer_is_removed_when_it_is_idle(stream: Stream) -> None:
    config = {"inactive_threshold": "500ms"}
    created = stream.client.post(f"{stream.path}/consumers", json=config)
    deadline = time.monotonic() + 60
    while stream.client.get(created.headers["location"]).status_code == 200:
        assert time.monotonic() < deadline
        stream.client.get(f"{stream.path}/messages?wait=200ms")


# Tokens ------------------------------------------------------------------------------------------
def problem_of(results: list[Any]) -> tuple[int, str]:
    [result] = results
    return result["problem"]["status"], result["problem"]["name"]


def test_forged_token_is_403(stream: Stream) -> None:
    stream.fill(1)
    consumer = stream.consumer()
    [token] = tokens(stream.next(consumer))
    head, _, position = token.partition(".")
    raw = bytearray(base64.urlsafe_b64decode(head + "=" * (-len(head) % 4)))
    for at in (0, 5, 20, len(raw) - 1):
        changed = bytearray(raw)
        changed[at] ^= 1
        forged = base64.urlsafe_b64encode(changed).rstrip(b"=").decode()
        assert problem_of(stream.ack(consumer, f"{forged}.{position}"))[0] == 403
        assert problem_of(stream.ack(consumer, forged)) == (403, "ack_token_invalid")
    for nonsense in ("", "x", "ä", "A" * 5000, head, f"{head}.1", f"{head}."):
        assert problem_of(stream.ack(consumer, nonsense))[0] == 403
    assert stream.client.get(consumer).json()["num_ack_pending"] == 1


def test_token_of_another_consumer_is_403(stream: Stream) -> None:
    stream.fill(1)
    one, other = stream.consumer("one"), stream.consumer("other")
    taken = tokens(stream.next(one))
    assert problem_of(stream.ack(other, *taken))[0] == 403


def test_token_of_a_deleted_or_recreated_consumer_is_stale(stream: Stream) -> None:
    stream.fill(1)
    consumer = stream.consumer()
    taken = tokens(stream.next(consumer))
    stream.client.delete(consumer)
    assert problem_of(stream.ack(consumer, *taken)) == (409, "stale_token")
    stream.consumer()
    assert problem_of(stream.ack(consumer, *taken)) == (409, "stale_token")


def test_bad_and_good_tokens_are_answered_in_order(stream: Stream) -> None:
    stream.fill(2)
    consumer = stream.consumer()
    first, second = tokens(stream.next(consumer, batch=2))
    results = stream.ack(consumer, first, "forged", second)
    assert [result.get("ok") for result in results] == [True, None, True]


@each(
    ("body", "pointer"),
    [
        ({}, "/acks"),
        ({"acks": [{}]}, "/acks/0/token"),
        ({"acks": [{"token": "t", "kind": "maybe"}]}, "/acks/0/kind"),
        ({"acks": [{"token": "t", "delay": "1s"}]}, "/acks/0/delay"),
        ({"acks": [{"token": "t", "kind": "nak", "delay": "soon"}]}, "/acks/0/delay"),
        ({"acks": [], "sync": "yes"}, "/sync"),
        ({"acks": [], "more": 1}, "/more"),
    ],
)
def test_invalid_ack_is_422_at_its_field(
    stream: Stream, body: dict[str, Any], pointer: str
) -> None:
    assert_problem(stream.client.post(f"{stream.consumer()}/ack", json=body), 422, None, pointer)


def test_ack_of_an_unknown_consumer_is_404(stream: Stream) -> None:
    answer = stream.client.post(f"{stream.path}/consumers/none/ack", json={"acks": []})
    assert_problem(answer, 404, 10014)


@pytest.mark.long
def test_token_outlives_a_restart_of_the_server(own_server: Any) -> None:
    with own_server.client() as client:
        client.put("/v1/streams/S", json={"subjects": ["s.>"]})
        client.post("/v1/subjects/s.a/messages", content=b"x")
        client.put("/v1/streams/S/consumers/c", json={})
        message = client.post("/v1/streams/S/consumers/c/next", json={}).json()["messages"][0]
    own_server.stop()
    own_server.start()
    with own_server.client() as client:
        acks = {"acks": [{"token": message["ack_token"]}], "sync": True}
        answer = client.post("/v1/streams/S/consumers/c/ack", json=acks)
        assert answer.json() == {"results": [{"ok": True}]}
        assert client.get("/v1/streams/S/consumers/c").json()["num_ack_pending"] == 0
