"""Slices, bins and ticks: round, complete, and never more than fit."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_pipeline.summary import bins
from contrail_pipeline.summary.figures import Bin

TIMES = st.integers(0, 4_000_000_000 * bins.S)


@given(TIMES, TIMES)
def test_a_range_has_at_most_so_many_slices(one: int, other: int) -> None:
    first, last = sorted((one, other))
    width = bins.slice_width(first, last)
    assert last // width - first // width < bins.SLICES_MAX


@pytest.mark.parametrize(
    ("span", "width"),
    [
        (0, bins.MS),
        (119 * bins.MS, bins.MS),
        (120 * bins.MS, 2 * bins.MS),
        (bins.MINUTE, bins.S),
        (bins.HOUR, bins.MINUTE),
        (bins.DAY, 15 * bins.MINUTE),
        (bins.YEAR, 7 * bins.DAY),
        (100 * bins.YEAR, bins.YEAR),
    ],
)
def test_slices_have_a_round_width(span: int, width: int) -> None:
    assert bins.slice_width(0, span) == width


@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_every_size_has_a_bin(one: int, other: int) -> None:
    least, most = sorted((one, other))
    edges = bins.size_edges(least, most)
    assert edges == sorted(set(edges))
    assert 1 <= len(edges) <= 32
    assert edges[0] <= least
    assert edges[bins.bin_of(most, edges)] <= most


def test_sizes_that_are_alike_get_bins_of_one_width() -> None:
    assert bins.size_edges(290, 308) == list(range(290, 309))
    assert bins.size_edges(100, 500) == list(range(100, 501, 20))


def test_sizes_that_differ_much_get_bins_that_double() -> None:
    assert bins.size_edges(5, 1_000) == [4, 8, 16, 32, 64, 128, 256, 512]
    assert bins.size_edges(0, 100) == [0, 1, 2, 4, 8, 16, 32, 64]


def test_sizes_that_are_equal_have_one_bin() -> None:
    assert bins.size_edges(0, 0) == [0]
    assert bins.size_edges(300, 300) == [300]


@pytest.mark.parametrize(
    ("most", "edges"), [(0, [0]), (1, [0, 1]), (2, [0, 1]), (30, [0, 1, 3, 10, 30])]
)
def test_times_between_messages_get_bins_by_tens(most: int, edges: list[int]) -> None:
    assert bins.gap_edges(most) == edges


def test_a_value_at_an_edge_is_in_the_bin_above() -> None:
    edges = [0, 1, 3, 10]
    assert [bins.bin_of(value, edges) for value in (0, 1, 2, 3, 9, 10, 99)] == [0, 1, 1, 2, 2, 3, 3]


def test_empty_bins_are_kept() -> None:
    assert bins.filled_bins({0: 5, 2: 1}, [0, 10, 20]) == (
        Bin(0, 10, 5),
        Bin(10, 20, 0),
        Bin(20, None, 1),
    )


@given(st.integers(0, 10**15))
def test_the_scale_of_an_axis_reaches_its_highest_value(most: int) -> None:
    for found in (bins.ticks(most), bins.size_ticks(most)):
        assert found[0] == 0
        assert found[-1] >= max(most, 1)
        assert len(found) <= 6


def test_the_scale_of_an_axis_is_round() -> None:
    assert bins.ticks(15_000) == [0, 5_000, 10_000, 15_000]
    assert bins.size_ticks(77 << 10) == [0, 32 << 10, 64 << 10, 96 << 10]


@given(TIMES, st.integers(1, 200 * bins.YEAR), st.integers(2, 10))
def test_an_axis_of_times_has_at_most_so_many_ticks(start: int, span: int, count: int) -> None:
    _, found = bins.time_ticks(start, start + span, count)
    assert len(found) <= count
    assert all(start <= at <= start + span for at in found)


def test_an_axis_of_years_has_ticks_at_the_first_of_a_month() -> None:
    start = int(datetime(2013, 1, 15, tzinfo=UTC).timestamp()) * bins.S
    _, found = bins.time_ticks(start, start + bins.YEAR, 4)
    days = [datetime.fromtimestamp(at / bins.S, UTC) for at in found]
    assert [(day.month, day.day, day.hour) for day in days] == [
        (4, 1, 0),
        (7, 1, 0),
        (10, 1, 0),
        (1, 1, 0),
    ]


def test_gaps_between_slices() -> None:
    assert bins.gaps_between([(0, 5), (12, 12), (20, 30)]) == [7, 8]
    assert bins.gaps_between([(0, 5)]) == []
