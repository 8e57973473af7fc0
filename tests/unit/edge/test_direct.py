"""Requests that the protocol answers without the application, on real sockets."""

import asyncio
import gc
import json
import re
import socket
import weakref
from collections.abc import Awaitable, Callable

import pytest

from contrail_api.publishing.batch import BATCH_DIRECT_BYTES_MAX, BatchPublish
from contrail_api.publishing.candidates import Admitted
from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_edge.routing import DIRECT_BODY_BYTES_MAX, Reply
from tests.unit.edge.edge_rig import Edge
from tests.unit.edge.test_http_protocol import HEAD, SOON_S, run, serving, wait_until

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
SEQ = re.compile(rb'"seq":(\d+)')


def publish(body: bytes, *lines: bytes, version: bytes = b"1.1") -> bytes:
    head = [
        b"POST /v1/subjects/a.b/messages HTTP/" + version,
        b"Host: localhost",
        b"Content-Length: %d" % len(body),
        *lines,
    ]
    return b"\r\n".join([*head, b"", body])


def connected(scenario: Callable[[Edge, Streams], Awaitable[None]], **settings: float) -> None:
    """Run ``scenario`` with an edge and one connection to it."""

    async def scene() -> None:
        edge = Edge(**settings)
        async with serving(edge) as (port, _):
            streams = await asyncio.open_connection("127.0.0.1", port)
            async with asyncio.timeout(SOON_S):
                await scenario(edge, streams)
            streams[1].close()

    run(scene())


async def answers(reader: asyncio.StreamReader, count: int) -> bytes:
    """Bytes up to the end of ``count`` answers, all of which tell a sequence."""
    received = b""
    while len(SEQ.findall(received)) < count or not received.endswith(b"}"):
        more = await reader.read(1 << 16)
        assert more, received
        received += more
    return received


def test_publish_is_answered_with_its_sequence_and_the_connection_is_kept() -> None:
    async def scenario(_: Edge, streams: Streams) -> None:
        reader, writer = streams
        for seq in (1, 2, 3):
            writer.write(publish(b"x"))
            answer = await answers(reader, 1)
            assert answer.startswith(b"HTTP/1.1 201 Created\r\n")
            assert b"\r\ndurability: fsync\r\n" in answer
            assert b"\r\ndate: " in answer
            assert SEQ.findall(answer) == [b"%d" % seq]

    connected(scenario)


def test_body_that_comes_in_pieces_is_stored_whole() -> None:
    async def scenario(edge: Edge, streams: Streams) -> None:
        reader, writer = streams
        head = publish(b"1234567890")
        for piece in (head[:30], head[30:-9], head[-9:-4], head[-4:]):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        await answers(reader, 1)
        assert edge.link.published[0][0].payload == b"1234567890"

    connected(scenario)


@pytest.mark.parametrize("held", [False, True])
def test_pipelined_publishes_are_stored_and_answered_in_order(held: bool) -> None:
    async def scenario(edge: Edge, streams: Streams) -> None:
        reader, writer = streams
        edge.link.outcomes = [] if held else None
        writer.write(publish(b"1") + publish(b"2") + HEAD + publish(b"3"))
        if held:
            # The first holds the others up; they then go through the application.
            await wait_until(lambda: bool(edge.link.outcomes))
            assert len(edge.link.published) == 1
            [first], edge.link.outcomes = edge.link.outcomes or [], None
            first()
        received = await answers(reader, 3)
        assert SEQ.findall(received) == [b"1", b"2", b"3"]
        assert received.count(b"HTTP/1.1 200 OK") == 1
        assert [batch[0].payload for batch in edge.link.published] == [b"1", b"2", b"3"]

    connected(scenario)


@pytest.mark.parametrize(
    "request_bytes", [publish(b"x", b"Connection: close"), publish(b"x", version=b"1.0")]
)
def test_connection_that_is_not_to_be_kept_ends_after_the_answer(request_bytes: bytes) -> None:
    async def scenario(_: Edge, streams: Streams) -> None:
        reader, writer = streams
        writer.write(request_bytes)
        answer = await reader.read()
        assert b"\r\nconnection: close\r\n" in answer
        assert answer.endswith(b'"duplicate":false}')

    connected(scenario)


@pytest.mark.parametrize(
    ("refusal", "status"),
    [
        (ApiError(errors.OUTCOME_UNKNOWN), b"504"),
        (ApiError(errors.OVERLOADED, retry_after_s=1), b"503"),
    ],
)
def test_outcome_that_is_an_error_is_answered_as_a_problem(
    refusal: ApiError, status: bytes
) -> None:
    async def scenario(edge: Edge, streams: Streams) -> None:
        reader, writer = streams
        edge.link.outcomes = []
        writer.write(publish(b"x"))
        await wait_until(lambda: bool(edge.link.outcomes))
        edge.link.outcomes[0](refusal)
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 " + status)
        assert b"application/problem+json" in answer

    connected(scenario)


def test_failure_nobody_foresaw_is_500_and_the_connection_lives() -> None:
    async def scenario(edge: Edge, streams: Streams) -> None:
        reader, writer = streams
        edge.link.failures = [RuntimeError("boom")]
        writer.write(publish(b"x"))
        answer = await reader.readuntil(b"}")
        assert answer.startswith(b"HTTP/1.1 500")
        assert b"boom" not in answer
        writer.write(publish(b"y"))
        assert (await answers(reader, 1)).startswith(b"HTTP/1.1 201")

    connected(scenario)


def test_client_that_leaves_before_its_answer_harms_nobody() -> None:
    async def scene() -> None:
        edge = Edge()
        edge.link.outcomes = []
        async with serving(edge) as (port, server):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(publish(b"x"))
            await wait_until(lambda: bool(edge.link.outcomes))
            writer.transport.abort()
            await wait_until(lambda: not server.server_state.connections)
            edge.link.outcomes[0]()
            # What was held for the request is given back.
            assert b"contrail_http_body_bytes_in_flight 0.0" in edge.app.metrics.text()

    run(scene())


def test_connection_that_ends_leaves_memory_without_a_collection() -> None:
    async def scene() -> None:
        edge = Edge()
        async with serving(edge) as (port, server):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for _ in range(2):  # a head that is parsed, and one that is known
                writer.write(publish(b"x"))
                await answers(reader, 1)
            [connection] = server.server_state.connections
            left, connection = weakref.ref(connection), None
            gc.disable()
            try:
                writer.close()
                await wait_until(lambda: not server.server_state.connections)
                await wait_until(lambda: left() is None)
            finally:
                gc.enable()

    run(scene())


def test_idle_connection_is_closed_after_the_keep_alive_time_of_its_last_answer() -> None:
    async def scenario(_: Edge, streams: Streams) -> None:
        reader, writer = streams
        loop = asyncio.get_running_loop()
        writer.write(publish(b"x"))
        await answers(reader, 1)
        # A second request within the time: the time begins anew.
        first = asyncio.ensure_future(reader.read(1))
        assert not (await asyncio.wait({first}, timeout=0.5))[0]
        writer.write(publish(b"y"))
        assert await first == b"H"
        await answers(reader, 1)
        answered = loop.time()
        assert await reader.read() == b""
        assert loop.time() - answered > 2.9

    # The link answers at once here. The time in which a head must arrive does not apply either.
    connected(scenario, keep_alive_s=3, head_timeout_s=0.2)


def test_request_that_waits_is_not_taken_for_an_idle_connection() -> None:
    async def scenario(edge: Edge, streams: Streams) -> None:
        reader, writer = streams
        writer.write(publish(b"x"))
        await answers(reader, 1)
        edge.link.outcomes = []
        writer.write(publish(b"y"))
        held = asyncio.ensure_future(reader.read(1))
        done, _ = await asyncio.wait({held}, timeout=1.5)
        assert not done
        edge.link.outcomes[0]()
        assert await held == b"H"

    connected(scenario, keep_alive_s=1)


def test_shutdown_waits_for_an_answer_that_is_on_its_way() -> None:
    async def scene() -> None:
        edge = Edge()
        edge.link.outcomes = []
        async with serving(edge) as (port, server):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(publish(b"x"))
            await wait_until(lambda: bool(edge.link.outcomes))
            server.should_exit = True
            await wait_until(lambda: not server.servers[0].is_serving())
            edge.link.outcomes[0]()
            answer = await asyncio.wait_for(reader.read(), SOON_S)
            assert answer.startswith(b"HTTP/1.1 201")
            writer.close()

    run(scene())


@pytest.mark.parametrize("size", [DIRECT_BODY_BYTES_MAX, DIRECT_BODY_BYTES_MAX + 1])
def test_body_at_and_beyond_the_limit_is_stored_either_way(size: int) -> None:
    async def scenario(edge: Edge, streams: Streams) -> None:
        reader, writer = streams
        writer.write(publish(b"x" * size))
        await answers(reader, 1)
        assert len(edge.link.published[0][0].payload) == size

    connected(scenario)


def test_head_that_asks_for_continue_gets_it() -> None:
    async def scenario(edge: Edge, streams: Streams) -> None:
        reader, writer = streams
        request = publish(b"x", b"Expect: 100-continue")
        writer.write(request[:-1])
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"x")
        assert SEQ.findall(await answers(reader, 1)) == [b"1"]

    connected(scenario)


def batch(body: bytes, *lines: bytes, kind: bytes = b"application/json") -> bytes:
    head = [
        b"POST /v1/streams/S/messages HTTP/1.1",
        b"Host: localhost",
        b"Content-Type: " + kind,
        b"Content-Length: %d" % len(body),
        *lines,
    ]
    return b"\r\n".join([*head, b"", body])


ITEM = b'{"subject":"a.b","data":"x"}'
COLUMNS = b"\x92\x02\x95\x91\xa3a.b\xc4\x08" + bytes(8) + b"\xc4\x0c" + bytes(4) + (
    b"\1\0\0\0\2\0\0\0\xc4\2xx\xc0"
)  # fmt: skip


@pytest.fixture
def direct_batches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The stream of each batch that is published without the application."""
    streams = []
    publish_then = BatchPublish._publish_then

    def counted(self: BatchPublish, stream: str, asked: Admitted, shown: str, reply: Reply) -> None:
        streams.append(stream)
        publish_then(self, stream, asked, shown, reply)

    monkeypatch.setattr(BatchPublish, "_publish_then", counted)
    return streams


@pytest.mark.parametrize(
    ("kind", "body", "direct"),
    [
        (b"application/json", b'{"messages":[%s,%s]}' % (ITEM, ITEM), True),
        (b"application/vnd.msgpack", b"\x92\x01\x92" + 2 * b"\x93\xa3a.b\xc0\xc4\x01x", True),
        (b"application/vnd.msgpack", COLUMNS, True),
        (b"application/json; charset=utf-8", b'{"messages":[%s,%s]}' % (ITEM, ITEM), False),
        (b"application/x-ndjson", ITEM + b"\n" + ITEM, True),
        (b"application/x-ndjson; charset=utf-8", ITEM + b"\n" + ITEM, False),
    ],
)
def test_batch_is_answered_the_same_with_and_without_the_application(
    kind: bytes, body: bytes, direct: bool, direct_batches: list[str]
) -> None:
    async def scenario(edge: Edge, streams: Streams) -> None:
        reader, writer = streams
        writer.write(batch(body, kind=kind))
        answer = await reader.readuntil(b"]}")
        assert answer.startswith(b"HTTP/1.1 201 Created\r\n")
        assert b"\r\ndurability: fsync\r\n" in answer
        assert b"\r\ndate: " in answer
        assert SEQ.findall(answer) == [b"1", b"2"]
        assert [message.payload for message in edge.link.published[0]] == [b"x", b"x"]
        assert direct_batches == ["S"] * direct

    connected(scenario)


@pytest.mark.parametrize("accept", [b"application/json", b"application/x-ndjson"])
@pytest.mark.parametrize("lines", [[], [ITEM], [ITEM, b"{", ITEM], [b"{", ITEM], [ITEM] * 1_001])
def test_lines_are_answered_the_same_with_and_without_the_application(
    lines: list[bytes], accept: bytes, direct_batches: list[str]
) -> None:
    def answered(kind: bytes) -> tuple[bytes, bytes]:
        told = []

        async def scenario(_: Edge, streams: Streams) -> None:
            reader, writer = streams
            asked = b"Accept: " + accept, b"Connection: close"
            writer.write(batch(b"\n".join(lines), *asked, kind=kind))
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            told.append((head.splitlines()[0], body.partition(b'"request_id"')[0]))

        connected(scenario)
        return told[0]

    found = answered(b"application/x-ndjson")
    assert direct_batches == ["S"] * (lines[:1] != [b"{"])
    assert found == answered(b"application/x-ndjson; charset=utf-8")


@pytest.mark.parametrize("over", [0, 1])
def test_batch_at_and_beyond_the_limit_is_stored_either_way(
    over: int, direct_batches: list[str]
) -> None:
    async def scenario(edge: Edge, streams: Streams) -> None:
        reader, writer = streams
        body = b'{"messages":[%s]}' % ITEM
        writer.write(batch(body.ljust(BATCH_DIRECT_BYTES_MAX + over)))
        assert SEQ.findall(await reader.readuntil(b"]}")) == [b"1"]
        assert direct_batches == ["S"] * (1 - over)

    connected(scenario)


def test_batch_that_cannot_be_read_is_refused_and_the_connection_is_kept() -> None:
    async def scenario(edge: Edge, streams: Streams) -> None:
        reader, writer = streams
        writer.write(batch(b'{"messages":1}'))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 422")
        await reader.readuntil(b"}")
        writer.write(batch(b'{"messages":[%s]}' % ITEM))
        assert b"HTTP/1.1 201" in await reader.readuntil(b"]}")

    connected(scenario)


def test_bytes_of_a_body_that_never_comes_whole_are_given_back() -> None:
    async def scenario(edge: Edge, streams: Streams) -> None:
        _, writer = streams
        state = edge.app.state
        writer.write(publish(b"x" * 1_000)[:-1])
        await wait_until(lambda: state.bodies.held == 999)
        writer.close()
        await wait_until(lambda: state.bodies.held == 0)

    connected(scenario)


# Who is let in -----------------------------------------------------------------------------------
@pytest.mark.parametrize("fast_lane", [True, False])
def test_callers_without_a_token_hold_nothing_of_what_bodies_may_take(fast_lane: bool) -> None:
    async def scenario() -> None:
        edge = Edge(token="t", bodies_in_flight_bytes_max=100_000, fast_lane=fast_lane)
        held = edge.app.state.bodies
        async with serving(edge) as (port, _), asyncio.timeout(SOON_S):
            strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
            for _, writer in strangers:
                writer.write(publish(bytes(50_000))[:-1])
            for reader, _ in strangers:
                assert (await reader.readline()).startswith(b"HTTP/1.1 401")
                assert held.held == 0
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(publish(bytes(50_000), b"Authorization: Bearer t"))
            assert (await reader.readline()).startswith(b"HTTP/1.1 201")
            for _, one in [*strangers, (reader, writer)]:
                one.close()

    run(scenario())


@pytest.mark.parametrize("fast_lane", [True, False])
def test_bytes_of_bodies_count_as_they_come_and_not_as_they_were_declared(fast_lane: bool) -> None:
    async def scenario() -> None:
        edge = Edge(bodies_in_flight_bytes_max=100_000, fast_lane=fast_lane)
        async with serving(edge) as (port, _), asyncio.timeout(SOON_S):
            slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
            for _, writer in slow:
                writer.write(publish(bytes(60_000))[:-59_000])
            await wait_until(lambda: edge.app.state.bodies.held == 20_000)
            for reader, writer in slow[:2]:
                writer.write(bytes(59_000))
                assert (await reader.readline()).startswith(b"HTTP/1.1 201")
            for _, one in slow:
                one.close()
            await wait_until(lambda: edge.app.state.bodies.held == 0)

    run(scenario())


@pytest.mark.parametrize("fast_lane", [True, False])
def test_body_beyond_what_all_may_hold_is_503_and_was_not_applied(fast_lane: bool) -> None:
    async def scenario() -> None:
        edge = Edge(bodies_in_flight_bytes_max=1_000, fast_lane=fast_lane)
        async with serving(edge) as (port, _), asyncio.timeout(SOON_S):
            for size, status in ((1_001, b"503"), (1_000, b"201")):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(publish(bytes(size)))
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 " + status)
                if status == b"503":
                    body = json.loads(await reader.read())
                    assert (body["name"], body["applied"]) == ("overloaded", False)
                    assert body["instance"] == "/v1/subjects/a.b/messages"
                writer.close()
            await wait_until(lambda: edge.app.state.bodies.held == 0)
        assert len(edge.link.published) == 1

    run(scenario())


# Answers nobody reads ----------------------------------------------------------------------------
MESSAGE_BYTES = 1 << 20
READ = b"GET /v1/streams/S/messages/9 HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def deaf_client(port: int, requests: bytes) -> socket.socket:
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    deaf.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(deaf, ("127.0.0.1", port))
    await loop.sock_sendall(deaf, requests)
    return deaf


@pytest.mark.long
@pytest.mark.parametrize("fast_lane", [True, False])
def test_no_answer_is_made_while_the_last_one_is_not_taken(fast_lane: bool) -> None:
    async def scenario() -> None:
        edge = Edge(fast_lane=fast_lane)
        edge.link.payload = bytes(8 * MESSAGE_BYTES)
        async with serving(edge) as (port, server), asyncio.timeout(SOON_S):
            deaf = await deaf_client(port, READ * 5)
            await wait_until(lambda: edge.link.reads_made > 0)
            for _ in range(5):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(HEAD)
                await reader.readline()
                writer.close()
            assert edge.link.reads_made == 1
            loop, left = asyncio.get_running_loop(), 40 * MESSAGE_BYTES
            while left > 0:
                left -= len(await loop.sock_recv(deaf, 1 << 20))
            assert edge.link.reads_made == 5
            deaf.close()
            await wait_until(lambda: not server.server_state.connections)

    run(scenario())


@pytest.mark.parametrize("fast_lane", [True, False])
def test_answers_that_nobody_reads_are_bounded_over_all_connections(fast_lane: bool) -> None:
    async def scenario() -> None:
        bound = 32 * MESSAGE_BYTES
        edge = Edge(fast_lane=fast_lane, unread_bytes_of_all_max=bound)
        edge.link.payload = bytes(8 * MESSAGE_BYTES)
        async with serving(edge) as (port, server), asyncio.timeout(SOON_S):
            deaf = []
            for number in range(1, 12):
                deaf.append(await deaf_client(port, READ))
                await wait_until(lambda count=number: edge.link.reads_made == count)
                assert edge.app.state.unread.held <= bound
            await wait_until(lambda: edge.app.state.unread.cut >= 4)
            assert b"contrail_http_unread_cut_total" in edge.app.metrics.text()
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
            writer.write(READ)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            await reader.readexactly(8 * MESSAGE_BYTES)
            for one in [*deaf, writer]:
                one.close()
            await wait_until(lambda: not server.server_state.connections)
            assert edge.app.state.unread.held == 0

    run(scenario())


def test_more_requests_than_may_wait_on_a_connection_end_it() -> None:
    async def scenario() -> None:
        edge = Edge(pipelined_max=4)
        async with serving(edge) as (port, _), asyncio.timeout(SOON_S):
            for count, answered in ((5, 5), (6, 1)):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                last = HEAD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
                writer.write(HEAD * (count - 1) + last)
                assert (await reader.read()).count(b"HTTP/1.1 200") == answered
                writer.close()

    run(scenario())
