"""Operations on a consumer with many pending messages: no step holds the event loop for long."""

import itertools
from pathlib import Path

import msgspec
import pytest

from contrail_common.model import ConsumerConfig, PublishMessage, Retention, StreamConfig
from contrail_link.contract.consume import AckItem, PullRequest
from contrail_link.publishing import publish
from contrail_storage.link import LocalLink
from tests.support.slices import assert_no_stall
from tests.unit.storage.test_stalls import play

PENDING = 60_000
BATCH = 1_000
FEW = 10
HOUR_NS = 3_600 * 1_000_000_000


async def make(link: LocalLink, retention: Retention) -> ConsumerConfig:
    """A stream, and a consumer that has all of its messages pending."""
    stream = StreamConfig(name="S", subjects=("a",), retention=retention)
    await link.put_stream(stream, "create", None, False)
    consumer = ConsumerConfig(
        name="c", durable=True, ack_policy="all", max_ack_pending=-1, ack_wait_ns=HOUR_NS
    )
    await link.put_consumer("S", consumer, "create", None, False)
    for _ in range(0, PENDING, BATCH):
        await publish(link, "S", [PublishMessage("a", None, b"x")] * BATCH)
        await pull(link)
    info = await link.consumer_info("S", "c")
    assert info.num_ack_pending == PENDING
    return info.config


async def pull(link: LocalLink) -> list[AckItem]:
    """Pull a batch; the acks of its messages."""
    request = PullRequest(stream="S", consumer="c", batch=BATCH, no_wait=True)
    pulled = await link.pull(request)
    return [AckItem(*pulled.address(one), [one.message.seq], "ack") for one in pulled.deliveries]


async def ack_up_to(link: LocalLink, item: AckItem, seq: int) -> None:
    [result] = await link.acknowledge(
        "S", "c", [msgspec.structs.replace(item, seqs=[seq])], sync=True
    )
    assert result.code == 0


@pytest.mark.long
@pytest.mark.parametrize("retention", ["limits", "interest"])
def test_acks_that_settle_all_before_them(tmp_path: Path, retention: Retention) -> None:
    async def scene(link: LocalLink) -> None:
        await make(link, retention)
        await publish(link, "S", [PublishMessage("a", None, b"x")])
        [item] = await pull(link)
        few = itertools.count(FEW, FEW)
        many = itertools.chain([PENDING // 3, 2 * PENDING // 3], itertools.repeat(PENDING + 1))

        async def ack_few() -> None:
            for seq in itertools.islice(few, 100):
                await ack_up_to(link, item, seq)

        async def ack_many() -> None:
            await ack_up_to(link, item, next(many))

        await assert_no_stall(ack_few)
        await assert_no_stall(ack_many)
        await ack_up_to(link, item, PENDING + 1)
        info = await link.consumer_info("S", "c")
        assert (info.num_ack_pending, info.ack_floor.stream_seq) == (0, PENDING + 1)

    play(tmp_path, scene)


@pytest.mark.long
def test_new_ack_wait_and_redelivery_with_many_pending(tmp_path: Path) -> None:
    async def scene(link: LocalLink) -> None:
        config = await make(link, "limits")
        waits = itertools.count(2)

        async def change() -> None:
            wait_ns = next(waits) * HOUR_NS
            changed = msgspec.structs.replace(config, ack_wait_ns=wait_ns)
            await link.put_consumer("S", changed, "update", None, False)
            await link.consumer_info("S", "c")

        await assert_no_stall(change)
        pulled: list[list[int]] = []

        async def pull_again() -> None:
            pulled.append([seq for item in await pull(link) for seq in item.seqs])

        # All are due again at once, and a pull gets the first ones.
        now_due = msgspec.structs.replace(config, ack_wait_ns=1)
        await link.put_consumer("S", now_due, "update", None, False)
        await assert_no_stall(pull_again)
        for number, seqs in enumerate(pulled):
            assert seqs == list(range(number * BATCH + 1, (number + 1) * BATCH + 1))
        info = await link.consumer_info("S", "c")
        assert info.num_redelivered == len(pulled) * BATCH
        # None is due, which a pull finds out.
        await link.put_consumer("S", config, "update", None, False)
        pulled.clear()
        await assert_no_stall(pull_again)
        assert not any(pulled)

    play(tmp_path, scene)
