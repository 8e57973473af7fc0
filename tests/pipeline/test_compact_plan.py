"""Which files a compaction merges: every file at most once, in order, and never a second time."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import count, groupby, pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_pipeline.compact.plan import Group, plan, rounds, unmeasured
from contrail_spark.errors import LakeError
from contrail_spark.lake.layout import DataFile, Partition
from contrail_spark.lake.manifest import FileEntry, partition_of
from tests.spark.lakes import DAY, entry

FILE_BYTES = 100
Sizes = dict[str, int]


def made(place: Partition, shard: int, bounds: tuple[int, int], commit: int = 1) -> FileEntry:
    path = DataFile(place, "S", shard, *bounds, commit).path
    return msgspec.structs.replace(entry(commit, *bounds, shard=shard), path=path)


def made_series(*sizes: int) -> tuple[list[FileEntry], Sizes]:
    """Files that follow each other in one folder, with these sizes before compression."""
    files = [made(Partition(DAY), 0, (at, at)) for at in range(1, len(sizes) + 1)]
    return files, {each.path: size for each, size in zip(files, sizes, strict=True)}


def after(
    files: Sequence[FileEntry], sizes: Mapping[str, int], groups: Sequence[Group]
) -> tuple[list[FileEntry], Sizes]:
    """The lake after the groups were merged: its files, and the sizes of all of them."""
    known = {each.path: each for each in files}
    found = {each.path: sizes[each.path] for each in files}
    for group in groups:
        first, last = group.files[0], group.files[-1]
        new = made(partition_of(first), first.shard, (first.from_seq, last.to_seq), 2)
        compressed = sum(each.bytes for each in group.files)
        known[new.path] = msgspec.structs.replace(new, bytes=compressed)
        found[new.path] = sum(found.pop(each.path) for each in group.files)
    return [known[path] for path in found], found


@st.composite
def lakes(draw: st.DrawFn) -> tuple[list[FileEntry], Sizes]:
    """Files of several shards, days and tokens, in an order that says nothing."""
    files, sizes = [], {}
    for shard in range(draw(st.integers(1, 2))):
        numbers = count(1)
        for _ in range(draw(st.integers(0, 25))):
            first = last = next(numbers)
            for _ in range(draw(st.integers(0, 3))):
                last = next(numbers)
            day = DAY + timedelta(days=draw(st.integers(0, 1)))
            new = made(Partition(day, draw(st.sampled_from("ab"))), shard, (first, last))
            size = draw(st.one_of(st.integers(1, 12), st.integers(40, 60), st.integers(1, 150)))
            # A footer may be larger than what compression saves.
            compressed = draw(st.integers(1, size + 20))
            files.append(msgspec.structs.replace(new, bytes=compressed))
            sizes[new.path] = size
    return draw(st.permutations(files)), sizes


@given(lakes())
def test_any_files_are_merged_once_in_order_and_for_good(
    made_lake: tuple[list[FileEntry], Sizes],
) -> None:
    files, sizes = made_lake
    candidates = {each.path for each in unmeasured(files, FILE_BYTES)}
    measured = {path: sizes[path] for path in candidates}
    groups = plan(files, measured, FILE_BYTES)
    taken = [each.path for group in groups for each in group.files]
    assert len(taken) == len(set(taken))
    assert set(taken) <= candidates
    for group in groups:
        places = {(each.shard, partition_of(each)) for each in group.files}
        [(shard, place)] = places
        first, last = group.files[0].from_seq, group.files[-1].to_seq
        between = [
            each
            for each in files
            if (each.shard, partition_of(each)) == (shard, place) and first <= each.from_seq <= last
        ]
        assert list(group.files) == sorted(between, key=lambda each: each.from_seq)
        assert len(group.files) > 1
        assert group.bytes == sum(sizes[each.path] for each in group.files) <= FILE_BYTES
        assert all(2 * sizes[each.path] < FILE_BYTES for each in group.files)
    assert plan(*after(files, sizes, groups), FILE_BYTES) == []


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([1], []),
        ([49, 49], [(1, 2)]),
        ([50, 49], []),
        ([49, 50, 49], []),
        ([40, 40, 20], [(1, 3)]),
        ([40, 40, 21], [(1, 2)]),
        ([40, 40, 21, 1], [(1, 2), (3, 4)]),
        ([1, 1, 60, 1, 1], [(1, 2), (4, 5)]),
        ([1] * 101, [(1, 100)]),
    ],
)
def test_where_groups_end(sizes: list[int], expected: list[tuple[int, int]]) -> None:
    groups = plan(*made_series(*sizes), FILE_BYTES)
    assert [(each.files[0].from_seq, each.files[-1].to_seq) for each in groups] == expected


def test_files_that_may_be_small_are_measured() -> None:
    files, _ = made_series(1, 1, 1, 1, 1)
    files = [
        msgspec.structs.replace(each, bytes=compressed)
        for each, compressed in zip(files, (49, 49, 50, 49, 50), strict=True)
    ]
    assert unmeasured(files, FILE_BYTES) == files[:2]


def test_files_that_overlap_are_refused() -> None:
    place = Partition(DAY)
    files = [made(place, 0, (1, 10)), made(place, 0, (10, 20)), made(place, 1, (5, 15))]
    with pytest.raises(LakeError, match=rf"^{files[0].path} and {files[1].path} overlap: "):
        unmeasured(files, FILE_BYTES)
    other = made(Partition(DAY, "a"), 0, (10, 20))
    assert unmeasured([files[0], other, files[2]], FILE_BYTES) == []


def test_rounds_have_a_size_and_a_number_of_groups() -> None:
    groups = [Group((), size) for size in (5, 5, 1, 12, 1, 1, 1, 1)]
    assert [[each.bytes for each in own] for own in rounds(groups, 10, 3)] == [
        [5, 5],
        [1],
        [12],
        [1, 1, 1],
        [1],
    ]
    assert list(rounds([], 10, 3)) == []


def test_a_series_is_one_shard_and_folder() -> None:
    """In the order of sequences these alternate, and all of them are small."""
    tokens = [Partition(DAY, each) for each in "ab"]
    files = [made(tokens[at % 2], at // 2 % 2, (at, at)) for at in range(1, 17)]
    sizes = {each.path: 1 for each in files}
    groups = plan(files, sizes, FILE_BYTES)
    assert sum(len(each.files) for each in groups) == 16
    for group in groups:
        assert len(list(groupby(group.files, lambda each: (each.shard, partition_of(each))))) == 1
        assert all(one.to_seq < other.from_seq for one, other in pairwise(group.files))
