"""The walk: a server in this process, one publish, one delivery with its ack, both recorded."""

import asyncio
import json
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import contrail_api
import contrail_gateway
from contrail_api.publish import SinglePublish
from contrail_common.ack_tokens import AckTokens
from contrail_common.columns import blocks
from contrail_edge.app import EdgeApp, build_app
from contrail_edge.direct import DirectExchange
from contrail_edge.http import delivery as edge_delivery
from contrail_edge.http.guard import Guard
from contrail_edge.http.settings import EdgeSettings
from contrail_edge.inputs import publishing
from contrail_edge.server import EdgeServer, make_server
from contrail_gateway.acks import Acks
from contrail_gateway.pull import Pulls
from contrail_replicator.group import RaftGroup
from contrail_serve.groups import SingleMemberGroups
from contrail_storage.consumers.delivery import Desk
from contrail_storage.consumers.manager import ConsumerManager
from contrail_storage.core.consumer_machine import ConsumerMachine
from contrail_storage.core.stream.appending import Appender
from contrail_storage.core.stream.stream_machine import StreamMachine
from contrail_storage.link import LocalLink
from contrail_storage.node import NodeOptions, StorageNode
from contrail_storage.reading.reader import Reader
from contrail_storage.replica.applier import Applier
from contrail_storage.replica.entries import EntryContext
from contrail_storage.replica.proposer import Proposer
from contrail_storage.replica.shard import Shard
from contrail_storage.store.rocks_store import RocksStore
from contrail_storage.wal import LogOptions
from contrail_storage.wal.node_log import NodeLog
from tests.walkthrough.tracing import Census, Function, Hop, Recorder

PUBLISH: Final[list[Function]] = [
    EdgeApp.answer_directly,
    Guard.check,
    SinglePublish.publish_directly,
    publishing.check_message,
    LocalLink.publish_then,
    Proposer.append_then,
    Proposer._flush,
    RaftGroup.propose,
    NodeLog.append,
    NodeLog._write,
    RaftGroup.handle_durable,
    Applier.apply,
    StreamMachine.apply,
    Appender.append,
    EntryContext.resolve,
    DirectExchange.send,
    Shard.advance,
    blocks.encode_block,
    RocksStore.write,
    Applier.written,
]
DELIVERY: Final[list[Function]] = [
    EdgeApp.__call__,
    Pulls.next,
    LocalLink.pull,
    ConsumerManager.pull,
    Desk.pull,
    Reader.block_at,
    Reader.select,
    AckTokens.signer,
    edge_delivery.deliver,
    Acks.ack,
    AckTokens.opener,
    ConsumerManager.acknowledge,
    Desk.flush,
    NodeLog.append,
    StreamMachine.apply,
    ConsumerMachine.change,
    RocksStore.write,
]
_PUBLISHES: Final = 20
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
    """The hops of one publish and one delivery, and the expected hops that were not reached.

    `publish_calls` are all calls of a publish, from the socket to its answer. They are the fewest
    of several publishes, because timers of the groups may run during one.
    """

    published: list[Hop]
    delivered: list[Hop]
    missing: list[str]
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
        calls = [await _census(client, recorder) for _ in range(_PUBLISHES)]
        await node.until_written()
        published, missing = recorder.hops, recorder.missing()
        recorder.watch(DELIVERY)
        await _deliver_and_ack(client)
        await node.until_written()
        delivered = recorder.hops
        missing += recorder.missing()
        writer.close()
    finally:
        server.should_exit = True
        await serving
        listener.close()
    return Walk(published, delivered, missing, min(calls, key=lambda one: one.calls))


async def _census(client: _Client, recorder: Recorder) -> Census:
    recorder.watch(PUBLISH)
    await client.post(_PUBLISH_PATH, b"hello")
    return recorder.census()


def _serve(node: StorageNode, listener: socket.socket) -> tuple[EdgeServer, "asyncio.Future[None]"]:
    settings = EdgeSettings(ack_keys=(b"a key for one walk",))
    link = LocalLink(node)
    rooms = [contrail_api.room(link, settings), contrail_gateway.room(link, settings)]
    server = make_server(build_app(rooms, settings), settings, [listener])
    return server, asyncio.ensure_future(server.serve())


async def _deliver_and_ack(client: _Client) -> None:
    consumer = "/v1/streams/TOUR/consumers/walker"
    pulled = await client.post(f"{consumer}/next", b'{"batch": 1, "expires": "5s"}')
    token = pulled["messages"][0]["ack_token"]
    acks = json.dumps({"acks": [{"token": token, "kind": "ack"}], "sync": True}).encode()
    await client.post(f"{consumer}/ack", acks)
