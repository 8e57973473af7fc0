"""Push subscriptions against a real server: acknowledging, credit, sharing, coming back."""

import asyncio
from pathlib import Path

import pytest

from contrail_client import (
    AsyncContrail,
    AsyncPushedMessage,
    AsyncSubscription,
    Closed,
    ConsumerConfig,
    Contrail,
    Message,
    NotFound,
    SubscriptionEnded,
)
from tests.contract.client_rig import cable_to, finish, new_stream
from tests.support.servers import ServerProcess


@pytest.fixture
def stream(live: ServerProcess) -> str:
    """A stream of the test's own; it captures what lies below its name."""
    return new_stream(live.url)


async def prepare(
    client: AsyncContrail, stream: str, count: int, config: ConsumerConfig | None = None
) -> None:
    """Store ``count`` messages, their payloads by number, and make consumer ``c``."""
    if count:
        messages = [Message(f"{stream}.{n % 3}", str(n)) for n in range(1, count + 1)]
        (await client.publish_batch(stream, messages)).raise_refused()
    await client.ensure_consumer(stream, "c", config)


async def read(messages: AsyncSubscription, count: int) -> list[AsyncPushedMessage]:
    """The next ``count`` messages."""
    return [await anext(messages) for _ in range(count)]


async def wait_settled(client: AsyncContrail, stream: str, pending: int = 0) -> None:
    """Until consumer ``c`` has ``pending`` messages that are not acknowledged."""
    consumer = client.consumer(stream, "c")
    while (await consumer.info()).num_ack_pending != pending:
        await asyncio.sleep(0.01)


def test_messages_come_as_they_were_published(live: ServerProcess, stream: str) -> None:
    async def work() -> None:
        async with AsyncContrail(live.url) as client:
            await prepare(client, stream, 0)
            payload = bytes(range(256))
            await client.publish(f"{stream}.x", payload, headers={"A": ["1", "2"]})
            async with client.subscribe(stream, "c") as messages:
                [message] = await read(messages, 1)
            assert (message.stream, message.seq, message.subject) == (stream, 1, f"{stream}.x")
            assert (message.payload, message.headers) == (payload, {"A": ["1", "2"]})
            assert (message.num_delivered, message.num_pending) == (1, 0)
            assert message.time_ns == (await client.get_message(stream, 1)).time_ns

    finish(work())


def test_acknowledged_messages_are_done(live: ServerProcess, stream: str) -> None:
    async def work() -> None:
        async with AsyncContrail(live.url) as client:
            await prepare(client, stream, 500)
            async with client.subscribe(stream, "c", credit_msgs=50) as messages:
                for message in await read(messages, 500):
                    await message.ack()
            await wait_settled(client, stream)
            info = await client.consumer(stream, "c").info()
            assert (info.ack_floor.stream_seq, info.num_redelivered) == (500, 0)

    finish(work())


def test_synced_acknowledgement_is_durable_when_it_returns(
    live: ServerProcess, stream: str
) -> None:
    async def work() -> None:
        async with AsyncContrail(live.url) as client:
            await prepare(client, stream, 20)
            async with client.subscribe(stream, "c") as messages:
                found = await read(messages, 20)
                await asyncio.gather(*(message.ack_sync() for message in found[::2]))
                info = await client.consumer(stream, "c").info()
                assert info.num_ack_pending == 10

    finish(work())


def test_nak_term_and_in_progress_do_what_they_say(live: ServerProcess, stream: str) -> None:
    async def work() -> None:
        async with AsyncContrail(live.url) as client:
            await prepare(client, stream, 4, {"ack_wait": "1h"})
            async with client.subscribe(stream, "c") as messages:
                again, late, never, busy = await read(messages, 4)
                await busy.in_progress()
                await late.nak(delay="1h")
                await never.term(reason="poison")
                await again.nak()
                [second] = await read(messages, 1)
                assert (second.seq, second.num_delivered) == (1, 2)
                await second.ack_sync()
                await busy.ack_sync()
                await wait_settled(client, stream, pending=1)  # the late one
                assert await messages.next(timeout_s=0.05) is None

    finish(work())


def test_message_is_acknowledged_once(live: ServerProcess, stream: str) -> None:
    async def work() -> None:
        async with AsyncContrail(live.url) as client:
            await prepare(client, stream, 1)
            async with client.subscribe(stream, "c") as messages:
                [message] = await read(messages, 1)
                await message.ack()
                with pytest.raises(ValueError, match="already acknowledged"):
                    await message.nak()

    finish(work())


def test_acknowledging_an_earlier_delivery_does_not_disturb_others(
    live: ServerProcess, stream: str
) -> None:
    async def work() -> None:
        async with AsyncContrail(live.url) as client:
            await prepare(client, stream, 3, {"ack_wait": "100ms"})
            async with client.subscribe(stream, "c") as messages:
                first = await read(messages, 3)
                second = await read(messages, 3)
                assert {message.num_delivered for message in second} == {2}
                for message in [*second, *first]:
                    await message.ack()
                await wait_settled(client, stream)

    finish(work())


def test_server_sends_no_more_than_the_credit(live: ServerProcess, stream: str) -> None:
    async def work() -> None:
        async with AsyncContrail(live.url) as client:
            await prepare(client, stream, 100)
            async with client.subscribe(stream, "c", credit_msgs=10) as messages:
                await read(messages, 4)
                await wait_settled(client, stream, pending=10)
                await read(messages, 1)
                await wait_settled(client, stream, pending=15)

    finish(work())


def test_small_credit_of_bytes_passes_messages_of_every_size_and_header(
    live: ServerProcess, stream: str
) -> None:
    async def work() -> None:
        async with AsyncContrail(live.url) as client:
            await prepare(client, stream, 0)
            for n in range(60):
                headers = {"Size": ["ä" * n, "x"], "B": ["y"]} if n % 2 else None
                message = Message(f"{stream}.ü{n}", bytes(n * 37), headers)
                (await client.publish_batch(stream, [message])).raise_refused()
            async with client.subscribe(stream, "c", credit_bytes=500) as messages:
                assert [message.seq for message in await read(messages, 60)] == list(range(1, 61))

    finish(work())


def test_subscriptions_of_one_consumer_share_its_messages(live: ServerProcess, stream: str) -> None:
    async def work() -> None:
        seen: list[int] = []

        async def worker(client: AsyncContrail) -> None:
            async with client.subscribe(stream, "c", credit_msgs=5) as messages:
                async for message in messages:
                    seen.append(message.seq)
                    await message.ack()

        async with AsyncContrail(live.url) as one, AsyncContrail(live.url) as two:
            await prepare(one, stream, 300)
            workers = [asyncio.create_task(worker(client)) for client in (one, one, two)]
            while len(seen) < 300:
                await asyncio.sleep(0)
            await wait_settled(one, stream)
            for each in workers:
                each.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        assert sorted(seen) == list(range(1, 301))

    finish(work())


def test_several_subscriptions_and_publishers_share_one_connection(
    live: ServerProcess, stream: str
) -> None:
    async def work() -> None:
        async with cable_to(live.url) as cable, AsyncContrail(cable.url) as client:
            await prepare(client, stream, 0)
            await client.ensure_consumer(stream, "d", {"filter_subject": f"{stream}.1"})
            sockets = cable.connections
            async with (
                client.subscribe(stream, "c") as all_,
                client.subscribe(stream, "d") as some,
                client.publisher() as publisher,
            ):
                for n in range(6):
                    await publisher.publish(f"{stream}.{n % 2}", str(n))
                assert [m.seq for m in await read(all_, 6)] == [1, 2, 3, 4, 5, 6]
                assert [m.seq for m in await read(some, 3)] == [2, 4, 6]
            assert cable.connections == sockets + 1

    finish(work())


def test_unread_messages_are_delivered_to_others_at_once(live: ServerProcess, stream: str) -> None:
    async def work() -> None:
        async with AsyncContrail(live.url) as client:
            await prepare(client, stream, 10, {"ack_wait": "1h"})
            async with client.subscribe(stream, "c") as messages:
                for message in await read(messages, 2):
                    await message.ack()
                await wait_settled(client, stream, pending=8)
            pulled = await client.consumer(stream, "c").next(10, expires="10s")
            assert {delivery.seq for delivery in pulled} <= set(range(3, 11))

    finish(work())


def test_drained_subscription_ends_after_what_was_sent(live: ServerProcess, stream: str) -> None:
    async def work() -> None:
        async with AsyncContrail(live.url) as client:
            await prepare(client, stream, 20, {"ack_wait": "1h"})
            async with client.subscribe(stream, "c", credit_msgs=10) as messages:
                await read(messages, 1)
                await messages.drain()
                rest = [message async for message in messages]
                assert [message.seq for message in rest] == list(range(2, 11))
                for message in rest:
                    await message.ack_sync()
            await wait_settled(client, stream, pending=1)

    finish(work())


def test_unknown_consumer_is_not_found(live: ServerProcess, stream: str) -> None:
    async def work() -> None:
        async with AsyncContrail(live.url) as client, client.subscribe(stream, "nobody") as found:
            with pytest.raises(NotFound, match="consumer_not_found"):
                await found.next()

    finish(work())


def test_deleted_consumer_ends_its_subscriptions(live: ServerProcess, stream: str) -> None:
    async def work() -> None:
        async with AsyncContrail(live.url) as client:
            await prepare(client, stream, 1)
            async with client.subscribe(stream, "c") as messages:
                [message] = await read(messages, 1)
                await client.consumer(stream, "c").delete()
                with pytest.raises(SubscriptionEnded):
                    await messages.next()
                with pytest.raises(SubscriptionEnded):
                    await message.ack_sync()

    finish(work())


def test_closed_client_ends_its_subscriptions(live: ServerProcess, stream: str) -> None:
    async def work() -> None:
        client = AsyncContrail(live.url)
        await prepare(client, stream, 0)
        messages = client.subscribe(stream, "c")
        waiting = asyncio.create_task(messages.next())
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(Closed):
            await waiting

    finish(work())


def test_lost_connection_is_opened_again_and_earlier_messages_are_acknowledged_over_it(
    live: ServerProcess, stream: str
) -> None:
    async def work() -> None:
        async with cable_to(live.url) as cable, AsyncContrail(cable.url) as client:
            await prepare(client, stream, 30, {"ack_wait": "1h"})
            async with client.subscribe(stream, "c", credit_msgs=10) as messages:
                before = await read(messages, 5)
                cable.cut()
                waiting = [asyncio.create_task(message.ack_sync()) for message in before]
                await asyncio.sleep(0)
                cable.repair()
                await asyncio.gather(*waiting)
                for message in await read(messages, 25):
                    await message.ack_sync()
            info = await client.consumer(stream, "c").info()
            assert (info.ack_floor.stream_seq, info.num_redelivered) == (30, 0)

    finish(work())


def test_consumer_that_acknowledges_nothing_delivers_each_message_once(
    live: ServerProcess, stream: str
) -> None:
    async def work() -> None:
        async with AsyncContrail(live.url) as client:
            await prepare(client, stream, 50, {"ack_policy": "none"})
            async with client.subscribe(stream, "c") as messages:
                found = await read(messages, 50)
                for message in found:
                    await message.ack()
                await found[0].in_progress()
            assert [message.seq for message in found] == list(range(1, 51))

    finish(work())


@pytest.mark.long
def test_killed_server_delivers_nothing_again_that_was_acknowledged_durably(
    tmp_path: Path,
) -> None:
    count = 600

    async def work(server: ServerProcess) -> None:
        done: set[int] = set()
        async with AsyncContrail(server.url) as client:
            await client.ensure_stream("S", {"subjects": ["S.>"]})
            # Those that wait here for their turn must not be delivered again meanwhile.
            await prepare(client, "S", count, {"ack_wait": "10s"})
            async with client.subscribe("S", "c", credit_msgs=20) as messages:
                while len(done) < count:
                    message = await anext(messages)
                    assert message.seq not in done
                    await message.ack_sync()
                    done.add(message.seq)
                    if len(done) in (count // 3, 2 * count // 3):
                        server.kill()
                        await asyncio.to_thread(server.start)
            info = await client.consumer("S", "c").info()
            assert (info.num_pending, info.num_ack_pending) == (0, 0)

    with ServerProcess(tmp_path / "data") as server:
        finish(work(server))


@pytest.mark.long
def test_stopped_server_is_left_in_order(tmp_path: Path) -> None:
    async def work(server: ServerProcess) -> None:
        async with AsyncContrail(server.url) as client:
            await client.ensure_stream("S", {"subjects": ["S.>"]})
            await prepare(client, "S", 10)
            async with (
                client.subscribe("S", "c") as messages,
                client.publisher(auto_ids=True) as publisher,
            ):
                for message in await read(messages, 10):
                    await message.ack()
                status = await asyncio.to_thread(server.stop)
                assert status == 0
                published = await publisher.publish("S.x", "after")
                await asyncio.to_thread(server.start)
                [message] = await read(messages, 1)
                assert message.payload == b"after"
                assert (await published).seq == 11
                await message.ack_sync()
            await wait_settled(client, "S")

    with ServerProcess(tmp_path / "data") as server:
        finish(work(server))


def test_synchronous_subscription_does_the_same(live: ServerProcess, stream: str) -> None:
    with Contrail(live.url) as client:
        messages = [Message(f"{stream}.a", str(n)) for n in range(1, 301)]
        client.publish_batch(stream, messages).raise_refused()
        consumer = client.ensure_consumer(stream, "c", {"ack_wait": "1h"})
        with client.subscribe(stream, "c") as found:
            for number, message in zip(range(1, 201), found, strict=False):
                assert (message.seq, message.payload) == (number, str(number).encode())
                if number % 10:
                    message.ack()
                else:
                    message.ack_sync()
            with pytest.raises(ValueError, match="already"):
                message.nak()
            late = found.next(timeout_s=30)
            assert late is not None
            late.in_progress()
            late.term(reason="no")
        rest = {delivery.seq for delivery in consumer.next(200, expires="10s")}
        assert rest <= set(range(202, 301))
        assert rest
        with client.subscribe(stream, "nobody") as nothing, pytest.raises(NotFound):
            nothing.next()
        consumer.delete()
