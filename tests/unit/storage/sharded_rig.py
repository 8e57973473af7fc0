"""A node in this process with a stream of several shards, and what is read of it."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from contrail_common.model import PublishMessage, StoredMessage, StreamConfig
from contrail_link.contract.read import RangeRequest
from contrail_link.publishing import publish
from contrail_storage.link import LocalLink
from contrail_storage.node import StorageNode
from tests.unit.storage.restore_rig import PATIENCE_S, running

SHARDS = 4
CONFIG = StreamConfig(name="S", subjects=("a.>",), shards=SHARDS, shard_by=(2,))
Scene = Callable[[StorageNode, LocalLink], Coroutine[Any, Any, None]]


def play(data_dir: Path, scene: Scene, config: StreamConfig | None = CONFIG) -> None:
    """Run ``scene`` on a node, with a stream made with ``config`` unless that is None."""

    async def whole() -> None:
        async with asyncio.timeout(PATIENCE_S), running(data_dir) as node:
            link = LocalLink(node)
            if config is not None:
                await link.put_stream(config, "put", None, False)
            await scene(node, link)

    asyncio.run(whole())


def message(key: object, payload: bytes = b"x", **fields: Any) -> PublishMessage:
    return PublishMessage(f"a.{key}", None, payload, **fields)


async def fill(link: LocalLink, count: int, keys: int = 7) -> None:
    """Messages one commit after the other, on ``keys`` subjects in turn; payloads by number."""
    for number in range(count):
        ack = await publish(link, "S", [message(number % keys, b"%d" % number)])
        assert not ack.results[0].code, ack


async def read_all(link: LocalLink, page: int = 100, **asked: Any) -> list[StoredMessage]:
    """Everything, a page at a time along the cursors."""
    found: list[StoredMessage] = []
    cursor = ""
    while True:
        request = RangeRequest(stream="S", limit=page, cursor=cursor, **asked)
        result = await link.read_range(request)
        found += result.messages
        if not result.messages:
            assert not result.num_pending
            return found
        cursor = result.cursor
        asked.pop("start_time_ns", None)
