"""A node in this process, archives of its streams, and what a crash leaves of restoring one."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest

from contrail_serve.groups import SingleMemberGroups
from contrail_storage.core import key_layout as keys
from contrail_storage.link import LocalLink
from contrail_storage.node import NodeOptions, StorageNode
from contrail_storage.streams import restore
from tests.support.folders import copy_at_one_moment

PATIENCE_S = 60.0
PIECE = 2_500


@contextlib.asynccontextmanager
async def running(data_dir: Path, *node_keys: bytes) -> AsyncIterator[StorageNode]:
    """A node over `data_dir`, which is opened with `node_keys`."""
    options = NodeOptions(data_dir, node_keys=node_keys, merge_blocks=4)
    node = StorageNode.open(options, SingleMemberGroups())
    await node.start()
    try:
        yield node
    finally:
        await node.stop()


async def archive_of(link: LocalLink, name: str = "S") -> bytes:
    """The stream as an archive, with its consumers."""
    return b"".join([chunk async for chunk in await link.snapshot(name, True)])


async def send(link: LocalLink, token: str, data: bytes, start: int = 0) -> None:
    """Append an archive to a restore, piece by piece."""
    for at in range(start, len(data), PIECE):
        await link.append_restore(token, at, data[at : at + PIECE])


async def restored(link: LocalLink, data: bytes, name: str = "S") -> None:
    """Make a stream of an archive."""
    token = await link.begin_restore(name)
    await send(link, token, data)
    await link.commit_restore(token)


async def rows_of_shards(node: StorageNode) -> list[bytes]:
    """Keys of all rows that belong to some stream's shard, once what is applied is written."""
    await node.until_written()
    found: list[bytes] = []
    for kind in keys.SHARD_KINDS:
        found += node._disk.scan_keys(keys.shard_key(kind, 1), keys.prefix_end(kind))
    return found


class RestoreCrashes:
    """Copies of data directories, each of them what a crash amid a restore of ``S`` leaves."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *node_keys: bytes) -> None:
        monkeypatch.setattr(restore, "_PART_BYTES", 4_000)
        self._tmp_path = tmp_path
        self._monkeypatch = monkeypatch
        self._node_keys = node_keys
        self.images: list[tuple[Path, bool]] = []
        """Each with whether the whole stream has to be there."""

    def provoke(self, data: bytes, flushed_at: Iterable[int]) -> None:
        """Restore ``data`` once for each piece behind which the store is flushed (-1: none)."""
        assert len(data) > 8 * PIECE
        for number in flushed_at:
            asyncio.run(self._restore(data, number))
        assert {whole for _, whole in self.images} == {True, False}

    async def _restore(self, data: bytes, flushed_at: int) -> None:
        data_dir = self._tmp_path / f"target-{flushed_at}"
        async with running(data_dir, *self._node_keys) as node:
            link, listing = LocalLink(node), node.streams._list

            async def seen(*arguments: Any) -> None:
                self._crash(data_dir, whole=True)
                await listing(*arguments)

            self._monkeypatch.setattr(node.streams, "_list", seen)
            token = await link.begin_restore("S")
            for number, at in enumerate(range(0, len(data), PIECE)):
                await link.append_restore(token, at, data[at : at + PIECE])
                if number == flushed_at:
                    await node.checkpoint()
                if number % 3 == 0:
                    self._crash(data_dir, whole=False)
            await link.commit_restore(token)
            self._crash(data_dir, whole=True)

    def _crash(self, data_dir: Path, *, whole: bool) -> None:
        # What a killed process leaves: no more of the store than was flushed, all of the log.
        image = self._tmp_path / f"image-{len(self.images)}"
        copy_at_one_moment(data_dir, image)
        self.images.append((image, whole))
