"""Numbers by name: those of a dict, also when names die and come again."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_storage.core.subjects.subject_names import SubjectIds, SubjectNames


class Names:
    """Names in their places, as a table of subjects has them."""

    def __init__(self, young: int) -> None:
        self.numbered = SubjectNames(young)


@given(
    st.integers(0, 20),
    st.lists(st.tuples(st.sampled_from("abcdefghijkl"), st.booleans()), max_size=80),
    st.sets(st.integers(0, 80)),
)
def test_numbers_are_those_that_a_dict_has(
    base: int, steps: list[tuple[str, bool]], laid_out_at: set[int]
) -> None:
    table = Names(base)
    ids = SubjectIds(table)
    known: dict[str, int] = {}
    for step, (name, removed) in enumerate(steps):
        if removed and name in known:
            ids.remove(name)
            del known[name]
        elif name not in known:
            sid = table.numbered.next_id
            ids.add(name, sid)
            table.numbered.append(name)
            known[name] = sid
        if step in laid_out_at:
            live = sorted((sid, one) for one, sid in known.items())
            sids = np.array([sid for sid, _ in live], np.int64)
            texts = [one for _, one in live]
            table.numbered = SubjectNames.of_live(sids, texts, table.numbered.next_id)
        assert dict(ids) == known
        assert len(ids) == len(known)
        assert {one: ids.get(one) for one in "abc"} == {one: known.get(one) for one in "abc"}


def test_name_without_a_number_is_not_there() -> None:
    ids = SubjectIds(Names(0))
    assert "a" not in ids
    assert ids.get("a") is None
    with pytest.raises(KeyError):
        ids["a"]


def test_table_that_was_cleared_begins_anew_at_any_number() -> None:
    table = Names(3)
    ids = SubjectIds(table)
    ids.add("a", 3)
    table.numbered.append("a")
    ids.clear()
    table.numbered = SubjectNames(5)
    ids.add("a", 5)
    table.numbered.append("a")
    assert ids["a"] == 5
