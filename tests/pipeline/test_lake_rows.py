"""Ranges of a lake: read in order, divided exactly, and never from damaged files."""

import os
import random
from collections.abc import Iterable
from pathlib import Path

import pytest

from contrail_common.subjects import matches_any
from contrail_spark.errors import LakeError
from contrail_spark.lake.manifest import Commit, Range
from contrail_spark.lake.reader import LakeReader
from contrail_spark.lake.selection import Selection
from contrail_spark.lake.splits import LakeSplit, cut, files_of, first_seq, missing, missing_wanted
from contrail_spark.lake.store import Lake
from tests.pipeline.lakes import archive, made_lake, made_row, partition_of_row, write

ALL = Selection()
DAY = 86_400


def seqs(lake: Lake, splits: Iterable[LakeSplit], wanted: Selection = ALL) -> list[list[int]]:
    reader = LakeReader(lake, wanted)
    return [
        [seq for batch in reader.read(split, ()) for seq in batch.column("seq").to_pylist()]
        for split in splits
    ]


def plan(
    lake: Lake, size: int, bounds: tuple[int, int] = (1, 10_000), wanted: Selection = ALL
) -> list[LakeSplit]:
    files = files_of(lake.state(), 0, bounds, wanted, lake.info.token)
    return cut({0: (bounds, files)}, size)


def rewrite(lake: Lake, path: str, keep: Iterable[int]) -> None:
    """Replace a file by one with only these of its messages."""
    state = lake.state()
    old = state.files[path]
    number = state.number + 1
    rows = [made_row(seq) for seq in keep]
    new = write(lake, number, partition_of_row(lake, rows[0]), rows)
    commit = Commit(number=number, job="test", time_us=1, added=(new,), removed=(old.path,))
    lake.commit(state, commit)
    (lake.root / old.path).unlink()


@pytest.mark.parametrize("seed", range(8))
def test_any_division_of_overlapping_files_has_every_row_once_in_order(
    tmp_path: Path, seed: int
) -> None:
    random_ = random.Random(seed)
    parts, seq = [], 0
    for _ in range(5):
        rows = []
        for _ in range(random_.randrange(1, 60)):
            seq += random_.randrange(1, 4)
            rows.append(made_row(seq, f"s.{random_.choice('abc')}.{random_.randrange(5)}"))
        parts.append(rows)
    lake = made_lake(tmp_path / "lake", *parts, token=2)
    rows = [row for part in parts for row in part]
    for _ in range(10):
        low, high = sorted(random_.randrange(1, seq + 20) for _ in range(2))
        wanted = Selection(tuple(random_.choices(["s.a.>", "s.*.3", "s.b.1", ">"], k=2)))
        expected = [
            row["seq"]
            for row in rows
            if low <= row["seq"] <= high and matches_any(wanted.subjects, row["subject"])
        ]
        splits = plan(lake, random_.randrange(500, 20_000), (low, high), wanted)
        found = seqs(lake, splits, wanted)
        assert [seq for part in found for seq in part] == expected


def test_files_in_a_long_chain_are_open_one_after_another(tmp_path: Path) -> None:
    """As after a compaction: the ranges of two tokens overlap without an end."""
    parts = [[made_row(3 * at + add, f"s.{at % 2}") for add in (1, 5)] for at in range(40)]
    rows = [row for part in parts for row in part]
    lake = made_lake(tmp_path / "lake", [made_row(200)], token=2)
    archived = lake.state()
    number = archived.number + 1
    added = tuple(write(lake, number, partition_of_row(lake, part[0]), part) for part in parts)
    lake.commit(archived, Commit(number=number, job="test", time_us=1, added=added))
    split = LakeReader(lake, ALL).range(lake.state(), 0, (1, 199))
    assert len(split.files) == len(parts)
    found, most = [], 0
    for batch in LakeReader(lake, ALL).read(split, ()):
        found += batch.column("seq").to_pylist()
        opened = (os.path.realpath(each.path) for each in os.scandir("/proc/self/fd"))
        most = max(most, sum(each.startswith(str(lake.root)) for each in opened))
    assert found == sorted(row["seq"] for row in rows)
    assert 1 <= most <= 3


def test_large_files_are_divided_and_small_ones_joined(tmp_path: Path) -> None:
    lake = made_lake(
        tmp_path / "lake",
        [made_row(seq) for seq in range(1, 1001)],
        *([made_row(seq)] for seq in range(1001, 1011)),
    )
    large = lake.state().live_files()[0]
    splits = plan(lake, large.bytes // 3)
    assert len(splits) > 3
    assert sum(len(each.files) > 1 for each in splits) >= 1
    assert len({path for each in splits for path in each.unverified}) == 11
    assert sum(len(each.unverified) for each in splits) == 11
    assert [seq for part in seqs(lake, splits) for seq in part] == list(range(1, 1011))


def test_headers_and_payloads_come_back_as_they_were(tmp_path: Path) -> None:
    rows = [made_row(seq) for seq in range(1, 20)]
    lake = made_lake(tmp_path / "lake", rows)
    [split] = plan(lake, 1 << 30)
    columns = ("data", "headers", "subject", "time", "shard")
    found = [
        row for batch in LakeReader(lake, ALL).read(split, columns) for row in batch.to_pylist()
    ]
    assert [{**row, "time": int(row["time"].timestamp()) * 1_000_000} for row in found] == rows


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    lake = made_lake(tmp_path / "lake", [made_row(seq) for seq in range(1, 100)])
    [split] = plan(lake, 1 << 30)
    path = lake.root / split.files[0].path
    whole = path.read_bytes()
    for at in random.Random(1).sample(range(len(whole)), 40):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(LakeError, match=rf"lake: {split.files[0].path} is damaged"):
            seqs(lake, [split])
    path.write_bytes(whole[:-1])
    with pytest.raises(LakeError, match=r"has [\d,]+ bytes instead of"):
        seqs(lake, [split])
    path.unlink()
    with pytest.raises(LakeError, match=rf"{split.files[0].path} is missing"):
        seqs(lake, [split])


def test_messages_out_of_order_are_damage(tmp_path: Path) -> None:
    lake = made_lake(tmp_path / "lake", [made_row(1)])
    archive(lake, [made_row(2), made_row(2), made_row(4)], [Range(0, 2, 4)])
    with pytest.raises(LakeError, match="its messages are not in order"):
        seqs(lake, plan(lake, 1 << 30))


def test_a_message_in_two_files_is_damage(tmp_path: Path) -> None:
    lake = made_lake(tmp_path / "lake", [made_row(1, "s.a"), made_row(2, "s.b")], token=2)
    archive(lake, [made_row(3, "s.a"), made_row(3, "s.b")], [Range(0, 3, 3)])
    with pytest.raises(LakeError, match="a sequence is in the lake more than once"):
        seqs(lake, plan(lake, 1 << 30))


def test_files_that_were_replaced_are_read_in_their_new_form(tmp_path: Path) -> None:
    lake = made_lake(tmp_path / "lake", *([made_row(1), made_row(2)], [made_row(3), made_row(4)]))
    [split] = plan(lake, 1 << 30)
    reading = LakeReader(lake, ALL).read(split, ())
    first = next(reading)
    assert first.column("seq").to_pylist() == [1, 2]
    rewrite(lake, split.files[1].path, [4])
    rewrite(lake, split.files[0].path, [1])
    assert [seq for batch in reading for seq in batch.column("seq").to_pylist()] == [4]
    assert seqs(lake, [split]) == [[1, 4]]


def test_what_the_lake_lacks_is_known_by_sequence_and_time(tmp_path: Path) -> None:
    lake = Lake.ensure(tmp_path / "lake", "S", "first", None)
    rows = [made_row(seq) for seq in (11, 12, 31, 32)]
    archive(lake, rows[:2], [Range(0, 1, 12)], [Range(0, 1, 10)])
    archive(lake, rows[2:], [Range(0, 13, 40)], [Range(0, 13, 30)])
    state = lake.state()
    assert first_seq(state, 0) == 11
    assert missing(state, 0, (5, 50)) == [(5, 10), (13, 30), (41, 50)]
    assert missing(state, 0, (31, 40)) == []
    assert missing(state, 1, (1, 2)) == [(1, 2)]
    second = 1_000_000
    cases = {
        Selection(): [(13, 30), (41, 50)],
        Selection(start_us=31 * second): [(13, 30), (41, 50)],
        Selection(start_us=31 * second + 1): [(41, 50)],
        Selection(end_us=32 * second): [(13, 30)],
        Selection(end_us=12 * second): [],
        Selection(start_us=20 * second, end_us=21 * second): [(13, 30)],
    }
    for wanted, expected in cases.items():
        assert missing_wanted(state, 0, (11, 50), wanted) == expected, wanted


def test_a_folder_in_place_of_a_file_is_damage(tmp_path: Path) -> None:
    lake = made_lake(tmp_path / "lake", [made_row(1)])
    [split] = plan(lake, 1 << 30)
    path = lake.root / split.files[0].path
    path.unlink()
    os.mkdir(path)
    with pytest.raises(
        LakeError, match=r"S-0-1-1-r1\.parquet has [0-9,]+ bytes instead of|cannot be read"
    ):
        seqs(lake, [split])
