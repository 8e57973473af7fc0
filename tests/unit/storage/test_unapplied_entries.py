"""Entries of the log that the store does not have: of another release, damaged, or none at all."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from contrail_common.model import PublishMessage, StreamConfig
from contrail_link import publishing
from contrail_serve.groups import SingleMemberGroups
from contrail_storage.core import commands as cmd
from contrail_storage.core import key_layout as keys
from contrail_storage.core.entry_codec import encode_entry
from contrail_storage.core.key_layout import SHARD_GROUP
from contrail_storage.disk.node_file import NO_CLUSTER, NodeIdentity
from contrail_storage.link import LocalLink
from contrail_storage.node import NodeOptions, StorageNode
from contrail_storage.store.rocks_store import RocksStore
from contrail_storage.upkeep.checkpointer import DataLostError
from contrail_storage.wal.node_log import NodeLog
from tests.support.folders import contents
from tests.unit.storage.test_open_damaged_node import play

OLD = msgspec.msgpack.encode((5, [(1, [3])]))
SOUND = encode_entry(cmd.Entry(5, [(99, cmd.DropStream())]))
DAMAGED = SOUND[:-1] + bytes((SOUND[-1] ^ 1,))
MESSAGES = [PublishMessage("s", None, b"%d" % number) for number in range(3)]


async def fill(_: StorageNode, link: LocalLink) -> None:
    await link.put_stream(StreamConfig(name="S", subjects=("s",)), "create", None, False)
    await publishing.publish(link, "S", MESSAGES)


async def look(_: StorageNode, link: LocalLink) -> tuple[int, str]:
    info = await link.stream_info("S")
    return info.state.last_seq, info.incarnation


def add_to_log(data_dir: Path, *entries: bytes) -> int:
    """Log entries after the last one of the shards' group; return the last index."""
    log = NodeLog.open(data_dir / "wal")
    end = log.attach(SHARD_GROUP, lambda position, index: None)
    for index, data in enumerate(entries, end.last_index + 1):
        log.append(SHARD_GROUP, index, end.last_term, data)
    log.start(call_soon=lambda _: None, on_failure=lambda _: None)
    log.close()
    return end.last_index + len(entries)


def unapplied(data_dir: Path) -> list[bytes]:
    """The commands' entries in the log that the store does not have."""
    node = StorageNode.open(NodeOptions(data_dir), SingleMemberGroups())
    try:
        groups = node.log.recovery.groups.values()
        return [data for group in groups for data, _, _ in group.entries if data]
    finally:
        node.close()


@pytest.mark.parametrize("accept", [False, True])
def test_entries_of_an_older_release_are_refused_in_a_sentence_and_stay(
    tmp_path: Path, accept: bool
) -> None:
    play(tmp_path / "data", fill)
    add_to_log(tmp_path / "data", OLD)
    before = contents(tmp_path / "data" / "wal")
    options = NodeOptions(tmp_path / "data", accept_data_loss=accept)
    with pytest.raises(OSError, match=r"release 0\.2 that are not in the store: start it once"):
        StorageNode.open(options, SingleMemberGroups())
    assert contents(tmp_path / "data" / "wal") == before


def test_entries_of_an_older_release_that_the_store_has_are_never_decoded(tmp_path: Path) -> None:
    play(tmp_path / "data", fill)
    before = play(tmp_path / "data", look)
    index = add_to_log(tmp_path / "data", OLD)
    store = RocksStore.open(tmp_path / "data" / "store")
    store.begin_writing()
    key = keys.shard_key(keys.APPLIED, SHARD_GROUP)
    applied = store.get(key)
    assert applied is not None
    store.write([("put", key, index.to_bytes(8, "big") + applied[8:])])
    store.flush()
    store.close()
    assert play(tmp_path / "data", look) == before


def test_damaged_entry_is_not_applied_and_ends_what_is_used_of_the_log(tmp_path: Path) -> None:
    play(tmp_path / "data", fill)
    seq, incarnation = play(tmp_path / "data", look)
    add_to_log(tmp_path / "data", SOUND, DAMAGED, SOUND)
    with pytest.raises(DataLostError, match="damaged: it does not match its checksum"):
        StorageNode.open(NodeOptions(tmp_path / "data"), SingleMemberGroups())
    after = play(tmp_path / "data", look, accept_data_loss=True)
    assert after[0] == seq
    assert after[1] != incarnation


def test_clean_stop_leaves_no_entry_to_apply(tmp_path: Path) -> None:
    """Also what the node's own tasks propose while they end is applied, or is not in the log."""

    async def propose_at_the_end(node: StorageNode, shard_id: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            node.shard_log.append(shard_id, MESSAGES[0], lambda _: None)
            await asyncio.sleep(0)

    async def scene(node: StorageNode, link: LocalLink) -> None:
        await fill(node, link)
        node.spawn(propose_at_the_end(node, node.streams.shard("S").machine.shard_id))
        await asyncio.sleep(0)

    play(tmp_path / "data", scene)
    assert unapplied(tmp_path / "data") == []
    assert play(tmp_path / "data", look)[0] == len(MESSAGES) + 1


def test_each_start_is_counted_and_the_cluster_stays(tmp_path: Path) -> None:
    async def identity(node: StorageNode, _: LocalLink) -> NodeIdentity:
        return node.identity

    first, second = (play(tmp_path / "data", identity) for _ in range(2))
    assert first.cluster_id != NO_CLUSTER
    assert (second.cluster_id, second.node_id) == (first.cluster_id, first.node_id)
    assert (first.boots, second.boots) == (1, 2)
