"""A node, and a search for bytes in everything under its folder."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from contrail_common.model import Compression, PublishMessage, StreamConfig
from contrail_link.contract.admin import ErasureReceipt
from contrail_serve.groups import SingleMemberGroups
from contrail_storage.link import LocalLink
from contrail_storage.node import NodeOptions, StorageNode
from contrail_storage.upkeep.compactor import CompactorBounds
from contrail_storage.upkeep.eraser import EraseBounds

PATIENCE_S = 60.0
WAIT_NS = 60_000_000_000
NODE_KEY = bytes(range(32))


@asynccontextmanager
async def running(data_dir: Path, **options: Any) -> AsyncIterator[tuple[StorageNode, LocalLink]]:
    """A node that makes room only when it erases."""
    options = {"erase": EraseBounds(patience_s=0.2), **options}
    whole = NodeOptions(data_dir, compactor=CompactorBounds(tick_s=3_600.0), **options)
    node = await asyncio.to_thread(StorageNode.open, whole, SingleMemberGroups())
    async with asyncio.timeout(PATIENCE_S):
        await node.start()
        try:
            yield node, LocalLink(node)
        finally:
            await node.stop()


async def make(link: LocalLink, name: str = "S", compression: Compression = "none") -> None:
    """A stream on ``<name>.>``."""
    config = StreamConfig(
        name=name, subjects=(f"{name}.>",), compression=compression, allow_rollup_hdrs=True
    )
    await link.put_stream(config, "create", None, False)


def secret(number: int, stream: str = "S") -> PublishMessage:
    """A message all of whose parts are found nowhere else."""
    return PublishMessage(
        f"{stream}.name-of-{number:04}",
        {"Header-Name": [f"header-value-{number:04}"], "Nats-Msg-Id": [f"message-id-{number:04}"]},
        f"payload-text-{number:04}-".encode() + b"." * 40,
        f"message-id-{number:04}",
    )


def traces(number: int) -> list[bytes]:
    """What would tell of the message :func:`secret`."""
    parts = ("name-of", "header-value", "message-id", "payload-text")
    return [f"{part}-{number:04}".encode() for part in parts]


async def erased(
    link: LocalLink, stream: str, seqs: list[int], subject: str = ""
) -> ErasureReceipt:
    """Erase, and wait for the end of it."""
    receipt = await link.erase(stream, seqs, subject)
    return await link.erasure(receipt.erasure_id, WAIT_NS)
