"""Which subjects sets of patterns match: right, and as cheap with many patterns."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from contrail_common.config_rules import SUBJECTS_MAX
from contrail_common.subjects import matches
from contrail_storage.core.stream.coverage import Coverage, FilterMatches
from tests.support.calls import calls_of
from tests.support.each import each

tokens = st.sampled_from(["a", "b", "a*"])
literals = st.lists(tokens, min_size=1, max_size=4).map(".".join)
patterns = st.lists(st.one_of(tokens, st.just("*")), min_size=1, max_size=4).flatmap(
    lambda some: st.sampled_from([".".join(some), ".".join([*some[:-1], ">"])])
)


def by_coverage(filters: tuple[str, ...]) -> Callable[[str], bool]:
    return Coverage(filters).__getitem__


def by_filter_matches(filters: tuple[str, ...]) -> Callable[[str], bool]:
    asked: list[str] = []
    found = FilterMatches()
    consumer: Any = SimpleNamespace(consumer_id=1, config=SimpleNamespace(filter_subjects=filters))
    table: Any = SimpleNamespace(rounds=0, name=asked.__getitem__)

    def answer(subject: str) -> bool:
        asked.append(subject)
        return found.matches(consumer, len(asked) - 1, table)

    return answer


@given(
    st.sampled_from([by_coverage, by_filter_matches]),
    st.lists(patterns, min_size=1, max_size=4).map(tuple),
    literals,
)
def test_agrees_with_comparing_each_pattern(
    kind: Callable[[tuple[str, ...]], Callable[[str], bool]],
    filters: tuple[str, ...],
    subject: str,
) -> None:
    covers = kind(filters)
    expected = any(matches(pattern, subject) for pattern in filters)
    assert covers(subject) is covers(subject) is expected


@each("kind", [by_coverage, by_filter_matches])
def test_new_subject_costs_the_same_with_as_many_patterns_as_possible(
    kind: Callable[[tuple[str, ...]], Callable[[str], bool]],
) -> None:
    def calls(count: int) -> int:
        covers = kind(tuple(f"a.{number}.*" for number in range(count)))
        covers("a.0.x")
        return calls_of(lambda: covers("a.1.y"))

    assert calls(SUBJECTS_MAX) == calls(2)
