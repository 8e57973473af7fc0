"""Arrays of numbers against lists of them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from contrail_common.arrays import compact, distinct, spared_bytes


@given(st.lists(st.integers(0, 9) | st.integers(0, (1 << 32) - 1)))
def test_distinct_integers_are_a_set_in_order(values: list[int]) -> None:
    found = distinct(np.array(values, np.uint32))

    assert found.tolist() == sorted(set(values))
    assert found.dtype == np.uint32


@given(st.lists(st.integers(0, 2), max_size=4), st.integers(1, 3))
def test_compact_array_has_the_same_values_in_less_memory(values: list[int], times: int) -> None:
    array = np.array(values * times, np.int64)

    found = compact(array)

    assert (found.tolist(), found.dtype) == (array.tolist(), array.dtype)
    assert found.tobytes() == array.tobytes()
    assert found[1:].tolist() == array[1:].tolist()
    assert spared_bytes(found) == (8 * (len(array) - 1) if len({*values}) == 1 else 0)
