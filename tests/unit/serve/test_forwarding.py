"""What a peer is asked, what the client is told, and what happens when either is gone."""

import asyncio

import pytest

from contrail_serve.forwarding.connection import PeerConnection, PeerLostError
from tests.support.each import each
from tests.support.handshake import HANDSHAKE
from tests.support.ports import HOST, free_port
from tests.unit.serve.peer_rig import OK, Front, Line, Peer, front, run, until

NEXT = "/v1/streams/S/consumers/c/next"
MIB = 1 << 20


async def answered(client: Line, *expected: bytes) -> bytes:
    head = await client.head()
    for one in expected:
        assert one in head, head
    return head


def dead_address() -> tuple[str, int]:
    return HOST, free_port()


# What is passed on -------------------------------------------------------------------------------
def test_request_and_answer_are_passed_on_without_what_belongs_to_one_connection() -> None:
    async def scenario() -> None:
        async with Peer() as peer, front(peer.address) as edge:
            client = await edge.ask(
                "POST",
                "/v1/subjects/a%20b/messages?ack=x",
                "Connection: close, X-Hop",
                "X-Hop: 1",
                "Keep-Alive: 3",
                "TE: trailers",
                "Authorization: Bearer t",
                "X-Request-Id: trace-7",
                "Msg-Header-A: b",
                body=b"hello",
            )
            line = await peer.line()
            head = (await line.head()).lower()
            assert head.startswith(b"post /v1/subjects/a%20b/messages?ack=x http/1.1\r\n")
            for kept in (b"host: 127.0.0.1", b"authorization: bearer t", b"msg-header-a: b"):
                assert kept in head
            assert head.count(b"x-request-id: trace-7") == 1
            assert b"contrail-forwarded: 1" in head
            for dropped in (b"x-hop", b"keep-alive", b"te:", b"connection:"):
                assert dropped not in head
            assert await line.exactly(5) == b"hello"
            line.send(
                b"HTTP/1.1 409 Conflict\r\ndate: then\r\nretry-after: 3\r\nconnection: x-own\r\n"
                b"x-own: 1\r\nx-request-id: trace-7\r\ncontent-type: application/problem+json\r\n"
                b"content-length: 2\r\n\r\n{}"
            )
            head = await answered(client, b"HTTP/1.1 409", b"retry-after: 3", b"content-length: 2")
            assert head.count(b"x-request-id") == head.count(b"date:") == 1
            assert b"x-own" not in head
            assert await client.exactly(2) == b"{}"

    run(scenario())


@each(
    ("lines", "body", "framing", "sent"),
    [
        (("Content-Length: 5",), b"hello", b"content-length: 5", b"hello"),
        (("Content-Length: 0",), b"", b"content-length: 0", b""),
        ((f"Content-Length: {70 << 10}",), bytes(70 << 10), b"content-length: 71680", None),
        (
            ("Transfer-Encoding: Chunked",),
            b"5;x=y\r\nhello\r\n0\r\nX-Trailer: 9\r\n\r\n",
            b"transfer-encoding: chunked",
            b"5\r\nhello\r\n0\r\n\r\n",
        ),
    ],
)
def test_framing_of_a_body_is_written_again(
    lines: tuple[str, ...], body: bytes, framing: bytes, sent: bytes | None
) -> None:
    async def scenario() -> None:
        async with Peer() as peer, front(peer.address) as edge:
            client = await edge.ask("POST", "/v1/streams/S/messages", *lines)
            client.send(body)
            line = await peer.line()
            head = (await line.head()).lower()
            assert framing in head
            assert head.count(b"content-length") + head.count(b"transfer-encoding") == 1
            whole = body if sent is None else sent
            assert await line.exactly(len(whole)) == whole
            line.send(OK)
            await answered(client, b"HTTP/1.1 200")
            # Nothing was left behind: the connection is kept, and the next head begins at once.
            client.send(b"GET /v1/streams HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await line.head()).startswith(b"GET /v1/streams HTTP/1.1\r\n")
            line.send(OK)
            await answered(client, b"HTTP/1.1 200")

    run(scenario())


@each(
    "said",
    [
        OK + OK,
        OK + b"H",
        OK + b"x",
        b"HTTP/1.1 200 OK\r\nConnection: content-length\r\nContent-Length: 2\r\n\r\nok" + OK,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n" + OK,
        b"HTTP/1.1 103 Early Hints\r\nX-A: 1\r\n\r\n" + OK + OK,
    ],
)
def test_connection_with_bytes_left_over_is_not_kept(said: bytes) -> None:
    async def scenario() -> None:
        async with Peer() as peer, front(peer.address) as edge:
            client = await edge.ask("GET", "/v1/streams")
            line = await peer.line()
            await line.head()
            line.send(said)
            head = await answered(client, b"HTTP/1.1 200", b"content-length: 2")
            assert head.count(b"content-length") == 1
            assert b"x-a" not in head
            assert await client.exactly(2) == b"ok"
            assert await line.rest() == b""
            client.send(b"GET /v1/streams HTTP/1.1\r\nHost: localhost\r\n\r\n")
            line = await peer.line()
            await line.head()
            line.send(OK)
            await answered(client, b"HTTP/1.1 200")
            assert peer.accepted == 2

    run(scenario())


def test_body_after_the_answer_to_head_is_dropped() -> None:
    async def scenario() -> None:
        async with Peer() as peer, front(peer.address) as edge:
            client = await edge.ask("HEAD", "/v1/streams")
            line = await peer.line()
            await line.head()
            line.send(OK)
            await answered(client, b"HTTP/1.1 200", b"content-length: 2")
            assert await line.rest() == b""

    run(scenario())


def test_connection_whose_body_was_never_sent_is_not_kept() -> None:
    async def scenario() -> None:
        async with Peer() as peer, front(peer.address) as edge:
            client = await edge.ask(
                "POST", "/v1/streams/S/messages", "Expect: 100-continue", "Content-Length: 3"
            )
            line = await peer.line()
            await line.head()
            line.send(OK)
            await answered(client, b"HTTP/1.1 200")
            assert await line.rest() == b""

    run(scenario())


def test_request_that_was_forwarded_is_refused() -> None:
    async def scenario() -> None:
        async with Peer() as peer, front(peer.address) as edge:
            for lines in ((), HANDSHAKE):
                target = "/v1/ws" if lines else "/v1/streams"
                client = await edge.ask("GET", target, "Contrail-Forwarded: 1", *lines)
                await answered(client, b"HTTP/1.1 503")
            assert peer.accepted == 0

    run(scenario())


def test_connection_is_used_again_and_answers_stay_with_their_requests() -> None:
    async def scenario() -> None:
        async with Peer() as peer, front(peer.address) as edge:
            client = await edge.line()
            line = None
            for method in ("GET", "HEAD", "GET"):
                client.send(b"%b /v1/streams HTTP/1.1\r\nHost: localhost\r\n\r\n" % method.encode())
                line = line or await peer.line()
                assert (await line.head()).startswith(method.encode())
                line.send(OK if method == "GET" else OK[:-2])
                await answered(client, b"HTTP/1.1 200", b"content-length: 2")
                if method == "GET":
                    assert await client.exactly(2) == b"ok"
            assert peer.accepted == 1

    run(scenario())


def test_body_that_waits_to_be_asked_for_is_asked_for_by_the_peer() -> None:
    async def scenario() -> None:
        async with Peer() as peer, front(peer.address) as edge:
            client = await edge.ask(
                "POST", "/v1/streams/S/messages", "Expect: 100-continue", "Content-Length: 3"
            )
            line = await peer.line()
            assert b"100-continue" in await line.head()
            line.send(b"HTTP/1.1 100 Continue\r\n\r\n")
            await answered(client, b"HTTP/1.1 100")
            client.send(b"abc")
            assert await line.exactly(3) == b"abc"
            line.send(OK)
            await answered(client, b"HTTP/1.1 200")

    run(scenario())


def test_body_that_was_refused_before_it_came_is_never_asked_for() -> None:
    async def scenario() -> None:
        async with Peer() as peer, front(peer.address) as edge:
            client = await edge.ask(
                "POST", "/v1/streams/S/messages", "Expect: 100-continue", "Content-Length: 3"
            )
            line = await peer.line()
            await line.head()
            line.send(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n")
            head = await answered(client, b"HTTP/1.1 413")
            assert b"100 Continue" not in head

    run(scenario())


def test_answer_begins_while_the_body_still_comes() -> None:
    async def scenario() -> None:
        async with Peer() as peer, front(peer.address) as edge:
            client = await edge.ask("POST", "/v1/streams/S/messages", "Transfer-Encoding: chunked")
            client.send(b"3\r\none\r\n")
            line = await peer.line()
            await line.head()
            assert await line.exactly(8) == b"3\r\none\r\n"
            line.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nack1\r\n")
            await answered(client, b"HTTP/1.1 200")
            assert await client.exactly(9) == b"4\r\nack1\r\n"
            client.send(b"3\r\ntwo\r\n0\r\n\r\n")
            assert await line.exactly(13) == b"3\r\ntwo\r\n0\r\n\r\n"
            line.send(b"4\r\nack2\r\n0\r\n\r\n")
            assert await client.exactly(14) == b"4\r\nack2\r\n0\r\n\r\n"

    run(scenario())


# Slow ends ---------------------------------------------------------------------------------------
async def swallowed(writer: asyncio.StreamWriter, piece: bytes, most: int) -> int:
    """How many bytes the other end takes before it takes no more."""
    sent = 0
    while sent < most:
        writer.write(piece)
        try:
            async with asyncio.timeout(0.5):
                await writer.drain()
        except TimeoutError:
            return sent
        sent += len(piece)
    return sent


def test_answer_that_is_not_read_is_not_taken_from_the_peer() -> None:
    async def scenario() -> None:
        async with Peer() as peer, front(peer.address) as edge:
            await edge.ask("GET", "/v1/streams/S/replay")
            line = await peer.line()
            await line.head()
            line.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (200 * MIB))
            assert await swallowed(line.writer, bytes(MIB), 200 * MIB) < 60 * MIB
            line.end()

    run(scenario())


def test_body_that_the_peer_does_not_read_is_not_taken_from_the_client() -> None:
    async def scenario() -> None:
        async with Peer() as peer, front(peer.address) as edge:
            client = await edge.ask(
                "POST", "/v1/streams/S/messages", f"Content-Length: {200 * MIB}"
            )
            line = await peer.line()
            await line.head()
            assert await swallowed(client.writer, bytes(MIB), 200 * MIB) < 60 * MIB
            client.end()
            line.end()

    run(scenario())


# Losses ------------------------------------------------------------------------------------------
def test_peer_that_does_not_answer_is_passed_over() -> None:
    async def scenario() -> None:
        async with Peer() as peer, front(dead_address(), peer.address) as edge:
            client = await edge.ask("POST", NEXT)
            line = await peer.line()
            for _ in range(4):
                await line.head()
                line.send(OK)
                await answered(client, b"HTTP/1.1 200")
                client = await edge.ask("POST", NEXT)

    run(scenario())


def test_no_peer_at_all_is_503() -> None:
    async def scenario() -> None:
        async with front(dead_address()) as edge, front() as lonely:
            for one in (edge, lonely):
                client = await one.ask("POST", NEXT)
                await answered(client, b"HTTP/1.1 503", b"retry-after: 1")
                client = await one.ask("GET", "/v1/ws", *HANDSHAKE)
                await answered(client, b"HTTP/1.1 503", b"retry-after: 1", b"x-request-id")

    run(scenario())


@pytest.mark.parametrize("kept", [False, True])
def test_read_whose_peer_is_lost_is_asked_of_the_next(kept: bool) -> None:
    async def scenario() -> None:
        async with Peer() as one, Peer() as two, front(one.address, two.address) as edge:
            if kept:
                await use_once(edge, one, two)
            client = await edge.ask("GET", "/v1/streams")
            first = await arrived(one, two) if not kept else None
            if first is not None:
                await first.head()
                first.end()
            second = await arrived(one, two)
            await second.head()
            second.send(OK)
            await answered(client, b"HTTP/1.1 200")

    run(scenario())


async def arrived(*peers: Peer) -> Line:
    """The connection that comes in first at any of ``peers``."""
    tasks = [asyncio.create_task(peer.line()) for peer in peers]
    done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in rest:
        task.cancel()
    return done.pop().result()


async def use_once(edge: Front, *peers: Peer) -> None:
    """Leave behind a kept connection whose other end closes as soon as it is used."""
    client = await edge.ask("GET", "/v1/streams")
    line = await arrived(*peers)
    await line.head()
    line.send(OK)
    await answered(client, b"HTTP/1.1 200")
    line.writer.close()


@each("said", [b"", b"HTTP/1.1 20", OK[:-1], b"nonsense\r\n\r\n"])
def test_change_whose_peer_is_lost_has_an_unknown_outcome(said: bytes) -> None:
    async def scenario() -> None:
        async with Peer() as peer, front(peer.address) as edge:
            client = await edge.ask("POST", "/v1/subjects/a.b/messages", body=b"x")
            line = await peer.line()
            await line.head()
            line.send(said)
            await line.writer.drain()
            line.end()
            await answered(client, b"HTTP/1.1 504")
            assert peer.accepted == 1

    run(scenario())


def test_nothing_is_written_to_a_connection_that_was_given_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        async with Peer() as peer:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(
                lambda: PeerConnection(peer.address), *peer.address
            )
            connection.abort()  # as when its answer makes no sense and the body still comes
            for _ in range(10):
                with pytest.raises(PeerLostError):
                    await connection.send(b"x")

    run(scenario())
    assert caplog.messages == []


def test_peer_that_never_answers_leaves_the_outcome_unknown() -> None:
    async def scenario() -> None:
        async with Peer() as peer, front(peer.address, answer_s=0.05) as edge:
            client = await edge.ask("POST", "/v1/subjects/a/messages", body=b"x")
            await peer.line()
            await answered(client, b"HTTP/1.1 504")

    run(scenario())


def test_stream_whose_peer_is_lost_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with Peer() as peer, front(peer.address) as edge:
            client = await edge.ask("GET", "/v1/streams/S/replay")
            line = await peer.line()
            await line.head()
            line.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n")
            await answered(client, b"HTTP/1.1 200")
            line.end()
            assert not (await client.rest()).endswith(b"0\r\n\r\n")

    run(scenario())
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("begun", [False, True])
def test_client_that_leaves_is_not_waited_for(begun: bool) -> None:
    async def scenario() -> None:
        async with Peer() as peer, front(peer.address) as edge:
            client = await edge.ask("POST", NEXT, body=b"{}")
            line = await peer.line()
            await line.head()
            await line.exactly(2)
            if begun:
                line.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n")
                await answered(client, b"HTTP/1.1 200")
            client.end()
            ended = asyncio.create_task(line.rest())
            while begun and not ended.done():
                line.send(b"2\r\nab\r\n")  # a stream's reader is missed when something is sent
                await asyncio.sleep(0)
            assert await ended == b""

    run(scenario())


def test_waiting_request_is_answered_when_the_process_stops() -> None:
    async def scenario() -> None:
        async with Peer() as peer, front(peer.address) as edge:
            client = await edge.ask("POST", NEXT)
            line = await peer.line()
            await line.head()
            edge.forwarder.drain()
            await answered(client, b"HTTP/1.1 503")
            assert await line.rest() == b""

    run(scenario())


# Upgrades ----------------------------------------------------------------------------------------
def test_upgraded_connection_is_joined_byte_by_byte_both_ways() -> None:
    async def scenario() -> None:
        async with Peer() as peer, front(peer.address) as edge:
            client = await edge.ask("GET", "/v1/ws", "X-Request-Id: abc", *HANDSHAKE)
            client.send(b"early")
            line = await peer.line()
            head = await line.head()
            for one in (*HANDSHAKE, "x-request-id: abc", "contrail-forwarded: 1"):
                assert one.lower().encode() in head.lower()
            assert await line.exactly(5) == b"early"
            line.send(b"HTTP/1.1 101 Switching Protocols\r\n\r\n\x81\x01a")
            await answered(client, b"101")
            assert await client.exactly(3) == b"\x81\x01a"
            client.send(bytes(range(256)) * 4_000)
            assert await line.exactly(1_024_000) == bytes(range(256)) * 4_000
            line.writer.close()
            assert await client.rest() == b""

    run(scenario())


def test_joined_connection_whose_reader_is_slow_is_read_no_further() -> None:
    async def scenario() -> None:
        async with Peer() as peer, front(peer.address) as edge:
            await edge.ask("GET", "/v1/ws", *HANDSHAKE)
            line = await peer.line()
            await line.head()
            assert await swallowed(line.writer, bytes(MIB), 200 * MIB) < 60 * MIB
            line.end()

    run(scenario())


def test_joined_connection_ends_with_either_end() -> None:
    async def scenario() -> None:
        async with Peer() as peer, front(peer.address) as edge:
            client = await edge.ask("GET", "/v1/ws", *HANDSHAKE)
            line = await peer.line()
            await line.head()
            client.end()
            assert await line.rest() == b""
            await until(lambda: not edge.server.server_state.connections)

    run(scenario())


def test_side_that_a_peer_ends_is_ended_towards_the_client_alone() -> None:
    async def scenario() -> None:
        async with Peer() as peer, front(peer.address) as edge:
            client = await edge.ask("GET", "/v1/ws", *HANDSHAKE)
            line = await peer.line()
            await line.head()
            line.send(b"HTTP/1.1 101 Switching Protocols\r\n\r\n\x88\x02\x11\xa1")
            line.writer.write_eof()
            assert (await client.rest()).endswith(b"\x88\x02\x11\xa1")
            client.send(bytes(MIB))
            assert await line.exactly(MIB) == bytes(MIB)
            client.writer.write_eof()
            assert await line.rest() == b""
            line.end()
            await until(lambda: not edge.server.server_state.connections)

    run(scenario())


@pytest.mark.long
@pytest.mark.parametrize("target", ["/v1/streams/S/replay", "/v1/ws"])
def test_what_clients_do_not_read_of_peers_is_bounded_over_all_connections(target: str) -> None:
    async def scenario() -> None:
        bound = 2 * MIB
        async with Peer() as peer, front(peer.address, unread_bytes_of_all_max=bound) as edge:
            for _ in range(40):
                lines = HANDSHAKE if target == "/v1/ws" else ()
                client = await edge.ask("GET", target, *lines)
                client.writer.transport.pause_reading()
                line = await peer.line()
                await line.head()
                line.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (9 * MIB))
                line.send(bytes(9 * MIB))
                assert edge.unread.held <= bound
            await until(lambda: edge.unread.cut > 0)
            assert edge.unread.held <= bound

    run(scenario())


def test_joined_connection_ends_when_the_process_stops() -> None:
    async def scenario() -> None:
        async with Peer() as peer:
            async with front(peer.address) as edge:
                client = await edge.ask("GET", "/v1/ws", *HANDSHAKE)
                line = await peer.line()
                await line.head()
            assert await line.rest() == b""
            assert await client.rest() == b""

    run(scenario())
