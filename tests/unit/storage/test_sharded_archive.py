"""Archives of streams with several shards: all of them as of one moment, whole or not at all."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import ConsumerConfig, PublishMessage, StreamConfig
from contrail_common.partition import shard_of
from contrail_link.contract.consume import AckItem, PullRequest
from contrail_link.contract.read import RangeRequest
from contrail_link.publishing import publish
from contrail_storage.core.archive import format as archive
from contrail_storage.core.archive.format import (
    ArchiveReader,
    ArchiveWriter,
    Record,
    Subjects,
    decoded,
)
from contrail_storage.core.commands import ArchiveHeader
from contrail_storage.link import LocalLink
from contrail_storage.node import StorageNode
from tests.unit.storage.restore_rig import (
    PATIENCE_S,
    RestoreCrashes,
    archive_of,
    restored,
    rows_of_shards,
    running,
)
from tests.unit.storage.sharded_rig import CONFIG, SHARDS, message, read_all

STREAM = msgspec.structs.replace(CONFIG, compression="zstd", max_msgs=10_000)


async def fill(link: LocalLink) -> None:
    """Messages with ids in all shards, a deletion, and a consumer amid its deliveries."""
    await link.put_stream(STREAM, "create", None, False)
    for turn in range(25):
        batch = [
            PublishMessage(f"a.{at}", {"K": ["v"]}, b"%d" % at * 40, f"id-{turn}-{at}")
            for at in range(9)
        ]
        await publish(link, "S", batch)
    await link.delete_message("S", 2, 1)
    await link.put_consumer("S", ConsumerConfig(name="c", durable=True), "put", None, False)
    pulled = await link.pull(PullRequest(stream="S", consumer="c", batch=60, no_wait=True))
    acks = [
        AckItem(*pulled.address(one), [one.message.seq], "ack") for one in pulled.deliveries[:20]
    ]
    await link.acknowledge("S", "c", acks, True)


async def known(link: LocalLink) -> dict[str, Any]:
    """What a reader and a consumer see of the stream."""
    info, consumer = await link.stream_info("S"), await link.consumer_info("S", "c")
    return {
        "messages": await read_all(link),
        "state": (info.config, info.created_ns, info.state, info.shards),
        "consumer": msgspec.structs.replace(consumer, version=0),
    }


@pytest.mark.long
def test_crash_at_any_point_leaves_all_shards_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def source() -> tuple[bytes, dict[str, Any]]:
        async with running(tmp_path / "source") as node:
            link = LocalLink(node)
            await fill(link)
            before = await known(link)
            return await archive_of(link), before

    async def look(image: Path, whole: bool, data: bytes, before: dict[str, Any]) -> None:
        async with asyncio.timeout(PATIENCE_S), running(image) as node:
            link = LocalLink(node)
            if not whole:
                assert node.streams.listed() == []
                assert await rows_of_shards(node) == []
                await restored(link, data)
            assert await known(link) == before
            shard = shard_of("a.1", SHARDS, (2,))
            ack = await publish(link, "S", [message(1, b"x", msg_id="id-24-1")])
            assert [(one.duplicate, one.shard) for one in ack.results] == [(True, shard)]
            ack = await publish(link, "S", [message(1, b"x")])
            assert ack.results[0].seq == before["state"][3][shard].last_seq + 1
            again = await archive_of(link)
            reader = ArchiveReader()
            reader.feed(again)
            reader.finish()

    data, before = asyncio.run(source())
    crashes = RestoreCrashes(tmp_path, monkeypatch)
    crashes.provoke(data, flushed_at=(-1, 4))
    for image, whole in crashes.images:
        asyncio.run(look(image, whole, data, before))


# Archives that were made up ----------------------------------------------------------------------
Change = Callable[[list[list[Record]]], list[list[Record]]]


def with_header(records: list[Record], **fields: Any) -> list[Record]:
    header = msgspec.structs.replace(decoded(records[0].payload, ArchiveHeader), **fields)
    return [Record(archive.HEADER, msgspec.msgpack.encode(header)), *records[1:]]


def without_consumers(shard: list[Record]) -> list[Record]:
    return [one for one in shard if one.kind not in (archive.CONSUMER, archive.PENDING)]


def renamed_subjects(shard: list[Record]) -> list[Record]:
    """The shard's subjects under names that belong elsewhere."""
    changed = []
    for one in shard:
        if one.kind == archive.SUBJECTS:
            subjects = decoded(one.payload, Subjects)
            number = shard_of(subjects.names[0], SHARDS, (2,))
            names = [
                next(
                    f"a.{at}.{position}"
                    for at in range(99)
                    if shard_of(f"a.{at}", SHARDS, (2,)) != number
                )
                for position in range(len(subjects.names))
            ]
            moved = msgspec.msgpack.encode(Subjects(subjects.rows, names))
            changed.append(Record(one.kind, moved))
        else:
            changed.append(one)
    return changed


CHANGES: dict[str, Change] = {
    "a shard is missing": lambda shards: shards[:-1],
    "a shard comes twice": lambda shards: [*shards, shards[-1]],
    "shards are out of order": lambda shards: [shards[1], shards[0], *shards[2:]],
    "a header says another shard": lambda shards: [
        *shards[:-1], with_header(shards[-1], shard=0)
    ],
    "a stream of one shard": lambda shards: [
        with_header(shards[0], config=StreamConfig(name="S", subjects=("a.>",))),
        *shards[1:],
    ],
    "another configuration": lambda shards: [
        shards[0],
        with_header(shards[1], config=msgspec.structs.replace(STREAM, max_msgs=9_999)),
        *shards[2:],
    ],
    "another incarnation": lambda shards: [
        *shards[:-1], with_header(shards[-1], incarnation="other")
    ],
    "another key": lambda shards: [*shards[:-1], with_header(shards[-1], hash_key=b"o" * 32)],
    "a consumer is not everywhere": lambda shards: [*shards[:-1], without_consumers(shards[-1])],
    "subjects of another shard": lambda shards: [renamed_subjects(shards[0]), *shards[1:]],
}  # fmt: skip


@contextlib.asynccontextmanager
async def with_archive(folder: Path) -> AsyncIterator[tuple[StorageNode, LocalLink, bytes]]:
    async with asyncio.timeout(PATIENCE_S), running(folder) as node:
        link = LocalLink(node)
        await fill(link)
        data = await archive_of(link)
        await link.delete_stream("S")
        yield node, link, data


def changed_archive(data: bytes, change: Change) -> bytes:
    reader = ArchiveReader()
    shards: list[list[Record]] = []
    for record in reader.feed(data):
        if record.kind == archive.HEADER:
            shards.append([])
        shards[-1].append(record)
    assert len(shards) == SHARDS
    writer = ArchiveWriter()
    pieces = [writer.start()]
    pieces += [writer.record(one) for shard in change(shards) for one in shard]
    return b"".join([*pieces, writer.end()])


def test_archive_whose_shards_are_not_one_stream_restores_nothing(tmp_path: Path) -> None:
    async def work() -> None:
        async with with_archive(tmp_path) as (node, link, data):
            for name, change in CHANGES.items():
                with pytest.raises(ApiError) as refused:
                    await restored(link, changed_archive(data, change))
                assert refused.value.spec is errors.ARCHIVE_INVALID, name
                while node.restores._open:
                    await asyncio.sleep(0)
                assert node.meta.streams == {}, name
                assert await rows_of_shards(node) == [], name
            await restored(link, changed_archive(data, lambda shards: shards))
            assert (await link.stream_info("S")).state.messages == 224

    asyncio.run(work())


def test_consumer_of_a_socket_that_began_at_a_cursor_is_left_out(tmp_path: Path) -> None:
    async def work() -> None:
        async with asyncio.timeout(PATIENCE_S), running(tmp_path) as node:
            link = LocalLink(node)
            await fill(link)
            own = ConsumerConfig(
                name="own",
                durable=False,
                ack_policy="none",
                deliver_policy="by_start_sequence",
                opt_start_cursor=await read_cursor_of(link),
                inactive_threshold_ns=3_600_000_000_000,
            )
            await link.put_consumer("S", own, "create", None, False)
            data = await archive_of(link)
            await link.delete_stream("S")
            await restored(link, data)
            page = await link.list_consumers("S", 10, "")
            assert [one.config.name for one in page.consumers] == ["c"]

    asyncio.run(work())


async def read_cursor_of(link: LocalLink) -> str:
    return (await link.read_range(RangeRequest(stream="S", limit=5))).cursor
