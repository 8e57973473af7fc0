"""What callers give and get, on every way in and out: headers, times, durations, tables."""

import asyncio
import subprocess
import sys
from contextlib import aclosing, closing
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from contrail_client import (
    AcksRefused,
    AsyncContrail,
    Bounds,
    ConsumerConfig,
    Contrail,
    Denied,
    Message,
    StreamConfig,
    to_timedelta,
)
from tests.contract.client_rig import finish, new_stream
from tests.contract.talk import wait_until
from tests.contract.test_client_cli import TIMEOUT_S, Shell
from tests.support.servers import ServerProcess

JSON_HEADER = {"Content-Type": "application/json"}


async def asynchronous(url: str, stream: str, subject: str, payload: Any, headers: Any) -> None:
    """Publish in each way of the asynchronous client."""
    async with AsyncContrail(url) as client:
        await client.publish(subject, payload, headers=headers)
        await client.publish_unacked(subject, payload, headers=headers)
        await client.publish_batch(stream, [Message(subject, payload, headers)])
        async with client.publisher() as publisher:
            await publisher.publish(subject, payload, headers=headers)


def synchronous(url: str, stream: str, subject: str, payload: Any, headers: Any) -> None:
    """Publish in each way of the synchronous client."""
    with Contrail(url) as client:
        client.publish(subject, payload, headers=headers)
        client.publish_unacked(subject, payload, headers=headers)
        client.publish_batch(stream, [Message(subject, payload, headers)])
        with client.publisher() as publisher:
            publisher.publish(subject, payload, headers=headers)


def test_header_given_as_one_text_is_stored_as_one_value_on_every_way(live: ServerProcess) -> None:
    stream = new_stream(live.url)
    with Contrail(live.url) as client, client.ordered(stream) as stored:
        synchronous(live.url, stream, f"{stream}.a", b"{}", JSON_HEADER)
        finish(asynchronous(live.url, stream, f"{stream}.a", b"{}", JSON_HEADER))
        found = [next(stored).headers for _ in range(8)]
    assert found == [{"Content-Type": ["application/json"]}] * 8


@pytest.mark.parametrize(
    ("payload", "headers"), [({"id": 1}, None), (None, None), (b"", {"Count": 1})]
)
def test_what_cannot_be_stored_is_a_type_error_before_anything_is_sent(
    live: ServerProcess, payload: Any, headers: Any
) -> None:
    stream = new_stream(live.url)
    with pytest.raises(TypeError, match="must be"):
        synchronous(live.url, stream, f"{stream}.a", payload, headers)
    with pytest.raises(TypeError, match="must be"):
        finish(asynchronous(live.url, stream, f"{stream}.a", payload, headers))
    with Contrail(live.url) as client:
        assert client.get_stream(stream).state.messages == 0


# Times and durations -----------------------------------------------------------------------------


def test_times_and_durations_may_be_those_of_python(live: ServerProcess) -> None:
    before = datetime.now(UTC)
    stream = new_stream(
        live.url,
        max_age=timedelta(days=7),
        duplicate_window=timedelta(seconds=90),
        consumer_limits={"inactive_threshold": timedelta(hours=1)},
        allow_msg_ttl=True,
    )
    with Contrail(live.url) as client:
        info = client.get_stream(stream)
        assert (info.config["max_age"], info.config["duplicate_window"]) == ("7d", "90s")
        assert to_timedelta(info.config["max_age"]) == timedelta(days=7)
        assert info.state.first_at is None
        client.publish(f"{stream}.a", "1", ttl=timedelta(hours=2))
        client.publish(f"{stream}.a", "2")
        first, second = client.read_range(stream).messages
        assert before - timedelta(seconds=1) < first.stored_at <= second.stored_at
        assert first.headers["Nats-TTL"] == ["7200s"]
        info = client.get_stream(stream)
        assert (info.state.first_at, info.state.last_at) == (first.stored_at, second.stored_at)
        assert info.created_at <= first.stored_at
        later = second.stored_at + timedelta(microseconds=1)
        assert client.read_range(stream, start_time=later).messages == ()
        assert len(list(client.last_messages(stream, up_to_time=later))) == 1
        assert len(list(client.replay(stream, Bounds(end_time=later)))) == 2
        config: ConsumerConfig = {
            "deliver_policy": "by_start_time",
            "opt_start_time": second.stored_at,
            "ack_wait": timedelta(seconds=9),
            "backoff": [timedelta(milliseconds=1500), timedelta(seconds=2)],
            "max_deliver": 4,
        }
        worker = client.create_consumer(stream, "w", config)
        found = worker.info()
        assert found.config["backoff"] == ["1500ms", "2s"]
        assert found.created_at >= info.created_at
        [delivery] = worker.next(2, expires=timedelta(seconds=30))
        assert delivery.payload == b"2"
        worker.nak(delivery, delay=timedelta(microseconds=1), sync=True)
        with client.subscribe(stream, "w") as messages:
            again = next(messages)
            assert (again.num_delivered, again.stored_at) == (2, second.stored_at)
            again.nak(delay=timedelta(0))
            next(messages).ack_sync()
        with pytest.raises(ValueError, match="no time zone"):
            client.read_range(stream, start_time=later.replace(tzinfo=None))


def test_every_field_of_an_answered_configuration_is_typed(live: ServerProcess) -> None:
    stream = new_stream(live.url)
    with Contrail(live.url) as client:
        assert client.get_stream(stream).config.keys() <= StreamConfig.__annotations__.keys()
        worker = client.create_consumer(stream, "w").info()
        assert worker.config.keys() <= ConsumerConfig.__annotations__.keys()
        # What was answered may be given again, and changes nothing.
        assert client.create_stream(stream, client.get_stream(stream).config).name == stream


def test_environment_says_where_the_server_is(
    live: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = new_stream(live.url)
    monkeypatch.setenv("CONTRAIL_URL", live.url)
    with Contrail() as client, client.publisher() as publisher:
        assert publisher.publish(f"{stream}.a").result(timeout=30).seq == 1
    with pytest.raises(ValueError, match="URL"):
        Contrail("")

    async def work() -> int:
        async with AsyncContrail() as client:
            return (await client.get_stream(stream)).state.messages

    assert finish(work()) == 1


@pytest.mark.long
def test_environment_gives_the_token_unless_one_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ServerProcess(tmp_path / "data", token="secret") as server:
        monkeypatch.setenv("CONTRAIL_TOKEN", "secret")
        with Contrail(server.url) as client:
            client.create_stream("S", {"subjects": ["s"]})
            with client.publisher() as publisher:  # over WebSocket
                assert publisher.publish("s").result(timeout=30).seq == 1
        for token in ("", "wrong"):
            with Contrail(server.url, token=token) as client, pytest.raises(Denied):
                list(client.list_streams())


# Pulling without an end --------------------------------------------------------------------------


def fill(client: Contrail, stream: str, count: int) -> None:
    client.publish_batch(stream, [Message(f"{stream}.a", str(n)) for n in range(count)])


def test_messages_of_a_consumer_are_iterated_over_and_the_rest_is_returned(
    live: ServerProcess,
) -> None:
    stream = new_stream(live.url)
    with Contrail(live.url) as client:
        fill(client, stream, 25)
        worker = client.create_consumer(stream, "w", {"ack_wait": "1h"})
        with closing(worker.messages(batch=10)) as messages:
            for delivery in islice(messages, 13):
                worker.ack(delivery)
        found = list(worker.messages(batch=7, timeout_s=0.0))
        assert sorted(int(each.payload) for each in found) == list(range(13, 25))
        worker.ack(*found, sync=True)
        assert list(worker.messages(timeout_s=0.01)) == []


def test_pulled_message_acknowledges_itself(live: ServerProcess) -> None:
    stream = new_stream(live.url)
    with Contrail(live.url) as client:
        fill(client, stream, 5)
        worker = client.create_consumer(stream, "w", {"ack_wait": "1h"})
        done, wrong, later, again, long = worker.messages(timeout_s=0.0)
        done.ack()
        wrong.term(reason="no order")
        later.nak(delay=timedelta(hours=1))
        long.in_progress()
        again.nak()
        (again,) = worker.next()
        assert (again.payload, again.num_delivered) == (b"3", 2)
        again.ack_sync()
        assert worker.info().num_ack_pending == 2  # the late one and the long one
        worker.delete()
        with pytest.raises(AcksRefused, match="the consumer was deleted"):
            long.ack()


def test_pulled_message_acknowledges_itself_without_blocking(live: ServerProcess) -> None:
    stream = new_stream(live.url)

    async def work() -> None:
        async with AsyncContrail(live.url) as client:
            await client.publish_batch(stream, [Message(f"{stream}.a", str(n)) for n in range(5)])
            worker = await client.create_consumer(stream, "w", {"ack_wait": "1h"})
            done, wrong, later, again, long = [
                each async for each in worker.messages(timeout_s=0.0)
            ]
            await done.ack()
            await wrong.term(reason="no order")
            await later.nak(delay="1h")
            await long.in_progress()
            await again.nak()
            (again,) = await worker.next()
            assert (again.payload, again.num_delivered) == (b"3", 2)
            await again.ack_sync()
            assert (await worker.info()).num_ack_pending == 2

    finish(work())


@pytest.mark.long
def test_messages_of_a_consumer_survive_a_restart_of_the_server(tmp_path: Path) -> None:
    count = 60

    async def work(server: ServerProcess) -> set[int]:
        done: set[int] = set()
        kills = {20, 40}
        async with AsyncContrail(server.url) as client:
            await client.create_stream("S", {"subjects": ["S.>"]})
            worker = await client.create_consumer("S", "w", {"ack_wait": "2s"})
            for n in range(count):
                await client.publish("S.a", str(n))
            async with aclosing(worker.messages(batch=5)) as messages:
                async for delivery in messages:
                    done.add(int(delivery.payload))
                    await worker.ack(delivery)
                    if len(done) == count:
                        return done
                    if len(done) in kills:
                        kills.remove(len(done))  # what comes again must not kill it again
                        server.kill()
                        await asyncio.to_thread(server.start)
        raise AssertionError("it does not end by itself")

    with ServerProcess(tmp_path / "data") as server:
        assert finish(work(server)) == set(range(count))


# Tables ------------------------------------------------------------------------------------------


def test_results_become_tables(live: ServerProcess) -> None:
    pandas = pytest.importorskip("pandas")
    stream = new_stream(live.url)
    with Contrail(live.url) as client:
        client.publish(f"{stream}.a", b"\x00\xff", headers={"Tag": "x"})
        client.publish(f"{stream}.b", "two")
        frame = client.replay(stream).to_pandas()
        assert list(frame.columns) == ["shard", "seq", "time", "subject", "headers", "data"]
        assert list(frame["data"]) == [b"\x00\xff", b"two"]
        assert list(frame["headers"]) == [{"Tag": ["x"]}, {}]
        assert str(frame["time"].dtype) == "datetime64[ns, UTC]"
        [first, _] = client.read_range(stream).messages
        assert frame["time"][0].value == first.time_ns
        pandas.testing.assert_frame_equal(client.read_range(stream).to_pandas(), frame)
        worker = client.create_consumer(stream)
        pandas.testing.assert_frame_equal(worker.next(2).to_pandas(), frame)
        empty = client.replay(stream, Bounds(subject="none")).to_pandas()
        assert (len(empty), dict(empty.dtypes)["seq"]) == (0, frame["seq"].dtype)

    async def work() -> None:
        async with AsyncContrail(live.url) as client:
            found = await client.replay(stream).to_pandas()
            pandas.testing.assert_frame_equal(found, frame)

    finish(work())


def test_table_without_pandas_says_what_to_install(
    live: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = new_stream(live.url)
    monkeypatch.setitem(sys.modules, "pandas", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with Contrail(live.url) as client:
        with pytest.raises(ImportError, match=r"contrail-client\[pandas\]"):
            client.replay(stream).to_pandas()
        client.publish(f"{stream}.a")
        [split] = client.replay_plan(stream).splits
        with pytest.raises(ImportError, match=r"contrail-client\[arrow\]"):
            next(client.read_split_arrow(split))


# The command -------------------------------------------------------------------------------------


def wait_until_stored(url: str, stream: str) -> None:
    """Until the stream has a message, so that whoever publishes is known to be at work."""
    with Contrail(url) as client:
        wait_until(lambda: client.get_stream(stream).state.messages > 0)


@pytest.mark.long
def test_lines_are_published_across_a_restart_of_the_server(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as server:
        with Contrail(server.url) as client:
            client.create_stream("S", {"subjects": ["s.>"]})
        shell = Shell(server.url, "S")
        with shell.process("pub", "s.a", "--lines", stdin=subprocess.PIPE) as running:
            assert running.stdin is not None
            for number in range(600):
                running.stdin.write(b"%d\n" % number)
                running.stdin.flush()
                if number == 200:
                    wait_until_stored(server.url, "S")
                    server.kill()
                elif number == 400:
                    server.start()
            running.stdin.close()
            assert running.wait(TIMEOUT_S) == 0
        with Contrail(server.url) as client:
            stored = [int(message.payload) for message in client.replay("S")]
    assert stored == list(range(600))
