"""The deleted set against a plain set of numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_storage.core import deleted
from contrail_storage.core.deleted import PAGE, DeletedSet
from contrail_storage.core.results import Writes
from tests.unit.storage.machine_rig import SHARD, RowStore

TOP = 3 * PAGE + 10
near_borders = st.sampled_from(
    [border + offset for border in (0, PAGE, 2 * PAGE, 3 * PAGE) for offset in (-2, -1, 0, 1, 2)]
).filter(lambda seq: seq > 0)
seqs = near_borders | st.integers(1, TOP)
steps = st.lists(
    st.tuples(st.just("add"), seqs)
    | st.tuples(st.just("trim"), seqs)
    | st.tuples(st.just("restart"), st.just(0))
    | st.tuples(st.just("clear"), st.just(0)),
    max_size=30,
)


def assert_runs(kept: DeletedSet, low: int, high: int, expected: list[int]) -> None:
    """Listed some at a time the runs hold exactly ``expected``."""
    listed: list[int] = []
    next_seq: int | None = low
    while next_seq is not None:
        runs, next_seq = kept.ranges(next_seq, high, 2)
        assert len(runs) <= 2
        for first, last in runs:
            listed += range(first, last + 1)
    assert listed == expected


@given(steps, st.tuples(seqs, seqs))
def test_deleted_set_is_a_set_of_sequences_above_the_first(
    script: list[tuple[str, int]], span: tuple[int, int]
) -> None:
    kept, store, plain, first_seq = DeletedSet(SHARD), RowStore(), set[int](), 1
    for kind, seq in script:
        writes = Writes()
        if kind == "add" and seq >= first_seq and seq not in plain:
            kept.add_many(np.array([seq]), writes)
            plain.add(seq)
        elif kind == "trim":
            first_seq = max(first_seq, seq)
            kept.trim(first_seq, writes)
            plain = {each for each in plain if each >= first_seq}
        elif kind == "clear":
            kept.clear(writes)
            plain.clear()
        elif kind == "restart":
            kept = DeletedSet(SHARD)
            kept.load(store.scan(b"T"), first_seq)
        store.write(writes.rows)
        low, high = sorted(span)
        assert kept.total == len(plain)
        assert all(seq in kept for seq in plain)
        assert kept.count(low, high) == len([each for each in plain if low <= each <= high])
        mask = kept.live_mask(low, high - low + 1)
        live = list(range(low, high + 1)) if mask is None else (mask.nonzero()[0] + low).tolist()
        assert live == [each for each in range(low, high + 1) if each not in plain]
        assert_runs(kept, low, high, sorted(each for each in plain if low <= each <= high))
        assert kept.next_live(low) == next(
            each for each in range(low, TOP + len(plain) + 2) if each not in plain
        )
        assert kept.previous_live(high) == next(
            each for each in range(high, -TOP, -1) if each not in plain
        )
        assert kept.are_live(np.arange(low, high + 1)).tolist() == [
            each not in plain for each in range(low, high + 1)
        ]


def test_listing_ends_after_some_pages_and_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deleted, "PAGE", 8)
    monkeypatch.setattr(deleted, "_PAGES_MAX", 2)
    kept = DeletedSet(SHARD)
    kept.add_many(np.arange(5, 30), Writes())
    assert kept.ranges(1, 100, 9) == ([(5, 15)], 16)
    assert kept.ranges(16, 100, 9) == ([(16, 29)], None)
    assert kept.ranges(1, 20, 9) == ([(5, 15)], 16)


def test_run_of_deleted_sequences_over_pages_is_skipped_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deleted, "PAGE", 8)
    kept = DeletedSet(SHARD)
    for seq in range(5, 30):
        kept.add_many(np.array([seq]), Writes())
    assert [kept.next_live(seq) for seq in (4, 5, 16, 29, 30)] == [4, 30, 30, 30, 30]


def test_no_row_is_left_of_pages_below_the_first_sequence() -> None:
    kept, store = DeletedSet(SHARD), RowStore()
    for first_seq in (5, 10, 2 * PAGE):
        writes = Writes()
        if first_seq == 5:
            kept.add_many(np.array([7]), writes)
        kept.trim(first_seq, writes)
        store.write(writes.rows)
    assert store.rows == {}


def test_inverted_range_holds_nothing() -> None:
    kept = DeletedSet(SHARD)
    kept.add_many(np.array([5]), Writes())
    assert kept.count(6, 4) == 0


@pytest.mark.long
@given(st.sets(seqs, min_size=1), st.sets(seqs, min_size=1))
def test_many_at_once_are_marked_like_one_by_one(first: set[int], second: set[int]) -> None:
    at_once, singly, store = DeletedSet(SHARD), DeletedSet(SHARD), RowStore()
    for some in (first, second - first):
        writes = Writes()
        if some:
            at_once.add_many(np.array(sorted(some)), writes)
        store.write(writes.rows)
        for seq in some:
            singly.add_many(np.array([seq]), Writes())
    again = DeletedSet(SHARD)
    again.load(store.scan(b"T"), 1)
    for kept in (at_once, singly, again):
        assert kept.total == len(first | second)
        assert [seq for seq in range(TOP + 1) if seq in kept] == sorted(first | second)


def test_pages_without_a_live_message_are_one_object() -> None:
    kept = DeletedSet(SHARD)
    kept.add_many(np.arange(PAGE, 4 * PAGE), Writes())
    loaded = DeletedSet(SHARD)
    loaded.load([(number.to_bytes(8, "big"), bytes(page)) for number, page in kept.pages()], 1)
    assert len({id(page) for _, page in kept.pages() + loaded.pages()}) == 1
    assert loaded.total == 3 * PAGE


def test_search_for_a_live_sequence_ends_at_its_stop() -> None:
    kept = DeletedSet(SHARD)
    kept.add_many(np.arange(1, 5 * PAGE), Writes())
    assert kept.next_live(1) == 5 * PAGE
    assert 2 * PAGE <= kept.next_live(1, 2 * PAGE) < 5 * PAGE
