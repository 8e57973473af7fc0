"""A member that cannot catch up from the log gets the whole state of its group from the leader."""

import asyncio
import shutil
import string
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import ConsumerConfig, PublishMessage, StreamConfig
from contrail_link.contract.consume import AckItem, PullRequest
from contrail_link.publishing import publish
from contrail_replicator.group import RaftGroup
from contrail_storage.core import key_layout as keys
from contrail_storage.core.commands import META_SHARD
from contrail_storage.core.key_layout import META_GROUP
from contrail_storage.disk.files import Files
from contrail_storage.disk.node_file import load_identity, save_identity
from contrail_storage.link import LocalLink
from contrail_storage.node import StorageNode
from contrail_storage.reading.window_reads import WindowReads
from contrail_storage.repair.swap import STORE_NAME
from contrail_storage.replica.raft_port import SUSPECT
from contrail_storage.state.install import Installer
from contrail_storage.state.rows import prefixes
from contrail_storage.store.rocks_store import RocksStore
from contrail_storage.upkeep.eraser import EraseBounds
from contrail_storage.wal import LogOptions
from tests.support.folders import copy_at_one_moment, files_with
from tests.unit.storage.cluster_rig import NAMES, Nodes, running, turn, until
from tests.unit.storage.erase_rig import WAIT_NS, traces
from tests.unit.storage.test_cluster_erasing import filled, receipt_of, status_of

LOG = LogOptions(segment_bytes=8 << 10, keep_bytes=0, tail_bytes=16 << 10)


@pytest.fixture(autouse=True)
def short_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members keep no applied entries in memory, so that others need the disk."""
    monkeypatch.setattr("contrail_replicator.group._TAIL_BYTES", 1)


async def create(nodes: Nodes, name: str, **given: Any) -> int:
    """Create a stream with three replicas that all nodes know; return its group."""
    config = StreamConfig(name=name, subjects=(f"{name}.*",), num_replicas=3, **given)
    await nodes.call(
        next(iter(nodes.links.nodes)), lambda link: link.put_stream(config, "put", None, False)
    )
    await nodes.until_listed(name)
    entry = nodes.all()[0].meta.streams[name]
    return entry.groups[0]


async def fill(nodes: Nodes, name: str, first: int, count: int, size: int = 200) -> None:
    for start in range(first, first + count, 50):
        some = [
            PublishMessage(f"{name}.{n % 7}", None, b"%d" % n * (size // 4), msg_id=f"{n}")
            for n in range(start, min(start + 50, first + count))
        ]
        asked = next(iter(nodes.links.nodes))
        await nodes.call(asked, lambda link, some=some: publish(link, name, some))


def rows_of(node: StorageNode, group: int) -> dict[bytes, bytes]:
    """The rows of a group that replicas have in common; blocks may be divided differently."""
    shards = [one for one, shard in node.applier.shards.items() if shard.group == group]
    physical = keys.BLOCK, keys.BLOCK_INDEX, keys.BLOCK_PAGE, keys.WINDOW, keys.SUBJECT_NAME
    return {
        key: value
        for prefix in prefixes(group, sorted(shards))
        if prefix[:1] not in physical
        for key, value in node.parts[0].scan(prefix, keys.prefix_end(prefix))
    }


def kinds_of_meta(node: StorageNode) -> set[bytes]:
    """The kinds of rows of the meta machine, apart from the node's own records."""
    kinds = (bytes((letter,)) for letter in string.ascii_letters.encode())
    ranges = {kind: keys.shard_key(kind, META_SHARD) for kind in kinds}
    found = {
        kind
        for kind, prefix in ranges.items()
        for _ in node.parts[0].scan(prefix, keys.prefix_end(prefix))
    }
    return found - {keys.APPLIED, b"K"}


async def until_equal(nodes: Nodes, group: int) -> None:
    """Wait until all members have applied the same, and compare what they have."""

    def same() -> bool:
        members = [one.groups[group] for one in nodes.all()]
        indexes = {one.applied_index for one in members}
        return len(indexes) == 1 and not any(one.flags for one in members)

    await until(same)
    for node in nodes.all():
        await node.until_written()
    one, *others = nodes.all()
    for other in others:
        assert other.applier.chains[group] == one.applier.chains[group]
        assert {n for n, s in other.applier.shards.items() if s.group == group} == {
            n for n, s in one.applier.shards.items() if s.group == group
        }
        assert rows_of(other, group) == rows_of(one, group)


async def lead(nodes: Nodes, group: int, name: str) -> LocalLink:
    """Make a node the leader of a group."""
    while nodes.leader(group) != name:
        known = nodes.leader(group)
        if known:
            nodes[known].groups[group].hand_over(name)
        await turn()
    return LocalLink(nodes[name])


async def forget_log(nodes: Nodes) -> None:
    """Let all nodes remove what they have applied of their logs.

    A follower keeps what it has not applied yet, and would give it to others as the next leader.
    A checkpoint would keep the newest segments, whose sizes differ from run to run.
    """

    def same() -> bool:
        indexes = [
            {at: one.applied_index for at, one in node.groups.items() if not one.is_alone}
            for node in nodes.all()
        ]
        return all(one == indexes[0] for one in indexes)

    await until(same)
    for node in nodes.all():
        await node.cut_log()


async def known_of(link: LocalLink, stream: str, last: int) -> list[Any]:
    """Everything that a client can learn of a stream with one consumer."""
    found: list[Any] = [(await link.stream_info(stream)).state]
    for seq in range(1, last + 1):
        try:
            message = await link.get_message(stream, seq)
            found.append((seq, message.subject, bytes(message.payload), message.time_ns))
        except ApiError as error:
            found.append(error.spec.code)
    info = await link.consumer_info(stream, "c")
    found.append((info.ack_floor, info.num_ack_pending, info.num_pending, info.delivered))
    found.append(await link.deleted_ranges(stream, 100, ""))
    return found


def test_member_that_was_away_gets_the_state_and_has_no_ghosts(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path, log=LOG) as nodes:
            group = await create(nodes, "S", duplicate_window_ns=10**12)
            gone = await create(nodes, "GONE")
            await fill(nodes, "S", 0, 100)
            await fill(nodes, "GONE", 0, 10)
            config = ConsumerConfig(name="c", durable=True, ack_wait_ns=10**12)
            await nodes.call("a", lambda link: link.put_consumer("S", config, "put", None, False))
            await until_equal(nodes, group)
            await nodes.stop("c")
            await nodes.until_led(META_GROUP, group, gone)
            pull = PullRequest(stream="S", consumer="c", batch=40, no_wait=True)
            pulled = await nodes.call("a", lambda link: link.pull(pull))
            acks = [
                AckItem(*pulled.address(one), [one.message.seq], "ack")
                for one in pulled.deliveries[5:20]
            ]
            await nodes.call("a", lambda link: link.acknowledge("S", "c", acks, sync=True))
            await nodes.call("a", lambda link: link.delete_message("S", 70))
            await nodes.call("a", lambda link: link.delete_stream("GONE"))
            later = await create(nodes, "LATER")
            await fill(nodes, "LATER", 0, 20)
            await fill(nodes, "S", 100, 400)
            await nodes.call("a", lambda link: link.purge_stream("S", "", 30, 0))
            await forget_log(nodes)
            before = await nodes.call("a", lambda link: known_of(link, "S", 500))
            await nodes.start("c")
            for number in {META_GROUP, group, gone, later}:
                await until_equal(nodes, number)
            behind = nodes["c"]
            assert kinds_of_meta(behind) == kinds_of_meta(nodes["a"]) <= set(keys.META_KINDS)
            assert behind.catching_up.installer.counts.installed >= 2
            assert "GONE" not in behind.meta.streams
            # It leads with everything: messages, deliveries, acknowledgements and ids.
            link = await lead(nodes, group, "c")
            assert await known_of(link, "S", 500) == before
            await fill(nodes, "S", 450, 60)
            assert (await link.stream_info("S")).state.last_seq == 510
            await until_equal(nodes, group)
        async with running(tmp_path, log=LOG) as nodes:
            link = await lead(nodes, group, "c")
            assert (await known_of(link, "S", 500))[1:501] == before[1:501]

    asyncio.run(scene())


async def left_behind(nodes: Nodes, count: int = 300) -> int:
    """Stop node c, and make it miss more of a stream than the others' logs have; the group."""
    group = await create(nodes, "S")
    await fill(nodes, "S", 0, 60)
    await until_equal(nodes, group)
    await nodes.stop("c")
    await nodes.until_led(META_GROUP, group)
    await fill(nodes, "S", 60, count)
    await forget_log(nodes)
    return group


def test_install_that_a_crash_interrupts_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images: list[Path] = []
    folder, images_folder = tmp_path / "nodes", tmp_path / "images"

    def keep_image() -> None:
        images.append(images_folder / f"{len(images)}")
        copy_at_one_moment(folder / "c", images[-1])

    async def write(self: Installer, batch: list[Any]) -> list[Any]:
        left = await write_really(self, batch)
        # Nothing is written after a piece in which no row ends.
        if batch and (len(images) < 4 or batch[-1][1][:1] == keys.APPLIED):
            self._store.flush()
            keep_image()
        return left

    def install(self: RaftGroup, index: int, term: int) -> bool:
        reset = install_really(self, index, term)
        assert reset
        keep_image()
        return reset

    write_really, install_really = Installer._write, RaftGroup.install

    async def scene() -> None:
        async with running(folder, log=LOG) as nodes:
            group = await left_behind(nodes)
            with monkeypatch.context() as patch:
                patch.setattr("contrail_storage.state.rows.PIECE_BYTES", 1_000)
                patch.setattr(Installer, "_write", write)
                patch.setattr(RaftGroup, "install", install)
                await nodes.start("c")
                await until_equal(nodes, group)
            # The log begins again only at the last of them, and the flag is still there.
            assert len(images) == 6
            for number, image in enumerate(images):
                await nodes.stop("c")
                shutil.rmtree(folder / "c")
                shutil.copytree(image, folder / "c")
                # The others would refuse it as a copy: each of them is the same start.
                identity = load_identity(Files(), folder / "c")
                assert identity is not None
                booted = replace(identity, boots=10 * (number + 1))
                save_identity(Files(), folder / "c", booted)
                await nodes.start("c")
                await until_equal(nodes, group)
                assert nodes["c"].catching_up.installer.counts.installed > 0
                await fill(nodes, "S", 360 + 20 * number, 20)
                await until_equal(nodes, group)
            link = await lead(nodes, group, "c")
            assert (await link.stream_info("S")).state.messages == 360 + 20 * len(images)

    asyncio.run(scene())


def test_install_goes_on_with_the_next_leader_and_while_messages_are_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        async with running(tmp_path, log=LOG, node_keys=(bytes(32),)) as nodes:
            group = await left_behind(nodes)
            first = nodes.leader(group)
            stopped: list[str] = []

            async def write(self: Installer, batch: list[Any]) -> list[Any]:
                left = await write_really(self, batch)
                if batch and batch[0][0] == "put" and not stopped:
                    stopped.append(first)
                    await nodes.stop(first)
                return left

            write_really = Installer._write
            monkeypatch.setattr("contrail_storage.state.rows.PIECE_BYTES", 10_000)
            monkeypatch.setattr(Installer, "_write", write)
            await nodes.start("c")
            await until(lambda: bool(stopped) and nodes.leader(group) not in ("", first))
            [second] = {"a", "b"} - {first}
            # Two members are a majority, although one of them has no state yet.
            await fill(nodes, "S", 360, 200)
            await until_equal(nodes, group)
            await lead(nodes, group, "c")
            await nodes.start(first)
            await until_equal(nodes, group)
            await nodes.stop(second)
            await nodes.until_led(group)
            info = await nodes.call("c", lambda link: link.stream_info("S"))
            assert info.state.messages == 560

    asyncio.run(scene())


def lose_blocks(node: StorageNode, group: int) -> None:
    """Lose the messages of a group that one node has, and what it knows of them."""
    for shard in node.applier.shards.values():
        if shard.group == group:
            for kind in (keys.BLOCK, keys.WINDOW):
                prefix = keys.shard_key(kind, shard.machine.shard_id)
                node.parts[0].write([("delete_range", prefix, keys.prefix_end(prefix))])
    node.blocks.cache.discard_shards(lambda _: True)
    node.reader.windows = WindowReads(node.blocks)


@pytest.mark.parametrize("leads", [False, True])
def test_damage_that_an_entry_needs_is_repaired_by_the_others(tmp_path: Path, leads: bool) -> None:
    async def scene() -> None:
        async with running(tmp_path, log=LOG) as nodes:
            group = await create(nodes, "S")
            await fill(nodes, "S", 0, 100)
            await until_equal(nodes, group)
            leader = nodes.leader(group)
            name = leader if leads else next(one for one in NAMES if one != leader)
            node = nodes[name]
            lose_blocks(node, group)
            if leads:
                with pytest.raises(ApiError) as caught:
                    await LocalLink(node).delete_message("S", 5)
                assert caught.value.spec is errors.OUTCOME_UNKNOWN
            else:
                await nodes.call(leader, lambda link: link.delete_message("S", 5))
            await until(lambda: node.catching_up.installer.counts.installed == 1)
            await fill(nodes, "S", 100, 50)
            await until_equal(nodes, group)
            link = await lead(nodes, group, name)
            state = (await link.stream_info("S")).state
            assert state.messages == 149
            assert (await link.get_message("S", 7)).subject == "S.6"

    asyncio.run(scene())


def test_damage_found_at_the_start_is_repaired_and_other_groups_are_served(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path, log=LOG) as nodes:
            group, other = await create(nodes, "S"), await create(nodes, "T")
            assert group != other
            for name in ("S", "T"):
                await fill(nodes, name, 0, 100)
            await until_equal(nodes, group)
            shard_id = nodes["c"].meta.streams["S"].shard_id
            await nodes.stop("c")
            store = RocksStore.open(tmp_path / "c" / STORE_NAME)
            store.write([("delete", keys.shard_key(keys.COUNTERS, shard_id))])
            store.flush()
            store.close()
            await nodes.start("c")
            assert nodes["c"].groups[group].flags & SUSPECT
            assert not nodes["c"].groups[other].flags
            await until_equal(nodes, group)
            await until_equal(nodes, other)
            link = await lead(nodes, group, "c")
            assert (await link.stream_info("S")).state.messages == 100

    asyncio.run(scene())


def test_member_that_gets_bytes_it_had_erased_erases_them_again(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path, log=LOG, erase=EraseBounds(patience_s=0.1)) as nodes:
            leader = await filled(nodes)
            group, first = leader.streams.shard("S").group, leader.membership.node_id
            name, absent = (one for one in NAMES if one != first)
            await nodes.stop(absent)
            await nodes.until_led(META_GROUP, group)
            # A member that reads the state holds files with the bytes; the erasure ends that.
            opened = await leader.catching_up.source.open(group, name)
            link = LocalLink(leader)
            receipt = await link.erase("S", [7], "")
            await until(
                lambda: (
                    status_of(nodes[name], receipt.erasure_id)
                    == {first: True, name: True, absent: False}
                )
            )
            with pytest.raises(ApiError):
                await leader.catching_up.source.read(opened.number, 0)
            nodes[name].catching_up.suspect(group, "to be repaired")
            await until(lambda: status_of(nodes[name], receipt.erasure_id).get(name) is False)
            await until(lambda: nodes[name].catching_up.installer.counts.installed == 1)
            await nodes.start(absent)
            done = await receipt_of(nodes, receipt.erasure_id, first, WAIT_NS)
            assert done.status == "done"
            assert files_with(tmp_path, traces(7)) == {}
            await until_equal(nodes, group)

    asyncio.run(scene())
