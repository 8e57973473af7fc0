"""The log time of a group: what a new leader takes from the clocks of the members."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_common.timeunits import NS_PER_S
from contrail_storage.core.chain import Chain
from contrail_storage.core.log_clock import agree, lower_median
from contrail_storage.replica.group_time import GroupTime, PeerClocks
from contrail_storage.replica.log_time import Clocks

MINUTE_NS = 60 * NS_PER_S
DAY_NS = 24 * 60 * MINUTE_NS
YEAR_NS = 365 * DAY_NS
NOW_NS = 1_700_000_000 * NS_PER_S
JUMP_MAX_NS = 10 * MINUTE_NS


class FakeClocks(Clocks):
    def __init__(self) -> None:
        self.wall, self.boot = NOW_NS, 5 * NS_PER_S

    def wall_ns(self) -> int:
        return self.wall

    def boot_ns(self) -> int:
        return self.boot


class Member:
    """One member of a group of three, whose others have wall clocks of their own."""

    def __init__(self, last_ns: int = NOW_NS, skipped_ns: int = 0) -> None:
        self.clocks = FakeClocks()
        self.applied = Chain(last_ns, b"", skipped_ns)
        self.peers = PeerClocks(self.clocks)
        self.ahead: dict[str, int] = {"b": 0, "c": 0}
        self.time = GroupTime(
            ("b", "c"), self.clocks, self.peers, lambda: self.applied, JUMP_MAX_NS
        )

    def hear(self) -> None:
        for name, ahead_ns in self.ahead.items():
            self.peers.note(name, self.clocks.wall + ahead_ns)

    def apply(self) -> None:
        """Apply an entry of the leader of this moment."""
        self.applied = Chain(self.clocks.wall, b"", self.applied.skipped_ns)
        self.time.note_applied()

    def pass_time(self, nanoseconds: int) -> None:
        self.clocks.wall += nanoseconds
        self.clocks.boot += nanoseconds
        self.hear()
        self.time.look()

    def lead(self) -> int:
        """Begin to lead; return how far log time is ahead of the wall clock."""
        self.hear()
        self.time.begin_term()
        return self.time.now_ns() - self.clocks.wall


def test_time_that_a_follower_has_seen_pass_is_no_jump() -> None:
    member = Member()
    member.apply()
    member.pass_time(5 * MINUTE_NS)  # nobody publishes
    assert member.lead() == 0
    assert member.time.skipped_ns == 0


def test_clock_of_the_old_leader_was_slow_so_log_time_jumps_and_elapsed_time_does_not() -> None:
    member = Member(NOW_NS - 9 * MINUTE_NS)
    member.clocks.boot += 3 * NS_PER_S
    elapsed_ns = NOW_NS - 9 * MINUTE_NS + 3 * NS_PER_S
    assert member.lead() == 0
    assert member.time.elapsed_ns() == elapsed_ns
    assert member.time.skipped_ns == NOW_NS - elapsed_ns
    # A later leader adds to the sum that the entries have stated.
    other = Member(NOW_NS - MINUTE_NS, member.time.skipped_ns)
    other.lead()
    assert other.time.skipped_ns == member.time.skipped_ns + MINUTE_NS


@pytest.mark.parametrize("own", [False, True], ids=["a peer", "the leader"])
@pytest.mark.parametrize("both_answer", [False, True])
def test_one_clock_of_next_year_does_not_count(own: bool, both_answer: bool) -> None:
    member = Member()
    if own:
        member.clocks.wall += YEAR_NS
        member.ahead = dict.fromkeys("bc", -YEAR_NS)
    else:
        member.ahead["b"] = YEAR_NS
    if not both_answer:
        del member.ahead["c"]
    member.lead()
    assert member.time.now_ns() == NOW_NS
    assert (member.time.doubt, member.time.skipped_ns) == ("", 0)


def test_week_of_rest_is_believed_if_most_clocks_agree_and_else_waits_for_that() -> None:
    member = Member(NOW_NS - 7 * DAY_NS)
    member.ahead["b"] = 3 * DAY_NS  # c is right
    assert member.lead() == 0
    assert member.time.doubt == ""
    member = Member(NOW_NS - 7 * DAY_NS)
    member.ahead = {"b": 3 * DAY_NS, "c": 2 * DAY_NS}
    assert member.lead() == -7 * DAY_NS  # of three different ones, none is better
    assert "--max-clock-jump 10d" in member.time.doubt
    member.pass_time(MINUTE_NS)  # time goes on meanwhile
    assert member.time.now_ns() == NOW_NS - 7 * DAY_NS + MINUTE_NS
    elapsed_ns = member.time.elapsed_ns()
    member.ahead["b"] = 5 * NS_PER_S  # it is set right
    member.pass_time(0)
    assert member.time.now_ns() - member.clocks.wall in range(6 * NS_PER_S)
    assert (member.time.doubt, member.time.elapsed_ns()) == ("", elapsed_ns)


def test_leader_waits_for_clocks_of_a_majority_and_forgets_old_ones() -> None:
    member = Member(NOW_NS - MINUTE_NS)
    member.hear()
    member.clocks.wall += MINUTE_NS
    member.clocks.boot += MINUTE_NS
    member.time.begin_term()
    assert member.time.now_ns() == NOW_NS
    member.pass_time(0)
    assert member.time.now_ns() == member.clocks.wall
    assert member.time.skipped_ns == MINUTE_NS


def test_new_group_begins_now_and_has_no_jump() -> None:
    member = Member(0)
    assert member.lead() == 0
    assert member.time.skipped_ns == 0


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3 * MINUTE_NS),
            st.sampled_from(["wall", "b", "c"]),
            st.integers(-2 * MINUTE_NS, 2 * MINUTE_NS),
            st.booleans(),
        ),
        max_size=20,
    )
)
def test_steps_of_clocks_move_neither_time_backwards_nor_elapsed_time_ahead(
    events: list[tuple[int, str, int, bool]],
) -> None:
    member = Member()
    member.apply()
    member.lead()
    begun = member.time.elapsed_ns()
    before, elapsed, passed = member.time.now_ns(), begun, 0
    for passes_ns, name, step_ns, new_term in events:
        member.pass_time(passes_ns)
        passed += passes_ns
        if name == "wall":
            member.clocks.wall += step_ns
        else:
            member.ahead[name] += step_ns
        if new_term:
            member.applied = Chain(member.time.now_ns(), b"", member.time.skipped_ns)
            member.time.note_applied()
            member.time.end_term()
            member.lead()
        assert member.time.now_ns() >= before
        assert member.time.elapsed_ns() >= elapsed
        before, elapsed = member.time.now_ns(), member.time.elapsed_ns()
        # Log time gains at most a thousandth on a clock that is ahead; elapsed time does as well.
        assert elapsed - begun <= passed + passed // 1_000 + 1


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=5))
def test_lower_median_has_no_more_clocks_after_than_before(walls: list[int]) -> None:
    median = lower_median(walls)
    assert sum(one < median for one in walls) <= (len(walls) - 1) // 2
    assert sum(one > median for one in walls) <= len(walls) // 2


def test_clocks_agree_within_ten_seconds() -> None:
    assert agree([0, 10 * NS_PER_S, 50 * NS_PER_S], 2)
    assert not agree([0, 10 * NS_PER_S + 1, 50 * NS_PER_S], 2)
    assert not agree([0, 9 * NS_PER_S, 18 * NS_PER_S], 3)
    assert not agree([0], 2)
