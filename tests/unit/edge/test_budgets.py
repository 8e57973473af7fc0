"""Bounds over all connections: who is let in, and who is cut."""

from contrail_edge.http.budgets import BodyBudget, UnreadBudget

KIB = 1 << 10
MIB = 1 << 20


def test_slow_bodies_of_one_caller_leave_room_for_all_others() -> None:
    budget = BodyBudget(256 * MIB)
    held = [0] * 16
    for _ in range(16 * MIB // (64 * KIB)):
        for at, own in enumerate(held):
            if budget.take(own, 64 * KIB):
                held[at] += 64 * KIB
    assert min(held) > 8 * MIB
    assert budget.take(0, 8 * MIB)


def test_room_that_is_given_back_is_there_again_and_the_bound_holds() -> None:
    budget = BodyBudget(100)
    assert not budget.take(0, 101)
    assert budget.take(0, 100)
    assert not budget.take(100, 1)
    budget.give(1)
    assert budget.take(99, 1)


def test_lone_body_may_take_a_quarter() -> None:
    budget = BodyBudget(MIB)
    assert budget.take(0, 256 * KIB)
    assert not budget.take(256 * KIB, 1)


class Sink:
    """A connection that takes what it is told to."""

    def __init__(self, budget: UnreadBudget) -> None:
        self.budget = budget
        self.unread = 0
        self.open = True

    def get_write_buffer_size(self) -> int:
        return self.unread

    def abort(self) -> None:
        self.open = False

    def write(self, count: int) -> None:
        self.unread += count
        self.budget.wrote(self, count)


def test_sum_of_what_nobody_reads_stays_within_the_bound() -> None:
    budget = UnreadBudget(10 * MIB, 100)
    sinks = [Sink(budget) for _ in range(100)]
    for sink in sinks:
        sink.write(MIB)
        assert sum(one.unread for one in sinks if one.open) <= 10 * MIB
    assert [one.open for one in sinks] == [False] * 90 + [True] * 10
    assert (budget.held, budget.cut) == (10 * MIB, 90)


def test_reader_that_takes_what_it_is_sent_is_not_cut_for_those_that_do_not() -> None:
    budget = UnreadBudget(10 * MIB, 100)
    reader = Sink(budget)
    sinks = [Sink(budget) for _ in range(50)]
    for sink in sinks:
        reader.write(2 * MIB)
        sink.write(MIB)
        reader.unread -= 2 * MIB
    assert reader.open


def test_reader_that_holds_less_than_its_share_is_not_cut() -> None:
    budget = UnreadBudget(10 * MIB, 100)
    small = [Sink(budget) for _ in range(20)]
    for sink in small:
        sink.write(100 * KIB)
    for _ in range(20):
        Sink(budget).write(MIB)
    assert all(one.open for one in small)
    assert budget.held <= 10 * MIB


def test_bytes_that_were_taken_meanwhile_count_no_more() -> None:
    budget = UnreadBudget(10 * MIB, 100)
    sinks = [Sink(budget) for _ in range(100)]
    for sink in sinks:
        sink.write(MIB)
        sink.unread = 0
    assert all(one.open for one in sinks)
    assert budget.held <= 10 * MIB


def test_few_bytes_are_not_looked_after_until_there_are_more() -> None:
    budget = UnreadBudget(10 * MIB, 100)
    sink = Sink(budget)
    sink.write(8 * KIB)
    assert budget.held == 0
    sink.write(1)
    assert budget.held == 8 * KIB + 1
    budget.forget(sink)
    assert budget.held == 0
