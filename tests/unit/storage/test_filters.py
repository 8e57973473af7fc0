"""Subject filters over a table whose subjects come, go, and are let go of."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from contrail_storage.core.results import Step, Writes
from contrail_storage.core.subjects.filters import FILTERS_MAX, FilterCache, SubjectFilter
from contrail_storage.core.subjects.subject_table import PAGE, SubjectTable
from tests.unit.storage.naive_subjects import naive_matches

SUBJECTS = ["a", "b", "a.x", "a.y", "b.x", "a.x.y"]
PATTERNS = ["a", "a.*", "*", ">", "*.x", "a.>", "nothing"]
patterns = st.lists(st.sampled_from(PATTERNS), max_size=3).map(tuple)


def add(table: SubjectTable, name: str, seq: int) -> int:
    return table.add_one(name, seq, Step(seq, 0, Writes()))


def remove(table: SubjectTable, name: str) -> None:
    sids = np.array([table.ids[name]], np.uint32)
    table.remove(sids, 1, Step(1, 0, Writes()))


@given(patterns, st.lists(st.sampled_from([*SUBJECTS, "-a", "-a.x", "-b", "clear"]), max_size=25))
def test_filter_selects_what_the_naive_matcher_does_while_subjects_come_and_go(
    wanted: tuple[str, ...], script: list[str]
) -> None:
    table, found = SubjectTable(1), SubjectFilter(wanted)
    for seq, step in enumerate(script, 1):
        if step == "clear":
            table.clear(Writes())
        elif not step.startswith("-"):
            add(table, step, seq)
        elif step[1:] in table.ids:
            remove(table, step[1:])
        live = sorted(table.live())
        expected = [
            (sid, name)
            for sid, name in live
            if not wanted or any(naive_matches(pattern, name) for pattern in wanted)
        ]
        assert sorted(found.subjects(table)) == expected
        for from_sid in (0, seq // 2):
            wanted_sids = [sid for sid, _ in expected if sid >= from_sid]
            assert found.numbers(table, from_sid).tolist() == wanted_sids
        if not found.matches_all:
            sids = np.array([sid for sid, _ in live], np.uint32)
            assert sids[found.select(table, sids)].tolist() == [sid for sid, _ in expected]


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


def test_numbers_that_the_table_does_not_know_are_not_selected() -> None:
    table = SubjectTable(1)
    add(table, "a", 1)
    found = SubjectFilter(("a",))
    assert found.select(table, np.array([0, 1, 99], np.uint32)).tolist() == [True, False, False]


def test_filters_used_last_are_kept_for_their_table_alone() -> None:
    table, other, cache = SubjectTable(1), SubjectTable(1), FilterCache()
    first = cache.get(table, ("a",))
    assert cache.get(table, ("a",)) is first
    assert cache.get(other, ("a",)) is not first
    for number in range(FILTERS_MAX - 1):
        cache.get(table, (f"s.{number}",))
    assert cache.get(table, ("a",)) is first
    for number in range(FILTERS_MAX):
        cache.get(table, (f"t.{number}",))
    assert cache.get(table, ("a",)) is not first


def test_no_pattern_and_the_full_wildcard_match_everything() -> None:
    assert SubjectFilter(()).matches_all
    assert SubjectFilter(("a", ">")).matches_all
    assert not SubjectFilter(("a",)).matches_all
