"""Log time: never backwards, near the wall clock, and not led astray by its steps."""

from hypothesis import given
from hypothesis import strategies as st

from contrail_storage.node.log_clock import LogClock

SECOND_NS = 1_000_000_000
times = st.integers(0, 2 * 10**18)


@given(
    times, times, times,
    st.lists(st.tuples(st.integers(-(10**12), 10**12), st.integers(-(10**6), 10**12))),
)  # fmt: skip
def test_log_time_never_runs_backwards_and_never_strays_from_boot_time(
    last_entry_ns: int, wall_ns: int, boot_ns: int, readings: list[tuple[int, int]]
) -> None:
    clock = LogClock(last_entry_ns, wall_ns, boot_ns)
    before_ns = clock.read(wall_ns, boot_ns)
    assert before_ns == max(last_entry_ns, wall_ns)
    highest_ns = boot_ns
    for wall_step_ns, boot_step_ns in readings:
        wall_ns += wall_step_ns
        boot_ns += boot_step_ns
        elapsed_ns = max(boot_ns - highest_ns, 0)
        highest_ns = max(highest_ns, boot_ns)
        now_ns = clock.read(wall_ns, boot_ns)
        assert now_ns >= before_ns
        assert abs(now_ns - before_ns - elapsed_ns) <= elapsed_ns // 1_000
        before_ns = now_ns


def test_step_of_the_wall_clock_is_followed_by_a_millisecond_a_second() -> None:
    clock = LogClock(0, 100 * SECOND_NS, 0)
    ahead_ns = clock.read(3_701 * SECOND_NS, SECOND_NS)
    assert ahead_ns == 101 * SECOND_NS + 1_000_000
    behind_ns = clock.read(0, 2 * SECOND_NS)
    assert behind_ns == 102 * SECOND_NS


def test_small_error_is_slewed_away_and_then_stays_away() -> None:
    clock = LogClock(0, 100 * SECOND_NS, 0)
    wall_ns = 100 * SECOND_NS + 500_000
    assert clock.read(wall_ns + SECOND_NS, SECOND_NS) == wall_ns + SECOND_NS
    assert clock.read(wall_ns + 2 * SECOND_NS, 2 * SECOND_NS) == wall_ns + 2 * SECOND_NS


def test_entries_from_the_future_hold_log_time_until_the_slew_has_caught_up() -> None:
    clock = LogClock(200 * SECOND_NS, 100 * SECOND_NS, 0)
    assert clock.read(101 * SECOND_NS, SECOND_NS) == 201 * SECOND_NS - 1_000_000
