"""Timings count every value in the bucket that it belongs to."""

from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_common.timings import BUCKETS_S, Timings


@given(st.lists(st.floats(0, 100) | st.sampled_from(BUCKETS_S)))
def test_buckets_hold_what_is_no_larger_than_their_bound(values: list[float]) -> None:
    timings = Timings()
    for value in values:
        timings.add(value)
    counts = dict(timings.buckets())
    for bound in BUCKETS_S:
        assert counts[str(bound)] == sum(value <= bound for value in values)
    assert counts["+Inf"] == timings.count == len(values)
    assert timings.sum_s == pytest.approx(sum(values))


def test_bounds_ascend() -> None:
    assert all(bisect_left(BUCKETS_S, bound) == at for at, bound in enumerate(BUCKETS_S))
