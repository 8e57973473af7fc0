"""The HTTP protocol on real sockets: deadlines, caps and what a connection may hold."""

import asyncio
import socket
import threading
from collections.abc import Coroutine
from typing import Any

import pytest
import uvloop

from contrail_common import errors
from contrail_common.errors import ApiError
from tests.support.each import each
from tests.unit.edge.edge_rig import Edge
from tests.unit.edge.edge_serving import SOON_S, serving, wait_until

HEAD = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
PUBLISH = b"POST /v1/subjects/a.b/messages HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = PUBLISH + b"Transfer-Encoding: chunked\r\n\r\n"
DIRECT = PUBLISH + b"Content-Length: 1\r\n\r\nx"


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


def test_idle_connection_is_closed_after_the_keep_alive_time() -> None:
    async def scenario() -> None:
        edge = Edge(keep_alive_s=1)
        async with serving(edge) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(HEAD)
            answer = await asyncio.wait_for(reader.read(), SOON_S)
            assert answer.startswith(b"HTTP/1.1 200")
            writer.close()

    run(scenario())


@pytest.mark.parametrize("sent", [b"", b"\r\n\r\n"])
def test_connection_that_sends_no_request_is_closed_without_a_word(sent: bytes) -> None:
    async def scenario() -> None:
        edge = Edge(head_timeout_s=0.2)
        async with serving(edge) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            assert await asyncio.wait_for(reader.read(), SOON_S) == b""
            writer.close()

    run(scenario())


@each(
    "half",
    [
        b"G",
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX: ",
        PUBLISH + b"Content-Length: 5\r\n\r\nab",
        PUBLISH + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab",
        HEAD + b"GET /l",
    ],
)
def test_half_a_request_is_answered_408_at_its_deadline(half: bytes) -> None:
    async def scenario() -> None:
        edge = Edge(head_timeout_s=0.2, body_idle_s=0.2)
        async with serving(edge) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(half)
            answer = await asyncio.wait_for(reader.read(), SOON_S)
            assert b"HTTP/1.1 408 Request Timeout" in answer
            assert b"application/problem+json" in answer
            writer.close()
        assert edge.link.published == []
        assert b'contrail_http_refused_total{name="request_timeout"} 1.0' in edge.app.metrics.text()

    run(scenario())


@pytest.mark.parametrize(
    ("before", "late", "answers"),
    [
        (b"", HEAD, 1),
        (HEAD[:9], HEAD[9:], 1),
        (CHUNKED + b"2\r\nab\r\n", b"0\r\n\r\n", 1),
        (HEAD, HEAD, 2),
        (DIRECT, HEAD, 2),
    ],
    ids=["first-head", "half-a-head", "half-a-body", "next-request", "next-behind-direct"],
)
def test_request_that_came_while_the_server_was_busy_is_answered(
    before: bytes, late: bytes, answers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes lie in the socket's buffer when the loop finds that their time is over."""

    async def scenario() -> bool:
        """Whether the server became busy before the deadline, which a loaded machine may miss."""
        edge = Edge(head_timeout_s=0.3, body_idle_s=0.3, keep_alive_s=1)
        loop = asyncio.get_running_loop()
        async with serving(edge) as (port, server):
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.setblocking(False)
                client.sendall(before)
                got = b""
                while got.count(b"HTTP/1.1 2") < answers - 1:
                    got += await asyncio.wait_for(loop.sock_recv(client, 1 << 16), SOON_S)
                await wait_until(lambda: bool(server.server_state.connections))
                [connection] = server.server_state.connections
                if before and not got:
                    await wait_until(lambda: connection._begun or connection._body_open)

                publish_then = edge.link.publish_then
                late_already = False

                def hold_up(*_: object) -> None:
                    nonlocal late_already
                    monkeypatch.setattr(edge.link, "publish_then", publish_then)
                    late_already = connection.transport.is_closing()
                    # Beyond each of the deadlines. Sockets are read next after the timers only
                    # where what holds the loop up is itself a socket that is read.
                    client.sendall(late)
                    threading.Event().wait(1.2)
                    raise ApiError(errors.OVERLOADED)

                monkeypatch.setattr(edge.link, "publish_then", hold_up)
                with socket.create_connection(("127.0.0.1", port)) as other:
                    other.sendall(DIRECT)
                    other.setblocking(False)
                    refusal = await asyncio.wait_for(loop.sock_recv(other, 1 << 16), SOON_S)
                    assert b"overloaded" in refusal
                if late_already:
                    return False
                while got.count(b"HTTP/1.1 2") < answers:
                    piece = await asyncio.wait_for(loop.sock_recv(client, 1 << 16), SOON_S)
                    assert piece, "closed without an answer"
                    got += piece
        return True

    assert any(uvloop.run(scenario()) for _ in range(20))


def test_body_that_drips_is_ended_after_a_window_with_too_little_of_it() -> None:
    async def scenario() -> None:
        edge = Edge(body_idle_s=0.3, body_window_s=0.6)
        async with serving(edge) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(PUBLISH + b"Content-Length: 1000\r\n\r\n")
            answer = asyncio.create_task(reader.read())
            while not answer.done():
                writer.write(b"x")
                await asyncio.wait({answer}, timeout=0.05)
            assert answer.result().startswith(b"HTTP/1.1 408")
            writer.close()

    run(scenario())


@pytest.mark.parametrize(("piece_bytes", "status"), [(100, b"HTTP/1.1 201"), (5, b"HTTP/1.1 408")])
def test_body_may_take_many_windows_while_each_brings_enough(
    piece_bytes: int, status: bytes
) -> None:
    async def scenario() -> None:
        edge = Edge(body_idle_s=1.0, body_window_s=0.5, body_window_bytes_min=100)
        pieces = 24 * [b"x" * piece_bytes]
        async with serving(edge) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(PUBLISH + b"Content-Length: %d\r\n\r\n" % sum(map(len, pieces)))
            answer = asyncio.create_task(reader.readline())
            for piece in pieces:
                writer.write(piece)
                await asyncio.wait({answer}, timeout=0.1)  # 2.4 s in all: two looks at it
            assert (await asyncio.wait_for(answer, SOON_S)).startswith(status)
            writer.close()

    run(scenario())


def test_connections_beyond_the_cap_are_answered_503() -> None:
    async def scenario() -> None:
        edge = Edge(connections_max=2)
        async with serving(edge) as (port, _):
            kept = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            for reader, writer in kept:
                writer.write(HEAD)
                assert b"200" in await asyncio.wait_for(reader.readline(), SOON_S)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            answer = await asyncio.wait_for(reader.read(), SOON_S)
            assert answer.startswith(b"HTTP/1.1 503")
            assert b"retry-after: 1" in answer
            for _, one in [*kept, (reader, writer)]:
                one.close()

    run(scenario())


@pytest.mark.parametrize("fast_lane", [True, False])
def test_pieces_of_a_chunk_are_one_chunk_on_the_wire(fast_lane: bool) -> None:
    async def scenario() -> None:
        edge = Edge(fast_lane=fast_lane)
        edge.link.replay_chunks = [(b"one ", b"", b"two"), (b"",), (b"three",)]
        async with serving(edge) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            get = b"GET /v1/streams/S/replay HTTP/1.1\r\nHost: localhost\r\n"
            writer.write(get + b"\r\n" + get + b"Connection: close\r\n\r\n")
            answer = await asyncio.wait_for(reader.read(), SOON_S)
            assert answer.count(b"\r\n\r\n7\r\none two\r\n5\r\nthree\r\n0\r\n\r\n") == 2
            writer.close()

    run(scenario())


@pytest.mark.long
@pytest.mark.parametrize("size", [1 << 20, 64 << 20])
def test_slow_reader_gets_all_pieces_in_order(size: int) -> None:
    async def scenario() -> None:
        edge = Edge()
        chunk = tuple(bytes([letter]) * (size >> 6) for letter in range(1, 65))
        edge.link.replay_chunks = [chunk, chunk]
        async with serving(edge) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
            writer.write(b"GET /v1/streams/S/replay HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SOON_S)
            for _ in range(2):
                assert int(await reader.readline(), 16) == size
                assert await asyncio.wait_for(reader.readexactly(size), SOON_S) == b"".join(chunk)
                assert await reader.readline() == b"\r\n"
            assert await reader.readline() == b"0\r\n"
            writer.close()

    run(scenario())


@pytest.mark.parametrize("pieces", [1, 64])
def test_reader_that_never_reads_is_cut_and_its_stream_given_up(pieces: int) -> None:
    async def scenario() -> None:
        edge = Edge(write_stall_s=0.3)
        chunk = (b"x" * ((1 << 20) // pieces),) * pieces
        edge.link.replay_chunks = [chunk if pieces > 1 else chunk[0]] * 64
        async with serving(edge) as (port, server):
            deaf = socket.create_connection(("127.0.0.1", port))
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.sendall(b"GET /v1/streams/S/replay HTTP/1.1\r\nHost: localhost\r\n\r\n")
            state = server.server_state
            await wait_until(lambda: bool(state.tasks))
            await wait_until(lambda: not state.connections and not state.tasks)
            deaf.close()

    run(scenario())


READ = b"GET /v1/streams/S/messages?wait=60s HTTP/1.1\r\nHost: localhost\r\n\r\n"
PULL = (
    b"POST /v1/streams/S/consumers/c/next HTTP/1.1\r\nHost: localhost\r\n"
    b'Content-Type: application/json\r\nContent-Length: 17\r\n\r\n{"expires":"60s"}'
)


@pytest.mark.parametrize("fast_lane", [True, False])
@pytest.mark.parametrize("later", [True, False])
@pytest.mark.parametrize("wait", [READ, PULL], ids=["read", "pull"])
def test_client_that_leaves_after_a_pipelined_request_is_noticed(
    wait: bytes, later: bool, fast_lane: bool
) -> None:
    async def scenario() -> None:
        edge = Edge(fast_lane=fast_lane)
        async with serving(edge) as (port, server):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(wait if later else wait + HEAD)
            await asyncio.wait_for(edge.link.waiting.wait(), SOON_S)
            if later:
                [connection] = server.server_state.connections
                writer.write(HEAD)
                await wait_until(lambda: bool(connection.pipeline))
            writer.transport.abort()
            await asyncio.wait_for(edge.link.cancelled.wait(), SOON_S)

    run(scenario())


def test_garbage_after_a_running_request_lets_its_answer_through() -> None:
    async def scenario() -> None:
        edge = Edge()
        async with serving(edge) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /v1/streams/S/messages?wait=60s HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await asyncio.wait_for(edge.link.waiting.wait(), SOON_S)
            writer.write(b"GARBAGE\r\n\r\n")
            edge.app.drain()
            answer = await asyncio.wait_for(reader.read(), SOON_S)
            assert answer.count(b"HTTP/1.1") == 1
            assert b"shutting_down" in answer
            writer.close()

    run(scenario())


def test_garbage_behind_a_slow_reader_takes_no_answer_away_and_no_place_of_one() -> None:
    async def scenario() -> None:
        edge = Edge()
        edge.link.in_memory, edge.link.payload = True, bytes(1 << 20)
        async with serving(edge) as (port, _):
            slow = socket.create_connection(("127.0.0.1", port))
            get = b"GET /v1/streams/S/messages/7 HTTP/1.1\r\nHost: localhost\r\n\r\n"
            slow.sendall(get * 32 + b"GARBAGE\r\n\r\n")
            await wait_until(
                lambda: b'refused_total{name="bad_request"} 1.0' in edge.app.metrics.text()
            )
            slow.setblocking(False)
            loop, received = asyncio.get_running_loop(), bytearray()
            while some := await asyncio.wait_for(loop.sock_recv(slow, 1 << 14), SOON_S):
                received += some
            answers = received.count(b"HTTP/1.1 200")
            assert 0 < answers < 32
            assert received.count(b"HTTP/1.1") == answers
            assert received.count(0) == answers << 20
            slow.close()

    run(scenario())


HANDSHAKE = (
    b"GET /v1/ws HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


@pytest.mark.parametrize("waits", ["directly", "in the application"])
def test_handshake_behind_a_publish_that_is_being_stored_lets_its_answer_through(
    waits: str,
) -> None:
    async def scenario() -> None:
        edge = Edge(fast_lane=waits == "directly")
        edge.link.outcomes = []
        async with serving(edge) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(DIRECT + HANDSHAKE)
            await wait_until(lambda: bool(edge.link.outcomes))
            await wait_until(
                lambda: b'refused_total{name="bad_request"} 1.0' in edge.app.metrics.text()
            )
            edge.link.outcomes[0]()
            answer = await asyncio.wait_for(reader.read(), SOON_S)
            assert answer.startswith(b"HTTP/1.1 201")
            assert answer.count(b"HTTP/1.1") == 1
            writer.close()

    run(scenario())


@pytest.mark.parametrize("fast_lane", [True, False])
def test_bytes_behind_the_last_request_after_an_offer_do_not_refuse_it(fast_lane: bool) -> None:
    async def scenario() -> None:
        edge = Edge(fast_lane=fast_lane)
        offer = HEAD.replace(b"\r\n\r\n", b"\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n")
        async with serving(edge) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(offer)
            await asyncio.wait_for(reader.readuntil(b"}"), SOON_S)
            edge.link.outcomes = []
            last = PUBLISH + b"Content-Length: 1\r\nConnection: close\r\n\r\nx"
            writer.write(last + b"G")
            await wait_until(lambda: bool(edge.link.outcomes))
            edge.link.outcomes[0]()
            answer = await asyncio.wait_for(reader.read(), SOON_S)
            assert answer.startswith(b"HTTP/1.1 201")
            assert answer.count(b"HTTP/1.1") == 1
            assert b"contrail_http_refused_total{" not in edge.app.metrics.text()
            writer.close()

    run(scenario())


@each("count", [1, 2, 50])
def test_offers_of_another_protocol_in_one_segment_are_all_answered(count: int) -> None:
    async def scenario() -> None:
        offer = (
            b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
        )
        edge = Edge()
        async with serving(edge) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            asked = PUBLISH + b"Content-Length: 5\r\n" + offer + b"\r\nhello"
            writer.write(
                asked * count + HEAD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
            )
            answers = await asyncio.wait_for(reader.read(), SOON_S)
            assert answers.count(b"HTTP/1.1 201") == count
            assert answers.count(b"HTTP/1.1 200") == 1
            writer.close()
        assert [one.payload for [one] in edge.link.published] == [b"hello"] * count

    run(scenario())


def test_offer_of_another_protocol_above_the_limit_of_pipelined_requests_is_refused() -> None:
    """The head is read a second time, without the offer; what is wrong with it then counts too."""

    async def scenario() -> None:
        edge = Edge(pipelined_max=2)
        wait = b"GET /v1/streams/S/messages?wait=60s HTTP/1.1\r\nHost: localhost\r\n\r\n"
        offer = (
            b"GET /v1 HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
        )
        async with serving(edge) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(wait)
            await asyncio.wait_for(edge.link.waiting.wait(), SOON_S)
            writer.write(offer * 3)
            await wait_until(
                lambda: b'refused_total{name="overloaded"} 1.0' in edge.app.metrics.text()
            )
            edge.app.drain()
            answer = await asyncio.wait_for(reader.read(), SOON_S)
            assert answer.count(b"HTTP/1.1") == 1
            assert b"shutting_down" in answer
            writer.close()

    run(scenario())


def test_connect_is_for_proxies() -> None:
    async def scenario() -> None:
        async with serving(Edge()) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            target = b"localhost:%d" % port
            writer.write(b"CONNECT %b HTTP/1.1\r\nHost: %b\r\n\r\n" % (target, target))
            assert (await asyncio.wait_for(reader.read(), SOON_S)).startswith(b"HTTP/1.1 400")
            writer.close()

    run(scenario())
