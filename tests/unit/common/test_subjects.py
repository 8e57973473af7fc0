"""Subjects and filters against a recursive matcher, and against every subject of a small world."""

import itertools
import sys

from hypothesis import given
from hypothesis import strategies as st

from contrail_common.subjects import (
    SUBJECT_BYTES_MAX,
    contains,
    filter_problem,
    is_wildcard,
    matches,
    matches_any,
    overlapping_pairs,
    overlaps,
    subject_problem,
)
from tests.support.calls import calls_of
from tests.support.each import each
from tests.unit.storage.naive_subjects import naive_matches

TOKENS = ["a", "b", "a*", ">b", "*>"]
WORLD = [
    ".".join(tokens)
    for length in (1, 2, 3, 4)
    for tokens in itertools.product(["a", "b"], repeat=length)
]
SMALL_FILTERS = [
    ".".join(tokens)
    for length in (1, 2, 3)
    for tokens in itertools.product(["a", "b", "*", ">"], repeat=length)
    if ">" not in tokens[:-1]
]
subjects = st.lists(st.sampled_from(TOKENS), min_size=1, max_size=4).map(".".join)
filters = st.builds(
    lambda tokens, tail: ".".join([*tokens, *tail]),
    st.lists(st.sampled_from([*TOKENS, "*"]), min_size=1, max_size=4),
    st.sampled_from([(), (">",)]),
)


def matched(pattern: str) -> set[str]:
    return {subject for subject in WORLD if naive_matches(pattern, subject)}


@given(filters | st.just(">"), subjects)
def test_filter_matches_as_the_recursive_matcher_says(pattern: str, subject: str) -> None:
    assert matches(pattern, subject) == naive_matches(pattern, subject)


def test_filters_overlap_exactly_when_some_subject_is_matched_by_both() -> None:
    found = {pattern: matched(pattern) for pattern in SMALL_FILTERS}
    for left, right in itertools.product(SMALL_FILTERS, repeat=2):
        assert overlaps(left, right) == bool(found[left] & found[right]), (left, right)


def test_filter_contains_another_exactly_when_it_matches_all_of_its_subjects() -> None:
    found = {pattern: matched(pattern) for pattern in SMALL_FILTERS}
    for outer, inner in itertools.product(SMALL_FILTERS, repeat=2):
        # The world ends at four tokens and has two words: `*` is more than both of them.
        if found[inner] and "*" not in inner.split("."):
            assert contains(outer, inner) == (found[inner] <= found[outer]), (outer, inner)


@given(filters, filters, subjects)
def test_contained_filter_matches_nothing_that_the_outer_does_not(
    outer: str, inner: str, subject: str
) -> None:
    if contains(outer, inner) and naive_matches(inner, subject):
        assert naive_matches(outer, subject)


@each(
    ("outer", "inner", "expected"),
    [
        (">", ">", True),
        (">", "*", True),
        ("*", ">", False),
        ("a.>", "a.*", True),
        ("a.*", "a.>", False),
        ("*.*", "a.*", True),
        ("a.*", "*.*", False),
        ("a.>", "a", False),
        ("*.>", "a.>", True),
    ],
)
def test_filters_with_wildcards_contain_each_other(outer: str, inner: str, expected: bool) -> None:
    assert contains(outer, inner) is expected


@given(filters)
def test_filter_overlaps_and_contains_itself(pattern: str) -> None:
    assert overlaps(pattern, pattern)
    assert contains(pattern, pattern)


@given(st.lists(filters, max_size=4))
def test_overlapping_pairs_are_those_of_all_filters_in_order(patterns: list[str]) -> None:
    pairs = [pair for pair in itertools.combinations(patterns, 2) if overlaps(*pair)]
    assert list(overlapping_pairs(patterns)) == pairs


def test_search_for_overlapping_pairs_costs_by_filters_and_not_by_pairs() -> None:
    def calls(count: int) -> int:
        patterns = [f"a.{number}.*.>" for number in range(count)]
        return calls_of(lambda: list(overlapping_pairs(patterns)))

    assert calls(200) <= 2 * calls(100)


@given(st.lists(filters, max_size=3).map(tuple), subjects)
def test_no_filter_matches_everything_and_several_match_what_any_does(
    patterns: tuple[str, ...], subject: str
) -> None:
    expected = not patterns or any(naive_matches(each, subject) for each in patterns)
    assert matches_any(patterns, subject) is expected


@each("pattern", ["*", ">", "a.*", "*.a", "a.>", "a.*.b"])
def test_token_that_is_a_wildcard_makes_a_filter(pattern: str) -> None:
    assert is_wildcard(pattern)
    assert filter_problem(pattern) is None
    assert subject_problem(pattern) is not None


@each("subject", ["a*", ">a", "a.b*c", "*a.b", "a>", "-", "_", "$x", "ä.🦊"])
def test_wildcard_character_within_a_token_is_an_ordinary_one(subject: str) -> None:
    assert not is_wildcard(subject)
    assert subject_problem(subject) is None


@each(
    "subject",
    [
        "",
        ".",
        "a.",
        ".a",
        "a..b",
        " ",
        "a b",
        "a\tb",
        "a\n",
        "\x00",
        "a\x7f",
        "a\u00a0b",
        "a\u2028",
    ],
)
def test_malformed_subject_is_neither_subject_nor_filter(subject: str) -> None:
    assert subject_problem(subject) is not None
    assert filter_problem(subject) is not None


def test_no_white_space_of_unicode_is_taken() -> None:
    spaces = [character for character in map(chr, range(sys.maxunicode + 1)) if character.isspace()]
    assert len(spaces) > 20
    assert all(filter_problem(f"a{space}b") is not None for space in spaces)


@each("subject", ["\ud800", "a.\udfff", "\udc00" * 5_000])
def test_lone_surrogate_is_refused_like_any_other_bad_character(subject: str) -> None:
    assert subject_problem(subject) is not None
    assert filter_problem(subject) is not None


@each("character", ["a", "ä", "🦊"])
def test_subject_is_bounded_in_bytes(character: str) -> None:
    longest = character * (SUBJECT_BYTES_MAX // len(character.encode()))
    assert len(longest.encode()) == SUBJECT_BYTES_MAX
    assert subject_problem(longest) is None
    assert subject_problem(longest + "a") is not None
    assert filter_problem(longest) is None
    assert filter_problem(longest + "a") is not None


@each("pattern", [">.a", "a.>.b", ">.>"])
def test_full_wildcard_before_the_last_token_is_refused(pattern: str) -> None:
    assert filter_problem(pattern) is not None
