"""Range reads with a filter: what they find, what they count, and how little they look at."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_common.columns.blocks import Block
from contrail_link.contract.read import RangeRequest, RangeResult
from contrail_storage.core import commands as cmd
from contrail_storage.core.subjects import filters
from contrail_storage.core.subjects.filters import SubjectFilter
from contrail_storage.reading import reader as reading
from contrail_storage.reading.reader import Reader
from contrail_storage.replica.shard import Shard
from contrail_storage.store.block_store import BlockStore
from tests.unit.storage.dispatcher_rig import DispatcherRig, run
from tests.unit.storage.naive_subjects import naive_matches

SUBJECTS = ["a.1", "a.2", "a.3", "b"]
FILTERS = ["a.1", "a.*", "b", ">", "c"]


class CountingReader(Reader):
    """A reader that counts the blocks it was asked for."""

    def __init__(self, blocks: BlockStore) -> None:
        super().__init__(blocks)
        self.looked = 0

    async def block_at(self, shard: Shard, seq: int) -> Block | None:
        self.looked += 1
        return await super().block_at(shard, seq)


@contextmanager
def tallied(near: int) -> Iterator[None]:
    """Count ranges of more than ``near`` sequences by the table, two slots in a step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "_NEAR", near)
        patch.setattr(reading, "_TALLIED", 1)
        patch.setattr(filters, "WINDOW", 2)
        yield


@pytest.mark.parametrize("near", [0, 4_096], ids=["by table", "by windows"])
@given(
    st.lists(st.lists(st.sampled_from(SUBJECTS), min_size=1, max_size=5), max_size=8),
    st.lists(st.integers(1, 30), max_size=6),
    st.integers(0, 8),
    st.sampled_from(FILTERS),
    st.integers(0, 30),
    st.integers(1, 4),
    st.booleans(),
)
def test_range_holds_and_counts_what_the_naive_model_has(
    near: int,
    batches: list[list[str]],
    deleted: list[int],
    trimmed: int,
    pattern: str,
    from_seq: int,
    limit: int,
    room: bool,
) -> None:
    async def scene() -> None:
        rig = DispatcherRig()
        subjects = dict(enumerate((name for batch in batches for name in batch), 1))
        for batch in batches:
            rig.publish(*batch)
        machine = rig.machine
        for seq in deleted:
            if machine.is_live(seq):
                rig.apply(cmd.DeleteMessage(seq))
        rig.apply(cmd.Trim(trimmed, 100))
        if room:
            rig.reclaim()
        matching = [
            seq
            for seq, name in subjects.items()
            if seq >= from_seq and machine.is_live(seq) and naive_matches(pattern, name)
        ]
        request = RangeRequest(stream="S", from_seq=from_seq, subject=pattern, limit=limit)
        found = await rig.reader.read_range(rig.shard, request)
        assert [message.seq for message in found.messages] == matching[:limit]
        assert found.num_pending == len(matching[limit:])
        assert all(seq >= found.next_seq for seq in matching[limit:])
        if len(matching) >= limit:
            assert found.next_seq == matching[limit - 1] + 1

    with tallied(near):
        run(scene())


def test_count_is_right_when_slots_move_meanwhile() -> None:
    async def scene() -> None:
        rig = DispatcherRig()
        names = [f"a.{number}" for number in range(20)]
        rig.publish(*names, *names)
        count = rig.reader.count(rig.shard, 15, 40, SubjectFilter(("a.*",)))
        counting = asyncio.ensure_future(count)
        for _ in range(5):
            await asyncio.sleep(0)
        assert not counting.done()
        rig.apply(cmd.Trim(11, 100))
        rig.machine.subjects._lay_out()
        assert await counting == 26

    with tallied(0):
        run(scene())


def scene_of(work: Callable[[DispatcherRig, CountingReader], Coroutine[None, None, None]]) -> None:
    """Run ``work`` on 50 blocks of ``a.1``, with ``b`` in the tenth and ``a.2`` in the last."""

    async def whole() -> None:
        rig = DispatcherRig()
        for number in range(1, 51):
            rare = {10: "b", 50: "a.2"}.get(number, "a.1")
            rig.publish("a.1", rare, "a.1")
        await work(rig, CountingReader(rig.blocks))

    run(whole())


async def read(rig: DispatcherRig, reader: Reader, subject: str, from_seq: int = 0) -> RangeResult:
    request = RangeRequest(stream="S", subject=subject, from_seq=from_seq, limit=1)
    return await reader.read_range(rig.shard, request)


def test_next_of_a_rare_subject_takes_one_block_wherever_it_is() -> None:
    async def work(rig: DispatcherRig, reader: CountingReader) -> None:
        for subject, from_seq, seq in (("b", 0, 29), ("b", 20, 29), ("a.2", 3, 149)):
            reader.looked = 0
            found = await read(rig, reader, subject, from_seq)
            assert [message.seq for message in found.messages] == [seq]
            assert (found.num_pending, reader.looked) == (0, 1)

    scene_of(work)


def test_nothing_is_looked_at_where_nothing_can_match() -> None:
    async def work(rig: DispatcherRig, reader: CountingReader) -> None:
        for subject, from_seq in (("b", 30), ("none", 0), ("none.*", 7)):
            found = await read(rig, reader, subject, from_seq)
            assert (found.messages, found.next_seq, found.num_pending) == ([], 151, 0)
        assert reader.looked == 0

    scene_of(work)


def test_what_remains_is_counted_on_the_shorter_side() -> None:
    async def work(rig: DispatcherRig, reader: CountingReader) -> None:
        for from_seq, pending in ((1, 147), (7, 141), (145, 4)):
            reader.looked = 0
            found = await read(rig, reader, "a.1", from_seq)
            assert found.num_pending == pending
            assert reader.looked <= 5

    scene_of(work)
