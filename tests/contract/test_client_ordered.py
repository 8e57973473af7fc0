"""Ordered reading against a real server: every message once, in order, across what may break."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import pytest

from contrail_client import (
    AsyncContrail,
    AsyncOrderedReader,
    Contrail,
    Gap,
    Message,
    NotFound,
    SubscriptionEnded,
)
from contrail_client.live.ordered import Start
from tests.contract.client_rig import cable_to, finish, new_stream
from tests.support.each import each
from tests.support.servers import ServerProcess


@pytest.fixture
def stream(live: ServerProcess) -> str:
    """A stream of the test's own; it captures what lies below its name."""
    return new_stream(live.url)


async def fill(client: AsyncContrail, stream: str, count: int) -> None:
    """Store ``count`` messages on the subjects ``0`` to ``2`` in turn."""
    messages = [Message(f"{stream}.{n % 3}", str(n)) for n in range(1, count + 1)]
    (await client.publish_batch(stream, messages)).raise_refused()


async def read(reader: AsyncOrderedReader, count: int) -> list[int]:
    """The sequences of the next ``count`` messages."""
    return [(await anext(reader)).seq for _ in range(count)]


def test_stored_messages_come_first_and_new_ones_follow(live: ServerProcess, stream: str) -> None:
    async def work() -> None:
        async with AsyncContrail(live.url) as client:
            await fill(client, stream, 2_500)
            async with client.ordered(stream, credit_msgs=100) as reader:
                assert await read(reader, 2_500) == list(range(1, 2_501))
                await client.publish(f"{stream}.a", "new")
                assert (await anext(reader)).payload == b"new"
                assert await reader.next(timeout_s=0.01) is None

    finish(work())


@pytest.mark.long
@pytest.mark.parametrize(
    ("start", "first"), [("all", 1), (4, 4), ("last", 9), ("new", 10), (100, 100)]
)
def test_reading_begins_where_the_option_says(
    live: ServerProcess, stream: str, start: Start, first: int
) -> None:
    async def work() -> None:
        async with AsyncContrail(live.url) as client:
            await fill(client, stream, 9)
            async with client.ordered(stream, start=start) as reader:
                waiting = asyncio.create_task(reader.next())
                if first <= 9:
                    found = await waiting
                else:
                    # The reader stands where it will begin once the server knows of it.
                    while (await client.get_stream(stream)).state.consumer_count == 0:
                        await asyncio.sleep(0)
                    for _ in range(9, first):
                        await client.publish(f"{stream}.a")
                    found = await waiting
                assert found is not None
                assert found.seq == first

    finish(work())


def test_reading_begins_at_a_time(live: ServerProcess, stream: str) -> None:
    async def work() -> None:
        async with AsyncContrail(live.url) as client:
            await fill(client, stream, 2)
            third = await client.publish(f"{stream}.a")
            stored = (await client.get_message(stream, third.seq)).time_ns
            # Microseconds: the last three digits of a stored time do not fit into a datetime.
            start = datetime.fromtimestamp(stored // 1_000 / 1e6, UTC)
            async with client.ordered(stream, start=start) as reader:
                assert third.seq in await read(reader, 1)

    finish(work())


def test_filters_choose_messages_and_keep_their_order(live: ServerProcess, stream: str) -> None:
    async def work() -> None:
        async with AsyncContrail(live.url) as client:
            await fill(client, stream, 9)
            filters = [f"{stream}.0", f"{stream}.2"]
            async with client.ordered(stream, filter_subjects=filters) as reader:
                assert await read(reader, 6) == [2, 3, 5, 6, 8, 9]

    finish(work())


def test_connection_cut_again_and_again_repeats_and_misses_nothing(
    live: ServerProcess, stream: str
) -> None:
    count = 3_000

    async def work() -> None:
        async with cable_to(live.url) as cable, AsyncContrail(cable.url) as client:
            await fill(client, stream, count)
            async with client.ordered(stream, credit_msgs=200) as reader:
                for first in range(1, count, 500):
                    assert await read(reader, 500) == list(range(first, first + 500))
                    cable.cut()
                    cable.repair()

    finish(work())


def test_reader_that_waits_for_new_messages_misses_none_while_it_is_away(
    live: ServerProcess, stream: str
) -> None:
    async def work() -> None:
        async with (
            AsyncContrail(live.url) as direct,
            cable_to(live.url) as cable,
            AsyncContrail(cable.url) as client,
        ):
            await fill(direct, stream, 5)
            async with client.ordered(stream, start="new") as reader:
                while (await direct.get_stream(stream)).state.consumer_count == 0:
                    await asyncio.sleep(0)
                cable.cut()
                for _ in range(3):
                    await direct.publish(f"{stream}.a")
                cable.repair()
                assert await read(reader, 3) == [6, 7, 8]

    finish(work())


def test_sequences_that_are_gone_are_reported_in_their_place(
    live: ServerProcess, stream: str
) -> None:
    async def work() -> None:
        events: list[int | Gap] = []
        async with (
            AsyncContrail(live.url) as direct,
            cable_to(live.url) as cable,
            AsyncContrail(cable.url) as client,
        ):
            await fill(direct, stream, 20)
            async with client.ordered(
                stream, start=1, on_gap=events.append, credit_msgs=5
            ) as reader:
                events += await read(reader, 5)
                cable.cut()
                await direct.purge_stream(stream, up_to_seq=16)
                cable.repair()
                while events[-1] != 20:
                    events += await read(reader, 1)
        [gap] = [event for event in events if isinstance(event, Gap)]
        at = events.index(gap)
        before, after = events[:at], events[at + 1 :]
        assert before == list(range(1, gap.first))
        assert gap.last == 15
        assert after == [16, 17, 18, 19, 20]

    finish(work())


def test_stream_created_again_while_the_reader_was_away_ends_it(
    live: ServerProcess, stream: str
) -> None:
    async def work() -> None:
        async with (
            AsyncContrail(live.url) as direct,
            cable_to(live.url) as cable,
            AsyncContrail(cable.url) as client,
        ):
            await fill(direct, stream, 3)
            async with client.ordered(stream) as reader:
                await read(reader, 3)
                cable.cut()
                await direct.delete_stream(stream)
                await direct.ensure_stream(stream, {"subjects": [f"{stream}.>"]})
                await fill(direct, stream, 10)
                cable.repair()
                with pytest.raises(SubscriptionEnded, match="re-created"):
                    await reader.next()

    finish(work())


def test_deleted_and_unknown_streams_end_the_reader(live: ServerProcess, stream: str) -> None:
    async def work() -> None:
        async with AsyncContrail(live.url) as client:
            await fill(client, stream, 1)
            async with client.ordered(stream) as reader:
                await read(reader, 1)
                await client.delete_stream(stream)
                with pytest.raises(SubscriptionEnded):
                    await reader.next()
            async with client.ordered(stream) as reader:
                with pytest.raises(NotFound, match="stream_not_found"):
                    await reader.next()

    finish(work())


@pytest.mark.long
def test_killed_server_repeats_and_misses_nothing(tmp_path: Path) -> None:
    count = 1_500

    async def work(server: ServerProcess) -> None:
        async with AsyncContrail(server.url) as client:
            await client.ensure_stream("S", {"subjects": ["s.>"]})

            async def publish() -> None:
                async with client.publisher(max_outstanding=200, auto_ids=True) as publisher:
                    for n in range(1, count + 1):
                        await publisher.publish("s.a", str(n))
                        if n in (count // 3, 2 * count // 3):
                            server.kill()
                            await asyncio.to_thread(server.start)

            async with client.ordered("S", credit_msgs=100) as reader:
                publishing = asyncio.create_task(publish())
                for seq in range(1, count + 1):
                    message = await anext(reader)
                    assert (message.seq, message.payload) == (seq, str(seq).encode())
                await publishing

    with ServerProcess(tmp_path / "data") as server:
        finish(work(server))


def test_ended_readers_leave_no_consumer_behind(live: ServerProcess, stream: str) -> None:
    async def work() -> None:
        async with AsyncContrail(live.url) as client:
            await fill(client, stream, 3)
            async with client.ordered(stream) as reader:
                await read(reader, 1)
            while (await client.get_stream(stream)).state.consumer_count:
                await asyncio.sleep(0)

    finish(work())


def test_synchronous_reader_does_the_same(live: ServerProcess, stream: str) -> None:
    with Contrail(live.url) as client:
        messages = [Message(f"{stream}.a", str(n)) for n in range(1, 501)]
        client.publish_batch(stream, messages).raise_refused()
        with client.ordered(stream, start=101) as reader:
            found = [message.seq for _, message in zip(range(400), reader, strict=False)]
            assert found == list(range(101, 501))
            assert reader.next(timeout_s=0.01) is None


@each("start", [0, -1, "soon", True, datetime(2026, 1, 1)])  # noqa: DTZ001
def test_place_to_start_that_is_none_is_refused(start: Start) -> None:
    with Contrail() as client, pytest.raises(ValueError, match=r"start|sequence|zone"):
        client.ordered("S", start=start)
