"""Hostile and broken HTTP: each gets its status, and the server lives on with bounded memory."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.contract.conftest import Stream
from tests.contract.raw_http import RawAnswer, RawConnection
from tests.contract.talk import wait_until
from tests.support.each import each
from tests.support.servers import TIMEOUT_S, ServerProcess

Connect = Callable[[], RawConnection]

pytestmark = [pytest.mark.declared, pytest.mark.split]

MIB = 1 << 20


@pytest.fixture
def raw(server: ServerProcess) -> Iterator[RawConnection]:
    with RawConnection(server.url) as connection:
        yield connection
    assert httpx.get(f"{server.url}/livez", timeout=TIMEOUT_S).status_code == 200


@pytest.fixture
def connect(server: ServerProcess) -> Iterator[Connect]:
    """Open one more connection."""
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(RawConnection(server.url))
    assert httpx.get(f"{server.url}/livez", timeout=TIMEOUT_S).status_code == 200


def refused(connection: RawConnection, status: int) -> RawAnswer:
    answer = connection.answer()
    assert answer is not None, "closed without an answer"
    assert answer.status == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["status"] == status
    assert answer.headers["connection"] == "close"
    assert connection.ended()
    return answer


# Expectations ------------------------------------------------------------------------------------
EDGES = 4
"""Processes of the split form that may be asked; whoever is asked, all behave the same."""


@pytest.mark.parametrize("expectation", ["100-continue", "100-Continue", "something-else"])
def test_body_that_follows_an_expectation_is_taken_by_every_process(
    server: ServerProcess, stream: Stream, expectation: str
) -> None:
    target = f"/v1/subjects/{stream.subject()}/messages"
    for number in range(1, EDGES + 1):
        with RawConnection(server.url) as connection:
            lines = [f"Expect: {expectation}", "Content-Length: 2", "Connection: close"]
            connection.request("POST", target, *lines, body=b"hi")
            answer = connection.answer()
            if answer is not None and answer.status == 100:
                answer = connection.answer()
            assert answer is not None
            assert (answer.status, answer.json()["seq"]) == (201, number)


# Requests that are no HTTP -----------------------------------------------------------------------
@each(
    "request_bytes",
    [
        b"GARBAGE\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /livez\r\n\r\n",
        b"GET /livez HTTP/9.9\r\nHost: {host}\r\n\r\n",
        b"GET /livez HTTP/1.1\nHost: {host}\n\n",
        b"GET /livez HTTP/1.1\r\nHost : {host}\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: {host}\r\n Folded: x\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: {host}\r\nBad Header: x\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: {host}\r\nX: a\x00b\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: {host}\r\nX: a\rb\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: {host}\r\n\r\n",
        b"GET http://other.example/livez HTTP/1.1\r\nHost: {host}\r\n\r\n",
        b"GET livez HTTP/1.1\r\nHost: {host}\r\n\r\n",
        b"CONNECT {host} HTTP/1.1\r\nHost: {host}\r\n\r\n",
        b"NOSUCHMETHOD /livez HTTP/1.1\r\nHost: {host}\r\n\r\n",
    ],
)
def test_broken_request_is_400(connect: Connect, request_bytes: bytes) -> None:
    raw = connect()
    raw.send(request_bytes.replace(b"{host}", raw.host.encode()))
    refused(raw, 400)


def test_absolute_target_of_the_same_server_is_served(raw: RawConnection) -> None:
    raw.request("GET", f"http://{raw.host}/livez")
    answer = raw.answer()
    assert answer is not None
    assert answer.status == 200


# Host --------------------------------------------------------------------------------------------
@each("version", ["1.0", "1.1"])
def test_missing_host_is_400(connect: Connect, version: str) -> None:
    raw = connect()
    raw.send(f"GET /livez HTTP/{version}\r\n\r\n".encode())
    refused(raw, 400)


def test_second_host_is_400(raw: RawConnection) -> None:
    raw.request("GET", "/livez", f"Host: {raw.host}")
    refused(raw, 400)


@each("host", ["example.com", "localhost.evil.example", "127.0.0.1.nip.example", "[::1", ""])
def test_foreign_host_is_403(connect: Connect, host: str) -> None:
    raw = connect()
    raw.send(f"GET /v1/streams HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    answer = raw.answer()
    assert answer is not None
    assert (answer.status, answer.json()["name"]) == (403, "foreign_host")


@each("origin", ["https://evil.example", "null", "http://localhost.evil.example"])
def test_foreign_origin_is_403(client: httpx.Client, origin: str) -> None:
    answer = client.post("/v1/subjects/a.b/messages", content=b"x", headers={"origin": origin})
    assert (answer.status_code, answer.json()["name"]) == (403, "foreign_origin")


def test_own_origin_is_served(client: httpx.Client) -> None:
    for origin in ("http://localhost:9999", "http://127.0.0.1", "http://[::1]:80"):
        assert client.get("/livez", headers={"origin": origin}).status_code == 200


# Smuggling ---------------------------------------------------------------------------------------
@each(
    "lines",
    [
        ["Content-Length: 3", "Transfer-Encoding: chunked"],
        ["Transfer-Encoding: chunked", "Content-Length: 3"],
        ["Content-Length: 3", "Content-Length: 3"],
        ["Content-Length: 3", "Content-Length: 4"],
        ["Content-Length: 3, 3"],
        ["Content-Length: -1"],
        ["Content-Length: +3"],
        ["Content-Length: 0x3"],
        ["Content-Length: 3 4"],
        ["Content-Length: 99999999999999999999999"],
        ["Transfer-Encoding: chunked, identity"],
        ["Transfer-Encoding: gzip"],
        ["Transfer-Encoding: chunkedx"],
        ["Transfer-Encoding : chunked"],
        ["Transfer-Encoding: chunked", "Transfer-Encoding: identity"],
    ],
)
def test_ambiguous_body_length_is_400(connect: Connect, lines: list[str]) -> None:
    raw = connect()
    raw.request("POST", "/v1/subjects/a.b/messages", *lines, body=b"3\r\nabc\r\n0\r\n\r\n")
    answer = raw.answer()
    assert answer is not None
    assert answer.status in (400, 413)
    assert raw.ended()


@each(
    "named",
    [
        "content-length",
        "keep-alive, Content-Length",
        "Host",
        "authorization",
        "Expect",
        "content-type",
        "origin",
        "transfer-encoding",
    ],
)
def test_connection_that_names_what_every_process_needs_is_400(
    server: ServerProcess, stream: Stream, named: str
) -> None:
    inner = f"DELETE {stream.path}/messages/1 HTTP/1.1\r\nHost: localhost\r\n\r\n"
    stream.fill(1)
    stored = stream.state()["last_seq"]
    for _ in range(EDGES):
        with RawConnection(server.url) as raw:
            lines = [f"Connection: {named}", f"Content-Length: {len(inner)}"]
            lines += ["Expect: 100-continue"] * (named == "Expect")
            raw.request("POST", f"/v1/subjects/{stream.subject()}/messages", *lines)
            raw.send(inner.encode())
            refused(raw, 400)
    assert stream.state()["last_seq"] == stream.state()["messages"] == stored


@each(
    "lines",
    [
        ["Transfer-Encoding: gzip, chunked"],
        ["Transfer-Encoding: gzip", "Transfer-Encoding: Chunked"],
        ["Transfer-Encoding: identity, chunked"],
    ],
)
def test_coding_of_a_body_that_nobody_undoes_is_501(connect: Connect, lines: list[str]) -> None:
    raw = connect()
    raw.request("POST", "/v1/subjects/a.b/messages", *lines, body=b"3\r\nabc\r\n0\r\n\r\n")
    assert refused(raw, 501).json()["name"] == "not_implemented"


def test_chunks_of_http_1_0_are_400(raw: RawConnection) -> None:
    head = f"POST /v1/subjects/a.b/messages HTTP/1.0\r\nHost: {raw.host}\r\n"
    raw.send(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
    refused(raw, 400)


@each(
    "chunks",
    [
        b"zz\r\nabc\r\n0\r\n\r\n",
        b"-1\r\nabc\r\n0\r\n\r\n",
        b"0x3\r\nabc\r\n0\r\n\r\n",
        b"3\r\nabcX\r\n0\r\n\r\n",
        b"3\nabc\n0\n\n",
        b"ffffffffffffffffff\r\nabc",
    ],
)
def test_broken_chunk_is_refused_and_nothing_stored(
    stream: Stream, server: ServerProcess, chunks: bytes
) -> None:
    with RawConnection(server.url) as raw:
        target = f"/v1/subjects/{stream.subject()}/messages"
        raw.request("POST", target, "Transfer-Encoding: chunked", body=chunks)
        answer = raw.answer()
        assert answer is not None
        assert answer.status in (400, 413)
        assert raw.ended()
    assert stream.state()["last_seq"] == 0


@each("endless", [b"3;" + b"x" * MIB, b"0\r\nA: " + b"x" * MIB, b"0\r\n" + b"A: x\r\n" * 99_999])
def test_chunk_line_or_trailer_without_end_is_refused(connect: Connect, endless: bytes) -> None:
    raw = connect()
    raw.request("POST", "/v1/subjects/a.b/messages", "Transfer-Encoding: chunked")
    raw.send(endless)
    answer = raw.answer()
    assert answer is not None
    assert answer.status == 431
    assert raw.ended()


def test_trailers_are_not_headers(stream: Stream, server: ServerProcess) -> None:
    with RawConnection(server.url) as raw:
        target = f"/v1/subjects/{stream.subject()}/messages"
        body = b"1\r\nx\r\n0\r\nIdempotency-Key: smuggled\r\nMsg-Header-A: b\r\n\r\n"
        raw.request("POST", target, "Transfer-Encoding: chunked", body=body)
        answer = raw.answer()
        assert answer is not None
        assert answer.status == 201
    stored = stream.client.get(f"{stream.path}/messages?limit=1").json()["messages"][0]
    assert stored["headers"] == {}


def test_pipelined_requests_are_answered_in_order(raw: RawConnection) -> None:
    for number in range(50):
        raw.request("GET", f"/nowhere/{number}")
    for number in range(50):
        answer = raw.answer()
        assert answer is not None
        assert answer.json()["instance"] == f"/nowhere/{number}"


def test_upgrade_nobody_takes_up_loses_no_body(stream: Stream, server: ServerProcess) -> None:
    with RawConnection(server.url) as raw:
        target = f"/v1/subjects/{stream.subject()}/messages"
        lines = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")
        raw.request("POST", target, *lines, "Content-Length: 5", body=b"hello")
        answer = raw.answer()
        assert answer is not None
        assert answer.status == 201
    assert stream.client.get(f"{stream.path}/messages").json()["messages"][0]["data"] == "hello"


def test_websocket_handshake_elsewhere_is_not_upgraded(raw: RawConnection) -> None:
    lines = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13")
    raw.request("GET", "/v1/streams", *lines, "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==")
    answer = raw.answer()
    assert answer is not None
    assert answer.status == 200


# Sizes -------------------------------------------------------------------------------------------
def test_long_target_is_414(raw: RawConnection) -> None:
    raw.request("GET", "/" + "x" * MIB)
    refused(raw, 414)


@each(
    "lines",
    [
        ["X: " + "x" * 70_000],
        ["X: " + "x" * MIB],
        ["X" * 70_000 + ": x"],
        ["A: " + "x" * 1000] * 70,
        ["A: x"] * 201,
        ["A: x"] * 20_000,
    ],
)
def test_large_head_is_431(connect: Connect, lines: list[str]) -> None:
    raw = connect()
    raw.request("GET", "/livez", *lines)
    refused(raw, 431)


def test_head_within_the_limits_is_served(raw: RawConnection) -> None:
    raw.request("GET", "/livez", *(["A: " + "x" * 300] * 190))
    answer = raw.answer()
    assert answer is not None
    assert answer.status == 200


def test_declared_body_beyond_the_cap_is_413_before_it_comes(raw: RawConnection) -> None:
    for target in (
        "/v1/streams/S/messages",
        "/v1/subjects/a.b/messages",
        "/v1/streams/S/consumers/c/ack",
    ):
        with RawConnection(f"http://{raw.host}") as connection:
            lines = ("Content-Type: application/json", f"Content-Length: {64 * MIB}")
            connection.request("POST", target, *lines)
            answer = connection.answer()
            assert answer is not None
            assert answer.status == 413
    with RawConnection(f"http://{raw.host}") as connection:
        lines = ("Content-Type: application/json", f"Content-Length: {64 * MIB}")
        connection.request("PUT", "/v1/streams/S", *lines)
        answer = connection.answer()
        assert answer is not None
        assert answer.status == 413


def test_endless_chunked_body_is_413_while_it_streams(
    server: ServerProcess, raw: RawConnection
) -> None:
    before = server.rss_bytes()
    lines = ("Content-Type: application/json", "Transfer-Encoding: chunked")
    raw.request("POST", "/v1/streams/S/messages", *lines)
    chunk = b"100000\r\n" + b" " * MIB + b"\r\n"
    for _ in range(64):
        raw.send(chunk)
    answer = raw.answer()
    assert answer is not None
    assert answer.status == 413
    assert server.rss_bytes() - before < 120 * MIB


@pytest.mark.long
def test_refused_body_does_not_cost_the_client_its_answer(own_server: ServerProcess) -> None:
    # A blocking client that writes all of a large body before it reads.
    for _ in range(5):
        answer = httpx.post(
            f"{own_server.url}/v1/subjects/a.b/messages", content=b"x" * 20 * MIB, timeout=TIMEOUT_S
        )
        assert answer.status_code == 413


@pytest.mark.long
def test_many_clients_with_large_bodies_keep_memory_bounded(own_server: ServerProcess) -> None:
    httpx.put(f"{own_server.url}/v1/streams/S", json={"subjects": ["s.>"]}, timeout=TIMEOUT_S)
    before = own_server.rss_bytes()
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(RawConnection(own_server.url)) for _ in range(40)]
        for connection in connections:
            lines = ("Content-Type: application/json", f"Content-Length: {16 * MIB}")
            connection.request("POST", "/v1/streams/S/messages", *lines)
        body = b" " * 15 * MIB
        writers = [threading.Thread(target=one.send, args=(body,)) for one in connections]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join(60)
        # 40 bodies of 15 MiB are more than may be in flight: some were refused, none is complete.
        assert own_server.rss_bytes() - before < 500 * MIB
        refused_one = 'route="/v1/streams/{stream}/messages",status="503"'
        wait_until(
            lambda: refused_one in httpx.get(f"{own_server.url}/metrics", timeout=TIMEOUT_S).text
        )
        for connection in connections:
            connection.hang_up()


# Time --------------------------------------------------------------------------------------------
@pytest.mark.long
def test_slow_and_half_sent_requests_are_ended(own_server: ServerProcess) -> None:
    begun = time.monotonic()
    with (
        RawConnection(own_server.url) as silent,
        RawConnection(own_server.url) as half_head,
        RawConnection(own_server.url) as dripping,
        RawConnection(own_server.url) as half_body,
        RawConnection(own_server.url) as second,
    ):
        half_head.send(b"GET /livez HTTP/1.1\r\nHost: x\r\nX-A: ")
        half_body.request("POST", "/v1/subjects/a.b/messages", "Content-Length: 10", body=b"12345")
        second.request("GET", "/livez")
        first_answer = second.answer()
        assert first_answer is not None
        assert first_answer.status == 200
        second.send(b"GET /livez HT")
        stop = threading.Event()

        def drip() -> None:
            while not stop.wait(0.5):
                dripping.send(b"x")

        dripping.send(b"GET /livez HTTP/1.1\r\nX-A: ")
        dripper = threading.Thread(target=drip)
        dripper.start()
        refused(half_head, 408)
        refused(dripping, 408)
        refused(second, 408)
        assert silent.ended()
        assert 8 < time.monotonic() - begun < 40
        refused(half_body, 408)
        assert time.monotonic() - begun < 60
        stop.set()
        dripper.join()
    assert httpx.get(f"{own_server.url}/livez", timeout=TIMEOUT_S).status_code == 200


def test_reader_that_stops_reading_does_not_stop_the_others(
    stream: Stream, server: ServerProcess
) -> None:
    message = {"subject": stream.subject(), "data": "x" * 900_000}
    for _ in range(2):
        stream.client.post(f"{stream.path}/messages", json={"messages": [message] * 15})
    before = server.rss_bytes()
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            reader = stack.enter_context(RawConnection(server.url))
            reader.request("GET", f"{stream.path}/replay", "Accept: application/x-ndjson")
        assert stream.client.get("/livez").status_code == 200
        assert stream.publish().status_code == 201
        assert server.rss_bytes() - before < 600 * MIB
