"""Requests between two nodes over real sockets: answers, refusals and bounds."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_replicator.peers.certificates import made_tls
from contrail_replicator.peers.frames import Channel
from contrail_replicator.peers.hub import Node, PeerHub
from contrail_replicator.peers.tcp import PeerSockets
from contrail_serve import peer_requests
from contrail_serve.peer_requests import PeerRequests

CLUSTER = b"c" * 16
OPEN_MAX = 4


async def refuse(body: bytes) -> bytes:
    raise ApiError(errors.NOT_LEADER, leader=body.decode())


class End:
    """A node with its requests."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sockets = PeerSockets(made_tls(name))
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.answer: Callable[[bytes], Awaitable[bytes]] = refuse
        self.requests: PeerRequests

    def start(self, ends: "list[End]") -> None:
        addresses = {one.name: f"127.0.0.1:{one.listener.getsockname()[1]}" for one in ends}
        self.hub = PeerHub(
            self.sockets,
            Node(self.name, CLUSTER, 1, 1, ord(self.name)),
            addresses,
            lambda: [bytes(32)],
        )
        self.requests = PeerRequests(self.hub, Channel.BULK, self._answer, open_max=OPEN_MAX)
        self.sockets.listen(self.listener, self.hub.accept)
        self.hub.start()

    async def _answer(self, body: bytes) -> bytes:
        return await self.answer(body)

    async def connected(self, name: str) -> None:
        await wait_until(lambda: self.hub.connected(name, Channel.BULK))

    async def stop(self) -> None:
        self.hub.stop()
        await self.sockets.close()
        self.listener.close()


async def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def with_ends(scene: Callable[[End, End], Awaitable[None]]) -> None:
    async def run() -> None:
        ends = [End("a"), End("b")]
        async with asyncio.timeout(60):
            for end in ends:
                end.start(ends)
            try:
                await ends[0].connected("b")
                await ends[1].connected("a")
                await scene(*ends)
            finally:
                for end in ends:
                    await end.stop()

    asyncio.run(run())


def test_the_largest_answers_come_back_at_once_in_both_directions() -> None:
    async def scene(a: End, b: End) -> None:
        async def echo(body: bytes) -> bytes:
            return body

        a.answer = b.answer = echo
        bodies = [bytes([number]) * a.requests.bytes_max for number in range(OPEN_MAX)]
        there = [a.requests.ask("b", body) for body in bodies]
        back = [b.requests.ask("a", body) for body in bodies]
        assert await asyncio.gather(*there, *back) == bodies * 2
        with pytest.raises(ValueError, match="a request of"):
            await a.requests.ask("b", bytes(a.requests.bytes_max + 1))

        async def too_long(body: bytes) -> bytes:
            return body + b"x"

        b.answer = too_long
        with pytest.raises(ApiError) as refused:
            await a.requests.ask("b", bodies[0])
        assert refused.value.spec is errors.OUTCOME_UNKNOWN
        # Nothing broke the protocol.
        b.answer = echo
        assert await a.requests.ask("b", b"still there") == b"still there"

    with_ends(scene)


def test_a_refusal_arrives_as_it_was_raised() -> None:
    async def scene(a: End, b: End) -> None:
        del b
        with pytest.raises(ApiError) as refused:
            await a.requests.ask("b", b"n7")
        assert (refused.value.spec, refused.value.leader) == (errors.NOT_LEADER, "n7")

    with_ends(scene)


def test_open_requests_are_bounded_at_both_ends() -> None:
    async def scene(a: End, b: End) -> None:
        go_on, waiting = asyncio.Event(), 0

        async def wait(body: bytes) -> bytes:
            nonlocal waiting
            waiting += 1
            await go_on.wait()
            return body

        b.answer = wait
        first = [asyncio.ensure_future(a.requests.ask("b", b"%d" % n)) for n in range(OPEN_MAX)]
        await wait_until(lambda: waiting == OPEN_MAX)
        with pytest.raises(ApiError, match="has not answered yet") as refused:
            await a.requests.ask("b", b"")
        assert (refused.value.spec, refused.value.applied) == (errors.OVERLOADED, False)
        # A node that gave up on its first requests, or lies, meets the bound of the other end.
        a.requests._open_max += 1
        with pytest.raises(ApiError, match="too many requests are open"):
            await a.requests.ask("b", b"")
        go_on.set()
        assert await asyncio.gather(*first) == [b"%d" % n for n in range(OPEN_MAX)]
        assert await a.requests.ask("b", b"again") == b"again"

    with_ends(scene)


def test_a_request_that_cannot_be_sent_or_is_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(a: End, b: End) -> None:
        async def never(body: bytes) -> bytes:
            await asyncio.get_running_loop().create_future()
            return body

        b.answer = never
        monkeypatch.setattr(peer_requests, "_ANSWER_S", 0.05)
        with pytest.raises(ApiError) as unknown:
            await a.requests.ask("b", b"")
        assert unknown.value.spec is errors.OUTCOME_UNKNOWN
        a.hub.stop()
        await wait_until(lambda: not a.hub.connected("b", Channel.BULK))
        with pytest.raises(ApiError) as unsent:
            await a.requests.ask("b", b"")
        assert (unsent.value.spec, unsent.value.applied) == (errors.NOT_LEADER, False)

    with_ends(scene)
