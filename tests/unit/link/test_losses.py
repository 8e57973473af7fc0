"""Either end gone at every moment: an answer, a refusal without effect, or an unknown outcome."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from contrail_common import errors
from contrail_common.columns.message_batch import MessageBatch
from contrail_common.errors import ApiError, ErrorSpec
from contrail_common.model import ConsumerConfig, PublishMessage
from contrail_link.contract import StorageLink
from contrail_link.contract.consume import AckItem, PullRequest
from contrail_link.contract.publish import PublishAck, PublishOutcome, PubResult
from contrail_link.contract.read import RangeRequest, ReplayRequest
from contrail_link.publishing import publish
from contrail_link.tcp import frames
from contrail_link.tcp.client import RemoteLink
from contrail_link.tcp.frames import frame_head
from contrail_link.tcp.handshake import MAGIC, ClientHandshake, derived_key
from contrail_link.tcp.limits import LinkLimits
from contrail_link.tcp.server import LinkServer
from contrail_storage.link import LocalLink
from tests.unit.link.link_rig import (
    HOST,
    KEY,
    QUICK,
    Wire,
    bound,
    remote,
    run,
    served,
    storage,
    until,
    until_found,
)

SECOND_NS = 1_000_000_000
HASTY = replace(QUICK, reconnect_wait_s=0.05)


def message(payload: bytes = b"x") -> PublishMessage:
    return PublishMessage("a.b", None, payload)


async def outcome(work: Awaitable[Any]) -> Any:
    """What came of ``work``: its result or its refusal; anything else is a failure."""
    try:
        return await work
    except ApiError as error:
        return error


def is_refusal(found: object, spec: ErrorSpec, applied: bool | None = None) -> bool:
    return isinstance(found, ApiError) and (found.spec, found.applied) == (spec, applied)


@asynccontextmanager
async def wired(
    data_dir: Path, limits: LinkLimits = QUICK
) -> AsyncIterator[tuple[LocalLink, Wire, RemoteLink]]:
    """Storage and a client, with a wire between them that a test can cut."""
    async with (
        storage(data_dir) as local,
        served(local, limits=limits) as (_, port),
        Wire(port) as wire,
        remote(wire.port, limits=limits) as link,
    ):
        yield local, wire, link


async def stored(local: LocalLink) -> int:
    return (await local.stream_info("S")).state.messages


async def is_stored(local: LocalLink) -> bool:
    return await stored(local) == 1


# Secrets and strangers ---------------------------------------------------------------------------
def test_client_with_another_secret_is_refused_and_says_so(tmp_path: Path) -> None:
    async def scenario() -> None:
        other = derived_key(b"another secret", "link")
        async with (
            storage(tmp_path) as local,
            served(local) as (server, port),
            remote(port, key=other, limits=HASTY, up=False) as link,
        ):
            # The count may be that of a stranger: a node whose peer had this port.
            await until(lambda: "secret" in link.readiness()["storage link"])
            await until(lambda: server.refused > 2)
            assert is_refusal(await outcome(link.stream_info("S")), errors.NOT_READY, False)
            assert server.served == 0

    run(scenario())


async def ends(reader: asyncio.StreamReader) -> bool:
    with contextlib.suppress(ConnectionError):
        while await reader.read(4_096):
            pass
    return True


@pytest.mark.parametrize(
    "said",
    [
        b"",
        MAGIC,
        MAGIC + b"n" * 63,
        MAGIC + b"n" * 64,
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        frame_head(frames.REQUEST, 2, 1, 0, 3) + b"\x91\xa1S",
        b"\xff" * 100_000,
    ],
)
def test_stranger_is_cut_off_unheard(tmp_path: Path, said: bytes) -> None:
    async def scenario() -> None:
        limits = replace(QUICK, handshake_s=0.2)
        async with storage(tmp_path) as local, served(local, limits=limits) as (server, port):
            reader, writer = await asyncio.open_connection(HOST, port)
            writer.write(said)
            assert await ends(reader)
            assert (server.refused, server.served, server.connections) == (1, 0, set())
            writer.close()

    run(scenario())


def test_strangers_beyond_the_bound_do_not_get_in_nor_keep_others_out(tmp_path: Path) -> None:
    async def scenario() -> None:
        limits = replace(QUICK, unproven_max=3, handshake_s=600)
        async with storage(tmp_path) as local, served(local, limits=limits) as (server, port):
            strangers = [await asyncio.open_connection(HOST, port) for _ in range(10)]
            await until(lambda: server.refused >= 7)
            assert len(server.connections) <= 3
            async with remote(port, limits=limits) as link:
                await link.stream_info("S")
            for _, writer in strangers:
                writer.close()

    run(scenario())


@pytest.mark.parametrize(
    "said",
    [
        b"\xff" * 64,
        frame_head(frames.REQUEST, 1, 1, 0, QUICK.frame_bytes_max + 1),
        frame_head(frames.REQUEST, 250, 1, 0, 0),
        frame_head(frames.REQUEST, 2, 1, 0, 2) + b"\x91\x01",
        frame_head(frames.REQUEST, 2, 1, 0, 3) + b"\xc1\xc1\xc1",
        frame_head(frames.RESULT, 2, 1, 0, 0),
    ],
)
def test_client_that_breaks_the_protocol_is_cut_and_others_are_not(
    tmp_path: Path, said: bytes
) -> None:
    async def scenario() -> None:
        async with (
            storage(tmp_path) as local,
            served(local) as (_, port),
            remote(port) as link,
        ):
            reader, writer = await asyncio.open_connection(HOST, port)
            hello = ClientHandshake(KEY, b"n" * 32)
            while not hello.done:
                writer.write(hello.feed(await reader.read(100)))
            writer.write(said)
            assert await ends(reader)
            writer.close()
            assert (await link.stream_info("S")).config.name == "S"

    run(scenario())


# Three outcomes ----------------------------------------------------------------------------------
PULLED = AckItem(1, 1, 1, [1], "ack")
CHANGES: dict[str, Callable[[RemoteLink], Awaitable[Any]]] = {
    "publish": lambda link: publish(link, "S", [message()]),
    "publish_batch": lambda link: publish(link, "S", MessageBatch.of([message()])),
    "purge": lambda link: link.purge_stream("S", "", 0, 0),
    "delete": lambda link: link.delete_message("S", 1),
    "acknowledge": lambda link: link.acknowledge("S", "c", [PULLED], True),
    "delete_consumer": lambda link: link.delete_consumer("S", "c"),
}
READS: dict[str, Callable[[RemoteLink], Awaitable[Any]]] = {
    "info": lambda link: link.stream_info("S"),
    "range": lambda link: link.read_range(RangeRequest(stream="S")),
    "consumer": lambda link: link.consumer_info("S", "c"),
    "route": lambda link: link.stream_for_subject("a.b"),
    "replay": lambda link: link.replay(ReplayRequest(stream="S")),
}
PULLS: dict[str, Callable[[RemoteLink], Awaitable[Any]]] = {
    "pull": lambda link: link.pull(
        PullRequest(stream="S", consumer="c", expires_ns=40 * SECOND_NS)
    ),
    "wait": lambda link: link.read_range(
        RangeRequest(stream="S", from_seq=9, wait_ns=40 * SECOND_NS)
    ),
}


async def cut_under(
    wire: Wire, link: RemoteLink, call: Callable[[RemoteLink], Awaitable[Any]], *, answered: bool
) -> Any:
    """The outcome of a call whose request (or answer) is on the way when the wire is cut."""
    wire.hold_answers, wire.hold_requests = answered, not answered
    before = wire.held_answers + wire.held_requests
    task = asyncio.ensure_future(outcome(call(link)))
    quiet = len(frame_head(frames.PULSE, 0, 0, 0, 0)) + 1
    await until(lambda: wire.held_answers + wire.held_requests > before + 2 * quiet)
    wire.hold_answers = wire.hold_requests = False
    wire.cut()
    return await task


@pytest.mark.long
@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_change_that_was_sent_and_not_answered_is_unknown(
    tmp_path: Path, name: str, answered: bool
) -> None:
    async def scenario() -> None:
        async with wired(tmp_path) as (local, wire, link):
            await publish(local, "S", [message()])
            await local.put_consumer(
                "S", ConsumerConfig(name="c", durable=True), "put", None, False
            )
            found = await cut_under(wire, link, CHANGES[name], answered=answered)
            assert is_refusal(found, errors.OUTCOME_UNKNOWN)
            # The link is back without anybody's help.
            await until(lambda: not link.readiness())
            await publish(link, "S", [message()])

    run(scenario())


@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize("name", READS)
def test_read_whose_connection_was_cut_is_asked_again(
    tmp_path: Path, name: str, answered: bool
) -> None:
    async def scenario() -> None:
        async with wired(tmp_path) as (local, wire, link):
            await local.put_consumer(
                "S", ConsumerConfig(name="c", durable=True), "put", None, False
            )
            found = await cut_under(wire, link, READS[name], answered=answered)
            assert not isinstance(found, ApiError)

    run(scenario())


@pytest.mark.parametrize("name", PULLS)
def test_wait_whose_connection_was_cut_is_refused(tmp_path: Path, name: str) -> None:
    async def scenario() -> None:
        async with wired(tmp_path) as (local, wire, link):
            await local.put_consumer(
                "S", ConsumerConfig(name="c", durable=True), "put", None, False
            )
            task = asyncio.ensure_future(outcome(PULLS[name](link)))
            await link.stream_info("S")
            wire.cut()
            found = await task
            assert is_refusal(found, errors.NOT_READY)
            assert found.retry_after_s

    run(scenario())


def test_publish_by_callback_is_unknown_when_cut_and_refused_while_away(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with wired(tmp_path) as (local, wire, link):
            outcomes: list[PublishOutcome] = []
            wire.hold_requests = wire.refuse = True
            link.publish_then("S", [message()], outcomes.append)
            await link_is_down(wire, link)
            assert is_refusal(outcomes[0], errors.OUTCOME_UNKNOWN)
            with pytest.raises(ApiError) as refused:
                link.publish_then("S", [message()], outcomes.append)
            assert is_refusal(refused.value, errors.NOT_READY, False)
            assert refused.value.retry_after_s
            assert len(outcomes) == 1
            assert await stored(local) == 0

    run(scenario())


class Partly:
    """Stores the first messages that came together, refuses the third, and says no more."""

    def readiness(self) -> dict[str, str]:
        return {}

    def publish_each_then(
        self,
        messages: list[PublishMessage],
        done: Callable[[list[int], PublishOutcome], None],
    ) -> None:
        done([0, 1], PublishAck("S", [PubResult(7, count=2)], "fsync"))
        done([2], ApiError(errors.NOT_LEADER, applied=False, leader="n2"))


def test_messages_that_came_together_are_answered_in_parts_and_the_rest_is_unknown() -> None:
    async def scenario() -> None:
        outcomes: list[tuple[list[int], Any]] = []
        sent = [message()] * 5

        def done(positions: list[int], outcome: PublishOutcome) -> None:
            outcomes.append((positions, outcome))

        async with (
            served(cast(StorageLink, Partly())) as (_, port),
            Wire(port) as wire,
            remote(wire.port) as link,
        ):
            link.publish_each_then(sent, done)
            await until(lambda: len(outcomes) == 2)
            assert outcomes[0] == ([0, 1], PublishAck("S", [PubResult(7, count=2)], "fsync"))
            assert outcomes[1][0] == [2]
            assert is_refusal(outcomes[1][1], errors.NOT_LEADER, False)
            assert outcomes[1][1].leader == "n2"
            wire.refuse = True
            await link_is_down(wire, link)
            assert outcomes[2][0] == [3, 4]
            assert is_refusal(outcomes[2][1], errors.OUTCOME_UNKNOWN)
            link.publish_each_then(sent, done)
            assert outcomes[3][0] == [0, 1, 2, 3, 4]
            assert is_refusal(outcomes[3][1], errors.NOT_READY, False)
            assert len(outcomes) == 4

    run(scenario())


async def link_is_down(wire: Wire, link: RemoteLink) -> None:
    wire.cut()
    await until(lambda: "storage link" in link.readiness())


def test_everything_is_refused_while_storage_is_away(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with wired(tmp_path, HASTY) as (local, wire, link):
            wire.refuse = True
            await link_is_down(wire, link)
            for call in (*CHANGES.values(), *READS.values(), *PULLS.values()):
                found = await outcome(call(link))
                assert is_refusal(found, errors.NOT_READY, False)
                assert found.retry_after_s
            assert await stored(local) == 0

    run(scenario())


def test_call_made_while_the_link_is_made_again_waits_for_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with wired(tmp_path) as (local, wire, link):
            wire.refuse = True
            await link_is_down(wire, link)
            call = asyncio.create_task(publish(link, "S", [message()]))
            await asyncio.sleep(0)
            wire.refuse = False
            assert (await call).results[0].seq == 1
            assert await stored(local) == 1

    run(scenario())


def test_stream_that_is_cut_does_not_look_complete(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with wired(tmp_path) as (local, wire, link):
            for _ in range(3):
                await publish(local, "S", [message(b"y" * 10_000)] * 50)
            stream = await link.replay(ReplayRequest(stream="S", format="ndjson"))
            await anext(stream)
            wire.cut()
            with pytest.raises(ApiError) as cut:
                async for _ in stream:
                    pass
            assert cut.value.spec is errors.NOT_READY

    run(scenario())


# Silence and time --------------------------------------------------------------------------------
def test_storage_that_falls_silent_is_given_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        limits = replace(QUICK, silence_s=0.4)
        async with wired(tmp_path, limits) as (_, wire, link):
            wire.hold_answers = True
            found = await outcome(publish(link, "S", [message()]))
            assert is_refusal(found, errors.OUTCOME_UNKNOWN)
            wire.hold_answers = False
            await until(lambda: not link.readiness())

    run(scenario())


def test_client_that_falls_silent_is_given_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        limits = replace(QUICK, silence_s=0.4)
        async with (
            storage(tmp_path) as local,
            served(local, limits=limits) as (server, port),
            Wire(port) as wire,
            remote(wire.port, limits=replace(QUICK, silence_s=60.0)) as link,
        ):
            pull = asyncio.create_task(outcome(PULLS["wait"](link)))
            await until(lambda: any(one.waits for one in server.connections))
            wire.hold_requests = True
            assert is_refusal(await pull, errors.NOT_READY)

    run(scenario())


def test_answer_that_does_not_come_in_time_is_unknown(tmp_path: Path) -> None:
    async def scenario() -> None:
        limits = replace(QUICK, call_s=0.2, silence_s=60.0)
        async with wired(tmp_path, limits) as (local, wire, link):
            wire.hold_answers = True
            found = await outcome(publish(link, "S", [message()]))
            assert is_refusal(found, errors.OUTCOME_UNKNOWN)
            await until_found(lambda: is_stored(local))  # it may be on its way still

    run(scenario())


def test_wait_beyond_its_callers_time_is_ended_at_storage(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with storage(tmp_path) as local, served(local) as (server, port):
            # The wait itself is 40 s: of it and the time for the answer 0.2 s are left.
            hurried = replace(QUICK, call_s=-39.8, silence_s=60.0)
            async with Wire(port) as wire, remote(wire.port, limits=hurried) as link:
                wait = asyncio.create_task(outcome(PULLS["wait"](link)))
                await until(lambda: any(one.waits for one in server.connections))
                wire.hold_requests = True  # so that no cancellation arrives
                await until(lambda: not any(one.waits for one in server.connections))
                assert isinstance(await wait, ApiError)

    run(scenario())


# Bounds ------------------------------------------------------------------------------------------
def test_more_requests_than_the_bound_are_refused_without_effect(tmp_path: Path) -> None:
    async def scenario() -> None:
        limits = replace(QUICK, busy_max=5)
        async with wired(tmp_path, limits) as (local, _, link):
            calls = [outcome(publish(link, "S", [message()])) for _ in range(20)]
            found = await asyncio.gather(*calls)
            refused = [one for one in found if isinstance(one, ApiError)]
            assert len(refused) == 15
            assert all(is_refusal(one, errors.OVERLOADED, False) for one in refused)
            assert await stored(local) == 5

    run(scenario())


def test_more_bytes_than_the_bound_are_refused_without_effect(tmp_path: Path) -> None:
    async def scenario() -> None:
        limits = replace(QUICK, busy_bytes_max=100_000)
        async with wired(tmp_path, limits) as (_, wire, link):
            wire.hold_requests = True
            large = [message(b"x" * 60_000)]
            first = asyncio.create_task(outcome(publish(link, "S", large)))
            await until(lambda: wire.held_requests > 60_000)
            assert is_refusal(await outcome(publish(link, "S", large)), errors.OVERLOADED, False)
            wire.cut()
            await first

    run(scenario())


def test_server_at_its_bound_reads_no_more_until_it_has_answered(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            storage(tmp_path) as local,
            served(local, limits=replace(QUICK, busy_max=2)) as (_, port),
            remote(port) as link,
        ):
            calls = [publish(link, "S", [message(b"x" * 1_000)]) for _ in range(300)]
            acks = await asyncio.gather(*calls)
            assert sorted(ack.results[0].seq for ack in acks) == list(range(1, 301))

    run(scenario())


# Restarts ----------------------------------------------------------------------------------------
def test_storage_that_stops_answers_what_waits_and_what_is_under_way(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            storage(tmp_path) as local,
            served(local) as (server, port),
            remote(port, limits=HASTY) as link,
        ):
            waits = [asyncio.create_task(outcome(PULLS["wait"](link))) for _ in range(3)]
            await until(lambda: sum(one.waits for one in server.connections) == 3)
            publishes = [
                asyncio.create_task(outcome(publish(link, "S", [message()]))) for _ in range(20)
            ]
            await until(lambda: sum(one.busy for one in server.connections) == 20)
            await server.stop(5.0)
            assert all([is_refusal(await one, errors.SHUTTING_DOWN, False) for one in waits])
            assert not [one for one in publishes if isinstance(await one, ApiError)]
            assert await stored(local) == 20
            await until(lambda: "storage link" in link.readiness())

    run(scenario())


def test_storage_gone_and_back_is_found_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            storage(tmp_path) as local,
            served(local) as (first, port),
            remote(port, limits=HASTY) as link,
        ):
            running = first
            for seq in (1, 2, 3):
                assert (await publish(link, "S", [message()])).results[0].seq == seq
                await running.stop(1.0)
                await until(lambda: "storage link" in link.readiness())
                running = LinkServer(local, [KEY], QUICK)
                await running.start(bound(port))
                await until(lambda: not link.readiness())
            await running.stop(1.0)

    run(scenario())


def test_readiness_is_what_storage_says_of_itself(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            storage(tmp_path) as local,
            served(local) as (server, port),
            remote(port) as link,
        ):
            server.link = Unready()  # type: ignore[assignment]
            await until(lambda: link.readiness() == {"disk": "full"})
            server.link = local
            await until(lambda: link.readiness() == {})
            for text in (server.metrics_text(), await link.metrics_text()):
                assert "# TYPE contrail_link_" in text

    run(scenario())


class Unready:
    """A storage that is not ready."""

    @staticmethod
    def readiness() -> dict[str, str]:
        return {"disk": "full"}
