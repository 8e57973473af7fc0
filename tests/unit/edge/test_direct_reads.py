"""Reads that the protocol answers without the application, on real sockets."""

import asyncio
import re
import socket

import pytest

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_edge.http.grouped import GROUP
from contrail_edge.http.requests import Request
from contrail_edge.http.responses import Response
from tests.support.each import each
from tests.support.handshake import HANDSHAKE
from tests.unit.edge.edge_rig import Edge
from tests.unit.edge.test_direct import Streams, connected
from tests.unit.edge.test_http_protocol import SOON_S, run, serving, wait_until

GET = "/v1/streams/S/messages/"
LAST = "/v1/streams/S/last"
OWN_ID = "X-Request-Id: this-one"
OWN = re.compile(rb"date: [^\r]*\r\n|connection: close\r\n")


def get(target: str, *lines: str, version: str = "1.1", body: str = "") -> bytes:
    return "\r\n".join(
        [f"GET {target} HTTP/{version}", "Host: localhost", *lines, "", body]
    ).encode()


async def answer(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    assert length is not None
    return head + await reader.readexactly(int(length[1]))


def same(answered: bytes) -> list[bytes]:
    """What an answer says, whichever way it went and whenever."""
    head, _, body = OWN.sub(b"", answered).partition(b"\r\n\r\n")
    return [*sorted(head.split(b"\r\n")), body]


@each(
    ("target", "status"),
    [
        (GET + "7", b"200"),
        (GET + "7?payload=base64", b"200"),
        (LAST + "?subject=a.%62", b"200"),
        (LAST, b"200"),
        (GET + "10", b"404"),
        (GET + "x", b"422"),
        (GET + "7?payload=none", b"422"),
        (GET + "7?payload=base64&payload=base64", b"422"),
        (LAST + "?subject=a..b", b"422"),
        (GET + "%zz", b"400"),
        (GET + "7#part", b"200"),
        (LAST + "?subject=a.b#part", b"200"),
    ],
)
@pytest.mark.parametrize("in_memory", [False, True])
def test_read_is_answered_as_by_the_application(
    target: str, status: bytes, in_memory: bool
) -> None:
    async def scenario(edge: Edge, streams: Streams) -> None:
        reader, writer = streams
        edge.link.in_memory = in_memory
        writer.write(get(target, OWN_ID))
        direct = await answer(reader)
        # A body makes it the application's, which does not read it and closes.
        writer.write(get(target, OWN_ID, "Content-Length: 1", body="x"))
        assert direct.startswith(b"HTTP/1.1 " + status)
        assert same(direct) == same(await answer(reader))

    connected(scenario)


def test_message_in_memory_is_x() -> None:
    async def scenario(edge: Edge, streams: Streams) -> None:
        reader, writer = streams
        edge.link.in_memory = True
        writer.write(get(GET + "7") + get(LAST + "?subject=a.b"))
        assert (await answer(reader)).endswith(b"m7")
        assert (await answer(reader)).startswith(b"HTTP/1.1 200")
        assert edge.link.reads_made == 0

    connected(scenario)


@each(
    ("in_memory", "away_again", "reads_made"),
    [(True, False, 0), (False, False, 1), (True, True, 1)],
)
def test_message_on_the_disk_is_answered_once_it_is_read(
    in_memory: bool, away_again: bool, reads_made: int
) -> None:
    async def scenario(edge: Edge, streams: Streams) -> None:
        reader, writer = streams
        edge.link.disk = reads = []
        writer.write(get(GET + "7"))
        await wait_until(lambda: len(reads) == 1)
        edge.link.in_memory = in_memory
        edge.link.disk = reads if away_again else None
        reads[0].set_result(None)
        assert (await answer(reader)).endswith(b"m7")
        assert edge.link.reads_made == reads_made

    connected(scenario)


def test_pipelined_reads_are_answered_in_order() -> None:
    async def scenario(edge: Edge, streams: Streams) -> None:
        reader, writer = streams
        edge.link.reads = []
        writer.write(get(GET + "1") + get(GET + "2") + get(GET + "3"))
        for expected in (b"m1", b"m2", b"m3"):
            await wait_until(lambda: bool(edge.link.reads))
            edge.link.reads.pop().set_result(None)
            assert (await answer(reader)).endswith(b"\r\n\r\n" + expected)

    connected(scenario)


@pytest.mark.parametrize("count", [1, GROUP - 1, GROUP, GROUP + 1, 3 * GROUP])
@pytest.mark.parametrize(
    ("last", "after"),
    [
        (b"", b""),  # the client ends its side
        (b"neither HTTP nor a head\r\n\r\n", b"HTTP/1.1 400 "),
        (get(GET + "1", "Connection: close"), b"HTTP/1.1 200 "),
        (get("/v1/ws", *HANDSHAKE), b"HTTP/1.1 101 "),
        (get("/v1"), b"HTTP/1.1 404 "),
    ],
)
def test_answers_that_are_sent_together_come_before_all_that_follows(
    count: int, last: bytes, after: bytes
) -> None:
    async def scene() -> None:
        edge = Edge()
        edge.link.in_memory = True
        async with serving(edge) as (port, _), asyncio.timeout(SOON_S):
            # Without giving way to the server, so that it finds everything in one pass.
            client = socket.create_connection(("127.0.0.1", port))
            client.sendall(b"".join(get(GET + "1") for _ in range(count)) + last)
            if not last:
                client.shutdown(socket.SHUT_WR)
            reader, writer = await asyncio.open_connection(sock=client)
            for _ in range(count):
                assert (await answer(reader)).endswith(b"\r\n\r\nm1")
            if last:
                assert await reader.readexactly(len(after)) == after
            else:
                assert await reader.read() == after
            writer.close()

    run(scene())


@pytest.mark.parametrize(
    "request_bytes", [get(GET + "1", "Connection: close"), get(GET + "1", version="1.0")]
)
def test_connection_that_is_not_to_be_kept_ends_after_the_answer(request_bytes: bytes) -> None:
    async def scenario(_: Edge, streams: Streams) -> None:
        reader, writer = streams
        writer.write(request_bytes)
        received = await reader.read()
        assert b"\r\nconnection: close\r\n" in received
        assert received.endswith(b"m1")

    connected(scenario)


def test_unexpected_failure_is_a_problem_and_the_connection_stays_open() -> None:
    async def scenario(edge: Edge, streams: Streams) -> None:
        reader, writer = streams
        edge.link.failures = [RuntimeError("a fault"), ApiError(errors.OVERLOADED)]
        for status in (b"500", b"503", b"200"):
            writer.write(get(GET + "1"))
            assert (await answer(reader)).startswith(b"HTTP/1.1 " + status)

    connected(scenario)


def test_reader_that_leaves_before_its_answer_harms_nobody() -> None:
    async def scenario(edge: Edge, streams: Streams) -> None:
        reader, writer = streams
        port = writer.get_extra_info("peername")[1]
        edge.link.reads = []
        _, leaving = await asyncio.open_connection("127.0.0.1", port)
        leaving.write(get(GET + "1"))
        await wait_until(lambda: len(edge.link.reads or []) == 1)
        leaving.transport.abort()
        writer.write(get(GET + "2"))
        await wait_until(lambda: len(edge.link.reads or []) == 2)
        for read in edge.link.reads:
            read.set_result(None)
        assert (await answer(reader)).endswith(b"m2")

    connected(scenario)


@pytest.mark.parametrize("fast_lane", [True, False])
def test_message_whose_headers_would_split_the_answer_is_not_sent_raw(fast_lane: bool) -> None:
    async def scenario(edge: Edge, streams: Streams) -> None:
        reader, writer = streams
        edge.link.headers = {"A\r\nSet-Cookie: b": ["v"]}
        writer.write(get(GET + "7"))
        answered = await answer(reader)
        assert answered.startswith(b"HTTP/1.1 406")
        assert b"Set-Cookie" not in answered
        writer.write(get(GET + "7", "Accept: application/json"))
        answered = await answer(reader)
        assert answered.startswith(b"HTTP/1.1 200")
        assert b"Set-Cookie" not in answered.partition(b"\r\n\r\n")[0]

    connected(scenario, fast_lane=fast_lane)


def test_answer_with_a_header_that_would_end_its_line_is_500_instead() -> None:
    async def scenario(edge: Edge, streams: Streams) -> None:
        reader, writer = streams

        async def unsound(request: Request) -> Response:
            return Response(200, b"", b"text/plain\r\nSet-Cookie: b")

        target = edge.app.direct_target(b"GET", GET.encode() + b"7")
        assert target is not None
        target.direct.handler._handler = unsound
        writer.write(get(GET + "7"))
        answered = await answer(reader)
        assert answered.startswith(b"HTTP/1.1 500")
        assert b"Set-Cookie" not in answered

    connected(scenario)


def test_numbers_that_end_a_path_share_the_search_for_their_target() -> None:
    app = Edge().app
    for number in ("7", "0", "007", "9" * 30, "x7", "7%20", ""):
        url = (GET + number).encode()
        found, searched = app.direct_target(b"GET", url), app._find_direct(b"GET", url)
        assert (found and found.path_values) == (searched and searched.path_values)
        assert (found and found.template) == (searched and searched.template)
    assert len([url for url in app._direct_targets[b"GET"] if url.endswith(b"/0")]) == 1
    assert app.direct_target(b"GET", b"/v1/streams/7") is None
    assert app.direct_target(b"GET", b"7") is None
