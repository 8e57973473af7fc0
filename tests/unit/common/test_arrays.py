"""Distinct integers, against a set of them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from contrail_common.arrays import distinct


@given(st.lists(st.integers(0, 9) | st.integers(0, (1 << 32) - 1)))
def test_distinct_integers_are_a_set_in_order(values: list[int]) -> None:
    found = distinct(np.array(values, np.uint32))

    assert found.tolist() == sorted(set(values))
    assert found.dtype == np.uint32
