"""The link over real sockets says what a direct call says, and bounds what it holds."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from contrail_common import errors
from contrail_common.columns.message_batch import MessageBatch
from contrail_common.errors import ApiError
from contrail_common.model import ConsumerConfig, Expected, PublishMessage, StreamConfig
from contrail_link.contract.consume import AckItem, PullRequest
from contrail_link.contract.publish import PublishOutcome, PubResult
from contrail_link.contract.read import (
    Chunk,
    DeletedRanges,
    LastRequest,
    Pieces,
    RangeRequest,
    ReplayPlanRequest,
    ReplayRequest,
    pieces_of,
)
from contrail_link.publishing import publish
from contrail_link.tcp.client import ChunkStream, RemoteLink
from contrail_link.tcp.limits import LinkLimits
from contrail_storage.link import LocalLink
from tests.unit.link.link_rig import QUICK, remote, run, served, storage, until, until_found


@asynccontextmanager
async def both(
    data_dir: Path, limits: LinkLimits = QUICK
) -> AsyncIterator[tuple[LocalLink, RemoteLink]]:
    async with (
        storage(data_dir) as local,
        served(local, limits=limits) as (_, port),
        remote(port, limits=limits) as link,
    ):
        yield local, link


def messages(count: int, payload: bytes = b"x", subject: str = "a.b") -> list[PublishMessage]:
    return [PublishMessage(subject, {"N": [str(n)]}, payload) for n in range(count)]


async def refusal(work: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await work
    return caught.value


async def collected(chunks: AsyncIterator[Chunk | Pieces]) -> bytes:
    return b"".join([piece async for chunk in chunks for piece in pieces_of(chunk)])


# The same as a direct call -----------------------------------------------------------------------
def test_reads_answer_what_storage_answers(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with both(tmp_path) as (local, link):
            await publish(link, "S", messages(30, b"\x00\xff"))
            asked = RangeRequest(stream="S", limit=20)
            plan = ReplayPlanRequest(stream="S", splits=2)
            for one in (local, link):
                assert (await one.get_message("S", 3)).headers == {"N": ["2"]}
                assert await one.stream_for_subject("a.x") == "S"
            assert await link.stream_info("S") == await local.stream_info("S")
            assert await link.list_streams("", "", 10, "") == await local.list_streams(
                "", "", 10, ""
            )
            assert await link.read_range(asked) == await local.read_range(asked)
            newest = LastRequest(stream="S", limit=5)
            assert await link.last_messages(newest) == await local.last_messages(newest)
            assert await link.deleted_ranges("S", 5, "") == DeletedRanges([], None)
            assert await link.read_position("S") == await local.read_position("S")
            assert await link.subject_counts("S", "a.>", 5, "") == ([("a.b", 30)], None)
            assert await link.replay_plan(plan) == await local.replay_plan(plan)
            for form in ("arrow", "ndjson", "msgpack"):
                request = ReplayRequest(stream="S", format=form, from_seq=2)
                direct = await collected(await local.replay(request))
                assert await collected(await link.replay(request)) == direct

    run(scenario())


def test_changes_are_made(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with both(tmp_path) as (local, link):
            config = StreamConfig(name="T", subjects=("t.>",), metadata={"k": "v"})
            info, created = await link.put_stream(config, "create", None, False)
            assert (created, info.config) == (True, config)
            await publish(link, "T", messages(4, subject="t.a"))
            await link.delete_message("T", 2)
            assert await link.purge_stream("T", "", 2, 0) == 1
            consumer = ConsumerConfig(name="c", durable=True, backoff_ns=(1, 2), max_deliver=3)
            made, _ = await link.put_consumer("T", consumer, "create", None, True)
            assert made.config == consumer
            assert await link.list_consumers("T", 5, "") == await local.list_consumers("T", 5, "")
            pulled = await link.pull(PullRequest(stream="T", consumer="c", batch=5))
            assert [one.message.seq for one in pulled.deliveries] == [3, 4]
            items = [
                AckItem(pulled.shard_id, pulled.consumer_id, pulled.epoch, [seq], "ack")
                for seq in (3, 4)
            ]
            assert [one.code for one in await link.acknowledge("T", "c", items, True)] == [0, 0]
            assert (await link.consumer_info("T", "c")).ack_floor.stream_seq == 4
            await link.delete_consumer("T", "c")
            await link.delete_stream("T")
            assert (await refusal(link.stream_info("T"))).spec is errors.STREAM_NOT_FOUND

    run(scenario())


def test_batch_in_columns_is_stored_as_it_is(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with both(tmp_path) as (local, link):
            sent = messages(1_000, b"payload")
            sent[7].msg_id = sent[8].msg_id = "twice"
            sent[9].expected = Expected(last_seq=77)
            ack = await publish(link, "S", MessageBatch.of(sent))
            results = [one for result in ack.results for one in result.each()]
            assert [results[8].duplicate, results[9].code] == [
                True,
                errors.WRONG_LAST_SEQUENCE.code,
            ]
            assert (await local.stream_info("S")).state.messages == 998

    run(scenario())


def test_damaged_batch_is_refused_before_storage_joins_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with both(tmp_path) as (_, link):
            batch = MessageBatch.of(messages(3))
            batch.subject_index = b"\xff" * 12
            error = await refusal(publish(link, "S", batch))
            assert (error.spec, error.applied) == (errors.BAD_REQUEST, False)

    run(scenario())


def test_refusals_arrive_whole(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with both(tmp_path) as (local, link):
            request = ReplayRequest(stream="S", to_seq=9)
            for work in (
                lambda one: one.stream_info("NONE"),
                lambda one: one.stream_for_subject("nobody"),
                lambda one: one.replay(request),
                lambda one: publish(one, "", messages(1, subject="nobody")),
                lambda one: one.purge_stream("NONE", "", 0, 0),
            ):
                assert await refusal(work(link)) == await refusal(work(local))

    run(scenario())


def test_callback_gets_the_outcome_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with both(tmp_path) as (_, link):
            outcomes: list[PublishOutcome] = []
            for subject in ("a.b", "nobody"):
                link.publish_then("", messages(1, subject=subject), outcomes.append)
            await until(lambda: len(outcomes) == 2)
            refused, stored = sorted(outcomes, key=lambda one: not isinstance(one, ApiError))
            assert isinstance(refused, ApiError)
            assert refused.spec is errors.NO_STREAM_FOR_SUBJECT
            assert not isinstance(stored, ApiError)
            assert (stored.stream, stored.results[0].seq) == ("S", 1)

    run(scenario())


@pytest.mark.parametrize("direct", [True, False])
def test_messages_that_came_together_are_stored_each_in_the_shard_of_its_subject(
    tmp_path: Path, direct: bool
) -> None:
    async def scenario() -> None:
        async with both(tmp_path) as (local, link):
            await local.put_stream(StreamConfig(name="T", subjects=("t.>",)), "put", None, True)
            subjects = ["a.1", "t.1", "nobody", "a.2", "a.2", "t.2", "t.3"]
            sent = [PublishMessage(subject, None, b"x") for subject in subjects]
            sent[3].msg_id = sent[4].msg_id = "twice"
            sent[5].expected = Expected(last_seq=77)
            found: dict[int, tuple[str, PubResult] | ApiError] = {}

            def done(positions: list[int], outcome: PublishOutcome) -> None:
                if isinstance(outcome, ApiError):
                    found.update(dict.fromkeys(positions, outcome))
                    return
                results = [each for run in outcome.results for each in run.each()]
                for at, result in zip(positions, results, strict=True):
                    found[at] = outcome.stream, result

            (local if direct else link).publish_each_then(sent, done)
            await until(lambda: len(found) == len(sent))
            refused = found.pop(2)
            assert isinstance(refused, ApiError)
            assert (refused.spec, refused.applied) == (errors.NO_STREAM_FOR_SUBJECT, False)
            wrong = errors.WRONG_LAST_SEQUENCE.code
            assert found == {
                0: ("S", PubResult(1)),
                1: ("T", PubResult(1)),
                3: ("S", PubResult(2)),
                4: ("S", PubResult(2, duplicate=True)),
                5: ("T", PubResult(0, code=wrong, detail="wrong last sequence: 1")),
                6: ("T", PubResult(2)),
            }

    run(scenario())


def test_many_requests_share_a_connection_and_each_gets_its_own_answer(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with both(tmp_path) as (_, link):
            acks = await asyncio.gather(
                *(publish(link, "S", messages(1, str(n).encode())) for n in range(500))
            )
            seqs = [ack.results[0].seq for ack in acks]
            assert sorted(seqs) == list(range(1, 501))
            found = await asyncio.gather(*(link.get_message("S", seq) for seq in seqs))
            assert [one.payload for one in found] == [str(n).encode() for n in range(500)]

    run(scenario())


# Waiting -----------------------------------------------------------------------------------------
def test_wait_ends_with_the_message_it_waits_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with both(tmp_path) as (local, link):
            asked = RangeRequest(stream="S", from_seq=1, wait_ns=30_000_000_000)
            waiting = asyncio.create_task(link.read_range(asked))
            await publish(local, "S", messages(1))
            assert len((await waiting).messages) == 1

    run(scenario())


def test_pull_whose_caller_leaves_gives_its_place_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with both(tmp_path) as (local, link):
            await link.put_consumer(
                "S", ConsumerConfig(name="c", durable=True), "create", None, False
            )

            async def waiting(count: int) -> bool:
                return (await local.consumer_info("S", "c")).num_waiting == count

            pull = asyncio.create_task(
                link.pull(PullRequest(stream="S", consumer="c", expires_ns=50_000_000_000))
            )
            await until_found(lambda: waiting(1))
            pull.cancel()
            await until_found(lambda: waiting(0))

    run(scenario())


def test_caller_who_leaves_at_once_leaves_nothing_behind(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            storage(tmp_path) as local,
            served(local) as (server, port),
            remote(port) as link,
        ):
            asked = RangeRequest(stream="S", wait_ns=50_000_000_000)
            leaving = [asyncio.create_task(link.read_range(asked)) for _ in range(20)]
            await asyncio.sleep(0)
            for one in leaving:
                one.cancel()
            await asyncio.gather(*leaving, return_exceptions=True)
            await link.stream_info("S")
            await until(lambda: not any(one.waits for one in server.connections))

    run(scenario())


def test_more_waiting_callers_than_the_bound_are_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        few = LinkLimits(waits_max=3, pulse_s=0.05)
        async with both(tmp_path, few) as (_, link):
            asked = RangeRequest(stream="S", wait_ns=50_000_000_000)
            waiting = [asyncio.create_task(link.read_range(asked)) for _ in range(4)]
            done, rest = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            [refused] = done
            assert (await refusal(refused)).spec is errors.OVERLOADED
            await publish(link, "S", messages(1))
            await asyncio.wait(rest)

    run(scenario())


# Streams -----------------------------------------------------------------------------------------
async def big_stream(link: LocalLink, messages_count: int = 400, size: int = 10_000) -> None:
    for _ in range(messages_count // 100):
        await publish(link, "S", messages(100, b"y" * size))


def held(stream: AsyncIterator[bytes]) -> int:
    assert isinstance(stream, ChunkStream)
    return sum(map(len, stream._pieces))


def test_reader_that_does_not_read_is_sent_no_more_than_a_window(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with both(tmp_path) as (local, link):
            await big_stream(local)
            stream = await link.replay(ReplayRequest(stream="S", format="msgpack"))
            bound = QUICK.window_bytes + QUICK.chunk_bytes
            await until(lambda: held(stream) >= QUICK.window_bytes)
            # Others are answered meanwhile, and nothing more comes.
            for _ in range(50):
                await link.stream_info("S")
            assert held(stream) <= bound
            read, most = 0, 0
            async for piece in stream:
                read += len(piece)
                most = max(most, held(stream))
            assert read > 4_000_000
            assert most <= bound

    run(scenario())


def test_reader_that_leaves_ends_the_stream_at_storage(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            storage(tmp_path) as local,
            served(local) as (server, port),
            remote(port) as link,
        ):
            await big_stream(local)
            for reads in (0, 1):
                stream = await link.replay(ReplayRequest(stream="S"))
                assert isinstance(stream, ChunkStream)
                for _ in range(reads):
                    await anext(stream)
                await stream.aclose()
            await until(lambda: not any(one.waits for one in server.connections))

    run(scenario())


def test_reader_that_stands_still_for_too_long_loses_its_stream(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with both(tmp_path, LinkLimits(stream_stall_s=0.2, window_bytes=1)) as (local, link):
            await big_stream(local)
            stream = await link.replay(ReplayRequest(stream="S", format="msgpack"))
            await anext(stream)
            await until(lambda: isinstance(stream, ChunkStream) and stream._complete)
            error = await refusal(collected(stream))
            assert error.spec is errors.OVERLOADED

    run(scenario())
