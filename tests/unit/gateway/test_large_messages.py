"""Large messages of a socket, hostile and honest: answered in order, and never long at a time."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.frames import Close, Frame, Opcode
from websockets.typing import Subprotocol

from contrail_edge.http import turns
from contrail_gateway.sockets.large_frames import FRAMES_MAX
from tests.unit.edge.calls_of_turns import CallsOfTurns
from tests.unit.edge.edge_rig import Edge
from tests.unit.edge.edge_serving import SOON_S, serving, wait_until

SIZE = 4 << 20
CALLS_MAX = 20_000
"""Calls of functions between two turns of the loop, those of the client too: some 2 ms."""
JSON, MSGPACK = "contrail.v1.json", "contrail.v1.msgpack"
PUB = '{"op":"pub","id":1,"subject":"a.b",'
pack = msgspec.msgpack.encode


@contextlib.asynccontextmanager
async def talking(port: int, form: str = JSON) -> AsyncIterator[ClientConnection]:
    """A client that has read ``info``."""
    url = f"ws://127.0.0.1:{port}/v1/ws"
    async with connect(
        url,
        subprotocols=[Subprotocol(form)],
        compression=None,
        close_timeout=0.1,
        ping_interval=None,
        max_size=None,
    ) as opened:
        assert (await frame(opened))["op"] == "info"
        yield opened


async def frame(client: ClientConnection) -> dict[str, Any]:
    async with asyncio.timeout(SOON_S):
        found = await client.recv()
    decode: Callable[..., Any] = json.loads if isinstance(found, str) else msgspec.msgpack.decode
    answer: dict[str, Any] = decode(found)
    return answer


async def told(client: ClientConnection) -> str | int:
    """The name of the refusal that comes, or the code of the close."""
    try:
        return str((await frame(client))["problem"]["name"])
    except ConnectionClosed as closed:
        return 0 if closed.rcvd is None else closed.rcvd.code


def filled(before: str, unit: str, behind: str) -> str:
    return before + ",".join([unit] * (SIZE // (len(unit) + 1))) + behind


def numbered(before: str, unit: str, behind: str) -> str:
    count = SIZE // (len(unit) + 5)
    return before + ",".join(unit.replace("#", str(at)) for at in range(count)) + behind


def packed_list(before: dict[str, Any], name: str, unit: bytes) -> bytes:
    count = SIZE // len(unit)
    head = (
        b"\xdf"
        + (len(before) + 1).to_bytes(4)
        + b"".join(pack(x) for p in before.items() for x in p)
    )
    return head + pack(name) + b"\xdd" + count.to_bytes(4) + unit * count


HEADERS = {f"a{at}": ["x"] for at in range(300_000)}
PACKED_PUB = {"op": "pub", "id": 1, "subject": "a.b", "data": b""}
HOSTILE: dict[str, tuple[Callable[[], str | bytes], str | int]] = {
    "headers": (
        lambda: numbered(PUB + '"data":"","headers":{', '"a#":["x"]', "}}"),
        "headers_too_large",
    ),
    "values": (
        lambda: filled(PUB + '"data":"","headers":{"a":[', '""', "]}}"),
        "headers_too_large",
    ),
    "numbers": (lambda: filled(PUB + '"json":[', "1", "]}"), "message_too_large"),
    "objects": (lambda: filled(PUB + '"json":[', "{}", "]}"), "message_too_large"),
    "blanks": (lambda: PUB + '"json":[1' + " " * SIZE + "2]}", "malformed_body"),
    "deep": (lambda: PUB + '"json":' + "[" * SIZE, 4500),
    "batch": (
        lambda: filled(
            '{"op":"pub_batch","id":1,"stream":"S","messages":[', '{"subject":"a"}', "]}"
        ),
        "batch_too_large",
    ),
    "pings": (lambda: filled("[", '{"op":"ping"}', "]"), 4513),
    "no objects": (lambda: filled("[", "1", "]"), 4513),
    "unknown ops": (lambda: filled("[", '{"op":"x"}', "]"), 4513),
    "unended": (lambda: filled("[", '{"op":"x","y":"' + "z" * 1_000 + '"}', ""), 4500),
    "seqs": (lambda: filled('{"op":"ack","id":1,"sid":"s","seqs":[', "1", "]}"), "batch_too_large"),
    "ranges": (
        lambda: filled('{"op":"ack","sid":"s","ranges":[', "[1,1]", "]}"),
        "batch_too_large",
    ),
    "shards": (
        lambda: numbered('{"op":"ack","sid":"s","seqs":{', '"#":[]', "}}"),
        "batch_too_large",
    ),
    "unknown fields": (
        lambda: numbered('{"op":"sub","id":1,"sid":"a",', '"a#":1', "}"),
        "invalid_field",
    ),
    "packed headers": (lambda: pack({**PACKED_PUB, "headers": HEADERS}), 4513),
    "packed names": (
        lambda: pack({**PACKED_PUB, "headers": dict(list(HEADERS.items())[:20_000])}),
        "headers_too_large",
    ),
    "packed numbers": (lambda: b"\xdd" + SIZE.to_bytes(4) + b"\x01" * SIZE, 4513),
    "packed seqs": (lambda: packed_list({"op": "ack", "sid": "s"}, "seqs", b"\x01"), 4513),
    "some packed seqs": (
        lambda: pack({"op": "ack", "id": 1, "sid": "s", "seqs": [1] * 70_000}),
        "batch_too_large",
    ),
    "packed batch": (
        lambda: pack({"op": "pub_batch", "id": 1, "stream": "S", "messages": [{}] * 70_000}),
        "batch_too_large",
    ),
    "cut": (lambda: pack([PACKED_PUB] * 9_000)[:-1], 4500),
}


@pytest.mark.long
@pytest.mark.parametrize("name", HOSTILE)
def test_message_that_asks_for_much_work_is_refused_in_steps(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "TURN_NS", 0)  # every step is a turn
    make, answer = HOSTILE[name]
    message = make()
    calls = CallsOfTurns()

    async def scenario() -> None:
        form = JSON if isinstance(message, str) else MSGPACK
        async with serving(Edge()) as (port, _), talking(port, form) as client:
            with calls:
                await client.send(message)
                assert await told(client) == answer

    asyncio.run(scenario())
    assert calls.most <= CALLS_MAX, calls.most


@pytest.mark.parametrize("form", [JSON, MSGPACK])
def test_frames_at_and_beyond_their_number(form: str) -> None:
    encode: Any = json.dumps if form == JSON else pack

    async def scenario() -> None:
        async with serving(Edge()) as (port, _), talking(port, form) as client:
            pings = [{"op": "ping", "id": at} for at in range(FRAMES_MAX)]
            await client.send(encode(pings))
            assert [(await frame(client))["id"] for _ in pings] == list(range(FRAMES_MAX))
            await client.send(encode([*pings, {"op": "ping"}]))
            assert await told(client) == 4513

    asyncio.run(scenario())


@pytest.mark.long
def test_misunderstood_frames_are_refused_each_by_its_id_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turns, "TURN_NS", 0)
    calls = CallsOfTurns()

    async def scenario() -> None:
        async with serving(Edge()) as (port, _), talking(port) as client:
            with calls:
                await client.send(json.dumps([{"op": "x", "id": at} for at in range(3_000)]))
                found = [await frame(client) for _ in range(3_000)]
            assert [one["id"] for one in found] == list(range(3_000))

    asyncio.run(scenario())
    assert calls.most <= CALLS_MAX
    assert calls.turns >= 3_000


@pytest.mark.long
@pytest.mark.parametrize("form", [JSON, MSGPACK])
def test_large_array_of_publishes_is_stored_in_order_and_another_socket_is_served_in_between(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "TURN_NS", 0)
    texts = [str(at).zfill(700) for at in range(9_999)]
    if form == JSON:
        message = json.dumps([{"op": "pub", "subject": "a.b", "data": text} for text in texts])
    else:
        message = pack([{"op": "pub", "subject": "a.b", "data": text.encode()} for text in texts])
    assert 6 << 20 < len(message) < 8 << 20

    async def scenario() -> None:
        edge = Edge()
        async with (
            serving(edge) as (port, _),
            talking(port, form) as client,
            talking(port) as other,
        ):
            sent = asyncio.ensure_future(client.send(message))
            await wait_until(lambda: bool(edge.link.published))
            await other.send('{"op":"ping","id":1}')
            assert await frame(other) == {"op": "pong", "id": 1}
            assert len(edge.link.published) < len(texts)
            await sent
            await wait_until(lambda: len(edge.link.published) == len(texts))
            stored = [one.payload.decode() for many in edge.link.published for one in many]
            assert stored == texts

    asyncio.run(scenario())


@pytest.mark.parametrize("form", [JSON, MSGPACK])
def test_large_batch_is_answered_message_by_message(form: str) -> None:
    texts = [str(at).zfill(600) for at in range(9_998)]
    data: Any = (lambda text: text) if form == JSON else (lambda text: text.encode())
    items = [{"subject": "a.b", "data": data(text)} for text in texts]
    items[5]["headers"] = {f"H{at}": ["v"] for at in range(20_000)}
    items[7]["subject"] = "a..b"
    encode: Any = json.dumps if form == JSON else pack

    async def scenario() -> None:
        edge = Edge()
        async with serving(edge) as (port, _), talking(port, form) as client:
            asked = {"op": "pub_batch", "stream": "S", "messages": items, "id": "b"}
            await client.send(encode(asked))
            await client.send(encode({"op": "ping", "id": 2}))
            answer = await frame(client)
            assert (answer["op"], answer["id"]) == ("acks", "b")
            names = [one["problem"]["name"] for one in answer["results"] if "problem" in one]
            assert names == ["headers_too_large", "invalid_subject"]
            assert len(answer["results"]) == len(items)
            stored = [one.payload.decode() for many in edge.link.published for one in many]
            assert stored == [text for at, text in enumerate(texts) if at not in (5, 7)]
            assert await frame(client) == {"op": "pong", "id": 2}

    asyncio.run(scenario())


def test_large_value_is_stored_without_its_blanks() -> None:
    value = [{"a": ' \\" ', "b": [at, None, 1.5e3]} for at in range(20_000)]
    text = PUB + '"json":' + json.dumps(value, indent=8) + "}"
    assert len(text) > 1 << 20

    async def scenario() -> None:
        edge = Edge(payload_bytes_max=3 << 20)
        async with serving(edge) as (port, _), talking(port) as client:
            await client.send(text)
            assert (await frame(client))["op"] == "ack"
            [[stored]] = edge.link.published
            assert stored.payload == json.dumps(value, separators=(",", ":")).encode()

    asyncio.run(scenario())


def test_close_after_a_large_array_comes_after_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "TURN_NS", 0)
    pubs = json.dumps([{"op": "pub", "subject": "a.b", "data": str(at)} for at in range(2_000)])

    async def scenario() -> None:
        edge = Edge()
        async with serving(edge) as (port, _), talking(port) as client:
            array = Frame(Opcode.TEXT, pubs.encode()).serialize(mask=True)
            close = Frame(Opcode.CLOSE, Close(1000, "").serialize()).serialize(mask=True)
            client.transport.write(array + array + close)
            async with asyncio.timeout(SOON_S):
                await client.wait_closed()
            stored = [int(one.payload) for many in edge.link.published for one in many]
            assert stored == [*range(2_000), *range(2_000)]

    asyncio.run(scenario())


def test_bytes_of_a_message_that_is_worked_on_are_counted_until_it_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turns, "TURN_NS", 0)
    pubs = pack([{"op": "pub", "subject": "a.b", "data": bytes(700)} for _ in range(6_000)])

    async def scenario() -> None:
        edge = Edge()
        bodies = edge.app.state.bodies
        async with serving(edge) as (port, _), talking(port, MSGPACK) as client:
            await client.send(pubs)
            await wait_until(lambda: bool(edge.link.published))
            assert len(edge.link.published) < 6_000
            assert bodies.held >= len(pubs)
            await wait_until(lambda: len(edge.link.published) == 6_000)
            await wait_until(lambda: bodies.held == 0)

    asyncio.run(scenario())
