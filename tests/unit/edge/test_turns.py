"""Thousands of connections at once: what one pass of the event loop does for them is bounded."""

import asyncio
import contextlib
import re
import socket
from collections.abc import Callable

import pytest

from contrail_edge.http import turns
from contrail_edge.http.turns import SharedTurns
from tests.bench.socket_scripts import JSON, handshake
from tests.unit.edge.calls_of_turns import CallsOfTurns
from tests.unit.edge.edge_rig import Edge
from tests.unit.edge.edge_serving import SOON_S, serving, wait_until

CONNECTIONS = 200
PING = b'\x81\x8d\0\0\0\0{"op":"ping"}'
GET_ONE = b"GET /v1/streams/S/messages/%d HTTP/1.1\r\nHost: localhost\r\n\r\n"
CALLS_EACH_MAX = 60
"""Calls for each connection in one pass: those to note that it is ready, and to poll it."""
CALLS_OF_A_SLICE_MAX = 40_000
"""Calls in one pass for what a connection has sent at once, however many requests that is."""


def test_work_that_waits_is_done_in_order_some_in_each_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turns, "TURN_NS", 0)  # each piece of work is a turn
    done: list[int] = []

    async def scenario() -> None:
        shared = SharedTurns()
        assert not shared.over  # the first piece of a pass may be done at once
        for number in range(3):
            shared.run(lambda number=number: done.append(number))  # type: ignore[misc]
        for number in range(3):
            assert done == list(range(number))
            await asyncio.sleep(0)
        assert done == [0, 1, 2]
        await asyncio.sleep(0)
        assert not shared.over

    asyncio.run(scenario())


def test_many_connections_that_are_ready_together_are_served_in_many_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turns, "TURN_NS", 0)
    edge = Edge()
    counts = edge.app._socket_counts

    async def scenario() -> None:
        async with serving(edge) as (port, server):
            with contextlib.ExitStack() as stack:
                peers = [
                    stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                    for _ in range(CONNECTIONS)
                ]

                await wait_until(lambda: len(server.server_state.connections) == CONNECTIONS)

                async def all_at_once(
                    act: Callable[[socket.socket], object], done: Callable[[], bool]
                ) -> None:
                    for peer in peers:
                        act(peer)
                    with CallsOfTurns() as calls:
                        await wait_until(done)
                    assert calls.most <= CALLS_EACH_MAX * CONNECTIONS
                    assert calls.turns >= CONNECTIONS / 2

                await all_at_once(
                    lambda peer: peer.send(handshake(JSON)),
                    lambda: len(counts._open) == CONNECTIONS,
                )
                read = counts.frames_in
                await all_at_once(
                    lambda peer: peer.send(PING),
                    lambda: counts.frames_in == read + CONNECTIONS,
                )
                await all_at_once(lambda peer: peer.close(), lambda: not counts._open)

    asyncio.run(scenario())


def test_thousands_of_requests_in_one_segment_are_answered_in_order_some_in_each_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turns, "TURN_NS", 0)
    edge = Edge()
    edge.link.in_memory = True
    numbers = [1 + number % 9 for number in range(2_000)]

    async def scenario() -> None:
        async with serving(edge) as (port, server):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            await wait_until(lambda: bool(server.server_state.connections))
            [connection] = server.server_state.connections
            received = b""
            with CallsOfTurns() as calls:
                connection.data_received(b"".join(GET_ONE % number for number in numbers))
                while received.count(b"HTTP/1.1 ") < len(numbers):
                    received += await asyncio.wait_for(reader.read(1 << 20), SOON_S)
            assert re.findall(rb"\r\n\r\nm(\d)", received) == [b"%d" % one for one in numbers]
            assert calls.most <= CALLS_OF_A_SLICE_MAX
            writer.close()

    asyncio.run(scenario())
