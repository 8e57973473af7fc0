"""A whole node over an encrypted folder and with compressed streams, in this process."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import (
    Compression,
    ConsumerConfig,
    PublishMessage,
    StreamConfig,
)
from contrail_link import publishing
from contrail_link.contract.read import RangeRequest, ReplayRequest, pieces_of
from contrail_serve.groups import SingleMemberGroups
from contrail_storage.core import key_layout as keys
from contrail_storage.link import LocalLink
from contrail_storage.node import NodeOptions, StorageNode
from contrail_storage.store.rocks_store import RocksStore
from contrail_storage.upkeep.checkpointer import DataLostError
from tests.support.folders import contents
from tests.unit.storage.restore_rig import PATIENCE_S, running

FIRST, SECOND = bytes([1]) * 32, bytes([2]) * 32
STREAM = StreamConfig(name="SecretStreamName", subjects=("secret.subject.>",))
CODEC_AT = 3


def play(
    data_dir: Path, scene: Callable[[StorageNode], Awaitable[None]], *node_keys: bytes
) -> None:
    async def whole() -> None:
        async with asyncio.timeout(PATIENCE_S), running(data_dir, *node_keys) as node:
            await scene(node)

    asyncio.run(whole())


async def put(node: StorageNode, config: StreamConfig) -> None:
    await LocalLink(node).put_stream(config, "put", None, False)


async def publish(node: StorageNode, count: int, note: str = "", stream: str = STREAM.name) -> None:
    messages = [
        PublishMessage(
            f"secret.subject.{number % 3}",
            {"Secret-Header": [f"secret header value {number}"]},
            json.dumps({"number": number, "text": f"secret payload {note}"}).encode(),
        )
        for number in range(count)
    ]
    ack = await publishing.publish(LocalLink(node), stream, messages)
    assert {result.code for result in ack.results} == {0}


async def texts(node: StorageNode) -> list[str]:
    request = RangeRequest(stream=STREAM.name, from_seq=1, limit=10_000, max_bytes=8 << 20)
    messages = (await LocalLink(node).read_range(request)).messages
    return [json.loads(message.payload)["text"] for message in messages]


async def with_data(node: StorageNode) -> None:
    await put(node, STREAM)
    await publish(node, 20, "early")
    await LocalLink(node).put_consumer(
        STREAM.name,
        ConsumerConfig(name="SecretConsumer", durable=True, description="secret description"),
        "put",
        None,
        False,
    )


def test_encrypted_folder_is_served_again_and_shows_nothing(tmp_path: Path) -> None:
    play(tmp_path, with_data, FIRST)

    async def again(node: StorageNode) -> None:
        await publish(node, 20, "late")
        assert await texts(node) == ["secret payload early"] * 20 + ["secret payload late"] * 20
        assert (await LocalLink(node).consumer_info(STREAM.name, "SecretConsumer")).num_pending

    play(tmp_path, again, FIRST)
    shown = [name for name, data in contents(tmp_path).items() if b"secret" in data.lower()]
    assert shown == []


@pytest.mark.parametrize(
    ("made_with", "opened_with", "complaint"),
    [
        ((FIRST,), (), "no encryption key was given"),
        ((FIRST,), (SECOND,), "given encryption keys opens it"),
        ((), (FIRST,), "unencrypted data"),
    ],
    ids=["no key", "wrong key", "key for plain data"],
)
def test_folder_that_the_keys_do_not_fit_is_refused_and_not_touched(
    tmp_path: Path,
    made_with: tuple[bytes, ...],
    opened_with: tuple[bytes, ...],
    complaint: str,
) -> None:
    play(tmp_path, with_data, *made_with)
    before = contents(tmp_path)
    with pytest.raises(OSError, match=complaint):
        StorageNode.open(NodeOptions(tmp_path, node_keys=opened_with), SingleMemberGroups())
    assert contents(tmp_path) == before


def test_lost_data_keys_refuse_the_start(tmp_path: Path) -> None:
    play(tmp_path, with_data, FIRST)
    for file in tmp_path.glob("keys*"):
        file.unlink()
    with pytest.raises(DataLostError, match="keys is missing"):
        StorageNode.open(NodeOptions(tmp_path, node_keys=(FIRST,)), SingleMemberGroups())


def test_after_a_rotation_in_service_the_new_key_alone_is_enough(tmp_path: Path) -> None:
    async def rotated(node: StorageNode) -> None:
        await with_data(node)
        assert await asyncio.to_thread(node.rotate_keys, (SECOND, FIRST))
        assert not await asyncio.to_thread(node.rotate_keys, (SECOND, FIRST))
        await publish(node, 20, "late")

    async def again(node: StorageNode) -> None:
        assert await texts(node) == ["secret payload early"] * 20 + ["secret payload late"] * 20

    play(tmp_path, rotated, FIRST)
    play(tmp_path, again, SECOND)
    with pytest.raises(OSError, match="opens it"):
        StorageNode.open(NodeOptions(tmp_path, node_keys=(FIRST,)), SingleMemberGroups())


def test_start_with_a_new_key_before_the_old_one_wraps_again(tmp_path: Path) -> None:
    async def whole(node: StorageNode) -> None:
        assert len(await texts(node)) == 20

    play(tmp_path, with_data, FIRST)
    play(tmp_path, whole, SECOND, FIRST)
    play(tmp_path, whole, SECOND)


def test_node_without_a_key_does_not_rotate(tmp_path: Path) -> None:
    async def scene(node: StorageNode) -> None:
        with pytest.raises(ValueError, match="does not encrypt"):
            node.rotate_keys((FIRST,))

    play(tmp_path, scene)


def test_stream_that_must_be_encrypted_needs_a_node_with_a_key(tmp_path: Path) -> None:
    demanding = msgspec.structs.replace(STREAM, encrypted=True)

    async def plain(node: StorageNode) -> None:
        with pytest.raises(ApiError) as created:
            await put(node, demanding)
        await put(node, STREAM)
        with pytest.raises(ApiError) as updated:
            await put(node, demanding)
        for refused in (created.value, updated.value):
            assert refused.spec is errors.STREAM_CONFIG_INVALID
            assert [problem.pointer for problem in refused.fields] == ["/encrypted"]

    async def encrypting(node: StorageNode) -> None:
        await put(node, demanding)
        assert (await LocalLink(node).stream_info(STREAM.name)).config.encrypted

    play(tmp_path / "plain", plain)
    play(tmp_path / "encrypted", encrypting, FIRST)


def block_codecs(data_dir: Path) -> list[int]:
    """The codecs of all blocks, in order of their first sequence."""
    store = RocksStore.open(data_dir / "store")
    found = [row[CODEC_AT] for _, row in store.scan(keys.BLOCK, keys.prefix_end(keys.BLOCK))]
    store.close()
    return found


@pytest.mark.parametrize(("compression", "number"), [("lz4", 1), ("zstd", 2)])
def test_change_of_compression_is_for_blocks_written_from_then_on(
    tmp_path: Path, compression: Compression, number: int
) -> None:
    async def scene(node: StorageNode) -> None:
        for note, codec in (("one", "none"), ("two", compression), ("three", "none")):
            await put(node, msgspec.structs.replace(STREAM, compression=codec))
            await publish(node, 600, note)
            # A block gets the codec of the moment it is written, which is behind its ack.
            await node.until_written()

    async def again(node: StorageNode) -> None:
        assert await texts(node) == [
            f"secret payload {note}" for note in ("one", "two", "three") for _ in range(600)
        ]
        request = ReplayRequest(stream=STREAM.name, format="arrow", from_seq=1, to_seq=1_800)
        chunks = await LocalLink(node).replay(request)
        body = b"".join([piece async for chunk in chunks for piece in pieces_of(chunk)])
        table = pa.ipc.open_stream(body).read_all()
        assert table.column("seq").to_pylist() == list(range(1, 1_801))
        assert json.loads(table.column("data")[700].as_py())["text"] == "secret payload two"

    play(tmp_path, scene)
    assert block_codecs(tmp_path) == [0, number, 0]
    play(tmp_path, again)


def test_small_blocks_stay_as_they_are_until_they_are_merged(tmp_path: Path) -> None:
    async def scene(node: StorageNode) -> None:
        await put(node, msgspec.structs.replace(STREAM, compression="zstd"))
        for _ in range(4):
            await publish(node, 20)
            await node.until_written()

    async def again(node: StorageNode) -> None:
        assert len(await texts(node)) == 80

    play(tmp_path, scene, FIRST)
    play(tmp_path, again, FIRST)
    play(tmp_path / "plain", scene)
    assert block_codecs(tmp_path / "plain") == [2]
