"""Numbers by name: those of a dict, also when names die and come again."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_storage.core.subjects import packed_names, subject_ids
from contrail_storage.core.subjects.subject_ids import SubjectIds
from contrail_storage.core.subjects.subject_names import SubjectNames

NAMES = [f"{letter}.{number}" for letter in "abcdef" for number in range(6)]


def check(ids: SubjectIds, known: dict[str, int]) -> None:
    assert len(ids) == len(known)
    assert {name: ids.get(name) for name in NAMES} == {name: known.get(name) for name in NAMES}


@pytest.mark.parametrize("equal", [False, True], ids=["any hashes", "equal hashes"])
@given(
    st.integers(0, 20),
    st.lists(st.tuples(st.sampled_from(NAMES), st.booleans()), max_size=60),
    st.sets(st.integers(0, 60)),
)
def test_numbers_are_those_that_a_dict_has(
    equal: bool, base: int, steps: list[tuple[str, bool]], laid_out_at: set[int]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_names, "CHUNK", 4)
        patch.setattr(packed_names, "_PIECE", 8)
        patch.setattr(subject_ids, "_PART", 2)
        if equal:
            patch.setattr(subject_ids, "hash", lambda name: -len(name), raising=False)
        _agree(base, steps, laid_out_at)


def _agree(base: int, steps: list[tuple[str, bool]], laid_out_at: set[int]) -> None:
    names = SubjectNames(base)
    ids = SubjectIds(names)
    known: dict[str, int] = {}
    for step, (name, removed) in enumerate(steps):
        if removed and name in known:
            ids.remove(name, known.pop(name))
        elif name not in known:
            sid = names.next_id
            ids.add(name, sid)
            names.append(name)
            known[name] = sid
        if step in laid_out_at:
            live = sorted((sid, one) for one, sid in known.items())
            sids = np.array([sid for sid, _ in live], np.int64)
            texts = pa.array([one for _, one in live], pa.string())
            names = ids.names = SubjectNames.of_live(sids, [texts], names.next_id)
        check(ids, known)
    filled = SubjectIds(names)
    filled.fill([(list(known), np.array(list(known.values()), np.uint32))])
    check(filled, known)
    for at, name in enumerate(NAMES):
        if name in known:
            filled.remove(name, known.pop(name))
        else:
            filled.add(name, known.setdefault(name, names.next_id))
            names.append(name)
        if at % 5 == 0:
            check(filled, known)
    check(filled, known)


def test_name_without_a_number_is_not_there() -> None:
    ids = SubjectIds(SubjectNames(0))
    assert "a" not in ids
    assert ids.get("a") is None
    assert ids.get("a", -1) == -1
    with pytest.raises(KeyError):
        ids["a"]


def test_cleared_table_starts_again_at_any_number() -> None:
    names = SubjectNames(3)
    ids = SubjectIds(names)
    ids.add("a", 3)
    names.append("a")
    ids.clear()
    names = ids.names = SubjectNames(5)
    ids.add("a", 5)
    names.append("a")
    assert ids["a"] == 5
