"""A node of a cluster with a damaged folder starts by itself: others have what it lost."""

import asyncio
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest

from contrail_common.model import StreamConfig
from contrail_link.publishing import publish
from contrail_storage.core.key_layout import META_GROUP
from contrail_storage.core.meta_machine import StreamEntry
from contrail_storage.link import LocalLink
from contrail_storage.node import StorageNode
from contrail_storage.store.store_errors import StoreError
from contrail_storage.upkeep.checkpointer import DataLostError
from contrail_storage.wal import LogOptions
from contrail_storage.wal.log_state import RESTORING
from tests.crash import damage
from tests.support.folders import contents
from tests.unit.storage.cluster_rig import NAMES, TIMINGS, Nodes, running, until
from tests.unit.storage.test_catching_up import create, fill, forget_log, lead, until_equal
from tests.unit.storage.test_cluster import messages
from tests.unit.storage.test_wiped_node import flags

LOG: Final = LogOptions(segment_bytes=16 << 10, keep_bytes=0, tail_bytes=32 << 10)
SEED: Final = 5
PAYLOAD: Final = 2_000
KEYS: Final = (bytes(range(32)),)
Spoil = Callable[[Path], object]


def bit(pattern: str, start: int = 0, stop: int | None = None) -> Spoil:
    def spoil(folder: Path) -> object:
        chance = random.Random(SEED)
        return damage.flip_bit(damage.some_file(folder, pattern, chance), chance, start, stop)

    return spoil


def cut(pattern: str) -> Spoil:
    def spoil(folder: Path) -> object:
        chance = random.Random(SEED)
        return damage.cut_end(damage.some_file(folder, pattern, chance), chance)

    return spoil


def no(pattern: str) -> Spoil:
    return lambda folder: [damage.remove(path) for path in folder.glob(pattern)]


def rot_in_the_log(folder: Path) -> None:
    """A batch that others follow."""
    segment = damage.newest_file(folder, "wal/*.wal")
    damage.flip_bit(segment, random.Random(SEED), 0, damage.written_end(segment) // 2)


def no_folder(name: str) -> Spoil:
    return lambda folder: shutil.rmtree(folder / name)


def both(one: Spoil, other: Spoil) -> Spoil:
    return lambda folder: (one(folder), other(folder))


def small_files(folder: Path) -> None:
    """One of two copies of each, and the newest record of a checkpoint."""
    chance = random.Random(SEED)
    for path in (folder / "identity", damage.newest_file(folder, "checkpoints/*")):
        damage.flip_bit(path, chance)
    damage.remove(folder / "keys")


DAMAGE: Final[dict[str, tuple[Spoil, str]]] = {
    "rot in the log": (rot_in_the_log, "log"),
    "name of the newest segment": (bit("wal/newest"), "log"),
    "no log": (no_folder("wal"), "log"),
    "manifest missing": (no("store/MANIFEST-*"), "store"),
    "table cut": (cut("store/*.sst"), "store"),
    "blob files missing": (no("store/*.blob"), "store"),
    "no store": (no_folder("store"), "store"),
    "store and log": (both(no("store/CURRENT"), rot_in_the_log), "store log"),
    "small files": (small_files, ""),
}


async def create_unreplicated(nodes: Nodes, name: str) -> StreamEntry:
    """Create a stream with one replica that all nodes know; return its entry."""
    config = StreamConfig(name=name, subjects=(f"{name}.*",))
    await nodes.call("a", lambda link: link.put_stream(config, "put", None, False))
    await nodes.until_listed(name)
    return nodes["a"].meta.streams[name]


async def until_whole(nodes: Nodes, group: int) -> None:
    await until_equal(nodes, META_GROUP)
    await until_equal(nodes, group)
    await until(lambda: all(not one.readiness() for one in nodes.all()))


async def check_all(link: LocalLink, count: int) -> None:
    assert (await link.stream_info("S")).state.messages == count
    for seq in range(1, count + 1, 7):
        n = seq - 1
        payload = (await link.get_message("S", seq)).payload
        assert bytes(payload) == b"%d" % n * (PAYLOAD // 4)


async def _crash(node: StorageNode) -> None:
    """End without a flush: what the store has not flushed is only in the log."""


def test_damaged_part_is_set_aside_and_filled_by_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StorageNode, "_flush_last", _crash)

    async def scene() -> None:
        async with running(tmp_path, log=LOG, node_keys=KEYS) as nodes:
            group = await create(nodes, "S")
            count = 0
            for number, (kind, (spoil, parts)) in enumerate(DAMAGE.items()):
                name = NAMES[number % 3]
                await fill(nodes, "S", count, 40, PAYLOAD)
                await until_equal(nodes, group)
                await nodes[name].checkpoint()
                await fill(nodes, "S", count + 40, 10, PAYLOAD)
                count += 50
                await until_whole(nodes, group)
                await nodes.stop(name)
                spoil(tmp_path / name)
                await nodes.until_led(META_GROUP, group)
                await fill(nodes, "S", count, 10, PAYLOAD)
                count += 10
                await nodes.start(name)
                told = nodes[name].catching_up.mended
                assert [one for one in ("store", "log") if f"the {one} was damaged" in told] == (
                    parts.split()
                ), kind
                assert nodes[name].identity.incarnation == 1
                await until_whole(nodes, group)
                await check_all(await lead(nodes, group, name), count)

    asyncio.run(scene())


def test_damage_that_spares_the_unreplicated_shards_loses_nothing_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StorageNode, "_flush_last", _crash)

    async def scene() -> None:
        async with running(tmp_path, log=LOG) as nodes:
            group = await create(nodes, "S")
            entry = await create_unreplicated(nodes, "R")
            name = NAMES[entry.groups[0] - 1]
            await nodes.call(name, lambda link: publish(link, "R", messages("R", 0, 20)))
            await until(lambda: nodes[name].identity.has_unreplicated)
            await nodes[name].checkpoint()
            # Several segments without an entry of the unreplicated stream; the first of them rots.
            # A member that fell behind would write all the batches together, into one segment.
            for first in range(0, 60, 10):
                await fill(nodes, "S", first, 10, PAYLOAD)
                await until_whole(nodes, group)
            await nodes.stop(name)
            segments = sorted((tmp_path / name / "wal").glob("*.wal"))
            assert len(segments) > 3
            damage.flip_bit(segments[-2], random.Random(SEED), segments[-2].stat().st_size // 2)
            await nodes.start(name)
            assert "the log was damaged" in nodes[name].catching_up.mended
            await until_whole(nodes, group)
            info = await nodes.call(name, lambda link: link.stream_info("R"))
            assert info.state.messages == 20
            # Their store is another matter: nobody else has what it had.
            await nodes.stop(name)
            (tmp_path / name / "store" / "CURRENT").unlink()
            before = contents(tmp_path / name)
            with pytest.raises(DataLostError):
                await nodes.start(name)
            assert contents(tmp_path / name) == before

    asyncio.run(scene())


def test_one_whole_member_fills_two_others_and_is_needed_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StorageNode, "_flush_last", _crash)

    async def scene() -> None:
        async with running(tmp_path, log=LOG) as nodes:
            group = await create(nodes, "S")
            for first in range(0, 60, 10):
                await fill(nodes, "S", first, 10, PAYLOAD)
            await until_whole(nodes, group)
            # Otherwise, they would apply their logs from the beginning.
            await forget_log(nodes)
            await nodes.stop(*NAMES)
            for name in ("b", "c"):
                (tmp_path / name / "store" / "CURRENT").unlink()
            await nodes.start("b", "c")
            # They can vote, and neither of them serves.
            await until(lambda: any(one.groups[META_GROUP].leader for one in nodes.all()))
            assert not any(one.groups.leads(META_GROUP) for one in nodes.all())
            assert all("the store was damaged" in one.readiness()["folder"] for one in nodes.all())
            await nodes.start("a")
            await until_whole(nodes, group)
            for name in NAMES:
                await check_all(await lead(nodes, group, name), 60)
            # Without their logs, they do not even vote: the whole one waits, and so does its data.
            await nodes.stop(*NAMES)
            for name in ("b", "c"):
                shutil.rmtree(tmp_path / name / "wal")
            await nodes.start(*NAMES)
            last = asyncio.get_running_loop().time() + TIMINGS.election_max_s
            await until(lambda: asyncio.get_running_loop().time() > last)
            for name in ("b", "c"):
                assert flags(nodes, name) == {RESTORING}
            assert not any(one.leader for one in nodes["a"].groups.values() if not one.is_alone)
            assert [shard.applied_seq for shard in nodes["a"].applier.shards.values()] == [60]

    asyncio.run(scene())


def test_store_that_fails_for_damage_is_set_aside_at_the_next_start(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path, log=LOG) as nodes:
            group = await create(nodes, "S")
            await fill(nodes, "S", 0, 60, PAYLOAD)
            await until_whole(nodes, group)
            node, store = nodes["c"], tmp_path / "c/store"
            await node.checkpoint()
            sound = {path: path.read_bytes() for path in store.glob("*.sst")}
            for path in sound:
                damage.flip_bit(path, random.Random(SEED), 0, 40)
            everything = (b"", b"\xff" * 32)
            with suppress(StoreError):
                await asyncio.to_thread(node.raw_store.rewrite, [everything], 1.0)
            # From now on the store takes no writes.
            await fill(nodes, "S", 60, 20, PAYLOAD)
            assert "Corruption" in await node.fatal
            await nodes.stop("c")
            # Most damage is where a start reads nothing.
            for path in store.glob("*.sst"):
                path.write_bytes(sound.get(path, path.read_bytes()))
            await nodes.start("c")
            assert "Corruption" in nodes["c"].catching_up.mended
            assert (tmp_path / "c/damaged/1/store/unusable").exists()
            await until_whole(nodes, group)
            await check_all(await lead(nodes, group, "c"), 80)
            await nodes.stop("c")
            await nodes.start("c")
            assert nodes["c"].catching_up.mended == ""

    asyncio.run(scene())
