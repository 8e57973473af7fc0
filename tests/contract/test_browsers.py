"""Pages of other origins: what they may ask and read, and tickets in place of a token."""

from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta

import httpx
import pytest

from tests.contract.conftest import assert_problem
from tests.contract.talk import OP_TEXT, PATH, RawSocket, frame_bytes
from tests.support.each import each
from tests.support.servers import ServerProcess, SplitServers

TOKEN = "open-sesame"
ORIGIN = "https://app.example"
EDGES = 4
RACES = 10
RACERS = 6 * EDGES
AUTHORIZED = {"authorization": f"Bearer {TOKEN}", "origin": ORIGIN}


@pytest.fixture(
    scope="module",
    params=[
        "fast",
        pytest.param("declared", marks=pytest.mark.other_form),
        pytest.param("split", marks=pytest.mark.other_form),
    ],
)
def listed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess | SplitServers]:
    """A server with a token that lists an origin."""
    folder = tmp_path_factory.mktemp(f"browsers-{request.param}")
    settings = {"token": TOKEN, "allowed_origins": f"{ORIGIN},http://localhost:3000"}
    if request.param == "split":
        with SplitServers(folder, **settings) as servers:
            yield servers
        return
    fast_lane = "on" if request.param == "fast" else "off"
    with ServerProcess(folder / "data", fast_lane=fast_lane, **settings) as running:
        yield running


@pytest.fixture
def page(listed: ServerProcess | SplitServers) -> Iterator[httpx.Client]:
    """What a page of the listed origin asks with."""
    with listed.client(headers=AUTHORIZED) as client:
        client.put("/v1/streams/B", json={"subjects": ["b.>"]})
        yield client


def exposed(answer: httpx.Response) -> set[str]:
    assert answer.headers.get_list("access-control-allow-origin") == [ORIGIN], answer.headers
    assert "Origin" in answer.headers["vary"]
    assert len(answer.headers.get_list("access-control-expose-headers")) == 1
    return set(answer.headers["access-control-expose-headers"].split(", "))


@pytest.mark.long
@each("path", ["/v1/streams/B", "/v1/subjects/b.a/messages", "/v1/nowhere"])
def test_preflight_lists_what_a_page_may_send(
    listed: ServerProcess | SplitServers, path: str
) -> None:
    asked = {
        "origin": ORIGIN,
        "access-control-request-method": "PUT",
        "access-control-request-headers": "authorization,content-type,Msg-Header-A,cookie,x y",
    }
    with listed.client() as client:
        for _ in range(EDGES):
            answer = client.options(path, headers=asked)
            assert (answer.status_code, answer.content) == (204, b"")
            assert exposed(answer) == {"x-request-id"}
            granted = answer.headers["access-control-allow-headers"]
            assert granted == "authorization, content-type, msg-header-a"
            methods = answer.headers["access-control-allow-methods"].split(", ")
            assert methods == ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"]
            assert "access-control-allow-credentials" not in answer.headers


@each("origin", ["https://evil.example", "null", f"{ORIGIN}.evil.example"])
def test_page_of_another_origin_gets_no_cors_headers(
    listed: ServerProcess | SplitServers, origin: str
) -> None:
    with listed.client() as client:
        headers = {"origin": origin, "access-control-request-method": "GET"}
        for method in ("GET", "OPTIONS"):
            answer = client.request(method, "/v1/streams", headers=headers)
            assert_problem(answer, 403)
            assert "access-control-allow-origin" not in answer.headers


def test_question_is_no_way_around_the_host(listed: ServerProcess | SplitServers) -> None:
    headers = {"host": "evil.example", "origin": ORIGIN, "access-control-request-method": "GET"}
    with listed.client() as client:
        assert_problem(client.options("/v1/streams", headers=headers), 403)


def test_page_reads_answers_of_every_kind(page: httpx.Client) -> None:
    for _ in range(EDGES):
        headers = {"msg-header-a": "b", "msg-header-c": "ä".encode()}
        stored = page.post("/v1/subjects/b.a/messages", content=b"x", headers=headers)
        assert {"durability", "x-request-id"} <= exposed(stored)
        raw = page.get(f"/v1/streams/B/messages/{stored.json()['seq']}")
        assert raw.content == b"x"
        assert exposed(raw) >= {"nats-subject", "nats-sequence", "msg-header-a", "msg-header-c*"}
        assert "etag" in exposed(page.get("/v1/streams/B"))
        assert exposed(page.get("/v1/streams/B/replay"))
        pulled = page.post("/v1/streams/B/consumers", json={})
        assert "location" in exposed(pulled)
        consumer = pulled.headers["location"]
        assert exposed(page.post(f"{consumer}/next", json={"batch": 1, "no_wait": True}))
        with page.stream(
            "GET", "/v1/streams/B/messages", headers={"accept": "text/event-stream"}
        ) as events:
            assert exposed(events) == {"x-request-id"}


def test_page_reads_refusals(listed: ServerProcess | SplitServers, page: httpx.Client) -> None:
    with listed.client(headers={"origin": ORIGIN}) as stranger:
        for _ in range(EDGES):
            assert exposed(assert_status(stranger.get("/v1/streams"), 401))
            publish = stranger.post("/v1/subjects/b.a/messages", content=b"x")
            assert exposed(assert_status(publish, 401))
            assert exposed(assert_status(page.get("/v1/streams/NONE"), 404))
            assert exposed(assert_status(page.get("/v1/streams/B/messages/99999"), 404))
            assert "allow" in exposed(assert_status(page.put("/v1/streams"), 405))
            body = page.put("/v1/streams/B", content=b"{", headers={"content-type": "text/plain"})
            assert exposed(assert_status(body, 415))


def assert_status(answer: httpx.Response, status: int) -> httpx.Response:
    assert answer.status_code == status, answer.text
    return answer


def test_answer_to_nobodys_page_varies_all_the_same(page: httpx.Client) -> None:
    answer = page.get("/v1/streams", headers={"origin": "http://127.0.0.1:9"})
    assert (answer.status_code, answer.headers["vary"]) == (200, "Origin")
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.long
def test_server_that_lists_no_origin_says_nothing_of_them(own_server: ServerProcess) -> None:
    for origin in ("http://localhost:3000", "http://127.0.0.1"):
        with own_server.client() as client:
            answer = client.get("/v1/streams", headers={"origin": origin})
        assert answer.status_code == 200
        assert "vary" not in answer.headers
        assert "access-control-allow-origin" not in answer.headers


# Tickets -----------------------------------------------------------------------------------------
def ticket_of(page: httpx.Client) -> str:
    answer = page.post("/v1/tickets")
    assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-store")
    body = answer.json()
    assert body.keys() == {"ticket", "expires_at"}
    left = datetime.fromisoformat(body["expires_at"]) - datetime.now(UTC)
    assert timedelta(0) < left <= timedelta(seconds=30)
    return str(body["ticket"])


def test_ticket_opens_one_socket_in_whichever_process(
    listed: ServerProcess | SplitServers, page: httpx.Client
) -> None:
    for _ in range(EDGES):
        path = f"{PATH}?ticket={ticket_of(page)}"
        with RawSocket(listed.url, f"Origin: {ORIGIN}", path=path) as first:
            first.opened()
            first.send(frame_bytes(OP_TEXT, b'{"op":"ping","id":1}'))
            assert b"pong" in first.frame()[1]
            for _ in range(EDGES):
                with RawSocket(listed.url, path=path) as second:
                    status, problem, _ = second.problem()
                    assert (status, problem["name"]) == (401, "unauthenticated")


def test_sockets_that_race_with_one_ticket_over_all_processes_open_one(
    listed: ServerProcess | SplitServers, page: httpx.Client
) -> None:
    for _ in range(RACES):
        path = f"{PATH}?ticket={ticket_of(page)}"
        with ExitStack() as opened:
            urls = [listed.url for _ in range(RACERS)]  # each process in turn
            racers = [opened.enter_context(RawSocket(url, path=path, held=True)) for url in urls]
            for racer in racers:
                racer.send(b"\n")
            answers = [racer.head()[0] for racer in racers]
        assert sorted(answers) == [101] + [401] * (RACERS - 1)


def test_ticket_reads_events_once_in_whichever_process(
    listed: ServerProcess | SplitServers, page: httpx.Client
) -> None:
    accept = {"accept": "text/event-stream", "origin": ORIGIN}
    with listed.client(headers=accept) as client:
        for path in ("/v1/streams/B/messages", "/v1/events"):
            for _ in range(EDGES):
                ticket = ticket_of(page)
                with client.stream("GET", path, params={"ticket": ticket}) as events:
                    assert events.status_code == 200
                    assert events.headers["content-type"].startswith("text/event-stream")
                for _ in range(EDGES):
                    again = client.get(path, params={"ticket": ticket})
                    assert exposed(assert_status(again, 401))


def test_ticket_opens_nothing_else(
    listed: ServerProcess | SplitServers, page: httpx.Client
) -> None:
    ticket = ticket_of(page)
    events = {"accept": "text/event-stream"}
    with listed.client() as client:
        for method, path, headers in (
            ("GET", "/v1/streams", {}),
            ("GET", "/v1/streams", events),
            ("GET", "/v1/streams/B/messages", {}),
            ("POST", "/v1/streams/B/messages", events),
            ("POST", "/v1/tickets", events),
            ("GET", "/metrics", events),
        ):
            for _ in range(EDGES):
                answer = client.request(method, path, params={"ticket": ticket}, headers=headers)
                assert_problem(answer, 401)
        answer = client.get(
            "/v1/events", params={"ticket": ticket}, headers={"origin": "https://evil.example"}
        )
        assert_problem(answer, 403)
        bad_token = {**events, "authorization": "Bearer wrong"}
        assert_problem(client.get("/v1/events", params={"ticket": ticket}, headers=bad_token), 401)
        assert_problem(client.post("/v1/tickets"), 401)


@each("bad", ["", "x", "a" * 54, "%00", "=", "\u00e4"])
def test_ticket_that_is_none_is_401(listed: ServerProcess | SplitServers, bad: str) -> None:
    with listed.client(headers={"accept": "text/event-stream"}) as client:
        for _ in range(EDGES):
            assert_problem(client.get("/v1/events", params={"ticket": bad}), 401)


def test_documents_are_for_everyone(listed: ServerProcess | SplitServers) -> None:
    with listed.client() as client:
        for _ in range(EDGES):
            assert client.get("/docs").status_code == 200
            assert "paths" in client.get("/openapi.json").json()
            start = client.get("/")
            assert (start.status_code, start.headers["location"]) == (307, "/docs")
            assert_problem(client.get("/metrics"), 401)
            assert_problem(client.get("/console"), 401)
