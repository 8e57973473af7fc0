"""A message is read at once only if it is in memory, and if any read would show it."""

import asyncio
from pathlib import Path

from contrail_common.model import PublishMessage, StoredMessage, StreamConfig
from contrail_link.publishing import publish
from contrail_storage.link import LocalLink
from contrail_storage.node import StorageNode
from tests.unit.storage.cluster_rig import running as cluster
from tests.unit.storage.test_cluster import create, messages
from tests.unit.storage.test_node import PAYLOAD, play
from tests.unit.storage.test_node import publish as publish_payloads


def test_message_in_memory_is_read_at_once_and_one_on_the_disk_once_it_is_read(
    tmp_path: Path,
) -> None:
    async def scene(_: StorageNode, link: LocalLink) -> None:
        await publish_payloads(link, 1_000)  # more than a block
        assert link.peek_message("S", 500) == await link.get_message("S", 500)
        assert link.peek_last("S", "a") == await link.get_message("S", 1_000)

    async def later(node: StorageNode, link: LocalLink) -> None:
        read = link.peek_message("S", 500)
        assert isinstance(read, asyncio.Future)
        await read
        found = link.peek_message("S", 500)
        assert found == await link.get_message("S", 500)
        assert isinstance(found, StoredMessage)
        assert found.payload == PAYLOAD
        read = link.peek_last("S", "a")
        assert isinstance(read, asyncio.Future)
        await read
        assert link.peek_last("S", "a") == await link.get_message("S", 1_000)

    play(tmp_path, scene)
    play(tmp_path, later)


def test_nothing_is_read_at_once_that_is_to_be_refused(tmp_path: Path) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        await publish_payloads(link, 3)
        await link.delete_message("S", 3)
        assert link.peek_message("S", 1) is not None
        for seq in (0, 3, 4, 1 << 62):
            assert link.peek_message("S", seq) is None
        assert link.peek_message("T", 1) is None
        # The newest message that was ever stored is gone; the search finds the one before it.
        assert link.peek_last("S", "a") is None
        assert link.peek_last("S", "b") is None
        assert link.peek_last("S", ">") is None
        node.streams.shard("S").damaged = "for a test"
        assert link.peek_message("S", 1) is None

    play(tmp_path, scene)


def test_shards_and_sealed_messages_are_read_the_general_way(tmp_path: Path) -> None:
    configs = [
        StreamConfig(name="M", subjects=("m.*",), shards=2),
        StreamConfig(name="K", subjects=("k.*",), erasure="subject_key"),
    ]

    async def scene(_: StorageNode, link: LocalLink) -> None:
        for config in configs:
            await link.put_stream(config, "create", None, False)
            subject = config.subjects[0].replace("*", "a")
            await publish(link, config.name, [PublishMessage(subject, None, b"x")])
            assert link.peek_message(config.name, 1) is None
            assert link.peek_last(config.name, subject) is None

    play(tmp_path, scene)


def test_leader_of_a_replicated_stream_confirms_that_it_leads(tmp_path: Path) -> None:
    async def scene() -> None:
        async with cluster(tmp_path) as nodes:
            link = LocalLink(nodes[await create(nodes, "S")])
            await publish(link, "S", messages("S", 0, 1))
            assert (await link.get_message("S", 1)).payload == b"0"
            assert link.peek_message("S", 1) is None

    asyncio.run(scene())
