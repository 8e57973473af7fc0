"""The tree of filters against comparing them one by one."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from contrail_common.subject_tree import SubjectTree
from contrail_common.subjects import SUBJECT_BYTES_MAX, matches, overlaps
from tests.support.calls import calls_of
from tests.support.each import each

Pairs = set[tuple[str, int]]

literals = st.lists(st.sampled_from(["a", "b", "a*", ">b"]), min_size=1, max_size=5).map(".".join)
filters = st.builds(
    lambda tokens, tail: ".".join([*tokens, *tail]),
    st.lists(st.sampled_from(["a", "b", "a*", "*"]), max_size=4),
    st.sampled_from([("a",), ("*",), (">",)]),
)
invalid = st.lists(st.sampled_from(["", "a", "*", ">"]), max_size=4).map(".".join)
pairs = st.tuples(filters, st.integers(0, 2))
changes = st.lists(st.tuples(st.sampled_from(["add", "add", "remove"]), pairs), max_size=30)


def made(kept: Pairs) -> SubjectTree[int]:
    tree = SubjectTree[int]()
    for pair in sorted(kept):
        tree.add(*pair)
    return tree


def shape(tree: SubjectTree[int]) -> object:
    def below(node: Any) -> object:
        return node.label, node.values, {key: below(one) for key, one in node.children.items()}

    return below(tree._root)


@given(changes, literals, filters)
def test_tree_finds_what_comparing_all_pairs_finds(
    history: list[tuple[str, tuple[str, int]]], subject: str, pattern: str
) -> None:
    tree, kept = SubjectTree[int](), Pairs()
    for change, pair in history:
        (tree.add if change == "add" else tree.remove)(*pair)
        (kept.add if change == "add" else kept.discard)(pair)
    matched = sorted(value for one, value in kept if matches(one, subject))
    assert sorted(tree.matching(subject)) == matched
    found = [one for one in kept if overlaps(one[0], pattern)]
    in_order = sorted({one for one, _ in found}, key=lambda one: one.split("."))
    rest = tree.overlapping(pattern)
    for one in in_order:
        values = {value for other, value in found if other == one}
        assert {next(rest) for _ in values} == values
    assert next(rest, None) is None


@given(changes)
def test_shape_of_the_tree_follows_from_what_is_in_it(
    history: list[tuple[str, tuple[str, int]]],
) -> None:
    tree, kept = SubjectTree[int](), Pairs()
    for change, pair in history:
        (tree.add if change == "add" else tree.remove)(*pair)
        (kept.add if change == "add" else kept.discard)(pair)
    assert shape(tree) == shape(made(kept))


@given(st.lists(invalid, max_size=20), invalid)
def test_invalid_filters_do_no_harm(patterns: list[str], pattern: str) -> None:
    tree = made({(one, 0) for one in patterns})
    overlapping = {one for one in patterns if overlaps(pattern, one)}
    assert len(list(tree.overlapping(pattern))) <= len(overlapping)
    tree.matching(pattern)
    for one in patterns:
        tree.remove(one, 0)
    assert shape(tree) == shape(SubjectTree[int]())


@each("subject", ["a.7.x", "a.7.x.y", "a.none", "none"])
def test_search_costs_the_same_beside_many_filters(subject: str) -> None:
    def calls(filters: int) -> int:
        tree = made({(f"a.{number}.>", number) for number in range(filters)})
        found = calls_of(lambda: tree.matching(subject))
        return found + calls_of(lambda: next(tree.overlapping(subject), None))

    assert calls(5_000) == calls(10)


@each("pattern", ["*", "*.x", "*.x.>", "*.x.*"])
@each("kept", ["s{}.a.b", "s{}.a.>", "s{}.>"])
def test_overlaps_of_a_leading_wildcard_cost_little_for_each_branch(
    pattern: str, kept: str
) -> None:
    branches = 5_000
    tree = made({(kept.format(number), number) for number in range(branches)})
    assert calls_of(lambda: next(tree.overlapping(pattern), None)) < 2.5 * branches


def test_filters_with_as_many_tokens_as_possible_take_one_node_each() -> None:
    longest = "a." * (SUBJECT_BYTES_MAX // 2 - 1)
    patterns = [longest + last for last in "abc*"]
    tree = made({(pattern, number) for number, pattern in enumerate(patterns)})
    (common,) = tree._root.children.values()
    assert len(common.children) == len(patterns)
    assert sorted(tree.matching(longest + "b")) == [1, 3]
    assert list(tree.overlapping(longest + ">")) == [3, 0, 1, 2]
    for number, pattern in enumerate(patterns):
        tree.remove(pattern, number)
    assert not tree._root.children
