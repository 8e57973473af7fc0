"""Sockets over a link that fails as told: dead peers, back-pressure, storage gone and back."""

import asyncio
import base64
import contextlib
import gc
import json
import os
import select
import socket
import threading
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest
import uvloop
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode
from websockets.typing import Subprotocol

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import ConsumerConfig, ConsumerInfo, StoredMessage
from contrail_edge.http_protocol import EdgeHttpProtocol
from contrail_edge.ws.websocket import CloseCode, EdgeSocket
from contrail_gateway.core.session import OUTSTANDING_MAX
from contrail_gateway.sockets.session import SocketSession
from contrail_link.contract.consume import AckResult, Delivery, PullResult
from contrail_storage.consumers.binding import Binding
from tests.unit.edge.edge_rig import Edge
from tests.unit.edge.edge_serving import SOON_S, serving, wait_until

SUB = {"op": "sub", "id": 1, "sid": "s", "stream": "S", "consumer": "c", "credit": {"msgs": 9}}
PUB = {"op": "pub", "id": 1, "subject": "a.b", "data": "x"}


@contextlib.asynccontextmanager
async def talking(port: int) -> AsyncIterator[ClientConnection]:
    """A client that has read ``info``."""
    url = f"ws://127.0.0.1:{port}/v1/ws"
    form = [Subprotocol("contrail.v1.json")]
    async with connect(
        url, subprotocols=form, compression=None, close_timeout=0.1, ping_interval=None
    ) as opened:
        assert (await frame(opened))["op"] == "info"
        yield opened


async def frame(client: ClientConnection) -> dict[str, Any]:
    async with asyncio.timeout(SOON_S):
        found: dict[str, Any] = json.loads(await client.recv())
    return found


async def ask(client: ClientConnection, value: dict[str, Any]) -> dict[str, Any]:
    await client.send(json.dumps(value))
    return await frame(client)


async def code_of_close(client: ClientConnection) -> int:
    with pytest.raises(ConnectionClosed) as ended:
        await frame(client)
    assert ended.value.rcvd is not None
    return ended.value.rcvd.code


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


def is_readable(connection: socket.socket) -> bool:
    return bool(select.select([connection], [], [], 0)[0])


def delivered(*seqs: int) -> PullResult:
    stored = [StoredMessage(seq, "a.b", 0, None, b"x") for seq in seqs]
    return PullResult([Delivery(one, one.seq, 1, 0) for one in stored], 0, 1, 7, 3)


def test_peer_that_answers_no_ping_is_cut() -> None:
    async def scenario() -> None:
        async with serving(Edge(socket_ping_s=0.1)) as (port, server):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            key = base64.b64encode(os.urandom(16)).decode()
            writer.write(
                f"GET /v1/ws HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\n"
                f"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n"
                f"Sec-WebSocket-Protocol: contrail.v1.json\r\n\r\n".encode()
            )
            with contextlib.suppress(ConnectionResetError):
                received = await asyncio.wait_for(reader.read(), SOON_S)
                assert received.endswith(b"\x89\x00"), "a ping is the last that was sent"
            await wait_until(lambda: not server.server_state.connections)
            writer.close()

    run(scenario())


def test_peer_that_answers_pings_stays() -> None:
    async def scenario() -> None:
        async with serving(Edge(socket_ping_s=0.02)) as (port, _), talking(port) as client:
            for _ in range(10):
                await (await client.ping())
                await asyncio.wait({asyncio.ensure_future(client.wait_closed())}, timeout=0.03)
            assert (await ask(client, {"op": "ping"}))["op"] == "pong"

    run(scenario())


def test_socket_that_does_not_connect_in_time_is_closed() -> None:
    async def scenario() -> None:
        async with serving(Edge(token="t", connect_s=0.1)) as (port, _), talking(port) as client:
            assert await code_of_close(client) == 4501

    run(scenario())


def test_connect_that_came_while_the_server_was_busy_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It lies in the socket's buffer when the loop finds that the time for it is over."""
    asked = json.dumps({"op": "connect", "id": 1, "token": "t"}).encode()
    connect_frame = bytes([0x81, 0x80 | len(asked), 0, 0, 0, 0]) + asked
    opening = (
        b"GET /v1/ws HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n"
        b"Sec-WebSocket-Protocol: contrail.v1.json\r\n\r\n"
    )
    publish = (
        b"POST /v1/subjects/a.b/messages HTTP/1.1\r\nHost: localhost\r\n"
        b"Authorization: Bearer t\r\nContent-Length: 1\r\n\r\nx"
    )

    async def scenario() -> bool:
        """Whether the server became busy before the deadline, which a loaded machine may miss."""
        edge = Edge(token="t", connect_s=0.5)
        closed_already = False
        loop = asyncio.get_running_loop()
        async with serving(edge) as (port, _):
            with (
                socket.create_connection(("127.0.0.1", port)) as late,
                socket.create_connection(("127.0.0.1", port)) as other,
            ):
                late.setblocking(False)
                other.setblocking(False)

                def hold_up(*_: object) -> None:
                    nonlocal closed_already
                    closed_already = is_readable(late)
                    late.sendall(connect_frame)
                    threading.Event().wait(1.0)
                    raise ApiError(errors.OVERLOADED)

                monkeypatch.setattr(edge.link, "publish_then", hold_up)
                late.sendall(opening)
                got = b""
                while b'"op":"info"' not in got:
                    got += await asyncio.wait_for(loop.sock_recv(late, 1 << 16), SOON_S)
                other.sendall(publish)
                await asyncio.wait_for(loop.sock_recv(other, 1 << 16), SOON_S)
                if closed_already:
                    return False
                while b'"op":"ok"' not in got:
                    piece = await asyncio.wait_for(loop.sock_recv(late, 1 << 16), SOON_S)
                    assert piece[:1] != b"\x88", "closed"
                    got += piece
        return True

    assert any(uvloop.run(scenario()) for _ in range(20))


def test_reading_stops_while_too_much_is_unanswered_and_continues_after() -> None:
    async def scenario() -> None:
        edge = Edge()
        edge.link.outcomes = waiting = []
        count = 3 * OUTSTANDING_MAX
        async with serving(edge) as (port, _), talking(port) as client:

            async def publish() -> None:
                padded = {**PUB, "data": "x" * 1_000}
                for number in range(count):
                    await client.send(json.dumps({**padded, "id": number}))

            sending = asyncio.create_task(publish())
            await wait_until(lambda: len(waiting) >= OUTSTANDING_MAX)
            held = len(waiting)
            await asyncio.wait({sending}, timeout=0.3)
            assert len(waiting) == held < 2 * OUTSTANDING_MAX
            answered = 0
            while answered < count:
                await wait_until(lambda: bool(waiting))
                for done in [waiting.pop(0) for _ in range(len(waiting))]:
                    done()
                    answered += 1
                await asyncio.sleep(0)
            await sending
            assert [(await frame(client))["id"] for _ in range(count)] == list(range(count))

    run(scenario())


def test_storage_that_was_away_continues_where_it_was() -> None:
    async def scenario() -> None:
        edge = Edge()
        away = [ApiError(errors.NOT_READY), ApiError(errors.OVERLOADED)]
        edge.link.failures = [*away, ApiError(errors.TOO_MANY_WAITERS)]
        edge.link.pull_results = [delivered(1, 2)]
        async with serving(edge) as (port, _), talking(port) as client:
            assert (await ask(client, SUB))["op"] == "ok"
            found = await frame(client)
            assert [one["seq"] for one in found["messages"]] == [1, 2]

    run(scenario())


def test_ordered_subscription_resumes_although_storage_is_away_meanwhile() -> None:
    async def scenario() -> None:
        edge = Edge()
        made: list[ConsumerConfig] = []
        away = [ApiError(errors.NOT_READY), ApiError(errors.OUTCOME_UNKNOWN)]

        async def put_consumer(
            stream: str, config: ConsumerConfig, *_: object
        ) -> tuple[ConsumerInfo, bool]:
            if made and away:
                raise away.pop()
            made.append(config)
            return await edge.link.consumer_info(stream, config.name), True

        async def delete_consumer(*_: object) -> None:
            raise ApiError(errors.CONSUMER_NOT_FOUND)

        edge.link.put_consumer = put_consumer  # type: ignore[attr-defined]
        edge.link.delete_consumer = delete_consumer  # type: ignore[attr-defined]
        edge.link.failures = [None, ApiError(errors.CONSUMER_DELETED)]
        edge.link.failures += [ApiError(errors.CONSUMER_NOT_FOUND)] * 2
        edge.link.pull_results = [delivered(1, 2), delivered(3)]
        edge.link.pull_results[1].deliveries[0] = Delivery(
            StoredMessage(3, "a.b", 0, None, b"x"), 1, 1, 0
        )
        ordered = {**SUB, "consumer": None, "ordered": True}
        async with serving(edge) as (port, _), talking(port) as client:
            assert (await ask(client, ordered))["op"] == "ok"
            seqs = [one["seq"] for _ in range(2) for one in (await frame(client))["messages"]]
            assert seqs == [1, 2, 3]
            assert [config.opt_start_seq for config in made] == [0, 3]

    run(scenario())


def test_publish_while_storage_is_away_is_refused_and_may_be_tried_again() -> None:
    async def scenario() -> None:
        edge = Edge()
        edge.link.failures = [ApiError(errors.NOT_READY, applied=False)]
        async with serving(edge) as (port, _), talking(port) as client:
            refused = await ask(client, PUB)
            assert (refused["problem"]["name"], refused["problem"]["retryable"]) == (
                "not_ready",
                True,
            )
            assert refused["problem"]["applied"] is False
            assert (await ask(client, PUB))["op"] == "ack"

    run(scenario())


def test_unknown_outcome_is_reported_by_the_id_of_the_message() -> None:
    async def scenario() -> None:
        edge = Edge()
        edge.link.outcomes = waiting = []
        async with serving(edge) as (port, _), talking(port) as client:
            await client.send(json.dumps(PUB))
            await wait_until(lambda: bool(waiting))
            waiting.pop()(ApiError(errors.OUTCOME_UNKNOWN))
            answer = await frame(client)
            assert (answer["id"], answer["problem"]["status"]) == (1, 504)
            assert "applied" not in answer["problem"]

    run(scenario())


def test_failure_that_is_nobodys_fault_but_ours_closes_the_socket() -> None:
    async def scenario() -> None:
        edge = Edge()
        edge.link.failures = [RuntimeError("a fault")]
        async with serving(edge) as (port, _), talking(port) as client:
            await client.send(json.dumps(PUB))
            assert await code_of_close(client) == 1011

    run(scenario())


def test_waiting_pull_of_a_lost_socket_is_cancelled() -> None:
    async def scenario() -> None:
        edge = Edge()
        async with serving(edge) as (port, _):
            async with talking(port) as client:
                await ask(client, SUB)
                await asyncio.wait_for(edge.link.waiting.wait(), SOON_S)
            await asyncio.wait_for(edge.link.cancelled.wait(), SOON_S)

    run(scenario())


def test_acks_of_one_pass_of_the_loop_go_together() -> None:
    async def scenario() -> None:
        edge = Edge()
        edge.link.pull_results = [delivered(1, 2, 3)]
        async with serving(edge) as (port, _), talking(port) as client:
            await ask(client, SUB)
            await frame(client)
            acks = [{"op": "ack", "sid": "s", "seqs": [seq]} for seq in (1, 2)]
            await client.send(json.dumps([*acks, {**acks[0], "seqs": [3], "id": "last"}]))
            assert await frame(client) == {"op": "ok", "id": "last"}
            assert [(item.seqs, item.consumer_id, item.epoch) for item in edge.link.acked] == [
                ([1], 7, 3),
                ([2], 7, 3),
                ([3], 7, 3),
            ]

    run(scenario())


def test_messages_that_wait_for_credit_are_given_back_when_the_socket_breaks() -> None:
    async def scenario() -> None:
        edge = Edge()
        edge.link.pull_results = [delivered(1, 2, 3)]
        async with serving(edge) as (port, _):
            async with talking(port) as client:
                await ask(client, {**SUB, "credit": {"bytes": 1}})
                assert [one["seq"] for one in (await frame(client))["messages"]] == [1]
            await wait_until(lambda: len(edge.link.acked) == 1)
            assert [(item.kind, item.seqs) for item in edge.link.acked] == [("nak", [2, 3])]

    run(scenario())


def test_ack_of_what_is_held_and_what_is_not_is_done_and_refused_each_for_itself() -> None:
    async def scenario() -> None:
        edge = Edge()
        edge.link.pull_results = [delivered(1, 2, 3)]
        async with serving(edge) as (port, _), talking(port) as client:
            await ask(client, SUB)
            await frame(client)
            ack = {"op": "ack", "sid": "s", "id": "mixed", "seqs": [1, 7], "ranges": [[3, 5]]}
            refused = await ask(client, ack)
            assert (refused["op"], refused["id"], refused["sid"]) == ("error", "mixed", "s")
            assert refused["problem"]["name"] == "not_sent_here"
            assert refused["problem"]["detail"] == "not awaiting acknowledgement on this socket: 7"
            assert "applied" not in refused["problem"]
            assert [(item.kind, item.seqs) for item in edge.link.acked] == [("ack", [1, 3])]
            nothing = await ask(client, {**ack, "seqs": [1], "ranges": []})
            assert nothing["problem"]["applied"] is False
            assert (await ask(client, {**ack, "seqs": [2], "ranges": []}))["op"] == "ok"

    run(scenario())


def test_message_acknowledged_while_it_waits_for_credit_again_is_not_pushed() -> None:
    async def scenario() -> None:
        edge = Edge()
        edge.link.pull_results = [delivered(1, 2), delivered(1, 2)]
        async with serving(edge) as (port, _), talking(port) as client:
            await ask(client, {**SUB, "credit": {"bytes": 9}})
            first = await frame(client)
            assert [one["seq"] for one in first["messages"]] == [1, 2]
            # Both come again, and one byte more is all that may be sent.
            assert (await frame(client))["messages"][0]["seq"] == 1
            ack = {"op": "ack", "sid": "s", "id": 2, "seqs": [2]}
            assert (await ask(client, ack))["op"] == "ok"
            await client.send(json.dumps({"op": "credit", "sid": "s", "bytes": 99}))
            await asyncio.wait_for(edge.link.waiting.wait(), SOON_S)
            assert (await ask(client, {"op": "ping", "id": 3})) == {"op": "pong", "id": 3}

    run(scenario())


def test_frame_after_publishes_of_the_same_array_finds_them_passed_on() -> None:
    async def scenario() -> None:
        edge = Edge()
        edge.link.outcomes = []
        async with serving(edge) as (port, _), talking(port) as client:
            await client.send(json.dumps([PUB, {**PUB, "id": 2}, {"op": "ping", "id": 3}]))
            assert await frame(client) == {"op": "pong", "id": 3}
            assert len(edge.link.outcomes) == 2
            for answer in edge.link.outcomes:
                answer()
            acks = [await frame(client), await frame(client)]
            assert [(ack["op"], ack["id"], ack["seq"]) for ack in acks] == [
                ("ack", 1, 1),
                ("ack", 2, 2),
            ]

    run(scenario())


def test_publishes_in_front_of_what_ends_the_socket_are_stored() -> None:
    async def scenario() -> None:
        edge = Edge()
        async with serving(edge) as (port, _), talking(port) as client:
            broken = Frame(Opcode.TEXT, b"3").serialize(mask=True)
            whole = Frame(Opcode.TEXT, json.dumps(PUB).encode()).serialize(mask=True)
            client.transport.write(whole + whole + broken)
            assert await code_of_close(client) == CloseCode.PROTOCOL_ERROR
            await wait_until(lambda: len(edge.link.published) == 2)

    run(scenario())


UNSUB = {"op": "unsub", "id": 2, "sid": "s"}


def test_unsub_is_answered_although_the_server_begins_to_drain_meanwhile() -> None:
    async def scenario() -> None:
        edge = Edge()
        releasing, released = asyncio.Event(), asyncio.Event()

        class SlowBinding(Binding):
            async def aclose(self) -> None:
                releasing.set()
                await released.wait()
                await super().aclose()

        async def bind_consumer(*_: object) -> Binding:
            return SlowBinding(lambda _: None)

        edge.link.bind_consumer = bind_consumer  # type: ignore[method-assign]
        async with serving(edge) as (port, server), talking(port) as client:
            assert (await ask(client, SUB))["op"] == "ok"
            await client.send(json.dumps(UNSUB))
            await asyncio.wait_for(releasing.wait(), SOON_S)
            server.should_exit = True
            assert (await frame(client))["op"] == "drain"
            released.set()
            assert await frame(client) == {"op": "ok", "id": 2}

    run(scenario())


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (None, {"op": "ok", "id": 1}),
        (ApiError(errors.CONSUMER_NOT_FOUND), {"op": "error", "id": 1}),
        (RuntimeError("a fault"), {"op": "gone"}),
    ],
)
def test_unsub_is_answered_however_the_start_of_its_subscription_ends(
    failure: Exception | None, told: dict[str, Any]
) -> None:
    async def scenario() -> None:
        edge = Edge()
        asked, answered = asyncio.Event(), asyncio.Event()
        found = edge.link.consumer_info

        async def consumer_info(stream: str, consumer: str) -> ConsumerInfo:
            asked.set()
            await answered.wait()
            if failure is not None:
                raise failure
            return await found(stream, consumer)

        edge.link.consumer_info = consumer_info  # type: ignore[method-assign]
        async with serving(edge) as (port, _), talking(port) as client:
            await client.send(json.dumps(SUB))
            await asyncio.wait_for(asked.wait(), SOON_S)
            await client.send(json.dumps([UNSUB, {"op": "ping", "id": 3}]))
            assert await frame(client) == {"op": "pong", "id": 3}
            answered.set()
            assert (await frame(client)).items() >= {**told, "sid": "s"}.items()
            assert await frame(client) == {"op": "ok", "id": 2}

    run(scenario())


def test_unsub_is_answered_although_the_stream_is_deleted_meanwhile() -> None:
    async def scenario() -> None:
        edge = Edge()
        making, made = asyncio.Event(), asyncio.Event()

        async def put_consumer(
            stream: str, config: ConsumerConfig, *_: object
        ) -> tuple[ConsumerInfo, bool]:
            making.set()
            await made.wait()
            return await edge.link.consumer_info(stream, config.name), True

        async def gone(*_: object) -> None:
            raise ApiError(errors.STREAM_NOT_FOUND)

        edge.link.put_consumer = put_consumer  # type: ignore[attr-defined]
        edge.link.stream_info = edge.link.delete_consumer = gone  # type: ignore[attr-defined]
        ordered = {**SUB, "consumer": None, "ordered": True}
        ordered |= {"deliver_policy": "by_start_sequence", "opt_start_seq": 5}
        async with serving(edge) as (port, _), talking(port) as client:
            await client.send(json.dumps(ordered))
            await asyncio.wait_for(making.wait(), SOON_S)
            await client.send(json.dumps([UNSUB, {"op": "ping", "id": 3}]))
            assert await frame(client) == {"op": "pong", "id": 3}
            made.set()
            assert (await frame(client))["op"] == "ok"
            assert (await frame(client))["op"] == "gone"
            assert await frame(client) == {"op": "ok", "id": 2}

    run(scenario())


def test_acks_go_on_after_one_that_failed_unexpectedly(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> list[AckResult]:
        raise RuntimeError("a fault")

    async def scenario() -> None:
        edge = Edge()
        edge.link.pull_results = [delivered(1, 2)]
        ack = {"op": "ack", "sid": "s", "id": 2, "seqs": [1]}
        async with serving(edge) as (port, _), talking(port) as client:
            await ask(client, SUB)
            await frame(client)
            with monkeypatch.context() as patch:
                patch.setattr(edge.link, "acknowledge", broken)
                refused = await ask(client, ack)
            assert (refused["op"], refused["problem"]["name"]) == ("error", "internal")
            assert await ask(client, {**ack, "id": 3}) == {"op": "ok", "id": 3}

    run(scenario())


def test_connections_that_ended_are_freed_without_a_collection() -> None:
    """They may be left out of collections, and would stay if they referred to each other."""
    kinds = EdgeHttpProtocol, EdgeSocket, SocketSession

    def left() -> int:
        return sum(issubclass(type(one), kinds) for one in gc.get_objects())

    async def scenario() -> None:
        async with serving(Edge()) as (port, _):
            for _ in range(5):
                async with talking(port) as client:
                    assert (await ask(client, {"op": "ping"}))["op"] == "pong"
                    assert (await ask(client, PUB))["op"] == "ack"
                    assert left() >= before + 2
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                for path in ("/healthz", "/nowhere", "/v1/ws"):
                    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
                    await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SOON_S)
                writer.close()
                # A timer or context may still refer to the last one.
                await wait_until(lambda: left() <= before + 1)

    gc.collect()
    before = left()  # of other tests
    gc.disable()
    try:
        uvloop.run(scenario())
    finally:
        gc.enable()
