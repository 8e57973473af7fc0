"""Subjects and their numbers: never used twice, let go of when dead, the same after a restart."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from contrail_storage.core import key_layout as keys
from contrail_storage.core.results import Step, Writes
from contrail_storage.core.subjects import layout, name_rows, packed_names, subject_table
from contrail_storage.core.subjects.subject_table import PAGE, SubjectTable
from tests.unit.storage.machine_rig import SHARD, RowStore


class Kept:
    """A table with its rows."""

    def __init__(self) -> None:
        self.table = SubjectTable(SHARD)
        self.store = RowStore()
        self.index = 0
        self.seq = 0

    def add(self, *names: str) -> None:
        """One message for each name, in one entry."""
        self.index += 1
        writes = Writes()
        sids = np.array([self.table.number(name) for name in names], np.uint32)
        self.table.add_run(sids, self.seq + 1, Step(self.index, 0, writes))
        self.seq += len(names)
        self.store.write(writes.rows)

    def add_by_subject(self, *names: str) -> None:
        """As `add`, counted by subject."""
        self.index += 1
        writes = Writes()
        subjects = list(dict.fromkeys(names))
        index = np.array([subjects.index(name) for name in names], np.uint32)
        counts, step = np.bincount(index), Step(self.index, 0, writes)
        sids = self.table.add_indexed(subjects, index, counts, self.seq + 1, step)
        assert sids.tolist() == [self.table.ids[name] for name in subjects]
        self.seq += len(names)
        self.store.write(writes.rows)

    def remove(self, *names: str) -> None:
        """The oldest message of each name, in one entry."""
        self.index += 1
        writes = Writes()
        sids = np.array([self.table.ids[name] for name in names], np.uint32)
        self.table.remove(sids, 1, Step(self.index, 0, writes))
        self.store.write(writes.rows)

    def clear(self) -> None:
        writes = Writes()
        self.table.clear(writes)
        self.store.write(writes.rows)

    def restart(self) -> None:
        self.table = SubjectTable(SHARD)
        scan = self.store.scan
        self.table.load(scan(b"N"), scan(b"P"), scan(b"p"))

    def pack(self) -> None:
        """Pack the names, one page after the other, as before the content of files is erased."""
        while self.table.has_unpacked:
            writes = Writes()
            self.table.pack_names(1, writes)
            self.store.write(writes.rows)

    def stored_names(self) -> list[str]:
        """All names in rows."""
        rows = [row for key, row in self.store.scan(b"N") if key[5:] != b"\xff\xff\xff\xff"]
        return [name for row in rows for name in row.decode().split("\0") if name]

    def restart_from_before(self) -> None:
        """Restart with the names as earlier versions wrote them: a row for each live name."""
        for key, _ in self.store.scan(b"N"):
            if key[5:] != b"\xff\xff\xff\xff":
                del self.store.rows[key]
        for sid, name in self.table.live():
            self.store.rows[keys.small_key(b"N", SHARD, sid)] = name.encode()
        self.restart()

    def move(self) -> None:
        """Out of this table and into a new one, as an archive does."""
        parts, next_id = list(self.table.parts()), self.table.next_id
        self.table, self.store = SubjectTable(SHARD), RowStore()
        writes = Writes()
        for row, texts in parts:
            self.table.restore(row, texts, writes)
        self.table.restore_next_id(next_id, writes)
        self.store.write(writes.rows)

    def content(self) -> dict[str, tuple[int, int, int]]:
        table = self.table
        return {name: (sid, table.last_seq(name), table.count(name)) for sid, name in table.live()}


def names(start: int, stop: int) -> list[str]:
    return [f"s.{number}" for number in range(start, stop)]


def test_subject_keeps_its_number_while_it_has_messages() -> None:
    kept = Kept()
    kept.add("a", "b", "a")
    assert kept.content() == {"a": (0, 3, 2), "b": (1, 2, 1)}
    kept.remove("a")
    kept.add("a")
    assert kept.content() == {"a": (0, 4, 2), "b": (1, 2, 1)}


def test_unknown_subject_has_no_messages() -> None:
    table = Kept().table
    assert (table.last_seq("a"), table.count("a"), len(table)) == (0, 0, 0)


@pytest.mark.parametrize("restarting", [False, True])
def test_number_of_a_subject_that_is_gone_is_never_given_again(restarting: bool) -> None:
    kept = Kept()
    used: set[int] = set()
    for way in ("remove", "remove", "clear", "clear"):
        kept.add("a", "b")
        sids = {sid for sid, _ in kept.table.live()}
        assert used.isdisjoint(sids)
        used |= sids
        if way == "remove":
            kept.remove("b")
            kept.remove("a")
        else:
            kept.clear()
        if restarting:
            kept.restart()
    assert len(kept.table) == 0


LISTS = st.sampled_from(["ab", "abba", "ba", "abc", "cccab", "d"])


@given(st.lists(LISTS | st.sampled_from(["-a", "-b", "-d", "clear", "lay out", "restart"])))
@example(["ab", "-a", "ab"])
@example(["ab", "clear", "ab"])
@example(["d", "-d", "ab", "lay out", "ab"])
def test_counting_by_subject_and_by_message_writes_the_same(steps: list[str]) -> None:
    one, other = Kept(), Kept()
    for step in steps:
        for kept in one, other:
            if step == "clear":
                kept.clear()
            elif step == "lay out":  # lays the slots out anew
                kept.table._lay_out()
            elif step == "restart":
                kept.restart()
            elif step[0] == "-":
                if step[1:] in kept.table.ids:
                    kept.remove(step[1:])
            else:
                (kept.add if kept is one else kept.add_by_subject)(*step)
        assert other.store.rows == one.store.rows
    assert other.content() == one.content()


def test_many_subjects_are_counted_without_remembering_them() -> None:
    one, other, many = Kept(), Kept(), names(0, 1_000)
    for _ in range(2):
        one.add(*many)
        other.add_by_subject(*many)
    assert other.table._recent is None
    assert other.store.rows == one.store.rows


STEPS = st.lists(st.tuples(st.integers(0, 40), st.sampled_from(["add", "add", "remove", "clear"])))


@given(STEPS, st.booleans())
def test_few_subjects_are_loaded_like_many(steps: list[tuple[int, str]], older: bool) -> None:
    kept = Kept()
    for number, step in steps:
        if step == "add":
            kept.add(f"s.{number}", f"s.{number // 2}")
        elif step == "clear" and number == 0:
            kept.clear()
        elif f"s.{number}" in kept.table.ids:
            kept.remove(f"s.{number}")
    if older and len(kept.table):  # rows of version 0.2 have negative bounds
        kept.table.last[: kept.table.size : 2] *= -1
        kept.add("last", *[name for _, name in kept.table.live()][::3])
    states = []
    for few in (500, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(subject_table, "_FEW", few)
            kept.restart()
        table = kept.table
        columns = [column[: table.size].tolist() for column in (table.first, table.last)]
        counts = table.counts[: table.size].tolist()
        ids = {name: table.ids.get(name) for _, name in table.live()}
        numbers = table.next_id, table.base, table._dead, len(table)
        states.append((*columns, counts, ids, numbers, list(table.names), table._dirty_pages))
    assert states[0] == states[1]


def test_many_subjects_come_back_from_pages_and_deltas() -> None:
    kept = Kept()
    kept.add(*names(0, 3 * PAGE + 5))
    kept.add(*names(PAGE, 2 * PAGE))
    kept.remove(*names(0, PAGE + 7))
    before = kept.content()
    kept.restart()
    assert kept.content() == before
    assert kept.table.next_id == 3 * PAGE + 5


def test_deltas_are_folded_into_pages_before_they_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject_table, "_DELTA_ROWS_MAX", 10)
    kept = Kept()
    for number in range(95):
        kept.add(f"s.{number % 7}")
    assert len(kept.store.scan(b"p")) == 5
    before = kept.content()
    kept.restart()
    assert kept.content() == before
    for number in range(5):
        kept.add(f"s.{number}")
    assert len(kept.store.scan(b"p")) == 0


def test_pages_are_folded_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject_table, "_DELTA_ROWS_MAX", 2)
    monkeypatch.setattr(subject_table, "_FOLDED_TOGETHER", 3)
    kept = Kept()
    kept.add(*names(0, 8 * PAGE))
    assert len(kept.store.scan(b"P")) == 0
    for pages, rows in ((3, 2), (6, 3), (8, 2), (8, 0)):
        kept.add("s.0", f"s.{7 * PAGE}")
        assert (len(kept.store.scan(b"P")), len(kept.store.scan(b"p"))) == (pages, rows)
        reopened = Kept()
        reopened.store = kept.store
        reopened.restart()
        assert reopened.content() == kept.content()


def test_names_of_a_command_are_one_row_for_each_page_until_a_fold_packs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = Kept()
    kept.add("a", "b", "é")
    kept.add("d")
    kept.add(*names(4, PAGE + 2))
    assert [row[:9] for _, row in kept.store.scan(b"N")][:2] == ["a\0b\0é".encode(), b"d"]
    assert len(kept.store.scan(b"N")) == 4
    kept.remove("b")
    assert "b" in kept.stored_names()
    before = kept.content()
    kept.restart()
    assert kept.content() == before
    monkeypatch.setattr(subject_table, "_DELTA_ROWS_MAX", 1)
    kept.add("a")
    assert len(kept.store.scan(b"N")) == 2
    assert kept.stored_names() == ["a", "é", "d", *names(4, PAGE + 2)]
    assert not kept.table.has_unpacked
    kept.restart()
    assert not kept.table.has_unpacked
    assert kept.content().keys() == before.keys()


def test_fewer_pages_are_folded_together_when_names_are_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subject_table, "_DELTA_ROWS_MAX", 2)
    monkeypatch.setattr(subject_table, "_FOLDED_BYTES", 50 * PAGE)
    kept = Kept()
    kept.add(*[f"{name}.{'x' * 150}" for name in names(0, 3 * PAGE)])
    for pages in (1, 2, 3):
        kept.add("s.0." + "x" * 150)
        assert len(kept.store.scan(b"P")) == pages


def test_page_without_a_live_subject_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject_table, "_DELTA_ROWS_MAX", 1)
    kept = Kept()
    kept.add("a")
    assert len(kept.store.scan(b"P")) == 1
    kept.remove("a")
    assert len(kept.store.scan(b"P")) == 0
    assert [key[5:] for key, _ in kept.store.scan(b"N")] == [b"\xff\xff\xff\xff"]


def test_dead_numbers_at_the_low_end_take_no_memory() -> None:
    kept = Kept()
    for start in range(0, 40 * PAGE, PAGE):
        kept.add(*names(start, start + PAGE))
        if start:
            kept.remove(*names(start - PAGE, start))
    assert len(kept.table) == PAGE
    assert kept.table.size <= 4 * PAGE
    assert len(kept.table.first) <= 8 * PAGE
    assert kept.content() == {
        name: (39 * PAGE + at, 39 * PAGE + at + 1, 1)
        for at, name in enumerate(names(39 * PAGE, 40 * PAGE))
    }


def test_one_old_subject_does_not_keep_memory_for_all_that_came_and_went_after_it() -> None:
    kept = Kept()
    kept.add("old", *names(0, PAGE))
    for start in range(PAGE, 60 * PAGE, PAGE):
        kept.add(*names(start, start + PAGE))
        kept.remove(*names(start - PAGE, start))
        assert kept.table.size <= 4 * PAGE
        assert len(kept.table.first) <= 8 * PAGE
        assert kept.table.ids["old"] == 0
    assert len(kept.table) == PAGE + 1
    before = kept.content()
    assert before["old"] == (0, 1, 1)
    kept.restart()
    assert kept.content() == before
    assert kept.table.size == PAGE + 1


def test_subjects_far_apart_take_memory_for_themselves_alone() -> None:
    kept = Kept()
    stay: list[str] = []
    for start in range(0, 40 * PAGE, PAGE):
        kept.add(*names(start, start + PAGE))
        stay.append(f"s.{start}")
        kept.remove(*names(start + 1, start + PAGE))
    assert sorted(kept.content()) == sorted(stay)
    assert kept.table.size <= 2 * PAGE
    kept.add(*stay)
    assert all(kept.table.count(name) == 2 for name in stay)
    kept.restart()
    assert kept.table.size == len(stay)
    assert all(kept.table.count(name) == 2 for name in stay)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(st.integers(0, 30), min_size=1, max_size=6)),
        st.tuples(st.just("remove"), st.integers(1, 8)),
        st.tuples(st.sampled_from(["keep last", "clear", "move"]), st.none()),
        st.tuples(st.sampled_from(["restart", "restart_from_before", "pack"]), st.none()),
    ),
    max_size=40,
)


@given(STEPS)
def test_table_agrees_with_a_dict_however_subjects_come_and_go(
    steps: list[tuple[str, list[int] | int | None]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subject_table, "PAGE", 4)
        patch.setattr(name_rows, "_LOADED", 5)
        patch.setattr(subject_table, "_SLOTS_MIN", 4)
        patch.setattr(subject_table, "_DOUBLED_MAX", 8)
        patch.setattr(subject_table, "_LEAP", 2)
        patch.setattr(subject_table, "PART", 3)
        patch.setattr(subject_table, "_DELTA_ROWS_MAX", 3)
        patch.setattr(subject_table, "_FOLDED_TOGETHER", 2)
        patch.setattr(packed_names, "CHUNK", 4)
        patch.setattr(packed_names, "_PIECE", 8)
        patch.setattr(layout, "CHUNK", 4)
        patch.setattr(layout, "_PIECE", 8)
        _agrees(steps)


def _agrees(steps: list[tuple[str, list[int] | int | None]]) -> None:
    kept = Kept()
    held: dict[str, list[int]] = {}
    sids: dict[str, int] = {}
    next_id = 0
    for what, argument in steps:
        if what == "add" and isinstance(argument, list):
            for at, number in enumerate(argument, kept.seq + 1):
                held.setdefault(f"s.{number}", []).append(at)
            kept.add(*[f"s.{number}" for number in argument])
        elif what == "remove" and isinstance(argument, int):
            gone = list(held)[:argument]
            if gone:
                kept.remove(*gone)
            for name in gone:
                held[name].pop(0)
        elif what == "keep last":
            gone = [name for name in list(held)[:-1] for _ in held[name]]
            if gone:
                kept.remove(*gone)
            held = dict(list(held.items())[-1:])
        elif what == "clear":
            kept.clear()
            held = {}
        else:
            getattr(kept, what)()
        if what == "pack":
            assert sorted(kept.stored_names()) == sorted(held)
        held = {name: seqs for name, seqs in held.items() if seqs}
        sids = {name: sid for name, sid in sids.items() if name in held}
        for name in sorted(held.keys() - sids.keys(), key=lambda one: kept.table.ids[one]):
            assert kept.table.ids[name] >= next_id
            sids[name] = kept.table.ids[name]
            next_id = sids[name] + 1
        table = kept.table
        assert table.next_id >= next_id
        expected = {name: (sids[name], seqs[-1], len(seqs)) for name, seqs in held.items()}
        assert kept.content() == expected
        assert all(table.ids.get(f"s.{at}") == sids.get(f"s.{at}") for at in range(31))
        assert all(table.name(sid) == name for name, sid in sids.items())
        assert table.size <= max(2 * len(held), len(held) + 4) + 31


def test_memory_of_removed_subjects_is_freed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject_table, "_FREED_TOGETHER", 4)
    kept = Kept()
    kept.add(*names(0, 4 * PAGE))
    kept.remove(*names(0, 3 * PAGE))
    laid_out = len(kept.table._dropped)
    assert laid_out > 4
    kept.clear()
    assert len(kept.table._dropped) > laid_out + 4
    before = len(kept.table._dropped)
    kept.add("a")
    assert len(kept.table._dropped) == before - 4
    while kept.table.has_dropped:
        kept.table.free_dropped()
    assert kept.content().keys() == {"a"}


def test_reader_continues_with_the_list_of_names_that_it_took() -> None:
    kept = Kept()
    kept.add(*names(0, 2 * PAGE))
    taken, base = kept.table.names, kept.table.base
    kept.remove(*names(0, 2 * PAGE))
    kept.clear()
    kept.add(*names(0, 10))
    assert [taken[sid - base] for sid in range(2 * PAGE)] == names(0, 2 * PAGE)


def test_negative_bound_of_an_older_version_is_the_sequence_of_no_message() -> None:
    kept = Kept()
    kept.add("a", "b", "a")
    kept.table.last[0] = -2  # the message of "b"
    writes = Writes()
    kept.table._delta_of_one(0, 0, Step(9, 0, writes))
    kept.store.write(writes.rows)
    for _ in range(2):
        kept.restart()
        assert kept.content() == {"a": (0, subject_table.NOT_LIVE, 2), "b": (1, 2, 1)}
    kept.add("a")
    assert kept.table.last_seq("a") == 4


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.lists(st.integers(0, 39), max_size=40, unique=True),
)
def test_one_message_is_taken_out_as_an_array_of_one(subjects: list[int], taken: list[int]) -> None:
    alone, arrays = Kept(), Kept()
    names = [f"s.{subject}" for subject in subjects]
    alone.add(*names)
    arrays.add(*names)
    floor_seq = 1
    for turn, at in enumerate(one for one in taken if one < len(names)):
        sid, seq, index = alone.table.ids[names[at]], at + 1, turn + 2
        floor_seq += seq == floor_seq
        first, second = Writes(), Writes()
        alone.table.take_out_one(sid, seq, floor_seq, Step(index, 0, first))
        arrays.table.take_out(
            np.array([sid], np.uint32), np.array([seq]), floor_seq, Step(index, 0, second)
        )
        assert first.rows == second.rows
        assert list(alone.table.live()) == list(arrays.table.live())


def test_new_layout_takes_the_names_of_a_few_slots_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subject_table, "PAGE", 4)
    for module in (layout, packed_names):
        monkeypatch.setattr(module, "CHUNK", 4)
        monkeypatch.setattr(module, "_PIECE", 8)
    kept, taken, array = Kept(), [0], packed_names.PackedNames.array

    def counted(self: packed_names.PackedNames, low: int, high: int) -> object:
        taken[-1] += high - low
        return array(self, low, high)

    monkeypatch.setattr(packed_names.PackedNames, "array", counted)
    kept.add(*names(0, 400))
    for number in range(0, 400, 2):
        kept.remove(f"s.{number}")
        taken.append(0)
    assert kept.table.size < 300
    assert sum(taken) >= 400
    assert max(taken) <= 16
    assert sorted(kept.content()) == sorted(f"s.{number}" for number in range(1, 400, 2))


def test_subject_takes_little_memory() -> None:
    table = SubjectTable(SHARD)
    tracemalloc.start()
    for number in range(20_000):
        name = f"orders.r{number % 8}.{number:06}.e1"
        table.add_one(name, number + 1, Step(number, 0, Writes()))
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(table) == 20_000
    assert taken < 100 * 20_000
