"""A real node over a damaged folder that is opened all the same: what clients kept is refused."""

import asyncio
import contextlib
import errno
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import ConsumerConfig, PublishMessage, StreamConfig
from contrail_link import publishing
from contrail_link.contract.consume import AckItem, PullRequest
from contrail_link.contract.read import ReplayRequest
from contrail_serve.groups import SingleMemberGroups
from contrail_storage.core import key_layout as keys
from contrail_storage.core.commands import META_SHARD
from contrail_storage.disk.files import Files, UpdateHandle
from contrail_storage.link import LocalLink
from contrail_storage.metrics import render_metrics
from contrail_storage.node import NodeOptions, StorageNode
from contrail_storage.seal.key_file import SUBJECT_KEYS_NAME
from contrail_storage.store.rocks_store import RocksStore
from contrail_storage.upkeep.checkpointer import DataLostError
from contrail_storage.wal.codec import BATCH_HEADER_BYTES
from contrail_storage.wal.node_log import LogOptions
from tests.crash import damage
from tests.support.folders import contents, copy_at_one_moment

PATIENCE_S = 60.0
PATIENCE_NS = 60_000_000_000
Scene = Callable[[StorageNode, LocalLink], Awaitable[Any]]


@contextlib.asynccontextmanager
async def running(data_dir: Path, **options: Any) -> AsyncIterator[StorageNode]:
    node = StorageNode.open(NodeOptions(data_dir, **options), SingleMemberGroups())
    await node.start()
    try:
        yield node
    finally:
        await node.stop()


def play(data_dir: Path, scene: Scene, **options: Any) -> Any:
    """What a scene on a running node answers."""

    async def whole() -> Any:
        async with asyncio.timeout(PATIENCE_S), running(data_dir, **options) as node:
            return await scene(node, LocalLink(node))

    return asyncio.run(whole())


def killed(data_dir: Path, target: Path, scene: Scene, **options: Any) -> Any:
    """As `play`, with the folder as a hard end behind the scene leaves it copied to ``target``."""

    async def and_copy(node: StorageNode, link: LocalLink) -> Any:
        answer = await scene(node, link)
        await asyncio.to_thread(copy_at_one_moment, data_dir, target)
        return answer

    return play(data_dir, and_copy, **options)


async def make(link: LocalLink, name: str, **config: Any) -> int:
    subjects = (f"{name.lower()}.>",)
    given = StreamConfig(name=name, subjects=subjects, **config)
    info, _ = await link.put_stream(given, "create", None, False)
    return info.version


async def publish(link: LocalLink, name: str, *payloads: bytes) -> list[int]:
    messages = [PublishMessage(f"{name.lower()}.a", None, payload) for payload in payloads]
    ack = await publishing.publish(link, name, messages)
    assert [result.code for result in ack.results] == [0] * len(payloads)
    return [result.seq for result in ack.results]


def damage_first_batch_with(data_dir: Path, mark: bytes) -> None:
    """Damage the first batch that has `mark` in it."""
    segment = damage.newest_file(data_dir, "wal/*.wal")
    content = bytearray(segment.read_bytes())
    content[content.index(mark)] ^= 1
    segment.write_bytes(content)


def refused(call: Awaitable[Any]) -> Awaitable[ApiError]:
    async def wait() -> ApiError:
        with pytest.raises(ApiError) as caught:
            await call
        return caught.value

    return wait()


def test_rows_of_windows_do_not_outlive_a_loss(tmp_path: Path) -> None:
    """A sequence that is used again must not be found by the subject that it had before."""

    def rows(node: StorageNode) -> list[bytes]:
        prefix = keys.shard_key(keys.WINDOW, node.streams.shard("S").machine.shard_id)
        return [key for key, _ in node._store.scan(prefix, keys.prefix_end(prefix))]

    async def before(node: StorageNode, link: LocalLink) -> None:
        await make(link, "S")
        for _ in range(5):
            await publish(link, "S", *[b"x"] * 1_000)
        await node.until_written()
        assert len(rows(node)) == 1
        await node.checkpoint()
        await publish(link, "S", b"third")
        await asyncio.to_thread(wait_for_successor, tmp_path / "live")

    killed(tmp_path / "live", tmp_path / "data", before)
    damage_first_batch_with(tmp_path / "data", b"third")

    async def after(node: StorageNode, link: LocalLink) -> None:
        assert rows(node) == []
        assert (await link.stream_info("S")).state.messages == 5_000

    play(tmp_path / "data", after, accept_data_loss=True)


def test_lost_end_of_the_log_voids_everything_that_names_what_came_before(tmp_path: Path) -> None:
    kept: dict[str, Any] = {}

    async def before(_: StorageNode, link: LocalLink) -> None:
        kept["version"] = await make(link, "S")
        await link.put_consumer("S", ConsumerConfig(name="c", durable=True), "create", None, False)
        await publish(link, "S", b"1", b"2")
        pulled = await link.pull(PullRequest(stream="S", consumer="c", no_wait=True))
        kept["token"] = AckItem(pulled.shard_id, pulled.consumer_id, pulled.epoch, [1], "ack")
        kept["incarnation"] = (await link.stream_info("S")).incarnation
        await publish(link, "S", b"third")
        await asyncio.to_thread(wait_for_successor, tmp_path / "live")

    killed(tmp_path / "live", tmp_path / "data", before)
    damage_first_batch_with(tmp_path / "data", b"third")
    with pytest.raises(DataLostError, match="write-ahead log is damaged"):
        StorageNode.open(NodeOptions(tmp_path / "data"), SingleMemberGroups())

    async def after(node: StorageNode, link: LocalLink) -> None:
        info = await link.stream_info("S")
        assert info.data_loss is not None
        assert "write-ahead log is damaged" in info.data_loss.reason
        assert (info.data_loss.unknown, info.data_loss.messages) == (True, 0)
        assert info.state.last_seq == 2
        assert info.incarnation != kept["incarnation"]
        assert "contrail_shards_data_loss 1.0" in await render_metrics(node)
        asked = ReplayRequest(stream="S", incarnation=kept["incarnation"], from_seq=1, to_seq=2)
        error = await refused(link.replay(asked))
        assert error.spec is errors.INCARNATION_CHANGED
        config = StreamConfig(name="S", subjects=("s.>", "t"))
        error = await refused(link.put_stream(config, "put", kept["version"], False))
        assert error.spec is errors.PRECONDITION_FAILED
        (stale,) = await link.acknowledge("S", "c", [kept["token"]], True)
        assert stale.code == errors.TOKEN_STALE.code
        assert await publish(link, "S", b"other 3") == [3]

    play(tmp_path / "data", after, accept_data_loss=True)

    async def again(node: StorageNode, link: LocalLink) -> None:
        info = await link.stream_info("S")
        assert info.data_loss is not None
        assert (info.data_loss.times, info.state.last_seq) == (1, 3)
        assert node.meta.next_shard_id > 60_000

    play(tmp_path / "data", again)


def wait_for_successor(data_dir: Path) -> None:
    """Return once the log ends with an empty batch."""
    segment = damage.newest_file(data_dir, "wal/*.wal")
    end = -1
    while end != (end := damage.written_end(segment)) or not ends_empty(segment, end):
        pass


def ends_empty(segment: Path, end: int) -> bool:
    salt = bytes.fromhex(segment.stem.split("-")[2])
    return segment.read_bytes().rfind(salt) == end - BATCH_HEADER_BYTES


def test_stream_that_was_made_in_what_is_lost_can_be_created_again(tmp_path: Path) -> None:
    async def before(_: StorageNode, link: LocalLink) -> int:
        await make(link, "OLD")
        await publish(link, "OLD", b"1")
        version = await make(link, "NEW")
        await asyncio.to_thread(wait_for_successor, tmp_path / "live")
        return version

    lost_version = killed(tmp_path / "live", tmp_path / "data", before)
    damage_first_batch_with(tmp_path / "data", b"NEW")

    async def after(_: StorageNode, link: LocalLink) -> None:
        assert (await all_messages(_, link)) == {"OLD": 1}
        error = await refused(link.stream_info("NEW"))
        assert error.spec is errors.STREAM_NOT_FOUND
        version = await make(link, "NEW")
        assert version > lost_version + 1_000_000
        assert await publish(link, "NEW", b"first") == [1]

    play(tmp_path / "data", after, accept_data_loss=True)


async def two_streams(_: StorageNode, link: LocalLink) -> None:
    for name in ("ONE", "TWO"):
        await make(link, name)
        await publish(link, name, b"1", b"2", b"3")


def changed(data_dir: Path, *operations: Any) -> None:
    store = RocksStore.open(data_dir / "store")
    store.write(operations)
    store.flush()
    store.close()


def name_key(number: int) -> bytes:
    return keys.small_key(keys.STREAM, META_SHARD, number)


async def all_messages(_: StorageNode, link: LocalLink) -> dict[str, int]:
    page = await link.list_streams("", "", 10, "")
    return {info.config.name: info.state.messages for info in page.streams}


def test_stream_whose_name_was_lost_with_its_number_is_named_by_its_configuration(
    tmp_path: Path,
) -> None:
    play(tmp_path, two_streams)
    changed(tmp_path, ("delete", name_key(0)), ("delete", name_key(2)))
    shutil.rmtree(tmp_path / "wal")
    found = play(tmp_path, all_messages, accept_data_loss=True)
    assert found == {"ONE": 3, "TWO": 3}
    assert play(tmp_path, all_messages) == found


def test_stream_whose_configuration_is_lost_can_be_read_and_takes_nothing(tmp_path: Path) -> None:
    play(tmp_path, two_streams)
    changed(tmp_path, ("delete", keys.shard_key(keys.STREAM, 2)))
    with pytest.raises(DataLostError):
        StorageNode.open(NodeOptions(tmp_path), SingleMemberGroups())

    async def after(_: StorageNode, link: LocalLink) -> None:
        info = await link.stream_info("TWO")
        assert info.config.sealed
        assert info.data_loss is not None
        assert (info.state.messages, info.config.subjects) == (3, ("two.>",))
        ack = await publishing.publish(link, "TWO", [PublishMessage("two.a", None, b"x")])
        assert ack.results[0].code == errors.STREAM_SEALED.code
        assert await publish(link, "ONE", b"4") == [4]

    play(tmp_path, after, accept_data_loss=True)


def test_shard_without_name_and_configuration_is_refused_with_the_switch_too(
    tmp_path: Path,
) -> None:
    play(tmp_path, two_streams)
    changed(tmp_path, ("delete", name_key(2)), ("delete", keys.shard_key(keys.STREAM, 2)))
    (tmp_path / "store/CURRENT").unlink()
    before = contents(tmp_path)
    with pytest.raises(DataLostError, match="Shard 2 has messages, but neither its name"):
        StorageNode.open(NodeOptions(tmp_path, accept_data_loss=True), SingleMemberGroups())
    assert contents(tmp_path) == before


def with_an_older_store(data_dir: Path, older: Path, **options: Any) -> None:
    """Two streams of three messages and two more in one, with the store from before these."""
    play(data_dir, two_streams, **options)
    shutil.copytree(data_dir / "store", older)

    async def more(_: StorageNode, link: LocalLink) -> None:
        await publish(link, "ONE", b"4", b"5")

    play(data_dir, more, **options)
    shutil.rmtree(data_dir / "store")
    older.rename(data_dir / "store")


def test_store_older_than_the_start_of_the_log_assigns_no_known_sequence_again(
    tmp_path: Path,
) -> None:
    data_dir = tmp_path / "data"
    with_an_older_store(data_dir, tmp_path / "older", log=LogOptions(100, keep_bytes=0))
    with pytest.raises(DataLostError, match="begins after applied index"):
        StorageNode.open(NodeOptions(data_dir), SingleMemberGroups())

    async def after(_: StorageNode, link: LocalLink) -> None:
        one, two = await link.stream_info("ONE"), await link.stream_info("TWO")
        assert (one.state.messages, one.state.last_seq) == (3, 5)
        assert one.data_loss is not None
        assert (one.data_loss.messages, one.data_loss.ranges) == (2, [(4, 5)])
        assert two.data_loss is not None
        assert (two.state.messages, two.data_loss.messages) == (3, 0)
        assert await publish(link, "ONE", b"6") == [6]

    play(data_dir, after, accept_data_loss=True)


def test_older_store_is_brought_up_from_a_log_that_reaches_back_to_it(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    with_an_older_store(data_dir, tmp_path / "older")
    with pytest.raises(DataLostError, match="row 2 is missing"):
        StorageNode.open(NodeOptions(data_dir), SingleMemberGroups())

    async def after(_: StorageNode, link: LocalLink) -> None:
        one = await link.stream_info("ONE")
        assert (one.state.messages, one.state.last_seq) == (5, 5)
        assert one.data_loss is not None
        assert (one.data_loss.unknown, one.data_loss.messages) == (True, 0)
        assert (await link.get_message("ONE", 5)).payload == b"5"

    play(data_dir, after, accept_data_loss=True)


def test_shards_of_a_stream_become_one_incarnation_and_cursors_of_the_old_one_are_refused(
    tmp_path: Path,
) -> None:
    async def before(_: StorageNode, link: LocalLink) -> None:
        await make(link, "WIDE", shards=4)
        messages = [PublishMessage(f"wide.{at}", None, b"x") for at in range(40)]
        await publishing.publish(link, "WIDE", messages)

    play(tmp_path, before)
    shutil.rmtree(tmp_path / "wal")

    async def after(node: StorageNode, link: LocalLink) -> None:
        info = await link.stream_info("WIDE")
        assert (info.state.messages, len(info.shards)) == (40, 4)
        records = [shard.machine.record for shard in node.streams.stream("WIDE").shards]
        assert len({record.incarnation for record in records if record is not None}) == 1
        assert not node.readiness()

    play(tmp_path, after, accept_data_loss=True)


def test_streams_in_memory_are_no_part_of_it(tmp_path: Path) -> None:
    async def before(_: StorageNode, link: LocalLink) -> None:
        await make(link, "FAST", storage="memory")
        await make(link, "SAFE")

    play(tmp_path, before)
    shutil.rmtree(tmp_path / "wal")

    async def after(_: StorageNode, link: LocalLink) -> None:
        assert (await link.stream_info("FAST")).data_loss is None
        assert (await link.stream_info("SAFE")).data_loss is not None
        assert await publish(link, "FAST", b"x") == [1]

    play(tmp_path, after, accept_data_loss=True)


def test_damaged_files_are_kept_twice_at_most_and_go_with_an_erasure(tmp_path: Path) -> None:
    play(tmp_path, two_streams)
    for number in (1, 2, 3):
        shutil.rmtree(tmp_path / "wal")
        play(tmp_path, all_messages, accept_data_loss=True)
        assert (tmp_path / f"damaged/{number}/store").is_dir()
    assert {path.name for path in (tmp_path / "damaged").iterdir()} == {"2", "3"}

    async def erase(node: StorageNode, link: LocalLink) -> None:
        await link.erase("ONE", [1], "")
        while node.eraser.erasures.pending():
            await asyncio.sleep(0)
        assert not (tmp_path / "damaged").exists()

    play(tmp_path, erase)


def test_archive_of_a_stream_records_its_loss(tmp_path: Path) -> None:
    play(tmp_path, two_streams)
    shutil.rmtree(tmp_path / "wal")

    async def copy(_: StorageNode, link: LocalLink) -> None:
        chunks = [chunk async for chunk in await link.snapshot("ONE", True)]
        await link.delete_stream("ONE")

        restore = await link.begin_restore("ONE")
        offset = 0
        for chunk in chunks:
            await link.append_restore(restore, offset, chunk)
            offset += len(chunk)
        info = await link.commit_restore(restore)
        assert info.data_loss is not None
        assert info.data_loss.unknown

    play(tmp_path, copy, accept_data_loss=True)


def test_second_process_on_the_folder_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    async def scene(_: StorageNode, _link: LocalLink) -> None:
        with pytest.raises(OSError, match="another process is using it"):
            StorageNode.open(NodeOptions(tmp_path, accept_data_loss=True), SingleMemberGroups())

    play(tmp_path, scene)


def open_files(data_dir: Path, name: str) -> int:
    """How often this process has a file of the folder open."""
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return [os.path.realpath(link) for link in links].count(str(data_dir.resolve() / name))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the system lists no open files")
def test_file_of_subject_keys_is_open_once_after_a_repair(tmp_path: Path) -> None:
    async def before(_: StorageNode, link: LocalLink) -> None:
        await make(link, "S", erasure="subject_key")
        await publish(link, "S", b"one")

    play(tmp_path, before)
    changed(tmp_path, ("put", keys.large_key(keys.BLOCK, 1, 1), b"not a block"))
    node = StorageNode.open(NodeOptions(tmp_path, accept_data_loss=True), SingleMemberGroups())
    held = open_files(tmp_path, SUBJECT_KEYS_NAME)
    node.close()
    assert (held, open_files(tmp_path, SUBJECT_KEYS_NAME)) == (1, 0)


class UnreadableFiles(Files):
    """A disk on which only the first bytes of a file that is changed in place can be read."""

    still_open = 0

    def update(self, path: Path) -> UpdateHandle:
        disk, handle = self, super().update(path)
        disk.still_open += 1

        class Handle:
            def read(self, offset: int, size: int) -> bytes:
                if offset:
                    raise OSError(errno.EIO, "Input/output error")
                return handle.read(offset, size)

            def write(self, offset: int, data: bytes) -> None:
                handle.write(offset, data)

            def sync(self) -> None:
                handle.sync()

            def close(self) -> None:
                disk.still_open -= 1
                handle.close()

        return Handle()


def test_file_of_subject_keys_is_closed_again_when_it_cannot_be_read(tmp_path: Path) -> None:
    async def before(_: StorageNode, link: LocalLink) -> None:
        await make(link, "S", erasure="subject_key")
        await publish(link, "S", b"one")

    play(tmp_path, before)
    files = UnreadableFiles()
    with pytest.raises(OSError, match="Input/output error"):
        StorageNode.open(NodeOptions(tmp_path, files=files), SingleMemberGroups())
    assert files.still_open == 0


@pytest.mark.parametrize("node_keys", [(), (bytes(32),)])
def test_sealed_content_below_the_damage_opens_and_can_be_shredded(
    tmp_path: Path, node_keys: tuple[bytes, ...]
) -> None:
    async def before(_: StorageNode, link: LocalLink) -> None:
        await make(link, "S", erasure="subject_key")
        await publishing.publish(link, "S", [PublishMessage("s.kept", {"H": ["v"]}, b"kept")])
        await publishing.publish(link, "S", [PublishMessage("s.erased", None, b"erased")])
        await make(link, "OTHER")
        await publish(link, "OTHER", b"lost")
        await publish(link, "S", b"after")
        await asyncio.to_thread(wait_for_successor, tmp_path / "live")

    killed(tmp_path / "live", tmp_path / "data", before, node_keys=node_keys)
    damage_batch(tmp_path / "data", 2)

    async def after(_: StorageNode, link: LocalLink) -> None:
        assert (await link.get_message("S", 1)).payload == b"kept"
        assert (await link.get_message("S", 1)).headers == {"H": ["v"]}
        receipt = await link.erase("S", [], "s.erased")
        assert receipt.shredded
        await link.erasure(receipt.erasure_id, PATIENCE_NS)
        assert (await refused(link.get_message("S", 2))).spec is errors.MESSAGE_NOT_FOUND
        assert await publish(link, "S", b"new") == [3]

    play(tmp_path / "data", after, accept_data_loss=True, node_keys=node_keys)

    async def again(_: StorageNode, link: LocalLink) -> None:
        assert [(await link.get_message("S", seq)).payload for seq in (1, 3)] == [b"kept", b"new"]

    play(tmp_path / "data", again, node_keys=node_keys)


def damage_batch(data_dir: Path, from_end: int) -> None:
    """Damage a batch of the newest segment, counted from its end, where an empty one stands."""
    segment = damage.newest_file(data_dir, "wal/*.wal")
    salt = bytes.fromhex(segment.stem.split("-")[2])
    content = bytearray(segment.read_bytes())
    place = damage.written_end(segment)
    for _ in range(from_end + 1):
        place = content.rfind(salt, 0, place)
    content[place + BATCH_HEADER_BYTES] ^= 1
    segment.write_bytes(content)
