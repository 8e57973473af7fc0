"""Names of a lake's files: what is written can be read back, and anything else is refused."""

from datetime import date
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_common.names import NAME_BYTES_MAX, name_problem
from contrail_spark.lake.layout import (
    DataFile,
    Partition,
    commit_name,
    parse_commit_name,
    parse_data_path,
    parse_temporary_name,
    quoted,
    temporary_name,
)

DAY = date(2026, 11, 24)
sequences = st.integers(1, (1 << 63) - 1)
names = st.text(min_size=1, max_size=NAME_BYTES_MAX).filter(lambda name: not name_problem(name))


def test_path_names_day_token_stream_and_range() -> None:
    file = DataFile(Partition(DAY, "JFK"), "FLIGHTS", 0, 1, 4_096, 7)
    assert file.path == "data/date=2026-11-24/token=JFK/FLIGHTS-0-1-4096-r7.parquet"


@given(
    stream=names,
    token=st.none() | names.map(quoted),
    day=st.dates(),
    shard=st.integers(0, 255),
    from_seq=sequences,
    to_seq=sequences,
    commit=st.integers(1, 10**17),
    copy=st.integers(0, 1_000),
)
def test_path_is_read_back(
    stream: str,
    token: str | None,
    day: date,
    shard: int,
    from_seq: int,
    to_seq: int,
    commit: int,
    copy: int,
) -> None:
    file = DataFile(Partition(day, token), quoted(stream), shard, from_seq, to_seq, commit, copy)
    assert parse_data_path(file.path) == file
    assert all(len(part.encode()) <= 255 for part in file.path.split("/"))


@given(names)
def test_quoted_name_is_safe_and_distinct(name: str) -> None:
    safe = quoted(name)
    assert safe.isascii()
    assert not set(safe) & set("/\\*?=. \n")
    assert not safe.startswith("_")
    # A name that is cut has a digest instead of its end.
    assert unquote(safe) == name or ("~" in safe and len(safe) <= 150)


@given(st.sets(names, min_size=2))
def test_names_stay_different(found: set[str]) -> None:
    assert len({quoted(name) for name in found}) == len(found)


def test_long_names_with_one_beginning_stay_different() -> None:
    long = "x" * 254
    assert quoted(long + "a") != quoted(long + "b")
    assert quoted("x" * 150) == "x" * 150
    assert len(quoted("x" * 151)) == 150


@pytest.mark.parametrize(
    "path",
    [
        "data/date=2026-11-24/S-0-1-2.parquet",
        "data/date=2026-11-24/S-0-1-2-r1.parquet.tmp",
        "data/date=2026-13-24/S-0-1-2-r1.parquet",
        "data/S-0-1-2-r1.parquet",
        "date=2026-11-24/S-0-1-2-r1.parquet",
        "data/date=2026-11-24/../S-0-1-2-r1.parquet",
        "data/date=2026-11-24/token=a/b/S-0-1-2-r1.parquet",
        "/data/date=2026-11-24/S-0-1-2-r1.parquet",
    ],
)
def test_other_paths_are_no_data_files(path: str) -> None:
    assert parse_data_path(path) is None


@given(st.integers(1, 10**17))
def test_commit_name_is_read_back(number: int) -> None:
    assert parse_commit_name(commit_name(number)) == number
    assert parse_temporary_name(temporary_name(number, "a1")) == number


@pytest.mark.parametrize("name", ["00000000.json", "1.json", "000000001.json", "00000001.json~"])
def test_other_names_are_no_commits(name: str) -> None:
    assert parse_commit_name(name) is None
