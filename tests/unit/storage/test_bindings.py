"""What holds a consumer, and what that keeps from happening to it."""

import asyncio
from pathlib import Path

import pytest

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import ConsumerConfig, StreamConfig
from contrail_storage.link import LocalLink
from contrail_storage.node import StorageNode
from tests.unit.storage.sharded_rig import CONFIG as SHARDED
from tests.unit.storage.sharded_rig import play

ONE = StreamConfig(name="S", subjects=("a.>",))


@pytest.mark.parametrize("config", [ONE, SHARDED], ids=["one shard", "several"])
def test_bound_consumer_is_in_use_and_is_removed_when_it_is_released(
    tmp_path: Path, config: StreamConfig
) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        async def bound() -> bool:
            return (await link.consumer_info("S", "c")).push_bound

        durable = ConsumerConfig(name="c", durable=True)
        await link.put_consumer("S", durable, "put", None, False)
        first, second = await link.bind_consumer("S", "c"), await link.bind_consumer("S", "c")
        idle = ConsumerConfig(name="c", durable=True, inactive_threshold_ns=1)
        await link.put_consumer("S", idle, "put", None, False)
        await first.aclose()
        await first.aclose()
        await node.consumers.drop_inactive()
        assert await bound()
        await second.aclose()
        while node.streams.stream("S").shards[0].machine.consumers:
            await node.consumers.drop_inactive()
        with pytest.raises(ApiError) as gone:
            await link.bind_consumer("S", "c")
        assert gone.value.spec is errors.CONSUMER_NOT_FOUND

    play(tmp_path, scene, config)


def test_binding_ends_with_its_consumer_or_the_stream(tmp_path: Path) -> None:
    async def scene(_: StorageNode, link: LocalLink) -> None:
        for what in ("consumer", "stream"):
            durable = ConsumerConfig(name="c", durable=True)
            await link.put_consumer("S", durable, "put", None, False)
            held = await link.bind_consumer("S", "c")

            async def until_gone(held: object = held) -> int:
                return len([one async for one in held])  # type: ignore[attr-defined]

            waiting = asyncio.ensure_future(until_gone())
            if what == "consumer":
                await link.delete_consumer("S", "c")
            else:
                await link.delete_stream("S")
            assert await waiting == 0
            await held.aclose()

    play(tmp_path, scene, ONE)


def test_reader_that_is_cancelled_leaves_the_closing_to_its_owner(tmp_path: Path) -> None:
    async def scene(_: StorageNode, link: LocalLink) -> None:
        durable = ConsumerConfig(name="c", durable=True)
        await link.put_consumer("S", durable, "put", None, False)
        held = await link.bind_consumer("S", "c")
        waiting = asyncio.ensure_future(anext(held.__aiter__()))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert (await link.consumer_info("S", "c")).push_bound
        await held.aclose()
        assert not (await link.consumer_info("S", "c")).push_bound

    play(tmp_path, scene, ONE)
