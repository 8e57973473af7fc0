"""A head that was parsed once is not parsed again, and no answer shows it."""

import asyncio
import random
import re
from collections.abc import Coroutine
from typing import Any, Final, cast

import pytest
import uvloop

from contrail_edge import known_heads
from contrail_edge.direct import DirectExchange, DirectHead, DirectTarget
from contrail_edge.http_protocol import EdgeHttpProtocol
from contrail_edge.known_heads import KnownHeads
from contrail_edge.metrics import RouteTimings
from contrail_edge.routing import Direct
from contrail_edge.server import EdgeServer
from tests.support.each import each
from tests.unit.edge.edge_rig import Edge
from tests.unit.edge.edge_serving import SOON_S, serving, wait_until

_HOST: Final = b"Host: localhost"


def post(body: bytes, *lines: bytes, subject: bytes = b"a.b") -> bytes:
    """A publish of ``body``."""
    head = [b"POST /v1/subjects/" + subject + b"/messages HTTP/1.1", _HOST]
    return b"\r\n".join([*head, b"Content-Length: %d" % len(body), *lines, b"", body])


def get(target: bytes, *lines: bytes) -> bytes:
    """A read."""
    return b"\r\n".join([b"GET " + target + b" HTTP/1.1", _HOST, *lines, b"", b""])


_ONE: Final = b"/v1/streams/S/messages/"
_TARGET_BYTES_MAX: Final = Edge().settings.target_bytes_max
_REQUESTS: Final = [
    get(_ONE + b"1"),
    get(_ONE + b"2?payload=base64"),
    get(_ONE + b"2?payload=none"),
    get(_ONE + b"none"),
    get(_ONE + b"%32"),
    get(_ONE + b"%zz"),
    get(_ONE + b"2#part"),
    get(_ONE + b'2"'),
    get(_ONE + b"2\xfc"),
    get(_ONE + b"2 "),
    get(b" " + _ONE + b"2"),
    get(_ONE + b"1 " + _ONE + b"2"),
    get(b"http://localhost" + _ONE + b"2"),
    get(b"*"),
    get(b"/v1/streams/S/last?subject=a.b"),
    get((_ONE + b"1?payload=").ljust(_TARGET_BYTES_MAX, b"x")),
    get((_ONE + b"1?payload=").ljust(_TARGET_BYTES_MAX + 1, b"x")),
    get(b"/v1/streams/S/messages?limit=1"),
    get(b"/v1/streams/S/gone"),
    get(_ONE + b"1", b"Accept: application/json"),
    get(_ONE + b"3", b"Accept: application/json"),
    get(_ONE + b"3", b"Content-Length: 0"),
    get(_ONE + b"3", b"X-Request-Id: mine"),
    get(_ONE + b"3", b"Connection: close"),
    get(_ONE + b"3").replace(b"HTTP/1.1", b"HTTP/1.0"),
    get(b"/livez"),
    get(b"/v1/ws"),
    post(b"x", b"X-Strength: 1"),
    post(b"x").replace(_HOST, b"X-Strength: 1\r\n" + _HOST),
    post(b"x").replace(_HOST, b"X-Strength: 22\r\n" + _HOST),
    post(b"one").replace(b"Length: 3", b"Length: 03"),
    post(b"one").replace(b"Length: 3", b"Length: 3 "),
    post(b"one").replace(b"Content-Length: 3", b"content-length: 3"),
    post(b"one").replace(b"Content-Length: 3", b"content-length:3"),
    post(b"one").replace(b"Length: 3", b"Length: +3"),
    post(b"one", b"Content-Length: 3"),
    post(b"y" * 70_000),
    post(b"one"),
    post(b"two"),
    post(b""),
    post(b"GET / HTTP/1.1\r\n\r\n"),
    post(b"longer", subject=b"a.c"),
    post(b"x", b"Content-Type: text/plain"),
    post(b"x", b"Nats-Msg-Id: 7"),
    post(b"x", b"X-Request-Id: mine"),
    post(b"x", b"Nats-TTL: never mind"),
    post(b"x", b"Bad Header: x"),
    post(b"x", b"Host: another"),
    post(b"x", b"Origin: http://elsewhere"),
    post(b"x", b"Connection: close"),
    post(b"x", b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AA"),
    post(b"x", b"Content-Encoding: gzip"),
    post(b"x", subject=b"b.unknown"),
    post(b"x", subject=b"a.*"),
    post(b"x").replace(b"HTTP/1.1", b"HTTP/1.0"),
    post(b"x").replace(b"/messages", b"/messages?ack=none"),
    post(b"3\r\nabc\r\n0\r\n\r\n", b"Transfer-Encoding: chunked").replace(
        b"Content-Length: 13\r\n", b""
    ),
    b"GET /livez HTTP/1.1\r\n" + _HOST + b"\r\n\r\n",
    b"\r\n" + post(b"one"),
    post(b"one") + post(b"two"),
]


_VARIED: Final = (b"x-request-id", b"date", b"content-length")
"""Lines of answers that may differ; the length of a problem does by that of the request's id."""


class _Never(KnownHeads):
    """Knows no head: each request is parsed."""

    def learn(self, data: bytes, exchange: DirectExchange) -> None:
        """Forget it."""


class _Client:
    """Sends one request after the other, on a new connection when the server has closed one."""

    def __init__(self, port: int, server: EdgeServer) -> None:
        self._port, self._server = port, server
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, request: bytes, cut: int) -> list[bytes]:
        """The answers to a request, which comes in two pieces if ``cut`` is inside of it."""
        if self._streams is None:
            await wait_until(lambda: not self._server.server_state.connections)
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        _, writer = self._streams
        expected = 2 if request.count(b"Host: localhost") == 2 else 1
        if cut:
            writer.write(request[:cut])
            await wait_until(self.has_begun)
            request = request[cut:]
        writer.write(request)
        answers = [await self._answer()]
        while self._streams is not None and len(answers) < expected:
            answers.append(await self._answer())
        return answers

    def write(self, data: bytes) -> None:
        """Send bytes on the connection that is open."""
        assert self._streams is not None
        self._streams[1].write(data)

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._streams is not None:
            self._streams[1].close()

    def has_begun(self) -> bool:
        """Whether a part of a request has arrived."""
        [connection] = self._server.server_state.connections or [None]
        return connection is not None and (connection._begun or connection._body_open)

    async def _answer(self) -> bytes:
        assert self._streams is not None
        reader, writer = self._streams
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SOON_S)
        length = re.search(rb"(?i)content-length: (\d+)", head)
        if length is not None:
            body = await reader.readexactly(int(length[1]))
        else:
            body = await reader.readuntil(b"0\r\n\r\n")
        if b"connection: close" in head.lower():
            writer.close()
            self._streams = None
        lines = [one for one in head.split(b"\r\n") if not one.lower().startswith(_VARIED)]
        return b"\n".join([*lines, re.sub(rb'"request_id":"[^"]*"', b"", body)])


def run(scenario: Coroutine[Any, Any, None]) -> None:
    uvloop.run(scenario)


@pytest.mark.parametrize("seed", range(3))
def test_answers_are_those_of_a_server_that_parses_every_head(seed: int) -> None:
    chance = random.Random(seed)
    requests = chance.choices(_REQUESTS, k=150)
    # Nowhere, in the request line, or in the body of what is accepted.
    cuts = [
        chance.choice([0, 0, 3, 18, len(one) - 1 if one in _REQUESTS[:2] else 0])
        for one in requests
    ]

    async def answered(edge: Edge) -> list[list[bytes]]:
        async with serving(edge) as (port, server):
            client = _Client(port, server)
            answers = [await client.send(*each) for each in zip(requests, cuts, strict=True)]
            client.close()
            return answers

    async def scenario() -> None:
        knows, parses = Edge(), Edge()
        parses.app.known_heads = _Never(_TARGET_BYTES_MAX)
        knows.link.in_memory = bool(seed)
        assert await answered(knows) == await answered(parses)
        assert knows.link.published == parses.link.published

    run(scenario())


def test_a_known_head_is_not_parsed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[object] = []
    begin = EdgeHttpProtocol.on_message_begin

    def on_message_begin(protocol: EdgeHttpProtocol) -> None:
        begun.append(protocol)
        begin(protocol)

    monkeypatch.setattr(EdgeHttpProtocol, "on_message_begin", on_message_begin)

    async def scenario() -> None:
        edge = Edge()
        async with serving(edge) as (port, server):
            client = _Client(port, server)
            for body in (b"one", b"two", b"six", b"three"):
                [answer] = await client.send(post(body), 0)
                assert answer.startswith(b"HTTP/1.1 201")
            for number in (b"1", b"2", b"3"):
                [answer] = await client.send(get(_ONE + number), 0)
                assert answer.endswith(b"\nm" + number)
            client.close()
        assert len(begun) == 2  # the first publish and the first read
        assert [one.payload for [one] in edge.link.published] == [b"one", b"two", b"six", b"three"]

    run(scenario())


_STRONG: Final = post(b"x").replace(_HOST, b"Strength: 1")


def learned(data: bytes) -> KnownHeads:
    """What is known after a request that was answered directly."""
    heads, head = KnownHeads(_TARGET_BYTES_MAX), data.partition(b"\r\n\r\n")[0]
    method = head.partition(b" ")[0].decode()
    scope = {"method": method, "raw_path": b"/", "query_string": b"", "headers": []}
    target = DirectTarget("", Direct(lambda *_: None, body_bytes_max=4), {}, RouteTimings())
    body = data[len(head) + 4 :]
    whole = DirectHead(scope, {})
    exchange = DirectExchange(whole, target, Edge().app, cast(Any, None), content=body)
    exchange.more_body = False
    heads.learn(data, exchange)
    return heads


@each(
    ("before", "now", "body"),
    [
        (post(b"x"), post(b"xy"), b"xy"),
        (post(b"x"), post(b"x" * 5), None),
        (post(b"x"), post(b"xy")[:-1], None),
        (post(b""), post(b"")[:-1], None),
        (post(b""), post(b"")[:-4], None),
        (post(b"x"), post(b"x").replace(b": 1\r\n", b": 1\r\r\n"), None),
        (post(b"x"), post(b"").replace(b"ength: 0", b"ength: "), None),
        (post(b"x"), post(b"").replace(b"ength: 0", b""), None),
        (post(b"x", b"A: 1"), post(b"x"), None),
        (post(b"x"), post(b"xy") + b"z", None),
        (post(b"x"), post(b"xy").replace(b": 2", b": 02"), None),
        (post(b"x"), post(b"x", subject=b"a.c"), None),
        (
            post(b"x").replace(_HOST, b"Strength: 1"),
            post(b"xy").replace(_HOST, b"Strength: 2"),
            None,
        ),
        (get(_ONE + b"1"), get(b"/"), b""),
        (get(_ONE + b"1"), get(b"/?a=%20"), b""),
        (get(_ONE + b"1"), get(b"/".ljust(_TARGET_BYTES_MAX, b"x")), b""),
        (get(_ONE + b"1"), get(b"/".ljust(_TARGET_BYTES_MAX + 1, b"x")), None),
        (get(_ONE + b"1"), get(b"/")[:-1], None),
        (get(_ONE + b"1"), get(b"/")[:-4], None),
        (get(_ONE + b"1"), get(b"/").replace(b" HTTP", b"HTTP"), None),
        (get(_ONE + b"1"), get(_ONE + b'"'), None),
        (get(_ONE + b"1"), get(_ONE + b"\xfc"), None),
        (get(_ONE + b"1"), get(b"x"), None),
        (get(_ONE + b"1"), get(b"/") + get(b"/"), None),
        (get(_ONE + b"1"), get(b"/", b"A: 1"), None),
        (get(b" " + _ONE + b"1"), get(_ONE + b"1 " + _ONE + b"1"), None),
        (get(_ONE + b"1 "), get(_ONE + b"2 "), None),
    ],
)
def test_only_the_length_or_the_target_may_differ(
    before: bytes, now: bytes, body: bytes | None
) -> None:
    found = learned(before).split(now)
    assert (found and found[2]) == body


def test_head_that_has_begun_before_an_answer_goes_on_after_it() -> None:
    async def scenario() -> None:
        edge = Edge()
        async with serving(edge) as (port, server):
            client = _Client(port, server)
            await client.send(post(b"x"), 0)
            edge.link.outcomes = []
            held = asyncio.ensure_future(client.send(post(b"x"), 0))
            await wait_until(lambda: bool(edge.link.outcomes))
            [answer], edge.link.outcomes = edge.link.outcomes or [], None
            client.write(b"POST /v1/subjects/a.later/messages HTTP/1.1\r\nA-Value: ")
            await wait_until(client.has_begun)
            answer()
            await held
            # The rest of that head, which looks like one that is known.
            await client.send(post(b"x"), 0)
            client.close()
        assert [one.subject for [one] in edge.link.published] == ["a.b", "a.b", "a.later"]

    run(scenario())


def test_request_that_comes_with_the_end_of_the_keep_alive_time_is_answered() -> None:
    async def scenario() -> None:
        edge = Edge()
        async with serving(edge) as (port, server):
            client = _Client(port, server)
            await client.send(post(b"x"), 0)
            edge.link.outcomes = []
            [connection] = server.server_state.connections
            # The time is over, and the server looks whether a request has arrived meanwhile.
            connection.timeout_keep_alive_handler()
            connection.data_received(post(b"x"))
            looked = asyncio.Event()
            asyncio.get_running_loop().call_later(0.01, looked.set)
            await looked.wait()
            [answer] = edge.link.outcomes
            answer()
            [received] = await client.send(b"", 0)
            assert received.startswith(b"HTTP/1.1 201")
            client.close()

    run(scenario())


def test_heads_are_forgotten_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_heads, "_HEADS_MAX", 2)

    async def scenario() -> None:
        edge = Edge()
        async with serving(edge) as (port, server):
            client = _Client(port, server)
            for number in range(5):
                await client.send(post(b"x", subject=b"a.%d" % number), 0)
                assert 1 <= len(edge.app.known_heads) <= 2
            long = post(b"x", b"H: " + bytes(1_024).replace(b"\0", b"v"))
            once = [
                post(b"x", b"X-Request-Id: 1"),
                post(b"x", b"Nats-Msg-Id: 1"),
                post(b"x", b"Idempotency-Key: 1"),
                long,
            ]
            known = len(edge.app.known_heads)
            for request in once:
                await client.send(request, 0)
                assert len(edge.app.known_heads) == known
            client.close()

    run(scenario())
