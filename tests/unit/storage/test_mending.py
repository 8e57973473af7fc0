"""A block that one member cannot read comes from another one, and nothing else changes."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from contrail_common import errors
from contrail_common.columns.blocks import Block, decode_block, encode_block
from contrail_common.errors import ApiError
from contrail_common.model import ConsumerConfig, PublishMessage
from contrail_link.contract.consume import PullRequest
from contrail_link.contract.read import RangeRequest
from contrail_link.publishing import publish
from contrail_storage.core import key_layout as keys
from contrail_storage.link import LocalLink
from contrail_storage.node import StorageNode
from contrail_storage.replica.shard import Shard
from contrail_storage.store.block_codecs import BLOCK_CODECS
from tests.unit.storage.cluster_rig import NAMES, PATIENCE_S, Nodes, running, until
from tests.unit.storage.test_catching_up import create, lead, until_equal
from tests.unit.storage.test_scrubber import raw_store

COUNT = 300
BLOCK = 100
"""Messages of one publish, which are a block."""
NODE_KEY = bytes(range(32))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, no member gives up."""
    monkeypatch.setattr("contrail_storage.replica.groups._APPLIED_S", PATIENCE_S)
    monkeypatch.setattr("contrail_storage.state.mending._PATIENCE_S", PATIENCE_S)


def payload(seq: int) -> bytes:
    return b"%05d" % seq * 200


async def filled(nodes: Nodes, count: int = COUNT) -> int:
    """Make a stream of several blocks that all members have stored; return its group."""
    group = await create(nodes, "S")
    for first in range(1, count + 1, BLOCK):
        some = [
            PublishMessage(f"S.{n % 7}", {"N": [str(n)]} if n % 3 else None, payload(n))
            for n in range(first, first + BLOCK)
        ]
        await nodes.call("a", lambda link, some=some: publish(link, "S", some))
    await until_equal(nodes, group)
    return group


def shard_of(node: StorageNode) -> Shard:
    return node.streams.shard("S")


def block_key(node: StorageNode, seq: int) -> bytes:
    """The key of the block with a sequence."""
    shard_id = shard_of(node).machine.shard_id
    directory = node.blocks.directory(shard_id)
    base_seq = directory.base_seq(directory.position(seq))
    return keys.large_key(keys.BLOCK, shard_id, base_seq)


async def stored(node: StorageNode, seq: int) -> Block:
    """The block with a sequence, as the disk has it once it is written."""
    shard_id = shard_of(node).machine.shard_id

    def is_written() -> bool:
        base_seq = keys.last_number(block_key(node, seq), 8)
        return (shard_id, base_seq) not in node.blocks._unwritten

    await until(is_written)
    value = node.parts[0].get(block_key(node, seq))
    assert value is not None
    return decode_block(value, BLOCK_CODECS)


def flip(node: StorageNode, seq: int) -> None:
    """Change one bit of the block with a sequence, and forget what is in memory of it."""
    flip_on_disk(node, seq)
    forget(node, seq)


def flip_on_disk(node: StorageNode, seq: int) -> None:
    store, key = raw_store(node), block_key(node, seq)
    value = store.get(key)
    assert value is not None
    middle = len(value) // 2
    store.write([("put", key, value[:middle] + bytes([value[middle] ^ 1]) + value[middle + 1 :])])


def remove(node: StorageNode, seq: int) -> None:
    """Remove the block with a sequence from the store alone."""
    raw_store(node).write([("delete", block_key(node, seq))])
    forget(node, seq)


def forget(node: StorageNode, seq: int) -> None:
    node.blocks.discard(shard_of(node).machine.shard_id, keys.last_number(block_key(node, seq), 8))


def is_whole(nodes: Nodes) -> bool:
    """Whether no node fetches a state, or has fetched one, or finds a stream damaged."""
    return all(
        not node.catching_up.suspects
        and not node.catching_up.installs.installed
        and not any(shard.damaged for shard in node.applier.shards.values())
        for node in nodes.all()
    )


async def scrub_finds_nothing(nodes: Nodes) -> None:
    for node in nodes.all():
        before = node.scrubber.counts.damaged
        await node.scrubber.round()
        assert node.scrubber.counts.damaged == before


async def get(link: LocalLink, replica: str) -> None:
    found = await link.get_message("S", 150, replica=replica)
    assert bytes(found.payload) == payload(150)
    assert found.headers is None


async def get_range(link: LocalLink, replica: str) -> None:
    request = RangeRequest(stream="S", from_seq=90, limit=200, replica=replica)
    found = await link.read_range(request)
    assert [one.seq for one in found.messages] == list(range(90, 290))
    assert all(bytes(one.payload) == payload(one.seq) for one in found.messages)


async def pull(link: LocalLink, replica: str) -> None:
    await link.put_consumer("S", ConsumerConfig(name="c", durable=True), "put", None, False)
    request = PullRequest(stream="S", consumer="c", batch=200, no_wait=True)
    found = await link.pull(request)
    assert [bytes(one.message.payload) for one in found.deliveries] == [
        payload(seq) for seq in range(1, len(found.deliveries) + 1)
    ]
    assert len(found.deliveries) > 150


Use = Callable[[LocalLink, str], Awaitable[None]]


@pytest.mark.parametrize("node_keys", [(), (NODE_KEY,)])
@pytest.mark.parametrize("use", [get, get_range, pull])
def test_reader_gets_its_answer_and_the_disk_the_block(
    tmp_path: Path, use: Use, node_keys: tuple[bytes, ...]
) -> None:
    async def scene() -> None:
        async with running(tmp_path, node_keys=node_keys) as nodes:
            group = await filled(nodes)
            leader = nodes.leader(group)
            follower = next(name for name in NAMES if name != leader)
            for name in (leader,) if use is pull else (leader, follower):
                node = nodes[name]
                flip(node, 150)
                await until(lambda node=node: node.streams.stream("S").staleness_s() < 1)
                await use(LocalLink(node), "" if name == leader else name)
                assert node.catching_up.mends.mended == 1
                block = await stored(node, 150)
                assert payload(150) in block.columns.payload
            await scrub_finds_nothing(nodes)
            await until_equal(nodes, group)
            assert is_whole(nodes)

    asyncio.run(scene())


def test_reader_of_a_block_that_is_gone_gets_its_answer_too(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            group = await filled(nodes)
            node = nodes[nodes.leader(group)]
            for use in (get, get_range):
                remove(node, 150)
                await use(LocalLink(node), "")
                await stored(node, 150)
            assert node.catching_up.mends.mended == 2
            assert is_whole(nodes)

    asyncio.run(scene())


@pytest.mark.parametrize("leads", [False, True])
def test_scrub_replaces_what_it_cannot_read(tmp_path: Path, leads: bool) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            group = await filled(nodes)
            leader = nodes.leader(group)
            name = leader if leads else next(one for one in NAMES if one != leader)
            node = nodes[name]
            flip(node, 1)
            flip(node, COUNT)
            remove(node, 150)
            await node.scrubber.round()
            assert (node.scrubber.counts.damaged, node.catching_up.mends.mended) == (3, 3)
            for seq in (1, 150, COUNT):
                await stored(node, seq)
            await scrub_finds_nothing(nodes)
            assert is_whole(nodes)
            link = await lead(nodes, group, name)
            for seq in range(1, COUNT + 1):
                assert bytes((await link.get_message("S", seq)).payload) == payload(seq)
            # The stream goes on, also with the block at its end.
            await publish(link, "S", [PublishMessage("S.0", None, b"more")])
            await until_equal(nodes, group)

    asyncio.run(scene())


async def remove_some(link: LocalLink) -> list[int]:
    """Remove most messages of the second block; return the sequences of the others."""
    left = [110, 150, 190]
    for seq in range(101, 201):
        if seq not in left:
            await link.delete_message("S", seq)
    return left


async def check_removed(node: StorageNode, left: list[int]) -> None:
    link = LocalLink(node)
    for seq in range(101, 201):
        if seq in left:
            found = await link.get_message("S", seq)
            assert bytes(found.payload) == payload(seq)
        else:
            with pytest.raises(ApiError) as caught:
                await link.get_message("S", seq)
            assert caught.value.spec is errors.MESSAGE_NOT_FOUND
    # The disk has nothing of the others either.
    for seq in left:
        block = await stored(node, seq)
        for gone in range(block.base_seq, block.last_seq + 1):
            assert (payload(gone) in block.columns.payload) is (gone in left)


def test_member_that_is_behind_brings_back_nothing_that_was_removed(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            group = await filled(nodes)
            leader = nodes.leader(group)
            node = nodes[leader]
            behind, other = (one for one in node.membership.members_of(group) if one != leader)
            nodes.links.withheld.add((behind, group))
            left = await remove_some(LocalLink(node))
            for seq in left:
                flip(node, seq)
                await LocalLink(node).get_message("S", seq)
            sent = [nodes[one].catching_up.sent.opened for one in (behind, other)]
            assert sent[0] > 0
            assert sent[1] == 0
            await check_removed(node, left)
            nodes.links.heal()
            await until_equal(nodes, group)
            assert is_whole(nodes)

    asyncio.run(scene())


def test_member_that_is_behind_waits_until_it_knows_what_was_removed(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            group = await filled(nodes)
            leader = nodes.leader(group)
            name = next(one for one in NAMES if one != leader)
            nodes.links.withheld.add((name, group))
            left = await remove_some(LocalLink(nodes[leader]))
            # What was removed is gone from the disk of the leader.
            await until(lambda: nodes[leader].compactor.counts.rewritten > 0)
            # The entries that are to come need the block, and find it in memory.
            flip_on_disk(nodes[name], 150)
            mend = nodes[name].catching_up.mend(shard_of(nodes[name]), 101)
            mending = asyncio.ensure_future(mend)
            await until(lambda: nodes[leader].catching_up.sent.opened > 0)
            assert not mending.done()
            nodes.links.heal()
            assert await mending
            await until_equal(nodes, group)
            await lead(nodes, group, name)
            await check_removed(nodes[name], left)
            assert is_whole(nodes)

    asyncio.run(scene())


def test_damaged_block_of_another_member_is_not_taken(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            group = await filled(nodes)
            leader = nodes.leader(group)
            node = nodes[leader]
            damaged = next(one for one in node.membership.members_of(group) if one != leader)
            for name in (leader, damaged):
                flip(nodes[name], 150)
            await get(LocalLink(node), "")
            assert is_whole(nodes)
            await nodes[damaged].scrubber.round()
            for name in (leader, damaged):
                assert nodes[name].catching_up.mends.mended == 1
                assert payload(150) in (await stored(nodes[name], 150)).columns.payload
            await scrub_finds_nothing(nodes)
            assert is_whole(nodes)

    asyncio.run(scene())


def test_block_that_no_member_can_read_is_lost_and_nothing_takes_its_place(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            group = await filled(nodes)
            node = nodes[nodes.leader(group)]
            for one in nodes.all():
                flip(one, 150)
            with pytest.raises(ApiError) as caught:
                await get(LocalLink(node), "")
            assert caught.value.spec is errors.DATA_LOST
            assert (node.catching_up.mends.mended, node.catching_up.mends.failed) == (0, 1)

    asyncio.run(scene())


def change(node: StorageNode, seq: int) -> None:
    """Make another message of one, in a block whose checksum is right."""
    store, key = node.parts[0], block_key(node, seq)
    value = store.get(key)
    assert value is not None
    block = decode_block(value, BLOCK_CODECS)
    block.subject_ids = block.subject_ids.copy()
    block.subject_ids[seq - block.base_seq] ^= 1
    store.write([("put", key, encode_block(block, 0))])
    forget(node, seq)


def test_other_messages_with_a_right_checksum_are_not_taken(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            # The windows of 4,096 sequences tell what the messages are.
            group = await create(nodes, "S")
            for _ in range(6):
                some = [PublishMessage(f"S.{n % 7}", None, b"%d" % n) for n in range(1_000)]
                await nodes.call("a", lambda link, some=some: publish(link, "S", some))
            await until_equal(nodes, group)
            leader = nodes.leader(group)
            node = nodes[leader]
            changed, sound = (one for one in node.membership.members_of(group) if one != leader)
            before = [await stored(one, 150) for one in nodes.all()]
            assert all(block.subject_ids[150 - block.base_seq] == 2 for block in before)
            change(nodes[changed], 150)
            flip(node, 150)
            found = await LocalLink(node).get_message("S", 150)
            assert (found.subject, bytes(found.payload)) == ("S.2", b"149")
            for name in (changed, sound):
                assert nodes[name].catching_up.sent.opened == 1
            assert is_whole(nodes)

    asyncio.run(scene())
