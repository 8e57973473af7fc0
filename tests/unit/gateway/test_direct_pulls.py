"""Pulls that the protocol answers without the application, on real sockets."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from tests.support.each import each
from tests.unit.edge.edge_rig import Edge
from tests.unit.edge.edge_serving import SOON_S, serving
from tests.unit.edge.test_direct_reads import answer, same
from tests.unit.edge.test_http_protocol import wait_until
from tests.unit.gateway.test_pulls import NEXT, delivery, run

Talk = Callable[[Edge, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def post(body: Any, *lines: str) -> bytes:
    raw = json.dumps(body).encode()
    head = [f"POST {NEXT} HTTP/1.1", "Host: localhost", f"Content-Length: {len(raw)}", *lines]
    return "\r\n".join([*head, "", ""]).encode() + raw


DIRECT = ("Content-Type: application/json", "X-Request-Id: this-one")
# The application answers where a type has a parameter, which the protocol does not compare.
APPLICATION = ("Content-Type: application/json; charset=utf-8", "X-Request-Id: this-one")


def play(talk: Talk) -> None:
    async def scenario() -> None:
        edge = Edge()
        async with serving(edge) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            await talk(edge, reader, writer)
            writer.close()

    run(asyncio.wait_for(scenario(), SOON_S))


@each(
    ("body", "accept", "status"),
    [
        ({"batch": 2}, "*/*", b"200"),
        ({"batch": 2}, "application/json", b"200"),
        ({"batch": 2}, "application/vnd.msgpack", b"200"),
        ({"batch": 2}, "application/vnd.msgpack; form=columns", b"200"),
        ({"acks": [{"token": "nonsense"}]}, "*/*", b"200"),
        ({"no_wait": True}, "*/*", b"204"),
        ({"batch": 0}, "*/*", b"422"),
        ({"idle_heartbeat": "1s"}, "*/*", b"422"),
        ({"batch": 2}, "text/plain", b"406"),
        ({"batch": 2}, "application/x-ndjson", b"200"),
    ],
)
def test_pull_is_answered_as_by_the_application(body: Any, accept: str, status: bytes) -> None:
    async def talk(edge: Edge, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found = []
        for lines in (DIRECT, DIRECT, APPLICATION):
            if "no_wait" not in body:
                edge.link.pull_results = [delivery()]
            writer.write(post(body, *lines, f"Accept: {accept}"))
            if status == b"204":
                found.append(await reader.readuntil(b"\r\n\r\n"))
            else:
                found.append(await answer(reader))
            assert found[-1][9:12] == status
        assert same(found[0]) == same(found[1]) == same(found[2])

    play(talk)


def test_head_of_a_pull_is_parsed_once() -> None:
    async def talk(edge: Edge, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for batch in (1, 2, 3):
            edge.link.pull_results = [delivery()]
            writer.write(post({"batch": batch}, "Content-Type: application/json"))
            assert (await answer(reader))[9:12] == b"200"
            assert len(edge.app.known_heads) == 1
        assert [one.batch for one in edge.link.pulls] == [1, 2, 3]

    play(talk)


def test_client_that_leaves_a_waiting_pull_ends_it() -> None:
    async def talk(edge: Edge, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(post({"expires": "10s"}, *DIRECT))
        await edge.link.waiting.wait()
        writer.close()
        await edge.link.cancelled.wait()
        await wait_until(lambda: not edge.app.state.waiting)

    play(talk)


def test_waiting_pull_ends_with_the_process_and_its_connection_goes_on() -> None:
    async def talk(edge: Edge, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # The second request comes while the first one waits, and is answered after it.
        writer.write(post({"expires": "10s"}, *DIRECT) + post({"no_wait": True}, *DIRECT))
        await edge.link.waiting.wait()
        edge.app.drain()
        assert b"shutting_down" in await answer(reader)
        assert (await reader.readuntil(b"\r\n\r\n"))[9:12] == b"204"

    play(talk)
