"""Subject filters over a table whose subjects come, go, and are let go of."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_common.subjects import SUBJECT_BYTES_MAX, filter_problem, subject_problem
from contrail_storage.core.results import Step, Writes
from contrail_storage.core.subjects import filters, subject_table
from contrail_storage.core.subjects.filters import SubjectFilter
from contrail_storage.core.subjects.subject_names import SubjectNames
from contrail_storage.core.subjects.subject_table import PAGE, SubjectTable
from contrail_storage.reading.filter_cache import FILTERS_MAX, FilterCache
from tests.unit.storage.dispatcher_rig import run
from tests.unit.storage.naive_subjects import naive_matches

SUBJECTS = ["a", "b", "a.x", "a.y", "b.x", "a.x.y"]
PATTERNS = ["a", "a.*", "*", ">", "*.x", "a.>", "nothing", "b.x"]
patterns = st.lists(st.sampled_from(PATTERNS), max_size=3).map(tuple)
TOKENS = [
    "a",
    "ab",
    "a*",
    "*a",
    ">b",
    "é",
    "日本",
    "$K",
    "#~",
    "a|b",
    "(a)",
    "[^x]",
    "\\E",
    "^a$",
    "+?{2}",
]
literals = st.lists(st.sampled_from(TOKENS), min_size=1, max_size=4).map(".".join)


@st.composite
def wild(draw: st.DrawFn) -> str:
    """A filter with tokens that mean something in expressions."""
    tokens = draw(st.lists(st.sampled_from([*TOKENS, "*"]), min_size=1, max_size=4))
    return ".".join([*tokens, ">"] if draw(st.booleans()) else tokens)


def add(table: SubjectTable, name: str, seq: int) -> int:
    return table.add_one(name, seq, Step(seq, 0, Writes()))


def remove(table: SubjectTable, name: str) -> None:
    sids = np.array([table.ids[name]], np.uint32)
    table.remove(sids, 1, Step(1, 0, Writes()))


def numbered(*names: str) -> SubjectTable:
    table = SubjectTable(1)
    for seq, name in enumerate(names, 1):
        add(table, name, seq)
    return table


def work_off(wanted: SubjectFilter, table: SubjectTable) -> None:
    """Do in one go what the cache does in a thread."""
    while (rest := wanted.rest(table)) is not None:
        wanted.accept(rest, rest.work())


def subjects(wanted: SubjectFilter, table: SubjectTable) -> list[tuple[int, str]]:
    """Numbers and names of the live subjects that match."""
    return [(sid, table.name(sid)) for sid in wanted.numbers(table).tolist()]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pieces of two names, and an expression for each."""
    with monkeypatch.context() as patch:
        patch.setattr(filters, "DIRECT", 1)
        patch.setattr(filters, "PIECE", 2)
        patch.setattr(filters, "WINDOW", 2)
        patch.setattr(filters, "_COMPARED", 0)
        yield


@pytest.mark.usefixtures("small")
@given(
    patterns,
    st.lists(st.sampled_from([*SUBJECTS, "-a", "-a.x", "-b", "clear", "trim"]), max_size=25),
    st.integers(0, 7),
)
def test_filter_selects_what_the_naive_matcher_does_while_subjects_come_and_go(
    wanted: tuple[str, ...], script: list[str], in_pieces: int
) -> None:
    table, found = SubjectTable(1), SubjectFilter(wanted)
    for seq, step in enumerate(script, 1):
        if step == "clear":
            table.clear(Writes())
        elif step == "trim":  # slots move
            table.restore_next_id(table.next_id + seq, Writes())
        elif not step.startswith("-"):
            add(table, step, seq)
        elif step[1:] in table.ids:
            remove(table, step[1:])
        if in_pieces & (1 << seq % 3):
            work_off(found, table)
        live = sorted(table.live())
        expected = [
            (sid, name)
            for sid, name in live
            if not wanted or any(naive_matches(pattern, name) for pattern in wanted)
        ]
        assert subjects(found, table) == expected
        assert found.count_at_most(table) >= len(expected)
        assert all(name.startswith(found.prefix) for _, name in expected) or found.literal
        for from_sid in (0, seq // 2):
            wanted_sids = [sid for sid, _ in expected if sid >= from_sid]
            assert found.numbers(table, from_sid).tolist() == wanted_sids
        sids = np.array([sid for sid, _ in live], np.uint32)
        assert sids[found.select(table, sids)].tolist() == [sid for sid, _ in expected]


@pytest.mark.usefixtures("small")
@given(st.lists(st.one_of(wild(), literals), min_size=1, max_size=4), st.sets(literals))
def test_expressions_match_as_tokens_do(some: list[str], names: set[str]) -> None:
    assert not any(map(filter_problem, some))
    names = {name for name in names if not subject_problem(name)}
    table = numbered(*names)
    matching = subjects(SubjectFilter(tuple(some)), table)
    expected = {one for one in names if any(naive_matches(pattern, one) for pattern in some)}
    assert {name for _, name in matching} == expected


@pytest.mark.usefixtures("small")
def test_expressions_hold_the_longest_and_the_most_patterns() -> None:
    tokens = SUBJECT_BYTES_MAX // 2
    longest = ".".join(["x"] * tokens)
    wild = ".".join(["*"] * tokens)
    many = tuple(f"{'y' * (SUBJECT_BYTES_MAX - 10)}.{number}.*" for number in range(255))
    table = numbered(longest, "x", f"{many[-1][:-1]}z", f"{many[0][:-1]}z")
    assert [sid for sid, _ in subjects(SubjectFilter((wild, *many)), table)] == [0, 2, 3]


def test_names_are_left_to_a_thread_when_they_or_the_patterns_are_many() -> None:
    table = numbered(*(f"a.{number}" for number in range(filters.DIRECT)))
    short = SubjectFilter(("a.*",))
    assert short.rest(table) is None
    add(table, "a.more", 1)
    assert short.rest(table) is not None
    longest = tuple(f"{'y' * (SUBJECT_BYTES_MAX - 10)}.{number}.*" for number in range(256))
    assert SubjectFilter(longest).rest(numbered("a")) is not None
    assert SubjectFilter(longest).rest(numbered()) is None
    assert SubjectFilter(longest[:4]).rest(numbered("a")) is None


def test_filter_follows_a_table_that_let_go_of_its_low_end() -> None:
    table, found = SubjectTable(1), SubjectFilter(("s.*",))
    sids = [add(table, f"s.{number}", number + 1) for number in range(3 * PAGE)]
    assert found.select(table, np.array(sids, np.uint32)).all()
    for number in range(2 * PAGE + 1):
        remove(table, f"s.{number}")
    assert table.base > 0
    other = add(table, "other", 9_999)
    selected = found.select(table, np.array([*sids, other], np.uint32))
    assert selected[2 * PAGE + 1 : 3 * PAGE].all()
    assert not selected[: table.base].any()
    assert not selected[-1]


def test_filter_over_a_table_loaded_in_a_later_run_of_numbers() -> None:
    table = SubjectTable(1)
    names = pa.array(["a.x", "a.y", "b"])
    table.numbered = SubjectNames.of_live(np.array([90, 3, 4]), [names], 5, 80)
    table.counts[:3] = 1
    for sid, name in ((90, "a.x"), (3, "a.y"), (4, "b")):
        table.ids.add(name, sid)
    found = SubjectFilter(("a.*",))
    assert subjects(found, table) == [(3, "a.y"), (90, "a.x")]
    assert found.numbers(table, 4).tolist() == [90]
    assert found.numbers(table, 91).tolist() == []
    assert found.select(table, np.array([90, 3, 4], np.uint32)).tolist() == [True, True, False]


def test_numbers_that_the_table_does_not_know_are_not_selected() -> None:
    table = numbered("a")
    for pattern in ("a", "*"):
        found = SubjectFilter((pattern,))
        sids = np.array([0, 1, 99], np.uint32)
        assert found.select(table, sids).tolist() == [True, False, False]


def test_no_pattern_and_the_full_wildcard_match_everything() -> None:
    assert SubjectFilter(()).matches_all
    assert SubjectFilter(("a", ">")).matches_all
    assert not SubjectFilter(("a",)).matches_all


# The cache --------------------------------------------------------------------------------------


def test_same_patterns_over_the_same_table_are_one_filter_while_it_is_used() -> None:
    table, other, cache = SubjectTable(1), SubjectTable(1), FilterCache()
    first = cache.share(table, ("a.*",))
    assert cache.share(table, ("a.*",)) is first
    assert cache.share(other, ("a.*",)) is not first
    assert cache.share(table, ("b.*",)) is not first
    gone = weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None


def test_filters_read_last_are_kept_as_long_as_their_table() -> None:
    async def scene() -> None:
        table, cache = SubjectTable(1), FilterCache()
        first = weakref.ref(await cache.get(table, ("a.*",)))
        for number in range(FILTERS_MAX - 1):
            await cache.get(table, (f"s.{number}.*",))
        assert first() is await cache.get(table, ("a.*",))
        for number in range(FILTERS_MAX):
            await cache.get(table, (f"t.{number}.*",))
        gc.collect()
        assert first() is None
        second = weakref.ref(await cache.get(table, ("a.*",)))
        del table
        gc.collect()
        assert second() is None

    run(scene())


@pytest.mark.usefixtures("small")
def test_many_names_are_matched_once_and_in_a_thread_for_all_who_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [f"a.{number}" for number in range(20)]
    looked: list[tuple[int, int, bool]] = []
    packed = filters.packed_names

    def noting(numbered: SubjectNames, low: int, high: int) -> object:
        looked.append((low, high, threading.current_thread() is threading.main_thread()))
        return packed(numbered, low, high)

    monkeypatch.setattr(filters, "packed_names", noting)

    async def scene() -> None:
        table, cache = numbered(*names), FilterCache()
        wanted = cache.share(table, ("*.1",))
        waiting = [asyncio.create_task(cache.prepare(table, wanted)) for _ in range(3)]
        while not looked:
            await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert wanted.numbers(table).tolist() == [1]
        # The cancelled one's step is repeated, because nobody has its result.
        assert sorted(set(looked)) == [(low, low + 2, False) for low in range(0, 20, 2)]
        assert len(looked) <= 11

    run(scene())


@pytest.mark.usefixtures("small")
def test_slots_that_move_during_a_step_are_matched_again() -> None:
    table, wanted = numbered("a.1", "b", "a.2", "b.2"), SubjectFilter(("a.*",))
    step = wanted.rest(table)
    assert step is not None
    answers = step.work()
    remove(table, "a.1")
    table.restore_next_id(table.next_id + subject_table.PAGE, Writes())
    wanted.numbers(table)  # matches at once what is left
    wanted.accept(step, answers)
    assert [name for _, name in subjects(wanted, table)] == ["a.2"]
