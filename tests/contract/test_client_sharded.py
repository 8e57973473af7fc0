"""The client over streams with several shards: pulled, pushed, and in order."""

import asyncio

import pytest

from contrail_client import AsyncContrail, AsyncOrderedReader, Gap, Message
from contrail_client.models import Delivered
from tests.contract.client_rig import cable_to, finish, new_stream
from tests.support.servers import ServerProcess

SHARDS = 4


@pytest.fixture
def stream(live: ServerProcess) -> str:
    """A stream of the test's own; it captures what lies below its name."""
    return new_stream(live.url, shards=SHARDS, shard_by=[2])


async def fill(client: AsyncContrail, stream: str, first: int, count: int) -> None:
    """Store messages on eleven subjects in turn, payloads by number from ``first`` on."""
    messages = [Message(f"{stream}.k{n % 11}", str(n)) for n in range(first, first + count)]
    (await client.publish_batch(stream, messages)).raise_refused()


async def read(reader: AsyncOrderedReader, count: int) -> list[Delivered]:
    return [await anext(reader) for _ in range(count)]


def numbers(messages: list[Delivered]) -> list[int]:
    return sorted(int(one.payload) for one in messages)


def check_order(messages: list[Delivered]) -> None:
    """Within each shard the sequences ascend."""
    for shard in range(SHARDS):
        seqs = [one.seq for one in messages if one.shard == shard]
        assert seqs == sorted(set(seqs))


def test_pulled_messages_are_settled_where_they_came_from(live: ServerProcess, stream: str) -> None:
    async def work() -> None:
        async with AsyncContrail(live.url) as client:
            await fill(client, stream, 0, 50)
            await client.ensure_consumer(stream, "c")
            consumer = client.consumer(stream, "c")
            found = await consumer.next(50, expires="20s")
            while len(found) and (await consumer.info()).num_pending:
                await consumer.ack(*found, sync=True)
                found = await consumer.next(50, expires="20s")
            await consumer.ack(*found, sync=True)
            info = await consumer.info()
            assert (info.num_ack_pending, info.ack_floor.consumer_seq) == (0, 50)
            assert [one.shard for one in info.shards] == list(range(SHARDS))

    finish(work())


def test_pushed_messages_are_acknowledged_over_lost_connections(
    live: ServerProcess, stream: str
) -> None:
    async def work() -> None:
        async with (
            AsyncContrail(live.url) as direct,
            cable_to(live.url) as cable,
            AsyncContrail(cable.url) as client,
        ):
            await fill(direct, stream, 0, 60)
            await direct.ensure_consumer(stream, "c", {"ack_wait": "1s"})
            done: set[int] = set()
            async with client.subscribe(stream, "c", credit_msgs=20) as messages:
                while len(done) < 60:
                    message = await anext(messages)
                    assert message.shard is not None
                    if len(done) in (10, 30):
                        cable.cut()
                        cable.repair()
                    await message.ack_sync()
                    done.add(int(message.payload))
            assert (await direct.consumer(stream, "c").info()).num_ack_pending == 0

    finish(work())


def test_ordered_reading_continues_over_lost_connections(live: ServerProcess, stream: str) -> None:
    async def work() -> None:
        async with cable_to(live.url) as cable, AsyncContrail(cable.url) as client:
            await fill(client, stream, 0, 2_000)
            found: list[Delivered] = []
            async with client.ordered(stream, credit_msgs=150) as reader:
                for _ in range(4):
                    found += await read(reader, 500)
                    cable.cut()
                    cable.repair()
            assert numbers(found) == list(range(2_000))
            check_order(found)

    finish(work())


def test_reader_of_what_is_new_misses_none_while_it_is_away(
    live: ServerProcess, stream: str
) -> None:
    async def work() -> None:
        async with (
            AsyncContrail(live.url) as direct,
            cable_to(live.url) as cable,
            AsyncContrail(cable.url) as client,
        ):
            await fill(direct, stream, 0, 20)
            async with client.ordered(stream, start="new") as reader:
                waiting = asyncio.ensure_future(read(reader, 1))
                while (await direct.get_stream(stream)).state.consumer_count == 0:
                    await asyncio.sleep(0)
                await fill(direct, stream, 20, 1)
                found = await waiting
                cable.cut()
                await fill(direct, stream, 21, 8)
                cable.repair()
                found += await read(reader, 8)
            assert numbers(found) == list(range(20, 29))

    finish(work())


def test_gap_names_the_shard_that_lost_messages(live: ServerProcess, stream: str) -> None:
    async def work() -> None:
        gaps: list[Gap] = []
        async with (
            AsyncContrail(live.url) as direct,
            cable_to(live.url) as cable,
            AsyncContrail(cable.url) as client,
        ):
            await fill(direct, stream, 0, 80)
            async with client.ordered(stream, on_gap=gaps.append, credit_msgs=5) as reader:
                found = await read(reader, 1)
                shard = found[0].shard
                cable.cut()
                info = await direct.get_stream(stream)
                last_seq = info.shards[shard or 0].last_seq
                await direct.purge_stream(stream, up_to_seq=last_seq, shard=shard)
                cable.repair()
                while last_seq not in [one.seq for one in found if one.shard == shard]:
                    found += await read(reader, 1)
        [gap] = gaps
        assert (gap.shard, gap.last) == (shard, last_seq - 1)
        check_order(found)

    finish(work())
