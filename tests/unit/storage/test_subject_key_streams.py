"""Streams with subject keys: files hold sealed content only, and an erased subject is shredded."""

import asyncio
import errno
from pathlib import Path
from typing import Any

import msgspec
import pytest

from contrail_common import errors
from contrail_common.columns.blocks import encode_block, message_size
from contrail_common.columns.message_batch import MessageBatch
from contrail_common.errors import ApiError
from contrail_common.model import ConsumerConfig, PublishMessage
from contrail_link import publishing
from contrail_link.contract.consume import PullRequest
from contrail_link.contract.read import RangeRequest, ReplayRequest
from contrail_storage.core.key_layout import BLOCK, large_key
from contrail_storage.disk.files import Files, UpdateHandle
from contrail_storage.link import LocalLink
from contrail_storage.node import StorageNode
from contrail_storage.replica.proposer import QUEUE_BYTES_MAX
from contrail_storage.seal.key_file import SUBJECT_KEYS_NAME
from tests.support.folders import copy_at_one_moment, files_with
from tests.unit.storage.erase_rig import NODE_KEY, WAIT_NS, erased, running, secret
from tests.unit.storage.subject_key_rig import (
    config,
    content_found,
    content_traces,
    everything,
    expected,
    fill,
    make,
    other,
)

ENCRYPTED = pytest.mark.parametrize("node_keys", [(), (NODE_KEY,)], ids=["plain", "encrypted"])


def keys_of(node: StorageNode, stream: str = "S") -> int:
    """How many keys the subjects of a stream with one shard have."""
    return node.subject_keys.live().get(node.streams.shard(stream).machine.shard_id, 0)


async def seen_alike(link: LocalLink, numbers: list[int], stream: str = "S") -> None:
    wanted = expected(numbers, stream)
    for how, seen in (await everything(link, stream)).items():
        assert seen == wanted, how


@ENCRYPTED
def test_content_is_in_no_file_and_is_given_out_in_every_way(
    tmp_path: Path, node_keys: tuple[bytes, ...]
) -> None:
    numbers = list(range(1, 61))

    async def scenario() -> None:
        options: Any = {"node_keys": node_keys, "merge_blocks": 4}
        async with running(tmp_path, **options) as (node, link):
            await make(link)
            await fill(link, 40)
            await seen_alike(link, numbers[:40])
            await node.checkpoint()
            await publishing.publish(link, "S", [secret(number) for number in range(41, 61)])
            await seen_alike(link, numbers)
            assert keys_of(node) == 60
            assert content_found(tmp_path, numbers) == {}
            state = (await link.stream_info("S")).state
            messages = map(secret, numbers)
            assert state.bytes == sum(message_size(x.headers, len(x.payload)) for x in messages)
            await node.scrubber.round()
            assert node.readiness() == {}
            assert "contrail_subject_keys 60.0" in await link.metrics_text()
        async with running(tmp_path, **options) as (node, link):
            assert content_found(tmp_path, numbers) == {}
            await seen_alike(link, numbers)
            assert keys_of(node) == 60
            assert (await publishing.publish(link, "S", [secret(7)])).results[0].duplicate

    asyncio.run(scenario())


def test_erased_subject_is_shredded_in_a_copy_taken_before(tmp_path: Path) -> None:
    data, copy = tmp_path / "data", tmp_path / "copy"

    async def scenario() -> None:
        async with running(data) as (node, link):
            await make(link)
            await fill(link, 20)
            await node.checkpoint()
            await publishing.publish(link, "S", [secret(21), other("S.name-of-0007", "again")])
            await node.until_written()
            copy_at_one_moment(data, copy)
            receipt = await link.erase("S", [], "S.name-of-0007")
            assert receipt.shredded
            # Also while it is pending the only copy of the key is gone.
            after = (data / SUBJECT_KEYS_NAME).read_bytes()
            done = await link.erasure(receipt.erasure_id, WAIT_NS)
            assert (done.status, done.messages, done.shredded) == ("done", 2, True)
            rest = [seq for seq in range(1, 22) if seq != 7]
            await seen_alike(link, rest)
            await publishing.publish(link, "S", [secret(7), other("S.name-of-0007", "new")])
            last = await link.get_message("S", 23)
            assert (last.subject, last.payload) == ("S.name-of-0007", b"new")
        (copy / SUBJECT_KEYS_NAME).write_bytes(after)
        async with running(copy) as (_, link):
            await seen_alike(link, [seq for seq in range(1, 22) if seq != 7])
            assert content_found(copy, [7]) == {}

    asyncio.run(scenario())


def test_erasing_by_a_filter_destroys_keys_of_subjects_without_messages_too(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (node, link):
            await make(link)
            await make(link, "T")
            await fill(link, 10)
            await fill(link, 3, "T")
            await link.purge_stream("S", "S.name-of-0004", 0, 0)
            await link.delete_message("S", 5)
            receipt = await erased(link, "S", [], "S.>")
            assert (receipt.messages, receipt.shredded) == (8, True)
            assert (keys_of(node), keys_of(node, "T")) == (0, 3)
            await seen_alike(link, [1, 2, 3], "T")
            await publishing.publish(link, "S", [secret(4)])
            assert keys_of(node) == 1

    asyncio.run(scenario())


def test_subject_that_lost_its_messages_before_can_still_be_shredded(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (node, link):
            await make(link)
            await fill(link, 3)
            await link.delete_message("S", 2)
            receipt = await erased(link, "S", [], "S.name-of-0002")
            assert (receipt.messages, receipt.shredded) == (0, True)
            assert keys_of(node) == 2

    asyncio.run(scenario())


def test_erasing_by_sequence_shreds_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (node, link):
            await make(link)
            await fill(link, 3)
            receipt = await erased(link, "S", [2])
            assert (receipt.status, receipt.messages, receipt.shredded) == ("done", 1, False)
            assert keys_of(node) == 3
            await seen_alike(link, [1, 3])

    asyncio.run(scenario())


@pytest.mark.parametrize("removed", [False, True], ids=["mended", "killed before"])
def test_messages_whose_key_is_destroyed_are_erased_ones_to_everybody(
    tmp_path: Path, removed: bool
) -> None:
    """As a crash leaves it between the destruction of keys and the removal of messages."""

    async def scenario() -> None:
        async with running(tmp_path) as (node, link):
            await make(link)
            await fill(link, 12)
            consumer = ConsumerConfig(name="c", durable=True, ack_wait_ns=1)
            await link.put_consumer("S", consumer, "put", None, False)
            await link.pull(PullRequest(stream="S", consumer="c", batch=3))
            shard = node.streams.shard("S")
            subjects = [secret(number).subject for number in (2, 5, 12)]
            slots = node.subject_keys.retire(shard.machine.shard_id, subjects)
            node.subject_keys.destroy(slots, 13)
            rest = [seq for seq in range(1, 13) if seq not in (2, 5, 12)]
            await seen_alike(link, rest)
            await node.scrubber.round()
            pulled = await link.pull(PullRequest(stream="S", consumer="c", batch=9, no_wait=True))
            assert not {2, 5, 12} & {one.message.seq for one in pulled.deliveries}
            assert node.readiness() == {}
            # A subject that is published again before keeps what is new.
            await publishing.publish(link, "S", [other(subjects[0], "new")])
            if removed:
                await node.shredder.reconcile()
        async with running(tmp_path) as (node, link):
            state = (await link.stream_info("S")).state
            assert (state.messages, state.last_seq) == (10, 13)
            assert (await link.get_message("S", 13)).payload == b"new"
            assert node.subject_keys.remains == {}
            assert node.readiness() == {}

    asyncio.run(scenario())


def test_what_destroyed_keys_leave_in_a_damaged_stream_is_not_tried_at_every_tick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (node, link):
            await make(link)
            await fill(link, 3)
            shard = node.streams.shard("S")
            slots = node.subject_keys.retire(shard.machine.shard_id, [secret(2).subject])
            destroy_again, tries = node.subject_keys.destroy_again, []

            def failing() -> None:
                tries.append("failed")
                raise OSError(5, "Input/output error")

            def counted() -> None:
                tries.append("done")
                destroy_again()

            monkeypatch.setattr(node.subject_keys, "destroy_again", failing)
            shard.damaged = "a block does not read back"
            node.subject_keys.destroy(slots, 4)
            for _ in range(3):
                await node.shredder.tick()
            assert tries == ["failed"]
            monkeypatch.setattr(node.subject_keys, "destroy_again", counted)
            node.shredder._retry_at_s = 0.0  # the pause is over
            for _ in range(3):
                await node.shredder.tick()
            assert tries == ["failed", "done"]
            shard.damaged = ""
            await node.shredder.tick()
            assert node.subject_keys.remains == {}
            await seen_alike(link, [1, 3])

    asyncio.run(scenario())


def test_keys_of_subjects_without_messages_and_of_deleted_streams_go(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (node, link):
            await make(link, max_msgs=4)
            await make(link, "T")
            await fill(link, 10)
            await fill(link, 3, "T")
            gone = node.streams.shard("T").machine.shard_id
            await node.shredder.tick(sweep_s=0)
            # What had no message in between is not yet sure to need no key.
            await publishing.publish(
                link, "S", [other("S.name-of-0006", "back"), other("S.x", "x")]
            )
            await link.delete_stream("T")
            await node.shredder.tick(sweep_s=0)
            assert gone not in node.subject_keys.live()
            assert keys_of(node) == 6  # two that were noted last have still theirs
            await node.shredder.tick(sweep_s=0)
            assert keys_of(node) == 4
            page = await link.read_range(RangeRequest(stream="S", limit=9))
            assert [one.payload[-4:] for one in page.messages] == [b"....", b"....", b"back", b"x"]
            await publishing.publish(link, "S", [secret(1), other("S.name-of-0001", "one")])
            page = await link.read_range(RangeRequest(stream="S", limit=9, from_seq=13))
            assert [one.payload for one in page.messages] == [b"one"]
            await link.purge_stream("S", "", 0, 0)

    asyncio.run(scenario())


def test_publishes_wait_for_the_keys_of_their_subjects_in_order(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (node, link):
            await make(link, allow_atomic=True)
            known = await publishing.publish(link, "S", [other("S.a", "0")])
            assert known.results[0].seq == 1
            work = [
                publishing.publish(
                    link, "S", [other("S.a" if number % 2 else f"S.{number}", str(number))]
                )
                for number in range(1, 40)
            ]
            batch = MessageBatch.of(
                [other(f"S.b{number}", str(number)) for number in range(40, 50)]
            )
            batch.atomic = True
            acks = await asyncio.gather(*work, publishing.publish(link, "S", batch))
            assert [ack.results[0].seq for ack in acks] == list(range(2, 42))
            page = await link.read_range(RangeRequest(stream="S", limit=100))
            assert [one.payload for one in page.messages] == [b"%d" % n for n in range(50)]
            assert node.shard_log.queued_bytes == 0

    asyncio.run(scenario())


def test_refused_messages_are_refused_by_their_plain_size(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (_, link):
            await make(link, max_msg_size=10)
            ack = await publishing.publish(
                link,
                "S",
                [
                    PublishMessage("S.a", None, b"x" * 10),
                    PublishMessage("S.a", None, b"x" * 11),
                    PublishMessage("T.a", None, b"x"),
                    PublishMessage("S.a", {"ab": ["c"]}, b"123"),
                    PublishMessage("S.a", None, b""),
                ],
            )
            codes = [one.code for one in ack.results]
            assert codes == [
                0,
                errors.MESSAGE_TOO_LARGE.code,
                errors.SUBJECT_NOT_CAPTURED.code,
                0,
                0,
            ]
            assert (await link.stream_info("S")).state.bytes == 20

    asyncio.run(scenario())


def test_sharded_stream_is_sealed_and_shredded_in_each_shard(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (node, link):
            await make(link, shards=3)
            ack = await publishing.publish(link, "S", [secret(number) for number in range(1, 31)])
            assert {one.shard for one in ack.results} == {0, 1, 2}
            assert sum(node.subject_keys.live().values()) == 30
            assert content_found(tmp_path, list(range(1, 31))) == {}
            assert (await erased(link, "S", [], "S.name-of-0003")).shredded
            page = await link.read_range(RangeRequest(stream="S", limit=100))
            payloads = {one.payload for one in page.messages}
            assert payloads == {secret(number).payload for number in range(1, 31) if number != 3}
            receipt = await erased(link, "S", [], ">")
            assert (receipt.messages, receipt.shredded) == (29, True)
            assert node.subject_keys.live() == {}

    asyncio.run(scenario())


@ENCRYPTED
def test_restored_stream_has_keys_of_its_own(tmp_path: Path, node_keys: tuple[bytes, ...]) -> None:
    async def scenario() -> None:
        async with running(tmp_path, node_keys=node_keys) as (node, link):
            await make(link)
            await fill(link, 30)
            await link.delete_message("S", 5)
            await link.purge_stream("S", "S.name-of-0009", 0, 0)
            archive = b"".join([chunk async for chunk in await link.snapshot("S", True)])
            assert content_traces(8)[2] in archive
            assert content_traces(5)[2] not in archive
            await link.delete_stream("S")
            token = await link.begin_restore("R")
            for at in range(0, len(archive), 1_000):
                await link.append_restore(token, at, archive[at : at + 1_000])
            await link.commit_restore(token)
            rest = [seq for seq in range(1, 31) if seq not in (5, 9)]
            await seen_alike_in(link, rest, "R")
            assert keys_of(node, "R") == 28
            assert content_found(tmp_path, list(range(1, 31))) == {}
            assert (await erased(link, "R", [], "S.name-of-0008")).shredded
        async with running(tmp_path, node_keys=node_keys) as (_, link):
            rest.remove(8)
            await seen_alike_in(link, rest, "R")

    async def seen_alike_in(link: LocalLink, numbers: list[int], stream: str) -> None:
        for how, seen in (await everything(link, stream)).items():
            assert seen == expected(numbers), how

    asyncio.run(scenario())


def test_snapshot_ends_when_a_subject_is_shredded_meanwhile(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (node, link):
            await make(link)
            await publishing.publish(link, "S", [other(f"S.{n}", "x" * 9_000) for n in range(200)])
            await node.until_written()
            chunks = await link.snapshot("S", True)
            await anext(chunks)
            assert node.snapshotter.is_reading
            await link.erase("S", [], "S.199")
            with pytest.raises(ApiError, match="aborted by an erasure") as refused:
                async for _ in chunks:
                    pass
            assert refused.value.spec is errors.OVERLOADED
            assert not node.snapshotter.is_reading

    asyncio.run(scenario())


def test_time_to_live_below_that_of_markers_is_raised_in_sealed_headers(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (_, link):
            marked = {"allow_msg_ttl": True, "subject_delete_marker_ttl_ns": 60_000_000_000}
            await make(link, allow_rollup_hdrs=True, **marked)
            short = PublishMessage("S.a", {"Nats-TTL": ["1s"]}, b"x", ttl_ns=1_000_000_000)
            await publishing.publish(link, "S", [short])
            assert (await link.get_message("S", 1)).headers == {"Nats-TTL": ["1m0s"]}

    asyncio.run(scenario())


@pytest.mark.parametrize("damage", ["missing", "header", "slot", "older"])
def test_lost_keys_stop_the_stream_that_needs_them_and_no_other(
    tmp_path: Path, damage: str
) -> None:
    async def scenario() -> None:
        path = tmp_path / SUBJECT_KEYS_NAME
        async with running(tmp_path) as (_, link):
            await make(link)
            await make(link, "NEW")
            plain = msgspec.structs.replace(config("P"), erasure="rewrite")
            await link.put_stream(plain, "create", None, False)
            await publishing.publish(link, "P", [secret(1, "P")])
            await publishing.publish(link, "S", [secret(1)])
            older = path.read_bytes()
            await publishing.publish(link, "S", [secret(2)])
            await publishing.publish(link, "NEW", [])
        whole = bytearray(path.read_bytes())
        whole[{"header": 9, "slot": len(whole) - 60}.get(damage, 0)] ^= damage in ("header", "slot")
        path.unlink()
        if damage != "missing":
            path.write_bytes(older if damage == "older" else bytes(whole))
        async with running(tmp_path) as (node, link):
            if damage in ("missing", "header"):
                assert SUBJECT_KEYS_NAME in node.readiness()["stream S"]
            with pytest.raises(ApiError) as refused:
                await link.get_message("S", 2)
            assert refused.value.spec is errors.DATA_LOST
            assert SUBJECT_KEYS_NAME in node.readiness()["stream S"]
            with pytest.raises(ApiError) as refused:
                await publishing.publish(link, "S", [secret(3)])
            assert refused.value.spec is errors.DATA_LOST
            assert (await link.get_message("P", 1)).payload == secret(1, "P").payload
            await link.delete_stream("S")
            assert node.readiness() == {}

    asyncio.run(scenario())


def test_content_under_a_wrong_key_is_damage_that_the_scrub_finds(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (node, link):
            await make(link)
            for each in (1, 2, 3):
                await publishing.publish(link, "S", [secret(each)])
                await node.until_written()
            await link.delete_message("S", 2)
            shard_id = node.streams.shard("S").machine.shard_id
            for deleted, seq in ((True, 2), (False, 3)):
                block = node.blocks.load(shard_id, seq)
                columns = block.columns
                assert columns.seals is not None
                first = node.blocks.load(shard_id, 1).columns.seals
                assert first is not None
                columns.seals.keys = first.keys
                operation = ("put", large_key(BLOCK, shard_id, seq), encode_block(block, 0))
                node._disk.write([operation])
                await node.scrubber.round()
                assert ("stream S" not in node.readiness()) == deleted
            shard = node.streams.shard("S")
            shard.damaged = ""
            with pytest.raises(ApiError):
                async for _ in await link.replay(ReplayRequest(stream="S")):
                    pass
            assert shard.damaged.startswith("block 3: ")
            with pytest.raises(ApiError) as refused:
                await link.get_message("S", 1)
            assert refused.value.spec is errors.DATA_LOST

    asyncio.run(scenario())


def test_stream_has_or_lacks_subject_keys_from_its_creation_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (_, link):
            await make(link)
            plain = msgspec.structs.replace(config(), erasure="rewrite")
            with pytest.raises(ApiError) as refused:
                await link.put_stream(plain, "put", None, False)
            assert refused.value.spec is errors.STREAM_UPDATE_REFUSED
            assert [one.pointer for one in refused.value.fields] == ["/erasure"]

    asyncio.run(scenario())


def test_subject_names_leave_the_files_with_the_keys(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (node, link):
            await make(link)
            await fill(link, 5)
            await node.checkpoint()
            assert files_with(tmp_path, [b"name-of-0003"])
            await erased(link, "S", [], "S.name-of-0003")
            assert files_with(tmp_path, [b"name-of-0003"]) == {}

    asyncio.run(scenario())


def test_publishes_and_erasures_of_a_subject_at_once_leave_no_message_unreadable(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (node, link):
            await make(link)
            acked: list[int] = []

            async def publish(number: int) -> None:
                ack = await publishing.publish(
                    link, "S", [other("S.a", str(number)), other("S.b", "b")]
                )
                acked.append(ack.results[0].seq)

            async def erase(number: int) -> int:
                return (await link.erase("S", [], "S.a" if number % 3 else "S.*")).messages

            erased_counts: list[int] = []
            for turn in range(15):
                work = [publish(turn * 10 + number) for number in range(10)]
                *_, count = await asyncio.gather(*work[:5], *work[5:], erase(turn))
                assert isinstance(count, int)
                erased_counts.append(count)
            assert len(set(acked)) == 150
            state = (await link.stream_info("S")).state
            assert state.messages == 300 - sum(erased_counts)
            page = await link.read_range(RangeRequest(stream="S", limit=1_000))
            assert len(page.messages) == state.messages
            assert node.subject_keys.remains == {}
            await node.scrubber.round()
            assert node.readiness() == {}

    asyncio.run(scenario())


class FullFiles(Files):
    """A disk that takes no more keys while it is full."""

    full = False

    def update(self, path: Path) -> UpdateHandle:
        disk, handle = self, super().update(path)

        class Handle:
            def read(self, offset: int, size: int) -> bytes:
                return handle.read(offset, size)

            def write(self, offset: int, data: bytes) -> None:
                if disk.full:
                    raise OSError(errno.ENOSPC, "No space left on device")
                handle.write(offset, data)

            def sync(self) -> None:
                handle.sync()

            def close(self) -> None:
                handle.close()

        return Handle()


def test_full_disk_refuses_new_subjects_in_their_order_and_heals(tmp_path: Path) -> None:
    async def scenario() -> None:
        files = FullFiles()
        async with running(tmp_path, files=files) as (node, link):
            await make(link)
            await publishing.publish(link, "S", [secret(1)])
            files.full = True
            known, new = await asyncio.gather(
                publishing.publish(link, "S", [other(secret(1).subject, "x")]),
                publishing.publish(link, "S", [secret(2)]),
                return_exceptions=True,
            )
            assert not isinstance(known, BaseException)
            assert isinstance(new, ApiError)
            assert (new.spec, new.applied) == (errors.STORAGE_FULL, False)
            with pytest.raises(ApiError) as unknown:
                await link.erase("S", [], secret(1).subject)
            assert unknown.value.spec is errors.OUTCOME_UNKNOWN
            files.full = False
            await publishing.publish(link, "S", [secret(2)])
            assert (await link.get_message("S", 3)).payload == secret(2).payload
            await node.shredder.reconcile()
            assert (await link.stream_info("S")).state.messages == 1
            assert node.shard_log.queued_bytes == 0

    asyncio.run(scenario())


def test_what_waits_for_keys_is_bounded(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (node, link):
            await make(link)
            log = node.shard_log
            log.hold(QUEUE_BYTES_MAX)
            for message in (other("S.new", "x"), other("S.new", "x")):
                with pytest.raises(ApiError) as refused:
                    await publishing.publish(link, "S", [message])
                assert refused.value.spec is errors.OVERLOADED
            log.hold(-QUEUE_BYTES_MAX)
            assert (await publishing.publish(link, "S", [other("S.new", "x")])).results[0].seq == 1

    asyncio.run(scenario())
