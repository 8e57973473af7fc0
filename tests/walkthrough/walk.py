"""The walk: a server in this process, one publish, one delivery with its ack, both recorded."""

import asyncio
import json
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import contrail_api
import contrail_gateway
from contrail_edge.app import build_app
from contrail_edge.http.settings import EdgeSettings
from contrail_edge.server import EdgeServer, make_server
from contrail_serve.groups import SingleMemberGroups
from contrail_storage.link import LocalLink
from contrail_storage.node import NodeOptions, StorageNode
from contrail_storage.wal import LogOptions
from tests.walkthrough.tracing import Census, Hop, Recorder

PUBLISHES: Final = 100
"""So many that no timer runs during one of them, also on a busy machine."""
_NEVER_S: Final = 3_600.0
_PUBLISH_PATH: Final = "/v1/subjects/tour.hello/messages"


class _Client:
    """A bare HTTP/1.1 client on one connection, so that the trace shows only the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def post(self, path: str, body: bytes) -> Any:
        head = (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        self._writer.write(head.encode() + body)
        answer = (await self._reader.readuntil(b"\r\n\r\n")).decode()
        length = int(answer.lower().split("content-length:")[1].split("\r\n")[0])
        value = json.loads(await self._reader.readexactly(length))
        assert answer.split()[1][0] == "2", value
        return value


@dataclass(frozen=True, slots=True)
class Walk:
    """The files that one publish and one delivery pass through.

    `publish_calls` are all calls of a publish, from the socket to its answer. `published` and
    `publish_calls` are of the shortest of several publishes, because timers may run during one.
    """

    published: list[Hop]
    delivered: list[Hop]
    publish_calls: Census


async def walk(data_dir: Path) -> Walk:
    """Publish and deliver one message."""
    recorder = Recorder()
    recorder.install()
    try:
        # The thread of the log writes an empty batch when it is idle. On a busy machine that could
        # happen during the walk, before the batch of the walk.
        options = NodeOptions(data_dir, log=LogOptions(idle_s=_NEVER_S))
        node = await asyncio.to_thread(StorageNode.open, options, SingleMemberGroups())
        await node.start()
        try:
            return await _walk_served(node, recorder)
        finally:
            await node.stop()
    finally:
        recorder.uninstall()


async def _walk_served(node: StorageNode, recorder: Recorder) -> Walk:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    listener.setblocking(False)
    server, serving = _serve(node, listener)
    try:
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        client = _Client(reader, writer)
        stream = json.dumps({"name": "TOUR", "subjects": ["tour.>"]}).encode()
        await client.post("/v1/streams", stream)
        await client.post("/v1/streams/TOUR/consumers", b'{"durable_name": "walker"}')
        await client.post(_PUBLISH_PATH, b"the first finds out which stream takes it")
        await node.until_written()
        await node.checkpoint()  # so that no checkpoint becomes due during the walk
        published = [await _publish(node, client, recorder) for _ in range(PUBLISHES)]
        await node.until_written()
        recorder.watch()
        await _deliver_and_ack(client)
        delivered = recorder.hops()
        writer.close()
    finally:
        server.should_exit = True
        await serving
        listener.close()
    hops, calls = min(published, key=lambda one: one[1].calls)
    return Walk(hops, delivered, calls)


async def _publish(
    node: StorageNode, client: _Client, recorder: Recorder
) -> tuple[list[Hop], Census]:
    await node.until_written()  # so that no work of an earlier publish is seen
    recorder.watch()
    await client.post(_PUBLISH_PATH, b"hello")
    return recorder.hops(), recorder.census()


def _serve(node: StorageNode, listener: socket.socket) -> tuple[EdgeServer, "asyncio.Future[None]"]:
    settings = EdgeSettings(ack_keys=(b"a key for one walk",))
    link = LocalLink(node)
    modules = [
        contrail_api.edge_module(link, settings),
        contrail_gateway.edge_module(link, settings),
    ]
    server = make_server(build_app(modules, settings), settings, [listener])
    return server, asyncio.ensure_future(server.serve())


async def _deliver_and_ack(client: _Client) -> None:
    consumer = "/v1/streams/TOUR/consumers/walker"
    pulled = await client.post(f"{consumer}/next", b'{"batch": 1, "expires": "5s"}')
    token = pulled["messages"][0]["ack_token"]
    acks = json.dumps({"acks": [{"token": token, "kind": "ack"}], "sync": True}).encode()
    await client.post(f"{consumer}/ack", acks)
