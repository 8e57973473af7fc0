"""The pending deliveries of a consumer agree with a dict, whatever happens to them."""

from collections.abc import Iterator
from itertools import pairwise
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_common.timeunits import INT64_MAX
from contrail_storage.core import pending_deliveries
from contrail_storage.core.pending_deliveries import Pending, PendingDeliveries

SMALL = 8
pending_rows = msgspec.msgpack.Decoder(dict[int, Pending])
seqs = st.integers(1, 80)
some_seqs = st.lists(seqs, max_size=30)
times = st.one_of(st.integers(0, 50), st.just(INT64_MAX))
steps = st.one_of(
    st.tuples(st.just("deliver"), some_seqs, times),
    st.tuples(st.just("deliver_next"), st.integers(1, 30), times),
    st.tuples(st.just("remove"), some_seqs, st.just(0)),
    st.tuples(st.just("remove_all"), some_seqs, st.just(0)),
    st.tuples(st.just("remove_below"), seqs, st.just(0)),
    st.tuples(st.just("postpone"), some_seqs, times),
    st.tuples(st.just("shift"), st.lists(st.integers(-5, 5), min_size=1, max_size=3), st.just(0)),
    st.tuples(st.just("take_due"), some_seqs, st.integers(1, 9)),
    st.tuples(st.just("give_back"), some_seqs, st.just(0)),
    st.tuples(st.just("give_all_back"), st.just(0), st.just(0)),
    st.tuples(st.just("pass_time"), st.integers(1, 20), st.just(0)),
    st.tuples(st.just("save"), st.integers(0, 3), st.just(0)),
    st.tuples(st.just("restart"), st.just(0), st.just(0)),
)


@pytest.fixture(autouse=True, scope="module")
def small_chunks() -> Iterator[None]:
    with (
        patch.object(pending_deliveries, "CHUNK", SMALL),
        patch.object(pending_deliveries, "_FEW", 2),
        patch.object(pending_deliveries, "CHUNKS_READ_MAX", 1_000),
    ):
        yield


class Story:
    """The deliveries, and a dict of them: consumer sequence, attempts and deadline."""

    def __init__(self) -> None:
        self.real = PendingDeliveries()
        self.plain: dict[int, Pending] = {}
        self.taken: set[int] = set()
        self.rows: dict[int, bytes] = {}
        self.number = self.top = 0
        self.now_ns = 10

    # Steps ---------------------------------------------------------------------------------------

    def deliver(self, chosen: list[int], deadline_ns: int) -> None:
        for seq in chosen:
            self.number += 1
            self.top = max(self.top, seq)
            item = self.real.get(seq)
            assert (item is None) == (seq not in self.plain)
            if item is None:
                self.real.add(seq, Pending(self.number, 1, deadline_ns))
                self.plain[seq] = Pending(self.number, 1, deadline_ns)
            else:
                self.real.redeliver(seq, item, deadline_ns)
                self.plain[seq].attempts += 1
                self.plain[seq].deadline_ns = deadline_ns
            self.taken.discard(seq)

    def deliver_next(self, count: int, deadline_ns: int) -> None:
        chosen = list(range(self.top + 1, self.top + 1 + 2 * count, 2))
        wrong = [chosen, chosen[::-1], [chosen[0], chosen[0]], [min(self.plain, default=0)], []]
        for each in wrong[1 + (count == 1) :]:
            assert not self.plain or not self.real.are_above(each)
        assert self.real.are_above(chosen)
        self.real.add_first(chosen, self.number + 1, deadline_ns)
        for seq in chosen:
            self.number += 1
            self.plain[seq] = Pending(self.number, 1, deadline_ns)
        self.top = chosen[-1]

    def remove(self, chosen: list[int], _: int) -> None:
        for seq in chosen:
            assert self.real.remove(seq) == self.plain.pop(seq, None)

    def remove_all(self, chosen: list[int], _: int) -> None:
        removed, missing = self.real.remove_all(chosen)
        assert sorted(removed) == sorted(self.plain.keys() & set(chosen))
        assert sorted([*removed, *missing]) == sorted(chosen)
        for seq in removed:
            del self.plain[seq]

    def remove_below(self, end_seq: int, _: int) -> None:
        below = sorted(seq for seq in self.plain if seq < end_seq)
        assert self.real.remove_below(end_seq) == below
        for seq in below:
            del self.plain[seq]

    def postpone(self, chosen: list[int], deadline_ns: int) -> None:
        for seq in self.plain.keys() & set(chosen):
            self.real.postpone(seq, self.real[seq], deadline_ns)
            self.plain[seq].deadline_ns = deadline_ns
            self.taken.discard(seq)

    def shift(self, changes: list[int], _: int) -> None:
        self.real.shift(tuple(changes))
        for item in self.plain.values():
            change_ns = changes[min(item.attempts, len(changes)) - 1]
            item.deadline_ns = min(item.deadline_ns + change_ns, INT64_MAX)

    def take_due(self, in_flight: list[int], most: int) -> None:
        found = self.real.take_due(self.now_ns, in_flight, most)
        due = {seq for seq, item in self.plain.items() if item.deadline_ns <= self.now_ns}
        assert len(found) <= most
        assert found == sorted(set(found))
        assert due.difference(in_flight).issuperset(found)
        left = due.difference(in_flight, self.taken, found)
        assert not left or (len(found) == most and min(left) > found[-1])
        self.taken |= due.intersection(in_flight).union(found)

    def give_back(self, chosen: list[int], _: int) -> None:
        self.real.note(chosen)
        self.taken.difference_update(chosen)

    def give_all_back(self, _: int, __: int) -> None:
        self.real.note_all()
        self.taken.clear()

    def pass_time(self, step_ns: int, _: int) -> None:
        self.now_ns += step_ns
        self.real.drop_stale(self.now_ns)

    def save(self, encoded: int, _: int) -> None:
        self.real.encode_some(encoded)
        changed, gone = self.real.take_rows()
        for number in gone:
            del self.rows[number]
        self.rows |= changed
        assert len(self.rows) == self.real.rows
        assert self.real.row_bytes == sum(map(len, self.rows.values()))
        stored = [self.real.without_rows(), *self.rows.values()]
        found = [each for row in stored for each in pending_rows.decode(row).items()]
        assert sorted(found) == sorted(self.plain.items())

    def restart(self, _: int, __: int) -> None:
        self.save(0, 0)
        if self.rows:
            self.real = PendingDeliveries.of_rows(self.rows.items())
        else:
            self.real = PendingDeliveries(pending_rows.decode(self.real.without_rows()))
        self.taken.clear()

    # Checks --------------------------------------------------------------------------------------

    def check(self, at: int) -> None:
        real, plain = self.real, self.plain
        self.taken &= plain.keys()
        watched = [item.deadline_ns for seq, item in plain.items() if seq not in self.taken]
        earliest_ns = real.earliest_ns
        assert (INT64_MAX if earliest_ns is None else earliest_ns) <= min(
            watched, default=INT64_MAX
        )
        self.check_chunks()
        assert len(real) == len(plain)
        assert bool(real) == bool(plain)
        assert real.redelivered == sum(item.attempts > 1 for item in plain.values())
        assert real.count_from(at) == sum(seq >= at for seq in plain)
        assert (at in real) == (at in plain)
        for wanted in (range(at), range(at, at + 2)):
            assert real.among(set(wanted)) == plain.keys() & set(wanted)
        if at % 3:  # otherwise the changes of deadlines stay to be made
            return
        assert list(real) == sorted(plain)
        assert real.to_dict() == plain
        assert real.lowest() == next(iter(sorted(plain.items())), None)
        latest_ns = max((item.deadline_ns for item in plain.values()), default=-1)
        assert real.is_any_due_from(at) == (latest_ns >= at)

    def check_chunks(self) -> None:
        firsts, chunks = self.real._firsts, self.real._chunks
        assert len(firsts) == len(chunks)
        assert firsts == sorted(set(firsts))
        sizes = [len(chunk.entries) for chunk in chunks]
        assert all(0 < size <= 2 * SMALL for size in sizes)
        for end_seq in (0, self.top // 2, self.top + 1):
            cuts = [0, *self.real.cuts(end_seq, SMALL), end_seq]
            for low, high in pairwise(cuts):
                count = sum(low < seq <= high for seq in self.plain if seq < end_seq)
                assert count < 4 * SMALL


@given(st.lists(st.tuples(steps, seqs), max_size=60))
def test_deliveries_agree_with_a_dict(script: list[tuple[tuple[str, object, int], int]]) -> None:
    story = Story()
    for (step, what, number), at in script:
        getattr(story, step)(what, number)
        story.check(at)


def test_few_that_are_left_everywhere_are_joined() -> None:
    pending = PendingDeliveries()
    for start in range(1, 10_000, 100):
        pending.add_first(list(range(start, start + 100)), start, 5)
        pending.remove_all([seq for seq in range(start, start + 100) if seq % 50])
    assert len(pending) == 200
    assert len(pending._chunks) < 100
    assert list(pending) == list(range(50, 10_001, 50))


def test_only_changed_chunks_are_written_again() -> None:
    pending = PendingDeliveries()
    pending.add_first(list(range(1, 100 * SMALL + 1)), 1, 5)
    rows, gone = pending.take_rows()
    assert (len(rows), gone) == (100, [])
    pending.postpone(1, pending[1], 9)
    pending.remove(50)
    pending.add_first([100 * SMALL + 1], 1, 5)
    pending.remove_below(20)
    rows, gone = pending.take_rows()
    assert len(gone) == 2
    assert len(rows) == 3


def test_rows_with_changed_deadlines_are_written_again() -> None:
    pending = PendingDeliveries()
    pending.add_first(list(range(1, 3 * SMALL + 1)), 1, 5)
    rows, _ = pending.take_rows()
    pending.shift((7,))
    rows |= pending.take_rows()[0]
    found = [item for row in rows.values() for item in pending_rows.decode(row).values()]
    assert {item.deadline_ns for item in found} == {12}


def test_dropped_chunks_are_freed_a_few_at_a_time() -> None:
    pending = PendingDeliveries()
    pending.add_first(list(range(1, 100 * SMALL + 1)), 1, 5)
    pending.remove_below(90 * SMALL)
    turns = 0
    while pending.has_dropped:
        assert pending.free_dropped() == pending.has_dropped
        turns += 1
    assert 5 < turns < 20
    assert not pending.free_dropped()


def test_search_that_is_long_is_continued_by_the_next() -> None:
    pending = PendingDeliveries()
    pending.add_first(list(range(1, 10 * SMALL + 1)), 1, 5)
    with patch.object(pending_deliveries, "CHUNKS_READ_MAX", 4):
        for seq in list(pending)[:-1]:
            pending.postpone(seq, pending[seq], 50)
        found = []
        while pending.earliest_ns is not None and pending.earliest_ns <= 10:
            found.append(pending.take_due(10, (), 3))
        assert found == [[], [], [10 * SMALL]]


def test_what_was_due_while_it_was_in_flight_is_found_once_it_is_not() -> None:
    pending = PendingDeliveries()
    pending.add(7, Pending(1, 1, 5))
    assert pending.take_due(10, {7}, 3) == []
    assert pending.take_due(10, (), 3) == []  # the search has moved on
    pending.note_passed([6, 7])
    assert pending.take_due(10, (), 3) == [7]
