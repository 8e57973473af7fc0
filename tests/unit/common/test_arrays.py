"""Arrays of numbers against lists of them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from contrail_common.arrays import compact, consecutive, distinct, spared_bytes


@given(st.sampled_from([0, 1, 2_046, 2_047, 2_048, 2_049]), st.integers(0, 3))
def test_consecutive_numbers_are_those_of_a_range(start: int, count: int) -> None:
    assert consecutive(start, start + count).tolist() == list(range(start, start + count))


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
