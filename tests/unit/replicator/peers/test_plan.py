"""Which nodes make up which groups: the figures for each size of a cluster, and zones."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_replicator.peers.plan import (
    Place,
    groups_of_five,
    groups_of_other_leaders,
    groups_of_three,
    meta_members,
    ring,
)

NODES = [Place(f"n{number:02}") for number in range(32)]


@pytest.mark.parametrize(
    ("nodes", "triples", "times"), [(3, 1, 6), (4, 4, 2), (5, 10, 1), (6, 12, 1)]
)
def test_triples_of_small_clusters(nodes: int, triples: int, times: int) -> None:
    found = Counter(map(frozenset, groups_of_three(NODES[:nodes])))
    assert len(found) == triples
    assert set(found.values()) == {times}


@pytest.mark.parametrize(("nodes", "memberships"), [(3, 8), (4, 11), (5, 25), (6, 45), (32, 45)])
def test_memberships_of_a_node_at_most(nodes: int, memberships: int) -> None:
    names = NODES[:nodes]
    groups = groups_of_three(names)
    if nodes >= 5:
        groups += groups_of_five(names)
    groups += groups_of_other_leaders(groups)
    groups += [meta_members(names)] + [[one.name] for one in names]
    assert max(Counter(name for group in groups for name in group).values()) == memberships


@given(st.integers(3, 32))
def test_each_node_leads_and_holds_as_much_as_any_other(nodes: int) -> None:
    groups = groups_of_three(NODES[:nodes])
    assert all(len(set(group)) == 3 for group in groups)
    assert set(Counter(group[0] for group in groups).values()) == {2}
    assert set(Counter(name for group in groups for name in group).values()) == {6}


@given(st.integers(3, 12))
def test_each_member_of_a_set_leads_a_group_with_it(nodes: int) -> None:
    groups = groups_of_three(NODES[:nodes])
    more = groups_of_other_leaders(groups)
    assert groups_of_other_leaders(groups + more) == []
    found = Counter((frozenset(group), group[0]) for group in groups + more)
    assert {(members, name) for members, _ in found for name in members} == set(found)
    assert len(set(Counter(group[0] for group in groups + more).values())) == 1
    if nodes != 3:
        assert set(found.values()) == {1}


@given(st.lists(st.sampled_from("abcd"), min_size=5, max_size=12))
def test_a_group_is_in_as_many_zones_as_there_are(zones: list[str]) -> None:
    places = [Place(f"n{number:02}", zone) for number, zone in enumerate(zones)]
    zone_of = dict(places)
    groups = [*groups_of_three(places), *groups_of_five(places), meta_members(places)]
    for group in groups:
        assert len(set(group)) == len(group)
        found = {zone_of[name] for name in group}
        assert len(found) == min(len(group), len(set(zones)))


def test_zones_alternate_on_the_ring() -> None:
    places = [Place("a1", "a"), Place("a2", "a"), Place("b1", "b"), Place("b2", "b")]
    assert [one.name for one in ring(places)] == ["a1", "b1", "a2", "b2"]


@pytest.mark.parametrize(("nodes", "members"), [(1, 1), (2, 1), (3, 3), (4, 3), (5, 5), (9, 5)])
def test_size_of_the_meta_group(nodes: int, members: int) -> None:
    assert len(meta_members(NODES[:nodes])) == members


def test_no_cluster_without_a_node() -> None:
    with pytest.raises(ValueError, match="at least one node"):
        meta_members([])
