"""Names by number: those of a dict, in no more slots than live numbers ask for."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_storage.core.subjects.subject_names import SubjectNames

LIVE = st.sets(st.integers(0, 60), max_size=40).map(sorted)


def of_live(sids: list[int], next_id: int) -> SubjectNames:
    names = pa.array([f"s.{sid}" for sid in sids], pa.string())
    cut = len(names) // 3
    pieces = [names[:cut], names[cut:]]
    return SubjectNames.of_live(np.array(sids, np.int64), pieces, next_id)


def check(names: SubjectNames, known: dict[int, str], end: int) -> None:
    """Each known number has a slot, and each slot its number."""
    slots = names.slots(np.arange(end))
    numbers = [names.number(at) for at in range(len(names.texts))]
    for sid in range(end):
        slot = int(slots[sid])
        inside = 0 <= slot < len(names.texts)
        assert slot == names.slot(sid) or not inside
        found = names.texts[slot] if inside else None
        assert found == known.get(sid)
        if inside:
            assert names.number(slot) == sid
        assert names.slot_from(sid) == sum(number < sid for number in numbers)
    every = np.arange(len(names.texts))
    assert names.slots(names.numbers(every)).tolist() == every.tolist()
    assert list(names) == [known.get(sid) for sid in range(names.base, names.next_id)]


@given(LIVE, st.integers(0, 5), st.integers(0, 8))
def test_every_live_number_has_a_place_and_the_others_none(
    sids: list[int], behind: int, more: int
) -> None:
    next_id = (sids[-1] + 1 if sids else 0) + behind
    names = of_live(sids, next_id)
    known = {sid: f"s.{sid}" for sid in sids}
    check(names, known, next_id)
    for sid in range(next_id, next_id + more):
        assert names.next_id == sid
        names.append(f"n.{sid}")
        known[sid] = f"n.{sid}"
    check(names, known, next_id + more)
    assert len(names.texts) - more <= len(sids) * 4 / 3


@given(LIVE, LIVE)
def test_live_numbers_above_all_others_are_added(sids: list[int], more: list[int]) -> None:
    next_id = sids[-1] + 1 if sids else 0
    names = of_live(sids, next_id)
    known = {sid: f"s.{sid}" for sid in sids}
    above = [next_id + sid for sid in more]
    if above:
        names = names.extended(np.array(above, np.int64), [f"n.{sid}" for sid in above])
        known |= {sid: f"n.{sid}" for sid in above}
    check(names, known, next_id + 61)


def test_one_old_number_does_not_keep_slots_for_all_after_it() -> None:
    names = of_live([3, 4_000_000_000, 4_000_000_001], 4_000_000_002)
    assert list(names.texts) == ["s.3", "s.4000000000", "s.4000000001"]
    assert names.slots(np.array([3, 4, 4_000_000_001])).tolist() == [0, -1, 2]
    assert (names[0], names[1], names[3_999_999_997]) == ("s.3", None, "s.4000000000")
    assert names[:2] == ["s.3", None]
    assert not names.all_in_a_row


def test_number_outside_of_the_names_is_refused() -> None:
    names = of_live([3, 9], 10)
    with pytest.raises(IndexError):
        names[7]
