"""Erased bytes are in no file of a node: looked for in every file under its folder."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import Compression, ConsumerConfig, PublishMessage, StreamConfig
from contrail_link.contract.consume import PullRequest
from contrail_link.contract.read import LastRequest, RangeRequest
from contrail_link.publishing import publish
from contrail_storage.core import key_layout as keys
from contrail_storage.disk.files import AppendHandle, Files
from contrail_storage.link import LocalLink
from contrail_storage.store.rocks_store import RocksStore, StoreOptions
from tests.support.folders import files_with
from tests.unit.storage.erase_rig import NODE_KEY, WAIT_NS, erased, make, running, secret, traces


async def fill(link: LocalLink, count: int = 40, stream: str = "S") -> None:
    """Messages 1 to ``count``, one by one: many blocks, many entries."""
    for number in range(1, count + 1):
        await publish(link, stream, [secret(number, stream)])


async def seqs_of(link: LocalLink, stream: str = "S") -> list[int]:
    page = await link.read_range(RangeRequest(stream=stream, limit=1_000))
    return [message.seq for message in page.messages]


def test_erased_messages_leave_the_log_alone_that_holds_them(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (_, link):
            await make(link)
            await fill(link)
            # The store has flushed nothing yet: the log has it all.
            assert all(name.endswith(".wal") for name in files_with(tmp_path, traces(7)))
            receipt = await erased(link, "S", [7, 9])
            assert (receipt.status, receipt.messages) == ("done", 2)
            assert [(one.node, one.status) for one in receipt.replicas] == [("n1", "done")]
            assert files_with(tmp_path, traces(7) + traces(9)) == {}
            assert files_with(tmp_path, traces(8))
            assert await seqs_of(link) == [seq for seq in range(1, 41) if seq not in (7, 9)]
            assert (await link.get_message("S", 8)).payload == secret(8).payload

    asyncio.run(scenario())


def test_answers_call_a_node_by_the_name_it_was_started_with(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, name="alpha") as (_, link):
            await make(link)
            await fill(link)
            receipt = await erased(link, "S", [7])
            assert [one.node for one in receipt.replicas] == ["alpha"]
            assert (await link.stream_info("S")).leader == "alpha"
        async with running(tmp_path, name="beta") as (_, link):
            assert [one.node for one in (await link.erasure(receipt.erasure_id, 0)).replicas] == [
                "beta"
            ]
            assert (await link.stream_info("S")).leader == "beta"

    asyncio.run(scenario())


@pytest.mark.long
@pytest.mark.parametrize("node_keys", [(), (NODE_KEY,)], ids=["plain", "encrypted"])
@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
@pytest.mark.parametrize("blob_bytes_min", [32 << 10, 100], ids=["in_tables", "blobs"])
def test_erased_messages_leave_tables_blocks_and_names(
    tmp_path: Path, node_keys: tuple[bytes, ...], compression: Compression, blob_bytes_min: int
) -> None:
    opened = partial(RocksStore.open_reading, options=StoreOptions(blob_bytes_min=blob_bytes_min))

    async def scenario() -> None:
        options: Any = {"node_keys": node_keys, "merge_blocks": 4, "open_store": opened}
        async with running(tmp_path, **options) as (node, link):
            await make(link, compression=compression)
            await fill(link)
            await node.checkpoint()
            await publish(link, "S", [secret(number) for number in range(41, 60)])
            assert bool(files_with(tmp_path, traces(7) + traces(45))) == (not node_keys)
            assert any((tmp_path / "store").glob("*.blob")) == (blob_bytes_min == 100)
            await erased(link, "S", [7, 45])
            assert files_with(tmp_path, traces(7) + traces(45)) == {}
        # Closed, opened and flushed again, nothing of it comes back.
        async with running(tmp_path, **options) as (node, link):
            await node.checkpoint()
            assert files_with(tmp_path, traces(7) + traces(45)) == {}
            assert bool(files_with(tmp_path, traces(8))) == (not node_keys)
            rest = [seq for seq in range(1, 60) if seq not in (7, 45)]
            assert await seqs_of(link) == rest
            for seq in rest:
                message = await link.get_message("S", seq)
                expected = secret(seq)
                assert (message.subject, message.payload) == (expected.subject, expected.payload)
                assert message.headers == expected.headers

    asyncio.run(scenario())


def test_subjects_erased_by_a_filter_take_their_names_along(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (node, link):
            await make(link)
            await make(link, "T")
            await fill(link, 20)
            await fill(link, 3, "T")
            await node.checkpoint()
            receipt = await erased(link, "S", [], "S.name-of-0001")
            assert (receipt.status, receipt.messages) == ("done", 1)
            assert files_with(tmp_path, [b"S.name-of-0001"]) == {}
            assert files_with(tmp_path, [b"S.name-of-0002"])
            assert (await erased(link, "S", [], "S.*")).messages == 19
            assert files_with(tmp_path, [b"S.name-of"]) == {}
            assert (await link.stream_info("S")).state.messages == 0
            assert await seqs_of(link, "T") == [1, 2, 3]
            assert (await erased(link, "T", [], ">")).messages == 3
            assert files_with(tmp_path, [b"name-of", b"payload-text", b"header-value"]) == {}

    asyncio.run(scenario())


def test_messages_gone_before_are_erased_too(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (node, link):
            await make(link)
            await fill(link, 30)
            await node.checkpoint()
            await link.delete_message("S", 20)
            await link.purge_stream("S", "", 5, 0)
            await link.purge_stream("S", "S.name-of-0025", 0, 0)
            config = StreamConfig(name="S", subjects=("S.>",), max_msgs=15)
            await link.put_stream(config, "put", None, False)
            gone = [4, 12, 20, 25]
            for seq in gone:
                assert files_with(tmp_path, traces(seq))
            receipt = await erased(link, "S", gone)
            assert (receipt.status, receipt.messages) == ("done", 4)
            assert files_with(tmp_path, [text for seq in gone for text in traces(seq)]) == {}
            # In one cycle whatever else is gone goes with them.
            assert files_with(tmp_path, traces(3)) == {}
            assert (await link.stream_info("S")).state.messages == 15

    asyncio.run(scenario())


def test_pending_deliveries_of_erased_messages_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (_, link):
            await make(link)
            await fill(link, 6)
            consumer = ConsumerConfig(name="c", durable=True)
            await link.put_consumer("S", consumer, "put", None, False)
            await link.pull(PullRequest(stream="S", consumer="c", batch=4))
            while (await link.consumer_info("S", "c")).num_ack_pending < 4:
                await asyncio.sleep(0)
            await erased(link, "S", [2, 3, 6])
            assert (await link.consumer_info("S", "c")).num_ack_pending == 2
            rest = await link.pull(PullRequest(stream="S", consumer="c", batch=9))
            assert [one.message.seq for one in rest.deliveries] == [5]
            assert files_with(tmp_path, [text for seq in (2, 3, 6) for text in traces(seq)]) == {}

    asyncio.run(scenario())


def test_name_of_a_subject_that_a_roll_up_has_not_finished_is_removed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("contrail_storage.core.stream.removal.by_subject.REMOVED_MAX", 2)
    monkeypatch.setattr("contrail_storage.upkeep.housekeeper.TICK_S", 3_600.0)

    async def scenario() -> None:
        async with running(tmp_path) as (node, link):
            await make(link)
            await publish(link, "S", [PublishMessage("S.rolled", None, b"old")] * 6)
            await publish(link, "S", [PublishMessage("S.rolled", None, b"new", rollup="sub")])
            await publish(link, "S", [secret(1)])
            assert node.streams.shard("S").machine.counters.replaced
            await node.checkpoint()
            await erased(link, "S", [], "S.rolled")
            assert node.streams.shard("S").machine.counters.replaced == {}
            assert files_with(tmp_path, [b"S.rolled"]) == {}

    asyncio.run(scenario())


def test_last_of_each_subject_stays_right_when_many_are_erased_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (node, link):
            await make(link)
            messages = [PublishMessage(f"S.{at % 3}", None, b"%d" % at) for at in range(900)]
            await publish(link, "S", messages)
            await erased(link, "S", [1, *range(301, 900), 900, 899, 900])
            table = node.streams.shard("S").machine.subjects
            newest, _ = await link.last_messages(LastRequest(stream="S"))
            assert [one.seq for one in newest] == [298, 299, 300]
            assert [table.count(f"S.{number}") for number in range(3)] == [99, 100, 100]

    asyncio.run(scenario())


def test_erasures_that_come_during_a_cycle_share_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (node, link):
            await make(link)
            await fill(link, 60)
            gate, cut_log = asyncio.Event(), node.eraser._cut_log

            async def held() -> None:
                await gate.wait()
                await cut_log()

            monkeypatch.setattr(node.eraser, "_cut_log", held)
            receipts = await asyncio.gather(*[link.erase("S", [seq], "") for seq in range(1, 51)])
            gate.set()
            done = [await link.erasure(one.erasure_id, WAIT_NS) for one in receipts]
            assert {one.status for one in done} == {"done"}
            assert node.eraser.counts.done == 50
            assert node.eraser.counts.cycles <= 2
            assert files_with(tmp_path, [text for n in range(1, 51) for text in traces(n)]) == {}
            text = await link.metrics_text()
            assert "contrail_erasures_done_total 50.0" in text
            assert "contrail_erasures_pending 0.0" in text

    asyncio.run(scenario())


def test_snapshot_that_nobody_reads_on_is_ended(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (node, link):
            await make(link)
            await publish(link, "S", [PublishMessage("S.big", None, b"B" * 100_000)] * 30)
            await fill(link, 5)
            await node.checkpoint()
            chunks = await link.snapshot("S", True)
            assert await anext(chunks)
            assert (await erased(link, "S", [33])).status == "done"
            assert files_with(tmp_path, traces(3)) == {}
            with pytest.raises(ApiError) as ended:
                async for _ in chunks:
                    pass
            assert ended.value.spec is errors.OVERLOADED
            assert [chunk async for chunk in await link.snapshot("S", True)]

    asyncio.run(scenario())


def test_receipt_of_a_stream_that_is_deleted_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (node, link):
            await make(link)
            await fill(link, 8)
            await node.checkpoint()
            receipt = await link.erase("S", [3], "")
            await link.delete_stream("S")
            done = await link.erasure(receipt.erasure_id, WAIT_NS)
            assert (done.status, done.messages) == ("done", 1)
            assert files_with(tmp_path, traces(3)) == {}
        async with running(tmp_path) as (node, link):
            assert await link.erasure(receipt.erasure_id, 0) == done

    asyncio.run(scenario())


@pytest.mark.parametrize("step", ["_empty", "_cut_log", "_store"])
def test_erasure_that_failed_is_finished_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (node, link):
            await make(link)
            await fill(link, 12)
            await node.checkpoint()
            monkeypatch.setattr(node.eraser, step, Failing())
            receipt = await link.erase("S", [4], "")
            while not node.eraser.counts.failed:
                await asyncio.sleep(0)
            assert (await link.erasure(receipt.erasure_id, 1_000_000)).status == "pending"
            # Unreadable at once; everything else goes on.
            with pytest.raises(ApiError):
                await link.get_message("S", 4)
            await publish(link, "S", [secret(13)])
            assert files_with(tmp_path, traces(4))
        async with running(tmp_path) as (node, link):
            done = await link.erasure(receipt.erasure_id, WAIT_NS)
            assert done.status == "done"
            assert files_with(tmp_path, traces(4)) == {}
            assert await seqs_of(link) == [seq for seq in range(1, 14) if seq != 4]

    asyncio.run(scenario())


def test_receipt_of_a_damaged_stream_is_tried_once_and_lets_others_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With these pauses whatever is tried again and again is tried at every turn of the loop.
    monkeypatch.setattr("contrail_storage.upkeep.eraser._RETRY_S", 0.0)
    monkeypatch.setattr("contrail_storage.upkeep.eraser._LOOK_S", 0.0)

    async def scenario() -> None:
        async with running(tmp_path) as (node, link):
            await make(link)
            await make(link, "T")
            await fill(link, 6)
            await fill(link, 6, "T")
            await link.delete_message("S", 4)
        async with running(tmp_path) as (node, link):
            shard_id = node.streams.shard("S").machine.shard_id
            directory = node.blocks.directory(shard_id)
            base_seq = directory.span(directory.position(4)).base_seq
            node._store.write([("put", keys.large_key(keys.BLOCK, shard_id, base_seq), b"rotten")])
            stuck = await link.erase("S", [4], "")
            while not node.eraser.counts.failed:
                await asyncio.sleep(0)
            for seq in (1, 2, 3):
                assert (await erased(link, "T", [seq])).status == "done"
            counts = node.eraser.counts
            assert (counts.cycles, counts.failed, counts.done) == (4, 1, 3)
            [replica] = (await link.erasure(stuck.erasure_id, 0)).replicas
            assert replica.status == "pending"
            assert replica.reason.startswith(f"stream S is damaged: block {base_seq}: ")
            await link.delete_stream("S")
            done = await link.erasure(stuck.erasure_id, WAIT_NS)
            assert [(one.status, one.reason) for one in done.replicas] == [("done", "")]
            assert files_with(tmp_path, [b"S.name-of"]) == {}

    asyncio.run(scenario())


def test_reason_of_a_failed_erasure_is_reported_and_its_pauses_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("contrail_storage.upkeep.eraser._RETRY_S", 0.001)
    monkeypatch.setattr("contrail_storage.upkeep.eraser._RETRY_MAX_S", 0.004)

    async def scenario() -> None:
        async with running(tmp_path) as (node, link):
            await make(link)
            await fill(link, 4)
            cut_log = node.eraser._cut_log
            monkeypatch.setattr(node.eraser, "_cut_log", Failing())
            receipt = await link.erase("S", [4], "")
            pauses = set()
            while node.eraser.counts.failed < 6:
                pauses.add(node.eraser._backoff.pause_s)
                await asyncio.sleep(0)
            assert pauses == {0.0, 0.001, 0.002, 0.004}
            [replica] = (await link.erasure(receipt.erasure_id, 0)).replicas
            assert "No space left on device" in replica.reason
            monkeypatch.setattr(node.eraser, "_cut_log", cut_log)
            done = await link.erasure(receipt.erasure_id, WAIT_NS)
            assert [(one.status, one.reason) for one in done.replicas] == [("done", "")]

    asyncio.run(scenario())


class Failing:
    """Stands for a step, or for the store, and refuses."""

    async def __call__(self, *_: object) -> bool:
        raise OSError(28, "No space left on device")

    def rewrite(self, *_: object) -> None:
        raise OSError(28, "No space left on device")


def test_log_that_failed_keeps_the_receipt_pending_until_it_takes_records_again(
    tmp_path: Path,
) -> None:
    class FullDisk(Files):
        full = False

        def create(self, path: Path, *, ahead_bytes: int = 0) -> AppendHandle:
            if self.full:
                raise OSError(28, "No space left on device")
            return super().create(path, ahead_bytes=ahead_bytes)

    async def scenario() -> None:
        files = FullDisk()
        async with running(tmp_path, files=files) as (node, link):
            await make(link)
            await fill(link, 12)
            receipt = await link.erase("S", [4], "")
            files.full = True  # the next segment cannot be made
            while not node.eraser.counts.failed:
                await asyncio.sleep(0)
            assert (await link.erasure(receipt.erasure_id, 0)).status == "pending"
            assert await seqs_of(link)
            files.full = False
            done = await link.erasure(receipt.erasure_id, WAIT_NS)
            assert done.status == "done"
            assert files_with(tmp_path, traces(4)) == {}
            while node.readiness():
                await asyncio.sleep(0)
            await publish(link, "S", [secret(13)])

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("fields", "seqs", "subject", "spec"),
    [
        ({"sealed": True}, [1], "", errors.STREAM_SEALED),
        ({"sealed": True}, [], "S.>", errors.STREAM_SEALED),
        ({"deny_delete": True}, [1], "", errors.DELETE_DENIED),
        ({"deny_delete": True}, [], "S.>", errors.DELETE_DENIED),
        ({"deny_purge": True}, [], "S.>", errors.PURGE_DENIED),
        ({}, [1, 4], "", errors.SEQUENCE_NOT_FOUND),
        ({}, [0, 1], "", errors.SEQUENCE_NOT_FOUND),
    ],
)
def test_refused_erasure_leaves_everything_as_it_was(
    tmp_path: Path, fields: dict[str, bool], seqs: list[int], subject: str, spec: errors.ErrorSpec
) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (node, link):
            await make(link)
            await fill(link, 3)
            config = StreamConfig(name="S", subjects=("S.>",), **fields)  # type: ignore[arg-type]
            await link.put_stream(config, "put", None, False)
            with pytest.raises(ApiError) as refused:
                await link.erase("S", seqs, subject)
            assert refused.value.spec is spec
            assert await seqs_of(link) == [1, 2, 3]
            assert node.meta.erasures.receipts == {}

    asyncio.run(scenario())


def test_unknown_receipt_and_unknown_stream_are_not_found(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (_, link):
            with pytest.raises(ApiError) as unknown:
                await link.erasure("no-such", 1_000_000)
            assert unknown.value.spec is errors.ERASURE_NOT_FOUND
            with pytest.raises(ApiError) as missing:
                await link.erase("S", [1], "")
            assert missing.value.spec is errors.STREAM_NOT_FOUND

    asyncio.run(scenario())


def test_erasing_from_several_shards_reaches_all_of_them(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (node, link):
            config = StreamConfig(name="S", subjects=("S.>",), shards=3)
            await link.put_stream(config, "create", None, False)
            await fill(link)
            await node.checkpoint()
            erased_ones = traces(7) + traces(8) + traces(9)
            assert files_with(tmp_path, erased_ones)
            with pytest.raises(ApiError) as refused:
                await link.erase("S", [1], "")
            assert refused.value.spec is errors.INVALID_FIELD
            for number in (7, 8, 9):
                receipt = await erased(link, "S", [], f"S.name-of-{number:04}")
                assert (receipt.status, receipt.messages) == ("done", 1)
            assert files_with(tmp_path, erased_ones) == {}
            first = await link.get_message("S", 2, 1)
            receipt = await link.erase("S", [2], "", 1)
            receipt = await link.erasure(receipt.erasure_id, WAIT_NS)
            assert receipt.status == "done"
            assert files_with(tmp_path, [first.payload]) == {}
            assert (await link.stream_info("S")).state.messages == 36

    asyncio.run(scenario())
