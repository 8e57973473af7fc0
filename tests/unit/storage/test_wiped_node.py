"""A node of a cluster whose folder is lost: what it may do, what others keep, what is gone."""

import asyncio
import copy
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import StreamConfig
from contrail_link.publishing import publish
from contrail_storage.core import commands as cmd
from contrail_storage.core.key_layout import META_GROUP
from contrail_storage.core.results import Result
from contrail_storage.link import LocalLink
from contrail_storage.node import StorageNode
from contrail_storage.upkeep.checkpointer import DataLostError
from contrail_storage.wal.log_state import RESTORING
from tests.unit.storage.cluster_rig import NAMES, Nodes, running, until
from tests.unit.storage.test_cluster import create, messages


def flags(nodes: Nodes, name: str) -> set[int]:
    """The flags of all replicated members of a node."""
    node = nodes[name]
    return {node.log.flags(number) for number, one in node.groups.items() if not one.is_alone}


async def put(nodes: Nodes, name: str, replicas: int) -> None:
    config = StreamConfig(name=name, subjects=(f"{name}.*",), num_replicas=replicas)
    await nodes.call("a", lambda link: link.put_stream(config, "put", None, False))
    await nodes.until_listed(name)


async def refusal(nodes: Nodes, name: str, asked: str) -> ApiError:
    """What a node answers to a question about a stream."""
    with pytest.raises(ApiError) as refused:
        await nodes.call(asked, lambda link: link.stream_info(name))
    return refused.value


def test_wiped_node_catches_up_and_then_counts_for_what_was_acknowledged(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            leader = await create(nodes, "S")
            group = nodes[leader].streams.shard("S").group
            await publish(LocalLink(nodes[leader]), "S", messages("S", 0, 50))
            lost, other = (name for name in NAMES if name != leader)
            await nodes.stop(lost)
            nodes.wipe(lost)
            await publish(LocalLink(nodes[leader]), "S", messages("S", 50, 50))
            await nodes.start(lost)
            wiped = nodes[lost]
            assert wiped.identity.incarnation == 2
            # It begins without a vote in each group, and gets it back from each leader.
            assert wiped.log.flags(META_GROUP) == RESTORING
            await until(lambda: group in wiped.groups and flags(nodes, lost) == {0})
            await until(lambda: not wiped.readiness())
            assert set(nodes[leader].groups) - {1, 2, 3} == set(wiped.groups) - {1, 2, 3}
            # Now the one that led goes: the wiped node is needed for a majority.
            await nodes.stop(leader)
            await until(lambda: any(nodes[one].groups.leads(group) for one in (lost, other)))
            ack = await nodes.call(other, lambda link: publish(link, "S", messages("S", 0, 120)))
            assert [one.duplicate for one in ack.results] == [True] * 100 + [False] * 20
            # A second start is one of the same incarnation.
            await nodes.start(leader)
            await nodes.stop(lost)
            await nodes.start(lost)
            assert nodes[lost].identity.incarnation == 2
            assert flags(nodes, lost) == {0}

    asyncio.run(scene())


def stored(node: StorageNode) -> list[int]:
    """The last sequences of all shards."""
    return [shard.applied_seq for shard in node.applier.shards.values()]


def newest_segment(folder: Path) -> Path:
    return max((folder / "wal").glob("*.wal"))


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(newest_segment, id="log"),
        pytest.param(lambda folder: folder / "store" / "CURRENT", id="store"),
    ],
)
def test_damaged_folder_is_set_aside_and_filled_again(
    tmp_path: Path, part: Callable[[Path], Path]
) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            leader = await create(nodes, "S")
            await publish(LocalLink(nodes[leader]), "S", messages("S", 0, 50))
            lost = next(name for name in NAMES if name != leader)
            for name in ("R0", "R1", "R2"):
                await put(nodes, name, 1)
                await nodes.call("a", lambda link, at=name: publish(link, at, messages(at, 0, 1)))
            await nodes.stop(lost)
            part(tmp_path / lost).unlink()
            with pytest.raises(DataLostError):
                await nodes.start(lost)
            await nodes.start(lost, accept_data_loss=True)
            for _ in range(2):
                await until(lambda: flags(nodes, lost) == {0})
                assert nodes[lost].identity.incarnation == 2
                await until(lambda: 50 in stored(nodes[lost]))
                assert (tmp_path / lost / "damaged" / "1" / "store").exists()
                # The option stays in the start command, and changes nothing that is sound.
                await nodes.stop(lost)
                await nodes.start(lost, accept_data_loss=True)

    asyncio.run(scene())


def test_streams_of_the_lost_disk_say_so_until_they_are_made_anew(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            for name in ("R0", "R1", "R2"):
                await put(nodes, name, 1)
                await nodes.call(
                    "a", lambda link, name=name: publish(link, name, messages(name, 0, 3))
                )
            await until(lambda: len(nodes["a"].meta.streams) == 3)
            homes = {
                nodes["a"].meta.group_of(entry.shard_id): entry.name
                for entry in nodes["a"].meta.streams.values()
            }
            assert set(homes) == {1, 2, 3}
            await nodes.stop("b")
            nodes.wipe("b")
            await nodes.start("b")
            await until(lambda: not nodes["b"].membership.is_catching_up)
            await until(lambda: nodes["b"].readiness() == {})
            name = homes[2]
            for asked in NAMES:
                error = await refusal(nodes, name, asked)
                assert error.spec is errors.DATA_LOST
                assert "disk of b that is lost" in error.detail
            for call in (
                lambda link: publish(link, name, messages(name, 3, 1)),
                lambda link: publish(link, None, messages(name, 3, 1)),
                lambda link: link.put_stream(
                    StreamConfig(name=name, subjects=(f"{name}.*",)), "put", None, False
                ),
            ):
                with pytest.raises(ApiError, match="disk of b that is lost"):
                    await nodes.call("b", call)
            for group in (1, 3):
                info = await nodes.call("a", lambda link, at=group: link.stream_info(homes[at]))
                assert info.state.messages == 3
            # A restart changes nothing.
            await nodes.stop("b")
            await nodes.start("b")
            assert (await refusal(nodes, name, "b")).spec is errors.DATA_LOST
            await nodes.call("b", lambda link: link.delete_stream(name, None))
            assert (await refusal(nodes, name, "b")).spec is errors.STREAM_NOT_FOUND
            await put(nodes, name, 1)
            ack = await nodes.call("b", lambda link: publish(link, name, messages(name, 0, 2)))
            assert [one.seq for one in ack.results] == [1, 2]
            info = await nodes.call("b", lambda link: link.stream_info(name))
            assert info.state.messages == 2

    asyncio.run(scene())


def test_node_is_registered_by_one_that_fetches_the_state_of_meta_meanwhile(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            asked = next(nodes[name] for name in NAMES if name != nodes.leader(META_GROUP))
            lost = next(name for name in NAMES if nodes[name] is not asked)
            command = asked.meta_log.command

            async def after_an_install(given: cmd.RegisterNode) -> Result:
                asked.meta.take_over(copy.deepcopy(asked.meta))
                return await command(given)

            with patch.object(asked.meta_log, "command", after_an_install):
                entry = await asked.membership.register(lost, bytes(16))
            assert (entry.incarnation, entry.token) == (2, bytes(16))

    asyncio.run(scene())
