"""Groups of subjects: which tokens become wildcards."""

import pytest

from contrail_pipeline.summary.patterns import (
    TOKENS_MAX,
    fewest_wildcards,
    pattern_of,
    wildcard_order,
)


def test_the_most_varied_tokens_become_wildcards_first() -> None:
    assert wildcard_order([1, 3, 105, 16]) == [2, 3, 1]


def test_of_tokens_that_vary_alike_the_later_one_becomes_a_wildcard() -> None:
    assert wildcard_order([2, 2, 0]) == [1, 0]


@pytest.mark.parametrize(
    ("groups", "number"), [([5], 0), ([40, 9], 0), ([41, 40], 1), ([90, 50, 3], 2), ([90, 80], 1)]
)
def test_there_are_no_more_wildcards_than_the_limit_needs(groups: list[int], number: int) -> None:
    assert fewest_wildcards(groups, 40) == number


def test_a_pattern_has_as_many_tokens_as_its_subjects() -> None:
    assert pattern_of("flights.JFK.LAX.AA", [2]) == "flights.JFK.*.AA"
    assert pattern_of("flights", [0, 1]) == "*"


def test_long_subjects_are_cut_off() -> None:
    tokens = [str(at) for at in range(TOKENS_MAX + 1)]
    assert pattern_of(".".join(tokens[:-1]), []) == ".".join(tokens[:-1])
    assert pattern_of(".".join(tokens), []) == ".".join([*tokens[:-1], ">"])
