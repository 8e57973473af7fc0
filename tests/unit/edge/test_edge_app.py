"""The application of the edge: who may call, bodies under their bounds, waiting, failing."""

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from contrail_common import errors
from contrail_common.errors import ApiError
from tests.support.each import each
from tests.unit.edge.edge_rig import Edge, Exchange
from tests.unit.edge.edge_serving import SOON_S, serving

PUBLISH = "/v1/subjects/a.b/messages"


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def call(method: str, target: str, *args: Any, edge: Edge | None = None, **kwargs: Any) -> Exchange:
    async def once() -> Exchange:
        return await (edge or Edge()).call(method, target, *args, **kwargs)

    result: Exchange = run(once())
    return result


# Who may call ------------------------------------------------------------------------------------
@each("host", ["localhost", "localhost:80", "127.0.0.1", "[::1]:7420", "LOCALHOST"])
def test_loopback_host_is_served(host: str) -> None:
    assert call("GET", "/livez", headers={"host": host}).status == 200


@each(
    "host",
    [
        "example.com",
        "localhost.example.com",
        "127.0.0.1.example.com",
        "",
        "a@localhost",
        "[::1",
        "localhost:x",
    ],
)
def test_foreign_host_is_403(host: str) -> None:
    answer = call("GET", "/livez", headers={"host": host})
    assert (answer.status, answer.json()["name"]) == (403, "foreign_host")


@each("origin", ["http://localhost:3000", "https://127.0.0.1", "http://[::1]:7420"])
def test_loopback_origin_is_served(origin: str) -> None:
    assert call("GET", "/livez", headers={"origin": origin}).status == 200


@each(
    "origin",
    [
        "http://example.com",
        "null",
        "",
        "localhost",
        "file://localhost",
        "http://localhost.example.com",
    ],
)
def test_foreign_origin_is_403(origin: str) -> None:
    answer = call("GET", "/livez", headers={"origin": origin})
    assert (answer.status, answer.json()["name"]) == (403, "foreign_origin")


def test_configured_host_and_origin_are_served() -> None:
    edge = Edge(
        allowed_hosts=frozenset({"contrail.example"}),
        allowed_origins=frozenset({"https://console.example"}),
    )
    headers = {"host": "contrail.example:443", "origin": "https://console.example"}
    assert call("GET", "/livez", headers=headers, edge=edge).status == 200


def test_token_is_asked_for_everywhere_but_at_probes_and_documents() -> None:
    edge = Edge(token="secret")
    for target in ("/livez", "/readyz", "/openapi.json", "/docs"):
        assert call("GET", target, edge=edge).status == 200
    assert call("GET", "/", edge=edge).headers["location"] == "/docs"
    for target in ("/metrics", "/v1/tickets", "/v1/streams/S/messages", "/nowhere", "//", "/docs/"):
        answer = call("GET", target, edge=edge)
        assert answer.status == 401
        assert answer.headers["www-authenticate"].startswith("Bearer")


@each(
    "value",
    ["Bearer other", "Bearer secre", "Bearer secrets", "Basic secret", "secret", "Bearer", ""],
)
def test_wrong_token_is_401(value: str) -> None:
    edge = Edge(token="secret")
    assert call("GET", "/metrics", headers={"authorization": value}, edge=edge).status == 401


def test_right_token_is_served_whatever_the_case_of_the_scheme() -> None:
    edge = Edge(token="secret")
    assert (
        call("GET", "/metrics", headers={"authorization": "bearer secret"}, edge=edge).status == 200
    )


# Routes ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("fast_lane", [True, False])
def test_unknown_path_and_method_are_problems(fast_lane: bool) -> None:
    edge = Edge(fast_lane=fast_lane)
    assert call("GET", "/v1/nothing", edge=edge).json()["name"] == "not_found"
    answer = call("POST", "/v1/streams/S", edge=edge)
    assert answer.json()["name"] == "method_not_allowed"
    assert answer.headers["allow"] == "DELETE, GET, HEAD, PATCH, PUT"
    assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("fast_lane", [True, False])
def test_slash_in_a_subject_is_part_of_it_when_escaped(fast_lane: bool) -> None:
    edge = Edge(fast_lane=fast_lane)
    assert call("POST", "/v1/subjects/a.x%2Fy%25z/messages", b"p", edge=edge).status == 201
    assert edge.link.published[0][0].subject == "a.x/y%z"


@each("fast_lane", [True, False])
@each("target", ["/v1/subjects/a.%zz/messages", "/v1/subjects/a.%FF/messages"])
def test_broken_escape_in_the_path_is_400(fast_lane: bool, target: str) -> None:
    assert call("POST", target, b"x", edge=Edge(fast_lane=fast_lane)).status == 400


@pytest.mark.parametrize("fast_lane", [True, False])
def test_pieces_are_sent_one_by_one_where_a_server_cannot_gather_them(fast_lane: bool) -> None:
    edge = Edge(fast_lane=fast_lane)
    edge.link.replay_chunks = [b"head ", (b"one ", b"", b"two"), b" end"]
    answer = call("GET", "/v1/streams/S/replay", edge=edge)
    assert (answer.status, answer.body, answer.ended) == (200, b"head one two end", True)


@pytest.mark.parametrize("fast_lane", [True, False])
def test_head_is_get_without_the_body_of_a_stream(fast_lane: bool) -> None:
    edge = Edge(fast_lane=fast_lane)
    edge.link.replay_chunks = [b"never sent"]
    answer = call("HEAD", "/v1/streams/S/replay", edge=edge)
    assert (answer.status, answer.body, answer.ended) == (200, b"", True)


def test_request_id_is_made_or_taken_and_stands_in_problems() -> None:
    answer = call("GET", "/nowhere", headers={"x-request-id": "abc-1"})
    assert answer.headers["x-request-id"] == answer.json()["request_id"] == "abc-1"
    made = call("GET", "/nowhere", headers={"x-request-id": "a b\t"})
    assert made.headers["x-request-id"] == made.json()["request_id"]
    assert "a b" not in made.headers["x-request-id"]


# Bodies ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("fast_lane", [True, False])
def test_declared_body_over_the_limit_is_refused_unread(fast_lane: bool) -> None:
    edge = Edge(fast_lane=fast_lane, payload_bytes_max=10)
    answer = call("POST", PUBLISH, b"x" * 11, edge=edge)
    assert (answer.status, answer.json()["code"]) == (413, 10054)
    assert answer.headers["connection"] == "close"
    assert answer.ended


@pytest.mark.parametrize("fast_lane", [True, False])
def test_chunked_body_over_the_limit_is_refused_while_it_streams(fast_lane: bool) -> None:
    edge = Edge(fast_lane=fast_lane, payload_bytes_max=10)
    answer = call("POST", PUBLISH, [b"x" * 4] * 100, edge=edge)
    assert answer.status == 413
    assert edge.link.published == []


def test_bodies_in_flight_are_bounded_and_given_back() -> None:
    edge = Edge(bodies_in_flight_bytes_max=100)
    assert call("POST", PUBLISH, b"x" * 101, edge=edge).json()["applied"] is False
    for _ in range(3):
        assert call("POST", PUBLISH, b"x" * 100, edge=edge).status == 201


def test_refused_body_is_read_and_dropped_before_the_connection_ends() -> None:
    edge = Edge(token="secret")
    answer = call("POST", PUBLISH, [b"x"] * 5, edge=edge)
    assert answer.status == 401
    assert answer.headers["connection"] == "close"
    # The whole answer goes out first, its end once the body was dropped.
    assert [message.get("more_body") for message in answer.sent[1:]] == [True, False]


def test_management_body_is_bounded_too() -> None:
    edge = Edge(json_body_bytes_max=50)
    headers = {"content-type": "application/json"}
    answer = call(
        "PUT", "/v1/streams/S", b'{"description":"' + b"x" * 50 + b'"}', headers, edge=edge
    )
    assert (answer.status, answer.json()["name"]) == (413, "body_too_large")


# Failing -----------------------------------------------------------------------------------------
@each("fast_lane", [True, False])
@each(
    ("failure", "status", "retry_after"),
    [
        (ApiError(errors.OVERLOADED, retry_after_s=7, applied=False), 503, "7"),
        (ApiError(errors.NOT_READY), 503, "1"),
        (ApiError(errors.OUTCOME_UNKNOWN), 504, None),
        (ApiError(errors.STORAGE_FULL, applied=False), 507, None),
    ],
)
def test_refusal_of_the_storage_is_a_problem(
    fast_lane: bool, failure: ApiError, status: int, retry_after: str | None
) -> None:
    edge = Edge(fast_lane=fast_lane)
    edge.link.failures = [failure]
    answer = call("POST", PUBLISH, b"x", edge=edge)
    assert answer.status == answer.json()["status"] == status
    assert answer.headers.get("retry-after") == retry_after
    assert answer.json().get("applied") == failure.applied
    assert answer.json()["retryable"] is failure.spec.retryable


@pytest.mark.long
@pytest.mark.parametrize("fast_lane", [True, False])
def test_failure_nobody_foresaw_is_500_without_details(fast_lane: bool) -> None:
    edge = Edge(fast_lane=fast_lane)
    edge.link.failures = [ZeroDivisionError("inner secret")]
    answer = call("POST", PUBLISH, b"x", edge=edge)
    assert (answer.status, answer.json()["name"]) == (500, "internal")
    assert b"inner secret" not in answer.body


def test_stream_that_fails_half_way_is_cut_without_its_end() -> None:
    async def scenario() -> None:
        edge = Edge()
        edge.link.replay_chunks = [b"one", RuntimeError("disk")]
        with pytest.raises(RuntimeError, match="disk"):
            await edge.call("GET", "/v1/streams/S/replay")

    run(scenario())


def test_stream_that_is_gone_half_way_is_cut_and_logged_in_one_line(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> bytes:
        edge = Edge()
        edge.link.replay_chunks = [b"one", ApiError(errors.STREAM_NOT_FOUND, "it was deleted")]
        async with serving(edge) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /v1/streams/S/replay HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            answer = await reader.read()
            writer.close()
            return answer

    answer = run(scenario())
    assert b" 200 OK" in answer
    assert answer.endswith(b"3\r\none\r\n")  # not the end of a chunked body
    told = capsys.readouterr()
    assert "it was deleted" in told.out + told.err
    assert "Traceback" not in told.out + told.err + caplog.text
    assert "without completing" not in told.out + told.err + caplog.text


# Waiting -----------------------------------------------------------------------------------------
WAITS: list[tuple[str, str, bytes]] = [
    ("GET", "/v1/streams/S/messages?wait=60s", b""),
    ("POST", "/v1/streams/S/consumers/c/next", b'{"expires":"60s"}'),
]
JSON = {"content-type": "application/json"}


async def while_waiting(
    edge: Edge, wait: tuple[str, str, bytes], then: Callable[[], None], gone: asyncio.Event
) -> asyncio.Task[Exchange]:
    method, target, body = wait
    task = asyncio.create_task(edge.call(method, target, body, JSON if body else None, gone))
    await edge.link.waiting.wait()
    then()
    await asyncio.wait({task}, timeout=SOON_S)
    await asyncio.wait_for(edge.link.cancelled.wait(), SOON_S)
    return task


@each("wait", WAITS)
@each("fast_lane", [True, False])
def test_client_that_leaves_ends_its_wait(wait: tuple[str, str, bytes], fast_lane: bool) -> None:
    async def scenario() -> None:
        edge, gone = Edge(fast_lane=fast_lane), asyncio.Event()
        task = await while_waiting(edge, wait, gone.set, gone)
        assert task.done()

    run(scenario())


@each("wait", WAITS)
@each("fast_lane", [True, False])
def test_drain_answers_what_waits(wait: tuple[str, str, bytes], fast_lane: bool) -> None:
    async def scenario() -> None:
        edge = Edge(fast_lane=fast_lane)
        task = await while_waiting(edge, wait, edge.app.drain, asyncio.Event())
        assert (await task).json()["name"] == "shutting_down"
        assert (await edge.call(*wait[:2], wait[2], JSON)).status == 503

    run(scenario())


def test_waits_are_bounded() -> None:
    async def scenario() -> None:
        edge, gone = Edge(waiting_max=1), asyncio.Event()
        method, target, body = WAITS[0]
        first = asyncio.create_task(edge.call(method, target, body, gone=gone))
        await edge.link.waiting.wait()
        second = await edge.call(method, target, body)
        assert (second.status, second.json()["applied"]) == (429, False)
        assert second.headers["retry-after"] == "1"
        gone.set()
        await first

    run(scenario())


# Probes ------------------------------------------------------------------------------------------
def test_readiness_names_what_is_missing_and_says_why_when_asked() -> None:
    edge = Edge()
    edge.link.unready = {"log": "replaying"}
    answer = call("GET", "/readyz", edge=edge)
    assert (answer.status, answer.json()["detail"]) == (503, "not ready: log")
    assert answer.json()["errors"] == []
    verbose = call("GET", "/readyz?verbose", edge=edge).json()
    assert verbose["errors"] == [{"pointer": "log", "message": "replaying"}]


def test_metrics_count_by_route_and_status_and_include_the_storage() -> None:
    edge = Edge()
    call("POST", PUBLISH, b"x", edge=edge)
    call("GET", "/v1/unknown/path", edge=edge)
    text = call("GET", "/metrics", edge=edge).body.decode()
    published = 'method="POST",route="/v1/subjects/{subject}/messages",status="201"'
    assert f"contrail_http_requests_total{{{published}}} 1.0" in text
    assert 'route="unmatched",status="404"' in text
    assert "unknown/path" not in text
    assert "storage_up 1" in text


def test_routes_that_could_not_be_loaded_are_loaded_by_the_next_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    edge = Edge()
    load = edge.app._load
    failures = [OSError("too many open files")]

    def failing() -> Any:
        if failures:
            raise failures.pop()
        return load()

    monkeypatch.setattr(edge.app, "_load", failing)
    statuses = [call("GET", "/openapi.json", edge=edge).status for _ in range(3)]
    assert statuses == [500, 200, 200]


def test_first_management_request_inspects_no_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """FastAPI would inspect all of them then, and build their models: 30 ms of the event loop."""

    async def scenario() -> None:
        edge = Edge()
        await edge.app.load()
        monkeypatch.setattr(inspect, "signature", pytest.fail)
        answer = await edge.call("GET", "/v1/streams/S/consumers/c")
        assert answer.json()["name"] == "c"

    asyncio.run(scenario())
