"""Streams with several shards on a node: made, changed and removed whole, whatever interrupts."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import StreamConfig
from contrail_common.partition import shard_of
from contrail_link.publishing import publish
from contrail_storage.core import commands as cmd
from contrail_storage.core.commands import META_SHARD
from contrail_storage.core.results import Result
from contrail_storage.link import LocalLink
from contrail_storage.node import StorageNode
from contrail_storage.replica.proposer import Proposer
from tests.support.folders import copy_at_one_moment
from tests.unit.storage.restore_rig import rows_of_shards
from tests.unit.storage.sharded_rig import (
    CONFIG,
    PATIENCE_S,
    SHARDS,
    fill,
    message,
    play,
    read_all,
    running,
)


def shards_of(node: StorageNode) -> list[tuple[StreamConfig, int, int]]:
    """Configuration, version and place of each shard that the node has."""
    records = [shard.machine.record for _, shard in sorted(node.applier.shards.items())]
    return [(one.config, one.version, one.shard) for one in records if one is not None]


def test_all_shards_have_one_configuration_and_version(tmp_path: Path) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        info = await link.stream_info("S")
        assert shards_of(node) == [(CONFIG, info.version, shard) for shard in range(SHARDS)]
        assert len(info.shards) == SHARDS
        changed = msgspec.structs.replace(CONFIG, max_msgs=10)
        after, _ = await link.put_stream(changed, "put", info.version, False)
        assert after.version == info.version + 1
        assert shards_of(node) == [(changed, after.version, shard) for shard in range(SHARDS)]
        with pytest.raises(ApiError) as refused:
            await link.put_stream(CONFIG, "put", info.version, False)
        assert refused.value.spec is errors.PRECONDITION_FAILED
        await link.delete_stream("S")
        assert node.applier.shards == {}
        assert await rows_of_shards(node) == []

    play(tmp_path, scene)


@pytest.mark.parametrize(
    "change",
    [{"shards": 5}, {"shards": 1}, {"shard_by": ()}, {"shard_by": (1,)}],
    ids=["more", "one", "whole-subject", "other-token"],
)
def test_shards_of_a_stream_stay_as_they_are(tmp_path: Path, change: dict[str, Any]) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        with pytest.raises(ApiError) as refused:
            await link.put_stream(msgspec.structs.replace(CONFIG, **change), "put", None, False)
        assert refused.value.spec is errors.STREAM_UPDATE_REFUSED

    play(tmp_path, scene)


def test_limits_are_shared_out_and_their_sum_holds(tmp_path: Path) -> None:
    config = msgspec.structs.replace(CONFIG, max_msgs=10)

    async def scene(node: StorageNode, link: LocalLink) -> None:
        await fill(link, 200, keys=20)
        info = await link.stream_info("S")
        assert info.state.messages == 10
        assert [state.messages for state in info.shards] == [3, 3, 2, 2]
        lower = msgspec.structs.replace(config, max_msgs=5)
        await link.put_stream(lower, "put", None, False)
        info = await link.stream_info("S")
        assert [state.messages for state in info.shards] == [2, 1, 1, 1]

    play(tmp_path, scene, config)


def test_new_messages_are_refused_where_a_shard_is_full(tmp_path: Path) -> None:
    config = msgspec.structs.replace(CONFIG, max_msgs=5, discard="new")

    async def scene(node: StorageNode, link: LocalLink) -> None:
        ack = await publish(link, "S", [message("k") for _ in range(3)])
        shard = shard_of("a.k", SHARDS, (2,))
        room = 2 if shard == 0 else 1
        assert [one.code for one in ack.results] == [0] * room + [errors.STORE_FAILED.code] * (
            3 - room
        )

    play(tmp_path, scene, config)


@pytest.mark.long
def test_crash_at_any_entry_leaves_the_stream_whole_before_or_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = msgspec.structs.replace(CONFIG, subjects=("a.>", "b.>"), max_msgs=20, description="d")
    images: list[tuple[Path, str]] = []

    def crash(data_dir: Path, during: str) -> None:
        # What a killed process leaves: no more of the store than was flushed, all of the log.
        image = tmp_path / f"image-{len(images)}"
        copy_at_one_moment(data_dir, image)
        images.append((image, during))

    async def life() -> None:
        data_dir = tmp_path / "data"
        async with running(data_dir) as node:
            link = LocalLink(node)
            propose = Proposer.command

            def command(log: Proposer, shard: int, one: cmd.Command) -> "asyncio.Future[Result]":
                future = propose(log, shard, one)
                asked = during
                # The housekeeper's command may end amid the next call: it is of neither.
                future.add_done_callback(lambda _: asked == during and crash(data_dir, asked))
                return future

            monkeypatch.setattr(Proposer, "command", command)
            during = "create"
            await link.put_stream(CONFIG, "create", None, False)
            await fill(link, 40)
            during = "update"
            await link.put_stream(changed, "put", None, False)
            during = "delete"
            await link.delete_stream("S")
            monkeypatch.undo()

    async def look(image: Path, during: str) -> str:
        async with asyncio.timeout(PATIENCE_S), running(image) as node:
            link = LocalLink(node)
            if not node.streams.listed():
                assert node.meta.streams == {}
                assert node.applier.shards == {}
                assert await rows_of_shards(node) == []
                assert during != "update"
                await link.put_stream(CONFIG, "create", None, False)
                await fill(link, 3)
                return "none"
            config, version, _ = shards_of(node)[0]
            assert config in (CONFIG, changed)
            assert shards_of(node) == [(config, version, shard) for shard in range(SHARDS)]
            assert set(node.meta.streams["S"].subjects) == set(config.subjects)
            assert {number for number in node.applier.shards if number != META_SHARD} == set(
                node.meta.streams["S"].shard_ids
            )
            if during != "create":
                messages = await read_all(link)
                # Lowered limits hold once all is done; a crash just before leaves them to appends.
                assert len(messages) == 40 or config == changed
            await fill(link, 3)
            return "before" if config == CONFIG else "after"

    asyncio.run(life())
    found = {during: set[str]() for during in ("create", "update", "delete")}
    for image, during in images:
        found[during].add(asyncio.run(look(image, during)))
    assert found["create"] == {"none", "before"}
    assert found["update"] == {"before", "after"}
    assert found["delete"] == {"none"}
