"""The formation of a cluster: every order of steps, crashes and lost disks."""

from collections import deque
from functools import cache
from typing import NamedTuple

import pytest

from contrail_replicator.peers.formation import (
    Decision,
    Membership,
    Report,
    Stage,
    checked_names,
    decide,
    node_number,
)

NAMES = ("a", "b", "c")
EMPTY = Membership()
ID, OTHER_ID, NEW_ID = (bytes([n]) * 16 for n in (1, 2, 9))


def prepared(cluster: bytes) -> Membership:
    return Membership(Stage.PREPARED, cluster)


def formed(cluster: bytes) -> Membership:
    return Membership(Stage.FORMED, cluster)


class Node(NamedTuple):
    """What a node has on disk, and what its process last heard of each node."""

    disk: Membership = EMPTY
    heard: tuple[Membership | None, ...] = (None, None, None)


class World(NamedTuple):
    nodes: tuple[Node, ...] = (Node(), Node(), Node())
    ids: int = 0
    wiped: int = 0

    def replacing(self, number: int, node: Node) -> "World":
        return self._replace(nodes=(*self.nodes[:number], node, *self.nodes[number + 1 :]))

    def decision(self, number: int) -> Decision:
        return decision(number, self.nodes[number], self.ids)


@cache
def decision(number: int, node: Node, ids: int) -> Decision:
    heard = {
        NAMES[other]: Report(membership, NAMES)
        for other, membership in enumerate(node.heard)
        if membership is not None
    }
    return decide(NAMES[number], node.disk, NAMES, heard, bytes([ids + 1]) * 16)


def after_decision(world: World, number: int) -> World:
    save = world.decision(number).save
    if save is None:
        return world
    formed_ids = {one.disk.cluster_id for one in world.nodes if one.disk.stage is Stage.FORMED}
    assert formed_ids <= {save.cluster_id}, "a second cluster beside a formed one"
    made = save.cluster_id == bytes([world.ids + 1]) * 16
    node = world.nodes[number]._replace(disk=save)
    return world.replacing(number, node)._replace(ids=world.ids + made)


def after_telling(world: World, teller: int, hearer: int) -> World:
    heard = list(world.nodes[hearer].heard)
    heard[teller] = world.nodes[teller].disk
    return world.replacing(hearer, world.nodes[hearer]._replace(heard=tuple(heard)))


def next_worlds(world: World, wipes: int) -> list[World]:
    found = []
    for number, node in enumerate(world.nodes):
        found.append(after_decision(world, number))
        # A crash after the save and before it is told is one at any later moment.
        found.append(world.replacing(number, Node(node.disk)))
        found += [after_telling(world, number, other) for other in range(3) if other != number]
        if world.wiped < wipes:
            found.append(world.replacing(number, Node())._replace(wiped=world.wiped + 1))
    return found


def settled(world: World) -> World:
    """The world after everybody has told and decided, again and again."""
    for _ in range(6):
        for number in range(3):
            for other in range(3):
                if other != number:
                    world = after_telling(world, number, other)
        for number in range(3):
            world = after_decision(world, number)
    return world


@cache
def check_ends_well(disks: tuple[Membership, ...], ids: int, wiped: int) -> None:
    """What was heard before does not matter, since everybody tells again."""
    world = settled(World(tuple(map(Node, disks)), ids, wiped))  # type: ignore[arg-type]
    ends = {node.disk for node in world.nodes} - {EMPTY}
    if len(ends) > 1:
        # The proposer's disk was lost while another node was about to save its first id.
        assert world.wiped
        assert {disk.stage for disk in ends} == {Stage.PREPARED}
        assert "different clusters" in world.decision(0).obstacle
        return
    assert {disk.stage for disk in ends} == {Stage.FORMED}
    for number, node in enumerate(world.nodes):
        # Only a node whose disk was lost stays outside, and it says so.
        assert world.decision(number).lost_disk == (node.disk == EMPTY)
        assert node.disk != EMPTY or world.wiped


@pytest.mark.parametrize(
    "wipes",
    [
        pytest.param(0),
        pytest.param(1, marks=pytest.mark.long),
        pytest.param(2, marks=pytest.mark.slow),
    ],
)
def test_every_order_of_telling_deciding_crashing_and_losing_disks(wipes: int) -> None:
    seen, queue = {World()}, deque([World()])
    while queue:
        world = queue.popleft()
        check_ends_well(tuple(node.disk for node in world.nodes), world.ids, world.wiped)
        for following in next_worlds(world, wipes):
            if following not in seen:
                seen.add(following)
                queue.append(following)
    assert len(seen) > 100


def reports(*memberships: Membership, names: tuple[str, ...] = NAMES) -> dict[str, Report]:
    return {
        name: Report(membership, names)
        for name, membership in zip(NAMES, memberships, strict=False)
    }


def test_two_new_disks_do_not_form_a_cluster_beside_the_third() -> None:
    decision = decide("a", EMPTY, NAMES, reports(EMPTY, EMPTY, formed(ID)), NEW_ID)
    assert decision == Decision(
        obstacle="c is part of a formed cluster, and this folder is empty", lost_disk=True
    )
    # While the third is silent, they wait for it.
    assert decide("a", EMPTY, NAMES, reports(EMPTY, EMPTY), NEW_ID) == Decision()


def test_a_wiped_proposer_takes_up_the_id_that_the_others_prepared() -> None:
    decision = decide("a", EMPTY, NAMES, reports(EMPTY, prepared(ID), EMPTY), NEW_ID)
    assert decision.save == prepared(ID)


def test_only_the_proposer_is_followed_and_only_all_prepared_form() -> None:
    assert decide("c", EMPTY, NAMES, reports(EMPTY, prepared(ID)), NEW_ID) == Decision()
    assert decide("c", EMPTY, NAMES, reports(prepared(ID)), NEW_ID).save == prepared(ID)
    some = reports(prepared(ID), prepared(ID), EMPTY)
    assert decide("a", prepared(ID), NAMES, some, NEW_ID) == Decision()


def test_two_ids_are_refused_in_a_sentence() -> None:
    heard = reports(EMPTY, prepared(ID), prepared(OTHER_ID))
    decision = decide("a", EMPTY, NAMES, heard, NEW_ID)
    assert decision.save is None
    assert "different clusters: 0101" in decision.obstacle
    assert "different clusters" in decide("b", prepared(ID), NAMES, heard, NEW_ID).obstacle


def test_other_names_are_refused_until_the_cluster_is_formed() -> None:
    other_names = reports(prepared(ID), names=("a", "b", "d"))
    decision = decide("b", EMPTY, NAMES, other_names, NEW_ID)
    assert decision.obstacle == "a was started with the nodes a, b, d; this node with a, b, c"
    # A formed cluster may have got other nodes since.
    grown = reports(formed(ID), names=("a", "b", "d"))
    assert decide("b", prepared(ID), NAMES, grown, NEW_ID).save == formed(ID)


def test_strangers_have_no_say() -> None:
    heard = {"z": Report(formed(OTHER_ID), ("z",)), **reports(prepared(ID))}
    assert decide("b", EMPTY, NAMES, heard, NEW_ID).save == prepared(ID)


def test_a_node_alone_forms_a_cluster_by_itself() -> None:
    first = decide("a", EMPTY, ("a",), {}, NEW_ID).save
    assert first == prepared(NEW_ID)
    assert decide("a", first, ("a",), {}, ID).save == formed(NEW_ID)
    assert decide("a", formed(NEW_ID), ("a",), {}, ID) == Decision()


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        ([], "begins with 1 or at least 3 nodes, not 0"),
        (["a", "b"], "two nodes survive no failure"),
        (["a", "b", "a"], "named twice"),
        (["a", "b", "c d"], "not a node name: 'c d'"),
        (["a", "b", "c" * 49], "not a node name"),
        ([f"n{number}" for number in range(33)], "at most 32 nodes, not 33"),
    ],
)
def test_bad_sets_of_names(names: list[str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        checked_names(names)


def test_numbers_follow_the_names() -> None:
    names = checked_names(["n3", "n1", "n2"])
    assert [node_number(name, names) for name in names] == [1, 2, 3]
    assert len(checked_names([f"n{number}" for number in range(32)])) == 32
