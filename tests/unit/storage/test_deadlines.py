"""The one number kept of deadlines, and the sets of sequences beside the deleted ones."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_storage.core import key_layout as keys
from contrail_storage.core.deleted import PAGE, DeletedSet
from contrail_storage.core.results import Writes
from contrail_storage.core.stream.deadlines import (
    NO_DEADLINE,
    Deadlines,
    ExemptSet,
    first_outside,
)
from tests.unit.storage.machine_rig import SHARD, RowStore


def seqs(*numbers: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    return np.array(numbers, np.int64)


def test_rows_lie_in_order_of_their_deadlines() -> None:
    deadlines, writes, store = Deadlines(SHARD), Writes(), RowStore()
    for deadline_ns, seq in ((300, 1), (5, 9), (5, 10), (1 << 40, 2)):
        deadlines.add(deadline_ns, seqs(seq), writes)
    store.write(writes.rows)
    rows = store.scan(keys.shard_key(keys.DEADLINE, SHARD))
    assert [keys.deadline_of(key) for key, _ in rows] == [(5, 9), (5, 10), (300, 1), (1 << 40, 2)]
    loaded = Deadlines(SHARD)
    loaded.load(rows)
    assert loaded.earliest_ns == deadlines.earliest_ns == 5


def test_what_is_added_during_a_look_is_not_lost_with_what_it_found() -> None:
    deadlines, writes = Deadlines(SHARD), Writes()
    assert deadlines.earliest_ns == NO_DEADLINE
    deadlines.add(50, seqs(1), writes)
    deadlines.begin_scan()
    assert deadlines.earliest_ns == 50
    deadlines.add(80, seqs(2), writes)
    deadlines.end_scan(NO_DEADLINE)
    assert deadlines.earliest_ns == 80
    deadlines.begin_scan()  # a look that fails changes nothing
    deadlines.begin_scan()
    assert deadlines.earliest_ns == 80


def test_nothing_is_cleared_where_nothing_is() -> None:
    deadlines, writes = Deadlines(SHARD), Writes()
    deadlines.clear(writes)
    assert writes.rows == []
    deadlines.add(50, seqs(1), writes)
    deadlines.clear(writes)
    assert [row[0] for row in writes.rows] == ["put", "delete_range"]
    assert deadlines.earliest_ns == NO_DEADLINE


numbers = st.sets(st.integers(1, 3 * PAGE) | st.sampled_from([PAGE - 1, PAGE, 2 * PAGE]))


@given(numbers.filter(len), numbers)
def test_discarded_sequences_are_unmarked_and_empty_pages_go(
    marked: set[int], gone: set[int]
) -> None:
    exempt, store = ExemptSet(SHARD), RowStore()
    writes = Writes()
    exempt.add_many(seqs(*sorted(marked)), writes)
    exempt.discard_many(seqs(*sorted(gone)), writes)
    store.write(writes.rows)
    left = marked - gone
    loaded = ExemptSet(SHARD)
    loaded.load(store.scan(keys.shard_key(keys.EXEMPT, SHARD)), 1)
    for found in (exempt, loaded):
        assert found.total == len(left)
        assert {seq for seq in marked | gone if seq in found} == left
        assert {number for number, _ in found.pages()} == {seq // PAGE for seq in left}


@given(numbers, numbers, st.integers(1, 3 * PAGE))
def test_sequence_outside_two_sets_is_the_first_one(
    some: set[int], others: set[int], seq: int
) -> None:
    sets = [DeletedSet(SHARD), ExemptSet(SHARD)]
    for one, chosen in zip(sets, (some, others), strict=True):
        if chosen:
            one.add_many(seqs(*sorted(chosen)), Writes())
    last_seq = 3 * PAGE
    outside = (each for each in range(seq, last_seq + 1) if each not in some | others)
    assert first_outside(sets, seq, last_seq) == next(outside, last_seq + 1)


@given(numbers, st.lists(st.integers(1, 3 * PAGE), unique=True).map(sorted))
def test_liveness_of_scattered_sequences_is_that_of_each(gone: set[int], asked: list[int]) -> None:
    deleted = DeletedSet(SHARD)
    if gone:
        deleted.add_many(seqs(*sorted(gone)), Writes())
    assert deleted.are_live(seqs(*asked)).tolist() == [each not in gone for each in asked]


@pytest.mark.parametrize("count", [PAGE, 2 * PAGE])
def test_run_that_fills_pages_is_passed_over(count: int) -> None:
    exempt = ExemptSet(SHARD)
    exempt.add_many(np.arange(PAGE, PAGE + count, dtype=np.int64), Writes())
    assert first_outside([exempt], PAGE, 9 * PAGE) == PAGE + count
