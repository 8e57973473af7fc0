"""Pulls and acknowledgements: forms of the answer, waiting, tokens."""

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import msgspec
import pytest

from contrail_common import errors
from contrail_common.ack_tokens import AckTokens
from contrail_common.errors import ApiError
from contrail_common.model import StoredMessage
from contrail_link.contract.consume import Delivery, PullResult
from tests.support.each import each
from tests.unit.edge.edge_rig import ACK_KEY, Edge, Exchange
from tests.unit.edge.edge_serving import SOON_S

NEXT = "/v1/streams/S/consumers/c/next"
ACK = "/v1/streams/S/consumers/c/ack"
JSON = {"content-type": "application/json"}
NDJSON = {**JSON, "accept": "application/x-ndjson"}


def delivery(payload: bytes = b"hello") -> PullResult:
    stored = StoredMessage(5, "a.b", 1_000_000_000, {"H": ["v"]}, payload)
    return PullResult([Delivery(stored, 9, 2, 4)], 4, 1, 7, 3)


def call(
    target: str, body: Any = None, headers: dict[str, str] = JSON, edge: Edge | None = None
) -> Exchange:
    raw = b"" if body is None else json.dumps(body).encode()
    result: Exchange = run((edge or Edge()).call("POST", target, raw, headers if raw else {}))
    return result


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def with_delivery(payload: bytes = b"hello") -> Edge:
    edge = Edge()
    edge.link.pull_results = [delivery(payload)]
    return edge


def token(consumer: str = "c", epoch: int = 3) -> str:
    return AckTokens("default", [ACK_KEY]).sign_each("S", consumer, (1, 7, epoch), [5])[0]


def test_delivery_carries_the_message_its_facts_and_a_token() -> None:
    answer = call(NEXT, edge=with_delivery())
    assert answer.status == 200
    [message] = answer.json()["messages"]
    assert message == {
        "stream": "S",
        "seq": 5,
        "subject": "a.b",
        "time": "1970-01-01T00:00:01.000000000Z",
        "headers": {"H": ["v"]},
        "data": "hello",
        "consumer_seq": 9,
        "num_delivered": 2,
        "num_pending": 4,
        "ack_token": token(),
    }
    assert answer.json()["num_pending"] == 4


def test_payload_that_is_no_text_is_shown_as_base64() -> None:
    [message] = call(NEXT, edge=with_delivery(b"\xff")).json()["messages"]
    assert message["data_base64"] == "/w=="
    [forced] = call(f"{NEXT}?payload=base64", edge=with_delivery()).json()["messages"]
    assert forced["data_base64"] == "aGVsbG8="
    assert "data" not in forced


def test_msgpack_answer_has_the_payload_as_bytes() -> None:
    headers = {**JSON, "accept": "application/vnd.msgpack"}
    answer = call(NEXT, {"batch": 2}, headers, with_delivery(b"\xff\x00"))
    assert answer.headers["content-type"] == "application/vnd.msgpack"
    decoded = msgspec.msgpack.decode(answer.body)
    assert decoded["messages"][0]["data"] == b"\xff\x00"
    assert decoded["messages"][0]["ack_token"] == token()


def test_ndjson_answer_ends_with_a_status_line() -> None:
    answer = call(NEXT, {"batch": 2}, NDJSON, with_delivery())
    message, status = map(json.loads, answer.body.splitlines())
    assert message["seq"] == 5
    assert status == {"status": {"code": 200, "description": "OK", "num_pending": 4}}


def test_pull_that_does_not_wait_answers_204_when_there_is_nothing() -> None:
    for headers in (JSON, NDJSON):
        answer = call(NEXT, {"no_wait": True}, headers)
        assert (answer.status, answer.body) == (204, b"")


def test_pull_waits_only_after_nothing_was_there() -> None:
    edge = Edge()
    edge.link.pull_results = [PullResult([], 0, 1, 7, 3), delivery()]
    assert call(NEXT, {"expires": "30s", "batch": 7}, edge=edge).status == 200
    first, second = edge.link.pulls
    assert (first.no_wait, second.no_wait) == (True, False)
    assert second.expires_ns == 30_000_000_000
    assert second.batch == 7


def test_default_expiry_gives_way_to_the_consumers_limit() -> None:
    edge = Edge()
    edge.link.max_expires_ns = 1_000_000
    edge.link.pull_results = [PullResult([], 0, 1, 7, 3), delivery()]
    call(NEXT, edge=edge)
    assert [one.expires_ns for one in edge.link.pulls] == [0, 1_000_000]


def test_heartbeats_come_while_nothing_else_does() -> None:
    async def scenario() -> list[Any]:
        edge, gone = Edge(), asyncio.Event()
        body = b'{"expires":"10s","idle_heartbeat":"100ms"}'
        task = asyncio.create_task(edge.call("POST", NEXT, body, NDJSON, gone))
        await edge.link.waiting.wait()
        edge.app.drain()
        return [json.loads(one) for one in (await task).body.splitlines()]

    lines = run(scenario())
    assert lines[-1]["status"]["code"] == 503
    assert all(
        line == {"hb": True, "last_consumer_seq": 0, "last_stream_seq": 0} for line in lines[:-1]
    )


def test_client_that_leaves_a_pull_with_heartbeats_ends_it() -> None:
    async def scenario() -> None:
        edge, gone = Edge(), asyncio.Event()
        body = b'{"expires":"10s","idle_heartbeat":"100ms"}'
        task = asyncio.create_task(edge.call("POST", NEXT, body, NDJSON, gone))
        await edge.link.waiting.wait()
        gone.set()
        await asyncio.wait_for(edge.link.cancelled.wait(), SOON_S)
        await task

    run(scenario())


@each("name", ["PULL_LIMIT", "PULL_TOO_SMALL", "CONSUMER_DELETED", "CONSUMER_NOT_FOUND"])
def test_refused_pull_is_a_problem(name: str) -> None:
    edge, spec = Edge(), getattr(errors, name)
    edge.link.failures = [ApiError(spec)]
    assert call(NEXT, edge=edge).json()["code"] == spec.code


# Acknowledgements --------------------------------------------------------------------------------
def test_acks_reach_the_storage_as_their_tokens_say() -> None:
    edge = Edge()
    body = {
        "acks": [
            {"token": token()},
            {"token": token(), "kind": "nak", "delay": "2s"},
            {"token": token(), "kind": "term", "reason": "poison"},
            {"token": token(), "kind": "in_progress"},
        ],
        "sync": True,
    }
    assert call(ACK, body, edge=edge).json() == {"results": [{"ok": True}] * 4}
    assert [(one.kind, one.delay_ns, one.reason) for one in edge.link.acked] == [
        ("ack", 0, ""),
        ("nak", 2_000_000_000, ""),
        ("term", 0, "poison"),
        ("in_progress", 0, ""),
    ]
    assert {(one.shard_id, one.consumer_id, one.epoch, *one.seqs) for one in edge.link.acked} == {
        (1, 7, 3, 5)
    }


def test_forged_and_foreign_tokens_are_403_one_by_one() -> None:
    edge = Edge()
    body = {"acks": [{"token": "nonsense"}, {"token": token()}, {"token": token("other")}]}
    results = call(ACK, body, edge=edge).json()["results"]
    assert [one.get("problem", {}).get("status") for one in results] == [403, None, 403]
    assert len(edge.link.acked) == 1


def test_genuine_token_of_a_deleted_consumer_is_stale() -> None:
    edge = Edge()
    edge.link.consumer_missing = True
    body = {"acks": [{"token": "nonsense"}, {"token": token()}]}
    results = call(ACK, body, edge=edge).json()["results"]
    assert [one["problem"]["name"] for one in results] == ["ack_token_invalid", "stale_token"]


@pytest.mark.parametrize("acks", [[], [{"token": "nonsense"}]])
def test_unknown_consumer_is_404_when_no_token_shows_that_it_existed(acks: list[Any]) -> None:
    edge = Edge()
    edge.link.consumer_missing = True
    assert call(ACK, {"acks": acks}, edge=edge).json()["name"] == "consumer_not_found"


def test_acks_of_a_pull_are_applied_first_and_an_empty_poll_is_then_200() -> None:
    edge = Edge()
    answer = call(NEXT, {"no_wait": True, "acks": [{"token": token()}]}, edge=edge)
    assert answer.status == 200
    assert answer.json() == {"messages": [], "num_pending": 0, "ack_results": [{"ok": True}]}
    assert len(edge.link.acked) == 1


def test_results_of_acks_survive_a_drain() -> None:
    async def scenario() -> Exchange:
        edge = Edge()
        edge.app.drain()
        body = json.dumps({"acks": [{"token": token()}]}).encode()
        return await edge.call("POST", NEXT, body, JSON)

    answer = run(scenario())
    assert (answer.status, answer.json()["ack_results"]) == (200, [{"ok": True}])


@each(
    ("body", "status"),
    [
        ({"acks": [{"token": 1}]}, 422),
        ({"acks": [{"token": "t", "kind": "nope"}]}, 422),
        ({"acks": [{"kind": "ack"}]}, 422),
        ({"acks": [{"token": "t", "more": 1}]}, 422),
        ({"acks": "t"}, 422),
        ({}, 422),
        ([], 422),
        ({"acks": [{"token": "t"}] * 10_001}, 413),
    ],
)
def test_malformed_acks_are_refused_as_a_whole(body: Any, status: int) -> None:
    assert call(ACK, body).status == status
