"""Which messages, files and row groups of a lake are wanted."""

from datetime import date

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from contrail_common.subjects import filter_problem, matches_any
from contrail_spark.lake.layout import NO_TOKEN, DataFile, Partition, quoted
from contrail_spark.lake.manifest import FileEntry
from contrail_spark.lake.selection import Selection
from tests.pipeline.lakes import SCHEMA, made_row

TOKENS = st.sampled_from(["a", "b", "ab", "_x", "ä", "%", "*", ">"])
PATTERNS = st.lists(TOKENS, min_size=1, max_size=4).map(".".join)
FILTERS = PATTERNS.filter(lambda text: filter_problem(text) is None)
SUBJECTS = st.lists(st.sampled_from(["a", "b", "ab", "_x", "ä", "%"]), min_size=1, max_size=4).map(
    ".".join
)


def entry(token: str | None, first_us: int = 0, last_us: int = 0) -> FileEntry:
    path = DataFile(Partition(date(2026, 1, 2), token), "S", 0, 1, 2, 1).path
    return FileEntry(
        path=path,
        shard=0,
        from_seq=1,
        to_seq=2,
        messages=2,
        bytes=1,
        sha256="",
        first_time_us=first_us,
        last_time_us=last_us,
    )


@given(st.lists(FILTERS, max_size=3), st.lists(SUBJECTS, min_size=1, max_size=20))
def test_rows_match_by_the_rules_of_the_server(filters: list[str], subjects: list[str]) -> None:
    batch = pa.RecordBatch.from_pylist(
        [made_row(seq, subject) for seq, subject in enumerate(subjects, 1)], SCHEMA
    )
    mask = Selection(tuple(filters)).mask(batch)
    found = [True] * len(subjects) if mask is None else mask.to_pylist()
    assert found == [matches_any(tuple(filters), each) for each in subjects]


@given(st.lists(FILTERS, min_size=1, max_size=3), st.lists(SUBJECTS, min_size=1, max_size=5))
def test_a_row_group_with_a_wanted_subject_is_read(filters: list[str], subjects: list[str]) -> None:
    if any(matches_any(tuple(filters), each) for each in subjects):
        assert Selection(tuple(filters)).may_have_subjects(min(subjects), max(subjects))


@given(st.lists(FILTERS, min_size=1, max_size=3), SUBJECTS, st.integers(1, 5))
def test_a_folder_with_a_wanted_subject_is_read(
    filters: list[str], subject: str, token: int
) -> None:
    tokens = subject.split(".")
    folder = quoted(tokens[token - 1]) if token <= len(tokens) else NO_TOKEN
    if matches_any(tuple(filters), subject):
        assert Selection(tuple(filters)).may_have(entry(folder), token)


def test_what_cannot_match_is_not_read() -> None:
    wanted = Selection(("a.x.>", "b.*"))
    assert not wanted.may_have_subjects("c", "d")
    assert not wanted.may_have_subjects("a.a", "a.w.z")
    assert not Selection(("a.x.>",)).may_have(entry("y"), 2)
    assert not Selection(("a.x.>",)).may_have(entry(NO_TOKEN), 2)


def test_times_begin_inclusive_and_end_exclusive() -> None:
    wanted = Selection(start_us=10, end_us=20)
    times = [9, 10, 19, 20]
    batch = pa.RecordBatch.from_pylist([made_row(at, time_us=at) for at in times], SCHEMA)
    mask = wanted.mask(batch)
    assert mask is not None
    assert mask.to_pylist() == [False, True, True, False]
    assert [wanted.may_have(entry(None, *each), None) for each in [(1, 9), (1, 10), (19, 30)]] == [
        False,
        True,
        True,
    ]
    assert not wanted.may_have(entry(None, 20, 30), None)
    assert wanted.may_have_between(None, None)
    assert not wanted.may_have_between(20, None)
    assert not wanted.may_have_between(None, 9)
