"""Ordered reading from servers that send columns, that do not know them, and that refuse them."""

import asyncio
import struct
from typing import Any

import msgspec
from websockets.asyncio.server import ServerConnection, serve
from websockets.typing import Subprotocol

from contrail_client.live.connection import AsyncConnection
from contrail_client.live.frames import SUBPROTOCOL
from contrail_client.live.reader import AsyncOrderedReader
from contrail_client.models import StreamInfo, StreamState
from contrail_client.transport import Options
from contrail_client.transport.aio import AsyncTransport
from tests.support.each import each

DEADLINE_S = 60.0
INFO = {"op": "info", "server": "test", "node": "n", "max_payload": 1, "heartbeat": "15s"}
STREAM = StreamInfo(
    config={"name": "S"},
    created="2026-01-01T00:00:00Z",
    state=StreamState(messages=2, bytes=2, first_seq=1, last_seq=2),
)


def one_by_one(sid: str) -> dict[str, Any]:
    messages = [
        {
            "stream": "S",
            "seq": seq,
            "subject": "a",
            "time": "1970-01-01T00:00:01.000000005Z",
            "headers": {},
            "consumer_seq": seq,
            "num_delivered": 1,
            "num_pending": 2 - seq,
            "data": b"x" * seq,
        }
        for seq in (1, 2)
    ]
    return {"op": "msgs", "sid": sid, "messages": messages}


def in_columns(sid: str) -> dict[str, Any]:
    cols = {
        "stream": "S",
        "count": 2,
        "first_consumer_seq": 1,
        "num_pending": 0,
        "seqs": struct.pack("<2q", 1, 2),
        "times_ns": struct.pack("<2q", 1_000_000_005, 1_000_000_005),
        "subjects": ["a"],
        "subject_index": bytes(8),
        "offsets": struct.pack("<3I", 0, 1, 3),
        "data": b"xxx",
    }
    return {"op": "msgs", "sid": sid, "cols": cols}


class OneServer:
    """Answers subscriptions as ``kind`` of server; ``asked`` is what they asked for."""

    def __init__(self, kind: str) -> None:
        self.asked: list[bool] = []
        self._kind = kind

    async def __call__(self, socket: ServerConnection) -> None:
        await socket.send(msgspec.msgpack.encode(INFO))
        async for message in socket:
            for frame in msgspec.msgpack.decode(message):
                if frame["op"] == "sub":
                    for answer in self._answers(frame):
                        await socket.send(msgspec.msgpack.encode(answer))

    def _answers(self, frame: dict[str, Any]) -> list[dict[str, Any]]:
        cols = frame.get("cols", False)
        self.asked.append(cols)
        if cols and self._kind == "refuses":
            return [{"op": "error", "id": frame["id"], "problem": {"name": "invalid_field"}}]
        ok = {"op": "ok", "id": frame["id"], "sid": frame["sid"], "consumer": "c"}
        pushed = in_columns if cols and self._kind == "knows" else one_by_one
        return [ok | {"num_pending": 2}, pushed(frame["sid"])]


class StreamAnswers(AsyncTransport):
    """Answers every request with the stream: the server speaks over WebSocket only."""

    async def run(self, call: Any) -> Any:
        return STREAM


@each(("kind", "asked"), [("knows", [True]), ("ignores", [True]), ("refuses", [True, False])])
def test_reader_gives_the_same_messages_whatever_the_server_knows(
    kind: str, asked: list[bool]
) -> None:
    async def scenario() -> None:
        server = OneServer(kind)
        protocols = [Subprotocol(SUBPROTOCOL)]
        async with serve(server, "127.0.0.1", 0, subprotocols=protocols, compression=None) as at:
            port = next(iter(at.sockets)).getsockname()[1]
            transport = StreamAnswers(Options(url=f"http://127.0.0.1:{port}"))
            connection = AsyncConnection(transport)
            reader = AsyncOrderedReader(connection, "S")
            found = [await anext(reader) for _ in range(2)]
            await connection.close()
            await transport.close()
        assert server.asked == asked
        assert [(one.seq, one.data, one.num_pending) for one in found] == [
            (1, b"x", 1),
            (2, b"xx", 0),
        ]
        assert {one.time_ns for one in found} == {1_000_000_005}

    async def within_time() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await scenario()

    asyncio.run(within_time())
