"""Replays on a whole node while what they read changes, goes, or is found damaged."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from contrail_common import errors
from contrail_common.columns.blocks import BlockView
from contrail_common.errors import ApiError
from contrail_common.model import PublishMessage, StreamConfig
from contrail_link import publishing
from contrail_link.contract.read import ReplayPlanRequest, ReplayRequest, pieces_of
from contrail_serve.groups import SingleMemberGroups
from contrail_storage.core import key_layout as keys
from contrail_storage.link import LocalLink
from contrail_storage.node import NodeOptions, StorageNode
from contrail_storage.reading import replay

PATIENCE_S = 60.0
END = b"\xff\xff\xff\xff\0\0\0\0"
BLOCK = 100
BLOCKS = 12
LAST = BLOCK * BLOCKS
Scene = Callable[[StorageNode, LocalLink], Coroutine[Any, Any, None]]


def play(data_dir: Path, scene: Scene, **fields: Any) -> None:
    """Run ``scene`` on a node with a stream ``S`` of some blocks, on the subjects ``k.0`` to 3."""

    async def whole() -> None:
        node = StorageNode.open(NodeOptions(data_dir), SingleMemberGroups())
        await node.start()
        link = LocalLink(node)
        try:
            async with asyncio.timeout(PATIENCE_S):
                config = StreamConfig(name="S", subjects=("k.>",), **fields)
                await link.put_stream(config, "create", None, False)
                for start in range(1, LAST, BLOCK):
                    await publish(link, start)
                    await node.until_written()  # each a block of its own
                await scene(node, link)
        finally:
            await node.stop()

    asyncio.run(whole())


async def publish(link: LocalLink, start: int) -> None:
    messages = [
        PublishMessage(f"k.{seq % 4}", None, payload_of(seq)) for seq in range(start, start + BLOCK)
    ]
    assert not any(one.code for one in (await publishing.publish(link, "S", messages)).results)


def payload_of(seq: int) -> bytes:
    return b"%08d" % seq * 80


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block or two are a unit, so that there are many."""
    for name in ("_ALL", "_SOME", "_SPARK"):
        monkeypatch.setattr(replay, name, replay._Bounds(2 * BLOCK, 1 << 20))


async def rows_of(chunks: AsyncIterator[Any], form: str = "arrow") -> list[tuple[int, bytes]]:
    """(sequence, payload) of all messages of a body that came to its end."""
    body = b"".join([bytes(piece) async for chunk in chunks for piece in pieces_of(chunk)])
    if form == "arrow":
        assert body.endswith(END)
        table = pa.ipc.open_stream(body).read_all()
        table.validate(full=True)
        return list(
            zip(table.column("seq").to_pylist(), table.column("data").to_pylist(), strict=True)
        )
    *lines, end = [msgspec.json.decode(line) for line in body.splitlines()]
    assert end == {"end": True, "messages": len(lines)}
    return [(line["seq"], line["data"].encode()) for line in lines]


def expected(seqs: Any) -> list[tuple[int, bytes]]:
    return [(seq, payload_of(seq)) for seq in seqs]


class Gate:
    """Holds back the reads of a replay, from the ``number``-th on, until it is opened."""

    def __init__(self, node: StorageNode, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        self.reads = 0
        self._open = threading.Event()
        self._reached = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._number = number
        self._view = node.blocks.view_many
        monkeypatch.setattr(node.blocks, "view_many", self._held)

    def _held(self, shard: int, bases: list[int]) -> list[BlockView]:
        self.reads += 1
        if self.reads >= self._number:
            self._loop.call_soon_threadsafe(self._reached.set)
            assert self._open.wait(PATIENCE_S)
        return self._view(shard, bases)

    async def reached(self) -> None:
        await self._reached.wait()

    def open(self) -> None:
        self._open.set()


def test_splits_are_of_about_equal_size_whatever_their_number_of_messages(tmp_path: Path) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        for _ in range(4):
            await publishing.publish(link, "S", [PublishMessage("k.0", None, bytes(1_000_000))])
            await node.until_written()
        first, second = (await link.replay_plan(ReplayPlanRequest(stream="S", splits=2))).splits
        assert (first.from_seq, first.to_seq) == (1, LAST + 2)
        assert (second.from_seq, second.to_seq) == (LAST + 3, LAST + 4)
        asked = ReplayPlanRequest(stream="S", split_bytes=first.bytes + second.bytes - 1)
        assert (await link.replay_plan(asked)).splits == [first, second]
        asked = ReplayPlanRequest(stream="S", split_bytes=first.bytes + second.bytes)
        assert len((await link.replay_plan(asked)).splits) == 1

    play(tmp_path, scene)


@pytest.mark.parametrize("form", ["arrow", "ndjson"])
@pytest.mark.parametrize("subject", ["", "k.*", "k.2"])
def test_many_units_are_the_range_in_order(tmp_path: Path, form: Any, subject: str) -> None:
    async def scene(_: StorageNode, link: LocalLink) -> None:
        for low, high in ((1, LAST), (BLOCK, BLOCK + 1), (7, LAST - 150), (LAST, LAST)):
            asked = ReplayRequest(
                stream="S", format=form, from_seq=low, to_seq=high, subject=subject
            )
            found = await rows_of(await link.replay(asked), form)
            wanted = [seq for seq in range(low, high + 1) if subject != "k.2" or seq % 4 == 2]
            assert found == expected(wanted)

    play(tmp_path, scene)


@pytest.mark.parametrize("form", ["arrow", "ndjson"])
def test_messages_deleted_while_they_are_read_are_whole_or_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Any
) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        gate = Gate(node, monkeypatch, 2)
        reading = asyncio.create_task(
            rows_of(await link.replay(ReplayRequest(stream="S", format=form)), form)
        )
        await gate.reached()
        gone = [*range(210, 290), 333, *range(500, 601)]
        for seq in gone:
            await link.delete_message("S", seq)
        # Their content leaves the blocks, before those are read.
        await node.until_written()
        assert await node.compactor.empty(node.streams.shard("S"))
        gate.open()
        assert await reading == expected(seq for seq in range(1, LAST + 1) if seq not in gone)

    play(tmp_path, scene)


def test_deletions_elsewhere_do_not_make_a_replay_read_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        gate = Gate(node, monkeypatch, 2)
        asked = ReplayRequest(stream="S", from_seq=401, to_seq=LAST)
        reading = asyncio.create_task(rows_of(await link.replay(asked)))
        await gate.reached()
        await link.delete_message("S", 300)
        await link.purge_stream("S", "", 200, 0)
        gate.open()
        assert await reading == expected(range(401, LAST + 1))
        assert gate.reads == 4

    play(tmp_path, scene)


@pytest.mark.parametrize("clamp", [False, True])
def test_replay_that_retention_overtakes_is_cut_or_continues_after_the_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clamp: bool
) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        gate = Gate(node, monkeypatch, 2)
        asked = ReplayRequest(stream="S", from_seq=1, clamp=clamp)
        reading = asyncio.create_task(rows_of(await link.replay(asked)))
        await gate.reached()
        await link.purge_stream("S", "", 651, 0)
        await node.until_written()
        gate.open()
        if clamp:
            found = await reading
            assert found[-550:] == expected(range(651, LAST + 1))
            assert [seq for seq, _ in found[:-550]] in ([], list(range(1, 201)))
        else:
            with pytest.raises(ApiError) as cut:
                await reading
            assert cut.value.spec is errors.REPLAY_GONE

    play(tmp_path, scene)


@pytest.mark.parametrize("subject", ["", "k.3"])
def test_deleted_stream_ends_its_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subject: str
) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        gate = Gate(node, monkeypatch, 2)
        asked = ReplayRequest(stream="S", subject=subject)
        reading = asyncio.create_task(rows_of(await link.replay(asked)))
        await gate.reached()
        await link.delete_stream("S")
        await node.until_written()
        gate.open()
        with pytest.raises(ApiError) as ended:
            await reading
        assert ended.value.spec is errors.STREAM_NOT_FOUND

    play(tmp_path, scene)


@pytest.mark.parametrize("base_seq", [1, 201, 401, 601, 801])
def test_damage_in_a_unit_is_reported_with_the_block_that_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base_seq: int
) -> None:
    monkeypatch.setattr(replay, "_ALL", replay._Bounds(100 * BLOCK, 1 << 20))

    async def scene(node: StorageNode, link: LocalLink) -> None:
        shard = node.streams.shard("S")
        key = keys.large_key(keys.BLOCK, shard.machine.shard_id, base_seq)
        value = node._store.get(key)
        assert value is not None
        node._store.write([("put", key, value[:-5] + b"?" + value[-4:])])
        with pytest.raises(ApiError) as damaged:
            await rows_of(await link.replay(ReplayRequest(stream="S")))
        assert damaged.value.spec is errors.DATA_LOST
        assert shard.damaged.startswith(f"block {base_seq}: ")

    play(tmp_path, scene)


@pytest.mark.parametrize("subject", ["", "k.3"])
def test_damage_is_reported_where_it_lies_and_not_before(tmp_path: Path, subject: str) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        shard = node.streams.shard("S")
        key = keys.large_key(keys.BLOCK, shard.machine.shard_id, 601)
        value = node._store.get(key)
        assert value is not None
        node._store.write([("put", key, value[:-5] + b"?" + value[-4:])])
        chunks = await link.replay(ReplayRequest(stream="S", subject=subject))
        got: list[bytes] = []

        async def read() -> None:
            async for chunk in chunks:
                got.extend(bytes(piece) for piece in pieces_of(chunk))

        with pytest.raises(ApiError) as damaged:
            await read()
        assert damaged.value.spec is errors.DATA_LOST
        assert "601" in shard.damaged
        table = pa.ipc.open_stream(b"".join([*got, END])).read_all()
        wanted = [seq for seq in range(1, 601) if not subject or seq % 4 == 3]
        assert table.column("seq").to_pylist() == wanted

    play(tmp_path, scene)


def test_reader_that_stands_still_has_but_a_few_units_read_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        gate = Gate(node, monkeypatch, LAST)
        chunks = await link.replay(ReplayRequest(stream="S"))
        assert await anext(chunks)  # the schema
        assert gate.reads == 0
        assert await anext(chunks)
        assert gate.reads <= 1 + replay._AHEAD
        await chunks.aclose()  # type: ignore[attr-defined]
        assert gate.reads <= 1 + replay._AHEAD

    play(tmp_path, scene)


@pytest.mark.parametrize("wrong", ["none", "another", "rotten"])
def test_what_a_rotten_table_leads_to_is_read_again_with_all_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        await node.until_written()
        right = node.blocks.source.get_unverified
        asked: list[int] = []

        def get_unverified(keys: Sequence[bytes]) -> list[bytes | None]:
            asked.append(len(keys))
            found = right(keys)
            if wrong == "another":
                return found[::-1] if len(found) > 1 else [None]
            return [None if wrong == "none" or one is None else one[:-1] + b"?" for one in found]

        monkeypatch.setattr(node.blocks.source, "get_unverified", get_unverified)
        found = await rows_of(await link.replay(ReplayRequest(stream="S", format="arrow")), "arrow")
        assert found == expected(range(1, LAST + 1))
        assert asked

    play(tmp_path, scene)
