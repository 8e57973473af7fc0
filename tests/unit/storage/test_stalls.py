"""Operations beside or on much content: no step holds the event loop for more than 20 ms.

Each scene runs a whole node on asyncio's own loop and measures every callback of the operation.
The operation runs on little content first, which loads what is imported at the first use.
"""

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from contrail_common.model import ConsumerConfig, PublishMessage, StreamConfig
from contrail_common.timeunits import NS_PER_S
from contrail_link.contract.consume import AckItem, Delivery, PullRequest
from contrail_link.contract.read import LastRequest, ManyRequest, RangeRequest, ReplayRequest
from contrail_link.publishing import publish
from contrail_serve.groups import SingleMemberGroups
from contrail_storage.link import LocalLink
from contrail_storage.node import NodeOptions, StorageNode
from tests.support.slices import assert_no_stall

PATIENCE_S = 120.0
PATIENCE_NS = 10 * NS_PER_S
SUBJECTS_EACH = 16
SUBJECTS = 100_000
STREAMS = 500
BATCH = 1_000
PENDING = 50_000
PULLED = 10_000
PAGES = 20
ACKS = 100
OTHERS = 200_000
Scene = Callable[[LocalLink], Coroutine[Any, Any, None]]


async def started(data_dir: Path) -> StorageNode:
    """A node as the service starts it."""
    node = await asyncio.to_thread(StorageNode.open, NodeOptions(data_dir), SingleMemberGroups())
    await node.start()
    return node


def play(data_dir: Path, scene: Scene) -> None:
    """Run ``scene`` on a node."""

    async def whole() -> None:
        node = await started(data_dir)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await scene(LocalLink(node))
        finally:
            await node.stop()

    asyncio.run(whole())


async def make_stream(link: LocalLink, number: int) -> None:
    """A stream on 16 subjects of its own."""
    subjects = tuple(f"s{number}.{other}.>" for other in range(SUBJECTS_EACH))
    config = StreamConfig(name=f"S{number}", subjects=subjects)
    await link.put_stream(config, "create", None, False)


async def publish_all(
    link: LocalLink, stream: str, subjects: list[str], payload: bytes = b"x"
) -> None:
    for at in range(0, len(subjects), BATCH):
        some = subjects[at : at + BATCH]
        ack = await publish(link, stream, [PublishMessage(one, None, payload) for one in some])
        assert not any(result.code for result in ack.results)


async def let_go(messages: list[Any]) -> None:
    """Free messages in steps: 100,000 headers at once take more than 10 ms."""
    while messages:
        del messages[-100:]
        await asyncio.sleep(0)


@pytest.mark.long
def test_streams_beside_many_others(tmp_path: Path) -> None:
    """Create, publish to a new subject, and delete, beside 500 streams on 16 subjects each."""

    async def scene(link: LocalLink) -> None:
        numbers = itertools.count()

        async def operation() -> None:
            number = next(numbers)
            await make_stream(link, number)
            subject = f"s{number}.7.new"
            await publish_all(link, await link.stream_for_subject(subject), [subject])
            await link.delete_stream(f"S{number}")

        await operation()
        for number in range(STREAMS):
            await make_stream(link, STREAMS + number)
        await assert_no_stall(operation)

    play(tmp_path, scene)


@pytest.mark.long
def test_start_and_expiry_with_many_streams(tmp_path: Path) -> None:
    """Start with 500 streams whose messages expire in an hour, until another's has expired."""
    long_ns, short_ns = 3_600 * NS_PER_S, NS_PER_S // 5

    async def make(link: LocalLink, name: str, max_age_ns: int) -> None:
        config = StreamConfig(name=name, subjects=(name,), max_age_ns=max_age_ns)
        await link.put_stream(config, "create", None, False)
        await publish_all(link, name, [name])

    async def wait_until_expired(link: LocalLink) -> None:
        while (await link.stream_info("SHORT")).state.messages:
            await asyncio.sleep(0.01)

    async def fill(link: LocalLink) -> None:
        await make(link, "SHORT", short_ns)
        for number in range(STREAMS):
            await make(link, f"LONG{number}", long_ns)

    async def operation() -> None:
        node = await started(tmp_path)
        link = LocalLink(node)
        await publish_all(link, "SHORT", ["SHORT"])
        await wait_until_expired(link)
        await node.stop()

    play(tmp_path, fill)
    asyncio.run(assert_no_stall(operation))


@pytest.mark.long
def test_filters_and_pages_of_subjects_with_many_subjects(tmp_path: Path) -> None:
    """Read by filters that are new each time, and list all subjects, of 100,000."""

    async def scene(link: LocalLink) -> None:
        numbers = itertools.count()

        async def operation() -> None:
            pattern = f"*.*.*.e{next(numbers)}"
            config = ConsumerConfig(name="C", durable=True, filter_subjects=(pattern,))
            await link.put_consumer("S0", config, "create", None, False)
            pull = PullRequest(stream="S0", consumer="C", batch=10, no_wait=True)
            assert await link.pull(pull)
            await link.delete_consumer("S0", "C")
            pattern, token = f"*.*.*.e{next(numbers)}", ""
            last = LastRequest(stream="S0", subject=pattern, limit=10)
            await link.last_messages(last)
            pattern = f"*.*.*.e{next(numbers)}"
            async for _ in await link.replay(ReplayRequest(stream="S0", subject=pattern)):
                pass
            for _ in range(PAGES):
                _, following = await link.subject_counts("S0", "", BATCH, token)
                token = following or ""

        await make_stream(link, 0)
        await publish_all(link, "S0", ["s0.0.x"])
        await operation()
        subjects = [f"s0.0.c{number}.e{number % 100}" for number in range(SUBJECTS)]
        await publish_all(link, "S0", subjects)
        await assert_no_stall(operation)

    play(tmp_path, scene)


@pytest.mark.long
def test_acknowledgements_of_all_with_many_pending(tmp_path: Path) -> None:
    """Acknowledge 100 deliveries with all before them, of 50,000 that are pending."""

    async def fill(link: LocalLink) -> PullRequest:
        await make_stream(link, 0)
        await publish_all(link, "S0", ["s0.0.x"] * PENDING)
        config = ConsumerConfig(
            name="C", durable=True, ack_policy="all", max_ack_pending=-1, ack_wait_ns=long_ns
        )
        await link.put_consumer("S0", config, "create", None, False)
        return PullRequest(stream="S0", consumer="C", batch=PULLED, no_wait=True)

    long_ns = 3_600 * NS_PER_S

    async def scene(link: LocalLink) -> None:
        pull = await fill(link)
        pulled = [await link.pull(pull) for _ in range(PENDING // PULLED)]
        sequences = itertools.count(1)

        async def operation() -> None:
            items = [
                AckItem(
                    shard_id=pulled[0].shard_id,
                    consumer_id=pulled[0].consumer_id,
                    epoch=pulled[0].epoch,
                    seqs=[next(sequences)],
                    kind="ack",
                )
                for _ in range(ACKS)
            ]
            results = await link.acknowledge("S0", "C", items, True)
            assert not any(result.code for result in results)

        await assert_no_stall(operation)
        info = await link.consumer_info("S0", "C")
        assert info.num_ack_pending == PENDING - next(sequences) + 1

    play(tmp_path, scene)


@pytest.mark.long
def test_pull_of_a_sparse_filter(tmp_path: Path) -> None:
    """Pull the first and the last of 200,000 messages, whose blocks are in memory."""

    async def scene(link: LocalLink) -> None:
        await make_stream(link, 0)
        numbers = itertools.count()

        async def operation() -> None:
            name = f"C{next(numbers)}"
            config = ConsumerConfig(name=name, durable=True, filter_subjects=("s0.1.*",))
            await link.put_consumer("S0", config, "create", None, False)
            pull = PullRequest(stream="S0", consumer=name, batch=PULLED, no_wait=True)
            pulled = await link.pull(pull)
            assert [one.message.seq for one in pulled.deliveries] == expected

        expected = [1]
        await publish_all(link, "S0", ["s0.1.a"])
        await operation()
        await publish_all(link, "S0", ["s0.0.x"] * OTHERS, b"x" * 400)
        await publish_all(link, "S0", ["s0.1.b"])
        expected = [1, OTHERS + 2]
        await assert_no_stall(operation)

    play(tmp_path, scene)


@pytest.mark.long
def test_pages_of_messages_with_many_headers(tmp_path: Path) -> None:
    """Read 1,000 messages with 100 headers each: in order, the newest of subjects, and by name."""
    headers = {f"H{number}": [f"{number}", "x"] for number in range(100)}

    async def scene(link: LocalLink) -> None:
        async def operation(most: int = 1_000) -> None:
            asked = RangeRequest(stream="S0", from_seq=1, limit=most, max_bytes=4 << 20)
            found = await link.read_range(asked)
            assert len(found.messages) == most
            await let_go(found.messages)
            newest = LastRequest(stream="S0", subject="s0.0.*", limit=most)
            page, _ = await link.last_messages(newest)
            assert len(page) == min(most, 628)  # 1 MiB
            await let_go(page)
            many = await link.get_messages(ManyRequest(stream="S0", seqs=list(range(1, most + 1))))
            assert [one.seq for one in many.messages if one] == list(range(1, most + 1))
            await let_go(many.messages)

        await make_stream(link, 0)
        for part in range(4):
            subjects = [f"s0.0.{250 * part + number}" for number in range(250)]
            messages = [PublishMessage(subject, headers, b"x") for subject in subjects]
            await publish(link, "S0", messages)
        await operation(10)
        await assert_no_stall(operation)

    play(tmp_path, scene)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["explicit", "none", "sharded", "headers_only", "single", "again"])
def test_pulls_of_messages_with_many_headers(tmp_path: Path, kind: str) -> None:
    """Pull 1,000 messages with 100 headers each, also those that no batch brought."""
    headers = {f"H{number}": [f"{number}", "x"] for number in range(100)}
    shards = 2 if kind == "sharded" else 1
    each = 10 if kind == "single" else 250

    async def publish_to(link: LocalLink, stream: str, count: int) -> None:
        for at in range(0, count, each):
            messages = [PublishMessage(stream, headers, b"x")] * min(each, count - at)
            await publish(link, stream, messages)

    async def scene(link: LocalLink) -> None:
        numbers = itertools.count()
        found: list[Delivery] = []

        async def operation(stream: str = "MANY", most: int = 1_000) -> None:
            name = f"C{next(numbers)}"
            config = ConsumerConfig(
                name=name,
                durable=True,
                ack_policy="none" if kind == "none" else "explicit",
                ack_wait_ns=NS_PER_S // 10,
                headers_only=kind == "headers_only",
            )
            await link.put_consumer(stream, config, "create", None, False)
            for expires_ns in [0, PATIENCE_NS][: 1 + (kind == "again")]:
                await let_go(found)
                while len(found) < most:
                    left = most - len(found)
                    pull = PullRequest(
                        stream=stream, consumer=name, batch=left, expires_ns=expires_ns
                    )
                    found.extend((await link.pull(pull)).deliveries)

        for stream, count in (("FEW", 20), ("MANY", 1_000)):
            made = StreamConfig(name=stream, subjects=(stream,), shards=shards)
            await link.put_stream(made, "create", None, False)
            await publish_to(link, stream, count)
        await operation("FEW", 20)
        await assert_no_stall(operation)
        expected = {**headers, "Nats-Msg-Size": ["1"]} if kind == "headers_only" else headers
        assert [one.message.headers for one in found] == [expected] * 1_000
        if shards == 1:
            assert [one.message.seq for one in found] == list(range(1, 1_001))

    play(tmp_path, scene)


@pytest.mark.long
@pytest.mark.parametrize(("subjects", "each"), [(100_000, 1), (10_000, 10)])
def test_purges_of_a_wildcard(tmp_path: Path, subjects: int, each: int) -> None:
    """Purge one of seven in turn of 100,000 messages: subjects in a row, and interleaved ones."""

    async def fill(link: LocalLink, name: str, subjects: int) -> None:
        config = StreamConfig(name=name, subjects=(f"{name}.>",))
        await link.put_stream(config, "create", None, False)
        names = [f"{name}.{number % 7}.{number}" for number in range(subjects)]
        await publish_all(link, name, names * each)

    async def scene(link: LocalLink) -> None:
        groups = itertools.count()

        async def operation() -> None:
            group = next(groups)
            purged = await link.purge_stream("S", f"S.{group}.*", 0, 0)
            assert purged == each * len(range(group, subjects, 7))

        await fill(link, "SMALL", 100)
        await link.purge_stream("SMALL", "SMALL.*.1", 0, 0)
        await fill(link, "S", subjects)
        await assert_no_stall(operation)

    play(tmp_path, scene)


@pytest.mark.long
def test_lowered_limit_of_many_subjects(tmp_path: Path) -> None:
    """Lower `max_msgs_per_subject` of 20,000 subjects with five interleaved messages each."""

    async def put(link: LocalLink, name: str, most: int) -> None:
        config = StreamConfig(name=name, subjects=(f"{name}.>",), max_msgs_per_subject=most)
        await link.put_stream(config, "put", None, False)

    async def scene(link: LocalLink) -> None:
        limits = itertools.count(-4)

        async def operation() -> None:
            most = -next(limits)
            await put(link, "S", most)
            assert (await link.stream_info("S")).state.messages == most * 20_000

        for name, subjects in (("SMALL", 10), ("S", 20_000)):
            await put(link, name, -1)
            await publish_all(link, name, [f"{name}.{number}" for number in range(subjects)] * 5)
        await put(link, "SMALL", 2)
        await assert_no_stall(operation)

    play(tmp_path, scene)


@pytest.mark.long
def test_many_entries_committed_by_one_sync(tmp_path: Path) -> None:
    """Publish 20 batches of 1,000 messages at once, each of which removes 1,000 others."""

    async def scene(link: LocalLink) -> None:
        config = StreamConfig(name="S", subjects=("S.>",), max_msgs_per_subject=1)
        await link.put_stream(config, "put", None, False)
        batches = [
            [PublishMessage(f"S.{number}", None, b"x" * 100) for number in range(BATCH)]
            for _ in range(20)
        ]

        async def operation() -> None:
            acks = await asyncio.gather(*(publish(link, "S", batch) for batch in batches))
            firsts = [ack.results[0].seq for ack in acks]
            assert firsts == list(range(firsts[0], firsts[0] + len(acks) * BATCH, BATCH))

        await operation()
        await assert_no_stall(operation)

    play(tmp_path, scene)
