"""Numbers by name: those of a dict, also when names die and come again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_storage.core.subject_ids import SubjectIds


class Names:
    """Names from a base on, as a table of subjects has them."""

    def __init__(self, base: int) -> None:
        self.base = base
        self.names: list[str | None] = []


@given(
    st.integers(0, 20),
    st.lists(st.tuples(st.sampled_from("abcdefghijkl"), st.booleans()), max_size=80),
    st.integers(0, 80),
)
def test_numbers_are_those_that_a_dict_has(
    base: int, steps: list[tuple[str, bool]], cut_at: int
) -> None:
    table = Names(base)
    ids = SubjectIds(table)
    known: dict[str, int] = {}
    for step, (name, removed) in enumerate(steps):
        if removed and name in known:
            ids.remove(name)
            del known[name]
        elif name not in known:
            sid = table.base + len(table.names)
            ids.add(name, sid)
            table.names.append(name)
            known[name] = sid
        if step == cut_at:  # as when dead names at the low end are let go of
            low = min(known.values(), default=table.base + len(table.names)) - table.base
            low -= low % 8
            alive = {sid - table.base for sid in known.values()}
            table.names = [
                one if at in alive else None for at, one in enumerate(table.names) if at >= low
            ]
            table.base += low
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
    table.names.append("a")
    ids.clear()
    table.base, table.names = 5, []
    ids.add("a", 5)
    table.names.append("a")
    assert ids["a"] == 5
