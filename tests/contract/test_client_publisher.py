"""The publisher against a real server: order, bounds, refusals, and what a crash leaves."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from contrail_client import (
    AsyncContrail,
    Closed,
    Contrail,
    Denied,
    Expected,
    NotFound,
    OutcomeUnknown,
    PreconditionFailed,
    PubAck,
    PublishesFailed,
    Retries,
    Unreachable,
)
from tests.contract.client_rig import cable_to, finish, new_stream
from tests.support.servers import ServerProcess


@pytest.fixture
def stream(live: ServerProcess) -> str:
    """A stream of the test's own; it captures what lies below its name."""
    return new_stream(live.url)


def payloads(url: str, stream: str) -> list[bytes]:
    """Everything the stream holds, in its order."""
    with Contrail(url) as client:
        return [message.payload for message in client.replay(stream)]


def test_messages_are_stored_in_the_order_of_publishing(live: ServerProcess, stream: str) -> None:
    async def work() -> list[PubAck]:
        async with (
            AsyncContrail(live.url) as client,
            client.publisher(max_outstanding=100) as publisher,
        ):
            under_way = [await publisher.publish(f"{stream}.a", str(n)) for n in range(1_000)]
            return [await each for each in under_way]

    acks = finish(work())
    assert [ack.seq for ack in acks] == list(range(1, 1_001))
    assert {ack.stream for ack in acks} == {stream}
    assert {ack.durability for ack in acks} == {"fsync"}
    assert payloads(live.url, stream) == [str(n).encode() for n in range(1_000)]


def test_headers_id_and_expectation_travel_with_the_message(
    live: ServerProcess, stream: str
) -> None:
    async def work() -> None:
        subject = f"{stream}.a"
        async with AsyncContrail(live.url) as client, client.publisher() as publisher:
            first = await publisher.publish(subject, headers={"A": ["1", "ü"]}, msg_id="one")
            again = await publisher.publish(subject, msg_id="one")
            assert (await first).duplicate is False
            assert (await again).duplicate is True
            assert (await again).seq == (await first).seq
            wrong = await publisher.publish(subject, expected=Expected(last_seq=7))
            with pytest.raises(PreconditionFailed, match="wrong_last_sequence"):
                await wrong
            stored = await client.get_message(stream, 1)
            assert stored.headers == {"A": ["1", "ü"], "Nats-Msg-Id": ["one"]}

    finish(work())


def test_refusal_fails_its_message_alone_and_flush_reports_the_rest(
    live: ServerProcess, stream: str
) -> None:
    async def work() -> None:
        async with AsyncContrail(live.url) as client, client.publisher() as publisher:
            good = await publisher.publish(f"{stream}.a")
            asked = await publisher.publish("nobody.captures.this")
            await publisher.publish("nor.this")
            with pytest.raises(NotFound):
                await asked
            with pytest.raises(
                PublishesFailed, match="1 messages failed, the first on nor"
            ) as all_:
                await publisher.flush()
            assert [subject for subject, _ in all_.value.failures] == ["nor.this"]
            assert (await good).seq == 1
            await publisher.flush()  # it is told once

    finish(work())


def test_leaving_the_publisher_waits_for_the_acks_and_raises_failures(
    live: ServerProcess, stream: str
) -> None:
    async def work() -> None:
        async with AsyncContrail(live.url) as client:
            publisher = await client.publisher().__aenter__()
            kept = await publisher.publish(f"{stream}.a")
            await publisher.publish("nobody.captures.this")
            with pytest.raises(PublishesFailed):
                await publisher.__aexit__(None, None, None)
            assert kept.result().seq == 1
            with pytest.raises(Closed):
                await publisher.publish(f"{stream}.a")

    finish(work())


def test_publisher_waits_when_its_bounds_are_reached(live: ServerProcess, stream: str) -> None:
    async def work() -> None:
        async with (
            cable_to(live.url) as cable,
            AsyncContrail(cable.url) as client,
            client.publisher(max_outstanding=3, auto_ids=True) as publisher,
        ):
            await (await publisher.publish(f"{stream}.a", "0"))
            cable.cut()
            for n in "123":
                await publisher.publish(f"{stream}.a", n)
            waiting = [asyncio.create_task(publisher.publish(f"{stream}.a", n)) for n in "456"]
            await asyncio.sleep(0)
            assert not any(each.done() for each in waiting)
            cable.repair()
            await asyncio.gather(*waiting)

    finish(work())
    assert payloads(live.url, stream) == [b"0", b"1", b"2", b"3", b"4", b"5", b"6"]


def test_message_larger_than_the_bound_is_sent_alone(live: ServerProcess, stream: str) -> None:
    async def work() -> None:
        async with AsyncContrail(live.url) as client, client.publisher(max_bytes=10) as publisher:
            for _ in range(3):
                await publisher.publish(f"{stream}.a", bytes(100_000))

    finish(work())
    assert len(payloads(live.url, stream)) == 3


def test_message_that_fits_no_frame_is_refused_before_it_is_sent(
    live: ServerProcess, stream: str
) -> None:
    async def work() -> None:
        async with AsyncContrail(live.url) as client, client.publisher() as publisher:
            with pytest.raises(ValueError, match="too large for a frame"):
                await publisher.publish(f"{stream}.a", bytes(9 << 20))
            assert (await (await publisher.publish(f"{stream}.a"))).seq == 1

    finish(work())


@pytest.mark.long
def test_killed_server_stores_every_message_with_an_id_once(tmp_path: Path) -> None:
    count = 2_400

    async def work(server: ServerProcess) -> list[PubAck]:
        async with AsyncContrail(server.url) as client:
            await client.ensure_stream("S", {"subjects": ["s.>"]})
            async with client.publisher(max_outstanding=300, auto_ids=True) as publisher:
                under_way = []
                for n in range(count):
                    under_way.append(await publisher.publish("s.a", str(n)))
                    if n in (count // 3, 2 * count // 3):
                        server.kill()
                        await asyncio.to_thread(server.start)
                return [await each for each in under_way]

    with ServerProcess(tmp_path / "data") as server:
        acks = finish(work(server))
        stored = payloads(server.url, "S")
    assert stored == [str(n).encode() for n in range(count)]
    assert [ack.seq for ack in acks] == list(range(1, count + 1))


@pytest.mark.long
def test_killed_server_loses_no_acked_message_without_an_id_and_stores_none_twice(
    tmp_path: Path,
) -> None:
    count = 1_500

    async def work(server: ServerProcess) -> tuple[set[bytes], set[bytes]]:
        acked, unknown = set(), set()
        async with AsyncContrail(server.url) as client:
            await client.ensure_stream("S", {"subjects": ["s.>"]})
            async with client.publisher(max_outstanding=300) as publisher:
                under_way = []
                for n in range(count):
                    under_way.append(await publisher.publish("s.a", str(n)))
                    if n == count // 2:
                        server.kill()
                        await asyncio.to_thread(server.start)
                for n, each in enumerate(under_way):
                    try:
                        await each
                        acked.add(str(n).encode())
                    except OutcomeUnknown:
                        unknown.add(str(n).encode())
        return acked, unknown

    with ServerProcess(tmp_path / "data") as server:
        acked, unknown = finish(work(server))
        stored = Counter(payloads(server.url, "S"))
    assert acked <= stored.keys() <= acked | unknown
    assert set(stored.values()) == {1}
    assert 0 < len(unknown) <= 300


def test_lost_connection_fails_only_what_was_sent_without_an_id(
    live: ServerProcess, stream: str
) -> None:
    async def work() -> None:
        async with (
            cable_to(live.url) as cable,
            AsyncContrail(cable.url) as client,
            client.publisher() as publisher,
        ):
            await (await publisher.publish(f"{stream}.a", "before"))
            cable.cut()
            sent = await publisher.publish(f"{stream}.a", "sent into the cut")
            with pytest.raises(OutcomeUnknown):
                await sent
            unsent = await publisher.publish(f"{stream}.a", "unsent")
            cable.repair()
            assert (await unsent).seq == 2
            assert cable.connections == 2

    finish(work())
    assert payloads(live.url, stream) == [b"before", b"unsent"]


def test_outage_longer_than_the_retry_window_is_an_unknown_outcome(
    live: ServerProcess, stream: str
) -> None:
    async def work() -> None:
        async with (
            cable_to(live.url) as cable,
            AsyncContrail(cable.url) as client,
            client.publisher(retry_s=0.0) as publisher,
        ):
            await (await publisher.publish(f"{stream}.a"))
            cable.cut()
            sent = await publisher.publish(f"{stream}.a", msg_id="1")
            with pytest.raises(OutcomeUnknown):
                await sent
            cable.repair()
            assert (await (await publisher.publish(f"{stream}.a"))).seq == 2

    finish(work())


def test_server_that_is_not_there_fails_what_is_published() -> None:
    async def work() -> None:
        retries = Retries(attempts=2, first_pause_s=0.01)
        async with AsyncContrail("http://127.0.0.1:9", retries=retries) as client:
            publisher = client.publisher()
            with pytest.raises(Unreachable):
                await (await publisher.publish("a"))
            with pytest.raises(Unreachable):
                await publisher.publish("a")

    finish(work())


@pytest.mark.long
def test_socket_without_a_good_token_is_denied(tmp_path: Path) -> None:
    async def work(url: str, token: str | None) -> None:
        async with AsyncContrail(url, token=token) as client:
            await (await client.publisher().publish("a.b"))

    with ServerProcess(tmp_path / "data", token="secret") as server:
        with pytest.raises(Denied):
            finish(work(server.url, "wrong"))
        with pytest.raises(NotFound):  # it may, but nothing captures the subject
            finish(work(server.url, "secret"))


def test_closing_the_client_fails_what_is_under_way(live: ServerProcess, stream: str) -> None:
    async def work() -> None:
        async with cable_to(live.url) as cable:
            client = AsyncContrail(cable.url)
            publisher = client.publisher()
            await (await publisher.publish(f"{stream}.a"))
            cable.cut()
            lost = await publisher.publish(f"{stream}.a", msg_id="1")
            await client.close()
            with pytest.raises((Closed, OutcomeUnknown), match="closed"):
                await lost

    finish(work())


def test_synchronous_publisher_does_the_same(live: ServerProcess, stream: str) -> None:
    with Contrail(live.url) as client:
        with client.publisher(max_outstanding=50, auto_ids=True) as publisher:
            under_way = [publisher.publish(f"{stream}.a", str(n)) for n in range(500)]
        assert [each.result(timeout=0).seq for each in under_way] == list(range(1, 501))
        with pytest.raises(PublishesFailed), client.publisher() as publisher:
            publisher.publish("nobody.captures.this")
        with client.publisher() as publisher:
            asked = publisher.publish("nobody.captures.this")
            with pytest.raises(NotFound):
                asked.result(timeout=30)
        with pytest.raises(Closed):
            publisher.publish(f"{stream}.a").result(timeout=30)
        publisher.publish(f"{stream}.a")
        with pytest.raises(PublishesFailed, match="closed"):
            publisher.flush()
    assert payloads(live.url, stream) == [str(n).encode() for n in range(500)]
