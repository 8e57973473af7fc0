"""What is removed leaves memory by itself: it is in no circle of references.

In a server process, objects that live long are left out of garbage collections, so a circle of them
would stay in memory.
"""

import asyncio
import gc
from collections import Counter
from pathlib import Path

import pytest

from contrail_common.model import ConsumerConfig, PublishMessage, StreamConfig
from contrail_link.contract.consume import AckItem, PullRequest
from contrail_link.publishing import publish
from contrail_storage.consumers.consumer import Consumer
from contrail_storage.consumers.dispatcher import Dispatcher
from contrail_storage.core.consumer_machine import ConsumerMachine
from contrail_storage.core.stream.stream_machine import StreamMachine
from contrail_storage.core.subjects.subject_table import SubjectTable
from contrail_storage.link import LocalLink
from contrail_storage.node import StorageNode
from contrail_storage.replica.shard import Shard
from contrail_storage.streams.stream import Stream
from tests.crash.lives import wait_until
from tests.unit.storage.test_memory_streams import running

KINDS = Consumer, ConsumerMachine, Dispatcher, Shard, Stream, StreamMachine, SubjectTable
STREAMS = 20


def counted() -> Counter[type]:
    return Counter(type(one) for one in gc.get_objects() if type(one) in KINDS)


async def use(link: LocalLink, name: str, shards: int) -> None:
    """A stream with a consumer that has delivered messages, and one that nobody has used."""
    config = StreamConfig(name=name, subjects=(f"{name}.>",), shards=shards)
    await link.put_stream(config, "put", None, False)
    await publish(link, name, [PublishMessage(f"{name}.{at}", None, b"x") for at in range(5)])
    for consumer in ("used", "idle"):
        durable = ConsumerConfig(
            name=consumer, durable=True, filter_subjects=(f"{name}.*",), max_deliver=3
        )
        await link.put_consumer(name, durable, "put", None, False)
    pulled = await link.pull(PullRequest(stream=name, consumer="used", batch=5, no_wait=True))
    first = AckItem(pulled.shard_id, pulled.consumer_id, pulled.epoch, [1], "ack")
    await link.acknowledge(name, "used", [first], True)


@pytest.mark.parametrize("shards", [1, 3])
def test_deleted_streams_and_consumers_are_freed_without_a_collection(
    tmp_path: Path, shards: int
) -> None:
    async def scene() -> None:
        async with running(tmp_path) as (node, link):
            gc.collect()
            before = counted()
            for number in range(STREAMS):
                await use(link, f"S{number}", shards)
            made = counted() - before
            assert all(made[kind] >= STREAMS for kind in KINDS)

            def consumers() -> int:
                return sum(counted()[kind] for kind in (Consumer, Dispatcher, ConsumerMachine))

            for number in range(STREAMS):
                await link.delete_consumer(f"S{number}", "used")
            assert consumers() < sum(made.values())
            for number in range(STREAMS):
                await link.delete_stream(f"S{number}")
            await wait_until(lambda: counted() == before)
            await nothing_left(node)

    gc.disable()
    try:
        asyncio.run(scene())
    finally:
        gc.enable()


async def nothing_left(node: StorageNode) -> None:
    await node.until_written()
    assert not node.applier.shards
    assert not node.streams.listed()
