"""Pulls over the link: columns arrive as they are, and what comes for nobody goes to others."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from contrail_common.model import ConsumerConfig, PublishMessage
from contrail_link.contract import StorageLink
from contrail_link.contract.consume import PullRequest
from contrail_link.publishing import publish
from contrail_storage.link import LocalLink
from tests.unit.link.link_rig import Wire, remote, run, served, storage, until, until_found

MINUTE_NS = 60_000_000_000
MESSAGES = [
    PublishMessage("a.b", {"N": ["v"]}, b"one"),
    PublishMessage("a.c", None, b""),
    PublishMessage("a.b", None, bytes(300)),
]


class SlowWire(Wire):
    """A wire on which answers wait while it is shut."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.waiting = 0
        self.opened = asyncio.Event()
        self.opened.set()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, requests: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if not requests and not self.opened.is_set():
                    self.waiting += len(data)
                    await self.opened.wait()
                writer.write(data)
                await writer.drain()
        writer.transport.abort()


@contextlib.asynccontextmanager
async def consumer(data_dir: Path, **config: object) -> AsyncIterator[LocalLink]:
    """Storage with some messages and a consumer whose deliveries are due again after a minute."""
    async with storage(data_dir) as local:
        await publish(local, "S", MESSAGES)
        named = ConsumerConfig(name="c", durable=True, ack_wait_ns=MINUTE_NS, **config)  # type: ignore[arg-type]
        await local.put_consumer("S", named, "create", None, False)
        yield local


def asked(
    batch: int = 9, expires_ns: int = MINUTE_NS // 4, *, columns: bool = False
) -> PullRequest:
    return PullRequest(
        stream="S", consumer="c", batch=batch, expires_ns=expires_ns, columns=columns
    )


async def gave_out(local: LocalLink) -> bool:
    return (await local.consumer_info("S", "c")).num_ack_pending > 0


async def attempts(link: StorageLink) -> list[tuple[int, int]]:
    """Sequence and attempt of what a pull gets."""
    deliveries = (await link.pull(asked())).deliveries
    return [(one.message.seq, one.num_delivered) for one in deliveries]


def test_columns_arrive_as_they_are(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            consumer(tmp_path, ack_policy="none") as local,
            served(local) as (_, port),
            remote(port) as link,
        ):
            result = await link.pull(asked(columns=True))
            assert result.columns is not None
            assert result.deliveries == []
            found = [(one.subject, one.headers, one.payload) for one in result.columns.messages()]
            assert found == [(one.subject, one.headers, one.payload) for one in MESSAGES]
            assert result.columns.first_consumer_seq == 1
            assert (await link.pull(asked(expires_ns=0, columns=True))).columns is None

    run(scenario())


@pytest.mark.parametrize("columns", [False, True])
def test_answer_that_comes_for_a_caller_who_left_is_given_back_at_once(
    tmp_path: Path, columns: bool
) -> None:
    async def scenario() -> None:
        async with (
            consumer(tmp_path) as local,
            served(local) as (_, port),
            SlowWire(port) as wire,
            remote(wire.port) as link,
        ):
            wire.opened.clear()
            pull = asyncio.create_task(link.pull(asked(2, columns=columns)))
            await until_found(lambda: gave_out(local))
            pull.cancel()
            await asyncio.wait({pull})
            assert pull.cancelled()
            await until(lambda: wire.waiting > 0)
            wire.opened.set()
            # The third was never given out; the others come anew as soon as they are back.
            seen = await attempts(local)
            while len(seen) < len(MESSAGES):
                seen += await attempts(local)
            assert sorted(seen) == [(1, 2), (2, 2), (3, 1)]

    run(scenario())


def test_caller_may_leave_at_any_moment_without_holding_a_message_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            consumer(tmp_path) as local,
            served(local) as (_, port),
            remote(port) as link,
        ):
            for turns in range(40):
                pull = asyncio.create_task(link.pull(asked(1)))
                for _ in range(turns):
                    await asyncio.sleep(0)
                pull.cancel()
                await asyncio.wait({pull})
                if not pull.cancelled():
                    break  # from here on the caller is always quick enough
                seen = await attempts(link)
                while len(seen) < len(MESSAGES):
                    seen += await attempts(link)
                assert sorted(seq for seq, _ in seen) == [1, 2, 3]
                await give_all_back(local)

    run(scenario())


async def give_all_back(local: LocalLink) -> None:
    """Nobody holds anything: the consumer begins anew."""
    config = (await local.consumer_info("S", "c")).config
    await local.delete_consumer("S", "c")
    await local.put_consumer("S", config, "create", None, False)


@pytest.mark.parametrize("ack_policy", ["none", "explicit"])
def test_connection_that_is_lost_with_an_answer_on_it_ends_the_pull(
    tmp_path: Path, ack_policy: str
) -> None:
    async def scenario() -> None:
        async with (
            consumer(tmp_path, ack_policy=ack_policy) as local,
            served(local) as (_, port),
            SlowWire(port) as wire,
            remote(wire.port) as link,
        ):
            wire.opened.clear()
            pull = asyncio.create_task(link.pull(asked(columns=True)))
            await until(lambda: wire.waiting > 0)
            pull.cancel()
            await asyncio.wait({pull})
            wire.cut()
            wire.opened.set()
            await until(lambda: not link.readiness())
            assert (await link.stream_info("S")).state.messages == len(MESSAGES)

    run(scenario())
