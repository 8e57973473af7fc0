"""The state of a cluster, put together from the views of its nodes."""

from contrail_api.cluster.shown import ClusterStateJson, cluster_json
from contrail_link.contract.cluster import MemberView, NodeView, PeerView

NAMES = ("n1", "n2", "n3")


def peer(name: str, *, lag: int = 0, offline: bool = False, restoring: bool = False) -> PeerView:
    current = not (lag or offline or restoring)
    return PeerView(name, lag, 10, current, offline, restoring, False)


def member(
    group: int,
    *,
    term: int = 3,
    peers: tuple[PeerView, ...] | None = None,
    restoring: bool = False,
) -> MemberView:
    """A member that leads if it has peers or is alone."""
    leads = peers is not None
    return MemberView(
        group=group,
        role="leader" if leads else "follower",
        leader="",
        term=term,
        durable=10,
        commit=10,
        applied=10,
        restoring=restoring,
        suspect=False,
        peers=list(peers or ()),
    )


def node(name: str, groups: list[MemberView]) -> NodeView:
    number = NAMES.index(name) + 1
    return NodeView(
        name=name,
        number=number,
        cluster_id="c1",
        incarnation=1,
        version="1",
        nodes={one: f"{one}:7431" for one in NAMES},
        disk_bytes=100,
        disk_free_bytes=50,
        erasures_pending=0,
        problems={},
        table={0: NAMES} | {at: (one,) for at, one in enumerate(NAMES, 1)},
        groups=[*groups, member(number, peers=())],
    )


def whole(lag: int = 0, *, restoring: bool = False) -> ClusterStateJson:
    return cluster_json(
        [
            node("n1", [member(0, peers=(peer("n2"), peer("n3")))]),
            node("n2", [member(0)]),
            node("n3", [member(0, restoring=restoring)]),
        ]
        if not lag
        else [
            node("n1", [member(0, peers=(peer("n2"), peer("n3", lag=lag)))]),
            node("n2", [member(0)]),
            node("n3", [member(0)]),
        ]
    )


def test_whole_cluster_is_healthy() -> None:
    state = whole()
    assert (state.status, state.missing, state.meta_leader) == ("healthy", [], "n1")
    assert [one.up for one in state.nodes] == [True, True, True]
    meta = state.groups[0]
    assert [(one.role, one.current, one.lag) for one in meta.members] == [
        ("leader", True, 0),
        ("follower", True, 0),
        ("follower", True, 0),
    ]
    assert [one.kind for one in state.groups] == ["meta", "single", "single", "single"]


def test_member_that_is_behind_or_restoring_degrades_it() -> None:
    behind = whole(lag=7)
    assert (behind.status, behind.missing) == (
        "degraded",
        ["n3 is 7 entries behind in the meta group"],
    )
    restoring = whole(restoring=True)
    assert (restoring.status, restoring.missing) == (
        "degraded",
        ["n3 is restoring the meta group"],
    )
    # Its leader still takes it for current.
    assert not restoring.groups[0].members[2].current


def test_node_that_is_away_is_shown_as_such() -> None:
    state = cluster_json(
        [
            node("n1", [member(0, peers=(peer("n2"), peer("n3", offline=True)))]),
            node("n2", [member(0)]),
        ]
    )
    assert (state.status, state.missing) == (
        "degraded",
        [
            "n3 does not answer",
            "the group of streams with one replica on n3 has no leader",
        ],
    )
    assert [one.up for one in state.nodes] == [True, True, False]
    away = state.groups[0].members[2]
    assert (away.role, away.offline, away.current) == ("unknown", True, False)


def test_node_that_only_the_leader_or_only_this_process_reaches_is_up() -> None:
    state = cluster_json(
        [
            node("n1", [member(0, peers=(peer("n2", offline=True), peer("n3")))]),
            node("n2", [member(0)]),
        ]
    )
    assert [one.up for one in state.nodes] == [True, True, True]
    assert state.missing[:1] == ["n3 does not answer"]
    assert "n1, the leader of the meta group, does not hear n2" in state.missing


def test_minority_has_no_leader() -> None:
    state = cluster_json([node("n3", [member(0)])])
    assert state.status == "unavailable"
    assert "the meta group has no leader" in state.missing
    assert state.meta_leader == ""


def test_leader_of_the_highest_term_leads() -> None:
    """One that was cut off has not noticed yet."""
    state = cluster_json(
        [
            node("n1", [member(0, term=3, peers=(peer("n2"), peer("n3")))]),
            node("n2", [member(0, term=4, peers=(peer("n1"), peer("n3")))]),
            node("n3", [member(0, term=4)]),
        ]
    )
    assert (state.meta_leader, state.groups[0].term) == ("n2", 4)
    assert [one.role for one in state.groups[0].members] == ["follower", "leader", "follower"]
