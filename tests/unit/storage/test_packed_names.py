"""Packed names: those of a list, as texts and as Arrow arrays."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_storage.core.subjects import packed_names
from contrail_storage.core.subjects.packed_names import CHUNK, PackedNames

NAME = st.none() | st.sampled_from(["a", "b.c", "dé.ü", "日本.語", "x" * 300])
NAMES = st.lists(NAME, max_size=20)


@given(st.lists(NAMES, max_size=4), NAMES, st.data())
def test_names_are_those_of_a_list(
    pieces: list[list[str | None]], added: list[str | None], data: st.DataObject
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_names, "CHUNK", 4)
        patch.setattr(packed_names, "_PIECE", 8)
        # Parts of longer arrays, as they come from a slice.
        arrays = [pa.array(["before", *each, "after"], pa.string())[1:-1] for each in pieces]
        names = PackedNames.of(arrays)
        expected = [name for each in pieces for name in each] + added
        for name in added:
            names.append(name)
        assert list(names) == expected
        assert (len(names), names.size) == (len(expected), len(expected))
        assert [names[slot] for slot in range(len(expected))] == expected
        assert names[1:-1] == expected[1:-1]
        with pytest.raises(IndexError):
            names[len(expected)]
        low = data.draw(st.integers(0, len(expected)))
        high = data.draw(st.integers(low, len(expected)))
        found = names.array(low, high)
        assert found.to_pylist() == [name or "" for name in expected[low:high]]
        slots = data.draw(st.sets(st.integers(0, len(expected) - 1))) if expected else set()
        ordered = sorted(slots)
        turned = data.draw(st.integers(0, len(ordered)))
        ordered = ordered[turned:] + ordered[:turned]
        found = pa.chunked_array(names.arrays(np.array(ordered, np.int64)), pa.string())
        assert found.to_pylist() == [expected[slot] or "" for slot in ordered]


def test_names_of_a_chunk_are_not_copied() -> None:
    names = PackedNames()
    for number in range(CHUNK + 1):
        names.append(f"s.{number}")
    first, second = names.array(5, 10), names.array(6, CHUNK)
    assert first.buffers()[2].address == second.buffers()[2].address
    assert names.array(CHUNK - 1, CHUNK + 1).to_pylist() == [f"s.{CHUNK - 1}", f"s.{CHUNK}"]


def test_position_below_zero_is_an_empty_text() -> None:
    names = pa.array(["a", "b"], pa.string())
    taken = packed_names.take(names, np.array([1, -1, 0]))
    assert list(PackedNames.of([taken])) == ["b", None, "a"]
