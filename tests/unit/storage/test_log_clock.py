"""Log time: never backwards, near the wall clock, and not led astray by its steps."""

from hypothesis import given
from hypothesis import strategies as st

from contrail_common.timeunits import NS_PER_S
from contrail_storage.core.log_clock import ClockRecord, LogClock, doubt

DAY_NS = 86_400 * NS_PER_S
times = st.integers(0, 2 * 10**18)


@given(
    times, times, times,
    st.lists(st.tuples(st.integers(-(10**12), 10**12), st.integers(-(10**6), 10**12))),
)  # fmt: skip
def test_log_time_never_runs_backwards_nor_faster_than_boot_time_nor_stands_still(
    time_ns: int, wall_ns: int, boot_ns: int, readings: list[tuple[int, int]]
) -> None:
    clock = LogClock(time_ns, boot_ns)
    before_ns = clock.read(wall_ns, boot_ns)
    assert before_ns == time_ns
    highest_ns, passed_ns = boot_ns, 0
    for wall_step_ns, boot_step_ns in readings:
        wall_ns += wall_step_ns
        boot_ns += boot_step_ns
        elapsed_ns = max(boot_ns - highest_ns, 0)
        highest_ns = max(highest_ns, boot_ns)
        passed_ns += elapsed_ns + elapsed_ns // 1_000
        now_ns = clock.read(wall_ns, boot_ns)
        assert now_ns - before_ns >= elapsed_ns // 2
        assert now_ns - time_ns <= passed_ns
        before_ns = now_ns


@given(times, st.integers(1, 10**15), st.lists(st.integers(1, 10**13), min_size=1))
def test_log_time_that_is_ahead_waits_for_the_wall_clock_and_continues_with_it(
    wall_ns: int, ahead_ns: int, steps: list[int]
) -> None:
    clock = LogClock(wall_ns + ahead_ns, 0)
    boot_ns = 0
    for step_ns in steps:
        boot_ns += step_ns
        left_ns = max(ahead_ns - boot_ns // 2, 0)
        distance_ns = clock.read(wall_ns + boot_ns, boot_ns) - (wall_ns + boot_ns)
        assert left_ns - len(steps) <= distance_ns <= left_ns + len(steps)


def test_step_forth_of_the_wall_clock_is_followed_by_a_millisecond_a_second() -> None:
    clock = LogClock(100 * NS_PER_S, 0)
    assert clock.read(3_701 * NS_PER_S, NS_PER_S) == 101 * NS_PER_S + 1_000_000


def test_step_back_that_is_undone_leaves_nothing_behind() -> None:
    clock = LogClock(5_000 * NS_PER_S, 0)
    assert clock.read(1_400 * NS_PER_S, 600 * NS_PER_S) == 5_300 * NS_PER_S
    assert clock.read(5_601 * NS_PER_S, 601 * NS_PER_S) == 5_601 * NS_PER_S


def test_wall_clock_that_stays_behind_is_believed_when_it_has_come_up() -> None:
    clock = LogClock(110 * NS_PER_S, 0)
    assert clock.read(120 * NS_PER_S, 20 * NS_PER_S) == 120 * NS_PER_S
    # From here on what it does forth is a step again.
    assert clock.read(200 * NS_PER_S, 21 * NS_PER_S) == 121 * NS_PER_S + 1_000_000


def test_small_error_is_slewed_away_and_then_stays_away() -> None:
    clock = LogClock(100 * NS_PER_S, 0)
    wall_ns = 100 * NS_PER_S + 500_000
    assert clock.read(wall_ns + NS_PER_S, NS_PER_S) == wall_ns + NS_PER_S
    assert clock.read(wall_ns + 2 * NS_PER_S, 2 * NS_PER_S) == wall_ns + 2 * NS_PER_S


def test_time_that_passed_is_known_while_the_machine_was_up() -> None:
    record = ClockRecord("boot-1", 50, 1_000)
    assert record.known_ns("boot-1", 50 + DAY_NS) == 1_000 + DAY_NS
    assert record.known_ns("boot-2", 50 + DAY_NS) == 1_000
    assert record.known_ns("boot-1", 49) == 1_000  # a copy of the machine
    assert ClockRecord("", 50, 1_000).known_ns("", 50 + DAY_NS) == 1_000


def test_wall_clock_is_doubted_beyond_the_bound_alone() -> None:
    bound_ns = 600 * NS_PER_S
    assert doubt(1_000, 1_000 + bound_ns, bound_ns) == ""
    assert doubt(DAY_NS, 0, bound_ns) == ""
    reason = doubt(0, bound_ns + 1, bound_ns)
    assert "the system clock (1970-01-01T00:10:00Z) is 10 minutes ahead" in reason
    assert "--max-clock-jump 1d" in reason
    assert "2 days ahead" in doubt(0, 2 * DAY_NS + 1, bound_ns)
    assert "--max-clock-jump 3d" in doubt(0, 2 * DAY_NS + 1, bound_ns)
